"""TensorBoard on a run, until Ctrl-C: its scalars while they grow, its traces by window."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from haiprof.base.errors import HaiprofError, MissingExtraError
from haiprof.base.local_http import GuardedHandler, GuardedServer, own_readers
from haiprof.base.safe_files import MadeFolder
from haiprof.base.stop_signal import stop_event
from haiprof.compat.tensorboard_folder import Layout, open_layout
from haiprof.compat.torch_profiler.loading import patch_loading, stop_loading
from haiprof.compat.torch_profiler.pages import Pages
from haiprof.compat.torch_profiler.patches import patch_pages
from haiprof.run_format.layout import RunPaths
from haiprof.show.run_header import RUNNING, manifest_or_none, run_header
from haiprof.show.scalars import write_scalars
from haiprof.show.servers import Access, free_port, new_access, url_of
from haiprof.trace_analysis.files import files_by_window

_SCALARS_EVERY_S = 5.0
_PLUGIN = "torch_tb_profiler"
_INSTALL_PLUGIN = "pip install 'haiprof[torch-tb-profiler]', or haiprof perfetto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is being served."""

    url: str
    port: int
    folder: Path
    is_temporary: bool
    window_count: int
    has_plugin: bool
    """Whether torch-tb-profiler shows the traces."""
    readers: str
    """Who may open the address."""

    @property
    def notes(self) -> Iterator[str]:
        """Notes for people, one line each."""
        if not self.has_plugin:
            yield f"traces are not shown without torch-tb-profiler: {_INSTALL_PLUGIN}"
        elif not self.window_count:
            yield "no traces yet"
        if self.is_temporary:
            yield f"{self.folder} is temporary and goes away"


def serve_tensorboard(
    run: RunPaths | None,
    source: Path,
    *,
    host: str,
    port: int,
    ready: Callable[[Serving], None],
) -> None:
    """Runs TensorBoard until SIGINT or SIGTERM."""
    has_plugin = _check_extras(run)
    if run is None:
        files_by_window(source)  # or there is nothing that could ever be shown
    with open_layout(run, source) as layout, stop_event() as stop:
        count = layout.link_windows(whole_only=_is_running(run)) if has_plugin else 0
        if run is not None:
            _follow(run, layout, stop)
        number = free_port(host, port)
        # TensorBoard has no access control: this server asks the kernel, or wants a token.
        access = new_access(host, number) if own_readers(host) is None else None
        server = _server(layout, host=host, port=number, has_plugin=has_plugin, access=access)
        threading.Thread(
            target=server.serve_forever, name="haiprof-tensorboard", daemon=True
        ).start()
        try:
            ready(Serving(
                url=url_of(host, number, access), port=number, folder=layout.folder,
                is_temporary=layout.is_temporary, window_count=count, has_plugin=has_plugin,
                readers="who has the address" if access else "you and root on this machine",
            ))  # fmt: skip
            while not stop.wait(_SCALARS_EVERY_S):
                if has_plugin:
                    layout.link_windows(whole_only=_is_running(run))
        finally:
            server.shutdown()
            stop_loading()


def _check_extras(run: RunPaths | None) -> bool:
    if find_spec("tensorboard") is None:
        raise MissingExtraError(
            "TensorBoard is not installed", hint="pip install 'haiprof[tensorboard]'"
        )
    has_plugin = find_spec(_PLUGIN) is not None
    if run is None and not has_plugin:
        raise MissingExtraError(
            "TensorBoard shows no traces without torch-tb-profiler",
            hint=_INSTALL_PLUGIN,
        )
    return has_plugin


def _keep_temporary_files_together() -> None:
    """Gives torch-tb-profiler a folder for temporary files that is gone when this process ends.

    It removes its own at exit, but not where closing its cache fails first (a trace was loading).
    What is registered first runs last: ours comes after its own.
    """
    folder = MadeFolder.temporary("haiprof-tensorboard-")
    atexit.register(folder.remove)
    vars(sys.modules["tempfile"])["tempdir"] = str(folder.path)


def _server(
    layout: Layout, *, host: str, port: int, has_plugin: bool, access: Access | None
) -> Any:  # noqa: ANN401
    """TensorBoard's own server, ready to serve; tensorboard has no types."""
    from tensorboard import default, program

    for noisy in ("tensorboard", "werkzeug", "pytorch_profiler"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    static = None
    if has_plugin:
        _keep_temporary_files_together()
        patch_loading()
        patch_pages()
        spec = find_spec(_PLUGIN)
        static = Path(str(spec.origin)).parent / "static" if spec else None

    class Server(GuardedServer, program.WerkzeugServer):  # type: ignore[misc]
        """werkzeug's server, with limits."""

        readers = own_readers(host)

    def make(app: Any, flags: Any) -> Any:  # noqa: ANN401 - tensorboard has no types
        server = Server(Pages(app, host=host, static=static, access=access), flags)
        theirs = server.RequestHandlerClass
        server.RequestHandlerClass = type("Handler", (GuardedHandler, theirs), {})
        return server

    board = program.TensorBoard(plugins=default.get_plugins(), server_class=make)
    board.configure(
        argv=[None, "--load_fast=false"], logdir=str(layout.folder), host=host, port=port
    )
    try:
        return board._make_server()
    except program.TensorBoardServerException as error:
        raise HaiprofError(f"TensorBoard: {error.msg}") from None


def _follow(run: RunPaths, layout: Layout, stop: threading.Event) -> None:
    """Writes the run's scalars continuously while the job runs, unless its launcher does."""
    manifest = manifest_or_none(run)
    by_launcher = manifest is not None and bool(manifest.options.get("tensorboard"))
    if by_launcher and _is_running(run):
        return

    def write() -> None:
        with contextlib.suppress(HaiprofError):  # no step yet, or a damaged rank: no scalars
            write_scalars(
                run, follow=True, every_s=_SCALARS_EVERY_S, folder=layout.folder, stop=stop
            )

    threading.Thread(target=write, name="haiprof-scalars", daemon=True).start()


def _is_running(run: RunPaths | None) -> bool:
    return run is not None and run_header(run, manifest_or_none(run)).state == RUNNING
