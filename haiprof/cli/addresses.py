"""Addresses on a command line: the run there is fetched for the time of the command."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from haiprof.base.log_addresses import is_address
from haiprof.base.messages import print_message
from haiprof.cli.target import default_options

_ON_JOBS = frozenset({"ps", "top", "attach", "snapshot", "trace-now"})
"""Commands on jobs that run: these are recorded into a folder of this machine first."""
_TAKE_ADDRESSES = frozenset({"put", "fetch", "submit"})
_OF_OTHERS = ("--cluster",)
"""Options whose addresses are not of runs."""


def has_address(words: Sequence[str]) -> bool:
    """Whether a command line names a run by its address."""
    return bool(_places(words))


@contextlib.contextmanager
def fetch_addresses(words: Sequence[str]) -> Iterator[list[str]]:
    """The command line with folders in place of addresses, which are removed at the end.

    Raises:
        HaiprofError: A run cannot be fetched.
    """
    found = list(words)
    with contextlib.ExitStack() as folders:
        for place in _places(words):
            if words[0] in _ON_JOBS:
                found[place] = str(default_options().log_dir)
            else:
                found[place] = str(_fetch(words[place], folders))
        yield found


def _fetch(address: str, folders: contextlib.ExitStack) -> Path:
    from haiprof.base.safe_files import MadeFolder
    from haiprof.run_analysis.remote_runs import fetch_run
    from haiprof.run_format.secrets import mask_text

    folder = folders.enter_context(MadeFolder.temporary("haiprof-fetched-"))
    run = fetch_run(address, folder)
    print_message(f"fetched {run.name} for this command; to keep it: haiprof fetch "
                  f"{mask_text(address)}")  # fmt: skip
    return run


def _places(words: Sequence[str]) -> list[int]:
    if not words or words[0] in _TAKE_ADDRESSES:
        return []
    return [
        place
        for place, (before, word) in enumerate(itertools.pairwise(words), start=1)
        if is_address(word) and " " not in word and before not in _OF_OTHERS
    ]
