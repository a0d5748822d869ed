"""The log-evidence is differentiable in whatever makes prior, noise and temperature: `gradcheck` in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from lapwing import Gaussian, GaussianPrior, Laplace
from tests import networks

STRUCTURES = ["diag", "kron", "ekfac", "block", "full", "lowrank"]


def fitted(structure: str, likelihood: Any = "classification") -> Laplace:
    name = likelihood if isinstance(likelihood, str) else "regression"
    x, y = networks.inputs("mlp", 8), networks.targets(name, 8)
    return Laplace(networks.make("mlp"), likelihood, structure).fit(networks.batches(x, y, 5, 3))


def numbers(count: int, equal: bool = False) -> Tensor:
    values = torch.zeros(count) if equal else torch.linspace(-0.5, 0.6, count)
    return values.double().requires_grad_()


def decay(p: Tensor) -> dict[str, Tensor]:
    """`λ_l = exp(a + b·l)` at depth l."""
    return {f"{layer}.*": (p[0] + p[1] * depth).exp() for depth, layer in enumerate((0, 2))}


def relevance(p: Tensor) -> dict[str, Tensor]:
    """One precision per input feature."""
    return {"0.weight": p[:3].exp().expand(4, 3), "*": p[3].exp()}


def per_output(p: Tensor) -> dict[str, Tensor]:
    return {"2.weight": p[:3].exp().unsqueeze(1).expand(3, 4), "2.bias": p[:3].exp(), "0.*": p[3].exp()}


def per_element(p: Tensor) -> dict[str, Tensor]:
    return {"0.weight": p[:12].exp().reshape(4, 3), "*": p[12].exp()}


PRIORS: dict[str, tuple[int, Callable[[Tensor], dict[str, Tensor]]]] = {
    "decay": (2, decay), "relevance": (4, relevance), "output": (4, per_output), "element": (13, per_element),
}  # fmt: skip
TAKES = {name: list(PRIORS) for name in ("diag", "block", "full", "lowrank")}
TAKES |= {"kron": ["decay", "relevance", "output"], "ekfac": ["decay"]}


@pytest.mark.parametrize("center", ["network", "newton"])
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("structure", "prior"), [(s, p) for s in STRUCTURES for p in TAKES[s]])
def test_precisions_as_functions(structure: str, prior: str, equal: bool, center: str) -> None:
    la = fitted(structure)
    count, made = PRIORS[prior]
    assert gradcheck(lambda p: la.log_evidence(prior=made(p), center=center), numbers(count, equal), rtol=1e-6)


@pytest.mark.parametrize("center", ["network", "newton"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_means_noise_and_temperature_as_functions(structure: str, center: str) -> None:
    la = fitted(structure, Gaussian(noise=0.5))

    def value(p: Tensor) -> Tensor:
        mean = {"0.bias": p[:4].sin(), "*": p[4]}
        noise, temperature = (p[5] + p[6]).exp(), p[6].exp()
        return la.log_evidence(GaussianPrior(p[7].exp(), mean), noise, temperature, center)

    assert gradcheck(value, numbers(8), rtol=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_second_derivatives_at_the_network(structure: str) -> None:
    la = fitted(structure, Gaussian(noise=0.5))
    joined = structure in ("full", "lowrank")  # one block of all layers

    def value(p: Tensor) -> Tensor:
        prior = GaussianPrior({"*": p[0].exp()} if joined else decay(p), {"0.bias": p[2]})
        return la.log_evidence(prior, noise=p[3].exp(), temperature=p[4].exp())

    assert gradgradcheck(value, numbers(5), rtol=1e-5)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_prior_with_a_learned_mean_serves_many_steps(structure: str) -> None:
    """Its graph is new at every call, and its value that of the moment."""
    la = fitted(structure)
    mean = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    prior = GaussianPrior(1.0, {"*": mean})
    with torch.no_grad():
        la.log_evidence(prior)  # leaves nothing behind
    for _ in range(2):
        (slope,) = torch.autograd.grad(la.log_evidence(prior), mean)
        with torch.no_grad():
            fixed = GaussianPrior(1.0, {"*": float(mean)})
            assert float(la.log_evidence(prior)) == float(la.log_evidence(fixed))
            distances = [value.double() - mean for value in la.posterior.weights.values()]
            assert float(slope) == pytest.approx(float(torch.stack([d.sum() for d in distances]).sum()), rel=1e-12)
            mean += 1.0


def test_ascent_on_a_learned_mean_finds_the_mean_of_the_weights() -> None:
    """At the network `log p(θ̃)` is the only term with the mean, and its best value is the average weight."""
    la = fitted("kron")
    mean = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([mean], line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -la.log_evidence(GaussianPrior(1.0, {"*": mean}))
        loss.backward()
        return loss

    optimizer.step(closure)
    average = torch.cat([value.flatten() for value in la.posterior.weights.values()]).double().mean()
    assert mean.item() == pytest.approx(average.item(), abs=1e-8)
