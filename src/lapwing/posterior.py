"""The posterior N(θ*, P⁻¹) with `P = T·H/σ² + Π`: a spectrum, a prior, a temperature and a noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.basis import Basis
from lapwing.curvature import Block
from lapwing.errors import ConvergenceWarning, InputError, NotFittedError, warn
from lapwing.priors import FactoredDamping, GaussianPrior, Prior
from lapwing.spectrum import Spectrum

if TYPE_CHECKING:
    from lapwing.mode import Mode

CENTERS = ("network", "newton", "linear")
TEMPERED = ("likelihood", "both")
_STALE = 1e-2  # violation of the first-order condition above which a mode belongs to other hyperparameters


@dataclass(frozen=True)
class BlockPosterior:
    """One block of P: `P⁻¹ = U diag(1/precisions) Uᵀ`, with `log_det_shape = log det M`."""

    block: Block
    basis: Basis
    eigenvalues: Tensor
    precisions: Tensor
    log_det_shape: Tensor

    @property
    def scale(self) -> Tensor:
        """`D = 1/(T s/σ² + λ)`."""
        return 1 / self.precisions


@dataclass(frozen=True)
class FirstOrder:
    """`slope` is `Π(θ − μ₀) − T∇/σ²` by parameter name, float64, and `residual` its size relative to that of its two

    terms, in the norm of Π⁻¹: 0 at a mode, at most 1.
    """

    slope: dict[str, Tensor]
    residual: float


@dataclass(frozen=True, eq=False)
class Posterior:
    """Everything here is elementwise in the spectrum; no data is touched.

    `temperature` T multiplies the likelihood (T > 1 is a cold posterior; laplace-torch's is the
    reciprocal); with `tempered="both"` it multiplies the prior as well.
    """

    spectrum: Spectrum
    prior: Prior
    temperature: Tensor
    noise: Tensor
    weights: dict[str, Tensor]
    center: str = "network"
    tempered: str = "likelihood"
    mode: Mode | None = None
    """The linear model's own, where it was found."""

    @property
    def likelihood_scale(self) -> Tensor:
        """`T/σ²`."""
        return self.temperature / self.noise

    @property
    def prior_scale(self) -> Tensor:
        """What multiplies the prior: T where it is tempered as well, else 1."""
        return self.temperature if self.tempered == "both" else torch.ones_like(self.temperature)

    @cached_property
    def precisions(self) -> dict[str, Tensor]:
        """Π by parameter name, untempered."""
        return self._here(self._gaussian().precisions(self.sizes))

    @cached_property
    def means(self) -> dict[str, Tensor]:
        """μ₀ by parameter name."""
        return self._here(self._gaussian().means(self.sizes))

    @cached_property
    def sizes(self) -> dict[str, torch.Size]:
        return {name: self.weights[name].shape for name in self.spectrum.curvature.parameters}

    @cached_property
    def chosen(self) -> dict[str, Tensor]:
        """Of a subnetwork, 1 for its weights and 0 for those that are held, by parameter name, float64; else empty."""
        found: dict[str, Tensor] = {}
        for block in self.spectrum.blocks:
            if block.chosen is not None:
                found |= block.unpack(torch.ones(block.size, dtype=torch.float64))
        return self._here(found)

    def _here(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The values on the devices of the weights they belong to."""
        return {name: value.to(self.weights[name].device) for name, value in values.items()}

    def _gaussian(self) -> GaussianPrior:
        if isinstance(self.prior, FactoredDamping):
            raise InputError(
                "FactoredDamping is no prior, so it has no evidence, no effective dimension and no Newton center. Use "
                "it for sampling and prediction, choose it with tune_prior(method='validation'), or set a "
                "number as prior."
            )
        return self.prior

    @cached_property
    def blocks(self) -> tuple[BlockPosterior, ...]:
        if isinstance(self.prior, FactoredDamping):
            return tuple(self._damped(i, self.prior) for i in range(len(self.spectrum.blocks)))
        return tuple(self._block(i) for i in range(len(self.spectrum.blocks)))

    def _block(self, index: int) -> BlockPosterior:
        prior = self.spectrum.prior_of(index, self.precisions)
        found = self.spectrum.decompose(index, prior.shape)
        precisions = self.likelihood_scale * found.eigenvalues + self.prior_scale * prior.scale
        block = self.spectrum.blocks[index]
        self._check_definite(block, precisions)
        shape = torch.zeros_like(self.temperature) if prior.shape is None else prior.shape.log().sum()
        return BlockPosterior(block, found.basis, found.eigenvalues, precisions, shape)

    def _damped(self, index: int, damping: FactoredDamping) -> BlockPosterior:
        found = self.spectrum.decompose(index, None)
        if found.sides is None:
            average = found.eigenvalues / self.spectrum.curvature.examples
            precisions = self.likelihood_scale * damping.n * average + damping.tau
        else:
            inputs, outputs = found.sides
            root = (self.likelihood_scale * damping.n).sqrt()
            precisions = (root * outputs + math.sqrt(damping.tau)).unsqueeze(2) * (
                root * inputs + math.sqrt(damping.tau)
            ).unsqueeze(1)
        self._check_definite(self.spectrum.blocks[index], precisions)
        zero = torch.zeros_like(self.temperature)
        return BlockPosterior(self.spectrum.blocks[index], found.basis, found.eigenvalues, precisions, zero)

    def _check_definite(self, block: Block, precisions: Tensor) -> None:
        if self.spectrum.curvature.kind == "hessian" and not bool((precisions > 0).all()):
            raise InputError(
                f"The exact Hessian of {block.name!r} is indefinite, and the prior does not make the posterior "
                f"precision positive (smallest eigenvalue {float(precisions.min()):.3g}). The weights are no mode: "
                "train on, raise the prior precision, or use curvature='ggn'."
            )

    def log_det_precision(self) -> Tensor:
        """`log det P`, 0-d; differentiable in prior, noise and temperature."""
        terms = [block.precisions.log().sum() + block.log_det_shape for block in self.blocks]
        return torch.stack(terms).sum()

    def effective_dimension(self) -> Tensor:
        """`γ = Σ_i (T s_i/σ²)/(T s_i/σ² + λ_i)`, the number of directions the data determine; 0-d."""
        self._gaussian()
        scale = self.likelihood_scale
        return torch.stack([(scale * block.eigenvalues / block.precisions).sum() for block in self.blocks]).sum()

    def effective_dimensions(self) -> dict[str, Tensor]:
        """How far the data determine each weight, the diagonal of `P⁻¹ T H/σ²`, by parameter name; float64.

        Between 0 and 1, and `1 − λ (P⁻¹)_ii`; the sum over all is the effective dimension.
        """
        self._gaussian()
        found: dict[str, Tensor] = {}
        for i, block in enumerate(self.blocks):
            shares = self.likelihood_scale * block.eigenvalues * block.scale
            diagonal = block.basis.to(torch.float64).marginal(shares)
            shape = self.spectrum.prior_of(i, self.precisions).shape
            found |= block.block.unpack(diagonal if shape is None else diagonal * shape)
        return found

    def variances(self) -> dict[str, Tensor]:
        """Marginal posterior variance of every parameter, in its dtype: the diagonal of P⁻¹."""
        return {name: value.to(self.weights[name].dtype) for name, value in self.covariance_diagonal().items()}

    def covariance_diagonal(self) -> dict[str, Tensor]:
        """The diagonal of P⁻¹ by parameter name, float64."""
        found: dict[str, Tensor] = {}
        for block in self.blocks:
            found |= block.block.unpack(block.basis.to(torch.float64).marginal(block.scale))
        return found

    def curvature_diagonal(self) -> dict[str, Tensor]:
        """The diagonal of H by parameter name, float64; negative where an exact Hessian is."""
        found: dict[str, Tensor] = {}
        for i, block in enumerate(self.spectrum.blocks):
            found |= block.unpack(self.spectrum.decompose(i, None).diagonal())
        return found

    def precision_diagonal(self) -> dict[str, Tensor]:
        """The diagonal of P by parameter name, float64. Its inverse is at most the marginal variance."""
        return {
            name: self.likelihood_scale * diagonal + self.prior_scale * self.precisions[name]
            for name, diagonal in self.curvature_diagonal().items()
        }

    @cached_property
    def step(self) -> dict[str, Tensor]:
        """`θ* − θ̃` by parameter name, float64, of the center.

        0 for the network, the step to the linear model's mode, or Newton's, `−P⁻¹(Π(θ̃ − μ₀) − T∇/σ²)`.
        """
        if self.center == "network":
            return {name: torch.zeros_like(self.weights[name], dtype=torch.float64) for name in self.sizes}
        if self.center == "linear":
            return self.linear_mode.step
        return {name: -moved for name, moved in self.solve(self.first_order().slope).items()}

    @cached_property
    def linear_mode(self) -> Mode:
        """The linear model's own mode, or an error that says how to find it.

        A `ConvergenceWarning` where it was found under another prior, noise or temperature and is far from theirs.
        """
        if self.mode is None:
            raise NotFittedError("center='linear' needs the linear model's own mode: call la.find_mode(loader) first.")
        residual = self.first_order(self.mode.step, self.mode.gradient).residual
        if residual > max(_STALE, 2 * self.mode.residual):
            warn(
                "The linear model's mode was found under another prior, noise or temperature: here its first-order "
                f"condition is violated by {residual:.2g} of its terms. Call la.find_mode(loader) again.",
                ConvergenceWarning,
            )
        return self.mode

    def solve(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """`P⁻¹ v` by parameter name, float64, held fixed when differentiating."""
        blocks = self.blocks  # made outside of no_grad: they are kept, and the evidence differentiates them
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for block in blocks:
                basis = block.basis.to(torch.float64)
                found |= block.block.unpack(basis.expand(block.scale * basis.reduce(block.block.pack(values))))
        return found

    def first_order(
        self, step: dict[str, Tensor] | None = None, gradient: dict[str, Tensor] | None = None
    ) -> FirstOrder:
        """The first-order condition at `θ̃ + step`, where the log-likelihood has this `gradient`; default at θ̃."""
        gradient = self.spectrum.curvature.gradient if gradient is None else gradient
        slope: dict[str, Tensor] = {}
        squares = torch.zeros(3, dtype=torch.float64)
        with torch.no_grad():
            for name in self.sizes:
                precision = self.prior_scale * self.precisions[name]
                distance = self.weights[name].double() - self.means[name]
                prior = precision * (distance if step is None else distance + step[name])
                data = self.likelihood_scale * gradient[name].double()
                slope[name] = prior - data
                squares += torch.stack([(term.square() / precision).sum().cpu() for term in (slope[name], prior, data)])
        whole, *terms = squares.sqrt().tolist()
        return FirstOrder(slope, whole / sum(terms) if sum(terms) > 0 else 0.0)

    @cached_property
    def slope(self) -> dict[str, Tensor]:
        """Gradient of the negative log posterior at the center, by parameter name, float64.

        That of the network; at the linear model's mode its own (0 unless the prior moved on); at the Newton center 0.
        """
        if self.center == "network":
            return self.first_order().slope
        if self.center == "newton":
            return {name: torch.zeros_like(step) for name, step in self.step.items()}
        return self.first_order(self.step, self.linear_mode.gradient).slope

    def step_curvature(self, step: dict[str, Tensor] | None = None) -> Tensor:
        """`δᵀ H δ` of the step to the center, or of another by parameter name; 0-d."""
        blocks, step = self.blocks, self.step if step is None else step
        with torch.no_grad():
            terms = []
            for i, block in enumerate(blocks):
                prior = self.spectrum.prior_of(i, self.precisions)
                shaped = block.block.pack(step)
                if prior.shape is not None:
                    shaped = shaped * prior.shape
                inverse = block.basis.to(torch.float64).reduce(shaped)  # U⁻¹ = Uᵀ M
                terms.append((block.eigenvalues * inverse.square()).sum())
            return torch.stack(terms).sum()

    @cached_property
    def squared_distances(self) -> dict[str, Tensor]:
        """`(θ* − μ₀)²` by parameter name, float64; summed already where one precision is shared."""
        found: dict[str, Tensor] = {}
        shared = self.spectrum.squared_distance(self._gaussian(), self.weights) if self.center == "network" else {}
        for name, precision in self.precisions.items():
            if name in shared and precision.dim() == 0 and name not in self.chosen:
                found[name] = shared[name]
            else:
                found[name] = (self.weights[name].double() + self.step[name] - self.means[name]).square()
            if name in self.chosen:
                found[name] = found[name] * self.chosen[name]
        return found

    @cached_property
    def mean(self) -> dict[str, Tensor]:
        """θ* by parameter name, in the weights' dtype."""
        if self.center == "network":
            return {name: self.weights[name] for name in self.sizes}
        return {name: (self.weights[name].double() + step).to(self.weights[name]) for name, step in self.step.items()}

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """`θ* + U D^{1/2} ε`: name → `[count, *shape]`."""
        drawn: dict[str, Tensor] = {}
        for block in self.blocks:
            like = self.weights[block.block.parameters[0]]
            dtype = torch.promote_types(like.dtype, torch.float32)
            noise = torch.randn((count, *block.basis.shape), generator=generator, dtype=dtype, device=like.device)
            scaled = noise * block.scale.sqrt().to(dtype)
            drawn |= block.block.unpack(block.basis.to(dtype).expand(scaled).to(like.dtype))
        return {name: self.mean[name] + drawn[name] for name in self.sizes}
