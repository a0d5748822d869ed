"""From a posterior to one network: what an ensemble of weight samples and distilled students keep, and what they cost.

    make experiment NAME=distillation

A small convolutional network on 3,000 digits of MNIST, its Kronecker-factored posterior as teacher (linearized, and 20
sampled networks), and students of the same architecture that learned from it: on the training images alone, or
with unlabeled letters of notMNIST beside them. A student of the plain network tells what distillation does without
a posterior. Three seeds. Writes `results.json` and `figure.svg`, prints the table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments import data
from lapwing import Ensemble, Laplace, Prediction, distill
from lapwing.metrics import accuracy, auroc, expected_calibration_error, negative_log_likelihood
from lapwing.plots.canvas import COLORS, GRAY, house_style
from lapwing.predictive.divergence import divergence

HERE = Path(__file__).parent
TRAIN, VALIDATION, TEST, FOREIGN = 3000, 500, 2000, 1000
EPOCHS, SAMPLES, BATCH, SEEDS = 30, 20, 250, 3
CANDIDATES = [30.0, 100.0, 300.0, 600.0, 1000.0, 3000.0]

Predict = Callable[[Tensor], Prediction]


@dataclass(frozen=True)
class Row:
    """One way to predict; divergences are from its teacher, in nats, and latency is relative to the plain network."""

    name: str
    accuracy: float
    nll: float
    ece: float
    kmnist: float
    fashion: float
    divergence: float | None
    divergence_kmnist: float | None
    divergence_fashion: float | None
    latency: float
    parameters: int


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, 2), nn.ReLU(), nn.Conv2d(8, 16, 5, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def train(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    model = network(seed)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(EPOCHS):
        for part in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    return model.eval()


def in_batches(predict: Predict, x: Tensor) -> list[Prediction]:
    with torch.no_grad():
        return [predict(part) for part in x.split(BATCH)]


def seconds(predict: Callable[[Tensor], Any], x: Tensor, repeats: int) -> float:
    """Processor time of the fastest of some calls, on one thread: others share the machine."""
    times = []
    with torch.no_grad():
        for _ in range(repeats):
            start = time.process_time()
            predict(x)
            times.append(time.process_time() - start)
    return min(times)


def tuned(la: Laplace, held: list[tuple[Tensor, Tensor]], **how: Any) -> Laplace:
    """Under the candidate whose predictions of this kind are the most likely on held-out digits."""

    def score(prior: float) -> float:
        at, generator = la.at(prior=prior), torch.Generator().manual_seed(0)
        return sum(float(at.predict(x, generator=generator, **how).log_prob(y).sum()) for x, y in held)

    return la.at(prior=max(CANDIDATES, key=score))


@dataclass(frozen=True)
class Sets:
    """The test digits and what no network was trained on."""

    test: Tensor
    targets: Tensor
    kmnist: Tensor
    fashion: Tensor

    def row(
        self, name: str, predict: Predict, latency: float, parameters: int, teacher: Predict | None = None
    ) -> tuple[Row, list[Tensor]]:
        found = [in_batches(predict, x) for x in (self.test, self.kmnist, self.fashion)]
        probs = torch.cat([one.probs for one in found[0]])
        entropies = [torch.cat([one.entropy for one in part]) for part in found]
        gaps: list[float | None] = [None] * 3
        if teacher is not None:
            pairs = zip((self.test, self.kmnist, self.fashion), found, strict=True)
            gaps = [
                float(torch.cat([divergence(p, q) for p, q in zip(in_batches(teacher, x), own, strict=True)]).mean())
                for x, own in pairs
            ]
        y = self.targets
        row = Row(
            name, float(accuracy(probs, y)), float(negative_log_likelihood(probs, y)),
            float(expected_calibration_error(probs, y)), float(auroc(entropies[0], entropies[1])),
            float(auroc(entropies[0], entropies[2])), gaps[0], gaps[1], gaps[2], latency, parameters,
        )  # fmt: skip
        print(row, flush=True)
        return row, entropies


@dataclass(frozen=True)
class Run:
    """What one seed gave: `entropies` on the three sets, and latencies relative to the plain network."""

    rows: list[Row]
    entropies: list[list[Tensor]]
    latencies: dict[str, float]
    priors: dict[str, str]
    losses: dict[str, tuple[float, ...]]


def run(seed: int) -> Run:
    digits = data.mnist(TRAIN + VALIDATION, TEST)
    x, y = digits.x_train[:TRAIN], digits.y_train[:TRAIN]
    held = list(zip(digits.x_train[TRAIN:].split(BATCH), digits.y_train[TRAIN:].split(BATCH), strict=True))
    sets = Sets(digits.x_test, digits.y_test, data.foreign("kmnist", FOREIGN), data.foreign("fashion_mnist", FOREIGN))
    model = train(x, y, seed)
    size = sum(parameter.numel() for parameter in model.parameters())

    fitted = Laplace(model, "classification", "kron", progress=False)
    fitted.fit(list(zip(x.split(BATCH), y.split(BATCH), strict=True)))
    linear = tuned(fitted, held)
    drawn = tuned(fitted, held, method="sampled", samples=SAMPLES)
    ensemble = Ensemble.of(drawn, SAMPLES, torch.Generator().manual_seed(seed))
    looped = Ensemble.of(drawn, SAMPLES, torch.Generator().manual_seed(seed), parallel=False)

    def alone(x: Tensor) -> Prediction:
        return fitted.likelihood.predict_samples(model(x).unsqueeze(0), torch.tensor(1.0))

    batch = sets.test[:100]
    plain = seconds(model, batch, 50)
    latencies = {
        "in parallel": seconds(ensemble, batch, 20) / plain,
        "one after another": seconds(looped, batch, 20) / plain,
        "exported": seconds(ensemble.export(batch).module(), batch, 20) / plain,
        "linearized": seconds(linear.predict, batch, 5) / plain,
    }
    found = [
        sets.row("plain network", alone, 1.0, size),
        sets.row("teacher, linearized", linear.predict, latencies["linearized"], size),
        sets.row("teacher, 20 sampled", ensemble.predict, latencies["in parallel"], size * (SAMPLES + 1)),
    ]
    images = list(x.split(50))
    letters = data.foreign("notmnist", 10_000)[::5].split(34)
    beside = [torch.cat(pair) for pair in zip(images, letters, strict=False)]
    fresh = {"predict": {"method": "sampled", "samples": 2}}
    lessons: list[tuple[str, Any, Predict, list[Tensor], dict[str, Any]]] = [
        ("student of the plain network", alone, alone, images, {"once": True}),
        ("student of linearized", linear, linear.predict, images, {"once": True}),
        ("student of linearized, letters too", linear, linear.predict, beside, {"once": True}),
        ("student of sampled", drawn, ensemble.predict, images, fresh),
        ("student of sampled, letters too", drawn, ensemble.predict, beside, fresh),
    ]
    losses = {}
    for name, teacher, predict, loader, how in lessons:
        learned = distill(
            teacher, network(100 + seed), loader, EPOCHS, optimizer=lambda weights: torch.optim.Adam(weights, 2e-3),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS),
            generator=torch.Generator().manual_seed(seed), progress=False, **how,
        )  # fmt: skip
        losses[name] = learned.losses
        found.append(sets.row(name, learned.predict, seconds(learned.student, batch, 50) / plain, size, predict))
    priors = {"linearized": str(linear.prior), "sampled": str(drawn.prior)}
    return Run([row for row, _ in found], [each for _, each in found], latencies, priors, losses)


def table(runs: list[Run]) -> list[str]:
    """Mean over the seeds, and half the range where there is one to see."""
    lines = []
    for rows in zip(*(one.rows for one in runs), strict=True):
        cells = [rows[0].name]
        for column in fields(Row)[1:]:
            values = [getattr(row, column.name) for row in rows]
            if values[0] is None or column.name == "parameters":
                cells.append("" if values[0] is None else f"{values[0]:,}")
                continue
            digits = 1 if column.name == "latency" else 3
            half = (max(values) - min(values)) / 2
            cells.append(f"{sum(values) / len(values):.{digits}f} ± {half:.{digits}f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    torch.set_num_threads(1)
    start = time.process_time()
    runs = [run(seed) for seed in range(SEEDS)]
    draw([row.name for row in runs[0].rows], runs[0].entropies)
    record = {
        "runs": [
            {"rows": [asdict(row) for row in one.rows], "latencies": one.latencies, "priors": one.priors,
             "losses": one.losses}
            for one in runs
        ],
        "seconds": time.process_time() - start,
    }  # fmt: skip
    (HERE / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(table(runs)))
    print(f"{record['seconds']:.0f} s")


def draw(names: list[str], entropies: list[list[Tensor]]) -> None:
    """The fraction of inputs whose entropy exceeds a value: digits, and what is none."""
    with house_style():
        import matplotlib
        from matplotlib.figure import Figure

        matplotlib.rcParams["svg.hashsalt"] = "lapwing"
        figure = Figure(figsize=(8.5, 3.0), layout="constrained")
        axes = figure.subplots(1, 3, sharey=True)
        places = torch.linspace(0, 2.3, 60)
        styles = ["-", "-", "-", "--", "--", ":", "--", ":"]
        colors = [GRAY, COLORS[0], COLORS[1], GRAY, COLORS[0], COLORS[0], COLORS[1], COLORS[1]]
        for column, (ax, title) in enumerate(zip(axes, ("MNIST, test", "KMNIST", "Fashion-MNIST"), strict=True)):
            for label, found, style, color in zip(names, entropies, styles, colors, strict=True):
                above = [float((found[column] > place).float().mean()) for place in places]
                ax.plot(places, above, style, color=color, linewidth=1.4, label=label)
            ax.set_title(title)
            ax.set_xlabel("entropy, nats")
        axes[0].set_ylabel("fraction above")
        figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=3)
        figure.savefig(HERE / "figure.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
