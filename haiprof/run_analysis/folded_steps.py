"""Steps of a rank that were folded: sums of blocks of them, and slow ones whole; as columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from haiprof.base.errors import RunFormatError
from haiprof.base.intervals import Bools, Floats, Intervals, Ints
from haiprof.base.ledger import POSITIONS
from haiprof.run_analysis.nesting import Spans, unpack
from haiprof.run_analysis.run_files import counts, read_table, record_columns
from haiprof.run_format import folded as stored
from haiprof.run_format import schema
from haiprof.run_format.layout import RankPaths
from haiprof.run_format.reader import RecordFile

_LIMIT = 1 << 61


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedSteps:
    """Times are on the clock of the rank's spans."""

    file: stored.FoldedFile
    step_count: int  # steps that were folded: the first one that is whole has this number
    until_ns: int  # when that one begins
    blocks: Mapping[str, np.ndarray]
    """Columns of BLOCKS, one row per block, in order of the steps; they follow each other."""
    plain_ns: Ints  # [position, block]: sums without collections
    collected_ns: Ints  # the same of collections
    slow: Mapping[str, np.ndarray]  # columns of SLOW
    spans: Spans  # of the slow steps
    stretches: Mapping[str, np.ndarray]  # columns of STRETCHES

    @property
    def first_step(self) -> Ints:
        """Per block: the number of its first step."""
        return self.blocks["first_step"]

    @property
    def count(self) -> Ints:
        """Per block: its steps."""
        return self.blocks["step_count"]

    @property
    def end_ns(self) -> Ints:
        """Per block: where it ends."""
        return np.append(self.blocks["start_ns"][1:], self.until_ns)[: len(self.count)]

    def fact(self, name: str) -> int:
        """A sum over all folded steps."""
        return self.file.whole(name)

    def roots(self) -> dict[int, int]:
        """Calls by tag of a root module."""
        found = counts(self.file.facts.get("roots"))
        return {int(tag): count for tag, count in found.items() if tag.isdigit()}

    def when(self, kind: int) -> Intervals:
        """The stretches of one kind, such as MET: collectives before the first step."""
        own = self.stretches["kind"] == kind
        return Intervals(self.stretches["start_ns"][own], self.stretches["end_ns"][own])

    @property
    def evaluations(self) -> Intervals:
        """When it evaluated."""
        return self.when(stored.EVALUATED)

    def saves(self) -> tuple[Spans, Ints]:
        """Checkpoints that were saved, and the step of each; -1: in none."""
        own = self.stretches["kind"] == stored.SAVED
        start, end = self.stretches["start_ns"][own], self.stretches["end_ns"][own]
        kind = np.full(len(start), schema.SAVE, dtype=np.int8)
        spans = Spans(kind=kind, tag=np.zeros_like(kind), start_ns=start, end_ns=end)
        return spans, self.stretches["step"][own]

    def timeline(self) -> tuple[Ints, Ints, Ints]:
        """Begin, position and step of each stretch of time up to `until_ns`, in order.

        What has no stretch of its own stands at the beginning of its block, position by position:
        the sums of each block are exact, the moments are not.
        """
        own = self.stretches["kind"] < len(POSITIONS)
        start, end, kind = (self.stretches[name][own] for name in ("start_ns", "end_ns", "kind"))
        found: list[tuple[int, int, int]] = []
        left = self.plain_ns + self.collected_ns
        of_block = np.searchsorted(self.blocks["start_ns"], start, "right") - 1
        np.subtract.at(left, (kind, np.maximum(of_block, 0)), end - start)
        left = np.maximum(left, 0)
        rows = np.searchsorted(of_block, np.arange(len(self.count) + 1))
        for block, (at, until) in enumerate(
            zip(self.blocks["start_ns"].tolist(), self.end_ns.tolist(), strict=True)
        ):
            mine = slice(rows[block], rows[block + 1])
            gaps = zip([at, *end[mine].tolist()], [*start[mine].tolist(), until], strict=True)
            fixed = [*kind[mine].tolist(), -1]
            parts = [[p, int(left[p, block])] for p in np.flatnonzero(left[:, block]).tolist()]
            parts.append([len(POSITIONS) - 1, until])  # all that is left
            for (begin, stop), then in zip(gaps, fixed, strict=True):
                while begin < stop:
                    found.append((begin, parts[0][0], block))
                    taken = min(parts[0][1], stop - begin)
                    begin += taken
                    parts[0][1] -= taken
                    if not parts[0][1]:
                        parts.pop(0)
                if then >= 0:
                    found.append((stop, then, block))
        begins, positions, blocks = np.array(found, dtype=np.int64).reshape(-1, 3).T
        return begins, positions, self.first_step[blocks]

    def trained_ns(self) -> Ints:
        """[step]: about when each had trained; exact at the end of each block."""
        count = self.count
        begin, end = self.blocks["start_ns"], self.blocks["trained_ns"]
        place = np.arange(self.step_count) - np.repeat(self.first_step, count) + 1
        length, number = np.repeat(end - begin, count), np.repeat(count, count)
        found: Ints = np.repeat(end, count) - (length / number * (number - place)).astype(np.int64)
        return found

    def samples(self) -> dict[str, Ints]:
        """Columns of SAMPLED, its codes one by one; -1 for what is not known."""
        columns = record_columns(self.file.sections["samples"])
        found = {name: column.astype(np.int64) for name, column in columns.items()}
        codes = found.pop("codes")
        for name, bits in stored.CODE_BITS.items():
            value = codes & ((1 << bits) - 1)
            found[name] = np.where(value == (1 << bits) - 1, -1, value) if bits > 1 else value
            codes = codes >> bits
        return found


def pack_codes(columns: Mapping[str, Ints | Bools]) -> Ints:
    """The codes of samples, as they are stored."""
    packed = np.zeros(len(columns["position"]), dtype=np.int64)
    for name, bits in reversed(stored.CODE_BITS.items()):
        packed = packed << bits | columns[name].astype(np.int64) & ((1 << bits) - 1)
    return packed


def read_folded_steps(paths: RankPaths) -> FoldedSteps:
    """What was folded of a rank; RunFormatError where its blocks do not follow each other."""
    if (file := stored.read_folded(paths.folded)) is None:
        return NOTHING_FOLDED
    found = _steps_of(file)
    begins = np.append(0, np.cumsum(found.count))
    follow = np.array_equal(np.append(found.first_step, found.step_count), begins)
    ascending = (np.diff(np.append(found.blocks["start_ns"], found.until_ns)) > 0).all()
    is_sound = follow and ascending and (found.count > 0).all()
    if not is_sound or not 0 < found.step_count < _LIMIT >> 32:
        raise RunFormatError(f"{paths.folded}: damaged: its blocks do not follow each other")
    return found


def _steps_of(file: stored.FoldedFile) -> FoldedSteps:
    blocks = _whole_columns(file, "blocks")
    zeros = np.zeros(len(blocks["first_step"]), dtype=np.int64)
    for column in stored.BLOCKS.columns:
        blocks.setdefault(column.name, zeros)
    spans = record_columns(file.sections["spans"])
    return FoldedSteps(
        file=file, step_count=file.whole("step_count"), until_ns=file.whole("until_ns"),
        blocks=blocks, plain_ns=np.stack([blocks[f"{name}_ns"] for name in POSITIONS]),
        collected_ns=np.stack([blocks[f"{name}_gc_ns"] for name in POSITIONS]),
        slow=_whole_columns(file, "slow"), spans=unpack(spans["start"], spans["end"]),
        stretches=_whole_columns(file, "stretches"),
    )  # fmt: skip


def optimizer_steps_before(paths: RankPaths, record: int, folded: FoldedSteps) -> int:
    """Optimizer steps of a rank before a record, folded ones too."""
    first, count = folded.fact("first_record"), int(folded.blocks["optimizer_step_count"].sum())
    columns = record_columns(read_table(paths.phases, schema.PHASES, first=first))
    stepped = (columns["start"] & schema.TAG_MASK) == schema.OPTIMIZER
    later = columns["end"] >> schema.TAG_BITS > folded.until_ns
    before = np.arange(len(stepped)) < record - first
    # Some spans of folded steps are kept: those that come from the record on are not before it.
    return count + int((stepped & later & before).sum()) - int((stepped & ~later & ~before).sum())


def _whole_columns(file: stored.FoldedFile, name: str) -> dict[str, np.ndarray]:
    """The columns of a section; times and sums beyond all measure are damage."""
    columns: dict[str, Any] = dict(record_columns(file.sections[name]))
    for column in columns.values():
        if column.dtype.kind == "i" and len(column) and np.abs(column).max() >= _LIMIT:
            raise RunFormatError(f"{file.sections[name].path}: damaged: {name}")
    return {key: np.ascontiguousarray(column) for key, column in columns.items()}


def phase_sums(folded: FoldedSteps) -> Floats:
    """[phase, block]: time of the four phases."""
    return np.stack([folded.blocks[f"{phase}_host_ns"] for phase in stored.HOST_PHASES])


_COLUMNS = {t: tuple((c.name, c.type, c.unit, c.kind) for c in t.columns) for t in stored.SECTIONS}
NOTHING_FOLDED = _steps_of(stored.FoldedFile(
    sections={t.name: RecordFile(Path(), t.name, columns, {}, b"", ())
              for t, columns in _COLUMNS.items()},
    facts={}, stack_lines=(),
))  # fmt: skip
"""Of a rank whose steps are all whole."""
