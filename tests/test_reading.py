"""Uses that look like others: each against plain autograd."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lapwing import InputError, Laplace, channels_last, probe
from lapwing.batches import Inputs
from lapwing.curvature.diagonal import DiagonalAccumulator
from lapwing.gradients import Gradients
from lapwing.layers import RULES, Call
from lapwing.layers import window as window_module
from lapwing.layers.linear import Linear
from lapwing.layers.window import Window
from lapwing.tape import Record, Tape
from tests import networks, oracles

STRUCTURES = ["diag", "full", "ekfac", "block"]


def sequences(count: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(count, length, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(count: int) -> Tensor:
    return torch.randint(3, (count,), generator=torch.Generator().manual_seed(1))


def check(model: nn.Module, data: list[Any], structure: str = "full", new: Any = None) -> Laplace:
    """Curvature, gradient and covariance of outputs are those of brute force."""
    la = Laplace(model, "classification", structure).fit(data)
    dense = oracles.curvature(la, data)
    found = torch.block_diag(*[block.accumulator.matrix() for block in la.curvature.blocks])
    if structure == "full":
        torch.testing.assert_close(found, dense, rtol=1e-9, atol=1e-11)
    else:
        assert float(found.trace()) == pytest.approx(float(dense.trace()), rel=1e-9)
    slope = torch.cat([block.pack(la.curvature.gradient) for block in la.curvature.blocks])
    torch.testing.assert_close(slope, oracles.gradient(la, data), rtol=1e-9, atol=1e-11)
    x = data[-1][0] if new is None else new
    rows = oracles.packed_jacobian(la, x)
    inverse = torch.linalg.inv(found + torch.eye(len(found), dtype=found.dtype))
    expected = torch.einsum("nci,ij,ndj->ncd", rows, inverse, rows)
    torch.testing.assert_close(la.latent(x).covariance, expected, rtol=1e-8, atol=1e-10)
    return la


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.position = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        position = self.position if x.shape[1] == 6 else self.position[: x.shape[1]]
        return self.head(torch.tanh(self.mix(x) + position).mean(1))


@pytest.mark.parametrize("structure", [*STRUCTURES, "kron"])
@pytest.mark.parametrize("lengths", [(6, 4), (4, 6), (6, 6)])
def test_a_parameter_of_which_later_batches_use_a_part(structure: str, lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    data = [(sequences(5, length), labels(5)) for length in lengths]
    if structure == "kron":
        la = Laplace(Positions().double(), "classification").fit(data)
        own = next(block for block in la.curvature.blocks if "position" in block.parameters)
        dense = oracles.curvature(la, data)
        names = [block.name for block in la.curvature.blocks]
        part = oracles.layer_slices(la)[names.index(own.name)]
        torch.testing.assert_close(own.accumulator.matrix(), dense[part, part])
        return
    check(Positions().double(), data, structure, sequences(3, 4, seed=5))


class Repeated(nn.Module):
    """The result of a layer with one position per example, added to all positions, once or twice."""

    def __init__(self, times: int, copied: bool) -> None:
        super().__init__()
        self.context, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.times, self.copied = times, copied

    def forward(self, x: Tensor) -> Tensor:
        context = self.context(x[:, :1])
        context = context.clone() if self.copied else context
        for _ in range(self.times):
            x = torch.tanh(x + context)
        return self.head(x.mean(1))


@pytest.mark.parametrize("times", [1, 2])
def test_repeating_the_result_of_a_layer_does_not_change_its_factors(times: int) -> None:
    data = [(sequences(5, 4), labels(5))]
    matrices = []
    for copied in (False, True):
        torch.manual_seed(0)
        la = Laplace(Repeated(times, copied).double(), "classification").fit(data)
        assert {layer.path for block in la.curvature.blocks for layer in block.layers} == {"linear"}
        matrices.append([block.accumulator.matrix() for block in la.curvature.blocks])
    for left, right in zip(*matrices, strict=True):
        torch.testing.assert_close(left, right)
    torch.manual_seed(0)
    check(Repeated(times, False).double(), data, "full")


class Token(nn.Module):
    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.token, self.gain = nn.Parameter(torch.randn(1, 1, 3)), nn.Parameter(torch.rand(3) + 0.5)
        self.mix, self.head, self.scaled = nn.Linear(3, 3), nn.Linear(3, 3), scaled

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(len(x), -1, -1)
        x = torch.cat([token * self.gain, x], 1) if self.scaled else x * self.gain + token
        return self.head(torch.tanh(self.mix(x)).mean(1))


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("sizes", [(8, 1), (1, 8), (3, 3)])
def test_a_token_repeated_for_a_single_example(scaled: bool, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    data = [(sequences(size, 2, seed=size), labels(size)) for size in sizes]
    for structure in STRUCTURES:
        check(Token(scaled).double(), data, structure, sequences(1, 2, seed=7))


class Ragged(nn.Module):
    """Rows of one matrix, of which each example owns as many as `lengths` says."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, rows: Tensor, lengths: Any) -> Tensor:
        pieces = torch.tanh(self.body(rows)).split(lengths)
        return self.head(torch.stack([piece.sum(0) for piece in pieces]))


def test_ragged_batches_are_not_read_as_even_ones() -> None:
    torch.manual_seed(0)
    model = Ragged().double()
    rows = sequences(2, 6)
    batches = [(rows[0], [2, 2, 2], labels(3)), (rows[1], [3, 2, 1], labels(3))]

    def unpack(batch: Any) -> Any:
        return batch[:2], {}, batch[2]

    la = Laplace(model, "classification", "diag", unpack=unpack)
    with pytest.raises(ValueError, match="mix|split|another way|interact|single examples"):
        la.fit(batches)


def test_a_few_examples_without_gradient_tell_nothing_of_the_others() -> None:
    """The first eight never reach `first`, whose output is `[L, N, D]` with L a multiple of N and of eight."""

    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(3, 2), nn.Linear(2, 3)
            with torch.no_grad():
                self.first.weight.abs_()
                self.first.bias.zero_()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.first(x.transpose(0, 1))).sum(0) / 10)

    torch.manual_seed(0)
    x = sequences(20, 40).abs()
    x[:8] *= -1
    check(Dead().double(), [(x, labels(20))], "diag", x[9:12])


def test_inputs_without_tensors() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 3), nn.Linear(3, 3)

        def forward(self, words: Any) -> Tensor:
            return self.head(torch.tanh(self.embed(torch.tensor([len(word) for word in words.words]))))

    class Text:
        def __init__(self, words: list[str]) -> None:
            self.words = words

    torch.manual_seed(0)
    words = Text(["a" * (1 + i % 8) for i in range(20)])
    la = Laplace(Words().double(), "classification").fit([(words, labels(20))])
    assert torch.isfinite(la.log_evidence())


def test_a_model_tied_to_its_batch_size() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offsets = torch.randn(20, 3, dtype=torch.float64)
            self.head = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(x + self.offsets))

    torch.manual_seed(0)
    check(Fixed().double(), [(sequences(20, 1)[:, 0], labels(20))])


@pytest.mark.parametrize("curvature", ["fisher", "ggn"])
def test_a_mask_as_long_as_the_batch(curvature: str) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.head(torch.tanh(mask @ self.mix(x)).mean(1))

    torch.manual_seed(0)
    model = Masked().double()
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([3.0, 0, 0]))
    x, y = sequences(20, 20), torch.zeros(20, dtype=torch.long)
    la = Laplace(model, "classification", "diag", curvature)
    la.fit([(x, torch.tril(torch.ones(20, 20, dtype=x.dtype)), y)], generator=torch.Generator().manual_seed(0))
    assert all(bool((block.accumulator.matrix().diagonal() > 0).any()) for block in la.curvature.blocks)


def test_learned_weights_of_a_bag_leave_no_graph_behind() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(5, 3, mode="sum"), nn.Linear(3, 3)
            self.weights = nn.Parameter(torch.rand(4))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.bag(tokens, per_sample_weights=self.weights.expand(len(tokens), -1)))

    torch.manual_seed(0)
    tokens = torch.randint(5, (6, 4))
    la = Laplace(Weighted().double(), "classification", "diag").fit([(tokens, labels(6))])
    assert not any(value.requires_grad for value in la.curvature.gradient.values())
    copy.deepcopy(la.curvature)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_biases_of_other_lengths(structure: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(1))
            self.packed, self.shifts = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(functional.linear(x, self.weight, self.bias))
            parts = [functional.linear(x, self.packed[i : i + 2], self.shifts[i : i + 2]) for i in (0, 2)]
            return torch.cat([torch.tanh(part) for part in parts], -1)[..., :3].sum(1)

    torch.manual_seed(0)
    check(Odd().double(), [(sequences(5, 2), labels(5))], structure)


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac"])
def test_derivatives_in_an_input_that_is_zero(structure: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False)).double()
    la = Laplace(model, "classification", structure).fit([(networks.inputs("mlp", 6), labels(6))])
    x = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(la.latent(x).covariance.sum(), x)
    assert torch.isfinite(slope).all()


def test_kfra_keeps_the_gradient() -> None:
    data = [(networks.inputs("mlp", 6), labels(6))]
    exact = Laplace(networks.make("mlp"), "classification").fit(data)
    kfra = Laplace(networks.make("mlp"), "classification", curvature="kfra").fit(data)
    for name, value in exact.curvature.gradient.items():
        torch.testing.assert_close(kfra.curvature.gradient[name], value)


class Sharing(nn.Module):
    """A convolution and a sequence: weights shared between many positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(x)).flatten(2).transpose(1, 2)).mean(1)


def test_scale_of_layers_that_share_weights() -> None:
    """Peers are off by the number of positions (kron), or forget the sum before the square (diag)."""
    torch.manual_seed(0)
    x = networks.inputs("cnn", 5)
    data = [(x, labels(5))]
    exact = {}
    for structure in ("full", "diag", "ekfac"):
        la = Laplace(Sharing().double(), "classification", structure)
        torch.manual_seed(0)
        la.model.load_state_dict(Sharing().double().state_dict())
        la.fit(data)
        exact[structure] = sum(float(block.accumulator.matrix().trace()) for block in la.curvature.blocks)
    assert exact["diag"] == pytest.approx(exact["full"], rel=1e-10)
    assert exact["ekfac"] == pytest.approx(exact["full"], rel=1e-10)
    torch.manual_seed(0)
    model = Sharing().double()
    kron = Laplace(model, "classification").fit(data)
    for block, module in zip(kron.curvature.blocks, (model.conv, model.head), strict=True):

        def columns(outputs: Tensor) -> Tensor:
            found = kron.likelihood.hessian_columns(outputs, torch.zeros(1, dtype=torch.long))
            return found.part(0, found.count)

        expected = oracles.kron_factors(model, module, x, columns, False)
        torch.testing.assert_close(block.accumulator.matrix().trace(), expected.trace())


def paths(la: Laplace) -> dict[str, str]:
    """How each parameter was read."""
    return {name: layer.path for block in la.curvature.blocks for layer in block.layers for name in layer.parameters}


@pytest.mark.parametrize("structure", ["full", "diag", "block"])
def test_rows_of_a_table_and_entries_of_a_vector_are_read_by_rules(structure: str) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Linear(3, 4)
            self.kinds, self.only, self.deep = (nn.Parameter(torch.randn(*s)) for s in ((3, 4), (1, 4), (3, 1, 4)))
            self.gains, self.scales, self.sums = (nn.Parameter(torch.randn(5)) for _ in range(3))
            self.stack, self.token = nn.Parameter(torch.randn(2, 4, 4)), nn.Parameter(torch.randn(2, 4))
            self.gain, self.shifts = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2, 4))
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.words(x) + self.kinds[1]) * self.gains[2] * self.gains[0]
            hidden = (hidden + self.only[0]) * self.deep[2] * self.scales[1:]
            hidden = functional.linear(torch.tanh(hidden), self.stack[1], self.kinds[2]) * self.sums[1:].sum()
            hidden = functional.layer_norm(hidden + self.token[1].expand(len(x), -1), (4,), self.gain, self.shifts[1])
            out: Tensor = self.head(hidden + self.kinds[0:1])
            return out

    torch.manual_seed(0)
    found = paths(check(Rows().double(), [(torch.randn(6, 3).double(), labels(6))], structure))
    expected = {"kinds": "shift", "only": "shift", "deep": "scale", "gains": "scale", "scales": "scale",
                "token": "expansion", "gain": "norm"}  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found["sums"] == "fallback"  # a sum of entries is not a view
    assert found["stack"] == "fallback"  # one matrix of several is not read as a layer


def test_a_short_part_of_a_long_table_takes_the_fallback() -> None:
    """By its rule the gradients of every example would be as long as the table, and nearly all zeros."""

    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Parameter(torch.randn(40, 3)), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(torch.tanh(x + self.table[:2]).sum(1))
            return out

    torch.manual_seed(0)
    assert paths(check(Long().double(), [(sequences(6, 2), labels(6))], "diag"))["table"] == "fallback"


def test_rounding_is_not_taken_for_examples_that_interact() -> None:
    """Of gradients in which large terms cancel, as in attention that is nearly even, few digits are left."""

    class Cancelling(nn.Module):
        def __init__(self, coupled: float) -> None:
            super().__init__()
            self.first, self.head, self.coupled = nn.Linear(3, 4), nn.Linear(4, 3), coupled

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            hidden = hidden * 1e5 - hidden * (1e5 - 1)
            out: Tensor = self.head(torch.tanh(hidden + self.coupled * hidden.mean(0)))
            return out

    def fit(coupled: float) -> Laplace:
        torch.manual_seed(0)
        return Laplace(Cancelling(coupled), "classification", "diag").fit([(torch.randn(20, 3), labels(20))])

    assert set(paths(fit(0.0)).values()) == {"linear"}
    for coupled in (1.0, 0.1):  # the latter below the rounding of the gradients
        with pytest.raises(InputError, match="Examples must be independent"):
            fit(coupled)


def test_a_bias_without_effect_passes_the_self_check() -> None:
    """Of the gradient of the keys' bias nothing is left but rounding, which depends on the order of a sum."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.head = (nn.Linear(8, size) for size in (8, 8, 8, 3))

        def forward(self, x: Tensor) -> Tensor:
            weights = (self.query(x) @ self.key(x).mT).softmax(2)
            out: Tensor = self.head((weights @ self.value(x)).mean(1))
            return out

    class Backwards(Linear):
        """Sums over the positions from the last to the first."""

        def add_total(self, call: Call, g: Tensor, *others: Any) -> None:
            turned = replace(call, input=call.input.flatten(0, -2).flip(0))
            super().add_total(turned, g.flatten(0, -2).flip(0), *others)

    torch.manual_seed(0)
    x, y = torch.randn(20, 30, 8), labels(20)
    for rule in (Linear(), Backwards()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(RULES, nn.functional.linear, rule)
            la = Laplace(Attention(), "classification").fit([(x, y)])
        assert set(paths(la).values()) == {"linear"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_bias_that_is_also_used_elsewhere_does_not_pass(dtype: torch.dtype) -> None:
    """Also where gradients nearly cancel, and in half precision, whose sums are made in more."""

    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(3, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            signs = (torch.arange(x.shape[1]) % 2 * 2 - 1).to(x.dtype).unsqueeze(1)
            out: Tensor = self.head((torch.tanh(self.first(x)) * signs).sum(1) + torch.sin(self.first.bias))
            return out

    torch.manual_seed(0)
    model, x, y = Alternating().to(dtype), 0.1 * sequences(20, 64).to(dtype), labels(20)
    la = Laplace(model, "classification", "diag").fit([(x, y)])
    assert paths(la)["first.bias"] == "fallback"
    exact = copy.deepcopy(model).double()
    total = functional.cross_entropy(exact(x.double()), y, reduction="sum")
    (expected,) = torch.autograd.grad(-total, exact.first.bias)
    error = (la.curvature.gradient["first.bias"].double() - expected).norm() / expected.norm()
    assert error < 64 * torch.finfo(dtype).eps  # large gradients cancel


@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_convolutions_of_one_position(kernel: int) -> None:
    """Computed as matrix products: changed in place afterwards, inside a checkpoint, and with a bias."""

    class Squeezed(nn.Module):
        def __init__(self, inside: bool) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 4, kernel, padding=kernel // 2), nn.Conv2d(4, 3, 1)
            self.inside = inside

        def body(self, x: Tensor) -> Tensor:
            hidden = nn.functional.silu(self.first(x)[..., :1, :1].contiguous(), inplace=True)
            return self.second(hidden).tanh_().flatten(1)

        def forward(self, x: Tensor) -> Tensor:
            if not self.inside:
                return self.body(x)
            out: Tensor = checkpoint(self.body, x, use_reentrant=False)
            return out

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 1, 1, generator=generator, dtype=torch.float64)
    for inside in (False, True):
        torch.manual_seed(0)
        la = check(Squeezed(inside).double(), [(x, labels(6))], "block")
        assert set(paths(la).values()) == {"convolution"}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("convolution", "norm", "size"),
    [
        (nn.Conv1d(2, 3, 3, padding=1), nn.BatchNorm1d(3), (2,)),
        (nn.Conv1d(2, 3, 5, padding=2, bias=False), nn.BatchNorm1d(3, affine=False), (3,)),
        (nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), (2, 2)),
        (nn.Conv2d(2, 3, 4, stride=2, padding=2), nn.BatchNorm2d(3), (2, 1)),
        (nn.Conv2d(2, 3, 3, padding=2, dilation=2), nn.BatchNorm2d(3), (1, 2)),
        (nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), (3, 3)),
        (nn.Conv3d(2, 3, 3, padding=1), nn.BatchNorm3d(3), (2, 1, 2)),
    ],
)
def test_small_images_under_large_kernels(
    convolution: nn.Module, norm: nn.Module, size: tuple[int, ...], inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed as matrix products; batch norms as a scale and a shift, changed in place afterwards."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = copy.deepcopy(convolution), copy.deepcopy(norm), nn.Linear(3, 3)
            for buffer in self.norm.buffers():
                if buffer.is_floating_point():
                    torch.nn.init.uniform_(buffer, 0.5, 2.0)

        def body(self, x: Tensor) -> Tensor:
            return nn.functional.silu(self.norm(self.first(x)), inplace=True).tanh_().flatten(2).sum(2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(checkpoint(self.body, x, use_reentrant=False) if inside else self.body(x))
            return out

    torch.manual_seed(0)
    model = Small().double()
    x = torch.randn(6, 2, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    monkeypatch.setattr(window_module, "_MANY", 1)
    la = check(model, [(x, labels(6))], "block")
    assert "fallback" not in set(paths(la).values())
    torch.testing.assert_close(la.latent(x).mean, model.eval()(x).detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("window", "space", "seen"),
    [
        (Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1)), (2, 2), True),
        (Window((2, 2), (1, 1), (1, 1), (0, 0), (0, 0)), (2, 2), True),
        (Window((3, 3), (2, 2), (1, 1), (1, 1), (1, 1)), (2, 2), True),
        (Window((5,), (1,), (1,), (2,), (2,)), (3,), True),
        (Window((3,), (1,), (2,), (2,), (2,)), (3,), False),
        (Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1)), (4, 4), False),
        (Window((7, 7), (1, 1), (1, 1), (3, 3), (3, 3)), (4, 4), False),  # all is seen, but the matrix is large
        (Window((101,), (1,), (1,), (50,), (50,)), (51,), False),
        (Window((9000,), (1,), (1,), (0,), (0,)), (9000,), True),  # without a matrix between its entries
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_a_convolution_as_a_matrix(window: Window, space: tuple[int, ...], seen: bool, last: bool) -> None:
    """Channels come first or last in the rows and columns of the matrix, and in memory."""
    torch.manual_seed(0)
    x = torch.randn(130, 2, *space, dtype=torch.float64)
    w = torch.randn(3, 2, *window.kernel, dtype=torch.float64, requires_grad=True)
    function = (functional.conv1d, functional.conv2d)[window.dimensions - 1]
    output = function(x, w, None, window.stride, window.before, window.dilation)
    g = torch.randn_like(output)
    (expected,) = torch.autograd.grad(output, w, g)
    matrix = window.matrix(w, x.shape, 1, last)
    assert (matrix is not None) == seen
    if matrix is not None:
        rows = channels_last.as_rows(x, last) @ matrix.T
        torch.testing.assert_close(rows, channels_last.as_rows(output, last))
    if last and window.dimensions == 2:
        x, g = channels_last.put_last(x), channels_last.put_last(g)
    torch.testing.assert_close(window.weight_gradient(x, g, 1), expected)


class Normed(nn.Module):
    def __init__(self, training: bool) -> None:
        super().__init__()
        self.mix, self.norm, self.head, self.own = nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), training

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        hidden = functional.batch_norm(
            self.mix(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, training=self.own, momentum=0.0
        )
        out: Tensor = self.head(hidden.tanh().mean(2))
        return out


def test_batch_norms_with_running_statistics_scale_and_shift() -> None:
    """With those of the batch examples interact; half precision is torch's own."""
    torch.manual_seed(0)
    x = torch.randn(6, 2, 5, dtype=torch.float64)
    model = Normed(training=False).double()
    parameters = dict(model.named_parameters())
    names = {child.name() for child in _behind(Tape(model, parameters).run(Inputs((x,), {})).outputs.grad_fn)}
    assert "AddcmulBackward0" in names
    assert "NativeBatchNormBackward0" not in names
    check(model, [(x, labels(6))], "block")
    with pytest.raises(InputError, match="Examples must be independent"):
        Laplace(Normed(training=True).double(), "classification").fit([(x, labels(6))])
    half = Normed(training=False).half()
    for buffer in half.norm.buffers():
        buffer.add_(10)
    outputs = Tape(half, dict(half.named_parameters())).run(Inputs((x.half(),), {})).outputs
    assert torch.equal(outputs, half(x.half()))


def _behind(node: Any) -> set[Any]:
    """All nodes of a graph."""
    found, stack = set(), [node]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack.extend(child for child, _ in node.next_functions)
    return found


@pytest.mark.parametrize(
    ("structure", "options"),
    [
        ("block", {"curvature": "hessian", "prior": 50.0}),
        ("kron", {"rank_tolerance": 0.1}),
        ("lowrank", {}),
        ("kron", {}),
    ],
)
def test_a_weight_that_later_batches_also_use_by_hand(structure: str, options: dict[str, Any]) -> None:
    """What its layer does not see of it is not missed: such a batch is looked at again, and must come first."""

    class Wandering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, by_hand: bool | None = None) -> Tensor:
            hidden = self.a(x) if by_hand is None else self.a(x) + x @ (self.a.weight**2).T
            out: Tensor = self.head(hidden.tanh())
            return out

    torch.manual_seed(0)
    model = Wandering().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    data: list[Any] = [{"x": x, "labels": labels(6)}, {"x": x, "by_hand": True, "labels": labels(6)}]
    la = Laplace(model, "classification", structure, progress=False, **options)
    with pytest.raises(InputError, match="Show a batch like this"):
        la.fit(data)
    la.fit(data[::-1])
    outputs = torch.cat([model(x), model(x, True)])
    total = -functional.cross_entropy(outputs, torch.cat([labels(6), labels(6)]), reduction="sum")
    for (name, found), expected in zip(
        la.curvature.gradient.items(), torch.autograd.grad(total, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=name)


def test_complex_parameters_are_refused_by_name() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn, self.gain = nn.Parameter(torch.randn(3, dtype=torch.complex128)), nn.Parameter(torch.ones(3))
            self.head = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head((torch.complex(x, x.square()) * self.gain * self.turn).abs())
            return out

    torch.manual_seed(0)
    model, x = Turned().double(), torch.randn(6, 3, dtype=torch.float64)
    with pytest.raises(InputError, match=r"'turn' is complex.*requires_grad=False"):
        Laplace(model, "classification").fit([(x, labels(6))])
    model.turn.requires_grad_(False)
    check(model, [(x, labels(6))], "block")


def test_operations_that_hand_no_gradient_on() -> None:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> None:
            return None

    class Stopped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(x) + Stop.apply(self.first(x))  # type: ignore[no-untyped-call]
            return out

    torch.manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64)
    la = Laplace(Stopped().double(), "classification", "block").fit([(x, labels(6))])
    matrices = {block.name: block.accumulator.matrix() for block in la.curvature.blocks}
    assert float(matrices["first"].abs().max()) == 0
    assert float(matrices["second"].abs().max()) > 0


class Places(nn.Module):
    """Positions as an embedding, whose outputs belong to no example."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.table, self.head = nn.Linear(3, 3), nn.Embedding(6, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.mix(x) + self.table(torch.arange(x.shape[1]))).mean(1))
        return out


@pytest.mark.parametrize("network", [Positions, Places])
def test_other_batch_sizes_are_not_probed_again(network: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another length is another reading."""
    torch.manual_seed(0)
    model, calls, examine = network().double(), list[int](), probe.examine

    def counted(record: Record, independent: bool) -> probe.Examined:
        calls.append(record.examples)
        return examine(record, independent)

    monkeypatch.setattr(probe, "examine", counted)
    data = [(sequences(size, 6, seed), labels(size)) for seed, size in enumerate((8, 5, 3, 8, 2))]
    la = Laplace(model, "classification", "full").fit(data)
    assert calls == [8]
    torch.testing.assert_close(la.curvature.blocks[0].accumulator.matrix(), oracles.curvature(la, data))
    Laplace(model, "classification", "full").fit([*data, (sequences(4, 4), labels(4))])
    assert calls == [8, 8, 4]


@pytest.mark.parametrize("structure", ["diag", "ekfac"])
@pytest.mark.parametrize(("columns", "turns"), [(1, [1] * 5), (2, [2, 2, 1]), (4, [3, 2]), (5, [5])])
def test_columns_in_turns_where_all_do_not_fit(
    structure: str, columns: int, turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 6)).double()
    data = [(torch.randn(4, 1, 3, 3).double(), torch.arange(4))]
    whole, seen = Laplace(model, "classification", structure).fit(data), list[int]()
    update = DiagonalAccumulator.update

    def counted(accumulator: DiagonalAccumulator, gradients: Gradients) -> None:
        seen.append(gradients.columns)
        update(accumulator, gradients)

    monkeypatch.setattr(DiagonalAccumulator, "update", counted)
    each = 4 * (8 + 6) * 8  # bytes of a column's gradients at the outputs of both layers
    parts = Laplace(model, "classification", structure, memory_budget=columns * each).fit(data)
    assert sorted(seen) == sorted(2 * turns)
    for one, other in zip(whole.curvature.blocks, parts.curvature.blocks, strict=True):
        torch.testing.assert_close(one.accumulator.matrix(), other.accumulator.matrix(), rtol=1e-10, atol=1e-13)


def test_batches_that_reach_other_layers_than_the_first() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor, which: str) -> Tensor:
            out: Tensor = (self.one if which == "one" else self.other)(x.mean(1))
            return out

    torch.manual_seed(0)
    model = Either().double()
    data = [{"x": sequences(4, 2, seed), "which": ("one", "other")[seed], "labels": labels(4)} for seed in range(2)]
    la = Laplace(model, "classification", "block").fit(data)
    for batch, block in zip(data, la.curvature.blocks, strict=True):
        alone = Laplace(model, "classification", "block", weights=[f"{batch['which']}.*"]).fit([batch])
        found, expected = (
            torch.linalg.eigvalsh(one.accumulator.matrix()) for one in (block, alone.curvature.blocks[0])
        )  # what the first batch did not reach has its elements in another order
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    slope = torch.cat([block.pack(la.curvature.gradient) for block in la.curvature.blocks])
    assert bool((slope != 0).all())
