"""The queue of notifications: what is left out, what is masked, what is tried again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from haiprof.agent.notifications import QUEUE_LIMIT, RUN_LIMIT, Notifier, send_death
from haiprof.base.errors import UsageError
from haiprof.base.options import Options, merge_options, options_from_environment, parse_value
from tests.webhook import Webhook

TOKEN = "ghp_" + "a1B2" * 9
END = {"rank": 1, "helper": False, "status": None, "signal": 9, "oom": {"kills": 1}, "pid": 77}


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        yield server


def notifier(target: str) -> Notifier:
    return Notifier(target, {"job": "train", "run": "/logs/train-1", "host": "node1"}, retry_s=0.01)


def close(sender: Notifier) -> None:
    sender.close(lambda: False)


def test_event_is_one_json_object_with_a_text_that_slack_shows(webhook: Webhook) -> None:
    sender = notifier(webhook.url)
    sender.send("hang", "no step for 320 s", rank=0)
    close(sender)
    (body,) = webhook.bodies
    assert body["text"] == "haiprof: train: no step for 320 s"
    assert (body["event"], body["rank"], body["host"]) == ("hang", 0, "node1")
    assert webhook.types == ["application/json"]


def test_secrets_are_masked_in_every_field(webhook: Webhook) -> None:
    sender = notifier(webhook.url)
    sender.send("end", f"exit 1: --api-key {TOKEN}", verdict={"problems": [f"token={TOKEN}"]})
    close(sender)
    assert TOKEN not in json.dumps(webhook.bodies)
    assert "***" in webhook.bodies[0]["text"]


def test_many_deaths_are_one_event_and_the_next_event_counts_the_rest(webhook: Webhook) -> None:
    sender = notifier(webhook.url)
    for rank in range(5):
        send_death(sender, {**END, "rank": rank})
    sender.send("end", "over")
    close(sender)
    death, end = webhook.bodies
    assert "rank 0 (process 77) ended with signal 9 (Killed)" in death["text"]
    assert "memory limit" in death["text"]
    assert end["left_out"] == {"death": 4}


@pytest.mark.parametrize(
    "line",
    [
        {"signal": 15}, {"signal": 2}, {"signal": None, "status": 0}, {"rank": None},
        {"helper": True},
    ],
)  # fmt: skip
def test_ordinary_ends_are_not_told(webhook: Webhook, line: dict[str, Any]) -> None:
    sender = notifier(webhook.url)
    assert not send_death(sender, {**END, **line}), (
        "the job's end tells of the death that led to it"
    )
    close(sender)
    assert webhook.bodies == []


def test_more_events_than_the_limit_of_a_run_are_left_out_but_not_its_end() -> None:
    received: list[object] = []
    sender = notifier("exit 0")
    sender._outbox._deliver = received.append
    for _ in range(RUN_LIMIT + 50):
        sender.send("hang", "no step")
        while sender._outbox.queue:
            time.sleep(0.001)
    sender.send("end", "over")
    close(sender)
    assert len(received) == RUN_LIMIT + 1


def test_receiver_that_never_answers_delays_nobody_and_the_queue_is_bounded(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Webhook(answers=False) as server:
        sender = notifier(server.url)
        for _ in range(10 * QUEUE_LIMIT):
            sender.send("hang", "no step")
        assert len(sender._outbox.queue) <= QUEUE_LIMIT
        sender.close(lambda: False, limit_s=0.2)
    assert "were not delivered" in capfd.readouterr().err


def test_close_ends_when_the_user_asks(capfd: pytest.CaptureFixture[str]) -> None:
    with Webhook(answers=False) as server:
        sender = notifier(server.url)
        sender.send("hang", "no step")
        sender.close(lambda: True, limit_s=3600)
    assert "1 of 1 notifications were not delivered" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("statuses", "count"), [([500, 429, 200], 3), ([500] * 9, 3), ([404], 1), ([302], 1)]
)
def test_failures_are_tried_again_where_that_may_help(
    statuses: list[int], count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with Webhook(statuses=statuses) as server:
        sender = notifier(server.url)
        sender.send("hang", "no step")
        close(sender)
        assert len(server.bodies) == count
        said = capfd.readouterr().err
        assert ("HTTP" in said) == (statuses[-1] != 200)
        assert "/services/" not in said, "the address may be a secret"


def test_option_is_read_everywhere_and_its_address_is_never_recorded() -> None:
    url = "https://example.com/hooks/abc"
    named = [dict([parse_value("notify", url, origin="test")]),
             options_from_environment({"HAIPROF_NOTIFY": url})]  # fmt: skip
    for layer in named:
        options = merge_options(layer)
        assert options.notify == url
        assert options.as_json()["notify"] == "URL"
        assert "abc" not in json.dumps(options.boot_json())
    assert Options().as_json()["notify"] == ""
    assert Options(notify="mail me --password x").as_json()["notify"] == "command"
    with pytest.raises(UsageError):
        parse_value("notify", "ftp://example.com", origin="test")
