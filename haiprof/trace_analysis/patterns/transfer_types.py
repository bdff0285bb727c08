"""What kind of transfer a communication kernel does: algorithm and collective."""

from __future__ import annotations

import re

# NCCL's and RCCL's names of algorithms as they stand in kernel names (nccl/src/include/device.h,
# ncclAlgoStr): Tree, Ring, CollnetDirect, CollnetChain, NVLS, NVLSTree, PAT.
_ALGORITHMS = (
    (r"nvls_?tree", "NVLS tree"),
    (r"nvls", "NVLS"),
    (r"collnet", "CollNet"),
    (r"_pat_", "PAT"),
    (r"send_?recv", "send/recv"),
    (r"_tree", "tree"),
    (r"_ring", "ring"),
)


def transfer_type(kind: str, name: str) -> str:
    """Such as `ring all_reduce`, `send/recv all_to_all`; the collective alone if names differ."""
    plain = name.lower()
    how = next((word for sign, word in _ALGORITHMS if re.search(sign, plain)), None)
    what = "send/recv" if kind == "send_receive" else kind
    return what if how is None or how == what else f"{how} {what}"
