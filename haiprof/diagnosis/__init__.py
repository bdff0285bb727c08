"""From frames to findings: what makes the job slow, proved by numbers."""
