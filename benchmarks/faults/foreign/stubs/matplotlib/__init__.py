"""Figures that are not drawn: the real package is not installed."""


def use(backend):
    return None
