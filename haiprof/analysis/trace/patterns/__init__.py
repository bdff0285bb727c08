"""What bounds a rank, function by function, as PerfTracker and EROICA summarise it."""
