"""Files are changed by one module alone: no other writes, renames or removes by itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "haiprof"
SAFE_FILES = PACKAGE / "base" / "safe_files.py"
MODULES = sorted(PACKAGE.rglob("*.py"))

# What changes a file system: by the function's name, whatever it is called on.
FILE_CALLS = {
    "unlink", "rmdir", "mkdir", "makedirs", "removedirs", "rmtree", "copytree", "copyfile", "copy2",
    "mkdtemp", "mkstemp", "TemporaryDirectory", "NamedTemporaryFile", "TemporaryFile", "mkfifo",
    "mknod", "symlink", "symlink_to", "hardlink_to", "link_to", "write_text", "write_bytes",
    "touch", "chmod", "lchmod", "chown", "lchown", "renames", "rename", "replace",
}  # fmt: skip
OS_CALLS = {"remove", "link", "truncate"}
SHUTIL_CALLS = {"move", "copy", "make_archive", "unpack_archive"}
CREATING = {"O_CREAT", "O_TRUNC", "O_TMPFILE"}
# Of polars: they write to a path or into a file object, which the call does not tell.
FRAME_CALLS = {
    "write_parquet", "write_csv", "write_ipc", "write_ipc_stream", "write_ndjson", "write_avro",
    "write_excel", "write_delta", "sink_parquet", "sink_csv", "sink_ipc", "sink_ndjson",
}  # fmt: skip
ALLOWED = {
    ("in_job/payload.py", "os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC"):
        "where the hook is not put in, nothing of haiprof is loaded; a new file in boot/, no link",
    ("in_job/boot/sitecustomize.py", "os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | "
                                     "os.O_NONBLOCK | os.O_CLOEXEC"):
        "says that haiprof could not be loaded; in boot/, which is the owner's alone, and no link",
    ("run_analysis/folding.py", "open('/proc/self/oom_score_adj', 'w', encoding='ascii')"):
        "the kernel's own file of this process",
    ("cli/mcp.py", "tempfile"): "an answer of another command, without a name",
    ("cli/mcp.py", "tempfile.TemporaryFile()"): "an answer of another command, without a name",
    ("in_job/preflight_probe.py", "tempfile"): "a file without a name, to measure the disk",
    ("in_job/preflight_probe.py", "tempfile.TemporaryFile(dir=folder)"):
        "a file without a name, to measure the disk",
    ("cli/skill.py", "path.parent.mkdir(parents=True, exist_ok=True)"):
        "in a folder that the user named",
    ("in_job/loader_trial.py", "open(os.devnull, 'wb')"):
        "a checkpoint of a trial goes nowhere",
    ("compat/exports.py", "frame.write_parquet(file)"):
        "into a file that the caller opened",
    ("trace_analysis/report_cache.py", "answer.write_ipc_stream(buffer, "
                                       "compression='uncompressed' if plain else 'lz4')"):
        "into memory",
    ("trace_format/kineto/cache.py", "frame.write_ipc_stream(buffer, compression='lz4')"):
        "into memory",
}  # fmt: skip
"""What else there is, and why it may be."""


def _names_of_another_meaning(call: ast.Call, name: str) -> bool:
    """`rename` of a frame and `replace` of a text or a frame: their arguments tell."""
    if name not in ("rename", "replace") or call.keywords:
        return name in ("rename", "replace") and call.keywords[0].arg not in ("target", "dst")
    if _is_on_os(call.func):
        return False
    literal = (ast.Dict, ast.DictComp, ast.Constant)
    return len(call.args) > 1 or (len(call.args) == 1 and isinstance(call.args[0], literal))


def _is_on_os(function: ast.expr) -> bool:
    return _is_of("os", function)


def _is_of(module: str, function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == module
    )


def _creates_by_flags(node: ast.AST) -> bool:
    """Flags of `os.open` that make or empty a file, with others or alone."""
    parts = ast.walk(node) if isinstance(node, ast.BinOp) else [node]
    return any(isinstance(each, ast.Attribute) and each.attr in CREATING for each in parts)


def _writes_a_frame(call: ast.Call, name: str) -> bool:
    """A method of a frame that is told where to: without, it returns what it would write."""
    is_told = call.args or any(word.arg in ("file", "path", "target") for word in call.keywords)
    return isinstance(call.func, ast.Attribute) and name in FRAME_CALLS and bool(is_told)


def _opens_for_writing(call: ast.Call, name: str) -> bool:
    """`open`, `Path.open`, `gzip.open`, `FileIO` and `GzipFile` with a mode that writes.

    `os.fdopen` takes descriptors alone: of what `safe_files` has opened.
    """
    if name == "GzipFile":  # within another file: it is written to that one
        return len(call.args) < 4 and not any(word.arg == "fileobj" for word in call.keywords)
    if name not in ("open", "FileIO"):
        return False
    modes = [*call.args[:2], *(word.value for word in call.keywords if word.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
    return any(
        isinstance(text, str) and set(text) <= set("rwaxbt+") and set(text) & set("wax+")
        for text in texts
    )


def changes_of_files(path: Path) -> dict[str, int]:
    """Every place in a module that changes the file system itself: its text and line."""
    found: dict[str, int] = {}
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    inner = {part for node in nodes if isinstance(node, ast.BinOp) for part in _parts(node)}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {a.name: node.lineno for a in node.names if a.name == "tempfile"}
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil", "tempfile"):
            wrong = FILE_CALLS | OS_CALLS | SHUTIL_CALLS
            found |= {a.name: node.lineno for a in node.names if a.name in wrong}
        if (node not in inner and _creates_by_flags(node)) or (
            isinstance(node, ast.Call) and _changes_files(node)
        ):
            found[ast.unparse(node)] = node.lineno  # type: ignore[attr-defined]
    return found


def _parts(node: ast.BinOp) -> list[ast.AST]:
    return [part for part in ast.walk(node) if part is not node]


def _changes_files(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    changes = isinstance(call.func, ast.Attribute) and name in FILE_CALLS
    return (
        (changes and not _names_of_another_meaning(call, name))
        or (name in OS_CALLS and _is_on_os(call.func))
        or (name in SHUTIL_CALLS and _is_of("shutil", call.func))
        or _opens_for_writing(call, name)
        or _writes_a_frame(call, name)
    )


def test_files_are_changed_by_safe_files_alone() -> None:
    """But for what is named in ALLOWED, each with its reason."""
    found = {
        (path.relative_to(PACKAGE).as_posix(), text): line
        for path in MODULES
        if path != SAFE_FILES
        for text, line in changes_of_files(path).items()
    }
    assert {place: line for place, line in found.items() if place not in ALLOWED} == {}
    assert set(ALLOWED) - set(found) == set(), "gone: take it from the list"
    assert changes_of_files(SAFE_FILES)


@pytest.mark.parametrize(
    "line",
    ["shutil.rmtree(path)", "os.unlink(path)", "path.unlink(missing_ok=True)", "os.rename(a, b)",
     "path.rename(other)", "path.replace(path.with_name('x'))", "os.replace(a, b)", "os.remove(a)",
     "open(f'{x}', 'w')", "path.open('ab')", "open(a, mode='x')", "gzip.open(path, 'wb')",
     "gzip.GzipFile(path, 'wb')", "path.write_text('')", "from os import unlink", "import tempfile",
     "os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)", "path.mkdir()", "path.replace(target=b)",
     "os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)", "os.open(path, os.O_CREAT)",
     "FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW", "shutil.move(a, b)",
     "shutil.copy(a, b)", "from shutil import move", "io.FileIO(path, 'w')", "FileIO(a, mode='xb')",
     "frame.write_parquet(path)", "frame.write_csv('x.csv')", "frame.lazy().sink_csv(path)",
     "frame.write_ipc(file=path)"],
)  # fmt: skip
def test_a_change_of_files_is_seen(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert changes_of_files(tmp_path / "module.py")


@pytest.mark.parametrize(
    "line",
    ["'a'.replace('a', 'b')", "frame.rename({'a': 'b'})", "frame.rename(mapping=names)",
     "series.rename('a')", "column.replace(old=names)", "replace(options, time_s=1)",
     "open(path, 'rb')", "open(path)", "gzip.GzipFile('', 'wb', 1, file)", "path.open()",
     "os.fdopen(fd, 'w')", "webbrowser.open(url)",
     "os.open(path, os.O_RDONLY)", "options.copy()", "shutil.copyfileobj(a, b)",
     "frame.write_csv(include_header=False)", "write_csv(frame, file)", "io.FileIO(number)",
     "player.move(1)"],
)  # fmt: skip
def test_what_changes_no_file_is_left_alone(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert changes_of_files(tmp_path / "module.py") == {}
