"""Each likelihood against autograd and torch's own losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from lapwing import Bernoulli, Categorical, Gaussian, Laplace
from tests import oracles


def dense_columns(likelihood: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """`S_n S_nᵀ`: `[N, D, D]` from all columns."""
    columns = likelihood.hessian_columns(outputs, targets)
    values = columns.part(0, columns.count).reshape(columns.count, len(outputs), outputs[0].numel())
    return torch.einsum("knc,knd->ncd", values, values)


CASES: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "classes": (Categorical(), (5, 4), lambda g: torch.randint(4, (5,), generator=g)),
    "two classes": (Categorical(), (5, 2), lambda g: torch.randint(2, (5,), generator=g)),
    "sequence": (Categorical(), (3, 2, 4), lambda g: torch.randint(4, (3, 2), generator=g)),
    "image": (Categorical(dim=1), (3, 4, 2, 2), lambda g: torch.randint(4, (3, 2, 2), generator=g)),
    "ignored": (Categorical(), (3, 2, 4), lambda g: torch.tensor([[1, -100], [-100, -100], [0, 3]])),
    "binary": (Bernoulli(), (5, 1), lambda g: torch.randint(2, (5, 1), generator=g).double()),
    "flat binary": (Bernoulli(), (5,), lambda g: torch.randint(2, (5,), generator=g)),
    "labels": (Bernoulli(), (5, 3), lambda g: torch.randint(2, (5, 3), generator=g)),
    "real": (Gaussian(), (5, 2), lambda g: torch.randn(5, 2, generator=g).double()),
    "flat real": (Gaussian(), (5,), lambda g: torch.randn(5, generator=g).double()),
    "ratios": (Gaussian([1.0, 4.0]), (5, 2), lambda g: torch.randn(5, 2, generator=g).double()),
    "real images": (Gaussian(), (3, 2, 2), lambda g: torch.randn(3, 2, 2, generator=g).double()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_columns_are_a_root_of_the_hessian(case: str) -> None:
    likelihood, shape, draw = CASES[case]
    generator = torch.Generator().manual_seed(0)
    outputs = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    targets = draw(generator)
    likelihood.check(outputs, targets, "here")
    expected = oracles.output_hessians(likelihood, outputs, targets)
    torch.testing.assert_close(dense_columns(likelihood, outputs, targets), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("case", CASES)
def test_sampled_gradients_have_the_hessian_as_covariance(case: str) -> None:
    likelihood, shape, draw = CASES[case]
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    targets = draw(generator)
    drawn = likelihood.sampled_gradients(outputs, targets, 40_000, generator).reshape(40_000, len(outputs), -1)
    found = torch.einsum("snc,snd->ncd", drawn, drawn) / len(drawn)
    expected = oracles.output_hessians(likelihood, outputs, targets)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03 * max(0.3, float(expected.abs().max())))
    assert float(drawn.mean(0).abs().max()) < 0.03


def test_log_probabilities_have_all_normalizers() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, 2, generator=generator, dtype=torch.float64)
    y = torch.tensor([[0, 1], [2, -100], [1, 1], [-100, -100]])
    expected = -functional.cross_entropy(logits, y, reduction="none").sum(1)
    torch.testing.assert_close(Categorical(dim=1).log_prob(logits, y), expected)
    labels = torch.randint(2, (4, 3), generator=generator).double()
    expected = -functional.binary_cross_entropy_with_logits(logits[..., 0], labels, reduction="none").sum(1)
    torch.testing.assert_close(Bernoulli().log_prob(logits[..., 0], labels), expected)
    ratios = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    targets = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    normal = torch.distributions.Normal(logits[..., 0], ratios.sqrt())
    gaussian = Gaussian(ratios)
    torch.testing.assert_close(gaussian.log_prob(logits[..., 0], targets), normal.log_prob(targets).sum(1))
    statistics = gaussian.statistics(logits[..., 0], targets)
    for noise in (0.3, 1.0, 2.0):
        normal = torch.distributions.Normal(logits[..., 0], (noise * ratios).sqrt())
        found = statistics.log_likelihood_at(torch.tensor(noise, dtype=torch.float64))
        assert float(found) == pytest.approx(float(normal.log_prob(targets).sum()), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-300, 300), min_size=2, max_size=6),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_columns_survive_extreme_logits(values: list[float], dtype: torch.dtype) -> None:
    """However saturated, the columns are finite and their outer products are diag(p) − ppᵀ."""
    logits = torch.tensor([values], dtype=dtype)
    found = dense_columns(Categorical(), logits, torch.zeros(1).long())[0]
    p = logits[0].double().softmax(0)
    expected = torch.diag(p) - p.outer(p)
    assert bool(torch.isfinite(found).all())
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


def test_empirical_fisher_of_the_squared_error() -> None:
    """The gradient of log p is y − f: the ½ belongs to the likelihood."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    x, y = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 3.0, dtype=torch.float64)
    la = Laplace(model, "regression", "full", "empirical").fit([(x, y)])
    weight = model.weight.item()
    residual = 3.0 - weight
    assert float(la.curvature.blocks[0].accumulator.matrix()) == pytest.approx(residual**2)
    assert float(la.log_evidence()) == pytest.approx(
        -0.5 * residual**2 - 0.5 * math.log(2 * math.pi) - 0.5 * weight**2 - 0.5 * math.log(residual**2 + 1)
    )
