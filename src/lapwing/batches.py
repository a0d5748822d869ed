"""From what a loader yields to the arguments of the model and the target."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lapwing.errors import InputError
from lapwing.progress import bar

Unpack = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any], Tensor]]
ReadOutput = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def to(self, device: torch.device) -> Inputs:
        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            with torch.inference_mode(False):  # a tensor made in inference mode has no place in a graph; a copy has
                return leaf.clone().to(device) if leaf.is_inference() else leaf.to(device)

        return Inputs(tree_map(move, self.args), tree_map(move, self.kwargs))

    def copy(self) -> Inputs:
        """Tensors of their own, without a graph."""

        def own(leaf: Any) -> Any:
            return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

        return Inputs(tree_map(own, self.args), tree_map(own, self.kwargs))

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, Tensor)]

    def check_finite(self, where: str) -> None:
        for tensor in self.tensors():
            if tensor.is_floating_point() and tensor.numel() and not bool(torch.isfinite(tensor.abs().amax())):
                raise InputError(f"{where}: the input holds NaN or inf. Clean or impute it first.")

    def explain(self, failure: RuntimeError, dtype: torch.dtype) -> None:
        """Raise with the fix, if the model failed on inputs of another floating dtype than its weights."""
        for tensor in self.tensors():
            if tensor.is_floating_point() and tensor.dtype != dtype:
                raise InputError(
                    f"The model failed on an input of dtype {tensor.dtype}, its weights are {dtype}. Convert one of "
                    f"them, e.g. x.to({dtype}). ({failure})"
                ) from failure

    def requires_grad(self) -> bool:
        return any(tensor.requires_grad for tensor in self.tensors())

    def examples(self) -> int:
        """The size of the first tensor's first dimension."""
        found = [tensor for tensor in self.tensors() if tensor.dim() > 0]
        if not found:
            raise InputError("The inputs hold no tensor with an example axis.")
        return found[0].shape[0]

    def joined(self, other: Inputs) -> Inputs:
        """The examples of both in one batch; what has no example axis must be the same in both."""
        (mine, spec), (theirs, same) = (tree_flatten((inputs.args, inputs.kwargs)) for inputs in (self, other))
        if spec != same:
            raise InputError("Inputs of different form (number or names of arguments) do not make one batch.")
        first, second = self.examples(), other.examples()

        def batched(leaf: Any, examples: int) -> bool:
            return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == examples

        leaves = []
        for one, two in zip(mine, theirs, strict=True):
            if batched(one, first) and batched(two, second):
                if one.shape[1:] != two.shape[1:]:
                    raise InputError(
                        f"Examples of shape {list(one.shape[1:])} and {list(two.shape[1:])} do not make one batch: "
                        "give both the same shape."
                    )
                leaves.append(torch.cat([one, two]))
            elif type(one) is type(two) and (torch.equal(one, two) if isinstance(one, Tensor) else one == two):
                leaves.append(one)
            else:
                raise InputError("An argument without an example axis differs between the two batches.")
        args, kwargs = tree_unflatten(leaves, spec)
        return Inputs(args, kwargs)

    def all_batched(self, examples: int) -> bool:
        """Whether there are tensors, each with an example axis (dimension 0 of size `examples`)."""
        found = self.tensors()
        return bool(found) and all(tensor.dim() > 0 and tensor.shape[0] == examples for tensor in found)

    def form(self, examples: int) -> Hashable:
        """What inputs must have in common to make one batch; None where one is not divided into examples."""
        leaves, spec = tree_flatten((self.args, self.kwargs))
        if not self.all_batched(examples) or not all(_joins(leaf) for leaf in leaves):
            return None
        each = [(leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves]
        return repr(spec), tuple(each)

    def split(self, examples: int) -> SplitInputs:
        """Tell the leaves that have an example axis (dimension 0 of size `examples`) from the rest."""
        leaves, spec = tree_flatten((self.args, self.kwargs))
        batched = tuple(isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == examples for leaf in leaves)
        return SplitInputs(tuple(leaves), batched, spec)


@dataclass(frozen=True)
class SplitInputs:
    """Inputs taken apart: `leaves[i]` has an example axis where `batched[i]`."""

    leaves: tuple[Any, ...]
    batched: tuple[bool, ...]
    spec: Any

    def examples(self) -> tuple[Tensor, ...]:
        """The leaves with an example axis."""
        return tuple(leaf for leaf, batched in zip(self.leaves, self.batched, strict=True) if batched)

    def join(self, examples: Sequence[Tensor]) -> Inputs:
        """Put other examples in the place of `examples()`."""
        given = iter(examples)
        leaves = [next(given) if batched else leaf for leaf, batched in zip(self.leaves, self.batched, strict=True)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return Inputs(args, kwargs)

    def beside(self, others: Sequence[SplitInputs]) -> Inputs:
        """The examples of others of one form after one's own."""
        leaves = zip(*(inputs.examples() for inputs in (self, *others)), strict=True)
        return self.join([torch.cat(leaf) for leaf in leaves])

    def pick(self, examples: Tensor) -> Inputs:
        """The inputs of the examples with these indices, `[M]`."""
        return self.join([leaf[examples.to(leaf.device)] for leaf in self.examples()])

    def part(self, start: int, stop: int) -> Inputs:
        """The inputs of examples `start` to `stop`."""
        return self.join([leaf[start:stop] for leaf in self.examples()])


def _joins(leaf: Any) -> bool:
    """Whether a leaf is a tensor without peculiarities, or an option."""
    plain = type(leaf) is Tensor and leaf.layout == torch.strided
    return plain or isinstance(leaf, bool | int | float | str | None)


def asked(x: Any, device: torch.device) -> Inputs:
    """What a prediction is asked for: a tensor, a tuple of positional or a mapping of keyword arguments."""
    if isinstance(x, Mapping):
        x = Inputs((), {key: value for key, value in x.items() if key != "labels"})
    elif not isinstance(x, Inputs):
        x = Inputs(tuple(x) if isinstance(x, tuple | list) else (x,), {})
    inputs: Inputs = x.to(device)
    inputs.check_finite("predict")
    return inputs


def unpack(batch: Any, where: str, custom: Unpack | None = None) -> tuple[Inputs, Tensor]:
    """Read one batch as (arguments, target).

    `(x, y)` and `(x1, x2, ..., y)` are positional arguments and a target; a mapping is keyword
    arguments with the target under "labels"; anything else goes through `custom`.
    """
    if custom is not None:
        args, kwargs, target = custom(batch)
        return Inputs(tuple(args), dict(kwargs)), target
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise InputError(
                f"{where}: a mapping without the key 'labels' (it has {', '.join(map(repr, batch))}). "
                "Add the target under 'labels', or pass Laplace(..., unpack=fn) with "
                "fn(batch) -> (args, kwargs, target)."
            )
        kwargs = {key: value for key, value in batch.items() if key != "labels"}
        return Inputs((), kwargs), _target(batch["labels"], where)
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return Inputs(tuple(batch[:-1]), {}), _target(batch[-1], where)
    raise InputError(
        f"{where}: a batch without a target ({type(batch).__name__}). Yield (x, y), (x1, ..., y) or a "
        "mapping with 'labels', or pass Laplace(..., unpack=fn) with fn(batch) -> (args, kwargs, target)."
    )


def read(
    loader: Iterable[Any], device: torch.device, custom: Unpack | None, title: str, show: bool
) -> Iterator[tuple[str, Inputs, Tensor]]:
    """The batches of one pass on a device: `(where, inputs, targets)`, with the name of each for errors."""
    for number, batch in enumerate(bar(loader, title, show)):
        where = f"Batch {number}"
        inputs, targets = unpack(batch, where, custom)
        inputs, targets = inputs.to(device), targets.to(device)
        inputs.check_finite(where)
        yield where, inputs, targets


def check_targets(where: str, outputs: Tensor, targets: Tensor) -> None:
    """Raise unless there are as many targets as outputs."""
    if targets.dim() == 0 or targets.shape[0] != outputs.shape[0]:
        raise InputError(
            f"{where}: {targets.shape[0] if targets.dim() else 'a single number as'} targets for "
            f"{outputs.shape[0]} outputs. The first dimension of both must be the examples."
        )


def _target(target: Any, where: str) -> Tensor:
    if not isinstance(target, Tensor):
        raise InputError(f"{where}: the target is a {type(target).__name__}, not a tensor.")
    return target


def read_output(output: Any, custom: ReadOutput | None = None) -> Tensor:
    """The tensor of outputs `[N, ...]` in whatever the model returned."""
    if custom is not None:
        output = custom(output)
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    if not isinstance(output, Tensor):
        raise InputError(
            f"The model returned a {type(output).__name__}, not a tensor. Pass Laplace(..., output=fn) with "
            "fn(returned) -> tensor [N, ...]."
        )
    if output.dim() == 0:
        raise InputError("The model returned a single number; its outputs need an example axis first: [N, ...].")
    return output


def outputs_of(
    model: nn.Module, inputs: Inputs, output: ReadOutput | None = None, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """`f(x): [N, ...]`, with `weights` in place of the model's own, by name, where they are given."""
    if not weights:
        return read_output(model(*inputs.args, **inputs.kwargs), output)
    return read_output(torch.func.functional_call(model, dict(weights), inputs.args, inputs.kwargs), output)


def peek(loader: Iterable[Any]) -> tuple[Iterable[Any], Any]:
    """The first batch, without losing it where the loader can be read only once."""
    if not isinstance(loader, Iterator):
        for batch in loader:
            return loader, batch
    else:
        iterator = iter(loader)
        for batch in iterator:
            return _chain(batch, iterator), batch
    raise InputError("The loader is empty: it yielded no batch, so there is nothing to fit.")


def _chain(first: Any, rest: Iterable[Any]) -> Iterable[Any]:
    yield first
    yield from rest
