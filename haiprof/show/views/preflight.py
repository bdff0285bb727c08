"""What `haiprof preflight` shows: suspects first, then what each rank measured."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import MISSING, bytes_text, digits_text
from haiprof.diagnosis.preflight import Preflight, Suspect
from haiprof.show.text import count_text, printable
from haiprof.show.views.blocks import one_line, plain_table


def preflight_view(found: Preflight) -> RenderableType:
    """The whole view."""
    whats = list(found.ranks[0]["rates"])
    heads = (what.removesuffix("_bytes_per_s").replace("_per_s", "/s") for what in whats)
    table = plain_table("rank", "node", *heads, left=("node",))
    for own in found.ranks:
        rates = (_value_text(what, own["rates"][what]) for what in whats)
        table.add_row(str(own["rank"]), printable(own["host"]), *rates)
    lines = [one_line(suspect_text(one)) for one in found.suspects]
    slurm = [one_line(f"Slurm: {found.slurm}")] if found.slurm else []
    return Group(Text(headline(found), style="bold"), *lines, *slurm, table)


def headline(found: Preflight) -> str:
    """`leave out node-2`, or what was found else."""
    ranks = count_text(len(found.ranks), "rank")
    if not found.suspects:
        return f"{ranks}: none differs from its peers"
    if found.leave_out:
        return f"{ranks}: leave out {', '.join(map(printable, found.leave_out))}"
    return f"{ranks}: {count_text(len(found.suspects), 'suspect')}, no node to leave out"


def suspect_text(one: Suspect) -> str:
    """`rank 3 on node-2: memory_bytes_per_s 1.2 GiB/s, peers 5.9 GiB/s`."""
    if one.to_host is not None:
        who = f"link {one.host} -> {one.to_host}"
    else:
        who = "all ranks" if one.rank is None else f"rank {one.rank} on {one.host}"
    usual = MISSING if one.usual is None else _value_text(one.what, one.usual)
    return printable(f"{who}: {one.what} {_value_text(one.what, one.value)}, {one.against} {usual}")


def _value_text(what: str, value: float) -> str:
    if what.endswith("bytes_per_s"):
        return f"{bytes_text(value)}/s"
    if what.endswith("bytes"):
        return bytes_text(value)
    return f"{digits_text(value / 1e9)} G" if value > 1e9 else digits_text(value)
