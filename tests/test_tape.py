"""What the tape sees: which path each parameter takes, which axis holds the examples, which weights are Bayesian."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lapwing import Laplace
from lapwing.batches import Inputs
from lapwing.guard import borrowed
from lapwing.layers import ExampleAxis
from lapwing.tape import Tape
from lapwing.weights import select
from tests import networks, oracles


def fitted(network: str, n: int = 5, **options: Any) -> Laplace:
    data = [(networks.inputs(network, n), networks.targets("classification", n))]
    return Laplace(networks.make(network), "classification", **options).fit(data)


def paths(la: Laplace) -> dict[str, str]:
    return {layer.name: layer.path for block in la.curvature.blocks for layer in block.layers}


def test_paths() -> None:
    assert paths(fitted("cnn")) == {"first": "convolution", "second": "convolution", "head": "linear"}
    assert paths(fitted("tied")) == {"shared": "linear", "head": "linear"}
    assert paths(fitted("batchnorm")) == {"linear": "linear", "norm": "norm", "head": "linear"}
    assert paths(fitted("attention")) == {
        "position": "fallback",  # enters a layer that mixes it
        "gain": "scale",
        "project": "linear",  # its input has no example axis, but what it is added to has
        "attention.in_proj_weight": "linear",
        "attention.out_proj": "linear",
        "norm": "norm",
        "head": "linear",
    }
    assert paths(fitted("tied-embedding"))["embedding"] == "embedding and linear"
    assert set(paths(fitted("lstm")).values()) == {"fallback", "linear"}
    for network in ("upsampling", "norms", "scaled", "tokens", "bags", "products", "cross-attention"):
        assert "fallback" not in paths(fitted(network)).values(), network
    assert paths(fitted("sequence-first")) == {"first": "linear", "second": "linear", "head": "linear"}


def test_summary_names_the_path() -> None:
    assert "fallback (loop)" in fitted("gru").summary()
    assert "fallback (vmap)" in fitted("attention").summary()
    table = fitted("cnn").summary()
    assert "convolution" in table
    assert "first" in table
    assert "multiplies the likelihood" in table


@pytest.mark.parametrize("n", [3, 4, 6])
def test_example_axes(n: int) -> None:
    """`[L, N, D]` and `[L·N, D]`, also where L = N."""
    model = networks.make("sequence-first")
    tape = Tape(model, select(model, "all"))
    with borrowed(model, select(model, "all")):
        record = tape.record(Inputs((networks.inputs("sequence-first", n),), {}))
    assert record.axes == (ExampleAxis(1), ExampleAxis(0, inner=True), ExampleAxis(0))


def test_single_examples_and_ragged_batches() -> None:
    for network in ("cnn", "sequence-first", "attention"):
        x, y = networks.inputs(network, 6), networks.targets("classification", 6)
        whole = Laplace(networks.make(network), "classification", "diag").fit([(x, y)])
        parts = Laplace(networks.make(network), "classification", "diag").fit(networks.batches(x, y, 4, 1, 1))
        for left, right in zip(whole.curvature.blocks, parts.curvature.blocks, strict=True):
            torch.testing.assert_close(left.accumulator.matrix(), right.accumulator.matrix())


class Shared(nn.Module):
    """A layer whose input is shared by all examples, and enters in a way that hides it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * torch.tanh(self.project(torch.ones(1, 3, dtype=x.dtype))))


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_coupling_hidden_by_a_first_batch_of_one(structure: str) -> None:
    """`project` has no example axis: a pair in a batch of one, and in larger ones one example after another."""
    x, y = networks.inputs("mlp", 6), networks.targets("classification", 6)
    data, model = networks.batches(x, y, 1, 2, 3), Shared().double()
    la = Laplace(model, "classification", structure).fit(data)
    assert paths(la)["project"] == "linear"
    expected, found = oracles.curvature(la, data), [block.accumulator.matrix() for block in la.curvature.blocks]
    torch.testing.assert_close(
        torch.block_diag(*found), expected if structure == "full" else torch.diag(expected.diagonal())
    )
    usual = Laplace(model, "classification", structure).fit([(x, y)])
    torch.testing.assert_close(la.latent(x).covariance, usual.latent(x).covariance)
    with pytest.raises(ValueError, match="'project' was read as .* couples or reorders"):
        la.latent(x, joint=True)


def test_examples_that_interact_are_an_error() -> None:
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            return self.head(hidden - hidden.mean(0))

    torch.manual_seed(0)
    x, y = networks.inputs("mlp", 3), networks.targets("classification", 3)
    with pytest.raises(ValueError, match="examples of this batch interact"):
        Laplace(Centered().double(), "classification", "diag").fit(networks.batches(x, y, 1, 2))


class Routed(nn.Module):
    """Every example goes to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = nn.ModuleList(nn.Linear(3, 3) for _ in range(2)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen, mixed = (x[:, 0] > 0).long(), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mixed = mixed.index_put((chosen == i,), torch.tanh(expert(x[chosen == i])))
        return self.head(mixed)


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_experts_that_see_some_of_the_examples(structure: str) -> None:
    """The first batch goes to the first expert as a whole; later ones are divided, or leave it without any."""
    torch.manual_seed(0)
    model = Routed().double()
    x, y = networks.inputs("mlp", 9), networks.targets("classification", 9)
    x[:3, 0], x[3:6, 0], x[6:, 0] = -1, torch.tensor([-1.0, 1.0, 1.0]).double(), 1
    data = networks.batches(x, y, 3, 3, 3)
    la = Laplace(model, "classification", structure).fit(data)
    assert paths(la)["experts.0"] == "linear"
    if structure == "kron":  # one position per example: the factors of the four examples that came
        own = Laplace(nn.Sequential(model.experts[0], nn.Tanh(), model.head), "classification")  # type: ignore[arg-type,index]
        expected = own.fit([(x[:4], y[:4])]).curvature.blocks[0].accumulator.matrix()
        torch.testing.assert_close(la.curvature.blocks[0].accumulator.matrix(), expected)
        return
    exact, found = oracles.curvature(la, data), [block.accumulator.matrix() for block in la.curvature.blocks]
    torch.testing.assert_close(torch.block_diag(*found), exact if structure == "full" else torch.diag(exact.diagonal()))
    rows, matrix = oracles.packed_jacobian(la, x[2:5]), torch.block_diag(*found)
    inverse = torch.linalg.inv(matrix + torch.eye(len(matrix), dtype=torch.float64))
    torch.testing.assert_close(la.latent(x[2:5]).covariance, torch.einsum("nci,ij,ndj->ncd", rows, inverse, rows))


class Reshaped(nn.Module):
    """The last layer's output is scaled and reshaped afterwards; a side head is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 6)
        self.side = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.body(x))
        self.side(features)
        return 2 * self.head(features).view(-1, 3, 2).sum(-1)


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "block", "full"])
def test_last_layer(structure: str) -> None:
    torch.manual_seed(0)
    for model in (networks.make("mlp"), Reshaped().double()):
        x, y = networks.inputs("mlp", 6), networks.targets("classification", 6)
        la = Laplace(model, "classification", structure, weights="last_layer").fit([(x[:4], y[:4]), (x[4:], y[4:])])
        name = "head" if isinstance(model, Reshaped) else "2"
        assert la.curvature.parameters == (f"{name}.weight", f"{name}.bias")
        named = Laplace(model, "classification", structure, weights=f"{name}.*").fit([(x, y)])
        assert float(la.log_evidence()) == pytest.approx(float(named.log_evidence()), rel=1e-10)
        if structure == "full":
            torch.testing.assert_close(la.curvature.blocks[0].accumulator.matrix(), oracles.curvature(la, [(x, y)]))


def test_last_layer_computes_the_features_once() -> None:
    """One forward pass a batch, and no graph before the last layer."""
    calls: list[bool] = []
    model = networks.make("mlp")
    model[0].register_forward_hook(lambda module, args, out: calls.append(out.requires_grad))  # type: ignore[index]
    x, y = networks.inputs("mlp", 6), networks.targets("classification", 6)
    Laplace(model, "classification", weights="last_layer").fit(networks.batches(x, y, 3, 3))
    assert calls[1:] == [False, False]  # after the one that finds the last layer
    la = Laplace(model, "classification", weights="2.*").fit([(x, y)])
    calls.clear()
    la.predict(x)
    assert calls == [False]


def test_last_layer_of_a_loader_that_is_read_once() -> None:
    x, y = networks.inputs("mlp", 6), networks.targets("classification", 6)
    la = Laplace(networks.make("mlp"), "classification", weights="last_layer").fit(iter(networks.batches(x, y, 3, 3)))
    assert la.curvature.examples == 6


def test_globs_and_frozen_parameters() -> None:
    x, y = networks.inputs("mlp", 6), networks.targets("classification", 6)
    model = networks.make("mlp")
    la = Laplace(model, "classification", "full", weights="*.weight").fit([(x, y)])
    assert la.curvature.parameters == ("0.weight", "2.weight")
    torch.testing.assert_close(la.curvature.blocks[0].accumulator.matrix(), oracles.curvature(la, [(x, y)]))
    model[0].requires_grad_(False)  # type: ignore[index]
    la = Laplace(model, "classification", "full").fit([(x, y)])
    assert la.curvature.parameters == ("2.weight", "2.bias")
    model.requires_grad_(True)
    model[0].weight.requires_grad_(False)  # type: ignore[index,union-attr,operator]
    la = Laplace(model, "classification", "full").fit([(x, y)])
    assert la.curvature.parameters == ("0.bias", "2.weight", "2.bias")
    torch.testing.assert_close(la.curvature.blocks[0].accumulator.matrix(), oracles.curvature(la, [(x, y)]))
    drawn = la.sample(2)
    assert {name: value.shape for name, value in drawn.items()} == {
        name: (2, *model.get_parameter(name).shape) for name in la.curvature.parameters
    }


class Branches(nn.Module):
    """Some batches do not reach one of the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.left(x) if float(x.detach()[0, 0]) > 0 else self.right(x) * self.gain
        return self.head(torch.tanh(x))


def test_branches_that_some_batches_do_not_reach() -> None:
    torch.manual_seed(0)
    model = Branches().double()
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    order = x[:, 0].argsort(descending=True)
    positive = int((x[:, 0] > 0).sum())
    data = [(x[order[:positive]], y[order[:positive]]), (x[order[positive:]], y[order[positive:]])]
    for structure in ("diag", "full"):
        la = Laplace(model, "classification", structure).fit(data)
        expected = oracles.curvature(la, data)
        found = torch.block_diag(*[block.accumulator.matrix() for block in la.curvature.blocks])
        torch.testing.assert_close(found, expected if structure == "full" else torch.diag(expected.diagonal()))


def test_in_place_and_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True))
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    torch.manual_seed(0)
    model = Checkpointed().double()
    data = [(networks.inputs("mlp", 5), networks.targets("classification", 5))]
    la = Laplace(model, "classification", "full").fit(data)
    torch.testing.assert_close(la.curvature.blocks[0].accumulator.matrix(), oracles.curvature(la, data))


def test_batches_of_every_form() -> None:
    model = networks.make("mlp")
    x, y = networks.inputs("mlp", 5), networks.targets("classification", 5)
    expected = float(Laplace(model, "classification").fit([(x, y)]).log_evidence())

    class Returned:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor, shift: Tensor | None = None) -> Any:
            return Returned(self.inner(x if shift is None else x + shift))

    loaders: list[tuple[Any, dict[str, Any]]] = [
        ([[x, y]], {}),
        ([(x, torch.zeros_like(x), y)], {}),
        ([{"x": x, "labels": y}], {}),
        ([{"x": x, "shift": torch.zeros(3, dtype=torch.float64), "labels": y}], {}),
        ([(y, x)], {"unpack": lambda batch: ((batch[1],), {}, batch[0])}),
        ([(x, y)], {"output": lambda returned: returned.logits}),
    ]
    for loader, options in loaders:
        la = Laplace(Wrapped(), "classification", **options).fit(loader)
        assert float(la.log_evidence()) == pytest.approx(expected, rel=1e-12)
        assert la.predict({"x": x}).probs.shape == la.predict((x,)).probs.shape == (5, 3)


def test_data_parallel_is_unwrapped_and_compiled_modules_run_eagerly() -> None:
    model = networks.make("mlp")
    data = [(networks.inputs("mlp", 5), networks.targets("classification", 5))]
    expected = float(Laplace(model, "classification").fit(data).log_evidence())
    assert float(Laplace(nn.DataParallel(model), "classification").fit(data).log_evidence()) == pytest.approx(expected)
    compiled = torch.compile(model)
    assert float(Laplace(compiled, "classification").fit(data).log_evidence()) == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = networks.make("cnn").to(dtype)
    x, y = networks.inputs("cnn", 6).to(dtype), networks.targets("classification", 6)
    reference = Laplace(networks.make("cnn"), "classification").fit([(x.double(), y)])
    la = Laplace(model, "classification").fit([(x, y)])
    assert la.curvature.blocks[0].accumulator.tensors()["inputs"].dtype == torch.float32
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert float(la.log_evidence()) == pytest.approx(float(reference.log_evidence()), rel=tolerance)
    probs = la.predict(x).probs
    assert probs.dtype == dtype
    torch.testing.assert_close(probs.double(), reference.predict(x.double()).probs, rtol=0, atol=tolerance)


class Sorted(nn.Module):
    """Examples in an order that depends on the data, as for packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True, stable=True)
        return self.head(torch.tanh(self.encode(x[order]))[order.argsort()])


def test_examples_in_an_order_of_the_data() -> None:
    torch.manual_seed(0)
    model = Sorted().double()
    x, y = networks.inputs("mlp", 4), networks.targets("classification", 4)
    ordered, mixed = torch.tensor([4, 3, 2, 1]), torch.tensor([2, 4, 1, 3])
    plain = Laplace(model, "classification", "full").fit([(x, ordered, y)])
    assert paths(plain) == {"encode": "linear", "head": "linear"}
    reordered = Laplace(model, "classification", "full").fit([(x, mixed, y)])
    assert paths(reordered) == {"encode": "fallback", "head": "linear"}
    assert float(plain.log_evidence()) == pytest.approx(float(reordered.log_evidence()), rel=1e-12)
    torch.testing.assert_close(plain.latent((x, ordered)).covariance, reordered.latent((x, mixed)).covariance)
    torch.testing.assert_close(reordered.latent((x, ordered)).covariance, reordered.latent((x, mixed)).covariance)
    torch.testing.assert_close(plain.latent((x, mixed)).covariance, reordered.latent((x, mixed)).covariance)
    both = Laplace(model, "classification", "full").fit([(x, ordered, y), (x, mixed, y)])
    assert paths(both)["encode"] == "linear"
    torch.testing.assert_close(
        both.curvature.blocks[0].accumulator.matrix(), 2 * plain.curvature.blocks[0].accumulator.matrix()
    )


def test_a_first_batch_without_gradient_decides_nothing() -> None:
    """All units dead on the first batch, `[L, N, D]` with L = N: the axis is found on the second."""

    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(2, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.first(x.transpose(0, 1)))  # [L, N, 3]
            return self.head(torch.tanh(hidden.cumsum(0))[-1])

    torch.manual_seed(0)
    model = Dead().double()
    x, y = networks.inputs("lstm", 6), networks.targets("classification", 6)
    with torch.no_grad():
        model.first.bias.fill_(0.5)
        model.first.weight.copy_(torch.eye(3, 2))
        model.first.weight[2] = 1
    x[:3] = -9 - x[:3].abs()
    data = [(x[:3], y[:3]), (x[3:], y[3:])]
    la = Laplace(model, "classification", "full").fit(data)
    assert paths(la)["first"] == "linear"
    torch.testing.assert_close(la.curvature.blocks[0].accumulator.matrix(), oracles.curvature(la, data))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_example_axes_in_few_bits(dtype: torch.dtype) -> None:
    for width in range(1, 20):
        torch.manual_seed(width)
        model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), _Last(), nn.Linear(width, 2)).to(dtype)
        parameters = select(model, "all")
        with borrowed(model, parameters):
            record = Tape(model, parameters).record(Inputs((torch.randn(2, 2, 3, dtype=dtype),), {}))
        assert record.axes == (ExampleAxis(1), ExampleAxis(0))


class _Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0)


def test_unbatched_convolution_takes_the_fallback() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 3, 2), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.stack([torch.tanh(self.conv(image)).mean((1, 2)) for image in x]))

    torch.manual_seed(0)
    model = Single().double()
    data = [(networks.inputs("cnn", 3), networks.targets("classification", 3))]
    la = Laplace(model, "classification", "full").fit(data)
    torch.testing.assert_close(la.curvature.blocks[0].accumulator.matrix(), oracles.curvature(la, data))


def test_last_layer_that_no_rule_reads_is_an_error() -> None:
    head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), head).double()
    x, y = networks.inputs("mlp", 4), networks.targets("classification", 4)
    with pytest.raises(ValueError, match="also depends on"):
        Laplace(model, "classification", weights="last_layer").fit([(x, y)])


def test_sums_in_half_precision_are_kept_in_float32() -> None:
    model = nn.Linear(2, 1).bfloat16()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    batch = (torch.ones(1, 2, dtype=torch.bfloat16), torch.full((1, 1), 0.5, dtype=torch.bfloat16))
    la = Laplace(model, "regression").fit([batch] * 1000)
    assert float(la.curvature.gradient["bias"]) == 500.0
    assert la.sample(3)["weight"].dtype == torch.bfloat16
    assert la.predict(batch[0], method="sampled", samples=2).mean.dtype == torch.bfloat16


def test_outputs_of_another_dtype_than_the_weights() -> None:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).double()

    torch.manual_seed(0)
    x, y = networks.inputs("mlp", 5).float(), networks.targets("classification", 5)
    model = Double()
    for structure in ("diag", "kron", "full"):
        la = Laplace(model, "classification", structure).fit([(x, y)])
        plain = Laplace(model.linear, "classification", structure).fit([(x, y)])
        torch.testing.assert_close(la.predict(x).probs.float(), plain.predict(x).probs)


@pytest.mark.parametrize("scales", [(1e-13, 1e-13), (1e-20, 1e-20)])
def test_tiny_gradients_do_not_look_like_coupled_examples(scales: tuple[float, float]) -> None:
    """Squares of gradients of 10⁻²⁶ are 0 in float32, gradients of 10⁻⁴⁰ have lost most of their digits."""

    class Faint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(3, 256), nn.Linear(256, 256), nn.Linear(256, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
            return self.head(hidden.detach() + scales[0] * (scales[1] * hidden))

    torch.manual_seed(0)
    model = Faint()
    data = [(torch.randn(n, 3), torch.arange(n) % 3) for n in (64, 32)]
    la = Laplace(model, "classification", "diag").fit(data)
    assert paths(la) == {"first": "linear", "second": "linear", "head": "linear"}


@pytest.mark.parametrize("cast", ["first", "slope"])
def test_models_that_cast_their_modules_on_the_way(cast: str) -> None:
    """`module.to(dtype)` assigns `.data`: torch 2.13 does not survive that under vmap."""

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.slope, self.head = nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.get_submodule(cast).to(x.dtype)
            return self.head(self.slope(self.first(x)))

    torch.manual_seed(0)
    model = Casting().double()
    data = [(networks.inputs("mlp", 4), networks.targets("classification", 4))]
    la = Laplace(model, "classification", "full").fit(data)
    assert "fallback (loop)" in la.summary()
    torch.testing.assert_close(la.curvature.blocks[0].accumulator.matrix(), oracles.curvature(la, data))


def test_float32_inside_a_float64_network() -> None:
    """Rounding to float32 on the way is not a coupling of examples."""

    class Rounding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
            self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = x + torch.tanh(layer(nn.functional.layer_norm(x.float(), (4,)).to(x.dtype)))
            return self.head(x)

    torch.manual_seed(0)
    data = [(networks.inputs("mlp", n), networks.targets("classification", n)) for n in (4, 3)]
    la = Laplace(Rounding().double(), "classification").fit(data)
    assert set(paths(la).values()) == {"linear"}


class Transposed(nn.Module):
    """Batch norm between transposed layouts, and a parameter that vmap refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.mix = nn.Linear(2, 3), nn.BatchNorm2d(3), nn.Linear(3, 3)
        self.conv, self.gain, self.head = nn.Conv2d(3, 3, 1), nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x)).permute(0, 2, 1).reshape(-1, 3, 2, 2)
        x = self.norm(self.conv(x)).view(-1, 3, 4).permute(0, 2, 1)
        x = nn.functional.layer_norm(x, (3,)) * self.gain.square()
        return self.head(torch.tanh(self.mix(x)).mean(1) if float(x.detach().max()) > -99 else x)


@pytest.mark.parametrize("sizes", [(3,), (1, 1, 1)])
def test_batch_norm_of_single_examples(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Transposed().double()
    x, y = torch.randn(3, 4, 2, dtype=torch.float64), torch.tensor([0, 1, 2])
    la = Laplace(model, "classification", "full").fit(networks.batches(x, y, *sizes))
    assert "fallback (loop)" in la.summary()
    torch.testing.assert_close(la.curvature.blocks[0].accumulator.matrix(), oracles.curvature(la, [(x, y)]))


class Pooled(nn.Module):
    """Largest rectified numbers, of what `way` does between the two."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.convolution, self.head = way, nn.Conv2d(2, 3, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.convolution(x)
        r = functional.relu(z, inplace=self.way == "in place")
        if self.way == "argument changed":
            z.detach().add_(1.0)
        if self.way == "indices":
            pooled = functional.max_pool2d(r, 2, return_indices=True)[0]
        elif self.way == "adaptive":
            pooled = functional.adaptive_max_pool2d(r, 2)
        else:
            pooled = functional.max_pool2d(r, 2)
        if self.way == "used twice":
            pooled = pooled + r[:, :, ::2, ::2]
        logits: Tensor = self.head(pooled.flatten(1))
        return logits


@pytest.mark.parametrize("way", ["plain", "in place", "argument changed", "indices", "adaptive", "used twice"])
def test_pooled_after_it_was_rectified(way: str) -> None:
    """In whichever order the two run: the gradients are autograd's."""
    torch.manual_seed(0)
    model, x = Pooled(way).double(), torch.randn(6, 2, 6, 6, dtype=torch.float64)
    model.get_parameter("convolution.bias").data.sub_(0.3)  # some windows have nothing above 0
    y = torch.arange(6) % 3
    la = Laplace(model, "classification", "diag", "empirical").fit([(x, y)])
    assert not any("fallback" in line for line in str(la.summary()).splitlines())
    names = [name for name, _ in model.named_parameters()]
    expected = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for own, label in zip(x, y, strict=True):
        loss = functional.cross_entropy(model(own.unsqueeze(0)), label.unsqueeze(0))
        for name, gradient in zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            expected[name] += gradient.square()
    for block in la.curvature.blocks:
        found = block.unpack(block.accumulator.tensors()["sums"].flatten())
        for name in block.parameters:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-14)


def test_fewer_numbers_are_rectified_where_they_are_pooled() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 2))
    record = Tape(model, dict(model.named_parameters())).record(Inputs((torch.randn(5, 1, 8, 8),), {}))
    names, node = [], record.outputs.grad_fn
    while node is not None and node.next_functions:
        names.append(node.name())
        node = next((child for child, _ in node.next_functions if child and child.next_functions), None)
    order = [name for name in names if name in ("ReluBackward0", "MaxPool2DWithIndicesBackward0")]
    assert order == ["ReluBackward0", "MaxPool2DWithIndicesBackward0"]
