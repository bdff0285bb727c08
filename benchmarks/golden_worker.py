"""Runs haiprof commands in this process and keeps what each printed and wrote.

`golden.py` starts it with the package of one tree: golden_worker.py TREE CALLS.json FOUND.pickle
"""

from __future__ import annotations

import json
import pickle
import shlex
import shutil
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path

# They write files, or need a window or what another one gave.
HTA_LEFT_OUT = ("generate_", "overlay_", "critical_path_", "get_queue_length_summary_from_")
HTA_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "get_frequent_cuda_kernel_sequences": ("aten::",),
    "get_gpu_kernels_with_user_annotations": (0,),
}


def work(tree: str, source: str, target: str) -> None:
    """Runs calls in this process, below the working directory, and keeps what each gave."""
    sys.path.remove(str(Path(__file__).parent))  # its names are not those of packages
    from haiprof.__main__ import __file__ as imported
    from haiprof.__main__ import main

    if not imported.startswith(tree):
        raise SystemExit(f"{imported} is not below {tree}")
    found, out = {}, Path("out")
    for line in json.loads(Path(source).read_text()):
        shutil.rmtree(out, ignore_errors=True)
        (out / "files").mkdir(parents=True)
        words = [word.replace("{out}", "out/files") for word in shlex.split(line)]
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(stack.enter_context(open("out/stdout", "w"))))
            stack.enter_context(redirect_stderr(stack.enter_context(open("out/stderr", "w"))))
            try:
                status: object = ask_hta(words[1]) if words[0] == "hta" else main(words)
            except BaseException as error:  # noqa: BLE001 - a result to compare
                status = repr(error)
        (out / "status").write_text(str(status))
        written = sorted(path for path in out.rglob("*") if path.is_file())
        found[line] = {str(path.relative_to(out)): path.read_bytes() for path in written}
    Path(target).write_bytes(pickle.dumps(found))


def ask_hta(path: str) -> int:
    """Prints what HTA's methods answer."""
    from haiprof import TraceAnalysis
    from haiprof.compat.hta import HTA_NAMES

    traces = TraceAnalysis(path, compat="hta")
    for name in sorted(name for name in HTA_NAMES if not name.startswith(HTA_LEFT_OUT)):
        try:
            answer = getattr(traces, name)(*HTA_ARGUMENTS.get(name, ()))
            print(name, json.dumps(answer, default=lambda frame: frame.to_dicts()))
        except Exception as error:  # noqa: BLE001, PERF203 - a result to compare
            print(name, repr(error))
    return 0


if __name__ == "__main__":
    work(*sys.argv[1:])
