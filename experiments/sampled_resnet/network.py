"""ResNet-20 for CIFAR-10, its weights and its images."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.data import IMAGENET, MissingDataError, folder
from benchmarks.models import ResNet20
from benchmarks.workloads import resnet20_weights


def trained() -> nn.Module:
    """With the weights in `../weights` beside the folder that LAPWING_DATA names."""
    model = ResNet20()
    model.load_state_dict(resnet20_weights())
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
