"""Calls of CUDA and HIP that return only when the GPU is done: one list for all questions."""

from __future__ import annotations

# Source: CUDA runtime API, "API synchronization behavior", and the HIP runtime's likewise.
# cudaEventQuery and cudaStreamQuery, which HTA counts among these, return at once; so do copies
# and sets with Async in their name, unless the memory is pageable, which only their times tell.
DEVICE_SYNC = r"^(?:(?:cuda|hip)DeviceSynchronize|cudaThreadSynchronize|(?:cu|hip)CtxSynchronize)$"
"""They wait for all streams of the device."""
STREAM_SYNC = r"^(?:cuda|cu|hip)(?:Stream|Event)Synchronize"
"""They wait for a stream, or for what was launched to one before an event was recorded."""
COPY_SYNC = (
    r"^(?:cuda|hip)Memcpy(?:2D|3D)?(?:(?:To|From)(?:Array|Symbol))?$|^hipMemcpyWithStream$"
    r"|^(?:cu|hip)Memcpy(?:2D|3D|(?:HtoD|DtoH|DtoD)(?:_v2)?)$"
)
"""They wait for the copy that they make."""
FREE = r"^(?:cuda|hip)Free(?:Host)?$|^cuMemFree(?:_v2)?$"
"""They wait for the device where the memory may be in use, and do much work of their own."""
BLOCKING = f"{DEVICE_SYNC}|{STREAM_SYNC}|{COPY_SYNC}"
"""All that always wait."""
