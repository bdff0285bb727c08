"""Facts beside the ledger, and what tells causes apart: memory, loaders, cores, NUMA nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from haiprof import Analyzer
from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.diagnosis.compare.compared_run import open_compared_run
from haiprof.diagnosis.compare.comparison import load_of
from haiprof.diagnosis.rule_inputs import gather_inputs
from haiprof.diagnosis.verdict import Finding, Verdict
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import CGROUP, GPU
from haiprof.run_format.writer import append_line, write_json
from tests.unit.analysis.recorded import CLOCK, row_of, write_records
from tests.unit.analysis.sampled import Stack, write_stacks
from tests.unit.analysis.test_lines import FETCH
from tests.unit.diagnosis.stories import (
    BALANCED,
    KINDS,
    START_NS,
    counters,
    find,
    judged,
    note,
    placed,
    saved_ns,
    verdict_of,
    write_beside,
    write_line,
    write_samples,
    write_story,
)
from tests.unit.diagnosis.test_setting_rules import told

PAGES = {"0": 500}
WAITING: Stack = (
    ("/me/train.py", 3, "main"),
    (
        "/site-packages/torch/utils/data/dataloader.py",
        9,
        "_MultiProcessingDataLoaderIter._get_data",
    ),
)


def numbers(finding: Finding) -> dict[str, float | None]:
    return {evidence.name: evidence.value for evidence in finding.evidence}


def write_memory(root: Path, rss: Callable[[float], float]) -> None:
    """How much a rank holds at a second of its training."""
    counters(root, lambda t, _: {"memory_rss_bytes": rss(t)})


def limited(root: Path, limit_bytes: float) -> None:
    """Memory of a rank that grows by 20 MB a second, and the limit of its control group."""
    write_memory(root, lambda t: 1e9 + 2e7 * t)
    times = [START_NS + second * NS_PER_S for second in range(20)]
    rows = [
        row_of(CGROUP, time_ns=t, cgroup_index=0, memory_limit_bytes=int(limit_bytes))
        for t in times
    ]
    node = RunPaths(root).node("node0")
    write_records(node.records("cgroup"), CGROUP, rows, entities=[{"key": [0], "name": "own"}])


def loader_story(
    root: Path, workers: int, *, main: float, all_cores: float, others: float = 0.0,
    kernel_waits: str = "", **loader: object,
) -> Finding:  # fmt: skip
    write_story(root, lambda rank, step: (30.0, *BALANCED[1:]), steps=200)
    note(root, 0, type="dataloader", workers=workers, batch_size=8, persistent=False, **loader)
    counters(root, lambda t, _: {"cpu_main_ns": main * (t + 2) * NS_PER_S,
                                 "cpu_ns": all_cores * (t + 2) * NS_PER_S},
             host=lambda t: {"cpu_user_ns": int((all_cores + others) * (t + 2) * NS_PER_S),
                             "cpu_idle_ns": int((4 - all_cores - others) * (t + 2) * NS_PER_S),
                             "cpu_count": 4})  # fmt: skip
    placed(root, cpus="0-3")
    if kernel_waits:
        fetch = (("/site-packages/torch/utils/data/_utils/fetch.py", 9, "fetch"),)
        samples = [(START_NS + i * NS_PER_MS, (*fetch, ("/me/data.py", 3, "read")))
                   for i in range(len(kernel_waits))]  # fmt: skip
        path = RunPaths(root).rank(0).worker_stacks(0)
        write_stacks(path, samples, worker=0, pid=9, kernel_waits=kernel_waits)
    return find(judged(root), "dataloader_bound")


@pytest.mark.parametrize(("second", "said"), [(10, True), (40, False)])
def test_a_worker_that_was_dealt_most_of_the_data_is_told(
    root: Path, second: int, said: bool
) -> None:
    """The other one has made its share, and waits."""
    finding = loader_story(root, 2, main=0.4, all_cores=2.3)
    assert finding.cause != "uneven_workers"
    write_samples(root, lambda phase, _: WAITING if phase == "dataloader" else ())
    fetch = ("/site-packages/torch/utils/data/_utils/fetch.py", 9, "fetch")
    idle = ("/site-packages/torch/utils/data/_utils/worker.py", 330, "_worker_loop")
    for worker, count in enumerate((50, second)):
        stacks = [(fetch, ("/me/data.py", 3, "read"))] * count + [(idle,)] * (50 - count)
        samples = [(START_NS + i * 10 * NS_PER_MS, stack) for i, stack in enumerate(stacks)]
        write_stacks(RunPaths(root).rank(0).worker_stacks(worker), samples, worker=worker,
                     pid=9 + worker)  # fmt: skip
    finding = find(judged(root), "dataloader_bound")
    assert (finding.cause == "uneven_workers") == said
    assert ("deal equal shares" in finding.remedy) == said
    # Dealt evenly each makes 30 of the busier one's 50; two that are alike have no such bound.
    assert finding.gain is not None
    share = finding.gain.left_ns / finding.gain.step_ns
    assert share == pytest.approx(0.6 if said else 17.5 / 47.5, abs=0.03)


@pytest.mark.parametrize(("inner", "said"), [
    ("ZipFile._RealGetContents", "once in each worker"), ("ZipFile.read", "decode and tokenize"),
])  # fmt: skip
def test_workers_that_open_an_archive_for_each_sample_are_told_so(
    root: Path, inner: str, said: str
) -> None:
    loader_story(root, 2, main=0.4, all_cores=2.3)
    fetch = ("/site-packages/torch/utils/data/_utils/fetch.py", 9, "fetch")
    stack = (fetch, ("/me/data.py", 3, "read"), ("/lib/python3.11/zipfile.py", 1420, inner))
    samples = [(START_NS + i * 10 * NS_PER_MS, stack) for i in range(60)]
    for worker in range(2):
        path = RunPaths(root).rank(0).worker_stacks(worker)
        write_stacks(path, samples, worker=worker, pid=9 + worker, libraries=["/lib/python3.11"])
    assert said in find(judged(root), "dataloader_bound").remedy


@pytest.mark.parametrize(
    ("waits", "left"), [(("0l" * 30, "l0" * 30), 0.5), (("l" + 59 * "0",) * 2, 0.37)]
)
def test_workers_behind_one_lock_still_make_their_batches_without_it(
    root: Path, waits: tuple[str, str], left: float
) -> None:
    """Of two one works at a time: half of the step is left. What they compute has no such bound."""
    loader_story(root, 2, main=0.4, all_cores=0.5 if left == 0.5 else 2.3)
    write_samples(root, lambda phase, _: WAITING if phase == "dataloader" else ())
    fetch = (("/site-packages/torch/utils/data/_utils/fetch.py", 9, "fetch"),)
    samples = [(START_NS + i * NS_PER_MS, (*fetch, ("/me/data.py", 3, "read"))) for i in range(60)]
    for worker, each in enumerate(waits):
        write_stacks(RunPaths(root).rank(0).worker_stacks(worker), samples, worker=worker,
                     pid=9 + worker, kernel_waits=each)  # fmt: skip
    finding = find(judged(root), "dataloader_bound")
    assert ("hold the lock for no more" in finding.remedy) == (left == 0.5)
    assert finding.gain is not None
    assert finding.gain.left_ns / finding.gain.step_ns == pytest.approx(left, abs=0.03)


def test_workers_of_one_rank_that_only_wait_for_a_lock_break_nothing(root: Path) -> None:
    write_story(root, lambda *_: (30.0, *BALANCED[1:]), ranks=2, steps=200)
    fetch = (("/site-packages/torch/utils/data/_utils/fetch.py", 9, "fetch"),)
    samples = [(START_NS + i * NS_PER_MS, (*fetch, ("/me/data.py", 3, "read"))) for i in range(60)]
    for rank, waits in enumerate(("0l" * 30, "l" * 60)):
        note(root, rank, type="dataloader", workers=1, batch_size=8, persistent=False)
        write_samples(root, lambda phase, _: WAITING if phase == "dataloader" else (), rank=rank)
        write_stacks(RunPaths(root).rank(rank).worker_stacks(0), samples, worker=0, pid=9,
                     kernel_waits=waits)  # fmt: skip
    finding = find(judged(root), "dataloader_bound")
    assert finding.gain is not None
    # A fourth of what both workers take is work.
    left = max(0.25 * finding.gain.step_ns, finding.gain.step_ns - 30e6)
    assert finding.gain.left_ns == pytest.approx(left, rel=0.1)


def test_slow_first_batch_is_named_with_its_length(root: Path) -> None:
    times = lambda rank, step: (0.2 if step else 5_000.0, *BALANCED[1:])  # noqa: E731
    write_story(root, times)
    write_samples(root, lambda phase, step: (("/me/data.py", 3 + min(step or 0, 1), "read"),))
    finding = find(judged(root), "first_batch")
    assert [line.location for line in finding.code_lines] == ["data.py:3 read"]
    assert finding.evidence[0].value == pytest.approx(5_000 * NS_PER_MS, rel=0.1)


@pytest.mark.parametrize(
    ("step", "severity", "title", "advice"),
    [
        (0, "info", "of the run: compilations: 1", "TORCHINDUCTOR_CACHE_DIR"),
        (1, "warning", "of the run: compilations: 1, 1 of them after the first step", "mark_dyna"),
    ],
)
def test_compilation_in_steps_that_are_not_judged_is_a_fact_of_the_run(
    root: Path, step: int, severity: str, title: str, advice: str
) -> None:
    rows, now, spans = [], START_NS, []
    for number in range(200):
        for kind, ms in ((schema.FORWARD, 5), (schema.BACKWARD, 9), (schema.OPTIMIZER, 2)):
            if number == step and kind == schema.FORWARD:
                ms = 8_000
                spans.append([(now - CLOCK.mono_ns + CLOCK.wall_ns) // 1000, ms * 1000])
            rows.append((kind, 0, now, now + ms * NS_PER_MS))
            now += ms * NS_PER_MS
    line = {"type": "compile", "time_ns": now, "count": 1, "spent_ns": 8 * NS_PER_S, "spans": spans}
    write_line(root, rows, [line])
    finding = find(judged(root), "compilation")
    assert finding.severity == severity
    assert finding.title.startswith("torch.compile took 8.00 s, ")
    assert finding.title.endswith(title)
    assert advice in finding.remedy


@pytest.mark.parametrize(
    ("workers", "main", "all_cores", "cause", "advice"),
    [
        (0, 0.35, 0.35, "storage", "num_workers=4 and up"),
        (0, 1.0, 1.0, "no_workers", "num_workers=3,"),  # of four cores one is its own
        (1, 0.4, 1.4, "few_workers", "num_workers=2;"),
        (2, 0.4, 0.5, "storage", "more workers wait in parallel"),
        (3, 0.6, 3.6, "cores_full", "more workers would not help"),
        (3, 0.2, 3.2, "few_workers", "num_workers=4;"),  # six have no room
    ],
)
def test_reason_for_late_batches(
    root: Path, workers: int, main: float, all_cores: float, cause: str, advice: str
) -> None:
    finding = loader_story(root, workers, main=main, all_cores=all_cores)
    assert finding.cause == cause
    assert advice in finding.remedy


@pytest.mark.parametrize(("main", "iterable", "said"), [
    (1.0, True, True), (0.35, True, True), (1.0, False, False), (1.0, None, False),
])  # fmt: skip
def test_workers_of_an_iterable_dataset_are_advised_with_a_warning(
    root: Path, main: float, iterable: bool | None, said: bool
) -> None:
    finding = loader_story(root, 0, main=main, all_cores=main, iterable=iterable)
    assert ("get_worker_info" in finding.remedy) == said


@pytest.mark.parametrize(
    ("kernel_waits", "said", "advice"),
    [
        ("z" * 18 + "f0", "the loader itself sleeps", "take the pauses out"),
        ("s" * 15 + "zz0", "the loader itself waits for a network peer", "no request per sample"),
        ("l" * 15 + "zz0", "the loader itself waits for a lock", "behind one lock more workers"),
        ("f" * 9 + "s" * 9, "for files, the network or a lock", "a local copy"),
        ("-" * 18 + "00", "for files, the network or a lock", "a local copy"),
    ],
)
def test_what_workers_wait_for_is_said_as_the_kernel_saw_it(
    root: Path, kernel_waits: str, said: str, advice: str
) -> None:
    finding = loader_story(root, 2, main=0.4, all_cores=0.5, kernel_waits=kernel_waits)
    assert (finding.cause, said in finding.title) == ("storage", True), finding.title
    assert advice in finding.remedy


def test_cores_that_others_use_are_not_said_to_be_of_no_use_to_workers(root: Path) -> None:
    finding = loader_story(root, 0, main=1.0, all_cores=1.0, others=3.0)
    assert finding.cause == "cores_full"
    assert "share the cores with training and with other processes (3.0 cores)" in finding.remedy
    assert "would not help" not in finding.remedy


def test_late_batches_of_an_unknown_loader_have_no_reason(root: Path) -> None:
    finding = find(verdict_of(root, lambda *_: (30.0, *BALANCED[1:])), "dataloader_bound")
    assert finding.cause is None
    assert finding.missing


@pytest.mark.parametrize(
    ("stack", "spacing_ms", "at", "without"),
    [
        ((("/me/data.py", 12, "connect"),), 1, ["data.py:12 connect"], False),
        ((FETCH, ("/me/data.py", 30, "Few.__getitem__")), 10, ["data.py:30 Few.__getitem__"], True),
        ((FETCH, ("/me/data.py", 30, "Few.__getitem__")), 200,  # more than a start
         ["data.py:30 Few.__getitem__"], False),
    ],
)  # fmt: skip
def test_restarted_workers_are_told_by_the_starts_of_epochs(
    root: Path, stack: Stack, spacing_ms: int, at: list[str], without: bool
) -> None:
    rows, now = [], START_NS
    for step in range(120):
        first = step % 10 == 0
        if first:
            rows.append((schema.DATA_ITER, 0, now, now + 60 * NS_PER_MS))
            now += 61 * NS_PER_MS
        for kind, ms in zip(
            (schema.DATA, schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER),
            (100.0 if first else 0.2, *BALANCED[1:]),
            strict=True,
        ):
            rows.append((kind, 0, now, now + int(ms * NS_PER_MS)))
            now += int((ms + 0.1) * NS_PER_MS)
    write_line(root, rows, [{"type": "dataloader", "workers": 2, "persistent": False}])
    samples = [(START_NS + i * spacing_ms * NS_PER_MS, stack) for i in range(20)]
    write_stacks(RunPaths(root).rank(0).worker_stacks(0), samples, worker=0, pid=9)
    library = "/x/site-packages/torch/utils/data/dataloader.py"
    main = ("/home/me/train.py", 22, "main")
    waits = (main, (library, 9, "_MultiProcessingDataLoaderIter._try_get_data"))
    begins = (main, (library, 5, "_BaseDataLoaderIter.__next__"))  # what it does itself
    of_kind = {schema.DATA: waits, schema.DATA_ITER: begins}
    own = [
        (at, of_kind.get(kind, (main,)))
        for kind, _, begin, end in rows
        for at in range(begin + 5000, end, NS_PER_MS)
    ]
    write_stacks(RunPaths(root).rank(0).stacks, own)
    verdict = judged(root)
    assert not [f.title for f in verdict.findings if "made on the training thread" in f.title]
    finding = verdict.findings[0]
    assert finding.cause == "epoch_restart"
    assert [line.location for line in finding.code_lines] == at
    is_loading = "__getitem__" in at[0]  # that is not what starting them takes
    assert (f" is at {at[0]}" in finding.title) is not is_loading
    assert "persistent_workers=True" in finding.remedy
    assert ("num_workers=0" in finding.remedy) == without


def test_what_each_step_pays_is_not_told_to_be_where_epochs_begin(root: Path) -> None:
    """The sampler shuffles a large data set at each start of a short epoch."""
    rows, stacks, now = [], [], START_NS
    library, main = "/x/site-packages/torch/utils/data/", ("/home/me/train.py", 38, "main")
    loads = (main, (f"{library}dataloader.py", 785, "_SingleProcessDataLoaderIter._next_data"))
    takes = (*loads, FETCH, ("/home/me/train.py", 17, "Pairs.__getitems__"))
    shuffles = (*loads, (f"{library}sampler.py", 183, "RandomSampler.__iter__"))
    for step in range(240):
        is_first = step % 40 == 39
        if is_first:
            rows.append((schema.DATA_ITER, 0, now, now + NS_PER_MS))
            now += 2 * NS_PER_MS
        for kind, ms in zip(KINDS, (200 if is_first else 3, 5, 10, 2), strict=True):
            of_kind = shuffles if is_first else takes
            stack = of_kind if kind == schema.DATA else (main,)
            rows.append((kind, 0, now, now + ms * NS_PER_MS))
            stacks += [(now + NS_PER_MS // 2 + at * NS_PER_MS, stack) for at in range(ms)]
            now += ms * NS_PER_MS + 100_000
    write_line(root, rows, [{"type": "dataloader", "workers": 0, "persistent": False}])
    write_stacks(RunPaths(root).rank(0).stacks, stacks)
    first, second = [f for f in judged(root).findings if f.rule == "dataloader_bound"]
    assert (first.cause, first.code_lines[0].location) == ("epoch_restart", "train.py:38 main")
    assert "most of it where an epoch begins" in first.title
    assert second.code_lines[0].location == "train.py:17 Pairs.__getitems__"
    assert second.title.endswith(": Pairs.__getitems__ (train.py:17), Python")
    assert "workers" in second.remedy


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("is_paid", "said", "remedy"),
    [
        (lambda step: step < 60, "paid until step 59", "fills a cache"),
        (lambda step: step >= 240, "paid since step 240", "what changed at that step"),
        (lambda step: step % 15 == 7, "for a few slow samples", "time dataset[i] for each i"),
    ],
)
def test_waiting_in_a_part_of_the_run_is_no_slow_sample(
    root: Path, workers: int, is_paid: Callable[[int], bool], said: str, remedy: str
) -> None:
    write_story(
        root, lambda _, step: (60.0 if is_paid(step) else 0.2, *BALANCED[1:]), steps=300
    )  # fmt: skip
    note(root, 0, type="dataloader", workers=workers)
    found = find(judged(root), "dataloader_bound")
    assert said in found.title
    assert remedy in found.remedy
    if not workers:  # without them nothing is read ahead
        assert "prefetch_factor" not in found.remedy


@pytest.mark.parametrize(
    ("usual_ms", "slow_ms", "every", "workers", "queued", "are_slow"),
    [
        (0.2, 400.0, 15, 2, 0.0, True),
        (14.0, 400.0, 15, 2, 0.0, True),
        (0.2, 60.0, 15, 0, 0.0, True),
        (0.2, 60.0, 15, 0, 0.4, False),  # the thread had no core meanwhile
        (0.2, 14.0, 8, 1, 0.0, False),  # for less than a step: a loader that just keeps up
        *((0.2, 40.0 * count, count, count, 0.0, False) for count in (1, 2, 4)),  # their bursts
    ],
)
def test_few_slow_samples_are_told_from_what_every_batch_costs(
    root: Path, usual_ms: float, slow_ms: float, every: int, workers: int, queued: float,
    are_slow: bool,
) -> None:  # fmt: skip
    times = lambda _, step: (usual_ms if step % every else slow_ms, *BALANCED[1:])  # noqa: E731
    write_story(root, times, steps=300)
    note(root, 0, type="dataloader", workers=workers)
    if queued:
        counters(root, lambda t, _: {"cpu_main_ns": 0.5 * (t + 2) * NS_PER_S,
                                     "run_queue_wait_ns": queued * (t + 2) * NS_PER_S})  # fmt: skip
    assert (find(judged(root), "dataloader_bound").cause == "slow_samples") is are_slow


@pytest.mark.parametrize(
    ("rss", "fires"),
    [
        (lambda t: 1e9 + 2e7 * t, True),
        (lambda t: 1e9, False),
        (lambda t: 1e9 + min(4e8, 2e8 * t), False),  # a cache that fills
        (lambda t: 1e9 + 5e5 * t, False),  # too little
    ],
)
def test_memory_creep(root: Path, rss: Callable[[float], float], fires: bool) -> None:
    write_story(root, lambda *_: BALANCED, steps=1200)
    write_memory(root, rss)
    assert ("memory_creep" in {f.rule for f in judged(root).findings}) is fires


@pytest.mark.parametrize(("grows", "severity"), [(True, "info"), (False, "warning")])
def test_memory_that_grows_with_the_inputs_is_no_problem(
    root: Path, grows: bool, severity: str
) -> None:
    """As where a curriculum has longer and longer sequences."""
    write_story(root, lambda *_: BALANCED, steps=1200)
    write_memory(root, lambda t: 1e9 + 2e7 * t)
    for look in range(12):
        count = 512 + 64 * (look if grows else look % 3)
        note(root, 0, type="input_size", time_ns=START_NS + look * NS_PER_S, root=1, step=look,
             number_count=count)  # fmt: skip
    creep = find(judged(root), "memory_creep")
    assert creep.severity == severity
    assert (": its inputs are" in creep.title) is grows


@pytest.mark.parametrize(("slow", "cause"), [(39, "no_workers"), (20, "slow_samples")])
def test_what_a_sampler_does_where_an_epoch_begins_is_no_slow_sample(
    root: Path, slow: int, cause: str
) -> None:
    """Most of the unusual waiting, though not of all, is at one step of each epoch's 40."""
    rows, now = [], START_NS
    for step in range(240):
        if step % 40 == 39:
            rows.append((schema.DATA_ITER, 0, now, now + NS_PER_MS))
            now += 2 * NS_PER_MS
        wait_ms = 200 if step % 40 == slow else 20 if step % 10 == 5 else 5
        for kind, ms in zip(KINDS, (wait_ms, 5, 10, 2), strict=True):
            rows.append((kind, 0, now, now + ms * NS_PER_MS))
            now += ms * NS_PER_MS + 100_000
    write_line(root, rows, [{"type": "dataloader", "workers": 0, "persistent": False}])
    assert find(judged(root), "dataloader_bound").cause == cause


def test_memory_that_the_jobs_own_profiler_keeps_is_told_as_that(root: Path) -> None:
    write_story(root, lambda *_: BALANCED, steps=800)
    write_memory(root, lambda t: 1e9 + 5e7 * t)
    told(root, seen={"profiler_count": 100})
    creep = find(judged(root), "memory_creep")
    assert "the job's own profiler keeps what it records" in creep.title
    assert "torch.profiler.schedule" in creep.remedy


def test_memory_that_each_step_keeps_creeps_also_where_steps_become_slower(root: Path) -> None:
    step_s, slower = sum(BALANCED) / 1e3, 4

    def times(rank: int, step: int) -> tuple[float, float, float, float]:
        data, forward, backward, optimizer = BALANCED
        times = 1 if step < 400 else slower
        return data * times, forward * times, backward * times, optimizer * times

    def kept_bytes(seconds: float) -> float:
        fast = min(seconds / step_s, 400.0)
        return 1e9 + 1e6 * (fast + max(seconds / step_s - 400, 0.0) / slower)

    write_story(root, times, steps=700)
    write_memory(root, kept_bytes)
    assert "memory_creep" in {f.rule for f in judged(root).findings}


@pytest.mark.parametrize(
    ("steps", "limit", "severity"),
    [
        (1200, 2e9, "critical"),
        (1200, 2e11, "warning"),
        (600, 2e9, "info"),  # in its first seconds a job loads what it keeps
    ],
)
def test_memory_that_ends_the_job_within_the_hour_is_grave(
    root: Path, steps: int, limit: float, severity: str
) -> None:
    write_story(root, lambda *_: BALANCED, steps=steps)
    limited(root, limit)
    creep = find(judged(root), "memory_creep")
    assert creep.severity == severity
    if severity != "critical":  # told only where the end is near, by what was seen
        assert "at this rate" not in creep.title
        return
    until, last = (numbers(creep)[name] for name in ("until its limit, at this rate", "at the end"))
    assert until is not None
    assert last is not None
    assert until / NS_PER_S == pytest.approx((2e9 - last) / 2e7, rel=0.1)
    assert "at this rate the 1.86 GiB of its control group are used up in 28" in creep.title
    assert creep.title.endswith("after about 1,600 more steps")


def ran_out(root: Path, second: int = 29) -> None:
    """The rank fails to allocate; its first step began at second 9."""
    append_line(RunPaths(root).node("node0").events, {
        "type": "process_end", "pid": 100, "rank": 0, "wall_ns": CLOCK.wall_ns + second * NS_PER_S,
        "status": None, "signal": 9, "oom": {"kills": 1},
    })  # fmt: skip


def test_memory_that_filled_up_before_it_ran_out_did_not_grow_with_each_step(root: Path) -> None:
    write_story(root, lambda *_: BALANCED, steps=1000)
    write_memory(root, lambda t: 1e8 + 1e7 * min(t, 8.0))
    ran_out(root)
    verdict = judged(root)
    assert verdict.memory_at_end[0].growth_bytes_per_step is None
    assert verdict.advice is not None
    assert verdict.advice.action == "RESTART"


def test_memory_that_grew_with_each_step_until_it_ran_out_is_mended_before_a_restart(
    root: Path,
) -> None:
    step_s = sum(BALANCED) / 1e3
    write_story(root, lambda *_: BALANCED, steps=1150)

    def kept(seconds: float) -> float:
        return 1e8 + 1e6 * max(seconds, 0.0) / step_s

    write_memory(root, lambda t: kept(t) if t < 20 else 1e8)
    ran_out(root)
    verdict = judged(root)
    (memory,) = verdict.memory_at_end
    assert memory.growth_bytes_per_step == pytest.approx(1e6, rel=0.05)
    assert " KiB a step" in memory.text
    assert "with its" not in memory.text
    assert "last minute" not in memory.text
    assert verdict.death is not None
    assert "look for what is kept from each step" in verdict.death.remedy
    assert verdict.advice is not None
    assert verdict.advice.headline == "STOP"
    assert "a step, and no checkpoint was seen: begun anew, it dies" in verdict.advice.text


@pytest.mark.parametrize(("source", "is_named"), [
    ("history.append([x for x in y])", True), ("kept[i] = make(i)", True), ("y = f(x)", False),
])  # fmt: skip
def test_line_that_keeps_what_it_makes_is_named_where_memory_ran_out_there(
    root: Path, source: str, *, is_named: bool
) -> None:
    step_s = sum(BALANCED) / 1e3
    write_story(root, lambda *_: BALANCED, steps=1150)
    write_memory(root, lambda t: 1e8 + 1e6 * max(t, 0.0) / step_s if t < 20 else 1e8)
    ran_out(root)
    run = RunPaths(root)
    run.uncaught.mkdir(exist_ok=True)
    frames = [["/home/me/train.py", 5, "keep"]]
    error = {"type": "MemoryError", "message": "", "frames": frames, "source": source}
    ended = {"how": "exception", "thread": None, "errors": [error],
             "wall_ns": CLOCK.wall_ns + 29 * NS_PER_S}  # fmt: skip
    content = {"host": "node0", "pid": 100, "rank": 0, "ended": [ended]}
    write_json(run.uncaught_file("node0", 100), content, below=root)
    death = judged(root).death
    assert death is not None
    assert death.remedy.startswith("memory grew by ")
    assert ("see first what train.py:5 in keep, where it ran out" in death.remedy) is is_named


def test_growth_that_the_job_died_of_is_told_by_its_death_alone(root: Path) -> None:
    write_story(root, lambda *_: BALANCED, steps=1200)
    limited(root, 2e9)
    ran_out(root, 60)
    verdict = judged(root)
    assert verdict.death is not None
    assert verdict.death.cause == "out_of_memory"
    assert verdict.memory_at_end[0].growth_bytes_per_step is not None
    assert "memory_creep" not in {f.rule for f in verdict.findings}, "one number for one growth"


@pytest.mark.parametrize(
    ("held_gib", "peak_gib", "said"),
    [
        (lambda step: 40.0, 60.0, None),
        (lambda step: 40.0, 77.0, "nearly full on rank 0: 96 %"),
        (lambda step: 10.0 if step < 1 else 40.0, 60.0, None),  # the optimizer's state
        (lambda step: 10 + min(step, 120) / 4, 60.0, None),  # a cache that fills
        (lambda step: 10 + step / 8, 0.0, "GPU memory grows by 128 MiB per step on rank 0"),
        (lambda step: 40 + step / 400, 0.0, None),  # too little
    ],
)
def test_gpu_memory_limit(
    root: Path, held_gib: Callable[[int], float], peak_gib: float, said: str | None
) -> None:
    write_story(root, lambda *_: BALANCED, steps=1200)
    for step in range(0, 400, 10):
        held = held_gib(step)
        sizes = {"allocated": held, "peak": max(peak_gib, held + 5), "reserved": 70, "limit": 80}
        note(root, 0, type="gpu_memory", time_ns=START_NS + step * NS_PER_S // 100, step=step,
             **{f"{name}_bytes": int(size * 2**30) for name, size in sizes.items()})  # fmt: skip
    found = [f for f in judged(root).findings if f.rule == "gpu_memory_limit"]
    assert [said in f.title for f in found if said] == [True] * (said is not None)
    assert len(found) == (said is not None)
    if said and "grows" in said:
        left = {e.name: e.value for e in found[0].evidence}
        steps = (80 - (10 + 390 / 8 + 5)) * 8
        assert left["steps until then, at this rate"] == pytest.approx(steps, rel=0.05)


def test_memory_creep_abstains_without_samples(root: Path) -> None:
    assert "memory_creep" in dict(verdict_of(root, lambda *_: BALANCED).abstained)


@pytest.mark.parametrize(("pressure", "fires"), [(0.3, True), (0.02, False)])
def test_memory_pressure(root: Path, pressure: float, fires: bool) -> None:
    write_story(root, lambda *_: BALANCED, steps=600)
    counters(root, lambda *_: {}, host=lambda t: {
        "pressure_memory_some_ns": int(pressure * (t + 2) * NS_PER_S)})  # fmt: skip
    assert ("memory_pressure" in {f.rule for f in judged(root).findings}) is fires


@pytest.mark.parametrize(
    ("per_s", "pages_kept", "cores", "workers", "lost"),
    [
        (200_000, 0.0, 1.0, 0.0, 0.10),
        (200_000, 0.3, 1.0, 0.0, 0.07),
        (200_000, 0.9, 1.0, 0.0, None),  # a heap that grows
        (200_000, 0.0, 4.0, 0.0, None),  # four threads share them
        (200_000, 0.0, 1.0, 0.06, None),  # it may be the loader's workers
        (60_000, 0.0, 1.0, 0.0, None),
        (0, 0.0, 1.0, 0.0, None),
    ],
)
def test_page_faults_of_memory_that_goes_back_and_forth(
    root: Path, per_s: float, pages_kept: float, cores: float, workers: float, lost: float | None
) -> None:
    write_story(root, lambda *_: BALANCED, steps=800)
    counters(root, lambda t, _: {
        "page_fault_count": per_s * (t + 2), "cpu_main_ns": cores * (t + 2) * NS_PER_S,
        "cpu_ns": (cores + workers) * (t + 2) * NS_PER_S,
        "memory_rss_bytes": 2**30 + pages_kept * per_s * 4096 * (t + 2)})  # fmt: skip
    found = [f for f in judged(root).findings if f.rule == "page_faults"]
    assert [f.lost_ratio for f in found] == ([] if lost is None else [pytest.approx(lost, rel=0.1)])
    if lost is not None:
        (finding,) = found
        assert finding.severity == "warning"
        assert "MALLOC_TRIM_THRESHOLD_=" in finding.remedy
        count = int(re.findall(r"about ([\d,]+) page faults", finding.title)[0].replace(",", ""))
        # Steps of 17.8 ms.
        assert count == pytest.approx(per_s * (1 - pages_kept) * 0.0178, rel=0.05)


@pytest.mark.parametrize(
    ("kernel", "said", "left"),
    [
        (0.6, "at least 10 % and at most 60 % of the step", (0.6, 0.4, 0.9)),  # 2 us each, as usual
        (0.3, "at least 10 % and at most 30 % of the step", (0.7, 0.7, 0.9)),
        (0.08, ", at most 8.0 % of the step", (0.92, 0.92, 1.0)),
        (0.04, None, ()),
    ],
)
def test_page_faults_take_at_most_what_the_kernel_works_for_the_rank(
    root: Path, kernel: float, said: str | None, left: tuple[float, ...]
) -> None:
    write_story(root, lambda *_: BALANCED, steps=800)
    counters(root, lambda t, _: {"page_fault_count": 200_000 * (t + 2),
                                 "cpu_main_ns": (t + 2) * NS_PER_S,
                                 "cpu_main_system_ns": kernel * (t + 2) * NS_PER_S})  # fmt: skip
    found = [f for f in judged(root).findings if f.rule == "page_faults"]
    assert len(found) == (said is not None)
    if said is not None:
        assert said in found[0].title
        gain = found[0].gain
        assert gain is not None
        times = gain.left_ns, gain.low_ns, gain.high_ns
        assert [ns / gain.step_ns for ns in times] == pytest.approx(left, rel=0.02)


@pytest.mark.parametrize(("retries", "fires"), [(40, True), (1, False)])
def test_allocator_retries(root: Path, retries: int, fires: bool) -> None:
    write_story(root, lambda *_: BALANCED)
    for place, count in enumerate((0, retries)):
        note(root, 0, type="allocator", time_ns=START_NS + place * 10 * NS_PER_S,
             retry_count=count, oom_count=0)  # fmt: skip
    assert ("allocator_retries" in {f.rule for f in judged(root).findings}) is fires


def slow_rank(rank: int, _: int) -> tuple[float, float, float, float]:
    """Forward of rank 1 takes 4 ms longer, for which the others wait in backward."""
    return (0.2, 9.0, 10.0, 2.0) if rank == 1 else (0.2, 5.0, 14.0, 2.0)


def test_slow_rank_is_joined_to_its_throttled_gpu(root: Path) -> None:
    write_story(root, slow_rank, ranks=4, gpu=0.9, steps=200)
    samples = range(START_NS, START_NS + 4 * NS_PER_S, NS_PER_S // 4)
    rows = [
        row_of(GPU, time_ns=t, gpu=r, utilization_ratio=0.9,
               throttle_hw_thermal_ns=int((0.6 if r == 1 else 0.01) * t))
        for t in samples
        for r in range(4)
    ]  # fmt: skip
    gpus = [{"key": [r], "name": f"gpu {r}", "uuid": f"GPU-{r}"} for r in range(4)]
    path = RunPaths(root).node("node0").records("gpu")
    path.unlink()
    write_records(path, GPU, rows, entities=gpus)
    finding = find(judged(root), "ranks_uneven")
    assert (finding.rank, finding.cause) == (1, "throttled")
    assert "temperature" in finding.title


@pytest.mark.parametrize(
    ("cores", "cause"),
    [
        ([(0.1, 0.2), (0.5, 0.4)], "forward"),
        ([(0.5, 0.12), (0.5, 0.25)], "waits_for_cores"),
        ([(0.4, 0.12), (0.6, 0.25)], "forward"),
    ],
)
def test_rank_that_works_more_is_not_called_starved(
    root: Path, cores: list[tuple[float, float]], cause: str
) -> None:
    """Rank 1's forward takes a fifth of the step longer. Each runs and waits for a core so long."""
    write_story(root, slow_rank, ranks=2, steps=200)

    def used(t: float, rank: int) -> dict[str, float]:
        run, wait = (share * (t + 1) * NS_PER_S for share in cores[rank])
        return {"cpu_main_ns": run, "cpu_ns": run, "run_queue_wait_ns": wait}

    counters(root, used, ranks=2)
    assert find(judged(root), "ranks_uneven").cause == cause


@pytest.mark.parametrize(
    ("sizes", "cause"),
    [((1000, 1000), "page_faults"), ((1000, 3000), "larger_inputs"), ((None, None), "forward")],
)
def test_a_rank_is_slow_by_page_faults_only_where_it_is_given_the_same(
    root: Path, sizes: tuple[int | None, int | None], cause: str
) -> None:
    """Rank 1 has twice the page faults."""
    write_story(root, slow_rank, steps=800, ranks=2)
    for rank, size in enumerate(sizes):
        if size is not None:
            note(root, rank, type="input_size", time_ns=START_NS, root=1, number_count=size)
    counters(root, lambda t, rank: {"page_fault_count": 50_000 * (1 + rank) * (t + 2)}, ranks=2)
    finding = find(judged(root), "ranks_uneven")
    assert (finding.rank, finding.cause) == (1, cause)
    assert ("LD_PRELOAD" in finding.remedy) is (cause == "page_faults")
    # Of two ranks half of what one does more goes where both are given the same.
    (longer,) = re.findall(r"straggler: ([\d.]+) ms", finding.title)
    gone_ms = saved_ns(finding) / NS_PER_MS
    part = 0.5 if cause == "larger_inputs" else 1.0
    assert gone_ms == pytest.approx(part * float(longer), rel=0.05)
    assert ("of that can go" in finding.title) == (part < 1)


def test_counters_of_a_job_beside_it_are_none_of_this_one(root: Path) -> None:
    """That of the first attempt waits for cores; of the judged one nothing is known."""
    write_story(root, lambda *_: BALANCED, steps=800)
    counters(root, lambda t, _: {"cpu_main_ns": 0.5 * (t + 2) * NS_PER_S,
                                 "run_queue_wait_ns": 0.5 * (t + 2) * NS_PER_S})  # fmt: skip
    assert gather_inputs(Analyzer(root)).core_waits.keys() == {0}
    write_beside(root, 10.0, steps=600)
    inputs = gather_inputs(Analyzer(root))
    assert set(inputs.ranks["attempt"]) == {1}
    assert inputs.core_waits == {}


@pytest.mark.parametrize(("before_s", "is_known"), [(1.0, True), (5.0, False)])
def test_samples_of_a_start_up_are_not_compared_with_training(
    root: Path, before_s: float, is_known: bool
) -> None:
    write_story(root, lambda *_: BALANCED, steps=200)
    counters(root, lambda t, _: {"cpu_main_ns": 0.5 * (t + before_s) * NS_PER_S},
             seconds=[n / 4 - before_s for n in range(16)])  # fmt: skip
    assert (load_of(open_compared_run(root)).main_cores is not None) is is_known


def numa(root: Path, *placements: Mapping[str, Any]) -> Verdict:
    write_story(root, lambda *_: BALANCED, ranks=len(placements), steps=200)
    for rank, placement in enumerate(placements):
        more: dict[str, Any] = {"memory_nodes": PAGES} | dict(placement)
        placed(root, rank, f"{rank * 4}-{rank * 4 + 3}", **more)
    return judged(root)


@pytest.mark.parametrize(
    ("placements", "title", "severity", "evidence", "remedy"),
    [
        ([{"cpu_nodes": [0], "gpu_node": 0}, {"cpu_nodes": [0], "gpu_node": 1}],
         "rank 1 runs on another NUMA node than its GPU", "warning",
         [("rank 1: cores on node 0, GPU on 1; pages away from its GPU", 1.0)],
         "--numa-binding=node"),
        ([{"cpu_nodes": [1], "memory_nodes": {"0": 400, "1": 100}}] * 2,
         "ranks 0 and 1 have most of their memory on another NUMA node than their cores", "warning",
         [(f"rank {rank}: cores on node 1; pages away from its cores", 0.8) for rank in (0, 1)],
         "bind before memory is taken"),
        ([{"cpu_nodes": [0, 1], "gpu_node": 1, "memory_nodes": {"0": 400, "1": 100}}],
         "rank 0 is not bound, and has most of its memory on another NUMA node than its GPU",
         "info", [("rank 0: cores on node 0 and 1, GPU on 1; pages away from its GPU", 0.8)],
         "--numa-binding=node"),
        ([{"cpu_nodes": [0], "nics": [{"name": "mlx5_0", "node": 1}]}],
         "rank 0 runs on a NUMA node without a network adapter, while another has one", "info",
         [("rank 0: cores on node 0, network on 1; pages away from its cores", 0.0)],
         "adapters' node"),
    ],
    ids=["cores", "memory", "unbound", "adapter"],
)  # fmt: skip
def test_ranks_far_from_what_they_use_are_named(
    root: Path, placements: list[dict[str, Any]], title: str, severity: str,
    evidence: list[tuple[str, float]], remedy: str,
) -> None:  # fmt: skip
    finding = find(numa(root, *placements), "numa_placement")
    assert (finding.title, finding.severity) == (title, severity)
    assert numbers(finding) == dict(evidence)
    assert remedy in finding.remedy
    assert finding.confidence == (0.5 if "adapter" in title else 0.7)
    assert finding.rank == (len(placements) - 1 if len(evidence) == 1 else None)


@pytest.mark.parametrize(
    "placement",
    [
        {"cpu_nodes": [0], "gpu_node": 0},
        {"cpu_nodes": [0, 1], "gpu_node": 0, "memory_nodes": {"0": 300, "1": 200}},
        {"cpu_nodes": [0, 1], "memory_nodes": {"0": 250, "1": 250}},
        {"cpu_nodes": [1], "memory_nodes": {"0": 30}},
        {"cpu_nodes": [0], "gpu_node": 0, "nics": [{"name": "mlx5_0", "node": 1}]},
        {"cpu_nodes": [0], "gpu_node": -1, "nics": [{"name": "eth0", "node": -1}]},
    ],
    ids=["one node", "near its GPU", "no GPU", "few pages", "as built", "firmware says nothing"],
)
def test_sound_placement_is_not_named(root: Path, placement: Mapping[str, Any]) -> None:
    assert "numa_placement" in numa(root, placement).checked


def test_unknown_nodes_abstain(root: Path) -> None:
    verdict = numa(root, {"cpu_nodes": None, "gpu_node": 1})
    assert dict(verdict.abstained)["numa_placement"] == (
        "the NUMA nodes of the ranks' cores are not known"
    )


def printed(root: Path, kind: str, text: str, **more: object) -> None:
    """A line that the agent read in the file that rank 0 alone prints into."""
    node = RunPaths(root).node("node0")
    node.root.mkdir(parents=True, exist_ok=True)
    output = {"type": "output", "output": 0, "file": "log", "ranks": [0], "skipped": 0}
    line = {"type": "printed", "output": 0, "wall_ns": START_NS, "kind": kind, "text": text}
    for each in (output, line | more):
        append_line(node.events, each)


def test_printed_loss_that_is_nan_is_a_problem_and_its_text_is_data(root: Path) -> None:
    write_story(root, lambda *_: BALANCED)
    printed(root, "loss", "step 7 loss nan \x1b[31m\u202e" + "x" * 900, step=7)
    finding = find(judged(root), "loss_not_finite")
    assert finding.title.startswith("the loss that rank 0 printed was no finite number at step 7")
    assert finding.title.isprintable()
    assert len(finding.title) < 400


def test_job_that_printed_finite_losses_is_checked_and_one_into_a_pipe_is_not(root: Path) -> None:
    write_story(root, lambda *_: BALANCED)
    why = dict(judged(root).abstained)
    assert why["loss_not_finite"] == "the job prints into no file"
    printed(root, "rate", "300 tok/s", per_second=300.0, unit="tokens")
    assert "loss_not_finite" in judged(root).checked
