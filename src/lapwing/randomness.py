"""The random states that reading a loader draws from: torch's, the loader's own and the caller's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def sources(loader: Iterable[Any], generator: torch.Generator | None) -> dict[str, torch.Generator]:
    """Every generator of a run by name: torch's on all devices, those in a `DataLoader` and its samplers, the run's."""
    found = {"torch": torch.default_generator}
    if torch.cuda.is_available():
        torch.cuda.init()
        found |= {f"cuda {i}": one for i, one in enumerate(torch.cuda.default_generators)}
    batches = getattr(loader, "batch_sampler", None)
    owners = {
        "loader": loader,
        "sampler": getattr(loader, "sampler", None),
        "batch sampler": batches,
        "sampler of batches": getattr(batches, "sampler", None),
        "data set": getattr(loader, "dataset", None),
    }
    own = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
    found |= {name: one for name, one in own.items() if isinstance(one, torch.Generator)}
    return found if generator is None else found | {"run": generator}


def states(generators: dict[str, torch.Generator]) -> dict[str, Tensor]:
    """What each would draw from next."""
    return {name: one.get_state() for name, one in generators.items()}


def restore(generators: dict[str, torch.Generator], kept: dict[str, Tensor]) -> None:
    for name, one in generators.items():
        one.set_state(kept[name])


@contextmanager
def kept(generators: dict[str, torch.Generator], but: torch.Generator | None) -> Iterator[None]:
    """Leave the generators as they were found, all but one."""
    others = {name: one for name, one in generators.items() if one is not but}
    before = states(others)
    try:
        yield
    finally:
        restore(others, before)
