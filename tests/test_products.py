"""Products with the GGN against the dense matrix, and estimates against what they estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import Categorical, Gaussian, InputError, Laplace
from lapwing.products import GGN, Estimate, log_det, trace
from tests import networks, oracles
from tests.test_untouched import DATA, Counting, check, state

NO_FORWARD_MODE = ("odd", "tokens")  # weight norm has none, and that of embeddings overlooks padding
LIKELIHOODS = ["classification", "binary", "regression"]


def dense(ggn: GGN, data: list[Any]) -> Tensor:
    """`Σ_n J_nᵀ Λ_n J_n` in the operator's order of parameters: `[p, p]`."""
    names = list(ggn.parameters)
    total = torch.zeros(ggn.size, ggn.size, dtype=torch.float64)
    for x, y in data:
        found = oracles.jacobian(ggn.model, x, names)
        rows = torch.cat([found[name].reshape(*found[name].shape[:2], -1) for name in names], dim=-1)
        middle = oracles.output_hessians(ggn.likelihood, oracles.evaluate(ggn.model, x), y)
        total += torch.einsum("nci,ncd,ndj->ij", rows, middle, rows)
    return total


def of(network: str, likelihood: Any = "classification", **options: Any) -> tuple[GGN, list[Any]]:
    name = likelihood if isinstance(likelihood, str) else "regression"
    data = networks.batches(networks.inputs(network, 7), networks.targets(name, 7), 4, 3)
    return GGN(networks.make(network), likelihood, data, progress=False, **options), data


def eye(ggn: GGN) -> Tensor:
    return torch.eye(ggn.size, dtype=torch.float64)


@pytest.mark.parametrize("network", [name for name in networks.NETWORKS if name != "bags"])
@pytest.mark.parametrize("likelihood", [*LIKELIHOODS, Gaussian([1.0, 2.0, 4.0])])
def test_product_is_that_of_the_dense_matrix(network: str, likelihood: Any) -> None:
    ggn, data = of(network, likelihood)
    expected = dense(ggn, data)
    scale = float(expected.abs().max())
    torch.testing.assert_close(ggn.matmul(eye(ggn)), expected, rtol=0, atol=1e-13 * scale)
    one_by_one = "forward" if any(parameter.dim() > 2 for parameter in ggn.parameters.values()) else "batched"
    assert ggn._method == ("backward" if network in NO_FORWARD_MODE else one_by_one)


@pytest.mark.parametrize("network", [name for name in networks.NETWORKS if name != "bags"])
@pytest.mark.parametrize("method", ["forward", "backward"])
def test_every_way_to_the_product_agrees(network: str, method: str) -> None:
    if network in NO_FORWARD_MODE and method == "forward":
        pytest.skip("no forward mode that agrees with the backward pass")
    ggn, data = of(network)
    ggn._method = method
    torch.testing.assert_close(ggn.matmul(eye(ggn)), dense(ggn, data), rtol=1e-11, atol=1e-12)


def test_operations_without_derivatives_are_named() -> None:
    model = nn.Sequential(nn.EmbeddingBag(5, 3), nn.Linear(3, 2)).double()
    data = [(torch.randint(5, (4, 3)), torch.randint(2, (4,)))]
    with pytest.raises(InputError, match="forward mode PyTorch fails at '_embedding_bag'.*two backward passes at '_em"):
        GGN(model, "classification", data).matmul(torch.ones(23, 1))
    head = GGN(model, "classification", data, weights="1.*")
    torch.testing.assert_close(head.matmul(eye(head)), dense(head, data), rtol=1e-12, atol=1e-14)


class Cube(torch.autograd.Function):
    """No forward mode; a double backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x.square() * gradients[0]


class WrongCube(Cube):
    """A forward mode that is not the derivative of `forward`."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return 2 * tangents[0]


@pytest.mark.parametrize("function", [Cube, WrongCube])
def test_a_missing_or_wrong_forward_mode_is_noticed(function: type[Cube]) -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(function.apply(self.first(x)))

    torch.manual_seed(0)
    data = networks.batches(networks.inputs("mlp", 7), networks.targets("classification", 7), 4, 3)
    ggn = GGN(Custom().double(), "classification", data)
    torch.testing.assert_close(ggn.matmul(eye(ggn)), dense(ggn, data), rtol=1e-12, atol=1e-13)
    assert ggn._method == "backward"


class Uneven(nn.Module):
    """Draws a number, which vmap refuses; and on batches of three, an operation without forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + 0 * torch.rand(4, dtype=x.dtype)
        return self.second(Cube.apply(hidden) if len(x) == 3 else hidden**3)


@pytest.mark.parametrize(("sizes", "method"), [((4, 2, 1), "forward"), ((4, 3), "forward"), ((3, 4), "backward")])
def test_batches_that_take_another_way_than_the_first(sizes: tuple[int, ...], method: str) -> None:
    torch.manual_seed(0)
    data = networks.batches(networks.inputs("mlp", 7), networks.targets("classification", 7), *sizes)
    ggn = GGN(Uneven().double(), "classification", data)
    torch.testing.assert_close(ggn.matmul(eye(ggn)), dense(ggn, data), rtol=1e-12, atol=1e-13)
    assert ggn._method == method


def test_weights_order_and_dtype() -> None:
    for weights, size in (("last_layer", 15), ("0.*", 16), (["0.bias", "2.weight"], 16), ("all", 31)):
        ggn, data = of("mlp", weights=weights)
        assert ggn.size == size
        torch.testing.assert_close(ggn.matmul(eye(ggn)), dense(ggn, data), rtol=1e-12, atol=1e-13)
        vector = torch.randn(2, size, dtype=torch.float64)
        unpacked = ggn.unpack(vector)
        assert {name: value.shape[1:] for name, value in unpacked.items()} == {
            name: parameter.shape for name, parameter in ggn.parameters.items()
        }
        assert torch.equal(ggn.pack(unpacked), vector)
        values = {name: parameter.detach() for name, parameter in ggn.parameters.items()}
        flat = torch.cat([value.flatten() for value in values.values()])
        assert torch.equal(ggn.pack(values), flat)
    single = GGN(networks.make("mlp").float(), "classification", [(x.float(), y) for x, y in data])
    product = single.matmul(torch.eye(31))
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), dense(ggn, data), rtol=1e-4, atol=1e-5)


def test_batches_as_in_a_fit() -> None:
    """Mappings, other outputs, positions that are not observed; and the same H as structure full."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(6, 3), nn.Linear(3, 4)

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            return {"scores": self.head(torch.tanh(self.embed(tokens)))}

    torch.manual_seed(0)
    model = Tagger().double()
    data = [{"tokens": torch.randint(6, (n, 5)), "labels": torch.randint(4, (n, 5))} for n in (3, 2)]
    data[0]["labels"][:, 2:] = -100
    options: dict[str, Any] = {"output": lambda returned: returned["scores"], "progress": False}
    full = Laplace(model, Categorical(), "full", **options).fit(data)
    ggn = GGN(model, Categorical(), data, **options)
    block = full.curvature.blocks[0]
    vectors = torch.randn(ggn.size, 3, dtype=torch.float64)
    packed = block.pack(ggn.unpack(vectors.T)).T
    found = block.pack(ggn.unpack(ggn.matmul(vectors).T)).T
    torch.testing.assert_close(found, block.accumulator.matrix() @ packed, rtol=1e-10, atol=1e-12)


def test_the_model_is_left_alone() -> None:
    torch.manual_seed(0)
    model = Counting()
    model(torch.randn(8, 3)).sum().backward()
    model.body.eval()
    broken = [*DATA, (torch.randn(6, 3), torch.full((6,), 9))]
    ggn, bad = GGN(model, "classification", DATA), GGN(model, "classification", broken)
    assert "frozen.weight" not in ggn.parameters
    before = state(model)
    first = ggn.matmul(torch.ones(ggn.size, 2))
    check(before, state(model), "matmul")
    with pytest.raises(InputError, match="Batch 2: class index 9"):
        bad.matmul(torch.ones(ggn.size, 2))
    check(before, state(model), "a failing matmul")
    assert torch.equal(ggn.matmul(torch.ones(ggn.size, 2)), first)


@dataclass(frozen=True)
class Dense:
    matrix: Tensor

    @property
    def size(self) -> int:
        return len(self.matrix)

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def matmul(self, vectors: Tensor) -> Tensor:
        return self.matrix @ vectors


def some(size: int = 40, rank: int = 40) -> Dense:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(size, rank, generator=generator, dtype=torch.float64)
    return Dense(root @ torch.diag(torch.logspace(0, -2, rank, dtype=torch.float64)) @ root.T)


def test_complete_probes_and_steps_are_exact() -> None:
    for operator in (some(), some(40, 7), of("mlp")[0], of("tied-embedding", "regression")[0]):
        size = operator.size
        matrix = operator.matmul(torch.eye(size, dtype=torch.float64))
        probes = size**0.5 * torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q
        assert trace(operator, probes).value == pytest.approx(float(matrix.trace()), rel=1e-12)
        expected = torch.linalg.slogdet(matrix + 0.3 * torch.eye(size, dtype=torch.float64))[1]
        assert log_det(operator, 0.3, probes, steps=size).value == pytest.approx(float(expected), rel=1e-10)
        assert log_det(operator, 0.3, probes, steps=10 * size).value == pytest.approx(float(expected), rel=1e-10)


def test_log_det_is_that_of_the_evidence() -> None:
    ggn, data = of("attention")
    full = Laplace(ggn.model, "classification", "full", prior=2.0).fit(data)
    expected = float(full.posterior.log_det_precision())
    found = log_det(ggn, 2.0, samples=200, steps=20, generator=torch.Generator().manual_seed(0))
    assert abs(found.value - expected) < 4 * found.error
    assert found.error < 0.05 * abs(expected)


def test_few_steps_already_give_the_log_det() -> None:
    operator = some()
    probes = 40**0.5 * torch.eye(40, dtype=torch.float64)
    expected = float(torch.linalg.slogdet(operator.matrix + torch.eye(40, dtype=torch.float64))[1])
    errors = [abs(log_det(operator, 1.0, probes, steps=steps).value - expected) for steps in (2, 6, 12, 24)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6 * abs(expected)


def test_error_of_a_trace_is_hutchinsons() -> None:
    """Random signs have variance `2 Σ_{i≠j} H_ij²`."""
    operator = some()
    off = operator.matrix - torch.diag(operator.matrix.diagonal())
    found = trace(operator, 4000, torch.Generator().manual_seed(0))
    assert found.error == pytest.approx(float((2 * off.square().sum() / 4000).sqrt()), rel=0.1)
    diagonal = Dense(torch.diag(torch.arange(5.0, dtype=torch.float64)))
    assert trace(diagonal, 2) == Estimate(10.0, 0.0)


@pytest.mark.parametrize("what", ["trace", "log_det"])
def test_error_bars_cover(what: str) -> None:
    """Within two standard errors about 95 times out of 100: with 300 repetitions between 91 and 98.5 percent."""
    operator, generator = some(), torch.Generator().manual_seed(0)
    expected = float(operator.matrix.trace())
    estimate: Callable[[], Estimate] = lambda: trace(operator, 30, generator)  # noqa: E731
    if what == "log_det":
        expected = float(torch.linalg.slogdet(operator.matrix + torch.eye(40, dtype=torch.float64))[1])
        estimate = lambda: log_det(operator, 1.0, 30, 20, generator)  # noqa: E731
    found = [estimate() for _ in range(300)]
    inside = sum(abs(one.value - expected) <= 2 * one.error for one in found) / 300
    assert 0.91 < inside < 0.985
    assert len({one.value for one in found}) == 300
    # And on average they are right: the mean of all within four standard errors of the mean.
    values = torch.tensor([one.value for one in found], dtype=torch.float64)
    assert abs(float(values.mean()) - expected) < 4 * float(values.std()) / 300**0.5


def test_the_generator_is_used() -> None:
    operator = some()
    before = torch.get_rng_state()
    first, second = (trace(operator, 4, torch.Generator().manual_seed(1)) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    third = trace(operator, 4)
    assert not torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert trace(operator, 4) == third


X, Y = torch.randn(4, 3), torch.zeros(4).long()
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "iterator": (lambda: GGN(nn.Linear(3, 2), "classification", iter([(X, Y)])), "only once"),
    "no loader": (lambda: GGN(nn.Linear(3, 2), "classification", 3), "iterable of batches"),  # type: ignore[arg-type]
    "empty": (lambda: GGN(nn.Linear(3, 2), "classification", []).matmul(torch.ones(8, 1)), "The loader is empty"),
    "shape": (lambda: GGN(nn.Linear(3, 2), "classification", [(X, Y)]).matmul(torch.ones(8)), r"\[8, k\]"),
    "targets": (lambda: GGN(nn.Linear(3, 2), "classification", [(X, Y[:2])]).matmul(torch.ones(8, 1)), "2 targets for 4"),
    "nan": (lambda: GGN(nn.Linear(3, 2), "classification", [(X / 0, Y)]).matmul(torch.ones(8, 1)), "Batch 0.*NaN or inf"),
    "dtype": (lambda: GGN(nn.Linear(3, 2), "classification", [(X.double(), Y)]).matmul(torch.ones(8, 1)), "input of dtype"),
    "detached": (lambda: GGN(_Detached(), "classification", [(X, Y)]).matmul(torch.ones(8, 1)), "through autograd"),
    "one sample": (lambda: trace(some(), 1), "at least 2 samples"),
    "probes": (lambda: trace(some(), torch.ones(3, 4)), r"\[40, s\]"),
    "shift": (lambda: log_det(some(), 0.0), "shift must be positive"),
    "steps": (lambda: log_det(some(), 1.0, steps=0), "at least 1"),
    "indefinite": (lambda: log_det(Dense(-some().matrix), 1.0), "positive semidefinite"),
}  # fmt: skip


class _Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).detach()


@pytest.mark.parametrize("case", BAD)
def test_error_names_the_culprit(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(InputError, match=message):
        call()
