"""Laplace: the object users meet."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import evidence, io, likelihoods, priors
from lapwing.allocator import keep_freed_memory
from lapwing.batches import Inputs, ReadOutput, Unpack, asked, peek
from lapwing.curvature import DENSE, KINDS, STRUCTURES, Curvature, StructureOptions
from lapwing.curvature.fit import Fit
from lapwing.curvature.kfra import RESIDUAL
from lapwing.data_evidence import data_evidence
from lapwing.errors import InputError, NotFittedError, choose, positive
from lapwing.fitted import Fitted
from lapwing.guard import borrowed, random_state_kept
from lapwing.likelihoods import Likelihood
from lapwing.linear_model import linear_model
from lapwing.mode import Mode, find_mode
from lapwing.posterior import CENTERS, TEMPERED, Posterior
from lapwing.predictive import asking
from lapwing.predictive.linearized import Latent
from lapwing.predictive.prediction import Prediction
from lapwing.priors import Prior
from lapwing.spectrum import Spectrum
from lapwing.subnetwork import Subnetwork
from lapwing.summary import summarize
from lapwing.tape import Tape
from lapwing.tuning import Groups, Tuning, tune
from lapwing.weights import LAST_LAYER, Weights, last_layer, refuse_complex, select, unwrap


class Laplace:
    """A Gaussian posterior over the weights of a trained network.

    Args:
        model: any trained `nn.Module`. It comes back from every call exactly as it was.
        likelihood: "classification", "regression", "binary", "heteroscedastic", "poisson", or an instance such as
            `Gaussian(noise=0.1)` or a `CustomLikelihood` of one's own.
        structure: "diag", "kron", "ekfac", "block" (dense per layer), "full", or "lowrank" (the largest
            eigenpairs of all weights together; the rest is left to the prior).
        curvature: "ggn" (exact), "rademacher" (random signs), "fisher" (Monte Carlo), "empirical", "kfra" (means
            passed back; structure "kron") or "hessian" (dense structures).
        weights: "all", "last_layer", a glob, a list of names and globs, or a `Subnetwork` (structures "full" and
            "block"). Frozen parameters (`requires_grad=False`) are never Bayesian.
        prior: prior precision λ: a number, `{glob: number}`, `GaussianPrior` or `FactoredDamping`.
        temperature: T multiplies the likelihood; T > 1 is a cold posterior. (laplace-torch's
            temperature is the reciprocal.)
        tempered: "likelihood", or "both" to temper the prior as well.
        kron: "expand" or "reduce", for layers that share a weight between positions.
        kfra_residual: for curvature "kfra", "cross" keeps the terms between branches that meet, "sum" adds the
            branches' matrices without them.
        fisher_samples: draws per example of "fisher" and "rademacher".
        rank_tolerance: fraction of the GGN's trace (in output space, batch by batch) that may be dropped for speed: the
            smallest (example, column) pairs go first (structure "kron" keeps those along the gradients of the labels,
            which cost nothing). What was dropped is in `la.curvature.dropped` and `la.summary()`. 0 is exact; 1e-3
            suits trained classifiers.
        rank: eigenpairs of structure "lowrank".
        unpack: `fn(batch) -> (args, kwargs, target)` for batches that are neither `(x, ..., y)` nor a
            mapping with "labels".
        output: `fn(returned) -> tensor [N, ...]` for models that return neither a tensor nor `.logits`.
        memory_budget: bytes for intermediate results.
        max_dense: largest dense block of a layer without Kronecker form (norms, raw parameters).
        max_factor: a Kronecker side above it is diagonal (vocabularies).
        max_columns: most backward passes per batch.
        progress: show a bar where something takes longer than two seconds.

    Examples:
        >>> import torch
        >>> from lapwing import Laplace
        >>> model = torch.nn.Linear(3, 2)
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,)))]
        >>> la = Laplace(model, "classification").fit(data)
        >>> la.predict(torch.randn(5, 3)).probs.shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        structure: str = "kron",
        curvature: str = "ggn",
        weights: Weights = "all",
        prior: float | Tensor | Mapping[str, float | Tensor] | Prior = 1.0,
        temperature: float = 1.0,
        *,
        tempered: str = "likelihood",
        kron: str = "expand",
        kfra_residual: str = "cross",
        fisher_samples: int = 1,
        rank_tolerance: float = 0.0,
        rank: int = 32,
        unpack: Unpack | None = None,
        output: ReadOutput | None = None,
        memory_budget: int = 2**30,
        max_dense: int = 1024,
        max_factor: int = 16384,
        max_columns: int = 10_000,
        progress: bool = True,
    ) -> None:
        self.model = unwrap(model)
        self.likelihood = likelihoods.resolve(likelihood)
        self.structure = choose(structure, STRUCTURES, "structure")
        self.curvature_kind = choose(curvature, KINDS, "curvature")
        if curvature == "hessian" and structure not in DENSE:
            raise InputError(f"curvature='hessian' needs a dense structure: 'block' or 'full', not {structure!r}.")
        if curvature == "kfra" and structure != "kron":
            raise InputError(f"curvature='kfra' makes Kronecker factors: it needs structure='kron', not {structure!r}.")
        if structure == "lowrank" and curvature != "ggn":
            raise InputError(f"structure='lowrank' is made of products with curvature='ggn', not {curvature!r}.")
        self.weights: Weights = weights if isinstance(weights, str | Subnetwork) else tuple(weights)
        if isinstance(weights, Subnetwork) and structure not in DENSE:
            raise InputError(
                f"A subnetwork has a dense covariance: it needs structure='full' or 'block', not {structure!r}."
            )
        self._select()
        self.kron = choose(kron, ("expand", "reduce"), "kron")
        self.kfra_residual = choose(kfra_residual, RESIDUAL, "kfra_residual")
        for name, value in (
            ("fisher_samples", fisher_samples),
            ("memory_budget", memory_budget),
            ("max_columns", max_columns),
            ("rank", rank),
        ):
            positive(value, name)
        if not 0 <= rank_tolerance < 1:
            raise InputError(f"rank_tolerance must be at least 0 and below 1, got {rank_tolerance}.")
        if rank_tolerance > 0 and curvature != "ggn":
            raise InputError(f"rank_tolerance belongs to curvature='ggn', not {curvature!r}: leave it at 0.")
        self.rank_tolerance = rank_tolerance
        if min(max_dense, max_factor) < 0:
            raise InputError(f"max_dense and max_factor must not be negative, got {max_dense} and {max_factor}.")
        self.fisher_samples, self.max_columns, self.progress = fisher_samples, max_columns, progress
        self.rank = rank
        self.memory_budget, self.max_dense, self.max_factor = memory_budget, max_dense, max_factor
        self.unpack, self.output = unpack, output
        self.prior = priors.resolve(prior)
        self._temperature = positive(temperature, "temperature")
        self._noise = torch.tensor(self.likelihood.noise or 1.0, dtype=torch.float64)
        self.tempered = choose(tempered, TEMPERED, "tempered")
        self.center = "network"
        self.tuning_: Tuning | None = None
        self.mode_: Mode | None = None
        self._fitted: Fitted | None = None

    @property
    def temperature(self) -> float:
        """T, which multiplies the likelihood."""
        return self._temperature.item()

    @property
    def noise(self) -> float | Tensor | None:
        """The noise variance of a Gaussian likelihood, one per output where their ratios were given."""
        if self.likelihood.noise is None:
            return None
        ratios: Tensor | None = getattr(self.likelihood, "ratios", None)
        return self._noise.item() if ratios is None else self._noise.detach() * ratios.to(self._noise.device)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def fitted(self) -> bool:
        """Whether there is a posterior."""
        return self._fitted is not None

    @property
    def curvature(self) -> Curvature:
        """The accumulated curvature and its statistics."""
        return self._state().spectrum.curvature

    @property
    def posterior(self) -> Posterior:
        """The posterior under the current prior, temperature, noise and center."""
        state = self._state()
        return Posterior(
            state.spectrum, self.prior, self._temperature, self._noise, state.weights, self.center, self.tempered,
            self.mode_,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------ fit

    def fit(self, loader: Iterable[Any], passes: int = 1, generator: torch.Generator | None = None) -> Laplace:
        """Accumulate the curvature in one pass over the data (two for "ekfac", a few for "lowrank"); returns `self`.

        Args:
            loader: yields `(x, y)`, `(x1, ..., y)` or mappings with "labels".
            passes: average this many passes, for data that are augmented at random: N, `Σ log p` and
                squared errors stay those of one data set.
            generator: for curvatures "fisher" and "rademacher". torch's global random state is left as it was found.
        """
        if passes < 1:
            raise InputError(f"passes must be at least 1, got {passes}.")
        if not isinstance(loader, Iterable):
            raise InputError(f"fit needs an iterable of batches, such as a DataLoader, got {type(loader).__name__}.")
        chosen = self._select()
        keep_freed_memory()
        with random_state_kept(), borrowed(self.model, chosen):
            if self.weights == LAST_LAYER:
                loader, first = peek(loader)
                names = last_layer(self._tape(chosen), first, self.unpack)
                chosen = {name: chosen[name] for name in names}
            refuse_complex(chosen)
            with self._borrow(chosen):
                tape = self._tape(chosen)
                curvature = Fit(
                    self.structure, self.curvature_kind, self.likelihood, self._options(), self.fisher_samples,
                    self.max_columns, self.unpack, self.progress, self.kfra_residual, self.rank_tolerance,
                    self.weights.elements if isinstance(self.weights, Subnetwork) else None,
                ).run(tape, loader, passes, generator)  # fmt: skip
        fitted = copy.copy(self)
        fitted._fitted = Fitted(tape, Spectrum(curvature))
        if self.curvature_kind == "hessian":
            fitted.posterior.log_det_precision()  # raises here and now if it is indefinite
        self._fitted = fitted._fitted
        self.tuning_ = self.mode_ = None
        return self

    def _select(self) -> dict[str, nn.Parameter]:
        if isinstance(self.weights, Subnetwork):
            return self.weights.parameters(self.model)
        return select(self.model, self.weights)

    def _options(self) -> StructureOptions:
        return StructureOptions(self.kron, self.max_dense, self.max_factor, self.memory_budget, self.rank)

    def _tape(self, parameters: dict[str, nn.Parameter]) -> Tape:
        return Tape(self.model, parameters, self.output, self.memory_budget)

    def _borrow(self, names: Collection[str]) -> AbstractContextManager[None]:
        return borrowed(self.model, names)

    def _state(self) -> Fitted:
        if self._fitted is None:
            raise NotFittedError("There is no posterior yet: call la.fit(loader) first.")
        return self._fitted

    def _unchanged(self) -> Fitted:
        """The state of the fit, for calls that run the model: it must be the one that was fitted."""
        state = self._state()
        state.check_unchanged()
        return state

    # ----------------------------------------------------------------------------- hyperparameters

    def at(
        self,
        prior: float | Tensor | Mapping[str, float | Tensor] | Prior | None = None,
        temperature: float | Tensor | None = None,
        noise: float | Tensor | None = None,
        center: str | None = None,
        tempered: str | None = None,
    ) -> Laplace:
        """The same curvature under another prior, temperature, noise or center; shared, nothing recomputed."""
        other = copy.copy(self)
        other.tuning_ = None
        if prior is not None:
            other.prior = priors.resolve(prior)
        if temperature is not None:
            other._temperature = positive(temperature, "temperature")
        if noise is not None:
            other._noise = self.likelihood.noise_scale(noise)
        if center is not None:
            other.center = choose(center, CENTERS, "center")
        if tempered is not None:
            other.tempered = choose(tempered, TEMPERED, "tempered")
        return other

    def log_evidence(
        self,
        prior: float | Tensor | Mapping[str, float | Tensor] | Prior | None = None,
        noise: float | Tensor | None = None,
        temperature: float | Tensor | None = None,
        center: str | None = None,
    ) -> Tensor:
        """`T·log p(D|θ*) + log p(θ*) + (p/2) log 2π − ½ log det P`: a 0-d float64 tensor.

        Differentiable in each argument that is given as a tensor with `requires_grad`.
        """
        return evidence.log_evidence(self.at(prior, temperature, noise, center).posterior)

    def data_evidence(self, x: Any, y: Tensor, scale: float | None = None) -> Tensor:
        """The part of the log-evidence that the data enter, for gradients in the inputs: a 0-d float64 tensor

        `scale·Σ_n { T·log p(y_n|f_n) − ½ (T/σ²) tr(Λ_n J_n P⁻¹ J_nᵀ) }`, where `P⁻¹` is that of the fit.

        If `x` depends on parameters η (an augmentation, a warping of inputs), the gradient in η is that of the
        log-evidence at the η of the fit, weights held: exact for structures full, block and diag, exact in the basis
        of the fit for ekfac, an approximation for kron and for lowrank without all of the rank. What it gains is
        a lower bound on what the evidence gains. Hyperparameters are held: their gradients are `log_evidence`'s.

        Args:
            x: inputs as for `predict`, made by differentiable operations outside the model.
            y: their targets, as in the batches of `fit`.
            scale: what multiplies the sum. Default N/M, for M of the N examples of the fit that stand for all;
                1 to add up batches.
        """
        return data_evidence(self, x, y, scale)

    def effective_dimension(self) -> float:
        """The number of directions in weight space that the data determine, `Σ_i (T s_i/σ²)/(T s_i/σ² + λ_i)`."""
        return float(self.posterior.effective_dimension())

    def tune_prior(
        self,
        method: str = "evidence",
        groups: Groups = "scalar",
        loader: Iterable[Any] | None = None,
        **options: Any,
    ) -> Laplace:
        """Choose prior precisions (and the noise of a regression); returns `self`.

        `method="evidence"` maximizes the evidence at the current center to convergence, without data.
        `method="linear-evidence"` maximizes that of the linear model, whose own mode moves along, with `loader` the
        data of the fit; the mode is in `la.mode_` afterwards, for `center="linear"`. `method="validation"` takes the
        prior with the best score on `loader`. What was done is in `la.tuning_`. See `lapwing.tuning` for the options of
        each.

        `groups` says which weights share a precision: all ("scalar"), those of a "layer", none ("parameter": structures
        diag, block, full, lowrank), those of a group whose scale a normalization takes out ("auto"), those that read
        one input feature of the first layer ("input"), or `{glob: label}`.
        """
        self._state()
        if isinstance(self.weights, Subnetwork) and groups in ("parameter", "input"):
            raise InputError(
                f"groups={groups!r} has precisions for weights that the subnetwork holds: use 'scalar' or 'layer'."
            )
        tuned, tuning = tune(self, method, groups, loader, options)
        self.prior, self._noise, self._temperature = tuned.prior, tuned._noise, tuned._temperature
        self.mode_, self.tuning_ = tuned.mode_, tuning
        return self

    def find_mode(self, loader: Iterable[Any], tolerance: float = 1e-4, max_steps: int = 500) -> Laplace:
        """Find the mode θ* of the linearized model under the current prior, noise and temperature; returns `self`.

        `θ* = argmin Σ_n ℓ(f(x_n) + J_n(θ − θ̃), y_n) + ½‖θ − μ₀‖²_Π`, a convex problem: one Jacobian-vector and one
        vector-Jacobian product a step, no Jacobian, for any likelihood. It starts from the mode that was found last,
        if there is one. Afterwards `center="linear"` serves evidence, samples and predictions; θ* stays where it was
        found when prior, noise or temperature move on, until it is found anew; a `ConvergenceWarning` tells where it
        is far from theirs.

        Args:
            loader: the data of the fit. It is read again and again, always in the same order.
            tolerance: of the first-order condition, relative to its terms: see `lapwing.mode.Mode.residual`, and what
                was reached in `la.mode_`.
            max_steps: after which a `ConvergenceWarning` says that it is not there.
        """
        with linear_model(self, loader, "find_mode") as model:
            self.mode_ = find_mode(
                model, self.posterior, self.mode_, tolerance, max_steps, self.memory_budget, self.progress
            )
        return self

    # ----------------------------------------------------------------------- samples and predictions

    def sample(self, n: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draw weights from the posterior: name → `[n, *shape]`."""
        if n < 1:
            raise InputError(f"sample(n) needs n of at least 1, got {n}.")
        return self.posterior.sample(n, generator)

    def latent(self, x: Any, joint: bool = False, diagonal: bool = False, center: str | None = None) -> Latent:
        """Mean and covariance of the linearized outputs at `x`.

        `[N, C]` and `[N, C, C]`; with `joint` `[N·C, N·C]` over all inputs; with `diagonal` `[N, C]`.
        """
        if joint and diagonal:
            raise InputError("latent: joint=True and diagonal=True exclude each other.")
        return asking.latent(self, x, joint, 0 if diagonal else sys.maxsize, center)

    def cross_covariance(self, x: Any, other: Any, center: str | None = None) -> Tensor:
        """Covariance of the linearized outputs at `x` with those at `other`: `[N·D, M·D]`.

        It is a block of the joint covariance at the inputs of both, which the model sees as one batch; the larger of
        the two goes in parts, so that little is computed of the rest of that matrix.
        """
        return asking.cross_covariance(self, x, other, center)

    def predict(
        self,
        x: Any,
        method: str = "linearized",
        link: str | None = None,
        samples: int | Mapping[str, Tensor] | None = None,
        generator: torch.Generator | None = None,
        center: str | None = None,
        joint: bool = False,
    ) -> Prediction:
        """Predict at `x`: a tensor, a tuple of positional or a mapping of keyword arguments of the model.

        Args:
            x: the inputs.
            method: "linearized" (outputs are Gaussian; the link integrates over them), "pushed" (the same outputs for
                weights drawn once, by a Jacobian-vector product each: for very many outputs) or "sampled" (forward
                passes of weights drawn once). Drawn weights are the same for all inputs.
            link: for linearized predictions of classes "probit" (default), "mf1", "mf2", "bridge", "bridge-norm" or
                "delta" (closed forms, each with its range: `lapwing.predictive.links`), or "mc" (Monte Carlo over
                outputs, with noise of its own for every input); regression is exact. See `Heteroscedastic` and
                `Poisson` for theirs.
            samples: draws (default 100 of weights, 1,000 in output space), or weights from `la.sample`.
            generator: the source of randomness; None consumes torch's global one.
            center: "network", "newton" or "linear" (after `find_mode`); default that of `la`.
            joint: all inputs together: a `JointPrediction` with the covariance between them, or the `JointSamples` of
                "pushed" and "sampled", both with `sample`, a joint `log_prob` and the `marginals` of each input.
        """
        return asking.predict(self, x, method, link, samples, generator, center, joint)

    def _inputs(self, x: Any) -> Inputs:
        return asked(x, self.device)

    # --------------------------------------------------------------------------------- housekeeping

    def merge(self, other: Laplace) -> Laplace:
        """The posterior given the data of both (same model, weights, structure and curvature)."""
        if self.likelihood.config() != other.likelihood.config():
            raise InputError("Posteriors of different likelihoods do not merge.")
        for name, value in self._state().weights.items():
            if name in other._state().weights and not torch.equal(value, other._state().weights[name]):
                raise InputError(f"Posteriors around different weights do not merge: {name!r} differs.")
        merged = copy.copy(self)
        merged.tuning_ = merged.mode_ = None
        merged._fitted = Fitted(self._state().tape, Spectrum(self.curvature.merge(other.curvature)))
        return merged

    def summary(self) -> str:
        """A table: for every layer its parameters, the path its gradients took, its structure and prior."""
        return summarize(self._state().tape, self.posterior)

    def save(self, path: str | Path) -> None:
        """Write the posterior to one safetensors file with a JSON header and a checksum. No pickle."""
        io.save(self, Path(path))

    @staticmethod
    def load(
        path: str | Path,
        model: nn.Module,
        likelihood: str | Likelihood | None = None,
        unpack: Unpack | None = None,
        output: ReadOutput | None = None,
    ) -> Laplace:
        """Read a posterior back. A file of another architecture or other weights is refused."""
        return io.load(Path(path), model, likelihood, unpack, output)

    def to(self, device: str | torch.device) -> Laplace:
        """Move model and posterior to a device; returns `self`."""
        device = torch.device(device)
        self.model.to(device)
        if self._fitted is not None:
            parameters = {name: self.model.get_parameter(name) for name in self._fitted.weights}
            tape = self._tape(parameters)
            tape.layers, seen = self._fitted.tape.layers, self._fitted.tape.seen
            tape.seen = None if seen is None else seen.to(device)
            self._fitted = Fitted(tape, Spectrum(self.curvature.to(device)))
        if isinstance(self.prior, priors.GaussianPrior):
            self.prior = self.prior.to(device)
        self.mode_ = None if self.mode_ is None else self.mode_.to(device)
        self._noise, self._temperature = self._noise.to(device), self._temperature.to(device)
        return self

    def __repr__(self) -> str:
        seen = f", N={self.curvature.examples:g}" if self._fitted is not None else ", not fitted"
        return (
            f"Laplace({self.likelihood.name}, structure={self.structure!r}, curvature={self.curvature_kind!r}, "
            f"weights={self.weights!r}, prior={self.prior!r}, temperature={self.temperature:g} (multiplies the "
            f"likelihood){seen})"
        )
