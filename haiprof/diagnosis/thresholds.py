"""Every number that a rule compares with, and where it comes from."""

from __future__ import annotations

from math import ceil

WARM_UP_RATIO = 0.05
"""Share of a rank's first steps left out: compilation, autotuning, worker start. Own choice."""
WARM_UP_MAX_STEPS = 10
"""No more than this many; torch.profiler's documented schedules skip fewer. Own choice."""
WARM_UP_MIN_TOTAL = 10
"""With fewer steps than this all of them are judged. Own choice."""

DATALOADER_WARNING_RATIO = 0.10
DATALOADER_CRITICAL_RATIO = 0.20
"""TraceML INPUT_BOUND: 10 % of the step is a warning, 20 % critical (diagnostics/DIAGNOSIS.md)."""
MIN_STEPS = 2
CRITICAL_MIN_STEPS = 20
"""TraceML: two steps to warn, twenty to call it critical."""
BLOCK_COUNT = 10
"""Blocks of steps whose median share is judged: several loader workers make the waits come in
bursts, which a median over single steps does not see, and one stall spoils one block only."""

OTHER_WARNING_RATIO = 0.30
OTHER_CRITICAL_RATIO = 0.60
"""Share of a step outside the four phases. TraceML calls a residual of 10 % a warning, but of a
short step Python's own work between the phases is a quarter. Own choice."""
SAVE_MAIN_RATIO = 0.50
"""Saves are named as the cause where they make this share of the time outside. Own choice."""

EVALUATION_RATIO = 0.30
"""Evaluation's share of evaluation and training together. Own choice."""

DRIFT_PHASE_RATIO = 0.50
"""A phase is named where it makes this share of the growth. Own choice."""

DEVICE_COVERAGE_RATIO = 0.8
"""The device clock is used in a comparison where it has this share of the steps; never both clocks
in one. TraceML asks for all steps, but an evaluation or a skipped step takes some away."""

FORWARD_BACKWARD_RATIO = 1.5
"""Forward to backward. A layer's backward has two matrix products for the forward's one, so about
0.5 is normal (Kaplan et al. 2020, section 2.1: 2N and 4N flops per token); three times that is not.
The published case (seed 002) had forward far above backward."""
FORWARD_STEP_RATIO = 0.30
"""Forward's share of the step from which it is worth a finding. Own choice."""

GPU_IDLE_RATIO = 0.50
"""Below it the GPU waits for most of the time. TraceML calls 30-70 % moderate; the published case
had 30 %. NVML counts a sample as used when any kernel ran, so true use is lower still."""
CPU_BUSY_CORES = 0.6
"""The published case had the CPU at 60-70 %."""
CPU_FULL_CORES = 0.9
"""One Python thread at its limit, as its launches are serial."""

DRIFT_RATIO = 0.10
"""Last third against first third of the steps. PerfTracker triggers at 20 %; with a test, less is
sure enough."""
DRIFT_P_VALUE = 0.01
"""Mann-Whitney U, one-sided: a conventional level."""
DRIFT_MIN_STEPS = 30
"""Ten steps in each third: below that the normal approximation of U is poor (Mann & Whitney 1947
give tables up to 8)."""

DRIFT_SMOOTH_PARTS = 20
"""The moving median that dates the drift covers this part of the steps. Own choice."""

RANK_EXCESS_WARNING_RATIO = 0.10
RANK_EXCESS_CRITICAL_RATIO = 0.20
"""TraceML straggler score: 10 % warning, 20 % critical of the victim's step
(rank-straggler-policy.md). It looks for the rank with the least visible backward; the same
lag is measured here directly, as the work before it."""
RANK_PHASE_COVERAGE_RATIO = 0.80
"""TraceML names a phase only where it makes 80 % of the gap."""

CORES_FULL_RATIO = 0.90
"""From here on a set of cores is full by the ranks' own work: at most a tenth is left to others, so
waiting beyond that is the ranks' own doing. Own choice."""
CORES_WANTED_RATIO = 1.25
"""With a quarter more runnable threads than cores they wait for each other, whatever others do.
Own choice."""
CORE_WAIT_WARNING_RATIO = 0.15
"""Share of time in which the main thread could run and got no core. Above the tenth that others may
have caused. Own choice."""
CORE_WAIT_CRITICAL_RATIO = 0.30
"""With a third of the time lost in waiting, a free core would make the loop half again as fast.
Own choice."""
THROTTLED_RATIO = 0.25
"""Share of a CPU limit's periods in which something had to stop; kubernetes-mixin's alert
CPUThrottlingHigh (cpuThrottlingPercent: 25)."""
THROTTLED_MIN_PERIODS = 20
"""Two seconds of the kernel's default period of 100 ms (sched-bwc.rst); fewer say little.
Own choice."""
PAGES_ELSEWHERE_RATIO = 0.50
"""Most of a rank's memory on nodes other than its cores'. Own choice."""
PAGES_MIN_COUNT = 64
"""Sampled pages below which their share says nothing. Own choice."""


def warm_up_steps(count: int) -> int:
    """How many of a rank's first steps are left out."""
    if count < WARM_UP_MIN_TOTAL:
        return 0
    return max(1, min(WARM_UP_MAX_STEPS, ceil(count * WARM_UP_RATIO)))
