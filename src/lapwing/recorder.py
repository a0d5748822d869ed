"""Sees every function of a forward pass, and keeps those that a Bayesian weight enters."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lapwing import channels_last
from lapwing.layers import LONE_BIAS, RULES, Call, Rule
from lapwing.pooling import max_pool2d
from lapwing.views import View, owner_of


@dataclass(frozen=True)
class Use:
    """One use of a Bayesian weight: the rule that reads it, its input, and the edge of its output.

    `instead_of` is the number of the same use before its output was repeated; the probe keeps one of the two.
    """

    rule: Rule
    call: Call
    edge: GradientEdge
    output: torch.Size
    instead_of: int | None = None

    @property
    def weight(self) -> str:
        return self.call.weight

    @property
    def bias(self) -> str | None:
        return self.call.bias


@dataclass
class Mailbox:
    """Where gradients arrive during a backward pass. It must not refer to the graph that refers to it."""

    listener: Callable[[int, Tensor], None] | None = None

    def deliver(self, index: int, gradient: Tensor) -> None:
        if self.listener is not None:
            self.listener(index, gradient)


def _see_through(function: Any) -> Callable[..., Any]:
    """The same function, but it does not hand itself over to a mode: the functions that it calls do."""
    inside = {**function.__globals__, "has_torch_function": lambda _: False}
    return types.FunctionType(function.__code__, inside, function.__name__, function.__defaults__)


# Not public. Where a version of PyTorch has it no more, everything counts as recomputed.
_saving_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _recomputed() -> bool:
    """Whether what runs now will run again in the backward pass, without a recorder, and must save the same tensors:
    checkpoints keep them from being saved by hooks.
    """
    return _saving_hooks is None or _saving_hooks(True) is not None


def _tensors(value: Any) -> list[Tensor]:
    """The tensors that a function was given, or returned."""
    values = value if isinstance(value, tuple | list) else (value,)
    return [one for one in values if isinstance(one, Tensor)]


_TRANSPARENT: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.multi_head_attention_forward: _see_through(functional.multi_head_attention_forward)
}
# By these a forward pass reads values, of which it may decide which way to go.
_READING_VALUES = {
    Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__contains__, Tensor.__array__,
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose,
    Tensor.is_nonzero, torch.is_nonzero,
}  # fmt: skip
_RECTIFYING = {functional.relu, torch.relu, Tensor.relu}
_POOLING = {
    functional.max_pool1d, functional.max_pool2d, functional.max_pool3d, functional.adaptive_max_pool1d,
    functional.adaptive_max_pool2d, functional.adaptive_max_pool3d,
}  # fmt: skip
# These want their numbers in the order of the shape.
_IN_ORDER = {Tensor.view, Tensor.view_as, Tensor.as_strided, torch.as_strided, torch.view_as_complex}
_ADDING = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}


def _pooled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = max_pool2d(*args, **kwargs) if func is functional.max_pool2d else None
    return func(*args, **kwargs) if found is None else found


@dataclass(frozen=True)
class _Rectified:
    """The last result of a ReLU and its argument, as they were. The largest of rectified numbers is the largest number,
    rectified: in this order there are fewer to rectify.
    """

    output: Tensor
    input: Tensor
    output_version: int
    input_version: int

    def holds(self, args: tuple[Any, ...]) -> bool:
        """Whether the first argument of a function is the result, and neither has been changed in place since."""
        versions = self.output._version == self.output_version and self.input._version == self.input_version
        return bool(args) and args[0] is self.output and versions


class Recorder(TorchFunctionMode):
    """Records into `uses`, in the order of the forward pass.

    `decides`: it read values of tensors, or made one number of a tensor (a sum, the longest length), and may have
    decided by it which way to go, how large to make a tensor, or by how much to divide all examples.
    `computed`: how many numbers it computed on its way. `rearranged`: it put images into another order in memory, as
    it does only if told that it may.
    """

    def __init__(self, names: Mapping[int, str], mailbox: Mailbox, may_rearrange: bool) -> None:
        super().__init__()
        self._view, self.mailbox, self.uses = owner_of(names), mailbox, list[Use]()
        self.decides, self.computed, self.rearranged, self._may_rearrange = False, 0, False, may_rearrange
        self._nodes: dict[object, int] = {}
        self._rectified: _Rectified | None = None

    def owner(self, value: object) -> View | None:
        """The parameter of which a value is a view, unless it is the result of a use that was read already."""
        if isinstance(value, Tensor) and value.grad_fn is not None and value.grad_fn in self._nodes:
            return None
        return self._view(value)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.decides |= func in _READING_VALUES
        if func in _TRANSPARENT:
            with self:
                return _TRANSPARENT[func](*args, **kwargs)
        if func in _ADDING and len(args) == 2:
            args = self._broadcast(args)
        if self._may_rearrange and args and not _recomputed():
            args = self._rearrange(func, args)
        rule = RULES.get(func)
        output = self._run(func, rule, args, kwargs)
        found = _tensors(output)
        self.computed += sum(tensor.numel() for tensor in found)
        given = _tensors([*args, *kwargs.values()])
        self.decides |= any(not tensor.dim() for tensor in found) and any(tensor.dim() for tensor in given)
        if rule is None or not isinstance(output, Tensor) or not output.requires_grad:
            return output
        call = rule.read(func, args, kwargs, output, self.owner)
        if call is not None:
            self._add(rule, call, output)
        bias = self._lone_bias(rule, call, args, kwargs, output)
        if bias is not None:
            self._add(LONE_BIAS, bias, output)
        return output

    def _run(self, func: Any, rule: Rule | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a function, with as little work as is known."""
        if _recomputed():
            return func(*args, **kwargs)
        if rule is not None:
            return rule.run(func, args, kwargs)
        before = self._rectified
        if func in _POOLING and before is not None and before.holds(args):
            return functional.relu(_pooled(func, (before.input, *args[1:]), kwargs))
        output = _pooled(func, args, kwargs) if func in _POOLING else func(*args, **kwargs)
        if func in _RECTIFYING and args and output.requires_grad and output is not args[0]:
            self._rectified = _Rectified(output, args[0], output._version, args[0]._version)
        return output

    def _rearrange(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Images with their channels last in memory before a convolution that gains; in order again before a function
        that wants them so.
        """
        if func is functional.conv2d and len(args) > 1 and channels_last.gains(*args[:2]):
            self.rearranged |= not args[0].is_contiguous(memory_format=torch.channels_last)
            return (channels_last.put_last(args[0]), *args[1:])
        if self.rearranged and func in _IN_ORDER and isinstance(args[0], Tensor) and channels_last.are_last(args[0]):
            return (args[0].contiguous(), *args[1:])
        return args

    def _add(self, rule: Rule, call: Call, output: Tensor) -> None:
        use = Use(rule, call, get_gradient_edge(output), output.shape)
        self._nodes.setdefault(use.edge.node, len(self.uses))
        self._keep(use, output)

    def _keep(self, use: Use, output: Tensor) -> None:
        """A hook set now sees the gradient of the value as it is now, whatever happens to it in place."""
        index, mailbox = len(self.uses), self.mailbox
        output.register_hook(lambda gradient: mailbox.deliver(index, gradient))
        self.uses.append(use)

    def _lone_bias(
        self, rule: Rule, call: Call | None, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Call | None:
        """A Bayesian bias that does not come with its weight: it shifts the output, and that is all."""
        given = kwargs.get("bias", args[2] if len(args) > 2 else None)
        view = self.owner(given) if call is None or call.bias is None else None
        if view is None or not isinstance(given, Tensor):
            return None
        align = rule.bias_align(output, kwargs["weight"] if "weight" in kwargs else args[1])
        if align is None or given.numel() != max(align):
            return None
        options = {"align": align, "scales": False, "shifts": True}
        return Call(output, view.name, None, None, options, entries=view.entries)

    def _broadcast(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Where the result of a use is repeated to be added to larger activations, record it a second time, as if it
        had been computed for each entry: where it has no examples of its own (a position embedding), the gradient
        there is not summed over them yet.
        """
        left, right = args
        if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or left.shape == right.shape:
            return args
        shape = torch.broadcast_shapes(left.shape, right.shape)
        return tuple(self._expanded(value, shape) if value.shape != shape else value for value in args)

    def _expanded(self, value: Tensor, shape: torch.Size) -> Tensor:
        index = None if value.grad_fn is None else self._nodes.get(value.grad_fn)
        if index is None or self.uses[index].output != value.shape:
            return value
        use = self.uses[index]
        call = use.rule.broadcast(use.call, shape)
        if call is None:
            return value
        expanded = value.expand(shape)
        self._keep(replace(use, call=call, edge=get_gradient_edge(expanded), output=shape, instead_of=index), expanded)
        return expanded
