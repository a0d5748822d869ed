"""Examples that batches leave over run together: the sums stay those of every batch by itself."""

from __future__ import annotations

import itertools
import math
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import Categorical, InputError, Laplace, probe
from lapwing.batches import Inputs
from lapwing.columns import Columns
from lapwing.curvature import leftovers
from lapwing.curvature.gradient import multiples
from lapwing.tape import Record, Tape
from tests import networks
from tests.sums import check_same

OPTIONS: list[dict[str, Any]] = [{"curvature": "fisher"}, {"rank_tolerance": 0.1}]
FEW = 2**18  # bytes of a budget that lets no batches go together, but some wait


class Sure(nn.Module):
    """Sure of most examples, but not of those near 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 12 * self.head(torch.tanh(self.norm(self.first(x))).mean(2))
        return out


def problem(*shapes: tuple[int, int], model: nn.Module | None = None) -> tuple[nn.Module, list[Any]]:
    """A network, and batches of so many examples of so many positions, labeled by it."""
    torch.manual_seed(0)
    model = (model or Sure()).double().eval()
    data = []
    for count, length in shapes:
        x = torch.randn(count, 2, length, dtype=torch.float64)
        data.append((x, model(x).argmax(1)))
    return model, data


@pytest.mark.parametrize("structure", ["kron", "diag", "block"])
@pytest.mark.parametrize("options", OPTIONS, ids=["fisher", "ranked"])
def test_fewer_passes_and_the_same_sums(options: dict[str, Any], structure: str, passes: list[int]) -> None:
    model, data = problem(*[(20, 5)] * 6)
    check_same(model, data, structure, memory_budget=FEW, **options)
    passes.clear()
    Laplace(model, "classification", structure, memory_budget=FEW, **options).fit(
        data, generator=torch.Generator().manual_seed(3)
    )
    first, probed, *others = passes
    assert (first, probed, others[:-1]) == (20, 4, [20] * 5)
    assert 6 < others[-1] <= 20  # what the six batches leave over together


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("options", OPTIONS, ids=["fisher", "ranked"])
def test_the_gradient_is_that_of_the_labels(options: dict[str, Any], structure: str, passes: list[int]) -> None:
    """Whatever is drawn or dropped."""
    model, data = problem(*[(20, 5)] * 6)
    la = Laplace(model, "classification", structure, memory_budget=FEW, **options).fit(
        data, generator=torch.Generator().manual_seed(3)
    )
    if structure != "full" or "rank_tolerance" in options:
        assert len(passes) > 7  # batches and probe: some were left over
    total = -torch.stack([nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in data]).sum()
    expected = torch.autograd.grad(total, list(model.parameters()))
    for found, own in zip(la.curvature.gradient.values(), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-9, atol=1e-9 * float(own.abs().max()))


@pytest.mark.parametrize("likelihood", ["binary", "regression", "classification"])
def test_draws_in_one_direction_leave_nothing_over(likelihood: str, passes: list[int]) -> None:
    """Of one output or two classes any draw has the direction of the gradient."""
    torch.manual_seed(0)
    outputs = 2 if likelihood == "classification" else 1
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    x = torch.randn(20, 3, dtype=torch.float64)
    y = {"binary": torch.arange(20.0).double() % 2, "regression": x[:, 0] + 1, "classification": torch.arange(20) % 2}
    target = y[likelihood] if likelihood == "classification" else y[likelihood].unsqueeze(1)
    la = Laplace(model, likelihood, curvature="fisher").fit([(x, target)], generator=torch.Generator().manual_seed(0))
    assert passes == [20, 4]
    total = la.likelihood.log_prob(model(x), target).sum()
    expected = torch.autograd.grad(total, list(model.parameters()))
    for found, own in zip(la.curvature.gradient.values(), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_multiples_of_a_vector(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    of = [[1.0, -1.0, 0.0], [1.0, -1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 2.0, 0.0], [tiny, -tiny, 0.0]]
    vectors = [[1.0, -1.0, 0.0], [-4.0, 4.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    of += [[-0.98, 0.99, -0.01]]
    vectors += [[0.02, -0.01, -0.01]]  # in half precision, half of it might be put down to rounding
    times, along = multiples(torch.tensor(of, dtype=dtype), torch.tensor(vectors, dtype=dtype))
    assert times.tolist() == [1.0, -4.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert along.tolist() == [True, True, True, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [5.0, 20.0, 200.0])
def test_gradients_far_from_their_draws(size: float, dtype: torch.dtype) -> None:
    """Draws as sure, and labels as unlikely, as numbers can be."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    x = torch.randn(24, 3, dtype=dtype)
    with torch.no_grad():
        model[2].weight.mul_(size)  # type: ignore[operator,union-attr]
    y = torch.arange(24) % 2
    la = Laplace(model, "classification", curvature="fisher").fit([(x, y)], generator=torch.Generator().manual_seed(0))
    total = -nn.functional.cross_entropy(model(x), y, reduction="sum")
    expected = torch.autograd.grad(total, list(model.parameters()))
    for found, own in zip(la.curvature.gradient.values(), expected, strict=True):
        rounding = 20 * torch.finfo(dtype).eps * float(own.abs().max())
        torch.testing.assert_close(found, own, rtol=0, atol=rounding)


def test_a_single_example_is_read_as_many_are(passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one example is left over, it runs twice and nothing is probed anew."""
    examined: list[int] = []
    examine = probe.examine

    def counted(record: Any, independent: bool) -> Any:
        examined.append(record.examples)
        return examine(record, independent)

    monkeypatch.setattr(probe, "examine", counted)
    model = nn.Linear(3, 3, bias=False).double()
    nn.init.eye_(model.weight)
    x = 40 * torch.eye(3, dtype=torch.float64)[torch.arange(20) % 3]
    x[7] = torch.tensor([20.0, 20.0, 0.0])  # one of two
    Laplace(model, "classification", "block", rank_tolerance=0.01).fit([(x, torch.arange(20) % 3)])
    assert passes == [20, 4, 2]
    assert examined == [4]


Calls = list[tuple[int, int]]


@pytest.mark.parametrize(
    ("batches", "before", "after"),
    [
        # The second and the third would be more than a batch; at last five of two vectors go beside two of three.
        ([[1] * 15 + [2] * 5, [1] * 30 + [3] * 2, [1] * 38], [(15, 1), (30, 1)], [(38, 1), (7, 3)]),
        ([[1] * 20 + [2] * 20, [2] * 10], [], [(20, 1), (30, 2)]),  # all of them would be more than a batch
    ],
)
def test_examples_with_as_many_vectors_go_together(batches: list[list[int]], before: Calls, after: Calls) -> None:
    """Few with less beside those with more."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    tape = Tape(model, dict(model.named_parameters()))
    calls: Calls = []
    total, expected = torch.zeros(2, 4, 3, dtype=torch.float64)

    def backpropagate(record: Record, columns: Columns) -> None:
        calls.append((record.examples, columns.count))
        total.add_(torch.einsum("kno,ni->oi", columns.part(0, columns.count), record.inputs.args[0]))

    waiting = leftovers.Leftovers(backpropagate)
    for counts in batches:
        x, examples, number = torch.randn(40, 3).double(), torch.randperm(40)[: len(counts)], torch.tensor(counts)
        vectors = torch.randn(max(counts), len(counts), 4, dtype=torch.float64)
        vectors *= torch.arange(max(counts)).unsqueeze(1).lt(number).unsqueeze(2)
        expected += torch.einsum("kno,ni->oi", vectors, x[examples])
        waiting.add(tape.record(Inputs((x,), {})), examples, vectors, number)
    assert calls == before
    waiting.flush(tape)
    assert calls == before + after
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


def test_an_example_with_several_vectors_runs_once(passes: list[int]) -> None:
    model = nn.Linear(3, 3, bias=False).double()
    nn.init.eye_(model.weight)
    x = 40 * torch.eye(3, dtype=torch.float64)[torch.arange(20) % 3]
    x[7], x[11] = torch.tensor([20.0, 20.0, 0.0]), 0  # one of two classes, and any of three
    data = [(x, torch.arange(20) % 3)] * 6
    check_same(model, data, "block", memory_budget=FEW, rank_tolerance=1e-6)
    passes.clear()
    Laplace(model, "classification", "block", memory_budget=FEW, rank_tolerance=1e-6).fit(data)
    assert passes == [20, 4, *[20] * 5, 12]


def test_no_more_batches_wait_than_memory_allows(passes: list[int]) -> None:
    model, data = problem(*[(20, 5)] * 6)

    def left(budget: int) -> list[int]:
        passes.clear()
        Laplace(model, "classification", memory_budget=budget, rank_tolerance=0.1).fit(data)
        del passes[1]  # the probe
        for _ in data:
            passes.remove(20)
        return list(passes)

    together, apart = left(FEW), left(FEW // 16)
    assert len(together) == 1
    assert len(apart) == 6
    assert sum(apart) == sum(together)


@pytest.mark.parametrize("options", OPTIONS, ids=["fisher", "ranked"])
def test_batches_of_other_forms_stay_apart(options: dict[str, Any]) -> None:
    model, data = problem((12, 5), (12, 5), (9, 3), (12, 5), (9, 3), (9, 3), (1, 5))
    check_same(model, data, memory_budget=FEW, **options)


def test_no_other_blocks_in_the_second_phase() -> None:
    """The trace of the second phase of ekfac is that of diag."""
    model, data = problem(*[(12, 4)] * 4)
    found = Laplace(model, "classification", "ekfac", memory_budget=FEW, rank_tolerance=0.1).fit(data).curvature
    expected = Laplace(model, "classification", "diag", memory_budget=FEW, rank_tolerance=0.1).fit(data).curvature
    for own, diagonal in zip(found.blocks, expected.blocks, strict=True):
        trace = float(diagonal.accumulator.matrix().trace())
        assert float(own.accumulator.matrix().trace()) == pytest.approx(trace, rel=1e-9)


def test_no_more_together_than_in_a_batch(passes: list[int]) -> None:
    model, data = problem(*[(20, 5)] * 40)
    Laplace(model, "classification", memory_budget=FEW, rank_tolerance=0.1).fit(data)
    assert max(passes) == 20
    assert 4 < len(passes) - 41 < 20  # besides the batches and the probe


class Branching(Sure):
    """Goes another way where numbers are large, on average."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool(x.abs().mean() < 2) else super().forward(x / 8)


class Trimmed(nn.Module):
    """A class for every word, up to the last of the longest row of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = 8 * self.head(torch.tanh(self.words(ids[:, ids.ne(0).any(0)])))
        return out


class Asserting(Sure):
    """Takes batches of one size only, and says so in a way of its own."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 20
        return super().forward(x)


class Masked(Sure):
    """Takes a number for each example from a table as long as the batch."""

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        return super().forward(x) * (1 if table is None else table.flip(0).reshape(-1, 1))


def test_a_network_that_looks_at_the_whole_batch() -> None:
    model, data = problem(*[(20, 4)] * 7, model=Branching())
    data = [(x * scale, y) for (x, y), scale in zip(data, (1.0, 1.0, 4.0, 1.0, 4.0, 1.0, 4.0), strict=True)]
    check_same(model, data, memory_budget=FEW, curvature="fisher")


@pytest.mark.parametrize("options", OPTIONS, ids=["fisher", "ranked"])
def test_a_network_that_takes_batches_of_one_size(options: dict[str, Any]) -> None:
    model, data = problem(*[(20, 4)] * 4, model=Asserting())
    check_same(model, data, memory_budget=FEW, **options)


def test_what_cannot_leave_its_batch_is_known_from_the_first(passes: list[int]) -> None:
    model, data = problem(*[(20, 5)] * 40, model=Asserting())
    Laplace(model, "classification", memory_budget=FEW, rank_tolerance=0.1).fit(data)
    assert 40 < passes.count(20) < 52  # those that waited are run once more, later ones are not


@pytest.mark.parametrize("seed", range(6))
def test_rows_as_long_as_the_longest_of_their_batch(seed: int) -> None:
    """What fails together, or comes out otherwise, is run with its batch once more."""
    torch.manual_seed(seed)
    model, data = Trimmed().double().eval(), []
    for _ in range(8):
        ids = torch.randint(1, 20, (12, 7))
        ids[torch.arange(7) >= torch.randint(3, 8, (12, 1))] = 0
        data.append((ids, model(ids).argmax(2)))
    likelihood = Categorical(dim=2)
    whole = Laplace(model, likelihood, curvature="fisher", memory_budget=FEW)
    whole.fit(data, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    apart = [Laplace(model, likelihood, curvature="fisher").fit([one], generator=generator) for one in data]
    sums = reduce(Laplace.merge, apart)
    for own, expected in zip(whole.curvature.blocks, sums.curvature.blocks, strict=True):
        torch.testing.assert_close(own.accumulator.matrix(), expected.accumulator.matrix(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("options", OPTIONS, ids=["fisher", "ranked"])
def test_what_fails_together_is_run_with_its_batch(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_together", lambda tape, kept: None)
    model, data = problem((20, 5), (20, 5), (12, 5), (20, 5))
    check_same(model, data, memory_budget=FEW, **options)


class Rounding(nn.Module):
    """Its outputs depend on the size of a batch, no more than rounding of the largest may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 1e3 * self.linear(x) + 1e-4 * len(x)
        return out


def test_small_outputs_of_a_large_batch(passes: list[int]) -> None:
    """What is left over are the examples with the smallest outputs: rounding is that of the batch."""
    torch.manual_seed(0)
    model, data = Rounding(), []
    for _ in range(12):
        x = torch.randn(64, 16)
        x[5] = 0  # each label is as likely
        data.append((x, model(x).argmax(1)))
    Laplace(model, "classification", curvature="fisher", memory_budget=FEW).fit(
        data, generator=torch.Generator().manual_seed(0)
    )
    assert len(passes) > 13  # batches and probe, and some were left over
    assert passes.count(64) == 12  # no batch was run once more


@pytest.mark.parametrize("options", OPTIONS, ids=["fisher", "ranked"])
def test_examples_that_cannot_leave_their_batch(options: dict[str, Any]) -> None:
    model, data = problem(*[(8, 4)] * 3, model=Masked())
    masked = [(x, torch.linspace(0.5, 1.5, 8, dtype=x.dtype), y) for x, y in data]
    check_same(model, masked, memory_budget=FEW, **options)


class Counting(Sure):
    """Its outputs depend on how many batches there were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + (self.calls > 7) * x.mean((1, 2)).unsqueeze(1)


def test_other_outputs_than_before_are_an_error() -> None:
    counting = Counting()
    model, data = problem(*[(20, 5)] * 6, model=counting)
    counting.calls = 0
    with pytest.raises(InputError, match="run once more gives other outputs"):
        Laplace(model, "classification", "kron", "fisher", memory_budget=FEW).fit(
            data, generator=torch.Generator().manual_seed(3)
        )


def test_no_example_is_left_over() -> None:
    model, data = networks.make("mlp"), networks.inputs("mlp", 6)
    with torch.no_grad():
        list(model.parameters())[-1][0] = 1e3  # always sure of the first class
    la = check_same(model, [(x, torch.zeros(3, dtype=torch.long)) for x in data.split(3)], curvature="fisher")
    assert float(la.curvature.blocks[-1].accumulator.matrix().abs().max()) == 0


@pytest.mark.parametrize("spared", [0.0, 0.7, 3.0, 1e9])
@pytest.mark.parametrize("seed", range(5))
def test_groups_cost_least(spared: float, seed: int) -> None:
    """Of all ways to divide examples, sorted by their vectors, into batches: against every one of them."""
    draw = torch.Generator().manual_seed(seed)
    counts = torch.randperm(30, generator=draw)[:7].sort(descending=True).values.tolist()
    sizes = torch.randint(1, 9, (7,), generator=draw).tolist()
    batch = leftovers._Batch(Inputs((), {}), torch.zeros(0))
    waiting = {
        count: [leftovers._Kept(batch, torch.arange(size), torch.zeros(count, size))]
        for count, size in zip(counts, sizes, strict=True)
    }
    room = 20

    def cost(groups: list[list[tuple[int, int]]]) -> float:
        if any(len(group) > 1 and sum(size for _, size in group) > room for group in groups):
            return math.inf
        return sum(
            spared * group[0][0] + sum(size * (group[0][0] - count) for count, size in group) for group in groups
        )

    levels = list(zip(counts, sizes, strict=True))
    ways = []
    for ends in itertools.product([False, True], repeat=6):
        cuts = [0, *(i + 1 for i, end in enumerate(ends) if end), 7]
        ways.append(cost([levels[start:stop] for start, stop in itertools.pairwise(cuts)]))
    found = [
        [(len(kept.vectors), len(kept.examples)) for kept in group]
        for group in leftovers._levels(waiting, room, spared)
    ]
    assert sorted(level for group in found for level in group) == sorted(levels)
    assert cost(found) == pytest.approx(min(ways), rel=1e-12)


def test_a_last_batch_of_one_leaves_room_for_the_others() -> None:
    """What goes together is as large as the largest batch, not as the last."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    tape = Tape(model, dict(model.named_parameters()))
    calls: Calls = []
    waiting = leftovers.Leftovers(lambda record, columns: calls.append((record.examples, columns.count)))
    for size, count in ((16, 1), (16, 2), (1, 3)):
        examples = torch.arange(min(size, 3))
        vectors = torch.randn(count, len(examples), 4, dtype=torch.float64)
        record = tape.record(Inputs((torch.randn(size, 3, dtype=torch.float64),), {}))
        waiting.add(record, examples, vectors, torch.full_like(examples, count))
    waiting.flush(tape)
    assert calls == [(7, 3)]
