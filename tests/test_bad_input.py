"""Every wrong input gets one clear error that names the culprit and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lapwing import Bernoulli, Categorical, FactoredDamping, Gaussian, InputError, Laplace, NotFittedError
from tests import networks

X = networks.inputs("mlp", 6)
Y = networks.targets("classification", 6)
REAL = networks.targets("regression", 6)


def mlp() -> nn.Module:
    return networks.make("mlp")


def fit(likelihood: Any, x: Any, y: Any) -> Laplace:
    return Laplace(mlp(), likelihood).fit([(X[:2], (Y if likelihood == "classification" else REAL)[:2]), (x, y)])


def nan_model() -> nn.Module:
    model = mlp()
    with torch.no_grad():
        model[2].bias[0] = float("nan")  # type: ignore[index,union-attr]
    return model


def replaced(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[1] = value
    return tensor


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "nan input": (lambda: fit("classification", replaced(X, float("nan")), Y), "Batch 1: the input holds NaN or inf"),
    "inf input": (lambda: fit("classification", replaced(X, float("inf")), Y), "Batch 1: the input holds NaN or inf"),
    "nan output": (lambda: Laplace(nan_model(), "classification").fit([(X, Y)]), "Batch 0: the model's outputs hold NaN"),
    "nan target": (lambda: fit("regression", X, replaced(REAL, float("nan"))), "Batch 1: the targets hold NaN"),
    "class too large": (lambda: fit("classification", X, replaced(Y, 3)), "Batch 1: class index 3 is out of range for 3"),
    "class negative": (lambda: fit("classification", X, replaced(Y, -1)), "class index -1 is out of range"),
    "float classes": (lambda: fit("classification", X, Y.double()), r"Batch 1: class targets of dtype .*y\.long\(\)"),
    "one-hot classes": (lambda: fit("classification", X, nn.functional.one_hot(Y, 3)), "One-hot targets"),
    "column of classes": (lambda: fit("classification", X, Y[:, None]), r"Use y\.squeeze\(-1\)"),
    "integer regression": (lambda: fit("regression", X, REAL.long()), "Batch 1: regression targets of dtype"),
    "wrong width": (lambda: fit("regression", X, REAL[:, :2]), "Batch 1: targets of shape"),
    "1-D regression": (
        lambda: Laplace(nn.Linear(3, 1).double(), "regression").fit([(X, REAL[:, 0])]),
        r"Batch 0: targets of shape \[6\] against outputs of shape \[6, 1\]. Use y\.unsqueeze\(-1\)",
    ),
    "soft binary": (lambda: Laplace(mlp(), "binary").fit([(X, REAL)]), "Batch 0: binary targets must be 0 or 1"),
    "fewer targets": (lambda: fit("classification", X, Y[:4]), "Batch 1: 4 targets for 6 outputs"),
    "scalar target": (lambda: fit("classification", X, Y[0]), "Batch 1"),
    "list target": (lambda: Laplace(mlp(), "classification").fit([(X, Y.tolist())]), "the target is a list"),
    "empty loader": (lambda: Laplace(mlp(), "classification").fit([]), "The loader is empty"),
    "empty loader, last layer": (
        lambda: Laplace(mlp(), "classification", weights="last_layer").fit([]), "The loader is empty"),
    "no target": (lambda: Laplace(mlp(), "classification").fit([X]), "Batch 0: a batch without a target .*unpack"),
    "no labels": (lambda: Laplace(mlp(), "classification").fit([{"x": X}]), "Batch 0: a mapping without the key 'labels'"),
    "not iterable": (lambda: Laplace(mlp(), "classification").fit(3), "iterable of batches"),  # type: ignore[arg-type]
    "iterator twice": (
        lambda: Laplace(mlp(), "classification", "ekfac").fit(iter([(X, Y)])), "can be read only once"),
    "no passes": (lambda: Laplace(mlp(), "classification").fit([(X, Y)], passes=0), "passes must be at least 1"),
    "frozen model": (lambda: Laplace(mlp().requires_grad_(False), "classification"), "no trainable parameter"),
    "no module": (lambda: Laplace(lambda x: x, "classification"), "model must be a torch.nn.Module"),  # type: ignore[arg-type]
    "scripted": (lambda: Laplace(_scripted(), "classification"), "torch.jit.script"),
    "detached output": (lambda: Laplace(_Detached(), "classification").fit([(X, Y)]), "does not depend on any Bayesian"),
    "tuple output": (lambda: Laplace(_Tuple(), "classification").fit([(X, Y)]), r"returned a tuple.*output=fn"),
    "unknown structure": (lambda: Laplace(mlp(), "classification", "krom"), "Unknown structure: 'krom'. Did you mean 'kron'"),
    "unknown curvature": (lambda: Laplace(mlp(), "classification", curvature="gnn"), "Did you mean 'ggn'"),
    "unknown likelihood": (lambda: Laplace(mlp(), "clasification"), "Did you mean 'classification'"),
    "likelihood class": (lambda: Laplace(mlp(), Gaussian), "an instance such as"),  # type: ignore[arg-type]
    "unknown kron": (lambda: Laplace(mlp(), "classification", kron="expnd"), "Did you mean 'expand'"),
    "unknown weights": (lambda: Laplace(mlp(), "classification", weights="0.wieght"), r"Nearest: '0\.weight'"),
    "frozen weights": (lambda: Laplace(_half_frozen(), "classification", weights="0.*"), "only frozen parameters"),
    "sparse hessian": (lambda: Laplace(mlp(), "classification", curvature="hessian"), "needs a dense structure"),
    "zero prior": (lambda: Laplace(mlp(), "classification", prior=0.0), "must be positive and finite"),
    "negative prior in a group": (lambda: Laplace(mlp(), "classification", prior={"*.bias": -1.0, "*": 1.0}), r"'\*\.bias'"),
    "nan prior": (lambda: Laplace(mlp(), "classification", prior=float("nan")), "must be positive and finite"),
    "prior of no kind": (lambda: Laplace(mlp(), "classification", prior="1"), "prior must be a number"),  # type: ignore[arg-type]
    "unmatched prior": (lambda: fitted(prior={"0.*": 1.0}).log_evidence(), r"no precision for parameter '2\.weight'"),
    "negative temperature": (lambda: Laplace(mlp(), "classification", temperature=-1.0), "temperature must be positive"),
    "zero noise": (lambda: Gaussian(noise=0.0), "must be positive and finite"),
    "noise of classes": (lambda: fitted().at(noise=1.0), "no noise to set"),
    "other ratios": (
        lambda: Laplace(mlp(), Gaussian([1.0, 2.0, 3.0])).fit([(X, REAL)]).at(noise=torch.tensor([1.0, 1.0, 1.0])), "Refit"),
    "ratios of other width": (lambda: Laplace(mlp(), Gaussian([1.0, 2.0])).fit([(X, REAL)]), "one variance per output"),
    "damped evidence": (lambda: fitted(prior=FactoredDamping(10, 1.0)).log_evidence(), "FactoredDamping is no prior"),
    "damping not positive": (lambda: FactoredDamping(10, 0.0), r"FactoredDamping\(tau"),
    "predict before fit": (lambda: Laplace(mlp(), "classification").predict(X), "call la.fit"),
    "sample before fit": (lambda: Laplace(mlp(), "classification").sample(1), "call la.fit"),
    "unknown method": (lambda: fitted().predict(X, method="linear"), "Did you mean 'linearized'"),
    "unknown link": (lambda: fitted().predict(X, link="probbit"), "Did you mean 'probit'"),
    "unknown center": (lambda: fitted().predict(X, center="newtown"), "Did you mean 'newton'"),
    "unknown tuning": (lambda: fitted().tune_prior(method="evidnce"), "Did you mean 'evidence'"),
    "unknown groups": (lambda: fitted().tune_prior(groups="layers"), "Did you mean 'layer'"),
    "no validation loader": (lambda: fitted().tune_prior(method="validation"), "needs loader"),
    "link of samples": (lambda: fitted().predict(X, method="sampled", link="mc"), "link belongs to"),
    "joint diagonal": (lambda: fitted().latent(X, joint=True, diagonal=True), "exclude each other"),
    "nan in predict": (lambda: fitted().predict(replaced(X, float("nan"))), "the input holds NaN"),
    "class dimension": (lambda: Laplace(mlp(), Categorical(dim=2)).fit([(X, Y)]), r"Categorical\(dim=2\)"),
    "too many columns": (lambda: Laplace(mlp(), "classification", max_columns=1).fit([(X, Y)]), "max_columns=1"),
    "interval": (lambda: Laplace(mlp(), "regression").fit([(X, REAL)]).predict(X).interval(95), "between 0 and 1"),
    "one class": (lambda: Laplace(nn.Linear(3, 1).double(), "classification").fit([(X, Y * 0)]), "use the likelihood 'binary'"),
    "empty batch": (lambda: Laplace(mlp(), "classification").fit([(X[:0], Y[:0])]), "The batch is empty"),
    "empty input": (lambda: fitted().predict(X[:0]), "The batch is empty"),
    "other dtype": (lambda: fitted().predict(X.float()), r"input of dtype torch.float32, its weights are torch.float64"),
    "misspelled option": (lambda: fitted().tune_prior(tolerence=1e-3), "Did you mean 'tolerance'"),
    "misspelled candidates": (
        lambda: fitted().tune_prior(method="validation", loader=[(X, Y)], candidats=[1.0]), "Did you mean 'candidates'"),
    "groups of validation": (
        lambda: fitted().tune_prior(method="validation", loader=[(X, Y)], groups="layer"), "in place of groups"),
    "loader of evidence": (lambda: fitted().tune_prior(loader=[(X, Y)]), "reads no data"),
    "no samples": (lambda: fitted().predict(X, link="mc", samples=0), "at least 1"),
    "negative max_dense": (lambda: Laplace(mlp(), "classification", max_dense=-1), "must not be negative"),
    "merge of other weights": (
        lambda: fitted().merge(Laplace(networks.make("mlp", seed=1), "classification").fit([(X, Y)])), "different weights"),
    "merge of other forms": (lambda: fitted().merge(
        Laplace(mlp(), "classification", max_factor=2).fit([(X, Y)])), "same max_dense, max_factor and rank"),
    "merge of other noise": (lambda: Laplace(mlp(), Gaussian([1.0, 2.0, 3.0])).fit([(X, REAL)]).merge(
        Laplace(mlp(), "regression").fit([(X, REAL)])), "different likelihoods"),
    "damped Hessian": (lambda: Laplace(mlp(), "regression", "full", "hessian", prior=1e5).fit([(X, 20 * REAL)]).at(
        prior=FactoredDamping(100, 0.01)).sample(1), "is indefinite"),
    "too large a block": (lambda: Laplace(nn.Linear(300, 300), "classification", "full").fit(
        [(torch.ones(1, 300), torch.zeros(1).long())]), "needs a matrix of 90300"),
    "indefinite Hessian": (
        lambda: Laplace(mlp(), "regression", "full", "hessian", prior=1e-3).fit([(X, 20 * REAL)]), "is indefinite"),
    "low rank of another curvature": (
        lambda: Laplace(mlp(), "classification", "lowrank", "empirical"), "made of products with curvature='ggn'"),
    "no rank": (lambda: Laplace(mlp(), "classification", "lowrank", rank=0), "rank must be positive"),
    "too high a rank": (lambda: Laplace(nn.Linear(300, 300), "classification", "lowrank", rank=90_000).fit(
        [(torch.ones(1, 300), torch.zeros(1).long())]), "Choose a lower rank"),
    "low rank read once": (lambda: Laplace(mlp(), "classification", "lowrank").fit(iter([(X, Y)])), "only once"),
    "low rank of many passes": (
        lambda: Laplace(mlp(), "classification", "lowrank").fit([(X, Y)], passes=2), "the same data in every pass"),
    "merge of other ranks": (lambda: fitted("lowrank").merge(
        Laplace(mlp(), "classification", "lowrank", rank=3).fit([(X, Y)])), "rank"),
    "elementwise kron prior": (
        lambda: fitted(prior={"0.weight": torch.rand(4, 3) + 1, "*": 1.0}).log_evidence(), "structure='kron' takes"),
    "prior of wrong shape": (lambda: fitted(prior={"0.weight": torch.ones(4), "*": 1.0}).log_evidence(), r"has shape \[4\]"),
    "uneven ekfac prior": (
        lambda: fitted("ekfac", prior={"*.bias": 2.0, "*": 1.0}).log_evidence(), "one prior precision per layer"),
}  # fmt: skip


def fitted(structure: str = "kron", prior: Any = 1.0) -> Laplace:
    return Laplace(mlp(), "classification", structure, prior=prior).fit([(X, Y)])


def _scripted() -> nn.Module:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(Plain())  # type: ignore[no-any-return]


class _Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).detach()


class _Tuple(_Detached):
    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x), x


def _half_frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


@pytest.mark.parametrize("case", CASES)
def test_error_names_the_culprit(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises((InputError, NotFittedError), match=message):
        call()


def test_bernoulli_needs_the_outputs_shape() -> None:
    with pytest.raises(InputError, match="against outputs of shape"):
        Laplace(mlp(), Bernoulli()).fit([(X, Y)])
