"""The ledger of a run: its time table, the opportunities in it, and what each would gain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from haiprof.base.code_places import place_text
from haiprof.base.intervals import Bools, Floats, Ints
from haiprof.base.ledger import NOT_KNOWN, POSITIONS, PROBLEM_RATIO, Account, AccountPart, Ledger
from haiprof.base.units import NS_PER_S
from haiprof.diagnosis import job_time, opportunities, thresholds
from haiprof.diagnosis.background_saves import SLOWED, Saves, SlowedSteps, find_saves, split_saves
from haiprof.diagnosis.job_time import BESIDE, DeviceUse, JobTime, Singles, Stragglers
from haiprof.diagnosis.loader_causes import even_ratio, restarts_workers
from haiprof.diagnosis.machine_causes import (
    NEIGHBOURS,
    busy_ratio,
    find_larger_inputs,
    shared_cores,
    starvation,
    used_by_others,
)
from haiprof.diagnosis.opportunities import CodePlace, Opportunity, opportunity
from haiprof.diagnosis.rule_inputs import RuleInputs, gather_inputs
from haiprof.diagnosis.small_operators import Recurrence, find_loops, give_lines, has_gradients
from haiprof.diagnosis.verdict import Finding
from haiprof.run_analysis import ledger, lines
from haiprof.run_analysis.code_samples import OTHER_THREADS, WORKER, CodeSamples
from haiprof.run_analysis.ledger import (
    LINK_WAIT,
    NO_CORE,
    OPERATORS,
    PEER_WAIT,
    RankSamples,
    TimeTable,
)
from haiprof.run_analysis.run_files import text
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_analysis.step_frame import GC_PHASE
from haiprof.run_analysis.step_positions import (
    AFTER_STEP,
    BETWEEN_STEPS,
    COMPILE,
    GRADIENTS,
    OPTIMIZER,
)

SAMPLED_RANKS = 8  # Samples of so many ranks are read: the slowest, and others at equal distances
SMALL_RATIO = 0.002  # Accounts below this share of a step are one row by position and activity
_MOST_SPLIT = 0.95  # No more of the model's own operators is called avoidable
_BEHIND_LOSS = (GRADIENTS, OPTIMIZER, AFTER_STEP, BETWEEN_STEPS)
_SLOWEST_RATIO = 1.2
"""A rank that spends so many times the mean of all ranks on an account is named."""
_ONE_RANK = 0.8  # Where one of several ranks has so much of an account, it is about that rank
_ALSO_RATIO = 0.25  # A second line that has so much of an account is named beside the first one
_ELSEWHERE_RATIO = 0.1
"""A position that holds so much of an account is named beside the one that holds most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLedger:
    """The ledger with what its explanations look at."""

    ledger: Ledger
    samples: CodeSamples
    late: Stragglers | None  # The ranks that need longer than the others; None without any
    slowed: SlowedSteps | None
    """What saves beside the training cost; None where there were none, or nothing is sure."""
    recurrences: Sequence[Recurrence]
    time: JobTime
    table: TimeTable
    rows: tuple[Ints, ...]  # Rows of the table by account

    def collections_ns(self, account: Account) -> float:
        """What an account takes of the mean step in garbage collections."""
        rows = self.rows[self.ledger.accounts.index(account)]
        collects = self.table.activity[rows] == ledger.COLLECTION
        return self.time.mean_of(self.table, rows[collects])

    def series(self, account: int) -> Floats:
        """[step of `time.step`]: what an account takes, of the one rank that has it or on average.

        In each step it has its share of the exact time of its positions.
        """
        parts = self.time.series_of(self.table, self.rows[account])
        if of := self.ledger.accounts[account].ranks:
            parts = parts[[self.time.ranks.index(of[0])]]
        found: Floats = parts.mean(axis=0, dtype=np.float64)
        return found

    def of_samples(self) -> tuple[Ints, Floats]:
        """Per sample: its position, -1 without one; and what it stands for of its rank's mean step.

        Without what no line is the cause of, so that a line's samples add up to its accounts.
        """
        table = self.table
        position, ns = np.full(len(self.samples.stack), -1), np.zeros(len(self.samples.stack))
        seen = table.sample >= 0
        position[table.sample[seen]] = table.position[seen]
        chosen = seen & ~opportunities.lacks_line(table)
        means = dict(zip(self.time.ranks, self.time.average(self.time.period_ns), strict=True))
        for rank in np.unique(table.rank).tolist():
            own = table.rank == rank
            rows = own & chosen
            scale = means[rank] / max(float(table.ns[own].sum()), 1.0)
            np.add.at(ns, table.sample[rows], scale * table.ns[rows])
        return position, ns

    def rank_positions(self) -> dict[int, dict[str, float]]:
        """By rank, the one with the longest mean step first: its mean step by position."""
        means = self.time.totals_ns.sum(axis=1) / self.time.count.sum()
        order = np.argsort(-means.sum(axis=1), kind="stable").tolist()
        named = [{name: ns for name, ns in zip(POSITIONS, own, strict=True) if ns}
                 for own in means.tolist()]  # fmt: skip
        return {self.time.ranks[row]: named[row] for row in order}


def run_ledger(
    inputs: RuleInputs, facts: Sequence[Finding] = (), also: Collection[int] = ()
) -> RunLedger | None:
    """Builds the ledger of a run; None without judged steps."""
    # Of `facts` the settings with a price have an account; samples of the ranks in `also` are read
    # beside those that are read anyway.
    analyzer = inputs.analyzer
    if not inputs.by_rank:
        return None
    time, saves = _side_by_side(inputs)
    apart = max(len(time.ranks) // (SAMPLED_RANKS - 1), 1)
    chosen = {time.slowest, *time.ranks[::apart], *set(also).intersection(time.ranks)}
    chosen |= set(sorted(saves.own)[:1]) if saves else set()
    samples = analyzer.code_samples(chosen)
    parts = [_rank_samples(inputs, rank, time, saves) for rank in sorted(chosen)]
    table = ledger.time_table(samples, parts, uses_gpu=inputs.uses_gpu)
    # A rank that was killed before it wrote its samples is as those that were sampled.
    sampled = np.isin(table.rank, table.rank[table.count > 0])
    some = sampled.any() and not sampled.all()
    table = opportunities.mark_needed(table.take(sampled) if some else table)
    table = _keep_needed_elsewhere(table, inputs)
    table, loops = find_loops(table, samples, time, inputs.traces.lines)
    found = opportunities.find_opportunities(table, loops.found)
    # A metric that records gradients may be the loss itself, up to backward.
    metric = table.tree.within(opportunities.METRIC_FILE)[table.stack]
    metric &= ~np.isin(table.position, _BEHIND_LOSS)
    found = [
        replace(each, unsure_ns=time.mean_of(table, rows)) if has_gradients(table, rows) else each
        for each in found for rows in [each.rows[metric[each.rows]]]
    ]  # fmt: skip
    asked = _asked_collections(inputs)
    if asked is not None:
        found = [replace(each, at=asked) if each.activity == ledger.COLLECTION else each
                 for each in found]  # fmt: skip
    else:
        seen = _find_pause_samples(samples, parts)
        table, found = opportunities.join_collections(table, found, seen)
    restarts = restarts_workers(inputs)
    found = opportunities.join_restarts(table, found) if restarts else found
    waits = not restarts and ledger.workers_hand_over(samples, time.slowest)
    found = opportunities.join_received(table, found, time=time, waits=waits)
    share = _workers_share(inputs, time.slowest)
    table, found = opportunities.join_worker_cores(table, found, share if share > 0.5 else 0.0)
    others = samples.take((samples.phase == OTHER_THREADS) & (samples.worker < 0))
    found = opportunities.join_fed_thread(table, found, others)
    starved = starvation(inputs)
    if starved is not None and starved.rule == NEIGHBOURS:  # the workers take cores, too
        found = [replace(each, unsure_ns=share * time.mean_of(table, each.rows))
                 if each.activity == NO_CORE else each for each in found]  # fmt: skip
    table = _keep_needed_waits(table, found, samples, inputs, time)
    found += loops.found
    slowed = None
    if saves is not None:
        table, beside, slowed = split_saves(table, time, saves)
        found += [beside] if beside else []
    left, by_position, goes = _subtract_found(table, time, found)
    late = job_time.find_stragglers(time, left, by_position)
    if late is not None:
        if all(find_larger_inputs(inputs, rank) for rank in late.ranks):
            late = late.dealt_over(len(time.ranks))
        table, more = _split_stragglers(table, time, late, found, goes)
        found += more
        time = replace(time, like=dict.fromkeys(late.ranks, time.slowest))
    elif time.waits_for_all and _inputs_differ(inputs.input_sizes, left):
        # Which steps waited how long for a core is an estimate: it may be all that differs.
        cores = [time.mean_of(table, each.rows) for each in found if each.activity == NO_CORE]
        found = [replace(each, key="data_imbalance", unsure_ns=sum(cores))
                 if each.activity == PEER_WAIT else each for each in found]  # fmt: skip
    if inputs.traces.lines is not None:
        table = give_lines(table, loops)
        samples = replace(samples, tree=table.tree)
    for fact in facts:
        if fact.is_priced:
            table, found = _split_setting(table, found, fact, time)
    table, found = _keep_needed_link(table, found, inputs, time)  # of what settings leave
    median = float(np.median([own["step_ns"].median() for own in inputs.by_rank.values()]))
    made, rows = _ledger(table, time, found, left, late)
    return RunLedger(
        ledger=replace(made, median_ns=median, missing=_missing(analyzer, table)),
        samples=samples, late=late, slowed=slowed, recurrences=loops.recurrences,
        time=time, table=table, rows=rows,
    )  # fmt: skip


def _side_by_side(inputs: RuleInputs) -> tuple[JobTime, Saves | None]:
    """The judged steps of all ranks, and what was saved beside them."""
    analyzer = inputs.analyzer
    steps = {r: analyzer.cells(r).of_steps(_judged_numbers(inputs, r)) for r in inputs.by_rank}
    groups = analyzer.arrivals()
    # A group is known in parts alone where it spans hosts whose clocks are not known to each other.
    is_whole = len({(group.group, group.group_name) for group in groups}) == len(groups)
    peers, tails = None, dict[int, float | None]()
    if groups:
        peers = job_time.peer_waits(
            groups if is_whole else [], analyzer.step_starts(steps),
            lambda rank: analyzer.step_positions(rank)[:2],
        )  # fmt: skip
        tails = {} if peers.ns else {rank: analyzer.backward_tail(rank) for rank in steps}
    known = {rank: share for rank, share in tails.items() if share is not None}
    saves = find_saves(analyzer, steps, inputs.hosts)
    time = job_time.job_time(
        steps, analyzer.position_times, analyzer.used_positions(), peers,
        known if len(known) == len(steps) else None,
        partial(_device_use, inputs) if inputs.uses_gpu else None, saves.steps if saves else None,
    )  # fmt: skip
    return time, saves


def _workers_share(inputs: RuleInputs, rank: int) -> float:
    """Of the CPU that was used on a rank's node beside the ranks' own, what their workers used."""
    host = inputs.hosts.get(rank)
    loads = (r for r in inputs.world if inputs.loader_workers.get(r))
    own = sum(inputs.worker_cores(r) or 0.0 for r in loads if inputs.hosts.get(r) == host)
    others = used_by_others(inputs, host)
    return own / (own + others) if own and others is not None else 0.0


def _judged_numbers(inputs: RuleInputs, rank: int) -> Ints:
    """The judged steps of a rank, folded ones first, a block by its first one."""
    step, blocks = inputs.by_rank[rank]["step"].to_numpy(), inputs.blocks.get(rank)
    return step if blocks is None else np.append(blocks.first_step, step)


def _missing(analyzer: RunFrames, table: TimeTable) -> tuple[str, ...]:
    """Why no code is known; empty where any is."""
    if _sample_count(table):
        return ()
    failed = [line for rank in analyzer.files.ranks for line in rank.of_type("stacks_failed")]
    why = text(failed[0].get("reason")) if failed else None
    return (why or "no stack was sampled in the evaluated steps",)


def _asked_collections(inputs: RuleInputs) -> CodePlace | None:
    """The line that calls gc.collect(), where most of all collections' time is its doing."""
    pauses = inputs.pauses.filter(phase=GC_PHASE)["duration_ns"].sum()
    looks = [settings.looks for settings in inputs.settings.values()]
    if sum(look.collect_ns or 0 for look in looks) <= pauses / 2:
        return None
    most = max(looks, key=lambda look: look.collect_ns or 0)
    if most.collect_file is None or most.collect_line is None:
        return None
    return CodePlace(
        file=most.collect_file, line=most.collect_line,
        function=lines.written_in(most.collect_function or "<module>"),
    )  # fmt: skip


def _find_pause_samples(
    samples: CodeSamples, parts: Sequence[RankSamples]
) -> opportunities.Collecting:
    """Samples at which a collection stopped training: what allocates there brings it about."""
    found = [np.empty((3, 0), dtype=np.int64)]
    free = (samples.worker < 0) & (samples.position < 0)
    for rank in parts:
        at = np.flatnonzero(free & (samples.rank == rank.rank))
        place = rank.positions.at(samples.time_ns[at] - rank.wall_offset_ns)
        collects = (place >= 0) & np.append(rank.positions.collecting, False)[place]
        own = np.full(int(collects.sum()), rank.rank)
        position = rank.positions.position[place[collects]]
        found.append(np.stack([own, position, samples.stack[at[collects]]]))
    return opportunities.Collecting(*np.concatenate(found, axis=1))


def _device_use(inputs: RuleInputs, rank: int) -> DeviceUse:
    """What events on a rank's stream and its GPU's counter say."""
    bound = inputs.by_rank[rank]["idle_device_ns"].to_numpy().astype(np.float64)  # null: NaN
    if rank in inputs.blocks:
        bound = np.append(inputs.blocks[rank].idle_ns, bound)
    step, busy = _judged_numbers(inputs, rank), inputs.gpu_use.get(rank)
    return DeviceUse(step=step, bound_ns=bound, busy_ratio=busy)


def plain_ledger(analyzer: RunFrames, also: Collection[int] = ()) -> RunLedger | None:
    """The ledger alone, for views that say no verdict; None without judged steps."""
    return run_ledger(gather_inputs(analyzer, trace_limit_bytes=0), also=also)


def _keep_needed_waits(
    table: TimeTable, found: list[Opportunity], samples: CodeSamples, inputs: RuleInputs,
    time: JobTime,
) -> TimeTable:  # fmt: skip
    """What waiting leaves: no step is shorter than the work of others that it is for."""
    # Where a lock or unequal shares hold workers up, that of each worker; where a lock is waited
    # for, that of all threads and processes of the ranks on their cores.
    least = {
        ledger.LOADER_WAIT: even_ratio(samples.take(samples.phase == WORKER)),
        ledger.LOCK_WAIT: busy_ratio(inputs, time.slowest),
    }
    for each in found:
        if each.activity == ledger.LOCK_WAIT or (
            each.activity == ledger.LOADER_WAIT and each.at is None
        ):
            wait_ns = time.mean_of(table, each.rows)
            left = least[each.activity] * time.mean_ns - (time.mean_ns - wait_ns)
            if left > 0:
                table, _ = table.split(each.rows, left / max(wait_ns, 1.0), needed=True)
    return table


def _keep_needed_link(
    table: TimeTable, found: list[Opportunity], inputs: RuleInputs, time: JobTime
) -> tuple[TimeTable, list[Opportunity]]:
    """Exchanging gradients takes what their bytes need on a good link; more is lost."""
    # A ring all-reduce moves 2 (n - 1) / n of the gradients' bytes (Patarasuk and Yuan 2009), and
    # shards, which gather parameters twice, 3 (n - 1) / n (Rajbhandari et al., ZeRO, 2020). An
    # exchange that takes no longer than it may on a good link is needed as a whole; of a longer one
    # what it usually takes there is needed. What is called outside the phases exchanges none, but
    # before the optimizer where backward exchanges none.
    count = len(time.ranks)
    most_bytes = max((s.gradient_bytes for s in inputs.settings.values()), default=0)
    is_sharded = any(m.fsdp_unit_count for s in inputs.settings.values() for m in s.models)
    moved_bytes = (2 + is_sharded) * (count - 1) / count * most_bytes
    bytes_ns = moved_bytes / thresholds.LINK_BYTES_PER_S * NS_PER_S
    most_ns = bytes_ns + thresholds.LINK_LATENCY_NS
    usual_ns = bytes_ns + thresholds.LINK_USUAL_NS
    in_model = np.isin(table.position, ledger.MODEL_POSITIONS)
    has_phases = in_model.any()
    called = opportunities.calls_collectives(table.tree)[table.stack]
    models = [model for each in inputs.settings.values() for model in each.models]
    trained = [model for model in models if model.gradient_bytes]
    wrapped = [model for model in trained if model.ddp is not None or model.fsdp_unit_count]
    by_hand = not trained or len(wrapped) < len(trained)
    by_hand &= not (in_model & (table.activity == LINK_WAIT) & ~called).any()
    kept, spent_ns = [], 0.0
    for each in sorted(found, key=lambda one: -float(table.ns[one.rows].sum())):
        whole = time.mean_of(table, each.rows)
        is_beside = has_phases and each.position not in (*ledger.MODEL_POSITIONS, GRADIENTS)
        own_ns = table.ns[each.rows]
        is_called = float(own_ns[called[each.rows]].sum()) > float(own_ns.sum()) / 2
        is_by_hand = by_hand and each.position == GRADIENTS
        is_beside |= is_called and not is_by_hand
        if each.activity != LINK_WAIT or each.key is not None or not whole or is_beside:
            kept.append(each)
            continue
        before_ns = spent_ns * is_by_hand  # several lines may exchange a part each
        least_ns = max(usual_ns - before_ns, 0.0)
        is_long = whole > most_ns - before_ns
        table, _ = table.split(each.rows, least_ns / whole if is_long else 1.0, needed=True)
        spent_ns += (least_ns if is_long else whole) * is_by_hand
        if is_long:
            kept.append(replace(each, unsure_ns=most_ns - usual_ns))
    return table, kept


def _keep_needed_elsewhere(table: TimeTable, inputs: RuleInputs) -> TimeTable:
    """Who waits for others to send or receive needs that as far as they do their models' work."""
    waits = table.tree.holds(ledger.point_to_point(table.tree))[table.stack]
    waits &= table.activity == LINK_WAIT
    if not waits.any():
        return table
    known = sorted(inputs.analyzer.files.last_attempts())
    chosen = {*known[:: max(len(known) // SAMPLED_RANKS, 1)], *inputs.untrained}
    samples = inputs.analyzer.code_samples(chosen)
    began_ns = min(float(own["start_ns"].to_numpy().min()) for own in inputs.by_rank.values())
    works = ~ledger.waits_for_peers(samples.tree)[samples.stack] & (samples.time_ns >= began_ns)
    works &= (samples.worker < 0) & (samples.phase != OTHER_THREADS)
    ns = np.where(works, samples.weight_ns, 0.0)
    own_ns = np.where(opportunities.in_models(samples.tree)[samples.stack], ns, 0.0)
    for rank in np.unique(table.rank[waits]).tolist():
        others = samples.rank != rank
        share = float(own_ns[others].sum() / max(ns[others].sum(), 1.0))
        rows = np.flatnonzero(waits & (table.rank[: len(waits)] == rank))
        table, _ = table.split(rows, share, needed=True)
    return table


def _subtract_found(
    table: TimeTable, time: JobTime, found: Sequence[Opportunity]
) -> tuple[Singles, Floats, list[Bools]]:
    """What is left of the ranks' own time, [rank, covered step], without what was found."""
    # And the mean of what goes, [rank, position]; per opportunity, of each rank whether all goes.
    # What one rank alone has goes; what several have goes whole, where a rank has no more than
    # twice of what the middle one has; else as much as that one has: what it has beyond that is
    # lost to all.
    total = np.zeros(time.period_ns.shape, dtype=np.float32)
    by_position = np.zeros((len(time.ranks), len(POSITIONS)))
    goes = []
    for each in found:
        parts = time.series_of(table, each.rows)
        means, of_rank = time.average(parts), parts.sum(axis=1)
        is_alone = len(means) > 1 and of_rank.max() >= _ONE_RANK * max(float(of_rank.sum()), 1.0)
        middle = int(np.argsort(means, kind="stable")[(len(means) - 1) // 2])
        goes.append((means <= 2 * means[middle]) | is_alone)
        if each.activity == PEER_WAIT:  # own time is without it
            continue
        if not goes[-1].all():
            more = ~goes[-1]
            parts[more] = np.minimum(parts[more], parts[middle])
        total += parts
        by_position[:, each.position] += time.average(parts)
        del parts  # before the next one is made: of a thousand ranks it is large
    # What is needed elsewhere is no work of the ranks that wait for it.
    total += time.series_of(table, np.flatnonzero(table.needed & (table.activity == LINK_WAIT)))
    left = time.own_ns
    left -= time.of_stretches(total)
    return np.maximum(left, 0, out=left), by_position, goes


def _split_stragglers(
    table: TimeTable, time: JobTime, late: Stragglers, found: Sequence[Opportunity],
    goes: Sequence[Bools],
) -> tuple[TimeTable, list[Opportunity]]:  # fmt: skip
    """What the stragglers' work takes beyond the others', as one opportunity."""
    # It has a line where most of it is in one account that the others have, too.
    account = np.full(len(table.ns), -1)
    for number, (each, going) in enumerate(zip(found, goes, strict=True)):
        stays = np.isin(table.rank[each.rows], np.array(time.ranks)[going])
        stays |= each.activity == PEER_WAIT
        account[each.rows] = np.where(stays, -2, number)
    moved: list[Ints] = []
    time_of = np.zeros(len(found) + 1)  # the last one: work that is in no account
    for rank, by_position in late.by_position.items():
        for position in np.flatnonzero(by_position > 0).tolist():
            inside = (table.rank == rank) & (table.position == position)
            rows = np.flatnonzero(inside & (account[: len(inside)] > -2))
            whole = float(table.ns[rows].sum())
            if not whole:
                continue
            share = min(float(by_position[position]) * time.count.sum() / whole, _MOST_SPLIT)
            np.add.at(time_of, account[rows], share * table.ns[rows])
            table, new = table.split(rows, share, needed=False)
            account = np.append(account, np.full(len(new), -2))
            moved.append(new)
    if not moved:
        return table, []
    most = int(time_of.argmax())
    at = found[most].at if most < len(found) and 2 * time_of[most] > time_of.sum() else None
    more = opportunity(table, np.concatenate(moved), at)
    return table, [replace(more, key="ranks_uneven")]


def _split_setting(
    table: TimeTable, found: Sequence[Opportunity], setting: Finding, time: JobTime
) -> tuple[TimeTable, list[Opportunity]]:
    """What a setting costs: what runs for its sake alone, a part of operators, or of exchanges."""
    if setting.python_ratio:
        of_torch = np.array([*(name == "torch" for name in table.packages), True])[table.tree.place]
        slow = np.isin(table.activity, (ledger.PYTHON, ledger.NO_CORE))
        slow &= (table.work == ledger.PYTHON) & ~(of_torch[table.stack] & table.needed)
        if not slow.any():
            return table, [*found]
        table, taken = table.split(np.flatnonzero(slow), setting.python_ratio, needed=False)
        own = replace(opportunity(table, taken, None), key=setting.rule)
        return table, [*found, replace(own, spread=setting.python_spread)]
    is_seen = table.tree.runs(setting.seen_in)[table.stack]
    seen = np.flatnonzero(is_seen & (table.position != COMPILE))
    inside = np.isin(table.position, [POSITIONS.index(phase) for phase in setting.phases])
    rows = np.setdiff1d(np.flatnonzero(table.needed & inside), seen)
    calls = rows[table.activity[rows] == ledger.PYTHON]
    # Fewer numbers need no fewer calls: not Python's, nor what torch does in each of them, which
    # may be as much in forward, and in backward.
    unsure_ns = 2 * setting.work_ratio * time.mean_of(table, calls)
    rows = np.setdiff1d(rows, calls) if setting.work_ratio else rows
    waits = np.flatnonzero(np.isin(table.activity, (LINK_WAIT, PEER_WAIT)) & inside)
    lost_ns = (setting.lost_ratio or 0.0) * float(table.ns.sum()) - float(table.ns[seen].sum())
    lost = max(lost_ns / max(float(table.ns[rows].sum()), 1.0), setting.work_ratio)
    taken = seen
    # What waits for a core while it works for the setting's sake is gained with it.
    starved = inside & (table.activity == ledger.NO_CORE) & (table.work == OPERATORS)
    works, lost = np.append(rows, np.flatnonzero(starved)), min(lost, _MOST_SPLIT)
    for part, share in ((works, lost), (waits, setting.exchange_ratio)):
        if len(part) and share > 0:
            table, new = table.split(part, share, needed=False)
            taken = np.append(taken, new)
    if len(seen):
        table = replace(table, needed=table.needed & ~np.isin(np.arange(len(table.ns)), seen))
        found = [replace(each, rows=np.setdiff1d(each.rows, seen)) for each in found]
    if not len(taken):
        return table, [*found]
    unsure_ns += setting.unsure_ratio * time.mean_of(table, taken)
    own = replace(opportunity(table, taken, None), key=setting.rule, unsure_ns=unsure_ns)
    # Also where it is mostly waiting for ranks: each of them is late at times, and all gain.
    return table, [*found, replace(own, activity=LINK_WAIT) if own.activity == PEER_WAIT else own]


def _inputs_differ(sizes: pl.DataFrame, own_ns: Singles) -> bool:
    """Whether ranks are given inputs of unlike sizes, each at steps of its own."""
    # Sizes are looked at once a second, and so seldom on two ranks at the same step: whether a step
    # is a large one for all of them is seen by the correlation of their work over the steps.
    known = sizes.filter(pl.col("number_count") > 0).group_by("rank", "root")
    low, high = (pl.col("number_count").quantile(each) for each in (0.25, 0.75))
    enough = pl.col("len") >= thresholds.SIZES_MIN_COUNT
    ratios = known.agg(pl.len(), ratio=high / low).filter(enough)
    ratio, varied = ratios["ratio"].max(), own_ns[own_ns.std(axis=1) > 0]
    if not isinstance(ratio, float) or ratio < thresholds.LIKE_RATIO or len(varied) < 2:
        return False
    alike = np.corrcoef(varied)[np.triu_indices(len(varied), k=1)]
    return float(np.median(alike)) < thresholds.SAME_WORK_CORRELATION


def _rank_samples(inputs: RuleInputs, rank: int, time: JobTime, saves: Saves | None) -> RankSamples:
    analyzer, row, part = inputs.analyzer, time.ranks.index(rank), time.count[time.covered]
    own = analyzer.cells(rank).of_steps(_judged_numbers(inputs, rank))
    whole = (time.period_ns[row, time.covered] * part).sum()
    waits = time.waits_ns.items() if time.waits_for_all else ()
    positions, offset, busy = analyzer.step_positions(rank)
    plain, collected = analyzer.position_times(rank)
    return RankSamples(
        rank=rank, step=own.step, count=own.count, plain_ns=plain[:, own.column],
        collected_ns=collected[:, own.column], positions=positions, wall_offset_ns=offset,
        no_core_ratio=inputs.core_waits.get(rank), tail_ratio=analyzer.backward_tail(rank),
        peer_ratios={at: float((ns[row, time.covered] * part).sum() / whole) for at, ns in waits},
        free_ratio=_free_ratio(inputs, rank), busy=busy if time.idle_ns is not None else None,
        beside=saves.steps[rank] == BESIDE if saves else None,
    )  # fmt: skip


def _free_ratio(inputs: RuleInputs, rank: int) -> float | None:
    """Of the time: how long cores that are fewer than their ranks had nothing to do."""
    # None where they are not fewer, or nobody counted. While all wait for a slow link none of them
    # uses a core; what they exchange over their node's memory takes cores, for which they wait.
    group, cores = shared_cores(inputs, rank)
    known = [inputs.busy_cores[one.rank] for one in group if one.rank in inputs.busy_cores]
    if len(group) <= cores or len(known) < len(group):
        return None
    others = used_by_others(inputs, inputs.hosts.get(rank)) or 0.0
    return max(1.0 - (sum(known) + others) / cores, 0.0)


def _ledger(
    table: TimeTable, time: JobTime, found: Sequence[Opportunity], left: Singles,
    late: Stragglers | None,
) -> tuple[Ledger, tuple[Ints, ...]]:  # fmt: skip
    """The ledger, and the rows of the table by account."""
    code = table.tree.place[lines.innermost_written_stack(table.tree)]
    make = _Accounts(table=table, time=time, code=code, left=left, late=late)
    priced = [(make.opportunity(each), each.rows) for each in found]
    priced.sort(key=lambda one: -one[0].gain_ns)
    rest = np.ones(len(table.ns), dtype=np.bool_)
    for each in found:
        rest[each.rows] = False
    others, unseen = make.others(np.flatnonzero(rest))
    accounts = tuple(account for account, _ in (*priced, *others))
    mean = time.mean_ns
    residual = mean - sum(account.ns_per_step for account in accounts)
    made = Ledger(
        mean_ns=mean, median_ns=0.0, count=int(time.count.sum()),
        residual_ns=max(residual, unseen) if abs(residual - unseen) < 1 else residual,
        positions=time.positions, accounts=accounts,
        opportunities=tuple(place for place, (a, _) in enumerate(priced) if a.gain_ns > 0),
        device_idle_ns=None
        if time.idle_ns is None or not time.is_idle_known
        else float(time.average(time.idle_ns).mean()),
        device_idle_is_bound=time.is_idle_bound,
        rests_on=f"spans of {time.count.sum()} steps, without warm-up and traced ones, and "
        f"{_sample_count(table)} samples",
    )  # fmt: skip
    return made, tuple(rows for _, rows in (*priced, *others))


def _sample_count(table: TimeTable) -> int:
    return int(np.count_nonzero(np.bincount(table.sample[table.sample >= 0])))


def _groups(keys: Ints) -> Ints:
    """By column of [key, row]: the number of what all its keys say, in their order."""
    one = np.zeros(keys.shape[1], dtype=np.int64)
    for key in keys:  # few and small numbers from -1 on
        one = one * (int(key.max(initial=0)) + 2) + key + 1
    group: Ints = np.unique(one, return_inverse=True)[1]
    return group


@dataclass(frozen=True, slots=True, kw_only=True)
class _Accounts:
    """Makes accounts of rows of a table."""

    table: TimeTable
    time: JobTime
    code: Ints
    """By stack: the frame of the job's that it is in, outside of comprehensions; -1: none."""
    left: Singles
    late: Stragglers | None

    def opportunity(self, found: Opportunity) -> Account:
        """What a change would remove, with its gain."""
        table, time = self.table, self.time
        split = time.parts_of(table, found.rows)
        parts = split[0] if len(split) == 1 else split.sum(axis=0)
        mean = parts.mean(axis=0, dtype=np.float64)
        shown = found.rows[~table.hidden[found.rows]]  # behind the device it holds nothing up
        gains = time.gains(split if len(shown) == len(found.rows) else time.parts_of(table, shown))
        if found.activity == PEER_WAIT:  # others' lateness: it is theirs, unless they take turns
            gains = np.zeros(1)
            if found.key is not None:
                gains = self.left.max(axis=0) - self.left.mean(axis=0, dtype=np.float64)
        gain = float(time.average(gains)) if len(gains) > 1 else float(gains.mean())
        if found.activity == LINK_WAIT and gain > 0:
            # Ranks of a group wait for their link at once: that the slowest one has more of it in
            # each step is the error of shares that samples tell.
            of_rank = parts.sum(axis=1)
            group = parts[of_rank >= _ELSEWHERE_RATIO * of_rank.max()]
            most = float(time.average(group.mean(axis=0, dtype=np.float64)))
            gains, gain = gains * min(most / gain, 1.0), min(most, gain)
        low = high = 0.0
        if gain > 0:
            low, high = self._interval(found.rows, gains, gain, found.spread)
        if time.is_idle_bound and found.activity != PEER_WAIT:
            low = 0.0
        main = found.rows[table.position[found.rows] == found.position]
        paid = parts if len(main) == len(found.rows) else time.series_of(table, main)
        share = parts.sum(axis=1) / max(float(parts.sum()), 1.0)
        alone = len(time.ranks) > 1 and float(share.max()) >= _ONE_RANK
        slowest = time.ranks[int(share.argmax())]
        ranks = (slowest,) if alone else ()
        is_uneven = float(share.max()) >= _SLOWEST_RATIO * float(share.mean())
        own_ns = table.ns[found.rows]
        ns = np.bincount(table.position[found.rows], own_ns, len(POSITIONS))
        large = np.flatnonzero(ns >= _ELSEWHERE_RATIO * max(float(ns.sum()), 1.0)).tolist()
        held, place = dict[str, float](), table.tree.place[table.stack[found.rows]] + 1
        of_frame, seen = np.bincount(place, own_ns), np.bincount(place)
        for at in np.flatnonzero(seen[1:]).tolist():
            name = table.packages[at]
            held[name] = held.get(name, 0.0) + float(of_frame[at + 1])
        both = (
            (paid.max(axis=0), parts.max(axis=0))
            if alone
            else (paid.mean(axis=0, dtype=np.float64), mean)
        )
        del split, parts, paid  # of a thousand ranks they are large
        return Account(
            ranks=self.late.ranks if found.key == "ranks_uneven" and self.late else ranks,
            slowest_rank=slowest if is_uneven else None, position=POSITIONS[found.position],
            activity=ledger.ACTIVITIES[found.activity],
            package=max(held, key=lambda name: (held[name], name), default=None),
            gain_ns=gain, gain_low_ns=min(max(low - found.unsure_ns, 0.0), gain),
            gain_high_ns=max(high, gain), when=found.when or time.when(table, main, *both),
            explanation=found.key,
            elsewhere=tuple(POSITIONS[place] for place in large if place != found.position),
            callers=tuple(place_text(*each) for each in found.at.callers) if found.at else (),
            **self._measure(found.rows, mean, found.spread), **self._line_of(found),
        )  # fmt: skip

    def others(self, rows: Ints) -> tuple[list[tuple[Account, Ints]], float]:
        """What no opportunity holds, by position, activity, package and function; and the residual.

        Work of the model that was never sampled is the residual: its position is known, no more.
        """
        table, tree = self.table, self.table.tree
        sampled = table.activity[rows] != ledger.UNKNOWN
        unseen = self.time.mean_of(table, rows[~sampled])
        rows = rows[sampled]
        frame = tree.line_places()[lines.innermost_stack(tree)][table.stack[rows]]
        names, package = np.unique([*table.packages, ""], return_inverse=True)
        package[-1] = -1
        keys = np.stack([
            table.position[rows], table.activity[rows], package[tree.place[table.stack[rows]]],
            lines.functions_of(tree)[1][frame], table.needed[rows],
        ])  # fmt: skip
        group = _groups(keys)
        small = np.bincount(group, table.ns[rows])[group] < SMALL_RATIO * float(table.ns.sum())
        keys[2:4, small] = -1
        group = _groups(keys)
        found = []
        for number in range(int(group.max(initial=-1)) + 1):
            inside = np.flatnonzero(group == number)
            own, key = rows[inside], keys[:, inside[0]]
            mean, at, when = np.array([self.time.mean_of(table, own)]), {}, NOT_KNOWN
            if key[3] >= 0:
                seen = frame[inside] >= 0
                most = np.bincount(frame[inside][seen], table.ns[own[seen]]).argmax()
                at = self._describe_line(own, *tree.frames[int(most)][:3])
                if key[4] and mean[0] >= PROBLEM_RATIO * self.time.mean_ns:
                    series = self.time.series_of(table, own).mean(axis=0, dtype=np.float64)
                    when = self.time.when(table, own, series, series)
            account = Account(
                ranks=(), position=POSITIONS[key[0]], activity=ledger.ACTIVITIES[key[1]],
                package=str(names[key[2]]) if key[2] >= 0 else None, needed=bool(key[4]), when=when,
                **self._measure(own, mean), **at,
            )  # fmt: skip
            found.append((account, own))
        return sorted(found, key=lambda one: -one[0].ns_per_step), unseen

    def _measure(
        self, rows: Ints, series: Floats, spread: tuple[float, float] | None = None
    ) -> dict[str, Any]:
        """What some rows take per step, exact, and where that lies by its series over steps."""
        mean = self.time.mean_of(self.table, rows)
        low, high = self._interval(rows, series, mean, spread)
        return {"ns_per_step": mean, "low_ns": low, "high_ns": high}

    def _interval(
        self, rows: Ints, series: Floats, mean: float, spread: tuple[float, float] | None
    ) -> tuple[float, float]:
        if spread is not None:
            return mean * spread[0], mean * spread[1]
        low, high = self.time.interval(self.table, rows, series)
        # Nothing takes more than all of where it is.
        inside = self.time.totals_ns[:, :, np.unique(self.table.cell[rows])].sum(axis=(1, 2))
        most = float(inside.max()) / float(self.time.count.sum())
        return low, min(high, max(mean, most))

    def _line_of(self, found: Opportunity) -> dict[str, Any]:
        at = found.at
        if at is None:
            return {}
        if found.key in (SLOWED, opportunities.RECOMPUTED):  # beside or before what it makes longer
            return {"file": at.file, "line": at.line, "function": at.function}
        rows = found.rows
        if found.key == opportunities.FEEDS_THREAD:  # the wait for the thread is in all lines
            rows = rows[self.table.activity[rows] != ledger.GIL_WAIT]
        return self._describe_line(rows, at.file, at.line, at.function)

    def _describe_line(self, rows: Ints, file: str, line: int, function: str) -> dict[str, Any]:
        """A line with what of it is most of what some rows do, and what that calls."""
        # The expression is None where it was not recorded.
        table, tree = self.table, self.table.tree
        frame, ns = self.code[table.stack[rows]], table.ns[rows]
        of_line = {at: tree.frames[at].expression for at in np.unique(frame[frame >= 0]).tolist()
                   if tree.frames[at][:2] == (file, line)}  # fmt: skip
        time = dict.fromkeys(of_line.values(), 0.0)
        for at, name in of_line.items():
            time[name] += float(ns[frame == at].sum())
        most = max(time, key=lambda name: (name != "", time[name], name), default=None)
        inside = [at for at, name in of_line.items() if not most or name == most]
        inner = rows[np.isin(frame, inside)] if of_line else rows
        return {
            "file": file, "line": line, "function": function, "expression": most or None,
            "expression_ratio": time[most] / max(float(ns.sum()), 1.0) if most else None,
            "callees": lines.common_callees(tree, table.stack[inner], table.ns[inner]),
            "also": self._also(rows, frame, ns, inside),
        }  # fmt: skip

    def _also(
        self, rows: Ints, frame: Ints, ns: Floats, named: Sequence[int]
    ) -> AccountPart | None:
        """The line that takes most of some rows beside the frames that they are named by."""
        left = (frame >= 0) & ~np.isin(frame, named)
        most = int(np.bincount(frame[left], ns[left], 1).argmax())
        own = left & (frame == most)
        ratio = float(ns[own].sum()) / max(float(ns.sum()), 1.0)
        if ratio < _ALSO_RATIO:
            return None
        at = self.table.tree.frames[most]
        activity = int(np.bincount(self.table.work[rows[own]], ns[own]).argmax())
        return AccountPart(
            file=at.file, line=at.line, function=lines.written_in(at.function),
            expression=at.expression or None, activity=ledger.ACTIVITIES[activity], ratio=ratio,
        )  # fmt: skip
