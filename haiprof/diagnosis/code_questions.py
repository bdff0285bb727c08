"""Which code a finding is about: the question that each rule raises, and its answer in lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import polars as pl

from haiprof.base.units import ratio_text
from haiprof.diagnosis.collective_time import BETWEEN_PHASES, COLLECTIVES
from haiprof.diagnosis.finding import CodeLine, Finding, place_text
from haiprof.diagnosis.python_time import ends_in_torch
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.rules.backward_bound import GRADIENTS, LOSS
from haiprof.diagnosis.rules.forward_bound import PYTHON
from haiprof.diagnosis.rules.step_time_drift import SINCE_STEP
from haiprof.run_analysis.code_samples import (
    CODE_PHASES,
    OTHER_THREADS,
    SLOW_RATIO,
    TRAINING_PHASES,
    WORKER,
    CodeSamples,
)
from haiprof.run_analysis.lines import FunctionTime, function_times, time_beyond
from haiprof.run_analysis.nesting import Bools
from haiprof.run_analysis.phases import GC_PHASE
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.stack_lines import LOCK_HELD

FIRST_BATCH, EVALUATION_HEAVY = "first_batch", "evaluation_heavy"
LINE_LIMIT = 3
MIN_SAMPLES = 4
"""A line that was seen less often is not named."""
MIN_RATIO = 0.05
"""Nor one with less than that share of what was asked about."""
RANK_LIMIT = 8
"""Of a finding about all ranks, so many are looked at: their code is the same."""
OTHER_MIN_CORES = 0.3
"""Another Python thread that uses so much of a core is named beside the training thread's lines."""
WAITING_RATIO = 0.5
WORKING_RATIO = 0.25
"""Of a phase: who is in collectives for more than the one waits there for who is for less than the
other. Own choice."""
LATE_NS = 2_000_000
LATE_RATIO = 0.5
_MACHINE = "all phases grew"
"""How a remedy begins that blames no code."""
_WAIT = "DataLoaderIter."
"""Where there are workers, the training thread waits for them there: their lines are the answer."""
_WHICH_CODE = "which code it is"
"""How a rule begins what it lacks, where it cannot tell the code: known now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeQuestion:
    """What is asked about the code."""

    phases: tuple[str, ...]
    """Of `CODE_PHASES`; of the training thread."""
    workers: bool = False
    """Whether DataLoader workers, where there are any, are asked in place of these phases."""
    against: Literal["", "usual_steps", "other_ranks", "earlier_steps"] = ""
    """What the time is compared with: slow steps with usual ones, the finding's rank with others,
    steps since something changed with those before.
    Then lines are those whose time is more than there."""
    within: str = ""
    """Only where a function of that file is on the stack."""
    outside: str = ""
    """Of stacks with a function of that file, what is outside of it."""
    own_code: bool = False
    """Only where the innermost frame is not torch's own."""
    collections: bool = False
    """Only in the pauses of the garbage collector that were recorded."""
    least_ratio: float = MIN_RATIO
    """A line with less than that share of what was asked about is not named."""


_STEP = TRAINING_PHASES[:6]
_OTHER_THREADS = CODE_PHASES[OTHER_THREADS]
_COMPILER = "/torch/_dynamo/convert_frame.py"
"""On the stack while torch.compile works, and not while what it has compiled runs."""
_MODULE = "/torch/nn/modules/module.py"
"""Around each call of a model: an evaluation that takes long is not made shorter in its layers."""
QUESTIONS: Mapping[str, CodeQuestion] = {
    "dataloader_bound": CodeQuestion(phases=("dataloader",), workers=True),
    FIRST_BATCH: CodeQuestion(phases=("dataloader",), workers=True),
    "forward_bound": CodeQuestion(phases=("forward",)),
    f"forward_bound/{PYTHON}": CodeQuestion(phases=("forward",), own_code=True),
    "backward_bound": CodeQuestion(phases=("backward",)),
    f"backward_bound/{LOSS}": CodeQuestion(phases=("other",), least_ratio=0.5),
    f"backward_bound/{GRADIENTS}": CodeQuestion(phases=()),  # its lines are all of torch's own
    "optimizer_bound": CodeQuestion(phases=("optimizer",)),
    "host_bound": CodeQuestion(phases=_STEP),
    "gpu_waits_for_host": CodeQuestion(phases=_STEP),
    "outside_the_model": CodeQuestion(phases=("other", "checkpoint")),
    "blocking_collectives": CodeQuestion(phases=BETWEEN_PHASES, within=COLLECTIVES),
    "checkpoint_stalls": CodeQuestion(phases=("checkpoint",)),
    EVALUATION_HEAVY: CodeQuestion(phases=("evaluation",), outside=_MODULE),
    "garbage_collection": CodeQuestion(phases=_STEP, collections=True),
    "interpreter_lock": CodeQuestion(phases=(_OTHER_THREADS,)),
    "recompiles": CodeQuestion(phases=(*_STEP, "evaluation"), within=_COMPILER, outside=_COMPILER),
    "too_few_cores": CodeQuestion(phases=_STEP, workers=True),
    "synchronising_calls": CodeQuestion(phases=_STEP),
    "jitter": CodeQuestion(phases=_STEP, against="usual_steps"),
    "step_time_drift": CodeQuestion(phases=_STEP, against="earlier_steps"),
    "ranks_uneven": CodeQuestion(phases=_STEP, against="other_ranks"),
    "late_rank": CodeQuestion(phases=_STEP, against="other_ranks"),
    "data_imbalance": CodeQuestion(phases=_STEP, against="other_ranks"),
}
"""By rule, or rule and cause; what is not here is no question of the job's own code, or not yet."""


class CodeAnswers:
    """Answers the questions of a run's findings; samples are read at the first one.

    Args:
        analyzer: Of the run.
        inputs: Its judged steps: only samples in their time count.
    """

    def __init__(self, analyzer: RunFrames, inputs: RuleInputs) -> None:
        self._analyzer = analyzer
        self._inputs = inputs
        self._samples: CodeSamples | None = None

    def name_lines(self, finding: Finding) -> Finding:
        """The finding with the lines of code that it is about, where they are known."""
        question = QUESTIONS.get(f"{finding.rule}/{finding.cause}", QUESTIONS.get(finding.rule))
        if question is None:
            return finding
        chosen, times, of, part = self._ask(finding, question)
        named = [time for time in times if time.ratio >= question.least_ratio]
        sure = [time for time in named if _is_sure(time)][:LINE_LIMIT]
        if finding.remedy.startswith(_MACHINE):
            return finding
        lines = tuple(_code_line(time, of, part) for time in sure)
        if _OTHER_THREADS not in question.phases:
            lines += tuple(self._other_threads(finding))
        if not lines:
            return finding
        # A thread that held the lock took the sample itself: of the code that it was in.
        missed = (chosen.late_ns > LATE_NS) & (chosen.lock_wait != LOCK_HELD)
        late = float(missed.mean()) if len(missed) else 0.0
        missing = tuple(lack for lack in finding.missing if not lack.startswith(_WHICH_CODE))
        if late > LATE_RATIO:
            missing += (_late_text(late),)
        return replace(
            finding,
            code_lines=lines,
            remedy=f"{finding.remedy}; begin at {lines[0].location}",
            missing=missing,
        )

    def _ask(
        self, finding: Finding, question: CodeQuestion
    ) -> tuple[CodeSamples, list[FunctionTime], str, float]:
        """The samples asked about, their functions, and what of which time they are."""
        samples = self._load(finding)
        if finding.rank is not None and question.against != "other_ranks":
            samples = samples.take(samples.rank == finding.rank)
        if _OTHER_THREADS in question.phases:
            return self._in_other_threads(samples)
        loading = samples.take(samples.phase == WORKER)
        if question.workers and len(loading.stack):
            return loading, function_times(loading), "the workers' loading", 1.0
        named = finding.cause in question.phases  # the title says in which one most of it is
        asked = question.phases if not named else (finding.cause,)
        phases = [CODE_PHASES.index(phase) for phase in asked]
        samples = samples.take(np.isin(samples.phase, phases))
        if question.within:
            samples = samples.take(samples.tree.within(question.within)[samples.stack])
        if question.outside:
            outside = samples.tree.ends_outside(question.outside)
            samples = replace(samples, stack=outside[samples.stack])
        if question.within == _COMPILER:
            return samples, function_times(samples), "the compilations", 1.0
        if question.collections:
            samples = samples.take(self._in_pauses(samples))
            return samples, function_times(samples), "the collections", 1.0
        if question.own_code:
            stack = np.where(ends_in_torch(samples), 0, samples.stack)
            samples = replace(samples, stack=stack)  # of no line, and in the whole all the same
        if question.against:
            chosen, times, of, part = self._contrast(samples, finding, question)
            of += f" in {finding.cause}" if named else ""
            if len(loading.stack) and times and any(_WAIT in name for name in times[0].callees):
                return loading, function_times(loading), "the workers' loading", 1.0
            return chosen, times, of, part
        if not question.within:
            samples = _of_working_ranks(samples)
        whole_ns = self._step_ns(samples)
        part = float(samples.weight_ns.sum()) / whole_ns if whole_ns else 0.0
        if "evaluation" in question.phases:
            return samples, function_times(samples), "the evaluations", 1.0
        return samples, function_times(samples), "the step", min(part, 1.0)

    def _contrast(
        self, samples: CodeSamples, finding: Finding, question: CodeQuestion
    ) -> tuple[CodeSamples, list[FunctionTime], str, float]:
        """Functions by the time that they take beyond what they take elsewhere."""
        if question.against == "other_ranks":
            return self._against_others(samples, finding.rank)
        if question.against == "usual_steps":
            rows, of = samples.slow, "the extra time of slow steps"
            slow, usual = self._step_counts(samples)
            scale = slow / max(usual, 1)
        else:
            since = next(e.value or 0.0 for e in finding.evidence if e.name == SINCE_STEP)
            rows, of = samples.step >= since, f"the extra time since step {since:.0f}"
            first = min(int(s["step"][0]) for s in self._inputs.by_rank.values())
            last = max(int(s["step"][-1]) for s in self._inputs.by_rank.values())
            scale = (last - since + 1) / max(since - first, 1)
        chosen, less = samples.take(rows), samples.take(~rows)
        times = function_times(chosen, less=less, scale=scale)
        beyond_ns = sum(time.time_ns for time in times if time.time_ns > 0)
        times = [
            replace(time, ratio=time.time_ns / beyond_ns, low=None, high=None)
            for time in times
            if time.time_ns > 0
        ]
        return chosen, times, of, 1.0

    def _against_others(
        self, samples: CodeSamples, rank: int | None
    ) -> tuple[CodeSamples, list[FunctionTime], str, float]:
        """Functions by the time that their lines take on this rank beyond others, without waiting.

        A rank in a collective waits for others there, or moves data as they do.
        """
        scale = 1 / max(len(np.unique(samples.rank)) - 1, 1)
        samples = samples.take(~samples.tree.within(COLLECTIVES)[samples.stack])
        chosen = samples.take(samples.rank == rank)
        beyond = time_beyond(chosen, samples.take(samples.rank != rank), scale=scale)
        times = [replace(time, low=None, high=None) for time in function_times(beyond)]
        return chosen, times, f"the extra time of rank {rank}", 1.0

    def _in_pauses(self, samples: CodeSamples) -> Bools:
        """Per sample: whether the collector had stopped its rank then."""
        found = np.zeros(len(samples.stack), dtype=np.bool_)
        pauses = self._inputs.pauses.filter(pl.col("phase") == GC_PHASE)
        for rank in np.unique(samples.rank).tolist():
            own = pauses.filter(pl.col("rank") == rank).sort("start_ns")
            start = own["start_ns"].to_numpy()
            end = np.append(np.maximum.accumulate(start + own["duration_ns"].to_numpy()), 0)
            last = np.searchsorted(start, samples.time_ns, side="right") - 1
            found |= (samples.rank == rank) & (last >= 0) & (samples.time_ns <= end[last])
        return found

    def _other_threads(self, finding: Finding) -> Iterator[CodeLine]:
        """Another Python thread that was busy most of the time: it takes the interpreter lock."""
        samples = self._load(finding)
        if finding.rank is not None:
            samples = samples.take(samples.rank == finding.rank)
        _, times, of, used = self._in_other_threads(samples)
        if used >= OTHER_MIN_CORES:
            for time in filter(_is_sure, times[:1]):
                yield _code_line(time, of, used)

    def _in_other_threads(
        self, samples: CodeSamples
    ) -> tuple[CodeSamples, list[FunctionTime], str, float]:
        """The same as `_ask`, of other Python threads beside the training threads."""
        others = samples.take((samples.phase == OTHER_THREADS) & (samples.worker < 0))
        whole_ns = self._step_ns(others)
        used = min(float(others.weight_ns.sum()) / whole_ns, 1.0) if whole_ns else 0.0
        of = "a core, in another thread that takes the interpreter lock"
        return others, function_times(others), of, used

    def _load(self, finding: Finding) -> CodeSamples:
        """Samples in the time that a finding is about: of some ranks, and of its own."""
        known = self._samples
        first, last = self._inputs.window_ns
        if known is None or (finding.rank is not None and not (known.rank == finding.rank).any()):
            world = self._inputs.world
            wanted = set(world[:: max(len(world) // RANK_LIMIT, 1)])
            samples = self._analyzer.code_samples(wanted | {finding.rank or 0})
            known = self._samples = samples
        if finding.rule == EVALUATION_HEAVY:  # also before the first step and after the last one
            return known
        known = known.take(known.time_ns <= last)
        if finding.rule != FIRST_BATCH:  # which was before the judged steps
            known = known.take(known.time_ns >= first)
        return known

    def _step_ns(self, samples: CodeSamples) -> float:
        """Time of the judged steps of these samples' ranks."""
        ranks = [r for r in np.unique(samples.rank).tolist() if r in self._inputs.by_rank]
        return float(sum(self._inputs.of_rank(rank)["step_ns"].sum() for rank in ranks))

    def _step_counts(self, samples: CodeSamples) -> tuple[int, int]:
        """Slow steps of these samples' ranks, and the others."""
        slow = total = 0
        for rank in np.unique(samples.rank).tolist():
            if rank in self._inputs.by_rank:
                step_ns = self._inputs.of_rank(rank)["step_ns"].to_numpy()
                slow += int((step_ns > SLOW_RATIO * np.median(step_ns)).sum())
                total += len(step_ns)
        return slow, total - slow


def _of_working_ranks(samples: CodeSamples) -> CodeSamples:
    """Without ranks that only wait, in a collective, for what another rank does in that phase."""
    waits = samples.tree.within(COLLECTIVES)[samples.stack]
    shares = {
        int(rank): float(samples.weight_ns[waits & own].sum() / samples.weight_ns[own].sum())
        for rank in np.unique(samples.rank)
        if samples.weight_ns[own := samples.rank == rank].sum()
    }
    working = [rank for rank, share in shares.items() if share < WORKING_RATIO]
    if not working or max(shares.values()) < WAITING_RATIO:
        return samples
    return samples.take(np.isin(samples.rank, working))


def _is_sure(time: FunctionTime) -> bool:
    return time.sample_count >= MIN_SAMPLES and time.ratio >= MIN_RATIO


def _code_line(time: FunctionTime, of: str, part: float) -> CodeLine:
    return CodeLine(
        file=time.file,
        line=time.line,
        function=time.function,
        share=time.ratio * part,
        low=None if time.low is None else time.low * part,
        high=None if time.high is None else time.high * part,
        of=of,
        sample_count=time.sample_count,
        callees=time.callees,
        callers=tuple(place_text(at.file, at.line, at.function) for at in time.callers),
    )


def _late_text(late: float) -> str:
    busy = f"the interpreter was busy when {ratio_text(late)} of the samples were due"
    return f"code that ran for less than 5 ms at a time: {busy}"
