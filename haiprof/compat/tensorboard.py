"""TensorBoard on a run, until Ctrl-C: the folder that it reads, scalars, traces by window."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from haiprof.base import safe_files
from haiprof.base.errors import HaiprofError, MissingExtraError, TraceFormatError, convert_os_errors
from haiprof.base.local_http import GuardedHandler, GuardedServer, own_readers
from haiprof.base.stop_signal import stop_event
from haiprof.compat.torch_profiler.pages import Pages
from haiprof.compat.torch_profiler.patches import patch_loading, patch_pages, stop_loading
from haiprof.run_format.layout import PLAIN_TRACE_SUFFIX, TRACE_SUFFIX, RunPaths
from haiprof.show.run_header import manifest_or_none, run_header
from haiprof.show.scalars import write_scalars
from haiprof.show.servers import Access, Serving, free_port, new_access, url_of
from haiprof.trace_analysis.files import Worker, files_by_window

_UNSAFE = re.compile(r"[^A-Za-z0-9-]+")
_FOLDER = "window"
_WINDOW = re.compile(_FOLDER + r"\d+")
_LINK = re.compile(r"rank\d+_[A-Za-z0-9-]+" + re.escape(PLAIN_TRACE_SUFFIX) + r"(\.gz)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What TensorBoard reads."""

    folder: Path
    below: Path  # The run, or the temporary folder: within it no link is followed
    source: Path  # Where the traces themselves are
    is_temporary: bool = False  # Whether it is removed at the end, as the run is not the user's own

    @property
    def traces(self) -> Path:
        """Below it one folder per window, with a link to each rank's trace."""
        return self.folder / "traces"

    def link_windows(self, *, whole_only: bool) -> int:
        """Links the windows that are not yet linked."""
        try:
            found = files_by_window(self.source)
        except TraceFormatError:
            return 0
        linked = 0
        for number, members in enumerate(found):
            folder = self.traces / f"{_FOLDER}{number}"
            size = max((member.world_size or 1 for member in members), default=1)
            if not folder.is_dir():
                if whole_only and len({member.rank for member in members}) < size:
                    continue
                self._link(folder, members)
            linked += 1
        return linked

    def _link(self, folder: Path, members: Sequence[Worker]) -> None:
        # Made elsewhere first: TensorBoard must not find it incomplete.
        fresh = safe_files.MadeFolder.temporary(".haiprof-", self.below)
        digits, names = len(str(max(member.rank for member in members))), set[str]()
        try:
            for member in members:  # by the names that torch-tb-profiler takes its workers from
                host = _UNSAFE.sub("-", member.host or "").strip("-")[:64] or "host"
                stem, number = f"rank{member.rank:0{digits}}_{host}", 1
                ending = TRACE_SUFFIX if member.is_packed else PLAIN_TRACE_SUFFIX
                name = stem + ending
                while name in names:
                    number += 1
                    name = f"{stem}-{number}{ending}"
                names.add(name)
                safe_files.make_link(fresh.path / name, member.path.resolve(), below=self.below)
            fresh.move(folder)
        except OSError:
            fresh.remove()
            raise

    def unlink_windows(self) -> None:
        """Removes the links, and the folders that held nothing else."""
        for window in _names(self.traces, self.below):
            folder = self.traces / window
            if not _WINDOW.fullmatch(window) or folder.is_symlink():
                continue
            for name in _names(folder, self.below):
                if _LINK.fullmatch(name) and (folder / name).is_symlink():
                    safe_files.remove_file(folder / name, below=self.below)
            with contextlib.suppress(OSError):  # it holds files of others
                safe_files.remove_folder(folder, below=self.below)
        with contextlib.suppress(OSError):
            safe_files.remove_folder(self.traces, below=self.below)


def _names(folder: Path, below: Path) -> list[str]:
    try:
        return safe_files.list_folder(folder, below=below)
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def open_layout(run: RunPaths | None, source: Path) -> Iterator[Layout]:
    """The folder, while TensorBoard runs."""
    with contextlib.ExitStack() as stack:
        if run is not None and _is_ours(run):
            layout = Layout(folder=run.tensorboard, below=run.root, source=source)
        else:
            base = stack.enter_context(safe_files.MadeFolder.temporary("haiprof-tensorboard-"))
            layout = Layout(folder=base / "log", below=base, source=source, is_temporary=True)
        try:
            with convert_os_errors(HaiprofError, f"{layout.folder}: cannot be written"):
                layout.unlink_windows()  # of an earlier server that was killed
                safe_files.make_folder(layout.traces, below=layout.below)
                yield layout
        finally:
            with contextlib.suppress(OSError):
                layout.unlink_windows()


def _is_ours(run: RunPaths) -> bool:
    """Whether only this user can write event files and links there."""
    try:
        safe_files.make_folder(run.tensorboard / "traces", below=run.root, own=True)
    except OSError:
        return False
    return os.access(run.root, os.W_OK) and os.access(run.tensorboard, os.W_OK)


_SCALARS_EVERY_S = 5.0
_PLUGIN = "torch_tb_profiler"
_INSTALL_PLUGIN = "pip install 'haiprof[torch-tb-profiler]', or haiprof export --to perfetto"


def serve_tensorboard(
    run: RunPaths | None, source: Path, *, host: str, port: int,
    ready: Callable[[Serving, Sequence[str]], None],
) -> None:  # fmt: skip
    """Runs TensorBoard until SIGINT or SIGTERM; what is served is told with notes for people."""
    has_plugin = _check_extras(run)
    if run is None:
        files_by_window(source)  # or there is nothing that could ever be shown
    with open_layout(run, source) as layout, stop_event() as stop:
        count = layout.link_windows(whole_only=_is_running(run)) if has_plugin else 0
        if run is not None:
            _follow(run, layout, stop)
        number = free_port(host, port)
        # TensorBoard has no access control: this server asks the kernel, or wants a token.
        access = new_access(host, number, is_open=own_readers(host) is not None)
        server = _server(layout, host=host, port=number, has_plugin=has_plugin, access=access)
        name = "haiprof-tensorboard"
        threading.Thread(target=server.serve_forever, name=name, daemon=True).start()
        try:
            notes = [] if count else ["no traces yet"]
            if not has_plugin:
                notes = [f"traces are not shown without torch-tb-profiler: {_INSTALL_PLUGIN}"]
            if layout.is_temporary:
                notes.append(f"{layout.folder} is temporary and goes away")
            who = "you and root on this machine" if access.is_open else "who has the address"
            url = url_of(host, number, access)
            ready(Serving(url=url, port=number), [*notes, f"TensorBoard is at {url} for {who}"])
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
            "TensorBoard shows no traces without torch-tb-profiler", hint=_INSTALL_PLUGIN
        )
    return has_plugin


def _server(layout: Layout, *, host: str, port: int, has_plugin: bool, access: Access) -> Any:  # noqa: ANN401
    """TensorBoard's own server, ready to serve; tensorboard has no types."""
    from tensorboard import default, program

    for noisy in ("tensorboard", "werkzeug", "pytorch_profiler"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    static = None
    if has_plugin:
        # torch-tb-profiler removes its temporary files at exit, but not where closing its cache
        # fails first (a trace was loading): they get a folder that is gone when this process ends.
        # What is registered first runs last: ours comes after its own.
        temporary = safe_files.MadeFolder.temporary("haiprof-tensorboard-")
        atexit.register(temporary.remove)
        vars(sys.modules["tempfile"])["tempdir"] = str(temporary.path)
        patch_loading()
        patch_pages()
        spec = find_spec(_PLUGIN)
        static = Path(str(spec.origin)).parent / "static" if spec else None

    class Server(GuardedServer, program.WerkzeugServer):  # type: ignore[misc]
        """werkzeug's server, with limits."""

        readers = own_readers(host)

    def make(app: Any, flags: Any) -> Any:  # noqa: ANN401 - tensorboard has no types
        server = Server(Pages(app, static=static, access=access), flags)
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
        every_s, folder = _SCALARS_EVERY_S, layout.folder
        with contextlib.suppress(HaiprofError):  # no step yet, or a damaged rank: no scalars
            write_scalars(run, follow=True, every_s=every_s, folder=folder, stop=stop)

    threading.Thread(target=write, name="haiprof-scalars", daemon=True).start()


def _is_running(run: RunPaths | None) -> bool:
    return run is not None and run_header(run, manifest_or_none(run)).is_running
