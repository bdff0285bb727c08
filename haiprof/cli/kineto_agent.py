"""`haiprof trace kineto-agent`: lets jobs that were started with KINETO_USE_DAEMON be traced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from haiprof.base.messages import print_message
from haiprof.cli.command_line import Opt

Folder = Annotated[
    Path | None,
    Opt(
        "--socket-dir DIR",
        "The jobs' KINETO_IPC_SOCKET_DIR, a folder with mode 700 (default: that variable, "
        "else Kineto's abstract address).",
    ),
]


def kineto_agent(socket_dir: Folder = None) -> None:
    """Listen for jobs that run with KINETO_USE_DAEMON=1 and not under haiprof.

    Stands in for the daemon that PyTorch asks for traces every 5 seconds (dynolog's): start it
    before the jobs. Only processes of this user are answered; nothing is opened to the network.
    It ends with Ctrl-C.

    For example:

      haiprof trace kineto-agent &
      KINETO_USE_DAEMON=1 python train.py &
      haiprof trace now $! --trace-steps 5 -o traces
    """
    from haiprof.agent.kineto_daemon import listen, own_address

    address = own_address(os.environ, socket_dir)
    ignored = listen(address, lambda shown: print_message(f"listening on {shown}"))
    if ignored:
        print_message(f"{ignored} datagrams were ignored: malformed, or another user's")
