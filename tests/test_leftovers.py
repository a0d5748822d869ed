"""Examples that batches leave over run together: the sums stay those of every batch by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import InputError, Laplace
from tests import networks
from tests.sums import check_same

OPTIONS: list[dict[str, Any]] = [{"curvature": "fisher"}, {"rank_tolerance": 0.1}]
FEW = 2**13  # bytes of a budget that lets no batches go together


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
    assert (first, probed, others[1:6]) == (20, 2, [20] * 5)
    assert len(others) == 7  # what the first batch leaves over at once, that of the other five together
    assert 0 < others[0] < others[-1] < 20


@pytest.mark.parametrize("options", OPTIONS, ids=["fisher", "ranked"])
def test_batches_of_other_forms_stay_apart(options: dict[str, Any]) -> None:
    model, data = problem((12, 5), (12, 5), (9, 3), (12, 5), (9, 3), (9, 3), (1, 5))
    check_same(model, data, memory_budget=FEW, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=["fisher", "ranked"])
def test_no_other_blocks_in_the_second_phase(options: dict[str, Any]) -> None:
    """The trace of the second phase of ekfac is that of diag; the blocks of its first phase stay as they were."""
    model, data = problem(*[(12, 4)] * 4)
    if "curvature" in options:
        options = options | {"curvature": "empirical"}  # the same columns in both phases
    found = Laplace(model, "classification", "ekfac", memory_budget=FEW, **options).fit(data).curvature
    expected = Laplace(model, "classification", "diag", memory_budget=FEW, **options).fit(data).curvature
    for own, diagonal in zip(found.blocks, expected.blocks, strict=True):
        trace = float(diagonal.accumulator.matrix().trace())
        assert float(own.accumulator.matrix().trace()) == pytest.approx(trace, rel=1e-9)


class Branching(Sure):
    """Goes another way where a batch is small, on average."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.abs().mean() > 0.5 else super().forward(2 * x)


class Masked(Sure):
    """Takes a number for each example from a table as long as the batch."""

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        return super().forward(x) * (1 if table is None else table.flip(0).reshape(-1, 1))


def test_networks_that_look_at_the_whole_batch() -> None:
    model, data = problem(*[(8, 4)] * 5, model=Branching())
    data = [(x * scale, y) for (x, y), scale in zip(data, (1.0, 0.1, 1.0, 0.3, 1.0), strict=True)]
    check_same(model, data, memory_budget=FEW, curvature="fisher")


def test_examples_that_cannot_leave_their_batch() -> None:
    model, data = problem(*[(8, 4)] * 3, model=Masked())
    masked = [(x, torch.linspace(0.5, 1.5, 8, dtype=x.dtype), y) for x, y in data]
    check_same(model, masked, memory_budget=FEW, curvature="fisher")
    with pytest.raises(InputError, match="rank_tolerance=0"):
        Laplace(model, "classification", rank_tolerance=0.1, memory_budget=FEW).fit(masked)


class Counting(Sure):
    """Its outputs depend on how many batches there were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + (self.calls > 8) * x.mean((1, 2)).unsqueeze(1)


def test_other_outputs_than_before_are_an_error() -> None:
    counting = Counting()
    model, data = problem(*[(20, 5)] * 6, model=counting)
    counting.calls = 0
    with pytest.raises(InputError, match="Examples must be independent"):
        Laplace(model, "classification", "kron", "fisher", memory_budget=FEW).fit(
            data, generator=torch.Generator().manual_seed(3)
        )


def test_no_example_is_left_over() -> None:
    model, data = networks.make("mlp"), networks.inputs("mlp", 6)
    with torch.no_grad():
        list(model.parameters())[-1][0] = 1e3  # always sure of the first class
    la = check_same(model, [(x, torch.zeros(3, dtype=torch.long)) for x in data.split(3)], curvature="fisher")
    assert float(la.curvature.blocks[-1].accumulator.matrix().abs().max()) == 0
