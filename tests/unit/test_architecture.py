"""The import rules of haiprof, as one table: every import counts, lazy and type-only ones too."""

from __future__ import annotations

import ast
import itertools
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from haiprof.cli.names import COMMANDS

PACKAGE = Path(__file__).parents[2] / "haiprof"
STDLIB = frozenset(sys.stdlib_module_names)

# The parts from the bottom to the top: each may import those named, all of which stand above it in
# this table. What runs in the job (in_job), and before torch is there (launch, agent), stays light.
ALLOWED: dict[str, set[str]] = {
    "base": set(),
    "run_format": {"base"},
    "trace_format": {"run_format", "base"},
    "linux": {"run_format", "base"},
    "in_job": {"run_format", "base"},
    "agent": {"linux", "run_format", "base"},
    "launch": {"agent", "linux", "run_format", "base"},
    "run_analysis": {"trace_format", "run_format", "base"},
    "trace_analysis": {"run_analysis", "trace_format", "run_format", "base"},
    "live": {"trace_analysis", "run_analysis", "trace_format", "launch", "agent", "linux",
             "run_format", "base"},
    "diagnosis": {"trace_analysis", "run_analysis", "trace_format", "run_format", "base"},
    "show": {"diagnosis", "live", "trace_analysis", "run_analysis", "trace_format", "agent",
             "run_format", "base"},
    "compat": {"show", "trace_analysis", "run_analysis", "trace_format", "run_format", "base"},
    "api": {"compat", "show", "diagnosis", "trace_analysis", "run_analysis", "base"},
    "cli": {"api", "compat", "show", "diagnosis", "live", "trace_analysis", "run_analysis",
            "trace_format", "launch", "agent", "linux", "run_format", "base"},
}  # fmt: skip
THIRD_PARTY: dict[str, set[str]] = {
    "base": {"fsspec", "numpy", "tomli"},
    "trace_format": {"msgspec", "numpy", "polars", "zlib_ng"},
    "in_job": {"torch"},
    "agent": {"prometheus_client", "pynvml"},
    "launch": {"submitit", "yaml"},
    "run_analysis": {"fsspec", "numpy", "polars"},
    "trace_analysis": {"dask_jobqueue", "distributed", "msgspec", "numpy", "polars"},
    "live": {"polars"},
    "diagnosis": {"numpy", "polars"},
    "show": {"IPython", "jinja2", "markupsafe", "numpy", "plotly", "polars", "rich",
             "tensorboard", "werkzeug"},
    "compat": {"google", "numpy", "opentelemetry", "polars", "tensorboard", "torch_tb_profiler",
               "werkzeug"},
    "api": {"polars"},
    "cli": {"mcp", "rich"},
}  # fmt: skip


class Definition(NamedTuple):
    """A function or class; its name without leading underscores, in lower case."""

    name: str
    line: int
    is_function: bool
    """Neither a class nor a property, which reads as data and may be one: `job.suspended`."""


class Source(NamedTuple):
    """What is asked of a module's source, which is parsed once for all questions."""

    imported: frozenset[str]
    """Absolute names of everything it imports, at any depth; `if TYPE_CHECKING` counts."""
    definitions: tuple[Definition, ...]
    started: tuple[int, ...]
    """The lines that name a command of haiprof to start."""


@cache
def read_source(path: Path) -> Source:
    imported: set[str] = set()
    definitions, started = [], []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            imported.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            definitions.append(_define(node))
        elif _names_a_command(node):
            started.append(getattr(node, "lineno", 0))
    return Source(frozenset(imported), tuple(definitions), tuple(started))


def _define(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Definition:
    bare, is_class = node.name.strip("_"), isinstance(node, ast.ClassDef)
    if is_class:
        bare = "".join(f"_{c.lower()}" if c.isupper() else c for c in bare).strip("_")
    is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
    return Definition(bare, node.lineno, not (is_class or is_property))


def _names_a_command(node: ast.AST) -> bool:
    """A text such as `-m haiprof`, or a list of words that starts haiprof."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and "haiprof" in node.value:
        starts = "haiprof.__main__" in node.value or node.value.split()[:2] == ["-m", "haiprof"]
        return starts and "\n" not in node.value
    return isinstance(node, ast.List) and _starts_a_command(node)


def _starts_a_command(node: ast.List) -> bool:
    """Whether a list of words is `[..., "-m", "haiprof", ...]` or `["haiprof", COMMAND, ...]`."""
    words = [e.value if isinstance(e, ast.Constant) else None for e in node.elts]
    return any(
        (a == "-m" and b == "haiprof") or (a == "haiprof" and b in COMMANDS)
        for a, b in itertools.pairwise(words)
    )


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


ALL_MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = [p for p in ALL_MODULES.values() if part_of(p) not in ("__init__", "__main__")]


@cache
def imports_of(name: str) -> frozenset[str]:
    """The modules of haiprof that a module imports; a name in a package counts as the package."""
    found = set()
    for target in read_source(ALL_MODULES[name]).imported:
        module = target if target in ALL_MODULES else target.rpartition(".")[0]
        if module in ALL_MODULES:
            found.add(module)
    return frozenset(found - {name})


def test_modules_import_only_what_their_part_may() -> None:
    forbidden = {}
    for path in MODULES:
        part, names = part_of(path), read_source(path).imported
        used = {name.split(".")[1] for name in names if name.startswith("haiprof.")} - {part}
        roots = {name.split(".")[0] for name in names} - {"haiprof", "__future__"} - STDLIB
        found = (used - ALLOWED[part]) | (roots - THIRD_PARTY.get(part, set()))
        if found:
            forbidden[path.relative_to(PACKAGE).as_posix()] = found
    assert forbidden == {}


def test_no_module_imports_itself_through_others() -> None:
    try:
        TopologicalSorter({name: imports_of(name) for name in ALL_MODULES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_only_the_command_line_names_haiprof_commands_to_start() -> None:
    """What stands below `cli` is given the command it starts: it knows of none by itself."""
    assert [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in MODULES
        if part_of(path) != "cli"
        for line in read_source(path).started
    ] == []


def test_every_part_is_in_the_table_in_order() -> None:
    seen: set[str] = set()
    for part, allowed in ALLOWED.items():
        assert allowed <= seen, f"{part} may only import parts listed above it"
        seen.add(part)
    assert {part_of(p) for p in MODULES} <= seen


def test_hook_imports_torch_only_inside_functions() -> None:
    for path in (PACKAGE / "in_job").rglob("*.py"):
        top = ast.parse(path.read_text(encoding="utf-8")).body
        names = {a.name for n in top if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in top if isinstance(n, ast.ImportFrom)}
        assert not {n for n in names if n.split(".")[0] == "torch"}, path


PRIVATE_WORDS = """
    again told beside rolls put_down silence roll_call say counted facts closer outside parts owners
    routine kept signs marks fields held board place side across watched workshop wanted what nobody
"""
"""Words that say nothing to who searches for them: no function, class or module is called so."""
IRREGULAR_PARTICIPLES = """
    begun bound bought brought built caught chosen done drawn driven eaten fallen felt forgotten
    frozen given gone grown heard held hidden kept known left lent lost made meant met seen sent
    shown sold spent stolen struck stuck sunk taken thrown told torn understood won worn written
"""
VERBS_IN_ED = frozenset({"bleed", "embed", "exceed", "feed", "need", "proceed", "seed", "shed"})


def test_nothing_is_called_by_a_private_word() -> None:
    words = set(PRIVATE_WORDS.split())
    found = [name for path in MODULES if (name := path.stem.strip("_")) in words]
    for path in MODULES:
        names = (each.name for each in read_source(path).definitions if each.name in words)
        found += [f"{path.relative_to(PACKAGE)}: {name}" for name in names]
    assert found == []


def test_functions_are_verbs_and_no_participles() -> None:
    found, participles = [], set(IRREGULAR_PARTICIPLES.split())
    for path in MODULES:
        for name, line, is_function in read_source(path).definitions:
            regular = name.endswith("ed") and "_" not in name and name not in VERBS_IN_ED
            if is_function and (regular or name in participles):
                found.append(f"{path.relative_to(PACKAGE)}:{line} {name}")
    assert found == []
