"""BALD and its batch version: against every joint outcome written out, and against log-determinants."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lapwing import Bernoulli, Categorical, Gaussian, InputError, Laplace, Poisson
from lapwing.decisions import bald, batch_bald, batch_information
from lapwing.predictive.joint import JointPrediction, JointSamples
from lapwing.predictive.prediction import ClassPrediction, Prediction, RegressionPrediction
from tests import networks

ONE = torch.tensor(1.0, dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def samples(s: int, n: int, c: int, seed: int = 0) -> JointSamples:
    outputs = 2 * torch.randn(s, n, c, generator=generator(seed), dtype=torch.float64)
    return JointSamples(outputs, Categorical(), ONE)


def enumerated(probs: Tensor, chosen: list[int]) -> float:
    """`H[y_S] − E_s H[y_S|s]`, a term for every joint outcome: probs `[S, N, C]`."""
    total = 0.0
    for outcome in itertools.product(range(probs.shape[2]), repeat=len(chosen)):
        each = torch.stack([probs[:, n, c] for n, c in zip(chosen, outcome, strict=True)]).prod(0)  # p(outcome|s)
        total += float(torch.special.entr(each.mean()) - torch.special.entr(each).mean())
    return total


def gaussian(n: int, d: int = 1, seed: int = 0, noise: float = 0.3) -> JointPrediction:
    root = torch.randn(n * d, 6, generator=generator(seed), dtype=torch.float64)
    shape = (n, d) if d > 1 else (n, 1)
    return JointPrediction(torch.zeros(shape).double(), root @ root.T, Gaussian(noise), torch.tensor(noise).double())


def log_det(joint: JointPrediction, chosen: list[int]) -> float:
    """`½ log det(I + K_SS/σ²)`, dense."""
    d = joint.mean.shape[1]
    rows = torch.tensor([n * d + k for n in chosen for k in range(d)])
    matrix = joint.covariance[rows][:, rows] / joint.noise
    return 0.5 * float(torch.logdet(torch.eye(len(rows)).double() + matrix))


def greedy(information: Any, n: int, size: int) -> tuple[list[int], list[float]]:
    """Try every candidate at every step."""
    chosen: list[int] = []
    values = []
    for _ in range(size):
        found = {i: information([*chosen, i]) for i in range(n) if i not in chosen}
        chosen.append(max(found, key=lambda i: found[i]))
        values.append(found[chosen[-1]])
    return chosen, values


@pytest.mark.parametrize("classes", [2, 3])
def test_classes_against_every_joint_outcome(classes: int) -> None:
    joint = samples(5, 6, classes)
    probs = joint.outputs.softmax(2)
    found = batch_bald(joint, 4)
    chosen, values = greedy(lambda these: enumerated(probs, these), 6, 4)
    assert found.indices.tolist() == chosen
    assert found.information.tolist() == pytest.approx(values, rel=1e-12)
    for these in ([3], [0, 5], [2, 4, 1], [5, 4, 3, 2]):
        assert float(batch_information(joint, these)) == pytest.approx(enumerated(probs, these), rel=1e-12)


def test_yes_or_no_against_every_joint_outcome() -> None:
    logits = 2 * torch.randn(6, 5, generator=generator(), dtype=torch.float64)
    joint = JointSamples(logits, Bernoulli(), ONE)
    probs = torch.stack([(-logits).sigmoid(), logits.sigmoid()], 2)
    chosen, values = greedy(lambda these: enumerated(probs, these), 5, 3)
    found = batch_bald(joint, 3)
    assert found.indices.tolist() == chosen
    assert found.information.tolist() == pytest.approx(values, rel=1e-12)
    column = JointSamples(logits.unsqueeze(2), Bernoulli(), ONE)
    assert torch.equal(batch_bald(column, 3).indices, found.indices)


def test_the_first_choice_is_balds() -> None:
    joint = samples(8, 20, 3)
    alone = bald(joint.marginals)
    found = batch_bald(joint, 1)
    assert int(found.indices[0]) == int(alone.argmax())
    assert float(found.information[0]) == pytest.approx(float(alone.max()), rel=1e-12)
    each = [float(batch_information(joint, [n])) for n in range(20)]
    assert each == pytest.approx(alone.tolist(), rel=1e-10)
    for d in (1, 2):
        other = gaussian(7, d)
        torch.testing.assert_close(
            bald(other.marginals),
            torch.tensor([log_det(other, [n]) for n in range(7)], dtype=torch.float64),
            rtol=1e-12,
            atol=0,
        )
        assert float(batch_bald(other, 1).information[0]) == pytest.approx(float(bald(other.marginals).max()))


@pytest.mark.parametrize("d", [1, 2])
def test_numbers_against_the_log_determinant(d: int) -> None:
    joint = gaussian(8, d)
    found = batch_bald(joint, 5)
    chosen, values = greedy(lambda these: log_det(joint, these), 8, 5)
    assert found.indices.tolist() == chosen
    assert found.information.tolist() == pytest.approx(values, rel=1e-10)


@pytest.mark.parametrize("d", [1, 2])
def test_numbers_in_single_precision(d: int) -> None:
    """Variances in float32 are those numbers in float64: nothing is rounded on the way."""
    known, noise = 1e-4 * torch.rand(7, d, generator=generator()), 0.1 + torch.rand(7, d, generator=generator(1))
    expected = 0.5 * torch.log1p(known.double() / noise.double()).sum(1)
    prediction = RegressionPrediction(torch.zeros(7, d), noise, known)
    torch.testing.assert_close(bald(prediction), expected, rtol=1e-14, atol=0)
    # With a covariance it is log det(I + R), whose rounding is that of 1 whatever R is.
    together = RegressionPrediction(torch.zeros(7, d), noise, known, torch.diag_embed(known))
    torch.testing.assert_close(bald(together), expected, rtol=0, atol=1e-15)
    double = gaussian(8, d)
    single = JointPrediction(double.mean.float(), double.covariance.float(), Gaussian(0.3), double.noise.float())
    rounded = JointPrediction(double.mean, single.covariance.double(), Gaussian(0.3), single.noise.double())
    found, same = batch_bald(single, 5), batch_bald(rounded, 5)
    assert torch.equal(found.indices, same.indices)
    torch.testing.assert_close(found.information, same.information, rtol=1e-13, atol=0)


def test_rounding_above_the_noise_is_named() -> None:
    """41 weights and outputs 10⁷ times as variable as their noise: after 41 targets float32 has nothing left."""
    predicted = {}
    for dtype in (torch.float32, torch.float64):
        draw = generator()
        x, y, pool = (torch.randn(n, k, generator=draw).to(dtype) for n, k in ((2, 3), (2, 1), (60, 3)))
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 2)
        la = Laplace(model, Gaussian(1e-4), "full", prior=1e-2).fit([(x, y)])
        predicted[dtype] = la.predict(3 * pool, joint=True)
    with pytest.raises(InputError, match=r"rounding exceeds the noise. Use the model in float64 \(model.double\(\)\)"):
        batch_bald(predicted[torch.float32], 60)
    found: Any = predicted[torch.float64]
    assert float(batch_bald(found, 60).information[-1]) == pytest.approx(log_det(found, list(range(60))), rel=1e-8)


def test_the_order_does_not_matter() -> None:
    numbers, labels = gaussian(6, 2), samples(5, 6, 3)
    for joint in (numbers, labels):
        found = [float(batch_information(joint, order)) for order in itertools.permutations([0, 2, 5])]
        assert found == pytest.approx([found[0]] * 6, rel=1e-10)
    assert float(batch_information(numbers, [0, 2, 5])) == pytest.approx(log_det(numbers, [0, 2, 5]), rel=1e-10)


def test_submodular_and_near_the_best_set() -> None:
    """At least 1 − 1/e of the best of all sets; a set tells no more than the sum of its parts."""
    for joint, value in (
        (gaussian(9, 1, 3), lambda these: log_det(gaussian(9, 1, 3), these)),
        (samples(6, 7, 2, 4), lambda these: enumerated(samples(6, 7, 2, 4).outputs.softmax(2), these)),
    ):
        n = len(joint.mean)
        best = max(value(list(these)) for these in itertools.combinations(range(n), 3))
        found = batch_bald(joint, 3)
        assert (1 - 1 / math.e) * best <= float(found.information[-1]) <= best * (1 + 1e-12)
        assert float(found.information[-1]) <= float(bald(joint.marginals)[found.indices].sum())
        gains = found.information.diff(prepend=torch.zeros(1).double())
        assert bool((gains.diff() <= 1e-12).all())


def test_twins_are_not_both_chosen() -> None:
    """The two most informative candidates are one and the same: top-k BALD takes both, a batch does not."""
    joint = samples(40, 10, 3)
    order = bald(joint.marginals).argsort(descending=True)
    twins = JointSamples(torch.cat([joint.outputs[:, order[:1]], joint.outputs[:, order]], 1), Categorical(), ONE)
    assert sorted(bald(twins.marginals).topk(2).indices.tolist()) == [0, 1]
    assert sorted(batch_bald(twins, 2).indices.tolist()) != [0, 1]
    # Numbers with little noise: the twin tells next to nothing, ½ log((1 + 2r)/(1 + r)) ≤ ½ log 2.
    root = torch.randn(6, 8, generator=generator(), dtype=torch.float64)
    root[0] = root[1] = 3 * root[0]
    numbers = JointPrediction(torch.zeros(6, 1).double(), root @ root.T, Gaussian(0.01), torch.tensor(0.01).double())
    assert sorted(bald(numbers.marginals).topk(2).indices.tolist()) == [0, 1]
    found = batch_bald(numbers, 5).indices.tolist()
    assert (0 in found) != (1 in found)


def test_drawn_outcomes_agree_with_all_of_them() -> None:
    """3⁶ = 729 outcomes, of which 100 at a time are drawn: within 5 standard errors, without bias."""
    joint, these = samples(12, 8, 3), [0, 1, 2, 3, 4, 5]
    exact = float(batch_information(joint, these))
    assert exact == pytest.approx(enumerated(joint.outputs.softmax(2), these), rel=1e-10)
    draw = generator()
    drawn = torch.stack([
        batch_information(joint, these, max_outcomes=100, generator=draw) for _ in range(400)
    ])  # fmt: skip
    assert float(drawn.std()) > 0
    assert float(drawn.mean()) == pytest.approx(exact, abs=5 * float(drawn.std()) / math.sqrt(400))
    assert float(drawn.std()) < 0.05 * exact
    again = [batch_bald(joint, 6, max_outcomes=20, generator=generator(3)) for _ in range(2)]
    assert torch.equal(again[0].information, again[1].information)
    # No more than log S can be told, however large the batch; with every outcome certain it is just that.
    assert float(drawn.max()) < math.log(12)
    certain = JointSamples(1000 * torch.eye(4).double().unsqueeze(1).expand(4, 30, 4), Categorical(), ONE)
    assert batch_bald(certain, 30, max_outcomes=50).information.tolist() == pytest.approx([math.log(4)] * 30)


def test_long_batches_do_not_underflow() -> None:
    """The probability of 400 labels together is far below the smallest number."""
    joint = samples(3, 400, 10)
    found = batch_bald(joint, 400, max_outcomes=60, generator=generator())
    assert bool(torch.isfinite(found.information).all())
    # All of log 3 is told soon, and nothing after it, not even by the noise of 60 drawn outcomes.
    assert float(found.information[-1]) == pytest.approx(math.log(3), abs=0.03)
    assert float(found.information[-1] - found.information[40]) < 1e-9
    assert sorted(found.indices.tolist()) == list(range(400))


def test_many_candidates_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = samples(5, 23, 3)
    whole = batch_bald(joint, 4)
    monkeypatch.setattr("lapwing.decisions.sampled_batch._HELD", 100)
    parts = batch_bald(joint, 4)
    assert torch.equal(whole.indices, parts.indices)
    torch.testing.assert_close(whole.information, parts.information, rtol=1e-12, atol=0)


class Entropies(TorchDispatchMode):
    """Of how many numbers at a time `−p log p` is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.special_entr.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_entropies_of_the_samples_are_taken_once() -> None:
    """S·N·C numbers before the first choice; then those of 1, 3 and 9 outcomes."""
    with Entropies() as seen:
        batch_bald(samples(5, 23, 3), 3)
    assert seen.sizes == [5 * 23 * 3, 23 * 3, 3 * 23 * 3, 9 * 23 * 3]


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_from_a_posterior(likelihood: str) -> None:
    x, y = networks.inputs("mlp", 8), networks.targets(likelihood, 8)
    chosen: Any = Gaussian(0.2) if likelihood == "regression" else likelihood
    la = Laplace(networks.make("mlp"), chosen, "full", prior=3.0).fit([(x, y)])
    pool = networks.inputs("mlp", 12, seed=5)
    joint: Any = la.predict(pool, joint=True)
    if likelihood == "regression":
        found = batch_bald(joint, 3)
        torch.testing.assert_close(bald(la.predict(pool)), bald(joint.marginals), rtol=1e-9, atol=0)
        these = [int(i) for i in found.indices]
        assert float(found.information[-1]) == pytest.approx(log_det(joint, these), rel=1e-9)
        with pytest.raises(InputError, match=r"closed form: la.predict\(x, joint=True\)"):
            batch_bald(la.predict(pool, method="pushed", joint=True, samples=4), 2)
        return
    drawn = JointSamples(joint.sample(50, generator()), joint.likelihood, joint.noise)
    found = batch_bald(joint, 3, samples=50, generator=generator())
    assert torch.equal(found.indices, batch_bald(drawn, 3).indices)
    pushed = la.predict(pool, method="pushed", joint=True, samples=50, generator=generator())
    assert len(set(batch_bald(pushed, 3).indices.tolist())) == 3


def test_bald_of_several_outputs_is_a_sum_or_a_determinant() -> None:
    logits = torch.randn(4, 5, 3, 2, generator=generator(), dtype=torch.float64)
    prediction = ClassPrediction.mixture(logits.log_softmax(2), 1)
    torch.testing.assert_close(bald(prediction), prediction.mutual_information.sum(1))
    known, noise = torch.rand(2, 5, 2, generator=generator(), dtype=torch.float64) + 0.1
    apart = RegressionPrediction(known, noise, known)
    torch.testing.assert_close(bald(apart), 0.5 * torch.log1p(known / noise).sum(1))
    covariance = torch.diag_embed(known) + 0.05
    together = RegressionPrediction(known, noise, covariance.diagonal(dim1=1, dim2=2), covariance)
    eye = torch.eye(2).double()
    expected = torch.stack([
        0.5 * torch.logdet(eye + one / two.unsqueeze(1)) for one, two in zip(covariance, noise, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(bald(together), expected)
    from lapwing.predictive.components import Components

    means = torch.tensor([[-50.0], [50.0]]).double()
    mixed = RegressionPrediction(means.mean(0), torch.ones(1).double(), means.var(0, correction=0),
                                 components=Components.equal(means, torch.ones(1).double()))  # fmt: skip
    assert float(bald(mixed)) == pytest.approx(math.log(2), rel=1e-9)  # which of the two it is


def test_bad_input() -> None:
    joint = samples(3, 4, 2)
    for size in (0, 5, -1):
        with pytest.raises(InputError, match=f"A batch of {size} cannot be chosen from 4"):
            batch_bald(joint, size)
    with pytest.raises(InputError, match="max_outcomes must be at least 1"):
        batch_bald(joint, 2, max_outcomes=0)
    wrong: list[Any] = [
        [], [4], [-1], [1, 1], [0.7, 1], torch.tensor([0.7]), torch.tensor([True, False]), torch.tensor([[0], [1]]),
        torch.zeros(0, dtype=torch.long),
    ]  # fmt: skip
    for these in wrong:
        with pytest.raises(InputError, match="whole numbers .b. that name different ones of the 4 candidates"):
            batch_information(joint, these)
    assert torch.equal(batch_information(joint, torch.tensor([2, 0])), batch_information(joint, [2, 0]))
    with pytest.raises(InputError, match=r"candidates together: la.predict\(x, joint=True\), not a ClassPrediction"):
        batch_bald(joint.marginals, 2)
    with pytest.raises(InputError, match="give it prediction.marginals"):
        bald(joint)
    with pytest.raises(InputError, match="not known"):
        bald(Prediction())
    with pytest.raises(InputError, match="one label per candidate"):
        batch_bald(JointSamples(torch.zeros(3, 4, 2, 5), Categorical(dim=1), ONE), 2)
    with pytest.raises(InputError, match="one label per candidate"):
        batch_bald(JointSamples(torch.zeros(3, 4, 2), Bernoulli(), ONE), 2)
    with pytest.raises(InputError, match="poisson likelihood has no batch_bald"):
        batch_bald(JointPrediction(torch.zeros(2, 1), torch.eye(2), Poisson(), ONE), 1)
    with pytest.raises(InputError, match="hold NaN"):
        batch_bald(JointSamples(torch.full((2, 3, 2), math.nan), Categorical(), ONE), 1)
    with pytest.raises(InputError, match="hold NaN"):
        batch_information(JointSamples(torch.full((2, 3, 2), math.nan), Categorical(), ONE), [0, 1])
    unknown = JointPrediction(torch.zeros(3, 1), torch.full((3, 3), math.nan), Gaussian(1.0), ONE)
    with pytest.raises(InputError, match="or holds NaN"):
        batch_bald(unknown, 1)
    with pytest.raises(InputError, match="or holds NaN"):
        batch_information(unknown, [0, 1])
