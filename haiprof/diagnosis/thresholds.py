"""Every number that a rule compares with, and where it comes from."""

from __future__ import annotations

from math import ceil

from haiprof.base.ledger import PROBLEM_RATIO

CRITICAL_RATIO = 4 * PROBLEM_RATIO  # A problem that costs so much of the step is shown in red
WARM_UP_RATIO = 0.05
"""Share of a rank's first steps left out: compilation, autotuning, worker start. Own choice."""
WARM_UP_MAX_STEPS = 10
"""No more than this many; torch.profiler's documented schedules skip fewer. Own choice."""
WARM_UP_MIN_TOTAL = 10  # With fewer steps than this all of them are judged. Own choice.

UNTRACED_MIN_RATIO = 0.10
"""With a smaller share of steps outside of trace windows, traced ones count too. Own choice."""

FEW_STEPS_SURE = 0.60  # No finding is surer with fewer steps than CRITICAL_MIN_STEPS. Own choice.
SHORT_RUN_S = 1.0
"""Seconds of judged steps below which findings are notes: counters are read once or twice a second,
so nothing is known of who had the cores. Own choice."""

MIN_STEPS = 2
CRITICAL_MIN_STEPS = 20  # TraceML: two steps to warn, twenty to call it critical

FAR_MAD_FACTOR = 5.0
"""A rank is far from the others where its distance is above the median plus this many MADs; a
single feature from more than 8 ranks by sqrt(log n / log 8) times as many, as extremes grow.
EROICA (arXiv 2506.08528), as read in ../shared/research/peers.md 1.4."""
FAR_MIN_RANKS = 4
"""Of fewer none is abnormal: of two either could be, of three the MAD says little. Own choice."""
ABNORMAL_RATIO = 0.01
"""PerfTracker: memory operations, runtime calls and Python functions with a bottleneck ratio above
1 % are abnormal (seed 001). What stays below on all ranks is not compared either."""
SAME_COUNT_RATIO = 0.10
"""Kernels whose counts differ by more did other work: they are not compared. Own choice."""

TF32_CAPABILITY = (8, 0)  # Ampere has TF32 (CUDA C++ Programming Guide, compute capabilities)
OPERATOR_CALL_NS = 5_000
"""What calling an operator of a CPU takes while it is recorded: 2.7 to 5.9 us for a product of 64
numbers with autograd (torch 2.13). What is longer computes, and stays."""
BACKWARD_RATIOS = 1.0, 2.0, 3.0
"""Of backward to forward, what a model needs at least, usually, and at most (Hobbhahn and Sevilla,
"What's the backward-forward FLOP ratio for neural networks?", 2021)."""
MANY_OPERATORS = 32
"""Operators that one line calls in a step, from which on it is a loop that may be one operator. Own
choice; the gain says whether it matters."""

COMPARE_MIN_STEPS = 20  # Steps of each run after warm-up; TraceML's twenty for something critical
COMPARE_P_VALUE = 0.05
"""Of an account, a position or a counter, for all of them together (Benjamini and Hochberg)."""

LIKE_RATIO = 1.6
"""A step with more work: forward and backward both take a quarter longer than around it, and their
growth differs by less than this factor, or by no more than that of attention from what is done per
token (MOST_POWER). What interrupts a step hits one of them. Own choice."""

SIZES_MIN_COUNT = 4
"""Sizes of one rank's inputs that were looked at, each unlike the one before. Own choice."""
SAME_WORK_CORRELATION = 0.3
"""Of two ranks' work over the steps, above which large steps are large for both: a bucket of long
sequences, tasks that alternate. Own choice."""


def warm_up_steps(count: int) -> int:
    """How many of a rank's first steps are left out."""
    if count < WARM_UP_MIN_TOTAL:
        return 0
    return max(1, min(WARM_UP_MAX_STEPS, ceil(count * WARM_UP_RATIO)))


LINK_BYTES_PER_S = 1e9
"""What ranks exchange gradients at where nothing is wrong with their link: gloo over a loopback,
and a network of 10 Gb/s. Nothing is promised beyond it."""
LINK_LATENCY_NS, LINK_USUAL_NS = 3_000_000, 1_000_000
"""And how long an exchange of few bytes may take, and as a rule takes: gloo between processes on
two busy cores needs 1 to 3 ms, scheduling included (measured)."""
RECEIVING_NS = 10_000_000
"""How long a batch of few tensors may take to be received from a DataLoader's worker: a tensor took
0.8 to 1.7 ms on two busy cores (measured)."""
PREFLIGHT_RATIO = 0.3
"""Source: two healthy ranks on a machine with other jobs differed by 24 % in plain Python."""
PREFLIGHT_LINK_RATIO = 0.5
"""Source: a link that lost half its lanes, or fell to the next lower Ethernet rate."""
PREFLIGHT_CLOCK_RATIO = 0.22
"""Source: alike GPUs of five machines differed by 8 % on average and 22 % at most (Sinha et al.,
"Not All GPUs Are Created Equal", SC22)."""
PREFLIGHT_MADS = 5.0
"""Source: beyond 3.5 is an outlier (Iglewicz and Hoaglin, 1993); few peers estimate MAD badly."""
