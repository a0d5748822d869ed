"""What the labels of several candidates tell about the weights, when the posterior is a set of samples: BatchBALD."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lapwing.errors import InputError
from lapwing.likelihoods import Bernoulli, Categorical
from lapwing.predictive.joint import JointPrediction, JointSamples

_HELD = 2**23  # numbers at once


@dataclass(frozen=True)
class SampledBatch:
    """The labels of N candidates given those of the chosen ones, under S equally likely samples of the weights.

    `probs: [S, N, C]` are the class probabilities of each sample and `entropies: [S, N]` theirs. The
    labels of the chosen ones have M outcomes m with probabilities `weights: [M]`; `beliefs: [S, M]` are S times the
    posterior probabilities of the samples given an outcome, by Bayes' rule. As long as there are at most `most`
    outcomes they are all of them, and everything is exact for these samples; then `most` of them are drawn (systematic
    resampling, unbiased), with equal weights.
    """

    probs: Tensor
    entropies: Tensor
    weights: Tensor
    beliefs: Tensor
    most: int
    generator: torch.Generator | None = field(default=None, repr=False)

    @staticmethod
    def of(joint: JointSamples, most: int, generator: torch.Generator | None) -> SampledBatch:
        """Nothing chosen yet: one outcome, under which all samples are as likely as before."""
        probs = _probabilities(joint)
        entropies = torch.special.entr(probs).sum(2)
        return SampledBatch(probs, entropies, probs.new_ones(1), probs.new_ones(len(probs), 1), most, generator)

    def gains(self) -> Tensor:
        """`I(y_n; θ | chosen) = Σ_m w_m {H[y_n|m] − E[H[y_n|θ_s] | m]}`: what each label adds, in nats: `[N]`.

        Both entropies are of the same outcomes, so that drawing these costs little and no term is negative.
        """
        samples, _, classes = self.probs.shape
        step = max(1, _HELD // (len(self.weights) * classes))
        total = []
        for part in self.probs.split(step, 1):
            found = (self.beliefs.T / samples) @ part.flatten(1)  # p(y_n = c | m): [M, n·C]
            entropy = torch.special.entr(found).unflatten(1, (-1, classes)).sum(2)
            total.append(self.weights @ entropy)
        within: Tensor = (self.beliefs @ self.weights / samples) @ self.entropies
        return (torch.cat(total) - within).clamp(min=0)  # equal entropies differ by rounding

    def after(self, candidate: int) -> SampledBatch:
        """Once the label of a candidate is known too."""
        own = self.probs[:, candidate]  # [S, C]
        answer = self.beliefs.T @ own / len(own)  # p(y = c | m): [M, C]
        weights = (self.weights[:, None] * answer).flatten()
        kept = (weights > 0).nonzero().flatten()
        if len(kept) > self.most:
            kept = self._draw(weights)
            fresh = weights.new_full((self.most,), 1 / self.most)
        else:
            fresh = weights[kept] / weights.sum()
        outcome, label = kept // own.shape[1], kept % own.shape[1]
        beliefs = self.beliefs[:, outcome] * own[:, label] / answer[outcome, label]
        return replace(self, weights=fresh, beliefs=beliefs)

    def _draw(self, weights: Tensor) -> Tensor:
        """Indices of `most` outcomes: each as often as its weight says, up to less than one more or less."""
        start = torch.rand(1, generator=self.generator, dtype=weights.dtype, device=weights.device)
        places = (start + torch.arange(self.most, dtype=weights.dtype, device=weights.device)) / self.most
        total = weights.cumsum(0)
        last = int((weights > 0).nonzero()[-1])
        return torch.searchsorted(total / total[-1], places, side="right").clamp(max=last)


def sampled(joint: JointPrediction, samples: int, generator: torch.Generator | None) -> JointSamples:
    """Draws of the outputs at all inputs together, in the place of their Gaussian."""
    return JointSamples(joint.sample(samples, generator), joint.likelihood, joint.noise)


def _probabilities(joint: JointSamples) -> Tensor:
    """`[S, N, C]`, float64."""
    outputs, likelihood = joint.outputs.detach().double(), joint.likelihood
    if isinstance(likelihood, Categorical) and outputs.dim() == 3:
        return outputs.softmax(2)
    if isinstance(likelihood, Bernoulli) and outputs[0, 0].numel() == 1:
        logits = outputs.flatten(1)
        return torch.stack([-logits, logits], 2).sigmoid()
    if isinstance(likelihood, Categorical | Bernoulli):
        raise InputError(
            f"batch_bald needs one label per candidate, got outputs of {list(outputs.shape[1:])}. Use bald, candidate "
            "by candidate."
        )
    raise InputError(
        f"batch_bald from samples is for classes, not for the {likelihood.name} likelihood. A Gaussian likelihood "
        "has it in closed form: la.predict(x, joint=True)."
    )
