"""A U-Net for dense outputs, and images with a mask to try it on."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class UNet(nn.Module):
    """Images `[N, channels, H, W]` to logits `[N, classes, H, W]`; H and W multiples of `2**levels`.

    Two convolutions with BatchNorm on every level, max-pooling down, transposed convolutions up, and skip
    connections between. With `width=24` and 3 levels it has 1.1 million weights.
    """

    def __init__(self, channels: int = 3, classes: int = 2, width: int = 24, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(_pair(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * b, b, 2, stride=2) for b in reversed(widths[:-1]))
        self.merge = nn.ModuleList(_pair(2 * b, b) for b in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips[:-1]), strict=True):
            x = merge(torch.cat([up(x), skip], dim=1))
        logits: Tensor = self.head(x)
        return logits


def _pair(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
    )  # fmt: skip


def discs(count: int, size: int = 128, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noisy images `[count, 3, size, size]` of a few bright discs, and 1 where they are: `[count, size, size]`."""
    generator = torch.Generator().manual_seed(seed)
    axis = torch.linspace(-1, 1, size)
    centers = torch.rand(count, 4, 2, 1, 1, generator=generator) * 2 - 1
    radii = torch.rand(count, 4, 1, 1, generator=generator) * 0.3
    distances = ((axis[:, None] - centers[:, :, 0]) ** 2 + (axis - centers[:, :, 1]) ** 2).sqrt()
    mask = (distances < radii).any(1)
    noise = torch.randn(count, 3, size, size, generator=generator)
    return mask.unsqueeze(1) + 0.7 * noise, mask.long()
