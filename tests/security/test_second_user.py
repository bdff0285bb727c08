"""What a second user of the machine tries, one attempt per test: each is refused or harmless.

pytest tests/security/test_second_user.py -v
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from haiprof.agent.kineto_daemon import PrivateFolder
from haiprof.agent.node_agent import Relay
from haiprof.agent.reach import make_token
from haiprof.base.errors import UsageError
from haiprof.base.options import ENV_ACTIVE
from haiprof.in_job.commands import Commands
from haiprof.in_job.identity import claim_folder
from haiprof.live.attach import write_payload
from haiprof.live.external_sampling import training_processes
from haiprof.live.find import find_job, running_jobs
from haiprof.run_format.boot import BOOT_FOLDER, boot_entries
from haiprof.run_format.control import new_request, post_request
from haiprof.run_format.layout import RunPaths
from tests.security.second_user import CODE, GID, UID, Place, as_second_user, environment, fill_run

HOST = socket.gethostname()
SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
BY_NAME = {"run-id": ("x-77", ("--run-id", "77"), {}), "slurm": ("x-77.0", (), SLURM)}

Attempt = Callable[[Place], None]
ATTEMPTS: list[tuple[str, Attempt]] = []


def attempt(function: Attempt) -> Attempt:
    """One line of the table."""
    ATTEMPTS.append((function.__name__, function))
    return function


@pytest.fixture
def place() -> Iterator[Place]:
    """Below /tmp itself: pytest's own folders let nobody else in."""
    base = Path(tempfile.mkdtemp(prefix="second-user-", dir="/tmp"))
    base.chmod(0o755)
    found = Place(base / "shared", base / "outside")
    found.shared.mkdir()
    found.shared.chmod(0o1777)
    found.outside.mkdir(mode=0o700)
    yield found
    shutil.rmtree(base)


# -- a run directory whose name is known before the job starts -----------------------------------


def assert_unrecorded(place: Place, done: subprocess.CompletedProcess[str], reason: str) -> None:
    """The job ran, alone; why is said, and what to do."""
    assert (done.returncode, done.stdout) == (0, "the job ran\n"), done.stderr
    assert "the job runs unrecorded" in done.stderr
    assert reason in done.stderr, done.stderr
    assert "hint:" in done.stderr
    place.assert_nothing_ran()


def known_name(kind: str, mode: int) -> Attempt:
    def tries(place: Place) -> None:
        name, options, environ = BY_NAME[kind]
        place.plant_run(name, mode=mode)
        done = place.launch(*options, environ=environ)
        assert_unrecorded(place, done, f"belongs to another user (uid {UID})")

    return tries


ATTEMPTS += [
    (f"make_the_run_directory_before_{kind}_{mode:o}", known_name(kind, mode))
    for kind in BY_NAME
    for mode in (0o755, 0o777)
]


def in_its_place(what: str, reason: str, make: Callable[[Path, Place], None]) -> None:
    def tries(place: Place) -> None:
        as_second_user(lambda: make(place.shared / "x-77", place))
        assert_unrecorded(place, place.launch("--run-id", "77"), reason)

    ATTEMPTS.append((f"put_{what}_where_the_run_directory_goes", tries))


def _link_to_own(path: Path, place: Place) -> None:
    fill_run(path.with_name("theirs"), place.mark)
    path.symlink_to(path.with_name("theirs"))


def _socket(path: Path, place: Place) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


in_its_place("a_link_to_their_run", "is a link", _link_to_own)
in_its_place("a_link_to_nothing", "is a link", lambda path, _: path.symlink_to("/nowhere"))
in_its_place("a_link_to_the_victims_home", "is a link", lambda p, at: p.symlink_to(at.outside))
in_its_place("a_pipe", "belongs to another user", lambda path, _: os.mkfifo(path))
in_its_place("a_file", "belongs to another user", lambda path, _: path.touch())
in_its_place("a_socket", "belongs to another user", _socket)


def run_of_victim(place: Place, mode: int = 0o755) -> Path:
    root = place.shared / "x-77"
    fill_run(root, place.mark, mode=mode)
    return root


@attempt
def plant_code_through_a_run_directory_that_its_group_may_write(place: Place) -> None:
    root = run_of_victim(place)
    for path in (root, root / "boot"):
        os.chown(path, -1, GID)
        path.chmod(0o775)  # as umask 002 made it
    as_second_user(lambda: (root / "boot" / "json.py").unlink())
    as_second_user(lambda: (root / "boot/json.py").write_text(CODE.format(mark=str(place.mark))))
    done = place.launch("--run-id", "77")
    assert_unrecorded(place, done, "may be written by others (mode 775)")


@attempt
def plant_code_through_a_boot_folder_that_its_group_may_write(place: Place) -> None:
    root = run_of_victim(place)
    os.chown(root / "boot", -1, GID)
    (root / "boot").chmod(0o775)
    done = place.launch("--run-id", "77")
    assert_unrecorded(place, done, "boot may be written by others (mode 775)")


def linked_inside(name: str) -> None:
    def tries(place: Place) -> None:
        root = run_of_victim(place)
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).symlink_to(as_second_user(lambda: _folder(place.shared / "theirs")))
        assert_unrecorded(place, place.launch("--run-id", "77"), f"{name} is a link")
        assert not list((place.shared / "theirs").iterdir())

    ATTEMPTS.append((f"lead_the_runs_{name}_elsewhere_by_a_link", tries))


def _folder(path: Path) -> Path:
    path.mkdir(mode=0o777)
    return path


for _name in ("boot", "ranks", "nodes", "control"):
    linked_inside(_name)


@attempt
def own_a_folder_in_the_victims_run(place: Place) -> None:
    root = run_of_victim(place)
    os.chown(root / "control" if (root / "control").exists() else root / "nodes", UID, GID)
    done = place.launch("--run-id", "77")
    assert_unrecorded(place, done, f"nodes belongs to another user (uid {UID})")


# -- a run directory that is exchanged while the job runs: the log directory lets everybody rename


def exchange(place: Place, run: RunPaths) -> None:
    """As the second user, where the folder has no sticky bit: its own run in the victim's place."""
    place.shared.chmod(0o777)

    def swap() -> None:
        run.root.rename(run.root.with_name("moved"))
        fill_run(run.root, place.mark, mode=0o777)

    as_second_user(swap)


def run_python(run: RunPaths, code: str, *, timeout_s: float = 30.0) -> tuple[int, str, str]:
    """A process of the victim's job; its torch does nothing but exist."""
    torch = run.root.parent / "job" / "torch"
    if not torch.exists():
        torch.mkdir(parents=True)
        (torch / "__init__.py").write_text("")
    path = os.pathsep.join([*boot_entries(run), str(torch.parent)])
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment({"PYTHONPATH": path}),
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@attempt
def exchange_the_run_directory_for_one_with_code(place: Place) -> None:
    run = place.record()
    entries = boot_entries(run)
    exchange(place, run)
    done = subprocess.run(
        [sys.executable, "-c", "import json; print('the job ran')"],
        env=environment({"PYTHONPATH": os.pathsep.join(entries)}),
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("the job ran\n", "")
    place.assert_nothing_ran()


@attempt
def exchange_the_hooks_options(place: Place) -> None:
    run = place.record()
    entries = boot_entries(run)
    exchange(place, run)
    (place.outside / "torch.py").write_text("")
    code = "import torch, sys; print([m for m in sys.modules if m.startswith('haiprof')])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment({"PYTHONPATH": os.pathsep.join([*entries, str(place.outside)])}),
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("[]\n", "")
    place.assert_nothing_ran()


@attempt
def exchange_the_run_directory_before_a_rank_reports_in(place: Place) -> None:
    run = place.record()
    exchange(place, run)
    with pytest.raises(PermissionError, match="belongs to"):
        claim_folder(run, 0)
    assert not list(run.ranks.iterdir())


@attempt
def exchange_the_run_directory_to_make_requests(place: Place) -> None:
    run = place.record()
    relay = Relay(run, HOST)
    relay.start()
    try:
        exchange(place, run)

        def ask() -> None:
            for folder in (run.control, run.control_requests, run.control_replies):
                folder.mkdir(mode=0o777)
            request = new_request("stacks", valid_s=60)
            path = run.control_requests / f"{request.id}.json"
            path.write_text(json.dumps(request.as_json()))

        as_second_user(ask)
        relay.tick()
        assert not relay._asked
    finally:
        relay.stop()


@attempt
def exchange_the_run_directory_before_it_is_attached_to(place: Place) -> None:
    run = place.record()
    place.shared.chmod(0o777)
    with pytest.raises(UsageError, match="every user can rename"):
        write_payload(run)


@attempt
def have_it_kept_quiet_that_everybody_may_rename(place: Place) -> None:
    place.shared.chmod(0o777)
    done = place.launch("--recorder", "phases")
    assert done.stdout == "the job ran\n"
    assert f"chmod +t {place.shared}" in done.stderr


# -- what is read of a run directory, in the job -------------------------------------------------


def read_config(change: Callable[[RunPaths], object]) -> Callable[[Place], str]:
    """What the hook says of its options after somebody has changed them."""

    def tries(place: Place) -> str:
        run = place.record()
        change(run)
        status, output, error = run_python(run, "import torch; print('the job ran')")
        assert (status, output, error) == (0, "the job ran\n", "")
        return run.boot_failures.read_text()

    return tries


@attempt
def own_the_hooks_options(place: Place) -> None:
    said = read_config(lambda run: os.chown(run.boot_config, UID, GID))(place)
    assert "not the run's owner's alone" in said


@attempt
def write_the_hooks_options(place: Place) -> None:
    said = read_config(lambda run: run.boot_config.chmod(0o660))(place)
    assert "not the run's owner's alone" in said


@attempt
def lead_the_hooks_options_elsewhere_by_a_link(place: Place) -> None:
    def change(run: RunPaths) -> None:
        theirs = run.root.with_name("theirs.json")
        as_second_user(lambda: theirs.write_text('{"recorder": []}'))
        run.boot_config.unlink()
        run.boot_config.symlink_to(theirs)

    assert "OSError" in read_config(change)(place)


@attempt
def let_the_job_wait_for_a_pipe_in_place_of_the_options(place: Place) -> None:
    def change(run: RunPaths) -> None:
        run.boot_config.unlink()
        os.mkfifo(run.boot_config)

    assert read_config(change)(place)


@attempt
def lead_the_hooks_complaints_into_a_file_of_the_victim(place: Place) -> None:
    run = place.record()
    precious = place.outside / "precious"
    precious.write_text("mine")
    run.boot_failures.symlink_to(precious)
    run.boot_config.write_text("{}")
    status, output, error = run_python(run, "import torch; print('the job ran')")
    assert (status, output, error) == (0, "the job ran\n", "")
    assert precious.read_text() == "mine"


# -- a run directory as it is by default, under umask 002 ----------------------------------------


def denied(action: Callable[[], object]) -> None:
    with pytest.raises(PermissionError):
        as_second_user(action)


def on_a_run(name: str, reach: Callable[[RunPaths], object]) -> None:
    def tries(place: Place) -> None:
        run = place.record()
        denied(lambda: reach(run))

    ATTEMPTS.append((name, tries))


on_a_run("list_a_run", lambda run: os.listdir(run.root))
on_a_run("read_what_was_run", lambda run: run.manifest.read_bytes())
on_a_run("read_what_ranks_wrote", lambda run: os.listdir(run.ranks))
on_a_run("read_snapshots", lambda run: os.listdir(run.snapshots))
on_a_run("write_a_python_module_into_boot", lambda run: (run.boot / "json.py").touch())
on_a_run("write_the_options_of_the_hook", lambda run: run.boot_config.write_text("{}"))
on_a_run("make_a_folder_for_a_rank_to_come", lambda run: (run.ranks / "1").mkdir())
on_a_run("post_a_request", lambda run: post_request(run, new_request("stacks", valid_s=9)))
on_a_run("remove_a_run", lambda run: run.root.rename(run.root.with_name("gone")))
on_a_run("write_into_haiprofs_own_boot_folder", lambda _: (BOOT_FOLDER / "json.py").touch())


@attempt
def write_into_a_run_that_is_shared_with_all(place: Place) -> None:
    run = place.record(share="all")
    assert as_second_user(lambda: json.loads(run.manifest.read_text()))["command"] == ["t"]
    for path in (run.root, *run.root.rglob("*")):
        assert not path.lstat().st_mode & 0o022, path
    denied(lambda: (run.boot / "json.py").touch())
    denied(lambda: run.control.mkdir())


@attempt
def read_a_run_that_is_shared_with_the_group_of_another(place: Place) -> None:
    run = place.record(share="group")
    assert stat.S_IMODE(run.root.stat().st_mode) == 0o750
    denied(lambda: os.listdir(run.root))


@attempt
def read_requests_of_a_run_that_is_shared_with_all(place: Place) -> None:
    run = place.record(share="all")
    post_request(run, new_request("stacks", valid_s=9))
    denied(lambda: os.listdir(run.control))


# -- requests and sockets ------------------------------------------------------------------------


def open_control(place: Place) -> tuple[RunPaths, Relay]:
    """A run whose control folder lets everybody in, as if somebody had opened it by mistake."""
    run = place.record()
    relay = Relay(run, HOST)
    relay.start()
    for folder in (run.root, run.control, run.control_requests):
        folder.chmod(0o777)
    return run, relay


def ask_by(put: Callable[[RunPaths, Path, str], None]) -> Attempt:
    def tries(place: Place) -> None:
        run, relay = open_control(place)
        try:
            request = new_request("trace", {"steps": 10_000}, valid_s=60)
            path = run.control_requests / f"{request.id}.json"
            as_second_user(lambda: put(run, path, json.dumps(request.as_json())))
            relay.tick()
            assert not relay._asked
        finally:
            relay.stop()

    return tries


def _as_link(run: RunPaths, path: Path, text: str) -> None:
    (run.root.parent / "theirs.json").write_text(text)
    path.symlink_to(run.root.parent / "theirs.json")


ATTEMPTS.append(("ask_for_a_trace_by_a_file", ask_by(lambda _, path, text: _write(path, text))))
ATTEMPTS.append(("ask_for_a_trace_by_a_link", ask_by(_as_link)))
ATTEMPTS.append(("hold_the_launcher_up_by_a_pipe", ask_by(lambda _, path, text: os.mkfifo(path))))


def _write(path: Path, text: str) -> None:
    path.write_text(text)


@attempt
def connect_to_the_agents_socket(place: Place) -> None:
    run, relay = open_control(place)
    try:
        (address,) = run.control.glob("*.sock")
        address.chmod(0o777)

        def connect() -> socket.socket:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                line.connect(str(address))
                line.send(b'{"hello": {"rank": 0, "attempt": 0}}')
            return None  # type: ignore[return-value]

        as_second_user(connect)
        relay.tick()
        assert not relay.peers
    finally:
        relay.stop()


@attempt
def stand_in_for_the_agent(place: Place) -> None:
    run = place.record()
    for folder in (run.root, run.control):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
    address = run.control / f"{HOST[:60]}.sock"
    ready, listening = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(GID)
        os.setuid(UID)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(address))
            listener.listen(1)
            address.chmod(0o777)
            os.write(listening, b"x")
            listener.settimeout(30)
            line, _ = listener.accept()
            os._exit(0 if line.recv(1000) == b"" else 1)  # not a word of the job's
    os.read(ready, 1)
    handled: list[str] = []
    notes: list[dict[str, object]] = []
    commands = Commands(run, {"trace": lambda i, _: handled.append(i)}, notes.append)
    commands.start({"rank": 0, "attempt": 0})
    assert os.waitpid(child, 0)[1] == 0
    commands.forget()
    assert not handled


# -- files beside a run (those in the way of haiprof's own: test_file_attacks.py) ----------------


@attempt
def read_the_token_of_reach(place: Place) -> None:
    token = make_token(place.shared / "reach.token")
    denied((place.shared / "reach.token").read_bytes)
    assert token


@attempt
def enter_a_temporary_folder_of_haiprof(place: Place) -> None:
    (place.outside / "a file").touch()
    before = tempfile.tempdir
    tempfile.tempdir = str(place.shared)
    try:
        folder = PrivateFolder.create(place.outside / "a file" / "control" / "k")
    finally:
        tempfile.tempdir = before
    try:
        denied(lambda: os.listdir(folder.path))
        assert folder.path.parent == place.shared
    finally:
        folder.remove()


@attempt
def find_anything_of_a_run_in_tmp_or_shared_memory(place: Place) -> None:
    def names() -> set[str]:
        folders = ("/tmp", "/dev/shm", "/var/tmp")
        return {f"{f}/{n}" for f in folders if os.path.isdir(f) for n in os.listdir(f)}

    own_tmp = place.shared / "tmp"
    own_tmp.mkdir(mode=0o700)
    before = names()
    done = place.launch("--quiet", environ={"TMPDIR": str(own_tmp)})
    new = {name for name in names() - before if "haiprof" in name.lower()}
    assert (done.stdout, new, list(own_tmp.iterdir())) == ("the job ran\n", set(), [])


# -- processes -----------------------------------------------------------------------------------


@pytest.fixture
def pretender(place: Place) -> Iterator[tuple[int, Path]]:
    """A process of the second user that says it runs under haiprof, as a rank."""
    root = place.plant_run("x-mine")
    environ = {ENV_ACTIVE: str(root), "RANK": "0"}
    with subprocess.Popen(["/bin/sleep", "60"], env=environ, user=UID, group=GID) as process:
        try:
            while os.stat(f"/proc/{process.pid}").st_uid != UID:
                time.sleep(0.01)
            yield process.pid, root
        finally:
            process.kill()


VARIANTS = {
    *(f"make_the_run_directory_before_{kind}_{mode}" for kind in BY_NAME for mode in (755, 777)),
    *(f"put_{what}_where_the_run_directory_goes" for what in (
        "a_link_to_nothing", "a_link_to_the_victims_home", "a_file", "a_socket")),
    *(f"lead_the_runs_{name}_elsewhere_by_a_link" for name in ("ranks", "nodes", "control")),
    "write_the_hooks_options", "plant_code_through_a_boot_folder_that_its_group_may_write",
} - {"make_the_run_directory_before_slurm_777"}  # fmt: skip
"""Attempts that go another one's way: proofs."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a second user")


@needs_root
@pytest.mark.parametrize(
    "tries",
    [
        pytest.param(tries, id=name, marks=pytest.mark.proof if name in VARIANTS else ())
        for name, tries in ATTEMPTS
    ],
)
def test_second_user_tries_to(tries: Attempt, place: Place) -> None:
    tries(place)


@needs_root
def test_second_user_tries_to_be_listed_as_a_job_of_the_victim(
    place: Place, pretender: tuple[int, Path]
) -> None:
    _, root = pretender
    jobs = running_jobs([place.shared])
    assert root not in [job.run.root for job in jobs]


@needs_root
def test_second_user_tries_to_have_its_job_controlled(
    place: Place, pretender: tuple[int, Path]
) -> None:
    pid, root = pretender
    with pytest.raises(UsageError, match="only that user may ask"):
        find_job(str(root), [], others=True)
    with pytest.raises(UsageError, match=f"uid {UID}"):
        training_processes(str(pid))


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kept_out"),
    [
        pytest.param((), 0o077, id="nobody"),
        pytest.param(("--share", "group"), 0o027, id="group", marks=pytest.mark.proof),
    ],
)
def test_every_file_of_a_traced_job_is_its_owners_alone(
    place: Place, options: tuple[str, ...], kept_out: int
) -> None:
    code = (
        "import torch; m = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), lr=.1)\n"
        "for _ in range(30): m(torch.ones(1, 2)).sum().backward(); o.step()\n"
    )
    done = place.launch("--trace", "--steps", "5:7", *options, code=code, umask=0o002)
    (run,) = (path for path in place.shared.iterdir() if path.name.startswith("x-"))
    found = {path.relative_to(run).as_posix(): path for path in (run, *run.rglob("*"))}
    assert {"ranks/0/phases.rec", "report/verdict.txt", "boot/config.json"} <= found.keys(), done
    assert any(name.endswith(".pt.trace.json.gz") for name in found)
    open_to_others = {name for name, path in found.items() if path.stat().st_mode & kept_out}
    assert not open_to_others
    unshared = {n for n, p in found.items() if options and not p.stat().st_mode & 0o040}
    assert not {name for name in unshared if not name.startswith("control")}
