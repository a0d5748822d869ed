"""Products by oneDNN against the same in float64, and fits with them against fits without."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lapwing import Laplace, channels_last, matmul
from lapwing.gram import Gram

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of torch comes without oneDNN"
)
EPS = torch.finfo(torch.float32).eps


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """As on a processor that torch's own products use half of; the shapes of what oneDNN multiplies."""
    found: list[tuple[int, ...]] = []
    inner = matmul._onednn

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append((*x.shape, len(weight)))
        return inner(x, weight, bias)

    monkeypatch.setattr(matmul, "partly_used", lambda: True)
    monkeypatch.setattr(matmul, "half_used", lambda: True)
    monkeypatch.setattr(matmul, "_onednn", watched)
    return found


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor, sizes: Tensor, count: int) -> bool:
    """Whether sums of so many numbers agree up to rounding, which is random; `sizes` are sums of the absolute values."""
    return bool(((found.double() - expected).abs() <= EPS * math.sqrt(count) * sizes).all())


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "turned": lambda x: x.T.contiguous().T,
    "gaps between rows": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "gaps between columns": lambda x: torch.cat([x.T, x.T], 1)[:, : len(x)].T,
    "every other": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("shape", [(220, 260, 90), (60, 330, 230), (1, 2400, 2000), (300, 77, 300)])
def test_products_of_any_layout(
    left: str, right: str, shape: tuple[int, int, int], calls: list[tuple[int, ...]]
) -> None:
    n, k, m = shape
    a, b = random(n, k), random(k, m, seed=1)
    a64, b64 = a.double(), b.double()
    found = matmul.matmul(LAYOUTS[left](a), LAYOUTS[right](b))
    assert len(calls) == 1
    assert found.shape == (n, m)
    assert close(found, a64 @ b64, a64.abs() @ b64.abs(), k)
    found = matmul.across(LAYOUTS[left](a.T), LAYOUTS[right](b))
    assert len(calls) == 2
    assert close(found, a64 @ b64, a64.abs() @ b64.abs(), k)


@pytest.mark.parametrize(("shape", "fast"), [((300, 120, 140), True), ((5, 2100, 2100), False), ((20, 30, 40), False)])
def test_sums_are_added_where_they_belong(
    shape: tuple[int, int, int], fast: bool, calls: list[tuple[int, ...]]
) -> None:
    """A large one by torch's own, which makes no second matrix of its size."""
    k, n, m = shape
    a, b, whole = random(k, n), random(k, m, seed=1), torch.ones(n, m + 1)
    matmul.add_across(whole[:, :-1], a, b)
    a64, b64 = a.double(), b.double()
    assert close(whole[:, :-1], 1 + a64.T @ b64, 1 + a64.abs().T @ b64.abs(), k)
    assert bool((whole[:, -1] == 1).all())
    assert bool(calls) == fast


def test_few_numbers_of_rows_are_seen(calls: list[tuple[int, ...]]) -> None:
    """oneDNN keeps memory for every size."""
    x, w, layer = random(1500, 120), random(120, 140, seed=1), nn.Linear(120, 140)
    for count in range(700, 1500, 7):
        matmul.matmul(x[:count], w)
        matmul.across(x[:count], x[:count])
        matmul.linear(x[:count], layer.weight, layer.bias)
        gram = Gram.zeros(1, 600, True, x)
        gram.add_rows(x[:count].repeat(1, 5).unsqueeze(0), slice(None))
    assert len({call[0] for call in calls}) <= 12
    assert len({call[1] for call in calls}) <= 12


@pytest.mark.parametrize("groups", [1, 3])
def test_products_of_every_group(groups: int, calls: list[tuple[int, ...]]) -> None:
    x, matrix = random(2, 60, groups, 9, 70), random(groups, 70, 60, seed=1)
    expected = torch.einsum("knqri,qij->knqrj", x.double(), matrix.double())
    sizes = torch.einsum("knqri,qij->knqrj", x.double().abs(), matrix.double().abs())
    assert close(matmul.times(x, matrix), expected, sizes, 70)
    assert len(calls) == (groups == 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("count", "width"), [(2000, 24), (2000, 72), (1500, 256), (600, 600), (140, 520), (600, 1100)])
def test_sums_of_outer_products(count: int, width: int, bias: bool, calls: list[tuple[int, ...]]) -> None:
    rows = random(count, width)
    full = torch.cat([rows, torch.ones(count, 1)], 1).double() if bias else rows.double()
    gram = Gram.zeros(1, full.shape[1], True, rows)
    for part in rows.split(count - 10):
        gram.add_rows(part.unsqueeze(0), slice(None), bias)
    assert close(gram.sums[0], full.T @ full, full.abs().T @ full.abs(), count)
    assert bool(calls) == (width > 512)
    assert (matmul.moments(rows) is not None) == (72 <= width <= 520)


@pytest.mark.parametrize("lead", [(600,), (6, 100), (2, 3, 100)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_and_its_derivatives(lead: tuple[int, ...], bias: bool, calls: list[tuple[int, ...]]) -> None:
    """Values, gradients and gradients of gradients are those of `functional.linear` in float64."""

    def derivatives(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        x, w = random(*lead, 80).to(dtype).requires_grad_(), random(120, 80, seed=1).to(dtype).requires_grad_()
        b = random(120, seed=2).to(dtype).requires_grad_() if bias else None
        given = [x, w] if b is None else [x, w, b]
        out = function(x, w, b)
        loss = (out.square() * random(*lead, 120, seed=3).to(dtype)).mean()
        first = torch.autograd.grad(loss, given, create_graph=True)
        second = torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros((), dtype=dtype)), given)
        return [value.detach() for value in (out, *first, *second)]

    expected = derivatives(functional.linear, torch.float64)
    found = derivatives(matmul.linear, torch.float32)
    assert calls[0] == (640, 80, 120)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def test_gradients_are_made_only_where_they_are_asked_for(calls: list[tuple[int, ...]]) -> None:
    """Also inside the backward pass of another function, which asks for others."""
    x, layer = random(600, 80).requires_grad_(), nn.Linear(80, 120)
    out = matmul.linear(x, layer.weight, layer.bias)
    free = torch.autograd.grad(out.sum(), [x, *layer.parameters()], retain_graph=True)
    calls.clear()
    (alone,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert len(calls) == 1  # one product, for x
    assert torch.equal(alone, free[0])
    (weight,) = torch.autograd.grad(out.sum(), layer.weight, retain_graph=True)
    assert torch.equal(weight, free[1])
    out.sum().backward()
    for parameter, gradient in zip([x, *layer.parameters()], free, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            with torch.enable_grad():
                ctx.own = x.detach().requires_grad_(), weight.detach().requires_grad_()
                ctx.out = matmul.linear(ctx.own[0], ctx.own[1], None)
            out: Tensor = ctx.out.detach()
            return out

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
            ctx.inner = torch.autograd.grad(ctx.out, ctx.own, g)
            return tuple(ctx.inner)

    made = random(120, 80, seed=4).requires_grad_() * 2  # an activation that is the weight of another
    nested: Tensor = Nested.apply(x, made)  # type: ignore[no-untyped-call]
    (found,) = torch.autograd.grad(nested.square().sum(), made)
    expected = torch.autograd.grad(functional.linear(x, made).square().sum(), made)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_inputs_of_frozen_layers_are_not_kept(calls: list[tuple[int, ...]]) -> None:
    u, layer = random(600, 120).requires_grad_() * 1, nn.Linear(120, 120).requires_grad_(False)
    before = u.detach().clone().requires_grad_()
    u += torch.tanh(matmul.linear(u, layer.weight, layer.bias))  # changes the input in place
    (before + torch.tanh(layer(before))).sum().backward()
    u.sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("layout", ["every other", "one for all"])
def test_biases_of_any_layout(layout: str, calls: list[tuple[int, ...]]) -> None:
    x, w = random(600, 80), random(120, 80, seed=1)
    b = random(240, seed=2)[::2] if layout == "every other" else random(1, seed=2).expand(120)
    found = matmul.linear(x, w, b)
    assert len(calls) == 1
    torch.testing.assert_close(found, functional.linear(x, w, b), rtol=1e-5, atol=1e-4)


class Doubled(Tensor):
    """A kind of its own, of which linear functions are twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [value.as_subclass(Tensor) if isinstance(value, Doubled) else value for value in args]
        found = func(*plain, **(kwargs or {}))
        return 2 * found if func is functional.linear else found


def test_transforms_and_kinds_of_tensors_are_left_to_torch(calls: list[tuple[int, ...]]) -> None:
    x, w = random(3, 600, 80), random(120, 80, seed=1)
    expected = x @ w.T
    found = torch.func.vmap(lambda one: matmul.linear(one, w, None))(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    moved = torch.func.jvp(lambda one: matmul.linear(one, w, None), (x[0],), (x[1],))[1]
    torch.testing.assert_close(moved, expected[1], rtol=1e-5, atol=1e-4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x[0], x[1])
        tangent = torch.autograd.forward_ad.unpack_dual(matmul.matmul(dual, w.T)).tangent
    torch.testing.assert_close(tangent, expected[1], rtol=1e-5, atol=1e-4)
    twice = matmul.linear(x[0], w.as_subclass(Doubled), None)
    torch.testing.assert_close(twice.as_subclass(Tensor), 2 * expected[0], rtol=1e-5, atol=1e-4)
    assert not calls


def test_only_what_gains(calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = random(170, 170), random(20, 20)
    matmul.matmul(small, small)
    matmul.matmul(large.double(), large.double())
    matmul.matmul(large.to(torch.bfloat16), large.to(torch.bfloat16))
    wanted = matmul.matmul(large.clone().requires_grad_(), large)
    assert wanted.requires_grad
    torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        matmul.matmul(large, large)
    finally:
        torch.backends.mkldnn.set_flags(_enabled=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul.linear(large, large, None).dtype == torch.bfloat16
    monkeypatch.setattr(matmul, "partly_used", lambda: False)
    matmul.matmul(large, large)
    assert matmul.moments(large) is None
    assert matmul.squares_of_products(random(2, 300, 300), random(2, 300, 300)) is None
    assert not calls


AMD, INTEL = "AuthenticAMD", "GenuineIntel"


@pytest.mark.parametrize(("maker", "family", "kernels", "partly", "half"), [
    (AMD, "26", "AVX512", True, True), (AMD, "25", "AVX512", True, False), (AMD, None, "AVX512", True, False),
    (AMD, "26", "AVX2", False, False), (INTEL, "26", "AVX512", False, False), (None, None, "DEFAULT", False, False),
])  # fmt: skip
def test_which_processors(
    maker: str | None, family: str | None, kernels: str, partly: bool, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Zen 4 (family 25) torch's own products leave a part unused, of Zen 5 (26) half."""
    monkeypatch.setattr(matmul, "_said", {"vendor_id": maker, "cpu family": family}.get)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kernels)
    monkeypatch.setattr(matmul, "partly_used", matmul.partly_used.__wrapped__)
    libraries = torch.backends.mkl.is_available()
    assert matmul.partly_used() == (partly and libraries)
    assert matmul.half_used.__wrapped__() == (half and libraries)


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="this system says nothing of its processor there")
def test_what_the_system_says_of_its_processor() -> None:
    assert matmul._said("processor") == "0"
    assert matmul._said("proc") is None


@pytest.mark.parametrize("width", [64, 72])
def test_narrow_sums_in_one_product_where_part_of_the_processor_is_unused(
    width: int, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Zen 4 half of a product by MKL takes less time, but of the narrowest; one by one products do of long sums."""
    few, long = random(200, 400), random(2, 100, 600)
    assert matmul.moments(few) is not None
    assert matmul.squares_of_products(long, long.mT.repeat(1, 1, 2)) is not None
    monkeypatch.setattr(matmul, "half_used", lambda: False)
    calls.clear()
    rows = random(4000, width)
    assert (matmul.moments(rows) is not None) == (width == 64)
    assert matmul.moments(few) is None
    assert matmul.squares_of_products(long, long.mT.repeat(1, 1, 2)) is None
    gram = Gram.zeros(1, width, True, rows)
    gram.add_rows(rows.unsqueeze(0), slice(None))
    assert close(gram.sums[0], rows.T.double() @ rows.double(), rows.T.double().abs() @ rows.double().abs(), 4000)
    assert not calls


@pytest.mark.parametrize("right", ["dense", "turned", "gaps between rows"])
@pytest.mark.parametrize("left", ["dense", "turned"])
@pytest.mark.parametrize("size", [200, 210])
def test_squares_of_products_that_are_large_enough(
    left: str, right: str, size: int, calls: list[tuple[int, ...]]
) -> None:
    a, b = random(3, size, 200), random(3, 200, size, seed=1)
    expected = (a.double() @ b.double()).square().sum(0)
    sizes = (a.double().abs() @ b.double().abs()).square().sum(0)
    found = matmul.squares_of_products(
        a if left == "dense" else a.mT.contiguous().mT,
        b if right == "dense" else b.mT.contiguous().mT if right == "turned" else torch.cat([b, b], 2)[..., :size],
    )
    assert (found is None) == (size == 200)
    assert len(calls) == (0 if size == 200 else 3)
    if found is not None:
        assert close(found, expected, sizes, 2 * 200)
    wide = random(2, 800, 20), random(2, 20, 800, seed=1)  # whose results do not stay close to the processor
    assert matmul.squares_of_products(*wide) is None


class Pairwise(nn.Module):
    """A linear function whose weight is an activation: gradients must pass through the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(20, 280), nn.Linear(20, 280), nn.Linear(128 * 128, 3)

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.left(x), self.right(x), strict=True)
        out: Tensor = self.head(torch.stack([functional.linear(one, other) / 280 for one, other in pairs]).flatten(1))
        return out


def sequences() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 96), nn.GELU(), nn.Linear(96, 80), nn.Flatten(), nn.Linear(80 * 6, 3))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (4, 3, 20)), nn.Conv2d(4, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(192, 3),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(240, 300), nn.Tanh(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 3)), (240,)),
    "sequences": (sequences, (6, 40)),
    "images": (images, (240,)),
    "weight that is an activation": (Pairwise, (128, 20)),
}  # fmt: skip


CASES = [
    (network, structure, curvature)
    for network in NETWORKS
    for structure in ("kron", "ekfac", "diag")
    for curvature in ("ggn", "fisher", "empirical")
]


@pytest.mark.parametrize(("network", "structure", "curvature"), [*CASES, ("mlp", "kron", "kfra")])
def test_fits_are_the_same(network: str, structure: str, curvature: str, calls: list[tuple[int, ...]]) -> None:
    """Evidence, gradient and predictions in float32 against the same fit in float64, where oneDNN has no part."""
    build, shape = NETWORKS[network]
    torch.manual_seed(0)
    model = build().eval()
    x, y = random(480, *shape)[: 48 if network == "weight that is an activation" else None], torch.arange(480) % 3

    def fit(dtype: torch.dtype) -> tuple[Laplace, Tensor, Tensor]:
        la = Laplace(model.to(dtype), "classification", structure=structure, curvature=curvature)
        batches = list(zip(x.to(dtype).split(160), y[: len(x)].split(160), strict=True))
        la.fit(batches, generator=torch.Generator().manual_seed(1))
        return la, la.log_evidence(), la.latent(x[:20].to(dtype)).covariance

    exact = fit(torch.float64)
    assert not calls
    found = fit(torch.float32)
    assert calls
    assert ((128, 280, 128) in calls) == (network == "weight that is an activation")
    torch.testing.assert_close(found[1].double(), exact[1].double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(found[2].double(), exact[2], rtol=2e-3, atol=1e-4 * float(exact[2].abs().max()))
    for name, value in exact[0].curvature.gradient.items():
        gap = (found[0].curvature.gradient[name].double() - value).abs().max()
        assert gap <= 1e-4 * value.abs().max() + 1e-6, name


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("structure", ["diag", "ekfac"])
def test_squares_of_gradients_of_large_images(
    structure: str, last: bool, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an example take a product of their own, in either order in memory; against the same in float64."""
    monkeypatch.setattr(channels_last, "gains", lambda x, w: last and x.dim() == 4)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 1), nn.ReLU(), nn.Conv2d(32, 256, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(256, 3),
    ).eval()  # fmt: skip
    x, y = random(12, 1, 8, 8), torch.arange(12) % 3

    def diagonal(dtype: torch.dtype) -> Tensor:
        la = Laplace(model.to(dtype), "classification", structure).fit([(x.to(dtype), y)])
        return torch.cat([value.flatten() for value in la.posterior.curvature_diagonal().values()])

    expected = diagonal(torch.float64)
    assert not calls
    found = diagonal(torch.float32)
    alone = (288, 64, 512) if structure == "diag" else (512, 64, 289)  # of two columns with 256 channels each
    assert calls.count(alone) == 12
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.max()))
