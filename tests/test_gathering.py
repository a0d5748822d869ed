"""Small batches run together: the sums of fits of one batch each, which have nothing to gather."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import InputError, Laplace, gathering
from lapwing.batches import Inputs
from lapwing.tape import Record, Tape
from tests import networks
from tests.sums import check_same


def batches(network: str, *sizes: int) -> list[Any]:
    count = sum(sizes)
    return networks.batches(networks.inputs(network, count), networks.targets("classification", count), *sizes)


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


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)


class Fixed(OneLayer):
    """Takes batches of two examples and no others."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.view(2, 4))
        return out


class Asserting(OneLayer):
    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 2
        out: Tensor = self.layer(x)
        return out


class Buffered(OneLayer):
    """Has room for so many examples."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + torch.zeros(3, 1, dtype=x.dtype)[: len(x)]
        return out


class Sized(OneLayer):
    """Behaves differently in a large batch."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * (2 if len(x) > 8 else 1)
        return out


class Cut(OneLayer):
    """Reads no further than the longest example of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[:, 0].abs() * 2).long() + 1  # of values repeated so many times
        long = x.unsqueeze(1).expand(-1, 20, -1)[:, : lengths.max()]
        seen = (torch.arange(long.shape[1]) < lengths.unsqueeze(1)).unsqueeze(2)
        out: Tensor = (self.layer(long).tanh() * seen).sum(1) / lengths.unsqueeze(1)
        return out


class Relative(OneLayer):
    """Compares with the first example."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + x[:1].tanh())
        return out


class RelativeToLast(OneLayer):
    """Compares with the last example."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + x[-1:].tanh())
        return out


class Divided(OneLayer):
    """Divides by the largest value of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x / x.amax())
        return out


class Centered(OneLayer):
    """Compares with the mean."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + x.mean(0).tanh())
        return out


@pytest.mark.parametrize("network", [Branching, Numbers, Fixed, Asserting, Buffered, Sized, Divided, Cut])
def test_networks_that_look_at_the_whole_batch(network: type[nn.Module], passes: list[int]) -> None:
    torch.manual_seed(0)
    model, x = network().double(), torch.randn(20, 4, dtype=torch.float64)
    data = [(own, y % 3) for own, y in zip(x.split(2), torch.arange(20).split(2), strict=True)]
    la = check_same(model, data, "kron" if network is Cut else "diag")
    assert {size for size in passes if size != 18} == {2}  # all others together were tried, at most
    assert passes.count(18) <= 1
    assert la.curvature.statistics.examples == 20


@pytest.mark.parametrize("outlier", [1.0, 1e6])
@pytest.mark.parametrize("network", [Relative, RelativeToLast, Centered])
def test_networks_that_are_right_only_example_by_example(
    network: type[nn.Module], outlier: float, passes: list[int]
) -> None:
    torch.manual_seed(0)
    model, x = network().double(), torch.randn(6, 4, dtype=torch.float64)
    x[3] *= outlier
    check_same(model, [(own, torch.tensor([n % 3])) for n, own in enumerate(x.split(1))], "full")
    assert passes.count(5) == 1  # tried
    assert set(passes) == {1, 5}


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
    assert passes.count(4) == 1  # the second and the third; of every other form there are no more than two
    assert max(passes) == 4
    alone = [Laplace(model, "classification", "full").fit([one]) for one in data]
    expected = sum(one.curvature.blocks[0].accumulator.matrix() for one in alone)
    torch.testing.assert_close(whole.curvature.blocks[0].accumulator.matrix(), expected)


def test_every_form_of_batch_is_looked_at(passes: list[int]) -> None:
    """What may go together depends on it: here on a flag by which a batch is doubled, and on the length."""

    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, flag: Tensor | None = None) -> Tensor:
            out: Tensor = self.layer(x).mean(1)
            return out * 2 if flag is not None and flag.sum() > 0 else out

    torch.manual_seed(0)
    model = Flagged().double()

    def batch(length: int, *flag: int) -> dict[str, Any]:
        x = torch.randn(2, length, 3, dtype=torch.float64)
        more = {"flag": torch.tensor(flag)} if flag else {}
        return {"x": x, "labels": torch.randint(3, (2,))} | more

    data = [batch(4), batch(4), batch(4), batch(4, 0, 1), batch(4, 0, 0), batch(4, 1, 0), batch(4, 0, 0)]
    whole = Laplace(model, "classification", "full").fit(data)
    assert passes.count(4) == 1
    assert max(passes) == 4
    alone = [Laplace(model, "classification", "full").fit([one]) for one in data]
    expected = sum(one.curvature.blocks[0].accumulator.matrix() for one in alone)
    torch.testing.assert_close(whole.curvature.blocks[0].accumulator.matrix(), expected)
    passes.clear()
    grown = [batch(2), batch(2), batch(2), batch(200), batch(200), batch(200)]
    Laplace(model, "classification", memory_budget=2**17).fit(grown)
    assert passes == [2, 4, 2, 2, 2]  # the long ones take more memory


def test_frozen_parts_take_memory_too(passes: list[int]) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.head = nn.Linear(4, 4000), nn.Linear(4000, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.wide(x))
            return out

    data = batches("mlp", *[4] * 4)
    width = data[0][0].shape[1]
    torch.manual_seed(0)
    model = Wide()
    model.wide = nn.Linear(width, 4000)
    Laplace(model.double(), "classification", weights="last_layer", memory_budget=2**21).fit(data)
    assert max(passes) == 4


def test_columns_are_dropped_however_many_outputs_there_are(passes: list[int]) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 40).double(), 20 * torch.randn(16, 4, dtype=torch.float64)
    data = list(zip(x.split(4), torch.arange(16).split(4), strict=True))
    la = check_same(model, data, "full", rank_tolerance=0.1, memory_budget=2**23)
    assert la.curvature.dropped > 0.01
    assert max(passes) < 12  # the columns of all together would not fit


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


def test_empty_batches_are_named_as_such() -> None:
    data = batches("mlp", 4, 4)
    x = data[0][0][:0]
    with pytest.raises(InputError, match="The batch is empty"):
        Laplace(networks.make("mlp"), "classification").fit([*data, (x, data[0][1][:0]), (x[:, :2], data[0][1][:0])])


def test_outputs_that_are_not_finite_are_named_by_batch() -> None:
    class Root(OneLayer):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x.sqrt())
            return out

    torch.manual_seed(0)
    data = [(torch.rand(4, 4), torch.arange(4) % 3) for _ in range(6)]
    data[4][0][3, 0] = -1
    with pytest.raises(InputError, match=r"^Batch 4: the model's outputs hold NaN"):
        Laplace(Root(), "classification").fit(data)


def test_loaders_that_write_every_batch_into_the_same_memory(passes: list[int]) -> None:
    data = batches("mlp", *[4] * 6)
    x, y = torch.empty_like(data[0][0]), torch.empty_like(data[0][1])

    class Reused:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for own, targets in data:
                x.copy_(own)
                y.copy_(targets)
                yield x, y

    found = Laplace(networks.make("mlp"), "classification", "full").fit(Reused())
    assert max(passes) == 20
    expected = Laplace(networks.make("mlp"), "classification", "full").fit(data)
    matrices = [la.curvature.blocks[0].accumulator.matrix() for la in (found, expected)]
    torch.testing.assert_close(*matrices)
    assert found.curvature.statistics.log_likelihood == expected.curvature.statistics.log_likelihood


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag"])
def test_activations_of_one_pass_at_a_time(structure: str, enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass begins when the one before is gone, but for a few examples of the probe."""
    monkeypatch.setattr(gathering, "_EXAMPLES", 40 if enabled else 0)
    passes: list[weakref.ref[Record]] = []
    alive: list[int] = []
    run = Tape.run

    def watched(self: Tape, inputs: Inputs, create_graph: bool = False) -> Record:
        alive.append(sum(one() is not None for one in passes))
        record = run(self, inputs, create_graph)
        passes.append(weakref.ref(record))
        return record

    monkeypatch.setattr(Tape, "run", watched)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    data = [(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(7)]
    Laplace(model, "classification", structure).fit(data)
    assert alive[:2] == [0, 1]  # the second is the probe's
    assert len(alive) > 3
    assert not any(alive[2:])
