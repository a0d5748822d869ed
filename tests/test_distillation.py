"""Distillation: divergences against torch.distributions, optima against convex solvers, and students that follow."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import kl_divergence
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lapwing import (
    Categorical,
    CustomLikelihood,
    Ensemble,
    FunctionSpace,
    Gaussian,
    Heteroscedastic,
    InputError,
    Laplace,
    Mixture,
    Poisson,
    Prediction,
    distill,
    sample_by_optimization,
)
from lapwing.batches import Inputs
from lapwing.likelihoods import resolve
from lapwing.predictive.divergence import divergence
from tests import networks

ONE = torch.tensor(1.0, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Students start from the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def outputs(samples: int, seed: int, width: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 5, width, generator=generator, dtype=torch.float64)


def decayed(rate: float, steps: int) -> dict[str, Any]:
    """Adam whose learning rate goes to 0 over the epochs."""
    return {
        "optimizer": lambda parameters: torch.optim.Adam(parameters, rate),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    }


@pytest.mark.parametrize("kind", ["classification", "binary", "regression", "heteroscedastic", "poisson"])
def test_divergence_is_that_of_the_distributions(kind: str) -> None:
    likelihood, width = resolve(kind), 4 if kind == "heteroscedastic" else 3
    p, q = (likelihood.predict_samples(outputs(1, seed, width), 0.7 * ONE) for seed in (0, 1))
    expected = kl_divergence(p.distribution(), q.distribution()) if kind in ("classification", "binary") else None
    if expected is None and kind == "poisson":
        expected = kl_divergence(*(torch.distributions.Poisson(one.mean) for one in (p, q)))
    elif expected is None:
        expected = kl_divergence(*(torch.distributions.Normal(one.mean, one.std) for one in (p, q)))
    expected = expected.sum(1) if expected.dim() > 1 else expected
    assert torch.allclose(divergence(p, q), expected, rtol=1e-12)
    assert float(divergence(p, p).abs().max()) < 1e-14


@pytest.mark.parametrize("kind", ["classification", "binary", "regression", "heteroscedastic", "poisson"])
def test_the_gradient_is_linear_in_the_teacher(kind: str) -> None:
    """That of the mixture is the mean of those of its samples, which is why one fresh sample per batch will do."""
    likelihood, width = resolve(kind), 4 if kind == "heteroscedastic" else 3
    drawn, leaf = outputs(6, 0, width), outputs(1, 1, width)[0].requires_grad_()

    def slope(teacher: Tensor) -> Tensor:
        student = likelihood.predict_samples(leaf.unsqueeze(0), ONE)
        (found,) = torch.autograd.grad(divergence(likelihood.predict_samples(teacher, ONE), student).sum(), leaf)
        return found

    single = torch.stack([slope(one.unsqueeze(0)) for one in drawn]).mean(0)
    assert torch.allclose(slope(drawn), single, rtol=1e-10, atol=1e-12)


def test_an_impossible_class_counts_nothing() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], dtype=torch.float64)
    likelihood = resolve("classification")
    p, q = (likelihood.predict_samples(one.unsqueeze(0), ONE) for one in (logits, torch.zeros(1, 3).double()))
    assert float(divergence(p, q)) == pytest.approx(torch.tensor(1.5).log().item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["classification", "binary", "regression", "poisson"])
def test_a_teacher_that_is_not_finite_has_no_finite_divergence(kind: str) -> None:
    likelihood, broken = resolve(kind), outputs(1, 0)
    broken[0, 2, 1] = torch.nan
    p, q = (likelihood.predict_samples(one, ONE) for one in (broken, outputs(1, 1)))
    assert divergence(p, q).isnan().tolist() == [False, False, True, False, False]


def test_counts_that_cannot_be_are_themselves() -> None:
    p = resolve("poisson").predict_samples(torch.full((1, 2, 1), -torch.inf, dtype=torch.float64), ONE)
    assert divergence(p, p).tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["classification", "binary"])
def test_students_may_rule_out_what_their_teacher_rules_out(kind: str) -> None:
    """The gradient is that of the problem without the impossible class."""
    x, student, likelihood = networks.inputs("mlp", 6), networks.Masked().double(), resolve(kind)
    drawn = outputs(1, 0)[0].repeat(2, 1)[:6]
    drawn[:, 2] = -torch.inf

    def loss(columns: int) -> Tensor:
        p, q = (likelihood.predict_samples(one[None, :, :columns], ONE) for one in (drawn, student(x)))
        return divergence(p, q).mean()

    found, expected = (torch.autograd.grad(loss(columns), list(student.parameters())) for columns in (3, 2))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12)

    def teacher(x: Tensor) -> Prediction:
        return likelihood.predict_samples(drawn.unsqueeze(0), ONE)

    learned = distill(teacher, student, [x], 200, likelihood, progress=False, **decayed(0.05, 200))
    assert learned.losses[-1] < learned.losses[0]
    assert all(bool(parameter.isfinite().all()) for parameter in student.parameters())


def posterior(kind: Any = "classification", network: str = "mlp", examples: int = 12) -> Laplace:
    name = kind if isinstance(kind, str) else "regression"
    x, y = networks.inputs(network, examples), networks.targets(name, examples)
    return Laplace(networks.make(network), kind, "kron").fit([(x, y)])


@pytest.mark.parametrize("how", [{}, {"link": "mf1"}, {"method": "sampled", "samples": 30}], ids=str)
def test_a_linear_student_reaches_the_optimum_of_the_convex_problem(how: dict[str, Any]) -> None:
    """The mean gradient of the divergence vanishes, and it is where Newton's method on the same problem ends."""
    la = posterior()
    x = networks.inputs("mlp", 12)
    if "samples" in how:
        how = how | {"samples": la.sample(30, torch.Generator().manual_seed(0))}
    target = la.predict(x, **how).probs
    student = nn.Linear(3, 3).double()
    found = distill(la, student, [x], 600, progress=False, once=True, predict=how, **decayed(0.1, 600))
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    weight = torch.cat([student.weight, student.bias.unsqueeze(1)], 1).detach()
    assert float((design.T @ ((design @ weight.T).softmax(1) - target) / 12).abs().max()) < 1e-4
    exact = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    newton = torch.optim.LBFGS(
        [exact], max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        newton.zero_grad()
        value = -(target * (design @ exact.T).log_softmax(1)).sum(1).mean()
        value.backward()
        return value

    newton.step(loss)
    expected = (design @ exact.T).softmax(1).detach()
    assert float((found.predict(x).probs - expected).abs().max()) < 1e-3
    least = (target * (target.log() - expected.log())).sum(1).mean()
    assert found.losses[-1] == pytest.approx(float(least), abs=1e-5)


@pytest.mark.parametrize("kind", ["classification", "binary", "heteroscedastic", "regression", "poisson"])
def test_a_student_with_room_for_it_becomes_the_teacher(kind: str) -> None:
    """Inputs one-hot, so that a linear student has weights of its own for every input: the optimum is 0."""
    x = torch.eye(5, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 6 if kind == "heteroscedastic" else 3)).double()
    likelihood: Any = {"heteroscedastic": Heteroscedastic(), "regression": Gaussian(0.3), "poisson": Poisson()}.get(
        kind, kind
    )
    y = networks.targets("binary" if kind == "poisson" else kind, 5)
    la = Laplace(model, likelihood, "kron", prior=4.0).fit([(x, y)])
    pairs = kind in ("heteroscedastic", "regression")
    found = distill(
        la, nn.Linear(5, 6 if pairs else 3).double(), [x], 1500, progress=False, once=True, **decayed(0.1, 1500)
    )
    student, teacher = found.predict(x), la.predict(x)
    if pairs or kind == "poisson":
        assert torch.allclose(student.mean, teacher.mean, atol=1e-3, rtol=1e-3)
    if pairs:
        assert torch.allclose(student.variance, teacher.variance, rtol=3e-3)
        assert float(student.epistemic.abs().max()) == 0
    if kind in ("classification", "binary"):
        assert float((student.probs - teacher.probs).abs().max()) < 1e-3
        assert float(student.mutual_information.abs().max()) < 1e-12
    assert found.losses[-1] < 1e-5
    assert found.losses[0] > 0.05


def test_fresh_samples_teach_the_mean_of_all() -> None:
    """Eight draws for every batch, against the mixture of ten thousand; loose by the noise of the last steps."""
    la = posterior().at(prior=0.1)
    x = torch.eye(3, dtype=torch.float64)
    found = distill(
        la, nn.Linear(3, 3).double(), [x], 600, progress=False, generator=torch.Generator().manual_seed(0),
        predict={"method": "sampled", "samples": 8}, **decayed(0.02, 600),
    )  # fmt: skip
    expected = Ensemble.of(la, 10_000, torch.Generator().manual_seed(1)).predict(x).probs
    with torch.no_grad():
        alone = la.model(x).softmax(1)
    assert float((found.predict(x).probs - expected).abs().mean()) < 0.02
    assert float((alone - expected).abs().mean()) > 0.03
    assert sum(found.losses[-100:]) / 100 > 0.05  # the samples differ from their mean


def test_off_the_data_the_student_follows_the_teacher_and_not_the_network() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=generator, dtype=torch.float64) + 2 * torch.tensor(
        [[1.0, 0.0]] * 40 + [[-1.0, 0.0]] * 40
    )
    y = (torch.arange(80) < 40).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.02, weight_decay=1e-3)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    la = Laplace(model, "classification", "kron", prior=0.3).fit([(x, y)])
    far = 6 * torch.randn(200, 2, generator=generator, dtype=torch.float64)
    student = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).double()

    def wider(x: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.cat([x, 6 * torch.randn(80, 2, generator=generator, dtype=torch.float64)])

    found = distill(
        la, student, [(x, y)], 250, augment=wider, generator=generator, progress=False, **decayed(0.02, 250)
    )
    with torch.no_grad():
        plain = la.likelihood.predict_samples(model(far).unsqueeze(0), ONE)
    teacher, own = la.predict(far), found.predict(far)
    gap = float((teacher.entropy - plain.entropy).abs().mean())
    assert gap > 0.1
    assert float((teacher.entropy - own.entropy).abs().mean()) < gap / 5
    assert float(divergence(teacher, own).mean()) < float(divergence(teacher, plain).mean()) / 20


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.head(torch.tanh(x - other))


def test_loaders_of_every_form_say_the_same() -> None:
    x, other, y = networks.inputs("mlp", 6), networks.inputs("mlp", 6, seed=5), networks.targets("classification", 6)
    la = Laplace(Two().double(), "classification", "diag").fit([(x, other, y)])

    def after(batch: Any, unpack: Any = None) -> Tensor:
        torch.manual_seed(0)
        return distill(la, Two().double(), [batch], 3, unpack=unpack, progress=False).predict((x, other)).probs

    expected = after((x, other, y))
    for found in (
        after({"x": x, "other": other}),
        after({"x": x, "other": other, "labels": y}),
        after([x, other], lambda batch: (batch, {}, None)),
    ):
        assert torch.equal(found, expected)
    single = posterior()
    students = [
        distill(single, copy.deepcopy(networks.make("mlp", 3)), [batch], 2, progress=False)
        for batch in (x, (x,), (x, y))
    ]
    assert len({one.losses for one in students}) == 1


def test_augment_and_a_function_see_what_predict_takes() -> None:
    x, other = networks.inputs("mlp", 6), networks.inputs("mlp", 6, seed=5)
    la = Laplace(Two().double(), "classification", "diag").fit([(x, other, networks.targets("classification", 6))])
    single = posterior()

    def seen(batch: Any, unpack: Any = None) -> list[Any]:
        found = []

        def teacher(question: Any) -> Prediction:
            found.append(question)
            return (single if isinstance(question, Tensor) else la).predict(question)

        def augment(question: Any, generator: torch.Generator | None) -> Any:
            found.append(question)
            return question

        student = networks.make("mlp", 1) if batch is x else Two().double()
        distill(teacher, student, [batch], 1, unpack=unpack, augment=augment, progress=False)
        return found

    for one in seen(x, lambda batch: ((batch,), {}, None)):
        assert torch.equal(one, x)
    for one in seen([x, other], lambda batch: (batch, {}, None)):
        assert isinstance(one, tuple)
        assert len(one) == 2
    for one in seen([x, other], lambda batch: ((), {"x": x, "other": other}, None)):
        assert isinstance(one, dict)
        assert list(one) == ["x", "other"]
    for one in seen([x, other], lambda batch: ((x,), {"other": other}, None)):
        assert isinstance(one, Inputs)
        assert list(one.kwargs) == ["other"]


class Listed(Two):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(*pair)


def test_a_pair_that_is_one_argument_stays_one() -> None:
    pair, y = (networks.inputs("mlp", 6), networks.inputs("mlp", 6, seed=5)), networks.targets("classification", 6)
    la = Laplace(Listed().double(), "classification", "diag").fit([(pair, y)])
    student = Listed().double()
    losses = distill(la, student, [(pair, y)], 2, progress=False, predict={"link": "mf1"}).losses
    assert losses[1] < losses[0]


@pytest.mark.parametrize("function", [False, True])
def test_inputs_that_require_gradients_get_none(function: bool) -> None:
    la = posterior()
    x = networks.inputs("mlp", 6).requires_grad_()
    shift = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    losses = []
    for batch in (x, x.detach()):
        torch.manual_seed(0)
        losses.append(
            distill(
                la.predict if function else la, networks.make("mlp", 1), [batch], 3, progress=False,
                augment=lambda x, _: x + shift,
            ).losses
        )  # fmt: skip
    distill(la, networks.make("mlp", 1), [{"input": x}], 1, progress=False)
    assert x.grad is None
    assert shift.grad is None
    assert losses[0] == losses[1]


def test_a_generator_makes_it_reproducible_and_the_teacher_is_untouched() -> None:
    la = posterior(network="batchnorm")
    before = copy.deepcopy(la.model.state_dict())
    la.model.train()
    loader = [networks.inputs("batchnorm", 12).split(6)[0], networks.inputs("batchnorm", 12).split(6)[1]]

    def once(seed: int, **how: Any) -> tuple[float, ...]:
        student = networks.make("mlp", 1)
        student.eval()
        found = distill(
            la, student, loader, 4, generator=torch.Generator().manual_seed(seed), progress=False,
            predict={"method": "sampled", "samples": 2},
            augment=lambda x, g: x + 0.1 * torch.randn(x.shape, generator=g, dtype=x.dtype), **how,
        )  # fmt: skip
        assert not student.training
        assert all(parameter.grad is None for parameter in student.parameters())
        return found.losses

    assert once(0) == once(0)
    assert once(0) != once(1)
    assert once(0, once=True) == once(0, once=True)
    assert la.model.training
    assert all(torch.equal(value, before[name]) for name, value in la.model.state_dict().items())
    assert all(parameter.grad is None for parameter in la.model.parameters())


def test_once_asks_the_teacher_once() -> None:
    la, asked = posterior(), []

    def teacher(x: Tensor) -> Prediction:
        asked.append(len(x))
        return la.predict(x)

    loader = list(networks.inputs("mlp", 12).split(5))
    distill(teacher, networks.make("mlp", 1), loader, 4, once=True, progress=False)
    assert asked == [5, 5, 2]
    distill(teacher, networks.make("mlp", 1), loader, 2, progress=False)
    assert len(asked) == 9


def test_every_kind_of_teacher() -> None:
    la, x = posterior(), networks.inputs("mlp", 6)
    weights = la.sample(4, torch.Generator().manual_seed(0))
    ensemble = Ensemble.of(la, weights)

    def losses(teacher: Any, **how: Any) -> tuple[float, ...]:
        return distill(teacher, networks.make("mlp", 1), [x], 3, progress=False, predict=how).losses

    expected = losses(la, method="sampled", samples=weights)
    for found in (
        losses(ensemble),
        losses(ensemble.predict),
        losses(lambda x: la.predict(x, "sampled", samples=weights)),
    ):
        assert found == pytest.approx(expected, rel=1e-10)
    assert losses(Mixture([la, la])) == pytest.approx(losses(la), rel=1e-10)
    data = [(networks.inputs("mlp", 12), networks.targets("classification", 12))]
    full = Laplace(networks.make("mlp"), "classification", "full").fit(data)
    process = FunctionSpace(networks.make("mlp"), "classification").fit(data)
    assert losses(process, link="mf1") == pytest.approx(losses(full, link="mf1"), rel=1e-8)
    drawn = sample_by_optimization(networks.make("mlp"), "classification", data, samples=4, progress=False)
    for method in ("pushed", "sampled"):
        expected = losses(full, method=method, samples=drawn.samples)
        own = losses(drawn, method="linearized" if method == "pushed" else method)
        assert own == pytest.approx(expected, rel=1e-8)


def test_options_of_predict_are_checked_by_name() -> None:
    la, x = posterior(), networks.inputs("mlp", 6)

    def learn(teacher: Any, **how: Any) -> tuple[float, ...]:
        return distill(teacher, networks.make("mlp", 1), [x], 2, progress=False, predict=how).losses

    with pytest.raises(InputError, match="option of predict: 'sample'. Did you mean 'samples'"):
        learn(la, sample=3)
    with pytest.raises(InputError, match="option of predict: 'joint'"):
        learn(la, joint=True)
    with pytest.raises(InputError, match="option of predict: 'method'.* Supported: none"):
        learn(Ensemble.of(la, 3), method="sampled")
    with pytest.raises(InputError, match="option of predict: 'center'"):
        learn(FunctionSpace(networks.make("mlp"), "classification"), center="newton")
    how = {"method": "sampled", "samples": 2}
    own = [learn(la, generator=torch.Generator().manual_seed(seed), **how) for seed in (0, 0, 1)]
    assert own[0] == own[1] != own[2]


def test_the_learning_rate_may_wait_for_a_plateau() -> None:
    rates = []

    def scheduler(optimizer: torch.optim.Optimizer) -> LRScheduler:
        rates.append(optimizer.param_groups[0])
        return ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=1e9, threshold_mode="abs")

    distill(posterior(), networks.make("mlp", 1), [networks.inputs("mlp", 6)], 4, scheduler=scheduler, progress=False)
    assert rates[0]["lr"] == pytest.approx(1e-3 / 8, rel=1e-12)  # no loss is better by that much than the first


def test_the_student_ignores_what_its_teacher_ignores() -> None:
    x, y = networks.inputs("mlp", 6), networks.targets("classification", 6)
    la = Laplace(networks.make("mlp"), Categorical(ignore_index=-1), "diag").fit([(x, y)])
    found = distill(la, networks.make("mlp", 1), [x], 1, progress=False)
    y[0] = -1
    assert float(found.predict(x).log_prob(y)[0]) == 0


class Square(nn.Module):
    """As many positions as classes, so that shapes do not tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).unflatten(1, (3, 3))


def test_classes_lie_along_the_same_dimension() -> None:
    x, y = networks.inputs("mlp", 6), torch.arange(18).reshape(6, 3) % 3
    la = Laplace(Square().double(), Categorical(dim=1), "diag").fit([(x, y)])
    for wrong in (Categorical(dim=2), "classification"):
        with pytest.raises(InputError, match=r"distill\(likelihood=Categorical\(dim=1\)\)"):
            distill(la, Square().double(), [x], 1, wrong, progress=False)
    losses = []
    for right in (None, Categorical(dim=1), Categorical(dim=-2)):
        torch.manual_seed(0)
        losses.append(distill(la, Square().double(), [x], 2, right, progress=False).losses)
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("kind", ["classification", "binary", "regression", "poisson"])
def test_once_keeps_no_more_than_it_needs(kind: str) -> None:
    x, y = networks.inputs("mlp", 6), networks.targets("binary" if kind == "poisson" else kind, 6)
    la = Laplace(networks.make("mlp"), kind, "diag").fit([(x, y)])
    weights, said, alive = la.sample(4), [], []

    def teacher(x: Tensor) -> Prediction:
        found = la.predict(x, "sampled", samples=weights)
        said.append(weakref.ref(found))
        return found

    student = nn.Linear(3, 6 if kind == "regression" else 3).double()
    student.register_forward_pre_hook(lambda *_: alive.append(sum(one() is not None for one in said)))
    losses = []
    for once in (True, False):
        torch.manual_seed(0)
        student.reset_parameters()
        losses.append(distill(teacher, student, [x], 3, once=once, progress=False).losses)
    assert alive[:3] == [0, 0, 0]
    assert losses[0] == losses[1]


class Cubic(CustomLikelihood):
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -(outputs - targets).square().sum(1)


def test_bad_input() -> None:
    la, x = posterior(), networks.inputs("mlp", 6)
    student = networks.make("mlp", 1)
    with pytest.raises(InputError, match=r"epochs=.* at least 1, got 0"):
        distill(la, student, [x], 0)
    with pytest.raises(InputError, match="copy.deepcopy"):
        distill(la, la.model, [x], 1)
    with pytest.raises(InputError, match="copy.deepcopy"):
        distill(Mixture([posterior(), la]), nn.Sequential(la.model), [x], 1)
    for teacher in (la.predict, Mixture([posterior(), la]).predict):
        with pytest.raises(InputError, match="copy.deepcopy"):
            distill(teacher, la.model, [x], 1)
    drawn = sample_by_optimization(networks.make("mlp"), "classification", [(x, networks.targets("classification", 6))])
    for one in (drawn, drawn.predict):
        with pytest.raises(InputError, match="copy.deepcopy"):
            distill(one, drawn.ggn.model, [x], 1)
    with pytest.raises(InputError, match="yielded nothing in epoch 0"):
        distill(la, student, [], 1)
    with pytest.raises(InputError, match="yielded nothing in epoch 1"):
        distill(la, student, iter([x]), 2)
    with pytest.raises(InputError, match="put method into it"):
        distill(la.predict, student, [x], 1, predict={"method": "sampled"})
    with pytest.raises(InputError, match=r"\[6, 3\] and \[6, 2\] do not compare"):
        distill(la, nn.Linear(3, 2).double(), [x], 1)
    with pytest.raises(InputError, match="between a ClassPrediction and a RegressionPrediction"):
        distill(la, student, [x], 1, "regression")
    with pytest.raises(InputError, match="two outputs per target"):
        distill(posterior("regression"), student, [x], 1)
    with pytest.raises(InputError, match="likelihood='regression'"):
        distill(posterior("regression"), nn.Linear(3, 6).double(), [x], 1, "regression")
    with pytest.raises(InputError, match="no closed form"):
        distill(Laplace(networks.make("mlp"), Cubic()).fit([(x, x)]), student, [x], 1)


def test_a_loss_that_is_not_finite_names_its_cause() -> None:
    la, x = posterior(), networks.inputs("mlp", 6)
    broken: Any = networks.make("mlp", 1)
    nn.init.constant_(broken[0].bias, torch.nan)
    with pytest.raises(InputError, match=r"No step was taken yet: the student's outputs are not finite"):
        distill(la, broken, [x], 1, progress=False)
    with pytest.raises(InputError, match="or rule out what the teacher does not"):
        distill(la, networks.Masked().double(), [x], 1, progress=False)

    def teacher(x: Tensor) -> Prediction:
        return la.likelihood.predict_samples(x.unsqueeze(0).log(), ONE)

    for loader in ([-x.abs()], [x.abs(), -x.abs()]):  # at once, and after a step
        with pytest.raises(InputError, match="The teacher's prediction is not finite"):
            distill(teacher, networks.make("mlp", 1), loader, 1, progress=False)
    with pytest.raises(InputError, match="lower learning rate"):
        distill(
            la, nn.Linear(3, 3).double(), [x], 9, progress=False,
            optimizer=lambda weights: torch.optim.SGD(weights, 1e308),
        )  # fmt: skip


def test_the_mean_alone() -> None:
    la = posterior(Gaussian(0.2))
    x = torch.eye(3, dtype=torch.float64)
    found = distill(
        la, nn.Linear(3, 3).double(), [x], 800, Gaussian(0.5), progress=False, once=True, **decayed(0.1, 800)
    )
    assert torch.allclose(found.predict(x).mean, la.predict(x).mean, atol=1e-3)
    assert float((found.predict(x).variance - 0.5).abs().max()) == 0
