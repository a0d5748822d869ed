"""Gradients of images that come a few examples at a time against the same all at once, and against dense algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lapwing import Laplace, delivery
from lapwing.batches import Inputs
from lapwing.delivery import Delivery
from lapwing.tape import Tape
from tests import networks, oracles

IMAGES = ["cnn", "grouped-cnn", "conv1d", "conv3d", "upsampling", "norms"]


def watch(monkeypatch: pytest.MonkeyPatch, close: int) -> list[range]:
    """As of large images: columns are handed on as they come, so many examples at a time as have `close` bytes; which
    examples came together.
    """
    found: list[range] = []
    inner = Delivery._consume

    def watched(self: Delivery, name: str, gradients: list[Tensor], examples: range) -> None:
        found.append(examples)
        inner(self, name, gradients, examples)

    monkeypatch.setattr(delivery, "_SMALL", -1)
    monkeypatch.setattr(delivery, "_CLOSE", close)
    monkeypatch.setattr(Delivery, "_consume", watched)
    return found


@pytest.fixture(params=[1, 400])
def parts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[range]:
    """One example at a time, or a few."""
    return watch(monkeypatch, request.param)


@pytest.mark.parametrize("structure", ["diag", "ekfac"])
@pytest.mark.parametrize("network", IMAGES)
def test_squares_of_gradients_in_parts(network: str, structure: str, parts: list[range]) -> None:
    data = networks.batches(networks.inputs(network, 7), networks.targets("classification", 7), 4, 3)
    la = Laplace(networks.make(network), "classification", structure).fit(data)
    assert any(0 < part.start < part.stop for part in parts)
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
def test_predictions_in_parts(network: str, structure: str, parts: list[range]) -> None:
    x = networks.inputs(network, 7)
    data = networks.batches(x, networks.targets("classification", 7), 4, 3)
    la = Laplace(networks.make(network), "classification", structure).fit(data)
    jacobian = oracles.packed_jacobian(la, x)
    parts.clear()
    found = la.latent(x).covariance
    assert any(0 < part.start < part.stop for part in parts)
    curvature = torch.block_diag(*(block.accumulator.matrix() for block in la.curvature.blocks))
    covariance = torch.linalg.inv(curvature + torch.eye(len(curvature), dtype=curvature.dtype))
    expected = jacobian @ covariance @ jacobian.mT
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(la.latent(x, joint=True).covariance, _joint(jacobian, covariance), rtol=1e-9, atol=1e-12)
    single = la.latent(x, diagonal=True).covariance  # a column at a time
    torch.testing.assert_close(single, expected.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-12)
    if structure != "lowrank":
        shifted = la.at(center="newton")
        step = torch.cat([block.block.pack(shifted.posterior.step) for block in shifted.posterior.blocks])
        mean = oracles.evaluate(la.model, x) + jacobian @ step
        torch.testing.assert_close(shifted.latent(x).mean, mean, rtol=1e-9, atol=1e-12)


def test_parts_of_several_examples_with_fewer_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found = watch(monkeypatch, 3 * 2 * 2 * 16 * 8)  # three examples, two columns of two channels each
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)).double()
    data = [(torch.randn(8, 1, 4, 4, dtype=torch.float64), torch.arange(8) % 3)]
    la = Laplace(model, "classification", "diag").fit(data)
    assert {range(3), range(3, 6), range(6, 8)} <= set(found)
    diagonal = la.posterior.curvature_diagonal()
    packed = torch.cat([layer.pack(diagonal) for block in la.curvature.blocks for layer in block.layers])
    torch.testing.assert_close(packed, oracles.curvature(la, data).diagonal(), rtol=1e-10, atol=1e-12)


def test_what_waits_fits_into_the_budget() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 40)).double()
    x = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    waiting = 6 * (144 + 40) * 8  # bytes of a column
    for budget, columns in ((2**30, 64), (20 * waiting, 10), (waiting, 1)):
        tape = Tape(model, dict(model.named_parameters()), budget=budget)
        assert tape.record(Inputs((x,), {}))._columns_at_once() == columns


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
