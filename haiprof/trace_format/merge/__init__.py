"""Merges traces of several ranks into one timeline; the text of each is streamed once."""
