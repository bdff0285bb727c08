"""The import rules of haiprof, as one table. README's map follows its order."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "haiprof"
STDLIB = frozenset(sys.stdlib_module_names)

# What each part may import from haiprof, besides itself: nothing imports what stands below it.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "units": set(),
    "trace_options": {"errors"},
    "react_options": {"errors"},
    "config": {"trace_options", "react_options", "errors", "units"},
    "rundir": {"errors", "units", "config"},
    "kineto": {"rundir", "config", "errors", "units"},
    "hook": {"rundir", "config", "errors", "units"},
    "samplers": {"rundir", "config", "errors", "units"},
    "launch": {"samplers", "kineto", "rundir", "config", "react_options", "errors", "units"},
    "traces": {"rundir", "config", "errors", "units"},
    "analysis": {"traces", "rundir", "config", "errors", "units"},
    "jobs": {"launch", "analysis", "traces", "samplers", "kineto", "rundir", "config", "errors",
             "units"},
    "diagnosis": {"analysis", "rundir", "config", "errors", "units"},
    "plots": {"analysis", "errors", "units"},
    "report": {"plots", "diagnosis", "jobs", "analysis", "rundir", "config", "errors", "units"},
    "cli": {"report", "plots", "diagnosis", "jobs", "analysis", "launch", "samplers", "kineto",
            "rundir", "config", "trace_options", "errors", "units"},
}  # fmt: skip
THIRD_PARTY: dict[str, set[str]] = {
    "config": {"tomli"},
    "hook": {"torch"},
    "samplers": {"psutil", "pynvml"},
    "launch": {"prometheus_client", "submitit"},
    "traces": {"msgspec", "numpy", "polars"},
    "analysis": {"dask_jobqueue", "distributed", "numpy", "polars"},
    "jobs": {"polars"},
    "diagnosis": {"numpy", "polars"},
    "plots": {"numpy", "polars", "plotly"},
    "report": {
        "numpy",
        "polars",
        "plotly",
        "rich",
        "IPython",
        "tensorboard",
        "torch_tb_profiler",
        "jinja2",
        "markupsafe",
        "werkzeug",
    },
    "cli": {"typer", "rich", "click"},
}
# Analyzer.show_overview() and show_one_rank() draw on request: the one arrow against the order.
EXCEPTIONS = {("analysis/analyzer.py", "report")}


def imported(path: Path) -> set[str]:
    """Absolute names of everything a module imports, at any depth; `if TYPE_CHECKING` counts."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


MODULES = [p for p in sorted(PACKAGE.rglob("*.py")) if part_of(p) not in ("__init__", "__main__")]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_module_imports_only_what_its_part_may(path: Path) -> None:
    part, relative = part_of(path), path.relative_to(PACKAGE).as_posix()
    names = imported(path)
    used = {name.split(".")[1] for name in names if name.startswith("haiprof.")} - {part}
    used -= {"__version__", "__file__"}
    used -= {target for module, target in EXCEPTIONS if module == relative}
    assert used <= ALLOWED[part]
    roots = {name.split(".")[0] for name in names} - {"haiprof", "__future__"} - STDLIB
    assert roots <= THIRD_PARTY.get(part, set())


def test_every_part_is_in_the_table_in_order() -> None:
    seen: set[str] = set()
    for part, allowed in ALLOWED.items():
        assert allowed <= seen, f"{part} may only import parts listed above it"
        seen.add(part)
    assert {part_of(p) for p in MODULES} <= seen


def _loaded_by(code: str) -> set[str]:
    """Top-level modules that a statement loads in a fresh interpreter."""
    program = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); before = set(sys.modules)\n"
        f"{code}\nprint(*{{m.split('.')[0] for m in set(sys.modules) - before}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("code", ["import haiprof", "import haiprof.hook", "import haiprof.rundir"])
def test_import_loads_nothing_but_the_standard_library(code: str) -> None:
    assert _loaded_by(code) <= STDLIB | {"haiprof"}


def test_launcher_starts_without_torch_polars_or_plotly() -> None:
    loaded = _loaded_by(
        "import haiprof.__main__, haiprof.launch.run, haiprof.launch.supervisor, "
        "haiprof.launch.agent"
    )
    heavy = {"torch", "numpy", "polars", "plotly", "rich", "typer", "pynvml", "prometheus_client"}
    assert not loaded & heavy


def test_hook_imports_torch_only_inside_functions() -> None:
    for path in (PACKAGE / "hook").rglob("*.py"):
        top = ast.parse(path.read_text(encoding="utf-8")).body
        names = {a.name for n in top if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in top if isinstance(n, ast.ImportFrom)}
        assert not {n for n in names if n.split(".")[0] == "torch"}, path
