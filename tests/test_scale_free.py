"""Scale-free groups: found where scaling them by hand, norms included, leaves the outputs alone, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lapwing import InputError, Laplace
from lapwing.scale_free import find_scale_free

NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.InstanceNorm2d)


class Block(nn.Module):
    def __init__(self, width: int, norm: Callable[[int], nn.Module], pre: bool) -> None:
        super().__init__()
        self.first, self.second, self.pre = norm(width), norm(width), pre
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if not self.pre:
            x = self.first(x + self.attention(x, x, x, need_weights=False)[0])
            return self.second(x + self.down(torch.tanh(self.up(x))))
        seen = self.first(x)
        x = x + self.attention(seen, seen, seen, need_weights=False)[0]
        return x + self.down(torch.tanh(self.up(self.second(x))))


class Transformer(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, pre: bool = True, last: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 4), nn.Parameter(0.5 * torch.randn(1, 5, 4))
        self.blocks = nn.Sequential(Block(4, norm, pre), Block(4, norm, pre))
        self.norm = norm(4) if last else nn.Identity()
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places)).mean(1))


class HandNorm(nn.Module):
    """A root-mean-square norm as language models write it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Residual(nn.Module):
    """A ResNet of two blocks, the second with a projection."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), norm(4)
        self.one, self.one_norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), norm(4)
        self.two, self.two_norm = nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False), norm(8)
        self.short, self.short_norm = nn.Conv2d(4, 8, 1, stride=2, bias=False), norm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = torch.relu(x + self.one_norm(self.one(x)))
        x = torch.relu(self.two_norm(self.two(x)) + self.short_norm(self.short(x)))
        return self.head(x.mean((2, 3)))


class Plain(nn.Module):
    """No norm, a saturated layer, one without any effect, and a homogeneous one before it is squashed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.idle, self.last = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(20 * self.first(x)) + 0 * self.idle(x))


def perceptron(bias: bool) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 6, bias=bias), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6, bias=bias), nn.BatchNorm1d(6), nn.Tanh(),
        nn.Linear(6, 3),
    )  # fmt: skip


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 3))


def vectors() -> Tensor:
    return torch.randn(12, 3)


def images() -> Tensor:
    return torch.randn(12, 1, 6, 6)


def tokens() -> Tensor:
    return torch.randint(7, (12, 5))


STREAM = {
    "tokens.weight", "places",
    *[f"blocks.{i}.{name}.{part}" for i in (0, 1) for name in ("attention.out_proj", "down") for part in ("weight", "bias")],
}  # fmt: skip
# Bias-free convolutions and norms are all that reads what these norms' affine parts add up to.
CONVOLUTIONS = [{"stem.weight"}, {"one.weight"}, {"two.weight"}, {"short.weight"}]
STAGE = {"stem_norm.weight", "stem_norm.bias", "one_norm.weight", "one_norm.bias"}
# What scaling with its consequences for the norms confirms below; everything else has a scale.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], list[set[str]]]] = {
    "perceptron": (lambda: perceptron(True), vectors, [{"0.weight", "0.bias"}, {"3.weight", "3.bias"}]),
    # Without biases behind it, the affine part of the first norm is scale-free as well: the second takes it out.
    "perceptron without biases": (
        lambda: perceptron(False), vectors, [{"0.weight"}, {"1.weight", "1.bias"}, {"3.weight"}]),
    "batch norm": (lambda: Residual(nn.BatchNorm2d), images, [*CONVOLUTIONS, STAGE]),
    "group norm": (lambda: Residual(lambda c: nn.GroupNorm(2, c)), images, [*CONVOLUTIONS, STAGE]),
    "instance norm": (lambda: Residual(lambda c: nn.InstanceNorm2d(c, affine=True)), images, [*CONVOLUTIONS, STAGE]),
    "running instance norm": (
        lambda: Residual(lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True)), images,
        [*CONVOLUTIONS, STAGE]),
    "no norm": (lambda: Residual(lambda _: nn.Identity()), images, []),
    "pre-norm": (Transformer, tokens, [STREAM]),
    "pre-norm, RMS": (lambda: Transformer(nn.RMSNorm), tokens, [STREAM]),
    "pre-norm by hand": (lambda: Transformer(HandNorm), tokens, [STREAM]),
    # An epsilon that moves the outputs by percents, as in a language model at its initial weights.
    "pre-norm by hand, large epsilon": (lambda: Transformer(lambda width: HandNorm(width, 3e-3)), tokens, [STREAM]),
    "pre-norm without the last": (lambda: Transformer(last=False), tokens, []),
    "post-norm": (lambda: Transformer(pre=False, last=False), tokens, []),
    "weight norm": (weight_normed, vectors, [{"0.parametrizations.weight.original1"}]),
    "saturated": (Plain, vectors, []),
}  # fmt: skip


def make(case: str) -> tuple[nn.Module, Tensor]:
    build, data, _ = CASES[case]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = build(), data()
        for module in model.modules():  # statistics and affine parts like those of a trained network
            if isinstance(module, NORMS) and module.weight is not None:
                nn.init.uniform_(module.weight, 0.5, 1.5)
        model.train()
        model(x)
    return model.eval(), x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_finds_them_all_and_no_other(case: str, dtype: torch.dtype) -> None:
    model, x = make(case)
    model = model.to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    y = torch.arange(len(x)) % 3
    la = Laplace(model, "classification", "diag").fit([(x, y)])
    expected = CASES[case][2]
    if not expected:
        with pytest.raises(InputError, match="no scale-free group.*'scalar' or 'layer'"):
            la.tune_prior(groups="auto")
        return
    tape = la._state().tape
    assert tape.seen is not None
    with la._borrow(la._state().weights):
        found = find_scale_free(tape, tape.seen)
    assert sorted(map(sorted, found.groups.values())) == sorted(map(sorted, expected))
    assert {*found.rest} == {name for name, _ in model.named_parameters()} - set().union(*expected)
    assert {*found.labels()} == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][2]])
def test_the_expected_groups_are_scale_free(case: str) -> None:
    """By hand, the oracle of the test above: scale weights, epsilons and running statistics, compare outputs."""
    model, x = make(case)
    model = model.double()
    x = x.double() if x.is_floating_point() else x
    for group in CASES[case][2]:
        scaled = copy.deepcopy(model)
        for name in group:
            scaled.get_parameter(name).data.mul_(10.0)
        touched = behind(scaled, group) if case != "weight norm" else []
        for norm in touched:
            norm.eps = (norm.eps or torch.finfo(torch.float64).eps) * 100
            if getattr(norm, "running_mean", None) is not None:
                norm.running_mean.mul_(10.0)
                norm.running_var.mul_(100.0)
        torch.testing.assert_close(scaled(x), model(x), rtol=1e-9, atol=1e-9)


def behind(model: nn.Module, group: set[str]) -> list[Any]:
    """The norms that read what a group writes, by the names in the networks above."""
    if group == STREAM:
        return [part for part in model.modules() if isinstance(part, (*NORMS, HandNorm))]
    if group == STAGE:
        return [model.get_submodule(name) for name in ("one_norm", "two_norm", "short_norm")]
    layer = next(iter(group)).rpartition(".")[0]
    if isinstance(model, Residual):
        return [model.get_submodule(f"{layer}_norm")]
    return [model.get_submodule({"0": "1", "1": "4", "3": "4"}[layer])]


def test_a_stream_with_frozen_writers_has_a_scale() -> None:
    model, x = make("pre-norm")
    la = Laplace(model, "classification", "diag", weights="blocks.*").fit([(x, torch.arange(len(x)) % 3)])
    with pytest.raises(InputError, match="no scale-free group"):
        la.tune_prior(groups="auto")


def test_the_model_comes_back_untouched() -> None:
    model, x = make("batch norm")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Laplace(model, "classification").fit([(x, torch.arange(len(x)) % 3)]).tune_prior(groups="auto")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_bias_that_is_0_still_has_a_scale() -> None:
    """Its gradient scales with what comes before it, though its value does not show."""
    model, x = make("perceptron")
    nn.init.zeros_(model.get_parameter("3.bias"))
    la = Laplace(model, "classification", "diag").fit([(x, torch.arange(len(x)) % 3)]).tune_prior(groups="auto")
    assert la.tuning_ is not None
    assert {*la.tuning_.precisions} == {"0", "3", "rest"}
    moved = la.to("cpu").tune_prior(groups="auto")  # which keeps the inputs
    assert moved.tuning_ is not None


def test_a_loader_is_left_as_found() -> None:
    model, x = make("perceptron")
    generator = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(x, torch.arange(len(x)) % 3)
    loader = torch.utils.data.DataLoader(data, batch_size=6, shuffle=True, generator=generator)
    la = Laplace(model, "classification").fit([data[:]])
    before = generator.get_state(), torch.get_rng_state()
    la.tune_prior(groups="auto", loader=loader)
    with pytest.raises(InputError, match="saw 12 examples"):
        Laplace(model, "classification").fit([data[:6]]).find_mode(loader)
    assert torch.equal(generator.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_files_keep_no_inputs(tmp_path: Any) -> None:
    model, x = make("perceptron")
    data = [(x, torch.arange(len(x)) % 3)]
    Laplace(model, "classification").fit(data).save(tmp_path / "posterior.safetensors")
    la = Laplace.load(tmp_path / "posterior.safetensors", model)
    with pytest.raises(InputError, match="pass loader="):
        la.tune_prior(groups="auto")
    assert la.tune_prior(groups="auto", loader=data).tuning_ is not None


def test_one_example_shows_nothing() -> None:
    model, x = make("perceptron")
    la = Laplace(model, "classification").fit([(x[:1], torch.tensor([1])), (x[1:], torch.arange(11) % 3)])
    with pytest.raises(InputError, match="two examples or more"):
        la.tune_prior(groups="auto")
