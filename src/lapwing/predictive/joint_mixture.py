"""The weighted mixture of joint predictions: which member is right is one question for all inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from lapwing.errors import InputError
from lapwing.predictive.joint import JointPrediction, JointSamples, check_count
from lapwing.predictive.mixing import average, check_shapes, log_average, mix
from lapwing.predictive.prediction import Prediction

JointMember = JointPrediction | JointSamples


@dataclass(frozen=True)
class JointMixture(Prediction):
    """`p(y_1, …, y_N) = Σ_m w_m p_m(y_1, …, y_N)`, with normalized `log_weights: [M]`.

    Inputs are coupled by the members' own covariances and by not knowing which member it is.
    """

    members: tuple[JointMember, ...] = field(repr=False)
    log_weights: Tensor

    def __post_init__(self) -> None:
        check_shapes([member.mean for member in self.members])

    @cached_property
    def mean(self) -> Tensor:
        """Of the outputs f: `[N, *output]`."""
        return average([member.mean for member in self.members], self.log_weights)

    @property
    def covariance(self) -> Tensor:
        """Of the outputs f, by the law of total covariance: `Σ_m w_m (C_m + (μ_m − μ)(μ_m − μ)ᵀ)`, `[N·D, N·D]`."""
        apart = [(member.mean - self.mean).flatten() for member in self.members]
        within = [member.covariance for member in self.members]
        return average([own + torch.outer(gap, gap) for own, gap in zip(within, apart, strict=True)], self.log_weights)

    @cached_property
    def marginals(self) -> Prediction:
        """The mixture of the members' predictions of each example by itself."""
        return mix([member.marginals for member in self.members], self.log_weights)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the outputs f at all inputs together, of one member each: `[n, N, *output]`."""
        check_count(n)
        weights = self.log_weights.exp().to("cpu" if generator is None else generator.device)
        chosen = torch.multinomial(weights, n, replacement=True, generator=generator)
        drawn = self.mean.new_empty(n, *self.mean.shape)
        for number, member in enumerate(self.members):
            own = (chosen == number).nonzero().squeeze(1).to(drawn.device)
            if len(own):
                drawn[own] = member.sample(len(own), generator).to(drawn)
        return drawn

    def log_prob(self, targets: Tensor, **options: Any) -> Tensor:
        """`log Σ_m w_m p_m(y_1, …, y_N)`: 0-d; `options` are those of the members' own `log_prob`."""
        return log_average([member.log_prob(targets, **options) for member in self.members], self.log_weights)

    def distribution(self) -> MixtureSameFamily:
        """The targets of a regression, noise included, as one vector: event shape `[N·D]`."""
        gaussians = [member.distribution() for member in self.members if isinstance(member, JointPrediction)]
        if len(gaussians) < len(self.members):
            raise InputError(
                "The joint distribution of drawn outputs has no closed form: draw some with prediction.sample(n), or "
                "use method='linearized'."
            )
        means, covariances = (
            torch.stack([getattr(one, name) for one in gaussians]) for name in ("mean", "covariance_matrix")
        )
        weights = Categorical(logits=self.log_weights.to(means))
        return MixtureSameFamily(weights, MultivariateNormal(means, covariances))
