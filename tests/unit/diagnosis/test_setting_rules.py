"""Rules on settings: told with their price, silent without effect, never with a made-up number."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.diagnosis.loader_causes import MAKES_LOADER
from haiprof.diagnosis.machine_causes import SETS_THREADS
from haiprof.diagnosis.settings_facts import PRICES, SETS_FLOAT64
from haiprof.diagnosis.thresholds import LINK_USUAL_NS
from haiprof.diagnosis.verdict import Finding, Verdict
from haiprof.run_analysis.lines import find_statement
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.setting_lines import FLAGS
from tests.unit.analysis.recorded import CLOCK, spans_from, write_rank, write_run
from tests.unit.analysis.sampled import Stack, write_stacks
from tests.unit.diagnosis.stories import (
    START_NS,
    counters,
    judged,
    ledger_of,
    note,
    placed,
    report,
    saved_ns,
    write_collectives,
    write_samples,
    write_story,
)
from tests.unit.diagnosis.tables import ENGINE, FORWARD, MODULE, SCRIPT, job, tree_of

USUAL = (0.2, 10.0, 20.0, 2.0)
RULES = {
    "padding", "tracemalloc",
    "anomaly_detection", "profiler_left_on", "costly_switches", "double_precision",
    "call_hook", "unused_gradients", "discarded_gradients",
    "deterministic_mode", "mkldnn_off", "unfused_adam", "optimizer_loop", "ddp_arguments",
    "threads_over_cores",
    "settings_differ", "fast_paths_off", "fsdp_units", "half_precision", "threads_under_cores",
}  # fmt: skip
LINE: dict[str, Any] = {
    "type": "settings",
    "time_ns": START_NS,
    "flags": {
        **dict.fromkeys(FLAGS), "anomaly": False, "profiler": False, "mkldnn": True,
        "deterministic": False, "default_dtype": "float32", "backend": None,
    },
    "gc": {"enabled": True, "thresholds": [700, 10, 10], "frozen_count": 0},
    "cores": 4,
    "cpu_limit_cores": None,
    "memory_limit_bytes": None,
    "models": [
        {
            "name": "GPT", "tensor_count": 40, "parameter_count": 1000, "trainable_count": 1000,
            "dtypes": {"float32": 1000}, "devices": ["cpu"], "layers": {"Linear": 20},
            "complete": True, "ddp": None, "fsdp_unit_count": 0,
        }
    ],
    "optimizers": [
        {"name": "AdamW", "group_count": 1, "tensor_count": 40, "foreach": None, "fused": None,
         "capturable": False, "dtypes": {"float32": 40}, "devices": {"cpu": 40}}
    ],
    "problems": [],
}  # fmt: skip
HALF = {"model": {"dtypes": {"float16": 900, "float32": 100}}}
SEEN = {
    "type": "settings_seen", "look_count": 100, "anomaly_count": 0, "profiler_count": 0,
    "no_sync_count": 0, "collect_count": 0, "collect_ns": 0,
}  # fmt: skip


def told(
    root: Path, rank: int = 0, *, seen: dict[str, object] | None = None, **changes: Any
) -> None:
    """Settings of a rank; `flags`, `model` and `optimizer` change some of their entries."""
    line = copy.deepcopy(LINE)
    line["flags"].update(changes.pop("flags", {}))
    line["models"][0].update(changes.pop("model", {}))
    line["optimizers"][0].update(changes.pop("optimizer", {}))
    variables = changes.pop("variables", {})
    note(root, rank, type="environment", variables=variables)
    note(root, rank, **(line | changes))
    note(root, rank, **(SEEN | (seen or {})))


def of_settings(verdict: Verdict) -> dict[str, Finding]:
    return {found.rule: found for found in verdict.findings if found.rule in RULES}


def on_cpus(root: Path, **settings: Any) -> dict[str, Finding]:
    """Findings on settings of a job on CPUs with one rank."""
    write_story(root, lambda rank, step: USUAL)
    told(root, **settings)
    return of_settings(judged(root))


def long_updates(root: Path, **settings: Any) -> dict[str, Finding]:
    """The same of a job whose optimizer takes a third of the step."""
    write_story(root, lambda rank, step: (0.2, 5.0, 10.0, 8.0))
    told(root, **settings)
    return of_settings(judged(root))


def of_quick_steps(root: Path, **settings: Any) -> dict[str, Finding]:
    write_story(root, lambda rank, step: (0.2, 1.0, 2.0, 0.2))
    told(root, **settings)
    return of_settings(judged(root))


def on_gpu(root: Path, *, ranks: int = 1, **settings: Any) -> dict[str, Finding]:
    write_story(root, lambda rank, step: (0.2, 5.0, 10.0, 9.0), ranks=ranks, gpu=0.9, cores=0.5)
    for rank in range(ranks):
        told(root, rank, **settings)
    return of_settings(judged(root))


def with_ddp(root: Path, *, passes: int, no_sync_count: int, **ddp: Any) -> dict[str, Finding]:
    """Two ranks with several micro-steps; what they wrote of DistributedDataParallel."""
    run = write_run(root)
    for rank in range(2):
        micro = ((schema.DATA, 1), (schema.FORWARD, 5), (schema.BACKWARD, 9))
        rows = repeated([*micro * passes, (schema.OPTIMIZER, 2)], 120)
        write_rank(run, spans_from(rows), rank=rank, world_size=2)
        told(root, rank, model={"ddp": ddp}, seen={"no_sync_count": no_sync_count})
    return of_settings(judged(root))


def with_threads(
    root: Path, *, ranks: int = 1, threads: int = 8, **settings: Any
) -> dict[str, Finding]:
    """So many threads for operators on each rank."""
    write_story(root, lambda rank, step: USUAL, ranks=ranks)
    for rank in range(ranks):
        told(root, rank, **settings)
        report(root, rank, operator_threads=threads)
        placed(root, rank, "0-3")
    return of_settings(judged(root))


def with_batches(root: Path, dtype: str) -> dict[str, Finding]:
    write_story(root, lambda rank, step: USUAL)
    note(root, 0, type="root_input", name="GPT", dtypes=[dtype])
    told(root)
    return of_settings(judged(root))


def repeated(
    step: Sequence[tuple[int, float]], count: int, gap_ms: float = 1.0
) -> list[tuple[int, int, int, int]]:
    """Steps of spans (kind, ms), with some time between them."""
    rows, now = [], START_NS
    for kind, ms in [*step] * count:
        rows.append((kind, 2 if kind == schema.GC else 0, now, now + round(ms * NS_PER_MS)))
        now += round((ms + gap_ms) * NS_PER_MS)
    return rows


FULL_PRECISION = {
    "compute_capability": "9.0", "matmul_precision": "highest", "tf32_matmul": "ieee",
    "cudnn_enabled": True, "cudnn_benchmark": False,
}  # fmt: skip
FLOAT32, BFLOAT16 = {"dtypes": {"float32": 900}}, {"dtypes": {"bfloat16": 900, "float32": 10}}
CONVOLUTIONS: dict[str, Any] = {"layers": {"Conv2d": 8}, "dtypes": {"bfloat16": 9}}
NO_SYNC: dict[str, Any] = {"passes": 4, "no_sync_count": 0, "static_graph": False}
PADDED: dict[str, object] = {
    "mask_column_count": 1000, "empty_column_count": 750,
    "mask_token_count": 16_000, "empty_token_count": 14_000,
}  # fmt: skip
EMBEDS = {"layers": {"Embedding": 1, "Linear": 4}}
UNPRICED: dict[str, Any] = {
    "flags": {"deterministic": True, "cudnn_deterministic": True},
    "variables": {"CUDA_LAUNCH_BLOCKING": "1"},
    "optimizer": {"foreach": False, "devices": {"cuda": 40}},
    "seen": {"profiler_count": 100},
}


COUNTS_CALLS = {
    "sets": "sys.setprofile", "function": "Stats.__call__", "file": "/home/me/train.py", "line": 13,
}  # fmt: skip
HOOKED: dict[str, object] = {"hook_look_count": 80, "hooks": [COUNTS_CALLS | {"count": 80}]}
TEACHER = {
    "root": 0, "tensor_count": 32, "number_count": 9000, "stepped_count": 0, "passed_count": 0,
    "complete": True,
}  # fmt: skip


def with_gradients(
    root: Path, *, asks: Iterator[Stack] | None = None, **root_line: Any
) -> dict[str, Finding]:
    """A student and a teacher that are called in turn, and what is left of gradients of these."""
    rows = repeated(
        [(schema.FORWARD, 4), (schema.FORWARD_EVAL, 6), (schema.BACKWARD, 20),
         (schema.OPTIMIZER, 2)], 120,
    )  # fmt: skip
    tags = {schema.FORWARD: 1}
    spans = [(kind, tags.get(kind, 0), begin, end) for kind, _, begin, end in rows]
    write_rank(write_run(root), spans_from(spans))
    note(root, 0, type="unused_gradients", roots=[TEACHER | root_line])
    told(root)
    asks = asks or itertools.repeat((SCRIPT, job(44, "main"), MODULE, FORWARD))
    write_samples(
        root, lambda *at: next(asks) if at[0] == "forward" else (SCRIPT, job(43, "main"), ENGINE)
    )
    return of_settings(judged(root))


CRITIC: dict[str, object] = {
    "root": 2, "tensor_count": 8, "number_count": 9000, "other_count": 0, "by": [2],
}  # fmt: skip


def with_critic(root: Path, /, **root_line: Any) -> dict[str, Finding]:
    """Optimizers of a critic and a generator take turns; some gradients are made in vain."""
    rows = repeated(
        [(schema.FORWARD, 4), (schema.BACKWARD, 8), (schema.OPTIMIZER, 2), (schema.FORWARD, 4),
         (schema.FORWARD, 4), (schema.BACKWARD, 16), (schema.OPTIMIZER, 2)], 120,
    )  # fmt: skip
    tags = (2, 0, 1, 1, 2, 0, 2)
    spans = [(row[0], tags[n % len(tags)], *row[2:]) for n, row in enumerate(rows)]
    write_rank(write_run(root), spans_from(spans))
    note(root, 0, type="discarded_gradients", roots=[CRITIC | root_line])
    told(root)
    asks = (SCRIPT, job(44, "main"), MODULE, FORWARD)
    write_samples(
        root, lambda *at: asks if at[0] == "forward" else (SCRIPT, job(43, "main"), ENGINE)
    )
    return of_settings(judged(root))


def full(**flags: Any) -> dict[str, Any]:
    return {"flags": FULL_PRECISION | flags, "model": FLOAT32}


@pytest.mark.parametrize(
    ("job", "settings", "rules"),
    [
        (on_cpus, {}, ()),
        (on_cpus, {"seen": {"anomaly_count": 100}}, ("anomaly_detection",)),
        (on_cpus, {"seen": {"anomaly_count": 5}}, ()),
        (on_cpus, {"seen": {"profiler_count": 90}}, ("profiler_left_on",)),
        (on_cpus, {"seen": {"profiler_count": 20}}, ()),  # with a schedule
        (on_cpus, {"seen": HOOKED}, ("call_hook",)),
        (on_cpus, {"seen": HOOKED | {"hook_look_count": 2000}}, ()),  # for some steps
        (on_cpus, {"seen": HOOKED | {"hooks": [{"function": "cProfile.Profile", "count": 80}]}},
         ("call_hook",)),
        (with_gradients, {}, ("unused_gradients",)),
        (with_gradients, {"tensor_count": 0}, ()),
        (with_critic, {}, ("discarded_gradients",)),
        (with_critic, {"tensor_count": 0}, ()),
        (on_cpus, {"seen": PADDED}, ("padding",)),
        (on_cpus, {"seen": PADDED | {"empty_column_count": 20}}, ()),  # to a multiple of 8
        (on_cpus, {"model": {"dtypes": {"float64": 900}}}, ("double_precision",)),
        (on_cpus, {"model": {"dtypes": {"float64": 9}, "trainable_count": 0}}, ()),  # a teacher
        (with_batches, {"dtype": "float64"}, ("double_precision",)),
        (with_batches, {"dtype": "float32"}, ()),
        (on_cpus, {"flags": {"mkldnn": False}, "model": {"layers": {"Conv2d": 8}}},
         ("mkldnn_off",)),
        (on_cpus, {"flags": {"mkldnn": False}, "model": {"layers": {"Linear": 8}}}, ()),
        (of_quick_steps, {"flags": {"mkldnn": False}, "model": {"layers": {"Conv2d": 8}}},
         ()),  # small ones may be quicker without
        (on_cpus, {"flags": {"deterministic": True}}, ()),  # from here on: no effect on CPUs
        (on_cpus, {"flags": {"cudnn_deterministic": True, "cudnn_benchmark": False}}, ()),
        (on_cpus, {"variables": {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "1"}}, ()),
        (on_cpus, {"optimizer": {"foreach": False}}, ()),
        (on_cpus, {"flags": {"distributed_debug": "DETAIL"}}, ()),
        (on_cpus, {"seen": PADDED | {"guessed_mask_count": 9}, "model": EMBEDS}, ("padding",)),
        (on_cpus, {"seen": PADDED | {"guessed_mask_count": 9}}, ()),
        (on_cpus, {"flags": {"tracemalloc": True}}, ("tracemalloc",)),
        (on_cpus, {"variables": {"ATEN_CPU_CAPABILITY": "default"}}, ("costly_switches",)),
        (on_cpus, {"variables": {"MALLOC_PERTURB_": "165"}}, ("costly_switches",)),
        (on_cpus, {"variables": {"MALLOC_PERTURB_": "0"}}, ()),
        (on_cpus, {"variables": {"ATEN_CPU_CAPABILITY": "avx2"}}, ()),  # of AVX512: no slower
        (on_cpus, {"variables": {"ONEDNN_MAX_CPU_ISA": "SSE41"}}, ("costly_switches",)),
        (on_cpus, {"variables": {"ONEDNN_MAX_CPU_ISA": "ALL"}}, ()),
        (long_updates, {}, ("unfused_adam",)),
        (long_updates, {"optimizer": {"mixed": True}}, ()),  # DTensors and others: it refuses
        (long_updates, {"optimizer": {"fused": True}}, ()),
        (long_updates, {"optimizer": {"name": "SGD"}}, ()),  # which gains nothing
        (on_gpu, UNPRICED,
         ("costly_switches", "deterministic_mode", "optimizer_loop", "profiler_left_on")),
        (on_gpu, {"variables": {"CUDA_LAUNCH_BLOCKING": "0", "NCCL_P2P_DISABLE": "1"}}, ()),
        (on_gpu, full(), ("fast_paths_off",)),
        (on_gpu, full(compute_capability="7.0"), ()),
        (on_gpu, full(compute_capability=None), ()),
        (on_gpu, full(matmul_precision="high"), ()),
        (on_gpu, full(tf32_matmul="tf32"), ()),
        (on_gpu, {"flags": FULL_PRECISION, "model": BFLOAT16}, ()),
        (on_gpu, {"flags": FULL_PRECISION, "model": CONVOLUTIONS}, ("fast_paths_off",)),
        (on_gpu, {"flags": FULL_PRECISION | {"cudnn_deterministic": True}, "model": CONVOLUTIONS},
         ("deterministic_mode",)),
        (on_gpu, {"ranks": 2, "model": {"fsdp_unit_count": 1}}, ("fsdp_units",)),
        (on_gpu, {"ranks": 2, "model": {"fsdp_unit_count": 13}}, ()),
        (on_gpu, {"ranks": 2, "model": {"fsdp_unit_count": 0}}, ()),
        (with_threads, {"cores": 8}, ()),
        (with_threads, {"cores": 8, "threads": 1}, ("threads_under_cores",)),
        (with_threads, {"cores": 8, "threads": 1, "cpu_limit_cores": 1.0}, ()),
        (with_threads, {"cores": 4, "threads": 1, "ranks": 4}, ()),  # they share these cores
        (on_cpus, HALF | {"flags": {"cpu_half": "bfloat16"}}, ("half_precision",)),
        (on_cpus, HALF | {"flags": {"cpu_half": "bfloat16 float16"}}, ()),
        (on_cpus, HALF, ()),  # of what the CPU can do nothing is known
        (with_threads, {"cores": 8, "cpu_limit_cores": 2.0}, ("threads_over_cores",)),
        (with_threads, {"cores": 4}, ("threads_over_cores",)),
        (with_ddp, NO_SYNC, ("ddp_arguments",)),
        (with_ddp, NO_SYNC | {"no_sync_count": 40}, ()),
        (with_ddp, NO_SYNC | {"passes": 1}, ()),
    ],
)  # fmt: skip
def test_a_setting_is_told_where_it_has_an_effect(
    root: Path, job: Callable[..., dict[str, Finding]], settings: Any, rules: tuple[str, ...]
) -> None:
    found = job(root, **copy.deepcopy(settings))
    assert tuple(sorted(found)) == rules
    if settings is UNPRICED:
        for finding in found.values():
            assert (finding.severity, finding.lost_ratio) == ("info", None), finding.rule
            assert any("not measured" in lack for lack in finding.missing), finding.rule


@pytest.mark.parametrize(
    ("source", "changed", "at"),
    [
        ("\ntorch.autograd.set_detect_anomaly(True)\nm(x)\n", 0, "train.py:2 <module>"),
        ("# set_detect_anomaly(True)\ndef main():\n  with log('detect_anomaly('), torch\\\n"
         "    .autograd.detect_anomaly():\n    m(x)\n", 0, "train.py:4 main"),
        ("fit = Trainer(\n  callbacks=[Log('\\d')],\n  detect_anomaly=True)\nm(x)\n", 0,
         "train.py:1 <module>"),
        ("set_detect_anomaly(False)\nm(x)\n", 0, None),
        ("set_detect_anomaly(True)\nset_detect_anomaly(mode)\nm(x)\n", 0, None),  # either
        ("set_detect_anomaly(True)\nm(x)\n", 1, None),  # after the job had begun
        ("set_detect_anomaly(True)\nm(y)\n", 0, None),  # it is not what the job ran
        ("set_detect_anomaly(True\nm(x)\n", 0, None),
        (None, 0, None),
    ],
)  # fmt: skip
def test_the_line_of_a_setting_is_named_where_one_alone_sets_it(
    root: Path, source: str | None, changed: int, at: str | None
) -> None:
    write_story(root, lambda rank, step: USUAL)
    told(root, seen={"anomaly_count": 100})
    script = root.with_name("train.py")
    if source is not None:
        script.write_text(source)
        os.utime(script, ns=(0, CLOCK.wall_ns + changed))
    stack = ((str(script), 40, "main", "m(x)"),)
    samples = [(START_NS + i * 10 * NS_PER_MS, stack) for i in range(60)]
    write_stacks(RunPaths(root).rank(0).stacks, samples)
    found = of_settings(judged(root))["anomaly_detection"]
    assert [line.location for line in found.code_lines] == ([at] if at else [])
    if at:
        low, high = found.code_lines[0].low, found.code_lines[0].high
        assert (low or 0.0) < (found.code_lines[0].share or 0.0) < (high or 0.0)


@pytest.mark.parametrize(
    ("setting", "source"),
    [
        (SETS_FLOAT64, "model.double()"),
        (SETS_FLOAT64, "model.to(device, dtype=torch.float64)"),
        (SETS_FLOAT64, "torch.set_default_dtype(torch.double)"),
        (SETS_FLOAT64, "nn.Linear(3, 4, dtype=torch.float64)"),
        (MAKES_LOADER, "torch.utils.data.DataLoader(data, num_workers=2)"),
        (SETS_THREADS, "torch.set_num_threads(8)"),
    ],
)
def test_a_setting_is_found_as_people_write_it(tmp_path: Path, setting: str, source: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"x = 1.0\n{source}\n")
    tree, _ = tree_of([((str(script), 1, "<module>"),)])
    since_ns = script.stat().st_mtime_ns
    assert find_statement(tree, setting, since_ns) == (str(script), 2, "<module>")


def test_run_without_recorded_settings_abstains(root: Path) -> None:
    write_story(root, lambda rank, step: USUAL)
    verdict = judged(root)
    assert not of_settings(verdict)
    assert {rule for rule, _ in verdict.abstained} >= RULES


def test_a_setting_costs_its_least_price(root: Path) -> None:
    anomaly = on_cpus(root, seen={"anomaly_count": 100})["anomaly_detection"]
    whole, least = sum(USUAL) + 4 * 0.2, PRICES["anomaly"].least
    expected = (USUAL[1] + USUAL[2]) / whole * (1 - 1 / least)
    assert anomaly.lost_ratio == pytest.approx(expected, rel=0.05)
    assert (anomaly.severity, anomaly.gain is None) == ("warning", False)
    double = on_gpu(root.with_name("gpu"), model={"dtypes": {"float64": 1000}})["double_precision"]
    assert double.lost_ratio == pytest.approx(0.45, abs=0.03)
    double = on_cpus(root.with_name("cpus"), model={"dtypes": {"float64": 1000}})[
        "double_precision"
    ]
    assert double.lost_ratio == pytest.approx(0.48, abs=0.03), "half of what is not calling"
    padded = on_cpus(root.with_name("padded"), seen=PADDED)["padding"]
    assert padded.lost_ratio == pytest.approx(0.75 * 0.98 * (USUAL[1] + USUAL[2]) / whole, rel=0.05)
    assert [row.value for row in padded.evidence] == pytest.approx([0.875, 0.5])
    ddp = {"passes": 1, "no_sync_count": 0, "find_unused_parameters": True}
    unused = with_ddp(root.with_name("ddp"), **ddp)["ddp_arguments"]
    assert (unused.cause, unused.lost_ratio is None) == ("find_unused_parameters", False)


@pytest.mark.parametrize(
    ("left", "gain_ms", "advice"),
    [
        ({}, 0.6 * 20, "torch.no_grad()"),  # by its share of forward
        ({"stepped_count": 3}, None, "torch.no_grad()"),  # which part is theirs is not known
        ({"complete": False}, None, "torch.no_grad()"),
        ({"passed_count": None}, None, "torch.no_grad()"),
        ({"passed_count": 32}, None, "no torch.no_grad()"),  # a loss that is a network
    ],
)
def test_gradients_that_no_optimizer_uses_gain_what_is_known_of_their_backward(
    root: Path, left: dict[str, Any], gain_ms: float | None, advice: str
) -> None:
    found = with_gradients(root, **left)["unused_gradients"]
    assert [row.value for row in found.evidence][:2] == [32, 9000]
    assert "32 parameters of GPT in no param group" in found.title
    assert advice in found.remedy
    assert ("no torch.no_grad()" in found.remedy) is (left.get("passed_count") == 32)
    assert "wait: link" not in {each.activity for each in ledger_of(judged(root)).accounts}, (
        "one rank"
    )
    if gain_ms is None:
        assert (found.gain, found.severity, len(found.missing)) == (None, "info", 1)
    else:
        gain_ns = saved_ns(found)
        assert found.gain is not None
        assert gain_ns == pytest.approx(gain_ms * NS_PER_MS, rel=0.1)
        assert found.gain.step_ns - found.gain.high_ns < 0.8 * gain_ns, "it rests on forward"
        assert found.severity == "critical"
        assert found.code_lines[0].callers == ("train.py:44 main", "train.py:300 <module>")


def test_a_model_that_is_spread_over_lines_is_named_by_what_calls_it(root: Path) -> None:
    """None of its own four lines has most of its forward."""
    lines = itertools.cycle([(SCRIPT, job(44, "main"), MODULE, job(n, "Net.forward"))
                             for n in (7, 8, 9, 10)])  # fmt: skip
    found = with_gradients(root, asks=lines)["unused_gradients"]
    assert found.code_lines[0].location == "train.py:44 main"


def test_gradients_made_in_vain_gain_their_part_of_the_passes_that_make_them(root: Path) -> None:
    """Half of that pass's forward is the critic's, and the pass two thirds of all backward."""
    found = with_critic(root)["discarded_gradients"]
    assert saved_ns(found) == pytest.approx(0.43 * 1 / 2 * 2 / 3 * 24 * NS_PER_MS, rel=0.1)
    assert "requires_grad_(False)" in found.remedy
    assert found.code_lines[0].callers == ("train.py:44 main", "train.py:300 <module>")


@pytest.mark.parametrize("line", [{"root": 7}, {"other_count": 1}], ids=["no call", "others"])
def test_gradients_made_in_vain_gain_nothing_known_where_their_part_is_not(
    root: Path, line: dict[str, int]
) -> None:
    found = with_critic(root, **line)["discarded_gradients"]
    assert (found.gain, found.severity, len(found.missing)) == (None, "info", 1)


def test_what_runs_in_a_hook_is_not_charged_to_the_lines_that_it_interrupts(root: Path) -> None:
    """Every other sample in the dataset is in the function that Python calls at each call."""
    write_story(root, lambda rank, step: (8.0, 10.0, 20.0, 2.0), steps=200)
    told(root, seen=HOOKED)
    item, hook = job(31, "Tagged.__getitem__"), job(18, "Stats.__call__")

    def at(phase: str, step: int) -> Stack:
        if phase != "dataloader":
            return (SCRIPT, job(43, "main"), ENGINE)
        return (SCRIPT, item, hook) if step % 2 else (SCRIPT, item)

    write_samples(root, at, lock="h")
    found = {each.rule: each for each in judged(root).findings}
    gains = {name: saved_ns(each) for name, each in found.items() if each.gain is not None}
    assert gains["call_hook"] == pytest.approx(4 * NS_PER_MS, rel=0.1)
    assert gains["dataloader_bound"] == pytest.approx(4 * NS_PER_MS, rel=0.1)
    assert "train.py:13 Stats.__call__" in found["call_hook"].title
    assert "costs at least" in found["call_hook"].title
    assert len(found["call_hook"].missing) == 1


def test_a_hook_in_c_is_a_fact_without_a_price(root: Path) -> None:
    hook = {"sets": "sys.settrace", "function": "coverage.tracer.CTracer", "count": 80}
    found = on_cpus(root, seen=HOOKED | {"hooks": [hook]})["call_hook"]
    assert "sys.settrace is on: coverage.tracer.CTracer is called" in found.title
    assert (found.gain, found.severity, len(found.missing)) == (None, "info", 1)


@pytest.mark.parametrize(
    ("passes", "looks", "late_ms", "spared_ms"),
    [
        (4, 0, (3.0, 3.0), 3 * 6.0),
        (4, 0, (3.0, 5.0), 3 * 4.0),  # nobody waits for the link before the last rank is there
        (4, 40, (3.0, 3.0), 3 * 6.0),  # in no_sync, but for its forward
        (1, 0, (3.0, 3.0), 0.0),
    ],
)
def test_accumulation_without_no_sync_is_told_before_the_link_and_nothing_is_promised_twice(
    root: Path, passes: int, looks: int, late_ms: tuple[float, float], spared_ms: float
) -> None:
    """Each backward of 9 ms ends with an exchange, and all but the last of a step's can go."""
    with_ddp(root, **NO_SYNC | {"passes": passes, "no_sync_count": looks})
    for rank in range(2):
        write_samples(root, lambda *_: (SCRIPT, job(43, "main"), ENGINE), rank=rank)
    write_collectives(root, late_ms)
    found = {each.rule: each for each in judged(root).findings}
    gains = {name: saved_ns(each) for name, each in found.items() if each.gain is not None}
    assert gains.get("ddp_arguments", 0.0) == pytest.approx(spared_ms * NS_PER_MS, rel=0.1)
    left_ms = 9 - max(late_ms) - LINK_USUAL_NS / NS_PER_MS
    assert gains["link_bound"] == pytest.approx(left_ms * NS_PER_MS, rel=0.2), "of one exchange"
    if passes > 1:
        no_sync = found["ddp_arguments"]
        assert next(iter(found)) == "ddp_arguments"
        assert (no_sync.cause, no_sync.severity != "info", no_sync.missing) == ("no_sync", True, ())


def test_a_forward_after_the_optimizer_of_a_batch_is_an_evaluation(root: Path) -> None:
    """Its output, `accuracy(model(x), y)`, has no backward; a second loss's forward has one."""
    train = [(schema.DATA, 1), (schema.FORWARD, 5), (schema.BACKWARD, 9), (schema.OPTIMIZER, 2)]
    for name, more, evaluation_ms in (
        ("looks", [(schema.FORWARD, 5)], 5.0),
        ("trains", [*train[1:]], 0.0),
    ):
        run = write_run(root.with_name(name))
        write_rank(run, spans_from(repeated([*train, *more], 120)))
        found = ledger_of(judged(run.root)).positions.get("evaluation", 0.0)
        assert found == pytest.approx(evaluation_ms * NS_PER_MS, rel=0.05)


def test_without_padding_calls_are_as_many_as_before(root: Path) -> None:
    """About a fifth of the model is Python, which gains nothing; operators may need calls, too."""
    write_story(root, lambda rank, step: USUAL, steps=200)
    told(root, seen=PADDED)
    write_samples(root, lambda *_: (SCRIPT, job(43, "main"), ENGINE), lock="h000")
    gain = {each.rule: each for each in judged(root).findings}["padding"].gain
    assert gain is not None
    whole_ns = 0.75 * 0.98 * (USUAL[1] + USUAL[2]) * NS_PER_MS
    calls_ns = whole_ns - (gain.step_ns - gain.left_ns)
    assert calls_ns == pytest.approx(whole_ns / 5, rel=0.2)
    assert gain.high_ns - gain.left_ns > 2 * calls_ns


def test_titles_and_remedies_name_what_is_set(root: Path) -> None:
    profiler = on_cpus(root, seen={"profiler_count": 90})["profiler_left_on"]
    assert profiler.title.endswith("is on 90 % of the time")
    no_sync = with_ddp(root.with_name("ddp"), **NO_SYNC)["ddp_arguments"]
    assert no_sync.cause == "no_sync"
    batches = with_batches(root.with_name("batches"), "float64")["double_precision"]
    assert (batches.cause, batches.severity, batches.lost_ratio) == ("batches", "info", None)
    shared = with_threads(root.with_name("shared"), ranks=2, cores=4)["threads_over_cores"]
    assert "OMP_NUM_THREADS=2 " in shared.remedy
    limited = with_threads(root.with_name("limited"), cores=8, cpu_limit_cores=3.0)
    assert "OMP_NUM_THREADS=3" in limited["threads_over_cores"].remedy
    half = on_cpus(root.with_name("half"), **HALF, flags={"cpu_half": "neither"})["half_precision"]
    assert half.severity == "critical"
    assert half.lost_ratio == pytest.approx((1 - 1 / PRICES["float16"].least) * 30 / 32.2, rel=0.05)
    path = on_gpu(
        root.with_name("path"), ranks=2, flags={"backend": "nccl"},
        variables={"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
    )["costly_switches"]  # fmt: skip
    assert "NCCL_P2P_DISABLE" in path.title
    assert "NCCL_IB_DISABLE" not in path.title  # of one node


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ({"flags": {"deterministic": True}}, "use_deterministic_algorithms True in place of False"),
        ({"optimizer": {"foreach": False}}, "foreach"),
        ({"optimizers": []}, None),  # the job had ended, and with it its optimizer
    ],
)
def test_a_rank_with_other_settings_is_named(
    root: Path, change: dict[str, Any], title: str | None
) -> None:
    write_story(root, lambda rank, step: USUAL, ranks=3)
    for rank in range(3):
        told(root, rank, **(copy.deepcopy(change) if rank == 2 else {}))
    found = of_settings(judged(root)).get("settings_differ")
    assert (found is None) is (title is None)
    if found is not None:
        assert (found.rank, found.severity) == (2, "info")
        assert (title or "") in found.title


def test_notes_of_a_short_run_stand_in_the_order_of_what_they_cost(root: Path) -> None:
    slow, waits = (0.2, 80.0, 20.0, 2.0), (0.2, 10.0, 90.0, 2.0)
    write_story(root, lambda rank, step: slow if rank == 1 else waits, ranks=2, steps=6)
    told(root, 0)
    told(root, 1, optimizer={"foreach": False})  # costs nothing that is known, and is surer
    rules = [finding.rule for finding in judged(root).findings]
    assert rules.index("ranks_uneven") < rules.index("settings_differ")


def test_pauses_that_the_job_asked_for_are_told_as_its_own(root: Path) -> None:
    step = ((schema.FORWARD, 5), (schema.BACKWARD, 9), (schema.OPTIMIZER, 2), (schema.GC, 8))
    write_rank(write_run(root), spans_from(repeated(step, 100)))
    line = {"collect_file": "/job/train.py", "collect_line": 7, "collect_function": "tidy"}
    told(root, seen={"collect_count": 100, "collect_ns": 8 * NS_PER_S // 10} | line)
    finding = next(f for f in judged(root).findings if f.rule == "garbage_collection")
    assert finding.cause == "explicit"
    assert "gc.collect()" in finding.remedy
    assert "tidy (train.py:7)" in finding.title
    told(root, seen={"collect_count": 100, "collect_ns": 8 * NS_PER_S // 10} | line
         | {"collect_function": "<module>"})  # fmt: skip
    finding = next(f for f in judged(root).findings if f.rule == "garbage_collection")
    assert "called by the script (train.py:7)" in finding.title


def test_compiling_evaluation_is_compilation(root: Path) -> None:
    step = ((schema.DATA, 1), (schema.FORWARD, 5), (schema.BACKWARD, 9), (schema.OPTIMIZER, 2))
    rows = repeated(step, 60)
    evaluated = rows[-1][3] + NS_PER_MS
    rows.append((schema.EVAL, 0, evaluated, evaluated + 3 * NS_PER_S))
    later = evaluated + 3 * NS_PER_S + NS_PER_MS - START_NS
    rows += [(kind, tag, at + later, end + later) for kind, tag, at, end in repeated(step, 140)]
    wall_us = (evaluated - CLOCK.mono_ns + CLOCK.wall_ns) // 1_000
    line = {"type": "compile", "time_ns": rows[-1][3], "count": 1, "spent_ns": 2_900_000_000,
            "spans": [[wall_us, 2_900_000]]}  # fmt: skip
    write_rank(write_run(root), spans_from(rows), lines=[line])
    verdict = judged(root)
    assert "evaluation_heavy" not in [f.rule for f in verdict.findings if f.severity != "info"]
    assert verdict.compile_ns == pytest.approx(2.9 * NS_PER_S)
    assert verdict.evaluation_ns == pytest.approx(0.1 * NS_PER_S, rel=0.1)


@pytest.mark.parametrize(
    ("beside", "others", "is_said"), [(0.2, 0.2, True), (2.6, 0.0, False), (0.2, 2.5, False)]
)
def test_more_threads_are_not_advised_where_workers_or_others_use_the_cores(
    root: Path, beside: float, others: float, is_said: bool
) -> None:
    busy = 0.9 + beside + others
    with_threads(root, threads=1)
    counters(root, lambda s, _: {"cpu_ns": (0.9 + beside) * (s + 9) * NS_PER_S,
                                 "cpu_main_ns": 0.9 * (s + 9) * NS_PER_S},
             host=lambda s: {"cpu_user_ns": int(busy * (s + 9) * NS_PER_S), "cpu_count": 4,
                             "cpu_idle_ns": int((4 - busy) * (s + 9) * NS_PER_S)})  # fmt: skip
    assert ("threads_under_cores" in of_settings(judged(root))) is is_said


@pytest.mark.parametrize(
    ("ranks", "variables", "says"),
    [
        (2, {"OMP_NUM_THREADS": "1"}, "or torch.set_num_threads(4): OMP_NUM_THREADS is 1 there, "
         "as torchrun sets it"),
        (1, {"OMP_NUM_THREADS": "1"}, "or torch.set_num_threads(8): OMP_NUM_THREADS is 1 there"),
        (1, {}, "the job sets fewer"),
        (1, {"OMP_NUM_THREADS": "8"}, "the job itself sets fewer than OMP_NUM_THREADS"),
    ],
)  # fmt: skip
def test_who_sets_few_threads_is_told_by_the_variable(
    root: Path, ranks: int, variables: dict[str, str], says: str
) -> None:
    """torchrun sets one thread for several ranks alone."""
    found = with_threads(root, ranks=ranks, cores=8, threads=1, variables=variables)
    assert found["threads_under_cores"].remedy.endswith(says) or not variables
    assert says in found["threads_under_cores"].remedy


@pytest.mark.parametrize(
    ("passes", "ms", "is_said"), [(96, 0.2, True), (96, 5.0, False), (2, 0.2, False)]
)
def test_many_short_passes_in_one_step_are_told(
    root: Path, passes: int, ms: float, is_said: bool
) -> None:
    """As of a job that needs the gradients of each sample."""
    micro = ((schema.FORWARD, ms), (schema.BACKWARD, 2 * ms))
    rows = repeated([*micro * passes, (schema.OPTIMIZER, ms)], 60, gap_ms=0.05)
    write_rank(write_run(root), spans_from(rows))
    said = f"{passes} forward and backward passes of 650 µs each in one optimizer step: "
    assert any(said in note for note in judged(root).notes) is is_said


@pytest.mark.parametrize(
    ("name", "fused", "layer", "hints"),
    [
        ("Adam", True, "Linear", ""),
        ("SparseAdam", None, "Embedding", ""),
        ("Adam", True, "Embedding",
         "sparse=True with SparseAdam leaves out what a large embedding did not use"),
    ],
)  # fmt: skip
def test_an_optimizer_that_takes_more_than_the_model_is_the_headline(
    root: Path, name: str, fused: bool | None, layer: str, hints: str
) -> None:
    """No change of the job's own code removes it, but a setting or another optimizer may."""
    write_story(root, lambda *_: (0.2, 5.0, 10.0, 30.0))
    told(root, optimizer={"name": name, "fused": fused}, model={"layers": {layer: 1}})
    verdict = judged(root)
    takes = "the optimizer takes 65 % of the step, more than forward and backward"
    updates = f": it updates all parameters, used or not ({hints})" if hints else ""
    assert verdict.headline == takes + updates
    assert {finding.severity for finding in verdict.findings} <= {"info"}


def test_passes_that_exchange_nothing_wait_for_no_link(root: Path) -> None:
    """Of four passes of 9 ms the last one ends with an exchange of 6 ms."""
    with_ddp(root, **NO_SYNC | {"passes": 4, "no_sync_count": 3})
    for rank in range(2):
        write_samples(root, lambda *_: (SCRIPT, job(43, "main"), ENGINE), rank=rank)
    write_collectives(root, (3.0, 3.0), every=4)
    ledger = ledger_of(judged(root))
    waits = sum(each.ns_per_step for each in ledger.accounts if each.activity == "wait: link")
    assert waits == pytest.approx(6 * NS_PER_MS, rel=0.1)
