from __future__ import annotations

import inspect

import pynvml

from tests.fake_nvml import NVML_ERRORS, FakeNvml


def test_fake_nvml_has_the_functions_of_the_real_one_with_their_parameters() -> None:
    functions = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert functions
    for name in functions:
        real = list(inspect.signature(getattr(pynvml, name)).parameters.values())
        fake = list(inspect.signature(getattr(FakeNvml, name)).parameters.values())[1:]
        assert [p.name for p in fake] == [p.name for p in real[: len(fake)]], name
        required = [p for p in real if p.default is inspect.Parameter.empty]
        assert len(fake) >= len(required), name


def test_fake_nvml_errors_have_the_names_and_codes_of_the_real_ones() -> None:
    for error in NVML_ERRORS:
        real = getattr(pynvml, error.__name__)
        assert issubclass(real, pynvml.NVMLError)
        assert real().value == error.value, error.__name__
