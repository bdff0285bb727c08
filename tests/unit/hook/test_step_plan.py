"""Numbers that ranks agree on in the run directory, and what another rank left damaged there."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof.in_job.windows.step_plan import Agreement


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where two ranks agree."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    parts = tmp_path / "traces" / ".parts"
    parts.mkdir(parents=True, mode=0o700)
    parts.parent.chmod(0o700)
    return parts


def test_rank_takes_what_another_has_settled(folder: Path) -> None:
    assert Agreement(folder).settle_all("series-1", (7, 5)) == (7, 5)
    assert Agreement(folder).find("series-1") == 7
    assert Agreement(folder).settle_all("series-1", (9, 6)) == (7, 5)


@pytest.mark.parametrize("damaged", [
    b"", b"{", b"[]", b"7", b"null", b"{}", b'{"steps": null}', b'{"steps": 7}', b'{"steps": []}',
    b'{"steps": {}}', b'{"steps": [null]}', b'{"steps": [[7]]}', b'{"steps": ["seven"]}',
    b'{"steps": [Infinity]}', b'{"steps": [-1]}', b'{"steps": [NaN, 5]}', b'{"steps": "75"}',
    b"\xff\xfe", b"[" * 100_000, b'{"steps": [%s]}' % (b"9" * 5000),
])  # fmt: skip
def test_damaged_agreement_is_none(folder: Path, damaged: bytes) -> None:
    Agreement(folder).settle_all("series-1", (7, 5))
    (path,) = folder.iterdir()
    path.write_bytes(damaged)
    rank = Agreement(folder)
    assert rank.find("series-1") is None
    assert rank.settle_all("series-1", (9, 6)) == (9, 6)
    assert rank.find("series-1") == 9


def test_agreement_on_another_count_of_numbers_is_not_taken(folder: Path) -> None:
    Agreement(folder).settle("series-1", 7)
    assert Agreement(folder).settle_all("series-1", (9, 6)) == (9, 6)
