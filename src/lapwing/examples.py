"""A few inputs to look at a fitted network with."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from lapwing.batches import Inputs, peek, unpack
from lapwing.replay import Replay

if TYPE_CHECKING:
    from lapwing.laplace import Laplace

_FEW = 16


def few_examples(la: Laplace, loader: Iterable[Any] | None = None) -> Inputs | None:
    """Those on which the fit found the layers, or the first of a loader; None after reading a file without one."""
    if loader is None:
        return la._state().tape.seen
    with closing(Replay(loader, "A look at a few inputs")) as batches:
        inputs, targets = unpack(peek(batches)[1], "Batch 0", la.unpack)
    count = len(targets)
    return (inputs.split(count).part(0, _FEW) if inputs.all_batched(count) else inputs).copy().to(la.device)
