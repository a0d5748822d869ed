"""What can go wrong, said so that the reader knows the culprit and the fix."""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class LapwingError(Exception):
    """Base of every error that Lapwing raises on purpose."""


class InputError(LapwingError, ValueError):
    """An argument, a batch or a model that cannot be used as given."""


class NotFittedError(LapwingError, RuntimeError):
    """A posterior was asked for before `fit`."""


class FileError(LapwingError, ValueError):
    """A saved posterior that is damaged, newer, or belongs to another model."""


class ConvergenceWarning(UserWarning):
    """An iteration ended before its tolerance was reached."""


class ComparisonWarning(UserWarning):
    """Evidences that differ for other reasons than the models."""


class ExportWarning(UserWarning):
    """A program that was exported in another form than asked for."""


class PruningWarning(UserWarning):
    """A pruning that leaves nothing of a layer."""


class DataWarning(UserWarning):
    """Data are not those of the fit."""


class IndefiniteWarning(UserWarning):
    """A likelihood whose Hessian is not positive semi-definite, and what takes its place."""


class TuningWarning(UserWarning):
    """A tuned value is not an interior optimum of the evidence."""


def warn(message: str, category: type[UserWarning]) -> None:
    """Warn at the line that called Lapwing, however deep inside of it the news arose."""
    frame, depth, level = sys._getframe(1), 2, 2
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
            level = depth + 1
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, category, stacklevel=level)


def choose(value: str, options: Iterable[str], what: str) -> str:
    """Return `value` if it is one of `options`, else raise and name the nearest right one."""
    options = sorted(options)
    if value in options:
        return value
    near = difflib.get_close_matches(str(value), options, n=1, cutoff=0.3)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise InputError(f"Unknown {what}: {value!r}.{hint} Supported: {', '.join(options) or 'none'}.")


def positive(value: float | Sequence[float] | Tensor, what: str) -> Tensor:
    """Return `value` as a float64 tensor if it is positive and finite everywhere, else raise."""
    tensor = torch.as_tensor(value, dtype=torch.float64)
    if tensor.numel() == 1:
        number = tensor.item()
        good = math.isfinite(number) and number > 0
    else:
        good = bool((torch.isfinite(tensor) & (tensor > 0)).all())
    if not good:
        raise InputError(f"{what} must be positive and finite, got {value!r}.")
    return tensor
