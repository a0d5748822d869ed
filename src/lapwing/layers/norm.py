"""Normalization layers: their affine parameters scale and shift what the statistics left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.channels_last import are_last
from lapwing.layers.elementwise import Elementwise
from lapwing.layers.rule import Call, bound
from lapwing.views import Owner, View


class FeatureNorm(Elementwise):
    """Layer and root-mean-square norm: statistics of every position, a weight for every feature."""

    name = "norm"
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (functional.layer_norm, functional.rms_norm)

    def read(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, owner: Owner
    ) -> Call | None:
        given = bound(function, args, kwargs)
        x, shape, eps = given["input"], list(given["normalized_shape"]), given["eps"]
        align = (*[1] * (x.dim() - len(shape)), *shape)
        options = {"standardize": lambda y: function(y, shape, eps=eps)}
        return _affine(x, owner(given["weight"]), owner(given.get("bias")), align, options)

    def prepare(self, call: Call) -> Call:
        return replace(call, input=call.options["standardize"](call.input))


class ChannelNorm(Elementwise):
    """Batch norm with running statistics, group and instance norm: statistics of channels, a weight for each.

    As they are constant over positions, the input is standardized after the sum over positions.
    """

    name = "norm"
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (
        functional.batch_norm, functional.group_norm, functional.instance_norm,
    )  # fmt: skip

    def read(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, owner: Owner
    ) -> Call | None:
        given = bound(function, args, kwargs)
        x, statistics = given["input"], _statistics(function, given)
        if statistics is None or x.dim() < 2:
            return None
        align = (1, x.shape[1], *[1] * (x.dim() - 2))
        return _affine(x, owner(given["weight"]), owner(given["bias"]), align, {"statistics": statistics})

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Batch norm with running statistics scales and shifts, and its gradient needs no more than a product."""
        if function is not functional.batch_norm:
            return function(*args, **kwargs)
        given = bound(function, args, kwargs)
        x, mean, variance = given["input"], given["running_mean"], given["running_var"]
        parts = [given["weight"], given["bias"], mean, variance]
        if given["training"] or not _usual(x, parts):
            return function(*args, **kwargs)
        scale = (variance + given["eps"]).rsqrt()
        scale = scale if given["weight"] is None else scale * given["weight"]
        shift = -mean * scale if given["bias"] is None else given["bias"] - mean * scale
        if are_last(x):
            return torch.addcmul(shift.view(-1, 1, 1), x, scale.view(-1, 1, 1))
        shift, scale = (value.repeat_interleave(x.shape[2:].numel()) for value in (shift, scale))
        flat = torch.addcmul(shift, x.flatten(1), scale)
        return torch.ops.aten._unsafe_view(flat, list(x.shape))  # to change in place

    def prepare(self, call: Call) -> Call:
        if not call.options["scales"]:
            return call
        mean, variance, eps = call.options["statistics"](call.input)
        return replace(call, options=call.options | {"mean": mean, "rstd": (variance + eps).rsqrt()})


def _usual(x: Tensor, parts: list[Tensor | None]) -> bool:
    """Whether a batch norm is of images in one of the two usual orders in memory, with a number for every channel.

    Half precision is left to torch, which computes scale and shift in more.
    """
    like = (x.dtype, x.device, x.shape[1:2])
    return (
        parts[2] is not None
        and x.dtype in (torch.float32, torch.float64)
        and (x.is_contiguous() or are_last(x))
        and all(part is None or (part.dtype, part.device, part.shape) == like for part in parts)
    )


Statistics = Callable[[Tensor], tuple[Tensor, Tensor, float]]


def _affine(
    x: Tensor, weight: View | None, bias: View | None, align: tuple[int, ...], options: dict[str, Any]
) -> Call | None:
    """Weight and bias, or either alone."""
    weight, bias = (view if view is not None and view.plain else None for view in (weight, bias))
    first = weight or bias
    if first is None:
        return None
    second = bias.name if weight is not None and bias is not None else None
    options = options | {"align": align, "scales": weight is not None, "shifts": bias is not None}
    return Call(x, first.name, second, None, options)


def _statistics(function: Callable[..., Any], given: dict[str, Any]) -> Statistics | None:
    """How to compute them; None for a batch norm without running statistics, which couples the examples."""
    eps = given["eps"]
    if function is functional.group_norm:
        return _grouped(given["num_groups"], eps)
    if function is functional.instance_norm and given["use_input_stats"]:
        return _grouped(given["input"].shape[1], eps)
    if given.get("training") or given["running_mean"] is None:
        return None
    return _running(given["running_mean"], given["running_var"], eps)


def _running(mean: Tensor, variance: Tensor, eps: float) -> Statistics:
    def statistics(x: Tensor) -> tuple[Tensor, Tensor, float]:
        shape = (1, -1, *[1] * (x.dim() - 2))
        return mean.to(x.dtype).view(shape), variance.to(x.dtype).view(shape), eps

    return statistics


def _grouped(groups: int, eps: float) -> Statistics:
    def statistics(x: Tensor) -> tuple[Tensor, Tensor, float]:
        grouped = x.unflatten(1, (groups, -1)).flatten(2)
        variance, mean = torch.var_mean(grouped, dim=2, correction=0)  # [N, groups]
        shape = (*x.shape[:2], *[1] * (x.dim() - 2))
        each = x.shape[1] // groups
        return mean.repeat_interleave(each, 1).view(shape), variance.repeat_interleave(each, 1).view(shape), eps

    return statistics
