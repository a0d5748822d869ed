"""A full covariance over chosen weights: everything as if the others were constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import FunctionSpace, Gaussian, InputError, Laplace, Subnetwork, sample_by_optimization
from tests import networks, oracles


def data(network: str, kind: str, count: int = 9) -> list[tuple[Tensor, Tensor]]:
    x, y = networks.inputs(network, count), networks.targets(kind, count)
    return list(zip(x.split(4), y.split(4), strict=True))


def fitted(network: str, likelihood: Any, structure: str = "full", k: int = 11, **options: Any) -> Laplace:
    model = networks.make(network)
    weights = Subnetwork.random(model, k, torch.Generator().manual_seed(3))
    kind = likelihood if isinstance(likelihood, str) else "regression"
    return Laplace(model, likelihood, structure, weights=weights, **options).fit(data(network, kind))


def whole(la: Laplace, batches: list[tuple[Tensor, Tensor]]) -> tuple[Laplace, Tensor]:
    """The same with all weights, and where in its parameters the chosen ones are."""
    full = Laplace(la.model, la.likelihood, "full", prior=la.prior, temperature=la.temperature).fit(batches)
    assert isinstance(la.weights, Subnetwork)
    marks = {name: torch.zeros(p.numel(), dtype=torch.bool) for name, p in la.model.named_parameters()}
    for name, indices in la.weights.elements.items():
        marks[name][indices] = True
    shaped = {name: marks[name].reshape(p.shape) for name, p in la.model.named_parameters()}
    return full, full.curvature.blocks[0].pack(shaped).nonzero().squeeze(1)


def packed_by(full: Laplace, values: dict[str, Tensor]) -> Tensor:
    """Parameters by name, 0 where one is missing, in the order of all weights."""
    lead = next(iter(values.values())).shape[: -len(full.posterior.sizes[next(iter(values))]) or None]
    return full.curvature.blocks[0].pack({
        name: values[name].double() if name in values else torch.zeros((*lead, *size), dtype=torch.float64)
        for name, size in full.posterior.sizes.items()
    })  # fmt: skip


NETWORKS = ["mlp", "cnn", "grouped-cnn", "tied", "tied-embedding", "batchnorm", "attention", "gru", "tokens"]


@pytest.mark.parametrize("likelihood", ["classification", Gaussian(0.3)], ids=["classification", "regression"])
@pytest.mark.parametrize("network", NETWORKS)
def test_against_dense_algebra(network: str, likelihood: Any) -> None:
    """H restricted to the chosen weights; covariance, evidence and Newton step with the others held."""
    kind = likelihood if isinstance(likelihood, str) else "regression"
    prior = {"*weight*": 0.8, "*": 1.9}
    la = fitted(network, likelihood, prior=prior, temperature=1.4)
    batches = data(network, kind)
    full, at = whole(la, batches)
    assert la.curvature.size == len(at) == 11
    matrix = oracles.curvature(full, batches)[at][:, at]
    torch.testing.assert_close(la.curvature.blocks[0].accumulator.matrix(), matrix, rtol=1e-9, atol=1e-10)
    block = full.curvature.blocks[0]
    sizes = full.posterior.sizes
    precision = block.pack({n: full.posterior.precisions[n].expand(size) for n, size in sizes.items()})[at]
    weights = block.pack({name: value.double() for name, value in full.posterior.weights.items()})[at]
    scale = float(la.posterior.likelihood_scale)
    posterior = scale * matrix + torch.diag(precision)
    x = networks.inputs(network, 3, seed=9)
    rows = oracles.packed_jacobian(full, x)[..., at]
    covariance = rows @ torch.linalg.inv(posterior) @ rows.mT
    torch.testing.assert_close(la.latent(x).covariance, covariance, rtol=1e-8, atol=1e-9)
    joint = rows.flatten(0, 1) @ torch.linalg.inv(posterior) @ rows.flatten(0, 1).T
    torch.testing.assert_close(la.latent(x, joint=True).covariance, joint, rtol=1e-8, atol=1e-9)
    diagonal = covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(la.latent(x, diagonal=True).covariance, diagonal, rtol=1e-8, atol=1e-9)
    fit = float(la.curvature.statistics.log_likelihood_at(la._noise))
    evidence = oracles.log_evidence(fit, matrix, precision, weights, scale, 1.4)
    assert float(la.log_evidence()) == pytest.approx(evidence, rel=1e-10)
    slope = precision * weights - scale * oracles.gradient(full, batches)[at]
    newton = la.at(center="newton").posterior.step
    expected = -torch.linalg.solve(posterior, slope)
    packed = packed_by(full, newton)
    torch.testing.assert_close(packed[at], expected, rtol=1e-7, atol=1e-9)
    assert float(packed.abs().sum()) == pytest.approx(float(expected.abs().sum()), rel=1e-6)


def test_only_chosen_weights_move() -> None:
    la = fitted("mlp", "classification", prior=0.5)
    full, at = whole(la, data("mlp", "classification"))
    drawn = la.sample(20_000, torch.Generator().manual_seed(0))
    assert set(drawn) == set(la.curvature.parameters)
    packed = packed_by(full, {name: value - full.posterior.weights[name] for name, value in drawn.items()})
    held = torch.ones(packed.shape[1], dtype=torch.bool)
    held[at] = False
    assert not bool(packed[:, held].any())
    matrix = la.curvature.blocks[0].accumulator.matrix() + 0.5 * torch.eye(11, dtype=torch.float64)
    expected = torch.linalg.inv(matrix)
    found = packed[:, at].T @ packed[:, at] / len(packed)
    deviation = (expected.diagonal().outer(expected.diagonal()) + expected.square()).sqrt() / len(packed) ** 0.5
    assert float(((found - expected).abs() / deviation).max()) < 4.5
    variances = packed_by(full, la.posterior.variances())
    torch.testing.assert_close(variances[at], expected.diagonal())
    assert not bool(variances[held].any())
    sampled = la.predict(networks.inputs("mlp", 3), method="sampled", samples=5)
    assert sampled.probs.shape == (3, 3)


def test_block_structure_is_the_diagonal_blocks() -> None:
    la, full = (fitted("cnn", "classification", structure) for structure in ("block", "full"))
    matrix, start = full.curvature.blocks[0].accumulator.matrix(), 0
    for block in la.curvature.blocks:
        part = slice(start, start + block.size)
        torch.testing.assert_close(block.accumulator.matrix(), matrix[part, part], rtol=1e-9, atol=1e-12)
        start = part.stop
    assert start == 11


def test_all_weights_are_a_subnetwork() -> None:
    model, batches = networks.make("mlp"), data("mlp", "classification")
    weights = Subnetwork.by_module(model, "*")
    la = Laplace(model, "classification", "full", weights=weights).fit(batches)
    full = Laplace(model, "classification", "full").fit(batches)
    x = networks.inputs("mlp", 3, seed=9)
    torch.testing.assert_close(la.latent(x).covariance, full.latent(x).covariance)
    la.tune_prior(groups="layer")
    full.tune_prior(groups="layer")
    assert la.tuning_ is not None
    assert full.tuning_ is not None
    assert la.tuning_.precisions == pytest.approx(full.tuning_.precisions, rel=1e-6)


def test_tuning_finds_the_maximum_of_the_evidence() -> None:
    la = fitted("mlp", "classification").tune_prior()
    assert la.tuning_ is not None
    assert la.tuning_.converged
    best = float(la.log_evidence())
    precision = la.tuning_.precisions["all"]
    assert best > max(float(la.log_evidence(prior=precision * factor)) for factor in (0.8, 1.25))


def test_layers_without_a_chosen_weight_are_not_recorded() -> None:
    model = networks.make("mlp")
    weights = Subnetwork({"2.weight": torch.tensor([0, 3])})
    la = Laplace(model, "classification", "full", weights=weights).fit(data("mlp", "classification"))
    assert list(la._state().tape.parameters) == ["2.weight"]
    assert la.curvature.blocks[0].accumulator.matrix().shape == (2, 2)
    assert "2 of " in la.summary()


def test_selections() -> None:
    model = networks.make("mlp")
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def marked(weights: Subnetwork) -> Tensor:
        marks = []
        for name, parameter in model.named_parameters():
            mark = torch.zeros(parameter.numel(), dtype=torch.bool)
            mark[weights.elements.get(name, torch.zeros(0, dtype=torch.long))] = True
            marks.append(mark)
        return torch.cat(marks)

    largest = marked(Subnetwork.largest_magnitude(model, 7))
    assert int(largest.sum()) == 7
    assert float(flat[largest].abs().min()) >= float(flat[~largest].abs().max())
    la = Laplace(model, "classification", "diag").fit(data("mlp", "classification"))
    variances = torch.cat([la.posterior.variances()[name].flatten() for name, _ in model.named_parameters()])
    uncertain = marked(Subnetwork.largest_variance(la, 7))
    assert int(uncertain.sum()) == 7
    assert float(variances[uncertain].min()) >= float(variances[~uncertain].max())
    drawn = [Subnetwork.random(model, 5, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(marked(drawn[0]), marked(drawn[1]))
    assert not torch.equal(marked(drawn[0]), marked(drawn[2]))
    assert set(Subnetwork.by_module(model, "0").elements) == {"0.weight", "0.bias"}
    masks = {name: parameter > 0 for name, parameter in model.named_parameters()}
    assert torch.equal(marked(Subnetwork.of(masks)), flat > 0)


def test_files_and_merging(tmp_path: Path) -> None:
    la = fitted("cnn", "classification", prior=0.4)
    x = networks.inputs("cnn", 3, seed=9)
    la.save(tmp_path / "posterior.safetensors")
    again = Laplace.load(tmp_path / "posterior.safetensors", la.model)
    assert isinstance(again.weights, Subnetwork)
    assert again.weights.size == 11
    torch.testing.assert_close(again.latent(x).covariance, la.latent(x).covariance)
    batches = data("cnn", "classification")
    parts = [Laplace(la.model, "classification", "full", weights=la.weights, prior=0.4).fit([b]) for b in batches]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    torch.testing.assert_close(merged.latent(x).covariance, la.latent(x).covariance)
    other = Laplace(la.model, "classification", "full", weights=Subnetwork.largest_magnitude(la.model, 11)).fit(batches)
    with pytest.raises(InputError, match="do not merge"):
        la.merge(other)


def test_bad_input_is_named() -> None:
    model, batches = networks.make("mlp"), data("mlp", "classification")
    weights = Subnetwork.largest_magnitude(model, 3)
    with pytest.raises(InputError, match="structure='full' or 'block'"):
        Laplace(model, "classification", "kron", weights=weights)
    with pytest.raises(InputError, match="k between 1 and"):
        Subnetwork.random(model, 0)
    with pytest.raises(InputError, match="no weight"):
        Subnetwork({})
    with pytest.raises(InputError, match="no trainable parameter"):
        Laplace(model, "classification", "full", weights=Subnetwork({"9.weight": torch.tensor([0])}))
    with pytest.raises(InputError, match="elements"):
        Laplace(model, "classification", "full", weights=Subnetwork({"0.bias": torch.tensor([99])}))
    with pytest.raises(InputError, match="matches no module"):
        Subnetwork.by_module(model, "nothing*")
    with pytest.raises(InputError, match="boolean"):
        Subnetwork.of({"0.bias": torch.ones(4)})
    la = Laplace(model, "classification", "full", weights=weights).fit(batches)
    with pytest.raises(InputError, match="holds"):
        la.tune_prior(groups="parameter")
    with pytest.raises(InputError, match="newton"):
        la.find_mode(batches)
    with pytest.raises(InputError, match="whole parameters"):
        FunctionSpace(model, "classification", weights=weights)
    with pytest.raises(InputError, match="whole parameters"):
        sample_by_optimization(nn.Linear(1, 1), "regression", [], weights=weights)
