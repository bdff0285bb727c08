"""Addresses on a command line: the run there is fetched for the time of the command."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from haiprof.base.errors import UsageError
from haiprof.base.log_addresses import is_address, note_fetched, run_address
from haiprof.base.messages import print_message
from haiprof.cli.target import ADDRESS, default_options

_ON_JOBS = frozenset({"ps", "top", "attach", "snapshot", "trace-now"})
"""Commands on jobs that run: these are recorded into a folder of this machine first."""
_WRITE_INTO_RUN = frozenset({"report", "merge", "scalars"})
"""Commands that write into the run directory, where no other file is named."""
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
    _check(words)
    found = list(words)
    with contextlib.ExitStack() as folders:
        for place in _places(words):
            if words[0] in _ON_JOBS:
                if words[place - 1] == "--log-dir":
                    ADDRESS.set(words[place])
                found[place] = str(default_options().log_dir)
            else:
                found[place] = str(_fetch(words[place], folders))
        yield found


def _check(words: Sequence[str]) -> None:
    """Refuses what would be lost with the fetched run, or is not about one run."""
    from haiprof.run_format.secrets import mask_text

    address = mask_text(words[_places(words)[0]])
    if words[0] == "list":
        raise UsageError(
            f"list: {address} is an address: only runs in a folder of this machine are listed",
            hint=f"haiprof verdict {address} judges its newest run",
        )
    if words[0] in _WRITE_INTO_RUN and not {"-o", "--output"} & set(words):
        raise UsageError(
            f"{words[0]} writes into the run, and {address} is fetched for this command alone",
            hint=f"-o FILE, or haiprof fetch {address} before it",
        )


def _fetch(address: str, folders: contextlib.ExitStack) -> Path:
    from haiprof.base.safe_files import MadeFolder
    from haiprof.run_analysis.remote_runs import fetch_run
    from haiprof.run_format.secrets import mask_text

    folder = folders.enter_context(MadeFolder.temporary("haiprof-fetched-"))
    run = fetch_run(address, folder)
    note_fetched(run, mask_text(_address_of(run.name, address)))
    print_message(f"fetched {run.name} for this command; to keep it: haiprof fetch "
                  f"{mask_text(address)}")  # fmt: skip
    return run


def _address_of(name: str, address: str) -> str:
    """The address of a run that was named by it, or by that of its log directory."""
    own = address.rstrip("/")
    return own if own.endswith(f"/{name}") else run_address(own, name)


def _places(words: Sequence[str]) -> list[int]:
    if not words or words[0] in _TAKE_ADDRESSES:
        return []
    return [
        place
        for place, (before, word) in enumerate(itertools.pairwise(words), start=1)
        if is_address(word) and " " not in word and before not in _OF_OTHERS
    ]
