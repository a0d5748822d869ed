"""Every number of a diagnosis against dense algebra in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import lapwing
from lapwing import FactoredDamping, GaussianPrior, InputError, Laplace, NotFittedError
from lapwing.diagnostics import diagnose
from tests import networks, oracles

LIKELIHOODS = ("classification", "regression")
STRUCTURES = ("diag", "kron", "ekfac", "block", "full", "lowrank")
PRIOR = GaussianPrior({"linear.*": 0.7, "*": 2.0}, mean=0.1)


def fitted(structure="full", likelihood="classification", name="batchnorm", **options):
    model = networks.make(name)
    data = networks.batches(networks.inputs(name, 12), networks.targets(likelihood, 12), 7, 5)
    options = {"prior": PRIOR} | options
    la = Laplace(model, likelihood, structure, temperature=1.5, progress=False, **options)
    return la.fit(data, generator=torch.Generator().manual_seed(0)), data


def dense(la):
    """H in the structure of the fit `[p, p]`, Π and θ̃ − μ₀ `[p]`, and T/σ², all in the order of the blocks."""
    blocks, posterior = la.curvature.blocks, la.posterior
    matrix = torch.block_diag(*(block.accumulator.matrix() for block in blocks))

    def pack(values):
        return torch.cat([block.pack(values) for block in blocks])

    precision = pack({n: posterior.precisions[n].expand(size) for n, size in posterior.sizes.items()})
    distance = pack(posterior.weights) - pack({n: posterior.means[n].expand(s) for n, s in posterior.sizes.items()})
    return matrix, precision, distance, float(posterior.likelihood_scale), pack


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_decrement_and_violation(structure, likelihood):
    prior = 0.7 if structure == "ekfac" else PRIOR
    la, data = fitted(structure, likelihood, prior=prior)
    matrix, precision, distance, scale, _ = dense(la)
    pull, push = precision * distance, scale * oracles.gradient(la, data)
    slope = pull - push
    decrement = 0.5 * slope @ torch.linalg.solve(scale * matrix + torch.diag(precision), slope)
    sizes = [(term.square() / precision).sum().sqrt() for term in (slope, pull, push)]
    found = diagnose(la)
    assert found.decrement == pytest.approx(float(decrement), rel=1e-9)
    assert found.violation == pytest.approx(float(sizes[0] / (sizes[1] + sizes[2])), rel=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_layers(structure):
    la, _ = fitted(structure, prior=0.7 if structure == "ekfac" else PRIOR, rank=6)
    matrix, precision, _, scale, _ = dense(la)
    shares = torch.linalg.solve(scale * matrix + torch.diag(precision), scale * matrix).diagonal()
    found = diagnose(la)
    assert [layer.name for layer in found.layers] == ["linear", "norm", "head"]
    for layer, part in zip(found.layers, oracles.layer_slices(la), strict=True):
        own = matrix[part, part]
        values = torch.linalg.eigvalsh(own)
        assert layer.size == len(values)
        assert layer.effective_dimension == pytest.approx(float(shares[part].sum()), rel=1e-9)
        assert layer.frobenius == pytest.approx(float(own.norm()), rel=1e-9)
        rank = int((values > layer.size * 2.3e-16 * values.max()).sum())
        assert layer.rank == rank
        if rank < layer.size:
            assert layer.condition == math.inf
        else:  # the smallest eigenvalue is known up to rounding of the largest one
            condition = float(values.max() / values.min())
            assert layer.condition == pytest.approx(condition, rel=1e-14 * condition + 1e-9)
    assert found.effective_dimension == pytest.approx(la.effective_dimension(), rel=1e-9)


def test_conditions_are_finite_and_infinite_somewhere():
    kinds = {math.isinf(layer.condition) for s in ("diag", "full") for layer in diagnose(fitted(s)[0]).layers}
    assert kinds == {True, False}


def test_groups():
    la, data = fitted(prior={"linear.*": 0.7, "norm.weight": 3.0, "*": 2.0})
    la.find_mode(data)
    matrix, precision, _, scale, pack = dense(la)
    shares = torch.linalg.solve(scale * matrix + torch.diag(precision), scale * matrix).diagonal()
    found = diagnose(la)
    assert [group.label for group in found.groups] == ["linear", "rest"]
    assert found.scale_free == ("linear",)
    assert [group.precision for group in found.groups] == [0.7, None]
    labels = {name: torch.full(size, float(name.startswith("linear"))) for name, size in la.posterior.sizes.items()}
    inside = pack(labels).bool()
    moved, weights = pack(la.mode_.step), pack(la.posterior.weights)
    for group, chosen in zip(found.groups, (inside, ~inside), strict=True):
        assert group.size == int(chosen.sum())
        assert group.effective_dimension == pytest.approx(float(shares[chosen].sum()), rel=1e-9)
        assert group.distance == pytest.approx(float(moved[chosen].norm() / weights[chosen].norm()), rel=1e-12)
    assert found.mode is not None
    assert found.mode.distance == pytest.approx(float(moved.norm() / weights.norm()), rel=1e-12)


def test_evidence_is_that_of_each_center():
    la, data = fitted()
    assert diagnose(la).mode is None
    la.find_mode(data)
    for center in ("network", "linear"):  # the center of la itself does not matter
        found = diagnose(la.at(center=center))
        assert found.evidence == float(la.log_evidence(center="network"))
        assert found.mode is not None
        assert found.mode.evidence == float(la.log_evidence(center="linear"))


def test_linear_network_at_its_mode_is_one_and_elsewhere_is_none():
    """Ridge regression: the decrement is the exact gap of the log joint."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(20, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False).double()
    mode = torch.linalg.solve(x.T @ x / 0.5 + 2.0 * torch.eye(3), x.T @ y / 0.5).T
    for offset in (0.0, 1.0):
        with torch.no_grad():
            model.weight.copy_(mode + offset)
        la = Laplace(model, lapwing.Gaussian(0.5), "full", prior=2.0, progress=False).fit([(x, y)])
        found = diagnose(la)
        step = torch.full((3,), offset, dtype=torch.float64)
        gap = 0.5 * float(step @ (x.T @ x / 0.5 + 2.0 * torch.eye(3, dtype=torch.float64)) @ step)
        assert found.decrement == pytest.approx(gap, rel=1e-9, abs=1e-20)
        assert found.is_mode == (offset == 0.0)
        assert any("no mode" in sentence for sentence in found.advice) == (offset == 1.0)
        assert (found.violation < 1e-12) == (offset == 0.0)


def test_mode_goes_stale_with_the_prior():
    la, data = fitted()
    la.find_mode(data)
    fresh = diagnose(la)
    assert fresh.mode is not None
    assert fresh.mode.residual == pytest.approx(la.mode_.residual, rel=1e-6)
    assert fresh.mode.current
    assert not any("another prior" in sentence for sentence in fresh.advice)
    for other in (la.at(prior=0.1), la.at(temperature=5.0)):
        stale = diagnose(other)
        problem = oracle_residual(other)
        assert stale.mode is not None
        assert stale.mode.residual == pytest.approx(problem, rel=1e-9)
        assert stale.mode.found == la.mode_.residual
        assert not stale.mode.current
        assert any("another prior" in sentence for sentence in stale.advice)
    again = diagnose(other.find_mode(data)).mode
    assert again is not None
    assert again.current


def oracle_residual(la):
    _, precision, distance, scale, pack = dense(la)
    pull, push = precision * (distance + pack(la.mode_.step)), scale * pack(la.mode_.gradient)
    sizes = [(term.square() / precision).sum().sqrt() for term in (pull - push, pull, push)]
    return float(sizes[0] / (sizes[1] + sizes[2]))


def test_mode_that_did_not_converge():
    la, data = fitted()
    with pytest.warns(lapwing.ConvergenceWarning):
        la.find_mode(data, tolerance=1e-12, max_steps=1)
    assert any("did not converge" in sentence for sentence in diagnose(la).advice)


def test_shared_precision_is_advised_against():
    assert any("'linear'" in sentence for sentence in diagnose(fitted(prior=1.0)[0]).advice)
    apart = diagnose(fitted(prior={"linear.*": 0.7, "*": 2.0})[0])
    assert not any("means nothing" in sentence for sentence in apart.advice)
    inside = diagnose(fitted(prior={"linear.bias": 0.7, "*": 2.0})[0])
    assert any("means nothing" in sentence for sentence in inside.advice)


def test_network_without_a_scale_free_group():
    found = diagnose(fitted(name="mlp", prior=1.0)[0])
    assert found.scale_free == ()
    assert [(group.label, group.scale_free, group.precision) for group in found.groups] == [("rest", False, 1.0)]
    assert not any("means nothing" in sentence for sentence in found.advice)


def test_dropped_curvature():
    la, _ = fitted(rank_tolerance=0.5)
    found = diagnose(la)
    assert found.dropped == la.curvature.dropped > 0.01
    assert any("dropped" in sentence for sentence in found.advice)


def test_group_that_the_data_do_not_determine():
    la, _ = fitted(prior={"linear.*": 1e9, "*": 1.0})
    assert any("say nothing about 'linear'" in sentence for sentence in diagnose(la).advice)


def test_table_names_everything():
    la, data = fitted(prior=1.0)
    text = str(diagnose(la))
    assert "not found: la.find_mode(loader)" in text
    found = diagnose(la.find_mode(data))
    text = str(found)
    for word in ("linear", "norm", "head", "rest", "singular", f"{found.decrement:.3g} nats", f"{found.evidence:.6g}"):
        assert word in text
    assert "not found" not in text
    assert all(sentence in text for sentence in found.advice)


def test_file_needs_a_loader(tmp_path):
    la, data = fitted()
    la.save(tmp_path / "posterior.safetensors")
    back = Laplace.load(tmp_path / "posterior.safetensors", la.model)
    unseen = diagnose(back)
    assert not unseen.groups_seen
    assert unseen.scale_free == ()
    assert any("diagnose(la, loader)" in sentence for sentence in unseen.advice)
    assert "unknown" in str(unseen)
    assert diagnose(back, data) == diagnose(la)


def test_nothing_is_touched():
    la, data = fitted()
    la.find_mode(data)
    la.model.train()
    before = copy.deepcopy(la.model.state_dict())
    random, prior, mode = torch.get_rng_state(), la.prior, la.mode_
    first = diagnose(la)
    assert torch.equal(torch.get_rng_state(), random)
    assert la.model.training
    assert all(torch.equal(value, before[name]) for name, value in la.model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in la.model.parameters())
    assert la.prior is prior
    assert la.mode_ is mode
    assert diagnose(la) == first


def test_refusals():
    with pytest.raises(NotFittedError):
        diagnose(Laplace(networks.make("mlp"), "classification"))
    with pytest.raises(InputError, match="FactoredDamping"):
        diagnose(fitted("kron", prior=FactoredDamping(1.0, 1.0))[0])
