"""Structure lowrank: with enough rank it is structure full; with less, the dense algebra of the truncated matrix."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import ConvergenceWarning, FactoredDamping, Gaussian, InputError, Laplace
from lapwing.columns import identity
from lapwing.curvature import lowrank
from lapwing.curvature.lowrank import LowRankAccumulator
from lapwing.eigenpairs import top_eigenpairs
from lapwing.gradients import Gradients, Layer, Pair
from lapwing.guard import borrowed
from lapwing.reflectors import LowRankBasis, project
from tests import networks, oracles

GROUPS: dict[str, Any] = {"one": 0.7, "two": {"*weight*": 3.0, "*": 0.4}}


def fit(network: str, structure: str, likelihood: Any = "classification", examples: int = 7, **options: Any) -> Laplace:
    name = likelihood if isinstance(likelihood, str) else "regression"
    x, y = networks.inputs(network, examples), networks.targets(name, examples)
    la = Laplace(networks.make(network), likelihood, structure, progress=False, **options)
    return la.fit(networks.batches(x, y, 4, examples - 4))


def matrix(la: Laplace) -> Tensor:
    (block,) = la.curvature.blocks
    return block.accumulator.matrix()


def truncated(dense: Tensor, rank: int) -> Tensor:
    values, vectors = torch.linalg.eigh(dense)
    return (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T


def precisions(la: Laplace) -> Tensor:
    posterior = la.posterior
    (block,) = la.curvature.blocks
    return block.pack({name: value.expand(posterior.sizes[name]) for name, value in posterior.precisions.items()})


@pytest.mark.parametrize("network", ["mlp", "cnn", "tied-embedding", "attention", "lstm", "batchnorm"])
@pytest.mark.parametrize("likelihood", ["classification", Gaussian(noise=0.5)])
def test_enough_rank_is_structure_full(network: str, likelihood: Any) -> None:
    full, low = (fit(network, structure, likelihood, rank=400) for structure in ("full", "lowrank"))
    x = networks.inputs(network, 3, seed=9)
    for prior in GROUPS.values():
        for center in ("network", "newton"):
            one, two = (la.at(prior=prior, center=center, temperature=1.3) for la in (full, low))
            assert float(two.log_evidence()) == pytest.approx(float(one.log_evidence()), rel=1e-10)
            assert two.effective_dimension() == pytest.approx(one.effective_dimension(), rel=1e-8)
            every: list[dict[str, Any]] = [{}, {"joint": True}, {"diagonal": True}]
            for options in every:
                for found, expected in zip(two.latent(x, **options), one.latent(x, **options), strict=True):
                    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
            for name, value in one.posterior.variances().items():
                torch.testing.assert_close(two.posterior.variances()[name], value, rtol=1e-9, atol=1e-10)
                torch.testing.assert_close(two.posterior.mean[name], one.posterior.mean[name], rtol=1e-8, atol=1e-10)
    for groups in ("scalar", "layer"):
        one, two = (la.at().tune_prior(groups=groups) for la in (full, low))
        assert two.tuning_ is not None
        assert two.tuning_.converged
        assert float(two.log_evidence()) == pytest.approx(float(one.log_evidence()), rel=1e-8)
        for label, value in one.tuning_.precisions.items():  # type: ignore[union-attr]
            assert two.tuning_.precisions[label] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("network", ["mlp", "cnn", "attention", "gru"])
@pytest.mark.parametrize("rank", [1, 4, 9])
@pytest.mark.parametrize("prior", GROUPS)
def test_less_rank_is_the_truncated_matrix(network: str, rank: int, prior: str) -> None:
    full, low = fit(network, "full"), fit(network, "lowrank", rank=rank, prior=GROUPS[prior])
    cut = truncated(matrix(full), rank)
    torch.testing.assert_close(matrix(low), cut, rtol=0, atol=1e-8 * float(cut.abs().max()))
    precision = precisions(low)
    inverse = torch.linalg.inv(cut + torch.diag(precision))
    weights = low.curvature.blocks[0].pack(low.posterior.weights)
    expected = oracles.log_evidence(low.curvature.statistics.log_likelihood, cut, precision, weights)
    assert float(low.log_evidence()) == pytest.approx(expected, rel=1e-9)
    x = networks.inputs(network, 3, seed=9)
    rows = oracles.packed_jacobian(low, x)
    wanted = torch.einsum("nci,ij,ndj->ncd", rows, inverse, rows)
    torch.testing.assert_close(low.latent(x).covariance, wanted, rtol=1e-7, atol=1e-8)
    (block,) = low.posterior.blocks
    root = block.basis.expand(torch.diag(block.scale.sqrt()))
    torch.testing.assert_close(root.T @ root, inverse, rtol=1e-7, atol=1e-8)
    assert int((block.eigenvalues > 0).sum()) == rank
    assert bool((block.eigenvalues.diff() >= 0).all())


def test_evidence_falls_with_the_rank_to_that_of_full() -> None:
    """At a fixed center. What is left out of H is left out of log det P."""
    for network in ("mlp", "attention"):
        values = [float(fit(network, "lowrank", rank=rank).log_evidence()) for rank in (1, 3, 6, 10, 14)]
        assert values == sorted(values, reverse=True)
        assert values[-1] >= float(fit(network, "full").log_evidence()) - 1e-10


def test_evidence_is_differentiable_in_groups() -> None:
    low = fit("mlp", "lowrank", rank=5)

    def evidence(logs: Tensor) -> Tensor:
        weight, bias = logs.exp()
        return low.log_evidence(prior={"*.bias": bias, "*": weight})

    assert torch.autograd.gradcheck(evidence, torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True))
    # Where the groups are equal they may still move apart.
    assert torch.autograd.gradcheck(evidence, torch.tensor([0.3, 0.3], dtype=torch.float64, requires_grad=True))


def test_repeated_eigenvalues() -> None:
    """Regression on several outputs has every eigenvalue as often; all copies count."""
    x, y = torch.randn(30, 3).double(), torch.randn(30, 24).double()
    low = Laplace(nn.Linear(3, 24, bias=False).double(), "regression", "lowrank", rank=20).fit([(x, y)])
    values = low.posterior.blocks[0].eigenvalues
    largest = torch.linalg.eigvalsh(x.T @ x)[-1]
    torch.testing.assert_close(values[-20:], largest.expand(20), rtol=1e-10, atol=0)


@pytest.mark.parametrize("root", [None, 0.5 + torch.rand(30, generator=torch.Generator().manual_seed(0)).double()])
@pytest.mark.parametrize("rank", [1, 6, 30])
def test_basis_is_complete(root: Tensor | None, rank: int) -> None:
    generator = torch.Generator().manual_seed(1)
    vectors = torch.linalg.qr(torch.randn(30, rank, generator=generator, dtype=torch.float64)).Q
    if rank > 1:
        vectors[:, -1] = 0  # eigenvalue 0
    accumulator = LowRankAccumulator(vectors, torch.linspace(9, 0, rank, dtype=torch.float64) if rank > 1 else
                                     torch.ones(1).double())  # fmt: skip
    found = accumulator.decompose(None if root is None else root**-2)
    eye = torch.eye(30, dtype=torch.float64)
    columns = found.basis.expand(eye).T
    shape = eye if root is None else torch.diag(root**-2)
    torch.testing.assert_close(columns.T @ shape @ columns, eye, rtol=0, atol=1e-12)
    diagonal = columns.T @ accumulator.matrix() @ columns
    torch.testing.assert_close(diagonal, torch.diag(found.eigenvalues), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.basis.reduce(eye), columns, rtol=0, atol=1e-13)
    scale = 1 / (found.eigenvalues + 2)
    torch.testing.assert_close(found.basis.marginal(scale), ((columns * scale) @ columns.T).diagonal())
    assert found.basis.to(torch.float64) is found.basis
    if rank < 29:
        with pytest.raises(ValueError, match="one scale"):
            found.basis.marginal(torch.arange(30.0))


def test_merge() -> None:
    """Exact while the rank suffices; the best approximation of the same rank where it does not."""
    model = networks.make("cnn")
    x, y = networks.inputs("cnn", 8), networks.targets("classification", 8)

    def part(s: slice, rank: int) -> Laplace:
        return Laplace(model, "classification", "lowrank", rank=rank).fit([(x[s], y[s])])

    halves, whole = (slice(0, 3), slice(3, 8)), slice(0, 8)
    merged = part(halves[0], 16).merge(part(halves[1], 16))
    torch.testing.assert_close(matrix(merged), matrix(part(whole, 16)), rtol=1e-9, atol=1e-10)
    few = [part(half, 3) for half in halves]
    merged = few[0].merge(few[1])
    expected = truncated(matrix(few[0]) + matrix(few[1]), 3)
    torch.testing.assert_close(matrix(merged), expected, rtol=0, atol=1e-10 * float(expected.abs().max()))
    assert merged.curvature.examples == 8
    twice = few[0].merge(few[0])
    torch.testing.assert_close(matrix(twice), 2 * matrix(few[0]), rtol=1e-10, atol=1e-11)


def test_single_precision() -> None:
    double = fit("cnn", "lowrank", rank=6, prior=GROUPS["two"])
    x, y = networks.inputs("cnn", 7).float(), networks.targets("classification", 7)
    single = Laplace(networks.make("cnn").float(), "classification", "lowrank", rank=6, prior=GROUPS["two"])
    single.fit(networks.batches(x, y, 4, 3))
    accumulator = single.curvature.blocks[0].accumulator
    assert accumulator.tensors()["vectors"].dtype == torch.float32
    torch.testing.assert_close(matrix(single).double(), matrix(double), rtol=0, atol=1e-5 * float(matrix(double).max()))
    test = networks.inputs("cnn", 3, seed=9)
    torch.testing.assert_close(
        single.latent(test.float()).covariance.double(), double.latent(test).covariance, rtol=1e-4, atol=1e-5
    )
    drawn = single.sample(2, torch.Generator().manual_seed(0))
    assert all(bool(torch.isfinite(value).all()) for value in drawn.values())


def test_more_weights_than_a_matrix_could_have() -> None:
    """p = 500,500: a dense matrix would have 2 TB. The gradients of one layer are known in closed form."""
    torch.manual_seed(0)
    model = nn.Linear(1000, 500)
    x, y = torch.randn(6, 1000), torch.randint(500, (6,))
    low = Laplace(model, "classification", "lowrank", rank=3, prior=2.0, max_columns=10_000).fit([(x, y)])
    inputs = torch.cat([x, torch.ones(6, 1)], dim=1).double()
    probs = model(x).detach().double().softmax(1)
    # H = Σ_n Λ_n ⊗ a_n a_nᵀ has the eigenvalues of the Gram matrix of Λ_n^{1/2} ⊗ a_n.
    roots = [torch.linalg.eigh(torch.diag(p) - torch.outer(p, p)) for p in probs]
    halves = torch.stack([vectors * values.clamp(min=0).sqrt() for values, vectors in roots])  # [n, C, C]
    gram = torch.einsum("noc,mod,nm->ncmd", halves, halves, inputs @ inputs.T).reshape(3000, 3000)
    expected = torch.linalg.eigvalsh(gram)[-3:]
    torch.testing.assert_close(low.posterior.blocks[0].eigenvalues[-3:], expected, rtol=1e-3, atol=0)
    size = 500_500
    tail = (size - 3) * math.log(2.0)
    assert float(low.posterior.log_det_precision()) == pytest.approx(float((expected + 2).log().sum()) + tail, rel=1e-6)
    variance = low.latent(x[:2], diagonal=True).covariance
    assert bool((variance <= 0.5 * inputs[:2].square().sum(1, keepdim=True) + 1e-3).all())
    assert low.sample(1)["weight"].shape == (1, 500, 1000)


@pytest.mark.parametrize("network", ["mlp", "cnn", "grouped-cnn", "tied", "attention"])
def test_two_ways_to_project_agree(network: str) -> None:
    """Through the layer and after forming the gradients, whichever is less work."""
    la = fit(network, "lowrank")
    x = networks.inputs(network, 3, seed=9)
    generator = torch.Generator().manual_seed(0)
    tape = la._state().tape
    seen: list[str] = []

    def consume(layer: Layer, gradients: Gradients) -> None:
        rows = gradients.rows(0, gradients.examples).reshape(gradients.columns, gradients.examples, -1)
        for rank in (1, 40):
            vectors = torch.randn(layer.size, rank, generator=generator, dtype=torch.float64)
            for budget in (1, 2**30):
                torch.testing.assert_close(project(gradients, vectors, budget), rows @ vectors, rtol=1e-10, atol=1e-12)
        if isinstance(gradients, Pair):
            seen.append(layer.name)

    with borrowed(la.model, la.curvature.parameters):
        record = tape.record(la._inputs(x))
        unit = identity(record.outputs)
        record.sweep(unit, consume, unit.count, {layer.name for layer in tape.layers or ()})
    assert seen


def test_prediction_keeps_no_gradient_of_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    low = fit("cnn", "lowrank", rank=4)
    monkeypatch.setattr(LowRankBasis, "coordinates", None)
    monkeypatch.setattr("lapwing.curvature.blocks._gather", None)
    low.latent(networks.inputs("cnn", 3, seed=9), joint=True)


class Augmented:
    """Shows other examples at every pass."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        generator = torch.Generator().manual_seed(self.passes)
        x, y = networks.inputs("mlp", 7), networks.targets("classification", 7)
        yield x + 0.05 * torch.randn(x.shape, generator=generator, dtype=x.dtype), y


def test_other_data_in_every_pass_are_an_error() -> None:
    # Three of 31 parameters, so that the first pass does not already span all of them.
    with pytest.raises(InputError, match="changed between passes"):
        Laplace(networks.make("mlp"), "classification", "lowrank", rank=3).fit(Augmented())


def test_shuffled_data_are_not() -> None:
    x, y = networks.inputs("mlp", 12), networks.targets("classification", 12)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5, shuffle=True)
    model = networks.make("mlp")
    one, two = (Laplace(model, "classification", "lowrank", rank=3).fit(data) for data in (loader, [(x, y)]))
    torch.testing.assert_close(matrix(one), matrix(two), rtol=0, atol=1e-8 * float(matrix(two).abs().max()))


def test_a_fit_that_does_not_converge_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowrank, "top_eigenpairs", functools.partial(top_eigenpairs, max_passes=1))
    with pytest.warns(ConvergenceWarning, match="did not converge in 1 passes"):
        fit("cnn", "lowrank", rank=3)


def test_last_layer_and_damping() -> None:
    full, low = (fit("cnn", structure, weights="last_layer") for structure in ("full", "lowrank"))
    torch.testing.assert_close(matrix(low), matrix(full), rtol=1e-9, atol=1e-11)
    x = networks.inputs("cnn", 3, seed=9)
    damped = [la.at(prior=FactoredDamping(20, 0.5)).latent(x).covariance for la in (full, low)]
    torch.testing.assert_close(*damped, rtol=1e-9, atol=1e-10)
    assert "lowrank" in low.summary()
