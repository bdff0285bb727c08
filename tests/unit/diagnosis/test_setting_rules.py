"""Rules on settings: told with their price, silent without effect, never with a made-up number."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from haiprof.base.units import NS_PER_S
from haiprof.diagnosis.settings_facts import PRICES
from haiprof.diagnosis.verdict import Finding, Verdict
from haiprof.run_format.setting_lines import FLAGS
from tests.unit.diagnosis.stories import START_NS, judged, note, placed, write_story

USUAL = (0.2, 10.0, 20.0, 2.0)
RULES = {
    "anomaly_detection", "profiler_left_on", "costly_switches", "double_precision",
    "deterministic_mode", "mkldnn_off", "optimizer_loop", "ddp_arguments", "threads_over_cores",
    "settings_differ", "fast_paths_off", "fsdp_units",
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
SEEN = {
    "type": "settings_seen", "look_count": 100, "anomaly_count": 0, "profiler_count": 0,
    "no_sync_count": 0, "collect_count": 0, "collect_ns": 0,
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def told(root: Path, rank: int = 0, *, seen: dict[str, int] | None = None, **changes: Any) -> None:
    """Settings of a rank; `flags`, `model` and `optimizer` change some of their entries."""
    line = copy.deepcopy(LINE)
    line["flags"].update(changes.pop("flags", {}))
    line["models"][0].update(changes.pop("model", {}))
    line["optimizers"][0].update(changes.pop("optimizer", {}))
    variables = changes.pop("variables", {})
    note(root, rank, type="environment", variables=variables)
    note(root, rank, **(line | changes))
    note(root, rank, **(SEEN | (seen or {})))


def threads(root: Path, count: int, *, rank: int = 0) -> None:
    path = root / "ranks" / str(rank) / "rank.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "operator_threads": count}))


def of_settings(verdict: Verdict) -> dict[str, Finding]:
    return {found.rule: found for found in verdict.findings if found.rule in RULES}


def story(root: Path, **settings: Any) -> dict[str, Finding]:
    """Findings on settings of a job on CPUs with one rank."""
    write_story(root, lambda rank, step: USUAL)
    told(root, **settings)
    return of_settings(judged(root))


def test_usual_settings_are_no_finding(root: Path) -> None:
    assert story(root) == {}


def test_run_without_recorded_settings_abstains(root: Path) -> None:
    write_story(root, lambda rank, step: USUAL)
    verdict = judged(root)
    assert not of_settings(verdict)
    assert {rule for rule, _ in verdict.abstained} >= RULES


def test_anomaly_detection_costs_its_least_price(root: Path) -> None:
    finding = story(root, seen={"anomaly_count": 100})["anomaly_detection"]
    whole, least = sum(USUAL) + 4 * 0.2, PRICES["anomaly"].least
    expected = (USUAL[1] + USUAL[2]) / whole * (1 - 1 / least)
    assert finding.lost_ratio == pytest.approx(expected, rel=0.05)
    assert finding.severity == "warning"
    assert "set_detect_anomaly" in finding.remedy


def test_anomaly_detection_of_a_few_steps_is_silent(root: Path) -> None:
    assert story(root, seen={"anomaly_count": 5}) == {}


def test_profiler_with_a_schedule_is_silent_and_one_left_on_is_told(root: Path) -> None:
    assert story(root, seen={"profiler_count": 20}) == {}


def test_profiler_left_on_is_told(root: Path) -> None:
    finding = story(root, seen={"profiler_count": 90})["profiler_left_on"]
    assert "schedule" in finding.remedy
    assert finding.title.endswith("is on 90 % of the time")


def test_float64_is_told_with_its_share_of_the_step(root: Path) -> None:
    finding = story(root, model={"dtypes": {"float64": 900, "float32": 100}})["double_precision"]
    assert finding.evidence[0].value == pytest.approx(0.9)
    assert finding.lost_ratio is not None
    assert 0.05 < finding.lost_ratio < 0.9


def test_a_frozen_float64_teacher_is_silent(root: Path) -> None:
    changes = {"dtypes": {"float64": 1000}, "trainable_count": 0}
    assert story(root, model=changes) == {}


@pytest.mark.parametrize(("dtype", "fires"), [("float64", True), ("float32", False)])
def test_batches_in_float64_are_a_note(root: Path, dtype: str, fires: bool) -> None:
    write_story(root, lambda rank, step: USUAL)
    note(root, 0, type="root_input", name="GPT", dtypes=[dtype])
    told(root)
    found = of_settings(judged(root))
    assert ("double_precision" in found) is fires
    if fires:
        finding = found["double_precision"]
        assert (finding.cause, finding.severity, finding.lost_ratio) == ("batches", "info", None)


@pytest.mark.parametrize(("layers", "fires"), [({"Conv2d": 8}, True), ({"Linear": 8}, False)])
def test_mkldnn_off_concerns_convolutions(root: Path, layers: dict[str, int], fires: bool) -> None:
    found = story(root, flags={"mkldnn": False}, model={"layers": layers})
    assert ("mkldnn_off" in found) is fires


@pytest.mark.parametrize(
    "settings",
    [
        {"flags": {"deterministic": True}},
        {"flags": {"cudnn_deterministic": True, "cudnn_benchmark": False}},
        {"variables": {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "1"}},
        {"optimizer": {"foreach": False}},
        {"flags": {"distributed_debug": "DETAIL"}},
    ],
)
def test_settings_without_effect_on_a_job_on_cpus_are_silent(
    root: Path, settings: dict[str, Any]
) -> None:
    assert story(root, **settings) == {}


def gpu_story(root: Path, *, ranks: int = 1, **settings: Any) -> dict[str, Finding]:
    write_story(root, lambda rank, step: (0.2, 5.0, 10.0, 9.0), ranks=ranks, gpu=0.9, cores=0.5)
    for rank in range(ranks):
        told(root, rank, **settings)
    return of_settings(judged(root))


def test_prices_that_are_not_known_are_notes_that_say_so(root: Path) -> None:
    found = gpu_story(
        root,
        flags={"deterministic": True, "cudnn_deterministic": True},
        variables={"CUDA_LAUNCH_BLOCKING": "1"},
        optimizer={"foreach": False, "devices": {"cuda": 40}},
        seen={"profiler_count": 100},
    )
    names = {"deterministic_mode", "costly_switches", "optimizer_loop", "profiler_left_on"}
    assert found.keys() == names
    for finding in found.values():
        assert (finding.severity, finding.lost_ratio) == ("info", None), finding.rule
        assert any("not measured" in lack for lack in finding.missing), finding.rule


def test_switched_off_variables_are_silent_on_a_gpu(root: Path) -> None:
    assert gpu_story(root, variables={"CUDA_LAUNCH_BLOCKING": "0", "NCCL_P2P_DISABLE": "1"}) == {}


FULL_PRECISION = {
    "compute_capability": "9.0", "matmul_precision": "highest", "tf32_matmul": "ieee",
    "cudnn_enabled": True, "cudnn_benchmark": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "dtypes", "said"),
    [
        ({}, {"float32": 900}, ["tensor cores"]),
        ({"compute_capability": "7.0"}, {"float32": 900}, []),
        ({"compute_capability": None}, {"float32": 900}, []),
        ({"matmul_precision": "high"}, {"float32": 900}, []),
        ({"tf32_matmul": "tf32"}, {"float32": 900}, []),
        ({}, {"bfloat16": 900, "float32": 10}, []),
    ],
)
def test_products_that_could_be_in_tf32_are_a_note(
    root: Path, flags: dict[str, Any], dtypes: dict[str, int], said: list[str]
) -> None:
    found = gpu_story(root, flags={**FULL_PRECISION, **flags}, model={"dtypes": dtypes})
    finding = found.get("fast_paths_off")
    assert [word for word in ("tensor cores", "cuDNN") if finding and word in finding.title] == said
    assert finding is None or (finding.severity, finding.lost_ratio) == ("info", None)


def test_convolutions_without_a_search_are_a_note_unless_they_must_be_deterministic(
    root: Path,
) -> None:
    changes: dict[str, Any] = {"model": {"layers": {"Conv2d": 8}, "dtypes": {"bfloat16": 9}}}
    assert "cuDNN" in gpu_story(root, flags=FULL_PRECISION, **changes)["fast_paths_off"].title
    flags = {**FULL_PRECISION, "cudnn_deterministic": True}
    other = gpu_story(root.parent / "deterministic", flags=flags, **changes)
    assert "fast_paths_off" not in other


@pytest.mark.parametrize(("units", "fires"), [(1, True), (13, False), (0, False)])
def test_fsdp_with_one_unit_is_a_note(root: Path, units: int, fires: bool) -> None:
    found = gpu_story(root, ranks=2, model={"fsdp_unit_count": units})
    assert ("fsdp_units" in found) is fires


def test_float64_on_a_busy_gpu_costs_half_of_what_it_computes(root: Path) -> None:
    finding = gpu_story(root, model={"dtypes": {"float64": 1000}})["double_precision"]
    assert finding.lost_ratio == pytest.approx(0.45, abs=0.03)


def test_disabled_path_between_gpus_of_a_node_is_told(root: Path) -> None:
    found = gpu_story(
        root, ranks=2, flags={"backend": "nccl"},
        variables={"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
    )  # fmt: skip
    assert "NCCL_P2P_DISABLE" in found["costly_switches"].title
    assert "NCCL_IB_DISABLE" not in found["costly_switches"].title


@pytest.mark.parametrize(
    ("cores", "limit", "fires"), [(8, None, False), (8, 2.0, True), (4, None, True)]
)
def test_threads_beyond_cores_or_limit_are_noted(
    root: Path, cores: int, limit: float | None, fires: bool
) -> None:
    write_story(root, lambda rank, step: USUAL)
    told(root, cores=cores, cpu_limit_cores=limit)
    threads(root, 8)
    found = of_settings(judged(root))
    assert ("threads_over_cores" in found) is fires
    if fires:
        assert f"OMP_NUM_THREADS={int(limit or cores)}" in found["threads_over_cores"].remedy


def test_threads_are_asked_to_fit_all_ranks_that_share_the_cores(root: Path) -> None:
    write_story(root, lambda rank, step: USUAL, ranks=2)
    for rank in range(2):
        told(root, rank, cores=4)
        threads(root, 8, rank=rank)
        placed(root, rank, "0-3")
    assert "OMP_NUM_THREADS=2 " in of_settings(judged(root))["threads_over_cores"].remedy


def ddp_story(root: Path, *, passes: int, no_sync_count: int, **ddp: Any) -> dict[str, Finding]:
    """Two ranks with several micro-steps; what they wrote of DistributedDataParallel."""
    from haiprof.run_format import schema
    from tests.unit.analysis.recorded import spans_from, write_rank, write_run

    run = write_run(root)
    for rank in range(2):
        rows, now = [], START_NS
        for _ in range(120):
            micro = ((schema.DATA, 1), (schema.FORWARD, 5), (schema.BACKWARD, 9))
            for kind, ms in (*micro * passes, (schema.OPTIMIZER, 2)):
                rows.append((kind, 0, now, now + ms * 1_000_000))
                now += (ms + 1) * 1_000_000
        write_rank(run, spans_from(rows), rank=rank, world_size=2)
        told(root, rank, model={"ddp": ddp}, seen={"no_sync_count": no_sync_count})
    return of_settings(judged(root))


@pytest.mark.parametrize(
    ("passes", "no_sync_count", "fires"), [(4, 0, True), (4, 40, False), (1, 0, False)]
)
def test_accumulation_without_no_sync_is_told(
    root: Path, passes: int, no_sync_count: int, fires: bool
) -> None:
    found = ddp_story(root, passes=passes, no_sync_count=no_sync_count, static_graph=False)
    assert ("ddp_arguments" in found) is fires
    if fires:
        assert found["ddp_arguments"].cause == "no_sync"


def test_find_unused_parameters_is_told_with_its_price(root: Path) -> None:
    found = ddp_story(root, passes=1, no_sync_count=0, find_unused_parameters=True)
    assert found["ddp_arguments"].cause == "find_unused_parameters"
    assert found["ddp_arguments"].lost_ratio is not None


def test_a_rank_with_other_settings_is_named(root: Path) -> None:
    write_story(root, lambda rank, step: USUAL, ranks=3)
    for rank in range(3):
        told(root, rank, flags={"deterministic": rank == 2})
    finding = of_settings(judged(root))["settings_differ"]
    assert (finding.rank, finding.severity) == (2, "info")
    assert "use_deterministic_algorithms True in place of False" in finding.title


def test_notes_of_a_short_run_stand_in_the_order_of_what_they_cost(root: Path) -> None:
    slow, waits = (0.2, 80.0, 20.0, 2.0), (0.2, 10.0, 90.0, 2.0)
    write_story(root, lambda rank, step: slow if rank == 1 else waits, ranks=2, steps=6)
    told(root, 0)
    told(root, 1, optimizer={"foreach": False})  # costs nothing that is known, and is surer
    rules = [finding.rule for finding in judged(root).findings]
    assert rules.index("ranks_uneven") < rules.index("settings_differ")


@pytest.mark.parametrize(("gone", "is_found"), [(True, False), (False, True)])
def test_ranks_differ_by_an_optimizer_only_where_all_were_read(
    root: Path, gone: bool, is_found: bool
) -> None:
    write_story(root, lambda rank, step: USUAL, ranks=2)
    told(root, 0)
    if gone:  # the job had ended, and with it its optimizer, when rank 1 was asked
        told(root, 1, optimizers=[])
    else:
        told(root, 1, optimizer={"foreach": False})
    assert ("settings_differ" in of_settings(judged(root))) is is_found


def test_pauses_that_the_job_asked_for_are_told_as_its_own(root: Path) -> None:
    from haiprof.run_format import schema
    from tests.unit.analysis.recorded import spans_from, write_rank, write_run

    rows, now = [], START_NS
    for _ in range(100):
        for kind, ms in ((schema.FORWARD, 5), (schema.BACKWARD, 9), (schema.OPTIMIZER, 2),
                         (schema.GC, 8)):  # fmt: skip
            rows.append((kind, 2 if kind == schema.GC else 0, now, now + ms * 1_000_000))
            now += ms * 1_000_000 + 1_000
    write_rank(write_run(root), spans_from(rows))
    told(root, seen={"collect_count": 100, "collect_ns": 8 * NS_PER_S // 10})
    finding = next(f for f in judged(root).findings if f.rule == "garbage_collection")
    assert finding.cause == "explicit"
    assert "gc.collect()" in finding.remedy


def test_compiling_evaluation_is_compilation(root: Path) -> None:
    from haiprof.run_format import schema
    from tests.unit.analysis.recorded import CLOCK, spans_from, write_rank, write_run

    rows, now = [], START_NS
    for step in range(200):
        for kind, ms in ((schema.DATA, 1), (schema.FORWARD, 5), (schema.BACKWARD, 9),
                         (schema.OPTIMIZER, 2)):  # fmt: skip
            rows.append((kind, 0, now, now + ms * 1_000_000))
            now += (ms + 1) * 1_000_000
        if step == 60:
            evaluated = now
            rows.append((schema.EVAL, 0, now, now + 3 * NS_PER_S))
            now += 3 * NS_PER_S + 1_000_000
    wall_us = (evaluated - CLOCK.mono_ns + CLOCK.wall_ns) // 1_000
    line = {"type": "compile", "time_ns": now, "count": 1, "spent_ns": 2_900_000_000,
            "spans": [[wall_us, 2_900_000]]}  # fmt: skip
    write_rank(write_run(root), spans_from(rows), lines=[line])
    verdict = judged(root)
    assert "evaluation_heavy" not in [f.rule for f in verdict.findings if f.severity != "info"]
    assert verdict.compile_ns == pytest.approx(2.9 * NS_PER_S)
    assert verdict.evaluation_ns == pytest.approx(0.1 * NS_PER_S, rel=0.1)
