"""Options: one table for the command line, the environment, pyproject.toml and the manifest."""

# ruff: noqa: RUF009 - `declare` makes a field
from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from haiprof.base.errors import UsageError
from haiprof.base.log_addresses import is_address, recording_folder
from haiprof.base.trace_options import (
    HangLimit,
    OptionSpec,
    TraceOptions,
    check,
    declare,
    parse_hang_limit,
    parse_slow_limit,
    parse_switch,
    specs_of,
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
SITE_OPTIONS = Path("/etc/haiprof/config.toml")  # of all users, as the administrator sets them
MEMORY_HISTORY = ("off", "auto", "on")
REACTIONS = ("snapshot", "trace", "both", "off")
DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.1
MIN_STACKS_INTERVAL_S = 0.01  # between samples of the training thread's stack; 0.05 s if not given
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
ENV_PEAK = "HAIPROF_PEAK"  # the device's most, as `haiprof trace efficiency --peak` takes it
ENV_DCGM_URL = "HAIPROF_DCGM_URL"  # where DCGM's exporter answers, and that it is wanted
ENV_RENDEZVOUS = "HAIPROF_RENDEZVOUS"  # set by `haiprof submit`: where a job's nodes meet
ENV_TRY_LOADER = "HAIPROF_TRY_LOADER"  # set by `haiprof try-loader`: FOLDER:MODE of one trial
KEPT_BATCHES = "kept"  # the mode of a trial in which a loader costs nothing; a number: its workers
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
_INTERVAL_ENV = re.compile(r"HAIPROF_([A-Z0-9_]+)_INTERVAL\Z")
DEFAULT_CACHE_LIMIT_MB = 4000.0
MIN_DETAIL_H = 0.25  # samples of a quarter of an hour are always kept whole
_BYTES_PER_MB = 1_000_000
_PLATFORM_LOG_DIR = "MARSV2_LOG_DIR"
_PORT_LIMIT = 65_535
_TIMES_LIMIT = 1000
_NAME_OK = re.compile(r"[^A-Za-z0-9._-]+")


def _plain(value: object) -> object:
    if isinstance(value, (Path, HangLimit)):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


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
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) and not is_notify_url(text):
        raise ValueError("expected http://, https:// or a command")
    return text


def _log_dir(text: str) -> object:
    return text if is_address(text) else _folder(text)


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


@dataclass(frozen=True, kw_only=True)
class Options(TraceOptions):
    """What a run records, and where it is written."""

    # fmt: off
    time_s: float = declare(
        "time SECONDS", 0.0,
        "stop recording after this time; the job runs on (default: the whole run)")
    """From the first training step after the warm-up; 0 is the whole run."""
    warmup_s: float = declare(
        "warmup SECONDS", 0.0, "do not record the first SECONDS after the first training step")
    detail_h: float = declare(
        "detail HOURS", 2.0,
        "keep so much of a long run in full, and sums per minute of what is older "
        "(default: {default:g}; 0: keep all)")
    recorder: tuple[str, ...] = declare(
        "recorder LIST", USUAL_RECORDERS,
        f"comma list of all, basic, {', '.join(RECORDERS)} (perf is not in all)", _recorders,
        "HAIPROF_RECORDERS")
    interval_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds between two samples, by recorder; others take 1 s."""
    log_dir: Path = declare(
        "log-dir DIR", Path("haiprof-logs"),
        "where run directories go, also s3://BUCKET/... (default: {default})", _log_dir)
    local_dir: Path | None = declare(
        "local-dir DIR", None,
        "with an address as log-dir: where runs are recorded first (default: "
        "~/.local/state/haiprof/runs)", _folder)
    """Is `log_dir` then, and nothing else reads it."""
    address: str = ""  # where recorded runs are put, such as `s3://bucket/runs`; empty is nowhere
    name: str = declare("name NAME", "", "name of the job (default: the script's)")
    share: str = declare(
        "share WHO", "nobody", "who else may read the run: nobody (default), group, or all")
    admin_group: str = declare(
        "admin-group GROUP", "",
        "they may read the run, and are shown jobs of others (default: root alone)")
    run_id: str = declare(
        "run-id ID", "", "give all nodes of a job the same ID: they share one run directory")
    burst: bool = declare(
        "burst", False, "GPU metrics every 100 µs for 5 s, by Nsight Systems (nsys)")
    burst_hz: int = declare(
        "burst-hz HZ", 10_000, "samples per second of a burst (default: {default})")
    burst_time_s: float = declare(
        "burst-time SECONDS", 5.0, "length of a burst (default: {default:g})")
    memory_history: str = declare(
        "memory-history WHEN", "auto",
        "record CUDA allocator history for the out-of-memory report: off, on, or auto (from "
        "90 % memory use on; default: {default})")
    tensorboard: bool = declare(
        "tensorboard", False, "also write live scalars for TensorBoard into the run")
    reach: str = declare(
        "reach HOST:PORT", "",
        "control channel without a shared file system; the node with HOST listens", _address)
    reach_token: Path | None = declare(
        "reach-token FILE", None,
        "file with the token for --reach, mode 600 (default: reach.token in log-dir)", _folder)
    prometheus_port: int = declare(
        "prometheus-port PORT", 0,
        "serve counters at 127.0.0.1:PORT for Prometheus (default: no port)")
    prometheus_allow: tuple[str, ...] = declare(
        "prometheus-allow USERS", (), "other users who may read them: names, uids, or all", _users)
    """Beside the job's own user and root."""
    kineto: bool = declare(
        "kineto", False, "let `trace now` work through Kineto, without Python (12 µs per step)")
    react: str = declare(
        "react WHAT", "snapshot",
        "automatic action: snapshot (of a hang, default), trace (of a slowdown), both, off")
    slow_limit: float = declare(
        "slow-limit PERCENT", 0.2,
        "a slowdown is a median step this far above the rank's typical step "
        "(default: {default:.0%})", parse_slow_limit)
    """As a ratio."""
    hang_limit: HangLimit = declare(
        "hang-limit SECONDS|5x", HangLimit(),
        "time without a step that counts as a hang; 5x: five times the longest so far, at "
        "least 300 s", parse_hang_limit)
    react_times: int = declare(
        "react-times N", 2,
        "maximum number of automatic snapshots, and of automatic traces (default: {default})")
    notify: str = declare(
        "notify COMMAND|URL", "",
        "send a JSON message on a hang, a slowdown, a death and the end of the job "
        "(default: nobody is told)", _notify)
    quiet: bool = declare("quiet", False, "do not print the first line and the verdict")
    # fmt: on

    def __post_init__(self) -> None:
        low, high = BURST_HZ_RANGE
        samples, (hang_s, factor) = self.burst_hz * self.burst_time_s, self.hang_limit
        least = dict.fromkeys(RECORDERS, MIN_INTERVAL_S) | {"stacks": MIN_STACKS_INTERVAL_S}
        check((
            (0 <= self.time_s < math.inf, "time must be 0 or more seconds", ""),
            (0 <= self.warmup_s < math.inf, "warmup must be 0 or more seconds", ""),
            (not self.detail_h or MIN_DETAIL_H <= self.detail_h < math.inf,
             f"detail must be {MIN_DETAIL_H:g} or more hours, or 0 to keep all", ""),
            *((each in least, f"interval.{each}: no such recorder", f"one of {', '.join(least)}")
              for each in self.interval_s),
            *((least.get(each, 0) <= seconds < math.inf,
               f"interval.{each} must be {least.get(each)} s or more", "")
              for each, seconds in self.interval_s.items()),
            (self.share in SHARES, f"share {self.share!r}: expected {', '.join(SHARES)}", ""),
            (self.memory_history in MEMORY_HISTORY,
             f"memory-history {self.memory_history!r}: expected {', '.join(MEMORY_HISTORY)}", ""),
            (low <= self.burst_hz <= high, f"burst-hz must be {low} to {high}", ""),
            (0 < self.burst_time_s < math.inf, "burst-time must be more than 0 seconds", ""),
            (samples <= BURST_SAMPLE_LIMIT, f"burst-hz times burst-time is {samples:g} samples",
             f"at most {BURST_SAMPLE_LIMIT}: a shorter burst, or fewer samples per second"),
            (0 <= self.prometheus_port <= _PORT_LIMIT,
             f"prometheus-port must be 1 to {_PORT_LIMIT}, or 0 for none", ""),
            (not (self.kineto and self.traces),
             "--kineto and --trace exclude each other: two profilers cannot share a process",
             "with --kineto, traces are asked for while the job runs: haiprof trace now"),
            (self.react in REACTIONS, f"react must be one of {', '.join(REACTIONS)}", ""),
            (0.01 <= self.slow_limit <= 100, "slow-limit must be 1% or more", ""),
            (1 <= hang_s < math.inf if hang_s else 2 <= factor < math.inf,
             "hang-limit must be 1 second or more, or 2x or more", ""),
            (0 <= self.react_times <= _TIMES_LIMIT, f"react-times must be 0 to {_TIMES_LIMIT}", ""),
            *self.trace_checks(self.time_s, self.warmup_s, phases="phases" in self.recorder),
        ))  # fmt: skip

    @property
    def traces(self) -> bool:
        """Whether a window is traced; how to trace may be said of reactions alone."""
        reacts = self.react in ("trace", "both") and self.react_times > 0
        return super().traces or (self.says_how and not reacts)

    def interval(self, recorder: str) -> float:
        """Seconds between two samples of one recorder."""
        return self.interval_s.get(recorder, DEFAULT_INTERVAL_S)

    def boot_json(self) -> dict[str, object]:
        """What the hook reads: the options, with the trace window worked out."""
        return {**self.as_json(), "trace": self.window(time_s=self.time_s, warmup_s=self.warmup_s)}

    def as_json(self) -> dict[str, object]:
        """The options as plain JSON values, by their names on the command line."""
        found: dict[str, object] = {}
        for spec in OPTIONS:
            if spec.field != "local_dir":
                found[spec.name.replace("-", "_")] = _plain(getattr(self, spec.field))
            if spec.field == "recorder":
                found["interval"] = dict(self.interval_s)
        found["trace"] = self.traces
        found["steps"] = None if self.steps is None else f"{self.steps[0]}:{self.steps[1]}"
        found["notify"] = self.notify and ("URL" if is_notify_url(self.notify) else "command")
        return found


_OWN, _TRACING = specs_of(Options), specs_of(TraceOptions)
_OWN = _OWN[len(_TRACING) :]
OPTIONS = (*_OWN[:3], *_TRACING, *_OWN[3:])
"""In the order in which the help lists them: what is traced stands after the times."""
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
    merged = {name: value for layer in layers for name, value in layer.items()}
    prefix = "interval."
    intervals = {k[len(prefix) :]: v for k, v in merged.items() if k.startswith(prefix)}
    for group, recorders in RECORDER_GROUPS.items():
        for recorder in recorders if group in intervals else ():
            if recorder != "stacks":  # whose interval is of another order
                intervals.setdefault(recorder, intervals[group])
        intervals.pop(group, None)
    fields = {k: v for k, v in merged.items() if not k.startswith(prefix)}
    if isinstance(fields.get("log_dir"), str):
        fields["address"] = fields["log_dir"]
        fields["log_dir"] = fields.get("local_dir") or recording_folder(os.environ)
    return Options(**fields, interval_s=intervals)  # type: ignore[arg-type]


def is_enabled(environ: Mapping[str, str]) -> bool:
    """HAIPROF_ENABLED=0 runs the job without haiprof; any other value, and none, records."""
    try:
        return parse_switch(environ.get(ENV_ENABLED) or "1")
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
