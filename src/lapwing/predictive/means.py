"""Means over samples `[S, ...]`, taken of a few at a time: what is computed from them is small beside them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

_NUMBERS = 2**22  # of samples that are looked at together


def mean_of(samples: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`mean_s function(samples_s)`, for a function of any number of samples `[s, ...]` to one value each."""
    return functools.reduce(torch.add, (function(some).sum(0) for some in _few(samples))) / len(samples)


def log_mean_of(samples: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`log mean_s exp(function(samples_s))`."""
    if len(samples) == 1:  # its derivative is finite also where the probability is 0
        return function(samples)[0]
    logs = (function(some).logsumexp(0) for some in _few(samples))
    return functools.reduce(torch.logaddexp, logs) - math.log(len(samples))


def _few(samples: Tensor) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():  # sizes are unknown in a program that is exported
        return (samples,)
    parts: tuple[Tensor, ...] = samples.split(max(1, _NUMBERS // max(1, samples[0].numel())))
    return parts
