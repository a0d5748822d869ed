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

from lapwing.layers import LONE_BIAS, RULES, Call, Rule
from lapwing.views import owner_of


@dataclass(frozen=True)
class Use:
    """One use of a Bayesian weight: the rule that reads it, its input, and the edge of its output."""

    rule: Rule
    call: Call
    edge: GradientEdge
    output: torch.Size

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


_TRANSPARENT: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.multi_head_attention_forward: _see_through(functional.multi_head_attention_forward)
}
_ADDING = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}


class Recorder(TorchFunctionMode):
    """Records into `uses`, in the order of the forward pass."""

    def __init__(self, names: Mapping[int, str], mailbox: Mailbox) -> None:
        super().__init__()
        self.owner, self.mailbox, self.uses = owner_of(names), mailbox, list[Use]()
        self._nodes: dict[object, int] = {}
        self._hooks: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TRANSPARENT:
            with self:
                return _TRANSPARENT[func](*args, **kwargs)
        if func in _ADDING and len(args) == 2:
            args = self._broadcast(args)
        output = func(*args, **kwargs)
        rule = RULES.get(func)
        if rule is None or not isinstance(output, Tensor) or not output.requires_grad:
            return output
        call = rule.read(func, args, kwargs, output, self.owner)
        if call is not None:
            self._add(rule, call, output)
        bias = self._lone_bias(rule, call, args, kwargs, output)
        if bias is not None:
            self._add(LONE_BIAS, bias, output)
        return output

    def _add(self, rule: Rule, call: Call, output: Tensor) -> None:
        use = Use(rule, call, get_gradient_edge(output), output.shape)
        self._nodes.setdefault(use.edge.node, len(self.uses))
        self._hooks.append(self._listen(len(self.uses), output))
        self.uses.append(use)

    def _lone_bias(
        self, rule: Rule, call: Call | None, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Call | None:
        """A Bayesian bias that does not come with its weight: it shifts the output, and that is all."""
        given = kwargs.get("bias", args[2] if len(args) > 2 else None)
        view = self.owner(given) if call is None or call.bias is None else None
        if view is None:
            return None
        align = rule.bias_align(output, kwargs["weight"] if "weight" in kwargs else args[1])
        if align is None:
            return None
        return Call(output, view.name, None, None, {"align": align, "scales": False, "shifts": True}, view.rows)

    def _listen(self, index: int, output: Tensor) -> Any:
        """A hook set now sees the gradient of the value as it is now, whatever happens to it in place."""
        mailbox = self.mailbox
        return output.register_hook(lambda gradient: mailbox.deliver(index, gradient))

    def _broadcast(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Where the result of a use without examples (a position embedding) is added to activations of many, record
        it as if it had been computed for each example: the gradient there is not summed over them yet.
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
        self._hooks[index].remove()
        self._hooks[index] = self._listen(index, expanded)
        self.uses[index] = replace(use, call=call, edge=get_gradient_edge(expanded), output=shape)
        return expanded
