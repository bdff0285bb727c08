"""Counters of a real run against what its script did: so many bytes, so many CPU seconds."""

from __future__ import annotations

import json

import polars as pl
import pytest

from haiprof.base.units import NS_PER_S
from tests.process.jobs import run_script, succeeded

pytestmark = [pytest.mark.slow, pytest.mark.proof]  # samplers/test_process_live.py is cheaper

TOLERANCE = 0.02
READ_BYTES, WRITTEN_BYTES, CPU_S = 600 << 20, 200 << 20, 4.0

SCRIPT = f"""
import glob, json, os, time
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()

def burn(cpu_s):
    until = time.process_time() + cpu_s
    while time.process_time() < until:
        pass

def write(path, count):
    block = bytes(1 << 20)
    with open(path, "wb", buffering=0) as file:
        for _ in range(count >> 20):
            file.write(block)

def read(path, count):
    done = 0
    while done < count:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(1 << 20):
                done += len(piece)

def beside(work):
    # Does it here and in a child, as a DataLoader worker: it is waited for between two samples.
    start, spent = time.time_ns(), sum(os.times()[:4])
    work()
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    os.waitpid(child, 0)
    end, spent = time.time_ns(), sum(os.times()[:4]) - spent
    wait_for_samples()  # one is taken before the next work begins
    return [start, end, spent]

def wait_for_samples():
    # Two whole ones more: of them the second began after this call.
    def size():
        return sum(os.path.getsize(path) for path in glob.glob("logs/*/nodes/*/process.rec"))
    until = time.monotonic() + 60
    for _ in range(2):
        last = size()
        while size() == last and time.monotonic() < until:
            time.sleep(0.2)  # seldom: what it costs is in the intervals around the work, too

step()
wait_for_samples()
def traffic():
    write("data", {WRITTEN_BYTES} // 2)
    read("data", {READ_BYTES} // 2)
spans = [beside(traffic), beside(lambda: burn({CPU_S} / 2))]
step()
os.unlink("data")
print(json.dumps(spans))
"""


@pytest.fixture(scope="module")
def growth(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Of reading and writing, and of burning CPU: growth by counter of the rank's process.

    Beside the counters, "script": CPU seconds by the script's own clock, fork and exit included.
    """
    job = succeeded(run_script(tmp_path_factory.mktemp("truth"), SCRIPT))
    rates = job.analyzer().counters().filter(pl.col("source") == "process", pl.col("rank") == 0)
    assert rates["flag"].null_count() == rates.height
    spans = json.loads(job.stdout.splitlines()[-1])
    return [{**_growth(rates, start, end), "script": spent} for start, end, spent in spans]


def _growth(rates: pl.DataFrame, start_ns: int, end_ns: int) -> dict[str, float]:
    """Rates times their intervals, of all intervals that touch the span."""
    found = {}
    for (metric,), frame in rates.sort("time_ns").group_by("metric"):
        intervals = frame.select("value", end="time_ns", start=pl.col("time_ns").shift()).filter(
            pl.col("end") > start_ns, pl.col("start") < end_ns
        )
        seconds = (intervals["end"] - intervals["start"]) / NS_PER_S
        found[str(metric)] = float((intervals["value"] * seconds).sum())
    return found


def test_read_and_written_bytes_are_those_of_the_script(growth: list[dict[str, float]]) -> None:
    traffic, _ = growth
    assert traffic["read_bytes_per_s"] == pytest.approx(READ_BYTES, rel=TOLERANCE)
    assert traffic["write_bytes_per_s"] == pytest.approx(WRITTEN_BYTES, rel=TOLERANCE)


def test_cpu_seconds_are_those_of_the_script(growth: list[dict[str, float]]) -> None:
    _, burnt = growth
    assert burnt["script"] >= CPU_S
    assert burnt["cpu_cores"] == pytest.approx(burnt["script"], rel=TOLERANCE)
