"""Memory that one batch frees and the next one takes."""

from __future__ import annotations

import functools

import torch

_LARGEST = 2**25 - 2**14  # bytes of the largest piece that the C library of Linux may keep


@functools.cache
def keep_freed_memory() -> None:
    """Let freed memory serve again instead of going back to the system; once for the process.

    The C library of Linux gives large pieces back, and clearing fresh ones takes longer than many an operation on them.
    From the largest piece that was freed so far, up to 32 MB, it learns to keep those up to that size, as it does in
    any training with large batches; here from one that nobody writes to. From then on up to 64 MB stay with the process
    when they are free, and more where small pieces lie behind them. Other libraries do not care.
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")
