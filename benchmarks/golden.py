"""Compares what every command prints and writes in two trees: `scripts/golden [REVISION]`.

The revision and the working tree read their own copies of tests/data/runs and of the real traces
(HAIPROF_TRACES, else ../shared/traces), with their own home and cache, in one process per 50 calls
of golden_calls.txt. JSON is compared value by value, text (100 columns) line by line, written files
after unpacking. The exit status is 1 where something differs or is missing.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
WORKER = str(REPOSITORY / "benchmarks/golden_worker.py")
INPUTS = ("runs", "runs/*", "traces", "traces/*", "flight_recorder")
CALLS_OF_A_PROCESS, LIMIT_S = 50, 1200
NAMES = "from haiprof.cli.names import COMMANDS; print(*COMMANDS)"
DATA = re.compile(r'<script type="text/plain" id="data">([\w+/=]+)</script>')
CODE = re.compile(r"<script.*?</script>|'sha256-.*?'", re.S)  # of a page, and its digest
# Printed where a command has read for 2 s, and every 10 s: it depends on the machine's load.
PROGRESS = re.compile(r"haiprof: (reading traces; .*|\d+ of \d+ traces read)\n")


def plan(inputs: Sequence[str], commands: set[str]) -> tuple[list[tuple[str, str]], set[str]]:
    """All calls as (input, command line), and the commands that have none and should."""
    calls, known, section, places = [], set(), "", [""]
    for line in Path(__file__).with_name("golden_calls.txt").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
            places = [p for p in inputs if any(fnmatch(p, part) for part in section.split())]
            places = sorted(commands) if section == "help" else places
        elif section.startswith("not"):
            known |= set(line.split())
        elif line and not line.startswith("#"):
            known.add(line.split()[0])
            for end in ("", "--json") if line.endswith("[--json]") else ("",):
                text = line.removesuffix("[--json]") + end
                calls += [(section if section == "help" else place,
                           text.replace("{path}", place).strip()) for place in places]  # fmt: skip
    return list(dict.fromkeys(calls)), commands - known


def unpack(content: bytes, root: str) -> Any:
    """What was printed or written: a JSON value, else lines; the tree's path is masked."""
    data = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    text = PROGRESS.sub("", data.decode(errors="backslashreplace").replace(root, "ROOT"))
    if text.startswith(("{", "[")):
        with suppress(ValueError):
            return json.loads(text)
    if packed := DATA.search(text):
        return {"data": unpack(base64.b64decode(packed[1]), root), "page": CODE.split(text)}
    return text.splitlines()


def differences(before: Any, after: Any, path: str) -> Iterator[tuple[str, str]]:
    """Paths at which two values differ, with both values in short."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            yield from differences(before.get(key, "-"), after.get(key, "-"), f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list):
        for place, pair in enumerate(zip(before, after, strict=False)):
            yield from differences(*pair, f"{path}[{place}]")
        if len(before) != len(after):
            yield f"{path}.length", f"{len(before)} -> {len(after)}"
    elif repr(before) != repr(after):  # 1 is neither 1.0 nor True, and NaN is NaN
        texts = repr(before), repr(after)
        start = max(0, len(os.path.commonprefix(texts)) - 30)  # noqa: RUF071 - by character
        yield path, " -> ".join(text[start : start + 80] for text in texts)


def first_difference(pair: Sequence[Any], allowed: Sequence[str]) -> str:
    """The first one that is not allowed; empty where there is none."""
    for path, values in differences(pair[0], pair[1], ""):
        field = re.sub(r"\[\d+\]", "", path[1:])
        if not any(name in field.split(".") or fnmatch(field, name) for name in allowed):
            return f"{path[1:]}: {values}"
    return ""


class Tree:
    """The package of a revision (or of the working tree), and inputs that it may write into."""

    def __init__(self, root: Path, revision: str | None) -> None:
        self.root, self.package = root, root / "tree"
        git = ["git", "-C", str(REPOSITORY)]
        if revision is None:
            shutil.copytree(REPOSITORY / "haiprof", self.package / "haiprof")
        else:
            self.package.mkdir(parents=True)
            packed = subprocess.run([*git, "archive", revision], check=True, capture_output=True)
            subprocess.run(["tar", "-xC", self.package], input=packed.stdout, check=True)
            for path in (REPOSITORY / "haiprof").rglob("*.so"):
                shutil.copy(path, self.package / path.relative_to(REPOSITORY))
            same = [*git, "diff", "--quiet", revision, "--", "*.[ch]", "*.cpp", "setup.py"]
            if subprocess.run(same).returncode:
                build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
                subprocess.run(build, cwd=self.package, check=True, capture_output=True)
        traces = os.environ.get("HAIPROF_TRACES") or REPOSITORY.parent / "shared/traces"
        data = REPOSITORY / "tests/data"
        for name, folder in (("runs", data / "runs"), ("traces", Path(traces)),
                             ("flight_recorder", data / "flight_recorder")):  # fmt: skip
            if folder.is_dir():
                shutil.copytree(folder, root / name, ignore=shutil.ignore_patterns("reference"))
        found = (sorted(root.glob(name)) for name in INPUTS)
        self.inputs = [str(p.relative_to(root)) for paths in found for p in paths if p.is_dir()]

    def python(self, *words: str) -> str:
        """What a Python process with this package prints."""
        own = {"HOME": f"{self.root}/home", "XDG_CACHE_HOME": f"{self.root}/cache",
               "PYTHONPATH": str(self.package), "PATH": os.environ["PATH"], "COLUMNS": "100",
               "LANG": "C.UTF-8", "TZ": "UTC", "TERM": "dumb"}  # fmt: skip
        done = subprocess.run([sys.executable, *words], cwd=self.root, env=own, text=True,
                              capture_output=True, timeout=LIMIT_S)  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{self.root.name}: {done.stderr[-2000:]}")
        return done.stdout

    def answers(self, lines: Sequence[str]) -> dict[str, dict[str, bytes]]:
        """What each command line printed and wrote, by file."""
        found: dict[str, dict[str, bytes]] = {}
        source, target = self.root / "calls.json", self.root / "found.pickle"
        for start in range(0, len(lines), CALLS_OF_A_PROCESS):
            source.write_text(json.dumps(lines[start : start + CALLS_OF_A_PROCESS]))
            self.python(WORKER, str(self.package), str(source), str(target))
            found |= pickle.loads(target.read_bytes())
            print(f"+ {self.root.name}: {len(found)} of {len(lines)} calls", file=sys.stderr)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/golden")
    parser.add_argument("revision", nargs="?", default="HEAD", help="what the working tree was")
    parser.add_argument("--only", default="*", metavar="GLOB", help="inputs, such as 'runs/two*'")
    parser.add_argument("--commands", nargs="+", metavar="NAME", help="such as verdict rank")
    parser.add_argument("--allow", metavar="FIELD", action="append", default=[],
                        help="may differ: a key, or a path like 'stdout.findings.*'")  # fmt: skip
    options, began = parser.parse_args(), time.monotonic()
    rows: dict[str, list[tuple[str, str, str, bool]]] = {}
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:  # names of one length in both
        trees = (Tree(Path(folder, "before"), options.revision), Tree(Path(folder, "actual"), None))
        old, new = (set(tree.python("-c", NAMES).split()) for tree in trees)
        calls, uncovered = plan(trees[0].inputs, old | new)
        chosen = [call for call in calls if fnmatch(call[0], options.only)
                  and (not options.commands or call[1].split()[0] in options.commands)]  # fmt: skip
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda tree: tree.answers([line for _, line in chosen]), trees))
        for place, line in chosen:
            pair = [{key: unpack(content, str(tree.root)) for key, content in answers[line].items()}
                    for tree, answers in zip(trees, found, strict=True)]  # fmt: skip
            row = place, line, first_difference(pair, options.allow), pair[1]["status"] != ["0"]
            rows.setdefault("help" if place == "help" else line.split()[0], []).append(row)
    missing = [f"{name} is in one of the trees only" for name in sorted(old ^ new)]
    missing += [f"{name} has no call in golden_calls.txt" for name in sorted(uncovered)]
    if "traces" not in trees[0].inputs:
        missing.append("real traces: HAIPROF_TRACES names their folder")
    print("command          inputs  calls  equal  ended with an error, in this tree")
    for name, results in sorted(rows.items()):
        different = [result for result in results if result[2]]
        counts = len({result[0] for result in results}), len(results), len(results) - len(different)
        print(f"{name:16} {counts[0]:6} {counts[1]:6} {counts[2]:6} {sum(r[3] for r in results):6}")
        for place, line, difference, _ in different:
            print(f"  differs on {place}: haiprof {line}\n    {difference}")
    print(*(f"missing: {text}\n" for text in missing), sep="", end="")
    bad = sum(bool(result[2]) for results in rows.values() for result in results)
    seconds = time.monotonic() - began
    print(f"{len(chosen)} calls, {bad} differ, {len(missing)} missing; {seconds:.0f} s")
    return 1 if bad or missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
