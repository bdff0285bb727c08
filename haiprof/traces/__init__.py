"""Kineto traces as columns: read once, cached beside the file, nothing dropped in silence."""
