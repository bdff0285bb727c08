"""Execution traces beside timelines: which node is which operator, and what it waited for."""
