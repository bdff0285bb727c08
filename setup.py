"""The one compiled part of haiprof; without a compiler it is left out, and loading takes longer."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "haiprof.traces._native",
            ["haiprof/traces/native.c"],
            optional=True,
        )
    ]
)
