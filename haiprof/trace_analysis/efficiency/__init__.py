"""Efficiency: the work of operators from their recorded shapes, against what the device can do."""
