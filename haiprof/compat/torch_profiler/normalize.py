"""A trace of torch 2 as torch-tb-profiler 0.4.3 understands it, event by event, in memory."""

from __future__ import annotations

import html
from collections import defaultdict
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from haiprof.run_analysis.run_files import entries
from haiprof.trace_format.kineto.events import GPU_BACKEND_NAMES

Event = dict[str, Any]

OPERATOR, RUNTIME, ANNOTATION = "Operator", "Runtime", "user_annotation"
_OF_CATEGORY = {
    "cpu_op": OPERATOR, "Operator": OPERATOR,
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "xpu_driver",
                     "privateuse1_runtime", "privateuse1_driver", "Runtime"), RUNTIME),
    "kernel": "Kernel", "Kernel": "Kernel", "gpu_memcpy": "Memcpy", "Memcpy": "Memcpy",
    "gpu_memset": "Memset", "Memset": "Memset", "user_annotation": ANNOTATION, "Trace": "Trace",
    "python_function": "python_function",
}  # fmt: skip
_DEVICE = ("Kernel", "Memcpy", "Memset")
_HOST = (OPERATOR, ANNOTATION, RUNTIME, "python_function")
_STEP = "ProfilerStep#"
GPU_COLLECTIVES = tuple(f"{name}:" for name in GPU_BACKEND_NAMES)
_COLLECTIVES = (*GPU_COLLECTIVES, "gloo:")
_LOADER = ("enumerate(DataLoader)#", "enumerate(DataPipe)#")
_IDS = (int, str, type(None))  # What can tell processes and launches apart
_MAX_DEVICES = 64  # torch_tb_profiler.consts.MAX_GPU_PER_NODE
_STACK_FRAMES = 64
_NS_PER_US = 1000
_TIME_LIMIT_US = 10**18
_TICKS_PER_US = 1024


class Exact(float):
    """A number of a JSON text that keeps all its digits."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Exact:
        """From digits as they are written."""
        found = super().__new__(cls, text)
        found.text = text
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """A trace in the form that torch-tb-profiler was written for."""

    trace: dict[str, Any]
    origin_ns: int  # Subtracted from every timestamp
    collectives: frozenset[str]  # Names of annotations that are collectives


def normalise_trace(trace: dict[str, Any]) -> Normal:
    """Normalizes a trace so that torch-tb-profiler computes correct numbers."""
    events = [event for event in map(_event, entries(trace.get("traceEvents"))) if event]
    origin_ns = min((event["ts"] for event in events), default=0)
    for event in events:
        for name in event.keys() & {"ts", "end"}:
            ticks = (event[name] - origin_ns) * _TICKS_PER_US
            event[name] = (ticks + _NS_PER_US // 2) // _NS_PER_US
    spans = [event for event in events if event["cat"] in _HOST]
    launches = _link_launches(spans)
    for event in events:
        if event["cat"] in _DEVICE:
            launch = launches.get(event["args"].get("correlation"))
            owner = launch and (launch["collective"] or launch["owner"])
            event["id"] = owner["id"] if owner else 0
    annotations = (event["name"] for event in events if event["cat"] == ANNOTATION)
    names = frozenset(name for name in annotations if name.startswith(_COLLECTIVES))
    kept = [_finish(event) for event in events if _is_kept(event)]
    metadata = {key: value for key, value in trace.items() if key != "traceEvents"}
    metadata["deviceProperties"] = _escape_names(metadata.get("deviceProperties"))
    return Normal(trace={**metadata, "traceEvents": kept}, origin_ns=origin_ns, collectives=names)


def _event(raw: Any) -> Event | None:  # noqa: ANN401 - whatever stands in the file
    """An event that the plugin uses, with `ts` in ns, and `end` if it has a duration."""
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        return None
    phase, args = raw.get("ph"), raw.get("args")
    ts_ns = _ns(raw.get("ts"))
    if ts_ns is None:
        return None
    raw["ts"], raw["args"] = ts_ns, args if isinstance(args, dict) else {}
    if phase == "i" and raw["name"] == "[memory]":
        raw["cat"] = "Memory"
        return raw
    category = _OF_CATEGORY.get(str(raw.get("cat")))
    if phase != "X" or category is None:
        return None
    raw["cat"] = category
    raw["end"] = ts_ns + max(0, _ns(raw.get("dur")) or 0)
    if category in _HOST and not (type(raw.get("tid")) is int and isinstance(raw.get("pid"), _IDS)):
        return None
    if not isinstance(raw["args"].get("correlation"), _IDS):
        raw["args"].pop("correlation", None)
    if category in _DEVICE:
        device = raw["args"].get("device", raw.get("pid"))
        if type(device) is not int or not 0 <= device < _MAX_DEVICES:
            return None
        raw["pid"] = raw["args"]["device"] = device
    return raw


def _ns(stamp: Any) -> int | None:  # noqa: ANN401 - whatever stands in the file
    """Microseconds as integer nanoseconds, exact."""
    if type(stamp) not in (int, Exact, float) or not abs(stamp) < _TIME_LIMIT_US:
        return None
    if isinstance(stamp, int):
        return stamp * _NS_PER_US
    text = stamp.text if isinstance(stamp, Exact) else repr(stamp)
    return int((Decimal(text) * _NS_PER_US).to_integral_value())


def _link_launches(spans: list[Event]) -> dict[Any, Event]:
    """Launches by correlation, each with `owner`; spans get ids, stacks, and ends that nest."""
    # Operators by the external id that Kineto gave them; none where it wrote correlations.
    calls = [span for span in spans if span["cat"] == RUNTIME]
    same = sum(_external_id(span) == span["args"].get("correlation") for span in calls)
    operators = () if 2 * same > len(calls) else spans
    noted = {_external_id(span): span for span in operators if span["cat"] == OPERATOR}
    for nothing in (None, 0):
        noted.pop(nothing, None)
    for number, span in enumerate(spans, start=1):
        span["id"] = number
    launches: dict[Any, Event] = {}
    threads: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for span in spans:
        threads[span.get("pid"), span["tid"]].append(span)
    for thread in threads.values():
        thread.sort(key=lambda span: (span["ts"], -span["end"], span["cat"] == RUNTIME))
        _nest(thread)
    for span in spans:
        if span["cat"] != RUNTIME:
            continue
        if span["owner"] is None or span["owner"]["cat"] != OPERATOR:
            span["owner"] = noted.get(_external_id(span)) or span["owner"]
        launches[span["args"].get("correlation")] = span
    return launches


def _external_id(event: Event) -> Any:  # noqa: ANN401 - whatever stands in the file
    args = event["args"]
    found = args.get("External id", args.get("external id"))
    return found if isinstance(found, _IDS) else None


def _nest(thread: list[Event]) -> None:
    """One pass over the spans of a thread, by start."""
    nodes: list[Event] = []
    functions: list[Event] = []
    for span in thread:
        if span["cat"] == "python_function":
            _close(functions, span["ts"])
            functions.append(span)
            if not _is_kept(span):
                continue
        _close(nodes, span["ts"])
        if span["cat"] == RUNTIME:
            # The innermost operator around a launch, else annotation; and the collective around it.
            around = [each for each in reversed(nodes) if each["end"] >= span["end"]]
            known = [each for each in around if each["cat"] in (OPERATOR, ANNOTATION)]
            operators = (each for each in known if each["cat"] == OPERATOR)
            span["owner"] = next(operators, known[0] if known else None)
            collectives = (each for each in known if each["name"].startswith(_COLLECTIVES))
            span["collective"] = next(collectives, None)
            continue
        _fit(span, nodes)
        if span["cat"] == OPERATOR:
            _close(functions, span["ts"])
            around = functions[: -_STACK_FRAMES - 1 : -1]  # the innermost first
            if stack := ";".join(each["name"].replace(";", ",") for each in around):
                span["args"]["Call stack"] = stack
        nodes.append(span)


def _close(open_: list[Event], now: int) -> None:
    while open_ and open_[-1]["end"] <= now:
        open_.pop()


def _fit(span: Event, open_: list[Event]) -> None:
    """Spans in the plugin's tree are nested or disjoint: it drops any other.

    An end within 1 us of the parent's is the file's rounding. Else the earlier span, closed on
    another thread or from within, holds nothing beyond the start of this one, as in `call_tree`.
    """
    while open_ and span["end"] > open_[-1]["end"]:
        if span["end"] - open_[-1]["end"] <= _TICKS_PER_US:
            span["end"] = open_[-1]["end"]
        else:
            open_.pop()["end"] = span["ts"]


def _is_kept(event: Event) -> bool:
    return event["cat"] != "python_function" or "Python module id" in event["args"]


def _finish(event: Event) -> Event:
    """The event with times in us, and its category of 2021."""
    args, name, category = event["args"], event["name"], event["cat"]
    found = {k: v for k, v in event.items() if k not in ("end", "id", "owner", "collective")}
    found["ts"] = event["ts"] / _TICKS_PER_US
    if "end" in event:
        found["dur"] = (event["end"] - event["ts"]) / _TICKS_PER_US
    launch = event.get("owner")
    own = launch["id"] if launch else 0
    args.pop("external id", None)
    args["External id"] = own if category == RUNTIME else event.get("id")
    if category == ANNOTATION and not name.startswith((_STEP, *_COLLECTIVES)):
        found["cat"] = OPERATOR if name.startswith(_LOADER) else "Python"
    return found


def _escape_names(devices: Any) -> list[Event] | None:  # noqa: ANN401 - whatever stands in the file
    """GPUs with names that the plugin's pages, which take them for HTML, show as they are."""
    if not isinstance(devices, list):
        return None
    return [
        {key: html.escape(value) if isinstance(value, str) else value for key, value in one.items()}
        for one in devices
        if isinstance(one, dict)
    ]
