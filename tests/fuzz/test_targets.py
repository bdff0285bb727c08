"""Every parser against damaged and hostile bytes: earlier findings, and a minute of new ones."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import haiprof
from haiprof.base.errors import HaiprofError
from tests import sampling
from tests.fuzz import engine, sanitized
from tests.fuzz.targets import BY_NAME, TARGETS, Target, unavailable

EACH_TIME_S, AS_A_PROOF_S = 12.0, 60.0
BUDGET_S = AS_A_PROOF_S if sampling.PROOFS else EACH_TIME_S
"""Of all targets together."""
GROUPS = 4
CORPUS = Path(__file__).with_name("corpus")
FINDINGS = sorted(path for path in CORPUS.rglob("*") if path.is_file())
PACKAGE = Path(haiprof.__file__).parent
ROOT = PACKAGE.parent

# What takes bytes apart. A module that calls one of them must be run by some target's seeds.
_PARSING = {
    "loads", "unpack_from", "iter_unpack", "frombuffer", "read_ipc_stream",
    "read_parquet", "decompressobj", "Decoder",
}  # fmt: skip
# Modules that parse what haiprof itself, or the system for it, has just written.
_OWN = {
    "trace_analysis/collectives.py": "arguments of a trace that was loaded",
    "base/version.py": "files of the package itself",
    "trace_analysis/chakra.py": "values of an execution trace that was loaded",
    "in_job/activation.py": "the boot config, whose folder is the owner's alone",
    "in_job/boot/sitecustomize.py": "the same",
    "in_job/payload.py": "the same",
    "in_job/collectives.py": "torch's own status, in the process that asks torch",
    "launch/supervisor.py": "the socket between the launcher and its own process",
    "live/follow.py": "the answer of a child process",
    "live/preflight.py": "the same",
    "cli/prepare.py": "a baseline that the user names, whose values must all be numbers",
    "agent/reactions.py": "the same",
    "agent/notifications.py": "the same",
    "agent/prometheus_endpoint.py": "records that a sampler of the same process has just made",
    "show/page/run_sections.py": "plotly's own output",
    "compat/torch_profiler/patches.py": "the plugin's process; `normal` has a target",
    "trace_format/kineto/cache.py": "the owner's cache, whose parts have checksums",
    "trace_analysis/function_patterns.py": "the user's own cache, whose entries have checksums",
    "run_analysis/remote_runs.py": "run.json at an address: each error becomes one of haiprof's",
    "in_job/worker_stacks.py": "the report of the rank that made the worker, cut and checked",
    "linux/processes.py": "the kernel's answer about a process",
    "trace_analysis/operator_work.py": "arguments of a trace that was loaded",
    "trace_analysis/kernel_names.py": "arguments of a trace that was loaded",
    "trace_format/kineto/rank_trace.py": "events of a trace that was loaded",
    "run_format/schema.py": "no bytes: it makes the struct",
    "run_analysis/folding.py": "a rank's own stacks, in a child of its node's agent that may fail",
    "compat/otlp.py": "64 KiB of the answer of a collector that the user names",
    "live/node.py": "records that a sampler of the same process has just made",
}


@pytest.fixture(autouse=True)
def _armed() -> Iterator[None]:
    before = engine.arm()
    yield
    engine.disarm(before)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_seeds_reach_the_reader(target: Target) -> None:
    """Some seed is read to its end, so that mutations begin behind a format's first check."""
    if unavailable(target):
        pytest.skip(unavailable(target))
    found = [engine.attempt(target, seed) for seed in target.seeds()]
    assert [finding for finding, _ in found if finding] == []
    assert any("Error" not in outcome for _, outcome in found)


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_earlier_finding_holds(path: Path) -> None:
    target = BY_NAME[path.parent.name]
    if unavailable(target):
        pytest.skip(unavailable(target))
    finding, _ = engine.attempt(target, path.read_bytes())
    assert finding is None, finding.details


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("group", range(GROUPS))
def test_mutated_input_gives_an_answer_or_one_error(tmp_path: Path, group: int) -> None:
    """No exception but haiprof's, no input of 64 KiB that takes seconds or half a GiB."""
    names = [target.name for target in TARGETS[group::GROUPS]]
    done = fuzz(tmp_path, *names, "--seconds", str(BUDGET_S / len(TARGETS)))
    assert done.returncode == 0, shown(done, tmp_path)
    for name in names:
        if not unavailable(BY_NAME[name]):
            assert engine.Workplace(tmp_path / name).tally().executions > 0


def fuzz(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """scripts/fuzz without the part that installs: targets first, then options."""
    targets = [word for name in words if name in BY_NAME for word in ("--target", name)]
    options = [word for word in words if word not in BY_NAME]
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", *targets, *options, "--jobs", "1",
         "--state", str(state)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


def shown(done: subprocess.CompletedProcess[str], state: Path) -> str:
    """What was found, with the details."""
    details = "\n".join(path.read_text() for path in state.glob("*/findings/*.txt"))
    return f"{done.stdout}\n{done.stderr}\n{details}"


@pytest.mark.proof
@pytest.mark.slow
def test_scanner_holds_under_sanitizers(tmp_path: Path) -> None:
    """Its own tests and its targets, built with AddressSanitizer and UBSan."""
    named = "damaged or bounds or every_category or their_place"
    hold_sanitized(tmp_path, "tests/unit/traces/test_native.py", "-k", named)
    done = fuzz(tmp_path, "scanner", "--seconds", "3", "--sanitize")
    assert done.returncode == 0, shown(done, tmp_path)


@pytest.mark.proof
@pytest.mark.slow
def test_what_runs_in_a_job_holds_under_sanitizers(tmp_path: Path) -> None:
    """Spans, calls and frames in processes that train, built in the same way."""
    hook = [
        f"tests/process/hook/test_{name}.py" for name in ("frames", "usual_calls", "steady_steps")
    ]
    hold_sanitized(tmp_path, "tests/unit/rundir/test_ring.py", *hook, "-m", "not proof")


def hold_sanitized(folder: Path, *tests: str) -> None:
    """These tests pass with the compiled parts that `sanitized` builds; none is skipped."""
    try:
        variables = sanitized.environment(sanitized.build(folder))
    except sanitized.NoSanitizerError as error:
        pytest.skip(str(error))
    assert overflow_is_seen(variables), "the sanitizer does not work here"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.fuzz.sanitized", "-p", "no:cacheprovider",
         *tests],
        cwd=ROOT, env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " skipped" not in done.stdout


def overflow_is_seen(variables: dict[str, str]) -> bool:
    """Whether a write behind an allocation ends a process with these variables."""
    code = "import ctypes; at = ctypes.CDLL(None).malloc; at.restype = ctypes.c_void_p; " \
           "ctypes.memset(at(8), 0, 9)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True,
                          text=True, check=False)  # fmt: skip
    return "heap-buffer-overflow" in done.stderr


def planted(run: Callable[[bytes], object]) -> Target:
    return Target(name="planted", reads="", run=run, seeds=lambda: [b"[1, 2]"])


def _hold_memory(_: bytes) -> object:
    return len(bytearray(os.urandom(1) * (64 << 20)))


def _take_long(_: bytes) -> object:
    end = time.process_time() + 60
    while time.process_time() < end:
        pass
    return None


def _refuse(_: bytes) -> object:
    raise HaiprofError("no")


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (lambda data: data[100], "IndexError"),
        (lambda data: {}[data], "KeyError"),
        (_hold_memory, "memory"),
        (_take_long, "slow"),
        (_refuse, None),
        (len, None),
    ],
)
def test_what_is_planted_is_found(
    run: Callable[[bytes], object], kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "CPU_LIMIT_S", 0.05 if kind == "slow" else 5)
    monkeypatch.setattr(engine, "MEMORY_LIMIT_BYTES", 32 << 20)
    finding, _ = engine.attempt(planted(run), b"[1, 2]")
    assert (finding.kind if finding else None) == kind


def test_crash_is_a_finding_with_its_input_and_the_run_goes_on(tmp_path: Path) -> None:
    program = (
        "import sys, ctypes\n"
        "from tests.fuzz import run, targets\n"
        "def crash(data):\n"
        "    return ctypes.string_at(0) if b'3' in data else 1\n"
        "targets.TARGETS = (targets.Target(name='planted', reads='', run=crash,\n"
        "                                  seeds=lambda: [b'[1, 2]', b'[3]']),)\n"
        "run._CRASH_LIMIT = 2\n"
        "sys.exit(run.main(sys.argv[1:]))\n"
    )
    words = ["--seconds", "1", "--state", str(tmp_path / "state"),
             "--report", str(tmp_path / "report.md")]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 1, done.stderr
    (found,) = (path for path in (tmp_path / "state/planted/findings").iterdir()
                if path.suffix != ".txt")  # fmt: skip
    assert found.read_bytes() == b"[3]"
    assert "ended by SIGSEGV" in (tmp_path / "report.md").read_text()


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    place = engine.Workplace(tmp_path)
    for seconds in (0.1, 0.2):
        session = engine.Session(planted(len), place, seconds)
        engine.fuzz(session, 1)
        assert session.over
    first = place.tally()
    assert first.seconds >= 0.2
    engine.fuzz(engine.Session(planted(len), place, 0.1), 1)
    assert place.tally().executions == first.executions + len(engine.inputs(planted(len), place))


def test_every_module_that_parses_is_run_by_a_target() -> None:
    """A new parser needs a target, or a reason why nobody else writes what it reads."""
    parsing = {name for name in map(str, modules()) if _parses(PACKAGE / name)}
    run = modules_run_by_seeds()
    missing = sorted(parsing - run - set(_OWN))
    assert missing == [], f"no target of tests/fuzz/targets.py reaches {missing}"
    assert sorted(name for name in _OWN if not (PACKAGE / name).exists()) == []


def test_security_md_says_how_much_is_fuzzed() -> None:
    text = " ".join((ROOT / "SECURITY.md").read_text(encoding="utf-8").split())
    assert f"{len(TARGETS)} fuzz targets in CI" in text
    assert f"gives all targets {EACH_TIME_S:.0f} s together at each commit" in text
    assert f"{AS_A_PROOF_S:.0f} s more among the proofs" in text


def modules() -> Iterator[Path]:
    yield from (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def _parses(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(call, ast.Attribute) and call.attr in _PARSING for call in calls)


def modules_run_by_seeds() -> set[str]:
    """Files of haiprof in which some function ran."""
    found: set[str] = set()

    def note(frame: object, event: str, _: object) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)  # type: ignore[attr-defined]

    sys.setprofile(note)
    try:
        for target in TARGETS:
            for seed in () if unavailable(target) else target.seeds():
                engine.attempt(target, seed)
    finally:
        sys.setprofile(None)
    inside = (Path(name) for name in found if name.startswith(str(PACKAGE)))
    return {str(path.relative_to(PACKAGE)) for path in inside}
