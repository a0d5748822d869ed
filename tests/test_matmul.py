"""Products by oneDNN against the same in float64, and fits with them against fits without."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lapwing import Laplace, matmul
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
@pytest.mark.parametrize("shape", [(220, 230, 90), (60, 330, 230), (1, 2400, 2000)])
def test_products_of_any_layout(
    left: str, right: str, shape: tuple[int, int, int], calls: list[tuple[int, ...]]
) -> None:
    n, k, m = shape
    a, b = random(n, k), random(k, m, seed=1)
    a64, b64 = a.double(), b.double()
    found = matmul.matmul(LAYOUTS[left](a), LAYOUTS[right](b))
    assert len(calls) == 1
    assert close(found, a64 @ b64, a64.abs() @ b64.abs(), k)
    into = torch.ones(n, m)
    matmul.add_matmul(into, LAYOUTS[left](a), LAYOUTS[right](b))
    assert close(into, 1 + a64 @ b64, 1 + a64.abs() @ b64.abs(), k)


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
    assert calls[0] == (600, 80, 120)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def test_gradients_of_weights_are_left_out_where_they_are_held(calls: list[tuple[int, ...]]) -> None:
    x, layer = random(600, 80).requires_grad_(), nn.Linear(80, 120)
    out = matmul.linear(x, layer.weight, layer.bias)
    free = torch.autograd.grad(out.sum(), [x, *layer.parameters()], retain_graph=True)
    before = len(calls)
    with matmul.weights_held():
        held = torch.autograd.grad(out.sum(), [x, *layer.parameters()], retain_graph=True, allow_unused=True)
    assert len(calls) == before + 1  # one product, for x
    assert torch.equal(held[0], free[0])
    assert all(gradient is None for gradient in held[1:])
    with pytest.raises(KeyError), matmul.weights_held():
        raise KeyError
    after = torch.autograd.grad(out.sum(), layer.weight)[0]
    assert torch.equal(after, free[1])


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
    monkeypatch.setattr(matmul, "half_used", lambda: False)
    matmul.matmul(large, large)
    assert matmul.moments(large) is None
    assert not calls


@pytest.mark.parametrize(("maker", "kernels", "used"), [
    ("AuthenticAMD", "AVX512", True), ("GenuineIntel", "AVX512", False), ("AuthenticAMD", "AVX2", False),
    (None, "DEFAULT", False),
])  # fmt: skip
def test_which_processors(maker: str | None, kernels: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_maker", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kernels)
    assert matmul.half_used.__wrapped__() == (used and torch.backends.mkl.is_available())


class Pairwise(nn.Module):
    """A linear function whose weight is an activation: gradients must pass through the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(20, 280), nn.Linear(20, 280), nn.Linear(64 * 64, 3)

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
    "weight that is an activation": (Pairwise, (64, 20)),
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
    torch.testing.assert_close(found[1].double(), exact[1].double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(found[2].double(), exact[2], rtol=2e-3, atol=1e-4 * float(exact[2].abs().max()))
    for name, value in exact[0].curvature.gradient.items():
        gap = (found[0].curvature.gradient[name].double() - value).abs().max()
        assert gap <= 1e-4 * value.abs().max() + 1e-6, name
