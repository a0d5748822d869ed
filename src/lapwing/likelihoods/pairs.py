"""Gaussian targets whose likelihood reads two outputs per target.

Outputs are `[N, *positions, 2D]` for targets `[N, *positions, D]`: along the last dimension first the D outputs f1,
then the D outputs f2. What distinguishes the likelihoods is what the pair `(f1, f2)` means: `moments` and `roots`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.columns import Columns, diagonal, given, random_signs
from lapwing.errors import InputError, choose
from lapwing.likelihoods.base import GaussianOutputs, Statistics, check_finite, check_same_shape
from lapwing.predictive.components import Components
from lapwing.predictive.draws import draw
from lapwing.predictive.prediction import RegressionPrediction

HEADS = ("softplus", "exp")
LINKS = ("delta", "known", "mc")


def head(name: str, f: Tensor) -> tuple[Tensor, Tensor]:
    """The positive function of this name at f, and its derivative."""
    if name == "exp":
        return f.exp(), f.exp()
    return functional.softplus(f), torch.sigmoid(f)


def split(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs f1 and f2, `[..., D]` each."""
    if outputs.shape[-1] % 2 or outputs.dim() < 2:
        raise InputError(
            f"A likelihood of two outputs per target needs outputs [N, ..., 2·D], got {list(outputs.shape)}: first "
            "the D outputs f1, then the D outputs f2."
        )
    f1, f2 = outputs.chunk(2, -1)
    return f1, f2


class PairLikelihood:
    """What `Heteroscedastic` and `MeanVariance` share."""

    name: str
    noise = None

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean μ and variance v of the targets: `[..., D]` each."""
        raise NotImplementedError

    def slopes(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """`∂μ/∂f1` and `∂μ/∂f2`: `[..., D]` each."""
        raise NotImplementedError

    def roots(self, outputs: Tensor) -> Tensor:
        """The two columns of `Λ_f^{1/2}` of every target, `[2, *outputs.shape]`: along the mean, then the variance.

        The gradient of log p at `y = μ + √v ε` is `roots[0]·ε + roots[1]·(ε² − 1)/√2`, so that its covariance is
        the sum of the columns' outer products.
        """
        raise NotImplementedError

    def noise_scale(self, noise: float | Tensor) -> Tensor:
        raise InputError(f"The {self.name} likelihood has no noise to set: the network predicts it.")

    def check(self, outputs: Tensor, targets: Tensor, where: str) -> None:
        check_finite(outputs, "the model's outputs hold", where)
        f1, _ = split(outputs)
        if not targets.is_floating_point():
            raise InputError(f"{where}: regression targets of dtype {targets.dtype}; convert them to floating point.")
        if targets.shape == outputs.shape:
            raise InputError(
                f"{where}: targets of shape {list(targets.shape)}, the same as the outputs. The {self.name} likelihood "
                f"reads two outputs per target: give the model {2 * targets.shape[-1]} outputs."
            )
        check_same_shape(f1, targets, f"{where}, two outputs per target")
        check_finite(targets, "the targets hold", where)
        mean, variance = self.moments(outputs)
        if not bool((torch.isfinite(mean) & torch.isfinite(variance) & (variance > 0)).all()):
            raise InputError(
                f"{where}: the second half of the outputs reaches {float(split(outputs)[1].abs().max()):g}, where "
                f"the variance over- or underflows in {outputs.dtype}. Train with a smaller learning rate or a prior, "
                "or in float64."
            )

    def statistics(self, outputs: Tensor, targets: Tensor) -> Statistics:
        return Statistics(outputs.shape[0], float(self.log_prob(outputs.double(), targets.double()).sum()))

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, variance = self.moments(outputs)
        terms = -0.5 * ((targets - mean).square() / variance + variance.log() + math.log(2 * math.pi))
        return terms.flatten(1).sum(1)

    def hessian_diagonal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.roots(outputs).square().sum(0)

    def hessian_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        roots = self.roots(outputs)
        r1, r2 = split(roots)
        index = torch.arange(outputs[0].numel(), device=outputs.device).reshape(outputs.shape[1:])
        i1, i2 = (part.flatten() for part in index.chunk(2, -1))
        cross = (r1 * r2).sum((0, 1)).flatten()
        matrix = torch.diag(roots.square().sum((0, 1)).flatten())
        return matrix.index_put((i1, i2), cross).index_put((i2, i1), cross)

    def hessian_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        """`Λ_f v`, both `[N, ..., 2D]`: that of autograd would add the head's second derivative."""
        along = [left + right for left, right in (split(root * vector) for root in self.roots(outputs))]
        pairs = zip(self.roots(outputs), along, strict=True)
        return torch.stack([root * torch.cat([inner, inner], -1) for root, inner in pairs]).sum(0)

    def hessian_columns(self, outputs: Tensor, targets: Tensor) -> Columns:
        halves = [[diagonal(half) for half in split(root)] for root in self.roots(outputs)]
        each = halves[0][0].count  # a column for the mean of every target, then one for its variance

        def part(start: int, stop: int) -> Tensor:
            pieces = []
            for k, (left, right) in enumerate(halves):
                low, high = max(start - k * each, 0), min(stop - k * each, each)
                if low < high:
                    pieces.append(torch.cat([left.part(low, high), right.part(low, high)], -1))
            return torch.cat(pieces)

        return Columns(2 * each, part)

    def signed_columns(self, outputs: Tensor, targets: Tensor, generator: torch.Generator | None) -> Columns:
        roots = self.roots(outputs)
        signs = random_signs(split(roots)[0].shape, outputs, generator)
        return given((roots * torch.cat([signs, signs], -1)).sum(0, keepdim=True))

    def sampled_gradients(
        self, outputs: Tensor, targets: Tensor, samples: int, generator: torch.Generator | None
    ) -> Tensor:
        roots = self.roots(outputs)
        shape = (samples, *split(outputs)[0].shape)
        drawn = torch.randn(shape, generator=generator, dtype=outputs.dtype, device=outputs.device)
        drawn = torch.cat([drawn, drawn], -1)
        return roots[0] * drawn + roots[1] * (drawn.square() - 1) / math.sqrt(2)

    def predict_gaussian(
        self, f: GaussianOutputs, noise: Tensor, link: str | None, samples: int, generator: torch.Generator | None
    ) -> RegressionPrediction:
        link = choose(link or "delta", LINKS, f"link for {self.name} regression")
        if link == "mc":
            return self.predict_samples(draw(f, samples, generator), noise)
        mean, variance = self.moments(f.mean)
        slope1, slope2 = self.slopes(f.mean)
        if link == "known":
            slope2 = torch.zeros_like(slope2)
        if f.covariance is None:
            return self._uncorrelated(f, link, mean, variance, slope1)
        index = torch.arange(f.mean[0].numel(), device=f.mean.device).reshape(f.mean.shape[1:])
        i1, i2 = (part.flatten() for part in index.chunk(2, -1))
        s1, s2 = slope1.flatten(1), slope2.flatten(1)
        rows = s1.unsqueeze(2) * f.covariance[:, i1] + s2.unsqueeze(2) * f.covariance[:, i2]
        covariance = rows[:, :, i1] * s1.unsqueeze(1) + rows[:, :, i2] * s2.unsqueeze(1)
        epistemic = covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape)
        return RegressionPrediction(mean, variance, epistemic, covariance=covariance)

    def _uncorrelated(
        self, f: GaussianOutputs, link: str, mean: Tensor, variance: Tensor, slope: Tensor
    ) -> RegressionPrediction:
        """Where the covariance between so many outputs was not kept."""
        if link == "delta":
            raise InputError(
                f"link='delta' needs the covariance between f1 and f2, which is not kept for {f.mean[0].numel()} "
                "outputs. Use la.predict(x, link='mc'), or link='known', which needs the variance of f1 alone."
            )
        return RegressionPrediction(mean, variance, slope.square() * split(f.variance)[0])

    def predict_samples(self, outputs: Tensor, noise: Tensor) -> RegressionPrediction:
        means, variances = self.moments(outputs)
        mean = means.mean(0)
        logs = torch.full((len(means),), 1 / len(means), dtype=means.dtype, device=means.device).log()
        spread = (means - mean).square().mean(0)
        return RegressionPrediction(
            mean, variances.mean(0), spread, components=Components(logs, means, variances)
        )  # fmt: skip

    def config(self) -> dict[str, Any]:
        return {"name": self.name, "head": getattr(self, "head", None)}
