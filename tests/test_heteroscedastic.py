"""Heteroscedastic likelihoods against autograd, torch's own distributions, dense algebra and Monte Carlo."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from lapwing import Heteroscedastic, IndefiniteWarning, InputError, Laplace, MeanVariance, train_with_evidence
from lapwing.likelihoods.base import GaussianOutputs
from lapwing.likelihoods.pairs import PairLikelihood
from lapwing.products import GGN
from tests import oracles

NOISE = torch.ones((), dtype=torch.float64)
HEADS = ("softplus", "exp")
SHAPES = ((5, 2), (4, 6), (3, 2, 4))


def naive(head: str = "softplus") -> MeanVariance:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IndefiniteWarning)
        return MeanVariance(head)


def likelihoods() -> list[PairLikelihood]:
    return [*(Heteroscedastic(head) for head in HEADS), *(naive(head) for head in HEADS)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def targets_for(outputs: Tensor, seed: int = 1) -> Tensor:
    return drawn(*outputs.shape[:-1], outputs.shape[-1] // 2, seed=seed)


def natural_log_prob(eta: Tensor, y: Tensor) -> Tensor:
    """The exponential family written out: `y η1 + y² η2 + η1²/4η2 + ½ log(−2η2) − ½ log 2π`, from `eta: [2]`."""
    return (
        y * eta[0] + y**2 * eta[1] + eta[0] ** 2 / (4 * eta[1])
        + 0.5 * (-2 * eta[1]).log() - 0.5 * math.log(2 * math.pi)
    )  # fmt: skip


def head_map(head: str, f: Tensor) -> Tensor:
    """η of one pair f: `[2]`."""
    precision = f[1].exp() if head == "exp" else torch.log1p(f[1].exp())
    return torch.stack([f[0], -0.5 * precision])


def outer(columns: Tensor) -> Tensor:
    """`Σ_k s_k s_kᵀ` per example, from `[K, N, *output]`."""
    flat = columns.reshape(len(columns), columns.shape[1], -1)
    return torch.einsum("knc,knd->ncd", flat, flat)


def test_gradient_and_hessian_in_natural_parameters() -> None:
    """What the design states in η, by autograd; the root that the code takes through the head is that Hessian's."""
    for f, y in zip(2 * drawn(20, 2), drawn(20, seed=1), strict=True):
        eta = head_map("softplus", f)
        mean, variance = -eta[0] / (2 * eta[1]), -1 / (2 * eta[1])
        gradient = torch.func.grad(natural_log_prob)(eta, y)
        torch.testing.assert_close(gradient, torch.stack([y - mean, y**2 - mean**2 - variance]), rtol=1e-10, atol=1e-12)
        hessian = -torch.func.hessian(natural_log_prob)(eta, y)  # type: ignore[operator]
        cross = 2 * mean * variance
        expected = torch.stack([variance, cross, cross, 4 * mean**2 * variance + 2 * variance**2]).reshape(2, 2)
        torch.testing.assert_close(hessian, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
def test_columns_are_the_hessian_in_natural_parameters_through_the_head(head: str, shape: tuple[int, ...]) -> None:
    likelihood, outputs = Heteroscedastic(head), 2 * drawn(*shape)
    y = targets_for(outputs)
    columns = likelihood.hessian_columns(outputs, y)
    assert columns.count == outputs[0].numel()
    found = outer(columns.part(0, columns.count))
    size, half = shape[-1], shape[-1] // 2
    expected = torch.zeros_like(found)
    for n in range(shape[0]):
        rows = outputs[n].reshape(-1, size)
        for position, row in enumerate(rows):
            for d in range(half):
                pair = torch.stack([row[d], row[half + d]])
                eta = head_map(head, pair)
                jacobian = torch.func.jacrev(lambda f: head_map(head, f))(pair)
                target = y[n].reshape(-1, half)[position, d]
                inner = -torch.func.hessian(natural_log_prob)(eta, target)  # type: ignore[operator]
                index = torch.tensor([position * size + d, position * size + half + d])
                expected[n, index.unsqueeze(1), index] = jacobian.T @ inner @ jacobian
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    parts = torch.cat([columns.part(i, min(i + 3, columns.count)) for i in range(0, columns.count, 3)])
    torch.testing.assert_close(parts, columns.part(0, columns.count), rtol=0, atol=0)


@pytest.mark.parametrize("likelihood", likelihoods(), ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_forms_of_the_hessian_agree(likelihood: PairLikelihood, shape: tuple[int, ...]) -> None:
    outputs = drawn(*shape)
    y = targets_for(outputs)
    columns = likelihood.hessian_columns(outputs, y)
    dense = outer(columns.part(0, columns.count))
    torch.testing.assert_close(likelihood.hessian_sum(outputs, y), dense.sum(0))
    diagonal = dense.diagonal(dim1=1, dim2=2).reshape(shape)
    torch.testing.assert_close(likelihood.hessian_diagonal(outputs, y), diagonal)
    vector = drawn(*shape, seed=3)
    product = torch.einsum("ncd,nd->nc", dense, vector.flatten(1)).reshape(shape)
    torch.testing.assert_close(likelihood.hessian_product(outputs, vector), product)


@pytest.mark.parametrize("likelihood", likelihoods(), ids=repr)
def test_random_columns_have_the_hessian_as_mean(likelihood: PairLikelihood) -> None:
    """Signed columns, gradients at sampled targets, and the Hessian averaged over sampled targets."""
    outputs, generator, count = drawn(2, 4) / 2, torch.Generator().manual_seed(5), 40_000
    y = targets_for(outputs)
    columns = likelihood.hessian_columns(outputs, y)
    expected = outer(columns.part(0, columns.count))
    many = outputs.repeat(count, 1)
    for vectors in (
        likelihood.signed_columns(many, targets_for(many), generator).part(0, 1)[0],
        likelihood.sampled_gradients(outputs, y, count, generator).reshape(-1, 4),
    ):
        products = torch.einsum("snc,snd->sncd", *[vectors.reshape(count, 2, 4)] * 2)
        error = products.std(0) / math.sqrt(count)
        assert bool(((products.mean(0) - expected).abs() <= 5 * error + 1e-12).all())
    mean, variance = likelihood.moments(outputs)
    few = 4000
    sampled = Normal(mean, variance.sqrt()).sample((few,)).flatten(0, 1)
    repeated = outputs.repeat(few, 1)
    hessians = oracles.output_hessians(likelihood, repeated[:200], sampled[:200])  # the true ones, that depend on y
    assert hessians.shape == (200, 4, 4)
    leaf = repeated.requires_grad_()
    (slope,) = torch.autograd.grad(-likelihood.log_prob(leaf, sampled).sum(), leaf, create_graph=True)
    rows = [torch.autograd.grad(slope[:, d].sum(), leaf, retain_graph=True)[0] for d in range(4)]
    true = torch.stack(rows, 1)
    torch.testing.assert_close(true[:200], hessians)
    true = true.reshape(few, 2, 4, 4)
    assert bool(((true.mean(0) - expected).abs() <= 5 * true.std(0) / math.sqrt(few) + 1e-12).all())


@pytest.mark.parametrize("likelihood", likelihoods(), ids=repr)
def test_log_prob_and_sampled_gradients_are_those_of_the_normal(likelihood: PairLikelihood) -> None:
    outputs = drawn(6, 4)
    y = targets_for(outputs)
    f1, f2 = outputs[:, :2], outputs[:, 2:]
    positive = f2.exp() if likelihood.config()["head"] == "exp" else torch.log1p(f2.exp())
    if isinstance(likelihood, MeanVariance):
        expected = Normal(f1, positive.sqrt())
    else:
        expected = Normal(f1 / positive, positive.rsqrt())
    torch.testing.assert_close(likelihood.log_prob(outputs, y), expected.log_prob(y).sum(1), rtol=1e-12, atol=0)
    assert likelihood.statistics(outputs, y).log_likelihood == pytest.approx(float(expected.log_prob(y).sum()))
    noise = torch.randn(1, 6, 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    drawn_y = expected.loc + expected.scale * noise[0]
    found = likelihood.sampled_gradients(outputs, y, 1, torch.Generator().manual_seed(7))[0]
    expected_gradient = oracles.output_gradients(likelihood, outputs, drawn_y)
    torch.testing.assert_close(found, expected_gradient, rtol=1e-10, atol=1e-12)


def network(outputs: int = 2) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    return model, drawn(12, 3), drawn(12, outputs // 2, seed=1)


def natural_jacobians(la: Laplace, x: Tensor) -> Tensor:
    """Of η in the weights: `[N, 2, p]`, through the softplus."""
    jacobian = oracles.packed_jacobian(la, x)
    f2 = oracles.evaluate(la.model, x)[:, 1]
    return torch.stack([jacobian[:, 0], -0.5 * torch.sigmoid(f2).unsqueeze(1) * jacobian[:, 1]], 1)


def test_posterior_and_closed_predictives_against_dense_algebra() -> None:
    model, x, y = network()
    la = Laplace(model, "heteroscedastic", "full", prior=0.7).fit(list(zip(x.split(5), y.split(5), strict=True)))
    f = oracles.evaluate(model, x)
    variance = 1 / nn.functional.softplus(f[:, 1])
    mean = f[:, 0] * variance
    j = natural_jacobians(la, x)
    cross = 2 * mean * variance
    inner = torch.stack([variance, cross, cross, 4 * mean**2 * variance + 2 * variance**2], 1).reshape(-1, 2, 2)
    precision = torch.einsum("ncp,ncd,ndq->pq", j, inner, j) + 0.7 * torch.eye(j.shape[2], dtype=torch.float64)
    covariance = torch.linalg.inv(precision)
    rows = {"known": variance.unsqueeze(1) * j[:, 0]}
    rows["delta"] = rows["known"] + (2 * mean * variance).unsqueeze(1) * j[:, 1]
    for link, row in rows.items():
        found = la.predict(x, link=link)
        epistemic = torch.einsum("np,pq,nq->n", row, covariance, row)
        torch.testing.assert_close(found.mean[:, 0], mean, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.aleatoric[:, 0], variance, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.epistemic[:, 0], epistemic, rtol=1e-8, atol=1e-12)
        expected = Normal(mean, (variance + epistemic).sqrt())
        torch.testing.assert_close(found.log_prob(y), expected.log_prob(y[:, 0]), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(found.std.square(), found.variance)
        low, high = found.interval(0.9)
        inside = expected.cdf(high[:, 0]) - expected.cdf(low[:, 0])
        torch.testing.assert_close(inside, torch.full_like(inside, 0.9))
    torch.testing.assert_close(la.predict(x).epistemic, la.predict(x, link="delta").epistemic)  # the default
    evidence = (
        Normal(mean, variance.sqrt()).log_prob(y[:, 0]).sum()
        - 0.35 * sum(p.square().sum() for p in model.parameters())
        + 0.5 * len(precision) * math.log(0.7) - 0.5 * torch.logdet(precision)
    )  # fmt: skip
    torch.testing.assert_close(la.log_evidence(), evidence.detach(), rtol=1e-9, atol=0)


def test_products_with_the_ggn_leave_the_head_s_curvature_out() -> None:
    model, x, y = network()
    la = Laplace(model, "heteroscedastic", "full").fit([(x, y)])
    dense = la.curvature.blocks[0].accumulator.matrix()
    operator = GGN(model, "heteroscedastic", [(x, y)], progress=False)
    found = operator.matmul(torch.eye(operator.size, dtype=torch.float64))
    assert float(torch.linalg.eigvalsh(found)[0]) > -1e-10
    torch.testing.assert_close(torch.linalg.eigvalsh(found), torch.linalg.eigvalsh(dense), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("likelihood", likelihoods(), ids=repr)
def test_predictives_against_a_million_draws(likelihood: PairLikelihood) -> None:
    """The mixture is exact up to Monte Carlo error; the closed forms are, for small variances of f, to first order."""
    mean = torch.tensor([[0.8, -0.5, 0.6, 0.9]], dtype=torch.float64)
    root = drawn(4, 4, seed=2)
    generator, count = torch.Generator().manual_seed(3), 1_000_000
    y = torch.tensor([[0.3, -0.2]], dtype=torch.float64)
    for size, links in ((0.3, ("mc",)), (1e-3, ("mc", "delta"))):
        covariance = size**2 * (root @ root.T).unsqueeze(0)
        f = GaussianOutputs(mean, covariance.diagonal(dim1=1, dim2=2), covariance)
        noise = torch.randn(count, 4, generator=generator, dtype=torch.float64)
        draws = mean + size * noise @ root.T
        means, variances = likelihood.moments(draws)
        density = Normal(means, variances.sqrt()).log_prob(y).sum(1).exp()
        for link in links:
            found: Any = likelihood.predict_gaussian(f, NOISE, link, 20_000, generator)
            slack = 6 / math.sqrt(20_000) if link == "mc" else 0.01  # of the found draws, or of second order
            spread = means.std(0)
            assert bool(((found.mean[0] - means.mean(0)).abs() <= slack * spread + size**2 * (link == "delta")).all())
            torch.testing.assert_close(found.epistemic[0], means.var(0), rtol=2 * slack, atol=0)
            bound = slack * variances.std(0) + 10 * size**2 * (link == "delta")
            assert bool(((found.aleatoric[0] - variances.mean(0)).abs() <= bound).all())
            error = slack * float(density.std()) + 10 * size**2 * (link == "delta")
            assert abs(float(found.log_prob(y).exp()) - float(density.mean())) <= error
            torch.testing.assert_close(found.variance, found.aleatoric + found.epistemic)


@pytest.mark.parametrize("head", ["softplus", "exp"])
def test_the_predictive_of_a_known_noise_against_a_million_draws(head: str) -> None:
    """With the second natural parameters held, the mean is linear in the first: exact at any variance of f."""
    likelihood = Heteroscedastic(head)
    mean = torch.tensor([[0.8, -0.5, 0.6, 0.9]], dtype=torch.float64)
    root = drawn(4, 4, seed=2)
    covariance = (root @ root.T).unsqueeze(0)
    f = GaussianOutputs(mean, covariance.diagonal(dim1=1, dim2=2), covariance)
    generator, count = torch.Generator().manual_seed(3), 1_000_000
    draws = mean + torch.randn(count, 4, generator=generator, dtype=torch.float64) @ root.T
    draws[:, 2:] = mean[:, 2:]
    means, variances = likelihood.moments(draws)
    found: Any = likelihood.predict_gaussian(f, NOISE, "known", 1, generator)
    slack = 5 / math.sqrt(count)
    assert bool(((found.mean[0] - means.mean(0)).abs() <= slack * means.std(0)).all())
    torch.testing.assert_close(found.epistemic[0], means.var(0), rtol=math.sqrt(2) * slack, atol=0)
    torch.testing.assert_close(found.aleatoric[0], variances[0])
    for y in (torch.tensor([[0.3, -0.2]], dtype=torch.float64), torch.tensor([[2.0, 1.0]], dtype=torch.float64)):
        density = Normal(means, variances.sqrt()).log_prob(y).sum(1).exp()
        error = slack * float(density.std())
        assert abs(float(found.log_prob(y).exp()) - float(density.mean())) <= error


def test_several_targets_share_one_joint_prediction() -> None:
    model, x, y = network(4)
    la = Laplace(model, Heteroscedastic("exp"), "full").fit([(x, y)])
    prediction: Any = la.predict(x)
    latent = la.latent(x)
    for n in range(len(x)):
        f = latent.mean[n]

        def means(f: Tensor) -> Tensor:
            return f[:2] * (-f[2:]).exp()

        jacobian: Tensor = torch.func.jacrev(means)(f)
        torch.testing.assert_close(prediction.covariance[n], jacobian @ latent.covariance[n] @ jacobian.T)
    assert prediction.log_prob(y).shape == (12,)
    assert prediction.distribution().sample((3,)).shape == (3, 12, 2)
    mixed: Any = la.predict(x, link="mc", samples=50, generator=torch.Generator().manual_seed(0))
    low, high = mixed.interval(0.5)
    assert bool((low < high).all())
    again = la.predict(x, link="mc", samples=50, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mixed.mean, again.mean, rtol=0, atol=0)


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "block", "full", "lowrank"])
def test_every_structure_and_curvature_takes_it(structure: str) -> None:
    model, x, y = network()
    kinds = ("ggn",) if structure == "lowrank" else ("ggn", "rademacher", "fisher", "empirical")
    for kind in kinds:
        la = Laplace(model, "heteroscedastic", structure, kind, rank=20)
        la.fit([(x, y)], generator=torch.Generator().manual_seed(0))
        la.tune_prior(groups="layer")
        assert la.noise is None
        assert bool(torch.isfinite(la.predict(x).log_prob(y)).all())


def test_last_layer_needs_no_backward_pass_and_is_the_same() -> None:
    model, x, y = network(4)
    block = Laplace(model, "heteroscedastic", "block", weights="last_layer").fit([(x, y)])
    diagonal = Laplace(model, "heteroscedastic", "diag", weights="last_layer").fit([(x, y)])
    torch.testing.assert_close(
        diagonal.curvature.blocks[0].accumulator.matrix(),
        torch.diag(block.curvature.blocks[0].accumulator.matrix().diagonal()),
    )
    kron = Laplace(model, "heteroscedastic", "kron", weights="last_layer").fit([(x[:1], y[:1])])
    exact = Laplace(model, "heteroscedastic", "block", weights="last_layer").fit([(x[:1], y[:1])])
    torch.testing.assert_close(
        kron.curvature.blocks[0].accumulator.matrix(), exact.curvature.blocks[0].accumulator.matrix()
    )


def wavy(seed: int = 4) -> tuple[Tensor, Tensor]:
    """A sine whose noise grows with x from 0.1 to 0.5: inputs and targets `[N, 1]`."""
    x = torch.linspace(-1, 1, 300, dtype=torch.float64).unsqueeze(1)
    return x, torch.sin(3 * x) + (0.3 + 0.2 * x) * drawn(300, 1, seed=seed)


def nearly_the_truth(la: Laplace) -> bool:
    """New targets are about as probable as under the truth, more than under the true mean with constant noise."""
    x, y = wavy(seed=9)
    mean = torch.sin(3 * x)
    truth = Normal(mean, 0.3 + 0.2 * x).log_prob(y).mean()
    constant = Normal(mean, (y - mean).std()).log_prob(y).mean()
    found = la.predict(x).log_prob(y).mean()
    assert float(truth - constant) > 0.15
    return bool((found > truth - 0.1) & (found > constant + 0.05))


def test_training_with_the_evidence_finds_the_noise(tmp_path: Path) -> None:
    x, y = wavy()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 2)).double()
        trained = train_with_evidence(
            model, [(x, y)], "heteroscedastic", 600, groups="layer", every=100, curvature="ggn", progress=False,
            optimizer=lambda parameters: torch.optim.Adam(parameters, 0.05),
        )  # fmt: skip
    assert trained.la is not None
    assert nearly_the_truth(trained.la)
    trained.la.save(tmp_path / "posterior.safetensors")
    loaded = Laplace.load(tmp_path / "posterior.safetensors", model)
    assert loaded.likelihood == Heteroscedastic("softplus")
    torch.testing.assert_close(loaded.predict(x).variance, trained.la.predict(x).variance)


def test_plain_training_with_the_log_probability() -> None:
    x, y = wavy()
    likelihood = Heteroscedastic("exp")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(600):
        optimizer.zero_grad()
        (-likelihood.log_prob(model(x), y).mean()).backward()
        optimizer.step()
    la = Laplace(model, likelihood).fit([(x, y)]).tune_prior()
    assert nearly_the_truth(la)
    far = la.predict(torch.tensor([[3.0]], dtype=torch.float64))
    assert float(far.epistemic) > float(la.predict(x).epistemic.mean())


def test_the_naive_parametrization_warns_and_its_hessian_is_refused() -> None:
    with pytest.warns(IndefiniteWarning, match="Use Heteroscedastic"):
        likelihood = MeanVariance()
    outputs, y = torch.tensor([[0.0, 0.0]], dtype=torch.float64), torch.tensor([[3.0]], dtype=torch.float64)
    assert float(torch.linalg.eigvalsh(oracles.output_hessians(likelihood, outputs, y))[0, 0]) < 0
    assert float(torch.linalg.eigvalsh(likelihood.hessian_sum(outputs, y))[0]) > 0
    model, x, y = network()
    with pytest.raises(InputError, match="indefinite"):
        Laplace(model, likelihood, "full", "hessian", prior=1e-3).fit([(x, 5 * y)])
    found = Laplace(model, likelihood, "full").fit([(x, y)])
    assert bool(torch.isfinite(found.predict(x).log_prob(y)).all())


def test_bad_input_says_what_and_how() -> None:
    model, x, y = network()
    with pytest.raises(InputError, match="Supported: exp, softplus"):
        Heteroscedastic("relu")
    with pytest.raises(InputError, match=r"Use y\.unsqueeze\(-1\)"):
        Laplace(model, "heteroscedastic").fit([(x, y[:, 0])])
    with pytest.raises(InputError, match="give the model 4 outputs"):
        Laplace(model, "heteroscedastic").fit([(x, y.repeat(1, 2))])
    with pytest.raises(InputError, match="first the D outputs f1"):
        Laplace(nn.Linear(3, 3).double(), "heteroscedastic").fit([(x, y)])
    with pytest.raises(InputError, match="floating point"):
        Laplace(model, "heteroscedastic").fit([(x, y.long())])
    la = Laplace(model, "heteroscedastic").fit([(x, y)])
    with pytest.raises(InputError, match="Supported: delta, known, mc"):
        la.predict(x, link="probit")
    with pytest.raises(InputError, match="no noise to set"):
        la.at(noise=0.1)
    extreme = torch.tensor([[1.0, -1000.0]], dtype=torch.float64)
    with pytest.raises(InputError, match="over- or underflows"):
        Heteroscedastic().check(extreme, torch.zeros(1, 1, dtype=torch.float64), "here")
    wide = nn.Linear(3, 80).double()
    many = Laplace(wide, "heteroscedastic").fit([(x, drawn(12, 40))])
    with pytest.raises(InputError, match="link='mc'"):
        many.predict(x)
    known, latent = many.predict(x, link="known"), many.latent(x, diagonal=True)
    variance = 1 / nn.functional.softplus(latent.mean[:, 40:])
    torch.testing.assert_close(known.epistemic, variance.square() * latent.covariance[:, :40])
    assert many.predict(x, link="mc", samples=5).mean.shape == (12, 40)
