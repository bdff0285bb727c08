"""Beside the job: one table of counters per source, sampled in the launcher's side thread."""
