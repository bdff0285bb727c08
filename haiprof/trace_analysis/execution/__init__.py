"""Execution traces joined with timelines: which node is which operator, and its waits."""
