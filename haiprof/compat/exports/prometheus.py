"""The last value of every counter in Prometheus' text format, with the time of its sample.

Source: Prometheus, "Exposition formats", text format 0.0.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from haiprof.base.units import NS_PER_MS
from haiprof.run_analysis.raw_counters import RawSeries
from haiprof.run_format.otel_names import instrument
from haiprof.run_format.prometheus_names import Family, Sample, families, series_labels


def last_values(series: Iterable[RawSeries], *, run: str) -> list[Family]:
    """The samples that Prometheus would have scraped last."""
    samples = []
    for each in series:
        meaning = instrument(each.source, each.column.name)
        labels = series_labels(
            meaning,
            run=run,
            host=each.host,
            keys=each.keys,
            key=each.key,
            entity=each.entity,
            rank=each.rank,
        )
        value = each.values[-1].item() / meaning.divisor
        time_ns = int(each.time_ns[-1])
        samples.append(Sample(instrument=meaning, labels=labels, value=value, time_ns=time_ns))
    return families(samples)


def exposition(found: Iterable[Family]) -> Iterator[str]:
    """The text format, family by family."""
    for family in found:
        name = family.instrument.prometheus_sample_name
        kind = "counter" if family.instrument.kind == "counter" else "gauge"
        yield f"# HELP {name} {_escape(family.instrument.description)}\n# TYPE {name} {kind}\n"
        for sample in family.samples:
            labels = ",".join(f'{k}="{_quote(v)}"' for k, v in sample.labels.items())
            yield f"{name}{{{labels}}} {sample.value!r} {sample.time_ns // NS_PER_MS}\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quote(text: str) -> str:
    return _escape(text).replace('"', r"\"")
