"""Links between the traces of a recorded job."""

from __future__ import annotations

import pytest

from haiprof.trace_analysis.execution_link import link
from haiprof.trace_analysis.execution_pairs import pairs
from tests.conftest import Once
from tests.unit.traces.execution import record, record_pair
from tests.unit.traces.test_link import check_links, check_nesting, hosts


@pytest.mark.slow
def test_a_recorded_ddp_job_is_linked_rank_by_rank(once: Once) -> None:
    found, alone = pairs(once(("record_pair",), record_pair))
    assert [pair.rank for pair in found] == [0, 1]
    assert alone == []
    for pair in found:
        linked = link(pair)
        assert pair.execution.path.name == f"rank{pair.rank}.et.json"
        assert (linked.share.linked_ratio, linked.share.operator_linked_ratio) == (1.0, 1.0)
        check_links(linked)
        assert all(row["parent"] is not None for row in hosts(linked))


def test_a_recorded_model_is_linked_whole(once: Once) -> None:
    found, alone = pairs(once(("record",), record))
    linked = link(found[0])
    share = linked.share
    assert (alone, share.linked_by, share.not_linked) == ([], "record_function_id", {})
    assert (share.linked_ratio, share.operator_linked_ratio) == (1.0, 1.0)
    assert share.linked_count > 100
    assert (share.kernel_count, share.kernel_linked_ratio) == (0, None)
    check_links(linked)
    check_nesting(linked)
