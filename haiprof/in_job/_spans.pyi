"""Types of the C extension `haiprof.in_job._spans`, built from spans.c where it can be."""

from collections.abc import Callable
from typing import Any

VERSION: int

class SpanBuffer:
    def begin(self, code: int, /) -> int: ...
    def end(self, start_ns: int, code: int, /) -> int: ...
    def put(self, start_ns: int, end_ns: int, code: int, /) -> None: ...
    def take(self) -> bytes: ...
    def clear(self) -> None: ...
    def attach(self, address: int, /) -> None: ...
    def detach(self) -> None: ...
    def __len__(self) -> int: ...

class Gate:
    __slots__ = (
        "busy", "idle", "loading", "optimizer_count", "owner", "owner_seen_ns", "slow",
    )  # fmt: skip
    busy: int
    idle: int
    loading: bool
    optimizer_count: int
    owner: int
    owner_seen_ns: int
    slow: bool

class TimedCall:
    def __init__(
        self,
        kind: int,
        original: Callable[..., Any],
        wrapper: Callable[..., Any],
        gate: Gate,
        spans: SpanBuffer,
        entries: dict[int, Any] = ...,
        is_grad_enabled: Callable[[], bool] = ...,
        /,
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class StepEnds:
    def __init__(self, gate: Gate, spans: SpanBuffer, entries: dict[int, Any], /) -> None: ...
    def begin(self) -> int: ...
    def end(self, optimizer: Any, start_ns: int, /) -> bool: ...
