"""PerfTracker's five reports: what bounds the job by function, and the rank that differs."""
