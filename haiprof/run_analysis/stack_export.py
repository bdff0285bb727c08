"""Sampled stacks for other viewers: speedscope's JSON, and collapsed stacks for flame graphs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from haiprof.base.intervals import Ints
from haiprof.base.version import __version__
from haiprof.run_analysis.code_samples import CODE_PHASES, CodeSamples, CodeTree
from haiprof.run_analysis.nesting import Bools

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def speedscope(samples: CodeSamples, *, name: str) -> bytes:
    """A file that speedscope.app opens: one profile per rank, thread and phase, in samples."""
    tree = samples.tree
    frames = [
        {"name": f"{frame.function}:{frame.line}", "file": frame.file, "line": frame.line}
        for frame in tree.frames
    ]
    profiles = [_profile(samples, title, rows) for title, rows in _groups(samples)]
    content = {
        "$schema": _SCHEMA,
        "name": name,
        "exporter": f"haiprof@{__version__}",
        "activeProfileIndex": 0,
        "shared": {"frames": frames},
        "profiles": profiles,
    }
    return json.dumps(content).encode()


def collapsed_lines(samples: CodeSamples) -> bytes:
    """Lines of `rank 0;phase;frame;frame COUNT`, as flamegraph.pl and others read them."""
    lines = []
    for title, rows in _groups(samples):
        stacks, counts = np.unique(samples.stack[rows], return_counts=True)
        for stack, count in zip(stacks.tolist(), counts.tolist(), strict=True):
            names = [_frame_text(samples.tree, place) for place in _places(samples.tree, stack)]
            lines.append(";".join((*title.split(", "), *names)) + f" {count}\n")
    return "".join(lines).encode("utf-8", "replace")


def _groups(samples: CodeSamples) -> Iterator[tuple[str, Bools]]:
    """(`rank 0, worker 3, phase`, its samples), in order."""
    keys = np.stack([samples.rank, samples.worker, samples.phase])
    for rank, worker, phase in np.unique(keys, axis=1).T.tolist():
        rows = (keys == np.array([[rank], [worker], [phase]])).all(axis=0)
        thread = f"worker {worker}, " if worker >= 0 else ""
        yield f"rank {rank}, {thread}{CODE_PHASES[phase].replace('_', ' ')}", rows


def _profile(samples: CodeSamples, title: str, rows: Bools) -> dict[str, object]:
    order = np.argsort(samples.time_ns[rows], kind="stable")
    stack: Ints = samples.stack[rows][order]
    return {
        "type": "sampled",
        "name": title,
        "unit": "none",
        "startValue": 0,
        "endValue": len(stack),
        "samples": [_places(samples.tree, number) for number in stack.tolist()],
        "weights": [1] * len(stack),
    }


def _places(tree: CodeTree, stack: int) -> list[int]:
    """Frames of a stack, the outermost first."""
    found = []
    while stack:
        found.append(int(tree.place[stack]))
        stack = int(tree.parent[stack])
    return found[::-1]


def _frame_text(tree: CodeTree, place: int) -> str:
    frame = tree.frames[place]
    text = f"{frame.function} ({frame.file}:{frame.line})"
    return " ".join(text.replace(";", ":").split())
