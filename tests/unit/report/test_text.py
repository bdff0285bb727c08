from __future__ import annotations

from haiprof.base.units import MISSING
from haiprof.show.text import count_text, fine_ratio_text, number_text, value_text


def test_value_text_shows_the_unit() -> None:
    assert value_text(12_300_000, "ns") == "12.3 ms"
    assert value_text(1.5 * 2**30, "bytes") == "1.50 GiB"
    assert value_text(0.37, "ratio") == "37 %"
    assert value_text(212.0, "watts") == "212 W"
    assert value_text(0.9, "cores") == "0.90 cores"
    assert value_text(400.0, "count") == "400"


def test_value_text_missing_is_a_dash() -> None:
    assert value_text(None, "ns") == MISSING
    assert number_text(None) == MISSING


def test_count_text_one_and_many() -> None:
    assert count_text(1, "rank") == "1 rank"
    assert count_text(0, "rank") == "0 ranks"


def test_fine_ratio_text_small_share_is_not_zero() -> None:
    assert fine_ratio_text(0.000_17) == "0.017 %"
    assert fine_ratio_text(0.0) == "0.0 %"
    assert fine_ratio_text(0.3) == "30 %"
