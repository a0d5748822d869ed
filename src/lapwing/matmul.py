"""Matrix products in float32 by oneDNN, where torch's own leave part of the processor unused.

torch multiplies matrices with MKL, which keeps to AVX2 on AMD's processors, and convolves with oneDNN, which takes
AVX-512 wherever there is one. A product by oneDNN takes half the time where AVX-512 does twice the work of AVX2 (from
Zen 5 on), and four fifths to nine tenths where it does not (Zen 4). Everywhere else, and for whatever it does not take
(other dtypes and devices, small matrices, tensors under transforms), these are torch's own; so is a product of which
autograd makes a graph, but for `linear`, which has one of its own.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

_SMALL = 2**22  # multiplications, below which a call costs more than it gains
_LARGE = 2**22  # numbers of a product, above which it is added where it belongs
_FEW, _NARROW = 256, 512  # rows and columns of a matrix, up to which all of its moments are less work than half of them
_NARROWEST = 64  # columns, up to which they are where oneDNN does not gain twice as well
_ALONE = 2**23  # multiplications of a product, from which one by oneDNN may take less than its share of many by MKL
_WIDE = 2**19  # numbers of its result, up to which it does: larger ones do not stay close to the processor
_SHORT = 512  # terms of its sums, up to which it does where oneDNN does not gain twice
_ZEN_5 = 26  # the family of the first processors by AMD of which most compute with 512 bits at once


def gains(work: int, *tensors: Tensor) -> bool:
    """Whether oneDNN gains in a product of so many multiplications, of which no graph is wanted."""
    return _suits(work, *tensors) and not (torch.is_grad_enabled() and any(one.requires_grad for one in tensors))


def gains_twice(work: int, *tensors: Tensor) -> bool:
    """Whether it gains so much that a whole symmetric product by it takes less time than one half of it by torch."""
    return half_used() and gains(work, *tensors)


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """`L R: [n, m]` of matrices `[n, k]` and `[k, m]`, n being the size that differs from call to call."""
    count = len(left)
    if not gains(count * right.numel(), left, right):
        return left @ right
    return _first_rows(_onednn(_filled_up(left), right.mT), count)


def across(left: Tensor, right: Tensor) -> Tensor:
    """`Lᵀ R: [n, m]` of rows `[k, n]` and `[k, m]`: the sum of their outer products."""
    whole = in_whole_blocks(len(left))
    if not gains(whole * left.shape[1] * right.shape[1], left, right):
        return left.T @ right
    first, second = left[:whole].T, right[:whole].T
    # It takes a copy of the first, which had better be the smaller one.
    found = _onednn(first, second) if len(first) <= len(second) else _onednn(second, first).T
    return found if whole == len(left) else found.addmm_(left[whole:].T, right[whole:])


def squares_of_products(left: Tensor, right: Tensor) -> Tensor | None:
    """`Σ_n (L_n R_n)²: [m, p]`, elementwise, of matrices `[n, m, k]` and `[n, k, p]`, multiplied one by one; None where
    all at once take less time.
    """
    work, length = left[0].numel() * right.shape[2], right.shape[1]
    gaining = gains if length <= _SHORT else gains_twice
    if work < _ALONE or left.shape[1] * right.shape[2] > _WIDE or not gaining(work, left, right):
        return None
    if right.mT[0].is_contiguous():  # of a first one that is not it would take a copy
        return _squares(right.mT, left).T
    return _squares(left, right.mT)


def _squares(left: Tensor, right: Tensor) -> Tensor:
    """`Σ_n (L_n R_nᵀ)²`."""
    total = left.new_zeros(left.shape[1], right.shape[1])
    for one, other in zip(left.unbind(0), right.unbind(0), strict=True):
        product = _onednn(one, other)
        total.addcmul_(product, product)
    return total


def add_across(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `Lᵀ R` to a matrix `[n, m]`. A large one, such as that of a vocabulary, is not made a second time."""
    if into.numel() <= _LARGE and gains(left.numel() * right.shape[1], left, right):
        into += across(left, right)
    else:
        into.addmm_(left.T, right)


def in_whole_blocks(count: int) -> int:
    """How many of so many rows oneDNN takes, so that their numbers are few: it keeps some megabytes for each."""
    return count - count % (64 if count < 512 else 256)


def _filled_up(rows: Tensor) -> Tensor:
    """Rows `[n, k]` with zeros after them, so that their numbers are few."""
    missing = -len(rows) % (64 if len(rows) <= 1024 else 256)
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _first_rows(values: Tensor, count: int) -> Tensor:
    """Of values that are new; no view of them, which autograd would not have changed in place."""
    if len(values) == count:
        return values
    return values.new_empty(0).set_(values.untyped_storage(), 0, (count, values.shape[1]), values.stride())


def times(x: Tensor, matrix: Tensor) -> Tensor:
    """`x M: [..., Q, R, J]` of `x: [..., Q, R, I]` and a matrix for each group, `[Q, I, J]`."""
    if len(matrix) > 1:
        return torch.einsum("...qri,qij->...qrj", x, matrix)
    return matmul(x.flatten(0, -2), matrix[0]).reshape(*x.shape[:-1], matrix.shape[2])


def moments(rows: Tensor) -> Tensor | None:
    """`Σ x xᵀ: [d, d]` of `rows: [n, d]`, few or narrow, in one product; None where one half of it takes less time:
    where oneDNN does not gain twice, all but the narrowest.
    """
    count, width = rows.shape
    if count < _FEW:
        return across(rows, rows) if gains_twice(rows.numel() * width, rows) else None
    gaining = gains if width <= _NARROWEST else gains_twice
    if width > _NARROW or not gaining(rows.numel() * width // 2, rows):
        return None
    # The weight gradient of one image with a column of pixels, its channels last: that is how it lies in memory.
    image = rows.contiguous().unsqueeze(1).unsqueeze(0).permute(0, 3, 1, 2)
    kernel, ones, zeros = rows.new_empty(width, width, 1, 1), (1, 1), (0, 0)
    found: Tensor = torch.ops.aten.convolution_backward(
        image, image, kernel, None, ones, zeros, ones, False, zeros, 1, (False, True, False)
    )[1]
    return found.flatten(1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x Wᵀ + b` of `x: [..., I]`, `weight: [O, I]` and `bias: [O]`."""
    given = (x, weight) if bias is None else (x, weight, bias)
    fits = x.dim() > 1 and weight.dim() == 2 and x.shape[-1] == weight.shape[1]
    fits = fits and (bias is None or bias.shape == weight.shape[:1]) and not torch.is_autocast_enabled("cpu")
    if not (fits and _suits(x.numel() * weight.shape[0], *given)):
        return functional.linear(x, weight, bias)
    flat: Tensor = MkldnnLinear.apply(x.flatten(0, -2), weight, bias)  # type: ignore[no-untyped-call]
    return flat if x.dim() == 2 else torch.ops.aten._unsafe_view(flat, [*x.shape[:-1], len(weight)])


class MkldnnLinear(torch.autograd.Function):
    """A linear layer of `x: [n, I]`. Autograd's graph has it by this name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        activations, weights, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if weights else None, weight if activations else None)
        return _first_rows(_onednn(_filled_up(x), weight, bias), len(x))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (
            matmul(g, weight) if ctx.needs_input_grad[0] else None,
            across(g, x) if _asked_for(ctx, 1) else None,
            g.sum(0) if _asked_for(ctx, 2) else None,
        )


def _asked_for(ctx: Any, argument: int) -> bool:
    """Whether this backward pass goes to an argument. Most go to activations only, and functions in Python are asked
    for all that have a gradient.
    """
    if not ctx.needs_input_grad[argument]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[argument][0]))
    except RuntimeError:  # it is a leaf, and what the pass is for
        return True


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x Wᵀ + b` of matrices. Weights with gaps in memory take it a hundred times as long."""
    bias = None if bias is None else bias.contiguous()  # it does not look at its stride
    if not (weight.is_contiguous() or weight.mT.is_contiguous()):
        weight = weight.mT.contiguous().mT if weight.stride(0) == 1 else weight.contiguous()
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


def _suits(work: int, *tensors: Tensor) -> bool:
    enabled = work >= _SMALL and partly_used() and bool(torch.backends.mkldnn.enabled)
    return enabled and all(tensor.dtype == torch.float32 and is_plain(tensor) for tensor in tensors)


def is_plain(tensor: Tensor) -> bool:
    """Whether it is numbers in the processor's memory, and no more: no kind of its own, no batch, no derivative; and no
    function that is being transformed sees it, as functions of our own would have to say what becomes of them.
    """
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and forward_ad.unpack_dual(tensor).tangent is None
    )


@functools.cache
def partly_used() -> bool:
    """Whether torch's own products leave part of this processor unused."""
    libraries = torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    libraries = libraries and hasattr(torch._C, "_will_engine_execute_node")
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return libraries and wide and _said("vendor_id") == "AuthenticAMD"


@functools.cache
def half_used() -> bool:
    """Whether that is half of it."""
    family = _said("cpu family")
    return partly_used() and family is not None and family.isdecimal() and int(family) >= _ZEN_5


def _said(name: str) -> str | None:
    """What the system says of the processor, where it does."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), None)
