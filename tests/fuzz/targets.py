"""Every parser of bytes that others may have written, with inputs to begin from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from haiprof.base.errors import HaiprofError
from haiprof.linux.readings import Unavailable
from haiprof.trace_format.kineto import load as native
from tests.fuzz import node_readers, run_readers, trace_readers


@dataclass(frozen=True, slots=True, kw_only=True)
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
    Target(name="scanner", reads="a piece of a trace (kineto/native.c)",
           run=trace_readers.read_piece, seeds=trace_readers.piece_seeds,
           tokens=trace_readers.TRACE_TOKENS),
    Target(name="trace", reads="a trace, compiled and in Python",
           run=trace_readers.read_trace_both_ways, seeds=trace_readers.trace_seeds,
           tokens=trace_readers.TRACE_TOKENS),
    Target(name="gzip", reads="a trace's gzip data",
           run=trace_readers.read_gzip, seeds=trace_readers.gzip_seeds),
    Target(name="merge", reads="a trace that is merged",
           run=trace_readers.merge_trace, seeds=trace_readers.trace_seeds,
           tokens=trace_readers.TRACE_TOKENS),
    Target(name="marks", reads="a trace that is written anew with marks",
           run=trace_readers.mark_events, seeds=trace_readers.trace_seeds,
           tokens=trace_readers.TRACE_TOKENS),
    Target(name="plugin", reads="a trace for torch-tb-profiler",
           run=trace_readers.view_in_plugin, seeds=trace_readers.trace_seeds,
           tokens=trace_readers.TRACE_TOKENS),
    Target(name="execution", reads="an execution trace, and Chakra's file of it",
           run=trace_readers.read_execution_trace, seeds=trace_readers.execution_seeds),
    Target(name="flight", reads="a dump of the Flight Recorder",
           run=trace_readers.read_flight_dump, seeds=trace_readers.flight_seeds),
    Target(name="torch-flight", reads="a dump of PyTorch's own Flight Recorder (pickle, JSON)",
           run=trace_readers.read_torch_flight, seeds=trace_readers.torch_flight_seeds),
    Target(name="nccl-files", reads="files of NCCL's Inspector (JSON, Prometheus) and profiler",
           run=trace_readers.read_nccl_folder, seeds=trace_readers.nccl_seeds,
           tokens=(b'"dump_stats": {', b'"cat": "NET"', b'"steps": [{', b'nranks="4"')),
    Target(name="nsight", reads="an export of Nsight Systems as a trace (SQLite)",
           run=trace_readers.read_nsight_database, seeds=trace_readers.nsight_seeds),
    Target(name="nsight-parquet", reads="an export of Nsight Systems as a trace (Parquet)",
           run=trace_readers.read_nsight_folder, seeds=trace_readers.nsight_folder_seeds),
    Target(name="memory", reads="a memory timeline of torch.profiler",
           run=trace_readers.read_memory_file, seeds=trace_readers.memory_seeds),
    Target(name="snapshot", reads="a snapshot of the CUDA allocator (a pickle)",
           run=trace_readers.read_snapshot, seeds=trace_readers.snapshot_seeds),
    Target(name="answers", reads="a summary: kept answers (Arrow IPC)",
           run=trace_readers.read_answers, seeds=trace_readers.answer_seeds),
    Target(name="functions", reads="a rank's functions: what its trace was reduced to",
           run=trace_readers.read_functions, seeds=trace_readers.function_seeds),
    Target(name="operations", reads="a table of operations (Parquet), replayed",
           run=trace_readers.replay_operations, seeds=trace_readers.operation_seeds),
    Target(name="sql", reads="a question of haiprof trace query",
           run=trace_readers.ask_sql, seeds=trace_readers.sql_seeds,
           tokens=trace_readers.SQL_TOKENS),
    Target(name="run", reads="a run directory with one changed file, all that can be asked",
           run=run_readers.read_run, seeds=run_readers.run_seeds, tokens=run_readers.RUN_TOKENS),
    Target(name="kept", reads="answers kept in a run: list, verdict, put",
           run=run_readers.read_kept, seeds=run_readers.kept_seeds),
    Target(name="records", reads="a .rec file: header line and records",
           run=run_readers.read_record_file, seeds=run_readers.record_seeds,
           tokens=run_readers.RUN_TOKENS),
    Target(name="manifest", reads="run.json",
           run=run_readers.read_manifest_file, seeds=run_readers.manifest_seeds),
    Target(name="events", reads="events.jsonl, also of a running job",
           run=run_readers.follow_lines, seeds=run_readers.line_seeds,
           tokens=run_readers.RUN_TOKENS),
    Target(name="spans", reads="phases.rec of a running job",
           run=run_readers.follow_spans, seeds=run_readers.span_seeds),
    Target(name="sidecar", reads="a raw trace's sidecar",
           run=run_readers.read_sidecar, seeds=run_readers.sidecar_seeds),
    Target(name="scheduler", reads="what Kubernetes says of a pod; a scheduler's kept record",
           run=run_readers.read_scheduler_answer, seeds=run_readers.scheduler_seeds),
    Target(name="requests", reads="a control request, in a file, a packet and the rank",
           run=run_readers.answer_requests, seeds=run_readers.request_seeds),
    Target(name="replies", reads="what ranks send to their launcher",
           run=run_readers.take_replies, seeds=run_readers.reply_seeds),
    Target(name="reach", reads="what both ends of --reach take: strangers, agents, token files",
           run=run_readers.take_reach, seeds=run_readers.reach_seeds,
           tokens=(b"<next>", b'{"member": {', b'"reply": {', b"haiprof-reach-1:")),
    Target(name="kineto", reads="datagrams of Kineto's daemon protocol",
           run=run_readers.answer_kineto, seeds=run_readers.kineto_seeds,
           tokens=(b"<next>", b"haiprof" + bytes(25), b"req" + bytes(29), b"ctxt" + bytes(28))),
    Target(name="dynolog", reads="an answer of dynolog's daemon",
           run=run_readers.ask_dynolog, seeds=run_readers.dynolog_seeds),
    Target(name="nsys", reads="an export of Nsight Systems (SQLite)",
           run=run_readers.read_nsys, seeds=run_readers.nsys_seeds),
    Target(name="options", reads="[tool.haiprof] of pyproject.toml",
           run=run_readers.read_options, seeds=run_readers.option_seeds),
    Target(name="git", reads="git's HEAD, packed-refs and worktree files",
           run=run_readers.read_git, seeds=run_readers.git_seeds,
           tokens=(b"<next>", b"ref: refs/heads/", b"gitdir: ", b"../..", b"/dev/zero")),
    Target(name="py-spy", reads="py-spy's JSON",
           run=run_readers.read_py_spy, seeds=run_readers.py_spy_seeds),
    Target(name="ras", reads="an answer of NCCL's RAS, text and JSON",
           run=run_readers.read_ras, seeds=run_readers.ras_seeds, tokens=(b"\n  Rank 1 -- [",)),
    Target(name="node", reads="files of /proc, /sys and cgroups, mountstats, Lustre's",
           run=node_readers.sample_node, seeds=node_readers.node_seeds,
           tokens=node_readers.NODE_TOKENS),
    Target(name="exporter", reads="a DCGM exporter's page (Prometheus text) and its HTTP head",
           run=node_readers.read_exporter, seeds=node_readers.exporter_seeds,
           tokens=node_readers.EXPORTER_TOKENS, refused=(HaiprofError, Unavailable)),
    Target(name="printed", reads="what the job prints into files",
           run=node_readers.read_printed, seeds=node_readers.printed_seeds,
           tokens=node_readers.PRINTED_TOKENS),
    Target(name="driver", reads="a network driver's answers to ethtool's ioctl",
           run=node_readers.ask_driver, seeds=node_readers.driver_seeds, tokens=(b"<next>",)),
)  # fmt: skip
BY_NAME = {target.name: target for target in TARGETS}


def unavailable(target: Target) -> str:
    """Why a target cannot run here; empty where it can."""
    if target.name == "scanner" and not native.is_compiled():
        return "the scanner was not built"
    return ""
