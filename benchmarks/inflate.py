"""Makes large traces of several ranks from a small real one, in the layout that it was written in.

    python benchmarks/inflate.py SRC OUT RANKS COPIES

Each rank gets a file `rank-<n>.json` with COPIES of the source's events, one after the other in
time. Correlations, external ids, flow ids and ids of Python calls are unique over the copies,
ProfilerSteps go on counting, and `distributedInfo` says the rank. Numbers are replaced in the
text, so that white space and digits are those of the profiler that wrote the source.
"""

from __future__ import annotations

import argparse
import gzip
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

_IDS = (
    rb"correlation|External id|external id|id|Ev Idx|Record function id|Sequence number|Seq"
    rb"|Python id|Python parent id|wait_on_cuda_event_record_corr_id"
)
_NUMBER = re.compile(rb'"(ts|' + _IDS + rb')"(\s*:\s*"?)(\d+)(?=[\s,.}"])')
_STEP = re.compile(rb"ProfilerStep#(\d+)")
_GAP_US = 1000


class _Document(msgspec.Struct):
    traceEvents: list[msgspec.Raw]  # noqa: N815 - the trace's word


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("src", type=Path, help="a trace, plain or gzip")
    parser.add_argument("out", type=Path, help="folder for rank-<n>.json")
    parser.add_argument("ranks", type=int)
    parser.add_argument("copies", type=int)
    arguments = parser.parse_args()
    for path in inflate(arguments.src, arguments.out, arguments.ranks, arguments.copies):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def inflate(source: Path, out: Path, ranks: int, copies: int) -> list[Path]:
    """Writes the files of all ranks."""
    text = source.read_bytes()
    text = gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text
    before, events, after = _taken_apart(text)
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"rank-{rank}.json" for rank in range(ranks)]
    for rank, path in enumerate(paths):
        with open(path, "wb") as file:
            file.write(_head(before, rank, ranks))
            for place, copy in enumerate(_copies(events, copies)):
                file.write(b"," + copy if place else copy)
            file.write(after)
    return paths


def _taken_apart(text: bytes) -> tuple[bytes, bytes, bytes]:
    """What stands before the events, the events, and what stands behind them."""
    decoded = msgspec.json.decode(text, type=_Document).traceEvents
    first = re.compile(rb'"traceEvents"\s*:\s*\[').search(text)
    assert first is not None
    end = first.end()
    for event in (decoded[0], decoded[-1]):
        body = bytes(event)
        end = text.index(body, end) if event is decoded[0] else text.rindex(body) + len(body)
    return text[: first.end()], text[first.end() : end], text[end:]


def _head(before: bytes, rank: int, ranks: int) -> bytes:
    info = b'"distributedInfo": {"backend": "nccl", "rank": %d, "world_size": %d}' % (rank, ranks)
    bare = re.sub(rb'"distributedInfo"\s*:\s*\{[^{}]*\}\s*,', b"", before)
    return bare.replace(b"{", b"{" + info + b",", 1)


def _copies(events: bytes, count: int) -> Iterator[bytes]:
    """The events again and again, with numbers of their own."""
    numbers = {key: [] for key in (b"ts", b"id", b"step")}  # type: dict[bytes, list[int]]
    for key, _, number in _NUMBER.findall(events):
        numbers[b"ts" if key == b"ts" else b"id"].append(int(number))
    numbers[b"step"] = [int(step) for step in _STEP.findall(events)]
    stride = {key: _stride(found) for key, found in numbers.items()}
    # Marks without a time of their own (0) and metadata far away must not widen a copy.
    times = sorted(numbers[b"ts"])
    middle = times[len(times) // 2]
    near = [time for time in times if abs(time - middle) < 600_000_000]
    stride[b"ts"] = near[-1] - near[0] + _GAP_US
    yield events
    for copy in range(1, count):
        shifted = _NUMBER.sub(_shift({key: copy * by for key, by in stride.items()}), events)
        yield _STEP.sub(_step(copy * stride[b"step"]), shifted)


def _stride(numbers: list[int]) -> int:
    """More than the span of the numbers that count up; huge ones are addresses or marks."""
    counted = [number for number in numbers if number < 1 << 31]
    return max(counted) - min(counted) + 1 if counted else 0


def _shift(by: dict[bytes, int]) -> Callable[[re.Match[bytes]], bytes]:
    def shifted(match: re.Match[bytes]) -> bytes:
        key, colon, number = match.groups()
        value = int(number)
        if key != b"ts" and (value == 0 or value >= 1 << 31):
            return match[0]
        return b'"%s"%s%d' % (key, colon, value + by[b"ts" if key == b"ts" else b"id"])

    return shifted


def _step(by: int) -> Callable[[re.Match[bytes]], bytes]:
    return lambda match: b"ProfilerStep#%d" % (int(match[1]) + by)


if __name__ == "__main__":
    main()
