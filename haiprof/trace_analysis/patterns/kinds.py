"""The kinds of functions in patterns, and which of them a moment counts for; imports nothing."""

from __future__ import annotations

GPU_COMPUTE, COMMUNICATION, MEMORY, RUNTIME, PYTHON = (
    "gpu-compute", "communication", "memory", "runtime", "python",
)  # fmt: skip
PRIORITY = (GPU_COMPUTE, COMMUNICATION, MEMORY, RUNTIME, PYTHON)
"""What runs at the same time counts for the first of these only.

Source: EROICA (arXiv 2506.08528), where GPU computation comes first and Python last, so that what
something above hides costs nothing. Of the kinds between, PerfTracker's reports (seed 001) take
away overlap with computation; here a copy beside communication counts as communication, as the
collective is what other ranks wait for. CUDA runtime calls are a kind of their own, as there.
"""
