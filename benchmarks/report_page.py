"""How large the report page is, what making it takes, and how long a browser takes to show it.

    python benchmarks/report_page.py                         8 and 1,024 ranks, 300 steps each
    python benchmarks/report_page.py --ranks 1024 --steps 2000

Runs are synthesised (tests/unit/report/many_ranks.py). A page is loaded from disk in headless
Chromium, each time in a new tab: until its figures can be drawn (`ready`), until the first one is
drawn, and until all are, scrolled through. `task` is how long the page's main thread was at work,
by the clock: other work on the machine lengthens it. Beside it stands a page with nothing but
plotly's script inside, the least that a page with plotly figures can take.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from haiprof import Analyzer
from haiprof.show.page.content import page_content
from haiprof.show.page.render import plotly_js, write_report
from tests.browser import Page, open_browser
from tests.unit.report.many_ranks import write_flight, write_many

REPEATS = 3
READY = "document.documentElement.dataset.ready === '1'"
FIRST = "document.querySelector('[data-figure=over-time]').dataset.drawn === '1'"
FIGURES = ("over-time", "map", "rank", "late")


def make(root: Path, ranks: int, steps: int) -> tuple[Path, dict[str, float]]:
    """A run and its page; seconds of the clock and of the processor."""
    run = write_many(root / f"run{ranks}", ranks=ranks, steps=steps)
    write_flight(run, ranks=ranks, late_rank=5, late_ns=12_000_000)
    wall, cpu = time.perf_counter(), time.process_time()
    page = write_report(page_content(Analyzer(run)), root / f"{ranks}.html")
    return page, {
        "made_s": time.perf_counter() - wall,
        "made_cpu_s": time.process_time() - cpu,
        "size_mb": page.stat().st_size / 1e6,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def empty_page(root: Path) -> Path:
    """Plotly's script and nothing else."""
    path = root / "plotly.html"
    done = "document.documentElement.dataset.ready = '1'"
    path.write_text(f"<!DOCTYPE html><script>{plotly_js()}</script><script>{done}</script>")
    return path


def load(browser: Callable[[str], Page], path: Path, *, figures: bool) -> dict[str, float]:
    """Milliseconds from the start of the navigation."""
    page = browser("about:blank")
    page.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1,
              mobile=False)  # fmt: skip
    page.call("Performance.enable")
    begin = time.perf_counter()
    page.call("Page.navigate", url=path.as_uri())
    page.wait(READY)
    found = {"ready_ms": (time.perf_counter() - begin) * 1e3}
    if figures:
        page.run("document.querySelector('[data-figure=over-time]').scrollIntoView()")
        page.wait(FIRST)
        found["first_ms"] = (time.perf_counter() - begin) * 1e3
        for name in FIGURES:
            selector = json.dumps(f"[data-figure={name}]")
            page.run(f"document.querySelector({selector}).scrollIntoView()")
            page.wait(f"document.querySelector({selector}).dataset.drawn === '1'")
        found["all_ms"] = (time.perf_counter() - begin) * 1e3
    metrics = {m["name"]: m["value"] for m in page.call("Performance.getMetrics")["metrics"]}
    found["task_ms"] = metrics["TaskDuration"] * 1e3
    found["heap_mb"] = metrics["JSHeapUsedSize"] / 1e6
    assert not page.errors, page.errors
    assert len(page.requests) == 1, page.requests
    return found


def median_load(path: Path, *, figures: bool = True) -> dict[str, float]:
    """Medians over several loads."""
    with open_browser() as browser:
        runs = [load(browser, path, figures=figures) for _ in range(REPEATS)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1024])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs")
    with tempfile.TemporaryDirectory() as folder:
        plain = median_load(empty_page(Path(folder)), figures=False)
        print("plotly alone:", row(plain), flush=True)
        for ranks in arguments.ranks:
            path, made = make(Path(folder), ranks, arguments.steps)
            loaded = median_load(path)
            ratio = loaded["ready_ms"] / plain["ready_ms"]
            print(f"{ranks} ranks x {arguments.steps} steps:", row(made), flush=True)
            print(f"  in the browser: {row(loaded)} ready/plotly {ratio:.2f}", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")


def row(values: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.3g}" for name, value in values.items())


if __name__ == "__main__":
    main()
