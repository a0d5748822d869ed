"""The networks, their data and their training: stochastic, stopped early, and never at a mode of the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data import Split, mnist, uci


@dataclass(frozen=True)
class Case:
    """A network with its data; `fit` and `tuning` are options of the fit and of the linear-evidence tuning."""

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[], Split]
    likelihood: str = "classification"
    fit: dict[str, Any] = field(default_factory=lambda: {"structure": "full"})
    tuning: dict[str, Any] = field(default_factory=dict)
    epochs: int = 20
    dtype: torch.dtype = torch.float64


class Residual(nn.Module):
    """Two convolutions beside a shortcut; without norms they start at half their size, so that sums stay bounded."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=not norm)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=not norm)
        self.norm_1 = nn.BatchNorm2d(outputs) if norm else nn.Identity()
        self.norm_2 = nn.BatchNorm2d(outputs) if norm else nn.Identity()
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else nn.Identity()
        if not norm:
            with torch.no_grad():
                self.second.weight.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm_1(self.first(x)))
        return functional.relu(self.norm_2(self.second(inner)) + self.shortcut(x))


def resnet(norm: bool) -> nn.Module:
    """A stem and two residual blocks, of 4 and 6 channels."""
    stem: list[nn.Module] = [nn.Conv2d(1, 4, 3, 1, 1, bias=not norm)]
    if norm:
        stem.append(nn.BatchNorm2d(4))
    blocks = [Residual(4, 4, 1, norm), Residual(4, 6, 2, norm)]
    return nn.Sequential(*stem, nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10))


class Block(nn.Module):
    """Attention and a small perceptron, each behind a LayerNorm, each adding to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True, bias=False)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        added: Tensor = self.down(functional.gelu(self.up(self.norm_2(x))))
        return x + added


class Transformer(nn.Module):
    """16 patches of 4 × 4 pixels, two pre-norm blocks, a norm before the head."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width, bias=False)
        self.position = nn.Parameter(0.1 * torch.randn(1, 16, width))
        self.blocks = nn.Sequential(Block(width, heads), Block(width, heads))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3).flatten(3).squeeze(1)
        outputs: Tensor = self.head(self.norm(self.blocks(self.embed(patches) + self.position)).mean(1))
        return outputs


class Unet(nn.Module):
    """An autoencoder of 16 × 16 images with skips between equal resolutions, GroupNorm behind every convolution."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.down_1, self.down_2 = _normed(1, width), _normed(width, 2 * width)
        self.bottom = _normed(2 * width, 2 * width)
        self.up_2, self.up_1 = _normed(4 * width, width), _normed(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down_1(x)
        coarse = self.down_2(functional.avg_pool2d(fine, 2))
        deep = functional.interpolate(self.bottom(functional.avg_pool2d(coarse, 2)), scale_factor=2.0)
        middle = self.up_2(torch.cat([coarse, deep], 1))
        top = self.up_1(torch.cat([fine, functional.interpolate(middle, scale_factor=2.0)], 1))
        image: Tensor = self.out(top)
        return image.flatten(1)


def _normed(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(1, outputs), nn.ReLU())


def mlp(*widths: int) -> nn.Module:
    """Linear, BatchNorm and ReLU up to the last layer."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths[:-1]):
        layers += [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


def lenet() -> nn.Module:
    """Two convolutions and two linear layers on images of 16 × 16 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10),
    )  # fmt: skip


def energy() -> Split:
    return uci("energy")


def digits(train: int = 400, test: int = 1000) -> Split:
    """MNIST with 16 × 16 pixels."""
    split = mnist(train, test)
    return Split(_smaller(split.x_train), split.y_train, _smaller(split.x_test), split.y_test)


def noisy_digits(train: int = 100, test: int = 100) -> Split:
    """Digits: the input has noise of standard deviation 0.5, the target `[N, 256]` none."""
    split = digits(train, test)
    generator = torch.Generator().manual_seed(0)
    noisy = [x + 0.5 * torch.randn(x.shape, generator=generator) for x in (split.x_train, split.x_test)]
    return Split(noisy[0], split.x_train.flatten(1), noisy[1], split.x_test.flatten(1))


def _smaller(images: Tensor) -> Tensor:
    """`[N, 1, 28, 28]`, padded with background, to `[N, 1, 16, 16]`."""
    return functional.avg_pool2d(functional.pad(images, (2, 2, 2, 2), value=float(images.min())), 2)


def train(case: Case, split: Split, seed: int = 0) -> nn.Module:
    """Adam on batches of 50, with a weight decay, for a fixed number of epochs."""
    torch.manual_seed(seed)
    model = case.build().to(case.dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    steps = case.epochs * (len(split.x_train) // 50)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for _ in range(case.epochs):
        for index in torch.randperm(len(split.x_train)).split(50):
            if len(index) < 50:
                continue
            outputs = model(split.x_train[index])
            target = split.y_train[index]
            regression = case.likelihood == "regression"
            loss = functional.mse_loss(outputs, target) if regression else functional.cross_entropy(outputs, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


CASES = {
    case.name: case
    for case in (
        Case("MLP + BatchNorm", lambda: mlp(8, 20, 20, 1), energy, "regression", epochs=10),
        Case(
            "MLP + BatchNorm, kron", lambda: mlp(8, 20, 20, 1), energy, "regression", {"structure": "kron"}, epochs=10
        ),
        Case("LeNet", lenet, digits),
        Case("ResNet + BatchNorm", lambda: resnet(True), digits, epochs=30),
        Case("ResNet", lambda: resnet(False), digits, epochs=30),
        Case("transformer + LayerNorm", Transformer, digits, epochs=40),
        Case("U-Net + GroupNorm", Unet, noisy_digits, "regression", epochs=80),
    )
}
LARGE = Case(
    "MLP + BatchNorm, 22.8M weights, kron", lambda: mlp(784, *[1750] * 8, 10), lambda: mnist(500, 1000),
    "classification", {"structure": "kron", "rank_tolerance": 1e-3, "memory_budget": 2**32},
    {"max_mode_steps": 10, "max_rounds": 2, "tolerance": 3e-2, "mode_tolerance": 1e-2}, 4, torch.float32,
)  # fmt: skip
