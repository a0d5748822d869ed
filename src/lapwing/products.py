"""Products with the GGN of all Bayesian weights, and what they tell without the matrix: trace and log-determinant.

`H V = Σ_n J_nᵀ Λ_n (J_n V)`: a Jacobian-vector product in forward mode, the Hessian of the negative log-likelihood
in the outputs, a vector-Jacobian product. One pass over the data for all columns of V, and no matrix `[p, p]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lapwing import likelihoods
from lapwing.batches import Inputs, ReadOutput, Unpack, check_targets, peek, read
from lapwing.errors import InputError, positive
from lapwing.flat import Flat
from lapwing.guard import borrowed, random_state_kept, twice_differentiable
from lapwing.jvp import METHODS, Linearized, OutputHessian, settle
from lapwing.likelihoods import Likelihood
from lapwing.tape import Tape
from lapwing.weights import LAST_LAYER, Weights, last_layer, select, unwrap

_AT_ONCE = 8  # vectors in one forward pass
_COLUMNS = 64  # columns of the likelihood's Hessian at once


class Operator(Protocol):
    """A symmetric matrix `[p, p]` that is known by its products."""

    @property
    def size(self) -> int:
        """The number p of its rows."""

    @property
    def device(self) -> torch.device:
        """Where its vectors live."""

    def matmul(self, vectors: Tensor) -> Tensor:
        """The product with `[p, k]`: `[p, k]`."""


class GGN:
    """`H = Σ_n J_nᵀ Λ_n J_n` with `Λ_n = −∇²_f log p(y_n|f_n)` at unit noise, as an operator.

    Parameters are counted in the order of `model.named_parameters()`, each row by row; `pack` and `unpack`
    translate. A product costs one pass over the data: for each batch a forward pass, and for each column about
    a forward pass (the Jacobian-vector product, of several columns at once by `torch.func.vmap`) and a backward pass.
    Where vmap refuses, columns take their turns; where an operation has no forward-mode derivative, the
    Jacobian-vector product is that of two backward passes. The first batch decides, where the product is checked
    against a backward pass: `u·(J v) = (Jᵀ u)·v`.

    Args:
        model: any trained `nn.Module`. It comes back from every product exactly as it was.
        likelihood: "classification", "regression", "binary", or an instance.
        loader: yields `(x, y)`, `(x1, ..., y)` or mappings with "labels", the same at every pass.
        weights: "all", "last_layer", a glob, or a list of names and globs.
        unpack: `fn(batch) -> (args, kwargs, target)` for other batches.
        output: `fn(returned) -> tensor [N, ...]` for models that return neither a tensor nor `.logits`.
        progress: show a bar where a pass takes longer than two seconds.
        title: what the bar says.

    Examples:
        >>> import torch
        >>> from lapwing.products import GGN, trace
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,)))]
        >>> ggn = GGN(torch.nn.Linear(3, 2), "classification", data)
        >>> ggn.matmul(torch.eye(ggn.size)).shape
        torch.Size([8, 8])
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        loader: Iterable[Any],
        weights: Weights = "all",
        *,
        unpack: Unpack | None = None,
        output: ReadOutput | None = None,
        progress: bool = True,
        title: str = "product with the GGN",
    ) -> None:
        if not isinstance(loader, Iterable):
            raise InputError(f"GGN needs an iterable of batches, such as a DataLoader, got {type(loader).__name__}.")
        if isinstance(loader, Iterator):
            raise InputError(
                "Products with the GGN read the data again and again, but the loader is an iterator that can be read "
                "only once. Pass a DataLoader or a list of batches."
            )
        self.model, self.likelihood, self.loader = unwrap(model), likelihoods.resolve(likelihood), loader
        self._unpack, self._progress, self._title = unpack, progress, title
        chosen = select(self.model, weights)
        self._tape = Tape(self.model, chosen, output)
        if weights == LAST_LAYER:
            with random_state_kept(), borrowed(self.model, chosen):
                names = last_layer(self._tape, peek(loader)[1], unpack)
            self._tape = Tape(self.model, {name: chosen[name] for name in names}, output)
        self._method: str | None = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The Bayesian parameters by name."""
        return self._tape.parameters

    @property
    def size(self) -> int:
        """p, the number of Bayesian parameters."""
        return self._flat.length

    @property
    def device(self) -> torch.device:
        """That of the model."""
        return next(iter(self.parameters.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights, in which products are computed."""
        return next(iter(self.parameters.values())).dtype

    @property
    def _flat(self) -> Flat:
        return Flat({name: parameter.shape for name, parameter in self.parameters.items()})

    def pack(self, values: dict[str, Tensor]) -> Tensor:
        """Parameters by name, each `[*lead, *shape]`, to `[*lead, p]`."""
        return self._flat.pack(values)

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """The inverse of `pack`: `[*lead, p]` to parameters by name."""
        return self._flat.unpack(vector)

    def matmul(self, vectors: Tensor) -> Tensor:
        """`H V` for `vectors` V: `[p, k]`, in their dtype; one pass over the data."""
        if vectors.dim() != 2 or vectors.shape[0] != self.size:
            raise InputError(
                f"GGN.matmul takes vectors of shape [{self.size}, k], one column each, got {list(vectors.shape)}."
            )
        tangents = vectors.detach().T.to(self.device, self.dtype)
        kept = torch.promote_types(vectors.dtype, torch.float32)
        total = torch.zeros(tangents.shape, dtype=kept, device=self.device)
        with random_state_kept(), borrowed(self.model, self.parameters), twice_differentiable(self.model):
            for linear, targets in self._batches():
                curve = OutputHessian.at(self.likelihood, linear.outputs, targets)
                for rows, few in zip(total.split(_AT_ONCE), tangents.split(_AT_ONCE), strict=True):
                    for row, moved in zip(rows, linear.push(self.unpack(few)), strict=True):
                        row += self.pack(linear.pull(curve(moved))).to(kept)
        return total.T.to(vectors.dtype)

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of `Σ_n J_nᵀ S_n ε_n` with `S_n S_nᵀ = Λ_n` and standard normal ε: `[p, count]`, float64.

        Their covariance is H itself. One pass over the data, and a backward pass for every draw.
        """
        positive(count, "GGN.draw(count)")
        total = torch.zeros(count, self.size, dtype=torch.float64, device=self.device)
        quiet = nullcontext() if generator is None else random_state_kept()
        with quiet, borrowed(self.model, self.parameters), twice_differentiable(self.model):
            for linear, targets in self._batches():
                outputs = linear.outputs.detach()
                columns = self.likelihood.hessian_columns(outputs, targets)
                vectors = outputs.new_zeros(count, *outputs.shape)
                for start in range(0, columns.count, _COLUMNS):
                    some = columns.part(start, min(start + _COLUMNS, columns.count))
                    shape = (count, *some.shape[:2])
                    noise = torch.randn(shape, generator=generator, dtype=outputs.dtype, device=outputs.device)
                    vectors += torch.einsum("ckn,kn...->cn...", noise, some)
                for row, vector in zip(total, vectors, strict=True):
                    row += self.pack(linear.pull(vector)).double()
        return total.T

    def push(self, inputs: Inputs, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs `[N, *output]` at other inputs, and `J v` for the columns of `vectors` `[p, k]`:
        `[k, N, *output]`.
        """
        tangents = vectors.detach().T.to(self.device, self.dtype)
        with random_state_kept(), borrowed(self.model, self.parameters), twice_differentiable(self.model):
            linear = Linearized.at(self._tape, inputs)
            linear.method = self._way(linear)
            moved = torch.cat([linear.push(self.unpack(few)) for few in tangents.split(_AT_ONCE)])
        return linear.outputs.detach(), moved

    def outputs(self, inputs: Inputs, steps: Tensor) -> Tensor:
        """The outputs of networks whose weights are moved by the columns of `steps` `[p, k]`: `[k, N, *output]`."""
        found = []
        with random_state_kept(), borrowed(self.model, self.parameters), torch.no_grad():
            for step in steps.detach().T.to(self.device, self.dtype):
                moved = self.unpack(step)
                weights = {name: parameter + moved[name] for name, parameter in self.parameters.items()}
                found.append(self._tape.forward(weights, inputs))
        return torch.stack(found)

    def _way(self, linear: Linearized) -> str:
        """How J v is computed; vmap turns convolutions into grouped ones, which take twice as long as one at a time."""
        if self._method is None:
            convolutions = any(parameter.dim() > 2 for parameter in self.parameters.values())
            self._method = settle(linear, METHODS[1:] if convolutions else METHODS).method
        return self._method

    def _batches(self) -> Iterator[tuple[Linearized, Tensor]]:
        empty = True
        for where, inputs, targets in read(self.loader, self.device, self._unpack, self._title, self._progress):
            empty = False
            linear = Linearized.at(self._tape, inputs)
            check_targets(where, linear.outputs, targets)
            self.likelihood.check(linear.outputs.detach(), targets, where)
            linear.method = self._way(linear)
            yield linear, targets
        if empty:
            raise InputError("The loader is empty: it yielded no batch, so there is no curvature.")


@dataclass(frozen=True)
class Estimate:
    """A Monte Carlo estimate: the mean over independent probes, and its standard error."""

    value: float
    error: float

    @staticmethod
    def of(terms: Tensor) -> Estimate:
        """From one unbiased term per probe: `[s]`."""
        return Estimate(float(terms.mean()), float(terms.std() / len(terms) ** 0.5))


def trace(operator: Operator, samples: int | Tensor = 32, generator: torch.Generator | None = None) -> Estimate:
    """`tr H` as the mean of `zᵀ H z` over random signs z; one product with all of them.

    Args:
        operator: a `GGN`, or anything with `size`, `device` and `matmul`.
        samples: how many probes, at least two, or the probes themselves, `[p, s]` with `E[z zᵀ] = I`.
        generator: the source of randomness; None consumes torch's global one.
    """
    probes = _probes(operator, samples, generator)
    return Estimate.of((probes * operator.matmul(probes).to(probes)).sum(0))


def log_det(
    operator: Operator,
    shift: float,
    samples: int | Tensor = 16,
    steps: int = 32,
    generator: torch.Generator | None = None,
) -> Estimate:
    """`log det(H + shift·I)` of a positive semidefinite H by stochastic Lanczos quadrature; `steps` products.

    Each probe z starts a Lanczos recursion, whose tridiagonal matrix gives the nodes and weights of a Gauss
    quadrature of `zᵀ log(H + shift·I) z`. All earlier vectors are kept and orthogonalized against, so memory is
    p·samples·steps numbers. The error is that of the probes alone. The quadrature adds its own, which falls
    exponentially with `steps` at a rate set by `√(shift/‖H‖)`: raise them until the value stands still.

    Args:
        operator: a `GGN`, or anything with `size`, `device` and `matmul`.
        shift: what is added to the diagonal, such as a prior precision; positive.
        samples: how many probes, at least two, or the probes themselves, `[p, s]` with `E[z zᵀ] = I`.
        steps: Lanczos steps, each one pass over the data.
        generator: the source of randomness; None consumes torch's global one.
    """
    if not shift > 0:
        raise InputError(f"log_det: shift must be positive, got {shift}.")
    if steps < 1:
        raise InputError(f"log_det: steps must be at least 1, got {steps}.")
    probes = _probes(operator, samples, generator)
    diagonals, couplings = _lanczos(operator, probes, min(steps, operator.size))
    tridiagonal = torch.diag_embed(diagonals) + torch.diag_embed(couplings, 1) + torch.diag_embed(couplings, -1)
    nodes, vectors = torch.linalg.eigh(tridiagonal)
    weights = vectors[:, 0].square()
    reached = torch.where(weights > torch.finfo(weights.dtype).eps, nodes, torch.zeros_like(nodes))
    rounding = torch.finfo(_precision(operator)).eps ** 0.5 * nodes.abs().amax()
    if bool((reached < -rounding).any()):
        raise InputError(f"log_det needs a positive semidefinite operator; it has an eigenvalue {reached.amin():.3g}.")
    terms = (weights * (reached.clamp(min=0) + shift).log()).sum(1)
    return Estimate.of(probes.square().sum(0) * terms)


def _lanczos(operator: Operator, probes: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Tridiagonal matrices of all probes `[p, s]`: diagonals `[s, m]` and couplings `[s, m − 1]`, float64.

    Where a recursion ends early (its space is invariant) the rest is 0 and out of the first vector's reach.
    """
    basis = probes.new_zeros(probes.shape[1], steps, probes.shape[0])  # [s, m, p]
    vector = (probes / probes.norm(dim=0)).T
    diagonals, couplings = list[Tensor](), list[Tensor]()
    floor = 10 * operator.size**0.5 * torch.finfo(_precision(operator)).eps
    largest = probes.new_zeros(probes.shape[1])
    for step in range(steps):
        basis[:, step] = vector
        image = operator.matmul(vector.T).to(probes).T
        diagonals.append((vector * image).sum(1))
        largest = torch.maximum(largest, image.norm(dim=1))
        for _ in range(2):  # once is not enough to be orthogonal to rounding
            seen = basis[:, : step + 1]
            image = image - torch.einsum("sm,smp->sp", torch.einsum("smp,sp->sm", seen, image), seen)
        norm = image.norm(dim=1)
        alive = norm > floor * largest
        vector = torch.where(alive[:, None], image / norm.clamp(min=1e-300)[:, None], torch.zeros_like(image))
        couplings.append(torch.where(alive, norm, torch.zeros_like(norm)))
        if not bool(alive.any()):
            break
    return torch.stack(diagonals, 1), torch.stack(couplings, 1)[:, : len(diagonals) - 1]


def _precision(operator: Operator) -> torch.dtype:
    return operator.dtype if isinstance(operator, GGN) else torch.float64


def _probes(operator: Operator, samples: int | Tensor, generator: torch.Generator | None) -> Tensor:
    """Vectors z with `E[z zᵀ] = I`: `[p, s]`, float64."""
    if isinstance(samples, Tensor):
        if samples.dim() != 2 or samples.shape[0] != operator.size or samples.shape[1] < 2:
            raise InputError(
                f"Probes must have shape [{operator.size}, s] with s of at least 2, got {list(samples.shape)}."
            )
        return samples.to(operator.device, torch.float64)
    if samples < 2:
        raise InputError(f"An error bar needs at least 2 samples, got {samples}.")
    place = operator.device if generator is None else generator.device
    signs = torch.randint(2, (operator.size, samples), generator=generator, device=place)
    return (2.0 * signs.double() - 1.0).to(operator.device)
