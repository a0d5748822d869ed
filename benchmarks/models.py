"""Networks of images to measure, written out so that nothing else is needed."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(inputs: int = 784, width: int = 1024, depth: int = 2, classes: int = 10) -> nn.Module:
    """`depth` hidden layers of `width` units."""
    layers: list[nn.Module] = []
    for size in [inputs] + [width] * (depth - 1):
        layers += [nn.Linear(size, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


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


class ShortcutBlock(nn.Module):
    """A basic block whose shortcut has no parameters: strided, new channels zero."""

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
            half = self.extra // 2
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half))
        return functional.relu(out + x)


class CifarResNet(nn.Module):
    """That of He et al. for CIFAR: stages of 16, 32 and 64 channels, `blocks` each (ResNet-20: 3, 32: 5, 56: 9)."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(ShortcutBlock(a, b, 1 if a == b else 2), *(ShortcutBlock(b, b, 1) for _ in range(blocks - 1)))
            for a, b in ((16, 16), (16, 32), (32, 64))
        )
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(functional.relu(self.bn1(self.conv1(x))))))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


class WideBlock(nn.Module):
    """Normalization and activation before each convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(x))
        short = x if self.shortcut is None else self.shortcut(out)
        wide: Tensor = self.conv2(functional.relu(self.bn2(self.conv1(out)))) + short
        return wide


class WideResNet(nn.Module):
    """WRN-16-4: three stages of two blocks, 64, 128 and 256 channels."""

    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.stages = nn.Sequential(*(
            nn.Sequential(WideBlock(a, b, 1 if b == 64 else 2), WideBlock(b, b, 1))
            for a, b in itertools.pairwise([16, 64, 128, 256])
        ))  # fmt: skip
        self.bn = nn.BatchNorm2d(256)
        self.fc = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(functional.relu(self.bn(self.stages(self.conv1(x)))).mean((2, 3)))
        return logits
