"""The rules, one module each, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable

from haiprof.diagnosis.finding import Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.rules.allocator_retries import allocator_retries
from haiprof.diagnosis.rules.anomaly_detection import anomaly_detection
from haiprof.diagnosis.rules.costly_switches import costly_switches
from haiprof.diagnosis.rules.ddp_arguments import ddp_arguments
from haiprof.diagnosis.rules.deterministic_mode import deterministic_mode
from haiprof.diagnosis.rules.double_precision import double_precision
from haiprof.diagnosis.rules.exposed_communication import exposed_communication
from haiprof.diagnosis.rules.fast_paths_off import fast_paths_off
from haiprof.diagnosis.rules.first_batch import first_batch
from haiprof.diagnosis.rules.fsdp_units import fsdp_units
from haiprof.diagnosis.rules.gpu_memory_limit import gpu_memory_limit
from haiprof.diagnosis.rules.gpu_waits_for_host import gpu_waits_for_host
from haiprof.diagnosis.rules.host_bound import host_bound
from haiprof.diagnosis.rules.launch_bound import launch_bound
from haiprof.diagnosis.rules.memory_creep import memory_creep
from haiprof.diagnosis.rules.memory_pressure import memory_pressure
from haiprof.diagnosis.rules.mkldnn_off import mkldnn_off
from haiprof.diagnosis.rules.numa_placement import numa_placement
from haiprof.diagnosis.rules.optimizer_loop import optimizer_loop
from haiprof.diagnosis.rules.pageable_copies import pageable_copies
from haiprof.diagnosis.rules.profiler_left_on import profiler_left_on
from haiprof.diagnosis.rules.settings_differ import settings_differ
from haiprof.diagnosis.rules.slow_kernels import slow_kernels
from haiprof.diagnosis.rules.slow_link import slow_link
from haiprof.diagnosis.rules.small_batches import small_batches
from haiprof.diagnosis.rules.standstill import standstill
from haiprof.diagnosis.rules.synchronising_calls import synchronising_calls
from haiprof.diagnosis.rules.tensor_cores_unused import tensor_cores_unused
from haiprof.diagnosis.rules.threads_over_cores import threads_over_cores

RULES: tuple[Callable[[RuleInputs], Judgement], ...] = (
    standstill,
    first_batch,
    host_bound,
    gpu_waits_for_host,
    memory_creep,
    memory_pressure,
    gpu_memory_limit,
    allocator_retries,
    numa_placement,
    anomaly_detection,
    profiler_left_on,
    costly_switches,
    double_precision,
    deterministic_mode,
    mkldnn_off,
    optimizer_loop,
    ddp_arguments,
    fsdp_units,
    fast_paths_off,
    threads_over_cores,
    settings_differ,
    slow_kernels,
    slow_link,
    exposed_communication,
    synchronising_calls,
    pageable_copies,
    launch_bound,
    tensor_cores_unused,
    small_batches,
)
