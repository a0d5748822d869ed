"""ResNet-20 for CIFAR-10, its weights and its images."""

from __future__ import annotations

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.data import MissingDataError, folder


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.extra = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.extra:
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra // 2, self.extra // 2))
        return functional.relu(out + x)


class ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(functional.relu(self.bn1(self.conv1(x))))))
        outputs: Tensor = self.linear(x.mean((2, 3)))
        return outputs


def trained() -> nn.Module:
    """With the weights in `../weights` beside the folder that LAPWING_DATA names."""
    path = folder().parent / "weights" / "resnet20_cifar10.safetensors"
    if not path.is_file():
        raise MissingDataError("This experiment needs ../weights/resnet20_cifar10.safetensors beside LAPWING_DATA.")
    model = ResNet20()
    model.load_state_dict({name.removeprefix("module."): value for name, value in load_file(path).items()})
    return model.eval()


def images(name: str, key: str, count: int) -> tuple[Tensor, Tensor]:
    """The first images `[N, 3, 32, 32]` of a file, standardized as in training, and their labels."""
    path = folder() / name
    if not path.is_file():
        raise MissingDataError(f"This experiment needs {name} in the folder that LAPWING_DATA names.")
    with np.load(path) as arrays:
        x, y = torch.tensor(arrays[f"x_{key}"][:count]), torch.tensor(arrays[f"y_{key}"][:count]).long()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((x.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous(), y
