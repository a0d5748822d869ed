"""A weighted mixture of Gaussians for each example: its density, its distribution and its quantiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, MultivariateNormal, Normal

_HALVINGS = 60  # until the bracket is at the level of rounding


@dataclass(frozen=True)
class Components:
    """`Σ_s w_s N(means_s, variances_s)` over real outputs.

    `log_weights: [S]` are normalized, `means` and `variances` (the marginal ones) `[S, N, *output]`; `covariances`
    `[S, N, D, D]`, where present, are those between the D outputs of an example, else they are independent.
    """

    log_weights: Tensor
    means: Tensor
    variances: Tensor
    covariances: Tensor | None = None

    @staticmethod
    def equal(means: Tensor, variance: Tensor) -> Components:
        """Equal weights: `means: [S, N, *output]`, all with the variance `[N, *output]`."""
        logs = torch.full((len(means),), 1 / len(means), dtype=means.dtype, device=means.device).log()
        return Components(logs, means, variance.expand_as(means))

    @staticmethod
    def joined(parts: list[Components], log_weights: Tensor) -> Components:
        """The mixture of mixtures, with `log_weights: [M]` for its M parts."""
        logs = [weight.to(part.log_weights) + part.log_weights for weight, part in zip(log_weights, parts, strict=True)]
        covariances = [part.covariances for part in parts if part.covariances is not None]
        return Components(
            torch.cat(logs),
            torch.cat([part.means for part in parts]),
            torch.cat([part.variances for part in parts]),
            torch.cat(covariances) if len(covariances) == len(parts) else None,
        )

    def distribution(self) -> Distribution:
        """One joint distribution of the outputs per example: batch shape `[N]`, the outputs flat where correlated."""
        means, events = self.means.movedim(0, 1), self.means.dim() - 2
        weights = Categorical(logits=self.log_weights.expand(means.shape[:2]))
        if self.covariances is not None and events:
            each: Distribution = MultivariateNormal(means.flatten(2), self.covariances.movedim(0, 1))
        else:
            marginal = Normal(means, self.variances.movedim(0, 1).sqrt())
            each = Independent(marginal, events) if events else marginal
        return MixtureSameFamily(weights, each)

    def mirrored(self) -> Components:
        """The mixture of `−y`: its lower quantiles are the upper ones of this, without the rounding of `1 − p`."""
        return replace(self, means=-self.means)

    def quantile(self, probability: float) -> Tensor:
        """The value below which each output lies with this probability: `[N, *output]`.

        Bisection between the smallest and the largest quantile of a component, in float64; differentiable by
        `dq = −dF(q)/F′(q)`.
        """
        dtype = self.means.dtype
        means, scales = self.means.double(), self.variances.double().sqrt()
        weights = self.log_weights.double().log_softmax(0).exp()  # they may be rounded

        def below(value: Tensor) -> Tensor:
            found: Tensor = torch.tensordot(weights, torch.special.ndtr((value - means) / scales), dims=1)
            return found

        with torch.no_grad():
            ends = means + scales * torch.special.ndtri(torch.full_like(means, probability))
            low: Tensor = ends.amin(0)
            high: Tensor = ends.amax(0)
            for _ in range(_HALVINGS):
                middle = low + (high - low) / 2
                short = below(middle) < probability
                low, high = torch.where(short, middle, low), torch.where(short, high, middle)
            found = low + (high - low) / 2
        if not (means.requires_grad or scales.requires_grad):
            return found.to(dtype)
        with torch.no_grad():
            density: Tensor = torch.tensordot(weights, Normal(means, scales).log_prob(found).exp(), dims=1)
        mass = below(found)
        moved: Tensor = found - (mass - mass.detach()) / density.clamp(min=torch.finfo(density.dtype).tiny)
        return moved.to(dtype)
