"""What the machine does to training: who has the cores, slow hardware, NUMA nodes, NFS mounts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import polars as pl

from haiprof.base import units
from haiprof.base.ledger import PROBLEM_RATIO
from haiprof.base.medians import lower_median
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import SAME_COUNT_RATIO
from haiprof.diagnosis.verdict import Finding, gain_of, make_finding
from haiprof.run_analysis.run_files import integer, number, objects, text
from haiprof.run_analysis.settings import Placement
from haiprof.run_format.environment import LOADER_WORKER

DRIFT_PHASE_RATIO = 0.50  # A phase is named where it makes this share of the growth. Own choice.
FAULT_NS = 2_000.0
"""What a page fault takes with a page to clear, on virtual machines: 9,000 of them took 22 ms on
ours; hosts take about half of it. Own choice."""
FAULT_LEAST_NS = 500.0
"""And at least, with giving the page back. Own choice: on our virtual machine 294,000 of them in a
step took 1.1 s, which glibc saved by keeping the memory, and half of which huge pages saved."""
PAGE_BYTES = 4096  # Of most systems; elsewhere pages are larger
STOLEN_NOTED_RATIO = 0.05
"""Of the time of a main thread: what shared machines lose to steal on a usual day. Own choice."""
PAGES_ELSEWHERE_RATIO = 0.50  # Most of a rank's memory on nodes other than its cores'. Own choice.
PAGES_MIN_COUNT = 64  # Sampled pages below which their share says nothing. Own choice.
HARDWARE_DIFFERENCE_RATIO = 0.15
"""A slow rank's wait for cores, or its GPU's throttled time, beyond the typical rank's."""
NEIGHBOURS = "busy_neighbours"  # Rule of what the ranks wait for cores that others use
SETS_THREADS = r"set_num_threads\("
LARGER_INPUTS = "larger_inputs"
LOADER_WORKERS = "loader_workers"
"""Cause of too few cores where they would do without what the loader's workers compute."""

_NAMED_RANKS = 4
_NAMED_PROCESSES, _NAMED_CORES = 3, 0.05
_THROTTLES = {
    "throttle_thermal_ratio": "temperature",
    "throttle_sw_thermal_ratio": "temperature",
    "throttle_hw_thermal_ratio": "temperature",
    "throttle_power_ratio": "its power cap",
    "throttle_power_brake_ratio": "the power brake",
}


def starvation(inputs: RuleInputs) -> Finding | None:
    """Why the rank that waits most got no core; None where the counters do not show it."""
    waits = inputs.core_waits
    rank = min(waits, key=lambda rank: (-waits[rank], rank), default=None)
    return None if rank is None or waits[rank] <= 0 else _starvation_of(inputs, rank)


def _starvation_of(inputs: RuleInputs, rank: int) -> Finding | None:
    # A limit comes first: the kernel counts a thread that is stopped at it as waiting. Then ranks
    # that want more cores than they may use, which would wait without anybody else; then others.
    return _limit(inputs, rank) or _own_doing(inputs, rank) or _neighbours(inputs, rank)


def lost_to_waiting(inputs: RuleInputs) -> float:
    """Of the time in which a training thread could run, how long it had no core, at most."""
    # Its loader's workers lose as much: they run on the same cores.
    waits, main = inputs.core_waits, inputs.main_cores
    return max((w / (w + main.get(r, 0.0)) for r, w in waits.items() if w > 0), default=0.0)


def _limit(inputs: RuleInputs, rank: int) -> Finding | None:
    """The cgroup's limit stopped something in as much of its periods as the rank waited."""
    node = inputs.node_cpus.get(inputs.hosts.get(rank, ""))
    stopped = node.throttled_ratio if node is not None else None
    if node is None or not stopped or stopped < inputs.core_waits[rank]:
        return None
    limit = "" if node.limit_cores is None else f" of {node.limit_cores:g} cores"
    return make_finding(
        f"the job's control group reaches its CPU limit{limit} in {units.ratio_text(stopped)} of "
        f"the periods",
        "raise the limit (Kubernetes resources.limits.cpu, docker --cpus, cgroup cpu.max), "
        "or run fewer threads and workers (OMP_NUM_THREADS, DataLoader num_workers): by default "
        "they are as many as the node has cores, not as the limit allows",
        ("periods with a stop", stopped, "ratio"),
        ("CPU limit", node.limit_cores, "cores"),
        rule="cpu_throttled",
    )


def _own_doing(inputs: RuleInputs, rank: int) -> Finding | None:
    """The ranks on these cores want more of them than there are."""
    group, cores = shared_cores(inputs, rank)
    ranks = [placement.rank for placement in group]
    if not cores or not all(r in inputs.busy_cores and r in inputs.core_waits for r in ranks):
        return None
    busy = sum(inputs.busy_cores[r] for r in ranks)
    wanted = busy + sum(inputs.core_waits[r] for r in ranks)
    node = inputs.node_cpus.get(group[0].host)
    on_node = (node.core_count if node is not None else None) or 0
    others = used_by_others(inputs, inputs.hosts.get(rank)) or 0.0
    others = max(others - max(on_node - cores, 0), 0.0)  # that have no room on the other cores
    too_many = len(ranks) > cores
    if (wanted <= cores and not too_many) or others > busy:
        return None
    spare, shared = on_node > cores, len(ranks) > 1
    of = f" of {on_node}" if spare else ""
    count = "1 core" if cores == 1 else f"{cores} cores"
    loading = sum(inputs.worker_cores(r) or 0.0 for r in ranks if inputs.loader_workers.get(r))
    # Without the workers there is room for the rest, and for what others need of the same cores. A
    # thread waits for no longer than the workers run: most of what is waited may be their doing.
    rest = wanted - loading + others
    by_workers = rest <= cores and not too_many and 2 * loading > wanted - busy
    threads = sum(inputs.settings[r].operator_threads or 0 for r in ranks if r in inputs.settings)
    by_threads = shared and threads > max(cores, len(ranks)) and not (spare or by_workers)
    fewer = "run fewer threads and workers (OMP_NUM_THREADS, DataLoader num_workers)"
    helper, used = _helper(inputs, inputs.hosts.get(rank))
    by_helper = used > 0 and wanted - used <= cores
    remedies = (  # the first that is true
        (by_helper, f"let {helper} run at a lower priority (nice 19), on cores of its own "
         "(taskset), seldom, or after training: the job starts it (subprocess, multiprocessing)"),
        (by_workers, "do less per sample in the DataLoader's workers, which use "
         f"{units.number_text(loading)} cores: decode and tokenize once, ahead of training; or "
         f"{'allow the job' if spare else 'take a node with'} more cores; what fewer workers gain "
         "is measured by haiprof try-loader"),
        (by_threads, f"OMP_NUM_THREADS={max(cores // len(ranks), 1)}, or torch.set_num_threads: "
         f"operators have {threads} threads on these cores"),
        (not spare, f"{fewer}, {'fewer ranks per node, ' * shared}or take a node with more cores"),
        (shared, "give each rank cores of its own: torchrun --numa-binding=exclusive, srun "
         "--cpus-per-task, mpirun --map-by slot:PE=N; look for a taskset or an affinity that all "
         "ranks inherit"),
        (True, "allow the rank more cores (srun --cpus-per-task, docker --cpuset-cpus, a wider "
         f"taskset), or {fewer}"),
    )  # fmt: skip
    title = f"too few cores{' for its loader workers' if by_workers else ''}: "
    title += f"{units.ranks_text(ranks)} may use {cores}{of}"
    if shared:
        title = f"{units.ranks_text(ranks)} share {count}{of}"
        title += f", with {threads} threads" * by_threads
    if by_helper:
        title = f"a process that the job has started uses {units.number_text(used)} of {count} "
        title += f"({helper})"
    return make_finding(
        title,
        next(do for is_so, do in remedies if is_so), ("cores they may use", float(cores), "cores"),
        ("cores they use", busy, "cores"), ("cores they could use at least", wanted, "cores"),
        rule="shared_cores" if shared else "too_few_cores",
        cause=LOADER_WORKERS if by_workers else None, setting=SETS_THREADS if by_threads else "",
        is_choice=spare or too_many or by_workers or by_threads or by_helper,
    )  # fmt: skip


def _neighbours(inputs: RuleInputs, rank: int) -> Finding | None:
    """Others use as many cores as the ranks of the node miss; else these hold each other up."""
    hosts = inputs.hosts
    host = hosts.get(rank)
    used = used_by_others(inputs, host)
    missed = sum(wait for r, wait in inputs.core_waits.items() if hosts.get(r) == host)
    if used is None or used < missed:
        return None
    whose = f"{units.number_text(used)} cores{_names_of_others(inputs, host, used)}"
    return make_finding(
        f"other processes use the CPUs ({whose})",
        "see what else runs there (top, haiprof ls) and move it, or give the job cores of its own "
        "(srun --exclusive, a cpuset)",
        ("cores used by others on its node", used, "cores"),
        ("cores used by the rank", inputs.busy_cores.get(rank), "cores"),
        rule=NEIGHBOURS,
    )


def _names_of_others(inputs: RuleInputs, host: str | None, cores_used: float) -> str:
    """`: pytest 1.1, node 0.3`: whose cores were seen, the mean over all looks.

    `: pytest, node` where that is more than the cores used in training: looks are once a minute.
    """
    used = _cores_by_name(inputs, host, "processes")
    most = sorted(used, key=lambda name: -used[name])[:_NAMED_PROCESSES]
    means = {name: used[name] for name in most if used[name] >= _NAMED_CORES}
    fits = sum(means.values()) <= cores_used
    named = [
        f"{name} {units.number_text(cores)}" if fits else name for name, cores in means.items()
    ]
    return f": {', '.join(named)}" if named else ""


def _cores_by_name(inputs: RuleInputs, host: str | None, of: str) -> dict[str, float]:
    """Cores used on a host by the `processes` of others, or those that ranks have `started`."""
    used, whole_ns = defaultdict[str, float](float), 0
    nodes = (node for node in inputs.analyzer.files.nodes if node.host == host)
    for line in (line for node in nodes for line in node.of_type("other_processes")):
        elapsed_ns = integer(line.get("elapsed_ns")) or 0
        whole_ns += elapsed_ns
        for each in objects(line.get(of)):
            name = units.visible(text(each.get("name")) or "?")
            used[name] += (number(each.get("cores")) or 0.0) * elapsed_ns
    return {name: cores / max(whole_ns, 1) for name, cores in used.items()}


def _helper(inputs: RuleInputs, host: str | None) -> tuple[str, float]:
    """Of what ranks have started beside their loaders' workers the busiest, and its cores."""
    started = _cores_by_name(inputs, host, "started")
    if not started.pop(LOADER_WORKER, 0.0) and any(inputs.loader_workers.values()):
        return "", 0.0  # of a torch that does not name them: they may be any of these
    return max(started.items(), key=lambda each: each[1], default=("", 0.0))


def shared_cores(inputs: RuleInputs, rank: int) -> tuple[tuple[Placement, ...], int]:
    """The ranks on a rank's cores, itself included, and how many cores; none where not known."""
    group = next((g for g in inputs.core_groups if rank in {p.rank for p in g}), ())
    return group, len(frozenset[int]().union(*(p.allowed_cpus or frozenset() for p in group)))


def busy_ratio(inputs: RuleInputs, rank: int) -> float:
    """Of the cores that a rank may use, what the job's ranks there use; 0 where not known."""
    group, cores = shared_cores(inputs, rank)
    return sum(inputs.busy_cores.get(one.rank, 0.0) for one in group) / cores if cores else 0.0


def others_beside(inputs: RuleInputs, ranks: Sequence[int]) -> float | None:
    """Cores that others used on the node of some ranks, the most of several; none named: of all."""
    hosts = inputs.hosts
    own = {hosts.get(rank) for rank in ranks or inputs.world}
    used = [used_by_others(inputs, host) for host in own]
    known = [cores for cores in used if cores is not None]
    return max(known) if known and len(known) == len(used) else None


def used_by_others(inputs: RuleInputs, host: str | None) -> float | None:
    """Cores of a host that others than its ranks used; None where that is not known."""
    if host is None or host not in inputs.node_cpus:
        return None
    cores, hosts = inputs.node_cpus[host].core_count, inputs.hosts
    busy = inputs.counted.nodes.get(host, {}).get(None, {}).get("cpu_utilization_ratio")
    ranks = [rank for rank in inputs.world if hosts.get(rank) == host]
    if cores is None or busy is None or not all(r in inputs.busy_cores for r in ranks):
        return None
    return max(busy * cores - sum(inputs.busy_cores[r] for r in ranks), 0.0)


def machine_text(inputs: RuleInputs) -> str | None:
    """What the cores of the job's busiest node did while it trained; None where nothing is known.

    `2 cores: the job 1.30, others 0.60; rank 0 was ready to run but had no CPU core 12 % of ...`.
    """
    wait, rank = max(((w, r) for r, w in inputs.core_waits.items()), default=(None, None))
    hosts, parts = inputs.hosts, []
    host = hosts.get(rank) if rank is not None else next(iter(inputs.node_cpus), None)
    others = used_by_others(inputs, host)
    if host is not None and others is not None:
        used = sum(inputs.busy_cores.get(r, 0.0) for r, h in hosts.items() if h == host)
        cores = inputs.node_cpus[host].core_count
        parts.append(
            f"{cores} cores: the job {units.number_text(used)}, others {units.number_text(others)}"
        )
    if wait is not None:
        waited = f"{units.ratio_text(wait)} of the time"
        parts.append(f"rank {rank} was ready to run but had no CPU core {waited}")
    if inputs.stolen:
        parts.append(f"steal {units.ratio_text(max(inputs.stolen.values()))}")
    return "; ".join(parts) or None


def stolen_notes(inputs: RuleInputs) -> tuple[str, ...]:
    """What the verdict says of steal: time of the cores that other virtual machines got."""
    lost = max(inputs.stolen.values(), default=0.0)
    if lost < STOLEN_NOTED_RATIO:
        return ()
    return (
        f"the hypervisor gave the cores to other virtual machines {units.ratio_text(lost)} of the "
        f"training time (steal), which makes steps longer",
    )


def state_of(inputs: RuleInputs, rank: int, share: float) -> Finding | None:
    """The first difference of a rank's hardware that would make it lose that share of a step."""
    # Its title goes on a sentence, with a leading comma; None without one.
    return (
        find_larger_inputs(inputs, rank)
        or _find_throttling(inputs, rank)
        or _find_starvation(inputs, rank, share)
        or _find_far_memory(inputs, rank)
        or _find_faults(inputs, rank, share)
    )


def _mean_sizes(inputs: RuleInputs) -> dict[int, float]:
    """By rank: how many numbers its inputs hold on the mean; empty where one is not known."""
    sizes = inputs.input_sizes.group_by("rank").agg(pl.col("number_count").mean())
    known = {rank: float(size) for rank, size in sizes.rows() if rank in inputs.world and size}
    return known if len(known) == len(inputs.world) else {}


def find_larger_inputs(inputs: RuleInputs, rank: int) -> Finding | None:
    """It is given more to do."""
    sizes = _mean_sizes(inputs)
    if len(sizes) < 2 or sizes[rank] <= (1 + SAME_COUNT_RATIO) * lower_median(sizes.values()):
        return None
    times = sizes[rank] / lower_median(sizes.values())
    return make_finding(
        f", its inputs are {units.number_text(times)} times as large as theirs",
        "give all ranks inputs of equal cost: check how the sampler distributes samples "
        "over ranks (DistributedSampler), group samples by length, or cap tokens per batch; dealt "
        "evenly, the other ranks take over a part of the work: the time above is with that",
        (f"rank {rank}: size of its inputs, of the others'", times, "times"),
        cause=LARGER_INPUTS,
    )


def _beyond(values: Mapping[int, float], rank: int) -> float | None:
    """A rank's value beyond the lower-median rank's; None where it is not known."""
    if rank not in values or len(values) < 2:
        return None
    return values[rank] - lower_median(values.values())


def _find_throttling(inputs: RuleInputs, rank: int) -> Finding | None:
    beyond = {name: _beyond(inputs.counted.of(name), rank) or 0.0 for name in _THROTTLES}
    worst = max(beyond, key=lambda name: beyond[name])
    if beyond[worst] < HARDWARE_DIFFERENCE_RATIO:
        return None
    share, why = inputs.counted.of(worst)[rank], _THROTTLES[worst]
    return make_finding(
        f", its GPU is slowed by {why} {units.ratio_text(share)} of the time",
        f"check the GPU of rank {rank}: cooling, dust, its power limit (nvidia-smi -q -d "
        "PERFORMANCE,POWER); move the job off this node until then",
        (f"rank {rank}: slowed by {why}", share, "ratio"),
        cause="throttled",
    )


def _find_starvation(inputs: RuleInputs, rank: int, share: float) -> Finding | None:
    """Waiting for cores must make most of what the rank loses."""
    # Ranks are compared by their wait for each second in which they could run: one that works more
    # also waits more, and is not starved by that. One that works no more, and waits for longer by
    # most of what it loses, is.
    waits, most = inputs.core_waits, DRIFT_PHASE_RATIO * share
    could = {r: wait + min(inputs.main_cores.get(r, 1.0), 1.0) for r, wait in waits.items()}
    hungers = {r: wait / could[r] if could[r] else 0.0 for r, wait in waits.items()}
    hungrier, longer = _beyond(hungers, rank), _beyond(waits, rank)
    if hungrier is None or longer is None:
        return None
    wait, works_more = waits[rank], _beyond(inputs.main_cores, rank)
    is_hungry = hungrier >= HARDWARE_DIFFERENCE_RATIO and wait >= most
    if not is_hungry and (longer < most or works_more is None or works_more >= most):
        return None
    why = _starvation_of(inputs, rank)
    remedy = f"give rank {rank} cores of its own, or run fewer threads and workers in it"
    title = f", it waits for a core {units.ratio_text(wait)} of the time"
    own = (f"rank {rank}: waits for a core", wait, "ratio")
    found = make_finding(title, remedy, own, cause="waits_for_cores")
    if why is None:
        return found
    evidence = (*found.evidence, *why.evidence)
    return replace(found, title=f"{title}: {why.title}", remedy=why.remedy, evidence=evidence)


def _find_far_memory(inputs: RuleInputs, rank: int) -> Finding | None:
    placed = numa_placement(inputs)
    if not isinstance(placed, Finding) or placed.rank != rank:
        return None
    return replace(placed, cause="far_memory", title=", it runs far from its GPU or memory")


_KEEP_MEMORY = (
    "keep it in the process: MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000 "
    "in the job's environment (glibc before 2.35: MALLOC_MMAP_MAX_=0 for the first), or jemalloc "
    "or tcmalloc by LD_PRELOAD (PyTorch's performance tuning guide); or reuse the tensors"
)


def page_faults(inputs: RuleInputs) -> Finding | str | None:
    """Memory goes back to the system and is faulted in again in each step, page by page."""
    faults = inputs.counted.of("page_fault_count_per_s")
    if inputs.uses_gpu or inputs.is_short or not faults:
        return "the ranks use a GPU, training was short, or page faults were not counted"
    # A page that stays is no churn, and those of loader workers took no more than all their time.
    fewer = {
        rank: _growth_per_s(inputs, rank) / PAGE_BYTES
        + (inputs.worker_cores(rank) or 0.0) * units.NS_PER_S / FAULT_LEAST_NS
        for rank in faults
    }
    again = {rank: max(count - fewer[rank], 0.0) for rank, count in faults.items()}
    # Several threads have theirs at the same time.
    threads = {rank: max(inputs.main_cores.get(rank, 1.0), 1.0) for rank in faults}
    lost = {rank: again[rank] * FAULT_LEAST_NS / units.NS_PER_S / threads[rank] for rank in faults}
    rank = max(lost, key=lambda r: (lost[r], -r))
    if lost[rank] < PROBLEM_RATIO:
        return None
    # And at most what the kernel works for the process; old runs have no counter of that.
    kernel = inputs.counted.of("cpu_main_system_cores").get(rank)
    most = lost[rank] if kernel is None else min(kernel / threads[rank], 1.0)
    usual = min(lost[rank] * FAULT_NS / FAULT_LEAST_NS, most)
    least = lost[rank] if lost[rank] <= most else 0.0
    if most < PROBLEM_RATIO:
        return None
    parts = [f"at least {units.ratio_text(least)}"] if least else []
    parts += [] if kernel is None else [f"at most {units.ratio_text(most)}"]
    step_ns = float(number(inputs.by_rank[rank]["step_ns"].mean()) or 0.0)
    count = again[rank] * step_ns / units.NS_PER_S
    size = units.bytes_text(round(count * PAGE_BYTES))
    return make_finding(
        f"about {float(f'{count:.2g}'):,.0f} page faults in each step: {size} are given back to "
        f"the system and taken again, {' and '.join(parts)} of the step",
        f"{_KEEP_MEMORY}; THP_MEM_ALLOC_ENABLE=1, with which PyTorch asks for transparent huge "
        "pages, saves a part of it",
        ("page faults a second", faults[rank], "count"),
        ("of which memory that grows and loader workers, at most", fewer[rank], "count"),
        (f"of a step, at {FAULT_LEAST_NS / 1e3:g} us each", least * step_ns, "ns"),
        ("the kernel's time for the rank", kernel, "cores"),
        confidence=0.7,
        lost_ratio=usual,
        gain=gain_of(step_ns, *(share * step_ns for share in (usual, least, most))),
        rank=rank if sum(share >= PROBLEM_RATIO for share in lost.values()) < len(lost) else None,
    )


def _growth_per_s(inputs: RuleInputs, rank: int) -> float:
    """By how many bytes the rank's memory became larger in each second."""
    points = inputs.counted.points
    own = points.filter((pl.col("metric") == "memory_rss_bytes") & (pl.col("rank") == rank))
    if own.height < 2:
        return 0.0
    time_ns, size = own.sort("time_ns").select("time_ns", "value").to_numpy()[[0, -1]].T
    return float(max(size[1] - size[0], 0.0) / max(time_ns[1] - time_ns[0], 1.0) * units.NS_PER_S)


def _find_faults(inputs: RuleInputs, rank: int, share: float) -> Finding | None:
    """The same work with far more page faults, which take most of what it loses."""
    # What the allocator keeps is chance. Larger inputs, which are found before, have more of them
    # too: where sizes are not known, nothing is said. Source of the remedy: PyTorch's performance
    # tuning guide, CPU specific optimizations.
    faults = inputs.counted.of("page_fault_count_per_s")
    beyond = _beyond(faults, rank) or 0.0
    if not _mean_sizes(inputs) or beyond * FAULT_NS / units.NS_PER_S < DRIFT_PHASE_RATIO * share:
        return None
    own = faults.get(rank, 0.0)
    return make_finding(
        f", it has {own:,.0f} page faults per second, {beyond:,.0f} more than the others",
        f"memory is given back to the system and faulted in again in each step: {_KEEP_MEMORY}",
        (f"rank {rank}: page faults per second", own, "count"),
        cause="page_faults",
    )


_BIND = "numactl --cpunodebind=N --membind=N"
_BIND_RANKS = (
    "bind each rank to its GPU's node: torchrun --numa-binding=node, srun --gpu-bind=closest with "
    f"--cpu-bind, or {_BIND} (nvidia-smi topo -m shows which)"
)
_MISPLACED = {
    "cores": ("run on another NUMA node than their GPU", _BIND_RANKS),
    "memory": ("have most of their memory on another NUMA node than their cores",
               f"bind before memory is taken, not afterwards: {_BIND} in front of the command, or "
               "torchrun --numa-binding=node"),
    "unbound": ("are not bound, and have most of their memory on another NUMA node than their GPU",
                _BIND_RANKS),
    "adapter": ("run on a NUMA node without a network adapter, while another has one",
                f"bind the ranks to the adapters' node: {_BIND}"),
}  # fmt: skip
"""Ways to be misplaced, the heaviest first."""
_SINGULAR = (("run ", "runs "), ("have ", "has "), ("are ", "is "), ("their ", "its "))


def numa_placement(inputs: RuleInputs) -> Finding | str | None:
    """A rank's cores, its memory, its GPU or its network adapters are on different NUMA nodes."""
    # The heaviest way is told, with all ranks that have it. A machine with one node, and a rank
    # that may run anywhere with its memory near its GPU, is fine. Network adapters count where no
    # GPU says where the rank belongs; a rank beside a GPU without an adapter of its node is how the
    # machine is built.
    placed = [inputs.placements[rank] for rank in inputs.world if rank in inputs.placements]
    if not any(placement.cpu_nodes for placement in placed):
        unknown = "the NUMA nodes of the ranks' cores are not known"
        return unknown if placed else "no placement of a rank was recorded"
    ways = [(_misplacement(placement), placement) for placement in placed if placement.cpu_nodes]
    worst = next((way for way in _MISPLACED if way in dict(ways)), None)
    if worst is None:
        return None
    found = [placement for way, placement in ways if way == worst]
    title, remedy = _MISPLACED[worst]
    for plural, single in _SINGULAR if len(found) == 1 else ():
        title = title.replace(plural, single)
    return make_finding(
        f"{units.ranks_text([placement.rank for placement in found])} {title}",
        remedy,
        *(_placement_row(placement, worst) for placement in found[:_NAMED_RANKS]),
        severity="warning" if worst in ("cores", "memory") else "info",
        confidence=0.5 if worst == "adapter" else 0.7,
        missing=("what it costs: counters of memory read from other nodes would say",),
        rank=found[0].rank if len(found) == 1 else None,
    )


def _misplacement(placement: Placement) -> str | None:
    """The heaviest way that fits."""
    gpu, cores = placement.gpu_node, placement.cpu_nodes
    if len(placement.nodes) < 2:
        return None
    if gpu is not None and gpu not in cores:
        return "cores"
    if _has_pages_elsewhere(placement, cores):
        return "memory"
    if gpu is not None and len(cores) > 1 and _has_pages_elsewhere(placement, [gpu]):
        return "unbound"
    adapters = {node for _, node in placement.adapters}
    alone = gpu is None and len(cores) == 1 and adapters and cores[0] not in adapters
    return "adapter" if alone else None


def _has_pages_elsewhere(placement: Placement, nodes: Collection[int]) -> bool:
    """Whether most pages lie on other nodes, and enough were looked at."""
    share = placement.pages_off(nodes)
    enough = sum(placement.memory_pages.values()) >= PAGES_MIN_COUNT
    return enough and share is not None and share >= PAGES_ELSEWHERE_RATIO


def _placement_row(placement: Placement, way: str) -> tuple[str, float | None, str]:
    parts = [f"cores on node {_join_nodes(placement.cpu_nodes)}"]
    if placement.gpu_node is not None:
        parts.append(f"GPU on {placement.gpu_node}")
    if placement.adapters:
        parts.append(f"network on {_join_nodes({node for _, node in placement.adapters})}")
    gpu = None if way == "memory" else placement.gpu_node
    away = "its cores" if gpu is None else "its GPU"
    name = f"rank {placement.rank}: {', '.join(parts)}; pages away from {away}"
    return name, placement.pages_off(placement.cpu_nodes if gpu is None else [gpu]), "ratio"


def _join_nodes(nodes: Collection[int]) -> str:
    return " and ".join(map(str, sorted(nodes)))


_SLOTS = (
    "let the client send more at once: mount with nconnect=N, or raise "
    "sunrpc.tcp_max_slot_table_entries and nfs.max_session_slots (`haiprof preflight` shows them)"
)
_SERVER = (
    "the server or the way to it is slow: a copy of the data on a local disk, or larger files read "
    "in order; nfsiostat and the server's own load tell more"
)


def nfs_wait(inputs: RuleInputs, ranks: Collection[int], share: float) -> Finding | None:
    """The NFS mount whose requests may be a wait of such a share of the time; None where none is.

    It may be where so many were under way on average, on a node of these ranks (none: of any). A
    sentence on waiting for a file goes on with its title.
    """
    own = {host for rank, host in inputs.hosts.items() if rank in ranks or not ranks}
    found = next((each for each in inputs.mounts if each.host in own), None)
    if found is None or found.under_way < share:
        return None
    queue, rtt = found.queue_ns, found.rtt_ns
    is_held = queue is not None and rtt is not None and queue > rtt
    again, point = found.sent_again_per_s, units.visible(found.point)
    known = (("RTT", rtt), ("queue", queue))
    parts = ", ".join(f"{name} {units.duration_text(ns)}" for name, ns in known if ns is not None)
    return make_finding(
        f"NFS {point}: a {found.kind} takes {units.duration_text(found.execute_ns)}"
        + (f" ({parts})" if parts else "")
        + (": RPC slots full" if is_held else "")
        + (f", {units.number_text(again)} requests a second sent again" if again else ""),
        _SLOTS if is_held else _SERVER,
        (f"{found.kind}s of NFS {point} a second", found.count_per_s, "count"),
        ("such requests under way, on average", found.under_way, "count"),
        ("one of them", found.execute_ns, "ns"),
        ("waiting on this client to be sent", queue, "ns"),
        ("from sending to the reply (RTT)", rtt, "ns"),
        ("requests sent again a second", again, "count"),
    )
