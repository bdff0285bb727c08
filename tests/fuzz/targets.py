"""Every parser of bytes that others may have written, with inputs to begin from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from haiprof.base.errors import HaiprofError
from haiprof.linux.readings import Unavailable
from haiprof.trace_format.kineto import load as native
from tests.fuzz import node_readers as nodes
from tests.fuzz import run_readers as runs
from tests.fuzz import trace_readers as traces


@dataclass(frozen=True, slots=True)
class Target:
    """One parser as the fuzzer sees it."""

    name: str
    reads: str
    """What, for the table."""
    run: Callable[[bytes], object]
    """What it returns tells outcomes apart: an input with a new one is kept."""
    seeds: Callable[[], Sequence[bytes]]
    tokens: Sequence[bytes] = ()
    refused: tuple[type[BaseException], ...] = (HaiprofError,)
    """What may come out; anything else is a finding."""


TARGETS = (
    Target("scanner", "a piece of a trace (kineto/native.c)", traces.read_piece, traces.piece_seeds,
           traces.TRACE_TOKENS),
    Target("trace", "a trace, compiled and in Python", traces.read_trace_both_ways,
           traces.trace_seeds, traces.TRACE_TOKENS),
    Target("gzip", "a trace's gzip data", traces.read_gzip, traces.gzip_seeds),
    Target("merge", "a trace that is merged", traces.merge_trace, traces.trace_seeds,
           traces.TRACE_TOKENS),
    Target("marks", "a trace that is written anew with marks", traces.mark_events,
           traces.trace_seeds, traces.TRACE_TOKENS),
    Target("plugin", "a trace for torch-tb-profiler", traces.view_in_plugin, traces.trace_seeds,
           traces.TRACE_TOKENS),
    Target("execution", "an execution trace, and Chakra's file of it", traces.read_execution_trace,
           traces.execution_seeds),
    Target("flight", "a dump of the Flight Recorder", traces.read_flight_dump, traces.flight_seeds),
    Target("torch-flight", "a dump of PyTorch's own Flight Recorder (pickle, JSON)",
           traces.read_torch_flight, traces.torch_flight_seeds),
    Target("nccl-files", "files of NCCL's Inspector (JSON, Prometheus) and profiler",
           traces.read_nccl_folder, traces.nccl_seeds,
           (b'"dump_stats": {', b'"cat": "NET"', b'"steps": [{', b'nranks="4"')),
    Target("nsight", "an export of Nsight Systems as a trace (SQLite)", traces.read_nsight_database,
           traces.nsight_seeds),
    Target("nsight-parquet", "an export of Nsight Systems as a trace (Parquet)",
           traces.read_nsight_folder, traces.nsight_folder_seeds),
    Target("memory", "a memory timeline of torch.profiler", traces.read_memory_file,
           traces.memory_seeds),
    Target("snapshot", "a snapshot of the CUDA allocator (a pickle)", traces.read_snapshot,
           traces.snapshot_seeds),
    Target("answers", "a summary: kept answers (Arrow IPC)", traces.read_answers,
           traces.answer_seeds),
    Target("functions", "a rank's functions: what its trace was reduced to", traces.read_functions,
           traces.function_seeds),
    Target("operations", "a table of operations (Parquet), replayed", traces.replay_operations,
           traces.operation_seeds),
    Target("sql", "a question of haiprof trace query", traces.ask_sql, traces.sql_seeds,
           traces.SQL_TOKENS),
    Target("run", "a run directory with one changed file, all that can be asked", runs.read_run,
           runs.run_seeds, runs.RUN_TOKENS),
    Target("kept", "answers kept in a run: list, verdict, put", runs.read_kept, runs.kept_seeds),
    Target("records", "a .rec file: header line and records", runs.read_record_file,
           runs.record_seeds, runs.RUN_TOKENS),
    Target("manifest", "run.json", runs.read_manifest_file, runs.manifest_seeds),
    Target("events", "events.jsonl, also of a running job", runs.follow_lines, runs.line_seeds,
           runs.RUN_TOKENS),
    Target("spans", "phases.rec of a running job", runs.follow_spans, runs.span_seeds),
    Target("sidecar", "a raw trace's sidecar", runs.read_sidecar, runs.sidecar_seeds),
    Target("scheduler", "what Kubernetes says of a pod; a scheduler's kept record",
           runs.read_scheduler_answer, runs.scheduler_seeds),
    Target("requests", "a control request, in a file, a packet and the rank", runs.answer_requests,
           runs.request_seeds),
    Target("replies", "what ranks send to their launcher", runs.take_replies, runs.reply_seeds),
    Target("reach", "what both ends of --reach take: strangers, agents, token files",
           runs.take_reach, runs.reach_seeds,
           (b"<next>", b'{"member": {', b'"reply": {', b"haiprof-reach-1:")),
    Target("kineto", "datagrams of Kineto's daemon protocol", runs.answer_kineto, runs.kineto_seeds,
           (b"<next>", b"haiprof" + bytes(25), b"req" + bytes(29), b"ctxt" + bytes(28))),
    Target("dynolog", "an answer of dynolog's daemon", runs.ask_dynolog, runs.dynolog_seeds),
    Target("nsys", "an export of Nsight Systems (SQLite)", runs.read_nsys, runs.nsys_seeds),
    Target("options", "[tool.haiprof] of pyproject.toml", runs.read_options, runs.option_seeds),
    Target("git", "git's HEAD, packed-refs and worktree files", runs.read_git, runs.git_seeds,
           (b"<next>", b"ref: refs/heads/", b"gitdir: ", b"../..", b"/dev/zero")),
    Target("py-spy", "py-spy's JSON", runs.read_py_spy, runs.py_spy_seeds),
    Target("ras", "an answer of NCCL's RAS, text and JSON", runs.read_ras, runs.ras_seeds,
           (b"\n  Rank 1 -- [",)),
    Target("node", "files of /proc, /sys and cgroups, mountstats, Lustre's", nodes.sample_node,
           nodes.node_seeds, nodes.NODE_TOKENS),
    Target("exporter", "a DCGM exporter's page (Prometheus text) and its HTTP head",
           nodes.read_exporter, nodes.exporter_seeds, nodes.EXPORTER_TOKENS,
           refused=(HaiprofError, Unavailable)),
    Target("printed", "what the job prints into files", nodes.read_printed, nodes.printed_seeds,
           nodes.PRINTED_TOKENS),
    Target("driver", "a network driver's answers to ethtool's ioctl", nodes.ask_driver,
           nodes.driver_seeds, (b"<next>",)),
)  # fmt: skip
BY_NAME = {target.name: target for target in TARGETS}


def unavailable(target: Target) -> str:
    """Why a target cannot run here; empty where it can."""
    if target.name == "scanner" and not native.is_compiled():
        return "the scanner was not built"
    return ""
