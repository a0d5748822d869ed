"""Outputs of the linearized network for weights drawn from the posterior, by Jacobian-vector products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lapwing.batches import Inputs
from lapwing.errors import InputError
from lapwing.jvp import Linearized, settle
from lapwing.posterior import Posterior
from lapwing.predictive.portions import portions, stacked
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

    One forward-mode pass for each draw, whatever the number of outputs, over the inputs in portions; memory is that of
    the outputs and of one pass.
    """
    if inputs.requires_grad():
        raise InputError(
            "method='pushed' is not differentiable in the inputs. Detach x, or use method='linearized' or 'sampled'."
        )
    parts = _linearized(tape, inputs)
    count = samples if isinstance(samples, int) else next(iter(samples.values())).shape[0]

    def outputs() -> Iterator[Tensor]:
        for i in bar(range(count), "sample", show):
            drawn = posterior.sample(1, generator) if isinstance(samples, int) else samples
            at = 0 if isinstance(samples, int) else i
            tangents = {name: (drawn[name][at] - posterior.weights[name]).unsqueeze(0) for name in tape.parameters}
            yield torch.cat([part.outputs.detach() + _push(part, tangents) for part in parts])

    return stacked(outputs(), count)


def _linearized(tape: Tape, inputs: Inputs) -> list[Linearized]:
    """The portions of the inputs, each without its graph where the products are made in forward mode."""
    parts = portions(tape, inputs)
    first = settle(Linearized.at(tape, parts[0]), ("forward", "backward"))
    if first.method == "backward" and len(parts) == 1:
        return [first]  # its graph serves all samples
    known = [first.outputs.detach()]
    with torch.no_grad():
        known += [tape.forward({}, part) for part in parts[1:]]
    return [Linearized(tape, part, outputs, first.method) for part, outputs in zip(parts, known, strict=True)]


def _push(part: Linearized, tangents: dict[str, Tensor]) -> Tensor:
    """`J v` on one portion: `[n, *output]`."""
    if part.method == "backward" and part.outputs.grad_fn is None:
        part = Linearized.at(part.tape, part.inputs, "backward")
    return part.push(tangents)[0].detach()
