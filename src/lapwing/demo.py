"""What `lapwing demo` shows: a small network on digits, plain and Bayesian, and a toy regression.

The network is trained as its prior says, with the weight decay `λ/N` that makes it the mode of the
posterior under a prior of precision λ = 1: the point a Laplace approximation expands around. Activation,
pooling and weight decay were chosen after looking at results like these, the digits and the library's
settings were not: they are the plain ones. The prior that the evidence chooses errs on the side of caution
with so few data, more so for ReLU networks; validation makes up for it. `--noise 0.4` makes the digits
harder and the plain network overconfident.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import InputError, LapwingError
from lapwing.laplace import Laplace
from lapwing.likelihoods import Gaussian
from lapwing.metrics import accuracy, auroc, expected_calibration_error, negative_log_likelihood
from lapwing.priors import from_weight_decay
from lapwing.progress import bar

NOISE = 0.0  # standard deviation of noise on the pixels
EPOCHS = 60
CLASSES = 8  # the digits 0 to 7; 8 and 9 stay unseen
TEST, VALIDATION = 500, 200  # the rest is for training
FACTORS = [2.0**k for k in range(-3, 10)]  # by which validation may scale the prior that the evidence chose


def run(output: Path, seed: int = 0, noise: float = NOISE, epochs: int = EPOCHS) -> None:
    """Print the comparison and write the picture to `output`."""
    _check(output, noise)
    curve = cubic(seed)
    comparison = compare(digits(seed, noise), seed, epochs)
    print(report(comparison))
    from lapwing.demo_picture import draw  # matplotlib is optional

    draw(curve, comparison, output)
    print(f"\nThe picture is in {output}")


def _check(output: Path, noise: float) -> None:
    for module, package in (("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")):
        if find_spec(module) is None:
            raise LapwingError(f"this needs {package}, which is not installed. Run: pip install 'lapwing[demo]'")
    if output.suffix not in (".png", ".pdf", ".svg"):
        raise InputError(f"the picture can be a .png, .pdf or .svg, not {output.name!r}.")
    if not output.parent.is_dir():
        raise InputError(f"there is no directory {str(output.parent)!r} to write the picture to.")
    if not noise >= 0:
        raise InputError(f"noise is a standard deviation, 0 or more, got {noise}.")


# ----------------------------------------------------------------------------------------------- digits


@contextmanager
def one_thread() -> Iterator[None]:
    """Networks this small gain nothing from threads, and on a busy machine lose minutes to them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Digits:
    """Images `[N, 1, 8, 8]` in [0, 1] plus noise, and labels `[N]`; `unseen` are images of 8 and 9."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    unseen: Tensor
    noise: float


@dataclass(frozen=True)
class Scores:
    """One way to predict: `probs: [N, 8]` on the test digits with their `targets: [N]`, and on unseen ones."""

    name: str
    probs: Tensor
    targets: Tensor
    unseen: Tensor

    @property
    def accuracy(self) -> float:
        return float(accuracy(self.probs, self.targets))

    @property
    def nll(self) -> float:
        return float(negative_log_likelihood(self.probs, self.targets))

    @property
    def ece(self) -> float:
        return float(expected_calibration_error(self.probs, self.targets))

    @property
    def auroc(self) -> float:
        return float(auroc(entropy(self.probs), entropy(self.unseen)))

    @property
    def overconfidence(self) -> float:
        """Mean confidence minus accuracy: positive for predictions that are too sure."""
        return float(self.probs.amax(1).mean()) - self.accuracy


@dataclass(frozen=True)
class Comparison:
    """The plain network against Laplace, and what the posterior says of itself."""

    data: Digits
    plain: Scores
    evidence: Scores
    validated: Scores
    log_evidence: tuple[float, float]
    dimension: float
    factor: float
    summary: str

    def __iter__(self) -> Iterator[Scores]:
        return iter((self.plain, self.evidence, self.validated))


def digits(seed: int = 0, noise: float = NOISE) -> Digits:
    """scikit-learn's digits with Gaussian noise on the pixels, split at random."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    images = images + noise * torch.randn(images.shape, generator=generator)
    labels = torch.tensor(classes)
    seen = torch.nonzero(labels < CLASSES).flatten()
    seen = seen[torch.randperm(len(seen), generator=generator)]
    parts = seen.split([len(seen) - VALIDATION - TEST, VALIDATION, TEST])
    train, validation, test = ((images[part], labels[part]) for part in parts)
    return Digits(train, validation, test, images[labels >= CLASSES], noise)


def train(data: tuple[Tensor, Tensor], seed: int = 0, epochs: int = EPOCHS, weight_decay: float = 0.0) -> nn.Module:
    """A convolutional network with about 11,000 weights, trained by Adam on minibatches of 32."""
    images, labels = data
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.Tanh(),
            nn.Conv2d(24, 32, 3, padding=1), nn.Tanh(),
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, CLASSES),
        )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=weight_decay)
    for _ in bar(range(epochs), "train"):
        for batch in torch.randperm(len(images), generator=generator).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


@one_thread()
def compare(data: Digits, seed: int = 0, epochs: int = EPOCHS) -> Comparison:
    """Train, fit, tune and predict."""
    count = len(data.train[0])
    model = train(data.train, seed, epochs, weight_decay=1 / count)
    with torch.no_grad():
        plain = Scores("plain network", model(data.test[0]).softmax(1), data.test[1], model(data.unseen).softmax(1))

    la = Laplace(model, "classification", structure="kron", prior=from_weight_decay(1 / count, count))
    la.fit(batches(data.train))
    before = float(la.log_evidence())
    la.tune_prior(groups="layer")
    evidence = _scores("Laplace, prior by evidence", la, data)

    assert la.tuning_ is not None
    chosen = la.tuning_.precisions
    priors = [{f"{layer}.*": factor * value for layer, value in chosen.items()} for factor in FACTORS]
    validated = la.at().tune_prior("validation", loader=batches(data.validation), candidates=priors)
    assert validated.tuning_ is not None
    best = [score for _, score in validated.tuning_.candidates].index(validated.tuning_.value)
    return Comparison(
        data, plain, evidence, _scores("Laplace, prior by validation", validated, data),
        (before, float(la.log_evidence())), la.effective_dimension(), FACTORS[best], la.summary(),
    )  # fmt: skip


def batches(data: tuple[Tensor, Tensor], size: int = 128) -> list[tuple[Tensor, Tensor]]:
    """Batches as `fit` reads them; a `DataLoader` does as well."""
    return list(zip(data[0].split(size), data[1].split(size), strict=True))


def entropy(probs: Tensor) -> Tensor:
    """`−Σ_c p_c log p_c` in nats: `[N, C]` to `[N]`."""
    result: Tensor = torch.special.entr(probs).sum(1)
    return result


def _scores(name: str, la: Laplace, data: Digits) -> Scores:
    return Scores(name, _probs(la, data.test[0]), data.test[1], _probs(la, data.unseen))


def _probs(la: Laplace, images: Tensor) -> Tensor:
    prediction: Any = la.predict(images)
    probs: Tensor = prediction.probs
    return probs


def report(comparison: Comparison) -> str:
    """The comparison as text."""
    data = comparison.data
    before, after = comparison.log_evidence
    rows = [
        f"{scores.name:<30}{scores.accuracy:>10.3f}{scores.nll:>10.3f}{scores.ece:>10.3f}{scores.auroc:>10.3f}"
        for scores in comparison
    ]
    return "\n".join([
        f"8×8 digits, pixels in [0, 1]{f' plus noise of deviation {data.noise:g}' if data.noise else ''}. Of 0 to 7, "
        f"{len(data.train[0])} are for training,",
        f"{len(data.validation[0])} for validation, {len(data.test[0])} for testing; {len(data.unseen)} of 8 and 9 are "
        "new to the network.",
        "",
        f"{'':<30}{'accuracy':>10}{'NLL':>10}{'ECE':>10}{'AUROC':>10}",
        *rows,
        "",
        "NLL: mean negative log-likelihood, ECE: expected calibration error (15 bins), both better low, on the test",
        "digits. AUROC: how well predictive entropy tells 8 and 9 from them, better high.",
        f"Only the last row uses the validation labels: they scaled the precisions of the evidence by "
        f"{comparison.factor:g}.",
        "",
        f"Log evidence {before:.1f} under the prior of the training, {after:.1f} tuned per layer; effective dimension "
        f"{comparison.dimension:.1f}.",
        "",
        comparison.summary,
    ])  # fmt: skip


# ------------------------------------------------------------------------------------------- regression


@dataclass(frozen=True)
class Curve:
    """Data `x, y: [20]`, and the prediction on a `grid: [G]`."""

    x: Tensor
    y: Tensor
    grid: Tensor
    mean: Tensor
    std: Tensor


@one_thread()
def cubic(seed: int = 0) -> Curve:
    """Twenty points of `y ~ N(x³, 3²)`, a network with two layers of seven units, its full posterior.

    The toy of Ritter et al. (2018), Section 5.1. Targets are in units of 20, so the noise variance is `9/20²`.
    """
    generator = torch.Generator().manual_seed(seed)
    x = 8 * torch.rand(20, 1, generator=generator, dtype=torch.float64) - 4
    y = x**3 + 3 * torch.randn(20, 1, generator=generator, dtype=torch.float64)
    unit, noise = 20.0, 9 / 20**2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=500, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = torch.stack([weight.square().sum() for weight in model.parameters()]).sum()
        loss: Tensor = (model(x) - y / unit).square().sum() / (2 * noise) + penalty / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    la = Laplace(model, Gaussian(noise=noise), structure="full", prior=1.0)
    la.fit([(x, y / unit)]).tune_prior(groups="layer", noise=False)
    grid = torch.linspace(-6, 6, 241, dtype=torch.float64)
    prediction: Any = la.predict(grid[:, None])
    return Curve(x[:, 0], y[:, 0], grid, unit * prediction.mean[:, 0], unit * prediction.std[:, 0])
