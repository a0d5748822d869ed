"""Images with their channels last in memory: the same numbers, and models that mind keep their own order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lapwing import Laplace, channels_last
from lapwing.batches import Inputs
from lapwing.guard import borrowed
from lapwing.layers import window as window_module
from lapwing.tape import Record, Tape
from tests import oracles
from tests.test_reading import check, labels

STRUCTURES = ["diag", "kron", "ekfac", "block", "full"]


class Residual(nn.Module):
    """Convolutions as they are (with stride, groups, dilation and a shortcut), and as matrices (of 2×2 and of 1×1
    pixels), norms, ReLUs in place, pooling, and a view of what is left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4)
        self.grouped = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2)
        self.shortcut = nn.Conv2d(4, 3, 1, stride=2)
        self.down, self.small = nn.Conv2d(4, 3, 3, stride=2, padding=1), nn.Conv2d(3, 2, 3, padding=1)
        self.gain = nn.GroupNorm(1, 2)
        self.pixel, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(2, 3)
        nn.init.uniform_(self.norm.running_mean, -1, 1)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 1, 2)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(x)), inplace=True)
        x = functional.max_pool2d(functional.relu(x + self.grouped(x)), 2)
        x = torch.tanh(self.down(x) + self.shortcut(x))
        x = self.gain(functional.relu(self.small(x), inplace=True))
        x = self.pixel(functional.avg_pool2d(x, 2)).sigmoid()
        logits: Tensor = self.head(x.view(len(x), -1))
        return logits


def residual() -> Residual:
    torch.manual_seed(0)
    return Residual().double().eval()


def images(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 2, 16, 16, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 too, where the oracles are, and for the few channels that they can do."""
    monkeypatch.setattr(channels_last, "gains", lambda x, w: x.dim() == w.dim() == 4)
    monkeypatch.setattr(window_module, "_MANY", 1)


def record(model: nn.Module, x: Tensor) -> tuple[Tape, Record]:
    tape = Tape(model, dict(model.named_parameters()))
    with borrowed(model, tape.parameters):
        return tape, tape.record(Inputs((x,), {}))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_fits_are_those_of_brute_force(always: None, structure: str) -> None:
    model, x = residual(), images(5)
    tape, found = record(model, x)
    assert found.rearranged
    assert not tape.in_order
    if structure != "kron":
        check(model, [(x[:3], labels(5)[:3]), (x[3:], labels(5)[3:])], structure)
        return
    la = Laplace(model, "classification", "kron").fit([(x, labels(5))])
    compared = 0
    for block in la.curvature.blocks:
        module = model.get_submodule(block.name)
        if isinstance(module, nn.Conv2d) and module.groups == 1:
            expected = oracles.kron_factors(model, module, x, roots, False)
            torch.testing.assert_close(block.accumulator.matrix(), expected, rtol=1e-10, atol=1e-13)
            compared += 1
    assert compared == 5


def roots(outputs: Tensor) -> Tensor:
    """Columns of `Λ^½` of one example: `[3, 1, 3]`."""
    p = outputs.softmax(1)[0]
    values, vectors = torch.linalg.eigh(torch.diag(p) - torch.outer(p, p))
    return (vectors * values.clamp(min=0).sqrt()).T.unsqueeze(1)


def test_gradients_lie_as_rows(always: None) -> None:
    """Which is what it is for: at the outputs of convolutions a row of channels for every position."""
    _, found = record(residual(), images(5))
    index = next(i for i, use in enumerate(found.uses) if use.weight == "stem.weight")
    (g,) = found.grad([found.uses[index].edge], torch.ones_like(found.outputs), batched=False)
    assert g is not None
    assert channels_last.are_last(g)


@pytest.mark.parametrize("structure", ["kron", "diag", "ekfac"])
def test_in_single_precision_by_rule(structure: str) -> None:
    """Of wide convolutions, without being told; compared with the same in float64, where nothing is rearranged."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(64, 32, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1), nn.Flatten(),
        nn.Linear(128, 3),
    ).eval()  # fmt: skip
    x, y = images(130, torch.float32), labels(130)
    assert record(model, x)[1].rearranged
    assert not record(copy.deepcopy(model).double(), x.double())[1].rearranged
    fits = [
        Laplace(copy.deepcopy(model).to(dtype), "classification", structure).fit([(x.to(dtype), y)])
        for dtype in (torch.float32, torch.float64)
    ]
    for one, other in zip(*(la.curvature.blocks for la in fits), strict=True):
        if structure == "ekfac":  # bases differ by signs
            pairs = [(one.accumulator.tensors()["sums"].sum(), other.accumulator.tensors()["sums"].sum())]
        else:
            names = ("inputs", "outputs", "sums")
            found, expected = one.accumulator.tensors(), other.accumulator.tensors()
            pairs = [(found[name], expected[name]) for name in names if name in found]
        for mine, theirs in pairs:
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
    slopes = [la.curvature.gradient for la in fits]
    for name, expected in slopes[1].items():
        allowed = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(slopes[0][name].double(), expected, rtol=1e-4, atol=allowed)
    means = [la.predict(x[:4].to(dtype)).probs for la, dtype in zip(fits, (torch.float32, torch.float64), strict=True)]
    torch.testing.assert_close(means[0].double(), means[1], rtol=1e-3, atol=1e-5)


class Minds(nn.Module):
    """Does something to its activations between two layers that depends on how they lie in memory."""

    def __init__(self, does: Any) -> None:
        super().__init__()
        self.mix, self.head, self.does = nn.Conv2d(2, 3, 3), nn.Linear(3, 3), does
        self.called = does.__name__  # oracles tell models apart by what they hold

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.does(self.mix(x)).tanh().mean((2, 3)))
        return out


def _looks(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else 2 * x


def _refuses(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        raise RuntimeError("must be contiguous")
    return x


def _writes_through_a_view(x: Tensor) -> Tensor:
    x.view(len(x), -1).mul_(2)
    return x


@pytest.mark.parametrize("does", [_looks, _refuses, _writes_through_a_view])
def test_a_model_that_minds_keeps_its_order(always: None, does: Any) -> None:
    torch.manual_seed(0)
    model, x = Minds(does).double().eval(), images(6)[:, :, :5, :5]
    tape, found = record(model, x)
    assert tape.in_order
    assert not found.rearranged
    torch.testing.assert_close(found.outputs, model(x), rtol=0, atol=0)
    check(model, [(x, labels(6))])


def test_what_fails_after_it_changed_its_input_is_not_run_again(always: None) -> None:
    model = Minds(_refuses).double().eval()
    model.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))
    with pytest.raises(RuntimeError, match="must be contiguous"):
        record(model, images(6))


def test_the_model_comes_back_in_its_own_order() -> None:
    model = residual().float()
    before = [parameter.stride() for parameter in model.parameters()]
    Laplace(model, "classification", "kron").fit([(images(5, torch.float32), labels(5))])
    assert [parameter.stride() for parameter in model.parameters()] == before
