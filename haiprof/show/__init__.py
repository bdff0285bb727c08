"""Presentation of results: terminal views, the verdict card, web pages, TensorBoard scalars."""
