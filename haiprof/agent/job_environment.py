"""The job's environment for the manifest: git state, script, machine, pod; found beside the job."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from haiprof.linux.procfs import read_text
from haiprof.run_format.environment import git_head, named_variables
from haiprof.run_format.secrets import mask_text

GIT_TIMEOUT_S = 10.0
_NICE = 10
_MAX_FILES = 100
_SCRIPT_LIMIT_BYTES = 1 << 22
# Never a lock, a hook, a monitor, an editor, a pager, a prompt or the network.
_GIT = (
    "git", "--no-optional-locks", "--no-pager",
    "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null",
)  # fmt: skip
_STATUS = ("status", "--porcelain=v1", "-z", "--untracked-files=no", "--ignore-submodules=all")
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all", "--binary")

SERVICE_ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"
"""Below the root of a container: namespace, token and certificate, as the kubelet mounts them."""
_UID = re.compile(r"/pods/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/")
"""In the path on the node of what the kubelet mounts: /etc/hosts, the termination log."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def at_launch(cwd: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The cheap part of it, known before the job starts."""
    found: dict[str, Any] = {"git": git_head(cwd), "variables": named_variables(environ)}
    if job := environ.get("SLURM_JOB_ID"):
        found |= {"slurm_job": job, "slurm_restart": environ.get("SLURM_RESTART_COUNT") or "0"}
        known = {"cluster": "CLUSTER_NAME", "nodes": "JOB_NODELIST", "name": "JOB_NAME"}
        found |= {
            f"slurm_{name}": mask_text(environ.get(f"SLURM_{of}", "")) for name, of in known.items()
        }
    if "KUBERNETES_SERVICE_HOST" in environ:
        found["kubernetes"] = True
    return found


class Surroundings:
    """The rest of it, collected in a thread while the job runs."""

    def __init__(
        self, known: Mapping[str, Any], command: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        self._found = dict(known)
        self._command, self._environ = command, environ
        self._thread = threading.Thread(target=self._ask, name="haiprof-surroundings", daemon=True)
        self._taken = False

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        """Returns everything once; None before it is complete and after it was taken."""
        if self._taken:
            return None
        self._thread.join(wait_s)
        if self._thread.is_alive():
            return None
        self._taken = True
        return self._found

    def _ask(self) -> None:
        nice = max(_NICE, os.getpriority(os.PRIO_PROCESS, 0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)  # git inherits it
        found = dict(self._found)
        found["machine"] = machine()
        found["script"] = describe_script(self._command)
        git = found.get("git") or {}
        if git.get("root"):
            found["git"] = {**git, **self._changes(git["root"])}
        self._found = found

    def _changes(self, root: str) -> dict[str, Any]:
        """Uncommitted changes of tracked files: `dirty`, `changed_files`, `changes_digest`."""
        status = self._git(root, _STATUS)
        if isinstance(status, str):
            return {"dirty": None, "dirty_reason": status}
        # Paths of `git status -z`: after the path of a rename comes the one it had before.
        entries = iter(status.split(b"\0"))
        names = []
        for entry in entries:
            if len(entry) > 3:
                names.append(entry[3:].decode("utf-8", "replace"))
                if entry[:1] in b"RC":
                    next(entries, None)
        if not names:
            return {"dirty": False, "changed_files": [], "changes_digest": None}
        difference = self._git(root, _DIFF)
        digest = None if isinstance(difference, str) else _digest(difference)
        return {"dirty": True, "changed_files": names[:_MAX_FILES], "changes_digest": digest}

    def _git(self, root: str, words: Sequence[str]) -> bytes | str:
        """Git's output, or why there is none."""
        environ = {k: v for k, v in self._environ.items() if not k.startswith("GIT_")}
        environ |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C",
                    "GIT_NO_LAZY_FETCH": "1"}  # fmt: skip
        try:
            done = subprocess.run(
                [*_GIT, "-C", root, *words], env=environ, stdin=subprocess.DEVNULL,
                capture_output=True, timeout=GIT_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"git took longer than {GIT_TIMEOUT_S:g} s"
        except OSError as error:
            return f"git: {error.strerror or error}"
        if done.returncode:
            lines = done.stderr.decode("utf-8", "replace").splitlines()
            said = mask_text(lines[0])[:200] if lines else f"exit status {done.returncode}"
            return f"git: {said}"
        return done.stdout


def describe_script(command: Sequence[str]) -> dict[str, Any] | None:
    """Path and digest of the first Python file on the command line; None where there is none."""
    path = next((word for word in command if word.endswith(".py")), None)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return {"path": path, "digest": _digest(file.read(_SCRIPT_LIMIT_BYTES))}
    except OSError as error:
        return {"path": path, "digest": None, "reason": error.strerror or str(error)}


def machine() -> dict[str, Any]:
    """This node: kernel, CPU, cores, memory, NVIDIA driver; None where unknown."""
    system = os.uname()
    return {
        "host": system.nodename, "kernel": system.release, "architecture": system.machine,
        "cpu_model": _field("/proc/cpuinfo", "model name"), "cpu_count": os.cpu_count(),
        "allowed_cpu_count": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "nvidia_driver": _field("/proc/driver/nvidia/version", "NVRM version"),
    }  # fmt: skip


def _field(path: str, name: str) -> str | None:
    """The value behind the first `name:` of a file of /proc."""
    found = re.search(rf"^\s*{name}\s*:(.*)", read_text(Path(path)) or "", re.MULTILINE)
    return found[1].strip() if found else None


def _digest(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()[:16]


def find_pod(environ: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, str | None] | None:
    """`name`, `namespace` and `uid` of the pod; None where this is none."""
    # POD_NAME, POD_NAMESPACE and POD_UID where the pod's template sets them (the downward API),
    # else the host name, the service account's namespace, and the kubelet's mounts.
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    mounted = _UID.search(read_text(root / "proc/self/mountinfo") or "")
    name = environ.get("POD_NAME") or read_text(root / "etc/hostname") or ""
    space = environ.get("POD_NAMESPACE") or read_text(root / SERVICE_ACCOUNT / "namespace")
    uid = environ.get("POD_UID") or (mounted[1] if mounted else None)
    if not is_pod_name(name) or not is_pod_name(space):
        return None
    return {"name": name, "namespace": space, "uid": uid}


def is_pod_name(name: object) -> bool:
    """Whether a text may be the name of a pod or of a namespace, and with it a part of a path."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None
