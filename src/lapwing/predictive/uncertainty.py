"""Where uncertainty comes from: total = aleatoric + epistemic, as a variance or as an entropy.

Aleatoric is what remains on average once the weights are known; epistemic is the rest: `Var_θ E[y|θ]` of the law of
total variance, and the mutual information between target and weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.errors import choose
from lapwing.predictive.components import Components

MEASURES = ("entropy", "variance")
CLOSED_FORM, SAMPLES, OUTPUT_SPACE = "closed form", "samples", "Monte Carlo in output space"
_NODES = 24  # of the quadrature within a component


@dataclass(frozen=True)
class Uncertainty:
    """`total = aleatoric + epistemic`, all of one shape; `source` says what the split was computed from."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    source: str

    @staticmethod
    def shared(total: Tensor, split: Split, source: str) -> Uncertainty:
        """`total` divided as `split` is: exactly it, where the two totals are the same."""
        epistemic = total * split.share
        return Uncertainty(total, total - epistemic, epistemic, source)


@dataclass(frozen=True)
class Split:
    """Entropy or variance of a mixture, and what remains of it on average within its components."""

    total: Tensor
    within: Tensor

    @property
    def between(self) -> Tensor:
        """`total − within`, not below 0 where they are equal up to rounding."""
        return (self.total - self.within).clamp(min=0)

    @property
    def share(self) -> Tensor:
        """The part of the total that lies between the components, from 0 to 1."""
        return self.between / self.total.clamp(min=torch.finfo(self.total.dtype).tiny)


@dataclass(frozen=True)
class Parts:
    """Both measures of a mixture over discrete targets: `entropy` per position, `variance` of `1{y = c}` per class."""

    entropy: Split
    variance: Split
    source: str = SAMPLES

    def of(self, measure: str) -> Split:
        """The split of one of `MEASURES`."""
        return self.entropy if choose(measure, MEASURES, "measure of uncertainty") == "entropy" else self.variance

    def in_output_space(self) -> Parts:
        """The same, said to be from draws of the outputs and not of the weights."""
        return replace(self, source=OUTPUT_SPACE)


def entropy_terms(log_probs: Tensor) -> Tensor:
    """`−p log p`, elementwise, from log p; 0 where p is."""
    return -log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)


def indicator_variance(log_probs: Tensor) -> Tensor:
    """`p(1 − p)`, the variance of `1{y = c}`, from log p."""
    return log_probs.exp() * -torch.expm1(log_probs)


def gaussian_entropy(variance: Tensor) -> Tensor:
    """`½ log 2πe·variance`."""
    return 0.5 * (math.log(2 * math.pi * math.e) + variance.log())


def mixture_entropy(components: Components) -> Tensor:
    """Differential entropy of each output's own mixture of Gaussians: `[N, *output]`.

    `−Σ_s w_s E_{y ~ N_s} log p(y)` with Gauss–Hermite quadrature within each component.
    """
    nodes, weights = _hermite(components.means)
    means, stds = components.means, components.variances.sqrt()
    total = torch.zeros_like(means[0])
    for node, weight in zip(nodes, weights, strict=True):
        for log_w, mean, std in zip(components.log_weights, means, stds, strict=True):
            gaps = (mean + node * std - means) / stds
            lead = components.log_weights.reshape(-1, *[1] * mean.dim())
            density = (lead - 0.5 * (gaps.square() + math.log(2 * math.pi)) - stds.log()).logsumexp(0)
            total = total - weight * log_w.exp() * density
    return total


def _hermite(like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights of `E g(z)`, z ~ N(0, 1), by the eigenvalues of the Jacobi matrix (Golub and Welsch)."""
    off = torch.arange(1, _NODES, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes.to(like), vectors[0].square().to(like)
