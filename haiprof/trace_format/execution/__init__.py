"""Execution traces of PyTorch (ExecutionTraceObserver): read as frames, written with times."""
