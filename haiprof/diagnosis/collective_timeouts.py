"""Settings of NCCL's timeouts and of PyTorch's watchdog that work against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
HEARTBEAT_S = 480
"""Source: PyTorch's default (HeartbeatMonitor in ProcessGroupNCCL.cpp)."""
_ASYNC, _BLOCKING, _DESYNC, _DUMP, _MONITORING = (
    f"TORCH_NCCL_{name}"
    for name in (
        "ASYNC_ERROR_HANDLING",
        "BLOCKING_WAIT",
        "DESYNC_DEBUG",
        "DUMP_ON_TIMEOUT",
        "ENABLE_MONITORING",
    )
)
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_IB_TIMEOUT, _IB_RETRIES = "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT"
_IB_UNIT_S, _IB_USUAL_RETRIES, _IB_HIGHEST = 4.096e-6, 7, 31
"""Source: NCCL's environment variables: 4.096 us * 2 ^ NCCL_IB_TIMEOUT, NCCL_IB_RETRY_CNT times; 31
is the highest that InfiniBand's five bits hold."""
_TRUE = ("1", "true", "t", "yes", "y")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """One setting that keeps another one, or a timeout, from its work."""

    variable: str
    value: float
    against_s: float | None
    """The timeout that it is compared with; None where it is no time."""
    reason: str


def find_contradictions(
    variables: Mapping[str, str], collective_s: float | None
) -> Iterator[Contradiction]:
    """What cannot work together.

    Args:
        variables: As they are set, by name.
        collective_s: After how long a collective is given up; None where that is not known.

    Source: PyTorch's "ProcessGroupNCCL Environment Variables" and ProcessGroupNCCL.hpp, of which
    variables must be set together; init_process_group, of the two of which one should be set;
    NCCL's "Environment Variables".
    """
    handling = _number(variables, _ASYNC, _ASYNC.removeprefix("TORCH_"))
    waits = _is_on(variables, _BLOCKING, _BLOCKING.removeprefix("TORCH_"))
    if handling == 0 and not waits:
        yield _plain(
            _ASYNC, 0, "a collective that fails or times out is not handled: the job hangs on"
        )
    if handling and waits:
        yield _plain(
            _BLOCKING, 1, f"only one of it and {_ASYNC} should be set: the other is not used"
        )
    if _is_on(variables, _DESYNC, _DESYNC.removeprefix("TORCH_")) and (handling == 0 or waits):
        yield _plain(
            _DESYNC, 1, f"it must be set together with {_ASYNC}: no report will be written"
        )
    if _is_on(variables, _DUMP):
        lacking = [name for name in _SIZES if name in variables][:1]
        lacking = [name for name in lacking if _number(variables, name) == 0]
        lacking += [_MONITORING] if _is_off(variables, _MONITORING) else []
        if lacking:
            yield _plain(_DUMP, 1, f"nothing is dumped with {lacking[0]}=0")
    yield from _short_heartbeat(variables, collective_s)
    yield from _long_retries(variables, collective_s)


def _short_heartbeat(
    variables: Mapping[str, str], collective_s: float | None
) -> Iterator[Contradiction]:
    # PyTorch's own heartbeat, 480 s, is shorter than its collectives' 600 s: only less is told.
    heartbeat = _number(variables, HEARTBEAT)
    if heartbeat is None or collective_s is None or _is_off(variables, _MONITORING):
        return
    if heartbeat < min(collective_s, HEARTBEAT_S):
        yield Contradiction(
            variable=HEARTBEAT, value=heartbeat, against_s=collective_s,
            reason="where the watchdog hangs in a call of CUDA or NCCL, the process is killed "
            "before its timeout tells which collective hangs",
        )  # fmt: skip


def _long_retries(
    variables: Mapping[str, str], collective_s: float | None
) -> Iterator[Contradiction]:
    exponent = _number(variables, _IB_TIMEOUT)
    retries = _number(variables, _IB_RETRIES)
    if exponent is None or collective_s is None or not 0 <= exponent <= _IB_HIGHEST:
        return
    gives_up_s = _IB_UNIT_S * 2**exponent * (_IB_USUAL_RETRIES if retries is None else retries)
    if gives_up_s >= collective_s:
        yield Contradiction(
            variable=_IB_TIMEOUT, value=exponent, against_s=collective_s,
            reason=f"NCCL gives a broken network up after {gives_up_s:.0f} s: the watchdog ends "
            "the job before that tells which link it is",
        )  # fmt: skip


def _plain(variable: str, value: float, reason: str) -> Contradiction:
    return Contradiction(variable=variable, value=value, against_s=None, reason=reason)


def _number(variables: Mapping[str, str], *names: str) -> float | None:
    """The first that is set; None where none is, or it is no whole number."""
    text = next((variables[name].strip() for name in names if name in variables), "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _is_on(variables: Mapping[str, str], *names: str) -> bool:
    text = next((variables[name] for name in names if name in variables), "")
    return text.strip().lower() in _TRUE


def _is_off(variables: Mapping[str, str], name: str) -> bool:
    return name in variables and not _is_on(variables, name)
