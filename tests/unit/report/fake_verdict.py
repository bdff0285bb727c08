"""A verdict with everything a card can show."""

from __future__ import annotations

from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.diagnosis.verdict import Cost, Events, Evidence, Finding, Verdict

SPLIT = {
    "dataloader": 2.0 * NS_PER_MS, "forward": 139.0 * NS_PER_MS, "backward": 47.0 * NS_PER_MS,
    "optimizer": 9.0 * NS_PER_MS, "other": None,
}  # fmt: skip
FORWARD_BOUND = Finding(
    rule="forward_bound",
    severity="critical",
    title="forward takes 3.0 times as long as backward: operators left on the CPU",
    evidence=(
        Evidence(name="forward", value=139.0 * NS_PER_MS, unit="ns"),
        Evidence(name="backward", value=47.0 * NS_PER_MS, unit="ns"),
        Evidence(name="GPU utilization", value=0.31, unit="ratio"),
        Evidence(name="CPU cores of the rank", value=0.98, unit="cores"),
    ),
    remedy="move the preprocessing in forward() to the GPU: keep its tensors on the model's "
    "device, and replace Python loops over samples by one batched operator",
    confidence=0.85,
    missing=("device time of single operators",),
)
DRIFT = Finding(
    rule="outside_the_model",
    severity="warning",
    title="after the optimizer: log (train.py:70), Python, 9.4 ms of a step, longer and longer",
    evidence=(Evidence(name="growth of the step", value=1.3, unit=""),),
    remedy="look for lists that grow with every step (losses kept with their graph)",
    confidence=0.6,
)


def fake_verdict(*findings: Finding) -> Verdict:
    return Verdict(
        run="haiprof-logs/train-1",
        name="train",
        headline=findings[0].title
        if findings
        else "nothing stands out: 98 % of the step is the model's own work",
        split=SPLIT,
        step_ns=198.0 * NS_PER_MS,
        work=None,
        step_count=412,
        ranks=(0, 1),
        findings=findings,
        abstained=(("slow_kernels", "one rank"),),
        not_measured=(("GPU power", "NVML: not supported on this device"),),
        evaluation_ns=3 * NS_PER_S,
        compile_ns=0,
        events={"gc": Events(count=12, total_ns=80 * NS_PER_MS, longest_ns=20 * NS_PER_MS)},
        cost=Cost(
            hook_ns_per_step=9_400.0, hook_ratio=0.000_05, threads_cpu_ratio=0.001,
            agent_cpu_ratio=0.004,
        ),
        next_command="haiprof verdict rank haiprof-logs/train-1 0",
        notes=("ranks/1/phases.rec: cut 5 bytes of a torn last record",),
    )  # fmt: skip
