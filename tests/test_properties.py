"""Properties over random shapes, groups, dtypes and priors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lapwing import Gaussian, Laplace, matmul
from lapwing.curvature import kronecker
from lapwing.layers import moments
from lapwing.layers import window as windows
from lapwing.layers.convolution import Convolution
from lapwing.layers.moments import Moments, MomentSum, _ByLines, _ByPixels, _ByRows, _ByShifts, moment_sum
from lapwing.layers.rule import ExampleAxis
from lapwing.layers.window import Images, Window, trimmed
from lapwing.views import View
from tests import oracles

SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A convolution of any kind in float64 and an input for it."""
    dimensions = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dimensions))

    kernel, dilation = each(1, 3), each(1, 2)
    padding: Any = draw(st.sampled_from(["same", "valid", "numbers"]))
    stride = (1,) * dimensions if padding == "same" else each(1, 3)
    mode = draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    space = each(3, 6)
    padding = each(0, 1) if padding == "numbers" else padding
    assume(all(gap * (size - 1) + 1 <= length for gap, size, length in zip(dilation, kernel, space, strict=True)))
    assume(
        mode in ("zeros", "replicate")
        or all(gap * (k - 1) < s for gap, k, s in zip(dilation, kernel, space, strict=True))
    )
    kind: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    seed = draw(st.integers(0, 1000))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        conv = kind(
            groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), kernel, stride, padding, dilation,
            groups, bias=draw(st.booleans()), padding_mode=mode,
        ).double()  # fmt: skip
        x = torch.randn(draw(st.integers(1, 3)), conv.in_channels, *space, dtype=torch.float64)
    return conv, x


class Pooled(nn.Module):
    """A convolution read out by random weights that differ between positions."""

    def __init__(self, conv: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.conv = conv
        with torch.no_grad():
            shape = conv(x).shape[1:]
        self.register_buffer("readout", torch.randn(2, shape.numel(), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x)).flatten(1) @ self.readout.T  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@SETTINGS
@given(convolutions(), st.sampled_from(["diag", "block"]))
def test_convolutions_of_any_kind(case: tuple[nn.Module, Tensor], structure: str) -> None:
    conv, x = case
    torch.manual_seed(0)
    model = Pooled(conv, x)
    data = [(x, torch.randn(len(x), 2, dtype=torch.float64))]
    la = Laplace(model, "regression", structure).fit(data)
    assert la.curvature.blocks[0].layers[0].path == "convolution"
    expected = oracles.curvature(la, data)
    expected = torch.diag(expected.diagonal()) if structure == "diag" else expected
    torch.testing.assert_close(la.curvature.blocks[0].accumulator.matrix(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@SETTINGS
@given(convolutions())
def test_moments_of_convolutions(case: tuple[nn.Module, Tensor]) -> None:
    """Products of pixels, of lines and of rows give the same `Σ a aᵀ` as unfolding everything."""
    conv, x = case
    padded: Any = conv
    if padded.padding_mode != "zeros":
        x = nn.functional.pad(x, padded._reversed_padding_repeated_twice, mode=padded.padding_mode)
        padding: Any = 0
    else:
        padding = padded.padding
    rule = Convolution()
    weight = padded.weight.detach()
    arguments = (x, weight, None, padded.stride, padding, padded.dilation, padded.groups)
    call = rule.read(nn.functional.conv2d, arguments, {}, x, lambda value: View("w", ()) if value is weight else None)
    assert call is not None
    everything = (call, ExampleAxis(0), len(x), slice(None))
    images, a = rule.images(*everything), rule.inputs(*everything)
    if images is None:
        assert call.options["window"].kernel[0] == 1
        return
    for kind in (_ByPixels, _ByLines, _ByRows):
        total = kind(images.window, images.x, images.groups)
        for part in images.x.split(2):
            total.add(part)
        check_moments(total.collect(), a)


@st.composite
def small_convolutions(draw: st.DrawFn) -> tuple[tuple[Any, ...], Tensor, Tensor]:
    """Arguments of a convolution in one to three dimensions of images hardly larger than its kernel, input and weight."""
    dimensions = draw(st.integers(1, 3))

    def each(least: int, most: int) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=dimensions, max_size=dimensions))

    space, kernel, stride, dilation, padding = each(1, 4), each(1, 4), each(1, 3), each(1, 3), each(0, 3)
    spans = [gap * (size - 1) + 1 for size, gap in zip(kernel, dilation, strict=True)]
    assume(all(size + 2 * edge >= span for size, edge, span in zip(space, padding, spans, strict=True)))
    channels = draw(st.sampled_from([1, 2]))
    groups, generator = draw(st.integers(1, channels)), torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*sizes, generator=generator, dtype=torch.float64).requires_grad_()
        for sizes in ((3, channels, *space), (4, channels // groups, *kernel), (4,))
    )
    return (x, weight, bias, stride, padding, dilation, groups), x, weight


@settings(SETTINGS, max_examples=200)
@given(small_convolutions())
def test_kernel_entries_that_see_only_padding(case: tuple[tuple[Any, ...], Tensor, Tensor]) -> None:
    """Leaving them out changes neither the values nor the gradients of a convolution."""
    arguments, x, weight = case
    rule, function = Convolution(), (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[x.dim() - 3]
    expected, found = function(*arguments), rule.run(function, arguments, {})
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    g = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(expected, (x, weight), g)
    for one, other in zip(torch.autograd.grad(found, (x, weight), g), gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    call = rule.read(function, arguments, {}, x, lambda value: View("w", ()) if value is weight else None)
    assert call is not None
    total = torch.zeros(4, weight[0].numel() + 1, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "_FEW", 1)
        rule.add_total(replace(call, input=x.detach()), g, ExampleAxis(0), 3, total[:, :-1], total[:, -1])
    torch.testing.assert_close(total[:, :-1], gradients[1].flatten(1), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(total[:, -1], g.transpose(0, 1).flatten(1).sum(1), rtol=1e-12, atol=1e-13)


def test_what_a_convolution_refuses_stays_refused() -> None:
    x, weight = torch.zeros(2, 3, 3, 3), torch.zeros(4, 3, 3, 3)
    for wrong in (
        (x, weight, None, 1, 0, 2),  # larger than the image
        (x[:, :2], weight),
        (x, weight, torch.zeros(1)),
        (x[:, :, :1, :1], weight, None, 2, "same"),
    ):
        with pytest.raises(RuntimeError) as plain:
            nn.functional.conv2d(*wrong)
        with pytest.raises(RuntimeError) as ours:
            Convolution().run(nn.functional.conv2d, wrong, {})
        assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize(("size", "stride", "left", "edge"), [(1, 1, 1, 0), (2, 2, 2, 0), (2, 1, 3, 1), (8, 2, 3, 1)])
def test_how_much_of_a_kernel_of_three_is_left(size: int, stride: int, left: int, edge: int) -> None:
    window, entries = trimmed(Window((3,), (stride,), (1,), (1,), (1,)), torch.Size([size]))
    assert (window.kernel, window.before, window.after) == ((left,), (edge,), (edge,))
    assert entries == (slice(1 - edge, 1 - edge + left),)


@SETTINGS
@given(st.data())
def test_patches_times_a_matrix(data: st.DataObject) -> None:
    """Formed or convolved, and without the entries of a kernel that see nothing but padding."""
    dimensions, groups = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    kernel, stride, dilation, before = (
        tuple(data.draw(st.lists(st.integers(low, high), min_size=dimensions, max_size=dimensions)))
        for low, high in ((1, 3), (1, 2), (1, 2), (0, 2))
    )
    after = before if data.draw(st.booleans()) else tuple(edge + 1 for edge in before)
    window = Window(kernel, stride, dilation, before, after)
    spans = [gap * (size - 1) + 1 for size, gap in zip(kernel, dilation, strict=True)]
    least = [max(1, span - b - a) for span, b, a in zip(spans, before, after, strict=True)]
    space = [size + data.draw(st.integers(0, 3)) for size in least]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2 * groups, *space, generator=generator, dtype=torch.float64)
    matrix = torch.randn(groups, 2 * prod(kernel), 5, generator=generator, dtype=torch.float64)
    expected = torch.einsum("nqri,qij->nqrj", window.patches(x.unsqueeze(1), groups), matrix)
    for few in (0, 2**20):
        with patch.object(windows, "_FEW", few):
            torch.testing.assert_close(Images(window, x, groups).times(matrix), expected, rtol=1e-10, atol=1e-12)


@SETTINGS
@given(st.integers(1, 3), st.integers(1, 3), st.integers(2, 6), st.integers(2, 6), st.integers(1, 5))
def test_moments_by_shifts(groups: int, channels: int, height: int, width: int, images: int) -> None:
    """Images convolved with themselves, less what the edges of a kernel 3×3 miss, give what unfolding gives."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(images, groups * channels, height, width, generator=generator, dtype=torch.float64)
    window = Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    total = _ByShifts(window, x, groups)
    for part in x.split(2):
        total.add(part)
    check_moments(total.collect(), window.patches(x.unsqueeze(1), groups))


@pytest.mark.parametrize(
    ("channels", "space", "window", "way"),
    [
        (16, 16, Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1)), _ByShifts),
        (16, 2, Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1)), _ByPixels),
        (16, 16, Window((3, 3), (2, 2), (1, 1), (1, 1), (1, 1)), _ByRows),
        (16, 16, Window((3, 3), (1, 1), (1, 1), (0, 0), (0, 0)), _ByRows),
        (3, 16, Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1)), _ByLines),
        (3, 96, Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1)), _ByRows),
        (1, 28, Window((5, 5), (1, 1), (1, 1), (2, 2), (2, 2)), _ByLines),
        (6, 14, Window((5, 5), (1, 1), (1, 1), (0, 0), (0, 0)), _ByLines),
        (3, 32, Window((7, 7), (2, 2), (1, 1), (3, 3), (3, 3)), _ByLines),
        (3, 224, Window((7, 7), (2, 2), (1, 1), (3, 3), (3, 3)), _ByRows),
        (1, 6, Window((5, 5, 5), (1, 1, 1), (1, 1, 1), (2, 2, 2), (2, 2, 2)), _ByLines),
        (1, 16, Window((5, 5, 5), (1, 1, 1), (1, 1, 1), (2, 2, 2), (2, 2, 2)), _ByRows),
    ],
)
def test_the_way_to_moments_that_is_least_work(
    channels: int, space: int, window: Window, way: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "half_used", lambda: False)
    x = torch.zeros(1, channels, *[space] * len(window.kernel))
    assert isinstance(moment_sum(Images(window, x, 1)), way)


@pytest.mark.parametrize(("groups", "half", "way"), [(1, False, _ByRows), (1, True, None), (2, True, _ByRows)])
def test_patches_in_one_product_where_torch_uses_half_of_the_processor(
    groups: int, half: bool, way: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One large product gains there, and many small ones do not."""
    monkeypatch.setattr(matmul, "partly_used", lambda: True)
    monkeypatch.setattr(matmul, "half_used", lambda: half)
    found = moment_sum(Images(Window((3, 3), (2, 2), (1, 1), (1, 1), (1, 1)), torch.zeros(8, 64, 8, 8), groups))
    assert isinstance(found, way) if way is not None else found is None


@pytest.mark.parametrize("groups", [1, 2])
def test_moments_by_lines_where_torch_uses_half_of_the_processor(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for share in ("partly_used", "half_used"):
        monkeypatch.setattr(matmul, share, lambda: True)
    window = Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    x = torch.randn(300, 8 * groups, 9, 10, generator=torch.Generator().manual_seed(0))
    assert matmul.gains_twice(300 * 80 * 240, x)
    total = _ByLines(window, x, groups)
    total.add(x)
    check_moments(total.collect(), window.patches(x.unsqueeze(1), groups), rtol=1e-4, atol=1e-2)


def test_sums_for_images_of_many_sizes_do_not_add_up() -> None:
    """Each size has sums of its own, which are collected before they are many."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    data = [(torch.randn(2, 2, 8, size, dtype=torch.float64), torch.tensor([0, 1])) for size in range(8, 40)]
    kept, fits = [], []

    def watched(sums: Iterable[MomentSum], result: int) -> bool:
        sums = list(sums)
        kept.append(sum(one.size for one in sums))
        return inner(sums, result)

    inner = moments.too_many
    for limit in (2**22, 2**16):
        kept.clear()
        with patch.object(moments, "_KEPT", limit), patch.object(kronecker, "too_many", watched):
            found = Laplace(model, "classification", "kron").fit(data).curvature.blocks[0].accumulator
        assert isinstance(found, kronecker.KroneckerAccumulator)
        fits.append(found.inputs)
        assert (max(kept) > 2**18) == (limit == 2**22)
    torch.testing.assert_close(*fits, rtol=1e-12, atol=1e-12)


def check_moments(found: Moments, a: Tensor, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found.products, torch.einsum("nqri,nqrj->qij", a, a), rtol=rtol, atol=atol)
    torch.testing.assert_close(found.sums, a.sum((0, 2)), rtol=rtol, atol=atol)
    assert found.count == a.shape[0] * a.shape[2]


@SETTINGS
@given(
    st.lists(st.integers(1, 3), max_size=3),
    st.integers(1, 4),
    st.sampled_from(["diag", "block", "full", "lowrank"]),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)
def test_linear_layers_with_any_leading_dimensions(
    lead: list[int], examples: int, structure: str, dtype: torch.dtype, bias: bool
) -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 3, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)).reshape(len(x), -1, 3).sum(1)

    torch.manual_seed(0)
    model = Summed().to(dtype)
    data = [(torch.randn(examples, *lead, 2, dtype=dtype), torch.randn(examples, 3, dtype=dtype))]
    la = Laplace(model, "regression", structure).fit(data)
    double = Laplace(Summed().double(), "regression", structure)
    double.model.load_state_dict(model.state_dict())
    exact = double.fit([(x.double(), y.double()) for x, y in data])
    expected = oracles.curvature(exact, [(x.double(), y.double()) for x, y in data])
    expected = torch.diag(expected.diagonal()) if structure == "diag" else expected
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    found = la.curvature.blocks[0].accumulator.matrix().double()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@SETTINGS
@given(
    st.dictionaries(st.sampled_from(["0.weight", "0.bias", "2.weight", "2.bias"]), st.floats(1e-4, 1e4), max_size=4),
    st.floats(1e-4, 1e4),
    st.floats(0.01, 100),
    st.floats(0.01, 100),
    st.sampled_from(["diag", "kron", "block", "full", "lowrank"]),
)
def test_evidence_of_any_groups(
    groups: dict[str, float], rest: float, noise: float, temperature: float, structure: str
) -> None:
    la = _regression(structure).at(prior={**groups, "*": rest}, noise=noise, temperature=temperature)
    matrix = torch.block_diag(*[block.accumulator.matrix() for block in la.curvature.blocks])
    posterior = la.posterior
    precision, weights = (
        torch.cat([block.pack(values) for block in la.curvature.blocks])
        for values in ({n: p.expand(posterior.sizes[n]) for n, p in posterior.precisions.items()}, posterior.weights)
    )
    statistics = la.curvature.statistics
    log_likelihood = float(statistics.log_likelihood_at(torch.tensor(noise, dtype=torch.float64)))
    expected = oracles.log_evidence(log_likelihood, matrix, precision, weights, temperature / noise, temperature)
    assert float(la.log_evidence()) == pytest.approx(expected, rel=1e-9, abs=1e-8)
    inverse = torch.linalg.inv(temperature / noise * matrix + torch.diag(precision))
    variances = torch.cat([block.pack(posterior.variances()) for block in la.curvature.blocks])
    torch.testing.assert_close(variances, inverse.diagonal(), rtol=1e-6, atol=0)


_FITTED: dict[str, Laplace] = {}


def _regression(structure: str) -> Laplace:
    if structure not in _FITTED:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        x = torch.randn(9, 2, dtype=torch.float64)
        _FITTED[structure] = Laplace(model, Gaussian(), structure).fit([(x, x.sum(1, keepdim=True))])
    return _FITTED[structure]


def test_outputs_without_an_output_dimension() -> None:
    """`[N]` outputs, for regression and for a yes or no."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).squeeze(-1)

    torch.manual_seed(0)
    model, x = Flat().double(), torch.randn(6, 3, dtype=torch.float64)
    for likelihood, y in (("regression", torch.randn(6, dtype=torch.float64)), ("binary", torch.randint(2, (6,)))):
        la = Laplace(model, likelihood, "full").fit([(x, y)])
        torch.testing.assert_close(la.curvature.blocks[0].accumulator.matrix(), _flat_curvature(la, x, y))
        assert la.latent(x).mean.shape == (6,)
        assert la.latent(x).covariance.shape == (6, 1, 1)
        assert la.latent(x, diagonal=True).covariance.shape == (6,)
        assert la.predict(x).log_prob(y).shape == (6,)


def _flat_curvature(la: Laplace, x: Tensor, y: Tensor) -> Tensor:
    design = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    f = oracles.evaluate(la.model, x)
    weight = torch.ones_like(f) if la.likelihood.name == "gaussian" else torch.sigmoid(f) * torch.sigmoid(-f)
    return design.T @ (weight[:, None] * design)
