"""An execution graph as GraphML, DOT, or a picture by Graphviz; coloured by what a node is."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from haiprof.base.errors import HaiprofError, MissingExtraError, UsageError
from haiprof.base.safe_files import named_file
from haiprof.trace_analysis.chakra import GraphDrawing

_BY_GRAPHVIZ = (".pdf", ".svg", ".png")
ENDINGS = (".graphml", ".dot", *_BY_GRAPHVIZ)
_TIMEOUT_S = 300
_NAME_LIMIT = 44
_ENGINE = "autograd::engine::evaluate_function: "
_HOST, _GPU = "#dce6f2", "#f6d7a7"
_COLOURS = {
    "COMM_COLL": "#f2a6a0", "COMM_SEND": "#f5c6c2", "COMM_RECV": "#f5c6c2",
    "MEM_LOAD": "#cfe8cf", "MEM_STORE": "#cfe8cf", "METADATA": "#e4e4e4",
}  # fmt: skip
_LINES = {
    "call": 'color="#b8b8b8", style=dashed, arrowhead=none',
    "launch": 'color="#c77f1c"',
    "stream": 'color="#c77f1c", style=dotted',
    "gap": 'color="#2f6db5", style=bold',
    "sync": 'color="#b0322a", style=bold',
}
_LEGEND = (
    ("computing on the host", _HOST), ("with GPU work", _GPU), ("communication", "#f2a6a0"),
    ("copy", "#cfe8cf"),
)  # fmt: skip


def check_ending(path: Path) -> None:
    """Checks the file's ending before anything is read."""
    if path.suffix not in ENDINGS:
        raise UsageError(f"{path}: a graph ends in {', '.join(ENDINGS)}")
    if path.suffix in _BY_GRAPHVIZ and shutil.which("dot") is None:
        raise MissingExtraError(
            f"{path}: Graphviz's program dot is not installed",
            hint="apt-get install graphviz, or write .dot or .graphml",
        )


def write_graph(path: Path, graph: GraphDrawing) -> None:
    """Writes a graph in the format of the file's ending, completely or not at all."""
    writers: dict[str, Callable[[GraphDrawing], str]] = {".graphml": graphml, ".dot": dot}
    writer = writers.get(path.suffix)
    content = writer(graph).encode() if writer else _render(graph, path)
    try:
        with named_file(path) as file:
            file.write(content)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from None


def dot(graph: GraphDrawing) -> str:
    """Graphviz's language: calls dashed, order solid, waits bold."""
    lines = [
        "digraph execution {",
        "  rankdir=TB; ranksep=0.3; nodesep=0.2; newrank=true;",
        '  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=10, '
        'color="#808080", margin="0.08,0.04"];',
        '  edge [arrowsize=0.6, color="#404040"];',
    ]
    cells = "".join(f'<td bgcolor="{colour}">{text}</td>' for text, colour in _LEGEND)
    said = "dashed: calls; solid: order on a thread; orange: launch, stream; bold: waits"
    rows = f'<tr>{cells}</tr><tr><td colspan="{len(_LEGEND)}">{said}</td></tr>'
    table = f'<table border="0" cellborder="0" cellspacing="4">{rows}</table>'
    lines.append(f'  label=<{table}>; labelloc=t; fontname="Helvetica"; fontsize=11;')
    for row in graph.nodes.iter_rows(named=True):
        label = "\\n".join(map(_quote, _label(row)))
        lines.append(f'  n{row["node"]} [label="{label}", fillcolor="{_colour(row)}", '
                     f'tooltip="{_quote(row["name"])}"];')  # fmt: skip
    for before, after, why in graph.edges.iter_rows():
        style = _LINES.get(why)
        lines.append(f"  n{before} -> n{after}" + (f" [{style}];" if style else ";"))
    return "\n".join([*lines, "}", ""])


def graphml(graph: GraphDrawing) -> str:
    """GraphML, for networkx, Gephi, yEd: `name`, `type`, `self_ns` ... as data of the nodes."""
    kinds = {"name": "string", "type": "string", "gpu": "boolean", "folded_count": "long",
             "self_ns": "long", "bytes": "long", "color": "string",
             "collective_kind": "string"}  # fmt: skip
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">',
        *(f'  <key id="{name}" for="node" attr.name="{name}" attr.type="{kind}"/>'
          for name, kind in kinds.items()),
        '  <key id="why" for="edge" attr.name="why" attr.type="string"/>',
        '  <graph id="execution" edgedefault="directed">',
    ]  # fmt: skip
    for row in graph.nodes.iter_rows(named=True):
        values = {**row, "gpu": str(row["gpu"]).lower(), "color": _colour(row)}
        data = "".join(f'<data key="{name}">{escape(_plain(str(values[name])))}</data>'
                       for name in kinds if values[name] is not None)  # fmt: skip
        lines.append(f"    <node id={quoteattr(str(row['node']))}>{data}</node>")
    for before, after, why in graph.edges.iter_rows():
        lines.append(f'    <edge source="{before}" target="{after}">'
                     f'<data key="why">{why}</data></edge>')  # fmt: skip
    return "\n".join([*lines, "  </graph>", "</graphml>", ""])


def _label(row: dict[str, object]) -> list[str]:
    name = str(row["name"]).replace(_ENGINE, "")
    name = f"{row['collective_kind']}: {name}" if row["collective_kind"] else name
    short = name if len(name) <= _NAME_LIMIT else f"{name[: _NAME_LIMIT - 3]}..."
    parts = []
    if isinstance(row["self_ns"], int):
        parts.append(f"{row['self_ns'] / 1e6:.3g} ms")
    if isinstance(row["bytes"], int):
        parts.append(f"{row['bytes'] / 1024:.4g} KiB")
    if row["folded_count"]:
        parts.append(f"+{row['folded_count']} inside")
    return [short, ", ".join(parts)] if parts else [short]


def _colour(row: dict[str, object]) -> str:
    return _COLOURS.get(str(row["type"]), _GPU if row["gpu"] else _HOST)


def _plain(text: str) -> str:
    """Without characters that XML and DOT cannot carry."""
    return "".join(c if c.isprintable() else "?" for c in text).encode("utf-8", "replace").decode()


def _quote(text: str) -> str:
    return _plain(text).replace("\\", "\\\\").replace('"', '\\"')


def _render(graph: GraphDrawing, path: Path) -> bytes:
    command = ["dot", f"-T{path.suffix[1:]}"]
    try:
        done = subprocess.run(
            command, input=dot(graph).encode(), capture_output=True, timeout=_TIMEOUT_S, check=True
        )
    except subprocess.TimeoutExpired:
        raise HaiprofError(
            f"{path}: Graphviz needs longer than {_TIMEOUT_S} s", hint="--max-nodes, or .graphml"
        ) from None
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or b""
        raise HaiprofError(f"{path}: dot failed: {said.decode(errors='replace')[:200]}") from None
    return done.stdout
