"""Small batches run together: the sums of fits of one batch each, which have nothing to gather."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import InputError, Laplace
from lapwing.tape import Tape
from tests import networks


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many examples each recorded pass has."""
    seen: list[int] = []
    run = Tape.run

    def counted(self: Tape, inputs: Any, create_graph: bool = False) -> Any:
        record = run(self, inputs, create_graph)
        seen.append(record.examples)
        return record

    monkeypatch.setattr(Tape, "run", counted)
    return seen


def batches(network: str, *sizes: int) -> list[Any]:
    count = sum(sizes)
    return networks.batches(networks.inputs(network, count), networks.targets("classification", count), *sizes)


def check_same(model: nn.Module, data: list[Any], structure: str = "kron", **options: Any) -> Laplace:
    """A fit is the sum of the fits of its batches, draw by draw."""
    whole = Laplace(model, "classification", structure, **options)
    whole.fit(data, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    alone = [Laplace(model, "classification", structure, **options).fit([batch], generator=generator) for batch in data]
    sums = reduce(Laplace.merge, alone)
    for own, expected in zip(whole.curvature.blocks, sums.curvature.blocks, strict=True):
        for name, tensor in expected.accumulator.tensors().items():
            if name == "counts":  # bounds on ranks
                continue
            found = own.accumulator.tensors()[name]
            torch.testing.assert_close(found, tensor, rtol=1e-9, atol=1e-11 * float(tensor.abs().max() + 1), msg=name)
    for name, slope in sums.curvature.gradient.items():
        torch.testing.assert_close(whole.curvature.gradient[name], slope, rtol=1e-9, atol=1e-11, msg=name)
    assert whole.curvature.statistics.examples == sums.curvature.statistics.examples
    assert whole.curvature.statistics.log_likelihood == pytest.approx(sums.curvature.statistics.log_likelihood)
    assert whole.curvature.dropped == pytest.approx(sums.curvature.dropped, rel=1e-9, abs=1e-15)
    return whole


@pytest.mark.parametrize("network", ["mlp", "cnn", "attention", "tied-embedding", "gru", "norms", "batchnorm"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank_tolerance": 0.1},
        {"curvature": "fisher"},
        {"curvature": "fisher", "fisher_samples": 3},
        {"curvature": "rademacher"},
        {"curvature": "empirical"},
        {"structure": "diag"},
        {"structure": "full"},
        {"structure": "full", "curvature": "hessian", "prior": 100.0},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "kron",
)
def test_the_sums_do_not_depend_on_it(network: str, options: dict[str, Any], passes: list[int]) -> None:
    check_same(networks.make(network), batches(network, 4, 4, 3, 5, 4, 4), **options)
    assert max(passes) == 20  # the first batch alone, then all others


def test_two_passes_and_two_phases(passes: list[int]) -> None:
    model, data = networks.make("mlp"), batches("mlp", 4, 4, 4, 4)
    la = Laplace(model, "classification", "ekfac").fit(data, passes=2)
    diagonal = Laplace(model, "classification", "diag").fit(data)
    traces = [sum(float(b.accumulator.matrix().trace()) for b in one.curvature.blocks) for one in (la, diagonal)]
    assert traces[0] == pytest.approx(traces[1], rel=1e-9)
    assert la.curvature.statistics.examples == 16
    assert max(passes) == 16  # the first pass has shown how many go together


def test_batches_of_one_example(passes: list[int]) -> None:
    check_same(networks.make("cnn"), batches("cnn", *[1] * 12))
    assert max(passes) == 11


def test_no_more_than_memory_allows(passes: list[int]) -> None:
    data = batches("mlp", *[4] * 6)
    Laplace(networks.make("mlp"), "classification", memory_budget=2**20).fit(data)
    few = max(passes)
    passes.clear()
    Laplace(networks.make("mlp"), "classification", memory_budget=2**13).fit(data)
    assert max(passes) == 4 < few


class Branching(nn.Module):
    """Goes one way or the other by a value of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.low(x), self.high(x)
        out: Tensor = low + high if x.sum() > 0 else low - high
        return out


class Numbers(Branching):
    """The same, by a number."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.low(x) + self.high(x) * (2 if x.sum().item() > 0 else 1)
        return out


class Fixed(nn.Module):
    """Takes batches of two examples and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.view(2, 4))
        return out


class Relative(nn.Module):
    """Compares with the first example."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + x[:1].tanh())
        return out


class Centered(Relative):
    """Compares with the mean."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + x.mean(0).tanh())
        return out


@pytest.mark.parametrize("network", [Branching, Numbers, Fixed])
def test_networks_that_look_at_the_whole_batch(network: type[nn.Module], passes: list[int]) -> None:
    torch.manual_seed(0)
    model, x = network().double(), torch.randn(12, 4, dtype=torch.float64)
    data = list(zip(x.split(2), torch.arange(12).split(2), strict=True))
    check_same(model, [(own, y % 3) for own, y in data], "diag")
    assert set(passes) == {2}


@pytest.mark.parametrize("network", [Relative, Centered])
def test_networks_that_are_right_only_example_by_example(network: type[nn.Module], passes: list[int]) -> None:
    torch.manual_seed(0)
    model, x = network().double(), torch.randn(6, 4, dtype=torch.float64)
    check_same(model, [(own, torch.tensor([n % 3])) for n, own in enumerate(x.split(1))], "full")
    assert set(passes) == {1}


def test_batches_of_another_form_stay_apart(passes: list[int]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, way: str, scale: Tensor | None = None) -> Tensor:
            out: Tensor = self.layer(x).mean(1) if way == "mean" else self.layer(x).sum(1)
            return out if scale is None else out * scale

    torch.manual_seed(0)
    model = Scaled().double()

    def batch(way: str, length: int, **more: Tensor) -> dict[str, Any]:
        x = torch.randn(2, length, 3, dtype=torch.float64)
        return {"x": x, "way": way, "labels": torch.randint(3, (2,))} | more

    data = [
        batch("mean", 4), batch("mean", 4), batch("mean", 4), batch("sum", 4), batch("sum", 4), batch("sum", 5),
        batch("sum", 5, scale=torch.tensor(2.0)), batch("sum", 5, scale=torch.tensor(3.0)),
        batch("sum", 5, scale=torch.ones(2, 1)), batch("sum", 5, scale=torch.ones(2, 1).double()),
    ]  # fmt: skip
    whole = Laplace(model, "classification", "full").fit(data)
    assert passes.count(4) == 2
    assert max(passes) == 4
    alone = [Laplace(model, "classification", "full").fit([one]) for one in data]
    expected = sum(one.curvature.blocks[0].accumulator.matrix() for one in alone)
    torch.testing.assert_close(whole.curvature.blocks[0].accumulator.matrix(), expected)


def test_kfra_averages_over_the_batches_of_the_loader(passes: list[int]) -> None:
    check_same(networks.make("mlp"), batches("mlp", 3, 3, 3, 3), curvature="kfra")
    assert max(passes) == 3


@pytest.mark.parametrize("number", [0, 1, 3, 5])
def test_errors_name_the_batch_of_the_loader(number: int) -> None:
    data = batches("mlp", *[4] * 6)
    x, y = data[number]
    wrong = y.clone()
    wrong[2] = 9
    with pytest.raises(InputError, match=rf"^Batch {number}: class index 9 "):
        Laplace(networks.make("mlp"), "classification").fit([*data[:number], (x, wrong), *data[number + 1 :]])
    bad = x.clone()
    bad[1, 0] = float("inf")
    with pytest.raises(InputError, match=rf"^Batch {number}: the input"):
        Laplace(networks.make("mlp"), "classification").fit([*data[:number], (bad, y), *data[number + 1 :]])
    with pytest.raises(InputError, match=rf"^Batch {number}: 3 targets for 4 outputs"):
        Laplace(networks.make("mlp"), "classification").fit([*data[:number], (x, y[:3]), *data[number + 1 :]])


def test_outputs_that_are_not_finite_are_named_by_batch() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x.sqrt())
            return out

    torch.manual_seed(0)
    data = [(torch.rand(4, 4), torch.arange(4) % 3) for _ in range(6)]
    data[4][0][3, 0] = -1
    with pytest.raises(InputError, match=r"^Batch 4: the model's outputs hold NaN"):
        Laplace(Root(), "classification").fit(data)
