"""Ten questions that an engineer asks of a job's traces, each answered by one command.

    python benchmarks/ten_questions.py [FOLDER_OF_TRACES]

The traces are the 8-rank DLRM set; where it holds no answer by its recording (it has one step, and
no memory events), the answer is that, and the question is asked of a trace that has it too. Each
command is a process of its own, started twice: the second time, with warm caches, counts.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "shared" / "traces"
RESULT = Path(__file__).parent / "results" / "ten_questions.md"
LIMIT_S = 3.0


@dataclass(frozen=True)
class Question:
    """One question, the command that answers it, and where in its output the answer stands."""

    asked: str
    command: str
    """With the folder of traces left out of paths."""
    heads: tuple[str, ...]
    """Beginnings or parts of lines that the answer begins with."""
    lines: int = 4


QUESTIONS = (
    Question("Which kernel takes the time?", "trace-report dlrm_v100_8ranks",
             ("Kernels, the longest",), 4),
    Question("How much communication is exposed, and why?", "functions dlrm_v100_8ranks",
             ("Communication: ",), 8),
    Question("Which layer?", "modules dlrm_v100_8ranks", ("Where the time goes",), 6),
    Question("MFU?", "efficiency dlrm_v100_8ranks", ("rank 0,",), 3),
    Question("Who is late?", "trace-report dlrm_v100_8ranks", ("who is late",), 4),
    Question("What fills memory at its peak?", "memory-timeline dlrm_v100_8ranks",
             ("haiprof: error", "haiprof: hint"), 1),
    Question("What fills memory at its peak? (a trace that recorded it)",
             "memory-timeline tl_h100_qwen05_mem_stack", ("cuda 0, by class of module",), 6),
    Question("Is it the loader?", "what-if dlrm_v100_8ranks --faster loader:2x",
             ("step ", "Predictions"), 3),
    Question("What would a 2x all-reduce give?",
             "what-if dlrm_v100_8ranks --faster collective=all_reduce:2x",
             ("step ", "Predictions"), 3),
    Question("What changed?", "trace-diff hta_diff_control_a100_r3of8 hta_diff_test_v100_r1of2",
             ("",), 6),
    Question("What is lost to the host?", "critical-path dlrm_v100_8ranks",
             ("What it consists of",), 5),
)  # fmt: skip


def ask(question: Question, folder: Path) -> tuple[str, float, float, int]:
    """The command's answer, seconds of its second run, of the processor too, and exit status."""
    words = [str(folder / word) if (folder / word).is_dir() else word
             for word in shlex.split(question.command)]  # fmt: skip
    environment = {**os.environ, "COLUMNS": "100"}
    for _ in range(2):
        start, before = time.perf_counter(), _children_s()
        done = subprocess.run(
            [sys.executable, "-m", "haiprof", *words], capture_output=True, text=True,
            env=environment, check=False,
        )  # fmt: skip
        seconds, cpu_s = time.perf_counter() - start, _children_s() - before
    text = (done.stdout + done.stderr).replace(f"{folder}/", "")
    return _answer(text, question), seconds, cpu_s, done.returncode


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _answer(text: str, question: Question) -> str:
    lines = [line.rstrip() for line in text.splitlines()]
    found: list[str] = []
    for head in question.heads:
        at = next((i for i, line in enumerate(lines) if line.strip() and head in line), None)
        if at is not None:
            found += lines[at : at + question.lines]
    return "\n".join(dict.fromkeys(found)) or "(no answer found in the output)"


def main() -> None:
    """Asks all, prints, and stores the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    lines = [
        "# Ten questions on traces", "",
        "Made by `benchmarks/ten_questions.py`; seconds of the whole command with warm caches; "
        f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.", "",
    ]  # fmt: skip
    slow = 0
    for question in QUESTIONS:
        answer, seconds, cpu_s, status = ask(question, folder)
        slow += cpu_s > LIMIT_S
        lines += [f"## {question.asked}", "",
                  f"`haiprof {question.command}`: {seconds:.2f} s ({cpu_s:.2f} s of "
                  f"the processor), exit status {status}", "",
                  "```", answer, "```", ""]  # fmt: skip
        print("\n".join(lines[-7:]), flush=True)
    lines.append(
        f"{len(QUESTIONS) - slow} of {len(QUESTIONS)} commands in under {LIMIT_S:g} s of the CPU."
    )
    print(lines[-1])
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
