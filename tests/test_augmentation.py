"""Networks averaged over copies of their inputs: curvature, predictions, and a range of rotations that is learned."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lapwing import Averaged, InputError, Laplace
from tests import networks, oracles

EXAMPLES, COPIES = 6, 4
PATHS = {"mlp": ["linear", "linear"], "cnn": ["convolution", "convolution", "linear"]}


def many(network: str) -> tuple[nn.Module, Tensor, Tensor]:
    x = networks.inputs(network, EXAMPLES * COPIES).unflatten(0, (EXAMPLES, COPIES))
    return Averaged(networks.make(network)), x, networks.targets("classification", EXAMPLES)


def test_outputs_are_means_over_copies() -> None:
    network = networks.make("mlp")
    model, x, _ = many("mlp")
    model.load_state_dict({f"model.{name}": value for name, value in network.state_dict().items()})
    torch.testing.assert_close(model(x), torch.stack([network(x[:, s]) for s in range(COPIES)]).mean(0))


@pytest.mark.parametrize("network", PATHS)
@pytest.mark.parametrize("structure", ["diag", "block", "full"])
def test_curvature_and_predictions_against_dense_algebra(network: str, structure: str) -> None:
    """The oracle knows nothing of copies: it differentiates the averaged outputs."""
    model, x, y = many(network)
    la = Laplace(model, "classification", structure).fit([(x[:4], y[:4]), (x[4:], y[4:])])
    matrix = oracles.curvature(la, [(x, y)])
    slices = [slice(0, len(matrix))] if structure == "full" else oracles.layer_slices(la)
    matrix = torch.diag(matrix.diagonal()) if structure == "diag" else oracles.block_diagonal(matrix, slices)
    found = torch.block_diag(*[block.accumulator.matrix() for block in la.curvature.blocks])
    torch.testing.assert_close(found, matrix, rtol=1e-9, atol=1e-11)
    rows = oracles.packed_jacobian(la, x)
    inverse = torch.linalg.inv(matrix + torch.eye(len(matrix), dtype=torch.float64))
    expected = torch.einsum("ncp,pq,ndq->ncd", rows, inverse, rows)
    torch.testing.assert_close(la.latent(x).covariance, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("network", PATHS)
@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "full"])
def test_layers_are_read_from_inputs_and_gradients(network: str, structure: str) -> None:
    model, x, y = many(network)
    la = Laplace(model, "classification", structure).fit([(x, y)])
    assert [layer.path for layer in la._state().tape.layers or ()] == PATHS[network]
    assert "fallback" not in la.summary()


@pytest.mark.parametrize(("kron", "scale"), [("reduce", 1.0), ("expand", 1 / COPIES)])
def test_kron_of_equal_copies(kron: str, scale: float) -> None:
    """Copies that are equal are one: "reduce" says so, "expand" takes them for independent."""
    _, _, y = many("mlp")
    network, x = networks.make("mlp"), networks.inputs("mlp", EXAMPLES)
    single = Laplace(network, "classification").fit([(x, y)])
    repeated = x.unsqueeze(1).expand(-1, COPIES, -1)
    la = Laplace(Averaged(network), "classification", kron=kron).fit([(repeated, y)])
    for block, other in zip(la.curvature.blocks, single.curvature.blocks, strict=True):
        torch.testing.assert_close(
            block.accumulator.matrix(), scale * other.accumulator.matrix(), rtol=1e-9, atol=1e-12
        )


def test_inputs_without_copies_are_refused() -> None:
    with pytest.raises(InputError, match=r"inputs \[N, S, ...\]"):
        Averaged(nn.Linear(3, 2))(torch.zeros(3))


def rotated(points: Tensor, angles: Tensor) -> Tensor:
    """Points `[N, 2]` turned by angles `[N, S]`: `[N, S, 2]`."""
    x, y = points.unsqueeze(1).unbind(-1)
    return torch.stack([angles.cos() * x - angles.sin() * y, angles.sin() * x + angles.cos() * y], -1)


def learned_range(label: str) -> tuple[float, Laplace, float]:
    """The half range in degrees, from 10, that the evidence chooses for labels by "radius" or by "angle"."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    radius, angle = 0.5 + 1.5 * torch.rand(100, generator=generator), 2 * math.pi * torch.rand(100, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    y = (radius > 1.25).long() if label == "radius" else (points[:, 0] > 0).long()
    model = Averaged(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)))
    raw, prior = torch.logit(torch.tensor(10 / 180)).requires_grad_(), 1.0
    weights, strength = torch.optim.Adam(model.parameters(), lr=0.02), torch.optim.Adam([raw], lr=0.2)

    def copies() -> Tensor:
        places = (torch.arange(8) + torch.rand(100, 8, generator=generator)) / 8
        return rotated(points, math.pi * torch.sigmoid(raw) * (2 * places - 1))

    first = math.nan
    for step in range(8):
        for _ in range(40):
            squares = torch.stack([value.square().sum() for value in model.parameters()]).sum()
            loss = functional.cross_entropy(model(copies().detach()), y, reduction="sum") + 0.5 * prior * squares
            weights.zero_grad()
            loss.backward()
            weights.step()
        la = Laplace(model, "classification", "ekfac", prior=prior).fit([(copies().detach(), y)]).tune_prior()
        prior = float(la.posterior.precisions["model.0.weight"])
        first = float(la.log_evidence()) if step == 0 else first
        for _ in range(5):
            strength.zero_grad()
            (-la.data_evidence(copies(), y)).backward()
            strength.step()
    return 180 * torch.sigmoid(raw).item(), la, first


def test_the_evidence_learns_the_range_of_an_invariance() -> None:
    """All angles where only the radius counts, none where the angle does, from the same start."""
    grown, la, first = learned_range("radius")
    assert grown > 150
    assert float(la.log_evidence()) > first
    shrunk, la, first = learned_range("angle")
    assert shrunk < 4
    assert float(la.log_evidence()) > first


def test_averaged_outputs_are_read() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x: torch.Tensor) -> tuple[str, torch.Tensor]:
            return "other", self.layer(x)

    model, x = Pair(), torch.randn(4, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(Averaged(model, output=lambda found: found[1])(x), model.layer(x.mean(1)))
