"""Function patterns: what bounds a rank, function by function, as in PerfTracker and EROICA."""
