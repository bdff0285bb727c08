"""Lines and flame graphs of sampled stacks: every count and time against one by hand."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from haiprof import Analyzer
from haiprof.base.code_places import code_name, is_library, place_text
from haiprof.base.ledger import POSITIONS
from haiprof.run_analysis.flame_graph import FlameGraph, collapsed_lines, inclusive_ns, speedscope
from haiprof.run_analysis.lines import common_callees, function_times, line_frame, wilson
from haiprof.show.card import view_text
from haiprof.show.flame import run_flames, sampled_lines
from haiprof.show.views.run import lines_view
from tests.unit.analysis.recorded import spans_of, write_rank, write_run
from tests.unit.analysis.sampled import Stack, write_stacks
from tests.unit.diagnosis.tables import samples_of as code_samples
from tests.unit.diagnosis.tables import tree_of

SITE = "/opt/venv/lib/python3.11/site-packages"
MAIN = ("/home/me/train.py", 88, "main")
LOAD = ("/home/me/data.py", 12, "load_image")
DECODE = ("/home/me/data.py", 14, "load_image")
OPEN = (f"{SITE}/PIL/Image.py", 3000, "open")
FETCH = (f"{SITE}/torch/utils/data/_utils/fetch.py", 54, "_MapDatasetFetcher.fetch")
CALL = (f"{SITE}/torch/nn/modules/module.py", 1700, "Module._call_impl")
RECURSE = ("/home/me/data.py", 30, "walk")
STACKS: tuple[Stack, ...] = (
    (MAIN,), (MAIN, CALL), (MAIN, FETCH, LOAD), (MAIN, FETCH, LOAD, OPEN), (MAIN, FETCH, DECODE),
    (MAIN, RECURSE, RECURSE), (MAIN, RECURSE, RECURSE, OPEN), (OPEN,),
)  # fmt: skip
LINE = "ITER " + "D F B O " * 30 + "E E E " + "D F B O SAVE " * 10
SPAN_NS, GAP_NS = 100_000, 7_000


def phase_of(time_ns: int) -> str:
    """By hand: the span, or the stretch between spans, that a moment lies in."""
    spans = spans_of(LINE, span_ns=SPAN_NS, gap_ns=GAP_NS)
    names = {1: "dataloader", 3: "dataloader", 4: "forward", 5: "evaluation", 7: "backward",
             8: "optimizer", 11: "checkpoint"}  # fmt: skip
    rows = zip(spans.kind.tolist(), spans.start_ns.tolist(), spans.end_ns.tolist(), strict=True)
    found = [(kind, start, end) for kind, start, end in rows]
    for kind, start, end in found:
        if start <= time_ns < end:
            return names[kind]
    evaluations = [(start, end) for kind, start, end in found if kind == 5]
    if evaluations[0][0] <= time_ns < evaluations[-1][1]:
        return "evaluation"
    last_optimizer = max(end for kind, _, end in found if kind == 8)
    first = min(start for _, start, _ in found)
    return "other" if first <= time_ns < last_optimizer else "between_steps"


def samples_of(count: int, seed: int) -> list[tuple[int, Stack]]:
    spans = spans_of(LINE, span_ns=SPAN_NS, gap_ns=GAP_NS)
    last = int(spans.end_ns.max()) // 1000
    chance = random.Random(seed)
    return sorted((1000 * chance.randint(1, last), chance.choice(STACKS)) for _ in range(count))


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, list[tuple[int, Stack]]]:
    run = write_run(tmp_path / "run")
    write_rank(run, spans_of(LINE, span_ns=SPAN_NS, gap_ns=GAP_NS))
    samples = samples_of(3000, seed=1)
    write_stacks(run.rank(0).stacks, samples)
    return run.root, samples


def innermost_user(stack: Stack) -> tuple[str, int, str] | None:
    own = [frame for frame in stack if "/site-packages/" not in frame[0]]
    return own[-1] if own else None


def test_every_count_is_that_of_counting_by_hand(
    recorded: tuple[Path, list[tuple[int, Stack]]],
) -> None:
    root, samples = recorded
    own: Counter[tuple[object, ...]] = Counter()
    inclusive: Counter[tuple[object, ...]] = Counter()
    for time_ns, stack in samples:
        phase = phase_of(time_ns)
        inner = innermost_user(stack)
        if inner is not None:
            own[(phase, *inner)] += 1
        for frame in {frame for frame in stack if "/site-packages/" not in frame[0]}:
            inclusive[(phase, *frame)] += 1
    rows = Analyzer(root).lines().to_dicts()
    key = ("phase", "file", "line", "function")
    assert {tuple(row[k] for k in key): row["inclusive_count"] for row in rows} == dict(inclusive)
    found = {tuple(row[k] for k in key): row["self_count"] for row in rows if row["self_count"]}
    assert found == dict(own)


def test_time_of_a_phase_is_shared_among_its_samples(
    recorded: tuple[Path, list[tuple[int, Stack]]],
) -> None:
    """Samples may be few where the interpreter is busy: the spans know how long it was."""
    root, _ = recorded
    analyzer = Analyzer(root)
    steps, samples = analyzer.steps(), analyzer.code_samples()
    for phase in ("forward", "backward"):
        total = samples.weight_ns[samples.phase == {"forward": 1, "backward": 2}[phase]].sum()
        assert total == pytest.approx(steps[f"{phase}_host_ns"].sum())


def test_function_is_named_with_its_top_line_and_what_it_calls(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, spans_of(LINE, span_ns=SPAN_NS, gap_ns=GAP_NS))
    stacks: list[Stack] = [(MAIN, FETCH, LOAD, OPEN)] * 60 + [(MAIN, FETCH, DECODE)] * 20
    stacks += [(MAIN,)] * 20
    write_stacks(run.rank(0).worker_stacks(3), [(1000 * i, s) for i, s in enumerate(stacks, 1)],
                 worker=3)  # fmt: skip
    times = function_times(Analyzer(run.root).code_samples(), "all")
    assert (times[0].function, times[0].line, times[0].share) == ("load_image", 12, 0.8)
    assert times[0].callees == ("PIL.Image.open",)
    assert times[0].callers == (place_text(*MAIN),)
    assert times[1].function == "main"


def test_callers_are_the_way_that_most_of_the_time_came(tmp_path: Path) -> None:
    """An evaluation's time lies in the model; the line to change is the one that evaluates."""
    run = write_run(tmp_path / "run")
    write_rank(run, spans_of(LINE, span_ns=SPAN_NS, gap_ns=GAP_NS))
    evaluate, every = ("/home/me/train.py", 40, "evaluate"), ("/home/me/train.py", 60, "after_step")
    seldom = ("/home/me/train.py", 70, "sometimes")
    each = ("/home/me/train.py", 40, "evaluate.<locals>.<listcomp>")
    stacks: list[Stack] = [(MAIN, every, FETCH, evaluate, each, FETCH, LOAD, OPEN)] * 30
    stacks += [(MAIN, seldom, evaluate, LOAD)] * 10
    write_stacks(run.rank(0).worker_stacks(3), [(1000 * i, s) for i, s in enumerate(stacks, 1)],
                 worker=3)  # fmt: skip
    (load,) = function_times(Analyzer(run.root).code_samples(), "all")
    assert [at.partition(" ")[2] for at in load.callers] == ["evaluate", "after_step", "main"]


def test_lines_are_of_the_last_attempt_that_has_steps(tmp_path: Path) -> None:
    """A restart, and a third start that died before its first step."""
    run = write_run(tmp_path / "run")
    lines = (LINE, LINE, "")
    for attempt, (spans, frame) in enumerate(zip(lines, (LOAD, DECODE, OPEN), strict=True)):
        write_rank(run, spans_of(spans, span_ns=SPAN_NS, gap_ns=GAP_NS), attempt=attempt)
        write_stacks(run.rank(0, attempt).stacks, [(1000 * i, (MAIN, frame)) for i in range(1, 99)])
    analyzer = Analyzer(run.root)
    named = analyzer.lines().filter(analyzer.lines()["self_count"] > 0)
    assert set(named["line"]) == {DECODE[1]}
    assert analyzer.code_samples({0}).notes == (
        "only the last attempt of each rank is looked at: 2 others are left out",
    )


def test_workers_wait_outside_their_fetch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, spans_of(LINE))
    write_stacks(run.rank(0).worker_stacks(0), [(1000, (FETCH, LOAD)), (2000, (OPEN,))], worker=0)
    lines = Analyzer(run.root).lines()
    assert lines.select("worker", "phase", "function").rows() == [(0, "worker", "load_image")]
    shown = view_text(lines_view(sampled_lines(Analyzer(run.root), None, None)[1], ()))
    assert "1 worker, by count of samples" in shown
    assert " s " not in shown  # no time


@pytest.mark.parametrize(("file", "function", "library"), [
    ("/home/me/train.py", "main", False),
    ("train.py", "main", False),
    ("/tmp/ipykernel_9/12.py", "<module>", False),
    ("/home/me/lib/python_tools/data.py", "load", False),
    ("<string>", "<module>", False),
    ("<string>", "__init__", True),
    ("<frozen importlib._bootstrap>", "_load", True),
    ("<eval_with_key>.3", "forward", True),
    (f"{SITE}/torch/nn/modules/linear.py", "forward", True),
    ("/usr/lib/python3/dist-packages/numpy/core.py", "f", True),
    ("/usr/lib/python3.11/json/encoder.py", "encode", True),
    ("/opt/pytorch/torch/nn/modules/linear.py", "forward", True),
])  # fmt: skip
def test_user_code_is_told_from_libraries(file: str, function: str, library: bool) -> None:
    assert is_library(file, function, libraries=("/opt/pytorch/torch",)) is library


def test_library_functions_have_the_names_people_import() -> None:
    assert code_name(f"{SITE}/PIL/Image.py", "open") == "PIL.Image.open"
    assert code_name("/usr/lib/python3.11/json/__init__.py", "dumps") == "json.dumps"
    low, high = wilson(np.array([10]), np.array([100]))
    assert (round(float(low[0]), 4), round(float(high[0]), 4)) == (0.0552, 0.1744)


def test_speedscope_file_holds_every_sample(recorded: tuple[Path, list[tuple[int, Stack]]]) -> None:
    root, samples = recorded
    content = json.loads(speedscope(Analyzer(root).code_samples(), name="job"))
    assert sum(len(profile["samples"]) for profile in content["profiles"]) == len(samples)
    for profile in content["profiles"]:
        assert profile["type"] == "sampled"
        assert len(profile["samples"]) == len(profile["weights"]) == profile["endValue"]
    frames = content["shared"]["frames"]
    used = {place for p in content["profiles"] for stack in p["samples"] for place in stack}
    assert used == set(range(len(frames)))
    lines = collapsed_lines(Analyzer(root).code_samples()).decode().splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == len(samples)
    assert all(line.startswith("rank 0;") for line in lines)


@pytest.mark.parametrize("text", [
    '{"type": "samples", "pid": 7, "time_ns": 1, "offset_us": [], "late_us": [0], "stack": []}',
    '{"type": "samples", "pid": 7, "time_ns": "x", "offset_us": [0], "stack": [1]}',
    '{"type": "samples", "pid": 7, "first_stack": 1, "stacks": [[1, 0], [5, 99], "x"]}',
    '{"type": "samples", "pid": 7, "first_frame": -4, "frames": [[1, 2, 3]]}',
    '{"type": "samples", "pid": 1e400}',
    '{"type": "stacks", "pid": 7, "version": 1, "libraries": 3}',
    '{"type": "samp',
])  # fmt: skip
def test_a_damaged_line_of_samples_costs_only_itself(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, spans_of(LINE, span_ns=SPAN_NS, gap_ns=GAP_NS))
    write_stacks(run.rank(0).stacks, samples_of(10, seed=2), pid=8)
    with run.rank(0).stacks.open("a") as file:
        file.write('{"type": "stacks", "version": 1, "pid": 7, "worker": null}\n' + text + "\n")
    assert Analyzer(run.root).lines()["inclusive_count"].sum() > 0


TINY = ("/home/me/data.py", 99, "seldom")
STEPS = "D F B O " * 60
STEP_NS = 4 * SPAN_NS + 4 * GAP_NS


def record(folder: Path, stacks: dict[int, Sequence[Stack]]) -> Analyzer:
    """A run whose ranks have these stacks in turn, one a microsecond."""
    run = write_run(folder)
    spans = spans_of(STEPS, span_ns=SPAN_NS, gap_ns=GAP_NS)
    last_us = int(spans.end_ns.max()) // 1000
    for rank, own in stacks.items():
        write_rank(run, spans, rank=rank)
        samples = [(1000 * us, own[us % len(own)]) for us in range(1, last_us)]
        write_stacks(run.rank(rank).stacks, samples, per_line=500)
    return Analyzer(run.root)


def times(graph: FlameGraph, series: int = 0) -> dict[tuple[str, ...], float]:
    """Inclusive ns per step by path of names."""
    whole = inclusive_ns(graph.parents, graph.series[series].self_ns)
    found = {}
    for number, ns in enumerate(whole.tolist()):
        path, at = [], number
        while at >= 0:
            path.append(graph.frames[graph.places[at]].name)
            at = graph.parents[at]
        found[tuple(reversed(path))] = ns
    return found


def test_positions_add_up_to_the_step_and_samples_share_their_time(tmp_path: Path) -> None:
    run = record(tmp_path / "run", {0: [(MAIN, LOAD, OPEN), (MAIN, LOAD, OPEN), (MAIN,)]})
    graph = run_flames(run).graph
    found = times(graph)
    assert sum(found[(name,)] for name in POSITIONS if (name,) in found) == pytest.approx(
        STEP_NS, rel=0.01
    )
    assert found["forward", "main"] == pytest.approx(SPAN_NS)
    assert found["forward", "main", "load_image", "open"] == pytest.approx(
        SPAN_NS * 2 / 3, rel=0.05
    )
    kinds = {frame.name: (frame.kind, frame.place) for frame in graph.frames}
    assert kinds["load_image"] == ("user", "/home/me/data.py:12")
    assert kinds["open"] == ("library", "PIL.Image")


def test_ranks_stand_beside_their_mean(tmp_path: Path) -> None:
    run = record(tmp_path / "run", {0: [(MAIN,)], 1: [(MAIN, LOAD)]})
    graph = run_flames(run).graph
    assert [one.rank for one in graph.series] == [None, 0, 1]
    path = ("backward", "main", "load_image")
    assert [round(times(graph, n).get(path, 0)) for n in range(3)] == [SPAN_NS // 2, 0, SPAN_NS]


def test_two_runs_are_told_apart_by_function(tmp_path: Path) -> None:
    """Lines move when code changes: the same function is one frame."""
    after = record(tmp_path / "after", {0: [(MAIN, LOAD)]})
    moved = ("/home/me/data.py", 40, "load_image")
    before = record(tmp_path / "before", {0: [(MAIN,), (MAIN, moved)]})
    graph = run_flames(after, before).graph
    assert [(one.run, one.rank) for one in graph.series] == [
        ("", None), ("", 0), ("before", None), ("before", 0),
    ]  # fmt: skip
    path = ("forward", "main", "load_image")
    assert times(graph, 0)[path] == pytest.approx(SPAN_NS)
    assert times(graph, 2)[path] == pytest.approx(SPAN_NS / 2, rel=0.02)


def test_small_frames_count_as_their_callers_own_time(tmp_path: Path) -> None:
    stacks = [(MAIN, LOAD)] * 1999 + [(MAIN, TINY)]
    graph = run_flames(record(tmp_path / "run", {0: stacks})).graph
    assert "seldom" not in {frame.name for frame in graph.frames}
    assert times(graph)["forward", "main"] == pytest.approx(SPAN_NS)


def test_table_names_lines_with_what_they_call(tmp_path: Path) -> None:
    run = record(tmp_path / "run", {0: [(MAIN, LOAD, OPEN), (MAIN, LOAD, OPEN), (MAIN, LOAD)]})
    table = run_flames(run).lines
    assert table.head[0] == "line"
    places = {row[:3]: row for row in table.rows}
    row = places["/home/me/data.py:12", "load_image", "forward"]
    assert row[3] == "100 µs"
    assert row[5] == "PIL.Image.open"


def test_run_without_stacks_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, spans_of(STEPS, span_ns=SPAN_NS, gap_ns=GAP_NS))
    assert "no stacks were sampled" in run_flames(Analyzer(run.root)).missing


def test_python_draws_and_writes_it(tmp_path: Path) -> None:
    found = record(tmp_path / "run", {0: [(MAIN, LOAD)]}).flame_graph()
    assert "samples in" in repr(found)
    page = found.write(tmp_path / "lines.html").read_text(encoding="utf-8")
    assert "load_image" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert found._repr_html_().startswith('<iframe title="Flame graph"')


def test_every_line_has_a_time_per_step(tmp_path: Path) -> None:
    """Also one that only calls: of `main` no sample is its own."""
    _, lines, _ = sampled_lines(record(tmp_path / "run", {0: [(MAIN, LOAD)]}), None, None)
    rows = view_text(lines_view(lines, ())).splitlines()
    assert "per step" in rows[2]
    mains = [row.split() for row in rows if "train.py:88 main" in row]
    assert mains
    assert all(row[:4] == ["0.0", "%", "100", "%"] for row in mains)
    assert all(row[-4:-2] == ["0", "s"] for row in mains)


def test_lines_show_what_of_them_ran_in_each_position() -> None:
    """Of a line of several statements what ran there; a name alone was not recorded."""
    place = ("/home/me/train.py", 3, "<module>")
    texts = ("loss.backward()", "float(loss)", "opt.step()", "")
    tree, numbers = tree_of([((*place, text),) for text in texts])
    samples = code_samples(
        tree, [(at, numbers[n], 0, 0, 0, 0) for at, n in enumerate([0, 0, 1, 2, 3])]
    )
    position = np.array([POSITIONS.index(p) for p in ("backward",) * 3 + ("optimizer", "prepare")])
    lines = line_frame(samples, (position, np.ones(5)))
    assert sorted(lines["code"].to_list(), key=str) == [None, "loss.backward()", "opt.step()"]
    rows = [row.rstrip() for row in view_text(lines_view(lines, ())).splitlines()]
    assert any(row.endswith("train.py:3 <module>: opt.step()") for row in rows)
    assert any(row.endswith("train.py:3 <module>") for row in rows)


def test_shares_of_lines_are_of_their_times_and_what_a_line_itself_runs_names_it() -> None:
    """Samples that wait for a core are counted, and are no line's time."""
    place = ("/home/me/train.py", 3, "<module>")
    mask = ("/home/me/train.py", 9, "mask", "fill(m)")
    inside = ((*place, "self.mask(x)"), mask)
    tree, numbers = tree_of([((*place, "attend(x)"),), inside])
    seen = [0, 0, 1, 1, 1]
    samples = code_samples(tree, [(at, numbers[n], 0, 0, 0, 0) for at, n in enumerate(seen)])
    backward = np.full(5, POSITIONS.index("backward"))
    lines = line_frame(samples, (backward, np.array([3e6, 3e6, 2e6, 0.0, 0.0])))
    rows = [row.split() for row in view_text(lines_view(lines, ())).splitlines()]
    shown = {" ".join(row[-2:]): row[:4] for row in rows if "train.py:" in " ".join(row)}
    assert shown == {
        "<module>: attend(x)": ["75", "%", "100", "%"], "mask: fill(m)": ["25", "%", "25", "%"]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "named"),
    [((45, 20, 35), "a, c"), ((45, 30, 25), "a"), ((30, 30, 40), "c"), ((30, 30, 30), "")],
)
def test_the_end_of_a_trainers_way_names_who_holds_a_third(
    counts: tuple[int, int, int], named: str
) -> None:
    train = (f"{SITE}/transformers/trainer.py", 1, "Trainer.train")
    ends = [(f"{SITE}/{name}.py", 1, "f") for name in "abc"]
    other = (f"{SITE}/d.py", 1, "f")
    stacks: list[Stack] = [
        (MAIN, train, end)
        for end, count in zip((*ends, other), (*counts, 100 - sum(counts)), strict=True)
        for _ in range(count)
    ]
    tree, numbers = tree_of(stacks)
    way = common_callees(tree, np.array(numbers), np.ones(len(numbers)))
    assert way[1:] == ((", ".join(f"{name}.f" for name in named.split(", ")),) if named else ())
