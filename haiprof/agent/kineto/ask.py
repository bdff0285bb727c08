"""Client of a Kineto agent: lists the processes that it knows, and requests traces."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from haiprof.agent.kineto.messages import OURS, decode, decode_ours, encode_ours
from haiprof.base.errors import HaiprofError

_TIMEOUT_S = 2.0
_ANSWER_LIMIT_BYTES = 1 << 18


class NoAgentError(HaiprofError):
    """No Kineto agent answers, or it is not haiprof's."""


def ask_agent(address: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """Sends a question and waits for the answer."""
    shown = shown_address(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        ours.bind("")  # the kernel finds an abstract address for the answer
        ours.settimeout(_TIMEOUT_S)
        try:
            ours.connect(address)
            ours.send(encode_ours(question))
            message = decode(ours.recv(_ANSWER_LIMIT_BYTES))
        except TimeoutError:
            raise NoAgentError(
                f"{shown}: what listens there is not haiprof's agent",
                hint="a dynolog daemon is driven with --backend dynolog",
            ) from None
        except OSError as error:
            raise NoAgentError(
                f"{shown}: no agent listens there ({error.strerror or error})",
                hint="haiprof kineto-agent listens for jobs that were not started under haiprof",
            ) from None
    answer = decode_ours(message.payload) if message and message.type == OURS else None
    if answer is None:
        raise NoAgentError(f"{shown}: its answer cannot be read")
    if "error" in answer:
        raise NoAgentError(f"{shown}: {answer['error']}")
    return answer


def shown_address(address: str) -> str:
    """An address for people: `@dynolog` for an abstract one."""
    return f"@{address.strip(chr(0))}" if address.startswith("\0") else address
