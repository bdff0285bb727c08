"""Every number that a rule compares with, and where it comes from."""

from __future__ import annotations

from math import ceil

WARM_UP_RATIO = 0.05
"""Share of a rank's first steps left out: compilation, autotuning, worker start. Own choice."""
WARM_UP_MAX_STEPS = 10
"""No more than this many; torch.profiler's documented schedules skip fewer. Own choice."""
WARM_UP_MIN_TOTAL = 10
"""With fewer steps than this all of them are judged. Own choice."""

UNTRACED_MIN_RATIO = 0.10
"""With a smaller share of steps outside of trace windows, traced ones count too. Own choice."""

FEW_STEPS_SURE = 0.60
"""No finding is surer with fewer steps than CRITICAL_MIN_STEPS. Own choice."""
EXPLAINED_RATIO = 0.50
"""A cause explains what costs at most twice as much as it does itself: of a smaller one most of
the other remains. Own choice."""
SHORT_RUN_S = 1.0
"""Seconds of judged steps below which findings are notes: counters are read once or twice a second,
so nothing is known of who had the cores. Own choice."""

DATALOADER_WARNING_RATIO = 0.10
"""TraceML INPUT_BOUND: 10 % of the step is a warning, 20 % critical (diagnostics/DIAGNOSIS.md)."""
MIN_STEPS = 2
CRITICAL_MIN_STEPS = 20
"""TraceML: two steps to warn, twenty to call it critical."""
BLOCK_COUNT = 20
"""Blocks of steps of which the middle half makes the usual step: several loader workers make the
waits come in bursts, which a median over single steps does not see, and one stall spoils one block
only."""

DRIFT_PHASE_RATIO = 0.50
"""A phase is named where it makes this share of the growth. Own choice."""

DEVICE_COVERAGE_RATIO = 0.8
"""The device clock is used in a comparison where it has this share of the steps; never both clocks
in one. TraceML asks for all steps, but an evaluation or a skipped step takes some away."""

GPU_IDLE_RATIO = 0.50
"""Below it the GPU waits for most of the time. TraceML calls 30-70 % moderate; the published case
had 30 %. NVML counts a sample as used when any kernel ran, so true use is lower still."""
CPU_FULL_CORES = 0.9
"""One Python thread at its limit, as its launches are serial."""

FAULT_NS = 2_000.0
"""What a page fault takes with a page to clear, on virtual machines: 9,000 of them took 22 ms on
ours; hosts take about half of it. Own choice."""

CORES_FULL_RATIO = 0.90
"""From here on a set of cores is full by the ranks' own work: at most a tenth is left to others, so
waiting beyond that is the ranks' own doing. Own choice."""
CORE_WAIT_WARNING_RATIO = 0.15
"""Share of time in which the main thread could run and got no core. Above the tenth that others may
have caused. Own choice."""
STOLEN_NOTED_RATIO = 0.05
"""Share of the time that a main thread lost to steal. What shared machines lose on an ordinary day
is noted. Own choice.
"""
PAGES_ELSEWHERE_RATIO = 0.50
"""Most of a rank's memory on nodes other than its cores'. Own choice."""
PAGES_MIN_COUNT = 64
"""Sampled pages below which their share says nothing. Own choice."""

FAR_MAD_FACTOR = 5.0
"""A rank is far from the others where its distance is above the median plus this many MADs; a
single feature from more than 8 ranks by sqrt(log n / log 8) times as many, as extremes grow.
EROICA (arXiv 2506.08528), as read in ../shared/research/peers.md 1.4."""
FAR_MIN_RANKS = 4
"""Of fewer ranks none is called abnormal: of two either could be, and the MAD of three is one
difference. Own choice."""
FAR_MIN_DIFFERENCE_RATIO = 0.10
"""And it must differ by a tenth, which MADs of nearly equal ranks do not see to: TraceML's
straggler warning (rank-straggler-policy.md)."""
ABNORMAL_RATIO = 0.01
"""PerfTracker: memory operations, runtime calls and Python functions with a bottleneck ratio above
1 % are abnormal (seed 001). What stays below on all ranks is not compared either."""
PER_BLOCK_RATIO = 1.15
"""How much longer a block may take on a rank with more of them before its GPU is doubted. Own
choice."""
SAME_COUNT_RATIO = 0.10
"""Kernels whose counts differ by more than this did other work: their cost is not compared. Own
choice."""

EXPOSED_WARNING_RATIO = 0.10
"""Communication that nothing hides, of the window: TraceML's 10 % and 20 % for what a step should
not hold (diagnostics/DIAGNOSIS.md)."""
WAITING_RATIO = 0.50
"""Most of the time in collectives is waiting: then a late rank is the cause. Own choice."""
SYNC_IDLE_RATIO = 0.10
"""GPU idle around synchronising calls: TraceML's warning again."""
SHORT_LAUNCH_RATIO = 0.50
"""Half of the kernels are HTA's short kernels (get_cuda_kernel_launch_stats). Own choice."""
TENSOR_CORE_CAPABILITY = (7, 0)
TF32_CAPABILITY = (8, 0)
"""Volta has the first tensor cores, Ampere TF32 (CUDA C++ Programming Guide, compute
capabilities)."""
TENSOR_CORE_OFF_RATIO = 0.20
"""Of computing time. An A100 does 19.5 TFLOPS in FP32 and 156 in TF32 (its datasheet): a fifth
would shrink to a fortieth. Own choice."""
SMALL_KERNEL_NS = 10_000
"""About twice what launching takes (3 to 7 us in the traces at hand). Own choice."""
OPERATOR_CALL_NS = 5_000
"""What calling an operator of a CPU takes while it is recorded: 2.7 to 5.9 us for a product of 64
numbers with autograd (torch 2.13). What is longer computes, and stays."""
MANY_OPERATORS = 32
"""Operators that one line calls in a step, from which on it is a loop that may be one operator. Own
choice; the gain says whether it matters."""
SMALL_OCCUPANCY_RATIO = 0.25
"""NVIDIA's CUDA C++ Best Practices Guide, occupancy: low occupancy interferes with hiding memory
latency, and more than needed does not help; it names no number. Own choice."""

COMPARE_MIN_STEPS = 20
"""Steps of each run after warm-up; TraceML's twenty for something critical."""
COMPARE_RUN_RATIO = 0.005
"""At the least; more where parts of the runs differ by more (`bootstrap.block_mean`). Two runs
of the same code on a quiet machine differ by about so much (standard deviation of one): memory
layout, clocks, placement. Kalibera and Jones, Rigorous Benchmarking in Reasonable Time,
2013: what varies between executions must be counted, and a single one cannot show it; Mytkowicz
et al. 2009 found layout alone to move programs by some percent. The number is our own choice."""
COMPARE_P_VALUE = 0.05
"""Of an account, a position or a counter, for all of them together (Benjamini and Hochberg)."""
COMPARE_COUNTER_RATIO = 0.10
"""A counter that changed by less is not shown: memory in use, say, is never twice the same. Own
choice."""
COMPARE_LOAD_RATIO = 0.10
"""Share of the nodes' cores that others used in the slower run, from which on it is asked
what that may explain, however much they used in the other one; a change of that share by as much is
said where nothing is asked. TraceML's 10 % of what a step should not hold."""
COMPARE_SHARED_CORE_RATIO = 0.50
"""A busy neighbour on the same physical core makes work on it take up to half again as long: two
hyperthreads do about 1.3 times the work of one (Marr et al., Hyper-Threading Technology
Architecture and Microarchitecture, 2002)."""
COMPARE_MAX_RANKS = 32
"""Of more ranks only those that changed most are named with an interval. Own choice."""

FIRST_BATCH_RATIO = 0.10
"""Of the recorded training time: TraceML's 10 % for waiting for input."""
EPOCH_MAIN_RATIO = 0.50
BURST_MAIN_RATIO = 0.80
BURST_RARE_RATIO = 0.50
"""Waiting beyond the median is concentrated where 80 % of it (TraceML's coverage) lies in fewer
than half as many steps as bursts of W workers would give, which is one in W. Own choice."""
BURST_UNUSUAL_RATIO = 0.50
"""Most of the waiting is more than the median step's. Own choice."""
LOADER_IDLE_RATIO = 0.50
"""Whoever makes the batches waits himself where he uses the CPU for less than half of the time in
which training waits for them. Own choice."""
SMALL_RATIO = 0.01
"""No share that is divided by is taken to be less. Own choice."""
FREE_CORES = 0.5
"""Cores are full where less than half of what one more worker needs is free: with half a core it
still adds half a worker's batches. Own choice."""

LIKE_RATIO = 1.6
"""A step with more work: forward and backward both take a quarter longer than around it, and their
growth differs by less than this factor, or by no more than that of attention from what is done per
token (MOST_POWER). What interrupts a step hits one of them. Own choice."""

TREND_P_VALUE = 0.01
"""Mann-Kendall, one-sided: a conventional level."""
TREND_MIN_POINTS = 8
"""Kendall's normal approximation is good from 8 points on (Kendall 1975)."""
CREEP_RATIO = 0.10
"""Growth of memory while steps ran, of what it was at the beginning. Own choice: less could be a
cache that fills."""
CREEP_MIN_STEPS = 50
"""Before so many steps what a job keeps by design may still fill: an optimizer's history (100
updates of L-BFGS), caches of samples. Own choice."""
CREEP_LAST_RATIO = 0.20
"""The last third must hold this share of the growth, where steady growth gives a third: what fills
and stays is no leak. Own choice."""
PRESSURE_RATIO = 0.10
"""Time in which some task waited for memory (Linux Documentation/accounting/psi.rst). oomd's
documented default for killing is 60 % (systemd oomd.conf, DefaultMemoryPressureLimit); a tenth of
the time is TraceML's share for a warning."""
AVAILABLE_RATIO = 0.10
"""Free memory below which earlyoom begins to act by default (its README, -m 10)."""
GPU_MEMORY_FULL_RATIO = 0.95
"""Peak of what is allocated, of what the process may take: the rest is what fragments and what
libraries take beside the allocator. Own choice."""
ALLOCATOR_RETRY_MIN_COUNT = 2
"""One retry may be the first large batch; more are a state. Own choice."""

SIZES_MIN_COUNT = 4
"""Sizes of one rank's inputs that were looked at, each unlike the one before. Own choice."""
SAME_WORK_CORRELATION = 0.3
"""Of two ranks' work over the steps, above which large steps are large for both: a bucket of long
sequences, tasks that alternate. Own choice."""
HARDWARE_DIFFERENCE_RATIO = 0.15
"""A slow rank's wait for cores, or its GPU's throttled time, beyond the typical rank's: as
CORE_WAIT_WARNING_RATIO."""
DISPATCH_RATIO = 0.50
"""Most of a window is spent in and between operators too short to compute much. Own choice."""
MAIN_CORE_FULL = 0.90
OTHER_THREADS_RATIO = 0.10
"""One thread does the work where it fills a core and the others use a tenth of theirs. Own
choice."""


def warm_up_steps(count: int) -> int:
    """How many of a rank's first steps are left out."""
    if count < WARM_UP_MIN_TOTAL:
        return 0
    return max(1, min(WARM_UP_MAX_STEPS, ceil(count * WARM_UP_RATIO)))


SWITCHED_ON_RATIO = 0.10
"""Of the looks, one a second, at which a switch was on: below it, it was tried for a moment. Own
choice."""
LEFT_ON_RATIO = 0.50
"""A profiler with a schedule is on for a part of the time; one that was left on for most. Own
choice."""
FLOAT64_RATIO = 0.50
"""Most of what is trained: a few parameters in float64 (a running sum) cost nothing. Own choice."""
LOOP_MIN_TENSORS = 20
"""Fewer tensors make no long loop. Own choice."""
THREADS_PER_CORE = 2.0
"""Threads of an operator for each core; less is not measured. Own choice."""
NO_SYNC_MISSED_RATIO = 0.01
"""So unlikely must it be that looks missed a no_sync that is there: a conventional level."""
MIN_COUNT = 20
"""With fewer samples nothing is said of a share of them. Own choice."""
LINK_BYTES_PER_S = 1e9
"""What ranks exchange gradients at where nothing is wrong with their link: gloo over a loopback,
and a network of 10 Gb/s. Nothing is promised beyond it."""
LINK_LATENCY_NS = 3_000_000
"""And how long an exchange of few bytes may take: gloo between two processes on two cores that are
both busy needs 1 to 3 ms, scheduling included (measured). Less is no slow link."""
