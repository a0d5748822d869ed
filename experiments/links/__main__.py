"""Where each link from Gaussian logits to class probabilities goes wrong, and what it costs on real predictions.

Four ways in which logits may be uncertain, with each closed form against the integral; then a small network on
Fashion-MNIST, with accuracy, log-likelihood, calibration and the distance to Monte Carlo for every link.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments import data
from lapwing import InputError, Laplace
from lapwing.metrics import accuracy, auroc, expected_calibration_error, negative_log_likelihood
from lapwing.plots.canvas import COLORS, INK, house_style
from lapwing.predictive.links import CATEGORICAL

HERE = Path(__file__).parent
DRAWS = 200_000
DEVIATIONS = torch.logspace(-1.5, 1, 26, dtype=torch.float64)
CLASSES = torch.tensor([2, 3, 4, 6, 8, 12, 16, 24, 32])
PRIORS = {"tuned": None, "1": 1.0, "30": 30.0}


@dataclass(frozen=True)
class Case:
    """Logits `(mean, covariance)` that vary with a number, and what that number is."""

    title: str
    label: str
    at: Tensor
    logits: Callable[[float], tuple[Tensor, Tensor]]


def diagonal(*values: float) -> Tensor:
    return torch.diag(torch.tensor(values, dtype=torch.float64))


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


CASES = [
    Case("Equal and independent", "standard deviation s of every logit", DEVIATIONS,
         lambda s: (vector(2, 0, 0), diagonal(s * s, s * s, s * s))),
    Case("Shared by all logits", "standard deviation s of what they share", DEVIATIONS,
         lambda s: (vector(2, 0, 0), diagonal(0.1, 0.1, 0.1) + s * s)),
    Case("One uncertain logit of three", "standard deviation s of the first", DEVIATIONS,
         lambda s: (vector(5, 3, 3), diagonal(s * s, 0.1, 0.1))),
    Case("More and more classes", "number of classes, each logit with s = 1", CLASSES,
         lambda k: (vector(4, *[0] * (int(k) - 1)), torch.eye(int(k), dtype=torch.float64))),
]  # fmt: skip


def integral(mean: Tensor, covariance: Tensor) -> Tensor:
    """`E[softmax(f)]` by draws: `[K]`."""
    values, vectors = torch.linalg.eigh(covariance)
    noise = torch.randn(DRAWS // 2, len(mean), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = torch.cat([noise, -noise]) @ (vectors * values.clamp(min=0).sqrt()).T
    probs: Tensor = (mean + moved).softmax(1)
    return probs.mean(0)


def first_class(case: Case) -> dict[str, list[float | None]]:
    """The probability of the first class by each link, None where it is refused."""
    curves: dict[str, list[float | None]] = {name: [] for name in ("integral", *CATEGORICAL)}
    for at in case.at.tolist():
        mean, covariance = case.logits(at)
        curves["integral"].append(float(integral(mean, covariance)[0]))
        for name, link in CATEGORICAL.items():
            spread = covariance if link.covariances else covariance.diagonal()
            try:
                curves[name].append(float(link.log_probs(mean[None], spread[None]).exp()[0, 0]))
            except InputError:
                curves[name].append(None)
    return curves


@dataclass(frozen=True)
class Row:
    """One link on Fashion-MNIST; `distance` is the mean total variation to 20,000 draws."""

    prior: str
    link: str
    accuracy: float
    nll: float
    ece: float
    auroc: float
    distance: float


def network(x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(20):
        for part in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    return model


def fashion() -> list[Row]:
    """Every link on the same posteriors; digits of MNIST are what the network does not know."""
    images = data.fashion_mnist(4000)
    foreign = data.mnist(1, 1000).x_test * 0.3081 + 0.1307
    foreign = (foreign - 0.286) / 0.353
    model = network(images.x_train, images.y_train)
    loader = list(zip(images.x_train.split(500), images.y_train.split(500), strict=True))
    la = Laplace(model, "classification", "kron", progress=False).fit(loader)
    rows = []
    for prior, value in PRIORS.items():
        at = la.at().tune_prior(groups="layer") if value is None else la.at(prior=value)
        generator = torch.Generator().manual_seed(0)
        exact = torch.cat([
            at.predict(part, link="mc", samples=20_000, generator=generator).probs for part in images.x_test.split(100)
        ])  # fmt: skip
        for name in ("network", *CATEGORICAL, "mc"):
            try:
                probs, entropy = scores(at, name, images.x_test)
                _, other = scores(at, name, foreign)
            except InputError:
                rows.append(Row(prior, name, math.nan, math.nan, math.nan, math.nan, math.nan))
                continue
            distance = float((probs - exact).abs().sum(1).mean() / 2)
            y = images.y_test
            rows.append(Row(
                prior, name, float(accuracy(probs, y)), float(negative_log_likelihood(probs, y)),
                float(expected_calibration_error(probs, y)), float(auroc(entropy, other)), distance,
            ))  # fmt: skip
    return rows


def scores(la: Laplace, link: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities `[N, C]` and entropies `[N]` by a link, or of the network itself."""
    if link == "network":
        with torch.no_grad():
            probs = la.model(x).softmax(1)
        return probs, -(probs * probs.clamp(min=1e-30).log()).sum(1)
    found = la.predict(x, link=link, samples=1000, generator=torch.Generator().manual_seed(1))
    return found.probs, found.entropy


def draw(curves: list[dict[str, list[float | None]]]) -> None:
    with house_style():
        import matplotlib
        from matplotlib.figure import Figure

        matplotlib.rcParams["svg.hashsalt"] = "lapwing"
        figure = Figure(figsize=(7.5, 5.6), layout="constrained")
        axes = figure.subplots(2, 2, sharey=True).flatten()
        for ax, case, found in zip(axes, CASES, curves, strict=True):
            for name, color in zip(CATEGORICAL, COLORS, strict=True):
                values: Any = [math.nan if value is None else value for value in found[name]]
                ax.plot(case.at, values, color=color, linewidth=1.4, label=name)
            ax.plot(case.at, found["integral"], color=INK, linewidth=3, alpha=0.35, label="integral", zorder=0)
            ax.set_xscale("log")
            ax.set_ylim(0, 1)
            ax.set_title(case.title)
            ax.set_xlabel(case.label)
        axes[-1].set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
        axes[-1].minorticks_off()
        for ax in (axes[0], axes[2]):
            ax.set_ylabel("p(first class)")
        figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=7)
        figure.savefig(HERE / "figure.svg", metadata={"Date": None})
    shutil.copy(HERE / "figure.svg", HERE.parent.parent / "docs" / "images" / "links.svg")


def main() -> None:
    torch.set_num_threads(1)
    curves = [first_class(case) for case in CASES]
    draw(curves)
    rows = fashion()
    for row in rows:
        if row.link == "network" and row.prior != "tuned":
            continue
        print("| " + " | ".join(f"{v:.3f}" if isinstance(v, float) else v for v in asdict(row).values()) + " |")
    record = {
        "cases": [
            {"title": case.title, "at": case.at.tolist(), "p": found}
            for case, found in zip(CASES, curves, strict=True)
        ],
        "fashion": [
            {key: None if value != value else value for key, value in asdict(row).items()}  # NaN is no JSON
            for row in rows
        ],
    }  # fmt: skip
    (HERE / "results.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
