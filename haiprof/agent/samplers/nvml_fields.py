"""NVML fields: our own table of ids by driver version, and one batched read per GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from haiprof.agent.samplers.nvml import Device, Version, refusal
from haiprof.linux.readings import Reading, Unavailable, Value, refused_reading

_READ = "nvmlDeviceGetFieldValues"
ALL_LINKS = 0xFFFFFFFF  # the scope of a sum over all NVLinks
_BLACKWELL = 10  # nvmlDeviceArchitecture_t of the first GPUs with NVLink 5

# nvmlValueType_t, nvml.h: the member of the union, and the value that stands for "none"
_MEMBERS = {
    0: ("dVal", None),
    1: ("uiVal", (1 << 32) - 1),
    2: ("ulVal", (1 << 64) - 1),
    3: ("ullVal", (1 << 64) - 1),
    4: ("sllVal", None),
    5: ("siVal", None),
    6: ("usVal", None),
}
_WIDE_TYPES = (2, 3, 4)
_I64_END = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field and the column that it fills."""

    column: str
    id: int | None
    """None where the id is not known for this driver."""
    scale: int | float = 1
    """From NVML's unit to the base unit; a float makes the value one."""
    scope: int = 0
    wide: bool = False
    """A count of traffic: 32 bits would wrap unnoticed between two samples."""
    above: int = 0
    """Only a value beyond this shows that the counter is wide enough."""


def gpu_fields(driver: Version) -> tuple[Field, ...]:
    """Power, energy, temperature and throttle times.

    The ids below 199 never changed. Those of the thermal slowdowns did: 251 to 253 in the headers
    of 575.51 and 580.65 (what that driver's nvidia-smi asks for), 269 to 271 from 580.82 on, where
    251 is another quantity; so an unknown driver is not asked.
    """
    heat = _slowdown_ids(driver)
    return (
        Field(column="power_instant_watts", id=186, scale=1e-3),
        Field(column="energy_joules", id=83, scale=1e-3),
        Field(column="memory_temperature_celsius", id=82, scale=1.0),
        Field(column="throttle_power_ns", id=74),
        Field(column="throttle_thermal_ns", id=75),
        Field(column="throttle_sync_boost_ns", id=76),
        Field(column="throttle_board_limit_ns", id=77),
        Field(column="throttle_reliability_ns", id=79),
        Field(column="throttle_sw_thermal_ns", id=heat[0]),
        Field(column="throttle_hw_thermal_ns", id=heat[1]),
        Field(column="throttle_power_brake_ns", id=heat[2]),
    )


def nvlink_fields(device: Device) -> tuple[Field, Field]:
    """NVLink traffic, sent and received: bytes of NVLink 5, KiB before it."""
    architecture = device.ask("nvmlDeviceGetArchitecture") or 0
    if architecture < _BLACKWELL:
        ids: tuple[int | None, int | None] = (138, 139)
        scale = 1024
    else:
        ids, scale = ((202, 204) if device.nvml.driver >= (560,) else (None, None)), 1
    sent, received = (
        Field(column=column, id=number, scale=scale, scope=ALL_LINKS, wide=True)
        for column, number in zip(NVLINK, ids, strict=True)
    )
    return sent, received


NVLINK = ("nvlink_transmit_bytes", "nvlink_receive_bytes")

# "Value can be wrapped" (nvml.h) without a word on the width: 32 bits would be 0.1 s of PCIe 5.
PCIE_FIELDS = (
    Field(column="pcie_transmit_bytes", id=197, wide=True, above=1 << 32),
    Field(column="pcie_receive_bytes", id=198, wide=True, above=1 << 32),
)

HEALTH_FIELDS = (
    Field(column="ecc_volatile_corrected_count", id=3),
    Field(column="ecc_volatile_uncorrected_count", id=4),
    Field(column="ecc_aggregate_corrected_count", id=5),
    Field(column="ecc_aggregate_uncorrected_count", id=6),
    Field(column="remapped_corrected_row_count", id=142),
    Field(column="remapped_uncorrected_row_count", id=143),
    Field(column="remap_pending_count", id=144),
    Field(column="remap_failure_count", id=145),
    Field(column="retired_corrected_page_count", id=29),
    Field(column="retired_uncorrected_page_count", id=30),
    Field(column="retired_pending_count", id=31),
    Field(column="pcie_replay_count", id=94),
    Field(column="pcie_correctable_count", id=173),
    Field(column="pcie_non_fatal_count", id=179),
    Field(column="pcie_fatal_count", id=180),
)


class FieldReader:
    """Reads fields of one GPU in one call, each with its own return code."""

    def __init__(self, device: Device, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)
        self._device = device
        self._queries = [(field.id, field.scope) for field in fields]
        self._proven: set[Field] = set()

    def read(self) -> list[Value | Unavailable]:
        """One answer per field."""
        answers = self._device.call(_READ, self._queries)
        return [self._answer(*pair) for pair in zip(self.fields, answers, strict=True)]

    def _answer(self, field: Field, answer: Any) -> Value | Unavailable:  # noqa: ANN401  a C struct
        what = f"NVML field {field.id}"
        if answer.nvmlReturn:
            why = refusal(answer.nvmlReturn, what)
            self._device.check(answer.nvmlReturn, why.reason)
            return why
        member, none = _MEMBERS.get(answer.valueType, ("", None))
        value = getattr(answer.value, member, None)
        if value is None or value == none or value >= _I64_END:
            return Unavailable(f"{what}: no value in it", status="unsupported")
        if field.wide and answer.valueType not in _WIDE_TYPES:
            reason = f"{what}: 32 bits, which wrap unseen between two samples"
            return Unavailable(reason, status="unsupported", lasting=True)
        if field.above and value >= field.above:
            self._proven.add(field)
        if field.above and field not in self._proven:
            reason = f"{what}: below 2^32 so far, so it may have 32 bits and wrap unseen"
            return Unavailable(reason, status="unsupported")
        return (int(value) if isinstance(field.scale, int) else float(value)) * field.scale


def field_readings(device: Device, fields: Iterable[Field]) -> Iterator[Reading]:
    """A reading of the fields that the driver answers; refused ones are not read again."""
    known = []
    for field in fields:
        if field.id is None:
            yield refused_reading([field.column], _READ, _no_id(device))
        else:
            known.append(field)
    try:
        answers = FieldReader(device, known).read()
    except Unavailable as why:
        yield refused_reading([field.column for field in known], _READ, why)
        return
    asked = []
    for field, answer in zip(known, answers, strict=True):
        if isinstance(answer, Unavailable) and answer.lasting:
            yield refused_reading([field.column], f"{_READ} {field.id}", answer)
        else:
            asked.append(field)
    if asked:
        yield Reading(
            columns=tuple(field.column for field in asked),
            origin=_READ,
            read=FieldReader(device, asked).read,
        )


def is_denied(device: Device, fields: Sequence[Field]) -> bool:
    """Whether the driver refuses these fields to this user: no permission, or an unknown id."""
    if any(field.id is None for field in fields):
        return True
    try:
        answers = FieldReader(device, fields).read()
    except Unavailable as why:
        return why.status == "denied"
    return any(isinstance(a, Unavailable) and a.status == "denied" for a in answers)


def _slowdown_ids(driver: Version) -> tuple[int | None, int | None, int | None]:
    if driver >= (580, 82):
        return 269, 270, 271
    if (575, 51) <= driver < (580, 66):
        return 251, 252, 253
    return None, None, None


def _no_id(device: Device) -> Unavailable:
    version = device.nvml.version or "of unknown version"
    return Unavailable(
        f"driver {version}: the id of this field is not known for it",
        status="unsupported",
        remedy="a newer NVIDIA driver",
        lasting=True,
    )
