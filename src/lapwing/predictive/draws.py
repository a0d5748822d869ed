"""Draws of Gaussian outputs, with noise of its own for every input."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.errors import InputError
from lapwing.likelihoods.base import GaussianOutputs
from lapwing.predictive.links import draw as draw_outputs


def draw(f: GaussianOutputs, samples: int, generator: torch.Generator | None) -> Tensor:
    """`samples` draws of the outputs: `[S, N, *output]`."""
    if f.covariance is None:
        raise InputError(
            f"Draws need the covariance between outputs, which is not kept for {f.mean[0].numel()} outputs unless "
            "asked for. Use la.predict(x, link='mc')."
        )
    shaped = f.mean if f.mean.dim() > 1 else f.mean.unsqueeze(1)
    return draw_outputs(shaped, f.covariance, samples, generator).reshape(samples, *f.mean.shape)
