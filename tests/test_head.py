"""Last layers whose output is the model's own: without backward passes, and without large tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lapwing import Categorical, Gaussian, Laplace
from lapwing.curvature import fit as fit_module
from lapwing.likelihoods import Bernoulli, Likelihood
from tests import networks, oracles


def body(classes: int = 3, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, classes, bias=bias)).double()


def data(likelihood: str) -> list[tuple[Tensor, Tensor]]:
    return networks.batches(networks.inputs("mlp", 9), networks.targets(likelihood, 9), 5, 4)


@pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])
@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "block", "full"])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_way_through_columns(
    likelihood: str, structure: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = body(bias=bias), networks.inputs("mlp", 4, seed=3)
    direct = Laplace(model, likelihood, structure, weights="last_layer").fit(data(likelihood))
    monkeypatch.setattr(fit_module.Fit, "_add_head", lambda *_: False)
    columns = Laplace(model, likelihood, structure, weights="last_layer").fit(data(likelihood))
    for left, right in zip(direct.curvature.blocks, columns.curvature.blocks, strict=True):
        torch.testing.assert_close(left.accumulator.matrix(), right.accumulator.matrix(), rtol=1e-10, atol=1e-12)
    for name, value in direct.curvature.gradient.items():
        torch.testing.assert_close(value, columns.curvature.gradient[name], rtol=1e-10, atol=1e-12)
    for center in ("network", "newton"):
        mean, covariance = direct.latent(x, center=center)
        found = direct.latent(x, diagonal=True, center=center)
        torch.testing.assert_close(found.mean, mean)
        torch.testing.assert_close(found.covariance, covariance.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("curvature", ["ggn", "empirical", "fisher"])
def test_empirical_and_sampled_last_layers_are_not_zero(curvature: str) -> None:
    la = Laplace(body(), "classification", "diag", curvature, weights="last_layer")
    la.fit(data("classification"), generator=torch.Generator().manual_seed(5))
    expected = oracles.curvature(la, data("classification"), torch.Generator().manual_seed(5)).diagonal()
    assert bool((expected > 0).all())
    torch.testing.assert_close(la.curvature.blocks[0].accumulator.matrix().diagonal(), expected)


@pytest.mark.parametrize(
    ("likelihood", "name", "shape"),
    [
        (Categorical(), "classification", (5, 4)),
        (Categorical(dim=1), "positions", (5, 4, 3)),
        (Bernoulli(), "binary", (5, 4)),
        (Gaussian([1.0, 2.0, 3.0, 4.0]), "regression", (5, 4)),
    ],
)
def test_sums_and_diagonals_of_the_hessian(likelihood: Likelihood, name: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if isinstance(likelihood, Categorical):
        targets = torch.randint(4, (shape[0], *shape[2:]), generator=generator)
        targets.view(-1)[0] = -100
    else:
        targets = torch.randint(2, shape, generator=generator).double()
    each = oracles.output_hessians(likelihood, outputs, targets)
    torch.testing.assert_close(likelihood.hessian_sum(outputs, targets), each.sum(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        likelihood.hessian_diagonal(outputs, targets).flatten(1), each.diagonal(dim1=1, dim2=2), rtol=1e-10, atol=1e-12
    )


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        entries = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.size = max([self.size, *entries])
        return made


@pytest.mark.parametrize("structure", ["kron", "diag"])
@pytest.mark.parametrize(("options", "largest"), [({}, 400 * 400), ({"max_factor": 300}, 400 * 20)])
def test_memory_with_many_classes(structure: str, options: dict[str, Any], largest: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 400))
    loader = [(torch.randn(16, 5), torch.randint(400, (16,))) for _ in range(2)]
    with Largest() as seen:
        la = Laplace(model, "classification", structure, weights="last_layer", max_columns=10, **options).fit(loader)
        probs = la.predict(torch.randn(20, 5)).probs
        la.log_evidence()
    assert seen.size <= largest
    torch.testing.assert_close(probs.sum(1), torch.ones(20))


def test_fifty_thousand_classes() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 50_000)
    with Largest() as seen:
        la = Laplace(model, "classification").fit([(torch.randn(4, 8), torch.randint(50_000, (4,)))])
        found = la.latent(torch.randn(3, 8), diagonal=True)
        assert torch.isfinite(la.predict(torch.randn(3, 8)).probs).all()
    assert seen.size <= 50_000 * 9
    assert found.covariance.shape == (3, 50_000)
    assert bool((found.covariance > 0).all())
