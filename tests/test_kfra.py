"""KFRA: exact for one example and for linear networks; for batches, explicit loops over the recursion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lapwing import Gaussian, InputError, Laplace
from lapwing.curvature.kronecker import KroneckerAccumulator
from lapwing.curvature.steps import _ELEMENTWISE
from lapwing.tape import Record
from tests import networks, oracles


class Residual(nn.Module):
    """Residual blocks, one inside the other's branch, and a skip around both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 4, bias=False)
        self.three, self.four = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        y = x + self.two(functional.gelu(self.one(x)))
        z = y + functional.silu(self.three(y + torch.sigmoid(self.four(y))))
        return self.head(z - 0.5 * x)


class InPlace(nn.Module):
    """In-place and functional variants, views, an operation of every spelling."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.drop, self.head = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)
        self.gain, self.activation = nn.Parameter(torch.tensor([0.5, 1.0, 1.5, 2.0])), nn.PReLU()
        with torch.no_grad():
            self.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
            self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = functional.leaky_relu(self.one(x), 0.2, inplace=True)
        y = self.two(x)
        y += x
        y = self.drop(self.norm(y)).view(-1, 2, 2).flatten(1)
        y = (y + 1.0).mul_(self.gain)
        z = functional.softplus(self.three(y).unsqueeze(1)).squeeze(1)
        y = self.activation(2.0 - y / 3) * z.clamp(max=2.0)  # both factors depend on weights
        return self.head(torch.where(y > 0, y, functional.elu(z)) + (-z).exp())


class Functional(nn.Module):
    """Products that are no layers, and a weight that is made of others (so it takes the exact path)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.fixed, self.head = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(x)) @ self.fixed
        x = torch.addmm(torch.ones(4, dtype=x.dtype), self.two(torch.tanh(x)), self.fixed.detach().T, alpha=0.7)
        return self.head(torch.tanh(x))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(x))
        x = torch.utils.checkpoint.checkpoint(lambda h: torch.tanh(self.two(h)) + h, x, use_reentrant=False)
        return self.head(x)


class FrozenConvolution(nn.Module):
    """What lies before all Bayesian weights may be anything."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv1d(1, 2, 2).requires_grad_(False)
        self.one, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.one(functional.layer_norm(self.features(x.unsqueeze(1)).flatten(1), [4]))))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": networks.mlp,
    "tied": networks.Tied,
    "batchnorm": networks.BatchNormed,
    "residual": Residual,
    "in-place": InPlace,
    "functional": Functional,
    "checkpointed": Checkpointed,
    "frozen convolution": FrozenConvolution,
}


def make(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETWORKS[name]().double()


def data(likelihood: str, *sizes: int) -> list[Any]:
    count = sum(sizes)
    return networks.batches(networks.inputs("mlp", count), networks.targets(likelihood, count), *sizes)


def fit(model: nn.Module, batches: list[Any], likelihood: Any = "classification", **options: Any) -> Laplace:
    return Laplace(model, likelihood, progress=False, **({"curvature": "kfra"} | options)).fit(batches)


def matrices(la: Laplace) -> dict[str, Tensor]:
    return {block.name: block.accumulator.matrix() for block in la.curvature.blocks}


def factor(la: Laplace, name: str) -> Tensor:
    """G of a layer: `[O, O]`."""
    (block,) = (block for block in la.curvature.blocks if block.name == name)
    assert isinstance(block.accumulator, KroneckerAccumulator)
    return block.accumulator.outputs[0]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])
def test_batches_of_one_example_give_the_exact_factors(network: str, likelihood: str) -> None:
    """Also of the blocks without Kronecker form, which take exact columns at any batch size."""
    model, batches = make(network), data(likelihood, *[1] * 6)
    found, expected = fit(model, batches, likelihood), fit(model, batches, likelihood, curvature="ggn")
    for name, matrix in matrices(expected).items():
        torch.testing.assert_close(matrices(found)[name], matrix, rtol=1e-10, atol=1e-12)
    whole = fit(model, data(likelihood, 6), likelihood)
    for block in whole.curvature.blocks:
        if block.accumulator.kind != "kron":
            torch.testing.assert_close(
                block.accumulator.matrix(), matrices(expected)[block.name], rtol=1e-10, atol=1e-12
            )


# Each function of two activations; those of one ignore the second.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": lambda x, y: torch.add(x, y, alpha=0.5), "Sub": lambda x, y: x - y, "Rsub": lambda x, y: 2 - x,
    "Mul": lambda x, y: x * y, "Div": lambda x, y: x / (2 + y), "Neg": lambda x, y: -x, "Pow": lambda x, y: x**3,
    "Lerp": lambda x, y: torch.lerp(x, y, 0.3), "Addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "Where": lambda x, y: torch.where(x > y, x, y), "Maximum": torch.maximum, "Minimum": torch.minimum,
    "Exp": lambda x, y: x.exp(), "Expm1": lambda x, y: x.expm1(), "Log": lambda x, y: (3 + x).log(),
    "Log1P": lambda x, y: (2 + x).log1p(), "Sqrt": lambda x, y: (3 + x).sqrt(), "Rsqrt": lambda x, y: (3 + x).rsqrt(),
    "Reciprocal": lambda x, y: (3 + x).reciprocal(), "Abs": lambda x, y: x.abs(), "Sin": lambda x, y: x.sin(),
    "Cos": lambda x, y: x.cos(), "Erf": lambda x, y: x.erf(), "Tanh": lambda x, y: x.tanh(),
    "Sigmoid": lambda x, y: x.sigmoid(), "LogSigmoid": lambda x, y: functional.logsigmoid(x),
    "Relu": lambda x, y: x.relu(), "LeakyRelu": lambda x, y: functional.leaky_relu(x, 0.3),
    "PreluKernel": lambda x, y: functional.prelu(x, torch.tensor([0.3]).double()),
    "RreluWithNoise": lambda x, y: functional.rrelu(x), "Elu": lambda x, y: functional.selu(x),
    "Celu": lambda x, y: functional.celu(x, 0.7), "Gelu": lambda x, y: functional.gelu(x, approximate="tanh"),
    "Silu": lambda x, y: functional.silu(x), "Mish": lambda x, y: functional.mish(x),
    "Softplus": lambda x, y: functional.softplus(x, 2.0), "Hardtanh": lambda x, y: functional.hardtanh(x, -0.2, 0.2),
    "Hardswish": lambda x, y: functional.hardswish(x), "Hardsigmoid": lambda x, y: functional.hardsigmoid(x),
    "Hardshrink": lambda x, y: functional.hardshrink(x, 0.1), "Softshrink": lambda x, y: functional.softshrink(x, 0.1),
    "Threshold": lambda x, y: functional.threshold(x, 0.1, 0.0), "Clamp": lambda x, y: x.clamp(-0.2, 0.3),
    "ClampMin": lambda x, y: x.clamp_min(0.1), "ClampMax": lambda x, y: x.clamp_max(0.1),
    "Clone": lambda x, y: x.clone(), "ToCopy": lambda x, y: x.float().double(),
    "NativeBatchNorm": lambda x, y: functional.batch_norm(x, x.new_ones(4), x.new_full((4,), 2.0)),
    "View": lambda x, y: x.view(-1, 2, 2).flatten(1), "UnsafeView": lambda x, y: torch.ops.aten._unsafe_view(x, [1, 4]),
    "ReshapeAlias": lambda x, y: torch.ops.aten._reshape_alias(x, [1, 4], [4, 1]),
    "Squeeze": lambda x, y: x.view(-1, 1, 4).squeeze(1), "Unsqueeze": lambda x, y: x.unsqueeze(-1).view(-1, 4),
}  # fmt: skip


def test_every_elementwise_function_is_tried() -> None:
    assert set(FUNCTIONS) == _ELEMENTWISE


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementwise_functions(name: str) -> None:
    function = FUNCTIONS[name]
    model = network(
        lambda m, x: m.head(function(m.one(x), torch.tanh(m.other(x))) + 0 * m.other(x)), other=nn.Linear(3, 4)
    )
    ((x, _),) = data("classification", 1)
    assert any(f"{name}Backward" in node for node in _nodes(model(x).grad_fn)), "autograd calls it otherwise"
    batches = data("classification", 1, 1, 1)
    exact = matrices(fit(model, batches, curvature="ggn"))
    tolerance = 1e-6 if name == "ToCopy" else 1e-10  # through float32
    for layer, matrix in matrices(fit(model, batches)).items():
        torch.testing.assert_close(matrix, exact[layer], rtol=tolerance, atol=1e-2 * tolerance)


def _nodes(node: Any) -> set[str]:
    return {node.name()}.union(*(_nodes(child) for child, _ in node.next_functions if child is not None))


@pytest.mark.parametrize("network", ["mlp", "residual"])
def test_one_example_is_the_block_of_the_ggn(network: str) -> None:
    model, batches = make(network), data("classification", 1)
    exact = fit(model, batches, curvature="ggn", structure="block")
    for name, matrix in matrices(fit(model, batches)).items():
        torch.testing.assert_close(matrix, matrices(exact)[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layer", ["stem", "one", "two", "three", "four", "head"])
def test_pre_activation_hessian_of_one_example(layer: str) -> None:
    """`Jᵀ Λ J` with the derivative of the outputs in the layer's own output, by plain autograd."""
    model = make("residual").eval()
    ((x, y),) = data("classification", 1)
    seen: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda _, args, output: seen.append(output))
    outputs = model(x)
    handle.remove()
    rows = torch.cat([torch.autograd.grad(value, seen[0], retain_graph=True)[0] for value in outputs[0]])
    la = fit(model, [(x, y)])
    expected = rows.T @ oracles.output_hessians(la.likelihood, outputs, y)[0] @ rows
    torch.testing.assert_close(factor(la, layer), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("activation", [torch.tanh, torch.relu, functional.gelu, functional.softplus])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_recursion_of_a_plain_network_example_by_example(activation: Any, likelihood: str) -> None:
    """Eq. 15 without D: `mean_n[B_n Wᵀ 𝓗 W B_n]`, the mean 𝓗 of the batch passed on."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:-1]:
                x = activation(layer(x))
            return self.layers[-1](x)

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Network().double()
    batches = data(likelihood, 5, 3)
    la = fit(model, batches, likelihood)
    totals = [torch.zeros(size, size, dtype=torch.float64) for size in (4, 6, 5, 3)]
    for x, y in batches:
        hiddens, a = [], x
        for layer in model.layers:
            hiddens.append(layer(a).detach())
            a = activation(hiddens[-1])
        hessian = oracles.output_hessians(la.likelihood, hiddens[-1], y).mean(0)
        totals[3] += len(x) * hessian
        for depth in (2, 1, 0):
            weight = model.get_parameter(f"layers.{depth + 1}.weight").detach()
            terms = []
            for h in hiddens[depth]:
                slope = torch.func.vmap(torch.func.grad(activation))(h)
                terms.append(torch.diag(slope) @ weight.T @ hessian @ weight @ torch.diag(slope))
            hessian = torch.stack(terms).mean(0)
            totals[depth] += len(x) * hessian
    for depth, expected in enumerate(totals):
        torch.testing.assert_close(factor(la, f"layers.{depth}"), expected, rtol=1e-10, atol=1e-12)


class Block(nn.Module):
    """`head(a + two(tanh(one(a))))` with `a = stem(x)`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.stem(x)
        return self.head(a + self.two(torch.tanh(self.one(a))))


@pytest.mark.parametrize("residual", ["cross", "sum"])
def test_residual_block_by_hand(residual: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Block().double()
    ((x, y),) = data("classification", 7)
    la = fit(model, [(x, y)], kfra_residual=residual)
    weights = {name: model.get_parameter(f"{name}.weight").detach() for name in ("stem", "head", "one", "two")}
    hessian = oracles.output_hessians(la.likelihood, oracles.evaluate(model, x), y).mean(0)
    after = weights["head"].T @ hessian @ weights["head"]  # of a + two(...), so also of the output of two
    slopes = 1 - torch.tanh(model.one(model.stem(x))).detach().square()
    squares = torch.einsum("nd,ne->de", slopes, slopes) / 7
    one = squares * (weights["two"].T @ after @ weights["two"])
    cross = torch.diag(slopes.mean(0)) @ weights["two"].T @ after  # between the output of one and a
    cross = weights["one"].T @ cross
    stem = after + weights["one"].T @ one @ weights["one"]
    if residual == "cross":
        stem = stem + cross + cross.T
    for name, expected in {"head": hessian, "two": after, "one": one, "stem": stem}.items():
        torch.testing.assert_close(factor(la, name), 7 * expected, rtol=1e-10, atol=1e-12)


def test_adding_branches_drops_cross_terms() -> None:
    """At batch size one the default is exact and the sum is not; without branches both are the same."""
    model, batches = make("residual"), data("classification", 1, 1, 1)
    exact = fit(model, batches, curvature="ggn")
    simple = fit(model, batches, kfra_residual="sum")
    assert (factor(simple, "stem") - factor(exact, "stem")).norm() > 0.01 * factor(exact, "stem").norm()
    plain = make("mlp")
    for name, matrix in matrices(fit(plain, batches)).items():
        torch.testing.assert_close(matrices(fit(plain, batches, kfra_residual="sum"))[name], matrix)


def test_linear_networks_are_exact_at_any_batch_size() -> None:
    class DeepLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            return self.three(x - 2 * self.two(x))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = DeepLinear().double()
    for likelihood in ("classification", "regression"):
        batches = data(likelihood, 4, 3)
        exact = fit(model, batches, likelihood, curvature="ggn")
        for name, matrix in matrices(fit(model, batches, likelihood)).items():
            torch.testing.assert_close(matrix, matrices(exact)[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("residual", ["cross", "sum"])
def test_factors_are_positive_semi_definite(network: str, residual: str) -> None:
    la = fit(make(network), data("classification", 9), kfra_residual=residual)
    for block in la.curvature.blocks:
        values = torch.linalg.eigvalsh(block.accumulator.matrix())
        assert float(values[0]) >= -1e-12 * float(values[-1])
    assert torch.isfinite(la.log_evidence())


def test_no_vector_is_backpropagated(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = Record.sweep

    def refuse(self: Record, columns: Any, consume: Any, *others: Any) -> None:
        assert consume is None, "a backward pass of columns"  # that of the gradient of the data is not
        sweep(self, columns, consume, *others)

    monkeypatch.setattr(Record, "sweep", refuse)
    fit(make("residual"), data("classification", 4, 2), max_columns=1)


def test_some_weights_and_large_sides() -> None:
    """Linear layers that are not Bayesian are passed; a side above `max_factor` keeps its diagonal."""
    model, batches = make("residual"), data("classification", 1, 1)
    whole = fit(model, batches)
    some = fit(model, batches, weights=["stem.*", "three.weight"])
    assert [block.name for block in some.curvature.blocks] == ["stem", "three"]
    torch.testing.assert_close(factor(some, "stem"), factor(whole, "stem"))
    torch.testing.assert_close(factor(some, "three"), factor(whole, "three"))
    small = fit(model, batches, max_factor=4)
    torch.testing.assert_close(factor(small, "one"), factor(whole, "one").diagonal())


def test_split_data_and_files(tmp_path: Path) -> None:
    model, batches = make("residual"), data("regression", 4, 3)
    la = fit(model, batches, Gaussian(0.5), kfra_residual="sum")
    halves = [fit(model, [batch], Gaussian(0.5), kfra_residual="sum") for batch in batches]
    torch.testing.assert_close(halves[0].merge(halves[1]).log_evidence(), la.log_evidence())
    la.save(tmp_path / "posterior.safetensors")
    back = Laplace.load(tmp_path / "posterior.safetensors", model)
    assert (back.curvature_kind, back.kfra_residual) == ("kfra", "sum")
    assert torch.equal(back.log_evidence(), la.log_evidence())


def test_trained_network_on_digits() -> None:
    """Real data, float32: close to the exact Kronecker factors where it counts."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _Digits()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-4)
        for step in range(120):
            part = slice(200 * (step % 6), 200 * (step % 6) + 200)
            optimizer.zero_grad()
            functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    batches = [(x[i : i + 100], y[i : i + 100]) for i in range(0, 1200, 100)]
    kfra, exact = fit(model, batches), fit(model, batches, curvature="ggn")
    kfra.tune_prior()
    assert torch.isfinite(kfra.log_evidence())
    found = kfra.predict(x[1200:])
    accuracy = float((found.labels == y[1200:]).double().mean())  # type: ignore[attr-defined]
    assert accuracy > 0.85
    assert bool(torch.isfinite(found.log_prob(y[1200:])).all())
    other = exact.at(prior=kfra.prior).predict(x[1200:])
    assert float((found.probs - other.probs).abs().mean()) < 0.02  # type: ignore[attr-defined]
    for name in ("stem", "one", "head"):
        assert 0.2 < float(factor(kfra, name).trace() / factor(exact, name).trace()) < 5


class _Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.head = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        return self.head(x + torch.relu(self.one(x)))


def network(forward: Callable[..., Tensor], **modules: nn.Module) -> nn.Module:
    class Network(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Network()
        for name, module in ({"one": nn.Linear(3, 4), "head": nn.Linear(4, 3)} | modules).items():
            model.add_module(name, module)
    return model.double()


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * g


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "convolution": (
        network(lambda m, x: m.head(m.conv(m.one(x).unsqueeze(1)).flatten(1)), conv=nn.Conv1d(1, 1, 3, padding=1)),
        "the convolution 'conv'",
    ),
    "frozen convolution between": (
        network(
            lambda m, x: m.head(m.conv(m.one(x).unsqueeze(1)).flatten(1)),
            conv=nn.Conv1d(1, 1, 3, padding=1).requires_grad_(False),
        ),
        "'convolution' past layer 'one'",
    ),
    "layer norm": (
        network(lambda m, x: m.head(m.norm(m.one(x))), norm=nn.LayerNorm(4)),
        "'native_layer_norm' past layer 'one'",
    ),
    "softmax": (network(lambda m, x: m.head(m.one(x).softmax(-1))), "'softmax' past layer 'one'"),
    "cat": (network(lambda m, x: m.head(torch.cat([m.one(x)[:, :1], x], 1))), "'cat' past layer 'one'"),
    "split": (
        network(lambda m, x: m.head(torch.cat([t.tanh() for t in m.one(x).split([1, 3], 1)], 1))),
        "'cat' past layer 'one'",
    ),
    "second of a split": (
        network(lambda m, x: m.head(m.one(x).chunk(2, 1)[1].tanh()), head=nn.Linear(2, 3)),
        "'split' past layer 'one'",
    ),
    "in-place change of a view": (
        network(lambda m, x: m.head(m.one(x).unflatten(1, (2, 2)).flatten(1).mul_(2))),
        "'in-place change of a view' past layer 'one'",
    ),
    "broadcasting": (
        network(lambda m, x: m.head(m.gate(x) * torch.tanh(m.one(x))), gate=nn.Linear(3, 1)),
        "'mul' past layer",
    ),
    "transposed product": (
        network(lambda m, x: m.head((torch.eye(4).double() @ m.one(x).T).T)),
        "'permute' past layer 'one', between tensors of shapes [[5, 4], [4, 5]]",
    ),
    "function of the user's": (
        network(lambda m, x: m.head(_Double.apply(m.one(x)))),
        "'_double' past layer 'one'",
    ),
    "positions": (
        network(lambda m, x: m.head(torch.tanh(m.one(x.unsqueeze(1).expand(-1, 2, 3)))).mean(1)),
        "shape",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_with_the_ways_out(case: str) -> None:
    model, culprit = REFUSED[case]
    with pytest.raises(InputError, match="curvature='kfra' passes") as error:
        fit(model, data("classification", 5))
    assert culprit in str(error.value)
    assert "curvature='ggn' (exact), 'rademacher' or 'fisher'" in str(error.value)


def test_batch_norm_without_running_statistics() -> None:
    """Where it couples examples no layer before it is a pair; in a batch of one it couples features."""
    norm = nn.BatchNorm1d(2, affine=False, track_running_stats=False)
    model = network(lambda m, x: m.head(m.norm(m.one(x).view(-1, 2, 2)).flatten(1)), norm=norm)
    with pytest.raises(InputError, match="the batch norm without running statistics past layer 'one'"):
        fit(model, data("classification", 1))


def test_wrong_options() -> None:
    model = make("mlp")
    for structure in ("diag", "ekfac", "block", "full"):
        with pytest.raises(InputError, match="needs structure='kron'"):
            Laplace(model, "classification", structure, "kfra")
    with pytest.raises(InputError, match="Unknown kfra_residual"):
        Laplace(model, "classification", curvature="kfra", kfra_residual="add")
    with pytest.raises(InputError, match="kron='reduce' needs the terms between the 2 uses"):
        fit(make("tied"), data("classification", 3), kron="reduce")
    fit(model, data("classification", 3), kron="reduce")  # one use: the same as expand


def test_the_model_comes_back_as_it_was() -> None:
    model = make("in-place").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    fit(model, data("classification", 5))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
