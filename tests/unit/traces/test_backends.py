"""Collectives of every backend that PyTorch names: spans, Flight Recorder, TensorBoard's views."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from haiprof.compat.torch_profiler.normalize import Exact, normalise_trace
from haiprof.trace_format.flight_recorder import read_torch_dump
from haiprof.trace_format.kineto.events import GPU_BACKEND_NAMES
from tests.unit.analysis.trace.shared import event

BACKENDS = pytest.mark.parametrize("backend", GPU_BACKEND_NAMES)


@BACKENDS
def test_kinds_in_a_dump_are_read_without_the_backend(backend: str, tmp_path: Path) -> None:
    entry = {
        "collective_seq_id": 1, "profiling_name": f"{backend}:all_reduce",
        "process_group": ["0", "default_pg"], "input_sizes": [[4]], "state": "started",
    }  # fmt: skip
    path = tmp_path / "rank_0"
    path.write_text(json.dumps({"entries": [entry], "pg_config": {}}))
    assert read_torch_dump(path).entries["kind"].to_list() == ["all_reduce"]


@BACKENDS
def test_spans_are_collectives_in_tensorboards_views(backend: str) -> None:
    name = f"{backend}:all_reduce"
    text = json.dumps({"traceEvents": [event(name, "user_annotation", 5, 10)]})
    found = normalise_trace(json.loads(text, parse_float=Exact))
    assert found.collectives == {name}
    (span,) = (one for one in found.trace["traceEvents"] if one.get("name") == name)
    assert span["cat"] == "user_annotation", "what the plugin counts as communication"
