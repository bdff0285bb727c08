"""Runs haiprof commands in this process and keeps what each printed and wrote.

`golden.py` starts it with the package of one tree: golden_worker.py TREE CALLS.json FOUND.pickle
"""

from __future__ import annotations

import json
import pickle
import shlex
import shutil
import sys
import threading
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
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
    sys.modules |= {name: Recorder(name) for name in ("wandb", "mlflow")}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    found, out = {}, Path("out")
    for line in json.loads(Path(source).read_text()):
        shutil.rmtree(out, ignore_errors=True)
        (out / "files").mkdir(parents=True)
        Collector.numbers = count()
        words = [word.replace("{out}", "out/files").replace("{collector}", url)
                 for word in shlex.split(line)]  # fmt: skip
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(stack.enter_context(open("out/stdout", "w"))))
            stack.enter_context(redirect_stderr(stack.enter_context(open("out/stderr", "w"))))
            try:
                ask = {"hta": ask_hta, "mcp": ask_mcp}.get(words[0])
                status: object = ask(words[1]) if ask else main(words)
            except BaseException as error:  # noqa: BLE001 - a result to compare
                status = repr(error)
        (out / "status").write_text(str(status))
        printed = (out / "stdout").read_text()
        (out / "stdout").write_text(printed.replace(url, "COLLECTOR"))
        written = sorted(path for path in out.rglob("*") if path.is_file())
        found[line] = {str(path.relative_to(out)): path.read_bytes() for path in written}
    Path(target).write_bytes(pickle.dumps(found))


class Collector(BaseHTTPRequestHandler):
    """Keeps what is posted as files."""

    numbers = count()

    def do_POST(self) -> None:
        """One request."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Path(f"out/files/posted-{next(self.numbers)}").write_bytes(body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Recorder:
    """In the place of a tracker's package: prints every call, and keeps the folders it is given."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Recorder:
        return Recorder(f"{self._name}.{name}")

    def __call__(self, *given: object, **named: object) -> Recorder:
        """A call; folders among its arguments are kept."""
        folders = [each for each in given if isinstance(each, str) and Path(each).is_dir()]
        for folder in folders:
            shutil.copytree(folder, "out/files", dirs_exist_ok=True)
        print(self._name, *(each for each in given if each not in folders), named)
        return Recorder(f"{self._name}()")

    def __setitem__(self, key: str, value: object) -> None:
        print(self._name, key, value)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        print(self._name, "ends")

    def __repr__(self) -> str:
        return self._name


def ask_mcp(path: str) -> int:
    """Prints what the tools of `haiprof mcp` answer, but `runs`, which reads as many as it may."""
    from haiprof.cli.mcp import Tools

    tools = Tools(Path(path).parent)
    for name in ("verdict", "ledger", "lines", "ranks", "sql"):
        print(name, getattr(tools, name)(run=Path(path).name))
    print(tools.compare(Path(path).name, Path(path).name))
    return 0


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
