"""A network on digits, pruned by the posterior's score, by magnitude and at random; with fine-tuning and without.

    make experiment NAME=pruning

Writes `results.json` and `figure.svg`, prints the tables.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm.auto import tqdm

from lapwing import Laplace, Pruning, prune
from lapwing.plots.canvas import COLORS, GRAY, house_style
from lapwing.pruning import prunable, scores, smallest
from lapwing.units import Units

HERE = Path(__file__).parent
SPARSITIES = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
SEEDS = (0, 1, 2)
UNITS = ("weight", "output")
EPOCHS = 20  # of fine-tuning

Data = tuple[Tensor, Tensor]


def digits() -> tuple[Data, Data]:
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1000], order[1000:]
    x = x.float() / 8 - 1
    return (x[train], y[train].long()), (x[test], y[test].long())


def train(data: Data, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    x, y = data
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    epochs, batch = 60, 50
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(x) // batch)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(())) / (2 * len(x))
            (nn.functional.cross_entropy(model(x[part]), y[part]) + penalty).backward()
            optimizer.step()
            schedule.step()
    return model


def magnitude(la: Laplace, units: Units) -> Tensor:
    return units.total({name: value.double().square() for name, value in la.posterior.weights.items()})


METHODS: dict[str, Callable[[Laplace, Units], Tensor]] = {
    "posterior, diagonal": lambda la, units: units.total(scores(la)),
    "posterior, marginal": lambda la, units: units.total(scores(la, "marginal")),
    "magnitude": magnitude,
    "random": lambda _, units: torch.rand(units.count, dtype=torch.float64),
}
RANKINGS = {"weight": "global", "output": "layer"}  # all methods alike; by layer, no layer loses all of its neurons


def pruned(la: Laplace, method: str, sparsity: float, kind: str) -> Pruning:
    units = prunable(la, kind)
    kept = torch.ones(units.count, dtype=torch.bool)
    kept[smallest(METHODS[method](la, units), units, sparsity, RANKINGS[kind])] = False
    return replace(prune(la, sparsity=0.0, units=kind), masks=units.masks(kept))


def measure(model: nn.Module, test: Data) -> dict[str, float]:
    x, y = test
    with torch.no_grad():
        log_probs = model(x).log_softmax(1)
    return {
        "accuracy": float((log_probs.argmax(1) == y).double().mean()),
        "nll": float(-log_probs.double().gather(1, y[:, None]).mean()),
    }


def batches(data: Data) -> list[Data]:
    return [(data[0][part], data[1][part]) for part in torch.arange(len(data[0])).split(50)]


def posterior(data: Data, seed: int) -> Laplace:
    return Laplace(train(data, seed), "classification", progress=False).fit([data]).tune_prior(groups="layer")


def run(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    data, test = digits()
    la, rows = posterior(data, seed), []
    for units in UNITS:
        for name in METHODS:
            for sparsity in SPARSITIES:
                found = pruned(la, name, sparsity, units)
                for tuned in (False, True):
                    model = found.fine_tune(batches(data), EPOCHS) if tuned else found.model()
                    rows.append({
                        "seed": seed, "units": units, "method": name, "sparsity": sparsity, "reached": found.sparsity,
                        "kept": {key: int(mask.sum()) for key, mask in found.masks.items()},
                        "tuned": tuned, **measure(model, test),
                    })  # fmt: skip
    return rows, razors(la, seed, data, test)


def razors(la: Laplace, seed: int, data: Data, test: Data) -> list[dict[str, Any]]:
    """What goes for free: by the posterior's own account, and by the loss of `log p(D, θ)` that is measured."""
    found = []
    for measured in (False, True):
        free = prune(la, evidence_loss=0.0, loader=[data] if measured else None)
        found.append({
            "seed": seed, "measured": measured, "sparsity": free.sparsity,
            "expected loss of evidence": free.evidence_loss, "expected loss of log joint": free.joint_loss,
            "measured loss of log joint": free.measured_loss([data]),
            "accuracy": measure(free.model(), test)["accuracy"], "accuracy before": measure(la.model, test)["accuracy"],
            "accuracy tuned": measure(free.fine_tune(batches(data), EPOCHS), test)["accuracy"],
        })  # fmt: skip
    return found


def mean(rows: list[dict[str, Any]], value: str, **where: Any) -> float:
    found = [row[value] for row in rows if all(row[key] == wanted for key, wanted in where.items())]
    return float(sum(found) / len(found))


def draw(rows: list[dict[str, Any]]) -> None:
    with house_style():
        import matplotlib
        from matplotlib.figure import Figure

        matplotlib.rcParams["svg.hashsalt"] = "lapwing"
        figure = Figure(figsize=(7.5, 5.2), layout="constrained")
        axes = figure.subplots(len(UNITS), 2, sharey=True)
        for line, units in enumerate(UNITS):
            for column, tuned in enumerate((False, True)):
                ax = axes[line, column]
                for color, name in zip([COLORS[0], COLORS[2], COLORS[1], GRAY], METHODS, strict=True):
                    where = {"units": units, "method": name, "tuned": tuned}
                    x = [mean(rows, "reached", sparsity=s, **where) for s in SPARSITIES]
                    y = [mean(rows, "accuracy", sparsity=s, **where) for s in SPARSITIES]
                    ax.plot(x, y, color=color, marker="o", markersize=3, label=name)
                what = "weights" if units == "weight" else "neurons"
                ax.set_title(f"{what}, {f'fine-tuned for {EPOCHS} epochs' if tuned else 'pruned only'}")
                ax.set_xlabel("sparsity" if line else "")
                ax.set_ylabel("" if column else "test accuracy")
        axes[0, 0].legend(frameon=False)
        figure.savefig(HERE / "figure.svg", metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    found = [run(seed) for seed in tqdm(SEEDS, "seeds")]
    rows, free = [row for part, _ in found for row in part], [razor for _, part in found for razor in part]
    (HERE / "results.json").write_text(json.dumps({"rows": rows, "evidence_loss=0": free}, indent=1) + "\n")
    draw(rows)
    for units in UNITS:
        for tuned in (False, True):
            print(f"\n{units}, {'fine-tuned' if tuned else 'pruned only'}\n")
            print("| method | " + " | ".join(f"{s:.0%}" for s in SPARSITIES) + " |")
            for name in METHODS:
                where = {"units": units, "method": name, "tuned": tuned}
                cells = [f"{mean(rows, 'accuracy', sparsity=s, **where):.3f}" for s in SPARSITIES]
                print(f"| {name} | " + " | ".join(cells) + " |")
    print()
    for razor in free:
        print(razor)
    print(f"{time.process_time():.0f} s of one core")


if __name__ == "__main__":
    main()
