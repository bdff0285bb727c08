"""haiprof inside an item's own process, and jobs that an item starts under haiprof."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench

REPOSITORY = Path(__file__).parents[2]
JOB = REPOSITORY / "benchmarks" / "gpu" / "job.py"


@contextlib.contextmanager
def hooked(folder: Path, trace: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """Haiprof's hook in this process, with a trace window where one is given; the run's paths."""
    from haiprof.in_job.installer import Installer
    from haiprof.in_job.recorder import Recorder
    from haiprof.in_job.windows.driver import attach
    from haiprof.run_format.layout import RunPaths

    run = RunPaths(folder)
    run.ranks.mkdir(parents=True)
    recorder = Recorder(run, time_s=0.0, warmup_s=0.0)
    installer = Installer(recorder)
    installer.install()
    if trace:
        attach(trace, recorder=recorder, state=installer.state)
    try:
        yield run
    finally:
        recorder.finish()
        installer.uninstall()


def lines_of(run: Any, kind: str) -> list[dict[str, Any]]:
    """What the hook wrote into events.jsonl."""
    from haiprof.run_format.reader import read_lines

    found = [line for _, _, paths in run.rank_folders() for line in read_lines(paths.events)[0]]
    return [line for line in found if line.get("type") == kind]


def device_rows(run: Any) -> list[dict[str, float]]:
    """Records of device time, ns; NaN where a phase was not measured."""
    from haiprof.run_format.reader import read_records
    from haiprof.run_format.schema import DEVICE

    names = [column.name for column in DEVICE.columns]
    rows: list[dict[str, float]] = []
    for _, _, paths in run.rank_folders():
        if paths.device.exists():
            records = DEVICE.struct.iter_unpack(read_records(paths.device).data)
            rows += [dict(zip(names, record, strict=True)) for record in records]
    return rows


def raw_traces(run: Any) -> list[Path]:
    """Traces as the hook put them down, and as the launcher compressed them."""
    folders = (run.trace_parts, run.traces)
    names = ("*.trace.json", "*.trace.json.gz")
    return [path for folder in folders for name in names for path in sorted(folder.glob(name))]


def read_trace(path: Path) -> dict[str, Any]:
    """A Chrome trace."""
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert isinstance(content, dict)
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that has ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    logs: Path
    facts: dict[str, Any] = field(default_factory=dict)
    """The last line of JSON that it printed."""

    @property
    def run_dir(self) -> Path | None:
        """Its run directory."""
        found = sorted(path.parent for path in self.logs.glob("*/run.json"))
        return found[-1] if found else None

    @property
    def paths(self) -> Any:
        """The same, with a name for every file."""
        from haiprof.run_format.layout import RunPaths

        if self.run_dir is None:
            raise RuntimeError(f"no run directory in {self.logs}: {self.stderr[-600:]}")
        return RunPaths(self.run_dir)

    def verdict(self) -> dict[str, Any]:
        """What `haiprof verdict --json` prints of it."""
        from haiprof import Analyzer
        from haiprof.diagnosis.engine import diagnose
        from haiprof.diagnosis.verdict import as_document

        return as_document(diagnose(Analyzer(self.paths.root)))

    def node_lines(self, kind: str) -> list[dict[str, Any]]:
        """Lines of a type that the launcher and its samplers wrote."""
        from haiprof.run_format.reader import read_lines

        found = [line for _, node in self.paths.node_folders() for line in
                 [*read_lines(node.events)[0], *read_lines(node.agent)[0]]]  # fmt: skip
        return [line for line in found if line.get("type") == kind]


def run_job(
    bench: Bench,
    kind: str,
    *words: str,
    options: Sequence[str] | None = (),
    environment: Mapping[str, str] | None = None,
    in_front: Sequence[str] = (),
) -> Job:
    """Runs a loop of `job.py` under haiprof and waits for it."""
    logs = bench.scratch / f"logs-{time.monotonic_ns()}"
    command = [sys.executable, str(JOB), kind, *words]
    if options is not None:
        own = [sys.executable, "-m", "haiprof", "run", "--quiet", "--log-dir", str(logs)]
        command = [*own, *options, "--", *command]
    began = time.monotonic()
    environ = {**os.environ, "PYTHONPATH": python_path(), **(environment or {})}
    process = subprocess.run(
        [*in_front, *command], cwd=bench.scratch, env=environ, capture_output=True, text=True,
        check=False, timeout=max(bench.seconds_left - 2, 1),
    )  # fmt: skip
    facts = [line for line in process.stdout.splitlines() if line.startswith("{")]
    job = Job(
        returncode=process.returncode, stdout=process.stdout, stderr=process.stderr, logs=logs,
        seconds=time.monotonic() - began, facts=json.loads(facts[-1]) if facts else {},
    )  # fmt: skip
    told = {"words": [kind, *words], "returncode": job.returncode, "seconds": job.seconds}
    bench.note("job", {**told, "stderr": job.stderr[-1500:], "facts": str(job.facts)[:1500]})
    return job


def python_path() -> str:
    """Where haiprof and these modules are found by a process of ours."""
    words = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(REPOSITORY)]
    return os.pathsep.join(dict.fromkeys(filter(None, words)))
