"""Sampled stacks on disk: kinds and codes of lines in stacks.jsonl and worker-N.jsonl.

Their fields: docs/how-it-works/before.md.
"""

from __future__ import annotations

STACKS_VERSION = 1
# History
# 1: frames and stacks by number, samples as arrays beside each other; `lock_wait`, the time since
#    the look before in `others`, `run_us`, `queue_us`, `wait` and expressions were added

HEADER, SAMPLES, END = "stacks", "samples", "end"
"""What a line is, in its field `type`: the first line of a process, its samples, its last line."""
FOLDED_WORKERS = "folded"
"""The first line of workers-folded.jsonl: `first_bytes`, by worker, is where its own file goes on.
A part of its old samples follows as of one process, whose pid is negative; then header, frames and
stacks of the process whose file goes on."""

INDEPENDENT, RECURRENCE, LAYERS, NO_GRAD = 1, 2, 3, 4
"""What a loop is: its rounds do not need one another, or they do, or they do not and each calls
another layer (the two low bits); no gradients are recorded."""
OPERATIONS_BIT = 3
"""From that bit on: how many calls, items and sums its text has; a round does each or more."""
LOCK_ELSEWHERE, LOCK_WAITED_FOR, LOCK_HELD, LOCK_UNKNOWN = 0, 1, 2, -1
"""How the training thread stood to the interpreter lock when a sample was due."""
LOCK_STATES = "01h-"  # the letters of `lock_wait` for these
WAITS = (
    "none", "file", "socket", "pipe", "lock", "sleep", "poll", "other", "fault",
)  # fmt: skip
"""What the thread waited for, by number: nothing, as it was on a core or ready for one; a lock, the
interpreter's among them; several descriptors (poll); memory (fault). -1: not known."""
WAIT_UNKNOWN = -1
WAIT_LETTERS = "0fsplzmov-"  # the letters of `wait` for these, the last for what is not known
LEFT_OUT = -1  # number of the stack of samples whose stacks were too many to be told apart
FILE_LIMIT_BYTES = 4 << 20
"""A worker's file takes no more room: a job that starts workers each minute goes on for days."""
