"""Groups of weights whose scale the network does not see, as a normalization takes it out again.

Scaling such a group by k leaves the outputs alone (with batch norm, its running statistics scaled alike), so its
gradients scale by 1/k and its best prior precision by 1/k²: it needs a precision of its own, or predictions depend on a
scale that means nothing. Candidates come from the graph of a forward pass: every layer, every parameter of a layer that
is not one as a whole (weight normalization), and the layers whose outputs are added up (the residual stream of a
pre-norm transformer). Scaling them decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lapwing.batches import Inputs
from lapwing.errors import InputError
from lapwing.layers.rule import bound
from lapwing.tape import Record, Tape

REST = "rest"
_STEP = 2.0**4  # a power of two scales without rounding
_SAME, _SETTLED = 1e-3, 1e-4  # how far outputs may move in the first step and in the second, relative to their size
_TRACE = 5e-2  # and in the first if the second shows the trace of an epsilon, which falls with the square of the scale
_TINY = 2.0**-40
# A factor on what enters these comes out of them.
_HOMOGENEOUS = re.compile(
    "(Add|Sub|Neg|Mul|Div|View|UnsafeView|ReshapeAlias|Alias|Transpose|Permute|T|Expand|Select|Slice|Split|SplitWithSizes|"
    "Unbind|Unsqueeze|Squeeze|Clone|ToCopy|Relu|LeakyRelu|MaxPool[123]DWithIndices|AvgPool[123]D|AdaptiveAvgPool[123]D|"
    "Mean|Sum|ConstantPadNd|UpsampleNearest[123]D|UpsampleBilinear2D|Index|IndexSelect|Cat|Stack|CopySlices)"
    "(Backward[0-9]*)?"
)
_BY_CONSTANTS_ONLY = ("Mul", "Div")


@dataclass(frozen=True)
class ScaleFree:
    """Names of the parameters in each scale-free group, and of the `rest`, which has a scale."""

    groups: dict[str, tuple[str, ...]]
    rest: tuple[str, ...]

    def labels(self) -> dict[str, str]:
        """Parameter name → name of its group; "rest" for what is in none."""
        found = {name: label for label, names in self.groups.items() for name in names}
        return found | dict.fromkeys(self.rest, REST)


def find_scale_free(tape: Tape, inputs: Inputs) -> ScaleFree:
    """The scale-free groups of the Bayesian weights, seen on a few examples. The model must be borrowed (see `guard`).

    Of two candidates the smaller one counts. A layer without any effect on these outputs is left to the rest.
    """
    record = tape.record(inputs)
    if record.examples < 2:
        raise InputError("Scale-free groups show on two examples or more; the first batch holds one.")
    layers = {layer.name: layer.parameters for layer in tape.layers or ()}
    owners = {name: layer for layer, names in layers.items() for name in names}
    streams = _streams(record, owners)
    scaled = _Scaled(tape, record.inputs)
    groups = {layer: names for layer, names in layers.items() if scaled.is_free(names)}
    for layer, names in layers.items():
        if layer not in groups and len(names) > 1:
            groups |= {name: (name,) for name in names if scaled.is_free((name,))}
    for stream in streams:
        taken = {name for names in groups.values() for name in names}
        members = [layer for layer in layers if layer in stream]
        names = tuple(name for layer in members for name in layers[layer] if name not in taken)
        if len(members) > 1 and len(names) > 1 and scaled.is_free(names):
            groups[f"{owners[names[0]]} … {owners[names[-1]]}"] = names
    taken = {name for names in groups.values() for name in names}
    return ScaleFree(groups, tuple(name for name in owners if name not in taken))


class _Scaled:
    """The outputs of the network with some weights scaled, its norms taking the statistics of what they see."""

    def __init__(self, tape: Tape, inputs: Inputs) -> None:
        self.tape, self.inputs = tape, inputs
        # A parameter that is 0, such as a fresh bias, has a scale that does not show.
        generator = torch.Generator().manual_seed(1)
        self.weights: dict[str, Tensor] = {
            name: value if bool(value.any()) else (0.1 * torch.randn(value.shape, generator=generator)).to(value)
            for name, value in tape.parameters.items()
        }
        self.plain = self._outputs({})

    def is_free(self, names: tuple[str, ...]) -> bool:
        """Whether scaling these parameters leaves the outputs alone, though the outputs depend on them."""
        once = self._outputs(dict.fromkeys(names, _STEP))
        first = self._gap(self.plain, once)
        if first > _TRACE:
            return False
        second = self._gap(once, self._outputs(dict.fromkeys(names, _STEP**2)))
        still = first <= _SAME and second <= _SETTLED
        # A norm written by hand keeps its epsilon.
        if not still and not 0.4 < second * _STEP**2 / first < 2.5:
            return False
        generator = torch.Generator().manual_seed(0)
        uneven = {
            name: (0.5 + torch.rand(self.tape.parameters[name].shape, generator=generator)).to(
                self.tape.parameters[name]
            )
            for name in names
        }
        return self._gap(self.plain, self._outputs(uneven)) > _SETTLED

    def _gap(self, left: Tensor, right: Tensor) -> float:
        """Relative to the outputs of the network as it is."""
        return float((left - right).abs().amax() / self.plain.abs().amax().clamp(min=1e-300))

    def _outputs(self, factors: dict[str, float] | dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), _OwnStatistics():
            scaled = {name: self.weights[name] * factor for name, factor in factors.items()}
            return self.tape.forward(self.weights | scaled, self.inputs)


class _OwnStatistics(TorchFunctionMode):
    """Norms take the statistics of their input, and next to no epsilon.

    One with running statistics divides by the root mean square over the batch and takes no mean off: a factor on all of
    its input comes out, as if the running statistics had been scaled alike, and anything else does not.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _NORMS:
            return func(*args, **kwargs)
        given = bound(func, args, kwargs)
        x = given["input"]
        eps = _TINY * (torch.finfo(x.dtype).eps if given["eps"] is None else given["eps"])
        if given.get("running_mean") is None:
            return func(**(given | {"eps": eps}))
        square = x.square().mean([axis for axis in range(x.dim()) if axis != 1], keepdim=True)
        normed = x * (square + eps).rsqrt()
        shape = (1, -1, *[1] * (x.dim() - 2))
        normed = normed if given["weight"] is None else normed * given["weight"].view(shape)
        return normed if given["bias"] is None else normed + given["bias"].view(shape)


_NORMS = {
    functional.layer_norm, functional.rms_norm, functional.group_norm, functional.batch_norm, functional.instance_norm,
}  # fmt: skip


def _streams(record: Record, owners: dict[str, str]) -> list[frozenset[str]]:
    """Sets of layers whose outputs are added up or put side by side, directly or through homogeneous operations."""
    names = {id(parameter): name for name, parameter in record.parameters.items()}
    writes = {use.edge.node: frozenset({owners[use.weight]}) for use in record.uses if use.weight in owners}
    writers: dict[Any, frozenset[str]] = {}
    joined: list[frozenset[str]] = []
    stack: list[tuple[Any, bool]] = [(record.outputs.grad_fn, False)]
    while stack:
        node, children_done = stack.pop()
        children = [child for child, _ in node.next_functions if child]
        if not children_done:
            if node in writers:
                continue
            writers[node] = frozenset()
            stack.append((node, True))
            stack.extend((child, False) for child in children if child not in writers)
        elif hasattr(node, "variable"):
            name = names.get(id(node.variable))
            writers[node] = frozenset() if name is None else frozenset({owners[name]})
        else:
            found = writes.get(node, frozenset())
            kind = _HOMOGENEOUS.fullmatch(node.name())
            if kind is not None and not (kind[1] in _BY_CONSTANTS_ONLY and len(children) > 1):
                found = found.union(*(writers[child] for child in children))
            writers[node] = found
            joined = _join(joined, found)
    return [stream for stream in joined if len(stream) > 1]


def _join(sets: list[frozenset[str]], new: frozenset[str]) -> list[frozenset[str]]:
    """Unite all sets that share a member with the new one."""
    apart = [one for one in sets if not one & new]
    return [*apart, new.union(*(one for one in sets if one & new))] if new else sets


def first_weight(tape: Tape, inputs: Inputs) -> str:
    """The weight `[O, I, ...]` of the layer that reads the network's input, or an error that says why there is none."""
    record = tape.record(inputs)
    readers = {
        use.weight: tuple(record.parameters[use.weight].shape)
        for use in record.uses
        if not use.call.input.requires_grad and use.call.shape is not None
    }
    sound = [name for name, shape in readers.items() if len(shape) > 1 and _reads_features(tape, name)]
    if len(sound) != 1:
        found = f"there are {len(sound)}: {', '.join(map(repr, sound))}" if sound else "there is none"
        raise InputError(
            "groups='input' gives every input feature of the first layer a precision, and needs one linear or "
            f"ungrouped convolution layer that reads the network's input; {found}. Use groups='layer', or a "
            "prior with a tensor of precisions for the weight."
        )
    return sound[0]


def _reads_features(tape: Tape, weight: str) -> bool:
    layer = next(layer for layer in tape.layers or () if weight in layer.parameters)
    return layer.form == "pair" and layer.shape is not None and layer.shape[0] == 1 and layer.layout is None
