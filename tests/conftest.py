"""What holds for all tests."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.one_slurm import one_machine_slurm

Once = Callable[[tuple[object, ...], Callable[[Path], Any]], Any]

# A busy machine makes single examples slow; pytest's own timeout ends what hangs.
settings.register_profile("haiprof", deadline=None)
settings.load_profile("haiprof")


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Makes what many tests only read: once per session, whichever worker asks first.

    `once(key, make)` is what `make(folder)` gave; the folder is new and `make` may leave it out.
    Keys are told apart by their `repr`.
    """
    made: dict[str, Any] = {}
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all workers
    shared = root / "made-once"
    shared.mkdir(exist_ok=True)

    def get(key: tuple[object, ...], make: Callable[[Path], Any]) -> Any:
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        if name in made:
            return made[name]
        kept = shared / f"{name}.pickle"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                shutil.rmtree(shared / name, ignore_errors=True)  # of a try that failed
                content = pickle.dumps(make(shared / name))
                kept.write_bytes(content)
            made[name] = pickle.loads(kept.read_bytes())
        return made[name]

    return get


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Slurm of this machine alone, whose commands find it; skips where there is none."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    with one_machine_slurm(folder) as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))
        yield
