"""A pipeline stage, a shard, a machine or one rank that the rest of the job waits for."""

from __future__ import annotations

import numpy as np

from haiprof.base.intervals import Bools, Floats
from haiprof.base.ledger import POSITIONS, PROBLEM_RATIO
from haiprof.base.units import duration_text
from haiprof.diagnosis.explanations import code_lines
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.run_ledger import RunLedger
from haiprof.diagnosis.verdict import Finding, gain_of, make_finding
from haiprof.run_analysis import ledger
from haiprof.run_analysis.code_samples import CodeSamples
from haiprof.run_analysis.lines import wilson
from haiprof.run_analysis.parallelism import MACHINE, Part
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_analysis.step_positions import BACKWARD

RULE = "slow_part"
_RANKS = 64  # Own time is told of so many ranks at most, at equal distances
_MIN_SAMPLES = 30  # Of each rank: with fewer its share of waiting is not known
_APART = 0.5
"""The fastest of its ranks needs longer than the slowest other one by so much of the difference of
their means: of eight alike ranks four are the slower ones in one of 35 cases."""
_RANK, _STAGE = "rank", "stage"
_REMEDIES = {
    "pipeline stage": "give this stage fewer layers: move some to the stages that wait for it, or "
    "split the first and the last one, which have the embedding and the loss, otherwise",
    "data shard": "compare what these ranks are given with the others' shards: lengths of samples, "
    "files, where they are stored, preprocessing",
    "tensor shard": "divide the work of a layer evenly: sizes that the number of shards divides",
    "expert group": "balance what experts are given: an auxiliary loss, capacity, expert placement",
    "context shard": "divide sequences so that each part has as much attention (zigzag, striped)",
    _STAGE: "a stage of a pipeline: move layers to the ranks that wait for it",
    MACHINE: "measure it against the others: `haiprof preflight`; then repair it or leave it out",
}
_OTHERWISE = "compare what these ranks do with the others: `haiprof verdict rank`"


def slow_part(inputs: RuleInputs, found: RunLedger) -> Finding | None:
    """The part of the job whose ranks all need longer than all others; None where there is none."""
    analyzer, layout = inputs.analyzer, inputs.layout
    # A rank's own time is its mean step without what it was sampled in torch.distributed, waiting.
    # In a job of pipeline stages ranks wait in sends and receives, which backends need not number:
    # there the times at which collectives begin do not tell who is late.
    ranks = found.time.ranks[:: max(-(-len(found.time.ranks) // _RANKS), 1)]
    # Ranks of no known layout are told where each has a part of the model, and hands it on.
    if len(ranks) < 2 or (layout is None and not are_stages(inputs, found)):
        return None
    known = set(np.unique(found.samples.rank).tolist())
    samples = found.samples if known >= set(ranks) else analyzer.code_samples(ranks)
    waits = ledger.waits_for_peers(samples.tree)[samples.stack]
    own = _own_times(analyzer, found, ranks, samples, waits)
    if own is None:
        return None
    # A rank alone that is known to be late by when its collectives begin is told by that.
    mean_ns = found.ledger.mean_ns
    told = {
        rank for each in found.ledger.accounts for rank in each.ranks
        if each.explanation == "ranks_uneven" and each.gain_ns >= PROBLEM_RATIO * mean_ns
    }  # fmt: skip
    parts = [] if layout is None else [part for parts in layout.dimensions for part in parts]
    alone = _STAGE if layout is None else _RANK
    parts += [Part(kind=alone, name=f"rank {r}", ranks=frozenset([r])) for r in {*ranks} - told]
    best = max(((_extra(own, ranks, part), part) for part in parts), key=lambda pair: pair[0][0])
    (extra, low, high), part = best
    if low < PROBLEM_RATIO * mean_ns:
        return None
    works = np.isin(samples.rank, [r for r in ranks if r in part.ranks]) & ~waits
    working = samples.take(works & (samples.worker < 0))
    inside = _of_part(ranks, part)
    its_own, usual = (float(own[chosen, 1].mean()) for chosen in (inside, ~inside))
    hosts = {host for rank, host in inputs.hosts.items() if rank in part.ranks}
    need = "it needs" if part.kind in (_RANK, _STAGE) else "its ranks need"
    if part.kind == _STAGE:  # who takes over work of it needs longer then
        extra, low, high = (ns * (~inside).mean() for ns in (extra, low, high))
    return make_finding(
        f"{inputs.name_ranks(sorted(part.ranks))} holds the job up: {need} "
        f"{duration_text(its_own - usual)} longer per step than the others",
        _REMEDIES.get(part.kind, _OTHERWISE), ("own time of a step there", its_own, "ns"),
        ("of the other ranks", usual, "ns"), ("what that costs per step", extra, "ns"), rule=RULE,
        confidence=0.9, cause=part.kind, lost_ratio=min(extra / mean_ns, 1.0),
        gain=gain_of(mean_ns, extra, low, high),
        nodes=tuple(sorted(hosts)) if part.kind == MACHINE else (),
        code_lines=code_lines(working, "its ranks' step", min(its_own / mean_ns, 1.0)),
    )  # fmt: skip


def are_stages(inputs: RuleInputs, found: RunLedger) -> bool:
    """Whether ranks hand on what each computes in its part of a model."""
    # Ranks with like models hand on other things, unless torch's pipelines do it.
    tree = found.samples.tree
    models = {tuple((model.name, model.parameter_count) for model in each.models)
              for each in inputs.settings.values()}  # fmt: skip
    return (
        bool(ledger.point_to_point(tree).any())
        and (len(models) > 1 or any(ledger.PIPELINE_FILE in f.file for f in tree.frames))
        and all("forward" in each for each in found.rank_positions().values())
    )


def _own_times(
    analyzer: RunFrames, found: RunLedger, ranks: tuple[int, ...], samples: CodeSamples,
    waits: Bools,
) -> Floats | None:  # fmt: skip
    """[rank, 3]: its mean step without waiting, at least, likely and at most, by its samples.

    None where one of them was not sampled enough.
    """
    # What backward does after the last collective that it began in it is waiting, too.
    trained = (samples.worker < 0) & (samples.step >= 0)
    means = found.time.average(found.time.period_ns)
    rows = dict(zip(found.time.ranks, means.tolist(), strict=True))
    positions = found.rank_positions()
    own = []
    for rank in ranks:
        chosen = trained & (samples.rank == rank)
        if chosen.sum() < _MIN_SAMPLES:
            return None
        weight = samples.weight_ns[chosen]
        waited = float(weight[waits[chosen]].sum()) / max(float(weight.sum()), 1.0)
        tail = (analyzer.backward_tail(rank) or 0.0) * positions[rank].get(POSITIONS[BACKWARD], 0.0)
        least, most = wilson(*np.array([[1.0 - waited], [1.0]]) * chosen.sum())
        shares = np.array([least[0], 1.0 - waited, most[0]])
        own.append(np.maximum(rows[rank] * shares - tail, 0.0))
    return np.array(own)


def _of_part(ranks: tuple[int, ...], part: Part) -> Bools:
    return np.array([rank in part.ranks for rank in ranks])


def _extra(own: Floats, ranks: tuple[int, ...], part: Part) -> tuple[float, float, float]:
    """By how much its ranks need longer: on the mean, at least and at most; 0 where not all do."""
    inside = _of_part(ranks, part)
    slow, others = own[inside], own[~inside]
    if not len(slow) or not len(others):
        return 0.0, 0.0, 0.0
    extra = float(slow[:, 1].mean() - others[:, 1].mean())
    low = float(slow[:, 1].min() - others[:, 1].max())
    if low < _APART * extra:
        return 0.0, 0.0, 0.0
    # One of many ranks is always the slowest: alone it counts as far as its samples prove.
    least, most = (0, 2) if part.kind in (_RANK, _STAGE) else (1, 1)
    low = float(slow[:, least].min() - others[:, most].max())
    return extra, low, float(slow[:, most].max() - others[:, least].min())
