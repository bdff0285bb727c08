"""`haiprof trace dyno`: what dynolog's own client sends, to one daemon and to many."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from haiprof.base.errors import UsageError
from haiprof.cli import main
from haiprof.cli.job_requests import parse_start
from haiprof.live.find import slurm_number
from haiprof.live.kineto_trace import GpuTrace, expand_hosts
from haiprof.live.trace_now import wait_until
from tests.unit.jobs.test_kineto_dynolog import FakeDynolog, dynolog_with

S = 1_000_000_000


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def dyno(*words: object) -> int:
    return main(["dyno", *map(str, words)])


@pytest.mark.parametrize(
    ("wish", "text"),
    [  # as in dynolog's own tests: cli/src/commands/gputrace.rs at c3a231a
        (GpuTrace(log_file="/tmp/test_trace.json", start_ms=1000, duration_ms=42,
                  switches=("shapes", "memory", "stacks", "modules")),
         "ACTIVITIES_LOG_FILE=/tmp/test_trace.json\nPROFILE_START_TIME=1000\n"
         "ACTIVITIES_DURATION_MSECS=42\nPROFILE_REPORT_INPUT_SHAPES=true\n"
         "PROFILE_PROFILE_MEMORY=true\nPROFILE_WITH_STACK=true\nPROFILE_WITH_FLOPS=false\n"
         "PROFILE_WITH_MODULES=true"),
        (GpuTrace(log_file="/tmp/t.json", roundup=1000, iterations=42),
         "ACTIVITIES_LOG_FILE=/tmp/t.json\nPROFILE_START_ITERATION=0\n"
         "PROFILE_START_ITERATION_ROUNDUP=1000\nACTIVITIES_ITERATIONS=42\n"
         "PROFILE_REPORT_INPUT_SHAPES=false\nPROFILE_PROFILE_MEMORY=false\n"
         "PROFILE_WITH_STACK=false\nPROFILE_WITH_FLOPS=false\nPROFILE_WITH_MODULES=false"),
    ],
)  # fmt: skip
def test_daemon_gets_the_text_that_dynos_client_sends(wish: GpuTrace, text: str) -> None:
    assert wish.config() == text


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]), ("a,b,a", ["a", "b"]), ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-11].x,login", ["n08.x", "n09.x", "n10.x", "n11.x", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]), ("::1", ["::1"]),
    ],
)  # fmt: skip
def test_hosts_are_read_as_slurm_writes_them(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "n[3-1]", "n[1-", "n[a]", "n[1-99999999]", "a b", "$(x)"]
)
def test_hosts_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        expand_hosts(text)


def test_traces_of_several_nodes_are_asked_for_at_once_and_begin_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port, now_ms = free_port(), time.time_ns() // 1_000_000
    with (dynolog_with({11, 12, 13, 14}, address=("127.0.0.1", port)) as one,
          dynolog_with({21}, address=("127.0.0.2", port)) as two):  # fmt: skip
        log = tmp_path / "t.json"
        words = ("--port", port, "--hostname", "127.0.0.[1-2]", "gputrace", "--job-id", 7)
        assert dyno(*words, "--log-file", log, "--duration-ms", 300, "--json") == 0
        said = json.loads(capsys.readouterr().out)["daemons"]
        assert [each["matched"] for each in said] == [[11, 12, 13, 14], [21]]
        assert said[1]["files"] == [str(tmp_path / "t_21.json")]
        requests = [fake.requests[-1] for fake in (one, two)]
    assert [each["job_id"] for each in requests] == [7, 7]
    assert all(each["process_limit"] > 4 for each in requests), "dynolog's own limit is 3"
    keys = [dict(line.split("=") for line in each["config"].splitlines()) for each in requests]
    starts = {each["PROFILE_START_TIME"] for each in keys}
    assert len(starts) == 1
    assert int(starts.pop()) >= now_ms + 10_000
    assert {each["ACTIVITIES_DURATION_MSECS"] for each in keys} == {"300"}


def test_node_that_does_not_answer_is_named_and_the_others_are_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    words = ("--hostname", "127.0.0.[1-2]", "--port", port)
    with dynolog_with({11}, address=("127.0.0.1", port)):
        assert dyno("gputrace", "--log-file", tmp_path / "t.json", *words) != 0
    output = capsys.readouterr()
    assert "127.0.0.1: matched 1 processes" in output.out
    assert "127.0.0.2: dynolog at 127.0.0.2" in output.out
    assert "127.0.0.2 did not answer" in output.err


@pytest.mark.parametrize("strict", [False, True])
def test_no_process_is_an_error_where_that_is_asked_for(
    tmp_path: Path, strict: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--fail-on-no-process"] if strict else []
    with dynolog_with(set()) as fake:
        place = ("--hostname", "127.0.0.1", "--port", fake.endpoint[1])
        log = ("--log-file", tmp_path / "t.json", "--pids", "5,6")
        assert (dyno("gputrace", *place, *log, *more) != 0) is strict
        assert fake.requests[-1]["pids"] == [5, 6]
    assert "no process was matched: see --job-id and --pids" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "sent", "shown"),
    [
        ("status", {"fn": "getStatus"}, "status 1"),
        ("version", {"fn": "getVersion"}, "version 0.6.0"),
        ("dcgm-pause", {"fn": "dcgmProfPause", "duration_s": 60}, "result True"),
        ("dcgm-resume", {"fn": "dcgmProfResume"}, "result True"),
    ],
)
def test_other_commands_are_passed_on(
    command: str, sent: object, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with dynolog_with(set()) as fake:
        place = ("--hostname", "127.0.0.1", "--port", fake.endpoint[1])
        more = ("--duration-s", 60) if command == "dcgm-pause" else ()
        assert dyno(command, *place, *more) == 0
        assert fake.requests[-1] == sent
    assert shown in capsys.readouterr().out


def test_daemon_of_this_machine_is_found_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeDynolog({11})
    try:
        assert dyno("gputrace", "--port", fake.endpoint[1], "--log-file", tmp_path / "t.json") == 0
    finally:
        fake.close()
    assert str(tmp_path / "t_11.json") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("gputrace",), "needs --log-file"), (("gputrace", "--log-file", "x.txt"), ".json"),
        (("gputrace", "--log-file", "a#b.json"), "Kineto cannot take"),
        (("gputrace", "--log-file", "x.json", "--pids", "a"), "process ids"),
        (("dcgm-pause",), "no daemon listens here"), (("nothing",), "status"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_error(
    words: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dyno("--port", free_port(), *words) != 0
    assert what in capsys.readouterr().err


def test_option_that_kineto_does_not_heed_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with dynolog_with({11}) as fake:
        place = ("gputrace", "--port", fake.endpoint[1], "--log-file", tmp_path / "t.json")
        dyno(*place, "--iterations", 5, "--profile-start-time", 1)
        assert "at no time of its own" in capsys.readouterr().err
        dyno(*place, "--profile-start-iteration-roundup", 5)
        assert "left out" in capsys.readouterr().err


def test_start_is_a_unix_time_or_seconds_from_now() -> None:
    now = time.time()
    assert parse_start(None) == 0
    assert abs(parse_start("+30") - (now + 30) * S) < 20 * S
    assert parse_start(f"{now + 60:.0f}") == round(now + 60) * S
    for text in ("soon", "12", "-5", "+-5", "nan", f"{now + 1e6}"):
        with pytest.raises(UsageError):
            parse_start(text)


def test_time_that_has_passed_is_not_waited_for() -> None:
    said: list[str] = []
    wait_until(0, 2.0, said.append)
    wait_until(time.time_ns() + S, 5.0, said.append)
    assert said == []
    end = time.time_ns() + S // 5
    wait_until(end, 0.0, said.append)
    assert time.time_ns() >= end
    assert len(said) == 1


@pytest.mark.parametrize(("name", "number"), [("slurm:12", 12), ("slurm:", None), ("12", None),
                                              ("slurm:x", None), ("job:12", None)])  # fmt: skip
def test_job_of_slurm_is_named_by_its_number(name: str, number: int | None) -> None:
    assert slurm_number(name) == number
