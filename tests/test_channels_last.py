"""Images with their channels last in memory: the same numbers, and models that mind keep their own order."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lapwing import Laplace, channels_last, gradients
from lapwing.batches import Inputs
from lapwing.guard import borrowed
from lapwing.layers import window as window_module
from lapwing.matmul import is_plain
from lapwing.tape import Record, Tape
from tests import oracles
from tests.test_reading import check, labels

STRUCTURES = ["diag", "kron", "ekfac", "block", "full"]
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


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

    def gains(x: Tensor, w: Tensor) -> bool:
        return x.dim() == w.dim() == 4 and len(x) > 1 and is_plain(x) and is_plain(w)

    monkeypatch.setattr(channels_last, "gains", gains)
    monkeypatch.setattr(window_module, "_MANY", 1)


def record(model: nn.Module, *batches: Tensor) -> Record:
    """Of the last of some batches."""
    tape = Tape(model, dict(model.named_parameters()))
    with borrowed(model, tape.parameters):
        return [tape.record(Inputs((x.clone(),), {})) for x in batches][-1]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_fits_are_those_of_brute_force(always: None, structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = residual(), images(5)
    assert record(model, x).rearranged
    if structure != "kron":
        check(model, [(x[:3], labels(5)[:3]), (x[3:], labels(5)[3:])], structure)
        return
    la = Laplace(model, "classification", "kron").fit([(x, labels(5))])
    monkeypatch.setattr(channels_last, "gains", lambda x, w: False)
    plain = Laplace(model, "classification", "kron").fit([(x, labels(5))])
    for block, other in zip(la.curvature.blocks, plain.curvature.blocks, strict=True):  # the grouped one, too
        torch.testing.assert_close(block.accumulator.matrix(), other.accumulator.matrix(), rtol=1e-10, atol=1e-13)
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
    found = record(residual(), images(5))
    index = next(i for i, use in enumerate(found.uses) if use.weight == "stem.weight")
    (g,) = found.grad([found.uses[index].edge], torch.ones_like(found.outputs), batched=False)
    assert g is not None
    assert channels_last.are_last(g)


@needs_onednn
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
    assert record(model, x).rearranged
    assert not record(copy.deepcopy(model).double(), x.double()).rearranged
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
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-6 * float(theirs.abs().max()))
    slopes = [la.curvature.gradient for la in fits]
    for name, expected in slopes[1].items():
        allowed = 2e-6 * float(expected.abs().max())
        torch.testing.assert_close(slopes[0][name].double(), expected, rtol=1e-5, atol=allowed)
    means = [la.predict(x[:4].to(dtype)).probs for la, dtype in zip(fits, (torch.float32, torch.float64), strict=True)]
    torch.testing.assert_close(means[0].double(), means[1], rtol=0, atol=1e-6)


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


def _writes_into_what_may_be_no_copy(x: Tensor) -> Tensor:
    """Its outputs are right, but what the sigmoid kept for its gradient is overwritten where it is none."""
    tokens = x.sigmoid().flatten(2).transpose(1, 2).contiguous()
    tokens += 1
    return tokens.transpose(1, 2).unflatten(2, x.shape[2:])


def _decides(x: Tensor) -> Tensor:
    return x if bool(x.sum() > -1e9) else 2 * x


MINDS = [_looks, _refuses, _writes_through_a_view, _writes_into_what_may_be_no_copy, _decides]


@pytest.mark.parametrize("does", MINDS)
def test_a_model_that_minds_keeps_its_order(always: None, does: Any) -> None:
    torch.manual_seed(0)
    model, x = Minds(does).double().eval(), images(6)[:, :, :5, :5]
    found = record(model, x)
    assert not found.rearranged
    torch.testing.assert_close(found.outputs, model(x), rtol=0, atol=0)
    check(model, [(x, labels(6))])


def _minds_when_large(x: Tensor) -> Tensor:
    return _looks(x) if x.shape[-1] > 3 else x


def test_images_of_another_size_are_compared_anew(always: None) -> None:
    torch.manual_seed(0)
    model, small, large = Minds(_minds_when_large).double().eval(), images(6)[:, :, :5, :5], images(6)[:, :, :7, :7]
    assert record(model, small).rearranged
    assert not record(model, small, large).rearranged
    check(model, [(small, labels(6)), (large, labels(6))])


def test_a_model_that_changes_its_input_in_place(always: None) -> None:
    """It sees every input once."""
    torch.manual_seed(0)
    model, x = Minds(torch.tanh).double().eval(), images(6)[:, :, :5, :5]
    before = copy.deepcopy(model)
    model.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))
    found = record(model, x)
    assert found.rearranged
    torch.testing.assert_close(found.outputs, before(2 * x), rtol=1e-12, atol=1e-12)


def _of_six(x: Tensor) -> Tensor:
    assert len(x) in (2, 6), "six, please"
    return x


def test_a_model_that_fails_on_part_of_a_batch(always: None) -> None:
    torch.manual_seed(0)
    model, x = Minds(_of_six).double().eval(), images(6)[:, :, :5, :5]
    assert record(model, x).rearranged
    check(model, [(x, labels(6))], "block")


def test_what_fails_anyway_says_why(always: None) -> None:
    with pytest.raises(RuntimeError, match="expected input"):
        record(residual(), torch.randn(6, 5, 16, 16, dtype=torch.float64))


class Mapped(nn.Module):
    """Convolves each image by itself, under `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.head = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.func.vmap(lambda image: self.mix(image.unsqueeze(0)).squeeze(0))(self.first(x))
        out: Tensor = self.head(mixed.tanh().mean((2, 3)))
        return out


def test_convolutions_under_vmap(always: None) -> None:
    torch.manual_seed(0)
    model, x = Mapped().double().eval(), images(6)[:, :, :6, :6]
    assert record(model, x).rearranged
    check(model, [(x, labels(6))])


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(3), nn.InstanceNorm2d(3, affine=True), nn.InstanceNorm2d(3), nn.GroupNorm(1, 3)]
)
@pytest.mark.parametrize("images_last", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_norms_of_one_image(always: None, norm: nn.Module, images_last: bool, count: int) -> None:
    """Of which torch differentiates some wrongly where the channels of the image come last."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), copy.deepcopy(norm), nn.Tanh(), nn.Conv2d(3, 3, 3), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(3, 3),
    ).double().eval()  # fmt: skip
    x = images(count)[:, :, :6, :6]
    if images_last:  # by the user, as the weights are
        x = channels_last.put_last(x)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    la = Laplace(model, "classification", "block").fit([(x, labels(count))])
    alone = [image.unsqueeze(0).contiguous() for image in x]
    plain = copy.deepcopy(model).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    expected = sum(_gradient(plain, image, y) for image, y in zip(alone, labels(count).split(1), strict=True))
    found = torch.cat([la.curvature.gradient[name].flatten() for name, _ in model.named_parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of the log-probability of one image in the usual order, norms written out so that none of torch's is used."""
    hooks = [
        part.register_forward_hook(lambda part, args, _: _normalized(part, args[0]))
        for part in model.modules()
        if isinstance(part, nn.InstanceNorm2d)
    ]
    loss = -functional.cross_entropy(model(x), y)
    for hook in hooks:
        hook.remove()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def _normalized(norm: nn.Module, x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, (2, 3), correction=0, keepdim=True)
    y = (x - mean) / (variance + float(norm.eps)).sqrt()  # type: ignore[arg-type]
    weight, bias = norm.weight, norm.bias
    return y if weight is None else y * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)  # type: ignore[operator, union-attr]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.inner, self.head = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda y: self.inner(y).tanh(), self.mix(x), use_reentrant=False)
        out: Tensor = self.head(hidden.mean((2, 3)))
        return out


def test_checkpoints_and_models_that_have_them_last_already(always: None) -> None:
    torch.manual_seed(0)
    x, y = images(6)[:, :, :6, :6], labels(6)
    model = Checkpointed().double().eval()
    assert record(model, x).rearranged
    check(model, [(x, y)])
    own = Minds(torch.tanh).double().eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    check(own, [(channels_last.put_last(x), y)])


def test_the_model_comes_back_in_its_own_order(always: None) -> None:
    model = residual()
    assert record(model, images(5)).rearranged
    before = [parameter.stride() for parameter in model.parameters()]
    Laplace(model, "classification", "kron").fit([(images(5), labels(5))])
    assert [parameter.stride() for parameter in model.parameters()] == before


@needs_onednn
def test_of_a_single_image_nothing_is_gained() -> None:
    x, w = torch.zeros(2, 16, 4, 4), torch.zeros(16, 16, 3, 3)
    assert channels_last.gains(x, w)
    assert not channels_last.gains(x[:1], w)


def test_sizes_beyond_the_first_few_are_not_compared(always: None) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)).double().eval()
    sizes = [images(3)[:, :, :size, :4] for size in range(4, 14)]
    assert record(model, *sizes[:8]).rearranged
    assert not record(model, *sizes[:9]).rearranged


def test_columns_lie_side_by_side(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that those of an example take one product, also after their channels were rotated."""
    seen: list[bool] = []
    inner = gradients._side_by_side

    def looked(g: Tensor) -> bool:
        seen.append(inner(g))
        return seen[-1]

    monkeypatch.setattr(gradients, "_side_by_side", looked)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 3, 3), nn.Flatten(), nn.Linear(108, 3))
    for structure in ("diag", "ekfac"):
        Laplace(model.double(), "classification", structure).fit([(images(6)[:, :, :10, :10], labels(6))])
        assert seen
        assert all(seen)
        seen.clear()


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux does")
def test_freed_memory_serves_again() -> None:
    """In processes of their own: pages are cleared once, where they are at every turn without."""
    script = """
import resource, sys, torch
from lapwing.allocator import keep_freed_memory
torch.set_default_device("meta")
if sys.argv[1] == "keep": keep_freed_memory()
def turn(): [torch.ones(2**20, device="cpu") for _ in range(8)]
turn(), turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    without, kept = (
        int(subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, check=True).stdout)
        for how in ("without", "keep")
    )
    assert 10 * kept < without
