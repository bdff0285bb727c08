"""`haiprof export --to tensorboard`: what it serves, where it writes, and how it ends."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from haiprof.base.errors import UsageError
from haiprof.cli.app import run_command
from haiprof.compat import tensorboard as tensorboard_server
from haiprof.compat.tensorboard import open_layout
from haiprof.show.servers import free_port
from tests.served import served
from tests.unit.analysis.trace.shared import rank_file, step
from tests.unit.rundir.small_run import write_small_run

pytest.importorskip("tensorboard", reason="pip install 'haiprof[tensorboard]'")


def fetch(url: str, host: str | None = None) -> Any:
    request = Request(url, headers={"Host": host} if host else {})
    with urlopen(request) as answer:
        return json.load(answer)


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_runs_scalars_and_traces_are_served_and_nothing_is_left_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("torch_tb_profiler", reason="pip install 'haiprof[torch-tb-profiler]'")
    run = write_small_run(tmp_path / "run")
    folder = run.root / "traces"
    folder.mkdir()
    for rank in range(2):
        rank_file(folder, rank, [step(1, 0, 100)])
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    before = files_of(run.root)
    with served("tensorboard", run.root, "--port", "0", env={"TMPDIR": str(scratch)}) as running:
        links = sorted(path.name for path in (run.tensorboard / "traces" / "window0").iterdir())
        assert links == ["rank0_host.pt.trace.json", "rank1_host.pt.trace.json"]
        found: Any = {}
        for _ in range(100):
            found = fetch(f"{running.url}data/plugin/scalars/tags")
            if "rank0" in found:
                break
            time.sleep(0.2)
        assert found["rank0"]
        with pytest.raises(HTTPError, match="403"):
            fetch(f"{running.url}data/plugin/scalars/tags", host="evil.example")
    added = files_of(run.root) - before
    assert added
    assert all(name.startswith("tensorboard/rank0/") for name in added)
    assert list(scratch.iterdir()) == []
    assert "no traces yet\n" not in "".join(running.said)


@pytest.mark.proof
@pytest.mark.slow
def test_a_busy_port_is_said_and_another_one_taken(tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "run")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with served("tensorboard", run.root, "--port", str(port)) as running:
            assert f":{port}/" not in running.url
        assert any(f"port {port} is in use" in line for line in running.said)


@pytest.mark.parametrize("extra", ["tensorboard", "torch-tb-profiler"])
def test_what_is_not_installed_is_named_with_its_extra(
    extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Traces alone take the plugin, too."""
    rank_file(tmp_path, 0, [step(1, 0, 100)])
    only = {"torch-tb-profiler": "tensorboard"}.get(extra)
    monkeypatch.setattr(tensorboard_server, "find_spec", lambda name: name == only or None)
    assert run_command(["tensorboard", str(tmp_path)]) == 6
    assert f"haiprof[{extra}]" in capsys.readouterr().err


def test_what_cannot_be_shown_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch_tb_profiler", reason="pip install 'haiprof[torch-tb-profiler]'")
    for path, status in (("nothing/here", 3), ("\0", 2), (str(tmp_path), 4)):
        assert run_command(["tensorboard", path, "--port", "0"]) == status
        said = capsys.readouterr().err
        assert "Traceback" not in said
    assert f"{tmp_path}: no trace in it" in said
    with pytest.raises(UsageError, match=r"192\.0\.2\.1"):
        free_port("192.0.2.1", 6006)


def test_a_window_is_linked_once_all_its_ranks_are_there(tmp_path: Path) -> None:
    first = rank_file(tmp_path, 0, [step(1, 0, 100)], world_size=2)
    with open_layout(None, tmp_path) as layout:
        assert layout.link_windows(whole_only=True) == 0
        assert not list(layout.traces.iterdir())
        rank_file(tmp_path, 1, [step(1, 0, 100)], world_size=2)
        assert layout.link_windows(whole_only=True) == 1
        links = list((layout.traces / "window0").iterdir())
        assert len(links) == 2
        assert first in {link.resolve() for link in links}
    assert not layout.folder.exists()
