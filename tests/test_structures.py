"""Every structure × curvature × likelihood × network against dense algebra in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing import InputError, Laplace
from lapwing.layers import elementwise, window
from tests import networks, oracles

STRUCTURES = ["diag", "kron", "ekfac", "block", "full", "lowrank"]
LIKELIHOODS = ["classification", "binary", "regression"]
KINDS = ["ggn", "fisher", "empirical", "hessian"]
DENSE = ["block", "full"]


def fitted(network: str, structure: str, kind: str, likelihood: str, prior: float = 1.0) -> tuple[Laplace, list]:
    model = networks.make(network)
    data = networks.batches(networks.inputs(network, 7), networks.targets(likelihood, 7), 4, 3)
    la = Laplace(model, likelihood, structure, kind, prior=prior, fisher_samples=2, progress=False)
    return la.fit(data, generator=torch.Generator().manual_seed(5)), data


def structured(la: Laplace, dense: Tensor) -> Tensor:
    """What the structure should make of the dense H: `[p, p]`."""
    if la.structure in ("full", "lowrank"):  # its 32 directions are all there are: 7 examples have 3 outputs each
        return dense
    if la.structure == "block":
        return oracles.block_diagonal(dense, oracles.layer_slices(la))
    if la.structure == "diag":
        return torch.diag(dense.diagonal())
    expected = torch.zeros_like(dense)
    for block, part in zip(la.curvature.blocks, oracles.layer_slices(la), strict=True):
        own = dense[part, part]
        if block.accumulator.kind == "ekfac":
            basis = block.accumulator.decompose(None).basis
            vectors = basis.expand(torch.eye(block.size, dtype=own.dtype).unflatten(1, basis.shape)).T
            torch.testing.assert_close(vectors.T @ vectors, torch.eye(block.size, dtype=own.dtype), rtol=0, atol=1e-12)
            own = vectors @ torch.diag((vectors.T @ own @ vectors).diagonal()) @ vectors.T
        elif block.accumulator.kind == "diag":
            own = torch.diag(own.diagonal())
        elif block.accumulator.kind == "kron":
            own = block.accumulator.matrix()  # its own oracle: test_kron
        expected[part, part] = own
    return expected


@pytest.mark.parametrize("network", networks.NETWORKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_against_dense_algebra(network: str, kind: str, likelihood: str) -> None:
    if network == "odd" and kind == "hessian":
        # torch's double backward of weight normalization is wrong; better refused than wrong.
        with pytest.raises(InputError, match="do not commute"):
            fitted(network, "full", kind, likelihood)
        return
    if network == "bags" and kind == "hessian":
        with pytest.raises(InputError, match="second derivative.*embedding_bag.*curvature='ggn'"):
            fitted(network, "full", kind, likelihood)
        return
    for structure in DENSE if kind == "hessian" else STRUCTURES:
        if structure != "lowrank" or (kind == "ggn" and network != "bags"):
            check(network, structure, kind, likelihood)


@pytest.mark.parametrize("network", ["cnn", "grouped-cnn", "batchnorm"])
@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_images_convolved_with_the_basis(network: str, structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of them are."""
    monkeypatch.setattr(window, "_FEW", 0)
    check(network, structure, "ggn", "classification")


@pytest.mark.parametrize("network", ["batchnorm", "norms"])
def test_products_summed_one_example_at_a_time(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of large images are; by the rule, which would not be taken if they were wrong."""
    monkeypatch.setattr(elementwise, "_CACHE", 1)
    check(network, "diag", "ggn", "classification")
    la, _ = fitted(network, "diag", "ggn", "classification")
    assert all(layer.path != "fallback" for block in la.curvature.blocks for layer in block.layers)


def check(network: str, structure: str, kind: str, likelihood: str) -> None:
    la, data = fitted(network, structure, kind, likelihood, prior=200.0 if kind == "hessian" else 1.0)
    dense = oracles.curvature(la, data, torch.Generator().manual_seed(5))
    if structure == "ekfac" and kind in ("fisher", "rademacher"):
        # The second pass has draws of its own: compare in distribution elsewhere, in structure here.
        dense = second_pass_draws(la, data)
    expected = structured(la, dense)
    found = torch.block_diag(*[block.accumulator.matrix() for block in la.curvature.blocks])
    scale = max(1e-3, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * scale)

    # The posterior covariance of outputs and weights, and the evidence, for this H.
    precision = la.prior.precision["*"] * torch.ones(la.curvature.size, dtype=torch.float64)  # type: ignore[union-attr,index,operator]
    inverse = torch.linalg.inv(found + torch.diag(precision))
    x = networks.inputs(network, 3, seed=9)
    rows = oracles.packed_jacobian(la, x)
    mean, covariance = la.latent(x)
    torch.testing.assert_close(mean, oracles.evaluate(la.model, x), rtol=1e-12, atol=1e-12)
    wanted = torch.einsum("nci,ij,ndj->ncd", rows, inverse, rows)
    torch.testing.assert_close(covariance, wanted, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(
        la.latent(x, diagonal=True).covariance, wanted.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-11
    )
    flat = rows.flatten(0, 1)
    torch.testing.assert_close(la.latent(x, joint=True).covariance, flat @ inverse @ flat.T, rtol=1e-9, atol=1e-11)
    weights = torch.cat([block.pack(la.posterior.weights) for block in la.curvature.blocks])
    log_likelihood = sum(float(la.likelihood.log_prob(oracles.evaluate(la.model, x), y).sum()) for x, y in data)
    evidence = oracles.log_evidence(log_likelihood, found, precision, weights)
    assert float(la.log_evidence()) == pytest.approx(evidence, rel=1e-10)
    maps = [
        block.basis.expand(torch.diag(block.scale.sqrt().flatten()).unflatten(1, block.basis.shape))
        for block in la.posterior.blocks
    ]
    torch.testing.assert_close(torch.block_diag(*[m.T @ m for m in maps]), inverse, rtol=1e-9, atol=1e-11)


def second_pass_draws(la: Laplace, data: list) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    oracles.curvature(la, data, generator)
    second = oracles.curvature(la, data, generator)
    first = oracles.curvature(la, data, torch.Generator().manual_seed(5))
    mixed = torch.zeros_like(first)
    for block, part in zip(la.curvature.blocks, oracles.layer_slices(la), strict=True):
        mixed[part, part] = (second if block.accumulator.kind == "ekfac" else first)[part, part]
    return mixed


@pytest.mark.parametrize("network", networks.NETWORKS)
def test_gradient_and_statistics(network: str) -> None:
    for likelihood in LIKELIHOODS:
        la, data = fitted(network, "diag", "ggn", likelihood)
        found = torch.cat([block.pack(la.curvature.gradient) for block in la.curvature.blocks])
        torch.testing.assert_close(found, oracles.gradient(la, data), rtol=1e-10, atol=1e-12)
        assert la.curvature.examples == 7


def test_sample_covariance() -> None:
    """The covariance of the draws themselves, within five standard errors of each entry."""
    for structure in STRUCTURES:
        la, _ = fitted("cnn" if structure not in ("full", "lowrank") else "mlp", structure, "ggn", "classification")
        drawn = la.sample(20_000, torch.Generator().manual_seed(0))
        packed = torch.cat([block.pack(drawn) for block in la.curvature.blocks], dim=-1)
        precision = torch.block_diag(*[block.accumulator.matrix() for block in la.curvature.blocks])
        expected = torch.linalg.inv(precision + torch.eye(len(precision), dtype=torch.float64))
        center = torch.cat([block.pack(la.posterior.weights) for block in la.curvature.blocks])
        centered = packed - center
        covariance = centered.T @ centered / len(packed)
        error = ((expected.diagonal()[:, None] * expected.diagonal() + expected.square()) / len(packed)).sqrt()
        assert float(((covariance - expected) / error).abs().max()) < 5.5
        assert float((centered.mean(0) / (expected.diagonal() / len(packed)).sqrt()).abs().max()) < 5


def test_ordering_of_evidence() -> None:
    """diag ≤ block ≤ full and ekfac ≤ block at a fixed center."""
    for network in ("mlp", "cnn", "grouped-cnn", "tied", "attention", "lstm"):
        value = {s: float(fitted(network, s, "ggn", "classification")[0].log_evidence()) for s in STRUCTURES}
        assert value["diag"] <= value["block"] + 1e-10
        assert value["block"] <= value["full"] + 1e-10
        assert value["ekfac"] <= value["block"] + 1e-10


def test_ekfac_is_closer_than_kron() -> None:
    for network in ("mlp", "cnn", "grouped-cnn", "conv1d", "conv3d", "sequence-first", "tied"):
        ekfac, data = fitted(network, "ekfac", "ggn", "classification")
        kron, _ = fitted(network, "kron", "ggn", "classification")
        dense = oracles.curvature(ekfac, data)
        for part, left, right in zip(
            oracles.layer_slices(ekfac), ekfac.curvature.blocks, kron.curvature.blocks, strict=True
        ):
            own = dense[part, part]
            distance = [float((own - block.accumulator.matrix()).norm()) for block in (left, right)]
            assert distance[0] <= distance[1] + 1e-12
            if left.accumulator.kind == "ekfac":  # its trace is that of the GGN, also with groups
                assert float(left.accumulator.matrix().trace()) == pytest.approx(float(own.trace()), rel=1e-10)
