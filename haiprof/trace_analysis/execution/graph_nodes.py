"""Chakra's type of each node: computing, memory, a collective, a send, a receive."""

from __future__ import annotations

import json
import re
from typing import Any

import polars as pl

from haiprof.trace_analysis.classify import MEMORY_CATEGORIES
from haiprof.trace_analysis.collectives import kind_of
from haiprof.trace_format.chakra.messages import (
    COLLECTIVES,
    COMM_COLL,
    COMM_RECV,
    COMM_SEND,
    COMP,
    MEM_LOAD,
    MEM_STORE,
    METADATA,
)

GROUPS_NOTE = "## process_group:init ##"
_KERNEL = re.compile(r"^(?:void )?(?:nccl|rccl|hccl)|nccl(?:Dev)?Kernel|rcclKernel")
_BACKEND = re.compile(r"^(?:nccl|gloo|mpi|ucc|xccl|hccl):")
_TO_DEVICE = re.compile(r"HtoD|Host ?To ?Device|HostToDevice", re.IGNORECASE)
_ANCESTORS = 4  # nccl:all_to_all, record_param_comms, c10d::alltoall_base_ and one more
_ROLES = {"send": COMM_SEND, "receive": COMM_RECV}

TYPE_SCHEMA: dict[str, Any] = {
    "type": pl.Int64,
    "collective_kind": pl.String,
    "comm_bytes": pl.Int64,
    "peer": pl.Int64,
    "tag": pl.Int64,
    "group": pl.String,
}


def with_type(nodes: pl.DataFrame) -> pl.DataFrame:
    """Adds the type of each node."""
    rows = _Rows(nodes)
    found = [rows.type_of(place) for place in range(len(nodes))]
    return nodes.hstack(pl.DataFrame(found, schema=TYPE_SCHEMA, orient="row"))


_Row = tuple[int, str | None, int | None, int | None, int | None, str | None]


class _Rows:
    """The columns that the type depends on, and where parents are."""

    def __init__(self, nodes: pl.DataFrame) -> None:
        self.names = nodes["name"].to_list()
        self.categories = nodes["category"].to_list()
        self.groups = nodes["process_group"].to_list()
        self.collectives = nodes["collective"].to_list()
        self.values, self.types = nodes["input_values"], nodes["input_types"]
        place = {number: at for at, number in enumerate(nodes["node"].to_list())}
        self.parents = [place.get(number, -1) for number in nodes["parent"].to_list()]
        self.launched = {
            self.parents[at] for at, category in enumerate(self.categories)
            if category is not None and _KERNEL.search(self.names[at])
        }  # fmt: skip
        self.only_group = self._only_group()

    def type_of(self, at: int) -> _Row:
        name, category = self.names[at], self.categories[at]
        if name == GROUPS_NOTE:
            return METADATA, None, None, None, None, None
        if category in MEMORY_CATEGORIES:
            kind = MEM_LOAD if _TO_DEVICE.search(name) else MEM_STORE
            return kind, None, None, None, None, None
        pattern = _BACKEND if category is None else _KERNEL
        if not pattern.search(name) or (category is None and at in self.launched):
            return COMP, None, None, None, None, None
        return self._communication(at)

    def _communication(self, at: int) -> _Row:
        chain = [at, *self._above(at)]
        said = [self.collectives[place] or self.names[place] for place in chain]
        kinds = [kind_of(text) for text in said if text]
        # NCCL's all-to-all is also a send/receive kernel: only its caller says which it is.
        plain = [kind for kind in kinds if kind not in ("other", "send_receive")]
        kind = plain[0] if plain else kinds[0]
        if self.categories[at] is None and kind == "other":
            return COMP, None, None, None, None, None
        peer, tag = self._peer(chain) if kind in _ROLES else (None, None)
        group = next((self.groups[place] for place in chain if self.groups[place]), self.only_group)
        size = next((size for place in chain if (size := self._bytes(place)) is not None), None)
        return _ROLES.get(kind, COMM_COLL), kind, size, peer, tag, group

    def _above(self, at: int) -> list[int]:
        found: list[int] = []
        while len(found) < _ANCESTORS and (at := self.parents[at]) >= 0:
            found.append(at)
        return found

    def _bytes(self, at: int) -> int | None:
        """Of the input tensors; null without one."""
        values, types = _json(self.values[at]), _json(self.types[at])
        sizes = [
            size
            for value, kind in zip(values, types, strict=False)
            if isinstance(kind, str) and "Tensor" in kind
            for size in _tensor_bytes(value)
        ]
        return sum(sizes) if sizes else None

    def _peer(self, chain: list[int]) -> tuple[int | None, int | None]:
        """Peer and tag of `c10d::send(tensors, group, dst, tag)` and `c10d::recv_`."""
        for at in chain:
            if re.match(r"c10d::(send|recv_?)$", self.names[at]):
                numbers = [value for value in _json(self.values[at]) if type(value) is int]
                if len(numbers) >= 2:
                    return numbers[-2], numbers[-1]
        return None, None

    def _only_group(self) -> str | None:
        """The process group, where the observer noted a single one."""
        noted = [self.values[at] for at, name in enumerate(self.names) if name == GROUPS_NOTE]
        groups = [
            group.get("pg_name")
            for text in noted
            for listed in map(_json, _texts(text))
            for group in listed
            if isinstance(group, dict)
        ]
        return str(groups[0]) if len(set(map(str, groups))) == 1 else None


def _json(text: str | None) -> list[Any]:
    try:
        found = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _texts(text: str | None) -> list[str]:
    return [value for value in _json(text) if isinstance(value, str)]


def _tensor_bytes(value: object) -> list[int]:
    """Of `[tensor, storage, offset, elements, bytes per element, device]`, or of a list of such."""
    if not isinstance(value, list) or not value:
        return []
    if isinstance(value[0], list):
        return [size for inner in value for size in _tensor_bytes(inner)]
    whole = len(value) >= 5 and all(type(number) is int for number in value[:5])
    return [value[3] * value[4]] if whole else []


def comm_type(kind: str | None) -> int | None:
    """Chakra's CollectiveCommType; None for what it has no name for."""
    return COLLECTIVES.get(kind or "")
