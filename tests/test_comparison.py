"""Evidences side by side: probabilities by hand, what does not compare, and choices that have a right answer."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import (
    ComparisonWarning,
    FactoredDamping,
    Gaussian,
    InputError,
    Laplace,
    NotFittedError,
    compare,
    evidence,
    plots,
)
from tests import networks

X, Y = networks.inputs("mlp", 8), networks.targets("classification", 8)


def fitted(structure: str = "kron", seed: int = 0, examples: int = 8, **options: Any) -> Laplace:
    model = networks.make("mlp", seed)
    return Laplace(model, "classification", structure, **options).fit([(X[:examples], Y[:examples])])


def test_probabilities_are_bayes_rule() -> None:
    models = {"a": fitted(seed=0), "b": fitted(seed=1), "c": fitted(seed=0, prior=3.0)}
    evidences = [math.exp(float(la.log_evidence())) for la in models.values()]
    found = compare(models)
    assert found.probabilities == pytest.approx(dict(zip(models, [e / sum(evidences) for e in evidences], strict=True)))
    prior = {"a": 1.0, "b": 5.0, "c": 2.0}
    weighed = [e * prior[name] for e, name in zip(evidences, models, strict=True)]
    expected = dict(zip(models, [w / sum(weighed) for w in weighed], strict=True))
    assert compare(models, prior).probabilities == pytest.approx(expected, rel=1e-12)
    assert found.best == max(models, key=lambda name: float(models[name].log_evidence()))
    assert [entry.log_evidence for entry in found.entries] == sorted(found.log_evidences.values(), reverse=True)
    for name, la in models.items():
        assert found[name].log_evidence == float(la.log_evidence())
        assert found[name].effective_dimension == pytest.approx(la.effective_dimension(), rel=1e-12)
        assert found[name].log_likelihood == pytest.approx(float(evidence.log_likelihood(la.posterior)), rel=1e-12)
        assert found[name].parameters == 31
    with pytest.raises(KeyError):
        found["d"]


def test_probabilities_of_distant_evidences_neither_overflow_nor_round() -> None:
    models = {"far": fitted(prior=1e-9), "near": fitted()}
    gap = float(models["near"].log_evidence() - models["far"].log_evidence())
    assert gap > 100  # exp of the evidences themselves would lose the smaller one in float32
    assert compare(models).probabilities["far"] == pytest.approx(math.exp(-gap), rel=1e-9)


def test_a_prior_decides_between_equals() -> None:
    la = fitted()
    assert compare({"a": la, "b": la}, {"a": 1.0, "b": 1.5}).best == "b"


def test_table_lists_all_models_best_first() -> None:
    found = compare({"small": fitted(prior=100.0), "the other": fitted()})
    header, _, first, second, foot = str(found).splitlines()
    assert header.split()[:3] == ["model", "log", "evidence"]
    assert first.startswith(found.best)
    assert f"{found.entries[1].log_evidence:,.2f}" in second
    assert "8 examples" in foot


def test_picture_shows_the_evidences() -> None:
    found = compare({"a": fitted(seed=0), "b": fitted(seed=1), "c": fitted(prior=3.0)})
    ax = plots.comparison(found)
    drawn: list[Any] = [part.get_offsets() for part in ax.collections]
    (dots,) = [offsets for offsets in drawn if offsets.shape == (3, 2)]
    assert dots[:, 0].tolist() == [entry.log_evidence for entry in found.entries]
    assert [label.get_text() for label in ax.get_yticklabels()] == [entry.name for entry in found.entries]
    assert f"{found.entries[0].probability:.2g}" in [text.get_text() for text in ax.texts]
    assert plots.comparison(found, ax) is ax


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({}, "nothing to compare"),
        ({"a": fitted(), "b": fitted(examples=7)}, "numbers of examples seen differ"),
        ({"a": fitted(), "b": fitted().at(temperature=2.0)}, "'b' has temperature 2"),
        ({"a": fitted().at(prior=FactoredDamping(8, 1.0))}, "'a' has FactoredDamping"),
        ({"a": fitted(), "b": nn.Linear(2, 2)}, "'b' is a Linear"),
        (
            {"a": fitted(), "b": Laplace(networks.make("mlp"), "binary").fit([(X, networks.targets("binary", 8))])},
            "likelihoods differ",
        ),
    ],
)
def test_what_does_not_compare_is_refused_by_name(models: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare(models)


def test_unfitted_models_and_odd_priors_are_refused() -> None:
    with pytest.raises(NotFittedError, match="'new' has no posterior"):
        compare({"new": Laplace(networks.make("mlp"), "classification")})
    with pytest.raises(InputError, match="'b' is in one of the two only"):
        compare({"a": fitted()}, {"a": 1.0, "b": 2.0})
    with pytest.raises(InputError, match="must be positive"):
        compare({"a": fitted(), "b": fitted()}, {"a": 1.0, "b": 0.0})


def test_different_numbers_of_outputs_are_different_data() -> None:
    x, y = networks.inputs("mlp", 8), networks.targets("regression", 8)
    one, three = (Laplace(nn.Linear(3, n).double(), "regression").fit([(x, y[:, :n])]) for n in (1, 3))
    with pytest.raises(InputError, match=r"observed values differ \(8 and 24\)"):
        compare({"one": one, "three": three})


def test_different_numbers_of_answers_or_observed_classes_are_different_data() -> None:
    x, y = networks.inputs("mlp", 8), networks.targets("binary", 8)
    one, three = (Laplace(nn.Linear(3, n).double(), "binary").fit([(x, y[:, :n])]) for n in (1, 3))
    with pytest.raises(InputError, match=r"observed values differ \(8 and 24\)"):
        compare({"one": one, "three": three})
    ignored = Y.clone()
    ignored[:2] = -100
    fewer = Laplace(networks.make("mlp"), "classification").fit([(X, ignored)])
    with pytest.raises(InputError, match=r"observed values differ \(8 and 6\)"):
        compare({"all": fitted(), "fewer": fewer})


def test_names_may_be_numbers_and_evidences_must_be() -> None:
    found = compare({2: fitted(), 4: fitted(seed=1)})  # type: ignore[dict-item]
    assert {line.split()[0] for line in str(found).splitlines()[2:4]} == {"2", "4"}
    with pytest.raises(InputError, match="got a list"):
        compare([fitted()])  # type: ignore[arg-type]
    broken = fitted()
    broken.curvature.gradient["0.weight"].fill_(math.nan)
    with pytest.raises(InputError, match="'broken' has the log-evidence nan"):
        compare({"broken": broken.at(center="newton")})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (fitted("diag"), "structure"),
        (fitted(kron="reduce"), "structure .*kron expand.*kron reduce"),
        (fitted(rank_tolerance=1e-3), "curvature .*ggn 0.001"),
        (fitted(curvature="empirical"), "curvature"),
        (fitted().at(center="newton"), "center"),
        (fitted(weights="last_layer"), "Bayesian weights"),
    ],
)
def test_bounds_of_unequal_tightness_are_said(other: Laplace, message: str) -> None:
    with pytest.warns(ComparisonWarning, match=message):
        compare({"a": fitted(), "b": other})


# ------------------------------------------------------------------------------ choices with a right answer


class Polynomial(nn.Module):
    """`Σ_k w_k P_k(x)` up to a degree, with Legendre polynomials P_k scaled to unit variance on [-1, 1]."""

    def __init__(self, degree: int) -> None:
        super().__init__()
        self.degree = degree
        self.head = nn.Linear(degree + 1, 1, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        powers = [torch.ones_like(x), x]
        for k in range(1, self.degree):
            powers.append(((2 * k + 1) * x * powers[k] - k * powers[k - 1]) / (k + 1))
        scaled = [math.sqrt(2 * k + 1) * power for k, power in enumerate(powers[: self.degree + 1])]
        return self.head(torch.cat(scaled, dim=1))


TRUE_DEGREE = 3


def polynomial_data(seed: int, examples: int = 100) -> list[tuple[Tensor, Tensor]]:
    """A cubic whose every coefficient is ±1, under noise of standard deviation 0.5."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(examples, 1, generator=generator, dtype=torch.float64) - 1
    truth = Polynomial(TRUE_DEGREE)
    signs = torch.randint(2, (1, TRUE_DEGREE + 1), generator=generator).double() * 2 - 1
    with torch.no_grad():
        truth.head.weight.copy_(signs)
        return [(x, truth(x) + 0.5 * torch.randn(examples, 1, generator=generator, dtype=torch.float64))]


def degrees(data: list[tuple[Tensor, Tensor]], structure: str = "full") -> dict[str, Laplace]:
    return {
        str(degree): Laplace(Polynomial(degree), Gaussian(), structure).fit(data).at(center="newton").tune_prior()
        for degree in range(7)
    }


def test_evidence_picks_the_true_degree_of_a_polynomial() -> None:
    """In at least 18 of 20 seeds; likelihood alone always takes the largest degree."""
    picked, fits = [], []
    for seed in range(20):
        found = compare(degrees(polynomial_data(seed)))
        picked.append(int(found.best))
        fits.append(int(max(found.entries, key=lambda entry: entry.log_likelihood).name))
    assert sum(degree == TRUE_DEGREE for degree in picked) >= 18
    assert sum(degree == TRUE_DEGREE for degree in fits) <= 2


def test_evidence_of_a_polynomial_is_that_of_linear_regression() -> None:
    """What the choice rests on, by brute force: `log N(y; 0, ΦΦᵀ/λ + σ²)` at the tuned λ and σ²."""
    data = polynomial_data(0)
    x, y = data[0]
    for la in degrees(data).values():
        assert isinstance(la.model, Polynomial)
        features = torch.stack([_column(la.model, x, k) for k in range(la.model.degree + 1)], 1)
        assert la.tuning_ is not None
        assert la.tuning_.converged
        assert isinstance(la.noise, float)
        precision = la.tuning_.precisions["all"]
        covariance = features @ features.T / precision + la.noise * torch.eye(len(x), dtype=torch.float64)
        normal = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=torch.float64), covariance)
        assert float(la.log_evidence()) == pytest.approx(float(normal.log_prob(y[:, 0])), rel=1e-9)


def _column(model: Polynomial, x: Tensor, k: int) -> Tensor:
    probe = copy.deepcopy(model)
    with torch.no_grad():
        probe.head.weight.zero_()[0, k] = 1
        return probe(x)[:, 0]


def trained(activation: nn.Module, data: list[tuple[Tensor, Tensor]], steps: int = 400) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(1, 8), activation, nn.Linear(8, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    ((x, y),) = data
    for _ in range(steps):
        optimizer.zero_grad()
        (
            0.5 * (model(x) - y).square().sum() / 0.01 + 0.05 * sum(p.square().sum() for p in model.parameters())
        ).backward()
        optimizer.step()
    return model


class Wave(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(3 * x)


def waves(seed: int, wavy: bool) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(-2, 2, 60, dtype=torch.float64)[:, None]
    clean = torch.sin(4 * x) if wavy else 2 * (x - 0.3).relu() - 1
    return [(x, clean + 0.1 * torch.randn(60, 1, generator=generator, dtype=torch.float64))]


@pytest.mark.parametrize(("wavy", "expected"), [(True, "wave"), (False, "relu")])
def test_evidence_picks_the_activation_that_made_the_data(wavy: bool, expected: str) -> None:
    """Both ways round, so that no activation wins by always having the larger evidence."""
    for seed in range(2):
        data = waves(seed, wavy)
        activations = {"tanh": nn.Tanh(), "wave": Wave(), "relu": nn.ReLU()}
        found = compare({name: explained(trained(activation, data), data) for name, activation in activations.items()})
        assert found.best == expected
        if wavy and seed == 1:  # another fits the data better, with more of its weights
            assert found["tanh"].log_likelihood > found["wave"].log_likelihood
            assert found["tanh"].effective_dimension > found["wave"].effective_dimension


def explained(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Laplace:
    return Laplace(model, Gaussian(0.01), "full").fit(data).tune_prior(groups="layer")


def test_evidence_orders_checkpoints_of_a_training_run() -> None:
    data = waves(0, wavy=True)
    checkpoints = {str(steps): explained(trained(Wave(), data, steps), data) for steps in (0, 10, 40, 400)}
    assert [entry.name for entry in compare(checkpoints).entries] == ["400", "40", "10", "0"]
