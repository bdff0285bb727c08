"""The device's ledger of all ranks: accounts of the mean step, and the gain without each."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import Floats, Ints
from haiprof.base.ledger import Account, Ledger, ledger_document
from haiprof.base.statistics import student_quantile
from haiprof.base.units import ranks_text, ratio_text
from haiprof.trace_analysis import host_activity
from haiprof.trace_analysis.arrivals import arrival_lateness, who_is_late
from haiprof.trace_analysis.call_tree import ADDRESS
from haiprof.trace_analysis.device_ledger import (
    COMPUTE,
    CONVERSIONS,
    COPY_OR_CAST,
    HOST_LANE,
    IDLE,
    QUEUE,
    REMEDIES,
    TALK,
    RankLedger,
    operator_remedy,
    rank_ledger,
    remedy_of,
)
from haiprof.trace_analysis.device_time import LAUNCH, with_rank
from haiprof.trace_analysis.operator_efficiency import OPERATOR, RankOperators, rank_operators
from haiprof.trace_analysis.operator_work import OwnFormulas
from haiprof.trace_analysis.pool import Pool, Progress
from haiprof.trace_analysis.questions.base import RankTraces

LINK, PEER = "link: ", "wait: peer"
_CONFIDENCE = 0.95
_SMALL_RATIO = 0.001  # accounts below this share of a step are one row by position and activity
_Chain = tuple[str, ...]
_SPREAD = tuple(
    f"{idle}{name}" for idle in ("", IDLE) for name in (
        host_activity.PYTHON, host_activity.OPERATORS, host_activity.OUTSIDE, host_activity.CALLS,
        host_activity.ALLOCATION, host_activity.COLLECTIVE, "between kernels",
    )
)  # fmt: skip
"""Activities that a whole part of the code has, not one line of it."""
_KEY = ["position", "activity", "file", "line", "function"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOperator:
    """Computing of one operator with one set of shapes, per mean step of a device."""

    name: str
    shapes: str | None  # as the profiler noted them
    kind: str
    precision: str | None
    kernel: str  # the longest of its kernels
    call_count: float
    kernel_count: float
    short_count: float  # of kernels below `operator_efficiency.SHORT_NS`
    short_ns_per_step: float
    row_count: int | None
    ns_per_step: float
    flops_per_s: float | None
    bytes_per_s: float | None
    bound: str | None  # `compute` or `memory`; None where the peak or the work is not known
    roofline_ratio: float | None  # 1 at the roofline; above 1 what was recorded cannot be true
    tensor_ratio: float | None  # of TF32's peak, where products of fp32 leave tensor cores idle
    estimate: str | None
    """`about` or `at least` where the shapes leave open how much memory is read."""
    blocks_per_sm: float | None
    """Of the longest kernel's launch, as are the next two: `device_time.LAUNCH`."""
    occupancy_ratio: float | None
    waves: float | None
    gain_ns: float  # what the mean step becomes shorter by at what such operators usually reach
    gain_low_ns: float
    gain_high_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenOperator:
    """An operator that takes longer on one rank, for which the others wait."""

    name: str
    rank: int
    own_ns: float  # on that rank, per mean step
    others_ns: float  # the median of all ranks; of two the other's
    is_same_work: bool  # whether its calls and shapes are those of the others
    ns_per_step: float  # by how much it is longer
    gain_ns: float
    gain_low_ns: float
    gain_high_ns: float


Opportunity = Account | DeviceOperator | UnevenOperator


class HostOperator(NamedTuple):
    """An operator of a trace without GPU events, where it is innermost, per mean step."""

    name: str
    code: str | None
    """The job's innermost code around it, as the profiler names it; of autograd's the forward's."""
    ns_per_step: float


class OperatorRole(NamedTuple):
    """Computing of one operator inside of one outermost operator, per mean step of a device."""

    top: str | None
    name: str
    kind: str
    ns_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLedger:
    """The ledger of traces, and what it was made of."""

    ledger: Ledger
    on_device: bool
    """False of traces without GPU events: it is the ledger of the host's training thread."""
    ranks: tuple[int, ...]
    world_size: int | None
    total_ns: int  # of all steps of all devices: the accounts' sum in whole ns
    account_ns: tuple[int, ...]  # of each account, of all steps of all devices
    mark_ns: float | None  # the mean step as the host marked it; None without profiler steps
    kernel_count: int
    linked_count: int
    operators: tuple[DeviceOperator, ...] = ()  # by their gain, then by their time
    uneven: tuple[UnevenOperator, ...] = ()  # where waiting for peers is known
    roles: tuple[OperatorRole, ...] = ()
    """All computing by operator and the outermost operator around it."""
    host_operators: tuple[HostOperator, ...] = ()
    """Without GPU events: those of the training thread, longest first."""
    branches: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    """Computing in ns per step, by the calls of the job's code around it and the operator."""
    device_name: str | None = None
    peak: str | None = None
    """Who states the peak that operators are held against; None where it is not known."""
    gaps: pl.DataFrame = field(default_factory=pl.DataFrame)
    """The longest idle times, longest first: `rank` and what `device_ledger.GAPS_SCHEMA` has."""
    damage: tuple[str, ...] = ()
    """What of the files could not be read, such as the end of one that is cut off."""
    late: str | None = None
    """Who comes last to collectives, in words; None where nobody waited, or nothing tells."""


def device_ledger(
    path: str | Path, *, window: int | None = None, peaks: Mapping[str, float] | None = None,
    progress: Progress | None = None, formulas: OwnFormulas | None = None,
    pool: Pool | None = None,
) -> DeviceLedger:  # fmt: skip
    """The ledger of the device's time line of some traces; options as of `TraceAnalysis`."""
    traces = _Traces(path, window=window, pool=pool)
    return traces.ledger({"peaks": peaks, "formulas": formulas}, progress)


class _Traces(RankTraces):
    """Asks each rank's trace, and compares the ranks."""

    def ledger(self, options: Mapping[str, Any], progress: Progress | None = None) -> DeviceLedger:
        """The ledger of all of them."""
        paths = [file.path for file in self.files.values()]
        ledgers = self._pool.map(rank_ledger, paths, {}, progress)
        ranks = dict(zip(self.files, ledgers, strict=True))
        operators = self._pool.map(rank_operators, paths, options, progress)
        rows = with_rank((rank, each.rows) for rank, each in ranks.items())
        if rows.is_empty() or all(each.has_no_step for each in ranks.values()):
            for path, cut in zip(paths, (each.cut for each in ranks.values()), strict=True):
                if cut:
                    raise MissingDataError(
                        f"{path}: no verdict: {cut.text}; {cut.effect}",
                        hint="copy the file again, or record again",
                    )
            raise MissingDataError(
                f"{self.path}: no event of a GPU, and no operator or Python function of the host",
                hint="profile with ProfilerActivity.CPU and ProfilerActivity.CUDA",
            )
        waits, unknown, late = self._waits(rows)
        parts = dict(zip(ranks, operators, strict=True))
        return replace(_as_ledger(split_waits(rows, waits), ranks, parts, unknown), late=late)

    def _waits(self, rows: pl.DataFrame) -> tuple[pl.DataFrame, list[str], str | None]:
        """`rank`, `event`, `wait_ns` of collectives; why that is unknown of others; who is late."""
        schema = {"rank": pl.Int64, "event": pl.Int64, "wait_ns": pl.Int64}
        asked = rows.filter(pl.col("event") >= 0).select("rank", "event").unique()
        if asked.is_empty() or len(self.files) == 1:
            return pl.DataFrame(schema=schema), ["one rank's trace"] * bool(len(asked)), None
        waits, clocks, _ = self._arrivals(None)
        late = who_is_late(arrival_lateness(waits, clocks), waits) if len(waits) else None
        known = waits.filter(pl.col("missing").is_null()).select(list(schema))
        lost = asked.join(known, on=["rank", "event"], how="anti")
        why = lost.join(waits, on=["rank", "event"], how="left")["missing"]
        reasons = why.fill_null("not matched with other ranks").unique().sort().to_list()
        return known, reasons, late if len(known) else None


def split_waits(rows: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Exposed communication as waiting for the last rank, by `waits`, and as the link's."""
    talks = pl.col("event") >= 0
    known = rows.filter(talks).join(waits, on=["rank", "event"], how="inner")
    waited = (pl.min_horizontal("end_ns", "wait_ns") - pl.col("start_ns")).clip(0)
    parts = [
        rows.filter(~talks),
        rows.filter(talks).join(waits, on=["rank", "event"], how="anti"),
        known.with_columns(ns=waited, activity=pl.lit(PEER)),
        known.with_columns(
            ns=pl.col("ns") - waited,
            activity=pl.col("activity").str.replace(TALK, LINK, literal=True),
        ),
    ]
    return pl.concat(part.select(rows.columns) for part in parts).filter(pl.col("ns") > 0)


def with_place(rows: pl.DataFrame, *, least_ns: float = 0) -> pl.DataFrame:
    """Rows with `file`, `line` and `function` of the job's code that an account is of.

    What is done at one place (a copy, a wait for the device, a kernel) is of the innermost code.
    What is spread over the code is of the call that holds most of it: `call_nodes`.
    """
    times = rows.group_by("position", "activity", "code").agg(pl.col("ns").sum())
    found = []
    for (position, activity), part in times.drop_nulls("code").group_by("position", "activity"):
        chains = {code: tuple(code.split("\n")) for code in part["code"]}
        nodes = {chain: chain for chain in chains.values()}
        if str(activity).startswith(_SPREAD):
            nodes = call_nodes(dict(zip(chains.values(), part["ns"], strict=True)), least_ns)
        for code, chain in chains.items():
            node = nodes[chain]
            place = host_activity.parse_place(node[-1]) if node else (None, None, None)
            found.append((position, activity, code, *place))
    schema = dict.fromkeys(("position", "activity", "code", "file"), pl.String)
    known = pl.DataFrame(
        found, schema={**schema, "line": pl.Int64, "function": pl.String}, orient="row"
    )
    return rows.join(known, on=["position", "activity", "code"], how="left")


def call_nodes(times: Mapping[_Chain, int], least_ns: float = 0) -> dict[_Chain, _Chain]:
    """For each call stack the node of the call tree that its time is counted to.

    From the root inwards as long as one call holds more than half of the time; what is not below
    that call is divided again in the same way. Empty for what is left below `least_ns`.
    """
    nowhere: _Chain = ()
    left, found = dict(times), dict.fromkeys(times, nowhere)
    while sum(left.values()) > least_ns:
        node, inside = nowhere, left
        while True:
            depth, children = len(node) + 1, Counter[_Chain]()
            for chain, ns in inside.items():
                if len(chain) >= depth:
                    children[chain[:depth]] += ns
            largest, ns = max(children.items(), key=lambda pair: pair[1], default=(nowhere, 0))
            if 2 * ns <= sum(inside.values()):
                break
            node = largest
            inside = {chain: ns for chain, ns in inside.items() if chain[:depth] == node}
        if not node:
            break
        found |= dict.fromkeys(inside, node)
        left = {chain: ns for chain, ns in left.items() if chain not in inside}
    return found


def _as_ledger(
    rows: pl.DataFrame, ranks: Mapping[int, RankLedger], parts: Mapping[int, RankOperators],
    unknown: list[str],
) -> DeviceLedger:  # fmt: skip
    steps = with_rank((rank, each.steps) for rank, each in ranks.items())
    times = _Steps(ranks, steps)
    of_lanes = times.lanes.join(steps, on="rank")  # each step once per device of its rank
    count, total = len(of_lanes), int((of_lanes["end_ns"] - of_lanes["start_ns"]).sum())
    placed = with_place(rows, least_ns=_SMALL_RATIO * total)
    small = pl.col("ns").sum().over(_KEY) < _SMALL_RATIO * total
    folded = placed.with_columns(pl.when(~small).then(name).alias(name) for name in _KEY[2:])
    keys = folded.group_by(_KEY).agg(
        pl.col("ns").sum(), pl.col("rank").unique().sort().alias("ranks")
    ).sort(-pl.col("ns"), *_KEY[:2]).with_row_index("account")  # fmt: skip
    numbered = folded.join(keys.select("account", *_KEY), on=_KEY, nulls_equal=True)
    cube = times.cube(numbered, len(keys))
    peers = np.flatnonzero((keys["activity"] == PEER).to_numpy())
    own = times.length - cube[peers].sum(axis=0)
    code = _largest_code(numbered)
    accounts = [_account(key, each, own, count, code[key["account"]], len(ranks))
                for key, each in zip(keys.iter_rows(named=True), cube, strict=True)]  # fmt: skip
    gains = np.array([account.gain_ns for account in accounts])
    order = np.argsort(-gains, kind="stable")  # the others stay by their time
    by_position = keys.group_by("position").agg(pl.col("ns").sum()).iter_rows()
    is_on_device = bool((times.lanes["device"] != HOST_LANE).any())
    ledger = Ledger(
        mean_ns=total / count,
        median_ns=float(np.median(of_lanes["own_ns"].to_numpy())),
        count=max(len(each.steps) for each in ranks.values()),
        residual_ns=(total - int(keys["ns"].sum())) / count,
        positions={position: ns / count for position, ns in sorted(by_position)},
        accounts=tuple(accounts[at] for at in order),
        opportunities=tuple(range(int((gains > 0).sum()))),
        rests_on=_rests_on(ranks, is_on_device=is_on_device),
        missing=tuple(_missing(ranks, unknown, is_on_device=is_on_device)),
    )
    marks = steps.drop_nulls("number")["mark_ns"]
    computing = with_rank((rank, each.rows) for rank, each in parts.items())
    works = pl.col("activity").str.contains(f"^(?:{COMPUTE}|{host_activity.OPERATORS}: )")
    chain = pl.concat_str("code", "operator", separator="\n", ignore_nulls=True)
    summed = rows.filter(works).group_by(chain, maintain_order=True).agg(pl.col("ns").sum())
    roles = computing.group_by("top", "operator", "kind", maintain_order=True).agg(
        pl.col("ns").sum() / count
    )  # fmt: skip
    hosts = rows.filter(
        pl.col("activity").str.starts_with(f"{host_activity.OPERATORS}: "), not is_on_device
    )
    on_host = hosts.drop_nulls("operator").group_by(
        "operator", pl.col("code").str.split("\n").list.last()
    ).agg(pl.col("ns").sum() / count).sort(-pl.col("ns"), "operator", "code")  # fmt: skip
    return DeviceLedger(
        ledger=ledger,
        on_device=is_on_device,
        ranks=tuple(ranks),
        world_size=next((each.world_size for each in ranks.values()), None),
        total_ns=total,
        account_ns=tuple(keys["ns"].gather(order).to_list()),
        mark_ns=float(np.mean(marks.to_numpy())) if len(marks) else None,
        gaps=with_rank((rank, each.gaps) for rank, each in ranks.items()).sort(
            "idle_ns", descending=True, maintain_order=True
        ),
        kernel_count=sum(each.kernel_count for each in ranks.values()),
        linked_count=sum(each.linked_count for each in ranks.values()),
        operators=_operators(computing, times, own, count),
        uneven=_uneven(computing, times, own) if len(peers) else (),
        roles=tuple(OperatorRole(*row) for row in roles.iter_rows()),
        host_operators=tuple(HostOperator(*row) for row in on_host.iter_rows()),
        branches={tuple(code.split("\n")): ns / count for code, ns in summed.iter_rows() if code},
        damage=tuple(note for each in ranks.values() for note in each.damage),
        device_name=next((each.device_name for each in parts.values()), None),
        peak=next((each.peak_source for each in parts.values()), None),
    )


def _operators(
    rows: pl.DataFrame, times: _Steps, own: Ints, count: int
) -> tuple[DeviceOperator, ...]:
    """The operators of all devices, and what each could gain."""
    key, sums = list(OPERATOR), ("call_count", "kernel_count", "short_count", "short_ns", "ns",
                                 "known_ns", "flops", "bytes")  # fmt: skip
    keys = rows.group_by(key, maintain_order=True).agg(
        pl.col("kernel", "row_count", "estimate", "compute_ratio", *LAUNCH).first(),
        pl.col(sums).sum(),
        *(pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum())
          for name in ("roof_ns", "tensor_ns")),
    ).with_row_index("account")  # fmt: skip
    numbered = rows.join(keys.select("account", *key), on=key, nulls_equal=True)
    gains = {}
    for gain, reached in (("gain_ns", "reach_ns"), ("gain_low_ns", "sure_ns"),
                          ("gain_high_ns", "best_ns")):  # fmt: skip
        less = (pl.col("ns") - pl.col(reached).fill_null(pl.col("ns"))).clip(0).round()
        cube = times.cube(numbered.with_columns(ns=less.cast(pl.Int64)), len(keys))
        gains[gain] = [float((own.max(axis=0) - (own - each).max(axis=0)).mean()) for each in cube]

    def of_known(name: str, unit: float = 1.0) -> pl.Expr:
        known = (pl.col("known_ns") > 0) & (pl.col(name) > 0)
        return pl.when(known).then(pl.col(name) / (pl.col("known_ns") / unit))

    table = keys.select(
        *("shapes", "kind", "precision", "kernel", "row_count", "estimate", *LAUNCH),
        pl.col("call_count", "kernel_count", "short_count") / count,
        name="operator", short_ns_per_step=pl.col("short_ns") / count,
        ns_per_step=pl.col("ns") / count, flops_per_s=of_known("flops", 1e9),
        bytes_per_s=of_known("bytes", 1e9), roofline_ratio=of_known("roof_ns"),
        tensor_ratio=of_known("tensor_ns"),
        bound=pl.when(pl.col("compute_ratio") > 1).then(pl.lit("compute"))
        .when(pl.col("compute_ratio").is_not_null()).then(pl.lit("memory")),
        **{name: pl.Series(values, dtype=pl.Float64) for name, values in gains.items()},
    ).sort("gain_ns", "ns_per_step", descending=True, maintain_order=True)  # fmt: skip
    return tuple(DeviceOperator(**row) for row in table.iter_rows(named=True))


def _uneven(rows: pl.DataFrame, times: _Steps, own: Ints) -> tuple[UnevenOperator, ...]:
    """Operators that are longer on one rank, by what the mean step becomes shorter without that."""
    key = ["operator", "kind"]
    keys = rows.select(key).unique(maintain_order=True).with_row_index("account")
    cube = times.cube(rows.join(keys, on=key, nulls_equal=True), len(keys)).astype(np.float64)
    usual = cube[:, ::-1] if cube.shape[1] == 2 else np.median(cube, axis=1, keepdims=True)
    usual = np.broadcast_to(usual, cube.shape)
    excess = (cube - usual).clip(0)
    calls = rows.group_by("rank", *key).agg(
        work=pl.struct("shapes", "call_count").sort().hash().sum()
    )  # fmt: skip
    found = []
    for (at, name, kind), each in zip(keys.iter_rows(), excess, strict=True):
        lane = int(each.sum(axis=1).argmax())
        after = own.astype(np.float64)
        after[lane] -= each[lane]
        gains = own.max(axis=0) - after.max(axis=0)
        low, high = _interval(gains, float(gains.mean()))
        rank = int(times.lanes["rank"][lane])
        work = calls.filter(operator=name, kind=kind).select("rank", "work")
        mine = work.filter(rank=rank)["work"]
        usually = work.filter(pl.col("rank") != rank)["work"].mode()
        steps = cube.shape[2]
        found.append(UnevenOperator(
            name=str(name), rank=rank, is_same_work=bool(mine.is_in(usually.implode()).any()),
            own_ns=float(cube[at, lane].sum()) / steps,
            others_ns=float(usual[at, lane].sum()) / steps,
            ns_per_step=float(each[lane].sum()) / steps,
            gain_ns=float(gains.mean()), gain_low_ns=low, gain_high_ns=high,
        ))  # fmt: skip
    return tuple(sorted((each for each in found if each.gain_ns > 0), key=lambda x: -x.gain_ns)[:3])


class _Steps:
    """The steps that all ranks have, as a table of devices (rank and device) by steps."""

    def __init__(self, ranks: Mapping[int, RankLedger], steps: pl.DataFrame) -> None:
        lanes = [(rank, device) for rank, each in ranks.items() for device in each.devices]
        self.lanes = pl.DataFrame(
            [(*place, lane) for lane, place in enumerate(lanes)],
            schema=dict.fromkeys(("rank", "device", "lane"), pl.Int64), orient="row",
        )  # fmt: skip
        for key in ("number", "step"):  # windows of other steps: the nth is compared with the nth
            is_common = pl.col("rank").n_unique().over(key) == len(ranks)
            common = steps.drop_nulls(key).filter(is_common)
            if len(common):
                break
        placed = common.with_columns(at=pl.col(key).rank("dense").cast(pl.Int64) - 1)
        self._steps = placed.select("rank", "step", "at")
        cells = self.lanes.join(placed, on="rank", maintain_order="left_right")
        self.length: Ints = np.zeros((len(lanes), placed["at"].n_unique()), dtype=np.int64)
        at = tuple(cells[name].to_numpy() for name in ("lane", "at"))
        self.length[at] = (cells["end_ns"] - cells["start_ns"]).to_numpy()

    def cube(self, rows: pl.DataFrame, account_count: int) -> Ints:
        """Time in ns of each account, device and step."""
        found: Ints = np.zeros((account_count, *self.length.shape), dtype=np.int64)
        known = rows.join(self.lanes, on=["rank", "device"]).join(self._steps, on=["rank", "step"])
        np.add.at(found, tuple(known[name].to_numpy() for name in ("account", "lane", "at")),
                  known["ns"].to_numpy())  # fmt: skip
        return found


def _account(
    key: dict[str, Any], times: Ints, own: Ints, count: int, code: list[str], rank_count: int
) -> Account:
    """One row of the ledger; `times` of the account and `own` are by device and step."""
    activity, function = str(key["activity"]), key["function"]
    needed = (
        activity.startswith((COMPUTE, f"{host_activity.OPERATORS}: "))
        and activity not in CONVERSIONS
    )
    mean = key["ns"] / count
    low, high = _interval(times.mean(axis=0), mean)
    gain, gain_low, gain_high = 0.0, 0.0, 0.0
    if not needed and activity != PEER:
        gains = own.max(axis=0) - (own - times).max(axis=0)
        gain = float(gains.mean())
        gain_low, gain_high = _interval(gains.astype(np.float64), gain)
        gain_high = min(gain_high, float(own.max(axis=0).mean()))
    if activity == COPY_OR_CAST or (activity == QUEUE and key["position"] != "optimizer"):
        # The device itself needs some time between two kernels, and some casts are meant: nobody
        # knows how much of it can go. An optimizer can be one kernel (fused=True).
        gain_low = 0.0
    remedy = None if needed else remedy_of(activity)
    inner = host_activity.parse_place(code[0])[0] if code else None
    package = None if key["file"] is None else "job"  # whose code is innermost
    if inner is not None:
        top = inner.replace("\\", "/").split("/")[0].removesuffix(".py")
        is_own = inner == key["file"] and top not in host_activity.LIBRARIES
        package = "job" if is_own else top
    paid = int((times > 0).any(axis=0).sum())
    return Account(
        ranks=() if len(key["ranks"]) == rank_count else tuple(key["ranks"]),
        position=str(key["position"]), activity=activity, package=package,
        file=key["file"], line=key["line"], function=function,
        callees=tuple(code), ns_per_step=mean, low_ns=low, high_ns=high, needed=needed,
        gain_ns=gain, gain_low_ns=gain_low, gain_high_ns=gain_high,
        when="each step" if paid == times.shape[1] else f"in {paid} of {times.shape[1]} steps",
        explanation=remedy.key if remedy else None,
    )  # fmt: skip


def _interval(values: Floats, mean: float) -> tuple[float, float]:
    """Where the mean over steps lies; the mean itself of a single step."""
    if len(values) < 2:
        return mean, mean
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    half = student_quantile((1 + _CONFIDENCE) / 2, len(values) - 1) * error
    return max(0.0, mean - half), mean + half


def _largest_code(rows: pl.DataFrame) -> dict[int, list[str]]:
    """The Python function and the operator in which most of each account passes."""
    found: dict[int, list[str]] = {account: [] for account in rows["account"].unique()}
    whole = rows.group_by("account").agg(whole=pl.col("ns").sum())
    for name in ("callee", "operator"):
        summed = rows.drop_nulls(name).group_by("account", name).agg(pl.col("ns").sum())
        most = summed.sort(-pl.col("ns"), name).unique("account", keep="first", maintain_order=True)
        known = most.join(whole, on="account").filter(pl.col("ns") * 3 > pl.col("whole"))
        for account, text in known.select("account", name).iter_rows():
            found[account].append(re.sub(ADDRESS, "", text))
    return found


def _rests_on(ranks: Mapping[int, RankLedger], *, is_on_device: bool) -> str:
    """What the numbers are made of, in words."""
    counts = sorted({len(each.steps) for each in ranks.values()})
    numbered = all(each.steps["number"].null_count() == 0 for each in ranks.values())
    steps = f"{'-'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} step"
    steps = steps + ("s" if counts[-1] != 1 else "") if numbered else "all that was recorded"
    traces = "a trace" if len(ranks) == 1 else f"traces of {len(ranks)} ranks"
    if not is_on_device:
        return f"{traces} without GPU events, {steps}: the host's training thread"
    kernels = sum(each.kernel_count for each in ranks.values())
    linked = sum(each.linked_count for each in ranks.values())
    known = f"{linked} of {kernels} GPU events linked to their launch"
    return f"{traces}, {steps}; {known} ({ratio_text(linked / kernels)})"


def _missing(
    ranks: Mapping[int, RankLedger], unknown: list[str], *, is_on_device: bool
) -> list[str]:
    """What the traces lack, each with what would bring it."""
    bare = [rank for rank, each in ranks.items() if not each.has_stacks]
    who = "" if len(bare) in (0, len(ranks)) else f" of {ranks_text(bare)}"
    unmarked = any(each.steps["number"].null_count() for each in ranks.values())
    is_one = max(len(each.steps) for each in ranks.values()) == 1
    lost = sum(each.kernel_count - each.linked_count for each in ranks.values())
    counted = (
        (bare, f"lines of code{who}: recorded without with_stack=True"),
        (unknown, f"waiting for peers in collectives: {'; '.join(unknown)}"),
        (unmarked,
         "steps: no whole one is marked (profiler.step()), all that was recorded counts as one"),
        (is_one and not unmarked,
         "spread over steps: there is one whole step, and it takes several"),
        (lost and is_on_device, f"launches of {lost} GPU events (launched before the window, as a "
                                "rule): they have the position of their neighbours"),
    )  # fmt: skip
    return [note for is_so, note in counted if is_so]


def device_document(found: DeviceLedger) -> dict[str, Any]:
    """The ledger of the devices, what their operators reach, and what to do about each account."""
    return {
        **ledger_document(found.ledger),
        "ranks": list(found.ranks),
        "damage": list(found.damage),
        "device_name": found.device_name,
        "peak": found.peak,
        "operators": [
            asdict(each) | {"do": operator_remedy(each.kind, each.precision, each.row_count)}
            for each in found.operators
        ],
        "uneven": [asdict(each) for each in found.uneven],
        "host_operators": [each._asdict() for each in found.host_operators],
        "gaps": found.gaps.to_dicts(),
        "explanations": {each.key: each.do for each in reversed(REMEDIES)},
        "late": found.late,
    }
