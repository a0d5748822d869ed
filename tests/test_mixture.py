"""Mixtures of posteriors against their definition, written out member by member."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal

from lapwing import Categorical, ComparisonWarning, Gaussian, InputError, Laplace, Mixture, NotFittedError
from lapwing.predictive.components import Components
from lapwing.predictive.prediction import RegressionPrediction
from tests import networks

X = networks.inputs("mlp", 6, seed=9)
WEIGHTS = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
OPTIONS: list[dict[str, Any]] = [{}, {"link": "mc", "samples": 50}, {"method": "sampled", "samples": 7}]


def member(seed: int, likelihood: Any = "classification", **options: Any) -> Laplace:
    kind = likelihood if isinstance(likelihood, str) else "regression"
    x, y = networks.inputs("mlp", 8), networks.targets(kind, 8)
    return Laplace(networks.make("mlp", seed), likelihood, **options).fit([(x, y)])


def members(likelihood: Any = "classification") -> list[Laplace]:
    return [member(0, likelihood), member(1, likelihood, prior=5.0), member(2, likelihood, structure="diag")]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def average(values: list[Tensor]) -> Tensor:
    return sum((w * v for w, v in zip(WEIGHTS, values, strict=True)), torch.zeros(()))


@pytest.mark.parametrize("likelihood", ["classification", "binary"])
@pytest.mark.parametrize("options", OPTIONS)
def test_probabilities_and_entropies(likelihood: str, options: dict[str, Any]) -> None:
    generator = seeded()
    parts = [la.predict(X, generator=generator, **options) for la in members(likelihood)]
    aleatoric = average([part.aleatoric for part in parts])  # a closed form draws here, in the same order
    mixture = Mixture(members(likelihood), WEIGHTS).predict(X, generator=seeded(), **options)
    probs = average([part.probs for part in parts])
    torch.testing.assert_close(mixture.probs, probs)
    entropy = -(probs * probs.log()).sum(1) if likelihood == "classification" else -(
        probs * probs.log() + (1 - probs) * (1 - probs).log()
    )  # fmt: skip
    torch.testing.assert_close(mixture.entropy, entropy)
    torch.testing.assert_close(mixture.aleatoric, aleatoric)
    torch.testing.assert_close(mixture.epistemic, entropy - aleatoric)
    within = average([part.epistemic for part in parts])
    assert bool((mixture.epistemic > within).all())  # the members disagree
    y = networks.targets(likelihood, 6)
    expected = average([part.log_prob(y).exp() for part in parts]).log()
    torch.testing.assert_close(mixture.log_prob(y), expected)  # of binary outputs together: no product of three
    if likelihood == "classification":
        torch.testing.assert_close(mixture.distribution().log_prob(y), expected)
        torch.testing.assert_close(mixture.labels, probs.argmax(1))
    else:
        torch.testing.assert_close(mixture.distribution().log_prob(y).exp(), torch.where(y == 1, probs, 1 - probs))


@pytest.mark.parametrize("method", ["linearized", "sampled"])
def test_positions_of_an_example_share_the_member(method: str) -> None:
    """`p(y|x) = Σ_m w_m Π_e p_m(y_e|x)`, some positions not observed; of samples likewise."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 1, 4, 4, dtype=torch.float64), torch.randint(3, (6, 4, 4))
    y[:, :2, :2] = -100
    nets = [nn.Conv2d(1, 3, 3, padding=1).double() for _ in range(2)]
    ensemble = [Laplace(net, Categorical(dim=1)).fit([(x, y)]) for net in nets]
    samples, generator = 4 if method == "sampled" else None, seeded()
    parts = [la.predict(x, method, samples=samples, generator=generator).log_prob(y) for la in ensemble]
    mixture = Mixture(ensemble, [1, 3]).predict(x, method, samples=samples, generator=seeded())
    expected = torch.stack([parts[0] + math.log(0.25), parts[1] + math.log(0.75)]).logsumexp(0)
    torch.testing.assert_close(mixture.log_prob(y), expected)


def test_outputs_of_sampled_weights_share_the_sample() -> None:
    la = member(0, "binary")
    y = networks.targets("binary", 6)
    weights = la.sample(5, seeded())
    found = la.predict(X, "sampled", samples=weights)
    each = []
    for s in range(5):
        outputs = torch.func.functional_call(la.model, {name: value[s] for name, value in weights.items()}, X)
        each.append(-nn.functional.binary_cross_entropy_with_logits(outputs, y, reduction="none").sum(1))
    torch.testing.assert_close(found.log_prob(y), torch.stack(each).logsumexp(0) - math.log(5))


@pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])
def test_members_of_different_dtypes_mix_in_the_wider(likelihood: str) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(4, (9, 2))
    y = networks.targets(likelihood, 9)
    double = nn.Sequential(nn.Embedding(4, 2), nn.Flatten(), nn.Linear(4, 3)).double()
    single = copy.deepcopy(double).float()
    y32 = y.float() if y.is_floating_point() else y
    ensemble = [Laplace(single, likelihood).fit([(tokens, y32)]), Laplace(double, likelihood).fit([(tokens, y)])]
    found: Any = Mixture(ensemble).predict(tokens)
    alone: Any = ensemble[1].predict(tokens)
    assert found.log_prob(y).dtype == torch.float64
    torch.testing.assert_close(found.log_prob(y), alone.log_prob(y), rtol=1e-5, atol=1e-5)
    assert found.epistemic.dtype == torch.float64
    if likelihood == "regression":
        torch.testing.assert_close(torch.stack(found.interval()), torch.stack(alone.interval()), rtol=1e-5, atol=1e-5)


def test_classes_along_the_same_dimension_under_another_number() -> None:
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    ensemble = [Laplace(networks.make("mlp"), Categorical(dim=dim)).fit([(x, y)]) for dim in (-1, 1)]
    torch.testing.assert_close(Mixture(ensemble).predict(X).probs, ensemble[0].predict(X).probs)


@pytest.mark.parametrize("method", ["linearized", "sampled"])
def test_regression_by_the_law_of_total_variance(method: str) -> None:
    noises = [0.2, 0.5, 0.1]
    ensemble = [la.at(noise=noise) for la, noise in zip(members(Gaussian()), noises, strict=True)]
    samples = 7 if method == "sampled" else None
    generator = seeded()
    parts = [la.predict(X, method, samples=samples, generator=generator) for la in ensemble]
    mixture: Any = Mixture(ensemble, WEIGHTS).predict(X, method, samples=samples, generator=seeded())
    mean = average([part.mean for part in parts])
    torch.testing.assert_close(mixture.mean, mean)
    second = average([part.variance + part.mean.square() for part in parts])
    torch.testing.assert_close(mixture.variance, second - mean.square())
    torch.testing.assert_close(mixture.aleatoric, torch.full_like(mean, float(WEIGHTS @ torch.tensor(noises).double())))
    torch.testing.assert_close(mixture.variance, mixture.aleatoric + mixture.epistemic)
    y = networks.targets("regression", 6)
    logs = torch.stack([part.log_prob(y) for part in parts]) + WEIGHTS.log()[:, None]
    torch.testing.assert_close(mixture.log_prob(y), logs.logsumexp(0))
    moments = mixture.distribution()
    torch.testing.assert_close(moments.mean.reshape(mean.shape), mean)
    torch.testing.assert_close(moments.variance.reshape(mean.shape), mixture.variance)
    low, high = mixture.interval(0.8)
    for edge, mass in ((low, 0.1), (high, 0.9)):
        below = average([_cdf(part, edge) for part in parts])
        torch.testing.assert_close(below, torch.full_like(below, mass), rtol=0, atol=1e-12)


def _cdf(part: Any, edge: Tensor) -> Tensor:
    if part.components is None:
        return Normal(part.mean, part.std).cdf(edge)
    return Normal(part.components.means, part.aleatoric.sqrt()).cdf(edge).mean(0)


def test_outputs_stay_correlated_within_members() -> None:
    ensemble = members(Gaussian(0.2))[:2]
    y = networks.targets("regression", 6)
    logs = []
    for la in ensemble:
        mean, covariance = la.latent(X)
        logs.append(MultivariateNormal(mean, covariance + 0.2 * torch.eye(3, dtype=torch.float64)).log_prob(y))
    expected = torch.stack(logs).logsumexp(0) - math.log(2)
    prediction = Mixture(ensemble).predict(X)
    torch.testing.assert_close(prediction.log_prob(y), expected)
    torch.manual_seed(0)
    drawn = prediction.distribution().sample((200_000,))
    assert drawn.shape == (200_000, 6, 3)
    torch.testing.assert_close(drawn.mean(0), prediction.mean, rtol=0, atol=0.03)
    torch.testing.assert_close(drawn.var(0), prediction.variance, rtol=0.03, atol=0)


def test_a_mixture_of_one_is_its_member() -> None:
    for likelihood in ("classification", "binary", Gaussian(0.2)):
        la = member(0, likelihood)
        one, alone = Mixture([la]).predict(X), la.predict(X)
        kind = likelihood if isinstance(likelihood, str) else "regression"
        y = networks.targets(kind, 6)
        torch.testing.assert_close(one.log_prob(y), alone.log_prob(y))
        if kind == "regression":
            torch.testing.assert_close(torch.stack(one.interval(0.9)), torch.stack(alone.interval(0.9)))


def test_evidence_weights_and_evidence() -> None:
    ensemble = [member(seed) for seed in range(3)]
    evidences = torch.stack([la.log_evidence() for la in ensemble])
    mixture = Mixture(ensemble, "evidence")
    torch.testing.assert_close(mixture.weights, evidences.exp() / evidences.exp().sum())
    torch.testing.assert_close(mixture.log_evidence(), evidences.exp().mean().log())
    weighed = Mixture(ensemble, [1.0, 0.0, 3.0])
    torch.testing.assert_close(weighed.weights, torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64))
    torch.testing.assert_close(weighed.log_evidence(), (0.25 * evidences[0].exp() + 0.75 * evidences[2].exp()).log())
    assert len(weighed) == 3
    assert "weights [0.25, 0, 0.75]" in repr(weighed)


def test_a_member_of_weight_zero_does_not_count() -> None:
    x = X.clone().requires_grad_()
    for likelihood in ("classification", "binary", Gaussian(0.2)):
        ensemble = members(likelihood)
        y = networks.targets(likelihood if isinstance(likelihood, str) else "regression", 6)
        full = Mixture(ensemble, [0.4, 0.0, 0.6]).predict(x).log_prob(y)
        torch.testing.assert_close(full, Mixture([ensemble[0], ensemble[2]], [0.4, 0.6]).predict(x).log_prob(y))
        (gradient,) = torch.autograd.grad(full.sum(), x)
        assert bool(torch.isfinite(gradient).all())
    with torch.no_grad():
        ensemble[1].model.get_parameter("0.bias").fill_(7)  # nor is it asked
    Mixture(ensemble, [0.4, 0.0, 0.6]).predict(X)
    with pytest.raises(InputError, match="changed since the fit"):
        Mixture(ensemble).predict(X)


def test_tuning_a_member_afterwards_changes_nothing() -> None:
    la = member(0)
    mixture = Mixture([la, member(1)], "evidence")
    before, evidence = mixture.predict(X).probs, mixture.log_evidence()
    la.tune_prior()
    torch.testing.assert_close(mixture.predict(X).probs, before, rtol=0, atol=0)
    torch.testing.assert_close(mixture.log_evidence(), evidence, rtol=0, atol=0)


def test_quantiles_of_far_components_and_their_gradients() -> None:
    means = torch.tensor([[[-50.0], [0.0]], [[50.0], [3.0]]], dtype=torch.float64, requires_grad=True)
    variances = torch.tensor([[[1.0], [4.0]], [[0.01], [1.0]]], dtype=torch.float64)
    components = Components(torch.tensor([0.3, 0.7], dtype=torch.float64).log(), means, variances)
    for probability in (0.001, 0.2, 0.6, 0.99):
        found = components.quantile(probability)
        masses = Normal(means, variances.sqrt()).cdf(found)
        below = 0.3 * masses[0] + 0.7 * masses[1]
        torch.testing.assert_close(below, torch.full_like(below, probability), rtol=0, atol=1e-12)

    def of_means(means: Tensor) -> Tensor:
        return Components(components.log_weights, means, variances).quantile(0.6)

    assert torch.autograd.gradcheck(of_means, (means,), eps=1e-5)


@pytest.mark.parametrize("probability", [0.5, 0.999, 1 - 1e-8, 1 - 2**-53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_intervals_reach_far_into_the_tails_in_low_precision(probability: float, dtype: torch.dtype) -> None:
    """A mixture of one Gaussian has its quantiles, known in closed form; so has one of equal samples."""
    means, variances = torch.tensor([[[1.0]], [[1.0]], [[1.0]]], dtype=dtype), torch.tensor([[4.0]], dtype=dtype)
    components = Components.equal(means, variances)
    prediction = RegressionPrediction(means[0], variances, torch.zeros_like(variances), components=components)
    width = -2 * float(torch.special.ndtri(torch.tensor((1 - probability) / 2, dtype=torch.float64)))
    low, high = prediction.interval(probability)
    assert low.dtype == high.dtype == dtype
    torch.testing.assert_close(high, torch.tensor([[1 + width]], dtype=dtype))
    torch.testing.assert_close(low, torch.tensor([[1 - width]], dtype=dtype))


def test_quantiles_in_a_gap_are_finite_and_so_are_their_gradients() -> None:
    means = torch.tensor([[[-50.0]], [[50.0]]], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([0.25, 0.75], dtype=torch.float64).log()
    found = Components(weights, means, torch.ones_like(means).detach()).quantile(0.25)
    assert -50 < float(found.detach()) < 50
    (gradient,) = torch.autograd.grad(found.sum(), means)
    assert bool(torch.isfinite(gradient).all())


def test_warnings_point_to_the_callers_line() -> None:
    mixed = [member(0), member(1, structure="diag")]
    with pytest.warns(ComparisonWarning) as caught:
        Mixture(mixed, "evidence").log_evidence()
    assert [warning.filename for warning in caught] == 2 * [__file__]


def test_intervals_of_samples_are_those_of_their_mixture() -> None:
    """Two far groups of samples: a Gaussian of the same variance would give another interval."""
    la = member(0, Gaussian(1e-4))
    prediction: Any = la.at(prior=1e-3).predict(X, "sampled", samples=5, generator=seeded())
    low, high = prediction.interval(0.5)
    normal = Normal(prediction.components.means, 0.01)
    torch.testing.assert_close(normal.cdf(high).mean(0) - normal.cdf(low).mean(0), torch.full_like(low, 0.5))


def test_single_outputs_without_an_axis() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(9, 2, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    nets = [nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)).double() for _ in range(2)]
    ensemble = [Laplace(net, "regression").fit([(x, y)]) for net in nets]
    prediction = Mixture(ensemble).predict(x)
    logs = torch.stack([Normal(p.mean, p.std).log_prob(y) for p in (la.predict(x) for la in ensemble)])
    torch.testing.assert_close(prediction.log_prob(y), logs.logsumexp(0) - math.log(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture([]), "needs a list"),
        (lambda: Mixture(member(0)), "needs a list"),  # type: ignore[arg-type]
        (lambda: Mixture([member(0), nn.Linear(1, 1)]), "Member 1 of the Mixture is a Linear"),  # type: ignore[list-item]
        (lambda: Mixture([member(0), member(1, "binary")]), "same likelihood"),
        (lambda: Mixture([member(0)], [0.5, 0.5]), "1 numbers"),
        (lambda: Mixture([member(0), member(1)], [1.0, -0.5]), "at least 0"),
        (lambda: Mixture([member(0), member(1)], [0.0, 0.0]), "all 0"),
        (lambda: Mixture([member(0), member(1)], "evidenc"), "Did you mean 'evidence'"),
        (lambda: Mixture([member(0), member(1).at(temperature=2.0)], "evidence"), "'member 1' has temperature"),
        (lambda: Mixture([member(0)]).predict(X, "sampled", samples=member(0).sample(2)), "as a number"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_mix_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_members_must_be_fitted_and_have_the_same_outputs() -> None:
    with pytest.raises(NotFittedError, match="Member 1"):
        Mixture([member(0), Laplace(networks.make("mlp"), "classification")])
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    wide = Laplace(nn.Linear(3, 4).double(), "classification").fit([(x, y)])
    with pytest.raises(InputError, match=r"member 0 predicts \[6, 3\], member 1 \[6, 4\]"):
        Mixture([member(0), wide]).predict(X)


@pytest.mark.parametrize("method", ["linearized", "sampled", "pushed"])
def test_joint_predictions_of_regressions(method: str) -> None:
    """Moments by the law of total covariance, the density member by member, draws against both."""
    ensemble = members(Gaussian(0.2))
    options: dict[str, Any] = {"method": method} | ({} if method == "linearized" else {"samples": 9})
    generator = seeded()
    parts: list[Any] = [la.predict(X, generator=generator, joint=True, **options) for la in ensemble]
    mixture: Any = Mixture(ensemble, WEIGHTS).predict(X, generator=seeded(), joint=True, **options)
    mean = average([part.mean for part in parts])
    torch.testing.assert_close(mixture.mean, mean)
    second = [part.covariance + torch.outer(part.mean.flatten(), part.mean.flatten()) for part in parts]
    torch.testing.assert_close(mixture.covariance, average(second) - torch.outer(mean.flatten(), mean.flatten()))
    y = networks.targets("regression", 6)
    logs = torch.stack([part.log_prob(y) for part in parts]) + WEIGHTS.log()
    torch.testing.assert_close(mixture.log_prob(y), logs.logsumexp(0))
    if method == "linearized":
        torch.testing.assert_close(mixture.distribution().log_prob(y.flatten()), mixture.log_prob(y))
        torch.testing.assert_close(mixture.distribution().mean, mean.flatten())
    else:
        with pytest.raises(InputError, match="no closed form"):
            mixture.distribution()
    alone: Any = Mixture(ensemble, WEIGHTS).predict(X, generator=seeded(), **options)
    torch.testing.assert_close(mixture.marginals.mean, alone.mean)
    torch.testing.assert_close(mixture.marginals.variance, alone.variance)
    own = mixture.covariance.diagonal().reshape(mean.shape)
    if method == "linearized":  # the covariance of samples is divided by S − 1
        torch.testing.assert_close(own, alone.epistemic)
    drawn = mixture.sample(200_000, generator=seeded()).flatten(1)
    error = (drawn.T @ drawn / len(drawn) - drawn.mean(0).outer(drawn.mean(0)) - mixture.covariance).abs()
    if method == "linearized":
        assert float(error.max()) < 0.02 * float(mixture.covariance.abs().max())
    assert float((drawn.mean(0) - mean.flatten()).abs().max()) < 5 / math.sqrt(len(drawn)) * float(own.max().sqrt())


def test_joint_predictions_of_classes() -> None:
    """The draws of each member are its own, one after the other from the same source of randomness."""
    ensemble = members()
    y = networks.targets("classification", 6)
    generator = seeded()
    parts: list[Any] = [la.predict(X, joint=True) for la in ensemble]
    logs = torch.stack([part.log_prob(y, 500, generator) for part in parts]) + WEIGHTS.log()
    mixture: Any = Mixture(ensemble, WEIGHTS).predict(X, joint=True)
    torch.testing.assert_close(mixture.log_prob(y, samples=500, generator=seeded()), logs.logsumexp(0))
    one: Any = Mixture(ensemble, [0, 1, 0]).predict(X, joint=True)
    torch.testing.assert_close(one.covariance, parts[1].covariance)
    assert one.sample(4, seeded()).shape == (4, *parts[1].mean.shape)
    torch.testing.assert_close(mixture.marginals.probs, Mixture(ensemble, WEIGHTS).predict(X).probs)
    with pytest.raises(InputError, match="at least 1, got 0"):
        mixture.sample(0)
