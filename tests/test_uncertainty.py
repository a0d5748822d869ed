"""Aleatoric, epistemic and total: the parts add up, and each is what its definition says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lapwing import Categorical, Gaussian, InputError, Laplace, Mixture
from lapwing.predictive.components import Components
from lapwing.predictive.prediction import ClassPrediction
from lapwing.predictive.uncertainty import mixture_entropy
from tests import networks

X = networks.inputs("mlp", 6, seed=9)
METHODS: list[dict[str, Any]] = [
    {}, {"link": "mf2"}, {"link": "bridge-norm"}, {"link": "mc", "samples": 50}, {"method": "sampled", "samples": 20},
    {"method": "pushed", "samples": 20},
]  # fmt: skip


def fitted(likelihood: str, seed: int = 0) -> Laplace:
    x, y = networks.inputs("mlp", 8), networks.targets(likelihood, 8)
    chosen: Any = Gaussian(0.2) if likelihood == "regression" else likelihood
    return Laplace(networks.make("mlp", seed), chosen, prior=2.0).fit([(x, y)])


def fits(likelihood: str, options: dict[str, Any]) -> bool:
    link = options.get("link")
    return link is None or likelihood == "classification" or (likelihood == "binary" and link == "mc")


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("options", METHODS)
@pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])
def test_parts_add_up(likelihood: str, options: dict[str, Any], mixed: bool) -> None:
    if not fits(likelihood, options):
        with pytest.raises(InputError, match="Supported"):
            fitted(likelihood).predict(X, **options)
        return
    model: Any = Mixture([fitted(likelihood, seed) for seed in range(2)]) if mixed else fitted(likelihood)
    prediction = model.predict(3 * X, generator=torch.Generator().manual_seed(0), **options)
    for measure in ("entropy", "variance"):
        found = prediction.uncertainty(measure)
        torch.testing.assert_close(found.aleatoric + found.epistemic, found.total, rtol=1e-12, atol=1e-14)
        assert bool((found.epistemic >= 0).all())
        assert bool((found.epistemic > 0).any())
        assert measure == "entropy" or bool((found.aleatoric >= 0).all())
        per_class = measure == "variance" or likelihood != "classification"
        assert found.total.shape == ((6, 3) if per_class else (6,))
    first = prediction.uncertainty()
    torch.testing.assert_close(first.aleatoric, prediction.aleatoric)
    torch.testing.assert_close(first.epistemic, prediction.epistemic)
    torch.testing.assert_close(prediction.uncertainty("variance").total, prediction.variance)
    with pytest.raises(InputError, match="Did you mean 'entropy'"):
        prediction.uncertainty("entropie")


def test_the_source_is_said() -> None:
    la, exact = fitted("classification"), fitted("regression")
    assert la.predict(X).uncertainty().source == "Monte Carlo in output space"
    assert fitted("binary").predict(X).uncertainty("variance").source == "Monte Carlo in output space"
    assert la.predict(X, method="sampled", samples=3).uncertainty().source == "samples"
    assert exact.predict(X).uncertainty("entropy").source == "closed form"
    assert exact.predict(X, method="sampled", samples=3).uncertainty().source == "samples"


def test_law_of_total_variance_of_classes() -> None:
    """`Var[1{y = c}] = E[p_c(1 − p_c)] + Var[p_c]` over the samples themselves."""
    la = fitted("classification")
    drawn = la.sample(7, torch.Generator().manual_seed(0))
    probs = torch.stack([
        torch.func.functional_call(la.model, {n: v[i] for n, v in drawn.items()}, (X,)) for i in range(7)
    ]).softmax(2).detach()  # fmt: skip
    found = la.predict(X, method="sampled", samples=drawn).uncertainty("variance")
    torch.testing.assert_close(found.epistemic, probs.var(0, correction=0), rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(found.aleatoric, (probs * (1 - probs)).mean(0), rtol=1e-9, atol=1e-14)
    binary = fitted("binary")
    drawn = binary.sample(7, torch.Generator().manual_seed(0))
    yes = torch.stack([
        torch.func.functional_call(binary.model, {n: v[i] for n, v in drawn.items()}, (X,)) for i in range(7)
    ]).sigmoid().detach()  # fmt: skip
    found = binary.predict(X, method="sampled", samples=drawn).uncertainty("variance")
    torch.testing.assert_close(found.epistemic, yes.var(0, correction=0), rtol=1e-9, atol=1e-14)


def test_information_of_a_gaussian() -> None:
    """Mutual information between `y = f + ε` and f: `½ log(1 + Var f/σ²)`, and entropies of `torch.distributions`."""
    la = fitted("regression")
    prediction = la.predict(X)
    found = prediction.uncertainty("entropy")
    noise = torch.full_like(prediction.mean, 0.2).sqrt()
    torch.testing.assert_close(found.total, torch.distributions.Normal(0.0, prediction.std).entropy())
    torch.testing.assert_close(found.aleatoric, torch.distributions.Normal(0.0, noise).entropy())


def simpson(components: Components) -> Tensor:
    """`−∫ p log p` on a fine grid, for single outputs `[S, N]`."""
    grid = torch.linspace(-40, 40, 40_001, dtype=torch.float64)
    normal = torch.distributions.Normal(components.means.unsqueeze(-1), components.variances.sqrt().unsqueeze(-1))
    log_p = (normal.log_prob(grid) + components.log_weights[:, None, None]).logsumexp(0)
    return torch.trapezoid(-log_p.exp() * log_p, grid)


def test_a_class_that_is_ruled_out_adds_no_entropy() -> None:
    logits = torch.tensor([[[0.3, -1.0, -math.inf]], [[1.3, 0.2, -math.inf]]], dtype=torch.float64)  # [S, 1, 3]
    masked, without = (ClassPrediction.mixture(part, 1) for part in (logits, logits[..., :2]))
    for measure in ("entropy", "variance"):
        found, expected = masked.uncertainty(measure), without.uncertainty(measure)
        for name in ("total", "aleatoric", "epistemic"):
            left, right = getattr(found, name), getattr(expected, name)
            left = left[..., :2] if measure == "variance" else left
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


def test_entropy_of_a_mixture_of_gaussians() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(5, generator=generator, dtype=torch.float64).log().log_softmax(0)
    means = 2 * torch.randn(5, 4, generator=generator, dtype=torch.float64)
    variances = 0.5 + torch.rand(5, 4, generator=generator, dtype=torch.float64)
    components = Components(weights, means, variances)
    # 24 nodes of quadrature for each component; log p has poles off the real axis, so that the error is not rounding.
    torch.testing.assert_close(mixture_entropy(components), simpson(components), rtol=0, atol=1e-3)
    far = Components(torch.full((2,), 0.5, dtype=torch.float64).log(), torch.tensor([[-20.0], [20.0]]).double(), torch.ones(2, 1).double())  # fmt: skip
    expected = 0.5 * math.log(2 * math.pi * math.e) + math.log(2)
    torch.testing.assert_close(mixture_entropy(far), torch.tensor([expected], dtype=torch.float64), rtol=1e-10, atol=0)


def test_per_position() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3, padding=1)).double()
    x, y = torch.randn(5, 2, 6, dtype=torch.float64), torch.randint(4, (5, 6))
    prediction = Laplace(model, Categorical(dim=1), "diag").fit([(x, y)]).predict(x)
    assert prediction.uncertainty("entropy").epistemic.shape == (5, 6)
    assert prediction.uncertainty("variance").epistemic.shape == (5, 4, 6)
