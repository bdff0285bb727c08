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
CREATING = {"O_CREAT", "O_TRUNC", "O_TMPFILE"}
CAREFUL = {"O_EXCL", "O_NOFOLLOW"}


def _names_of_another_meaning(call: ast.Call, name: str) -> bool:
    """`rename` of a frame and `replace` of a text or a frame: their arguments tell."""
    if name not in ("rename", "replace") or call.keywords:
        return name in ("rename", "replace") and call.keywords[0].arg not in ("target", "dst")
    if _is_on_os(call.func):
        return False
    literal = (ast.Dict, ast.DictComp, ast.Constant)
    return len(call.args) > 1 or (len(call.args) == 1 and isinstance(call.args[0], literal))


def _is_on_os(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "os"
    )


def _opens_for_writing(call: ast.Call, name: str) -> bool:
    """`open`, `Path.open`, `gzip.open` and `GzipFile` with a mode that writes.

    `os.fdopen` takes descriptors alone: of what `safe_files` has opened.
    """
    if name == "GzipFile":  # within another file: it is written to that one
        return len(call.args) < 4 and not any(word.arg == "fileobj" for word in call.keywords)
    if name != "open":
        return False
    modes = [*call.args[:2], *(word.value for word in call.keywords if word.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
    return any(
        isinstance(text, str) and set(text) <= set("rwaxbt+") and set(text) & set("wax+")
        for text in texts
    )


def changes_of_files(path: Path) -> list[str]:
    """Every place in a module that changes the file system itself, as `line: call`."""
    found = []
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    inner = {node.left for node in nodes if isinstance(node, ast.BinOp)}
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [f"{node.lineno}: {a.name}" for a in node.names if a.name == "tempfile"]
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil", "tempfile"):
            wrong = FILE_CALLS | OS_CALLS
            found += [f"{node.lineno}: {a.name}" for a in node.names if a.name in wrong]
        if isinstance(node, ast.BinOp) and node not in inner:
            flags = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
            if flags & CREATING and not flags & CAREFUL:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        changes = isinstance(node.func, ast.Attribute) and name in FILE_CALLS
        if (
            (changes and not _names_of_another_meaning(node, name))
            or (name in OS_CALLS and _is_on_os(node.func))
            or _opens_for_writing(node, name)
        ):
            found.append(f"{node.lineno}: {ast.unparse(node)[:90]}")
    return found


def test_files_are_changed_by_safe_files_alone() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): changes_of_files(path) for path in MODULES}
    assert found.pop(SAFE_FILES.relative_to(PACKAGE).as_posix())
    assert {name: changes for name, changes in found.items() if changes} == {}


@pytest.mark.parametrize(
    "line",
    ["shutil.rmtree(path)", "os.unlink(path)", "path.unlink(missing_ok=True)", "os.rename(a, b)",
     "path.rename(other)", "path.replace(path.with_name('x'))", "os.replace(a, b)", "os.remove(a)",
     "open(f'{x}', 'w')", "path.open('ab')", "open(a, mode='x')", "gzip.open(path, 'wb')",
     "gzip.GzipFile(path, 'wb')", "path.write_text('')", "from os import unlink", "import tempfile",
     "os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)", "path.mkdir()", "path.replace(target=b)"],
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
     "os.open(path, os.O_RDONLY)"],
)  # fmt: skip
def test_what_changes_no_file_is_left_alone(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert changes_of_files(tmp_path / "module.py") == []
