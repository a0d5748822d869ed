"""Random signs over exact columns: the GGN on average, one backward pass for one position."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import Bernoulli, Categorical, Gaussian, InputError, Laplace, columns
from lapwing.likelihoods import Likelihood, categorical
from lapwing.tape import Record
from tests import networks, oracles
from tests.test_structures import check

# A likelihood, the shape of its outputs, targets, and how many columns there should be.
CASES: dict[str, tuple[Likelihood, tuple[int, ...], Tensor, int]] = {
    "classes": (Categorical(), (1, 4), torch.tensor([2]), 1),
    "classes, ignored": (Categorical(ignore_index=1), (2, 3), torch.tensor([1, 2]), 1),
    "one position": (Categorical(dim=1), (1, 3, 1, 1), torch.tensor([[[0]]]), 1),
    "image": (Categorical(dim=1), (1, 3, 1, 2), torch.tensor([[[2, 0]]]), 2),
    "sequence, ignored": (Categorical(), (1, 3, 3), torch.tensor([[1, -100, 2]]), 2),
    "yes or no": (Bernoulli(), (2, 3), torch.zeros(2, 3).double(), 1),
    "yes or no, flat": (Bernoulli(), (2,), torch.zeros(2).double(), 1),
    "image of yes or no": (Bernoulli(), (1, 2, 2), torch.ones(1, 2, 2).double(), 1),
    "real": (Gaussian(), (1, 4), torch.zeros(1, 4).double(), 1),
    "real, ratios": (Gaussian([0.5, 2.0]), (2, 2), torch.zeros(2, 2).double(), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_mean_over_all_signs_is_the_hessian(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    likelihood, shape, targets, count = CASES[case]
    outputs = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, draws = torch.zeros(()), 0
    for signs in _every_sign(monkeypatch):
        drawn = likelihood.signed_columns(outputs, targets, None)
        assert drawn.count == count
        flat = drawn.part(0, count).flatten(2) if outputs.dim() > 1 else drawn.part(0, count).unsqueeze(2)
        found, draws = found + torch.einsum("knc,knd->ncd", flat, flat), draws + 1
        assert signs.done or draws < 2000
    expected = oracles.output_hessians(likelihood, outputs, targets)
    torch.testing.assert_close(found / draws, expected, rtol=1e-12, atol=1e-14)


class _Signs:
    done = False


def _every_sign(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One round for every sign vector: the size is known after the first draw."""
    state, waiting = _Signs(), list[tuple[int, ...]]()

    def draw(shape: Any, like: Tensor, generator: Any) -> Tensor:
        size = torch.Size(shape).numel()
        if not waiting:
            waiting.extend(itertools.product((-1, 1), repeat=size))
        signs = waiting.pop()
        state.done = not waiting
        return torch.tensor(signs, dtype=torch.int8).view(tuple(shape))

    for module in (columns, categorical):
        monkeypatch.setattr(module, "random_signs", draw)
    while not state.done:
        yield state


@pytest.mark.parametrize("shape", [(5, 1), (4, 3), ()])
def test_signs_are_fair_and_independent(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = columns.random_signs((20_000, *shape), torch.zeros(()), generator).double().flatten(1 if shape else 0)
    drawn = drawn.reshape(20_000, -1)
    assert set(drawn.unique().tolist()) == {-1.0, 1.0}
    moments = drawn.T @ drawn / len(drawn)
    tolerance = 5 / len(drawn) ** 0.5  # five standard deviations of a mean of signs
    assert float((moments - torch.eye(len(moments), dtype=torch.float64)).abs().max()) < tolerance
    assert float(drawn.mean(0).abs().max()) < tolerance


def test_saturated_classes_keep_their_precision() -> None:
    """Where one class has all the mass, float32 agrees with float64 entry by entry: nothing cancels."""
    logits = torch.tensor([[0.0, 40.0, -10.0, 5.0], [30.0, 29.0, 0.0, -60.0]], dtype=torch.float64)
    targets = torch.zeros(2, dtype=torch.long)
    for seed in range(16):
        exact, single = (
            Categorical().signed_columns(logits.to(dtype), targets, torch.Generator().manual_seed(seed)).part(0, 1)
            for dtype in (torch.float64, torch.float32)
        )
        torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("network", ["mlp", "cnn", "batchnorm", "attention", "tied"])
@pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])
@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "block", "full"])
def test_every_structure_against_dense_algebra(network: str, likelihood: str, structure: str) -> None:
    """The same signs through plain autograd, two draws averaged, with everything downstream."""
    check(network, structure, "rademacher", likelihood)


class Segmentation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 3, 2), nn.Conv1d(3, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def _dense() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, y = torch.randn(3, 2, 5, dtype=torch.float64), torch.randint(3, (3, 3))
        y[0, 1] = -100
        return Segmentation().double(), x, y


@pytest.mark.parametrize("structure", ["kron", "full"])
@pytest.mark.parametrize("outputs", ["single", "dense"])
def test_the_mean_of_many_fits_is_the_exact_one(structure: str, outputs: str) -> None:
    if outputs == "single":
        model, likelihood = networks.make("mlp"), Categorical()
        data = [(networks.inputs("mlp", 4), networks.targets("classification", 4))]
    else:
        model, x, y = _dense()
        data, likelihood = [(x, y)], Categorical(dim=1)
    exact = Laplace(model, likelihood, structure, progress=False).fit(data)
    la = Laplace(model, likelihood, structure, "rademacher", progress=False)
    generator = torch.Generator().manual_seed(0)
    fits = [_matrix(la.fit(data, generator=generator)) for _ in range(300)]
    drawn = torch.stack(fits)
    expected = _matrix(exact)
    error = (drawn.mean(0) - expected).abs()
    # Five standard errors of the mean, entry by entry; the floor is for entries without noise.
    assert bool((error <= 5 * drawn.std(0) / len(fits) ** 0.5 + 1e-12).all())
    assert float(drawn.std(0).max()) > 1e-3  # and it is random


def _matrix(la: Laplace) -> Tensor:
    return torch.block_diag(*[block.accumulator.matrix() for block in la.curvature.blocks])


def _passes(monkeypatch: pytest.MonkeyPatch, fit: Callable[[], Any]) -> int:
    """How many vectors are backpropagated to the layers, the gradient of the data apart."""
    count, grad, sweep = 0, Record.grad, Record.sweep
    for_curvature = False

    def swept(self: Record, columns: Any, consume: Any, *others: Any) -> None:
        nonlocal for_curvature
        for_curvature = consume is not None
        sweep(self, columns, consume, *others)

    def counting(self: Record, edges: Any, vectors: Tensor, batched: bool) -> Any:
        nonlocal count
        count += (len(vectors) if batched else 1) * for_curvature
        return grad(self, edges, vectors, batched)

    with monkeypatch.context() as patch:
        patch.setattr(Record, "sweep", swept)
        patch.setattr(Record, "grad", counting)
        fit()
    return count


def test_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for one position, whatever the classes; classes − 1 for many, whatever the positions."""
    data = [(networks.inputs("mlp", 4), networks.targets("classification", 4))] * 2
    la = Laplace(networks.make("mlp"), "classification", progress=False, curvature="rademacher")
    assert _passes(monkeypatch, lambda: la.fit(data)) == 2
    la = Laplace(networks.make("mlp"), "classification", progress=False, curvature="rademacher", fisher_samples=3)
    assert _passes(monkeypatch, lambda: la.fit(data)) == 6
    model, x, y = _dense()
    for curvature, expected in (("ggn", 6), ("rademacher", 2), ("fisher", 1)):
        la = Laplace(model, Categorical(dim=1), curvature=curvature, progress=False)
        assert _passes(monkeypatch, lambda la=la: la.fit([(x, y)])) == expected  # type: ignore[misc]
    for likelihood, target in (
        (Bernoulli(), torch.ones(3, 3, 3).double()),
        (Gaussian(), torch.randn(3, 3, 3).double()),
    ):
        la = Laplace(model, likelihood, curvature="rademacher", progress=False)
        assert _passes(monkeypatch, lambda la=la, target=target: la.fit([(x, target)])) == 1  # type: ignore[misc]


def test_draws_are_averaged() -> None:
    """`fisher_samples` draws: columns of all of them, asked for in any ranges."""
    model, x, y = _dense()
    likelihood, generator = Categorical(dim=1), torch.Generator().manual_seed(3)
    outputs = oracles.evaluate(model, x)
    draws = [likelihood.signed_columns(outputs, y, generator) for _ in range(3)]
    whole = columns.averaged(draws)
    expected = torch.cat([draw.part(0, 2) for draw in draws]) / 3**0.5
    assert whole.count == 6
    for start, stop in itertools.combinations(range(7), 2):
        assert torch.equal(whole.part(start, stop), expected[start:stop])


def test_reproducible_and_the_random_state_left_alone() -> None:
    model, data = networks.make("mlp"), [(networks.inputs("mlp", 5), networks.targets("classification", 5))]
    la = Laplace(model, "classification", curvature="rademacher", progress=False)
    before = torch.get_rng_state()
    found = [float(la.fit(data, generator=torch.Generator().manual_seed(seed)).log_evidence()) for seed in (1, 1, 2)]
    la.fit(data)
    assert torch.equal(before, torch.get_rng_state())
    assert found[0] == found[1] != found[2]


def test_too_many_columns_name_the_ways_out() -> None:
    model, x, y = _dense()
    for curvature, limit, ways in (
        ("ggn", 5, ("rademacher", "fisher", "empirical", "rank_tolerance", "raise max_columns")),
        ("rademacher", 1, ("fisher", "empirical", "fisher_samples", "raise max_columns")),
    ):
        la = Laplace(model, Categorical(dim=1), curvature=curvature, max_columns=limit, progress=False)
        with pytest.raises(InputError, match=f"more than max_columns={limit}") as error:
            la.fit([(x, y)])
        assert all(way in str(error.value) for way in ways)
    la = Laplace(model, Categorical(dim=1), curvature="rademacher", max_columns=2, progress=False)
    assert la.fit([(x, y)]).curvature.examples == 3
    la = Laplace(networks.make("mlp"), "classification", curvature="fisher", fisher_samples=3, max_columns=2)
    with pytest.raises(InputError, match="lower fisher_samples"):
        la.fit([(networks.inputs("mlp", 4), networks.targets("classification", 4))])
