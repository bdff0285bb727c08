"""The report page: what stands in it, what cannot get into it, and how large it is."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from haiprof import Analyzer
from haiprof.cli.app import run_command
from haiprof.diagnosis.engine import diagnose
from haiprof.run_format.manifest import Manifest, write_manifest
from haiprof.show.figures.style import BLUE, VERMILLION
from haiprof.show.page.content import page_content
from haiprof.show.page.counter_data import half_floats, json_for_script, on_axis
from haiprof.show.page.render import report_html
from tests.unit.analysis.recorded import CLOCK, write_run
from tests.unit.analysis.test_deaths import GLOO, Job
from tests.unit.analysis.test_lines import LOAD, MAIN, OPEN, record
from tests.unit.analysis.test_windows import STEP_NS, part, recorded, traced_run
from tests.unit.analysis.trace.shared import event, rank_file, step
from tests.unit.analysis.trace.test_attribution import model
from tests.unit.report.many_ranks import write_flight, write_many
from tests.unit.report.page_parts import PageParts, parts_of

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u202eevil"
LIMIT_BYTES = 10 << 20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_many(tmp_path_factory.mktemp("page") / "run", ranks=8, steps=120)
    write_flight(root, ranks=8, late_rank=5, late_ns=12_000_000)
    return root


@pytest.fixture(scope="module")
def page(run: Path) -> PageParts:
    return parts_of(report_html(page_content(Analyzer(run))))


def test_verdict_comes_first_and_every_link_has_its_section(page: PageParts) -> None:
    sections = [e.attributes["id"] for e in page.all("section")]
    assert sections[0] == "verdict"
    wanted = {"overview", "ranks", "rank", "phases", "counters", "collectives", "environment"}
    assert wanted <= set(sections)
    assert {"lines", "kernels", "traces"}.isdisjoint(sections)  # nothing was recorded for them
    links = [e.attributes["href"] for e in page.all("a")]
    assert [link for link in links[1:] if link] == [f"#{name}" for name in sections]
    assert len(page.all("caption")) == len(page.all("table")) - len(
        [e for e in page.all("table") if e.attributes.get("class") == "evidence"]
    )
    assert all(e.text for e in page.all("caption"))
    reasons = page.by_id("environment").text
    assert "no traces in this run" in reasons
    assert "no stacks were sampled" in reasons
    folded = [e for e in page.all("details") if e.text.startswith("Not measured")]
    assert len(folded) == 1
    assert "open" not in folded[0].attributes


def test_numbers_of_the_verdict_are_those_of_the_command(run: Path, page: PageParts) -> None:
    verdict = diagnose(Analyzer(run))
    assert len(verdict.findings) >= 1
    text = page.by_id("verdict").text.replace("\xa0", " ")
    assert verdict.headline in text
    said = [e.attributes["value"] for e in page.all("data")]
    for finding in verdict.findings:
        assert finding.remedy in text
        assert str(finding.confidence) in said
        for evidence in finding.numbers:
            assert evidence.name in text
            assert str(evidence.value) in said
    assert str(verdict.step_ns) in said


def test_page_asks_for_nothing_and_runs_only_its_own_scripts(run: Path) -> None:
    html = report_html(page_content(Analyzer(run)))
    page = parts_of(html)
    for element in page.elements:
        assert not [name for name in element.attributes if name.startswith("on")]
        for name in ("src", "href", "data-src", "action", "poster", "srcset"):
            value = element.attributes.get(name)
            assert value is None or value.startswith("#") or value == "data:,", element
    policy = next(e.attributes["content"] for e in page.all("meta") if "http-equiv" in e.attributes)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    hashes = re.findall(r"sha256-([\w+/=]+)", policy)
    own, packed = page.all("script")[-1].text, page.by_id("plotly").text
    plotly = gzip.decompress(base64.b64decode(packed)).decode()
    assert hashes == [
        base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in (own, plotly)
    ]
    assert "url(" not in page.all("style")[0].text
    assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg", "", own)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    root = write_many(tmp_path / "run", ranks=2, steps=60)
    write_manifest_named(root)
    rank = root / "ranks" / "1" / "rank.json"
    facts = json.loads(rank.read_text(encoding="utf-8"))
    rank.write_text(json.dumps({**facts, "host": HOSTILE, "torch": HOSTILE}), encoding="utf-8")
    lines = (root / "ranks" / "1" / "events.jsonl").read_text(encoding="utf-8")
    (root / "ranks" / "1" / "events.jsonl").write_text(
        lines + json.dumps({"type": "root", "tag": 1, "name": HOSTILE, "family": 1}) + "\n",
        encoding="utf-8",
    )
    (root / "traces").mkdir()
    (root / "traces" / "<b onclick=x>&quot;.json").write_text("{}", encoding="utf-8")
    html = report_html(page_content(Analyzer(root)))
    page = parts_of(html)
    assert len(page.all("script")) == 3
    assert not page.all("img")
    assert not [e for e in page.elements if any(n.startswith("on") for n in e.attributes)]
    assert "alert(1)" in page.by_id("environment").text
    assert "\u202e" not in html
    assert json.loads(json_for_script({"name": HOSTILE}))["name"] == HOSTILE
    assert "<" not in json_for_script({"name": HOSTILE})


def write_manifest_named(root: Path) -> None:
    from haiprof.run_format.layout import RunPaths

    manifest = Manifest(
        haiprof_version=HOSTILE, name=HOSTILE, command=["python", HOSTILE], cwd=HOSTILE,
        start_wall_ns=CLOCK.wall_ns, options={HOSTILE: HOSTILE},
    )  # fmt: skip
    write_manifest(RunPaths(root), manifest)


def test_rank_that_hung_is_the_late_one_of_the_figure(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", ranks=2)
    job.began(0, *["all_reduce"] * 12)
    job.began(1, *["all_reduce"] * 11)
    job.died(0, 0, "RuntimeError", GLOO)
    job.over(1, 1.2, number=15)
    page = parts_of(report_html(page_content(Analyzer(job.run.root))))
    assert "rank 1 hung: the others waited for it" in page.by_id("collectives").text
    (bars,) = page.numbers()["figures"]["late"]["data"]
    assert bars["marker"]["color"] == [BLUE, VERMILLION]


def test_words_between_backticks_of_a_remedy_are_code(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", ranks=2)
    job.died(0, 0, "RuntimeError", GLOO)
    death = job.death()
    assert "`haiprof " in death.remedy
    page = parts_of(report_html(page_content(Analyzer(job.run.root))))
    assert "`" not in page.by_id("death").text
    assert death.remedy.split("`")[1] in [each.text for each in page.all("code")]


def test_page_says_what_to_do_after_a_death_as_the_terminal_does(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", ranks=2)
    job.died(0, 0, "NameError", "name 'x' is not defined")
    page = parts_of(report_html(page_content(Analyzer(job.run.root))))
    assert "STOP: an error of the program" in page.by_id("verdict").text
    assert "STOP: an error of the program" not in page.by_id("death").text  # not twice


def test_run_without_steps_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    page = parts_of(report_html(page_content(Analyzer(tmp_path / "run"))))
    assert "no training steps" in page.by_id("verdict").text
    sections = [e.attributes["id"] for e in page.all("section")]
    assert {"ranks", "rank", "phases", "lines"}.isdisjoint(sections)
    assert "no training step was recorded" in page.by_id("environment").text
    assert page.numbers()["map"] is None


def test_same_run_gives_the_same_page(run: Path) -> None:
    first, second = (report_html(page_content(Analyzer(run))) for _ in range(2))
    strip = re.compile(r"· (?:for|lasted) [^·]*")  # the age of a run that did not end
    assert strip.sub("", first) == strip.sub("", second)


def test_every_rank_has_its_steps_and_counters(page: PageParts) -> None:
    numbers = page.numbers()
    assert numbers["steps"]["ranks"] == numbers["map"]["ranks"] == list(range(8))
    assert min(numbers["steps"]["counts"]) == 120
    lines = numbers["counters"]["lines"]
    for rank in range(8):
        mine = {numbers["counters"]["panels"][x["panel"]]["title"] for x in lines
                if x["rank"] == rank and x["own"]}  # fmt: skip
        assert {"CPU of ranks", "GPU utilization", "GPU memory"} <= mine


def test_page_opens_on_the_training_and_marks_traced_steps(tmp_path: Path) -> None:
    run = traced_run(tmp_path, [STEP_NS] * 60)
    recorded(run, part(run), (20, 25))
    numbers = parts_of(report_html(page_content(Analyzer(run.root)))).numbers()
    begin, end = numbers["window"]
    assert 0 < begin < end <= numbers["span_s"]
    assert len(numbers["traced"]) == 1
    assert begin < numbers["traced"][0][0] < numbers["traced"][0][1] < end


def test_bars_are_of_the_job_and_of_its_ranks_slowest_first(page: PageParts) -> None:
    bars = [str(e.attributes["aria-label"]) for e in page.all("div")
            if e.attributes.get("class") == "lane"]  # fmt: skip
    names = [bar.partition(":")[0] for bar in bars][:9]
    assert names[:3] == ["all ranks", "rank 2", "rank 5"]  # one drifts, one is slow in forward
    assert sorted(names[1:]) == [f"rank {rank}" for rank in range(8)]
    assert all("forward " in bar and "backward " in bar for bar in bars[:9])


def test_accounts_add_up_and_show_their_series_and_their_code(tmp_path: Path) -> None:
    record(tmp_path / "run", {0: [(MAIN, LOAD, OPEN), (MAIN,), (MAIN, LOAD)]})
    content = page_content(Analyzer(tmp_path / "run"))
    ledger = content.ledger
    assert ledger is not None
    assert sum(row.ns for row in ledger.rows) == pytest.approx(ledger.ledger.mean_ns)
    assert sum(ledger.bars[0][1].values()) == pytest.approx(ledger.ledger.mean_ns)
    details = [row for row in ledger.rows if row.number is not None]
    assert set(ledger.data["counts"]) == {str(row.number) for row in details}
    graph = content.flames.graph
    for row in details:
        shown = graph.accounts[row.number or 0]
        assert sum(shown.self_ns.values()) == pytest.approx(row.ns, rel=1e-6)
    page = parts_of(report_html(content))
    assert sum("load_image" in e.text for e in page.all("summary")) >= 2


def test_bars_of_many_ranks_are_folded(tmp_path: Path) -> None:
    root = write_many(tmp_path / "run", ranks=40, steps=60)
    page = parts_of(report_html(page_content(Analyzer(root))))
    assert any(e.text.startswith("And 8 faster ranks") for e in page.all("details"))


@pytest.mark.parametrize(("words", "shown", "hidden"), [
    (["overview"], {"overview", "ranks", "counters"}, {"lines", "environment"}),
    (["rank", "3"], {"rank", "ranks", "phases"}, {"overview", "counters"}),
])  # fmt: skip
def test_overview_and_rank_are_parts_of_the_page(
    run: Path, tmp_path: Path, words: list[str], shown: set[str], hidden: set[str]
) -> None:
    path = tmp_path / "part.html"
    assert run_command([words[0], str(run), *words[1:], "--html", str(path)]) == 0
    part = parts_of(path.read_text(encoding="utf-8"))
    sections = {str(e.attributes["id"]) for e in part.all("section")}
    assert shown <= sections
    assert not hidden & sections
    assert {str(e.attributes["href"])[1:] for e in part.all("a")} <= sections
    chosen = [e.text for e in part.all("option") if "selected" in e.attributes]
    assert chosen == (["3"] if words[0] == "rank" else [])
    assert path.stat().st_size < 2_500_000


def test_command_writes_into_the_run_or_where_it_is_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["report", str(run), "-o", str(tmp_path / "r.html")]) == 0
    assert "wrote" in capsys.readouterr().err
    assert run_command(["report", str(run), "--no-traces"]) == 0
    assert (run / "report" / "report.html").stat().st_size < LIMIT_BYTES
    assert run_command(["report", str(run), "-o", str(tmp_path / "no" / "r.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("values", [
    [0.0, 1e-3, 250.125, 1e5, np.nan], [np.nan, np.nan], [], [-3.0, 3.0], [0.0, 0.0],
])  # fmt: skip
def test_half_floats_keep_three_digits_and_what_is_missing(values: list[float]) -> None:
    packed = half_floats(np.array(values))
    codes = np.frombuffer(base64.b64decode(packed["f2"]), dtype="<f2").astype(float)
    assert codes * packed["scale"] == pytest.approx(values, rel=5e-4, nan_ok=True)


def test_places_are_exact_to_what_a_screen_shows() -> None:
    seconds = np.linspace(-2.0, 3600.0, 1000)
    packed = on_axis(seconds, low=-2.0, high=3600.0)
    codes = np.frombuffer(base64.b64decode(packed["u2"]), dtype="<u2").astype(float)
    assert np.abs(packed["low"] + codes * packed["step"] - seconds).max() <= 3602 / 65535 / 2 + 1e-9


@pytest.mark.proof
def test_thousand_ranks_stay_below_the_limit(tmp_path: Path) -> None:
    root = write_many(tmp_path / "run", ranks=1024, steps=300)
    html = report_html(page_content(Analyzer(root)))
    assert len(html.encode()) < LIMIT_BYTES
    assert len(parts_of(html).numbers()["steps"]["ranks"]) == 1024


def test_operators_and_modules_of_the_traces_are_tables(tmp_path: Path) -> None:
    root = write_many(tmp_path / "run", ranks=2, steps=60)
    (root / "traces").mkdir()
    for rank in range(2):
        rank_file(root / "traces", rank, model())
    content = page_content(Analyzer(root))
    operators, modules = content.traces.operators
    most = ["aten::to", "4", "20.0 µs", "20.0 µs", "2", "14.0 µs", "14.0 µs"]  # 7 us on each rank
    assert [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in operators.rows[0]] == most
    assert ("Linear_0", "4", "12.0 µs") in modules.rows
    assert "Linear_0" in parts_of(report_html(content)).by_id("operators").text


def test_traces_of_a_job_without_a_gpu_have_no_kernels_and_no_empty_parts(tmp_path: Path) -> None:
    root = write_many(tmp_path / "run", ranks=1, steps=60)
    (root / "traces").mkdir()
    rank_file(
        root / "traces", 0, [step(1, 0, 1000), event("aten::mm", "cpu_op", 10, 400)], world_size=1
    )
    page = parts_of(report_html(page_content(Analyzer(root))))
    assert "Traced steps" in page.by_id("kernels").text
    assert not any(each.attributes.get("id") == "operators" for each in page.elements), "said once"
    assert page.by_id("functions").text.count("GPU compute") == 1, "where the word is explained"
    assert "functions, GPU compute" in page.by_id("environment").text
