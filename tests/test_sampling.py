"""Draws by optimization: their covariance is P⁻¹, conjugate gradients solve, and the same draws tune the prior."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lapwing import ConvergenceWarning, DrawnPosterior, Gaussian, InputError, Laplace, sample_by_optimization
from lapwing.conjugate_gradients import Precision, solve
from tests import networks

DRAWS = 200
PRIOR = {"*bias": 0.6, "*": 1.7}


def data(kind: str, network: str = "mlp") -> list[tuple[Tensor, Tensor]]:
    x, y = networks.inputs(network, 7), networks.targets(kind, 7)
    return list(zip(x.split(4), y.split(4), strict=True))


@cache
def drawn(kind: str) -> tuple[DrawnPosterior, Laplace]:
    """Draws to rounding, and the dense posterior."""
    likelihood: Any = Gaussian(0.3) if kind == "regression" else kind
    model, batches = networks.make("mlp"), data(kind)
    found = sample_by_optimization(
        model, likelihood, batches, DRAWS, PRIOR, 1.4, tolerance=1e-6, generator=torch.Generator().manual_seed(0)
    )
    return found, Laplace(model, likelihood, "full", prior=PRIOR, temperature=1.4).fit(batches)


def dense(la: Laplace, found: DrawnPosterior) -> tuple[Tensor, Tensor]:
    """`s H` and P in the order of the draws."""
    posterior, block = la.posterior, la.curvature.blocks[0]
    order = block.pack(found.ggn.unpack(torch.arange(float(found.ggn.size), dtype=torch.float64))).long().argsort()
    scaled = (float(posterior.likelihood_scale) * block.accumulator.matrix())[order][:, order]
    precision = block.pack({n: posterior.precisions[n].expand(size) for n, size in posterior.sizes.items()})[order]
    return scaled, scaled + torch.diag(precision)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_covariance_of_draws_is_that_of_the_posterior(kind: str) -> None:
    """Every entry within Monte Carlo error: its variance is `(C_ii C_jj + C_ij²)/S`."""
    found, la = drawn(kind)
    assert found.solution is not None
    assert found.solution.converged
    _, precision = dense(la, found)
    expected = torch.linalg.inv(precision)
    sample = found.steps @ found.steps.T / DRAWS
    deviation = ((expected.diagonal().outer(expected.diagonal()) + expected.square()) / DRAWS).sqrt()
    assert float(((sample - expected) / deviation).abs().max()) < 4.5
    # In the coordinates where the posterior is standard, all of its directions alike: tr is χ² with S·p degrees.
    white = torch.linalg.cholesky(precision).T @ found.steps
    assert float(white.square().mean()) == pytest.approx(1, abs=4.5 * (2 / white.numel()) ** 0.5)
    assert float((found.steps.mean(1) / (expected.diagonal() / DRAWS).sqrt()).abs().max()) < 4.5


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_draws_solve_their_equation(kind: str) -> None:
    found, la = drawn(kind)
    scaled, precision = dense(la, found)
    prior = precision.diagonal() - scaled.diagonal()
    scale = float(la.posterior.likelihood_scale)
    right = prior.sqrt().unsqueeze(1) * found.normals + scale**0.5 * found.pulls
    expected = torch.linalg.solve(precision, right)
    gap = found.steps - expected  # no more than the tolerance allows, in the norm of P
    allowed = 1.01e-6 * (expected * (scaled @ expected)).sum(0).sqrt()
    assert bool(((gap * (precision @ gap)).sum(0).sqrt() <= allowed).all())
    torch.testing.assert_close(found.determined, scaled @ found.steps, rtol=0, atol=1e-8)
    vectors = torch.randn(found.ggn.size, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(found.solve(vectors).vectors, torch.linalg.solve(precision, vectors), rtol=0, atol=1e-5)


def test_pulls_have_the_covariance_of_the_curvature() -> None:
    found, la = drawn("classification")
    scaled, _ = dense(la, found)
    expected = scaled / float(la.posterior.likelihood_scale)
    sample = found.pulls @ found.pulls.T / DRAWS
    deviation = ((expected.diagonal().outer(expected.diagonal()) + expected.square()) / DRAWS).sqrt()
    assert float(((sample - expected) / deviation).abs().max()) < 4.5


def test_effective_dimension_and_prior_update() -> None:
    for kind in ("classification", "regression"):
        found, la = drawn(kind)
        gamma = found.effective_dimension
        assert abs(gamma.value - la.effective_dimension()) < 4 * gamma.error
        assert sum(found.effective_dimensions().values()) == pytest.approx(gamma.value, rel=1e-10)
        shares = la.posterior.effective_dimensions()
        updated = found.mackay_prior().precisions(la.posterior.sizes)
        for glob in ("bias", "weight"):
            names = [name for name in shares if name.endswith(glob)]
            share = sum(float(shares[name].sum()) for name in names)
            square = sum(float(la.posterior.weights[name].square().sum()) for name in names)
            assert sum(found.effective_dimensions()[name] for name in names) == pytest.approx(share, rel=0.25)
            assert float(updated[names[0]]) == pytest.approx(share / square, rel=0.25)


def test_other_hyperparameters_start_from_the_draws() -> None:
    """The draws at λ moved to λ′ are those drawn at λ′ from the same randomness, in fewer products when close."""
    model, batches = networks.make("mlp"), data("regression")

    def at(prior: float) -> DrawnPosterior:
        generator = torch.Generator().manual_seed(2)
        return sample_by_optimization(model, Gaussian(0.3), batches, 4, prior, tolerance=1e-8, generator=generator)

    moved, fresh = at(1.0).at(prior=1.01), at(1.01)
    torch.testing.assert_close(moved.steps, fresh.steps, rtol=0, atol=1e-6)
    assert moved.solution is not None
    assert fresh.solution is not None
    assert moved.solution.products <= fresh.solution.products
    colder = at(1.0).at(temperature=2.0, noise=0.6)
    torch.testing.assert_close(colder.steps, at(1.0).steps, rtol=0, atol=1e-6)
    updated = at(1.0).update_prior(2)
    torch.testing.assert_close(updated.steps, at(1.0).at(prior=updated.prior).steps, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_predictions(kind: str) -> None:
    found, la = drawn(kind)
    x = networks.inputs("mlp", 3, seed=9)
    mean, covariance = la.latent(x)
    latent = found.latent(x)
    torch.testing.assert_close(latent.mean, mean)
    spread = covariance.diagonal(dim1=1, dim2=2)
    deviation = ((spread.unsqueeze(2) * spread.unsqueeze(1) + covariance.square()) / DRAWS).sqrt()
    assert float(((latent.covariance - covariance) / deviation).abs().max()) < 4.5
    jacobian = torch.func.jacrev(lambda w: torch.func.functional_call(found.ggn.model, w, (x,)))
    rows = found.ggn.pack(jacobian({n: p.detach() for n, p in found.ggn.parameters.items()}))
    torch.testing.assert_close(found.outputs(x), mean + torch.einsum("ncp,ps->snc", rows, found.steps))
    for method in ("linearized", "sampled"):
        prediction = found.predict(x, method)
        assert prediction.distribution().batch_shape[0] == 3
    sampled = la.predict(x, "sampled", samples=found.samples)
    name = "probs" if kind == "classification" else "mean"
    torch.testing.assert_close(getattr(found.predict(x, "sampled"), name), getattr(sampled, name))


def test_a_preconditioner_changes_the_steps_and_not_the_draws() -> None:
    model, batches = networks.make("mlp"), data("classification")
    la = Laplace(model, "classification", "full").fit(batches)
    found = []
    for preconditioner in (None, la):
        generator = torch.Generator().manual_seed(2)
        options: dict[str, Any] = {"preconditioner": preconditioner, "tolerance": 1e-8, "generator": generator}
        found.append(sample_by_optimization(model, "classification", batches, 3, 0.01, **options))
    torch.testing.assert_close(found[0].steps, found[1].steps, rtol=0, atol=1e-5)
    plain, helped = (one.solution.products for one in found if one.solution is not None)
    assert helped <= 4 < plain  # the dense posterior is P itself
    other = Laplace(model, "classification", weights="last_layer").fit(batches)
    with pytest.raises(InputError, match="other weights"):
        sample_by_optimization(model, "classification", batches, 2, preconditioner=other)


class Dense:
    """A matrix as an operator, whose products carry a rounding error like single precision."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.size, self.device = matrix, len(matrix), matrix.device

    def matmul(self, vectors: Tensor) -> Tensor:
        return (self.matrix.float() @ vectors.float()).double()


def test_conjugate_gradients_against_dense_solves() -> None:
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(40, 60, generator=generator, dtype=torch.float64) * torch.logspace(-3, 2, 60).double()
    matrix = factor.T @ factor
    prior = torch.rand(60, generator=generator, dtype=torch.float64) + 0.5
    right = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    precision = Precision(Dense(matrix), 0.7, prior)
    whole = 0.7 * matrix + torch.diag(prior)

    def measure(x: Tensor, residual: Tensor, error: Tensor) -> Tensor:
        return error

    start = torch.zeros_like(right)
    found = solve(precision.matmul, right, start, precision.relax, measure, 1e-2, 500, "test", False)
    expected = torch.linalg.solve(whole, right)
    error = found.vectors - expected
    assert found.converged
    in_norm = (error * (whole @ error)).sum(0).sqrt()
    assert bool((in_norm <= 1.01 * found.errors).all())  # the bound holds
    assert not bool(start.any())
    few = solve(precision.matmul, right, start, precision.relax, measure, 1e-9, 3, "test", False)
    assert not few.converged
    assert few.products == 3


def test_works_on_other_networks_and_leaves_them_alone() -> None:
    for network in ("cnn", "batchnorm", "attention"):
        model = networks.make(network).train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        batches = data("classification", network)
        found = sample_by_optimization(
            model, "classification", batches, 2, tolerance=1e-7, generator=torch.Generator().manual_seed(0)
        )
        _, precision = dense(Laplace(model, "classification", "full").fit(batches), found)
        right = found.normals + found.pulls
        torch.testing.assert_close(found.steps, torch.linalg.solve(precision, right), rtol=0, atol=1e-6)
        assert model.training
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_warnings_and_bad_input() -> None:
    model, batches = networks.make("mlp"), data("classification")
    with pytest.warns(ConvergenceWarning, match="did not converge in 3 products"):
        found = sample_by_optimization(model, "classification", batches, 2, 1e-3, tolerance=1e-9, max_products=3)
    assert found.solution is not None
    assert not found.solution.converged
    with pytest.raises(InputError, match="at least 1"):
        sample_by_optimization(model, "classification", batches, 0)
    with pytest.raises(InputError, match="tolerance"):
        sample_by_optimization(model, "classification", batches, 1, tolerance=0)
    with pytest.raises(InputError, match="only once"):
        sample_by_optimization(model, "classification", iter(batches))
    one = sample_by_optimization(model, "classification", batches, 1)
    with pytest.raises(InputError, match="at least 2"):
        _ = one.effective_dimension
    with pytest.raises(InputError, match="Unknown method"):
        one.predict(batches[0][0], "exact")
    elements = {name: torch.ones_like(value) for name, value in model.named_parameters()}
    with pytest.raises(InputError, match="one number per element"):
        sample_by_optimization(model, "classification", batches, 2, elements).mackay_prior()
    changed = networks.make("mlp")
    stale = sample_by_optimization(changed, "classification", batches, 2)
    with torch.no_grad():
        next(changed.parameters()).add_(1)
    with pytest.raises(InputError, match="changed since the fit"):
        stale.predict(batches[0][0])
