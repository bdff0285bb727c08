"""The rules, one module each, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable

from haiprof.diagnosis.facts import Facts
from haiprof.diagnosis.finding import Judgement
from haiprof.diagnosis.rules.cpu_throttled import cpu_throttled
from haiprof.diagnosis.rules.dataloader_bound import dataloader_bound
from haiprof.diagnosis.rules.evaluation_heavy import evaluation_heavy
from haiprof.diagnosis.rules.forward_bound import forward_bound
from haiprof.diagnosis.rules.gpu_waits_for_host import gpu_waits_for_host
from haiprof.diagnosis.rules.numa_placement import numa_placement
from haiprof.diagnosis.rules.outside_the_model import outside_the_model
from haiprof.diagnosis.rules.ranks_uneven import ranks_uneven
from haiprof.diagnosis.rules.shared_cores import shared_cores
from haiprof.diagnosis.rules.step_time_drift import step_time_drift
from haiprof.diagnosis.rules.too_few_cores import too_few_cores

RULES: tuple[Callable[[Facts], Judgement], ...] = (
    dataloader_bound,
    forward_bound,
    gpu_waits_for_host,
    outside_the_model,
    evaluation_heavy,
    ranks_uneven,
    step_time_drift,
    cpu_throttled,
    shared_cores,
    too_few_cores,
    numa_placement,
)
