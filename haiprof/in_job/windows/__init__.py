"""Trace windows: torch.profiler around chosen steps of the job, and never in a user's own way."""
