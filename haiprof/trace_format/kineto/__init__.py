"""Kineto traces as columns: read once, cached for the user alone, every lost event counted."""
