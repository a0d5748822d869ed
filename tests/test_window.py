"""Weight gradients of convolutions, however they are computed, against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing.layers import window as windows
from lapwing.layers.window import Window


def by_autograd(window: Window, x: Tensor, g: Tensor) -> Tensor:
    kernels = torch.zeros(g.shape[1], x.shape[1], *window.kernel, dtype=x.dtype, requires_grad=True)
    y = torch.convolution(
        x, kernels, None, window.stride, window.before, window.dilation, False, [0] * window.dimensions, 1
    )
    (found,) = torch.autograd.grad(y, kernels, g)
    return found


@pytest.mark.parametrize("cache", [2**22, 1000])  # all images at once, and one or two at a time
@pytest.mark.parametrize(
    ("space", "kernel", "stride", "dilation", "padding"),
    [
        ((28, 28), (5, 5), (1, 1), (1, 1), (2, 2)),
        ((7, 9), (3, 2), (2, 3), (1, 1), (1, 0)),
        ((9, 9), (3, 3), (1, 2), (1, 2), (0, 1)),
        ((9, 9), (3, 3), (1, 2), (2, 2), (0, 1)),  # the library's
        ((5, 6, 7), (2, 3, 2), (1, 2, 1), (1, 1, 2), (1, 0, 1)),
        ((9,), (3,), (2,), (1,), (1,)),  # the library's
        ((9, 1), (3, 1), (2, 1), (1, 1), (1, 0)),  # the library's
    ],
)
def test_images_of_one_channel(
    space: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...],
    cache: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(windows, "_CACHE", cache)
    monkeypatch.setattr(windows, "_FEW", 1)
    window, generator = Window(kernel, stride, dilation, padding, padding), torch.Generator().manual_seed(0)
    x = torch.randn(5, 1, *space, generator=generator, dtype=torch.float64)
    g = torch.randn(5, 3, *window.positions(x.shape[2:]), generator=generator, dtype=torch.float64)
    expected = by_autograd(window, x, g)
    torch.testing.assert_close(window.weight_gradient(x, g, 1), expected, rtol=1e-12, atol=1e-12)
    strided = g.transpose(0, 1).contiguous().transpose(0, 1)  # as gradients may come
    torch.testing.assert_close(window.weight_gradient(x, strided, 1), expected, rtol=1e-12, atol=1e-12)
