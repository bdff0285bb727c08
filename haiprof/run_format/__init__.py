"""The run directory: the one interface between the job and everything that reads it."""
