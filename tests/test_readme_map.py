"""README's map of the package is the first line of every module's docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"^    (\s*)(\S+)\s{2,}(.+)$")


def map_lines() -> dict[str, str]:
    """Path and meaning of every line of README's map."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.split("<!-- map -->")[1]
    lines: dict[str, str] = {}
    folders: list[str] = []
    for line in block.splitlines():
        match = LINE.match(line)
        if not match:
            continue
        depth = len(match[1]) // 2
        folders = [*folders[:depth], match[2]]
        lines["".join(folders)] = match[3].strip()
    return lines


def first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{path} has no docstring"
    return docstring.splitlines()[0]


def test_map_names_every_part_with_its_docstring() -> None:
    package = ROOT / "haiprof"
    expected = {"haiprof/": first_line(package / "__init__.py")}
    for path in sorted(package.iterdir()):
        if path.suffix == ".py" and path.name != "__init__.py":
            expected[f"haiprof/{path.name}"] = first_line(path)
        elif (path / "__init__.py").exists():
            expected[f"haiprof/{path.name}/"] = first_line(path / "__init__.py")
            for module in sorted(path.glob("*.py")):
                if module.name != "__init__.py":
                    expected[f"haiprof/{path.name}/{module.name}"] = first_line(module)
            for inner in sorted(path.glob("*/**/__init__.py")):
                folder = inner.parent.relative_to(ROOT).as_posix()
                expected[f"{folder}/"] = first_line(inner)
    assert map_lines() == expected


def test_links_in_the_documents_exist() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
