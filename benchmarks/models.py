"""Networks to measure, written out so that nothing else is needed."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )  # fmt: skip


def lenet5() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        return functional.relu(self.bn2(self.conv2(out)) + self.shortcut(x), inplace=True)


class ResNet18(nn.Module):
    """The layout of the ImageNet network (7×7 stem, max pooling), 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        widths = [64, 64, 128, 256, 512]
        self.stages = nn.Sequential(*(
            nn.Sequential(BasicBlock(a, b, 1 if b == 64 else 2), BasicBlock(b, b, 1))
            for a, b in itertools.pairwise(widths)
        ))  # fmt: skip
        self.fc = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x)), inplace=True), 3, 2, 1)
        logits: Tensor = self.fc(torch.flatten(functional.adaptive_avg_pool2d(self.stages(x), 1), 1))
        return logits
