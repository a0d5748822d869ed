"""Which weights, and which predictive: one table on ResNet-20, CIFAR-10 against SVHN.

    make experiment NAME=predictives

Every posterior is fitted to the same training images; its one prior precision is chosen by the log-likelihood of its
own predictions on held-out images. Writes `results.json` after every row (what is there already is not run again) and
`figure.svg`, prints the table.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.cifar_resnet import images, trained
from lapwing import Laplace, Mixture, Subnetwork, metrics
from lapwing.plots.canvas import COLORS, house_style
from lapwing.predictive.prediction import ClassPrediction

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
TRAIN, VALIDATION, TEST, BATCH = 10_000, 200, 1000, 100
PRIORS = [1.0, 10.0, 100.0, 1e3, 1e4, 1e5]
WEIGHT_DECAY = 5.0  # 10⁻⁴ on a mean loss over 50,000 images
DRAWS, CHOSEN = 20, 1000  # weight samples; weights of the subnetwork
DEPTHS = (20, 32, 56)

Predict = Callable[[Tensor], Tensor]


@cache
def data(name: str) -> tuple[Tensor, Tensor]:
    if name == "train":
        return images("cifar10_train20k.npz", "train", TRAIN)
    if name == "SVHN":
        return images("svhn_test10k.npz", "test", TEST)
    x, y = images("cifar10_test.npz", "test", 10_000)
    return (x[-VALIDATION:], y[-VALIDATION:]) if name == "validation" else (x[:TEST], y[:TEST])


def batches(name: str) -> list[tuple[Tensor, Tensor]]:
    x, y = data(name)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


@cache
def fitted(layers: int = 20, weights: str = "all", structure: str = "kron") -> Laplace:
    model = trained(layers)
    options: dict[str, Any] = {"weights": weights, "structure": structure, "rank_tolerance": 1e-3}
    if weights == "largest weights":
        options |= {"weights": Subnetwork.largest_magnitude(model, CHOSEN)}
    if weights == "largest variances":
        diag = Laplace(model, "classification", "diag", curvature="fisher", prior=WEIGHT_DECAY)
        diag.fit(batches("train"), generator=torch.Generator().manual_seed(0))
        options |= {"weights": Subnetwork.largest_variance(diag, CHOSEN)}
    return Laplace(model, "classification", **options).fit(batches("train"))


@cache
def tuned(layers: int = 20, weights: str = "all", structure: str = "kron", method: str = "linearized") -> Laplace:
    """Under the precision that predicts held-out images best, by the same method."""
    predict: dict[str, Any] = {"method": method}
    if method == "sampled":
        predict |= {"samples": DRAWS, "generator": torch.Generator().manual_seed(1)}
    return fitted(layers, weights, structure).at().tune_prior(
        method="validation", loader=batches("validation"), candidates=PRIORS, predict=predict
    )  # fmt: skip


def network(layers: int) -> Predict:
    model = trained(layers)
    return lambda x: model(x).softmax(1)


def probabilities(la: Laplace | Mixture, **options: Any) -> Predict:
    def predict(x: Tensor) -> Tensor:
        found = la.predict(x, **options)
        assert isinstance(found, ClassPrediction)
        return found.probs

    return predict


def sampled(la: Laplace) -> Predict:
    weights = la.sample(DRAWS, generator=torch.Generator().manual_seed(2))
    return probabilities(la, method="sampled", samples=weights)


def mean(parts: list[Predict]) -> Predict:
    return lambda x: torch.stack([part(x) for part in parts]).mean(0)


def mixture() -> Mixture:
    """Of last layers, which cost little more than the networks themselves."""
    return Mixture([tuned(layers, "last_layer", "full") for layers in DEPTHS])


ROWS: dict[str, Callable[[], tuple[Predict, float | None]]] = {
    "MAP": lambda: (network(20), None),
    "sampled, prior of its own": lambda: _row(tuned(method="sampled"), sampled),
    "sampled, prior of the linearized": lambda: _row(tuned(), sampled),
    "sampled, prior of the weight decay": lambda: _row(fitted().at(prior=WEIGHT_DECAY), sampled),
    "linearized": lambda: _row(tuned(), probabilities),
    "linearized, prior of the weight decay": lambda: _row(fitted().at(prior=WEIGHT_DECAY), probabilities),
    "last layer": lambda: _row(tuned(weights="last_layer", structure="full"), probabilities),
    "subnetwork, largest variances": lambda: _row(tuned(20, "largest variances", "full"), probabilities),
    "subnetwork, largest weights": lambda: _row(tuned(20, "largest weights", "full"), probabilities),
    "ensemble of MAP, 20 + 32 + 56 layers": lambda: (mean([network(layers) for layers in DEPTHS]), None),
    "mixture of last layers, 20 + 32 + 56 layers": lambda: (probabilities(mixture()), None),
}


def _row(la: Laplace, predict: Callable[[Laplace], Predict]) -> tuple[Predict, float]:
    precisions = la.posterior.precisions  # the same for all
    return predict(la), float(next(iter(precisions.values())).flatten()[0])


def measure(name: str) -> dict[str, Any]:
    predict, prior = ROWS[name]()
    with torch.no_grad():
        inside, outside = (torch.cat([predict(x) for x, _ in batches(kind)]) for kind in ("test", "SVHN"))
    targets = data("test")[1]
    entropies = [-torch.special.xlogy(probs, probs).sum(1) for probs in (inside, outside)]
    nll = float(metrics.negative_log_likelihood(inside, targets))
    return {
        "prior": prior,
        "accuracy": float(metrics.accuracy(inside, targets)),
        "nll": nll if math.isfinite(nll) else None,
        "ece": float(metrics.expected_calibration_error(inside, targets)),
        "auroc": float(metrics.auroc(*entropies)),
    }


def table(results: dict[str, Any]) -> str:
    lines = ["| | prior | accuracy | NLL | ECE | AUROC |", "| --- | --- | --- | --- | --- | --- |"]
    for name, row in results.items():
        prior = "–" if row["prior"] is None else f"{row['prior']:g}"
        scores = " | ".join("∞" if row[key] is None else f"{row[key]:.3f}" for key in ("nll", "ece", "auroc"))
        lines.append(f"| {name} | {prior} | {100 * row['accuracy']:.1f} % | {scores} |")
    return "\n".join(lines)


def draw(results: dict[str, Any]) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "predictives"
    with house_style():
        figure = Figure(figsize=(10, 0.35 * len(results) + 1), layout="constrained")
        panels = figure.subplots(1, 4, sharey=True)
        for ax, (key, title) in zip(
            panels, (("accuracy", "accuracy"), ("nll", "NLL"), ("ece", "ECE"), ("auroc", "AUROC, SVHN")), strict=True
        ):
            known = [(row[key], place) for place, row in enumerate(results.values()) if row[key] is not None]
            ax.plot(*zip(*known, strict=True), "o", color=COLORS[0])
            ax.axvline(results["MAP"][key], color="gray", linewidth=1)
            ax.set_title(title)
        panels[0].set_yticks(range(len(results)), list(results))
        panels[0].invert_yaxis()
        figure.savefig(HERE / "figure.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), help="some of them; none only draws what is there")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
    for name in options.rows:
        if name not in found:
            found[name] = measure(name)
            found = {key: found[key] for key in ROWS if key in found}
            RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
            print(name, found[name], flush=True)
    draw(found)
    print(table(found))


if __name__ == "__main__":
    main()
