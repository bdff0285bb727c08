"""haiprof's runtime patches of torch-tb-profiler, whose files stay unchanged; and its parsers."""

from __future__ import annotations

import gzip
import json
import logging
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from haiprof.compat.torch_profiler.normalize import GPU_COLLECTIVES, Exact, normalise_trace
from haiprof.run_format.unpack import read_text
from haiprof.trace_analysis.device_time import COMMUNICATION_NAMES

_COMMUNICATION = re.compile(COMMUNICATION_NAMES)
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_LOGGER = "pytorch_profiler"
_TEXT_LIMIT_BYTES = 4 << 30


class _Anything:
    """It has every key: the plugin looks whether a kernel is among those of collectives."""

    def __contains__(self, _key: object) -> bool:
        return True


def patch_parsing() -> None:
    """Makes torch-tb-profiler compute from normalised traces; in the process that parses."""
    from torch_tb_profiler.profiler import trace
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.event_parser import NodeParserMixin, StepParser
    from torch_tb_profiler.profiler.gpu_metrics_parser import GPUMetricsParser

    logging.getLogger(_LOGGER).setLevel(logging.ERROR)
    # The other modules of the plugin hold the same list.
    shared_names: list[str] = trace.NcclOpNameSet
    origin_ns = [0]

    def preprocess(path: str, _cache_dir: str) -> tuple[str, dict[str, Any]]:
        text = read_text(Path(path), limit_bytes=_TEXT_LIMIT_BYTES)
        loaded = json.loads(text.decode("utf-8", "replace"), parse_float=Exact, strict=False)
        del text
        normal = normalise_trace(loaded)
        origin_ns[0] = normal.origin_ns
        shared_names[:] = sorted(
            name for name in normal.collectives if name.startswith(GPU_COLLECTIVES)
        )
        trace.GlooOpNameSet[:] = sorted(normal.collectives - set(shared_names))
        return path, normal.trace

    RunProfileData._preprocess_file = staticmethod(preprocess)
    StepParser._parse_step = _by_kernel(StepParser._parse_step)
    NodeParserMixin.parse_nodes = _without_host_ranges(NodeParserMixin.parse_nodes)
    metrics = GPUMetricsParser.get_gpu_metrics
    GPUMetricsParser.get_gpu_metrics = lambda self: [
        _shift_counter(counter, origin_ns[0]) for counter in metrics(self)
    ]


def patch_pages() -> None:
    """The same for the process that answers the pages."""
    from torch_tb_profiler import consts
    from torch_tb_profiler.plugin import TorchProfilerPlugin
    from torch_tb_profiler.run import RunProfile

    # Workers are named rank03_node1: node1, process 03.
    consts.NODE_PROCESS_PATTERN = re.compile(r"^(?=rank\d+_(.*))rank(\d+)_")
    RunProfile.append_gpu_metrics = lambda self, data: with_counters(data, self.gpu_metrics)
    answer = TorchProfilerPlugin.respond_as_json
    TorchProfilerPlugin.respond_as_json = staticmethod(
        lambda data, compress=False: answer(_round_times(data), compress)
    )


def _round_times(data: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Times in us have no digit that means anything behind the third."""
    if isinstance(data, dict):
        return {key: _round_times(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_round_times(value) for value in data]
    return round(data, 3) if isinstance(data, float) else data


def with_counters(trace: bytes, counters: list[str]) -> bytes:
    """A trace's text with more events, as gzip.

    The original puts them before the last bracket of the file, which may be one of the metadata.
    """
    begin = _EVENTS.search(trace)
    if begin is None or not counters:
        return gzip.compress(trace, 1)
    empty = trace[begin.end() :].lstrip().startswith(b"]")
    more = ",\n".join(counters).encode() + (b"" if empty else b",\n")
    return gzip.compress(b"".join([trace[: begin.end()], more, trace[begin.end() :]]), 1)


def _by_kernel(original: Callable[..., None]) -> Callable[..., None]:
    """Communication is kernels of NCCL and collectives on the CPU, as in `step_time_breakdown`."""

    def parse_step(self: Any, event: Any, nodes: Mapping[Any, Any]) -> None:  # noqa: ANN401
        if event.type == "Kernel":
            collective = event.args.get("Collective name") or _COMMUNICATION.search(event.name)
            original(self, event, _Anything() if collective else {})
        elif event.type == "user_annotation" and event.name.startswith(GPU_COLLECTIVES):
            work = SimpleNamespace(type="Python", name="", ts=event.ts, duration=event.duration)
            original(self, work, nodes)
        else:
            original(self, event, nodes)

    return parse_step


def _without_host_ranges(original: Callable[..., Any]) -> Callable[..., Any]:
    """An NCCL collective took the time of its kernels; the original adds that of its call."""

    def parse_nodes(self: Any, events: list[Any]) -> Any:  # noqa: ANN401
        found = original(self, events)
        for node in self.communication_data.values():
            if node.name.startswith(GPU_COLLECTIVES):
                host = node.kernel_ranges.pop(0)
                node.total_time -= host[1] - host[0]
        return found

    return parse_nodes


def _shift_counter(counter: str, origin_ns: int) -> str:
    """A counter event on the clock of the file, which the Trace page shows it with."""
    event = json.loads(counter)
    ns = origin_ns + round(event["ts"] * 1000)
    event["ts"] = ns / 1000 if ns % 1000 else ns // 1000
    return json.dumps(event)


_SPAWN = multiprocessing.get_context("spawn")
_RUNNING: set[BaseProcess] = set()
_LOCK = threading.Lock()
_ROOM: list[ThreadPoolExecutor] = []


class Parsing:
    """Replaces the plugin's `Process`, which would start one per trace, all at once."""

    def __init__(self, *, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        """Parses when there is room."""
        _ROOM[0].submit(self._run)

    def _run(self) -> None:
        process = _SPAWN.Process(target=parse, args=(self._target, self._args), daemon=True)
        with _LOCK:
            process.start()
            _RUNNING.add(process)
        process.join()
        _RUNNING.discard(process)
        if process.exitcode:  # it sent nothing, and the plugin would wait forever
            self._target.__self__.queue.put((None, None))  # type: ignore[attr-defined]


def parse(target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Parses one trace, in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    patch_parsing()
    target(*args)


def patch_loading() -> None:
    """Makes the plugin parse in this way."""
    from torch_tb_profiler.profiler import loader

    _ROOM[:] = [ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 2) // 2))]
    loader.Process = Parsing


def stop_loading() -> None:
    """Ends running parsers."""
    for room in _ROOM:
        room.shutdown(wait=False, cancel_futures=True)
    with _LOCK:
        for process in list(_RUNNING):
            process.terminate()
