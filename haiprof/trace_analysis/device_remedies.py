"""What each kind of account of the device's time means, and what to do about it: one line each."""

from __future__ import annotations

from typing import NamedTuple


class Remedy(NamedTuple):
    """What an account is called, and what makes it smaller."""

    activity: str
    """Begins the activities that it is for; the first that fits is taken."""
    key: str
    """Of the explanation, as JSON has it."""
    says: str
    """What the device does there."""
    do: str


REMEDIES = (
    Remedy("idle: wait: device", "synchronising_call", "idle after a call that waits for it",
           "keep the value on the device: no .item(), .cpu(), print or torch.cuda.synchronize() in "
           "the step; log every N steps"),
    Remedy("idle: operators", "launch_bound", "idle while the host launches operators",
           "launch fewer, larger kernels: torch.compile(mode='reduce-overhead') or CUDA graphs, "
           "foreach or fused optimizers, a larger batch"),
    Remedy("idle: python", "host_python", "idle while Python runs",
           "the model's own code: torch.compile or CUDA graphs take Python out of the step; other "
           "code: vectorise it, run it less often or in a worker"),
    Remedy("idle: outside operators", "host_python", "idle while the host runs no operator",
           "record with_stack=True to see which Python code it is; take it out of the step"),
    Remedy("idle: wait: loader", "dataloader", "idle while the host waits for input",
           "more DataLoader workers, persistent_workers=True and prefetch_factor; do less per "
           "sample"),
    Remedy("idle: wait: collective", "blocking_collective", "idle in a collective of the host",
           "async_op=True, fewer collectives of the host (barrier, all_gather_object), or log less "
           "often"),
    Remedy("idle: wait: sleep", "sleep_or_lock", "idle while the host sleeps or waits",
           "remove the sleep; what it waits for (a lock, a process, a socket) can be done beside "
           "training"),
    Remedy("idle: allocation", "allocator", "idle while device memory is allocated or freed",
           "allocate in the first steps only: constant shapes, no empty_cache() in the step, "
           "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; inside a convolution its library "
           "does it: torch.backends.cudnn.benchmark=True, on ROCm MIOPEN_FIND_MODE=FAST"),
    Remedy("idle: runtime calls", "runtime_calls", "idle while the host is in the GPU's runtime",
           "warm up before the measured steps; CUDA graphs need few such calls"),
    Remedy("idle: between kernels, long", "queue_gaps",
           "idle for more than 10 µs each between kernels that are queued",
           "see what the device waits for: events of other streams, another process on it, its "
           "driver under a profiler; CUDA graphs and fewer, larger kernels have fewer gaps"),
    Remedy("idle: between kernels", "kernel_gaps", "idle between kernels that are launched",
           "launch fewer, larger kernels: torch.compile fuses small ones, CUDA graphs shorten the "
           "gaps; see that streams do not wait for each other"),
    Remedy("idle: host not recorded", "host_not_recorded", "idle",
           "record ProfilerActivity.CPU too: nothing tells what the host did"),
    Remedy("wait: peer", "late_peer", "waits in a collective for the last rank",
           "look at the rank that comes last: its own accounts say why"),
    Remedy("link: ", "exposed_communication", "communicates, and computing hides nothing of it",
           "overlap it: larger or earlier buckets (bucket_cap_mb, gradient_as_bucket_view), FSDP "
           "prefetch; or send less: bf16, accumulate gradients"),
    Remedy("communication: ", "exposed_communication",
           "communicates or waits for peers, and computing hides nothing of it",
           "record all ranks to tell waiting from the link; overlap it: larger or earlier buckets, "
           "FSDP prefetch"),
    Remedy("compute: layout conversion", "layout_conversion", "converts between memory layouts",
           "model and batches .to(memory_format=torch.channels_last): no operator converts then"),
    Remedy("compute: copy or cast", "copies_and_casts", "copies or casts tensors",
           "keep tensors in the dtype and layout in which they are used: cast weights once, no "
           ".to(), .float(), .contiguous() or .clone() in the step; torch.compile fuses the rest"),
    Remedy("copy: host to device, pageable", "pageable_copy",
           "waits for a copy from pageable memory",
           "pin_memory=True in the DataLoader and .to(device, non_blocking=True)"),
    Remedy("copy: device to host, pageable", "pageable_copy",
           "waits for a copy to pageable memory",
           "copy less often, into pinned memory with non_blocking=True"),
    Remedy("copy: ", "exposed_copy", "copies or sets memory, and computing hides nothing of it",
           "copy on another stream ahead of use; avoid .contiguous(), clones and zeroing"),
    Remedy("wait: loader", "dataloader", "waits for input",
           "more DataLoader workers (a _SingleProcess iterator has none: it loads on this thread), "
           "persistent_workers=True and prefetch_factor; do less per sample"),
    Remedy("wait: sleep", "sleep_or_lock", "sleeps, or waits for a lock, a process or a socket",
           "remove the sleep; what it waits for can be done beside training"),
    Remedy("wait: collective", "blocking_collective", "waits in a collective",
           "overlap it with computing, send less, or look at the rank that comes last"),
    Remedy("wait: device", "synchronising_call", "waits for a device",
           "keep the value on the device; log every N steps"),
    Remedy("allocation", "allocator", "allocates or frees device memory",
           "allocate in the first steps only: constant shapes, no empty_cache() in the step"),
    Remedy("runtime calls", "runtime_calls", "is in the GPU's runtime",
           "warm up before the measured steps"),
    Remedy("python", "host_python", "runs Python",
           "the model's own code: torch.compile; other code: vectorise it, run it less often or in "
           "a DataLoader worker"),
    Remedy("outside operators", "host_python",
           "runs Python, or waits, outside of operators",
           "see which code it is: haiprof --trace --trace-stacks train.py, or with_stack=True"),
)  # fmt: skip
"""In the order in which they are tried."""


HOST_OPERATORS_REMEDY = (
    "give them the cores of the job (torch.get_num_threads(), OMP_NUM_THREADS); torch.compile "
    "fuses small ones; torch.autocast('cpu') where the CPU has AMX or AVX-512 BF16; a larger batch "
    "where each is short"
)
"""What to do where operators take most of a step on a CPU."""
_FEWER_BITS = "compute in bf16 (torch.autocast), or allow TF32: "
OPERATOR_REMEDIES = {
    "gemm": "sizes that are multiples of 64 (pad the dimensions); with a small result and a long "
            "inner dimension split that dimension; let torch.compile(mode='max-autotune') choose",
    "convolution": "channels_last, torch.backends.cudnn.benchmark=True, channels that are "
                   "multiples of 8; depthwise and transposed ones are often faster in another form",
    "attention": "scaled_dot_product_attention without a mask that its flash kernel lacks; where "
                 "that one runs already, cuDNN's (SDPBackend.CUDNN_ATTENTION) or a newer "
                 "FlashAttention; longer sequences or a larger batch fill the GPU better",
    "mixture of experts": "a kernel that is tuned for these shapes (grouped GEMM); more tokens to "
                          "an expert: a larger batch or fewer experts on a GPU",
    "optimizer": "fused=True, which reads and writes each parameter once",
}  # fmt: skip
"""What to do about an operator that is far from the roofline, by its kind."""
_MEMORY_BOUND = (
    "fuse it with its neighbours (torch.compile), so that its tensors are read once; see that they "
    "are contiguous and of 16 bits where that is enough"
)
_SMALL_ROWS = 128
"""Fewer rows than this leave a GPU of today waiting for the weights."""


def operator_remedy(kind: str, precision: str | None, rows: int | None) -> str:
    """What to do about an operator that is far from the roofline."""
    found = OPERATOR_REMEDIES.get(kind, _MEMORY_BOUND)
    if is_small_batch(kind, rows):
        return f"a larger batch: the weights are read for {rows:,} rows alone; else {found}"
    if precision == "fp32" and kind in ("gemm", "convolution", "attention"):
        return f"{_FEWER_BITS}torch.set_float32_matmul_precision('high'); {found}"
    return found


def is_small_batch(kind: str, rows: int | None) -> bool:
    """Whether a product of matrices has too few rows for its weights."""
    return kind in ("gemm", "mixture of experts") and rows is not None and rows <= _SMALL_ROWS


def remedy_of(activity: str) -> Remedy | None:
    """What is said of an activity; None of work that is needed."""
    return next((each for each in REMEDIES if activity.startswith(each.activity)), None)
