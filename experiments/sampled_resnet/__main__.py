"""Draws from the posterior of ResNet-20 with the full GGN of all 270,000 weights on 2,000 images of CIFAR-10.

    make experiment NAME=sampled_resnet

The draws `w_k`, found by conjugate gradients, must have the covariance P⁻¹. For directions V, gradients of outputs at
held-out images, `A = Vᵀ P⁻¹ V` comes from conjugate gradients of its own, and `Σ_k w_kᵀ V A⁻¹ Vᵀ w_k` is then χ² with
as many degrees of freedom as there are pairs of draws and directions. Writes `results.json`, `figure.svg`, prints both.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.cifar_resnet import images, trained
from lapwing import DrawnPosterior, Laplace, sample_by_optimization
from lapwing.plots.canvas import COLORS, GRAY, house_style

HERE = Path(__file__).parent
IMAGES, DRAWS, DIRECTIONS, TEST = 2000, 4, 3, 200
PRIOR = 1000.0  # strong on purpose: the number of products grows with the ratio of curvature to prior
TOLERANCE, MAX_PRODUCTS = 0.05, 30


def directions(drawn: DrawnPosterior, x: Tensor) -> Tensor:
    """The gradients of the margin between the two largest outputs at each input: `[p, N]`."""
    model, found = drawn.ggn.model, []
    for one in x:
        top = model(one.unsqueeze(0))[0].topk(2).values
        slopes = torch.autograd.grad(top[0] - top[1], list(drawn.ggn.parameters.values()))
        found.append(drawn.ggn.pack(dict(zip(drawn.ggn.parameters, slopes, strict=True))))
    return torch.stack(found, 1).double()


def main() -> None:
    torch.manual_seed(0)
    model = trained()
    x, y = images("cifar10_train20k.npz", "train", IMAGES)
    test, labels = images("cifar10_test.npz", "test", TEST)
    results: dict[str, Any] = {"images": IMAGES, "prior": PRIOR, "tolerance": TOLERANCE}
    loader = list(zip(x.split(100), y.split(100), strict=True))
    start = time.perf_counter()
    near = Laplace(model, "classification", "kron", rank_tolerance=1e-3, progress=False).fit(loader)
    drawn = sample_by_optimization(
        model, "classification", loader, DRAWS, PRIOR, preconditioner=near, tolerance=TOLERANCE,
        max_products=MAX_PRODUCTS, generator=torch.Generator().manual_seed(0), progress=False,
    )  # fmt: skip
    assert drawn.solution is not None
    gamma = drawn.effective_dimension
    results["weights"] = drawn.ggn.size
    results["draws"] = {
        "products": drawn.solution.products,
        "converged": drawn.solution.converged,
        "errors": drawn.solution.errors.tolist(),
        "effective_dimension": gamma.value,
        "standard_error": gamma.error,
        "updated_prior": float(next(iter(drawn.mackay_prior().precision.values()))),  # type: ignore[union-attr]
        "seconds": time.perf_counter() - start,
    }
    keep(results)
    results["predictions"] = predictions(drawn, test, labels)
    keep(results)
    start = time.perf_counter()
    v = directions(drawn, test[:DIRECTIONS])
    solved = drawn.solve(v)
    matrix = v.T @ solved.vectors
    matrix = 0.5 * (matrix + matrix.T)
    along = v.T @ drawn.steps  # [directions, draws]
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(matrix), along, upper=False)
    results["directions"] = {
        "products": solved.products,
        "converged": solved.converged,
        "errors": solved.errors.tolist(),
        "prior_variance": (v.square().sum(0) / PRIOR).tolist(),
        "variance_by_solve": matrix.diagonal().tolist(),
        "mean_square_of_draws": along.square().mean(1).tolist(),
        "whitened": white.flatten().tolist(),
        "chi_square": float(white.square().sum()),
        "degrees": white.numel(),
        "probability_below": float(
            torch.special.gammainc(torch.tensor(white.numel() / 2), white.square().sum().float() / 2)
        ),
        "seconds": time.perf_counter() - start,
    }
    keep(results)
    draw(results)


def predictions(drawn: DrawnPosterior, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Accuracy and mean log-likelihood of the network, of linearized and of sampled predictions."""
    with torch.no_grad():
        plain = torch.cat([drawn.ggn.model(part) for part in x.split(100)]).log_softmax(1)
    found = {"network": plain}
    for method in ("linearized", "sampled"):
        found[method] = torch.cat([drawn.predict(part, method).probs for part in x.split(100)]).log()
    return {
        name: {
            "accuracy": float((logs.argmax(1) == y).float().mean()),
            "log_likelihood": float(logs.gather(1, y[:, None]).mean()),
        }
        for name, logs in found.items()
    }


def keep(results: dict[str, Any]) -> None:
    (HERE / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2), flush=True)


def draw(results: dict[str, Any]) -> None:
    """Variances in the directions: of the prior, by solving, and the draws' mean squares."""
    import matplotlib.pyplot as plt

    found = results["directions"]
    with house_style(), plt.rc_context({"svg.hashsalt": "sampled_resnet"}):
        figure, ax = plt.subplots(figsize=(5, 3))
        places = range(len(found["variance_by_solve"]))
        ax.scatter(places, found["prior_variance"], marker="_", s=300, color=GRAY, label="prior")
        ax.scatter(places, found["variance_by_solve"], marker="_", s=300, color=COLORS[0], label="solved")
        ax.scatter(places, found["mean_square_of_draws"], color=COLORS[1], label=f"mean square of {DRAWS} draws")
        ax.set(yscale="log", xlabel="direction", ylabel="variance of the margin", xticks=list(places))
        ax.legend()
        figure.savefig(HERE / "figure.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
