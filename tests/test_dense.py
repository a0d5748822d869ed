"""Dense and sequence outputs: a class or a number at every position of an image or a text."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.unet import UNet
from lapwing import Categorical, Gaussian, InputError, Laplace
from lapwing.batches import asked
from lapwing.predictive.portions import portions
from lapwing.tape import Tape
from tests import oracles

SIDE, IGNORED = 4, -100


class CausalLanguageModel(nn.Module):
    """One layer of causal attention; the embedding is the head as well. Tokens `[N, L]` to logits `[N, L, V]`."""

    def __init__(self, vocabulary: int = 6, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        x = x + scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        return functional.linear(x + torch.tanh(self.mlp(x)), self.embed.weight)


def unet(classes: int = 2) -> UNet:
    """A tiny one in float64, with statistics of its own in every BatchNorm."""
    torch.manual_seed(0)
    model = UNet(channels=1, classes=classes, width=2, levels=1).double().train()
    for _ in range(20):
        model(2 * torch.randn(8, 1, SIDE, SIDE, dtype=torch.float64))
    return model.eval()


def images(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Some pixels of the masks are not observed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, SIDE, SIDE, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (count, SIDE, SIDE), generator=generator)
    y[0, :2], y[1] = IGNORED, IGNORED  # half of an image, and all of one
    return x, y


def texts(padded: bool) -> list[tuple[Tensor, Tensor]]:
    """Sentences of 4 and of 2 tokens and what comes next, in one batch with padding, or each by itself."""
    long, short = torch.tensor([[1, 4, 2, 5], [3, 3, 1, 2]]), torch.tensor([[5, 2], [4, 1], [2, 2]])
    after, next_ = torch.tensor([[4, 2, 5, 0], [3, 1, 2, 0]]), torch.tensor([[2, 0], [1, 0], [2, 0]])
    if not padded:
        return [(long, after), (short, next_)]
    filled = functional.pad(short, (0, 2), value=3), functional.pad(next_, (0, 2), value=IGNORED)
    return [(torch.cat([long, filled[0]]), torch.cat([after, filled[1]]))]


def observed_ggn(model: nn.Module, names: list[str], x: Tensor, y: Tensor, dim: int) -> dict[str, Tensor]:
    """`Σ J_eᵀ (diag p − ppᵀ) J_e` over the observed positions e alone, those left out never looked at."""
    rows = oracles.jacobian(model, x, names)
    flat = torch.cat([rows[name].flatten(2) for name in names], dim=2)  # [N, D, p]
    outputs = oracles.evaluate(model, x)
    flat = flat.unflatten(1, outputs.shape[1:]).movedim(dim % outputs.dim(), -2)  # [N, *positions, C, p]
    seen = y != IGNORED
    probs, jacobians = outputs.movedim(dim, -1).softmax(-1)[seen], flat[seen]
    middle = torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)
    gradients = functional.one_hot(y[seen], probs.shape[1]) - probs
    slope = torch.einsum("ec,ecp->p", gradients, jacobians)
    log_likelihood = probs.log().gather(1, y[seen].unsqueeze(1)).sum()
    matrix = torch.einsum("ecp,ecd,edq->pq", jacobians, middle, jacobians)
    return {"matrix": matrix, "slope": slope, "log_likelihood": log_likelihood, "count": seen.sum()}


def dense_matrix(la: Laplace, names: list[str]) -> Tensor:
    """H of structure "full" with the parameters in the order of `names`."""
    (block,) = la.curvature.blocks
    index = block.unpack(torch.arange(block.size))
    order = torch.cat([index[name].flatten() for name in names])
    return block.accumulator.matrix()[order][:, order]


def cases() -> dict[str, tuple[nn.Module, list[tuple[Tensor, Tensor]], int]]:
    torch.manual_seed(0)
    return {"segmentation": (unet(), [images(3)], 1), "language": (CausalLanguageModel().double(), texts(True), -1)}


@pytest.mark.parametrize("case", ["segmentation", "language"])
def test_what_is_not_observed_adds_nothing(case: str) -> None:
    model, batches, dim = cases()[case]
    la = Laplace(model, Categorical(dim=dim), "full").fit(batches)
    names = [name for name, _ in model.named_parameters()]
    truth = observed_ggn(model, names, *batches[0], dim)
    torch.testing.assert_close(dense_matrix(la, names), truth["matrix"], rtol=1e-9, atol=1e-11)
    found = torch.cat([la.curvature.gradient[name].flatten() for name in names])
    torch.testing.assert_close(found, truth["slope"], rtol=1e-9, atol=1e-11)
    statistics = la.curvature.statistics
    assert statistics.log_likelihood == pytest.approx(float(truth["log_likelihood"]), rel=1e-12)
    assert statistics.observations == int(truth["count"]) < batches[0][1].numel()
    diagonal = Laplace(model, Categorical(dim=dim), "diag").fit(batches)
    values = torch.cat([diagonal.posterior.curvature_diagonal()[name].flatten() for name in names])
    torch.testing.assert_close(values, truth["matrix"].diagonal(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("curvature", ["rademacher", "fisher"])
@pytest.mark.parametrize("case", ["segmentation", "language"])
def test_estimates_are_unbiased(case: str, curvature: str) -> None:
    """Mean over many fits against the exact GGN of the observed positions: traces, and along random vectors."""
    model, batches, dim = cases()[case]
    names = [name for name, _ in model.named_parameters()]
    truth = observed_ggn(model, names, *batches[0], dim)["matrix"]
    generator = torch.Generator().manual_seed(0)
    along = torch.randn(len(truth), 20, generator=generator, dtype=torch.float64)
    sizes = [parameter.numel() for parameter in model.parameters()]

    def sums(matrix: Tensor) -> Tensor:
        traces = [part.sum() for part in matrix.diagonal().split(sizes)]
        return torch.cat([torch.stack(traces), (along * (matrix @ along)).sum(0)])

    found = []
    for _ in range(100):
        la = Laplace(model, Categorical(dim=dim), "full", curvature, progress=False).fit(batches, generator=generator)
        found.append(sums(dense_matrix(la, names)))
    draws, exact = torch.stack(found), sums(truth)
    error = draws.std(0) / math.sqrt(len(draws))
    assert float((error / exact).max()) < 0.25  # known well enough to tell a factor
    score = (draws.mean(0) - exact).abs() / error
    assert float(score.max()) < 4.5
    assert float(score.square().mean()) < 3


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "full"])
def test_pushed_predictions_are_products_with_the_jacobian(structure: str) -> None:
    model, (x, y) = unet(), images(4)
    la = Laplace(model, Categorical(dim=1), structure, "rademacher", prior=3.0)
    la.fit([(x, y)], generator=torch.Generator().manual_seed(0))
    drawn = la.sample(5, torch.Generator().manual_seed(1))
    pushed: Any = la.predict(x, method="pushed", samples=drawn, joint=True)
    rows = oracles.jacobian(model, x, list(drawn))
    moves = [
        torch.einsum("ndp,sp->snd", rows[name].flatten(2), (drawn[name] - model.get_parameter(name)).flatten(1))
        for name in drawn
    ]
    expected = oracles.evaluate(model, x) + torch.stack(moves).sum(0).reshape(5, 4, 2, SIDE, SIDE)
    torch.testing.assert_close(pushed.outputs, expected.detach(), rtol=1e-9, atol=1e-11)
    sampled: Any = la.predict(x, method="sampled", samples=drawn, joint=True)
    for s in range(5):
        weights = {name: value[s] for name, value in drawn.items()}
        alone = torch.func.functional_call(model, weights, (x,))
        torch.testing.assert_close(sampled.outputs[s], alone.detach())


def test_pushed_moments_are_those_of_dense_algebra() -> None:
    model, (x, y) = unet(), images(3)
    la = Laplace(model, Categorical(dim=1), "full", prior=2.0).fit([(x, y)])
    names = [name for name, _ in model.named_parameters()]
    precision = observed_ggn(model, names, x, y, 1)["matrix"] + 2.0 * torch.eye(la.curvature.size).double()
    found = oracles.jacobian(model, x, names)
    rows = torch.cat([found[name].flatten(2) for name in names], dim=2)
    variance = torch.einsum("ndp,pq,ndq->nd", rows, torch.linalg.inv(precision), rows).reshape(3, 2, SIDE, SIDE)
    torch.testing.assert_close(la.latent(x, diagonal=True).covariance, variance, rtol=1e-8, atol=1e-12)
    count = 400
    pushed: Any = la.predict(x, "pushed", samples=count, joint=True, generator=torch.Generator().manual_seed(0))
    assert bool(((pushed.outputs.var(0) / variance - 1).abs() < 5 * math.sqrt(2 / count)).all())
    gap = (pushed.mean - oracles.evaluate(model, x)).abs()
    assert bool((gap < 5 * (variance / count).sqrt()).all())


@pytest.mark.parametrize("method", ["pushed", "sampled"])
def test_maps_of_uncertainty(method: str) -> None:
    """Each pixel's entropies and probabilities, and the joint probability of a mask, by explicit loops."""
    model, (x, y) = unet(), images(3)
    la = Laplace(model, Categorical(dim=1), "kron", "rademacher", prior=300.0).fit([(x, y)])
    drawn = la.sample(7, torch.Generator().manual_seed(0))
    outputs = la.predict(x, method=method, samples=drawn, joint=True).outputs  # type: ignore[attr-defined]
    prediction = la.predict(x, method=method, samples=drawn)
    probs = outputs.softmax(2)
    torch.testing.assert_close(prediction.probs, probs.mean(0))
    entropy = -(probs.mean(0) * probs.mean(0).log()).sum(1)
    within = torch.stack([-(one * one.log()).sum(1) for one in probs]).mean(0)
    for name, expected in (("entropy", entropy), ("aleatoric", within), ("epistemic", entropy - within)):
        assert getattr(prediction, name).shape == (3, SIDE, SIDE)
        torch.testing.assert_close(getattr(prediction, name), expected, rtol=1e-9, atol=1e-12)
    logs = torch.zeros(7, 3, dtype=torch.float64)
    for s in range(7):
        for n, i, j in torch.cartesian_prod(*map(torch.arange, y.shape)).tolist():
            if y[n, i, j] != IGNORED:
                logs[s, n] += probs[s, n, y[n, i, j], i, j].log()
    torch.testing.assert_close(prediction.log_prob(y), logs.logsumexp(0) - math.log(7))
    assert float(prediction.log_prob(y)[1]) == pytest.approx(0, abs=1e-12)  # nothing was observed there


@pytest.mark.parametrize("kron", ["expand", "reduce"])
@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_language_model_with_a_tied_embedding(structure: str, kron: str) -> None:
    """Padding changes neither the gradient nor the log-likelihood; one Kronecker product keeps the ekfac's trace."""
    torch.manual_seed(0)
    model = CausalLanguageModel().double()
    padded, plain = (Laplace(model, Categorical(), structure, kron=kron).fit(texts(flag)) for flag in (True, False))
    for name, value in plain.curvature.gradient.items():
        torch.testing.assert_close(padded.curvature.gradient[name], value, rtol=1e-9, atol=1e-11)
    assert padded.curvature.statistics.log_likelihood == pytest.approx(plain.curvature.statistics.log_likelihood)
    assert padded.curvature.statistics.observations == plain.curvature.statistics.observations == 14
    if structure == "ekfac":
        names = [name for name, _ in model.named_parameters()]
        trace = observed_ggn(model, names, *texts(True)[0], -1)["matrix"].trace()
        sums = sum(float(block.accumulator.decompose(None).eigenvalues.sum()) for block in padded.curvature.blocks)
        assert sums == pytest.approx(float(trace), rel=1e-9)
    (tokens, targets) = texts(True)[0]
    prediction = padded.predict(tokens, method="pushed", samples=6, generator=torch.Generator().manual_seed(0))
    assert prediction.probs.shape == (5, 4, 6)
    assert prediction.epistemic.shape == (5, 4)
    assert prediction.log_prob(targets).shape == (5,)


def test_image_to_image_regression() -> None:
    """Gaussian targets `[N, C, H, W]`: curvature, moments and densities by dense algebra."""
    model, (x, _) = unet(classes=1), images(3)
    y = torch.randn(3, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    names = [name for name, _ in model.named_parameters()]
    found = oracles.jacobian(model, x, names)
    rows = torch.cat([found[name].flatten(2) for name in names], dim=2)
    la = Laplace(model, Gaussian(0.3), "full", prior=2.0).fit([(x, y)])
    torch.testing.assert_close(dense_matrix(la, names), torch.einsum("ndp,ndq->pq", rows, rows), rtol=1e-9, atol=1e-11)
    generator = torch.Generator().manual_seed(0)
    fits = [Laplace(model, Gaussian(0.3), "full", "rademacher").fit([(x, y)], generator=generator) for _ in range(60)]
    draws = torch.stack([dense_matrix(fit, names).trace() for fit in fits])
    assert float(draws.mean()) == pytest.approx(float(rows.square().sum()), abs=4 * float(draws.std()) / math.sqrt(60))
    drawn = la.sample(9, generator)
    prediction = la.predict(x, method="pushed", samples=drawn)
    outputs = la.predict(x, method="pushed", samples=drawn, joint=True).outputs  # type: ignore[attr-defined]
    torch.testing.assert_close(prediction.mean, outputs.mean(0))
    torch.testing.assert_close(prediction.epistemic, outputs.var(0, correction=0))
    assert prediction.variance.shape == y.shape
    logs = torch.distributions.Normal(outputs, math.sqrt(0.3)).log_prob(y).flatten(2).sum(2)
    torch.testing.assert_close(prediction.log_prob(y), logs.logsumexp(0) - math.log(9))


@pytest.mark.parametrize("method", ["pushed", "sampled"])
def test_portions_change_nothing(method: str) -> None:
    """A budget that one image fills: they go one by one, with the same weights."""
    model, (x, y) = unet(), images(5)
    whole = Laplace(model, Categorical(dim=1), "kron", "empirical").fit([(x, y)])
    tight = Laplace(model, Categorical(dim=1), "kron", "empirical", memory_budget=100).fit([(x, y)])
    seen: list[int] = []
    model.head.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    drawn = whole.sample(3, torch.Generator().manual_seed(0))
    one, other = (la.predict(x, method=method, samples=drawn) for la in (whole, tight))
    torch.testing.assert_close(one.probs, other.probs)
    torch.testing.assert_close(one.epistemic, other.epistemic, rtol=1e-6, atol=1e-10)
    assert max(seen) == 5
    seen.clear()
    tight.predict(x, method=method, samples=2)
    assert max(seen) == 2  # the two that show that images are independent
    assert seen.count(1) >= 10
    diagonal = tight.latent(x, diagonal=True).covariance
    torch.testing.assert_close(diagonal, whole.latent(x, diagonal=True).covariance)


def test_memory_of_an_example_is_that_of_its_activations() -> None:
    """Not that of the inputs, which are there anyway and of which an example is a view."""
    model = nn.Sequential(nn.Linear(1000, 3), nn.Tanh(), nn.Linear(3, 2))
    tape = Tape(model, dict(model.named_parameters()), None, 100_000)
    assert len(portions(tape, asked(torch.randn(2000, 1000), torch.device("cpu")))) == 1
    assert list(tape.footprints.values()) == [12]  # three numbers: tanh's outputs, once, serve both layers
    assert len(portions(tape, asked(torch.randn(5000, 1000), torch.device("cpu")))) == 2


def test_inputs_that_are_no_examples_stay_together() -> None:
    """A model that centers its batch has other outputs on a part of it; one whose tokens come first as well."""

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x - x.mean(0))

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sum(0)

    torch.manual_seed(0)
    for model, x in ((Centered(), torch.randn(6, 3)), (TimeFirst(), torch.randn(4, 6, 3))):
        y = torch.randint(2, (6,))
        la = Laplace(model, "classification", "diag", memory_budget=1).fit([(x, y)])
        drawn = la.sample(3)
        outputs = la.predict(x, method="sampled", samples=drawn, joint=True).outputs  # type: ignore[attr-defined]
        for s in range(3):
            alone = torch.func.functional_call(model, {name: value[s] for name, value in drawn.items()}, (x,))
            torch.testing.assert_close(outputs[s], alone.detach())


def test_refusals_name_the_ways_out() -> None:
    torch.manual_seed(0)
    model = UNet(width=2, levels=1).eval()
    x, y = torch.randn(2, 3, 128, 128), torch.randint(2, (2, 128, 128))
    with pytest.raises(InputError, match=r"16384 backward passes.*'rademacher'.*'fisher'.*'empirical'"):
        Laplace(model, Categorical(dim=1)).fit([(x, y)])
    la = Laplace(model, Categorical(dim=1), "diag", "empirical").fit([(x, y)])
    with pytest.raises(InputError, match=r"32768 outputs.*method='pushed'"):
        la.predict(x)
    with pytest.raises(InputError, match=r"65536 rows.*method='pushed', joint=True"):
        la.predict(x, joint=True)
    with pytest.raises(InputError, match=r"method='pushed'"):
        la.latent(x, diagonal=True)
    joint: Any = la.predict(x, method="pushed", joint=True, samples=2)
    assert joint.outputs.shape == (2, 2, 2, 128, 128)
    with pytest.raises(InputError, match=r"65536 outputs.*prediction.outputs"):
        _ = joint.covariance
    # 8,192 outputs are fewer than max_columns, but their gradients in all layers are too large.
    wide = nn.Sequential(nn.Conv2d(3, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 2, 1))
    half = torch.randn(1, 3, 64, 64)
    la = Laplace(wide, Categorical(dim=1), "diag", "empirical").fit([(half, torch.randint(2, (1, 64, 64)))])
    with pytest.raises(InputError, match=r"GB.*method='pushed'.*diagonal=True"):
        la.latent(half)
    with pytest.raises(InputError, match=r"GB.*method='pushed'"):
        la.predict(half, joint=True)


MEMORY = """
import torch
from benchmarks.measure import peak_mb
from benchmarks.unet import UNet, discs
from lapwing import Categorical, Laplace

torch.manual_seed(0)
model, (x, y) = UNet().eval(), discs(16)
batches = list(zip(x.split(8), y.split(8)))
la = Laplace(model, Categorical(dim=1), "kron", "{curvature}", progress=False).fit(batches)
after = discs(12, seed=1)
for method in ("pushed", "sampled"):
    prediction = la.predict(after[0], method=method, samples=3)
    assert prediction.epistemic.shape == (12, 128, 128) and prediction.log_prob(after[1]).shape == (12,)
print(sum(parameter.numel() for parameter in model.parameters()), peak_mb())
"""


@pytest.mark.slow
@pytest.mark.parametrize("curvature", ["rademacher", "fisher", "empirical"])
def test_a_unet_on_large_images_fits_into_memory(curvature: str) -> None:
    """A million weights, 128 × 128 pixels, 2 classes, in a process of its own: fit and predictions below 4 GB."""
    run = [sys.executable, "-c", MEMORY.format(curvature=curvature)]
    weights, peak = map(float, subprocess.run(run, check=True, capture_output=True, text=True).stdout.split())
    assert weights > 1e6
    assert peak < 4096
