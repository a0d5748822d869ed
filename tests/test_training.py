"""Training with the evidence in the loop: the right loss, the right hyperparameters, the same result after Ctrl-C."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader, TensorDataset

from lapwing import (
    Bernoulli,
    Categorical,
    EvidenceInTheLoop,
    FactoredDamping,
    FileError,
    Gaussian,
    GaussianPrior,
    InputError,
    Laplace,
    TuningWarning,
    train_with_evidence,
)
from lapwing.training import Epoch, Training
from tests import networks

# ------------------------------------------------------------------------------------- empirical Bayes


def regression(seed: int, examples: int = 60, features: int = 4) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, features, generator=source, dtype=torch.float64)
    weight = 1.5 * torch.randn(features, 1, generator=source, dtype=torch.float64)
    return x, x @ weight + 0.5 * torch.randn(examples, 1, generator=source, dtype=torch.float64)


def empirical_bayes(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """λ, σ² and the log marginal at the maximum of `N(y; 0, XXᵀ/λ + σ²I)`, from the dense covariance."""
    logs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [logs], max_iter=1000, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
    )
    eye, zero = torch.eye(len(x), dtype=torch.float64), torch.zeros(len(x), dtype=torch.float64)

    def loss() -> Tensor:
        optimizer.zero_grad()
        covariance = x @ x.T / logs[0].exp() + logs[1].exp() * eye
        value = -torch.distributions.MultivariateNormal(zero, covariance).log_prob(y[:, 0])
        value.backward()
        return value

    optimizer.step(loss)
    precision, noise = logs.detach().exp().tolist()
    return precision, noise, -loss().item()


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("seed", [0, 1])
def test_linear_regression_finds_the_precision_and_noise_of_empirical_bayes(structure: str, seed: int) -> None:
    # 300 steps of gradient descent and 30 alternations contract the error to about 1e-8.
    x, y = regression(seed)
    precision, noise, log_marginal = empirical_bayes(x, y)
    trained = train_with_evidence(
        nn.Linear(4, 1, bias=False).double(),
        [(x, y)],
        "regression",
        epochs=300,
        structure=structure,
        curvature="ggn",
        every=10,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    last = trained.history[-1]
    assert last.precisions is not None
    assert last.noise is not None
    assert last.precisions["all"] == pytest.approx(precision, rel=1e-6)
    assert last.noise == pytest.approx(noise, rel=1e-6)
    assert last.log_evidence == pytest.approx(log_marginal, rel=1e-10)
    assert trained.la is not None
    assert float(trained.la.log_evidence()) == pytest.approx(log_marginal, rel=1e-10)
    ridge = torch.linalg.solve(x.T @ x + noise * precision * torch.eye(4, dtype=torch.float64), x.T @ y)
    torch.testing.assert_close(trained.model.get_parameter("weight").detach().T, ridge, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------- loss and regularizer


def positions(n: int) -> Tensor:
    """Classes at two positions, some of them not observed."""
    drawn = torch.randint(3, (n, 2), generator=torch.Generator().manual_seed(4))
    drawn[0, 1] = -100
    return drawn


def binary(n: int) -> Tensor:
    return networks.targets("binary", n)


CASES: dict[str, tuple[Any, Callable[[int], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    # likelihood, targets, the sum of log p by torch.distributions
    "classification": (
        Categorical(),
        lambda n: networks.targets("classification", n),
        lambda f, y: torch.distributions.Categorical(logits=f).log_prob(y).sum(),
    ),
    "positions": (
        Categorical(),
        positions,
        lambda f, y: torch.distributions.Categorical(logits=f[y >= 0]).log_prob(y[y >= 0]).sum(),
    ),
    "binary": (Bernoulli(), binary, lambda f, y: torch.distributions.Bernoulli(logits=f).log_prob(y).sum()),
    "regression": (
        Gaussian(noise=0.3),
        lambda n: networks.targets("regression", n),
        lambda f, y: torch.distributions.Normal(f, torch.tensor(0.3, dtype=torch.float64).sqrt()).log_prob(y).sum(),
    ),
    "ratios": (
        Gaussian(noise=[0.5, 1.0, 2.0]),
        lambda n: networks.targets("regression", n),
        lambda f, y: torch.distributions.Normal(f, torch.tensor([0.5, 1.0, 2.0]).double().sqrt()).log_prob(y).sum(),
    ),
}


def problem(case: str) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    if case == "positions":
        head = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)))
    else:
        head = nn.Sequential(nn.Linear(4, 3))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), head)
    model.double()
    return model, networks.inputs("mlp", 6), CASES[case][1](6)


@pytest.mark.parametrize("tempered", ["likelihood", "both"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_regularizer_are_the_negative_log_posterior_of_one_example(case: str, tempered: str) -> None:
    likelihood, _, log_prob = CASES[case]
    model, x, y = problem(case)
    prior = GaussianPrior({"0.weight": 0.7, "*": 2.0}, mean={"0.bias": 0.3})
    temperature = 1.7
    evidence = EvidenceInTheLoop(model, likelihood, [(x, y)], prior=prior, temperature=temperature, tempered=tempered)
    log_prior = torch.zeros(())
    for name, parameter in model.named_parameters():
        mean = torch.full_like(parameter, 0.3 if name == "0.bias" else 0.0)
        precision = torch.full_like(parameter, 0.7 if name == "0.weight" else 2.0)
        log_prior = log_prior + torch.distributions.Normal(mean, precision.rsqrt()).log_prob(parameter).sum()
    weight = temperature if tempered == "both" else 1.0
    log_likelihood = log_prob(model(x), y)
    objective = -(temperature * log_likelihood + weight * log_prior) / 6
    expected = torch.autograd.grad(objective, list(model.parameters()))
    parts = [evidence.loss(model(x[i : i + 2]), y[i : i + 2]) for i in (0, 2, 4)]
    found = torch.autograd.grad(torch.stack(parts).mean() + evidence.regularizer(model), list(model.parameters()))
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)
    # The likelihood has its normalizers; the prior lacks those that do not depend on the weights.
    torch.testing.assert_close(torch.stack(parts).mean(), -temperature * log_likelihood / 6, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", ["regression", "ratios", "classification"])
def test_the_loss_after_a_fit_is_the_likelihood_that_the_evidence_has(case: str) -> None:
    likelihood = CASES[case][0]
    model, x, y = problem(case)
    evidence = EvidenceInTheLoop(model, likelihood, [(x, y)], groups="layer", temperature=1.7, curvature="ggn", every=1)
    la = evidence.step(0)
    assert la is not None
    assert evidence.prior is la.prior
    free_of_weights = sum(
        0.5 * size.numel() * (la.posterior.precisions[name].log() - math.log(2 * math.pi))
        for name, size in la.posterior.sizes.items()
    )
    total = -6 * (evidence.loss(model(x), y) + evidence.regularizer(model)) + free_of_weights
    log_determinant = la.posterior.log_det_precision() - la.curvature.size * math.log(2 * math.pi)
    torch.testing.assert_close(total - 0.5 * log_determinant, la.log_evidence(), rtol=1e-12, atol=0)


def test_a_loader_that_shows_a_part_counts_what_it_shows() -> None:
    model, x, y = problem("classification")
    data = TensorDataset(x, y)
    some = torch.utils.data.SubsetRandomSampler([0, 2, 3])
    loaders: dict[int, Any] = {
        6: DataLoader(data, batch_size=4), 4: DataLoader(data, batch_size=4, drop_last=True),
        3: DataLoader(data, batch_size=2, sampler=some), 5: [(x[:4], y[:4]), (x[4:5], y[4:5])],
    }  # fmt: skip
    for expected, loader in loaders.items():
        evidence = EvidenceInTheLoop(model, "classification", loader, curvature="ggn")
        assert evidence.examples == expected
        assert evidence.measure(0).curvature.examples == expected


# ------------------------------------------------------------------------------------- the object


def small_classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def small_data(seed: int = 0, examples: int = 24) -> TensorDataset:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, 3, generator=source)
    return TensorDataset(x, (x + 0.5 * torch.randn(x.shape, generator=source)).argmax(1))


def test_steps_are_due_after_burn_in_and_every_f_epochs() -> None:
    model, x, y = problem("classification")
    evidence = EvidenceInTheLoop(model, "classification", [(x, y)], burn_in=2, every=3)
    done = [epoch for epoch in range(12) if evidence.step(epoch) is not None]
    assert done == [4, 7, 10]


def test_a_measurement_leaves_the_training_as_it_was() -> None:
    torch.manual_seed(0)
    model = small_classifier()
    model[1].eval()
    own = torch.Generator().manual_seed(5)
    loader = DataLoader(small_data(), batch_size=8, shuffle=True, generator=own)
    evidence = EvidenceInTheLoop(model, "classification", loader, "kron", "layer")
    x, y = small_data()[:]
    (evidence.loss(model(x), y) + evidence.regularizer(model)).backward()
    before = [value.clone() for value in (*model.state_dict().values(), *(p.grad for p in model.parameters()))]
    states, modes = (torch.get_rng_state(), own.get_state()), [module.training for module in model.modules()]
    evidence.measure(0)
    after = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], own.get_state())
    assert modes == [module.training for module in model.modules()]
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_best_evidence_is_kept_and_put_back() -> None:
    model, x, y = problem("classification")
    evidence = EvidenceInTheLoop(model, "classification", [(x, y)], curvature="ggn")
    values = []
    for epoch, scale in enumerate((1.0, 0.3, 3.0)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        values.append(float(evidence.measure(epoch).log_evidence()))
    chosen = max(range(3), key=values.__getitem__)
    assert evidence.best is not None
    assert (evidence.best.epoch, evidence.best.log_evidence) == (chosen, values[chosen])
    la = evidence.restore_best()
    assert float(la.log_evidence()) == values[chosen]
    assert la.predict(x).probs.shape == (6, 3)  # refused if the weights were others
    again = Laplace(model, "classification", prior=la.prior).fit([(x, y)])
    torch.testing.assert_close(again.log_evidence(), la.log_evidence(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("groups", "structure", "labels"), [
    ("scalar", "kron", ["all"]), ("layer", "ekfac", ["0", "2.0"]), ("parameter", "diag", ["0.weight", "0.bias", "2.0.weight", "2.0.bias"]),
    ({"*bias": "biases", "*": "weights"}, "full", ["weights", "biases"]), ("input", "kron", ["inputs of 0.weight", "rest"]),
])  # fmt: skip
def test_groups_and_structures(groups: Any, structure: str, labels: list[str]) -> None:
    model, x, y = problem("classification")
    trained = train_with_evidence(model, [(x, y)], "classification", 4, structure, groups, every=2, progress=False)
    assert [record.precisions is None for record in trained.history] == [True, False, True, False]
    precisions = trained.history[-1].precisions
    assert precisions is not None
    assert list(precisions) == labels
    if groups == "parameter":
        assert torch.as_tensor(precisions["0.weight"]).shape == (4, 3)


def test_scale_free_groups_have_their_own_precisions() -> None:
    torch.manual_seed(0)
    loader = DataLoader(small_data(examples=64), batch_size=16, shuffle=True)
    trained = train_with_evidence(small_classifier(), loader, "classification", 10, groups="auto", progress=False)
    precisions = trained.history[-1].precisions
    assert precisions is not None
    assert list(precisions) == ["0", "rest"]
    assert len({float(torch.as_tensor(value)) for value in precisions.values()}) == 2


def test_a_group_that_runs_off_is_named_and_held() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, y = regression(0, 20, 3)
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.mul_(1e-10)
    evidence = EvidenceInTheLoop(model, "regression", [(x, y)], groups="layer", curvature="ggn", steps=100)
    with pytest.warns(
        TuningWarning, match="Epoch 7: The precision of prior group '0' runs off to infinity.*held at 1e"
    ):
        la = evidence.measure(7)
    assert la.tuning_ is not None
    assert la.tuning_.precisions["0"] == pytest.approx(1e8)
    assert float(evidence.prior.precisions({"0.weight": torch.Size((4, 3))})["0.weight"]) == pytest.approx(1e8)
    assert la.tuning_.value == float(la.log_evidence())


def test_a_noise_that_runs_off_is_named_and_held() -> None:
    x, y = regression(0, 20, 3)
    weight = torch.linalg.lstsq(x, y).solution
    model = nn.Linear(3, 1, bias=False).double()
    model.weight.data.copy_(weight.T + 1e-7)
    evidence = EvidenceInTheLoop(model, "regression", [(x, x @ weight)], curvature="ggn", steps=100)
    with pytest.warns(TuningWarning, match="Epoch 3: The noise variance runs off to 0.*held at 1e-08"):
        la = evidence.measure(3)
    assert la.noise == pytest.approx(1e-8)
    assert la.tuning_ is not None
    assert la.tuning_.noise == pytest.approx(1e-8)


def test_a_group_without_curvature_is_named_and_held() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    nn.init.constant_(model.get_parameter("0.bias"), -1000.0)  # no unit is ever active
    x, y = regression(0, 20, 3)
    evidence = EvidenceInTheLoop(model, "regression", [(x, y)], groups="layer", curvature="ggn", prior=3.0)
    with pytest.warns(TuningWarning, match="Epoch 1: Prior group '0' is without curvature"):
        la = evidence.measure(1)
    assert la.tuning_ is not None
    assert la.tuning_.precisions["0"] == pytest.approx(3.0)


# ------------------------------------------------------------------------------------- interruptions


class Interrupted(TensorDataset):
    """Data that press Ctrl-C when an example is read for the `at`-th time."""

    def __init__(self, data: TensorDataset, at: int) -> None:
        super().__init__(*data.tensors)
        self.left = at

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().__getitem__(index)


SCHEDULERS: dict[str, tuple[Callable[[Optimizer], LRScheduler], str]] = {
    "cosine": (lambda optimizer: CosineAnnealingLR(optimizer, 6), "epoch"),
    "one cycle": (lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=18), "batch"),
    "milestones": (lambda optimizer: MultiStepLR(optimizer, [1, 4]), "epoch"),
    "plateau": (lambda optimizer: ReduceLROnPlateau(optimizer, patience=0), "epoch"),
    "lambda": (lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.9**epoch), "epoch"),
    "sequence": (
        lambda optimizer: SequentialLR(
            optimizer, [LambdaLR(optimizer, lambda epoch: 0.1 + epoch), CosineAnnealingLR(optimizer, 4)], [2]
        ),
        "epoch",
    ),
}


def run(
    data: TensorDataset, seed: int, path: Path | None, own: bool, scheduler: str, callback: Any = None
) -> tuple[Training, dict[str, Tensor]]:
    """A run with everything that draws at random: shuffling, dropout, and the curvature."""
    torch.manual_seed(seed)
    generators = [torch.Generator().manual_seed(seed + i) if own else None for i in range(2)]
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=generators[0])
    make, schedule = SCHEDULERS[scheduler]
    trained = train_with_evidence(
        small_classifier(), loader, "classification", epochs=6, groups="layer", burn_in=1, every=2, steps=3,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02), scheduler=make, schedule=schedule,
        checkpoint=path, generator=generators[1], callback=callback, progress=False,
    )  # fmt: skip
    assert trained.la is None or trained.la.predict(data.tensors[0]).probs.shape == (24, 3)
    return trained, dict(trained.model.state_dict())


def check_same(one: tuple[Training, dict[str, Tensor]], other: tuple[Training, dict[str, Tensor]]) -> None:
    (left, left_values), (right, right_values) = one, other
    assert left.history == right.history  # losses, evidences, precisions, to the last bit
    assert left.best_epoch == right.best_epoch
    for name, value in left_values.items():
        assert torch.equal(value, right_values[name]), name
    assert left.la is not None
    assert right.la is not None
    assert torch.equal(left.la.log_evidence(), right.la.log_evidence())
    assert left.la.tuning_ == right.la.tuning_
    assert repr(left.la) == repr(right.la)


WHOLE: dict[tuple[bool, str], tuple[Training, dict[str, Tensor]]] = {}
READS = 24 * (6 + 3)  # by six epochs and three fits


@pytest.mark.parametrize("own", [False, True])
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.integers(0, READS - 1), second=st.integers(0, READS - 1))
def test_interrupted_anywhere_and_resumed_the_result_is_the_same_bit_for_bit(
    own: bool, first: int, second: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = WHOLE.setdefault((own, "cosine"), run(small_data(), 0, None, own, "cosine"))
    path = tmp_path_factory.mktemp("run") / "run.safetensors"
    cut, _ = run(Interrupted(small_data(), first), 0, path, own, "cosine")
    assert cut.interrupted
    # Another process has other random states and another network: all of that must come from the file.
    again, _ = run(Interrupted(small_data(), second), 17, path, own, "cosine")
    resumed = run(small_data(), 99, path, own, "cosine")
    assert not resumed[0].interrupted
    check_same(whole, resumed)
    assert again.history == whole[0].history[: len(again.history)]


@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
def test_every_schedule_is_resumed(scheduler: str, tmp_path: Path) -> None:
    whole = run(small_data(), 0, None, False, scheduler)
    cut, _ = run(Interrupted(small_data(), 100), 0, tmp_path / "run", False, scheduler)
    assert cut.interrupted
    check_same(whole, run(small_data(), 5, tmp_path / "run", False, scheduler))


def test_a_finished_run_comes_back_from_its_file(tmp_path: Path) -> None:
    first = run(small_data(), 0, tmp_path / "run", False, "cosine")
    check_same(first, run(small_data(), 3, tmp_path / "run", False, "cosine"))


def test_ctrl_c_returns_the_best_so_far() -> None:
    def press(record: Epoch) -> None:
        if record.epoch == 3:
            raise KeyboardInterrupt

    whole, _ = run(small_data(), 0, None, False, "cosine")
    trained, _ = run(small_data(), 0, None, False, "cosine", press)
    assert trained.interrupted
    assert trained.history == whole.history[:4]
    assert trained.best_epoch == 2
    assert trained.la is not None
    assert trained.history[2].log_evidence == float(trained.la.log_evidence())
    early, _ = run(Interrupted(small_data(), 3), 0, None, False, "cosine")
    assert (early.interrupted, early.la, early.best_epoch, early.history) == (True, None, None, ())


def test_modes_come_back() -> None:
    model, x, y = problem("classification")
    seen = []
    model.eval()
    model[1].register_forward_hook(lambda module, *_: seen.append(module.training))
    train_with_evidence(model, [(x, y)], "classification", 1, progress=False)
    assert seen[0] is True
    assert not any(module.training for module in model.modules())
    model.train()
    model[1].eval()
    seen.clear()
    train_with_evidence(model, [(x, y)], "classification", 1, progress=False)
    assert not any(seen)
    assert model.training
    assert not model[1].training


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(("options", "message"), [
    ({"every": 0}, "every must be at least 1, got 0"),
    ({"steps": 0}, "steps must be at least 1, got 0"),
    ({"burn_in": -1}, "burn_in must be at least 0, got -1"),
    ({"epochs": 3, "burn_in": 3}, "epochs=3 end within burn_in=3.*no evidence"),
    ({"epochs": 0}, "epochs=0"),
    ({"loader": []}, "loader is empty"),
    ({"loader": iter([1])}, "readable once for every epoch.*list_iterator"),
    ({"groups": "parameter"}, "groups='parameter' needs structure"),
    ({"groups": {"0.*": "first"}}, "groups has no label for parameter '2.0.weight'"),
    ({"prior": FactoredDamping(1.0, 1.0)}, "FactoredDamping is no prior"),
    ({"weights": "last_layer"}, "name the parameters"),
    ({"optimizer": torch.optim.AdamW}, "decays weights.*weight_decay=0"),
    ({"schedule": "step"}, "Unknown schedule: 'step'.*batch, epoch"),
    ({"structure": "crown"}, "Unknown structure: 'crown'. Did you mean 'kron'"),
])  # fmt: skip
def test_bad_input_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    model, x, y = problem("classification")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given: dict[str, Any] = {"loader": [(x, y)], "epochs": 4} | options
    with pytest.raises(InputError, match=message):
        train_with_evidence(model, likelihood="classification", **given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_targets_of_another_shape_are_refused_where_they_come() -> None:
    x, y = regression(0, 6, 3)
    evidence = EvidenceInTheLoop(nn.Linear(3, 1).double(), "regression", [(x, y)])
    with pytest.raises(InputError, match="loss: targets of shape .6. against outputs of shape .6, 1."):
        evidence.loss(evidence.la.model(x), y[:, 0])
    with pytest.raises(InputError, match="No evidence was computed yet: burn_in=0, every=5"):
        evidence.restore_best()


def test_a_training_that_diverges_says_where() -> None:
    x, y = regression(0, 20, 3)

    def fast(parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=1e200)

    with pytest.raises(InputError, match="Epoch 2, batch 0: the model's outputs hold NaN or inf"):
        train_with_evidence(nn.Linear(3, 1).double(), [(x, y)], "regression", 9, every=9, optimizer=fast)


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    model, x, y = problem("classification")
    path = tmp_path / "run"

    def train(model: nn.Module = model, **options: Any) -> Training:
        given: dict[str, Any] = {"epochs": 2, "every": 1, "checkpoint": path} | options
        return train_with_evidence(model, [(x, y)], "classification", **given)

    train()
    for options, message in (
        ({"every": 2}, "another run: it was written with every = 1, this run has 2"),
        ({"epochs": 3}, "written with epochs = 2, this run has 3"),
        ({"temperature": 2.0}, "written with temperature = 1.0, this run has 2.0"),
        ({"groups": "layer"}, "written with groups = 'scalar', this run has 'layer'"),
        ({"optimizer": torch.optim.NAdam}, "written with optimizer = 'Adam', this run has 'NAdam'"),
        ({"optimizer": lambda p: torch.optim.Adam(p, lr=0.1)}, "with optimizer's option: lr = 0.001, this run has 0.1"),
        ({"prior": 2.0}, "written with prior: precision: .* = tensor.1., dtype=torch.float64., this run has tensor.2."),
        ({"kron": "reduce"}, "written with option: kron = 'expand', this run has 'reduce'"),
        ({"generator": torch.Generator()}, "written with random states"),
        ({"model": nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()}, "shape: 0.weight"),
    ):
        with pytest.raises(FileError, match=message):
            train(**options)  # type: ignore[arg-type]
    with pytest.raises(FileError, match="holds no posterior, but a training run"):
        Laplace.load(path, model)
    Laplace(model, "classification").fit([(x, y)]).save(tmp_path / "posterior")
    with pytest.raises(FileError, match="holds no training run"):
        train(checkpoint=tmp_path / "posterior")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(FileError, match="truncated or no safetensors file"):
        train()


def test_a_state_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    class Odd(LambdaLR):
        def state_dict(self) -> dict[str, Any]:
            return {"thing": object()}

    model, x, y = problem("classification")
    with pytest.raises(FileError, match="cannot hold config/scheduler's option/thing: a object"):
        train_with_evidence(
            model, [(x, y)], "classification", 2, checkpoint=tmp_path / "run",
            scheduler=lambda optimizer: Odd(optimizer, lambda epoch: 1.0),
        )  # fmt: skip
