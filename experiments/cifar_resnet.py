"""Published residual networks for CIFAR-10, and images as they take them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.data import IMAGENET, MissingDataError, folder
from benchmarks.models import CifarResNet
from benchmarks.workloads import cifar_resnet_weights


def trained(layers: int = 20) -> nn.Module:
    """Of 20, 32 or 56 layers, with the weights in `../weights` beside the folder that LAPWING_DATA names."""
    model = CifarResNet((layers - 2) // 6)
    model.load_state_dict(cifar_resnet_weights(layers))
    return model.eval()


def images(name: str, key: str, count: int) -> tuple[Tensor, Tensor]:
    """The first images `[N, 3, 32, 32]` of a file, standardized as in training, and their labels."""
    path = folder() / name
    if not path.is_file():
        raise MissingDataError(f"This experiment needs {name} in the folder that LAPWING_DATA names.")
    with np.load(path) as arrays:
        x, y = torch.tensor(arrays[f"x_{key}"][:count]), torch.tensor(arrays[f"y_{key}"][:count]).long()
    mean, std = IMAGENET
    return ((x.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous(), y
