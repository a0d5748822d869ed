"""A loader that shows the same batches in the same order at every pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lapwing import randomness
from lapwing.errors import InputError


class Replay:
    """Reads a loader again and again; what it draws at random is drawn alike each time.

    The random states of torch and of the loader's own generators are set back before every pass, and `close` leaves
    them as they were found. So a `DataLoader` that shuffles, or augments with torch's randomness, can be read twice.
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
        self._generators = randomness.sources(loader, None)
        self._states = randomness.states(self._generators)

    def __iter__(self) -> Iterator[Any]:
        self.close()
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError where the loader has none

    def close(self) -> None:
        """Leave the random states as they were found."""
        randomness.restore(self._generators, self._states)
