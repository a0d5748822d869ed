"""Predictions: integrals against Monte Carlo, decompositions, gradients in x, samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import Categorical, Gaussian, Laplace
from lapwing.layers import window
from tests import networks

STRUCTURES = ["diag", "kron", "ekfac", "block", "full", "lowrank"]


def fitted(
    likelihood: Any = "classification", structure: str = "kron", network: str = "mlp", **options: Any
) -> Laplace:
    kind = likelihood if isinstance(likelihood, str) else "regression"
    x, y = networks.inputs(network, 8), networks.targets(kind, 8)
    return Laplace(networks.make(network), likelihood, structure, **options).fit([(x, y)])


X = networks.inputs("mlp", 6, seed=9)


def test_probit_and_monte_carlo_of_classes() -> None:
    la = fitted(prior=3.0)
    mean, covariance = la.latent(X)
    variance = covariance.diagonal(dim1=1, dim2=2)
    expected = (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(1)
    torch.testing.assert_close(la.predict(X).probs, expected)
    draws = torch.distributions.MultivariateNormal(mean, covariance).sample((400_000,)).softmax(2)
    prediction: Any = la.predict(X, link="mc", samples=400_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(prediction.probs, draws.mean(0), rtol=0, atol=3e-3)
    entropies = -(draws * draws.log()).sum(2).mean(0)
    torch.testing.assert_close(prediction.aleatoric, entropies, rtol=0, atol=3e-3)
    torch.testing.assert_close(prediction.mutual_information, prediction.epistemic, rtol=1e-6, atol=1e-9)


def test_probit_of_binary_outputs() -> None:
    la = fitted("binary", prior=3.0)
    mean, variance = la.latent(X, diagonal=True)
    prediction: Any = la.predict(X)
    torch.testing.assert_close(prediction.probs, torch.sigmoid(mean / (1 + math.pi / 8 * variance).sqrt()))
    exact: Any = la.predict(X, link="mc", samples=200_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(prediction.probs, exact.probs, rtol=0, atol=0.02)


@pytest.mark.parametrize("likelihood", ["classification", "binary"])
@pytest.mark.parametrize("options", [{}, {"link": "mc", "samples": 50}, {"method": "sampled", "samples": 20}])
def test_parts_add_up_to_the_total(likelihood: str, options: dict[str, Any]) -> None:
    prediction: Any = fitted(likelihood).predict(10 * X, generator=torch.Generator().manual_seed(0), **options)
    torch.testing.assert_close(prediction.aleatoric + prediction.epistemic, prediction.entropy)
    assert bool((prediction.aleatoric >= 0).all())
    assert bool((prediction.epistemic >= 0).all())
    assert bool((prediction.mutual_information >= 0).all())
    assert bool((prediction.confidence <= 1).all())
    if likelihood == "classification":
        torch.testing.assert_close(prediction.probs.sum(1), torch.ones(6, dtype=torch.float64))
        torch.testing.assert_close(prediction.labels, prediction.probs.argmax(1))
        y = torch.tensor([0, 1, 2, 0, 1, 2])
        torch.testing.assert_close(prediction.log_prob(y), prediction.probs.gather(1, y[:, None])[:, 0].log())
        assert prediction.distribution().batch_shape == (6,)


def test_regression_is_exact() -> None:
    la = fitted(Gaussian(0.2))
    prediction: Any = la.predict(X)
    mean, covariance = la.latent(X)
    torch.testing.assert_close(prediction.mean, mean)
    torch.testing.assert_close(prediction.epistemic, covariance.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(prediction.variance, prediction.epistemic + 0.2)
    y = torch.randn(6, 3, dtype=torch.float64)
    joint = torch.distributions.MultivariateNormal(mean, covariance + 0.2 * torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(prediction.log_prob(y), joint.log_prob(y))
    low, high = prediction.interval(0.9)
    normal = torch.distributions.Normal(prediction.mean, prediction.std)
    torch.testing.assert_close(normal.cdf(high) - normal.cdf(low), torch.full_like(low, 0.9))
    sampled: Any = la.predict(X, method="sampled", samples=3, generator=torch.Generator().manual_seed(1))
    normals = torch.distributions.Normal(sampled.components.means, math.sqrt(0.2))
    mixture = normals.log_prob(y).sum(2).logsumexp(0) - math.log(3)
    torch.testing.assert_close(sampled.log_prob(y), mixture)
    torch.testing.assert_close(sampled.variance, sampled.components.means.var(0, correction=0) + 0.2)


def test_sampled_predictions_use_the_same_weights_for_all_inputs() -> None:
    la = fitted(Gaussian(0.2))
    drawn = la.sample(4, torch.Generator().manual_seed(0))
    whole: Any = la.predict(X, method="sampled", samples=drawn)
    parts: list[Any] = [la.predict(x, method="sampled", samples=drawn) for x in X.split(2)]
    torch.testing.assert_close(whole.mean, torch.cat([part.mean for part in parts]))
    outputs = torch.stack([
        torch.func.functional_call(la.model, {n: v[i] for n, v in drawn.items()}, (X,)) for i in range(4)
    ]).detach()  # fmt: skip
    torch.testing.assert_close(whole.mean, outputs.mean(0))
    torch.testing.assert_close(whole.epistemic, outputs.var(0, correction=0))


def test_monte_carlo_noise_is_independent_across_inputs() -> None:
    """The same input twice gets different noise, uncorrelated over many draws."""
    la = fitted(prior=0.5)
    twins = X[:1].expand(2, -1)
    errors = torch.stack([
        la.predict(twins, link="mc", samples=1, generator=torch.Generator().manual_seed(seed)).probs[:, 0]
        for seed in range(2000)
    ])  # fmt: skip
    assert not torch.equal(errors[:, 0], errors[:, 1])
    assert abs(float(torch.corrcoef(errors.T)[0, 1])) < 0.08


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("network", ["mlp", "cnn", "tied", "batchnorm", "attention", "gru", "branching"])
def test_differentiable_in_x(structure: str, network: str) -> None:
    la = fitted(structure=structure, network=network)
    x = networks.inputs(network, 2, seed=9).requires_grad_()

    def score(x: Tensor) -> Tensor:
        return la.predict(x).entropy.sum()  # type: ignore[attr-defined,no-any-return]

    (gradient,) = torch.autograd.grad(score(x), x)
    flat = torch.Generator().manual_seed(0)
    for _ in range(3):
        direction = torch.randn(x.shape, generator=flat, dtype=torch.float64)
        with torch.no_grad():
            numeric = (score(x.detach() + 1e-5 * direction) - score(x.detach() - 1e-5 * direction)) / 2e-5
        assert float((gradient * direction).sum()) == pytest.approx(float(numeric), rel=1e-5, abs=1e-8)
    sampled: Any = la.predict(x, method="sampled", samples=2, generator=torch.Generator().manual_seed(0))
    assert sampled.entropy.sum().requires_grad


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_differentiable_where_images_are_convolved_with_the_basis(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "_FEW", 0)
    test_differentiable_in_x(structure, "cnn")


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_small_memory_budget_changes_nothing(structure: str) -> None:
    for network in ("cnn", "attention"):
        x = networks.inputs(network, 7, seed=9)
        wide, tight = (
            fitted(structure=structure, network=network),
            fitted(structure=structure, network=network, memory_budget=2000),
        )
        torch.testing.assert_close(wide.log_evidence(), tight.log_evidence(), rtol=1e-12, atol=0)
        every: list[dict[str, Any]] = [{}, {"diagonal": True}, {"joint": True}]
        for options in every:
            torch.testing.assert_close(wide.latent(x, **options).covariance, tight.latent(x, **options).covariance)


def test_dense_outputs() -> None:
    """Sequences of classes with positions that are not observed."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 3)
            self.head = nn.Linear(3, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embed(tokens)))

    torch.manual_seed(0)
    model = Tagger().double()
    x, y = torch.randint(6, (5, 3)), torch.randint(4, (5, 3))
    y[1:, 2] = -100
    la = Laplace(model, Categorical(), "full").fit([(x, y)])
    prediction: Any = la.predict(x)
    assert prediction.probs.shape == (5, 3, 4)
    assert prediction.entropy.shape == prediction.epistemic.shape == (5, 3)
    assert prediction.log_prob(y).shape == (5,)
    assert la.latent(x).covariance.shape == (5, 12, 12)
    dropped = Laplace(model, Categorical(), "full").fit([(x[:1], y[:1]), (x[1:, :2], y[1:, :2])])
    torch.testing.assert_close(
        la.curvature.blocks[0].accumulator.matrix(), dropped.curvature.blocks[0].accumulator.matrix()
    )
    assert float(la.log_evidence()) == pytest.approx(float(dropped.log_evidence()), rel=1e-12)
    la.tune_prior(method="validation", loader=[(x, y)], candidates=[1.0, 2.0], score="brier")


def test_many_outputs_keep_variances_only() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 80).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    la = Laplace(model, "classification").fit([(x, torch.randint(80, (4,)))])
    prediction: Any = la.predict(x)
    variance = la.latent(x).covariance.diagonal(dim1=1, dim2=2)
    expected = (model(x) / (1 + math.pi / 8 * variance).sqrt()).softmax(1)
    torch.testing.assert_close(prediction.probs, expected.detach())
    with pytest.raises(ValueError, match="link='mc'"):
        _ = prediction.epistemic
    assert la.predict(x, link="mc", samples=5).epistemic.shape == (4,)


def test_saturated_predictions_stay_finite() -> None:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    x = torch.tensor([[30.0], [-30.0], [120.0]])
    binary = Laplace(model, "binary", prior=1e9).fit([(x, (x > 0).long())])
    inputs = x.clone().requires_grad_()
    for options in ({}, {"link": "mc", "samples": 3}, {"method": "sampled", "samples": 3}):
        prediction = binary.predict(inputs, generator=torch.Generator().manual_seed(0), **options)  # type: ignore[arg-type]
        torch.testing.assert_close(prediction.log_prob(x < 0), torch.tensor([-30.0, -30.0, -120.0]), rtol=1e-2, atol=0)
        (gradient,) = torch.autograd.grad(prediction.entropy.sum(), inputs)
        assert bool(torch.isfinite(gradient).all())
    wide = nn.Linear(1, 3)
    with torch.no_grad():
        wide.weight.copy_(torch.tensor([[1.0], [0.0], [-0.01]]))
    classes = Laplace(wide, "classification", prior=1e9).fit([(x, torch.tensor([0, 1, 0]))])
    prediction = classes.predict(inputs)
    (gradient,) = torch.autograd.grad(prediction.entropy.sum(), inputs)
    assert bool(torch.isfinite(gradient).all())
    assert float(prediction.log_prob(torch.tensor([1, 0, 2])).detach().min()) < -100


@pytest.mark.parametrize("structure", STRUCTURES)
def test_to_a_device_keeps_the_posterior(structure: str) -> None:
    """The code path of a move; a second device is not at hand in the tests."""
    la = fitted(structure=structure, network="attention", prior={"*": 2.0})
    x = networks.inputs("attention", 3, seed=9)
    before, evidence = la.predict(x).probs, la.log_evidence()
    assert la.to("cpu") is la
    torch.testing.assert_close(la.predict(x).probs, before, rtol=1e-12, atol=0)
    assert torch.equal(la.log_evidence(), evidence)
    assert "N=8" in repr(la)
    assert "not fitted" in repr(Laplace(la.model, "classification"))


def test_sampled_and_linearized_see_the_same_function() -> None:
    """torch's encoder writes 0 at padded positions, but only where no gradient is wanted."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x, src_key_padding_mask=x[..., 0] > 1).mean(1))

    torch.manual_seed(0)
    model = Encoder().double()
    x = networks.inputs("attention", 6)
    x[:, :, 0] = torch.tensor([0.0, 0.0, 2.0]).double()
    x[0, :, 0] = 0.0
    la = Laplace(model, "classification", "diag", prior=1e16).fit([(x, networks.targets("classification", 6))])
    enabled = torch.backends.mha.get_fastpath_enabled()
    sampled = la.predict(x, method="sampled", samples=1).probs
    torch.testing.assert_close(sampled, la.latent(x).mean.softmax(1), rtol=1e-6, atol=0)
    assert torch.backends.mha.get_fastpath_enabled() == enabled
