"""Types of the C extension `haiprof.trace_format._plain_pickle`, built from plain_pickle.c."""

VERSION: int

def is_plain(content: bytes, /) -> bool: ...
