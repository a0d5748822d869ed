"""Outputs of networks whose weights are drawn from the posterior; the same set for all inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lapwing.batches import Inputs, ReadOutput, read_output
from lapwing.posterior import Posterior
from lapwing.progress import bar


def sampled_outputs(
    model: nn.Module,
    posterior: Posterior,
    inputs: Inputs,
    output: ReadOutput | None,
    samples: int | Mapping[str, Tensor],
    generator: torch.Generator | None,
    show: bool = True,
) -> Tensor:
    """`f(x, θ_s)` for draws θ_s: `[S, N, *output]`. `samples` is a number, or the draws themselves."""
    outputs = []
    count = samples if isinstance(samples, int) else next(iter(samples.values())).shape[0]
    with torch.set_grad_enabled(inputs.requires_grad()):
        for i in bar(range(count), "sample", show):
            # One at a time: all draws of a large network together would not fit.
            drawn = posterior.sample(1, generator) if isinstance(samples, int) else samples
            weights = {name: value[0 if isinstance(samples, int) else i] for name, value in drawn.items()}
            outputs.append(outputs_at(model, weights, inputs, output))
    return torch.stack(outputs)


def outputs_at(model: nn.Module, weights: Mapping[str, Tensor], inputs: Inputs, output: ReadOutput | None) -> Tensor:
    """`f(x, θ)` with these weights in place of the model's own: `[N, *output]`."""
    returned = torch.func.functional_call(model, dict(weights), inputs.args, inputs.kwargs)
    return read_output(returned, output)
