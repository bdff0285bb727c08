"""Sampled stacks on disk: what each field of a line in stacks.jsonl and workers/N.jsonl means."""

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

HEADER_FIELDS = {
    "version": "of this format",
    "pid": "the process; one file holds several DataLoader workers of the same number in turn",
    "worker": "number of the DataLoader worker; null for the training process",
    "time_ns": "CLOCK_MONOTONIC ns",
    "hz": "samples per second at the start",
    "libraries": "folders that hold installed code: the standard library, torch",
}
"""The fields of a header line."""
SAMPLE_FIELDS = {
    "pid": "the process",
    "time_ns": "CLOCK_MONOTONIC ns that the offsets count from",
    "first_frame": "number of the first frame in `frames`: those of a process count from 0",
    "frames": "[file, line, function, first line of the function, expression, number of the "
    "statement on that line, line of the loop around it, what that is], each written once; the "
    "last four for code of the user's own alone, where they are known (Python 3.11 on), and up to "
    "the last one that is not 0",
    "first_stack": "number of the first stack in `stacks`: those of a process count from 1",
    "stacks": "[parent, frame]: a stack is its caller's stack and one frame; 0 has no frames",
    "offset_us": "when each sample was taken",
    "late_us": "how long each sample came after its time: it waited for the interpreter or a core",
    "stack": "the stack of each sample; 0: no Python code ran; -1: left out, there were too many",
    "lock_wait": "a letter for each sample: 1 where the training thread waited for the interpreter "
    "lock, which another thread held, h where it held it itself, 0 where neither, - where nobody "
    "looked; left out without any",
    "run_us": "CPU time of the sampled thread since the sample before; -1 where it is not known",
    "queue_us": "how long it waited for a core since it was last asked: -1 where nobody asked, as "
    "the thread had a core nearly all the time; left out without any",
    "wait": "a letter for each sample, of WAIT_LETTERS: what the thread waited for when it was "
    "due; left out without any",
    "weight_us": "the time that each sample stands for, of folded ones: others stand for the time "
    "to those beside them; left out without any",
    "others": "[offset_us, thread, stack, share of a core in 1/1000, us since the look before]: "
    "other threads that were busy, and all where the training thread waited for a lock",
    "threads": "[number, name] of the threads in `others`, each written once",
    "cpu_ns": "CPU time of the sampling thread so far, without the garbage collections on it",
}  # fmt: skip
"""The fields of a line of samples."""

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
