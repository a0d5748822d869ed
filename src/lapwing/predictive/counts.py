"""What a prediction of counts says."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, Poisson

from lapwing.errors import InputError, choose
from lapwing.predictive.prediction import Prediction
from lapwing.predictive.uncertainty import CLOSED_FORM, MEASURES, SAMPLES, Split, Uncertainty, entropy_terms

_NODES = 48  # of the quadrature
_STRATA = 512  # draws at equal probabilities that stand for a log-normal rate in its distribution
_NEWTON = 100
_LEFT, _MOST_COUNTS = 1e-7, 100_000  # probability left out of an entropy, and counts it is summed over at most
_AT_ONCE, _NUMBERS = 256, 2**20  # counts, and numbers in all, that are computed together


@dataclass(frozen=True)
class CountPrediction(Prediction):
    """Mean and variance of counts: `variance = aleatoric + epistemic`, each `[N, *output]`.

    `aleatoric` is the mean rate, which is the mean of the counts' variance given their rate; `epistemic` the variance
    of the rate. `log_rates: [S, N, *output]` are those whose equal mixture this is. Of a log-normal rate
    (`mean` and `variance` of its logarithm in `gaussian`) they lie at equal probabilities and serve `interval` and
    `distribution`, output by output; the other members are then exact.
    """

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    log_rates: Tensor = field(repr=False)
    gaussian: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    @staticmethod
    def log_normal(mean: Tensor, variance: Tensor) -> CountPrediction:
        """Log-rates N(mean, variance), `[N, *output]` each: `E[rate] = exp(m + s/2)`, `Var = E[rate]² (eˢ − 1)`."""
        rate = (mean + variance / 2).exp()
        places = (torch.arange(_STRATA, dtype=torch.float64, device=mean.device) + 0.5) / _STRATA
        normal = torch.special.ndtri(places).to(mean).reshape(-1, *[1] * mean.dim())
        log_rates = mean + normal * variance.sqrt()
        return CountPrediction(rate, rate, rate.square() * torch.expm1(variance), log_rates, (mean, variance))

    @staticmethod
    def mixture(log_rates: Tensor) -> CountPrediction:
        """The equal mixture over `log_rates: [S, N, *output]`."""
        rates = log_rates.exp()
        mean = rates.mean(0)
        return CountPrediction(mean, mean, (rates - mean).square().mean(0), log_rates)

    @property
    def variance(self) -> Tensor:
        """Total variance: `[N, *output]`."""
        return self.aleatoric + self.epistemic

    @property
    def std(self) -> Tensor:
        """Its square root."""
        return self.variance.sqrt()

    def uncertainty(self, measure: str = "variance") -> Uncertainty:
        """Total, aleatoric and epistemic "variance", or "entropy" (nats), of each output for itself.

        The entropy is summed over the counts until what is left has a probability below 1e-7; for a log-normal rate
        their probabilities and the mean entropy at a known rate come from quadrature.
        """
        if choose(measure, MEASURES, "measure of uncertainty") == "variance":
            source = SAMPLES if self.gaussian is None else CLOSED_FORM
            return Uncertainty(self.variance, self.aleatoric, self.epistemic, source)
        split = self._entropies()
        total = split.within + split.between
        return Uncertainty(total, split.within, split.between, SAMPLES if self.gaussian is None else "quadrature")

    @property
    def entropy(self) -> Tensor:
        """Total entropy of each output, in nats: `[N, *output]`."""
        return self.uncertainty("entropy").total

    def _entropies(self) -> Split:
        """Entropy of the counts, and its mean once the rate is known: `−Σ_y p(y) log p(y)` both."""
        f, log_weights = self._places()
        rates = f.exp()
        total = within = mass = torch.zeros_like(f[0])
        step = max(1, min(_AT_ONCE, _NUMBERS // f.numel()))
        for start in range(0, _MOST_COUNTS, step):
            y = torch.arange(start, start + step, dtype=f.dtype, device=f.device).reshape(-1, *[1] * f.dim())
            each = y * f - rates - torch.lgamma(y + 1)  # [counts, S, N, *output]
            logs = (each + log_weights).logsumexp(1)
            if self.gaussian is not None:
                mean, variance = (part.double() for part in self.gaussian)
                logs = log_poisson_integral(mean, variance, y[:, 0])
            total, mass = total + entropy_terms(logs).sum(0), mass + logs.exp().sum(0)
            within = within + (entropy_terms(each) * log_weights.exp()).sum((0, 1))
            if bool((mass > 1 - _LEFT).all()):
                return Split(total.to(self.mean.dtype), within.to(self.mean.dtype))
        raise InputError(
            f"The entropy of counts is a sum over them, and more than {_MOST_COUNTS} are probable here (the mean rate "
            f"is up to {float(self.mean.max()):.3g}). Use uncertainty('variance')."
        )

    def _places(self) -> tuple[Tensor, Tensor]:
        """Log-rates `[S, N, *output]` and the logarithms of their weights, in float64: the draws, or quadrature's."""
        if self.gaussian is None:
            f = self.log_rates.double()
            return f, f.new_full((len(f), *[1] * self.mean.dim()), -math.log(len(f)))
        mean, variance = (part.double() for part in self.gaussian)
        nodes, logs = (part.to(mean).reshape(-1, *[1] * mean.dim()) for part in _gauss_hermite(_NODES))
        return mean + math.sqrt(2) * _safe_root(variance) * nodes, logs - nodes.square() - 0.5 * math.log(math.pi)

    def log_prob(self, counts: Tensor) -> Tensor:
        """Log probability of counts `[N, *output]`, summed over the outputs: `[N]`.

        For a log-normal rate output by output, as if they were independent; for a mixture jointly.
        """
        if counts.shape != self.mean.shape:
            raise InputError(f"counts of shape {list(counts.shape)} against means of {list(self.mean.shape)}.")
        counts = counts.to(self.mean.dtype)
        if self.gaussian is not None:
            terms = log_poisson_integral(*self.gaussian, counts)
            return terms.flatten(1).sum(1) if terms.dim() > 1 else terms
        terms = counts * self.log_rates - self.log_rates.exp() - torch.lgamma(counts + 1)
        terms = terms.flatten(2).sum(2) if terms.dim() > 2 else terms
        return terms.logsumexp(0) - math.log(len(terms))

    def interval(self, probability: float = 0.95) -> tuple[Tensor, Tensor]:
        """The smallest counts `(low, high)` that are not exceeded with probability `(1 − p)/2` and `(1 + p)/2`."""
        if not 0 < probability < 1:
            raise InputError(f"interval(p) needs a probability between 0 and 1, got {probability}.")
        return self._quantile((1 - probability) / 2), self._quantile((1 + probability) / 2)

    def _quantile(self, probability: float) -> Tensor:
        """Doubling, then bisection between whole numbers."""
        with torch.no_grad():
            rates = self.log_rates.double().exp()

            def below(count: Tensor) -> Tensor:
                found: Tensor = torch.special.gammaincc(count + 1, rates).mean(0) < probability
                return found

            low, high = torch.full_like(rates[0], -1.0), torch.ones_like(rates[0])
            while bool((short := below(high)).any()):
                low, high = torch.where(short, high, low), torch.where(short, 2 * high, high)
            while bool((high - low > 1).any()):
                middle = torch.floor((low + high) / 2)
                short = below(middle)
                low, high = torch.where(short, middle, low), torch.where(short, high, middle)
        return high.to(self.mean.dtype)

    def distribution(self) -> Distribution:
        """One joint distribution of the outputs per example: the mixture of Poisson distributions over `log_rates`."""
        rates, events = self.log_rates.exp().movedim(0, 1), self.mean.dim() - 1
        each: Distribution = Independent(Poisson(rates), events) if events else Poisson(rates)
        return MixtureSameFamily(Categorical(logits=rates.new_zeros(rates.shape[:2])), each)


def log_poisson_integral(mean: Tensor, variance: Tensor, counts: Tensor) -> Tensor:
    """`log ∫ Poisson(y; eᶠ) N(f; m, s) df`, elementwise; differentiable in m and s.

    With `f = m + √s z` the integrand's logarithm is concave in z. Newton's method from a point above its mode (from
    there it comes down without overshooting) finds mode and width, where Gauss–Hermite quadrature is laid.
    """
    m, s, y = torch.broadcast_tensors(mean.double(), variance.double(), counts.double())
    with torch.no_grad():
        root = s.sqrt()
        above = (y.clamp(min=1).log() - m) / torch.where(root > 0, root, torch.ones_like(root))
        z = torch.where((root > 0) & (y > 0), above.clamp(min=0), torch.zeros_like(m))
        for _ in range(_NEWTON):
            rate = (m + root * z).exp()
            step = (root * (y - rate) - z) / (1 + s * rate)
            z = z + step
            if float(step.abs().max()) < 1e-12 * (1 + float(z.abs().max())):
                break
        width = (1 + s * (m + root * z).exp()).rsqrt()
        nodes, log_weights = (part.to(m).reshape(-1, *[1] * m.dim()) for part in _gauss_hermite(_NODES))
        places = z + math.sqrt(2) * width * nodes
        log_volume = log_weights + (math.sqrt(2) * width).log() - 0.5 * places.square() - 0.5 * math.log(2 * math.pi)
    f = m + _safe_root(s) * places
    terms = y * f - f.exp() - torch.lgamma(y + 1) + log_volume
    integral: Tensor = terms.logsumexp(0).to(mean.dtype)
    return integral


def _safe_root(values: Tensor) -> Tensor:
    """√, with derivative 0 at 0."""
    positive = values > 0
    return torch.where(
        positive, torch.where(positive, values, torch.ones_like(values)).sqrt(), torch.zeros_like(values)
    )


def _gauss_hermite(count: int) -> tuple[Tensor, Tensor]:
    """Nodes x of `∫ g(x) dx ≈ Σ_k w_k g(x_k)` and `log w_k`, with g the product of `exp(−x²)` and a polynomial.

    The nodes are the eigenvalues of the Hermite polynomials' recurrence, and `1/w_k` the sum of the squares of the
    first Hermite functions there.
    """
    order = torch.arange(1, count, dtype=torch.float64)
    side = torch.diag((order / 2).sqrt(), 1)
    nodes = torch.linalg.eigvalsh(side + side.T)
    previous, now = torch.zeros_like(nodes), math.pi**-0.25 * (-0.5 * nodes.square()).exp()
    total = now.square()
    for j in range(1, count):
        previous, now = now, nodes * math.sqrt(2 / j) * now - math.sqrt((j - 1) / j) * previous
        total = total + now.square()
    return nodes, -total.log()
