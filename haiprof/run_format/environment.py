"""What is recorded of a job's environment: listed variables, installed packages, git's HEAD."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from haiprof.run_format.secrets import mask_variable

# Variables that change how fast PyTorch runs. Values of no other variable are ever stored.
_PREFIXES = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "CUDA_", "CUBLAS_", "CUDNN_", "NCCL_",
    "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_", "GLOO_", "UCX_", "UCC_",
    "FI_", "HSA_", "HIP_", "ROCR_", "MALLOC_", "ATEN_", "ONEDNN_", "DNNL_",
)  # fmt: skip
_NAMES = (
    "NVIDIA_TF32_OVERRIDE", "NVIDIA_VISIBLE_DEVICES", "LD_PRELOAD", "PYTHONOPTIMIZE",
    "PYTHONMALLOC", "PYTHONHASHSEED", "PYTHON_GIL",
)  # fmt: skip
LOADER_WORKER = "pt_data_worker"  # torch names the processes so
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
WORLD_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Where launchers say which rank a process is: torchrun, Open MPI, MPICH, Slurm."""
_VALUE_LIMIT = 500
_TEXT_LIMIT_BYTES = 1 << 22
_HEX = frozenset("0123456789abcdef")
_MAX_PACKAGES = 2000


def named_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that affect speed, with credentials masked; others are left out."""
    return {
        name: mask_variable(name, value)[:_VALUE_LIMIT]
        for name, value in sorted(environ.items())
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def find_number(environ: Mapping[str, str], names: Iterable[str]) -> int | None:
    """The number in the first of some variables that holds one; None where none does."""
    for name in names:
        text = environ.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 12:
            return int(text)
    return None


def installed_packages(paths: Iterable[str]) -> dict[str, str]:
    """Version by name of what is installed on these import paths, by the names of folders alone.

    The first path that has a package wins, as in imports. No file is opened: some ms.
    """
    found: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        try:
            with os.scandir(path or ".") as entries:
                names = sorted(entry.name for entry in entries)
        except OSError:
            continue
        for name in names:
            stem, dot, kind = name.rpartition(".")
            package, _, version = stem.partition("-")
            if dot and kind in ("dist-info", "egg-info") and version:
                found.setdefault(package.lower().replace("_", "-"), version)
    return dict(sorted(found.items())[:_MAX_PACKAGES])


def git_head(folder: str) -> dict[str, Any]:
    """The commit that is checked out there, read from git's files; git itself is not run.

    `root`, `branch` (null where HEAD is detached), `commit`; or `reason` alone.
    """
    root, git = _repository(folder)
    if not git:
        return {"reason": "no git repository here"}
    if (head := _text(os.path.join(git, "HEAD"))) is None:
        return {"reason": f"{git}: HEAD cannot be read"}
    if not head.startswith("ref:"):
        return {"root": root, "branch": None, "commit": _commit(head)}
    ref = head[4:].strip()
    parts = ref.split("/")  # a name below refs/ that cannot leave git's folder
    if parts[0] != "refs" or {"", ".", ".."} & set(parts) or "\0" in ref:
        return {"reason": f"{git}: HEAD names no branch"}
    common = _text(os.path.join(git, "commondir"))
    shared = os.path.normpath(os.path.join(git, common)) if common else git
    commit = next(filter(None, (_commit(_text(os.path.join(g, ref))) for g in (git, shared))), None)
    packed = "" if commit else _text(os.path.join(shared, "packed-refs")) or ""
    for line in packed.splitlines():
        word, _, name = line.partition(" ")
        if name == ref:
            commit = _commit(word)
            break
    branch = ref.removeprefix("refs/heads/")[:_VALUE_LIMIT]
    lacking = {} if commit else {"reason": "no commit yet, or kept in a form that only git reads"}
    return {"root": root, "branch": branch, "commit": commit, **lacking}


def _repository(folder: str) -> tuple[str, str]:
    """Root of the working tree and the folder of git's files; empty where there are none."""
    for place in (folder, *map(str, Path(folder).parents)):
        dot = os.path.join(place, ".git")
        if os.path.isdir(dot):
            return place, dot
        if os.path.isfile(dot):  # a worktree or a submodule
            line = _text(dot) or ""
            target = line[7:].strip() if line.startswith("gitdir:") else ""
            return (place, os.path.normpath(os.path.join(place, target))) if target else ("", "")
    return "", ""


def _commit(text: str | None) -> str | None:
    word = (text or "").strip()
    return word if len(word) in (40, 64) and set(word) <= _HEX else None


def _text(path: str) -> str | None:
    """A regular file's text without its last line end; None where there is none."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            return file.read(_TEXT_LIMIT_BYTES).decode("utf-8", "replace").rstrip("\n")
    except (OSError, ValueError):
        return None
