"""Ranks that have not reported in: late ones are told from those that train elsewhere, unseen."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from haiprof.base.options import Options
from haiprof.launch.run_directories import create_run
from haiprof.live.find import find_missing_ranks

HERE = socket.gethostname()


@pytest.mark.parametrize(
    ("ranks", "nodes", "late", "unknown"),
    [
        ({0: HERE, 1: HERE}, [HERE], [], [2, 3]),
        ({2: HERE, 3: HERE}, [HERE], [], [0, 1]),
        ({0: HERE, 1: HERE, 2: "other"}, [HERE, "other"], [3], []),
        ({0: HERE, 1: HERE}, [HERE, "other"], [2, 3], []),
        ({0: HERE, 1: HERE, 2: "other", 3: "other"}, [HERE, "other"], [], []),
    ],
)
def test_rank_is_late_only_where_a_node_that_writes_here_has_room_for_it(
    tmp_path: Path, ranks: dict[int, str], nodes: list[str], late: list[int], unknown: list[int]
) -> None:
    run, _, _ = create_run(Options(log_dir=tmp_path), command=["x"], name="x", environ={})
    for host in nodes:
        run.node(host).root.mkdir(parents=True)
    for rank, host in ranks.items():
        run.rank(rank).root.mkdir()
        report = {"rank": rank, "host": host, "pid": None, "world_size": 4}
        run.rank(rank).report.write_text(json.dumps(report))
    found = find_missing_ranks(run)
    assert [member.rank for member in found.late] == late
    assert list(found.unknown) == unknown
    assert (found.note is None) == (not unknown)
    assert len(found.notes) == bool(late) + bool(unknown)
