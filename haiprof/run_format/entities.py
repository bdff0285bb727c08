"""Entities of records: their names, and the rank that a process or a GPU belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PROCESS_KEYS = ("pid", "start_ticks")

Key = tuple[int, ...]  # values of a table's key columns


def entity_key(entity: Mapping[str, Any]) -> Key:
    """The key of an entity as a header or an `entity` line describes it; empty if damaged."""
    values = entity.get("key")
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        return ()
    return tuple(values)


def entities_by_key(entities: Iterable[object]) -> dict[Key, Mapping[str, Any]]:
    """The latest description of each entity by key; damaged ones are left out."""
    described = [entity for entity in entities if isinstance(entity, dict)]
    return {entity_key(entity): entity for entity in described if entity_key(entity)}


def entity_name(entity: Mapping[str, Any]) -> str:
    """Its name as text that can be encoded; empty where there is none."""
    name = entity.get("name")
    return name.encode("utf-8", "replace").decode() if isinstance(name, str) else ""


def ranks_by_key(
    reports: Iterable[tuple[int, Mapping[str, Any]]],
    keys: Sequence[str],
    entities: Mapping[Key, Mapping[str, Any]],
) -> dict[Key, int]:
    """Rank by process, or by GPU where exactly one rank uses that GPU."""
    if tuple(keys) == PROCESS_KEYS:
        processes = ((process_key(report), rank) for rank, report in reports)
        return {key: rank for key, rank in processes if key}
    users: dict[str, set[int]] = {}
    for rank, report in reports:
        if uuid := plain_uuid(report.get("gpu_uuid")):
            users.setdefault(uuid, set()).add(rank)
    found = ((key, users.get(plain_uuid(own.get("uuid")), set())) for key, own in entities.items())
    return {key: min(ranks) for key, ranks in found if len(ranks) == 1}


def process_key(report: Mapping[str, Any]) -> Key:
    """The process of a rank, as a key of its table; empty where rank.json does not say."""
    pid, start_ticks = (report.get(name) for name in PROCESS_KEYS)
    return (pid, start_ticks) if type(pid) is int and type(start_ticks) is int else ()


def plain_uuid(value: object) -> str:
    """A GPU's UUID in one form: NVML writes `GPU-` before it, torch does not."""
    return value.lower().removeprefix("gpu-") if isinstance(value, str) else ""
