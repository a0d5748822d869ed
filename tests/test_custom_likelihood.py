"""A likelihood from its log-probability alone, against the built-in ones and autograd."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import NegativeBinomial, StudentT

from lapwing import Categorical, CustomLikelihood, FileError, InputError, Laplace, Poisson
from tests import oracles


class Counts(CustomLikelihood):
    """The Poisson likelihood again."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.distributions.Poisson(outputs.exp()).log_prob(targets).sum(-1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.poisson(outputs.exp(), generator=generator)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def variance(self, outputs: Tensor) -> Tensor:
        return outputs.exp()


class Classes(CustomLikelihood):
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@dataclass
class Overdispersed(CustomLikelihood):
    """Negative binomial with `total` failures and logits f: concave in f."""

    total: float = 3.0
    name = "negative binomial"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return NegativeBinomial(self.total, logits=outputs).log_prob(targets).sum(-1)


class HeavyTails(CustomLikelihood):
    """Student's t: not concave where |y − f| > √dof."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return StudentT(3.0, outputs).log_prob(targets).sum(-1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def counts(*shape: int) -> Tensor:
    return torch.randint(6, shape, generator=torch.Generator().manual_seed(1)).double()


def network(outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


@pytest.mark.parametrize("case", ["counts", "classes", "negative binomial"])
def test_columns_are_a_root_of_autograd_s_hessian(case: str) -> None:
    likelihood: CustomLikelihood = {"counts": Counts(), "classes": Classes(), "negative binomial": Overdispersed()}[
        case
    ]
    f = drawn(5, 3)
    y = torch.tensor([0, 2, 1, 1, 0]) if case == "classes" else counts(5, 3)
    likelihood.check(f, y, "here")
    expected = oracles.output_hessians(likelihood, f, y)
    columns = likelihood.hessian_columns(f, y)
    found = columns.part(0, columns.count)
    torch.testing.assert_close(torch.einsum("knc,knd->ncd", found, found), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(likelihood.hessian_sum(f, y), expected.sum(0), rtol=1e-10, atol=1e-12)
    diagonal = expected.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(likelihood.hessian_diagonal(f, y), diagonal, rtol=1e-10, atol=1e-12)
    generator, count = torch.Generator().manual_seed(0), 20_000
    many = likelihood.signed_columns(f.repeat(count, 1), y.repeat(count, *[1] * (y.dim() - 1)), generator).part(0, 1)
    products = torch.einsum("snc,snd->sncd", *[many.reshape(count, 5, 3)] * 2)
    assert bool(((products.mean(0) - expected).abs() <= 5 * products.std(0) / count**0.5 + 1e-12).all())


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "full", "lowrank"])
def test_the_same_posterior_as_the_built_in_likelihoods(structure: str) -> None:
    x = drawn(12, 2, seed=2)
    pairs: list[tuple[CustomLikelihood, Any, int, Tensor]] = [
        (Counts(), Poisson(), 2, counts(12, 2)),
        (Classes(), Categorical(), 3, torch.randint(3, (12,), generator=torch.Generator().manual_seed(3))),
    ]
    for own, built_in, outputs, y in pairs:
        model = network(outputs)
        las = [Laplace(model, one, structure, rank=22).fit([(x[:7], y[:7]), (x[7:], y[7:])]) for one in (own, built_in)]
        torch.testing.assert_close(las[0].log_evidence(), las[1].log_evidence(), rtol=1e-9, atol=0)
        torch.testing.assert_close(las[0].latent(x).covariance, las[1].latent(x).covariance, rtol=1e-7, atol=1e-9)


def test_predictions_are_mixtures_over_draws() -> None:
    model, x, y = network(2), drawn(12, 2, seed=2), counts(12, 2)
    own = Laplace(model, Counts()).fit([(x, y)])
    built_in = Laplace(model, "poisson").fit([(x, y)])
    for options in ({"link": "mc"}, {"method": "sampled"}):
        found, expected = (
            la.predict(x, samples=40, generator=torch.Generator().manual_seed(0), **options)  # type: ignore[arg-type]
            for la in (own, built_in)
        )
        torch.testing.assert_close(found.log_prob(y), expected.log_prob(y))
        for name in ("mean", "aleatoric", "epistemic", "variance", "std"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    silent = Laplace(model, Overdispersed()).fit([(x, y)]).predict(x)
    with pytest.raises(InputError, match=r"has no method mean\(outputs\)"):
        silent.mean  # noqa: B018


def test_sampled_gradients_come_from_the_user_s_sampler() -> None:
    f, generator, count = drawn(2, 3), torch.Generator().manual_seed(0), 3000
    gradients = Counts().sampled_gradients(f, counts(2, 3), count, generator)
    products = torch.einsum("snc,snd->sncd", gradients, gradients)
    expected = torch.diag_embed(f.exp())
    assert bool(((products.mean(0) - expected).abs() <= 5 * products.std(0) / count**0.5).all())
    with pytest.raises(InputError, match=r"no method sample\(outputs, generator\)"):
        Laplace(network(2), Overdispersed(), curvature="fisher").fit([(drawn(3, 2), counts(3, 2))])


def test_an_indefinite_hessian_is_refused_by_example() -> None:
    model, x = network(1), drawn(4, 2)
    near = oracles.evaluate(model, x)
    y = near.clone()
    la = Laplace(model, HeavyTails()).fit([(x, y)])
    assert bool(torch.isfinite(la.log_evidence()))
    y[2] += 5
    with pytest.raises(InputError, match=r"HeavyTails likelihood is not positive semi-definite at example 2 of"):
        Laplace(model, HeavyTails()).fit([(x, y)])
    for structure in ("diag", "kron"):
        with pytest.raises(InputError, match="example 2"):
            Laplace(model, HeavyTails(), structure, weights="last_layer").fit([(x, y)])
    assert Laplace(model, HeavyTails(), curvature="empirical").fit([(x, y)]).fitted


def test_files_need_the_likelihood_again(tmp_path: Path) -> None:
    model, x, y = network(2), drawn(12, 2, seed=2), counts(12, 2)
    la = Laplace(model, Overdispersed(2.0)).fit([(x, y)])
    la.save(tmp_path / "own.safetensors")
    with pytest.raises(FileError, match="'negative binomial'; pass it"):
        Laplace.load(tmp_path / "own.safetensors", model)
    loaded = Laplace.load(tmp_path / "own.safetensors", model, likelihood=Overdispersed(2.0))
    torch.testing.assert_close(loaded.log_evidence(), la.log_evidence())
    with pytest.raises(InputError, match="different likelihoods"):
        la.merge(Laplace(model, Overdispersed(3.0)).fit([(x, y)]))


def test_bad_input_says_what_and_how() -> None:
    class Total(CustomLikelihood):
        def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return -(outputs - targets).square().sum()

    class Mixing(CustomLikelihood):
        def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return -(outputs - outputs.mean(0) - targets).square().sum(-1)

    class Constant(CustomLikelihood):
        def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return targets.sum(-1)

    class Infinite(CustomLikelihood):
        def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return outputs.sum(-1) / 0

    class Nothing(CustomLikelihood):
        pass

    f, y = drawn(3, 2), drawn(3, 2, seed=1)
    cases: list[tuple[CustomLikelihood, str]] = [
        (Total(), "sum over outputs, not over examples"), (Mixing(), "mixes examples"),
        (Constant(), "does not depend on the outputs"), (Infinite(), "NaN or inf"),
    ]  # fmt: skip
    for likelihood, message in cases:
        with pytest.raises(InputError, match=message):
            likelihood.check(f, y, "Batch 0")
    with pytest.raises(NotImplementedError, match="Nothing needs a method log_prob"):
        Nothing().check(f, y, "Batch 0")
    with pytest.raises(InputError, match="Supported: mc"):
        Laplace(network(2), Counts()).fit([(f, counts(3, 2))]).predict(f, link="probit")
