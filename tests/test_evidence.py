"""The evidence under every prior, temperature and center, and its gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import FactoredDamping, Gaussian, GaussianPrior, InputError, Laplace, TuningWarning, priors
from tests import networks, oracles

STRUCTURES = ["diag", "kron", "ekfac", "block", "full", "lowrank"]


def fitted(structure: str, likelihood: Any = "classification", network: str = "mlp", **options: Any) -> Laplace:
    name = likelihood if isinstance(likelihood, str) else "regression"
    x, y = networks.inputs(network, 8), networks.targets(name, 8)
    return Laplace(networks.make(network), likelihood, structure, **options).fit(networks.batches(x, y, 5, 3))


def dense(la: Laplace) -> Tensor:
    return torch.block_diag(*[block.accumulator.matrix() for block in la.curvature.blocks])


def packed(la: Laplace, values: dict[str, Tensor]) -> Tensor:
    return torch.cat([block.pack(values) for block in la.curvature.blocks], dim=-1)


def weights(la: Laplace) -> Tensor:
    return packed(la, la.posterior.weights)


def log_likelihood(la: Laplace, noise: float = 1.0) -> float:
    return float(la.curvature.statistics.log_likelihood_at(torch.tensor(noise, dtype=torch.float64)))


def elementwise(la: Laplace) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = {name: la.posterior.weights[name].shape for name in la.curvature.parameters}
    return {name: 0.5 + torch.rand(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}


PRIORS: dict[str, Any] = {
    "scalar": lambda la: 2.5,
    "layer": lambda la: {"0.*": 0.3, "2.*": 4.0},
    "weight and bias": lambda la: {"*.bias": 0.3, "*": 4.0},
    "per input": lambda la: {"0.weight": torch.tensor([1.0, 2.0, 3.0]).expand(4, 3), "*": 1.0},
    "per output": lambda la: {
        "2.weight": torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 4), "2.bias": torch.tensor([1.0, 2.0, 3.0]), "*": 0.7},
    "elementwise": elementwise,
}  # fmt: skip
TAKES = {
    "diag": list(PRIORS), "block": list(PRIORS), "full": list(PRIORS), "lowrank": list(PRIORS), "ekfac": ["scalar", "layer"],
    "kron": ["scalar", "layer", "weight and bias", "per input", "per output"],
}  # fmt: skip


@pytest.mark.parametrize(("structure", "prior"), [(s, p) for s in STRUCTURES for p in TAKES[s]])
@pytest.mark.parametrize("tempered", ["likelihood", "both"])
def test_priors_and_temperatures_against_dense_algebra(structure: str, prior: str, tempered: str) -> None:
    la = fitted(structure)
    mean: dict[str, Any] = {"0.bias": torch.full((4,), 0.3), "2.weight": 0.1}
    temperature = 1.7
    la = la.at(prior=GaussianPrior(PRIORS[prior](la), mean), temperature=temperature, tempered=tempered)
    precision = packed(la, {n: p.expand(la.posterior.sizes[n]) for n, p in la.posterior.precisions.items()})
    center = packed(la, {n: m.expand(la.posterior.sizes[n]) for n, m in la.posterior.means.items()})
    matrix, distance = dense(la), weights(la) - center
    scale = temperature if tempered == "both" else 1.0
    expected = oracles.log_evidence(
        log_likelihood(la), matrix, scale * precision, distance, scale=temperature, temperature=temperature
    )
    size = precision.numel()
    if tempered == "both":  # the normalizers of p(θ)^T against those of N(μ₀, (TΠ)⁻¹)
        logs = (precision / (2 * math.pi)).log().sum()
        expected += float(0.5 * (temperature * logs - (logs + size * math.log(temperature))))
    assert float(la.log_evidence()) == pytest.approx(expected, rel=1e-10)
    inverse = torch.linalg.inv(temperature * matrix + torch.diag(scale * precision))
    torch.testing.assert_close(packed(la, la.posterior.variances()), inverse.diagonal(), rtol=1e-9, atol=1e-12)
    assert float(la.posterior.effective_dimension()) == pytest.approx(
        float(size - (scale * precision * inverse.diagonal()).sum()), rel=1e-9
    )
    x = networks.inputs("mlp", 3, seed=4)
    rows = oracles.packed_jacobian(la, x)
    expected_covariance = torch.einsum("nci,ij,ndj->ncd", rows, inverse, rows)
    torch.testing.assert_close(la.latent(x).covariance, expected_covariance, rtol=1e-9, atol=1e-12)

    # The Newton center and the quadratic model there.
    newton = la.at(center="newton")
    gradient = packed(la, la.curvature.gradient)
    step = -inverse @ (scale * precision * distance - temperature * gradient)
    torch.testing.assert_close(packed(la, newton.posterior.step), step, rtol=1e-9, atol=1e-12)
    moved = log_likelihood(la) + float(gradient @ step - 0.5 * step @ matrix @ step)
    expected = oracles.log_evidence(
        moved, matrix, scale * precision, distance + step, scale=temperature, temperature=temperature
    )
    if tempered == "both":
        expected += float(0.5 * (temperature * logs - (logs + size * math.log(temperature))))
    assert float(newton.log_evidence()) == pytest.approx(expected, rel=1e-10)
    assert float(newton.log_evidence()) >= float(la.log_evidence()) - 1e-10
    shifted = oracles.evaluate(la.model, x) + torch.einsum("ncp,p->nc", rows, step)
    torch.testing.assert_close(newton.latent(x).mean, shifted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("center", ["network", "newton"])
def test_gradients_in_prior_noise_and_temperature(structure: str, center: str) -> None:
    la = fitted(structure, Gaussian(noise=0.5)).at(center=center)
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]

    def value(logs: Tensor) -> Tensor:
        precisions = logs[:4].exp()
        if structure == "ekfac":
            groups = {"0.*": precisions[0], "2.*": precisions[2]}
        else:
            groups = dict(zip(names, precisions, strict=True))
        return la.log_evidence(groups, noise=logs[4].exp(), temperature=logs[5].exp())

    point = torch.tensor([0.3, -0.4, 0.1, 0.7, -0.5, 0.2], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(value(point), point)
    for i in range(6):
        shift = torch.zeros(6, dtype=torch.float64)
        shift[i] = 1e-5
        numeric = (value(point.detach() + shift) - value(point.detach() - shift)) / 2e-5
        assert float(gradient[i]) == pytest.approx(float(numeric), rel=1e-6, abs=1e-7)


def test_at_shares_everything() -> None:
    la = fitted("kron")
    other = la.at(prior=3.0, temperature=2.0)
    assert other.curvature is la.curvature
    assert other.posterior.spectrum is la.posterior.spectrum
    assert other.posterior.blocks[0].basis is la.posterior.blocks[0].basis
    assert la.temperature == 1.0


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("groups", ["scalar", "layer", {"*.bias": "b", "*": "w"}, "parameter"])
def test_tuning_reaches_mackays_fixed_point(structure: str, groups: Any) -> None:
    if (structure == "ekfac" and not isinstance(groups, str)) or (
        structure in ("kron", "ekfac") and groups == "parameter"
    ):
        pytest.skip("the structure does not take this prior")
    la = fitted(structure)
    before = float(la.log_evidence())
    la.tune_prior(groups=groups)
    assert la.tuning_ is not None
    assert la.tuning_.converged
    assert la.tuning_.residual <= 1e-6
    assert la.tuning_.start == pytest.approx(before)
    assert la.tuning_.value == pytest.approx(float(la.log_evidence()))
    posterior = la.posterior
    variances = posterior.variances()
    labels = {"scalar": lambda n: "", "layer": lambda n: n[0], "parameter": lambda n: n}
    label = labels[groups] if isinstance(groups, str) else (lambda n: n.rpartition(".")[2])
    for key in {label(name) for name in posterior.sizes}:
        members = [name for name in posterior.sizes if label(name) == key]
        determined = [1 - posterior.precisions[n] * variances[n] for n in members]
        distance = [posterior.precisions[n] * posterior.weights[n].square() for n in members]
        if groups == "parameter":
            torch.testing.assert_close(determined[0], distance[0].expand_as(determined[0]), rtol=1e-4, atol=1e-6)
        else:
            assert float(sum(d.sum() for d in determined)) == pytest.approx(
                float(sum(d.sum() for d in distance)), rel=1e-5
            )


def test_tuning_is_a_maximum() -> None:
    """No other precision or noise near the tuned ones has more evidence."""
    la = fitted("kron", Gaussian(noise=2.0)).tune_prior(groups="layer")
    best = float(la.log_evidence())
    assert la.tuning_ is not None
    tuned = {f"{label}.*": value for label, value in la.tuning_.precisions.items()}
    for factor in (0.98, 1.02):
        assert float(la.log_evidence(noise=factor * la.noise)) < best  # type: ignore[operator]
        for name in tuned:
            assert float(la.log_evidence({**tuned, name: factor * tuned[name]})) < best


def test_runaway_optima_are_named() -> None:
    model = networks.make("mlp")
    with torch.no_grad():
        model[2].bias.zero_()  # type: ignore[index,union-attr,operator]
    x, y = networks.inputs("mlp", 6), networks.targets("classification", 6)
    x[:, 0] = 0  # no curvature for the weights of the first input
    la = Laplace(model, "classification", "diag").fit([(x, y)])
    with pytest.warns(TuningWarning, match="'2.bias' is at the prior mean: the best precision is infinite; held"):
        la.tune_prior(groups={"2.bias": "2.bias", "*": "rest"})
    assert la.tuning_ is not None
    assert la.tuning_.converged
    assert la.tuning_.precisions["2.bias"] == 1.0
    la = la.at(prior=1.0)
    with pytest.warns(TuningWarning) as caught:
        la.tune_prior(groups="parameter")
    messages = " ".join(str(warning.message) for warning in caught)
    assert "4 of 12 elements of '0.weight' are without curvature" in messages
    assert "3 of 3 elements of '2.bias' are at the prior mean" in messages
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(ValueError, match="Nothing to tune"):
        Laplace(model, "classification").fit([(x, y)]).tune_prior()


def test_batches_of_statistics() -> None:
    """`passes` averages: N, log-likelihood, squared error and H stay those of one data set."""
    model = networks.make("mlp")
    x, y = networks.inputs("mlp", 7), networks.targets("regression", 7)
    once = Laplace(model, "regression").fit([(x, y)])
    thrice = Laplace(model, "regression").fit([(x, y)], passes=3)
    assert thrice.curvature.examples == 7
    assert float(thrice.log_evidence()) == pytest.approx(float(once.log_evidence()), rel=1e-12)


@pytest.mark.parametrize("structure", ["diag", "kron", "block", "full", "lowrank"])
@pytest.mark.parametrize("network", ["cnn", "attention"])
def test_halves_merge_to_the_whole(structure: str, network: str) -> None:
    model = networks.make(network)
    x, y = networks.inputs(network, 8), networks.targets("classification", 8)
    parts = [Laplace(model, "classification", structure).fit([(x[s], y[s])]) for s in (slice(0, 3), slice(3, 8))]
    whole = Laplace(model, "classification", structure).fit([(x, y)])
    merged = parts[0].merge(parts[1])
    torch.testing.assert_close(dense(merged), dense(whole), rtol=1e-10, atol=1e-12)
    assert merged.curvature.examples == 8
    assert float(merged.log_evidence(center="newton")) == pytest.approx(
        float(whole.log_evidence(center="newton")), rel=1e-10
    )


def test_ekfac_merges_on_a_shared_basis_only() -> None:
    la = fitted("ekfac")
    twice = la.merge(la)
    torch.testing.assert_close(dense(twice), 2 * dense(la), rtol=1e-12, atol=0)
    x, y = networks.inputs("mlp", 4, seed=7), networks.targets("classification", 4, seed=7)
    other = Laplace(la.model, "classification", "ekfac").fit([(x, y)])
    with pytest.raises(ValueError, match="shared basis"):
        la.merge(other)


def test_a_sampler_that_shows_part_of_the_data() -> None:
    """N is what was seen, not the length of the data set."""
    model = networks.make("mlp").float()
    dataset = torch.utils.data.TensorDataset(torch.randn(200, 3), torch.randint(3, (200,)))
    sampler = torch.utils.data.SubsetRandomSampler(range(40))
    la = Laplace(model, "classification").fit(torch.utils.data.DataLoader(dataset, 16, sampler=sampler))
    assert la.curvature.examples == 40


def test_factored_damping() -> None:
    """(√(Tn) Q + √τ) ⊗ (√(Tn) H + √τ), with per-example averages; for convolutions Q sums over positions."""
    for network in ("mlp", "cnn"):
        la = fitted("kron", network=network).at(prior=FactoredDamping(50, 0.3), temperature=2.0)
        for block in la.posterior.blocks:
            accumulator: Any = block.block.accumulator
            positions = accumulator.positions / accumulator.examples
            q = accumulator.inputs[0] / accumulator.examples
            h = accumulator.outputs[0] / (accumulator.examples * positions)
            eye = [torch.eye(len(f), dtype=f.dtype) for f in (h, q)]
            root = math.sqrt(2.0 * 50)
            expected = torch.kron(root * h + math.sqrt(0.3) * eye[0], root * q + math.sqrt(0.3) * eye[1])
            half = block.basis.expand(torch.diag(block.scale.sqrt().flatten()).unflatten(1, block.basis.shape))
            torch.testing.assert_close(half.T @ half, torch.linalg.inv(expected), rtol=1e-8, atol=1e-10)


def test_weight_decay() -> None:
    assert priors.from_weight_decay(1e-4, 1000) == pytest.approx(0.1)


def test_validation_takes_the_best_and_never_nan() -> None:
    la = fitted("kron")
    loader = [(networks.inputs("mlp", 9, seed=5), networks.targets("classification", 9, seed=5))]
    la.tune_prior(method="validation", loader=loader, candidates=[1e9, 1e-6, 0.1, 1.0, 10.0, 1e-30], score="log")
    assert la.tuning_ is not None
    scores = {option["prior"]: score for option, score in la.tuning_.candidates}
    assert la.tuning_.value == max(scores.values())
    assert float(torch.as_tensor(la.prior.precision["*"])) == max(scores, key=scores.get)  # type: ignore[union-attr,index,call-overload,arg-type]

    def broken(prediction: Any, y: Tensor) -> Tensor:
        log_prob: Tensor = prediction.log_prob(y)
        return log_prob * float("nan") if float(prediction.epistemic.mean()) > 0.05 else log_prob

    la.tune_prior(method="validation", loader=loader, candidates=[1e-6, 1e9, 30.0, 1e-3], score=broken)
    assert math.isfinite(la.tuning_.value)
    assert any(math.isnan(score) for _, score in la.tuning_.candidates)
    with pytest.raises(ValueError, match="None of the 1 candidates has a finite score"):
        la.tune_prior(method="validation", loader=loader, candidates=[1.0], score=lambda p, y: p.log_prob(y) / 0)


def test_validation_tunes_temperature_and_damping() -> None:
    la = fitted("kron")
    loader = [(networks.inputs("mlp", 9, seed=5), networks.targets("classification", 9, seed=5))]
    la.tune_prior(
        method="validation", loader=loader, candidates=[FactoredDamping(8, 1.0), FactoredDamping(80, 1.0)],
        temperatures=[0.5, 2.0],
    )  # fmt: skip
    assert la.tuning_ is not None
    best = max(la.tuning_.candidates, key=lambda item: item[1])[0]
    assert la.prior == best["prior"]
    assert la.temperature == best["temperature"]
    assert len({score for _, score in la.tuning_.candidates}) == 4


def test_validation_by_the_predictions_that_are_asked_for() -> None:
    la = fitted("kron")
    loader = [(networks.inputs("mlp", 9, seed=5), networks.targets("classification", 9, seed=5))]
    la.tune_prior(
        method="validation", loader=loader, candidates=[1.0, 3.0],
        predict={"method": "sampled", "samples": 7, "generator": torch.Generator().manual_seed(3)},
    )  # fmt: skip
    assert la.tuning_ is not None
    for option, score in la.tuning_.candidates:
        prediction = la.at(**option).predict(
            loader[0][0], method="sampled", samples=7, generator=torch.Generator().manual_seed(3)
        )
        assert score == pytest.approx(float(prediction.log_prob(loader[0][1]).mean()), rel=1e-12)
    with pytest.raises(InputError, match="Did you mean 'samples'"):
        la.tune_prior(method="validation", loader=loader, predict={"sample": 7})


def test_perfect_fit_holds_the_noise() -> None:
    model = nn.Linear(2, 1).double()
    x = torch.randn(5, 2, dtype=torch.float64)
    la = Laplace(model, "regression", "full").fit([(x, model(x).detach())])
    with pytest.warns(TuningWarning, match="squared error is 0"):
        la.tune_prior()
    assert la.noise == 1.0


@pytest.mark.parametrize("temperature", [0.95, 2.0])
@pytest.mark.parametrize("structure", ["diag", "kron", "full", "lowrank"])
def test_tuning_with_a_tempered_prior_is_a_maximum(structure: str, temperature: float) -> None:
    la = fitted(structure, Gaussian(noise=2.0), temperature=temperature, tempered="both").tune_prior(groups="layer")
    assert la.tuning_ is not None
    assert la.tuning_.converged
    best = la.tuning_.value
    tuned = {f"{label}.*": value for label, value in la.tuning_.precisions.items()}
    for factor in (0.98, 1.02):
        assert float(la.log_evidence(noise=factor * la.noise)) < best  # type: ignore[operator]
        for name in tuned:
            assert float(la.log_evidence({**tuned, name: factor * tuned[name]})) < best


def test_tempered_priors_have_interior_optima_of_their_own() -> None:
    """T < 1 with weights at the prior mean, T > 1 without curvature: `λ = (1 − 1/T) p/‖θ‖²`."""
    model = networks.make("mlp")
    x, y = networks.inputs("mlp", 6), networks.targets("classification", 6)
    with torch.no_grad():
        model[2].bias.zero_()  # type: ignore[index,union-attr,operator]
    la = Laplace(model, "classification", "block", temperature=0.5, tempered="both").fit([(x, y)])
    la.tune_prior(groups={"2.bias": "bias", "*": "rest"})
    assert la.tuning_ is not None
    value, tuned = la.tuning_.value, la.tuning_.precisions
    assert la.tuning_.converged
    for factor in (0.95, 1.05):
        other = {"2.bias": factor * tuned["bias"], "*": tuned["rest"]}
        assert float(la.log_evidence(other)) < value
    x[:, 0] = 0
    la = Laplace(networks.make("mlp"), "classification", "diag", temperature=2.0, tempered="both").fit([(x, y)])
    la.tune_prior(groups="parameter")
    assert la.tuning_ is not None
    weight = la.posterior.weights["0.weight"][:, 0]
    torch.testing.assert_close(la.tuning_.precisions["0.weight"][:, 0], 0.5 / weight.square(), rtol=1e-4, atol=0)


def test_run_away_at_the_newton_center_is_named() -> None:
    """Inputs that say nothing of the targets: the best precision is infinite."""
    torch.manual_seed(3)
    x = torch.randn(200, 3, dtype=torch.float64)
    y = torch.randn(200, 1, dtype=torch.float64)
    y = y - x @ torch.linalg.lstsq(x, y).solution  # no correlation at all
    la = Laplace(nn.Linear(3, 1, bias=False).double(), "regression", "full").fit([(x, y)]).at(center="newton")
    with pytest.warns(TuningWarning, match="ran off"):
        la.tune_prior()


def test_sequences_of_different_lengths() -> None:
    model = nn.Linear(2, 3).double()
    torch.manual_seed(0)
    data = [(torch.randn(2, n, 2).double(), torch.randn(2, n, 3).double()) for n in (5, 2, 1)]
    la = Laplace(model, "regression", "full").fit(data)
    statistics = la.curvature.statistics
    assert float(statistics.errors.sum()) == pytest.approx(statistics.squared_error)  # type: ignore[union-attr]
    torch.testing.assert_close(dense(la), oracles.curvature(la, data))


def test_a_prior_mean_that_changes_is_seen() -> None:
    """Distances to it are kept between evaluations, as long as it is the same."""
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    la = Laplace(networks.make("mlp"), "classification").fit([(x, y)])
    mean = torch.zeros((), dtype=torch.float64)
    before = la.at(prior=GaussianPrior(2.0, mean)).log_evidence()
    torch.testing.assert_close(la.at(prior=GaussianPrior(2.0, mean)).log_evidence(), before)
    mean += 1
    moved = la.at(prior=GaussianPrior(2.0, mean)).log_evidence()
    torch.testing.assert_close(moved, la.at(prior=GaussianPrior(2.0, 1.0)).log_evidence())
    assert float((moved - before).detach().abs()) > 1
    mean.requires_grad_()
    la.at(prior=GaussianPrior(2.0, mean)).log_evidence().backward()
    weights = torch.cat([parameter.detach().flatten() for parameter in la.model.parameters()])
    assert mean.grad is not None
    torch.testing.assert_close(mean.grad, 2.0 * (weights - 1).sum())
