"""The compiled parts of haiprof; without a compiler they are left out, and plain Python does it.

All are on the stable ABI of CPython 3.10, so that one wheel fits each later version too. With
HAIPROF_PURE set nothing is compiled, and the wheel fits every machine.
"""

import os

from setuptools import Extension, setup

_PARTS = {
    "trace_format.kineto._native": ["trace_format/kineto/native.c"],
    "trace_format._plain_pickle": ["trace_format/plain_pickle.c"],
    "in_job._spans": ["in_job/spans.c", "in_job/calls.c"],
    "in_job._frames": [
        "in_job/frames.c",
        "in_job/sample_clock.c",
        "in_job/running_place.c",
        "in_job/crash.c",
    ],
    "in_job._terminate": ["in_job/terminate.cpp"],
}

setup(
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    ext_modules=[
        Extension(
            f"haiprof.{name}",
            [f"haiprof/{source}" for source in sources],
            depends=["haiprof/in_job/spans.h", "haiprof/in_job/sampling.h"],
            extra_compile_args=["-fvisibility=hidden"],
            libraries=["dl"],  # of its own before glibc 2.34
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            py_limited_api=True,
            optional=True,
        )
        for name, sources in _PARTS.items()
        if not os.environ.get("HAIPROF_PURE")
    ],
)
