"""`rank_tolerance`: which pairs are kept, that they are enough, and that no more is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lapwing import Laplace
from lapwing.tape import Tape
from tests import networks, oracles

NETWORKS = ["mlp", "cnn", "grouped-cnn", "attention", "tokens", "tied-embedding", "gru", "norms", "cross-attention"]


def confident(network: str) -> nn.Module:
    """A network whose last layer is scaled, so that examples differ in how sure it is of them."""
    model = networks.make(network)
    with torch.no_grad():
        list(model.parameters())[-1].mul_(4)
        for name, parameter in model.named_parameters():
            if name.startswith(("head", "2.")):
                parameter.mul_(4)
    return model


def kept(
    la: Laplace, x: Tensor, y: Tensor, tolerance: float, keep_gradient: bool = False
) -> tuple[list[tuple[int, Tensor]], float]:
    """The pairs that are kept, examples and vectors in the outputs, and the fraction dropped.

    Where the direction v of the gradient is kept, `Λ` is `vvᵀ/(vᵀΛ⁻¹v)` and a rest of one rank less, the pairs of which
    count.
    """
    outputs = oracles.evaluate(la.model, x)
    hessians = oracles.output_hessians(la.likelihood, outputs, y)
    found: list[tuple[int, Tensor]] = []
    rest = hessians
    if keep_gradient:
        along = oracles.output_gradients(la.likelihood, outputs, y).unsqueeze(2)
        first = along / (along.mT @ torch.linalg.pinv(hessians, hermitian=True, rtol=1e-12) @ along).sqrt()
        rest = hessians - first @ first.mT
        found = [(n, column.squeeze(1)) for n, column in enumerate(first)]
    values, vectors = torch.linalg.eigh(rest)
    pairs = sorted(
        (float(values[n, k].clamp(min=0)), n, k) for n in range(values.shape[0]) for k in range(values.shape[1])
    )
    total = float(hessians.diagonal(dim1=1, dim2=2).sum())
    dropped = 0.0
    while dropped + pairs[0][0] <= tolerance * total:
        dropped += pairs.pop(0)[0]
    return found + [(n, size**0.5 * vectors[n, :, k]) for size, n, k in pairs], dropped / total


def brute_force(la: Laplace, x: Tensor, y: Tensor, tolerance: float) -> Tensor:
    """H of the kept pairs."""
    jacobian = oracles.packed_jacobian(la, x)
    rows = torch.stack([vector @ jacobian[n] for n, vector in kept(la, x, y, tolerance)[0]])
    return rows.T @ rows


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("tolerance", [1e-3, 0.05, 0.5])
def test_keeps_the_largest_pairs_of_each_batch(network: str, tolerance: float) -> None:
    model = confident(network)
    data = networks.batches(networks.inputs(network, 9), networks.targets("classification", 9), 6, 3)
    la = Laplace(model, "classification", "full", rank_tolerance=tolerance, progress=False).fit(data)
    expected = torch.stack([brute_force(la, x, y, tolerance) for x, y in data]).sum(0)
    found = la.curvature.blocks[0].accumulator.matrix()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))
    for structure in ("diag", "ekfac", "block"):
        other = Laplace(model, "classification", structure, rank_tolerance=tolerance, progress=False).fit(data)
        if structure == "diag":
            diagonal = torch.cat([block.accumulator.matrix().diagonal() for block in other.curvature.blocks])
            torch.testing.assert_close(diagonal, expected.diagonal(), rtol=1e-8, atol=1e-12)
        if structure == "ekfac":
            trace = sum(float(block.accumulator.matrix().trace()) for block in other.curvature.blocks)
            assert trace == pytest.approx(float(expected.trace()), rel=1e-9)
        assert other.curvature.dropped == pytest.approx(la.curvature.dropped, rel=1e-9)


@pytest.mark.parametrize("tolerance", [0.01, 0.1, 0.3])
def test_kron_keeps_the_direction_of_the_gradient_besides(tolerance: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(20, 4, generator=generator, dtype=torch.float64), torch.arange(20) % 7
    torch.manual_seed(1)
    first, last = nn.Linear(4, 5).double(), nn.Linear(5, 7).double()
    model = nn.Sequential(first, nn.Tanh(), last)
    la = Laplace(model, "classification", rank_tolerance=tolerance, progress=False).fit([(x, y)])
    pairs, dropped = kept(la, x, y, tolerance, keep_gradient=True)
    vectors = torch.stack([vector for _, vector in pairs])
    slopes = 1 - torch.tanh(first(x)).detach().square()
    inner = [slopes[n] * (vector @ last.weight.detach()) for n, vector in pairs]
    for block, g in zip(la.curvature.blocks, (torch.stack(inner), vectors), strict=True):
        torch.testing.assert_close(block.accumulator.tensors()["outputs"][0], g.T @ g, rtol=1e-9, atol=1e-11)
    assert la.curvature.dropped == pytest.approx(dropped, rel=1e-9)
    assert 0 < dropped <= tolerance


def test_is_a_lower_bound_and_says_what_it_dropped(tmp_path: Path) -> None:
    model = confident("mlp")
    data = networks.batches(networks.inputs("mlp", 30), networks.targets("classification", 30), 20, 10)
    exact = Laplace(model, "classification", "full").fit(data)
    la = Laplace(model, "classification", "full", rank_tolerance=0.1).fit(data)
    gap = exact.curvature.blocks[0].accumulator.matrix() - la.curvature.blocks[0].accumulator.matrix()
    assert float(torch.linalg.eigvalsh(gap).min()) > -1e-10
    assert 0 < la.curvature.dropped <= 0.1
    assert exact.curvature.dropped == 0
    assert "of its trace" in la.summary()
    assert "of its trace" not in exact.summary()
    la.save(tmp_path / "posterior.safetensors")
    again = Laplace.load(tmp_path / "posterior.safetensors", model)
    assert again.curvature.dropped == la.curvature.dropped
    assert again.rank_tolerance == 0.1
    halves = [Laplace(model, "classification", "full", rank_tolerance=0.1).fit([batch]) for batch in data]
    assert halves[0].merge(halves[1]).curvature.dropped == pytest.approx(la.curvature.dropped)


def test_runs_the_few_uncertain_examples_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
        model.bias.zero_()
    x = 12 * torch.eye(3, dtype=torch.float64)[torch.arange(20) % 3]
    x[7] = 0.1
    seen: list[int] = []
    record = Tape.record

    def counted(self: Tape, inputs, create_graph: bool = False):
        seen.append(len(inputs.args[0]))
        return record(self, inputs, create_graph)

    monkeypatch.setattr(Tape, "record", counted)
    y = torch.arange(20) % 3
    la = Laplace(model, "classification", "full", rank_tolerance=0.01).fit([(x, y)])
    assert seen == [20, 2]  # the batch, and the one uncertain example for each of its two columns
    exact = Laplace(model, "classification", "full").fit([(x, y)])
    torch.testing.assert_close(
        la.curvature.blocks[0].accumulator.matrix(), exact.curvature.blocks[0].accumulator.matrix(), rtol=0, atol=0.02
    )


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan")])
def test_refuses_other_tolerances(tolerance: float) -> None:
    with pytest.raises(ValueError, match="rank_tolerance must be"):
        Laplace(networks.make("mlp"), "classification", rank_tolerance=tolerance)
    with pytest.raises(ValueError, match="rank_tolerance belongs to curvature='ggn'"):
        Laplace(networks.make("mlp"), "classification", curvature="fisher", rank_tolerance=0.1)


def test_an_input_as_long_as_the_batch_that_has_no_examples() -> None:
    """Its examples cannot be run without the others, so that columns go through the whole batch."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
            return self.linear(x) * (8 if table is None else table.sum())

    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    x = x * torch.logspace(0, 2, 8, dtype=x.dtype).unsqueeze(1)
    model = Shared().double()
    expected = Laplace(model, "classification", "full", rank_tolerance=0.2).fit([(x, y)])
    found = Laplace(model, "classification", "full", rank_tolerance=0.2).fit([(x, torch.ones(8, dtype=x.dtype), y)])
    assert found.curvature.dropped == pytest.approx(expected.curvature.dropped, rel=1e-9)
    matrices = [la.curvature.blocks[0].accumulator.matrix() for la in (found, expected)]
    torch.testing.assert_close(*matrices, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("examples", "tolerance"), [(3, 0.6), (100, 0.2)])
def test_equal_columns_are_dropped_as_many_as_reported(examples: int, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 5).double()
    x = torch.randn(examples, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(examples, 5, generator=generator, dtype=torch.float64)
    la = Laplace(model, "regression", "full", rank_tolerance=tolerance, weights="bias").fit([(x, y)])
    kept = float(la.curvature.blocks[0].accumulator.matrix().trace()) / (5 * examples)
    assert 1 - kept == pytest.approx(la.curvature.dropped, abs=1e-12)
    assert 0 < la.curvature.dropped <= tolerance
