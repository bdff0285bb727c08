"""Every function is there and does nothing."""


def __getattr__(name):
    return lambda *_, **__: None
