"""Readings of Linux: machine and processes in /proc, control groups, perf events."""
