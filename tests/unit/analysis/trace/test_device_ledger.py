"""The ledger of the device's time: exact sums, overlap, what idle time is charged to, and gains."""

from __future__ import annotations

import gzip
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.device_ledger import REMEDIES, RankLedger, rank_ledger, remedy_of
from haiprof.trace_analysis.device_verdict import DeviceLedger, call_nodes, device_ledger
from haiprof.trace_analysis.host_activity import ACTIVITIES
from haiprof.trace_analysis.kernel_names import work_kind
from haiprof.trace_format.find import trace_files
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.sampling import first_of
from tests.unit.analysis.trace.shared import (
    FEW_TRACES,
    Event,
    all_reduce,
    event,
    kernel,
    launch,
    rank_file,
    raw_events,
    step,
    trace_of,
    traces,
    write_trace,
)

US = 1000
NO_RANK_CATEGORIES = {"gpu_memcpy", "gpu_memset", "Memcpy", "Memset"}


def spent(found: RankLedger) -> dict[tuple[str, str], int]:
    """Time in us by position and activity."""
    summed = found.rows.group_by("position", "activity").agg(pl.col("ns").sum())
    return {(position, what): ns // US for position, what, ns in summed.iter_rows()}


def by_class(rows: pl.DataFrame) -> Counter[str]:
    """Time in ns computing, communicating, copying and idle, of one rank."""
    found: Counter[str] = Counter()
    for activity, ns in rows.group_by("activity").agg(pl.col("ns").sum()).iter_rows():
        name = activity.partition(":")[0]
        found["communication" if name in ("link", "wait") else name] += ns
    return found


def assert_adds_up(found: RankLedger) -> None:
    """Each step of each device, to the nanosecond."""
    sums = found.rows.group_by("device", "step").agg(pl.col("ns").sum()).rows()
    assert {(device, at): ns for device, at, ns in sums} == {
        (device, at): end - start
        for device in found.devices
        for at, start, end in found.steps.select("step", "start_ns", "end_ns").iter_rows()
        if end > start
    }
    assert found.rows.is_empty() or found.rows["ns"].to_numpy().min() > 0


@pytest.mark.parametrize("name", FEW_TRACES)
def test_accounts_add_up_to_the_mean_step(name: str) -> None:
    found = device_ledger(traces(name))
    assert sum(found.account_ns) == found.total_ns
    assert found.ledger.residual_ns == 0
    assert found.ledger.sum_error_ns == pytest.approx(0, abs=1e-3)
    positions = sum(found.ledger.positions.values())
    assert positions == pytest.approx(found.ledger.mean_ns, abs=1e-3)
    accounts = found.ledger.accounts
    assert all(each.needed or remedy_of(each.activity) for each in accounts)
    assert all(not accounts[at].needed for at in found.ledger.opportunities)
    gains = [each.gain_ns for each in found.ledger.largest()]
    assert gains == sorted(gains, reverse=True)
    assert all(0 < gain <= found.ledger.mean_ns * 1.5 for gain in gains)


# An independent sum: plain JSON, decimals, and one loop over the moments at which anything changes.


def raw_span(each: dict[str, Any]) -> tuple[int, int]:
    return int(each["ts"] * 1000), int((each["ts"] + each["dur"]) * 1000)


def raw_window(events: list[dict[str, Any]]) -> tuple[int, int]:
    """The one step of a file on the device: until its last kernel, after what was queued before."""
    mark = next(e for e in events if str(e.get("name")).startswith("ProfilerStep#")
                and e.get("cat") == "user_annotation")  # fmt: skip
    low, high = raw_span(mark)
    calls = {e["args"]["correlation"]: raw_span(e)[0] for e in events
             if e.get("cat") in ("cuda_runtime", "cuda_driver")
             and e.get("args", {}).get("correlation")}  # fmt: skip
    own: list[tuple[int, int]] = []
    other: list[tuple[int, int]] = []
    for each in events:
        if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            begun = calls.get(each["args"].get("correlation"), low - 1)
            (own if low <= begun < high else other).append(raw_span(each))
    first = min(start for start, _ in own)
    return max([low, *(end for _, end in other if end < first)]), max(high, *(e for _, e in own))


def swept(events: list[dict[str, Any]], window: tuple[int, int]) -> Counter[str]:
    changes: list[tuple[int, int, str]] = []
    for each in events:
        if each.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        kind = "copy" if each["cat"] != "kernel" else "compute"
        kind = "communication" if "nccl" in each["name"] and kind == "compute" else kind
        start, end = raw_span(each)
        changes += [(start, 1, kind), (end, -1, kind)]
    found: Counter[str] = Counter()
    running: Counter[str] = Counter()
    before = window[0]
    for at, change, kind in [*sorted(changes), (window[1], 0, "")]:
        now = min(max(at, window[0]), window[1])
        active = (name for name in ("compute", "communication", "copy") if running[name] > 0)
        found[next(active, "idle")] += now - before
        before = now
        running[kind] += change
    return found


@pytest.mark.parametrize(
    "name", first_of(["tl_h100_qwen05_mem_stack", "dlrm_v100_8ranks"], "tl_h100_qwen05_mem_stack")
)
def test_ledger_agrees_with_a_sweep_over_the_raw_file(name: str) -> None:
    for path in trace_files(traces(name)):
        events = raw_events(path)
        window, found = raw_window(events), rank_ledger(Trace(path))
        assert found.steps.select("start_ns", "end_ns").rows() == [window]
        assert +by_class(found.rows) == +swept(events, window)


@st.composite
def _event_tables(draw: st.DrawFn) -> list[Event]:
    """A host with operators, Python, calls and loaders, and kernels of all kinds on two streams."""
    times = st.integers(0, 400)
    found: list[Event] = []
    at = 0
    for number in range(draw(st.integers(0, 3))):
        length = draw(st.integers(1, 150))
        found.append(step(number + 5 * draw(st.integers(0, 1)), at, length))
        at += length + draw(st.integers(0, 3))
    names = ["aten::mm", "Optimizer.step#SGD.step", "forward", "train.py(3): f", "loss.backward",
             "autograd::engine::evaluate_function: MmBackward0", "torch/nn/linear.py(1): g",
             "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"]  # fmt: skip
    for _ in range(draw(st.integers(0, 12))):
        category = draw(st.sampled_from(["cpu_op", "python_function", "user_annotation"]))
        more = {"Sequence number": draw(st.integers(0, 3)), "Fwd thread id": draw(times) % 2}
        found.append(event(draw(st.sampled_from(names)), category, draw(times), draw(times) / 4,
                           tid=draw(st.integers(1, 2)), **more))  # fmt: skip
    calls = [
        "cudaLaunchKernel", "cudaStreamSynchronize", "cudaMalloc", "cudaFree", "cudaEventQuery",
    ]  # fmt: skip
    for number in range(1, draw(st.integers(0, 12)) + 1):
        begun, tid = draw(times), draw(st.integers(1, 2))
        found.append(
            launch(number, begun, draw(times) / 8, name=draw(st.sampled_from(calls)), tid=tid)
        )
        if draw(st.booleans()):
            name, category = draw(st.sampled_from([
                ("gemm", "kernel"), ("ncclDevKernel_AllReduce_Sum", "kernel"),
                ("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy"),
                ("Memset (Device)", "gpu_memset"),
            ]))  # fmt: skip
            found.append(kernel(name, begun + draw(times) / 4, draw(times) / 8, category=category,
                                correlation=number * draw(st.integers(0, 1)),
                                stream=draw(st.integers(7, 8))))  # fmt: skip
    return found


@given(events=_event_tables())
def test_accounts_add_up_whatever_was_recorded(
    events: list[Event], tmp_path_factory: pytest.TempPathFactory
) -> None:
    trace = trace_of(tmp_path_factory.mktemp("trace"), events)
    found = rank_ledger(trace)
    assert_adds_up(found)
    device = [each for each in events if each["cat"] in ("kernel", *NO_RANK_CATEGORIES)]
    is_moved = {each["ts"] * 1000 for each in device} != set(trace.gpu["ts_ns"])
    if not found.devices or found.devices == (-1,) or is_moved:  # its clock was ahead
        return
    sums = Counter[str]()
    for start, end in found.steps.select("start_ns", "end_ns").iter_rows():
        raw = [{**each, "ts": Decimal(str(each["ts"])), "dur": Decimal(str(each["dur"]))}
               for each in device]  # fmt: skip
        sums += swept(raw, (start, end))
    assert +by_class(found.rows) == +sums


def test_overlapping_events_are_computing_first_and_the_earlier_one_first(tmp_path: Path) -> None:
    found = rank_ledger(trace_of(tmp_path, [
        step(1, 0, 100), launch(1, 0), launch(2, 0), launch(3, 0), launch(4, 0),
        kernel("ncclDevKernel_AllReduce_Sum", 10, 50, correlation=1, stream=9),
        kernel("gemm", 20, 20, correlation=2),
        kernel("elementwise_kernel", 30, 20, correlation=3, stream=8),
        kernel("Memcpy HtoD (Pinned -> Device)", 55, 25, correlation=4, category="gpu_memcpy"),
    ]))  # fmt: skip
    assert spent(found) == {
        ("forward", "compute: gemm"): 20,
        ("forward", "compute: elementwise"): 10,
        ("forward", "communication: all_reduce"): 20,
        ("forward", "copy: host to device"): 20,
        ("forward", "idle: between kernels"): 9,
        ("forward", "idle: operators"): 1,
        ("forward", "idle: outside operators"): 20,
    }


def test_idle_time_is_what_the_host_did_until_the_next_launch(tmp_path: Path) -> None:
    found = rank_ledger(trace_of(tmp_path, [
        step(1, 0, 100),
        event("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "user_annotation",
              0, 30),
        event("aten::mm", "cpu_op", 40, 20), launch(1, 45, 10),
        kernel("gemm", 60, 20, correlation=1),
        event("Optimizer.step#SGD.step", "user_annotation", 90, 10),
    ]))  # fmt: skip
    assert spent(found) == {
        ("input", "idle: wait: loader"): 30, ("forward", "idle: outside operators"): 10 + 10,
        ("forward", "idle: operators"): 15, ("forward", "idle: between kernels"): 5,
        ("forward", "compute: gemm"): 20, ("optimizer", "idle: outside operators"): 10,
    }  # fmt: skip


def test_a_wait_for_the_device_is_charged_as_long_as_it_kept_the_host(tmp_path: Path) -> None:
    """Without the wait of 40 us the host would have launched the next kernel 40 us earlier."""
    found = rank_ledger(trace_of(tmp_path, [
        step(1, 0, 200), launch(1, 0, 5), kernel("gemm", 10, 40, correlation=1),
        event("aten::item", "cpu_op", 15, 40),
        launch(2, 15, 40, name="cudaStreamSynchronize"),
        event("train.py(7): log", "python_function", 0, 200),
        launch(3, 110, 5), kernel("gemm", 120, 75, correlation=3),
    ]))  # fmt: skip
    idle = found.rows.filter(pl.col("activity").str.starts_with("idle: wait"))
    assert idle.select("activity", "code", "operator", "ns").rows() == [
        ("idle: wait: device", "train.py(7): log", "aten::item", 40 * US)
    ]
    assert spent(found)["forward", "idle: python"] == 20 + 5
    assert spent(found)["forward", "idle: operators"] == 5 + 5  # the launches themselves


def test_backward_kernels_belong_to_the_line_of_their_forward(tmp_path: Path) -> None:
    backward = {"tid": 2, "Sequence number": 4, "Fwd thread id": 1}
    found = rank_ledger(trace_of(tmp_path, [
        step(1, 0, 100),
        event("train.py(1): <module>", "python_function", 0, 100),
        event("model.py(9): forward", "python_function", 5, 20),
        event("aten::mm", "cpu_op", 10, 10, **{"Sequence number": 4}),
        launch(1, 12), kernel("gemm", 20, 10, correlation=1),
        event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 50, 20, **backward),
        event("aten::mm", "cpu_op", 52, 10, tid=2),
        launch(2, 54, tid=2), kernel("gemm", 60, 10, correlation=2),
    ]))  # fmt: skip
    computes = found.rows.filter(pl.col("activity") == "compute: gemm").sort("position")
    assert computes.select("position", "code", "operator").rows() == [
        ("backward", "train.py(?): <module>\nmodel.py(9): forward", "aten::mm"),
        ("forward", "train.py(?): <module>\nmodel.py(9): forward", "aten::mm"),
    ]


def test_backward_on_a_cpu_belongs_to_the_line_of_its_forward_too(tmp_path: Path) -> None:
    """There autograd runs below backward() on the same thread; a hook of the job is its own."""
    backward = {"Sequence number": 4, "Fwd thread id": 1}
    found = rank_ledger(trace_of(tmp_path, [
        step(1, 0, 100), event("train.py(1): main", "python_function", 0, 100),
        event("model.py(9): forward", "python_function", 5, 20),
        event("aten::mm", "cpu_op", 10, 10, **{"Sequence number": 4}),
        event("<built-in method run_backward of X object at 0x7f>", "python_function", 50, 40),
        event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 50, 40, **backward),
        event("aten::mm", "cpu_op", 52, 10),
        event("hooks.py(2): clip", "python_function", 70, 10), event("aten::mul", "cpu_op", 71, 8),
    ]))  # fmt: skip
    is_aten = pl.col("operator").str.starts_with("aten::")
    works = found.rows.filter((pl.col("position") == "backward") & is_aten)
    line = pl.col("code").str.split("\n").list.last()
    assert set(works.select("operator", line).rows()) == {
        ("aten::mm", "model.py(9): forward"),
        ("aten::mul", "hooks.py(2): clip"),
    }


def test_each_device_of_a_process_has_a_time_line(tmp_path: Path) -> None:
    found = device_ledger(write_trace(tmp_path / "two.json", [
        step(1, 0, 100), launch(1, 0, 1), launch(2, 0, 1),
        kernel("gemm", 0, 100, correlation=1), kernel("gemm", 1, 39, correlation=2, device=1),
    ]))  # fmt: skip
    times = {each.activity: each.ns_per_step for each in found.ledger.accounts}
    assert times["compute: gemm"] == (100 + 39) / 2 * US
    # The other device is busy all the time: nothing is gained by this one's idle time.
    assert found.ledger.opportunities == ()
    assert found.ledger.sum_error_ns == 0


def test_positions_follow_the_order_of_spans(tmp_path: Path) -> None:
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    found = rank_ledger(trace_of(tmp_path, [
        step(1, 0, 100), event(loader, "user_annotation", 2, 8),
        event("nn.Module: Net_0", "python_function", 15, 15), event("aten::mm", "cpu_op", 20, 5),
        event("autograd::engine::evaluate_function: X", "cpu_op", 40, 20, tid=2,
              **{"Fwd thread id": 1}),
        event("Optimizer.step#Adam.step", "user_annotation", 70, 20),
        launch(9, 98, 1), kernel("gemm", 99, 1, correlation=9),
    ]))  # fmt: skip
    times: Counter[str] = Counter()
    for (position, _), us in spent(found).items():
        times[position] += us
    assert times == {
        "between_steps": 2, "input": 8, "prepare": 5, "forward": 15, "loss": 10, "backward": 20,
        "gradients": 10, "optimizer": 20, "after_step": 10,
    }  # fmt: skip


def two_ranks(folder: Path) -> DeviceLedger:
    """Rank 1 computes 40 us longer before both reduce; the link needs 20 us."""
    for rank in (0, 1):
        late = 40 * rank
        rank_file(folder, rank, [
            step(1, 0, 100), launch(1, 0, 1), launch(2, 2, 1),
            kernel("gemm", 1, 29 + late, correlation=1),
            all_reduce(30 + late, 90, seq=1, correlation=2, stream=9),
        ])  # fmt: skip
    return device_ledger(folder)


def test_waiting_for_a_peer_gains_nothing_and_the_link_what_it_takes(tmp_path: Path) -> None:
    found = two_ranks(tmp_path)
    accounts = {each.activity: each for each in found.ledger.accounts}
    wait, link = accounts["wait: peer"], accounts["link: all_reduce"]
    assert (wait.ranks, wait.ns_per_step, wait.gain_ns) == ((0,), 20 * US, 0)
    assert (link.ranks, link.ns_per_step, link.gain_ns) == ((), 20 * US, 20 * US)
    assert found.ledger.sum_error_ns == 0
    assert found.late is not None
    assert found.late.startswith("who is late is not known")  # one collective is too few to tell


def test_gain_counts_on_the_slowest_rank_only(tmp_path: Path) -> None:
    """Rank 1 loads for 30 us, rank 0 for 10 us and waits: without loading both gain 30 us."""
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    for rank, loads in ((0, 10), (1, 30)):
        rank_file(tmp_path, rank, [
            step(1, 0, 100), event(loader, "user_annotation", 0, loads), launch(1, loads, 2),
            all_reduce(2 + loads, 100, seq=1, correlation=1),
        ])  # fmt: skip
    found = device_ledger(tmp_path)
    load = next(each for each in found.ledger.largest() if each.position == "input")
    assert (load.ns_per_step, load.gain_ns) == (20 * US, 30 * US)
    assert load.explanation == "dataloader"
    assert found.ledger.problem_count >= 1


def test_one_rank_of_several_cannot_tell_waiting_from_the_link(tmp_path: Path) -> None:
    path = rank_file(tmp_path, 0, [
        step(1, 0, 100), launch(1, 0), kernel("ncclDevKernel_AllReduce_Sum", 2, 97, correlation=1),
    ])  # fmt: skip
    found = device_ledger(path)
    talk = found.ledger.largest()[0]
    assert talk.activity == "communication: all_reduce"
    assert (talk.gain_low_ns, talk.gain_ns) == (97 * US, 97 * US)
    assert found.ledger.problem_count == 1, "either way the device computes nothing meanwhile"
    assert any("waiting for peers" in each for each in found.ledger.missing)


def test_a_trace_without_a_gpu_has_the_ledger_of_its_host(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "cpu.json", [
        step(1, 0, 100), event("train.py(1): main", "python_function", 0, 100),
        event("aten::linear", "cpu_op", 10, 60), event("aten::addmm", "cpu_op", 20, 40),
        event("aten::relu", "cpu_op", 80, 10),
    ])  # fmt: skip
    found = device_ledger(path)
    assert not found.on_device
    assert {each.activity: each.ns_per_step / US for each in found.ledger.accounts} == {
        "operators: gemm": 60, "python": 30, "operators: elementwise": 10,
    }  # fmt: skip
    assert found.ledger.sum_error_ns == 0


def test_a_trace_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="no event of a GPU"):
        device_ledger(write_trace(tmp_path / "empty.json", []))


def test_call_nodes_go_inwards_as_long_as_one_call_holds_most() -> None:
    times: dict[tuple[str, ...], int]
    times = {("main", "step", "a"): 30, ("main", "step", "b"): 25, ("main", "log"): 40, ("x",): 5}
    assert call_nodes(times) == {
        ("main", "step", "a"): ("main", "step", "a"), ("main", "step", "b"): ("main", "step", "b"),
        ("main", "log"): ("main", "log"), ("x",): ("x",),
    }  # fmt: skip
    even: dict[tuple[str, ...], int] = {("main", "f", name): 10 for name in "abcd"}
    assert set(call_nodes(even).values()) == {("main", "f")}


@pytest.mark.parametrize(("name", "operator", "kind"), [
    ("ampere_sgemm_128x64_nn", "aten::mm", "gemm"),
    ("sm80_xmma_gemm_f16f16", "aten::cudnn_convolution", "convolution"),
    ("void pytorch_flash::flash_fwd_kernel<...>", "aten::_flash_attention_forward", "attention"),
    ("void at::native::vectorized_elementwise_kernel<4, ...>", "aten::add", "elementwise"),
    ("nvjet_hsh_128x256_64x4_1x2", "aten::mm", "gemm"),
    ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<...>", "aten::cudnn_batch_norm", "normalisation"),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", None, "foreach"),
    ("aten::normal_", None, "elementwise"),
    ("fused_add_rms_norm_kernel<vllm::_typeConvert<c10::BFloat16>>", None, "normalisation"),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, NormTwoOps<float>>>",
     "aten::linalg_vector_norm", "reduction"),
    ("multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float, 1>>", None, "foreach"),
    ("ClipNormBackward", None, "reduction"),
    ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
     "aten::native_layer_norm", "normalisation"),
    ("some_new_thing", None, "other"),
])  # fmt: skip
def test_work_is_told_by_names(name: str, operator: str | None, kind: str) -> None:
    assert work_kind(name, operator) == kind


def test_each_activity_that_is_not_needed_has_a_remedy() -> None:
    idle = [f"idle: {name}" for name in (*ACTIVITIES, "between kernels", "host not recorded")]
    talks = ["wait: peer", "link: all_reduce", "communication: other", "copy: set"]
    host = [name for name in ACTIVITIES if name != "operators"]
    for activity in (*idle, *talks, *host):
        assert remedy_of(activity) is not None, activity
    assert remedy_of("compute: gemm") is None
    assert all(each.do and each.says for each in REMEDIES)


@pytest.mark.parametrize(("name", "operator", "launch"), [
    # 1,280 blocks of 4 warps on 132 multiprocessors; 13 % of 64 warps are two blocks.
    ("tl_h100_qwen05_mem_stack", "aten::_scaled_dot_product_flash_attention",
     (1280 / 132, 0.13, 1280 / 264)),
    # 114 KiB of shared memory for a block: the calculator says 0, so that nothing is known.
    ("tl_h100_qwen05_mem_stack", "aten::mm", (1.0, None, None)),
    # The whole grid is there at once, and fills 32 of 148 multiprocessors.
    ("tl_b200_r0of8_nccl", "vllm::unified_attention_with_output", (32 / 148, 0.05, 32 / 148)),
    # ROCm records no occupancy.
    ("tl_mi300_ddp_resnet18", "aten::convolution", (None, None, None)),
])  # fmt: skip
def test_launches_of_real_operators_fill_the_gpu_so_far(
    name: str, operator: str, launch: tuple[float | None, ...]
) -> None:
    found = device_ledger(traces(name)).operators
    largest = max((each for each in found if each.name == operator), key=lambda x: x.ns_per_step)
    said = (largest.blocks_per_sm, largest.occupancy_ratio, largest.waves)
    assert said == pytest.approx(launch, rel=1e-5)


def by_step(found: RankLedger) -> dict[int | None, list[tuple[Any, ...]]]:
    """Begin and end of each step by its number, and its time by activity."""
    keys = ("number", "start_ns", "end_ns")
    rows = found.rows.join(found.steps.select("step", *keys), on="step")
    summed = rows.group_by(*keys, "activity").agg(pl.col("ns").sum()).sort("activity")
    kept: dict[int | None, list[tuple[Any, ...]]] = {}
    for number, *row in summed.iter_rows():
        kept.setdefault(number, []).append(tuple(row))
    return kept


@pytest.mark.parametrize("part", first_of((0.5, 0.7, 0.9, 0.99), 0.7))
def test_whole_steps_of_a_file_that_is_cut_off_are_as_in_the_whole_file(
    tmp_path: Path, part: float
) -> None:
    packed = trace_files(traces("hta_nsres_v100_r0of1"))[0]
    text, cut = gzip.decompress(packed.read_bytes()), tmp_path / "cut.json"
    cut.write_bytes(text[: int(len(text) * part)])
    whole, found = (by_step(rank_ledger(Trace(path))) for path in (packed, cut))
    assert found
    assert found.items() < whole.items()


def test_no_step_of_file_that_is_cut_off_out_of_the_order_of_time_is_whole(tmp_path: Path) -> None:
    """Kineto writes the records of a long trace in blocks, whose order is not that of time."""
    calls = [
        each for at in (205, 210, 215, 5, 10, 15)
        for each in (launch(at, at, 1), kernel("gemm", at + 2, 3, correlation=at))
    ]  # fmt: skip
    ops = [event("aten::mm", "cpu_op", at, 20) for at in (1, 101, 201)]
    events = [*(step(at, 100 * at, 100) for at in range(3)), *ops, *calls]
    path = write_trace(tmp_path / "trace.json", events)
    path.write_text(path.read_text()[:-300])
    trace = Trace(path)
    assert trace.steps.is_empty()
    assert "no step of it is whole for certain" in trace.report.notes[0]
    assert "no whole one is marked" in " ".join(device_ledger(path).ledger.missing)


def test_a_gpu_jobs_trace_that_lost_its_gpu_events_is_not_judged_as_one_of_a_cpu_job(
    tmp_path: Path,
) -> None:
    packed = trace_files(traces("hta_nsres_v100_r0of1"))[0]
    text, cut = gzip.decompress(packed.read_bytes()), tmp_path / "cut.json"
    cut.write_bytes(text[: text.index(b'"kernel"') - 3000])
    with pytest.raises(MissingDataError, match="its GPU events came later, and are lost"):
        device_ledger(cut)
