"""Which ranks, nodes and links of a preflight differ from their peers, or from a baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from haiprof.base.medians import MAD_TO_SIGMA, mean_median, upper_median
from haiprof.base.units import NS_PER_S, duration_text
from haiprof.diagnosis import thresholds

T = TypeVar("T")
Ranks = Sequence[Mapping[str, Any]]  # What each rank measured
_NOISY = ("disk_bytes_per_s", "loader_batches_per_s")
"""What others who use the same disk or cores change: half of the peers' is needed, as of links."""
NONE_IS_USUAL, TIMEOUT = "none is usual", "timeout"
_CLOCK = "gpu_load_clock_mhz"
_HELD_DOWN = {
    0x2: "its application clocks", 0x4: "its power cap", 0x8: "a slowdown of the hardware",
    0x10: "sync boost", 0x20: "temperature", 0x40: "temperature (hardware)",
    0x80: "the power brake",
}  # fmt: skip
"""Source: nvmlClocksEventReasons in nvml.h."""
_NOT_USUAL = 0x8 | 0x20 | 0x40 | 0x80
"""A GPU that multiplies matrices reaches its power cap; these say that something is wrong."""
_OF_PROGRAMS = (13, 31, 43, 45, 68, 109)
"""XIDs that say nothing of the GPU. Source: what NVIDIA's k8s-device-plugin leaves out."""
_XID_S = 86_400.0
"""What is older was as a rule mended, by a reset that the log need not show. Own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One thing that differs."""

    what: str  # `cpu_loops_per_s`, `send_bytes_per_s`, `limit cpu_cores`, ..
    rank: int | None = None  # None for a link between nodes, and for what all ranks share
    host: str | None = None
    to_host: str | None = None  # The receiver of a link
    value: float
    usual: float | None  # Of its peers or of the baseline; None where the peers have no such limit
    against: str = "peers"
    """`peers`, `baseline`, `maximum` (of its own clock), `timeout`, or `none is usual`."""
    reason: str = ""  # What is known beside the numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What was measured, and what to leave out."""

    ranks: tuple[Mapping[str, Any], ...]
    suspects: tuple[Suspect, ...]
    leave_out: tuple[str, ...]  # Nodes
    unread: tuple[str, ...]  # What could not be read, and why

    @property
    def slurm(self) -> str:
        """For srun or sbatch; empty where no node is to be left out."""
        return f"--exclude={','.join(self.leave_out)}" if self.leave_out else ""

    @property
    def rates(self) -> dict[str, float]:
        """The median of each rate, which a baseline keeps."""
        return {what: mean_median(list(own.values())) for what, own in _rates(self.ranks).items()}


def judge_preflight(ranks: Ranks, baseline: Mapping[str, float] | None = None) -> Preflight:
    """Compares what ranks measured (`preflight_probe`) with their peers and `Preflight.rates`."""
    known = baseline or {}
    found = [*_slow_ranks(ranks, known), *_slow_clocks(ranks, known), *_tight_limits(ranks)]
    found += [*_faults(ranks), *_xids(ranks)]
    found += _slow_links(ranks, {suspect.rank for suspect in found})
    found += _contradictions(ranks)
    found += _below_baseline(ranks, known, {suspect.what for suspect in found})
    return Preflight(
        ranks=tuple(ranks),
        suspects=tuple(found),
        leave_out=_blame_nodes(ranks, found),
        unread=tuple(
            f"rank {own['rank']} on {own['host']}: {what}: not readable, because {why}"
            for own in ranks
            for what, why in own.get("unread", {}).items()
        ),
    )


def _rates(ranks: Ranks) -> dict[str, dict[int, float]]:
    """By what was measured: each rank's."""
    found: dict[str, dict[int, float]] = {}
    for own in ranks:
        rates = {**own["rates"]}
        if "all_reduce" in own:
            rates["all_reduce_bytes_per_s"], latency = own["all_reduce"]
            rates["all_reduces_per_s"] = 1 / latency
        for what, value in rates.items():
            found.setdefault(what, {})[own["rank"]] = value
    return found


def _slower(
    rates: Mapping[T, float], known: float | None, ratio: float
) -> Iterator[tuple[T, float, float, str]]:
    """Who is slower than peers, else than the baseline: whose value, it, the usual one, of whom."""
    # Slow is far from the median in MADs and as a share.
    # Half of what the share allows is slow however the peers spread: a node of four that is slow to
    # all others makes half of the links slow, and the MAD as large as the fault.
    values, usual, lowest = list(rates.values()), 0.0, 0.0
    if len(values) > 1:
        usual = upper_median(values)  # of two the better one: the worse is not usual
        mad = mean_median([abs(value - usual) for value in values]) * MAD_TO_SIGMA
        far = max(usual * (1 - ratio) / 2, usual - thresholds.PREFLIGHT_MADS * mad)
        lowest = min(usual * (1 - ratio), far)
    for who, value in rates.items():
        if value < lowest:
            yield who, value, usual, "peers"
        elif known is not None and value < known * (1 - ratio):
            yield who, value, known, "baseline"


def _slow_ranks(ranks: Ranks, baseline: Mapping[str, float]) -> Iterator[Suspect]:
    hosts = {own["rank"]: own["host"] for own in ranks}
    for what, own in _rates(ranks).items():
        # All ranks wait for the slowest in an all-reduce: it says nothing of one.
        if what.startswith("all_reduce") or what == _CLOCK:
            continue
        ratio = thresholds.PREFLIGHT_LINK_RATIO if what in _NOISY else thresholds.PREFLIGHT_RATIO
        for rank, value, usual, against in _slower(own, baseline.get(what), ratio):
            yield Suspect(what=what, rank=rank, host=hosts[rank], value=value, usual=usual,
                          against=against)  # fmt: skip


def _slow_clocks(ranks: Ranks, baseline: Mapping[str, float]) -> Iterator[Suspect]:
    """GPUs whose clock under load is below that of their peers, or held down by what is unusual."""
    clocks = {at: own["clock"]["mhz"] for at, own in enumerate(ranks)
              if own["rates"].get(_CLOCK) is not None}  # fmt: skip
    slow = {at: (usual, against) for at, _, usual, against in
            _slower(clocks, baseline.get(_CLOCK), thresholds.PREFLIGHT_CLOCK_RATIO)}  # fmt: skip
    for at, mhz in clocks.items():
        own, clock = ranks[at], ranks[at]["clock"]
        bits, highest = int(clock["reasons"] or 0), clock["max_mhz"]
        half = highest is not None and mhz < highest * (1 - thresholds.PREFLIGHT_LINK_RATIO)
        if at in slow or bits & _NOT_USUAL or half:
            usual, against = slow.get(at, (highest, "maximum"))
            held = dict.fromkeys(word for bit, word in _HELD_DOWN.items() if bits & bit)
            yield Suspect(what=_CLOCK, rank=own["rank"], host=own["host"], value=mhz, usual=usual,
                          against=against,
                          reason=f"held down by {', '.join(held)}" if held else "")  # fmt: skip


def _tight_limits(ranks: Ranks) -> Iterator[Suspect]:
    """Limits below what most ranks have, and fewer GPUs; None is no limit."""
    for what in ("gpu_count", *ranks[0]["limits"]):
        own = [rank[what] if what == "gpu_count" else rank["limits"].get(what) for rank in ranks]
        numbers = [float("inf") if value is None else float(value) for value in own]
        usual = upper_median(numbers)
        for rank, value in zip(ranks, numbers, strict=True):
            if value < usual:
                name = what if what == "gpu_count" else f"limit {what}"
                yield Suspect(what=name, rank=rank["rank"], host=rank["host"], value=value,
                              usual=None if usual == float("inf") else usual)  # fmt: skip


def _faults(ranks: Ranks) -> Iterator[Suspect]:
    """Faults that a GPU tells itself: none of these is usual, whatever the peers have."""
    for rank in ranks:
        for what, value in rank.get("faults", {}).items():
            if value:
                yield Suspect(what=what, rank=rank["rank"], host=rank["host"], value=float(value),
                              usual=0.0, against=NONE_IS_USUAL)  # fmt: skip


def _xids(ranks: Ranks) -> Iterator[Suspect]:
    """Errors that the driver logged of a node's GPUs; a GPU that is lost has no rank."""
    for own in ranks:
        found: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
        for xid in own.get("xids", ()):
            if xid["code"] not in _OF_PROGRAMS and xid["age_s"] < _XID_S:
                found.setdefault((xid["code"], xid["gpu"]), []).append(xid)
        for (code, gpu), same in found.items():
            last = min(same, key=lambda xid: xid["age_s"])
            ago = duration_text(last["age_s"] * NS_PER_S)
            yield Suspect(what=f"xid_{code}", rank=None, host=own["host"], value=len(same),
                          usual=0.0, against=NONE_IS_USUAL,
                          reason=f"GPU {gpu}, last {ago} ago: {last['text']}")  # fmt: skip


def _contradictions(ranks: Ranks) -> Iterator[Suspect]:
    """Settings of timeouts that work against each other; said once where all ranks have them."""
    own = {rank["rank"]: rank["timeouts"] for rank in ranks if "timeouts" in rank}
    found: dict[Suspect, list[int]] = {}
    for rank, timeouts in own.items():
        for one in _of_timeouts(timeouts["set"], timeouts["collective_s"]):
            found.setdefault(one, []).append(rank)
    for one, among in found.items():
        for rank in [None] if len(among) == len(own) else among:
            yield replace(one, rank=rank)


def _setting(variable: str, value: float, reason: str, timeout_s: float | None = None) -> Suspect:
    """A setting that keeps another one, or a timeout, from its work."""
    return Suspect(what=f"setting {variable}", value=value, usual=timeout_s, against=TIMEOUT,
                   reason=reason)  # fmt: skip


def _slow_links(ranks: Ranks, slow: set[int | None]) -> Iterator[Suspect]:
    """Directions between nodes, and inside them, that are far below the others of their kind."""
    # Ranks that are slow by themselves say nothing of a link.
    hosts = {own["rank"]: own["host"] for own in ranks}
    links: dict[tuple[str, str], list[float]] = {}
    for own in ranks:
        for to_rank, (bytes_per_s, _) in own.get("sends", {}).items():
            if not {own["rank"], int(to_rank)} & slow:
                links.setdefault((own["host"], hosts[int(to_rank)]), []).append(bytes_per_s)
    for inside in (False, True):
        rates = {link: mean_median(values) for link, values in links.items()
                 if (link[0] == link[1]) == inside}  # fmt: skip
        for (host, to), value, usual, _ in _slower(rates, None, thresholds.PREFLIGHT_LINK_RATIO):
            yield Suspect(what="send_bytes_per_s", host=host, to_host=to, value=value,
                          usual=usual)  # fmt: skip


def _below_baseline(
    ranks: Ranks, baseline: Mapping[str, float], named: set[str]
) -> Iterator[Suspect]:
    """What all ranks share: a slow link explains a slow all-reduce, and is not said twice."""
    for what, own in _rates(ranks).items():
        known, value = baseline.get(what), mean_median(list(own.values()))
        shared = what.startswith("all_reduce") and "send_bytes_per_s" not in named
        if shared and known is not None and value < known * (1 - thresholds.PREFLIGHT_LINK_RATIO):
            yield Suspect(what=what, value=value, usual=known, against="baseline")


def _blame_nodes(ranks: Ranks, suspects: Sequence[Suspect]) -> tuple[str, ...]:
    """Nodes of slow ranks; of slow links the node that most of them share, if there is one."""
    blamed = {one.host for one in suspects if one.to_host is None and one.host is not None}
    links = [{s.host, s.to_host} for s in suspects if s.host is not None and s.to_host is not None]
    ends = Counter(host for link in links for host in link)
    worst = {host for host, count in ends.items() if count == max(ends.values())}
    blamed |= worst if len(worst) == 1 else set()
    return tuple(sorted(blamed)) if len(blamed) < len({own["host"] for own in ranks}) else ()


_HEARTBEAT, _HEARTBEAT_S = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", 480
"""Source: PyTorch's default (HeartbeatMonitor in ProcessGroupNCCL.cpp)."""
_ASYNC, _BLOCKING = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"
_DESYNC, _DUMP = "TORCH_NCCL_DESYNC_DEBUG", "TORCH_NCCL_DUMP_ON_TIMEOUT"
_MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_IB_TIMEOUT, _IB_RETRIES = "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT"
_IB_UNIT_S, _IB_USUAL_RETRIES, _IB_HIGHEST = 4.096e-6, 7, 31
"""Source: NCCL's environment variables: 4.096 us * 2 ^ NCCL_IB_TIMEOUT, NCCL_IB_RETRY_CNT times; 31
is the highest that InfiniBand's five bits hold."""
_TRUE = ("1", "true", "t", "yes", "y")


def _of_timeouts(variables: Mapping[str, str], collective_s: float | None) -> Iterator[Suspect]:
    """Settings of NCCL's timeouts and of PyTorch's watchdog that cannot work together."""
    # Source: PyTorch's "ProcessGroupNCCL Environment Variables" and ProcessGroupNCCL.hpp, of which
    # variables must be set together; init_process_group, of the two of which one should be set;
    # NCCL's "Environment Variables".
    handling = _number(variables, _ASYNC, _ASYNC.removeprefix("TORCH_"))
    waits = _is_on(variables, _BLOCKING, _BLOCKING.removeprefix("TORCH_"))
    if handling == 0 and not waits:
        why = "a collective that fails or times out is not handled: the job hangs on"
        yield _setting(_ASYNC, 0, why)
    if handling and waits:
        yield _setting(_BLOCKING, 1, f"only one of it and {_ASYNC} should be set: the other is not "
                       "used")  # fmt: skip
    if _is_on(variables, _DESYNC, _DESYNC.removeprefix("TORCH_")) and (handling == 0 or waits):
        why = f"it must be set together with {_ASYNC}: no report will be written"
        yield _setting(_DESYNC, 1, why)
    monitors = _MONITORING not in variables or _is_on(variables, _MONITORING)
    if _is_on(variables, _DUMP):
        lacking = [name for name in _SIZES if name in variables][:1]
        lacking = [name for name in lacking if _number(variables, name) == 0]
        lacking += [] if monitors else [_MONITORING]
        if lacking:
            yield _setting(_DUMP, 1, f"nothing is dumped with {lacking[0]}=0")
    if collective_s is None:
        return
    heartbeat = _number(variables, _HEARTBEAT)
    # PyTorch's own heartbeat, 480 s, is shorter than its collectives' 600 s: only less is told.
    if heartbeat is not None and monitors and heartbeat < min(collective_s, _HEARTBEAT_S):
        why = (
            "where the watchdog hangs in a call of CUDA or NCCL, the process is killed before its "
            "timeout tells which collective hangs"
        )
        yield _setting(_HEARTBEAT, heartbeat, why, collective_s)
    exponent, retries = (_number(variables, name) for name in (_IB_TIMEOUT, _IB_RETRIES))
    if exponent is None or not 0 <= exponent <= _IB_HIGHEST:
        return
    gives_up_s = _IB_UNIT_S * 2**exponent * (_IB_USUAL_RETRIES if retries is None else retries)
    if gives_up_s >= collective_s:
        why = (
            f"NCCL gives a broken network up after {gives_up_s:.0f} s: the watchdog ends the job "
            "before that tells which link it is"
        )
        yield _setting(_IB_TIMEOUT, exponent, why, collective_s)


def _number(variables: Mapping[str, str], *names: str) -> float | None:
    """The first that is set; None where none is, or it is no whole number."""
    text = next((variables[name].strip() for name in names if name in variables), "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _is_on(variables: Mapping[str, str], *names: str) -> bool:
    text = next((variables[name] for name in names if name in variables), "")
    return text.strip().lower() in _TRUE
