"""Gradients of images that come a few examples at a time against the same all at once, and against dense algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lapwing import Laplace, delivery
from lapwing.delivery import Delivery
from tests import networks, oracles

IMAGES = ["cnn", "grouped-cnn", "conv1d", "conv3d", "upsampling", "norms"]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """As of large images: columns are handed on as they come, one example at a time; which examples came together."""
    found: list[range] = []
    inner = Delivery._consume

    def watched(self: Delivery, name: str, gradients: list[Tensor], examples: range) -> None:
        found.append(examples)
        inner(self, name, gradients, examples)

    monkeypatch.setattr(delivery, "_SMALL", -1)
    monkeypatch.setattr(delivery, "_CLOSE", 1)
    monkeypatch.setattr(Delivery, "_consume", watched)
    return found


@pytest.mark.parametrize("structure", ["diag", "ekfac"])
@pytest.mark.parametrize("network", IMAGES)
def test_squares_of_gradients_one_example_at_a_time(network: str, structure: str, parts: list[range]) -> None:
    data = networks.batches(networks.inputs(network, 7), networks.targets("classification", 7), 4, 3)
    la = Laplace(networks.make(network), "classification", structure).fit(data)
    assert range(3, 4) in parts
    dense, found = oracles.curvature(la, data), la.posterior.curvature_diagonal()
    for block, part in zip(la.curvature.blocks, oracles.layer_slices(la), strict=True):
        own = dense[part, part]
        if block.accumulator.kind == "ekfac":
            basis = block.accumulator.decompose(None).basis
            vectors = basis.expand(torch.eye(block.size, dtype=own.dtype).unflatten(1, basis.shape)).T
            own = vectors @ torch.diag((vectors.T @ own @ vectors).diagonal()) @ vectors.T
        packed = torch.cat([layer.pack(found) for layer in block.layers])
        torch.testing.assert_close(packed, own.diagonal(), rtol=1e-10, atol=1e-12)
    for name, value in la.curvature.gradient.items():  # made of the first column, which comes whole
        own_gradient = Laplace(networks.make(network), "classification", "kron").fit(data).curvature.gradient[name]
        torch.testing.assert_close(value, own_gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "lowrank"])
@pytest.mark.parametrize("network", IMAGES)
def test_predictions_one_example_at_a_time(network: str, structure: str, parts: list[range]) -> None:
    x = networks.inputs(network, 7)
    data = networks.batches(x, networks.targets("classification", 7), 4, 3)
    la = Laplace(networks.make(network), "classification", structure).fit(data)
    jacobian = oracles.packed_jacobian(la, x)
    parts.clear()
    found = la.latent(x).covariance
    assert range(6, 7) in parts
    curvature = torch.block_diag(*(block.accumulator.matrix() for block in la.curvature.blocks))
    covariance = torch.linalg.inv(curvature + torch.eye(len(curvature), dtype=curvature.dtype))
    torch.testing.assert_close(found, jacobian @ covariance @ jacobian.mT, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(la.latent(x, joint=True).covariance, _joint(jacobian, covariance), rtol=1e-9, atol=1e-12)


def _joint(jacobian: Tensor, covariance: Tensor) -> Tensor:
    rows = jacobian.flatten(0, 1)
    return rows @ covariance @ rows.T


def test_uses_that_do_not_divide_come_whole(parts: list[range]) -> None:
    """A kernel that is used twice, and images that are several to an example."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(2 * 16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(torch.tanh(self.conv(x))).flatten(1))

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(2 * 2 * 16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.conv(x.flatten(0, 1).unsqueeze(1))).reshape(len(x), -1))

    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(5, 2, 4, 4, generator=generator, dtype=torch.float64), torch.arange(5) % 3)]
    for build in (Twice, Several):
        torch.manual_seed(0)
        la = Laplace(build().double(), "classification", "diag").fit(data)
        expected = oracles.curvature(la, data).diagonal()
        diagonal = la.posterior.curvature_diagonal()
        packed = torch.cat([layer.pack(diagonal) for block in la.curvature.blocks for layer in block.layers])
        torch.testing.assert_close(packed, expected, rtol=1e-10, atol=1e-12)
        assert set(parts) == {range(5)}
        parts.clear()
