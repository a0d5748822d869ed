"""Kronecker factors against loops over examples with forward hooks, and where they are exact."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lapwing import Laplace
from lapwing.basis import KroneckerBasis
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.single_positions import without_curvature
from tests import networks, oracles


@pytest.mark.parametrize("kind", ["ggn", "fisher", "empirical"])
@pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])
def test_factors_of_every_curvature_and_likelihood(kind: str, likelihood: str) -> None:
    model = networks.make("cnn").eval()
    x, y = networks.inputs("cnn", 4), networks.targets(likelihood, 4)
    la = Laplace(model, likelihood, "kron", kind).fit([(x, y)], generator=torch.Generator().manual_seed(5))
    outputs = oracles.evaluate(model, x)
    drawn = la.likelihood.sampled_gradients(outputs, y, 1, torch.Generator().manual_seed(5))
    position = iter(range(10_000))

    def one(single: Tensor) -> Tensor:
        n = next(position) % 4
        if kind == "fisher":
            return drawn[:, n : n + 1]
        if kind == "empirical":
            return oracles.output_gradients(la.likelihood, single, y[n : n + 1]).unsqueeze(0)
        found = la.likelihood.hessian_columns(single, y[n : n + 1])
        return found.part(0, found.count)

    for block in la.curvature.blocks:
        expected = oracles.kron_factors(model, model.get_submodule(block.name), x, one, False)
        torch.testing.assert_close(block.accumulator.matrix(), expected, rtol=1e-10, atol=1e-12)


def columns(outputs: Tensor) -> Tensor:
    likelihood = Categorical()
    target = torch.zeros(len(outputs), dtype=torch.long)
    found = likelihood.hessian_columns(outputs, target)
    return found.part(0, found.count)


@pytest.mark.parametrize("kron", ["expand", "reduce"])
@pytest.mark.parametrize("network", ["mlp", "cnn", "conv1d", "conv3d", "tied", "sequence-first", "batchnorm"])
def test_factors_against_hooks(network: str, kron: str) -> None:
    model = networks.make(network).eval()
    x = networks.inputs(network, 5)
    data = networks.batches(x, networks.targets("classification", 5), 3, 2)
    la = Laplace(model, "classification", kron=kron).fit(data)
    checked = 0
    for block in la.curvature.blocks:
        if block.accumulator.kind == "kron":
            module = model.get_submodule(block.name)
            expected = oracles.kron_factors(model, module, x, columns, kron == "reduce")
            torch.testing.assert_close(block.accumulator.matrix(), expected, rtol=1e-10, atol=1e-12)
            checked += 1
    assert checked == sum(
        isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in model.modules()
    )


def test_groups_have_factors_of_their_own() -> None:
    """A grouped convolution is a set of convolutions side by side."""
    model = networks.make("grouped-cnn").eval()
    x = networks.inputs("grouped-cnn", 4)
    la = Laplace(model, "classification").fit([(x, networks.targets("classification", 4))])
    block = la.curvature.blocks[0]
    assert block.layers[0].shape == (2, 2, 10)
    first, second = nn.Conv2d(1, 2, 3, padding="same", dilation=2), nn.Conv2d(1, 2, 3, padding="same", dilation=2)
    split = _Split(model, first, second).double().eval()
    for i, conv in enumerate((first, second)):
        expected = oracles.kron_factors(split, conv, x, columns, False)
        found = block.accumulator.matrix()[20 * i : 20 * (i + 1), 20 * i : 20 * (i + 1)]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class _Split(nn.Module):
    """The grouped network with its first convolution as two modules."""

    def __init__(self, model: nn.Module, first: nn.Conv2d, second: nn.Conv2d) -> None:
        super().__init__()
        self.model, self.parts = model, nn.ModuleList([first, second])
        with torch.no_grad():
            for i, conv in enumerate((first, second)):
                conv.weight.data = model.first.weight.data[2 * i : 2 * i + 2]  # type: ignore[union-attr,index]
                conv.bias.data = model.first.bias.data[2 * i : 2 * i + 2]  # type: ignore[union-attr,index]

    def forward(self, x: Tensor) -> Tensor:
        halves = [conv(part) for conv, part in zip(self.parts, x.split(1, dim=1), strict=True)]
        x = torch.relu(torch.cat(halves, dim=1))
        x = torch.tanh(self.model.second(x))  # type: ignore[operator]
        return self.model.head(nn.functional.adaptive_avg_pool2d(x, 2).flatten(1))  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize("network", ["mlp", "tied-embedding"])
def test_exact_for_one_example_without_sharing(network: str) -> None:
    model = networks.make(network)
    data = [(networks.inputs(network, 1), networks.targets("classification", 1))]
    kron = Laplace(model, "classification").fit(data)
    block = Laplace(model, "classification", "block").fit(data)
    for left, right in zip(kron.curvature.blocks, block.curvature.blocks, strict=True):
        torch.testing.assert_close(left.accumulator.matrix(), right.accumulator.matrix(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kron", ["expand", "reduce"])
def test_exact_for_deep_linear_networks(kron: str) -> None:
    """Gaussian noise and no nonlinearity: expand where every position has an output of its own, reduce where
    the outputs average over positions."""

    class DeepLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            outputs = self.layers(x)
            return outputs if kron == "expand" else outputs.mean(1)

    torch.manual_seed(0)
    model = DeepLinear().double()
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    y = torch.randn(6, 4, 2, dtype=torch.float64) if kron == "expand" else torch.randn(6, 2, dtype=torch.float64)
    found = Laplace(model, Gaussian(), kron=kron).fit([(x[:4], y[:4]), (x[4:], y[4:])])
    exact = Laplace(model, Gaussian(), "block").fit([(x, y)])
    for left, right in zip(found.curvature.blocks, exact.curvature.blocks, strict=True):
        torch.testing.assert_close(left.accumulator.matrix(), right.accumulator.matrix(), rtol=1e-10, atol=1e-12)


def test_large_sides_are_diagonal() -> None:
    """`max_factor`: that side keeps the identity basis; everything downstream still matches dense algebra."""
    model = networks.make("mlp")
    x = networks.inputs("mlp", 6)
    data = [(x, networks.targets("classification", 6))]
    whole = Laplace(model, "classification").fit(data)
    la = Laplace(model, "classification", max_factor=3).fit(data)
    for block, reference in zip(la.curvature.blocks, whole.curvature.blocks, strict=True):
        accumulator = reference.accumulator
        factors = [accumulator.outputs[0], accumulator.inputs[0] / 6]  # type: ignore[attr-defined]
        factors = [f if len(f) <= 3 else torch.diag(f.diagonal()) for f in factors]
        torch.testing.assert_close(block.accumulator.matrix(), torch.kron(*factors), rtol=1e-12, atol=1e-14)
    matrix = torch.block_diag(*[block.accumulator.matrix() for block in la.curvature.blocks])
    inverse = torch.linalg.inv(matrix + torch.eye(len(matrix), dtype=torch.float64))
    rows = oracles.packed_jacobian(la, x)
    torch.testing.assert_close(la.latent(x).covariance, torch.einsum("nci,ij,ndj->ncd", rows, inverse, rows))


def test_layers_without_kronecker_form() -> None:
    """Dense up to `max_dense`, then parameter by parameter, then diagonal."""
    model, data = networks.make("lstm"), [(networks.inputs("lstm", 4), networks.targets("classification", 4))]
    for limit, kinds in (
        (100, ["dense", "kron"]),
        (10, ["diag", "diag", "dense", "dense", "kron"]),
        (0, ["diag"] * 4 + ["kron"]),
    ):
        la = Laplace(model, "classification", max_dense=limit).fit(data)
        assert [block.accumulator.kind for block in la.curvature.blocks] == kinds


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 40), (40, 5), (40, 40)])
def test_null_directions_are_not_rotated_into(shape: tuple[int, int], bias: bool) -> None:
    """Few data, many inputs or outputs: leaving out directions without curvature changes nothing beyond rounding."""
    torch.manual_seed(0)
    inputs, hidden = shape
    model = nn.Sequential(nn.Linear(inputs, hidden, bias), nn.Tanh(), nn.Linear(hidden, 2, bias)).double()
    x, y = torch.randn(3, inputs, dtype=torch.float64), torch.tensor([0, 1, 0])
    la = Laplace(model, "classification").fit([(x, y)])
    block = la.posterior.blocks[0]
    assert isinstance(block.basis, KroneckerBasis)
    skipped = [without_curvature(block.basis, block.scale.detach(), side) for side in (0, 1)]
    assert skipped == [hidden - 3, inputs + bias - 3]
    test = torch.cat([torch.randn(4, inputs, dtype=torch.float64), x])
    rows = oracles.packed_jacobian(la, test)
    matrix = torch.block_diag(*[block.accumulator.matrix() for block in la.curvature.blocks])
    inverse = torch.linalg.inv(matrix + torch.eye(len(matrix), dtype=torch.float64))
    expected = torch.einsum("nci,ij,ndj->ncd", rows, inverse, rows)
    torch.testing.assert_close(la.latent(test).covariance, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(la.latent(test, diagonal=True).covariance, expected.diagonal(dim1=1, dim2=2))


def test_directions_are_left_out_only_where_rounding_allows() -> None:
    """On data that the curvature is made of, variances are small differences; so much must not get lost in them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
    x, y = torch.randn(3, 40), torch.randn(3, 2)
    single = Laplace(model, Gaussian(noise=1e-6)).fit([(x, y)])
    double = Laplace(copy.deepcopy(model).double(), Gaussian(noise=1e-6)).fit([(x.double(), y.double())])
    found, expected = single.latent(x).covariance.double(), double.latent(x.double()).covariance
    assert float(expected.diagonal(dim1=1, dim2=2).max()) < 1e-4  # against 1e2 elsewhere
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_second_derivatives_where_nothing_is_left_outside_the_curvature() -> None:
    """On the data itself what the curved directions leave of an input is 0 up to rounding, of either sign."""
    torch.manual_seed(0)
    model = nn.Linear(12, 3).double()
    x = torch.randn(4, 12, dtype=torch.float64)
    la = Laplace(model, "regression").fit([(x, torch.randn(4, 3, dtype=torch.float64))])
    inverse = torch.linalg.inv(la.curvature.blocks[0].accumulator.matrix() + torch.eye(39, dtype=torch.float64))

    def variance(own: Tensor) -> Tensor:
        return la.latent(own.unsqueeze(0)).covariance[0, 0, 0]

    for own in x:
        found = torch.autograd.functional.hessian(variance, own)
        torch.testing.assert_close(found, 2 * inverse[:12, :12], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("network", ["cnn", "grouped-cnn", "tied-embedding", "norms"])
@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag", "block"])
def test_diagonal_of_the_curvature(network: str, structure: str) -> None:
    """That of Kronecker products is found side by side."""
    data = [(networks.inputs(network, 5), networks.targets("classification", 5))]
    la = Laplace(networks.make(network), "classification", structure).fit(data)
    diagonal = la.posterior.curvature_diagonal()
    for block in la.curvature.blocks:
        expected = block.accumulator.matrix().diagonal()
        torch.testing.assert_close(block.pack(diagonal), expected, rtol=1e-9, atol=1e-12 * float(expected.max()))
