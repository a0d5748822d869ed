"""The network linear in its weights on one batch: `J v`, `Jᵀ u`, and the Hessian of the likelihood between them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lapwing.batches import Inputs
from lapwing.errors import InputError
from lapwing.gradients import dense
from lapwing.likelihoods import Likelihood
from lapwing.tape import Tape

METHODS = ("batched", "forward", "backward")  # J v of many v at once, of one, or by two backward passes
_GRADIENTS_ONLY = "use a structure that takes gradients only: 'diag', 'kron', 'ekfac', 'block' or 'full'"
REFUSALS = (RuntimeError, ValueError, NotImplementedError, TypeError, IndexError)


class OutputHessian:
    """`v ↦ Λ v` for outputs `[N, ...]` of one batch: the likelihood's own `hessian_product` where it has one (its head
    counts as part of the network), else by the derivative of the gradient of `−log p`.
    """

    def __init__(self, outputs: Tensor, slope: Tensor, product: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        self.outputs, self.slope, self.product = outputs, slope, product

    @staticmethod
    def at(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> OutputHessian:
        leaf = outputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(-likelihood.log_prob(leaf, targets).sum(), leaf, create_graph=True)
        return OutputHessian(leaf, slope, getattr(likelihood, "hessian_product", None))

    def __call__(self, vector: Tensor) -> Tensor:
        if self.product is not None:
            return self.product(self.outputs.detach(), vector)
        if not self.slope.requires_grad:  # piecewise linear: no curvature
            return torch.zeros_like(vector)
        (product,) = torch.autograd.grad(self.slope, self.outputs, vector, retain_graph=True)
        return product


@dataclass
class Linearized:
    """One batch of the model, linear in its weights: `push` is `v ↦ J v`, `pull` is `u ↦ Jᵀ u`."""

    tape: Tape
    inputs: Inputs
    outputs: Tensor
    method: str = "batched"
    _adjoint: tuple[Tensor, list[Tensor | None]] | None = None

    @staticmethod
    def at(tape: Tape, inputs: Inputs, method: str = METHODS[0]) -> Linearized:
        try:
            outputs = tape.forward({}, inputs)
        except RuntimeError as failure:
            inputs.explain(failure, next(iter(tape.parameters.values())).dtype)
            raise
        if outputs.grad_fn is None:
            raise InputError(
                "The model's output does not depend on any Bayesian parameter through autograd. Remove "
                "torch.no_grad(), .detach() or torch.jit.script from its forward pass, or choose other weights."
            )
        return Linearized(tape, inputs, outputs, method)

    def push(self, tangents: dict[str, Tensor]) -> Tensor:
        """`J v` for `tangents` by parameter, `[k, *shape]`: `[k, N, ...]`."""
        try:
            return self._push(tangents)
        except REFUSALS:  # this batch meets other operations than the first
            known = self if self.outputs.grad_fn is not None else Linearized.at(self.tape, self.inputs)
            return settle(known)._push(tangents)

    def _push(self, tangents: dict[str, Tensor]) -> Tensor:
        if self.method == "batched":
            return self._batched(tangents)
        one = self._forward_mode if self.method == "forward" else self._two_backward
        count = len(next(iter(tangents.values())))
        return torch.stack([one({name: value[i] for name, value in tangents.items()}) for i in range(count)])

    def pull(self, vector: Tensor) -> dict[str, Tensor]:
        """`Jᵀ u` by parameter."""
        tensors = list(self.tape.parameters.values())
        found = torch.autograd.grad(self.outputs, tensors, vector, retain_graph=True, allow_unused=True)
        return {
            name: torch.zeros_like(tensor) if gradient is None else dense(gradient)
            for name, tensor, gradient in zip(self.tape.parameters, tensors, found, strict=True)
        }

    def _batched(self, tangents: dict[str, Tensor]) -> Tensor:
        """All tangents through one forward pass."""
        parameters = {name: parameter.detach() for name, parameter in self.tape.parameters.items()}

        def one(tangent: dict[str, Tensor]) -> Tensor:
            moved: Tensor = torch.func.jvp(lambda at: self.tape.forward(at, self.inputs), (parameters,), (tangent,))[1]
            return moved

        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            found: Tensor = torch.func.vmap(one)(tangents)
        return found.to(self.outputs.dtype)

    def _forward_mode(self, tangents: dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), forward_ad.dual_level():
            duals = {
                name: forward_ad.make_dual(parameter.detach(), tangents[name])
                for name, parameter in self.tape.parameters.items()
            }
            moved = forward_ad.unpack_dual(self.tape.forward(duals, self.inputs)).tangent
        return torch.zeros_like(self.outputs) if moved is None else moved.to(self.outputs.dtype)

    def _two_backward(self, tangents: dict[str, Tensor]) -> Tensor:
        """`Jᵀ u` is linear in u, and J v is its derivative in u, applied to v backward."""
        if self._adjoint is None:
            seed = torch.zeros_like(self.outputs).requires_grad_()
            tensors = list(self.tape.parameters.values())
            self._adjoint = (
                seed,
                list(torch.autograd.grad(self.outputs, tensors, seed, create_graph=True, allow_unused=True)),
            )
        seed, gradients = self._adjoint
        kept = [(g, tangents[name]) for name, g in zip(tangents, gradients, strict=True) if g is not None]
        kept = [(gradient, tangent) for gradient, tangent in kept if gradient.requires_grad]
        if not kept:
            return torch.zeros_like(self.outputs)
        values, vectors = zip(*kept, strict=True)
        (moved,) = torch.autograd.grad(values, seed, vectors, retain_graph=True, allow_unused=True)
        return torch.zeros_like(self.outputs) if moved is None else moved


def settle(linear: Linearized, methods: tuple[str, ...] = METHODS, otherwise: str = _GRADIENTS_ONLY) -> Linearized:
    """The first of the ways to `J v` that works for this network and agrees with `Jᵀ u`.

    `otherwise` is what the user can do where there is none.
    """
    reasons = {}
    for method in methods:
        linear.method = method
        try:
            if _is_adjoint(linear):
                return linear
            reasons[method] = "an operation whose derivatives disagree"
        except REFUSALS as failure:
            reasons[method] = _operation(str(failure))
    raise InputError(
        f"Products with the Jacobian need J v. In forward mode PyTorch fails at {reasons['forward']}, and as two "
        f"backward passes at {reasons['backward']}. Leave the parameters behind it out of `weights`, write it with "
        f"other operations, or {otherwise}."
    )


def _is_adjoint(linear: Linearized) -> bool:
    """Whether `u·(J v) = (Jᵀ u)·v` up to rounding, for a random u and two random v."""
    generator = torch.Generator().manual_seed(0)

    def drawn(like: Tensor, *lead: int) -> Tensor:
        return torch.randn((*lead, *like.shape), generator=generator, dtype=torch.float64).to(like)

    vector = drawn(linear.outputs.detach())
    tangents = {name: drawn(parameter.detach(), 2) for name, parameter in linear.tape.parameters.items()}
    moved, pulled = linear._push(tangents).double().flatten(1), linear.pull(vector)
    left = moved @ vector.double().flatten()
    terms = [tangents[name].double().reshape(2, -1) @ pulled[name].double().flatten() for name in tangents]
    size = vector.double().norm() * moved.norm(dim=1)
    gap = (left - torch.stack(terms).sum(0)).abs()
    return bool((gap <= 10 * torch.finfo(linear.outputs.dtype).eps ** 0.5 * size).all())


def _operation(message: str) -> str:
    """The operation that an error of autograd names, or the error itself."""
    found = re.search(r"forward AD with (\S+)|derivative for '?([\w:.]+)'?", message)
    name = next((group for group in found.groups() if group), None) if found else None
    return f"{name!r}" if name else f"an operation ({message.splitlines()[0] if message else 'no reason given'})"
