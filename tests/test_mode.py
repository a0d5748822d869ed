"""The linear model's own mode, against dense Newton steps on explicit Jacobians, and ridge regression."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lapwing import (
    Categorical,
    ConvergenceWarning,
    DataWarning,
    Gaussian,
    GaussianPrior,
    InputError,
    Laplace,
    NotFittedError,
)
from tests import networks, oracles

STRUCTURES = ["diag", "kron", "ekfac", "block", "full", "lowrank"]


def packed(la: Laplace, values: dict[str, Tensor]) -> Tensor:
    sizes = la.posterior.sizes
    return torch.cat(
        [block.pack({n: values[n].double().expand(sizes[n]) for n in sizes}) for block in la.curvature.blocks], dim=-1
    )


class Dense:
    """The linearized model of a fitted posterior, with all of J."""

    def __init__(self, la: Laplace, x: Any, y: Tensor) -> None:
        self.la, self.y = la, y
        self.f = oracles.evaluate(la.model, x)
        self.jacobian = oracles.packed_jacobian(la, x)
        self.precision = packed(la, la.posterior.precisions) * float(la.posterior.prior_scale)
        self.distance = packed(la, la.posterior.weights) - packed(la, la.posterior.means)
        self.scale = float(la.posterior.likelihood_scale)

    def outputs(self, step: Tensor) -> Tensor:
        return self.f + torch.einsum("ncp,p->nc", self.jacobian, step).reshape(self.f.shape)

    def loss(self, step: Tensor) -> Tensor:
        fit = self.la.likelihood.log_prob(self.outputs(step), self.y).sum()
        return 0.5 * (self.precision * (self.distance + step).square()).sum() - self.scale * fit

    def gradient(self, step: Tensor) -> Tensor:
        slopes = oracles.output_gradients(self.la.likelihood, self.outputs(step), self.y)
        return self.precision * (self.distance + step) - self.scale * torch.einsum("ncp,nc->p", self.jacobian, slopes)

    def mode(self) -> Tensor:
        """Damped Newton steps until nothing moves."""
        step = torch.zeros_like(self.distance)
        for _ in range(200):
            middle = oracles.output_hessians(self.la.likelihood, self.outputs(step), self.y)
            hessian = self.scale * torch.einsum("nci,ncd,ndj->ij", self.jacobian, middle, self.jacobian)
            newton = torch.linalg.solve(hessian + torch.diag(self.precision), self.gradient(step))
            length = 1.0
            while float(self.loss(step - length * newton)) > float(self.loss(step)) and length > 1e-6:
                length /= 2
            step = step - length * newton
            if float(newton.norm()) < 1e-13 * float(1 + step.norm()):
                break
        return step


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("tempered", ["likelihood", "both"])
def test_of_a_linear_network_is_the_ridge_solution(structure: str, temperature: float, tempered: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(4, 2, generator=generator, dtype=torch.float64) + 0.5
    torch.manual_seed(1)
    model = nn.Linear(4, 2).double()
    batches = list(zip(x.split(11), y.split(11), strict=True))
    la = Laplace(model, Gaussian(noise=0.4), structure, prior=1.7, temperature=temperature, tempered=tempered)
    la.fit(batches).find_mode(batches, tolerance=1e-10)
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    prior = 1.7 * (temperature if tempered == "both" else 1.0)
    scale = temperature / 0.4
    ridge = torch.linalg.solve(scale * design.T @ design + prior * torch.eye(5, dtype=x.dtype), scale * design.T @ y)
    found = la.at(center="linear").posterior.mean
    torch.testing.assert_close(found["weight"], ridge[:4].T, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found["bias"], ridge[4], rtol=1e-8, atol=1e-8)
    prediction = la.predict(x[:5], center="linear")
    torch.testing.assert_close(prediction.mean, design[:5] @ ridge, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("likelihood", ["classification", "regression", "binary"])
@pytest.mark.parametrize("network", ["mlp", "cnn", "batchnorm", "attention"])
def test_is_that_of_dense_newton_steps(network: str, likelihood: str) -> None:
    x, y = networks.inputs(network, 8), networks.targets(likelihood, 8)
    batches = networks.batches(x, y, 5, 3)
    prior = GaussianPrior({"*.bias": 0.4, "*": 1.3}, mean=0.2)
    noise: Any = Gaussian(noise=0.5) if likelihood == "regression" else likelihood
    la = Laplace(networks.make(network), noise, "kron", prior=prior, temperature=1.5).fit(batches)
    la.find_mode(batches, tolerance=1e-9)
    assert la.mode_ is not None
    assert la.mode_.converged
    dense = Dense(la, x, y)
    expected, found = dense.mode(), packed(la, la.mode_.step)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    # The first-order condition, relative to its terms, and the bounds that convexity gives.
    violation = float((dense.gradient(found).square() / dense.precision).sum().sqrt())
    terms = float((dense.precision * (dense.distance + found).square()).sum().sqrt())
    assert violation <= 1.1e-9 * 2 * terms
    assert la.mode_.residual == pytest.approx(violation / (2 * terms), rel=0.2, abs=1e-14)
    assert float(dense.loss(found) - dense.loss(expected)) <= la.mode_.gap + 1e-12
    # What the data say there.
    outputs = dense.outputs(found)
    total = la.likelihood.statistics(outputs, y)
    assert la.mode_.statistics.log_likelihood == pytest.approx(total.log_likelihood, rel=1e-9)
    torch.testing.assert_close(la.latent(x, center="linear").mean, outputs, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(la.latent(x, center="linear").covariance, la.latent(x).covariance)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_evidence_is_the_linear_models_and_never_below_the_networks(structure: str) -> None:
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    for precision in (0.01, 1.0, 100.0):
        la = Laplace(networks.make("mlp"), "classification", structure, prior=precision).fit([(x, y)])
        la.find_mode([(x, y)], tolerance=1e-8)
        assert la.mode_ is not None
        dense = Dense(la, x, y)
        step = packed(la, la.mode_.step)
        fit = float(la.likelihood.log_prob(dense.outputs(step), y).sum())
        size = step.numel()
        log_prior = 0.5 * size * math.log(precision) - 0.5 * precision * float((dense.distance + step).square().sum())
        expected = fit + log_prior - 0.5 * float(la.posterior.log_det_precision())
        assert float(la.log_evidence(center="linear")) == pytest.approx(expected, rel=1e-10)
        assert float(la.log_evidence(center="linear")) >= float(la.log_evidence(center="network"))


def test_stops_short_are_no_worse_than_the_network() -> None:
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    la = Laplace(networks.make("mlp"), "classification", prior=0.01).fit([(x, y)])
    with pytest.warns(ConvergenceWarning, match="did not converge in 2 steps.*Raise max_steps"):
        la.find_mode([(x, y)], tolerance=1e-10, max_steps=2)
    assert la.mode_ is not None
    assert not la.mode_.converged
    assert list(la.mode_.losses) == sorted(la.mode_.losses, reverse=True)
    assert float(la.log_evidence(center="linear")) >= float(la.log_evidence())


def test_starts_from_the_last_one_and_ends_where_a_cold_start_does() -> None:
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    la = Laplace(networks.make("mlp"), "classification", prior=1.0).fit([(x, y)]).find_mode([(x, y)], tolerance=1e-9)
    near = la.at(prior=1.01).find_mode([(x, y)], tolerance=1e-9).mode_
    cold = Laplace(la.model, "classification", prior=1.01).fit([(x, y)]).find_mode([(x, y)], tolerance=1e-9).mode_
    assert near is not None
    assert cold is not None
    assert near.losses[0] < cold.losses[0]
    assert near.iterations < cold.iterations
    for name, step in cold.step.items():
        torch.testing.assert_close(near.step[name], step, rtol=1e-6, atol=1e-8)


def test_derivatives_of_the_evidence_hold_the_mode_fixed_and_are_exact() -> None:
    """By the envelope theorem: against differences of modes found anew."""
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    la = Laplace(networks.make("mlp"), "classification", "full").fit([(x, y)])

    def value(precision: float) -> float:
        return float(la.at(prior=precision).find_mode([(x, y)], tolerance=1e-10).log_evidence(center="linear"))

    precision = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    here = la.at(prior=1.3).find_mode([(x, y)], tolerance=1e-10)
    (slope,) = torch.autograd.grad(here.log_evidence(prior=precision, center="linear"), precision)
    assert float(slope) == pytest.approx((value(1.3 + 1e-3) - value(1.3 - 1e-3)) / 2e-3, rel=1e-5)


def test_a_shuffling_loader_is_read_alike_at_every_pass() -> None:
    x, y = networks.inputs("mlp", 12), networks.targets("classification", 12)
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    for loader in (
        DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True),
        DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True, generator=generator),
    ):
        la = Laplace(networks.make("mlp"), "classification").fit([(x, y)])
        before = torch.get_rng_state()
        found = la.find_mode(loader, tolerance=1e-9).mode_
        assert torch.equal(torch.get_rng_state(), before)
        expected = la.fit([(x, y)]).find_mode([(x, y)], tolerance=1e-9).mode_
        assert found is not None
        assert expected is not None
        for name, step in expected.step.items():
            torch.testing.assert_close(found.step[name], step, rtol=1e-6, atol=1e-8)
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("loader", ["one more", "one less", "other sizes"])
def test_batches_that_change_between_passes(loader: str) -> None:
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    la = Laplace(networks.make("mlp"), "classification").fit([(x, y)]).find_mode([(x, y)])

    class Changing:
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            sizes = (
                {"one more": (4, 4, 4), "one less": (4,), "other sizes": (3, 5)}[loader] if self.passes > 1 else (4, 4)
            )
            yield from networks.batches(torch.cat([x, x])[: sum(sizes)], torch.cat([y, y])[: sum(sizes)], *sizes)

    with pytest.raises(InputError, match="differ from one pass over the loader to the next"):
        la.at(prior=3.0).find_mode(Changing())


def test_a_mode_of_another_prior_is_told() -> None:
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    la = Laplace(networks.make("mlp"), "classification", prior=0.001).fit([(x, y)]).find_mode([(x, y)], tolerance=1e-6)
    la.log_evidence(prior=0.001, center="linear")
    with pytest.warns(ConvergenceWarning, match="found under another prior.*find_mode"):
        la.log_evidence(prior=100.0, center="linear")
    with pytest.warns(ConvergenceWarning, match="found under another prior"):
        la.at(temperature=5.0).predict(x, center="linear")


def test_sparse_gradients() -> None:
    x, y = networks.inputs("tokens", 8), networks.targets("classification", 8)
    sparse = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Flatten(), nn.Linear(8, 3)).double()
    plain = nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(8, 3)).double()
    plain.load_state_dict(sparse.state_dict())
    found = [
        Laplace(model, "classification").fit([(x, y)]).find_mode([(x, y)], 1e-9).mode_ for model in (sparse, plain)
    ]
    assert found[0] is not None
    assert found[1] is not None
    for name, step in found[0].step.items():
        torch.testing.assert_close(step, found[1].step[name], rtol=1e-7, atol=1e-9)


class _Pixels(nn.Module):
    """Logits `[N, 3, 2, 2]`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x)) * 2


@pytest.mark.parametrize("case", ["positions", "ratios", "last_layer", "tied"])
def test_other_outputs_and_weights(case: str) -> None:
    x, y = networks.inputs("mlp", 8), networks.targets("regression", 8)
    model, likelihood, options = networks.make("mlp"), "regression", dict[str, Any]()
    if case == "positions":
        x = networks.inputs("cnn", 8)
        y = torch.randint(3, (8, 2, 2), generator=torch.Generator().manual_seed(0))
        y[::2, 0] = -100
        model, likelihood = _Pixels().double(), Categorical(dim=1)  # type: ignore[assignment]
    elif case == "ratios":
        likelihood = Gaussian(noise=[0.5, 1.0, 2.0])  # type: ignore[assignment]
    elif case == "last_layer":
        options = {"weights": "last_layer"}
    else:
        model = networks.make("tied")
    la = Laplace(model, likelihood, prior=2.0, **options).fit([(x, y)]).find_mode([(x, y)], tolerance=1e-9)
    assert la.mode_ is not None
    torch.testing.assert_close(packed(la, la.mode_.step), Dense(la, x, y).mode(), rtol=1e-6, atol=1e-8)


class _Changing:
    """Other inputs at every pass, whatever torch's random state says."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.passes = x, y, 0

    def __iter__(self) -> Any:
        self.passes += 1
        yield self.x + 0.1 * self.passes, self.y


def test_bad_input() -> None:
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    la = Laplace(networks.make("mlp"), "classification")
    with pytest.raises(NotFittedError, match="fit"):
        la.find_mode([(x, y)])
    la.fit([(x, y)])
    with pytest.raises(NotFittedError, match=r"find_mode\(loader\)"):
        la.log_evidence(center="linear")
    with pytest.raises(InputError, match="saw 5 examples, the fit 8"):
        la.find_mode([(x[:5], y[:5])])
    with pytest.raises(InputError, match="iterator that can be read only once"):
        la.find_mode(iter([(x, y)]))
    with pytest.raises(InputError, match="differ from one pass over the loader to the next"):
        la.find_mode(_Changing(x, y))
    with pytest.warns(DataWarning, match="other data"):
        la.find_mode([(x + 3, (y + 1) % 3)])
    la.fit([(x, y)])
    with pytest.raises(InputError, match="The loader is empty"):
        la.find_mode([])
    with pytest.raises(InputError, match="tolerance must be between 0 and 1"):
        la.find_mode([(x, y)], tolerance=0.0)
    with pytest.raises(InputError, match="max_steps must be at least 1"):
        la.find_mode([(x, y)], max_steps=0)
    assert la.mode_ is None


@pytest.mark.parametrize("network", ["lstm", "odd"])
def test_networks_without_forward_mode(network: str) -> None:
    x, y = networks.inputs(network, 6), networks.targets("classification", 6)
    la = Laplace(networks.make(network), "classification").fit([(x, y)]).find_mode([(x, y)], tolerance=1e-9)
    assert la.mode_ is not None
    torch.testing.assert_close(packed(la, la.mode_.step), Dense(la, x, y).mode(), rtol=1e-5, atol=1e-6)


def test_operations_without_any_second_derivative_are_named() -> None:
    x, y = networks.inputs("bags", 6), networks.targets("classification", 6)
    la = Laplace(networks.make("bags"), "classification").fit([(x, y)])
    with pytest.raises(InputError, match="J v.*_embedding_bag.*center='network' or 'newton'"):
        la.find_mode([(x, y)])


def test_files_fits_and_merges(tmp_path: Path) -> None:
    x, y = networks.inputs("mlp", 8), networks.targets("regression", 8)
    la = Laplace(networks.make("mlp"), "regression").fit([(x, y)]).find_mode([(x, y)])
    kept = la.at(center="linear")
    kept.save(tmp_path / "posterior.safetensors")
    again = Laplace.load(tmp_path / "posterior.safetensors", la.model)
    assert again.center == "linear"
    assert float(again.log_evidence()) == float(kept.log_evidence())
    torch.testing.assert_close(again.predict(x).mean, kept.predict(x).mean)
    assert again.mode_ is not None
    assert la.mode_ is not None
    assert again.mode_.losses == la.mode_.losses
    assert la.merge(la).mode_ is None
    assert la.fit([(x, y)]).mode_ is None
