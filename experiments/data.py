"""Real data from the folder that LAPWING_DATA names, as tensors; each function raises MissingDataError without it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.data import MissingDataError, folder


@dataclass(frozen=True)
class Split:
    """Training and test examples of one set; `spread` is what standardized targets were divided by."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    spread: float = 1.0


def uci(name: str, split: int = 0, dtype: torch.dtype = torch.float64) -> Split:
    """A UCI regression set, inputs and targets `[N, 1]` standardized by the training rows of this standard split."""
    with np.load(_file("uci_regression.npz")) as arrays:
        x, y = torch.tensor(arrays[f"{name}__X"]).to(dtype), torch.tensor(arrays[f"{name}__y"]).to(dtype).reshape(-1, 1)
        order, tests = torch.tensor(arrays[f"{name}__perm"][split]).long(), int(arrays[f"{name}__n_test"])
    train, test = order[:-tests], order[-tests:]
    shift, spread = x[train].mean(0), x[train].std(0)
    x = (x - shift) / torch.where(spread > 0, spread, torch.ones_like(spread))
    size = float(y[train].std())
    y = (y - y[train].mean(0)) / size
    return Split(x[train], y[train], x[test], y[test], size)


def crispr(screen: str, split: int = 0, dtype: torch.dtype = torch.float32) -> Split:
    """Knockdown efficacies `[N, 1]` (means of replicates) of guides `[N, 152]`, one-hot; a tenth at random to test on.

    `screen` is "flow_cytometry_HEK293", "survival_screen_A375" or "survival_screen_HEK293". Targets are standardized.
    """
    with np.load(_file("crispr_cas13.npz")) as arrays:
        codes, y = torch.tensor(arrays[f"{screen}__x"]).long(), torch.tensor(arrays[f"{screen}__y_mean"]).to(dtype)
    x = (codes.unsqueeze(-1) == torch.arange(4)).to(dtype).flatten(1)  # an unknown base is all 0
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(split))
    test, train = order[: len(x) // 10], order[len(x) // 10 :]
    size = float(y[train].std())
    y = (y - y[train].mean(0)) / size
    return Split(x[train], y[train], x[test], y[test], size)


def fashion_mnist(train: int) -> Split:
    """Of the 10,000 test images the first `train` to train on and the last 2,000 to test on: `[N, 1, 28, 28]`."""
    with np.load(_file("fashion_mnist_test.npz")) as arrays:
        x, y = torch.tensor(arrays["x_test"]), torch.tensor(arrays["y_test"]).long()
    x = ((x.float() / 255 - 0.286) / 0.353).unsqueeze(1)
    return Split(x[:train], y[:train], x[-2000:], y[-2000:])


def cifar10(train: int, test: int = 10_000) -> Split:
    """The first images of CIFAR-10: `[N, 3, 32, 32]`, each channel standardized."""
    with np.load(_file("cifar10_train20k.npz")) as arrays:
        x_train, y_train = _color(arrays["x_train"][:train]), torch.tensor(arrays["y_train"][:train]).long()
    with np.load(_file("cifar10_test.npz")) as arrays:
        x_test, y_test = _color(arrays["x_test"][:test]), torch.tensor(arrays["y_test"][:test]).long()
    return Split(x_train, y_train, x_test, y_test)


def mnist(train: int, test: int = 10_000) -> Split:
    """The first images of MNIST: `[N, 1, 28, 28]`."""
    with np.load(_file("mnist.npz")) as arrays:
        parts = [arrays[name][:count] for name, count in (("x_train", train), ("x_test", test))]
        labels = [torch.tensor(arrays[name][:count]).long() for name, count in (("y_train", train), ("y_test", test))]
    x_train, x_test = (((torch.tensor(part).float() / 255 - 0.1307) / 0.3081).unsqueeze(1) for part in parts)
    return Split(x_train, labels[0], x_test, labels[1])


def foreign(name: str, count: int) -> Tensor:
    """The first images of "kmnist", "fashion_mnist" or "notmnist", scaled as `mnist` is: `[N, 1, 28, 28]`."""
    with np.load(_file(f"{name}_test.npz")) as arrays:
        x = torch.tensor(arrays["x_test"][:count])
    return ((x.float() / 255 - 0.1307) / 0.3081).unsqueeze(1)


def _color(images: np.ndarray) -> Tensor:
    mean, std = torch.tensor([0.491, 0.482, 0.447]), torch.tensor([0.247, 0.243, 0.262])
    return ((torch.tensor(images).float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()


def _file(name: str) -> str:
    path = folder() / name
    if not path.is_file():
        raise MissingDataError(f"This experiment needs {name} in the folder that LAPWING_DATA names.")
    return str(path)
