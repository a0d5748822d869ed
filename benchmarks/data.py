"""Real data from the folder that LAPWING_DATA names, as tensors; each function raises MissingDataError without it."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

IMAGENET = (torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225]))


class MissingDataError(Exception):
    """Something is not on this machine; the message says what."""


def folder() -> Path:
    return Path(os.environ.get("LAPWING_DATA", "data"))


def mnist(count: int) -> tuple[Tensor, Tensor]:
    """Images `[count, 1, 28, 28]` and labels."""
    x, y = _arrays("mnist.npz", "x_train", "y_train", count)
    return (x.float() / 255 - 0.1307).unsqueeze(1) / 0.3081, y


def flat_mnist(count: int) -> tuple[Tensor, Tensor]:
    x, y = mnist(count)
    return x.flatten(1), y


def cifar10(count: int) -> tuple[Tensor, Tensor]:
    """Images `[count, 3, 32, 32]`, normalized as the weights of ResNet-20 expect."""
    return _color("cifar10_train20k.npz", count)


def cifar100(count: int) -> tuple[Tensor, Tensor]:
    return _color("cifar100_subset.npz", count)


def headlines(count: int) -> tuple[Tensor, Tensor]:
    """AG News: tokens `[count, 64]` by hashing words into 10,000 bins, four classes."""
    x, y = _arrays("agnews_test.npz", "text_test", "y_test", None)
    rows = []
    for line in _lines(x)[:count]:
        words = re.findall(r"[a-z0-9]+", line.lower())[:64]
        rows.append([1 + zlib.crc32(word.encode()) % 9_999 for word in words])
    return _padded(rows, 64), y[:count]


def sentences(count: int, vocabulary: list[str]) -> tuple[Tensor, Tensor]:
    """SST-2: WordPiece tokens `[count, 32]`, two classes."""
    x, y = _arrays("sst2.npz", "text_train", "y_train", None)
    index = {piece: number for number, piece in enumerate(vocabulary)}
    rows = []
    for line in _lines(x)[:count]:
        pieces = [piece for word in re.findall(r"\w+|[^\w\s]", line.lower()) for piece in word_pieces(word, index)]
        rows.append([index["[CLS]"], *pieces[:30], index["[SEP]"]])
    return _padded(rows, 32), y[:count]


def word_pieces(word: str, index: dict[str, int]) -> list[int]:
    """The longest piece of the vocabulary that starts the word, and so on with what is left."""
    found, start = [], 0
    while start < len(word):
        prefix = "##" if start else ""
        stop = next((stop for stop in range(len(word), start, -1) if prefix + word[start:stop] in index), None)
        if stop is None:
            return [index["[UNK]"]]
        found.append(index[prefix + word[start:stop]])
        start = stop
    return found


def random_images(classes: int, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise with labels at random, `shape` with the number of examples first."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator), torch.randint(classes, (shape[0],), generator=generator)


def _color(name: str, count: int) -> tuple[Tensor, Tensor]:
    x, y = _arrays(name, "x_train", "y_train", count)
    mean, std = IMAGENET
    return ((x.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous(), y


def _arrays(name: str, x: str, y: str, count: int | None) -> tuple[Tensor, Tensor]:
    path = folder() / name
    if not path.is_file():
        raise MissingDataError(f"needs {name} in the folder that LAPWING_DATA names")
    with np.load(path) as arrays:
        return torch.tensor(arrays[x][:count]), torch.tensor(arrays[y][:count]).long()


def _lines(text: Tensor) -> list[str]:
    return bytes(text.numpy()).decode().split("\n")


def _padded(rows: list[list[int]], length: int) -> Tensor:
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    for row, numbers in zip(tokens, rows, strict=True):
        row[: len(numbers)] = torch.tensor(numbers)
    return tokens
