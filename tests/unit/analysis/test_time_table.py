"""What a training thread did, from written stacks: each activity with its share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from haiprof.base.ledger import POSITIONS
from haiprof.base.units import NS_PER_MS
from haiprof.run_analysis.ledger import (
    ACTIVITIES,
    COLLECTIVES_FILE,
    LONG,
    USUAL,
    package_of,
    spikes,
)
from haiprof.run_analysis.step_positions import BACKWARD
from tests.unit.diagnosis.tables import (
    BARRIER,
    ENGINE,
    FORWARD,
    LINEAR,
    MAIN,
    MODULE,
    PYTHON,
    SITE,
    STEP,
    Part,
    job,
    shares,
    table_of,
)

LOG = job(70, "log")
NORM = (f"{SITE}/numpy/linalg/linalg.py", 2300, "norm")
LOADER = (
    f"{SITE}/torch/utils/data/dataloader.py", 1300, "_MultiProcessingDataLoaderIter._get_data"
)  # fmt: skip
GET = (f"{PYTHON}/multiprocessing/queues.py", 100, "Queue.get")


def of_python(name: str, function: str = "wait") -> tuple[str, int, str]:
    return (f"{PYTHON}/{name}", 9, function)


SELECT = of_python("selectors.py", "select")


@pytest.mark.parametrize(("stack", "lock", "expected"), [
    # operators, Python and other native code
    ((MAIN, MODULE, FORWARD, MODULE, LINEAR), "0", {"operators": 1}),
    ((MAIN, MODULE, FORWARD), "0", {"operators": 1}),
    ((MAIN, MODULE, FORWARD), "h", {"python": 1}),
    ((MAIN, MODULE, FORWARD), "h00", {"operators": 1}),  # calls of small ones
    ((MAIN, MODULE, FORWARD), "h0", {"python": 1 / 4, "operators": 3 / 4}),
    ((MAIN, MODULE, FORWARD), "hh0", {"python": 1 / 2, "operators": 1 / 2}),
    ((MAIN, MODULE, LINEAR), "h", {"python": 1}),
    ((MAIN, LOG), "-", {"operators": 1}),  # nobody looked at the lock
    ((MAIN, MODULE, LINEAR), "-", {"operators": 1}),
    ((MAIN, LOG, NORM), "0", {"native": 1}),
    ((MAIN, LOG, NORM), "h", {"python": 1}),
    ((), "0", {"unknown": 1}),
    # waits
    ((MAIN, LOG), "1", {"wait: interpreter lock": 1}),
    ((MAIN, MODULE, LINEAR), "10", {"wait: interpreter lock": 1 / 2, "operators": 1 / 2}),
    ((MAIN, LOADER, GET), "0", {"wait: loader": 1}),
    ((MAIN, LOADER, GET), "10", {"wait: interpreter lock": 1 / 2, "wait: loader": 1 / 2}),
    ((MAIN, LOG, BARRIER), "0", {"wait: link": 1}),
    ((MAIN, LOG, of_python("threading.py")), "0", {"wait: lock": 1}),
    ((MAIN, LOG, of_python("queue.py")), "0", {"wait: lock": 1}),
    ((MAIN, LOG, of_python("socket.py")), "0", {"wait: socket": 1}),
    ((MAIN, LOG, of_python("http/client.py")), "0", {"wait: socket": 1}),
    ((MAIN, LOG, of_python("subprocess.py")), "0", {"wait: process": 1}),
    ((MAIN, LOG, of_python("multiprocessing/connection.py")), "0", {"wait: pipe": 1}),
    ((MAIN, LOG, (f"{SITE}/torch/cuda/streams.py", 9, "Event.synchronize")), "0",
     {"wait: device": 1}),
    ((MAIN, (*LOG, "os.fsync(log.fileno())")), "0", {"wait: file": 1}),
    ((MAIN, (*LOG, "time.sleep(0.01)")), "0", {"wait: sleep": 1}),
    ((MAIN, (*LOG, "shutil.copyfile(path, other)")), "0", {"native": 1}),
    ((MAIN, (*LOG, "loss.mean()")), "0", {"operators": 1}),
    ((MAIN, LOG, of_python("threading.py")), "h", {"python": 1}),  # and does not wait
])  # fmt: skip
def test_stack_tells_what_the_thread_did(stack: Any, lock: str, expected: dict[str, float]) -> None:
    assert shares(table_of(("forward", stack, 6, lock)), "forward") == pytest.approx(expected)


def test_as_often_as_torch_holds_the_lock_is_the_calling_of_operators() -> None:
    """Of torch's own frames half hold it: operators are that small here."""
    torch: Any = ("forward", (MAIN, MODULE, LINEAR), 6, "h0")
    own: Any = ("loss", (MAIN, LOG), 6, "h0")
    assert shares(table_of(torch, own), "loss") == pytest.approx({"operators": 1})
    own = ("loss", (MAIN, LOG), 8, "hhh0")
    assert shares(table_of(torch, own), "loss") == pytest.approx({"python": 0.5, "operators": 0.5})


def test_outside_of_the_model_the_jobs_own_line_is_python_where_nobody_looked() -> None:
    parts: Any = (("forward", (MAIN, MODULE, LINEAR), 6), ("after_step", (MAIN, LOG), 4, "-"))
    assert shares(table_of(*parts), "after_step") == pytest.approx({"python": 1})


def test_collections_are_told_by_their_events_wherever_they_come() -> None:
    pause = Part(position="forward", stack=(MAIN, MODULE, FORWARD), ms=2, collecting=True)
    table = table_of(("forward", (MAIN, MODULE, LINEAR), 6), pause)
    assert shares(table, "forward") == pytest.approx(
        {"operators": 0.75, "garbage collection": 0.25}
    )


def test_without_a_core_is_what_counters_say_and_only_of_what_would_run() -> None:
    table = table_of(
        ("forward", (MAIN, MODULE, LINEAR), 6), ("input", (MAIN, LOADER, GET), 2), no_core_ratio=0.3
    )
    assert shares(table, "forward") == pytest.approx({"operators": 0.6, "no core": 0.4})
    assert shares(table, "input") == {"wait: loader": 1}


@pytest.mark.parametrize(("stack", "wait", "expected"), [
    ((MAIN, LOG, of_python("socket.py")), "0", "native"),
    ((MAIN, LOG, of_python("socket.py")), "s", "wait: socket"),
    ((MAIN, (*LOG, "os.fsync(log.fileno())")), "0", "native"),
    # woken as often as it waits, and then ready: without a core
    ((MAIN, LOG, of_python("socket.py")), "s0", "wait: socket"),
    ((MAIN, (*LOG, "peer.recv(16)")), "s0", "wait: socket"),
    ((MAIN, (*LOG, "peer.recv(16)")), "0", "native"),
    ((MAIN, (*LOG, "time.sleep(0.01)")), "z00", "wait: sleep"),
    # who selects waits for what its caller reads
    ((MAIN, LOG, SELECT), "m", "wait: socket"),
    ((MAIN, LOG, of_python("socketserver.py"), SELECT), "m", "wait: socket"),
    ((MAIN, LOG, of_python("subprocess.py"), SELECT), "m", "wait: process"),
    ((MAIN, LOG, of_python("multiprocessing/connection.py"), SELECT), "m", "wait: pipe"),
    ((MAIN, LOADER, GET), "p", "wait: loader"),
    ((MAIN, LOADER, GET), "-", "wait: loader"),
    ((MAIN, LOADER, GET, of_python("multiprocessing/connection.py")), "0", "native"),
    ((MAIN, LOADER, (f"{SITE}/torch/multiprocessing/reductions.py", 9, "rebuild")), "0",
     "operators"),
])  # fmt: skip
def test_a_thread_that_is_ready_to_run_waits_for_nothing(
    stack: Any, wait: str, expected: str
) -> None:
    part = Part(position="input", stack=stack, ms=6, wait=wait)
    assert shares(table_of(part), "input") == {expected: 1}


@pytest.mark.parametrize(("wait", "expected"), [
    ("f00", "wait: file"),
    ("f-0000", "wait: file"),  # off its core a third of the time; what for is seen once
    ("f0000", {"wait: file": 0.2, "operators": 0.8}),
    ("s0", "wait: socket"),
    ("-0", "operators"),  # nothing says what it waited for
    ("l-0", {"wait: lock": 1 / 3, "operators": 2 / 3}),  # its threads' barrier: it computes
])  # fmt: skip
def test_a_call_that_sleeps_for_a_file_again_and_again_waits_for_it(
    wait: str, expected: str | dict[str, float]
) -> None:
    """A commit of sqlite sleeps ten times; between these it works, or has no core."""
    commits = (MAIN, (*LOG, "self.db.commit()"))
    part = Part(position="between_steps", stack=commits, ms=30, wait=wait, queued=0.0)
    found = shares(table_of(part), "between_steps")
    assert found == pytest.approx({expected: 1} if isinstance(expected, str) else expected)


def test_waiting_for_a_core_is_where_the_kernel_counted_it() -> None:
    """Three in four of its time in forward, none in backward."""
    table = table_of(
        Part(position="forward", stack=(MAIN, MODULE, LINEAR), ms=6, queued=0.75),
        Part(position="backward", stack=(MAIN, ENGINE), ms=6, queued=0.0),
    )
    assert shares(table, "forward")["no core"] == pytest.approx(0.75, abs=0.05)
    assert shares(table, "backward").get("no core", 0.0) == pytest.approx(0, abs=0.05)


def test_what_queued_in_the_stretch_that_was_looked_at_is_not_that_of_the_whole_run() -> None:
    """Nobody asks how long a thread queued while it is on a core all the time."""
    table = table_of(
        Part(position="forward", stack=(MAIN, MODULE, LINEAR), ms=10, queued=0.0, asked=False),
        Part(position="backward", stack=(MAIN, ENGINE), ms=20, queued=0.5, every=1000),
        steps=40,
    )
    lost = table.ns[table.activity == ACTIVITIES.index("no core")].sum()
    assert lost == pytest.approx(10e6, rel=0.1)


def test_a_package_that_modules_call_runs_operators_and_any_other_its_own_code() -> None:
    attention, sort = ((f"{SITE}/{name}/x.py", 3, "f") for name in ("models", "fastsort"))
    table = table_of(
        Part(position="forward", stack=(MAIN, MODULE, attention), ms=6),
        Part(position="loss", stack=(MAIN, attention), ms=6),
        Part(position="after_step", stack=(MAIN, LOG, sort), ms=6),
    )
    assert shares(table, "forward") == shares(table, "loss") == {"operators": 1}
    assert shares(table, "after_step") == {"native": 1}


def test_a_step_that_waited_for_a_core_took_no_longer_itself() -> None:
    """Every tenth step 40 ms longer, for want of a core: the line takes 4 ms in all of them."""
    table = table_of(
        Part(position="forward", stack=(MAIN, MODULE, LINEAR), ms=10, queued=0.0),
        Part(position="after_step", stack=(MAIN, LOG), ms=4, lock="h", queued=0.0),
        Part(position="after_step", stack=(MAIN, LOG), ms=40, lock="h", queued=1.0, every=10),
        steps=60,
    )
    own = table.activity == ACTIVITIES.index("python")
    usual, long = (float(table.ns[own & (table.kind == kind)].sum()) for kind in (USUAL, LONG))
    assert usual == pytest.approx(54 * 4e6, rel=0.1)
    assert long < 6 * 8e6


def test_a_long_sleep_is_no_waiting_for_a_core_though_the_exchange_beside_it_is() -> None:
    """A thread that waits for its peers is woken often, and queues each time; a sleeper once."""
    table = table_of(
        Part(position="prepare", stack=(MAIN, LOG), ms=50, wait="z", queued=0.0, every=10),
        Part(position="forward", stack=(MAIN, MODULE, LINEAR), ms=1, queued=0.0),
        Part(position="backward", stack=(MAIN, ENGINE), ms=10, queued=0.4),
        steps=60, tail_ratio=0.8,
    )  # fmt: skip
    assert shares(table, "prepare") == pytest.approx({"wait: sleep": 1}, abs=0.05)


def test_a_wait_of_many_short_ones_is_for_a_core_as_far_as_the_thread_queued() -> None:
    table = table_of(
        Part(position="input", stack=(MAIN, LOG), ms=20, wait="f", queued=0.5),
        Part(position="forward", stack=(MAIN, MODULE, LINEAR), ms=5, queued=0.0),
    )
    found = shares(table, "input")
    assert found == pytest.approx({"wait: file": 0.5, "no core": 0.5}, abs=0.05)
    assert shares(table, "forward") == pytest.approx({"operators": 1.0}, abs=0.05)


def test_python_in_a_backward_is_not_the_link() -> None:
    """A hook holds the interpreter lock: the rest of backward holds all of its waiting."""
    hook = (MAIN, ENGINE, job(90, "hook"))
    table = table_of(("backward", (MAIN, ENGINE), 6), ("backward", hook, 2, "h"), tail_ratio=0.25)
    assert shares(table, "backward") == pytest.approx(
        {"operators": 0.5, "python": 0.25, "wait: link": 0.25}
    )


def test_what_follows_the_last_collective_of_a_backward_is_the_link() -> None:
    """A quarter of backward; of that, until the last rank was there, others are the reason."""
    parts: Any = (("forward", (MAIN, MODULE, LINEAR), 4), ("backward", (MAIN, ENGINE), 8))
    table = table_of(*parts, tail_ratio=0.25, peer_ratios={BACKWARD: 1 / 12})
    assert shares(table, "forward") == {"operators": 1}
    assert shares(table, "backward") == pytest.approx(
        {"operators": 3 / 4, "wait: link": 1 / 8, "wait: peer": 1 / 8}
    )
    table = table_of(*parts, tail_ratio=0.25, free_ratio=1 / 12)
    assert shares(table, "backward") == pytest.approx(
        {"operators": 3 / 4, "wait: link": 1 / 8, "no core": 1 / 8}
    )


def test_ranks_wait_for_one_another_in_the_positions_where_they_are_late() -> None:
    """As in the exchange of gradients, and not in collectives that the job calls after it."""
    file = f"{SITE}{COLLECTIVES_FILE}"
    gathers = (MAIN, (file, 3000, "all_gather_object"), (file, 4000, "all_gather"))
    table = table_of(
        ("backward", (MAIN, ENGINE), 8), ("after_step", gathers, 4),
        tail_ratio=0.5, peer_ratios={BACKWARD: 1 / 6},
    )  # fmt: skip
    assert shares(table, "backward") == pytest.approx(
        {"operators": 1 / 2, "wait: link": 1 / 4, "wait: peer": 1 / 4}
    )
    assert shares(table, "after_step") == {"wait: link": 1}


def test_each_position_keeps_its_exact_time_however_seldom_it_was_sampled() -> None:
    """One without any sample is there all the same."""
    table = table_of(
        ("input", (), 1), ("forward", (MAIN, MODULE, LINEAR), 7), ("optimizer", (MAIN, STEP), 3)
    )
    sums = np.bincount(table.cell, table.ns, minlength=len(POSITIONS)) / NS_PER_MS
    assert sums[[0, 2, 6]] == pytest.approx([12, 84, 36])


@pytest.mark.parametrize(("file", "library", "package"), [
    ("/home/me/train.py", False, "job"),
    (f"{SITE}/numpy/linalg/linalg.py", True, "numpy"),
    (f"{SITE}/six.py", True, "six"),
    (f"{SITE}/torch/nn/functional.py", True, "torch"),
    ("/src/pytorch/torch/nn/functional.py", True, "torch"),
    (f"{PYTHON}/json/encoder.py", True, "python"),
    ("/usr/lib/python3/dist-packages/yaml/loader.py", True, "yaml"),
    ("/tmp/torchinductor_me/ab/cabc.py", True, "torch"),
    ("<eval_with_key>.1", True, "torch"),
])  # fmt: skip
def test_whose_code_a_file_is(file: str, library: bool, package: str) -> None:
    assert package_of(file, library=library) == package


@pytest.mark.parametrize(
    ("long", "found"),
    [({}, []), ({3: 30}, [3]), ({3: 14}, []), ({3: 30, 9: 30}, [3, 9]), ({3: 20}, [])],
)
def test_steps_that_take_far_longer_than_usual_are_sampled_for_themselves(
    long: dict[int, float], found: list[int]
) -> None:
    times = np.array([[long.get(step, 10) for step in range(12)], [0] * 12])
    assert np.flatnonzero(spikes((times * NS_PER_MS).astype(int))[0]).tolist() == found
