"""How far may a digit be turned? The range of rotations that a network is averaged over, learned by the evidence.

Training and test images are turned by U(−r, r) for r of 0, 90 and 180 degrees. The network averages its outputs over
copies of each image that are turned once more, by U(−η, η). From 5 degrees, η climbs the evidence, which is that of
the training images.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data import Split, mnist
from lapwing import Averaged, Laplace
from lapwing.plots.canvas import COLORS, GRAY, house_style
from lapwing.progress import bar

HERE = Path(__file__).parent
RANGES = (0, 90, 180)
STARTS = {"none": 0.0, "learned": 5.0, "all": 180.0}  # degrees
IMAGES, TESTS, COPIES, BATCH = 1000, 2000, 8, 50
EPOCHS, BURN_IN, EVERY, STEPS = 60, 6, 3, 6


@dataclass
class Run:
    """One training: ranges in degrees, those of the network by epoch, and what it knows of turned test images."""

    data_range: int
    method: str
    range: float = 0.0
    accuracy: float = 0.0
    nll: float = 0.0
    nll_laplace: float = 0.0
    log_evidence: float = 0.0
    seconds: float = 0.0
    epochs: list[int] = field(default_factory=list)
    ranges: list[float] = field(default_factory=list)


def rotated(images: Tensor, angles: Tensor) -> Tensor:
    """Images `[N, 1, H, W]` turned by angles `[N, S]` in radians: `[N, S, 1, H, W]`, differentiable in the angles."""
    cos, sin, zero = angles.cos().flatten(), angles.sin().flatten(), torch.zeros_like(angles).flatten()
    turns = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
    repeated = images.repeat_interleave(angles.shape[1], 0)
    paper = images.min()  # what lies outside of an image is as empty as its corners
    grid = functional.affine_grid(turns, list(repeated.shape), align_corners=False)
    turned_by_angle = functional.grid_sample(repeated - paper, grid, align_corners=False) + paper
    return turned_by_angle.reshape(*angles.shape, *images.shape[1:])


def copies(images: Tensor, half_range: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Copies turned by U(−η, η), one from each of `count` equal parts of the range: `[N, S, 1, H, W]`."""
    places = torch.arange(count) + torch.rand(len(images), count, generator=generator)
    return rotated(images, half_range * (2 * places / count - 1))


def turned(split: Split, degrees: float) -> Split:
    """The same images, each turned once by U(−r, r)."""
    radians, generator = torch.tensor(math.radians(degrees)), torch.Generator().manual_seed(0)
    x_train, x_test = (copies(x, radians, 1, generator)[:, 0] for x in (split.x_train, split.x_test))
    return Split(x_train, split.y_train, x_test, split.y_test)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def train(split: Split, run: Run) -> Run:
    """Weights by gradient descent; a precision per layer, and the range where it is learned, by the evidence."""
    began = time.perf_counter()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model, learned = Averaged(network()), run.method == "learned"
    raw = torch.tensor(STARTS[run.method] / 180, dtype=torch.float64).logit().requires_grad_(learned)  # η = π·sigmoid
    count = 1 if run.method == "none" else COPIES
    weights, strength = torch.optim.Adam(model.parameters(), lr=2e-3), torch.optim.Adam([raw], lr=0.2)
    precisions: dict[str, Tensor] = {name: torch.ones(()) for name, _ in model.named_parameters()}
    x, y = split.x_train, split.y_train

    def seen(images: Tensor) -> Tensor:
        return copies(images, math.pi * raw.sigmoid().float(), count, generator)

    def shuffled() -> tuple[Tensor, ...]:
        return tuple(torch.randperm(IMAGES, generator=generator).split(BATCH))

    for epoch in bar(range(1, EPOCHS + 1), f"{run.data_range} degrees, {run.method}", True):
        for group, rate in ((weights, 2e-3), (strength, 0.2)):
            group.param_groups[0]["lr"] = rate * (1 - 0.95 * epoch / EPOCHS)
        for batch in shuffled():
            squares = [0.5 * precisions[name] * value.square().sum() for name, value in model.named_parameters()]
            fit = functional.cross_entropy(model(seen(x[batch]).detach()), y[batch])
            weights.zero_grad()
            (fit + torch.stack(squares).sum() / IMAGES).backward()
            weights.step()
        if epoch < BURN_IN or epoch % EVERY:
            continue
        data = [(seen(x[batch]).detach(), y[batch]) for batch in shuffled()]
        la = Laplace(model, "classification", kron="reduce", prior=precisions, progress=False).fit(data)
        la.tune_prior(groups="layer")
        precisions = {name: value.float() for name, value in la.posterior.precisions.items()}
        for batch in shuffled()[: STEPS if learned else 0]:
            strength.zero_grad()
            (-la.data_evidence(seen(x[batch]), y[batch])).backward()
            strength.step()
        run.epochs.append(epoch)
        run.ranges.append(180 * raw.detach().sigmoid().item())
    run.range, run.log_evidence = run.ranges[-1], float(la.log_evidence())
    _score(
        run, la, [(seen(a).detach(), b) for a, b in zip(split.x_test.split(50), split.y_test.split(50), strict=True)]
    )
    run.seconds = round(time.perf_counter() - began, 1)
    return run


def _score(run: Run, la: Laplace, data: list[tuple[Tensor, Tensor]]) -> None:
    """Accuracy and mean −log p of the network, and of the linearized predictions."""
    targets = torch.cat([y for _, y in data])
    with torch.no_grad():
        outputs = torch.cat([la.model(x) for x, _ in data])
    run.accuracy = float((outputs.argmax(1) == targets).double().mean())
    run.nll = float(functional.cross_entropy(outputs, targets))
    run.nll_laplace = -float(torch.cat([la.predict(x).log_prob(y) for x, y in data]).mean())


def table(runs: list[Run]) -> str:
    """The runs as a table in Markdown."""
    lines = [
        "| images turned by | network averaged over | log-evidence | accuracy | −log p | −log p, Laplace |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    names = {"none": "nothing", "learned": "±{:.0f}°, learned", "all": "±180°, all"}
    for run in runs:
        cells = (
            f"±{run.data_range}°", names[run.method].format(run.range), f"{run.log_evidence:.0f}",
            f"{100 * run.accuracy:.1f} %", f"{run.nll:.3f}", f"{run.nll_laplace:.3f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: list[Run], path: Path) -> None:
    """The learned range by epoch for each data set, and the test accuracies."""
    with house_style():
        import matplotlib
        from matplotlib.figure import Figure

        matplotlib.rcParams["svg.hashsalt"] = "invariance"
        figure = Figure(figsize=(8.4, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for degrees, color in zip(RANGES, COLORS, strict=False):
            learned = next(run for run in runs if run.data_range == degrees and run.method == "learned")
            left.plot([0, *learned.epochs], [STARTS["learned"], *learned.ranges], color=color, label=f"±{degrees}°")
            left.axhline(degrees, color=color, linewidth=0.8, linestyle=":")
        left.set(xlabel="epoch", ylabel="learned half range (degrees)", yticks=range(0, 181, 45))
        left.set_title("Range of rotations, learned by the evidence")
        left.legend(title="images turned by", frameon=False, loc="center left", bbox_to_anchor=(0.62, 0.66))
        shades = {"none": GRAY, "learned": COLORS[0], "all": COLORS[2]}
        labels = {"none": "not averaged", "learned": "learned range", "all": "all rotations"}
        for i, (method, color) in enumerate(shades.items()):
            heights = [100 * run.accuracy for run in runs if run.method == method]
            places = [place + 0.27 * (i - 1) for place in range(len(RANGES))]
            right.bar(places, heights, width=0.25, color=color, label=labels[method])
        right.set(xticks=range(len(RANGES)), xticklabels=[f"±{degrees}°" for degrees in RANGES], ylim=(0, 100))
        right.set(xlabel="images turned by", ylabel="test accuracy (%)")
        right.set_title("On test images turned alike")
        right.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, columnspacing=1.0)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    split = mnist(IMAGES, TESTS)
    runs = [train(turned(split, degrees), Run(degrees, method)) for degrees in RANGES for method in STARTS]
    (HERE / "results.json").write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    draw(runs, HERE / "figure.svg")
    print(table(runs))


if __name__ == "__main__":
    main()
