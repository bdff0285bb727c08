"""What `haiprof snapshot` shows: the ranks that block the job, and what all ranks do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from haiprof.base.code_places import is_library
from haiprof.base.units import ranks_text
from haiprof.live.native_stacks import SuspectDetails
from haiprof.live.snapshot import Snapshot
from haiprof.live.stacks import Node
from haiprof.live.standstill import RankState, Suspect, doing
from haiprof.run_format.stack_frames import frame_text
from haiprof.show.text import count_text, moment_text, printable, value_text
from haiprof.show.views.blocks import notes_block, one_line, section

MOST_SUSPECTS = 12
NATIVE_FRAMES = 8


def snapshot_view(snapshot: Snapshot) -> RenderableType:
    """The whole view: the verdict first, then every rank's stack as one tree."""
    return Group(
        Text(_headline(snapshot), style="bold"),
        Text(
            f"{moment_text(snapshot.wall_ns)} · {count_text(len(snapshot.states), 'rank')}, "
            f"{sum(s.answered for s in snapshot.states)} answered",
            style="dim",
        ),
        *_suspects(snapshot.suspects, {details.rank: details for details in snapshot.details}),
        section("main threads", _tree(snapshot.tree)),
        *_without_stack(snapshot.states),
        *([notes_block(snapshot.notes)] if snapshot.notes else []),
    )


def _headline(snapshot: Snapshot) -> str:
    if not snapshot.states:
        return "no rank has reported in"
    if snapshot.suspended:
        return "The job is suspended: all its ranks are stopped by a signal (kill -CONT)"
    certain = [s.rank for s in snapshot.suspects if s.certain]
    if certain:
        return f"{_names_text(certain)} {'holds' if len(certain) == 1 else 'hold'} the job up"
    if snapshot.moves:
        return "The job moves: collectives went on between two looks"
    odd = [s.rank for s in snapshot.suspects]
    if odd:
        return (
            f"{_names_text(odd)} {'does' if len(odd) == 1 else 'do'} something else than the rest"
        )
    if snapshot.moves is None:
        return "No collectives to compare; all ranks do the same or none could be compared"
    return "Nothing moves, and no rank differs from the others: all wait for something else"


def _names_text(ranks: Sequence[int]) -> str:
    text = ranks_text(ranks)
    return text[:1].upper() + text[1:]


def _suspects(
    suspects: Sequence[Suspect], details: Mapping[int, SuspectDetails]
) -> Iterator[RenderableType]:
    for suspect in suspects[:MOST_SUSPECTS]:
        yield section(
            f"rank {suspect.rank}",
            Text(printable(suspect.reason)),
            *([one_line(f"doing: {suspect.doing}")] if suspect.doing else []),
            *_details(details.get(suspect.rank)),
        )
    if len(suspects) > MOST_SUSPECTS:
        yield Text(f"and {len(suspects) - MOST_SUSPECTS} more (--json has all)", style="dim")


def _details(details: SuspectDetails | None) -> Iterator[RenderableType]:
    if details is None:
        return
    for frame in (details.native or ())[-NATIVE_FRAMES:]:
        yield one_line(f"  {printable(frame)}")
    if details.gpu:
        said = (_metric_text(metric, value) for metric, value in details.gpu.items())
        yield one_line("its GPU: " + ", ".join(said))
    if details.xids:
        codes = ", ".join(map(str, details.xids))
        yield one_line(f"its GPU reported XID {codes}", style="bold")


def _metric_text(metric: str, value: float) -> str:
    """`memory used 12.0 GiB`: a metric's last word is its unit."""
    name, _, unit = metric.rpartition("_")
    return f"{name.replace('_', ' ')} {value_text(value, unit)}"


def _without_stack(states: Sequence[RankState]) -> Iterator[RenderableType]:
    mute = [state for state in states if state.stack is None]
    if mute:
        lines = [one_line(f"rank {s.rank}: {doing(s)}") for s in mute[:MOST_SUSPECTS]]
        yield section("without a stack", *lines)


def _tree(root: Node) -> RenderableType:
    """The merged tree; a chain of frames that the same ranks are in is one branch."""
    tree = Tree(Text(ranks_text(root.ranks) if root.ranks else "no stacks"), guide_style="dim")
    _grow(tree, root)
    return tree


def _grow(branch: Tree, node: Node) -> None:
    for child in node.children.values():
        chain = [child]
        while len(chain[-1].children) == 1:
            (only,) = chain[-1].children.values()
            if only.ranks != chain[-1].ranks:
                break
            chain.append(only)
        _grow(branch.add(_chain_text(chain)), chain[-1])


def _chain_text(chain: Sequence[Node]) -> Text:
    """The user's own frames of a chain and its innermost one; what lies between is counted."""
    text = Text(style="")
    text.append(ranks_text(chain[0].ranks), style="cyan")
    hidden = 0
    for node in chain:
        frame = node.frame or ("", 0, "")
        inner = node is chain[-1]
        if is_library(frame[0], frame[2]) and not inner:
            hidden += 1
            continue
        if hidden:
            text.append(f"\n  … {hidden} library frames", style="dim")
            hidden = 0
        text.append(f"\n  {printable(frame_text(frame))}")
    return text
