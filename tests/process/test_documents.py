"""Documents say what the code says, link to what exists, and build to a site."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README_LIMIT = 12_000


def test_generated_documents_are_up_to_date() -> None:
    line = [sys.executable, str(ROOT / "scripts" / "generate-docs"), "--check"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_links_in_the_documents_exist() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_files_of_the_code_that_documents_name_exist() -> None:
    folders = ("haiprof", "tests", "benchmarks", "scripts", "examples")
    files = [path for folder in folders for path in ROOT.joinpath(folder).rglob("*")]
    code = [f"/{path.relative_to(ROOT)}" for path in files]
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        if document.name == "CHANGELOG.md":
            continue
        for name in re.findall(r"`([\w/]+\.(?:py|c|cpp))`", document.read_text(encoding="utf-8")):
            known = name in ("sitecustomize.py", "train.py") or any(
                path.endswith(f"/{name}") for path in code
            )
            assert known, f"{document.name} names {name}"


def test_readme_can_be_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8")) < README_LIMIT


@pytest.mark.proof
def test_documents_build_to_a_site_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install 'haiprof[docs]'")
    pytest.importorskip("material", reason="pip install 'haiprof[docs]'")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "fonts.googleapis.com" not in page  # read on clusters without network
