"""From a run directory to frames: no drawing, no printing."""
