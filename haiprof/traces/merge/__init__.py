"""Traces of several ranks in one timeline: the text of each passed through, once, in pieces."""
