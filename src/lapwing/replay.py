"""A loader that shows the same batches in the same order at every pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lapwing.errors import InputError


class Replay:
    """Reads a loader again and again; what it draws at random is drawn alike each time.

    The random states of torch and of the loader's own generators are set back before every pass, and `close` leaves
    the loader's as they were found. So a `DataLoader` that shuffles, or augments with torch's randomness, can be read
    twice. torch's global state is the caller's to keep (`guard.random_state_kept`).
    """

    def __init__(self, loader: Iterable[Any], what: str) -> None:
        if not isinstance(loader, Iterable):
            raise InputError(f"{what} needs an iterable of batches, such as a DataLoader, got {type(loader).__name__}.")
        if isinstance(loader, Iterator):
            raise InputError(
                f"{what} reads the data again and again, but the loader is an iterator that can be read only once. "
                "Pass a DataLoader or a list of batches."
            )
        self.loader = loader
        self._state = torch.get_rng_state()
        self._generators = [(generator, generator.get_state()) for generator in _generators(loader)]

    def __iter__(self) -> Iterator[Any]:
        torch.set_rng_state(self._state)
        self.close()
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError where the loader has none

    def close(self) -> None:
        """Leave the loader's generators as they were found."""
        for generator, state in self._generators:
            generator.set_state(state)


def _generators(loader: Any) -> list[torch.Generator]:
    samplers = (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler")))
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    found = [getattr(owner, "generator", None) for owner in (*samplers, inner)]
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())
