"""What real jobs were run with is recorded once per rank, and judged; usual settings are silent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from haiprof.diagnosis.engine import diagnose
from haiprof.run_analysis.settings import RankSettings
from haiprof.run_format.setting_lines import (
    FLAGS,
    MODEL_FIELDS,
    OPTIMIZER_FIELDS,
    SEEN_FIELDS,
    SETTINGS_FIELDS,
)
from tests.conftest import Once
from tests.process.jobs import Job, rank_events, run_command, run_script, succeeded

pytestmark = pytest.mark.slow
RULES = {
    "anomaly_detection", "profiler_left_on", "costly_switches", "double_precision",
    "deterministic_mode", "mkldnn_off", "unfused_adam", "optimizer_loop", "ddp_arguments",
    "threads_over_cores",
    "settings_differ", "call_hook", "unused_gradients", "discarded_gradients",
}  # fmt: skip
COMMON = """
import gc, os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

def build(width=64, depth=6):
    return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())])

def batches(count):
    for _ in range(count):
        yield torch.randn(32, 64)
"""
PLAIN = """
model = build(512)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(150):
    optimizer.zero_grad()
    model(torch.randn(64, 512)).square().mean().backward()
    optimizer.step()
"""
COSTLY = """
torch.set_default_dtype(torch.float64)
torch.autograd.set_detect_anomaly(True)
torch.use_deterministic_algorithms(True)
model = build()
model[0].requires_grad_(False)
optimizer = torch.optim.AdamW(
    [{"params": model[2:6].parameters()}, {"params": model[6:].parameters()}], foreach=False)
end = time.monotonic() + 2.5
while time.monotonic() < end:
    for x in batches(10):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
    gc.collect()
"""
LEFT = """
class Calls:
    def __call__(self, frame, event, argument):
        self.last = event

student, teacher = build(), build()
optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)
sys.setprofile(Calls())
end = time.monotonic() + 4
while time.monotonic() < end:
    for x in batches(10):
        loss = (student(x) - teacher(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
Run = Callable[..., Job]


@pytest.fixture(scope="module")
def run(once: Once) -> Run:
    def start(script: str) -> Job:
        def make(folder: Path) -> Job:
            head = COMMON
            extra = {"NCCL_API_TOKEN": "s3cr3t0123456789abcdef", "NCCL_DEBUG": "WARN"}
            return succeeded(run_script(folder, head + script, extra_environment=extra))

        job: Job = once(("settings", script), make)
        return job

    return start


def only(job: Job) -> RankSettings:
    (settings,) = job.analyzer().settings().values()
    return settings


def slugs(job: Job) -> set[str]:
    return {finding.rule for finding in diagnose(job.analyzer()).findings}


def test_costly_settings_are_recorded_once_and_are_findings(run: Run) -> None:
    job = run(COSTLY)
    (line,) = rank_events(job, "settings")
    assert line.keys() - {"type"} == SETTINGS_FIELDS.keys()
    assert line["flags"].keys() == FLAGS.keys()
    assert line["models"][0].keys() == MODEL_FIELDS.keys()
    assert line["optimizers"][0].keys() == OPTIMIZER_FIELDS.keys()
    assert line["problems"] == []
    for seen in rank_events(job, "settings_seen"):
        assert seen.keys() - {"type"} == SEEN_FIELDS.keys()
    assert slugs(job) & RULES == {"anomaly_detection", "double_precision"}
    settings = only(job)
    (model,), (optimizer,) = settings.models, settings.optimizers
    assert (model.name, model.tensor_count, model.dtypes) == ("Sequential", 12, {"float64": 24960})
    assert model.trainable_ratio == pytest.approx(5 / 6)
    assert model.layers == {"Linear": 6, "ReLU": 6}
    assert (optimizer.name, optimizer.tensor_count, optimizer.foreach) == ("AdamW", 10, False)
    sizes = [line["number_count"] for line in rank_events(job, "input_size")]
    assert sizes == [32 * 64], "one line, as all are alike"


def test_switches_are_recorded(run: Run) -> None:
    settings = only(run(COSTLY))
    flags = settings.flags
    assert (flags["anomaly"], flags["deterministic"], flags["mkldnn"]) == (True, True, True)
    assert (flags["default_dtype"], flags["profiler"]) == ("float64", False)
    assert settings.autocast is None
    assert settings.cores
    assert settings.operator_threads == 1
    assert settings.on_ratio("anomaly") == 1.0
    assert settings.looks.collect_count
    assert settings.looks.kept_graph_count
    assert only(run(PLAIN)).looks.kept_graph_count == 0
    line = 1 + (COMMON + COSTLY).splitlines().index("    gc.collect()")
    assert settings.looks.collect_line == line
    assert (settings.looks.collect_file or "").endswith(".py")


def test_what_was_left_on_is_a_finding(run: Run) -> None:
    job = run(LEFT)
    assert slugs(job) & RULES == {"call_hook", "unused_gradients"}
    settings = only(job)
    (hook,) = settings.looks.hooks
    assert (hook.sets, hook.function) == ("sys.setprofile", "Calls.__call__")
    student, teacher = settings.unused_gradients
    assert (student.tensor_count, teacher.tensor_count, teacher.passed_count) == (0, 12, 0)
    assert not slugs(run(PLAIN)) & {"call_hook", "unused_gradients"}


def test_surroundings_are_recorded_by_the_rank_and_shown(run: Run) -> None:
    job = run(COSTLY)
    (environment,) = rank_events(job, "environment")
    assert environment["variables"]["NCCL_DEBUG"] == "WARN"
    assert only(job).variables["NCCL_API_TOKEN"] != "s3cr3t0123456789abcdef"
    assert environment["packages"]["torch"]
    manifest = job.analyzer().run.manifest
    assert json.loads(manifest.read_text())["environment"]["machine"]["cpu_count"] >= 1
    command = ["rank", str(job.log_dir), "0"]
    shown = run_command(command, folder=job.folder).stdout
    assert "24960 parameters" in shown
    assert "foreach=False" in shown
    assert "anomaly detection, deterministic algorithms" in shown
    found = run_command([*command, "--json"], folder=job.folder).stdout
    assert json.loads(found)["settings"]["flags"]["default_dtype"] == "float64"


def test_usual_settings_are_silent(run: Run) -> None:
    job = run(PLAIN)
    assert slugs(job) & RULES == set()
    assert only(job).looks.collect_count == 0, "the collector's own are none of the job's"
    assert only(job).models[0].parameter_count == 6 * (512 * 512 + 512)
