"""The cases of the scored benchmark, a line each: what is wrong, how it starts, what to expect."""

# ruff: noqa: E501 - a table of long lines

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job."""

    name: str
    options: str
    """Of job.py."""
    expected: str = ""
    """Rule that must come first, with `/cause` where it tells several apart; empty: healthy."""
    rank: int | None = None
    """The rank that it must name."""
    ranks: int = 1
    seconds: float = 10.0
    threads: int | None = None
    """OMP_NUM_THREADS."""
    beside: str = ""
    """`neighbours`: four busy processes from the start; `late`: from the middle on."""
    trace: str = ""
    """Steps to trace, as `--steps` takes them."""
    under: str = ""
    """`one_core`: bound to one core; `quota`: half a core by cgroup; `hang`: never ends."""


FAULTS = (
    Case(name="slow storage", options="--fault slow_storage", expected="dataloader_bound/storage"),
    Case(name="slow storage, 2 workers", options="--fault slow_storage --workers 2 --persistent", expected="dataloader_bound/storage"),
    Case(name="slow storage, 2 ranks", options="--fault slow_storage", ranks=2, expected="dataloader_bound/storage"),
    Case(name="no workers, heavy transform", options="--fault heavy_transform", expected="dataloader_bound/no_workers"),
    Case(name="too few workers", options="--fault few_workers --workers 1 --persistent --batch 32", expected="dataloader_bound/few_workers"),
    Case(name="slow samples", options="--fault slow_index --workers 2 --persistent", expected="dataloader_bound/slow_samples"),
    Case(name="workers start each epoch", options="--workers 2 --length 640", expected="dataloader_bound/epoch_restart"),
    Case(name="first batch", options="--fault first_batch", expected="first_batch"),
    Case(name="sleep in forward", options="--fault sleep_forward", expected="forward_bound"),
    Case(name="Python in forward", options="--fault python_forward --model cnn --batch 16", expected="forward_bound"),
    Case(name="sleep in forward, 2 ranks", options="--fault sleep_forward", ranks=2, expected="forward_bound"),
    Case(name="sleep in backward", options="--fault sleep_backward", expected="backward_bound"),
    Case(name="sleep in backward, 2 ranks", options="--fault sleep_backward", ranks=2, expected="backward_bound"),
    Case(name="sleep at the end of backward, 2 ranks", options="--fault sleep_backward_end", ranks=2, expected="backward_bound"),
    Case(name="slow optimizer", options="--fault sleep_optimizer --batch 256", expected="optimizer_bound"),
    Case(name="logging each step", options="--fault outside", expected="outside_the_model"),
    Case(name="Python between steps", options="--fault python_outside --model cnn --batch 16", expected="outside_the_model"),
    Case(name="slow rank: dataloader", options="--fault rank_dataloader", ranks=2, expected="ranks_uneven/dataloader", rank=1),
    Case(name="slow rank: forward", options="--fault rank_forward", ranks=2, expected="ranks_uneven/forward", rank=1),
    Case(name="slow rank: backward", options="--fault rank_backward", ranks=2, expected="late_rank", rank=1),
    Case(name="slow rank: optimizer", options="--fault rank_optimizer", ranks=2, expected="ranks_uneven/optimizer", rank=1),
    Case(name="slow rank: logging", options="--fault rank_outside", ranks=2, expected="ranks_uneven/other", rank=0),
    Case(name="one rank has more data", options="--fault rank_data --model cnn --batch 16", ranks=2, expected="ranks_uneven/forward", rank=1),
    Case(name="ranks' data uneven by turns", options="--fault data_imbalance --model cnn --batch 16", ranks=2, expected="data_imbalance"),
    Case(name="drift", options="--fault drift --batch 32", expected="step_time_drift/gradual", seconds=12),
    Case(name="sudden regression", options="--fault regression", expected="step_time_drift/sudden", seconds=12),
    Case(name="jitter", options="--fault jitter", expected="jitter/forward", seconds=12),
    Case(name="collector storms", options="--fault gc_storm", expected="garbage_collection"),
    Case(name="memory creep", options="--fault memory_creep", expected="memory_creep", seconds=14),
    Case(name="checkpoints", options="--fault checkpoints", expected="checkpoint_stalls"),
    Case(name="checkpoints of rank 0, 2 ranks", options="--fault checkpoints", ranks=2, expected="checkpoint_stalls"),
    Case(name="heavy evaluation", options="--fault evaluation", expected="evaluation_heavy"),
    Case(name="busy neighbours", options="--model mlp", beside="neighbours", expected="busy_neighbours"),
    Case(name="busy neighbours, 2 ranks", options="--model cnn --batch 16", ranks=2, beside="neighbours", expected="busy_neighbours"),
    Case(name="neighbours come later", options="--model mlp", beside="late", expected="busy_neighbours", seconds=16),
    Case(name="CPU quota", options="--model mlp", under="quota", expected="cpu_throttled", seconds=14),
    Case(name="bound to one core, 2 workers", options="--fault few_workers --workers 2 --persistent --batch 32", under="one_core", expected="too_few_cores", seconds=14),
    Case(name="2 ranks on one core", options="--model cnn --batch 16", ranks=2, under="one_core", expected="shared_cores"),
    Case(name="too many threads", options="--model cnn --threads 4 --batch 32", ranks=2, threads=4, expected="shared_cores"),
    Case(name="tiny operators", options="--model tiny --threads 0", expected="host_bound"),
    Case(name="tiny operators, traced", options="--model tiny --threads 0", trace="100:105", expected="host_bound"),
    Case(name="recompiles", options="--fault recompiles --model transformer --no-loader --batch 512", expected="recompiles", seconds=14),
    Case(name="hang of one rank", options="--fault hang", ranks=2, under="hang", expected="snapshot", rank=1, seconds=60),
)  # fmt: skip

HEALTHY = (
    Case(name="mlp", options="--model mlp --batch 256"),
    Case(name="mlp, all threads", options="--model mlp --batch 512 --threads 0"),
    Case(name="mlp without loader", options="--model mlp --batch 256 --no-loader"),
    Case(name="mlp, 1 worker", options="--model mlp --batch 512 --workers 1 --persistent"),
    Case(name="mlp, 1 worker, long epochs", options="--model mlp --batch 512 --workers 1 --length 262144"),
    Case(name="mlp, accumulation", options="--model mlp --batch 128 --accumulate 4"),
    Case(name="mlp, logging and saving", options="--model mlp --batch 256 --print-loss --save --evaluate"),
    Case(name="cnn", options="--model cnn --batch 16"),
    Case(name="cnn, all threads", options="--model cnn --batch 64 --threads 0"),
    Case(name="cnn, noise", options="--model cnn --batch 32 --noise 0.3"),
    Case(name="cnn, accumulation", options="--model cnn --batch 16 --accumulate 2"),
    Case(name="cnn, evaluation", options="--model cnn --batch 16 --evaluate"),
    Case(name="transformer", options="--model transformer --batch 32"),
    Case(name="transformer, traced", options="--model transformer --batch 32", trace="50:55"),
    Case(name="transformer, noise", options="--model transformer --batch 32 --noise 0.3"),
    Case(name="transformer, 1 worker", options="--model transformer --batch 32 --workers 1 --persistent"),
    Case(name="transformer, compiled", options="--model transformer --batch 32 --compile", seconds=14),
    Case(name="lstm", options="--model lstm --batch 64"),
    Case(name="lstm, all threads", options="--model lstm --batch 128 --threads 0"),
    Case(name="lstm, saving", options="--model lstm --batch 64 --save --print-loss"),
    Case(name="gan", options="--model gan --batch 128"),
    Case(name="lightning", options="--model lightning --batch 256"),
    Case(name="mlp, 2 ranks", options="--model mlp --batch 256", ranks=2),
    Case(name="mlp, 2 ranks, accumulation", options="--model mlp --batch 128 --accumulate 4", ranks=2),
    Case(name="cnn, 2 ranks", options="--model cnn --batch 16", ranks=2),
    Case(name="cnn, 2 ranks, noise", options="--model cnn --batch 32 --noise 0.1", ranks=2),
    Case(name="cnn, 2 ranks, evaluation and saving", options="--model cnn --batch 16 --evaluate --save --print-loss", ranks=2),
    Case(name="transformer, 2 ranks", options="--model transformer --batch 32", ranks=2),
    Case(name="lstm, 2 ranks", options="--model lstm --batch 64", ranks=2),
    Case(name="lstm, 2 ranks without loader", options="--model lstm --batch 64 --no-loader", ranks=2),
)  # fmt: skip

CASES = (*FAULTS, *HEALTHY)
