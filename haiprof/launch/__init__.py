"""Launches a job: its command line, environment, supervision, and submission to clusters."""
