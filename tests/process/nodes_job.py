"""A job of four ranks on two nodes, in which one of them may do something wrong."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.process.jobs import PYTHON, REPOSITORY, environment
from tests.process.live import within
from tests.two_nodes import ENVIRONMENT, Node, two_nodes

SCRIPT = str(REPOSITORY / "tests" / "process" / "faulty_job.py")
HOSTS = {0: "node-1", 1: "node-1", 2: "node-2", 3: "node-2"}
REACH = "--reach=10.213.7.1:29600"
RUN = "faulty_job-two"


class NodesJob:
    """The job, from its start until its nodes end."""

    def __init__(
        self,
        nodes: tuple[Node, Node],
        folder: Path,
        *,
        options: Sequence[str] = (),
        words: Sequence[str] = (),
    ) -> None:
        self.nodes, self.folder, self.logs = nodes, folder, folder / "logs"
        self.launchers = [
            self._start(place, node, options, words) for place, node in enumerate(nodes)
        ]

    def _start(
        self, place: int, node: Node, options: Sequence[str], words: Sequence[str]
    ) -> subprocess.Popen[str]:
        haiprof = [PYTHON, "-m", "haiprof", "--quiet", f"--log-dir={self.logs}", "--run-id=two"]
        torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nnodes=2"]
        torchrun += ["--nproc-per-node=2", f"--node-rank={place}", "--master-port=29500"]
        torchrun += [f"--master-addr={self.nodes[0].address}", SCRIPT]
        with (self.folder / f"stderr-{place}").open("w") as stderr:
            return subprocess.Popen(
                node.words(*haiprof, *options, *torchrun, *words, folder=self.folder),
                env=environment(ENVIRONMENT), stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip

    def wait_for_fault(self, rank: int) -> int:
        """Until the rank is at the step of its fault; the Unix time in ns at which it was."""
        out = self.launchers[rank // 2].stdout
        assert out is not None
        word, _, wall_ns = out.readline().partition(" ")
        assert word == "FAULT", self.stderr()
        return int(wall_ns)

    def tell(self, fault: str, rank: int) -> None:
        """What goes wrong from the next step on, where the script was told to `--follow` this."""
        draft = self.folder / ".told"
        draft.write_text(f"{fault} {rank}")
        draft.rename(self.folder / "told")

    def ask(self, node: Node, *words: str) -> dict[str, Any]:
        """What a command on a node answers."""
        command = [PYTHON, "-m", "haiprof", *words, "--json", f"--log-dir={self.logs}"]
        done = subprocess.run(
            node.words(*command, folder=self.folder), env=environment(ENVIRONMENT),
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def pid(self, rank: int) -> int:
        """Of a rank, as its node knows it."""
        report = self.nodes[rank // 2].seen(self.logs / RUN / "ranks" / str(rank) / "rank.json")
        pid: int = json.loads(report.read_text())["pid"]
        return pid

    def own_steps(self, found: dict[str, Any]) -> dict[int, list[int]]:
        """By rank: the steps in the files of `trace-now`, as the script itself numbered them."""
        paths = {rank["rank"]: rank["path"].rpartition(":")[2] for rank in found["ranks"]}
        files = {rank: self.nodes[rank // 2].seen(Path(path)) for rank, path in paths.items()}
        # of another disk, only where they will be is known
        within(60, lambda: all(file.exists() for file in files.values()))
        return {rank: own_steps(file) for rank, file in files.items()}

    def stderr(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("stderr-*")))

    def collect(self) -> None:
        """After it, or its nodes, have ended."""
        for launcher in self.launchers:
            launcher.communicate(timeout=120)


def own_steps(trace: Path) -> list[int]:
    """The steps of a trace, by the names that `faulty_job.py` gave them."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {str(event.get("name")) for event in events if event.get("ph") == "X"}
    return sorted(int(n.removeprefix("own step ")) for n in names if n.startswith("own step "))


@contextmanager
def nodes_job(
    folder: Path, *, options: Sequence[str] = (), words: Sequence[str] = (), apart: bool = False
) -> Iterator[NodesJob]:
    """Runs it, at most until this is left; with `apart` each node has a disk of its own."""
    job = None
    (folder / "logs").mkdir()
    try:
        with two_nodes() as nodes:
            for node in nodes if apart else ():
                node.own_disk(folder / "logs")
            job = NodesJob(nodes, folder, options=options, words=words)
            yield job
    finally:
        if job is not None:
            job.collect()
