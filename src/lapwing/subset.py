"""A random subset of the examples that a loader yields, drawn in one pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.batches import Inputs, Unpack, read
from lapwing.errors import InputError


@dataclass(frozen=True)
class Chunk:
    """Examples that go through the model together; `where` says which batch they (or the first of them) came in."""

    where: str
    inputs: Inputs
    targets: Tensor
    keys: Tensor


def choose_subset(
    loader: Iterable[Any],
    size: int | None,
    device: torch.device,
    unpack: Unpack | None,
    generator: torch.Generator | None,
    show: bool,
) -> tuple[list[Chunk], int]:
    """`size` examples (or all), each set of so many equally likely, and how many there were.

    Every example draws a number, and those with the smallest stay; so no more than `size` are held at any time.
    Chunks are as large as the largest batch where examples of several batches go together.
    """
    kept: list[Chunk] = []
    seen = largest = 0
    for where, inputs, targets in read(loader, device, unpack, "choose points", show):
        if targets.dim() == 0:
            raise InputError(f"{where}: the target is a single number; its first dimension must be the examples.")
        count = len(targets)
        seen, largest = seen + count, max(largest, count)
        keys = torch.zeros(count, dtype=torch.float64)
        if size is not None:
            place = "cpu" if generator is None else generator.device
            keys = torch.rand(count, generator=generator, dtype=torch.float64, device=place).cpu()
        kept.append(Chunk(where, inputs, targets, keys))
        if size is not None and seen > size:
            kept = _smallest(kept, size)
    if not kept:
        raise InputError("The loader is empty: it yielded no batch, so there is nothing to fit.")
    return _merged(kept, largest), seen


def _smallest(chunks: list[Chunk], size: int) -> list[Chunk]:
    """The examples with the `size` smallest keys."""
    threshold = torch.cat([chunk.keys for chunk in chunks]).kthvalue(size).values
    found = []
    for chunk in chunks:
        stay = (chunk.keys <= threshold).nonzero().squeeze(1)
        if len(stay) == len(chunk.keys):
            found.append(chunk)
        elif len(stay):
            inputs = chunk.inputs.split(len(chunk.keys)).pick(stay)
            found.append(Chunk(chunk.where, inputs, chunk.targets[stay.to(chunk.targets.device)], chunk.keys[stay]))
    return found


def _merged(chunks: list[Chunk], largest: int) -> list[Chunk]:
    """Neighbors in one, where all their inputs have an example axis and the same shapes."""
    found = [chunks[0]]
    for chunk in chunks[1:]:
        last = found[-1]
        if len(last.keys) + len(chunk.keys) <= largest and _signature(last) == _signature(chunk) is not None:
            ours, theirs = (one.inputs.split(len(one.keys)) for one in (last, chunk))
            pairs = zip(ours.examples(), theirs.examples(), strict=True)
            found[-1] = Chunk(
                last.where,
                ours.join([torch.cat(pair) for pair in pairs]),
                torch.cat([last.targets, chunk.targets]),
                torch.cat([last.keys, chunk.keys]),
            )
        else:
            found.append(chunk)
    return found


def _signature(chunk: Chunk) -> Any:
    """What two chunks must have in common to be one; None if this one cannot be."""
    split = chunk.inputs.split(len(chunk.keys))
    if not all(split.batched):
        return None
    return (str(split.spec), [(leaf.shape[1:], leaf.dtype) for leaf in split.leaves], chunk.targets.shape[1:])
