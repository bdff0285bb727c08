"""Servers on this machine: TensorBoard, Perfetto, and what serves pages."""
