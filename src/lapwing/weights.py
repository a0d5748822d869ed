"""Which parameters are Bayesian."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from lapwing.batches import Inputs, ReadOutput, Unpack, unpack
from lapwing.errors import InputError
from lapwing.graph import nearest, walk
from lapwing.guard import borrowed, random_state_kept
from lapwing.layers import PairRule
from lapwing.subnetwork import Subnetwork
from lapwing.tape import Tape

LAST_LAYER = "last_layer"
Weights = str | Iterable[str] | Subnetwork


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter for all with `requires_grad`; a tied parameter under its first name."""
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise InputError(
            "The model has no trainable parameter: every parameter has requires_grad=False. "
            "Call requires_grad_(True) on those that should be Bayesian."
        )
    for name, parameter in found.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InputError(f"Parameter {name!r} is not initialized yet (lazy module). Run one forward pass first.")
    return found


def select(model: nn.Module, weights: Weights) -> dict[str, nn.Parameter]:
    """Resolve "all", a glob, or a list of names and globs to the Bayesian parameters.

    Frozen parameters (`requires_grad=False`) are never Bayesian; naming one exactly is an error.
    "last_layer" is found from the tape and is resolved by `fit`; here it means all candidates.
    """
    if isinstance(weights, Subnetwork):
        raise InputError(
            "A Subnetwork is for Laplace(..., structure='full' or 'block'); here weights are whole parameters."
        )
    candidates = trainable(model)
    if isinstance(weights, str) and weights in ("all", LAST_LAYER):
        return candidates
    patterns = [weights] if isinstance(weights, str) else list(weights)
    aliases = list(model.named_parameters(remove_duplicate=False))
    by_identity = {id(parameter): name for name, parameter in candidates.items()}
    chosen: set[str] = set()
    for pattern in patterns:
        matches = [(name, parameter) for name, parameter in aliases if fnmatchcase(name, pattern)]
        live = [by_identity[id(parameter)] for _, parameter in matches if id(parameter) in by_identity]
        if not live:
            raise InputError(_no_match(pattern, [name for name, _ in aliases], frozen=bool(matches)))
        chosen.update(live)
    return {name: parameter for name, parameter in candidates.items() if name in chosen}


def _no_match(pattern: str, names: list[str], frozen: bool) -> str:
    if frozen:
        return f"weights={pattern!r} names only frozen parameters (requires_grad=False), which are never Bayesian."
    near = difflib.get_close_matches(pattern, [*names, "all", LAST_LAYER], n=3, cutoff=0.3)
    hint = f" Nearest: {', '.join(map(repr, near))}." if near else ""
    return f"weights={pattern!r} matches no parameter of the model.{hint} Use 'all', 'last_layer', names or globs."


def refuse_complex(parameters: Mapping[str, nn.Parameter]) -> None:
    """A Gaussian over a complex number is not one over its real and imaginary part."""
    name = next((name for name, parameter in parameters.items() if parameter.is_complex()), None)
    if name is not None:
        raise InputError(
            f"Parameter {name!r} is complex. Keep its real and imaginary part as two real parameters, or leave it out: "
            "weights=[...] without it, or requires_grad=False."
        )


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside `DataParallel`; scripted modules, which no tape can see into, are refused."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, nn.DataParallel):
        return unwrap(model.module)
    scripted = next((name for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise InputError(
            f"Module {scripted or '(the model itself)'!r} is a torch.jit.script module, which cannot be recorded. "
            "Use the original nn.Module."
        )
    return model


def last_layer(tape: Tape, batch: Any, custom: Unpack | None) -> tuple[str, ...]:
    """The parameters of the last layer that the output depends on, found from the tape."""
    inputs, _ = unpack(batch, "Batch 0", custom)
    device = next(iter(tape.parameters.values())).device
    record = tape.record(inputs.to(device))
    pairs = zip(record.uses, record.graph.reached, strict=True)
    reached = [use for use, reached in pairs if reached and isinstance(use.rule, PairRule)]
    if not reached:
        raise InputError(
            "weights='last_layer' found no linear or convolutional layer before the output. Name the parameters: "
            "weights=['head.weight', ...]."
        )
    use = reached[-1]
    names = (use.weight,) if use.bias is None else (use.weight, use.bias)
    after = walk(record.outputs, [], stop=use.edge.node).leaves
    later = [name for name, parameter in record.parameters.items() if id(parameter) in after and name not in names]
    if later:
        raise InputError(
            f"weights='last_layer' found {use.weight!r}, but the output also depends on {later[0]!r} past it, which no "
            "rule reads as a layer. Name the parameters: weights=['head.weight', ...]."
        )
    return names


def output_weights(model: nn.Module, inputs: Inputs, output: ReadOutput | None = None) -> frozenset[str]:
    """The weights whose layers make the model's outputs: nothing but norms and functions without weights follows them.

    Frozen weights count as well. Of a tied weight, its first name.
    """
    parameters = {name: value for name, value in model.named_parameters() if value.is_floating_point()}
    with random_state_kept(), borrowed(model, parameters):
        record = Tape(model, parameters, output).run(inputs)
        uses = [use for use in record.uses if isinstance(use.rule, PairRule)]
        last = nearest(record.outputs, {use.edge.node for use in uses})
        return frozenset(use.weight for use in uses if use.edge.node in last)
