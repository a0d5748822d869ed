"""The posterior in function space: all points are the full posterior in weight space; subsets lie above it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import Categorical, FunctionSpace, Gaussian, GaussianPrior, InputError, Laplace, NotFittedError
from lapwing.subset import choose_subset
from tests import networks, oracles

PRIOR = {"*bias": 0.6, "*": 1.7}


def pair(
    network: str, likelihood: Any, prior: Any = PRIOR, temperature: float = 1.3, **options: Any
) -> tuple[FunctionSpace, Laplace]:
    """All points, and the same in weight space."""
    kind = likelihood if isinstance(likelihood, str) else "regression"
    model, x, y = networks.make(network), networks.inputs(network, 7), networks.targets(kind, 7)
    data = list(zip(x.split(3), y.split(3), strict=True))
    process = FunctionSpace(model, likelihood, prior=prior, temperature=temperature, **options).fit(data)
    return process, Laplace(model, likelihood, "full", prior=prior, temperature=temperature).fit(data)


OPTIONS: list[dict[str, Any]] = [{}, {"joint": True}, {"diagonal": True}]
LIKELIHOODS = ["classification", "binary", Gaussian(0.3), Gaussian([0.5, 1.0, 2.0])]


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=["classification", "binary", "gaussian", "ratios"])
@pytest.mark.parametrize(
    "network", ["mlp", "cnn", "grouped-cnn", "tied", "tied-embedding", "batchnorm", "attention", "gru"]
)
def test_all_points_are_the_full_posterior(network: str, likelihood: Any) -> None:
    process, la = pair(network, likelihood)
    x = networks.inputs(network, 4, seed=9)
    for options in OPTIONS:
        found, expected = process.latent(x, **options), la.latent(x, **options)
        torch.testing.assert_close(found.mean, expected.mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-8, atol=1e-8)
    assert float(process.log_evidence()) == pytest.approx(float(la.log_evidence()), rel=1e-9)
    assert process.effective_dimension() == pytest.approx(la.effective_dimension(), rel=1e-8)
    ours, theirs = process.predict(x), la.predict(x)
    name = "mean" if isinstance(likelihood, Gaussian) else "probs"
    torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-8, atol=1e-8)


def data(network: str = "mlp", count: int = 12, kind: str = "classification") -> list[tuple[Tensor, Tensor]]:
    x, y = networks.inputs(network, count), networks.targets(kind, count)
    return list(zip(x.split(5), y.split(5), strict=True))


def smallest_eigenvalue(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh(0.5 * (matrix + matrix.T))[0])


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_all_points_below_a_subset_below_the_prior(network: str, likelihood: str, independent: bool) -> None:
    """As matrices over all outputs of all inputs, those of the subset among them; subsets of subsets likewise."""
    model, batches = networks.make(network), data(network, kind=likelihood)
    x = torch.cat([networks.inputs(network, 3, seed=9), batches[0][0][:3]])
    sizes = (12, 7, 3, 1)
    drawn = [
        FunctionSpace(model, likelihood, size, prior=0.2, independent=independent).fit(
            batches, torch.Generator().manual_seed(4)
        )
        for size in sizes
    ]
    found = [process.latent(x, joint=True).covariance for process in drawn]
    found.append(drawn[0].prior_latent(x, joint=True).covariance)
    assert smallest_eigenvalue(found[0]) > -1e-12
    for lower, upper in itertools.pairwise(found):
        assert smallest_eigenvalue(upper - lower) > -1e-11
        assert float((upper - lower).trace()) > 1e-3


@pytest.mark.parametrize("independent", [False, True])
def test_far_from_the_subset_the_prior_is_kept_exactly(independent: bool) -> None:
    """Inputs in the other half space: no unit of theirs is active at any point of the subset, and there is no bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 6, bias=False), nn.ReLU(), nn.Linear(6, 2, bias=False)).double()
    x = torch.rand(8, 1, dtype=torch.float64) + 0.1
    process = FunctionSpace(model, Gaussian(0.01), 5, prior=0.7, independent=independent)
    process.fit([(x, torch.randn(8, 2, dtype=torch.float64))], torch.Generator().manual_seed(0))
    assert torch.equal(process.kernel(-x, x), torch.zeros(16, 16, dtype=torch.float64))
    for options in OPTIONS:
        assert torch.equal(process.latent(-x, **options).covariance, process.prior_latent(-x, **options).covariance)
    assert bool((process.latent(x).covariance < process.prior_latent(x).covariance).diagonal(dim1=1, dim2=2).all())


def test_the_kernel_is_the_jacobian_with_itself() -> None:
    for network in ("mlp", "cnn", "attention", "gru"):
        process, la = pair(network, "classification")
        x, z = networks.inputs(network, 3, seed=9), networks.inputs(network, 2, seed=8)
        rows, others = (oracles.packed_jacobian(la, one).flatten(0, 1) for one in (x, z))
        sizes = {name: parameter.shape for name, parameter in process.model.named_parameters()}
        precisions = GaussianPrior(PRIOR).precisions(sizes)
        packed = la.curvature.blocks[0].pack({n: precisions[n].expand(size) for n, size in sizes.items()})
        torch.testing.assert_close(process.kernel(x, z), rows / packed @ others.T, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(process.kernel(x), rows / packed @ rows.T, rtol=1e-10, atol=1e-10)


def test_a_precision_of_every_element() -> None:
    generator = torch.Generator().manual_seed(3)
    for network in ("mlp", "cnn"):
        model = networks.make(network)
        prior = {
            name: torch.rand(value.shape, generator=generator, dtype=torch.float64) + 0.5
            for name, value in model.named_parameters()
        }
        process, la = pair(network, "classification", prior=prior)
        x = networks.inputs(network, 3, seed=9)
        torch.testing.assert_close(process.latent(x).covariance, la.latent(x).covariance, rtol=1e-8, atol=1e-10)


def test_a_subset_is_a_fit_on_its_examples() -> None:
    """The points that the generator drew, found by their inputs, alone give the same posterior."""
    batches = data()
    process = FunctionSpace(networks.make("mlp"), "classification", 5).fit(batches, torch.Generator().manual_seed(1))
    assert process._points is not None
    assert (process._points.count, process._points.seen) == (5, 12)
    chosen = [(chunk.inputs.args[0], chunk.targets) for chunk in process._points.chunks]
    x, y = (torch.cat([batch[i] for batch in batches]) for i in range(2))
    for inputs, targets in chosen:
        places = (x.unsqueeze(0) == inputs.unsqueeze(1)).all(2).nonzero()[:, 1]
        assert torch.equal(y[places], targets)
    full = Laplace(process.model, "classification", "full").fit(chosen)
    test = networks.inputs("mlp", 4, seed=9)
    torch.testing.assert_close(process.latent(test).covariance, full.latent(test).covariance, rtol=1e-8, atol=1e-10)


def test_subsets_are_uniform() -> None:
    """Every example is drawn equally often, whatever its batch."""
    loader = [(torch.arange(5), torch.zeros(5)), (torch.arange(5, 7), torch.zeros(2))]
    counts, generator, rounds = torch.zeros(7), torch.Generator().manual_seed(0), 2000
    for _ in range(rounds):
        chunks, seen = choose_subset(loader, 3, torch.device("cpu"), None, generator, False)
        assert (sum(len(chunk.targets) for chunk in chunks), seen) == (3, 7)
        for chunk in chunks:
            counts[chunk.inputs.args[0]] += 1
    expected = rounds * 3 / 7
    assert float((counts - expected).abs().max()) < 4 * (expected * 4 / 7) ** 0.5


def test_independent_outputs_are_separate_processes() -> None:
    """With Gaussian noise and outputs that share no weight, nothing is lost; else each is a process of its own."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    linear = nn.Linear(3, 2).double()
    test = torch.randn(4, 3).double()
    both = [FunctionSpace(linear, Gaussian(0.3), independent=flag).fit([(x, y)]) for flag in (False, True)]
    torch.testing.assert_close(both[1].latent(test).covariance, both[0].latent(test).covariance)
    torch.testing.assert_close(both[1].latent(test, joint=True).covariance, both[0].latent(test, joint=True).covariance)
    shared = networks.make("mlp")
    targets = networks.targets("classification", 6)
    process = FunctionSpace(shared, "classification", independent=True, prior=0.8).fit([(x, targets)])
    la = Laplace(shared, "classification", "full").fit([(x, targets)])
    rows, others = oracles.packed_jacobian(la, x), oracles.packed_jacobian(la, test)
    probs = oracles.evaluate(shared, x).softmax(1)
    for c in range(3):
        precision = 0.8 * torch.eye(rows.shape[2], dtype=torch.float64)
        precision += torch.einsum("np,n,nq->pq", rows[:, c], probs[:, c] * (1 - probs[:, c]), rows[:, c])
        expected = torch.einsum("np,pq,nq->n", others[:, c], torch.linalg.inv(precision), others[:, c])
        torch.testing.assert_close(
            process.latent(test, diagonal=True).covariance[:, c], expected, rtol=1e-9, atol=1e-10
        )
    torch.testing.assert_close(process.predict(test).probs.sum(1), torch.ones(4, dtype=torch.float64))


def test_other_hyperparameters_need_no_data() -> None:
    process, la = pair("mlp", Gaussian(0.3))
    x = networks.inputs("mlp", 4, seed=9)
    for change in ({"prior": 3.0}, {"temperature": 0.4}, {"noise": 2.0}):
        other, expected = process.at(**change), la.at(**change)  # type: ignore[arg-type]
        torch.testing.assert_close(other.latent(x).covariance, expected.latent(x).covariance, rtol=1e-8, atol=1e-10)
        assert float(other.log_evidence()) == pytest.approx(float(expected.log_evidence()), rel=1e-9)
        torch.testing.assert_close(other.predict(x).variance, expected.predict(x).variance, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(process.latent(x).covariance, la.latent(x).covariance, rtol=1e-8, atol=1e-10)


def test_points_that_do_not_fit_into_the_budget_are_read_again() -> None:
    x = networks.inputs("cnn", 4, seed=9)
    whole, _ = pair("cnn", "classification")
    small, _ = pair("cnn", "classification", memory_budget=20_000)
    assert whole._points is not None
    assert small._points is not None
    assert whole._points.held is not None
    assert small._points.held is None
    for options in OPTIONS:
        torch.testing.assert_close(small.latent(x, **options).covariance, whole.latent(x, **options).covariance)


def test_last_layer_and_weights_by_name() -> None:
    for weights in ("last_layer", ["0.*"]):
        model, batches = networks.make("mlp"), data()
        process = FunctionSpace(model, "classification", weights=weights).fit(batches)
        la = Laplace(model, "classification", "full", weights=weights).fit(batches)
        x = networks.inputs("mlp", 4, seed=9)
        torch.testing.assert_close(process.latent(x).covariance, la.latent(x).covariance, rtol=1e-8, atol=1e-10)


def test_differentiable_in_x() -> None:
    process = FunctionSpace(networks.make("mlp"), "classification", 5).fit(data(), torch.Generator().manual_seed(0))
    x = networks.inputs("mlp", 2, seed=9).requires_grad_()

    def score(x: Tensor) -> Tensor:
        return process.predict(x).probs[:, 0].sum() + process.latent(x, diagonal=True).covariance.sum()

    assert torch.autograd.gradcheck(score, x, atol=1e-6)


def test_single_precision_keeps_covariances_positive() -> None:
    """Points of the subset, with so little noise that their variance is far below the prior's rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1))
    x = torch.randn(30, 2)
    process = FunctionSpace(model, Gaussian(1e-7), prior=0.1).fit([(x, torch.randn(30, 1))])
    variance = process.latent(x, diagonal=True).covariance
    assert bool((variance > 0).all())
    assert bool((variance <= 1.01e-7).all())


def test_the_model_comes_back_and_bad_input_is_named() -> None:
    model, batches = networks.make("batchnorm").train(), data("batchnorm")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    process = FunctionSpace(model, "classification", 4).fit(batches)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    x = networks.inputs("batchnorm", 2)
    with pytest.raises(InputError, match="exclude each other"):
        process.latent(x, joint=True, diagonal=True)
    with pytest.raises(InputError, match="all 12 examples"):
        process.log_evidence()
    with pytest.raises(InputError, match="at least 1"):
        process.predict(x, samples=0)
    with pytest.raises(InputError, match="at least 1 example"):
        FunctionSpace(model, "classification", 0)
    with pytest.raises(NotFittedError):
        FunctionSpace(model, "classification").latent(x)
    with pytest.raises(InputError, match="max_columns=2"):
        FunctionSpace(model, "classification", max_columns=2).fit(batches)
    with pytest.raises(InputError, match="empty"):
        FunctionSpace(model, "classification").fit([])
    with pytest.raises(InputError, match="Batch 1"):
        FunctionSpace(model, Categorical()).fit([batches[0], (batches[1][0], batches[1][1] + 7)])
    with torch.no_grad():
        model.head.weight += 1  # type: ignore[operator, union-attr]
    with pytest.raises(InputError, match="changed since the fit"):
        process.predict(x)


@pytest.mark.parametrize("link", ["mf2", "mc"])
def test_links_see_the_covariance_of_many_outputs(link: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 70).double(), torch.randn(8, 3, dtype=torch.float64)
    given = [(x, torch.randint(70, (8,)))]
    process = FunctionSpace(model, "classification", prior=0.5).fit(given)
    la = Laplace(model, "classification", "full", prior=0.5).fit(given)
    ours, theirs = (
        one.predict(x, link=link, samples=50, generator=torch.Generator().manual_seed(1)) for one in (process, la)
    )
    torch.testing.assert_close(ours.probs, theirs.probs, rtol=1e-6, atol=1e-8)
