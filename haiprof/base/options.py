"""Options: one table for the command line, the environment, pyproject.toml and the manifest."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from haiprof.base.errors import UsageError
from haiprof.base.log_addresses import is_address, recording_folder
from haiprof.base.trace_options import (
    DEFAULT_STEPS,
    HangLimit,
    ReactOptions,
    TraceOptions,
    parse_hang_limit,
    parse_slow_limit,
    parse_steps,
)

USUAL_RECORDERS = (
    "phases", "stacks", "host", "process", "gpu", "infiniband", "numa", "filesystem",
)  # fmt: skip
# Hardware events of every thread of a rank make its context switches slower, by an amount that
# has not been measured on real hardware: they are recorded only on request.
RECORDERS = (*USUAL_RECORDERS, "perf")
RECORDER_GROUPS = {"all": USUAL_RECORDERS, "basic": ("phases", "host", "process")}
SHARES = {"nobody": 0o700, "group": 0o750, "all": 0o755}
"""Who may read a run beside its owner, as the mode of its directory."""
SITE_OPTIONS = Path("/etc/haiprof/config.toml")
"""Options of all users of a machine, as its administrator sets them."""
MEMORY_HISTORY = ("off", "auto", "on")
DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.1
MIN_STACKS_INTERVAL_S = 0.01
"""Between two samples of the training thread's stack; 0.05 s unless given."""
BURST_HZ_RANGE = (10, 200_000)  # Nsight Systems user guide, GPU metrics: sampling frequency
BURST_SAMPLE_LIMIT = 1_000_000  # per GPU: 2.5 GB of export at the most

ALL_USERS = "all"

ENV_ENABLED = "HAIPROF_ENABLED"
ENV_ACTIVE = "HAIPROF_ACTIVE_RUN"  # set in the job: its run directory
ENV_DEBUG = "HAIPROF_DEBUG"
ENV_LOG_DIR = "HAIPROF_LOG_DIR"  # an option's, as all HAIPROF_* of the table below
ENV_UNPACK_LIMIT = "HAIPROF_UNPACK_LIMIT"  # MiB that a packed file may become, where that is much
ENV_NSYS = "HAIPROF_NSYS"  # Nsight Systems' command, where it is not on PATH
ENV_CACHE_LIMIT = "HAIPROF_CACHE_LIMIT"  # MB that may be kept of traces in the user's cache folder
ENV_PEAK = (
    "HAIPROF_PEAK"  # what the device can do at most, as `haiprof trace efficiency --peak` takes it
)
ENV_DCGM_URL = "HAIPROF_DCGM_URL"  # where DCGM's exporter answers, and that it is wanted
ENV_RENDEZVOUS = "HAIPROF_RENDEZVOUS"  # set by `haiprof submit`: where a job's nodes meet
ENV_TRY_LOADER = "HAIPROF_TRY_LOADER"  # set by `haiprof try-loader`: FOLDER:MODE of one trial
KEPT_BATCHES = "kept"
"""The mode of such a trial in which a loader costs nothing; a number is how many workers."""
ENV_KINETO_DAEMON = "KINETO_USE_DAEMON"  # Kineto's own: a process asks a daemon for traces
ENV_KINETO_FOLDER = "KINETO_IPC_SOCKET_DIR"  # Kineto's own: where the daemon's socket is
ENV_TRAINJOB = ("KUBEFLOW_TRAINER_SERVER_", "KUBEFLOW_TRAINER_STATUS_")
"""Prefixes of Kubeflow Trainer's variables: the released ones, and those of its proposal."""
ENV_NO_KUBEFLOW = "DISABLE_KUBEFLOW_INTEGRATION"  # transformers': its Trainer posts no status
ENV_FLIGHT_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""PyTorch's own: entries of its Flight Recorder, from torch 2.9 on and before."""
ENV_FLIGHT_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""PyTorch's own: where its watchdog writes them, up to the rank's number."""
FLIGHT_ENTRIES = "2000"
_LOCAL_DIR = "local_dir"  # the one that is no field of `Options`: with an address it is log_dir
_INTERVAL_ENV = re.compile(r"HAIPROF_([A-Z0-9_]+)_INTERVAL\Z")
DEFAULT_CACHE_LIMIT_MB = 4000.0
MIN_DETAIL_H = 0.25
"""Samples of a quarter of an hour are always kept whole."""
_BYTES_PER_MB = 1_000_000
_PLATFORM_LOG_DIR = "MARSV2_LOG_DIR"
_PORT_LIMIT = 65_535
_NAME_OK = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class Options(TraceOptions, ReactOptions):
    """What a run records, and where it is written."""

    time_s: float = 0.0
    """Seconds to record, from the first training step after the warm-up; 0 is the whole run."""
    warmup_s: float = 0.0
    """Seconds from the first training step that are not recorded."""
    detail_h: float = 2.0
    """Hours of a long run that are kept in full; what is older is folded. 0 keeps all."""
    recorder: tuple[str, ...] = USUAL_RECORDERS
    """Which recorders run."""
    interval_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds between two samples, by recorder; others take 1 s."""
    log_dir: Path = Path("haiprof-logs")
    """Where run directories are created."""
    address: str = ""
    """Where runs are put once they are recorded, such as `s3://bucket/runs`; empty is nowhere."""
    name: str = ""
    """Name of the job; empty takes the script's."""
    share: str = "nobody"
    """Who may read the run beside its owner: `nobody`, `group` or `all`; none of them writes."""
    admin_group: str = ""
    """Administrators, who may read the run too, and whom commands show the jobs of others."""
    run_id: str = ""
    """Shared by launchers of one job on several nodes, so that they write one run directory."""
    burst: bool = False
    """A short window of GPU metrics by Nsight Systems, beside the job."""
    burst_hz: int = 10_000
    """Samples per second in a burst."""
    burst_time_s: float = 5.0
    """Length of a burst in seconds."""
    memory_history: str = "auto"
    """History of the CUDA allocator, for its snapshot where memory runs out: `off`, `on` from the
    start, `auto` once nine tenths of the GPU's memory were allocated."""
    tensorboard: bool = False
    """Live scalars for TensorBoard beside the run."""
    reach: str = ""
    """HOST:PORT of the node that hands requests to nodes without a shared file system."""
    reach_token: Path | None = None
    """File with the token for that; None is reach.token in the log directory."""
    prometheus_port: int = 0
    """Port on the loopback interface at which Prometheus can scrape this node; 0 opens none."""
    prometheus_allow: tuple[str, ...] = ()
    """Users who may read it beside the job's own and root: names, uids, or `all`."""
    kineto: bool = False
    """Let the job be traced through Kineto, beside Python (KINETO_USE_DAEMON)."""
    notify: str = ""
    """URL or shell command that is told of hangs, slow-downs, deaths and the end; empty is none."""
    quiet: bool = False
    """Print neither the first line nor the verdict."""

    def __post_init__(self) -> None:
        for name in ("time_s", "warmup_s"):
            if not math.isfinite(getattr(self, name)) or getattr(self, name) < 0:
                raise UsageError(f"{name.removesuffix('_s')} must be 0 or more seconds")
        if self.detail_h and not MIN_DETAIL_H <= self.detail_h < math.inf:
            raise UsageError(f"detail must be {MIN_DETAIL_H:g} or more hours, or 0 to keep all")
        for recorder, seconds in self.interval_s.items():
            if recorder not in RECORDERS:
                raise UsageError(
                    f"interval.{recorder}: no such recorder", hint=f"one of {', '.join(RECORDERS)}"
                )
            least = MIN_STACKS_INTERVAL_S if recorder == "stacks" else MIN_INTERVAL_S
            if not math.isfinite(seconds) or seconds < least:
                raise UsageError(f"interval.{recorder} must be {least} s or more")
        if self.share not in SHARES:
            raise UsageError(f"share {self.share!r}: expected {', '.join(SHARES)}")
        if self.memory_history not in MEMORY_HISTORY:
            raise UsageError(
                f"memory-history {self.memory_history!r}: expected {', '.join(MEMORY_HISTORY)}"
            )
        low, high = BURST_HZ_RANGE
        if not low <= self.burst_hz <= high:
            raise UsageError(f"burst-hz must be {low} to {high}")
        if not math.isfinite(self.burst_time_s) or self.burst_time_s <= 0:
            raise UsageError("burst-time must be more than 0 seconds")
        if self.burst_hz * self.burst_time_s > BURST_SAMPLE_LIMIT:
            raise UsageError(
                f"burst-hz times burst-time is {self.burst_hz * self.burst_time_s:g} samples",
                hint=f"at most {BURST_SAMPLE_LIMIT}: a shorter burst, or fewer samples per second",
            )
        if not 0 <= self.prometheus_port <= _PORT_LIMIT:
            raise UsageError(f"prometheus-port must be 1 to {_PORT_LIMIT}, or 0 for none")
        if self.kineto and self.traces:
            raise UsageError(
                "--kineto and --trace exclude each other: two profilers cannot share a process",
                hint="with --kineto, traces are asked for while the job runs: haiprof trace now",
            )
        self.check_react()
        self.check_trace(
            time_s=self.time_s,
            warmup_s=self.warmup_s,
            phases="phases" in self.recorder,
        )

    @property
    def traces(self) -> bool:
        """Whether a window is traced; how to trace may be said of reactions alone."""
        reacts = self.reacts_with_trace and self.react_times > 0
        return super().traces or (self.says_how and not reacts)

    def interval(self, recorder: str) -> float:
        """Seconds between two samples of one recorder."""
        return self.interval_s.get(recorder, DEFAULT_INTERVAL_S)

    def boot_json(self) -> dict[str, object]:
        """What the hook reads: the options, with the trace window worked out."""
        trace = self.window(time_s=self.time_s, warmup_s=self.warmup_s)
        return {**self.as_json(), "trace": trace}

    def as_json(self) -> dict[str, object]:
        """The options as plain JSON values, by their names on the command line."""
        found: dict[str, object] = {}
        for spec in OPTIONS:
            if spec.field != _LOCAL_DIR:
                found[spec.name.replace("-", "_")] = _plain(getattr(self, spec.field))
            if spec.field == "recorder":
                found["interval"] = dict(self.interval_s)
        found["trace"] = self.traces
        found["steps"] = None if self.steps is None else f"{self.steps[0]}:{self.steps[1]}"
        found["notify"] = self.notify and ("URL" if is_notify_url(self.notify) else "command")
        return found


def _plain(value: object) -> object:
    if isinstance(value, (Path, HangLimit)):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _switch(text: str) -> bool:
    """`1`, `true`, `yes`, `on` and their opposites."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected 1 or 0")


def _address(text: str) -> str:
    """`HOST:PORT`; `PORT` alone is on the loopback interface."""
    port = text.rpartition(":")[2]
    if not port.isdigit() or not 0 < int(port) <= _PORT_LIMIT:
        raise ValueError("expected HOST:PORT")
    return text


def is_notify_url(target: str) -> bool:
    """Whether `--notify` names a URL; otherwise it is a command."""
    return target.startswith(("http://", "https://"))


def _notify(text: str) -> str:
    """A URL, which may be a secret as a whole, or a command."""
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text)
    if scheme and not is_notify_url(text):
        raise ValueError("expected http://, https:// or a command")
    return text


def _folder(text: str) -> Path:
    if is_address(text):
        raise ValueError("an address, where a folder or file of this machine is expected")
    return Path(text).expanduser()


def _users(text: str) -> tuple[str, ...]:
    words = tuple(filter(None, (part.strip() for part in text.split(","))))
    for word in words:
        if word != ALL_USERS:
            user_id(word)
    return words


def user_id(word: str) -> int:
    """The uid of a user of this machine, by name or number."""
    import pwd  # in no job's process: only a launcher asks

    try:
        return int(word) if word.isascii() and word.isdigit() else pwd.getpwnam(word).pw_uid
    except KeyError:
        raise ValueError(f"no user {word!r} on this machine") from None


def _recorders(text: str) -> tuple[str, ...]:
    chosen: set[str] = set()
    for word in filter(None, (part.strip() for part in text.split(","))):
        group = RECORDER_GROUPS.get(word, (word,))
        if not set(group) <= set(RECORDERS):
            known = ", ".join((*RECORDER_GROUPS, *RECORDERS))
            raise ValueError(f"expected recorders of {known}")
        chosen.update(group)
    return tuple(r for r in RECORDERS if r in chosen)


@dataclass(frozen=True)
class OptionSpec:
    """One option as users write it."""

    name: str
    """`--NAME`, `profile.NAME`, and the key in `[tool.haiprof]`."""
    field: str
    """The field of `Options`."""
    parse: Callable[[str], object]
    """Parses the text; raises ValueError."""
    env: str
    """Its environment variable."""
    metavar: str
    """What the help shows for its value; empty for a switch."""
    help: str
    """One line."""


OPTIONS = (
    OptionSpec("time", "time_s", float, "HAIPROF_TIME", "SECONDS",
               "stop recording after this time; the job runs on (default: the whole run)"),
    OptionSpec("warmup", "warmup_s", float, "HAIPROF_WARMUP", "SECONDS",
               "do not record the first SECONDS after the first training step"),
    OptionSpec("detail", "detail_h", float, "HAIPROF_DETAIL", "HOURS",
               "keep so much of a long run in full, and sums per minute of what is older "
               f"(default: {Options.detail_h:g}; 0: keep all)"),
    OptionSpec("trace", "trace", _switch, "HAIPROF_TRACE", "",
               "trace some steps with torch.profiler on every rank"),
    OptionSpec("steps", "steps", parse_steps, "HAIPROF_STEPS", "A:B",
               "trace steps A to B-1; implies --trace"),
    OptionSpec("trace-steps", "trace_steps", int, "HAIPROF_TRACE_STEPS", "N",
               f"trace N steps (default: {DEFAULT_STEPS})"),
    OptionSpec("trace-stacks", "trace_stacks", _switch, "HAIPROF_TRACE_STACKS", "",
               "with Python call stacks; implies --trace"),
    OptionSpec("trace-shapes", "trace_shapes", _switch, "HAIPROF_TRACE_SHAPES", "",
               "with the shapes of operators' inputs"),
    OptionSpec("trace-memory", "trace_memory", _switch, "HAIPROF_TRACE_MEMORY", "",
               "with allocations and releases"),
    OptionSpec("trace-flops", "trace_flops", _switch, "HAIPROF_TRACE_FLOPS", "",
               "with floating point operations, estimated"),
    OptionSpec("trace-modules", "trace_modules", _switch, "HAIPROF_TRACE_MODULES", "",
               "with the modules of TorchScript (of others: --trace-stacks)"),
    OptionSpec("trace-sync", "trace_sync", _switch, "HAIPROF_TRACE_SYNC", "",
               "with CUDA synchronisation events"),
    OptionSpec("execution-trace", "execution_trace", _switch, "HAIPROF_EXECUTION_TRACE", "",
               "also an execution trace of the same steps; implies --trace"),
    OptionSpec("explain", "explain", _switch, "HAIPROF_EXPLAIN", "",
               "trace two steps with the lines that call operators: what backward does has a line"),
    OptionSpec("repeat", "repeat", int, "HAIPROF_REPEAT", "N",
               f"trace N windows (default: {Options.repeat})"),
    OptionSpec("repeat-every", "repeat_every", int, "HAIPROF_REPEAT_EVERY", "STEPS",
               "steps between the starts of two windows (default: ten times the window)"),
    OptionSpec("keep-slow", "keep_slow", _switch, "HAIPROF_KEEP_SLOW", "",
               "trace a few steps repeatedly, and keep windows with a slow step; implies --trace"),
    OptionSpec("slow-ratio", "slow_ratio", float, "HAIPROF_SLOW_RATIO", "RATIO",
               f"a slow step takes RATIO times the typical step (default: {Options.slow_ratio})"),
    OptionSpec("slow-cost", "slow_cost", float, "HAIPROF_SLOW_COST", "RATIO",
               f"maximum overhead of --keep-slow (default: {Options.slow_cost})"),
    OptionSpec("trace-limit", "trace_limit_mb", float, "HAIPROF_TRACE_LIMIT", "MB",
               f"largest raw trace of a rank and window (default: {Options.trace_limit_mb:g})"),
    OptionSpec("recorder", "recorder", _recorders, "HAIPROF_RECORDERS", "LIST",
               f"comma list of all, basic, {', '.join(RECORDERS)} (perf is not in all)"),
    OptionSpec("log-dir", "log_dir", lambda text: text if is_address(text) else _folder(text),
               ENV_LOG_DIR, "DIR",
               f"where run directories go, also s3://BUCKET/... (default: {Options.log_dir})"),
    OptionSpec("local-dir", _LOCAL_DIR, _folder, "HAIPROF_LOCAL_DIR", "DIR",
               "with an address as log-dir: where runs are recorded first (default: "
               "~/.local/state/haiprof/runs)"),
    OptionSpec("name", "name", str, "HAIPROF_NAME", "NAME",
               "name of the job (default: the script's)"),
    OptionSpec("share", "share", str, "HAIPROF_SHARE", "WHO",
               "who else may read the run: nobody (default), group, or all"),
    OptionSpec("admin-group", "admin_group", str, "HAIPROF_ADMIN_GROUP", "GROUP",
               "they may read the run, and are shown jobs of others (default: root alone)"),
    OptionSpec("run-id", "run_id", str, "HAIPROF_RUN_ID", "ID",
               "give all nodes of a job the same ID: they share one run directory"),
    OptionSpec("burst", "burst", _switch, "HAIPROF_BURST", "",
               "GPU metrics every 100 µs for 5 s, by Nsight Systems (nsys)"),
    OptionSpec("burst-hz", "burst_hz", int, "HAIPROF_BURST_HZ", "HZ",
               f"samples per second of a burst (default: {Options.burst_hz})"),
    OptionSpec("burst-time", "burst_time_s", float, "HAIPROF_BURST_TIME", "SECONDS",
               f"length of a burst (default: {Options.burst_time_s:g})"),
    OptionSpec("memory-history", "memory_history", str, "HAIPROF_MEMORY_HISTORY", "WHEN",
               "record CUDA allocator history for the out-of-memory report: off, on, or auto (from "
               f"90 % memory use on; default: {Options.memory_history})"),
    OptionSpec("tensorboard", "tensorboard", _switch, "HAIPROF_TENSORBOARD", "",
               "also write live scalars for TensorBoard into the run"),
    OptionSpec("reach", "reach", _address, "HAIPROF_REACH", "HOST:PORT",
               "control channel without a shared file system; the node with HOST listens"),
    OptionSpec("reach-token", "reach_token", _folder, "HAIPROF_REACH_TOKEN", "FILE",
               "file with the token for --reach, mode 600 (default: reach.token in log-dir)"),
    OptionSpec("prometheus-port", "prometheus_port", int, "HAIPROF_PROMETHEUS_PORT", "PORT",
               "serve counters at 127.0.0.1:PORT for Prometheus (default: no port)"),
    OptionSpec("prometheus-allow", "prometheus_allow", _users, "HAIPROF_PROMETHEUS_ALLOW", "USERS",
               "other users who may read them: names, uids, or all"),
    OptionSpec("kineto", "kineto", _switch, "HAIPROF_KINETO", "",
               "let `trace now` work through Kineto, without Python (12 µs per step)"),
    OptionSpec("react", "react", str, "HAIPROF_REACT", "WHAT",
               "automatic action: snapshot (of a hang, default), trace (of a slowdown), both, off"),
    OptionSpec("slow-limit", "slow_limit", parse_slow_limit, "HAIPROF_SLOW_LIMIT", "PERCENT",
               "a slowdown is a median step this far above the rank's typical step "
               f"(default: {Options.slow_limit:.0%})"),
    OptionSpec("hang-limit", "hang_limit", parse_hang_limit, "HAIPROF_HANG_LIMIT", "SECONDS|5x",
               "time without a step that counts as a hang; 5x: five times the longest so far, at "
               "least 300 s"),
    OptionSpec("react-times", "react_times", int, "HAIPROF_REACT_TIMES", "N",
               "maximum number of automatic snapshots, and of automatic traces "
               f"(default: {Options.react_times})"),
    OptionSpec("notify", "notify", _notify, "HAIPROF_NOTIFY", "COMMAND|URL",
               "send a JSON message on a hang, a slowdown, a death and the end of the job "
               "(default: nobody is told)"),
    OptionSpec("quiet", "quiet", _switch, "HAIPROF_QUIET", "",
               "do not print the first line and the verdict"),
)  # fmt: skip
INTERVAL_HELP = "seconds between two samples of one recorder, e.g. --interval.gpu 0.5"

_BY_NAME = {spec.name: spec for spec in OPTIONS}


def option_spec(name: str) -> OptionSpec | None:
    """The option of that name; `log_dir` and `log-dir` are the same."""
    return _BY_NAME.get(name.replace("_", "-"))


def is_option(name: str) -> bool:
    """Whether haiprof takes `--NAME` (also `interval.RECORDER` and `options`)."""
    return option_spec(name) is not None or name.startswith("interval.")


def parse_value(name: str, text: str, *, origin: str) -> tuple[str, object]:
    """One option's text as (field of `Options`, value); intervals as (`interval.X`, seconds)."""
    spec = option_spec(name)
    try:
        if spec is not None:
            return spec.field, spec.parse(text)
        if name.startswith("interval."):
            return name, float(text)
    except ValueError as error:
        said = str(error)
        why = "expected a number" if said.startswith(("could not conv", "invalid lit")) else said
        raise UsageError(f"{origin}: {why}, got {text!r}") from None
    import difflib  # only for a mistyped name

    known = ", ".join([*_BY_NAME, "interval.RECORDER"])
    near = difflib.get_close_matches(name, _BY_NAME, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known options: {known}"
    raise UsageError(f"{origin}: no option {name!r}", hint=hint)


def parse_dotted(text: str, *, origin: str = "--options") -> tuple[str, object]:
    """`profile.NAME=VALUE` as the published tool takes it; VALUE may hold further `=`."""
    key, equals, value = text.partition("=")
    if not equals or not key.startswith("profile."):
        raise UsageError(f"{origin} {text!r}: expected profile.NAME=VALUE")
    return parse_value(key.removeprefix("profile."), value, origin=f"{origin} {key}")


def options_from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """The HAIPROF_* variables with their published meanings; empty ones count as unset."""
    values: dict[str, object] = {}
    if environ.get(_PLATFORM_LOG_DIR):
        values["log_dir"] = Path(environ[_PLATFORM_LOG_DIR]) / "haiprof"
    for spec in OPTIONS:
        if environ.get(spec.env):
            key, value = parse_value(spec.name, environ[spec.env], origin=spec.env)
            values[key] = value
    for variable, text in environ.items():
        match = _INTERVAL_ENV.match(variable)
        if match and text:
            name = f"interval.{match[1].lower()}"
            values[name] = parse_value(name, text, origin=variable)[1]
    return values


def options_from_files(
    pyproject: Path = Path("pyproject.toml"), site: Path = SITE_OPTIONS
) -> dict[str, object]:
    """Those of the machine, and in their place those of `[tool.haiprof]` of a pyproject.toml."""
    try:
        content, mode = site.read_bytes(), site.stat().st_mode
    except OSError:
        return options_from_pyproject(pyproject)
    if mode & 0o022:
        raise UsageError(f"{site}: others may write to it", hint=f"chmod go-w {site}")
    return {**_options_of(site, read_toml(site, content)), **options_from_pyproject(pyproject)}


def options_from_pyproject(path: Path) -> dict[str, object]:
    """`[tool.haiprof]` of a pyproject.toml; no file or no such table is no options."""
    try:
        content = path.read_bytes()
    except OSError:
        return {}
    if b"haiprof" not in content:
        return {}
    tool = read_toml(path, content).get("tool", {})
    table = tool.get("haiprof", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise UsageError(f"{path}: [tool.haiprof] must be a table")
    return _options_of(f"{path} [tool.haiprof]", table)


def _options_of(origin: object, table: Mapping[str, object]) -> dict[str, object]:
    rows: list[tuple[str, object]] = []
    for name, value in table.items():
        if isinstance(value, dict):
            rows += [(f"{name}.{key}", inner) for key, inner in value.items()]
        else:
            rows.append((name, value))
    values: dict[str, object] = {}
    for name, value in rows:
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        key, parsed = parse_value(name, text, origin=str(origin))
        values[key] = parsed
    return values


def read_toml(path: Path, content: bytes) -> dict[str, object]:
    """A document; raises UsageError where it is none."""
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        return dict(importlib.import_module(name).loads(content.decode()))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {error}") from None


def merge_options(*layers: Mapping[str, object]) -> Options:
    """Options from layers, later ones first in rank: pyproject, environment, command line."""
    merged: dict[str, object] = {}
    for layer in layers:
        merged.update(layer)
    prefix = "interval."
    intervals = {k[len(prefix) :]: v for k, v in merged.items() if k.startswith(prefix)}
    for group, recorders in RECORDER_GROUPS.items():
        for recorder in recorders if group in intervals else ():
            if recorder != "stacks":  # whose interval is of another order
                intervals.setdefault(recorder, intervals[group])
        intervals.pop(group, None)
    fields = {k: v for k, v in merged.items() if not k.startswith(prefix)}
    local_dir = fields.pop(_LOCAL_DIR, None)
    if isinstance(fields.get("log_dir"), str):
        fields["address"] = fields["log_dir"]
        fields["log_dir"] = local_dir or recording_folder(os.environ)
    return Options(**fields, interval_s=intervals)  # type: ignore[arg-type]


def is_enabled(environ: Mapping[str, str]) -> bool:
    """HAIPROF_ENABLED=0 runs the job without haiprof; any other value, and none, records."""
    try:
        return _switch(environ.get(ENV_ENABLED) or "1")
    except ValueError as error:
        raise UsageError(f"{ENV_ENABLED}: {error}") from None


def cache_limit_bytes(environ: Mapping[str, str]) -> int:
    """Size limit of the cache of traces in bytes; 0 disables it."""
    text = environ.get(ENV_CACHE_LIMIT) or str(DEFAULT_CACHE_LIMIT_MB)
    try:
        limit_mb = float(text)
    except ValueError:
        limit_mb = math.nan
    if not math.isfinite(limit_mb) or limit_mb < 0:
        raise UsageError(
            f"{ENV_CACHE_LIMIT}: {text!r} is no number of megabytes", hint="0 keeps nothing"
        )
    return round(limit_mb * _BYTES_PER_MB)


def safe_name(text: str) -> str:
    """A name made safe as the name of a folder."""
    return _NAME_OK.sub("-", os.path.basename(text)).strip("-.")[:80] or "job"
