"""What holds for all tests."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import proofs, sampling
from tests.browser import browser, running_chromium
from tests.commands import Ran, Run
from tests.one_slurm import one_machine_slurm

__all__ = ["browser", "running_chromium"]  # fixtures
Once = Callable[[tuple[object, ...], Callable[[Path], Any]], Any]


def pytest_configure(config: pytest.Config) -> None:
    sampling.PROOFS = config.option.markexpr == "proof"
    config.option.loadscopereorder = False  # xdist would begin with the files of most tests
    # A busy machine makes single examples slow; pytest's own timeout ends what hangs.
    settings.register_profile("haiprof", deadline=None, max_examples=sampling.examples(100))
    settings.load_profile("haiprof")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which proofs came first: a header is not printed with -q."""
    if sampling.PROOFS:
        commit = proofs.this_commit() or "unknown: in the order of the files"
        terminalreporter.write_line(f"proofs of each rank began where their commit says: {commit}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the proofs: `tests/proofs.py` says how."""
    if sampling.PROOFS:
        ranks, files = proofs.mark_and_rank(items), [item.path for item in items]
        items[:] = proofs.order_proofs(items, ranks, files, commit=proofs.this_commit())


def pytest_make_parametrize_id(val: object) -> str | None:
    """Long values are cut: the id goes into a variable that every process inherits."""
    if isinstance(val, (str, bytes)) and len(val) > 100:
        return f"{ascii(val)[:40]}...{len(val)}"
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests of one group run on one worker, or not at all: their jobs have one name."""
    if not getattr(session.config.option, "loadgroup", False):
        return
    for item in session.items:
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError("this pytest-xdist does not group tests with this pytest")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Takes xdist's "@group" off a test's name: `--last-failed` does not know it with that."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # there xdist itself looks at the name
        report.nodeid = re.sub(r"@[^\]]*$", "", report.nodeid)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Proofs begin only until `HAIPROF_PROOFS_UNTIL`, in Unix seconds: CI has an end.

    One that takes minutes says so, `proof(takes_s=600)`, and begins only where they are left.
    """
    until = float(os.environ.get("HAIPROF_PROOFS_UNTIL", "inf"))
    proof = item.get_closest_marker("proof")
    if proof and time.time() + proof.kwargs.get("takes_s", 0) > until:
        pytest.skip("no time is left for this proof")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of traces goes to one folder of the test session, not to the user's."""
    cache = tmp_path_factory.getbasetemp() / "user-cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


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
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process, which says nothing of work that takes long."""
    from haiprof.cli import main  # reads polars: tests/unit/conftest.py comes first

    monkeypatch.setattr("haiprof.cli.shared._QUIET_S", 3600.0)

    def ran(*words: object, status: int | None = 0) -> Ran:
        done = Ran(main([str(word) for word in words]), *capsys.readouterr())
        assert status in (None, done.status), done.err
        return done

    return ran


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Slurm of this machine alone, whose commands find it; skips where there is none."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    with one_machine_slurm(folder) as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))
        yield
