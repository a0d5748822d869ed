"""A progress bar where work takes longer than two seconds and somebody watches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tqdm.auto import tqdm

Item = TypeVar("Item")


def bar(items: Iterable[Item], title: str, show: bool = True) -> Iterable[Item]:
    """Iterate over `items` with a bar, unless `show` is False or the output is no terminal."""
    progress: Iterable[Item] = tqdm(items, title, delay=2, leave=False, disable=None if show else True)
    return progress
