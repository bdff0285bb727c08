"""Process groups by the part of the job that they serve: data, tensor, pipeline parallel."""

from __future__ import annotations

import json
import re

import polars as pl

from haiprof.trace_format.kineto.rank_trace import Trace

WHOLE_JOB, PIPELINE = "whole job", "pipeline parallel"
# Words of a description, in the order in which a part is named. DeviceMesh describes a group as
# `mesh_` and its dimension's name, which torchtitan calls dp_replicate, tp ...; Megatron-Core's
# descriptions are those of parallel_state.py, such as TENSOR_MODEL_PARALLEL_GROUP.
_WORDS = (
    ("data", r"e?dp|e?fsdp|hsdp|ddp|data"),
    ("tensor", r"e?tp|tensor"),
    ("pipeline", r"pp|pipeline|pipe"),
    ("context", r"cp|context"),
    ("sequence", r"sp|ulysses|sequence"),
    ("expert", r"ep|expert"),
)
# Not a dimension of its own: what follows it is, among the ranks that hold the same experts.
_OF_EXPERTS = r"expert_(?=data|tensor_parallel)|(?<=dp)_(?:shard_)?(?:mod|in)_ep"

GROUPS_SCHEMA = {
    "process_group": pl.String,
    "description": pl.String,
    "part": pl.String,
    "backend": pl.String,
    "group_size": pl.Int64,
    "group_ranks": pl.String,
}


def part_of(description: str | None) -> str | None:
    """The part of the job that a group of this description serves; None where it does not say."""
    text = (description or "").lower()
    if text == "default_pg":
        return WHOLE_JOB
    plain = re.sub(_OF_EXPERTS, "", text)
    words = re.split(r"[^a-z]+", plain)
    found = [name for name, sign in _WORDS if any(re.fullmatch(sign, word) for word in words)]
    return f"{' and '.join(found)} parallel" if found else None


def process_group_table(trace: Trace) -> pl.DataFrame:
    """The process groups that a rank belongs to, as `torch.profiler` lists them."""
    said = trace.metadata.get("distributedInfo")
    listed = said.get("pg_config") if isinstance(said, dict) else None
    rows = [_group(each) for each in listed or () if isinstance(each, dict)]
    return pl.DataFrame(rows, schema=GROUPS_SCHEMA, orient="row").unique(
        "process_group", keep="first", maintain_order=True
    )


def with_part(collectives: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Collectives with the `part` of their `process_group`, and its ranks if only that has them."""
    listed = groups.select(
        "process_group", "part", listed_ranks="group_ranks", listed_size="group_size"
    )
    found = collectives.join(listed, on="process_group", how="left", maintain_order="left")
    return found.with_columns(
        group_ranks=pl.coalesce("group_ranks", "listed_ranks"),
        group_size=pl.coalesce("group_size", "listed_size"),
    ).drop("listed_ranks", "listed_size")


def has_several_groups(groups: pl.DataFrame) -> bool:
    """Whether a collective may belong to more than one of the rank's groups."""
    return groups.filter(pl.col("group_size") > 1).height > 1


def the_only_group(groups: pl.DataFrame) -> dict[str, object] | None:
    """The one group with other ranks in it, where there is just one; else None."""
    several = groups.filter(pl.col("group_size") > 1)
    return several.row(0, named=True) if several.height == 1 else None


def _group(each: dict[str, object]) -> tuple[object, ...]:
    name, said, backend = each.get("pg_name"), each.get("pg_desc"), each.get("backend_config")
    description = said if isinstance(said, str) and said not in ("", "undefined") else None
    ranks = each.get("ranks")
    known = isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
    size = len(ranks) if isinstance(ranks, list) and known else None
    return (
        name if isinstance(name, str) else None,
        description,
        part_of(description),
        backend if isinstance(backend, str) else None,
        size,
        json.dumps(ranks) if known else None,
    )
