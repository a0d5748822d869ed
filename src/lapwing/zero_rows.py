"""Rows of gradients that are 0, as those at the padding of sequences are: they add nothing to sums of products."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST = 8  # entries that are looked at first
_FEW = 8  # one of so many rows must be 0 for it to pay to leave them out
_NARROW = 128  # entries of a row below which it does not


def nonzero_rows(rows: Tensor) -> Tensor | None:
    """Which of `rows: [n, d]` are not 0, as indices; None where it does not pay to leave the others out: where they are
    few or narrow, and on GPUs, which would have to be waited for.
    """
    if rows.shape[1] < _NARROW or not rows.is_cpu:
        return None
    candidates = (rows[:, :_FIRST] == 0).all(1).nonzero().squeeze(1)
    if _FEW * len(candidates) < len(rows):
        return None
    zeros = candidates[rows.index_select(0, candidates).abs().amax(1) == 0]
    if _FEW * len(zeros) < len(rows):
        return None
    return torch.ones(len(rows), dtype=torch.bool, device=rows.device).index_fill_(0, zeros, False).nonzero().squeeze(1)
