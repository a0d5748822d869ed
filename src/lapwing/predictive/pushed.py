"""Outputs of the linearized network for weights drawn from the posterior, by Jacobian-vector products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lapwing.batches import Inputs
from lapwing.errors import InputError
from lapwing.jvp import Linearized, settle
from lapwing.posterior import Posterior
from lapwing.progress import bar
from lapwing.tape import Tape


def pushed_outputs(
    tape: Tape,
    posterior: Posterior,
    inputs: Inputs,
    samples: int | Mapping[str, Tensor],
    generator: torch.Generator | None,
    show: bool = True,
) -> Tensor:
    """`f(x) + J(x)(θ_s − θ̃)` for draws θ_s, the same for all inputs: `[S, N, *output]`.

    One forward-mode pass for each draw, whatever the number of outputs; memory is that of the outputs and of one pass.
    """
    if inputs.requires_grad():
        raise InputError(
            "method='pushed' is not differentiable in the inputs. Detach x, or use method='linearized' or 'sampled'."
        )
    linear = settle(Linearized.at(tape, inputs), ("forward", "backward"))
    base = linear.outputs.detach()
    count = samples if isinstance(samples, int) else next(iter(samples.values())).shape[0]
    outputs = []
    for i in bar(range(count), "sample", show):
        drawn = posterior.sample(1, generator) if isinstance(samples, int) else samples
        at = 0 if isinstance(samples, int) else i
        tangents = {name: (drawn[name][at] - posterior.weights[name]).unsqueeze(0) for name in tape.parameters}
        outputs.append(base + linear.push(tangents)[0].detach())
    return torch.stack(outputs)
