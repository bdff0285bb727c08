"""A second user of the same machine, for tests that run as root: acts with its own rights alone."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from haiprof.base.options import Options
from haiprof.launch.run_directories import create_run
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest

UID = GID = 65534
PACKAGE_PARENT = Path(__file__).parents[2]
_Result = TypeVar("_Result")
# What it would like to run as somebody else; it leaves its mark wherever it runs.
CODE = "import os; open({mark!r} + str(os.getuid()), 'w').close()\n"
SHADOWED = ("sitecustomize.py", "json.py", "torch.py", "os.py", "encodings.py", "haiprof.py")


def as_second_user(action: Callable[[], _Result]) -> _Result:
    """Does something in a child with the rights of that user alone."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            os.setgroups([])
            os.setgid(GID)
            os.setuid(UID)
            content: tuple[bool, object] = (True, action())
        except BaseException as error:  # noqa: BLE001 (it is raised in the test)
            content = (False, error)
        os.write(write, pickle.dumps(content))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    worked, result = pickle.loads(data)
    if not worked:
        raise result
    return result  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Place:
    """A folder that all users share, as /tmp or a scratch file system, and who works there."""

    shared: Path
    """Mode 1777: everybody may create, nobody may rename or remove what is another's."""
    outside: Path
    """The victim's alone."""

    @property
    def mark(self) -> Path:
        """What the second user's code leaves where it runs, with the uid behind it."""
        return self.shared / "ran-as-"

    def assert_nothing_ran(self) -> None:
        """No code of the second user ran as the victim."""
        assert not Path(f"{self.mark}{os.getuid()}").exists()

    def plant_run(self, name: str = "x-77", *, mode: int = 0o755) -> Path:
        """As the second user: what looks like a running run, with code in its boot folder."""

        def make() -> None:
            os.umask(0)
            fill_run(self.shared / name, self.mark, mode=mode)

        as_second_user(make)
        return self.shared / name

    def launch(
        self,
        *options: str,
        code: str = "import json; print('the job ran')",
        umask: int = 0o022,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """As the victim: a job under haiprof, in the shared folder."""
        words = ["--log-dir", str(self.shared), "--name", "x", *options]
        return subprocess.run(
            [sys.executable, "-m", "haiprof", *words, "--", sys.executable, "-c", code],
            cwd=self.outside, env=environment(environ), umask=umask,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def record(self, umask: int = 0o002, **options: object) -> RunPaths:
        """As the victim: the run directory of a job, as the launcher makes it."""
        chosen = Options(log_dir=self.shared, **options)  # type: ignore[arg-type]
        before = os.umask(umask)
        try:
            return create_run(chosen, command=["t"], name="x", environ={})[0]
        finally:
            os.umask(before)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The victim's, with this haiprof."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HAIPROF_", "SLURM_"))}
    return {**kept, "PYTHONPATH": str(PACKAGE_PARENT), **(extra or {})}


def fill_run(root: Path, mark: Path, *, mode: int = 0o755) -> None:
    """A run that goes on, as a launcher of haiprof leaves it; its boot folder holds CODE."""
    for name in ("boot", "ranks", "nodes", "report"):
        (root / name).mkdir(parents=True)
    for name in SHADOWED:
        (root / "boot" / name).write_text(CODE.format(mark=str(mark)))
    config = {"package": str(root / "boot"), "run_dir": str(root), "recorder": ["phases"]}
    (root / "boot" / "config.json").write_text(json.dumps(config))
    manifest = Manifest(
        haiprof_version="0", name="x", command=["t"], host="h", launcher_pid=1,
        start_wall_ns=time.time_ns(),
    )  # fmt: skip
    (root / "run.json").write_text(json.dumps(asdict(manifest)))
    root.chmod(mode)
