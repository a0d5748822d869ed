"""The posterior in function space: a Gaussian process whose kernel is the network's own.

Linearized in its weights, a network with prior N(μ₀, Π⁻¹) is a Gaussian process with the neural tangent kernel
`K = J Π⁻¹ Jᵀ`. Given M of the data with output Hessians `Λ = S Sᵀ` and `s = T/σ²`, the covariance of outputs is
`K_** − s K_*M S (I + s Sᵀ K_MM S)⁻¹ Sᵀ K_M*`, also where Λ is singular. With all data it is `J P⁻¹ Jᵀ` of the full
posterior in weight space, at a cost that grows with the data instead of the weights; with a subset it is larger, never
above the prior's.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import likelihoods, priors
from lapwing.batches import ReadOutput, Unpack, asked, peek
from lapwing.errors import InputError, NotFittedError, positive
from lapwing.fitted import Looks
from lapwing.guard import borrowed, random_state_kept
from lapwing.kernel import Features, Kernel, read_features
from lapwing.likelihoods import Likelihood
from lapwing.points import Points
from lapwing.predictive.linearized import Latent, kept_covariance
from lapwing.predictive.prediction import Prediction
from lapwing.priors import GaussianPrior, Prior
from lapwing.subnetwork import Subnetwork
from lapwing.subset import choose_subset
from lapwing.tape import Tape
from lapwing.weights import LAST_LAYER, Weights, last_layer, select, unwrap

_LARGEST = 2**33  # bytes of the matrix between the outputs of all points


class FunctionSpace:
    """The Laplace posterior as a Gaussian process over the network's outputs.

    Args:
        model: any trained `nn.Module`. It comes back from every call exactly as it was.
        likelihood: "classification", "regression", "binary", or an instance such as `Gaussian(noise=0.1)`.
        subset: M, the number of examples that the posterior is conditioned on, drawn at random; None takes all of them,
            and the posterior is that of structure "full" in weight space.
        prior: prior precision λ: a number, `{glob: number or tensor}` or `GaussianPrior`.
        temperature: T multiplies the likelihood; T > 1 is a cold posterior.
        weights: "all", "last_layer", a glob, or a list of names and globs.
        independent: treat the C outputs as independent processes: C matrices M × M instead of one CM × CM.
        unpack: `fn(batch) -> (args, kwargs, target)` for batches that are neither `(x, ..., y)` nor a
            mapping with "labels".
        output: `fn(returned) -> tensor [N, ...]` for models that return neither a tensor nor `.logits`.
        memory_budget: bytes for intermediate results. The gradients of the subset are kept if they fit, else made anew.
        max_columns: most backward passes per batch.
        progress: show a bar where something takes longer than two seconds.

    Examples:
        >>> import torch
        >>> from lapwing import FunctionSpace
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,)))]
        >>> process = FunctionSpace(torch.nn.Linear(3, 2), "classification", subset=5).fit(data)
        >>> process.predict(torch.randn(5, 3)).probs.shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        subset: int | None = None,
        prior: float | Tensor | Mapping[str, float | Tensor] | Prior = 1.0,
        temperature: float = 1.0,
        weights: Weights = "all",
        *,
        independent: bool = False,
        unpack: Unpack | None = None,
        output: ReadOutput | None = None,
        memory_budget: int = 2**30,
        max_columns: int = 10_000,
        progress: bool = True,
    ) -> None:
        self.model, self.likelihood = unwrap(model), likelihoods.resolve(likelihood)
        if subset is not None and subset < 1:
            raise InputError(f"FunctionSpace(subset=...) needs at least 1 example, or None for all, got {subset}.")
        self.subset, self.independent = subset, independent
        self.prior = _gaussian(prior)
        self.temperature = float(positive(temperature, "temperature"))
        self.noise = float(self.likelihood.noise or 1.0)
        self.weights: Weights = weights if isinstance(weights, str | Subnetwork) else tuple(weights)
        select(self.model, self.weights)
        self.unpack, self.output, self.progress = unpack, output, progress
        self.memory_budget, self.max_columns = memory_budget, max_columns
        self._points: Points | None = None

    def fit(self, loader: Iterable[Any], generator: torch.Generator | None = None) -> FunctionSpace:
        """Choose the subset in one pass over the data and compute its kernel; returns `self`.

        Args:
            loader: yields `(x, y)`, `(x1, ..., y)` or mappings with "labels".
            generator: the source of randomness that draws the subset; None consumes torch's global one.
        """
        if not isinstance(loader, Iterable):
            raise InputError(f"fit needs an iterable of batches, such as a DataLoader, got {type(loader).__name__}.")
        chosen = select(self.model, self.weights)
        if self.weights == LAST_LAYER:
            with random_state_kept(), borrowed(self.model, chosen):
                loader, first = peek(loader)
                names = last_layer(Tape(self.model, chosen, self.output, self.memory_budget), first, self.unpack)
            chosen = {name: chosen[name] for name in names}
        tape = Tape(self.model, chosen, self.output, self.memory_budget)
        device = next(iter(chosen.values())).device
        chunks, seen = choose_subset(loader, self.subset, device, self.unpack, generator, self.progress)
        points = Points(tape, chunks, seen, Looks.of(self.model))
        with self._borrow(points):
            points.keep(self)
            self._condition(points)
        self._points = points
        return self

    def _borrow(self, points: Points) -> AbstractContextManager[None]:
        return borrowed(self.model, points.tape.parameters)

    def _kernel(self, points: Points) -> Kernel:
        tape = points.tape
        assert tape.layers is not None
        like = next(iter(tape.parameters.values())).detach()
        precisions = self.prior.precisions({name: parameter.shape for name, parameter in tape.parameters.items()})
        return Kernel.of(tape.layers, precisions, self.independent, tape.budget, like)

    def _condition(self, points: Points) -> None:
        part = next(points.parts(self))
        width = points.count * (1 if self.independent else part.root.shape[2])
        size = 8 * width**2 * (part.root.shape[1] if self.independent else 1)
        if size > _LARGEST:
            raise InputError(
                f"The kernel between {points.count} examples has {width} rows, {size / 2**30:.0f} GB in all. Take a "
                "smaller subset=..., or independent=True."
            )
        points.condition(self, self._kernel(points))

    def at(
        self,
        prior: float | Tensor | Mapping[str, float | Tensor] | Prior | None = None,
        temperature: float | None = None,
        noise: float | None = None,
    ) -> FunctionSpace:
        """The same points under another prior, temperature or noise. No loader is read; the kernel is made anew."""
        other = copy.copy(self)
        if prior is not None:
            other.prior = _gaussian(prior)
        if temperature is not None:
            other.temperature = float(positive(temperature, "temperature"))
        if noise is not None:
            other.noise = float(self.likelihood.noise_scale(noise))
        if self._points is not None:
            other._points = replace(self._points)
            with random_state_kept(), self._borrow(other._points):
                other._condition(other._points)
        return other

    @property
    def scale(self) -> float:
        """`s = T/σ²`."""
        return self.temperature / self.noise

    # --------------------------------------------------------------------------------- predictions

    def latent(self, x: Any, joint: bool = False, diagonal: bool = False) -> Latent:
        """Mean and covariance of the outputs at `x` given the data.

        `[N, C]` and `[N, C, C]`; with `joint` `[N·C, N·C]` over all inputs; with `diagonal` `[N, C]`.
        """
        return self._latent(x, joint, 0 if diagonal else sys.maxsize, given=True)

    def prior_latent(self, x: Any, joint: bool = False, diagonal: bool = False) -> Latent:
        """The same without the data: the network's outputs as mean, and the kernel as covariance."""
        return self._latent(x, joint, 0 if diagonal else sys.maxsize, given=False)

    def kernel(self, x: Any, z: Any = None) -> Tensor:
        """`J(x) Π⁻¹ J(z)ᵀ` between all outputs at two sets of inputs (`z` default `x`): `[N·C, M·C]`, float64."""
        points = self._fitted()
        kernel = replace(self._kernel(points), independent=False)
        with random_state_kept(), self._borrow(points):
            left = self._features(points, x)
            right = left if z is None else self._features(points, z)
            return _blocks([[kernel.between(one, two) for two in right] for one in left]).detach()

    def predict(
        self,
        x: Any,
        link: str | None = None,
        samples: int = 1000,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Predict at `x`: a tensor, a tuple of positional or a mapping of keyword arguments of the model.

        Args:
            x: the inputs.
            link: how the likelihood integrates over the Gaussian outputs, as in `Laplace.predict`.
            samples: draws in output space, where the link takes them.
            generator: the source of randomness; None consumes torch's global one.
        """
        if samples < 1:
            raise InputError(f"predict(samples=...) needs at least 1, got {samples}.")
        outputs = self._latent(x, False, kept_covariance(link), given=True).outputs()
        noise = torch.tensor(self.noise, dtype=torch.float64, device=outputs.mean.device)
        return self.likelihood.predict_gaussian(outputs, noise, link, samples, generator)

    def _latent(self, x: Any, joint: bool, keep: int, given: bool) -> Latent:
        """Where an example has more than `keep` outputs, only their variances."""
        if joint and keep == 0:
            raise InputError("latent: joint=True and diagonal=True exclude each other.")
        points = self._fitted()
        kernel = self._kernel(points)
        with random_state_kept(), self._borrow(points):
            asked_for = self._features(points, x)
            diagonal = asked_for[0].count > keep
            means = torch.cat([features.outputs for features in asked_for])
            if joint:
                covariance = self._joint(kernel, points if given else None, asked_for)
            else:
                covariance = torch.cat([
                    self._marginal(kernel, points if given else None, features, diagonal) for features in asked_for
                ])  # fmt: skip
        covariance = covariance.reshape(means.shape) if diagonal else covariance
        return Latent(means, covariance.to(means.dtype), diagonal)

    def _marginal(self, kernel: Kernel, points: Points | None, features: Features, diagonal: bool) -> Tensor:
        total = kernel.variance(features, diagonal)
        if points is None:
            return total
        known = points.whitened(self, kernel, features)
        if self.independent:  # [D, M, n]
            taken = known.square().sum(1).T
            return total - (taken if diagonal else torch.diag_embed(taken))
        rows = known.unflatten(1, total.shape[:2])  # [B, n, D]
        return total - (rows.square().sum(0) if diagonal else torch.einsum("bnd,bne->nde", rows, rows))

    def _joint(self, kernel: Kernel, points: Points | None, asked_for: list[Features]) -> Tensor:
        blocks = [[kernel.between(one, two) for two in asked_for] for one in asked_for]
        if not self.independent:
            total = _blocks(blocks)
            if points is not None:
                known = torch.cat([points.whitened(self, kernel, features) for features in asked_for], dim=1)
                total = total - known.T @ known
            return total
        total = torch.cat([torch.cat(row, dim=2) for row in blocks], dim=1)  # [D, N, N]
        if points is not None:
            known = torch.cat([points.whitened(self, kernel, features) for features in asked_for], dim=2)
            total = total - known.mT @ known
        outputs, examples = total.shape[:2]
        return torch.diag_embed(total.permute(1, 2, 0)).transpose(1, 2).reshape((examples * outputs,) * 2)

    def _features(self, points: Points, x: Any) -> list[Features]:
        inputs = asked(x, next(iter(points.tape.parameters.values())).device)
        return read_features(points.tape, inputs, self.max_columns, inputs.requires_grad())

    # ------------------------------------------------------------------------------------ evidence

    def log_evidence(self) -> Tensor:
        """`T·log p(D|θ̃) − ½‖θ̃ − μ₀‖²_Π − ½ log det(I + s Sᵀ K S)`: 0-d float64, the evidence of structure "full".

        It belongs to all of the data: a subset, or outputs that are independent by decree, have none.
        """
        points = self._exact("evidence")
        assert points.cholesky is not None
        parameters = {name: value.detach().double() for name, value in points.tape.parameters.items()}
        sizes = {name: value.shape for name, value in parameters.items()}
        precisions, means = self.prior.precisions(sizes), self.prior.means(sizes)
        distance = sum(
            float((precisions[name].to(value) * (value - means[name].to(value)).square()).sum())
            for name, value in parameters.items()
        )
        fit = self.temperature * points.statistics.log_likelihood_at(torch.tensor(self.noise, dtype=torch.float64))
        return fit - 0.5 * distance - points.cholesky.diagonal().log().sum().cpu()

    def effective_dimension(self) -> float:
        """The number of directions that the data determine, `tr(I − (I + s Sᵀ K S)⁻¹)`; of all data."""
        root = self._exact("effective dimension").cholesky
        assert root is not None
        inverse = torch.linalg.solve_triangular(root, torch.eye(len(root)).to(root), upper=False)
        return len(root) - float(inverse.square().sum())

    def _exact(self, what: str) -> Points:
        points = self._fitted()
        if self.independent or points.count < points.seen:
            raise InputError(
                f"The {what} belongs to the whole model and all {points.seen} examples: use subset=None and "
                "independent=False, or Laplace(structure=...)."
            )
        return points

    def _fitted(self) -> Points:
        if self._points is None:
            raise NotFittedError("There is no posterior yet: call fit(loader) first.")
        self._points.looks.check(self.model)
        return self._points

    def __repr__(self) -> str:
        size = "not fitted" if self._points is None else f"{self._points.count} of {self._points.seen} examples"
        return f"FunctionSpace({self.likelihood.name}, {size}, prior={self.prior!r}, temperature={self.temperature:g})"


def _blocks(blocks: list[list[Tensor]]) -> Tensor:
    """`[n, D, m, E]` each, as one matrix."""
    return torch.cat([torch.cat([b.flatten(2).flatten(0, 1) for b in row], dim=1) for row in blocks])


def _gaussian(prior: float | Tensor | Mapping[str, float | Tensor] | Prior) -> GaussianPrior:
    found = priors.resolve(prior)
    if not isinstance(found, GaussianPrior):
        raise InputError("A Gaussian process needs a Gaussian prior: a number, {glob: number} or GaussianPrior.")
    return found
