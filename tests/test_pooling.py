"""The largest number of every window, and where it was: torch's, wherever numbers are equal too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lapwing import pooling
from lapwing.batches import Inputs
from lapwing.tape import Tape

# kernel, stride, padding, dilation
WINDOWS: list[tuple[Any, Any, Any, Any]] = [
    (2, None, 0, 1), (2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 1), ((1, 2), (2, 1), 0, 1), ((2, 1), (1, 2), 0, 1),
    ((3, 2), (1, 3), (1, 0), (2, 1)), (5, 3, 2, 2), ([4], [1], [2], [1]), ((1, 2), [], 0, 1), ((1, 3), 1, (0, 1), 1),
]  # fmt: skip


def images(dtype: torch.dtype = torch.float64, equal: bool = True) -> Tensor:
    """With many equal numbers next to each other, as of constant areas, or with none."""
    x = torch.randn(9, 7, 17, 18, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return x.round() if equal else x


def both(x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    found = pooling.max_pool2d(x, *window)
    assert found is not None
    return found, functional.max_pool2d(x, *window)


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", WINDOWS)
def test_is_torchs(window: tuple[Any, ...], dtype: torch.dtype, equal: bool) -> None:
    x = images(dtype, equal).requires_grad_()
    found, expected = both(x, *window)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    g = torch.randn(expected.shape, dtype=dtype)
    ours, theirs = (torch.autograd.grad(value, x, g)[0] for value in (found, expected))
    assert ours.count_nonzero() > 100
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # where windows overlap, sums in any order


@pytest.mark.parametrize("window", WINDOWS)
def test_may_be_changed_in_place(window: tuple[Any, ...]) -> None:
    x = images(equal=False).requires_grad_()
    found, expected = (torch.autograd.grad(value.mul_(2).exp_().sum(), x)[0] for value in both(x, *window))
    torch.testing.assert_close(found, expected)


def test_wide_images() -> None:
    """Of which a window sees pixels so far apart that their numbers are large."""
    x = torch.randn(1, 1, 6, 9000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    found, expected = (torch.autograd.grad(value.square().sum(), x)[0] for value in both(x, 3))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_twice_differentiable() -> None:
    x = images(equal=False).requires_grad_()
    seconds = []
    for pooled in both(x, 2):
        (first,) = torch.autograd.grad(pooled.square().sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.pow(3).sum(), x)[0])
    assert seconds[0].count_nonzero() > 100
    torch.testing.assert_close(*seconds)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_torchs(value: float) -> None:
    x = images()
    x[3, 2, 5, 5] = value
    assert pooling.max_pool2d(x, 2) is None
    x[3, 2, 5, 5] = -torch.inf
    assert pooling.max_pool2d(x, 2) is not None  # something else is larger
    x[3, 2] = -torch.inf
    assert pooling.max_pool2d(x, 2) is None


def test_what_is_left_to_torch() -> None:
    x = images()
    assert pooling.max_pool2d(x, 2, ceil_mode=True) is None
    assert pooling.max_pool2d(x, 2, return_indices=True) is None
    assert pooling.max_pool2d(x[0], 2) is None
    assert pooling.max_pool2d(x[:1, :1], 2) is None
    assert pooling.max_pool2d(x, 6) is None
    assert pooling.max_pool2d(x, 1, 2) is None
    assert pooling.max_pool2d(x, 2, padding=2) is None  # an error of torch's
    assert pooling.max_pool2d(x, 5, dilation=5) is None  # another
    assert pooling.max_pool2d(x.to(memory_format=torch.channels_last), 2) is None
    assert pooling.max_pool2d(x.to(torch.bfloat16), 2) is None
    numbers: list[Any] = [np.int64(2), torch.tensor(2), 2.0, True, 0, (2, 2, 2), (), [2.0, 2.0], "2"]
    for odd in numbers:
        assert pooling.max_pool2d(x, odd) is None
        assert isinstance(odd, tuple) or pooling.max_pool2d(x, 2, odd) is None
        assert pooling.max_pool2d(x, 2, dilation=odd) is None
    seen: list[object] = []

    def transformed(one: Tensor) -> Tensor:
        seen.append(pooling.max_pool2d(one, 2))
        return one

    torch.func.vmap(transformed)(x.unsqueeze(1))
    torch.func.jvp(transformed, (x,), (x,))
    one = torch.ones(())

    def of_another(other: Tensor) -> Tensor:
        return transformed(x).sum() * other

    torch.func.vmap(of_another)(one.unsqueeze(0))
    torch.func.grad(of_another)(one.double())
    torch.func.jvp(of_another, (one,), (one,))
    assert seen == [None] * 5


def test_in_a_recorded_pass() -> None:
    """By name and by place; what comes after may change it in place."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 7 * 7, 3)

        def forward(self, x: Tensor) -> Tensor:
            pooled = functional.max_pool2d(input=self.convolution(x), kernel_size=2).relu_()
            logits: Tensor = self.head(pooled.flatten(1))
            return logits

    torch.manual_seed(0)
    model = Model().double()
    x = torch.randn(32, 1, 16, 16, dtype=torch.float64)
    record = Tape(model, dict(model.named_parameters())).record(Inputs((x,), {}))
    assert _nodes(record.outputs) >= {"MaxPool2DWithIndicesBackward"}
    torch.testing.assert_close(record.outputs, model(x))
    loss, expected = record.outputs.square().sum(), model(x).square().sum()
    for ours, theirs in zip(*(torch.autograd.grad(v, list(model.parameters())) for v in (loss, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def _nodes(value: Tensor) -> set[str]:
    found, stack = set(), [value.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None:
            found.add(node.name())
            stack.extend(child for child, _ in node.next_functions)
    return found
