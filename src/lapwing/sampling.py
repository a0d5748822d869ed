"""Draws from the posterior of the full GGN of all weights, where no matrix of it fits: sampling by optimization.

With `w_p ~ N(0, Π⁻¹)` and standard normal ε, the minimizer of `½ s Σ_n ‖J_n w‖²_{Λ_n} + ½‖w − w_0‖²_Π`, where
`w_0 = w_p + √s Π⁻¹ Σ_n J_nᵀ Λ_n^{1/2} ε_n` and `s = T/σ²`, is a draw from N(0, P⁻¹) with `P = s H + Π`. It solves
`P w = Π w_0`: conjugate gradients on products with H, for all draws in the same passes over the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import priors
from lapwing.batches import ReadOutput, Unpack, asked
from lapwing.conjugate_gradients import Precision, Product, Solution, solve
from lapwing.errors import ConvergenceWarning, InputError, choose, positive, warn
from lapwing.fitted import Looks
from lapwing.laplace import Laplace
from lapwing.likelihoods import Likelihood
from lapwing.predictive.linearized import Latent
from lapwing.predictive.prediction import Prediction
from lapwing.priors import GaussianPrior, Prior
from lapwing.products import GGN, Estimate
from lapwing.weights import Weights


def sample_by_optimization(
    model: nn.Module,
    likelihood: str | Likelihood,
    loader: Iterable[Any],
    samples: int = 16,
    prior: float | Tensor | Mapping[str, float | Tensor] | Prior = 1.0,
    temperature: float = 1.0,
    weights: Weights = "all",
    *,
    preconditioner: Laplace | None = None,
    tolerance: float = 0.01,
    max_products: int = 200,
    generator: torch.Generator | None = None,
    unpack: Unpack | None = None,
    output: ReadOutput | None = None,
    progress: bool = True,
) -> DrawnPosterior:
    """Draw from the Laplace posterior with the full GGN of all weights, by products with it alone.

    Memory is a few times `samples·p` numbers, time a Jacobian-vector and a vector-Jacobian product over the data for
    each draw and step of conjugate gradients.

    Args:
        model: any trained `nn.Module`. It comes back exactly as it was.
        likelihood: "classification", "regression", "binary", or an instance.
        loader: the training data, the same at every pass.
        samples: how many draws.
        prior: prior precision: a number, `{glob: number}` or `GaussianPrior`.
        temperature: T multiplies the likelihood.
        weights: "all", "last_layer", a glob, or a list of names and globs.
        preconditioner: a fitted `Laplace` on the same weights, such as structure "kron" or "lowrank", whose
            posterior under this prior stands in for P. It changes the number of steps, not the draws.
        tolerance: of the draws: the change that they make to the outputs on the data is off by at most this fraction
            of it, in the norm of Λ. Without a preconditioner this is a rigorous bound, mostly far from tight; with one
            that is close to P it is an estimate.
        max_products: products with H after which a `ConvergenceWarning` says that a draw is not there.
        generator: the source of randomness; None consumes torch's global one.
        unpack: `fn(batch) -> (args, kwargs, target)` for other batches.
        output: `fn(returned) -> tensor [N, ...]` for models that return neither a tensor nor `.logits`.
        progress: show a bar where something takes longer than two seconds.

    Examples:
        >>> import torch
        >>> from lapwing import sample_by_optimization
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,)))]
        >>> drawn = sample_by_optimization(torch.nn.Linear(3, 2), "classification", data, samples=4)
        >>> drawn.samples["weight"].shape, drawn.predict(torch.randn(5, 3)).probs.shape
        (torch.Size([4, 2, 3]), torch.Size([5, 2]))
    """
    if samples < 1:
        raise InputError(f"sample_by_optimization(samples=...) needs at least 1, got {samples}.")
    if not 0 < tolerance < 1:
        raise InputError(f"sample_by_optimization: tolerance must be between 0 and 1, got {tolerance}.")
    if max_products < 2:
        raise InputError(f"sample_by_optimization: max_products must be at least 2, got {max_products}.")
    ggn = GGN(model, likelihood, loader, weights, unpack=unpack, output=output, progress=progress)
    place = ggn.device if generator is None else generator.device
    normals = torch.randn(ggn.size, samples, generator=generator, dtype=torch.float64, device=place).to(ggn.device)
    noise = float(ggn.likelihood.noise or 1.0)
    given = DrawnPosterior(
        ggn, _gaussian(prior), float(positive(temperature, "temperature")), noise, normals,
        ggn.draw(samples, generator), torch.zeros(0), torch.zeros(0), Looks.of(ggn.model), None,
        _Search(preconditioner, tolerance, max_products, progress),
    )  # fmt: skip
    return given._solved(None)


@dataclass(frozen=True)
class _Search:
    """How solutions are found."""

    preconditioner: Laplace | None
    tolerance: float
    max_products: int
    progress: bool


@dataclass(frozen=True, eq=False)
class DrawnPosterior:
    """Draws `θ̃ + w_k` from N(θ̃, P⁻¹), what they say about the prior, and predictions.

    `normals` z and `pulls` q (`Σ_n J_nᵀ Λ_n^{1/2} ε_n` at unit noise), both `[p, S]`, are the randomness behind them:
    `P w = Π^{1/2} z + √s q`. `steps: [p, S]` are the w, and `determined: [p, S]` their `s H w`, in the order of
    `ggn`. `solution` says how well they were found.
    """

    ggn: GGN
    prior: GaussianPrior
    temperature: float
    noise: float
    normals: Tensor
    pulls: Tensor
    steps: Tensor
    determined: Tensor
    looks: Looks
    solution: Solution | None
    search: _Search

    # ------------------------------------------------------------------------------------ draws

    @property
    def count(self) -> int:
        """How many draws there are."""
        return self.normals.shape[1]

    @property
    def samples(self) -> dict[str, Tensor]:
        """The drawn weights: name → `[S, *shape]`; `la.predict(x, method="sampled", samples=...)` takes them too."""
        moved = self.ggn.unpack(self.steps.T)
        return {
            name: (value.detach().double() + moved[name]).to(value.dtype) for name, value in self.ggn.parameters.items()
        }

    def solve(self, vectors: Tensor) -> Solution:
        """`P⁻¹ V` for `[p, k]`, to the tolerance of the draws in the norm of P; `vᵀ P⁻¹ v` to its square."""
        precision = self._precision()

        def measure(x: Tensor, residual: Tensor, error: Tensor) -> Tensor:
            return error / _root(x * (vectors - residual))

        # From 0 what is missing is orthogonal to what is found, in the norm of P.
        found = self._search(precision, vectors, torch.zeros_like(vectors), measure)
        self._warn(found, "P⁻¹ v")
        return found

    def at(
        self,
        prior: float | Tensor | Mapping[str, float | Tensor] | Prior | None = None,
        temperature: float | None = None,
        noise: float | None = None,
    ) -> DrawnPosterior:
        """The draws under another prior, temperature or noise, from the same randomness, found from where these are."""
        moved = replace(
            self,
            prior=self.prior if prior is None else _gaussian(prior),
            temperature=self.temperature if temperature is None else float(positive(temperature, "temperature")),
            noise=self.noise if noise is None else float(self.ggn.likelihood.noise_scale(noise)),
        )
        return moved._solved(self.steps)

    def _solved(self, start: Tensor | None) -> DrawnPosterior:
        self.looks.check(self.ggn.model)
        precision = self._precision()
        right = precision.prior.sqrt().unsqueeze(1) * self.normals + precision.scale**0.5 * self.pulls

        def measure(w: Tensor, residual: Tensor, error: Tensor) -> Tensor:
            moved = w * (
                right - residual - precision.prior.unsqueeze(1) * w
            )  # sums to Σ_n ‖J_n w‖² in the norm of sΛ_n
            return error / _root(moved)

        # Where the data say nothing, a draw is the prior's: from there all that is left lies in the span of the data.
        first = self.normals / precision.prior.sqrt().unsqueeze(1) if start is None else start
        found = self._search(precision, right, first, measure)
        self._warn(found, "draws")
        determined = right - found.residuals - precision.prior.unsqueeze(1) * found.vectors
        return replace(self, steps=found.vectors, determined=determined, solution=found)

    def _search(self, precision: Precision, right: Tensor, start: Tensor, measure: Any) -> Solution:
        search = self.search
        return solve(
            precision.matmul, right, start, self._preconditioner(precision), measure, search.tolerance,
            search.max_products, "conjugate gradients", search.progress,
        )  # fmt: skip

    def _warn(self, found: Solution, what: str) -> None:
        if not found.converged:
            warn(
                f"Conjugate gradients for {what} did not converge in {found.products} products with the GGN: they "
                f"may be off by {float(found.errors.max()):.2g} of their size, above the tolerance of "
                f"{self.search.tolerance:.2g}. Raise max_products or tolerance, take a stronger prior, or pass "
                "preconditioner=Laplace(...).fit(loader).",
                ConvergenceWarning,
            )

    def _precision(self) -> Precision:
        sizes = {name: parameter.shape for name, parameter in self.ggn.parameters.items()}
        values = self.prior.precisions(sizes)
        with torch.no_grad():
            packed = self.ggn.pack(
                {name: values[name].to(self.ggn.device).expand(size) for name, size in sizes.items()}
            )
        return Precision(self.ggn, self.temperature / self.noise, packed.detach())

    def _preconditioner(self, precision: Precision) -> Product:
        if self.search.preconditioner is None:
            return precision.relax
        la = self.search.preconditioner.at(
            prior=self.prior,
            temperature=self.temperature,
            noise=None if self.ggn.likelihood.noise is None else self.noise,
        )
        posterior = la.posterior
        if set(posterior.sizes) != set(self.ggn.parameters):
            raise InputError("The preconditioner was fitted on other weights: pass the same weights=... to both.")

        def apply(vectors: Tensor) -> Tensor:
            return self.ggn.pack(posterior.solve(self.ggn.unpack(vectors.T))).T

        return apply

    # ------------------------------------------------------------------------------------ prior

    @property
    def effective_dimension(self) -> Estimate:
        """`γ = tr(P⁻¹ s H)` as the mean of `s Σ_n ‖J_n w_k‖²_{Λ_n}` over the draws, with its standard error."""
        if self.count < 2:
            raise InputError("An error bar of the effective dimension needs at least 2 draws.")
        return Estimate.of((self.steps * self.determined).sum(0))

    def effective_dimensions(self) -> dict[str, float]:
        """The same for every parameter by name, `γ_l = mean_k w_kl·(s H w_k)_l`; they add up to γ."""
        shares = self.ggn.unpack((self.steps * self.determined).T)
        return {name: float(values.sum()) / self.count for name, values in shares.items()}

    def mackay_prior(self) -> GaussianPrior:
        """MacKay's update of every number in the prior, `λ_l ← γ_l / ‖θ̃_l − μ₀‖²`, from these draws."""
        sizes = {name: parameter.shape for name, parameter in self.ggn.parameters.items()}
        means, gammas = self.prior.means(sizes), self.effective_dimensions()
        assert isinstance(self.prior.precision, Mapping)
        globs = {name: next(g for g in self.prior.precision if g == name or fnmatchcase(name, g)) for name in sizes}
        updated: dict[str, Tensor] = {}
        for glob, value in self.prior.precision.items():
            names = [name for name in sizes if globs[name] == glob]
            if torch.as_tensor(value).dim():
                raise InputError(
                    f"The prior precision of {glob!r} has one number per element; draws are too few to update each. "
                    "Give one number for each glob."
                )
            gamma = sum(gammas[name] for name in names)
            distance = sum(
                float((self.ggn.parameters[n].detach().double() - means[n].to(self.ggn.device)).square().sum())
                for n in names
            )
            if names and not (gamma > 0 and distance > 0):
                raise InputError(
                    f"The draws give an effective dimension of {gamma:.3g} and a squared norm of {distance:.3g} to the "
                    f"parameters of {glob!r}, so there is no precision to update to. Draw more samples, or merge globs."
                )
            updated[glob] = torch.tensor(gamma / distance, dtype=torch.float64) if names else torch.as_tensor(value)
        return GaussianPrior(updated, self.prior.mean)

    def update_prior(self, rounds: int = 1) -> DrawnPosterior:
        """The draws under MacKay's prior, `rounds` times over, each found from the draws before."""
        positive(rounds, "update_prior(rounds)")
        found = self
        for _ in range(rounds):
            found = found.at(prior=found.mackay_prior())
        return found

    # ------------------------------------------------------------------------------- predictions

    def outputs(self, x: Any, method: str = "linearized") -> Tensor:
        """Outputs of every draw: `f(x) + J(x) w_k` ("linearized") or `f(x, θ̃ + w_k)` ("sampled"): `[S, N, *output]`."""
        choose(method, ("linearized", "sampled"), "method")
        self.looks.check(self.ggn.model)
        inputs = asked(x, self.ggn.device)
        if method == "sampled":
            return self.ggn.outputs(inputs, self.steps)
        center, moved = self.ggn.push(inputs, self.steps)
        return center + moved

    def latent(self, x: Any) -> Latent:
        """Mean and covariance of the linearized outputs, `[N, *output]` and `[N, D, D]`: `mean_k (J w_k)(J w_k)ᵀ`."""
        self.looks.check(self.ggn.model)
        center, moved = self.ggn.push(asked(x, self.ggn.device), self.steps)
        rows = moved.flatten(2) if moved.dim() > 2 else moved.unsqueeze(2)
        return Latent(center, torch.einsum("snc,snd->ncd", rows, rows) / self.count)

    def predict(self, x: Any, method: str = "linearized") -> Prediction:
        """The equal mixture of `p(y|f_k)` over the draws' outputs, linearized or through the network itself."""
        noise = torch.tensor(self.noise, dtype=torch.float64, device=self.ggn.device)
        return self.ggn.likelihood.predict_samples(self.outputs(x, method), noise)

    def __repr__(self) -> str:
        return (
            f"DrawnPosterior({self.count} draws, {self.ggn.likelihood.name}, p={self.ggn.size}, prior={self.prior!r})"
        )


def _gaussian(prior: float | Tensor | Mapping[str, float | Tensor] | Prior) -> GaussianPrior:
    found = priors.resolve(prior)
    if not isinstance(found, GaussianPrior):
        raise InputError("Draws by optimization need a Gaussian prior: a number, {glob: number} or GaussianPrior.")
    return found


def _root(terms: Tensor) -> Tensor:
    """`√Σ` of terms `[p, k]` whose sum is positive but for rounding: `[k]`."""
    return terms.sum(0).clamp(min=torch.finfo(terms.dtype).tiny).sqrt()
