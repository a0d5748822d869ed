"""A U-Net that finds digits on pictures, its posterior over all weights, and maps of what it does not know.

    make experiment NAME=segmentation

Every pixel is an output with two classes, 32,768 logits an image: the curvature comes from random signs, predictions
from weights drawn once and pushed through the linearized network by Jacobian-vector products. Trained on digits, shown
Japanese characters and clothes as well. Writes `results.json` and `figure.svg`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import forget_peak, peak_mb
from benchmarks.unet import UNet
from experiments.segmentation.canvases import Canvases, canvases
from experiments.segmentation.figure import draw
from lapwing import Categorical, Laplace, metrics
from lapwing.predictive.prediction import Prediction

HERE = Path(__file__).parent
TRAIN, STEPS, BATCH, WIDTH = 400, 400, 8, 16
TEST, ODD, VALIDATION = 32, 16, 8
SAMPLES = 30
TEMPERATURES = (1.0, 0.1, 0.01, 0.001)
ROWS = {
    "sampled, T = 1": ("sampled", False),
    "pushed, T = 1": ("pushed", False),
    "sampled, T chosen": ("sampled", True),
    "pushed, T chosen": ("pushed", True),
}


def trained(data: Canvases) -> UNet:
    """Adam with a falling step size, on random batches."""
    torch.manual_seed(0)
    model = UNet(width=WIDTH)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        pick = torch.randint(len(data.masks), (BATCH,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data.images[pick]), data.masks[pick])
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: {loss.item():.3f}", flush=True)
    return model.eval()


def predict(la: Laplace, images: Tensor, method: str, samples: int = SAMPLES) -> Prediction:
    return la.predict(images, method=method, samples=samples, generator=torch.Generator().manual_seed(0))


def network(model: nn.Module, images: Tensor) -> Prediction:
    """The network alone, as a prediction of one sample."""
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in images.split(BATCH)])
    return Categorical(dim=1).predict_samples(outputs[None], torch.ones(()))


def pixels(prediction: Prediction) -> Tensor:
    """Probabilities of all pixels: `[N·H·W, 2]`."""
    return prediction.probs.movedim(1, -1).flatten(0, -2)


def negative_log_likelihood(prediction: Prediction, data: Canvases) -> float:
    """Per pixel, each for itself; from logarithms, as a probability may be 0 up to rounding."""
    log_probs: Tensor = prediction.distribution().log_prob(data.masks)
    return -float(log_probs.double().mean())


def scores(prediction: Prediction, data: Canvases, odd: dict[str, tuple[Prediction, Canvases]]) -> dict[str, float]:
    """Quality on digits, whether uncertainty finds the errors, and whether it tells other objects from digits.

    The last is by pixels on the strokes of what was pasted, on digits against on other objects.
    """
    probs, targets = pixels(prediction), data.masks.flatten()
    found, true = prediction.labels == 1, data.masks == 1
    wrong = (prediction.labels != data.masks).flatten()
    result = {
        "accuracy": float(metrics.accuracy(probs, targets)),
        "iou": float((found & true).sum() / (found | true).sum()),
        "nll": negative_log_likelihood(prediction, data),
        "ece": float(metrics.expected_calibration_error(probs, targets)),
    }
    for name in ("entropy", "epistemic"):
        score = getattr(prediction, name)
        result[f"errors by {name}"] = float(metrics.auroc(score.flatten()[~wrong], score.flatten()[wrong]))
        for other, (shown, theirs) in odd.items():
            result[f"{other} by {name}"] = float(metrics.auroc(score[true], getattr(shown, name)[theirs.masks == 1]))
    return result


def main() -> None:
    train, test = canvases("train", TRAIN), canvases("test", TEST, seed=1)
    held_out = canvases("test", VALIDATION, seed=2)
    odd = {name: canvases("test", ODD, name, seed=1) for name in ("kmnist", "fashion_mnist")}
    start = time.perf_counter()
    model = trained(train)
    results: dict[str, Any] = {"training_seconds": time.perf_counter() - start}
    results["weights"] = sum(parameter.numel() for parameter in model.parameters())
    loader = list(zip(train.images.split(BATCH), train.masks.split(BATCH), strict=True))
    forget_peak()
    start = time.perf_counter()
    la = Laplace(model, Categorical(dim=1), "kron", "rademacher", progress=False)
    la.fit(loader, generator=torch.Generator().manual_seed(0))
    results["fit"] = {"seconds": time.perf_counter() - start, "peak_mb": peak_mb()}
    la.tune_prior(groups="layer")
    results["effective_dimension"] = la.effective_dimension()
    print(json.dumps(results), flush=True)
    nll = {
        t: negative_log_likelihood(predict(la.at(temperature=t), held_out.images, "pushed", 10), held_out)
        for t in TEMPERATURES
    }
    chosen = min(nll, key=lambda t: nll[t])
    results["temperature"] = {"held-out nll": nll, "chosen": chosen}
    others = {name: (network(model, data.images), data) for name, data in odd.items()}
    results["rows"] = {"network": scores(network(model, test.images), test, others)}
    kept: dict[str, Prediction] = {}
    for row, (method, tempered) in ROWS.items():
        own = la.at(temperature=chosen) if tempered else la
        forget_peak()
        start = time.perf_counter()
        prediction = predict(own, test.images, method)
        seconds, memory = time.perf_counter() - start, peak_mb()
        others = {name: (predict(own, data.images, method), data) for name, data in odd.items()}
        found = scores(prediction, test, others) | {"seconds": seconds, "peak_mb": memory}
        results["rows"][row] = found
        kept = {"mnist": prediction} | {name: shown for name, (shown, _) in others.items()}
        print(row, json.dumps(found), flush=True)
    (HERE / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    shown = {"mnist": test} | odd
    draw({name: (shown[name].images[0], kept[name]) for name in shown}, HERE / "figure.svg")
    for row, values in results["rows"].items():
        print(f"| {row} | " + " | ".join(f"{value:.3f}" for value in values.values()) + " |")


if __name__ == "__main__":
    main()
