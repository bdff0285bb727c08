"""What README's first page promises, held against a job that looks for the opposite.

SECURITY.md lists every promise with its test; those that have none elsewhere are here.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from haiprof.agent.samplers.registry import SAMPLERS
from haiprof.agent.samplers.table import ALL_METRICS, Node, TableSampler
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.schema import NULL_I64
from tests.fakes import FakeTree
from tests.process.jobs import training

ROOT = Path(__file__).parents[2]
HAIPROF = [sys.executable, "-m", "haiprof"]
TRAIN = training("while time.monotonic() < end:",
                 before="end = time.monotonic() + float(sys.argv[1])")  # fmt: skip
COLLECTIVES = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step()
c10d = dist.distributed_c10d
found = [c10d._get_default_group()._get_sequence_number_for_group(), len(c10d._world.pg_map)]
open(f"{sys.argv[1]}/{dist.get_rank()}.json", "w").write(json.dumps(found))
dist.barrier()
import time; time.sleep(0.2)  # tests/process/loops.py says why
dist.destroy_process_group()
"""


def surroundings(home: Path) -> dict[str, str]:
    """A user whose every usual place to write is below one folder."""
    places = {"HOME": "home", "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "XDG_RUNTIME_DIR": "run"}
    for name in places.values():
        (home / name).mkdir(parents=True)
    return {**os.environ, **{variable: str(home / name) for variable, name in places.items()}}


def run_watched(
    command: Sequence[str], work: Path, environment: dict[str, str]
) -> tuple[int, set[tuple[str, int]]]:
    """Exit status, and the addresses at which any process of a job took connections meanwhile."""
    ports: set[tuple[str, int]] = set()
    job = psutil.Popen(list(command), cwd=work, env=environment, stderr=subprocess.DEVNULL)
    while job.poll() is None:
        for process in (job, *of_the_job(job, work)):
            ports |= open_ports(process)
        time.sleep(0.1)
    return job.returncode, ports


def of_the_job(job: psutil.Process, work: Path) -> list[psutil.Process]:
    """Its processes, also those that are nobody's children any more."""
    found = set(job.children(recursive=True))
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(work):
                found.add(process)
        except psutil.Error:  # noqa: PERF203 - another user's, or gone
            continue
    return list(found)


def open_ports(process: psutil.Process) -> set[tuple[str, int]]:
    try:
        connections = process.net_connections("inet")
    except psutil.Error:  # gone meanwhile
        return set()
    waiting = (c for c in connections if c.status == psutil.CONN_LISTEN or c.type == 2)
    return {(c.laddr.ip, c.laddr.port) for c in waiting if c.laddr}


def files_below(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()}


LISTEN = """
import socket, time
with socket.create_server(("127.0.0.1", 0)):
    time.sleep(1.5)
"""


def test_a_port_would_be_seen(tmp_path: Path) -> None:
    _, ports = run_watched([sys.executable, "-c", LISTEN], tmp_path, dict(os.environ))
    assert len(ports) == 1


@pytest.mark.slow
def test_no_port_is_opened_and_no_file_written_outside_the_log_directory(tmp_path: Path) -> None:
    """Beside the same job without haiprof: torch itself may keep caches."""
    written: dict[str, set[Path]] = {}
    for how, launcher in {"bare": [sys.executable], "recorded": [*HAIPROF, "--quiet"]}.items():
        home = tmp_path / how
        environment = surroundings(home)
        work = home / "work"
        work.mkdir()
        (work / "train.py").write_text(TRAIN)
        status, ports = run_watched([*launcher, "train.py", "2"], work, environment)
        assert (status, ports) == (0, set()), how
        written[how] = files_below(home)
    (logs,) = {path.parts[:2] for path in written["recorded"] - written["bare"]}
    assert logs == ("work", "haiprof-logs")
    assert written["bare"] <= written["recorded"]


@pytest.mark.slow
def test_no_collective_and_no_process_group_is_added(tmp_path: Path) -> None:
    """Two ranks that also agree on a trace window: they do it without the job's network."""
    (tmp_path / "train.py").write_text(COLLECTIVES)
    job = [sys.executable, str(ROOT / "tests/process/ranks.py"), "2", "train.py"]
    counted: dict[str, list[object]] = {}
    warnings = {}
    for how, launcher in {
        "bare": [],
        "recorded": [*HAIPROF, "--quiet", "--steps", "10:12"],
    }.items():
        (tmp_path / how).mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*launcher, *job, how], cwd=tmp_path, env=environment,
                              check=True, capture_output=True, timeout=240)  # fmt: skip
        warnings[how] = done.stderr.count(b"Warning:")  # of torch: an old variable's name
        counted[how] = [json.loads(p.read_text()) for p in sorted((tmp_path / how).iterdir())]
    assert len(counted["bare"]) == 2
    assert counted["recorded"] == counted["bare"]
    assert warnings["recorded"] == warnings["bare"]
    assert list((tmp_path / "haiprof-logs").glob("*/traces/*.json.gz"))


class NoNvml(ModuleType):
    """A machine without NVIDIA's driver."""

    class NVMLError(Exception):
        """As pynvml's."""

    def __getattr__(self, name: str) -> object:
        raise AttributeError(name)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.table.name)
@pytest.mark.parametrize("files", ["none", "empty"])
def test_what_cannot_be_read_has_a_reason_and_is_never_0(
    sampler: type[TableSampler], files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sampler on a node that shows it nothing: no record has a value that nobody measured."""
    monkeypatch.delenv("HAIPROF_DCGM_URL", raising=False)
    root = tmp_path / "root"
    root.mkdir()
    if files == "empty":
        tree = FakeTree(root)
        for path in [path for path in root.rglob("*") if path.is_file()]:
            tree.write(str(path.relative_to(root)), "")
    node = Node(run=RunPaths(tmp_path / "run"), host="node0", root=root, nvml=NoNvml("pynvml"))
    found = sampler(node)
    missing = found.open()
    assert all(each.reason for each in missing)
    is_nothing = ALL_METRICS in {each.metric for each in missing}
    records = b"" if is_nothing else found.sample()
    missing += found.missing.drain()
    found.close()
    named = {each.metric for each in missing}
    for record in found.table.struct.iter_unpack(records):
        for column, value in zip(found.table.columns, record, strict=True):
            if column in found.table.metrics:
                absent = math.isnan(value) if column.type[0] == "f" else value == NULL_I64
                assert absent, f"{column.name} is {value}"
                assert column.name in named, f"no reason for {column.name}"


def test_every_promise_in_security_md_has_its_test() -> None:
    """What SECURITY.md names exists, and what attacks haiprof is named there."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"\btests/[\w/]+\.py(?:::\w+)?", text)
    assert len(named) > 30
    for name in sorted(set(named)):
        file, _, function = name.partition("::")
        assert (ROOT / file).exists(), f"SECURITY.md names {file}"
        assert not function or function in functions(ROOT / file), f"SECURITY.md names {name}"
    attacks = {f"tests/security/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    assert attacks <= {name.partition("::")[0] for name in named}


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
