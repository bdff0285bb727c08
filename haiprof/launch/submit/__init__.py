"""Submission: one training job, started in the background here or by an engine on many nodes."""
