"""Outputs of networks whose weights are drawn from the posterior; the same set for all inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lapwing.batches import Inputs
from lapwing.posterior import Posterior
from lapwing.predictive.portions import portions, stacked
from lapwing.progress import bar
from lapwing.tape import Tape


def sampled_outputs(
    tape: Tape,
    posterior: Posterior,
    inputs: Inputs,
    samples: int | Mapping[str, Tensor],
    generator: torch.Generator | None,
    show: bool = True,
) -> Tensor:
    """`f(x, θ_s)` for draws θ_s: `[S, N, *output]`. `samples` is a number, or the draws themselves.

    The inputs go through each network in portions; memory is that of the outputs and of one pass.
    """
    count = samples if isinstance(samples, int) else next(iter(samples.values())).shape[0]
    parts = portions(tape, inputs)

    def outputs() -> Iterator[Tensor]:
        for i in bar(range(count), "sample", show):
            # One at a time: all draws of a large network together would not fit.
            drawn = posterior.sample(1, generator) if isinstance(samples, int) else samples
            weights = {name: value[0 if isinstance(samples, int) else i] for name, value in drawn.items()}
            yield torch.cat([tape.forward(weights, part) for part in parts])

    if inputs.requires_grad():
        return torch.stack(list(outputs()))
    with torch.no_grad():
        return stacked(outputs(), count)
