"""Canvases of 128×128: one picture of CIFAR-10 each, enlarged, and small pictures in color on top of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.data import MissingDataError, folder

SIZE, PASTED = 128, 3


@dataclass(frozen=True)
class Canvases:
    """Images `[N, 3, 128, 128]`, standardized, and masks `[N, 128, 128]`: 1 on the strokes of what was pasted."""

    images: Tensor
    masks: Tensor


def canvases(part: str, count: int, pasted: str = "mnist", seed: int = 0) -> Canvases:
    """`part` is "train" or "test", for the pictures and the digits alike; `pasted` "mnist", or "kmnist" or
    "fashion_mnist" (test sets both).
    """
    generator = torch.Generator().manual_seed(seed)
    pictures = _images("cifar10_train20k" if part == "train" else "cifar10_test", part)
    objects = _images("mnist", part) if pasted == "mnist" else _images(f"{pasted}_test", "test")
    chosen = torch.randperm(len(pictures), generator=generator)[:count]
    backs = functional.interpolate(pictures[chosen].permute(0, 3, 1, 2) / 255, size=(SIZE, SIZE), mode="bicubic")
    backs = backs.clamp(0, 1)
    masks = torch.zeros(count, SIZE, SIZE, dtype=torch.long)
    for back, mask in zip(backs, masks, strict=True):
        for index in torch.randint(len(objects), (PASTED,), generator=generator):
            size = int(torch.randint(28, 53, (), generator=generator))
            ink = functional.interpolate(objects[index][None, None] / 255, size=(size, size), mode="bilinear")[0, 0]
            row, column = (int(torch.randint(SIZE - size, (), generator=generator)) for _ in range(2))
            color = torch.rand(3, 1, 1, generator=generator)
            opacity = 0.4 + 0.5 * torch.rand((), generator=generator)
            place = (..., slice(row, row + size), slice(column, column + size))
            back[place] += opacity * ink * (color - back[place])
            mask[place] |= ink > 0.5
    return Canvases((backs - 0.47) / 0.25, masks)


def _images(name: str, part: str) -> Tensor:
    path = folder() / f"{name}.npz"
    if not path.is_file():
        raise MissingDataError(f"This experiment needs {path.name} in the folder that LAPWING_DATA names.")
    with np.load(path) as arrays:
        return torch.tensor(arrays[f"x_{part}"][:10_000]).float()
