"""The compiled parts of haiprof; without a compiler they are left out, and plain Python does it."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "haiprof.trace_format.kineto._native",
            ["haiprof/trace_format/kineto/native.c"],
            optional=True,
        ),
        Extension(
            "haiprof.trace_format._plain_pickle",
            ["haiprof/trace_format/plain_pickle.c"],
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "haiprof.in_job._terminate",
            ["haiprof/in_job/terminate.cpp"],
            extra_compile_args=["-std=gnu++17", "-fvisibility=hidden"],
            language="c++",
            optional=True,
        ),
        *(
            Extension(  # loaded by the job's interpreter, which need not be haiprof's own
                f"haiprof.in_job._{name}",
                [f"haiprof/in_job/{source}.c" for source in sources],
                depends=["haiprof/in_job/spans.h", "haiprof/in_job/sampling.h"],
                extra_compile_args=["-fvisibility=hidden"],
                define_macros=[("Py_LIMITED_API", "0x030A0000")],
                py_limited_api=True,
                optional=True,
            )
            for name, sources in (
                ("spans", ("spans", "calls")),
                ("frames", ("frames", "sample_clock")),
            )
        ),
    ]
)
