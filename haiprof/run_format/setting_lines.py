"""Recorded settings on disk: what each field of the lines `settings` and `settings_seen` means."""

from __future__ import annotations

SETTINGS, SEEN = "settings", "settings_seen"
UNUSED, DISCARDED = "unused_gradients", "discarded_gradients"
"""What a line of a rank's events.jsonl is, in its field `type`: once per process, counts, and what
optimizer steps left behind."""

SETTINGS_FIELDS = {
    "time_ns": "CLOCK_MONOTONIC ns at which they were read",
    "cost_ns": "what reading them took",
    "flags": "by name: switches of the process, null where this torch does not tell",
    "gc": "of Python's collector: enabled, thresholds, frozen_count",
    "cores": "CPUs that the main thread may run on",
    "cpu_limit_cores": "tightest CPU limit of the process's control group and those above it",
    "memory_limit_bytes": "the same of memory",
    "models": "of each module that was called outermost, see MODEL_FIELDS",
    "optimizers": "of each optimizer that has stepped, see OPTIMIZER_FIELDS",
    "problems": "what could not be read, and why",
}
"""The fields of the line `settings`."""

FLAGS = {
    "anomaly": "torch.autograd.set_detect_anomaly",
    "deterministic": "torch.use_deterministic_algorithms",
    "deterministic_fill": "torch.utils.deterministic.fill_uninitialized_memory",
    "cudnn_enabled": "torch.backends.cudnn.enabled",
    "cudnn_benchmark": "torch.backends.cudnn.benchmark",
    "cudnn_deterministic": "torch.backends.cudnn.deterministic",
    "mkldnn": "torch.backends.mkldnn.enabled",
    "matmul_precision": "torch.get_float32_matmul_precision",
    "compute_capability": "of the current GPU, `9.0`; null before CUDA is used, and without it",
    "cpu_half": "16-bit formats that the CPU computes in: bfloat16, float16, or `neither`",
    "tf32_matmul": "torch.backends.cuda.matmul.fp32_precision: tf32, ieee or none",
    "default_dtype": "torch.get_default_dtype",
    "interop_threads": "torch.get_num_interop_threads",
    "profiler": "a profiler of the job's own that is on: torch.profiler or torch.autograd.profiler",
    "tracemalloc": "tracemalloc records where memory was allocated",
    "developer_mode": "python -X dev",
    "backend": "torch.distributed.get_backend",
    "distributed_debug": "torch.distributed.get_debug_level: OFF, INFO or DETAIL",
}
"""Switches by their name in `flags`, and where they are set."""

MODEL_FIELDS = {
    "name": "class of the module",
    "tensor_count": "parameters, each a tensor",
    "parameter_count": "numbers in them; null where their tensors are of a kind of their own",
    "trainable_count": "of those, in tensors that require gradients",
    "dtypes": "numbers by dtype",
    "devices": "kinds of devices that parameters are on",
    "layers": "modules without modules inside by class, the eight most frequent",
    "complete": "false where it has so many parts that not all were counted",
    "ddp": "of DistributedDataParallel: find_unused_parameters, static_graph, bucket_bytes, "
    "broadcast_buffers, gradient_as_bucket_view",
    "fsdp_unit_count": "modules whose parameters FSDP gathers together",
}
OPTIMIZER_FIELDS = {
    "name": "class of the optimizer",
    "group_count": "parameter groups",
    "tensor_count": "parameters, each a tensor",
    "foreach": "as it was given, of the first group; null: torch decides",
    "fused": "the same",
    "capturable": "the same",
    "differentiable": "the same",
    "dtypes": "tensors by dtype",
    "devices": "tensors by kind of device",
}
SEEN_FIELDS = {
    "time_ns": "CLOCK_MONOTONIC ns",
    "look_count": "looks so far, one a second",
    "anomaly_count": "looks at which anomaly detection was on",
    "profiler_count": "looks at which a profiler of the job's own was on",
    "no_sync_count": "looks at which a DistributedDataParallel was in no_sync",
    "kept_graph_count": "backward passes so far with retain_graph=True and not create_graph=True",
    "mask_column_count": "columns of `attention_mask`, or of tokens, on the CPU in the inputs seen",
    "empty_column_count": "of those, padding in every row of their batch",
    "mask_token_count": "elements of these masks",
    "empty_token_count": "of those, padding",
    "guessed_mask_count": "of these masks, those told from the first integers of two dimensions",
    "hook_look_count": "looks so far at what Python calls at each call of the training thread",
    "hooks": "what was found by these, see HOOK_FIELDS",
    "collect_count": "calls of gc.collect() by the job so far",
    "collect_ns": "time in them",
    "collect_file": "file of the job's line that took most of it; null without any",
    "collect_line": "that line",
    "collect_function": "its function",
}
"""The fields of the line `settings_seen`; counts of the whole recording."""
HOOK_FIELDS = {
    "sets": "what set it: sys.setprofile, sys.settrace or signal.setitimer",
    "function": "the function that is called; of one in C its class",
    "file": "its file; null where it is in C",
    "line": "where it begins; null where it is in C",
    "count": "looks that found it",
}
"""The fields of one of `hooks`."""

UNUSED_FIELDS = {
    "root": "tag of the module that was called outermost",
    "tensor_count": "parameters with a gradient that was only added to since the look before, and "
    "that no living optimizer has",
    "number_count": "numbers in them",
    "stepped_count": "parameters of the module that an optimizer has",
    "passed_count": "of those in tensor_count, parameters of layers through which a gradient goes "
    "on to others that train; null where the graph was not looked at",
    "complete": "false where it has so many parts that not all were looked at",
}
"""The fields of one of `roots` in the line `unused_gradients`; its `step`, `time_ns` and `cost_ns`
are those of the look."""
DISCARDED_FIELDS = {
    "root": "tag of the module that was called outermost",
    "tensor_count": "parameters whose gradient a backward pass for another optimizer made, and "
    "which was cleared before their own optimizer used it",
    "number_count": "numbers in them",
    "by": "tags of those other optimizers",
}
"""The same of the line `discarded_gradients`."""
