"""The row of one network: evidence at θ̃ and at θ*, shared and separate precisions, and what scaling a group does."""

from __future__ import annotations

import copy
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data import Split
from experiments.linearized_evidence.networks import Case, train
from lapwing import ConvergenceWarning, Laplace, TuningWarning
from lapwing.diagnostics import diagnose

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class Setting:
    """A trained network and its data in the case's dtype."""

    case: Case
    model: nn.Module
    split: Split

    @staticmethod
    def of(case: Case) -> Setting:
        split = case.data()
        parts = (split.x_train, split.y_train, split.x_test, split.y_test)
        x, y, x_test, y_test = (part.to(case.dtype) if part.is_floating_point() else part for part in parts)
        split = Split(x, y, x_test, y_test)
        return Setting(case, train(case, split), split)

    @property
    def loader(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.split.x_train.split(100), self.split.y_train.split(100), strict=True))

    def fit(self, model: nn.Module) -> Laplace:
        """Weights of linear layers and convolutions are Bayesian; biases and what norms have of their own are not."""
        weights = [name for name, value in model.named_parameters() if value.dim() > 1]
        return Laplace(model, self.case.likelihood, weights=weights, **self.case.fit).fit(self.loader)

    def tuned(self, la: Laplace, groups: str) -> Laplace:
        """By the linear model's own evidence, from the same start each time."""
        other = la.at()
        other.mode_ = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TuningWarning)  # they are kept in tuning_
            return other.tune_prior("linear-evidence", groups, self.loader, **self.case.tuning)

    def score(self, la: Laplace, center: str) -> float:
        """Mean log predictive probability of an example of the test set."""
        parts = zip(self.split.x_test.split(100), self.split.y_test.split(100), strict=True)
        return float(torch.cat([la.predict(x, center=center).log_prob(y) for x, y in parts]).mean())

    def plain_score(self) -> float:
        """That of the network itself; a regression has the noise of its training error."""
        with torch.no_grad():
            outputs = self.model(self.split.x_test)
            if self.case.likelihood == "classification":
                return -float(functional.cross_entropy(outputs, self.split.y_test))
            noise = (self.model(self.split.x_train) - self.split.y_train).square().mean()
        density = torch.distributions.Normal(outputs, noise.sqrt()).log_prob(self.split.y_test)
        return float(density.sum(1).mean())

    def spread(self, la: Laplace) -> Tensor:
        """Standard deviations of linearized outputs at some test inputs: `[N, C]`."""
        return la.latent(self.split.x_test[:100], diagonal=True, center="network").covariance.sqrt()


def measure(setting: Setting) -> tuple[dict[str, Any], dict[str, Laplace]]:
    """What the table says of one network, and its posteriors with shared and with separate precisions."""
    start, case = time.perf_counter(), setting.case
    la = setting.fit(setting.model)
    network = la.at().tune_prior()
    assert network.tuning_ is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        network.find_mode(setting.loader, tolerance=1e-3, max_steps=case.tuning.get("max_mode_steps", 500))
    found = diagnose(network)
    assert found.mode is not None
    tuned = {"shared": setting.tuned(la, "scalar")}
    if found.scale_free:
        tuned["separate"] = setting.tuned(la, "auto")
    row: dict[str, Any] = {
        "weights": la.curvature.size,
        "structure": la.structure,
        "examples": int(la.curvature.examples),
        "scale_free": found.scale_free,
        "decrement": found.decrement,
        "distance": found.mode.distance,
        "precision_at_network": network.tuning_.precisions["all"],
        "evidence": {
            "network": found.evidence,
            "mode": found.mode.evidence,
            "mode_residual": found.mode.residual,
        },
        "test": {"plain": setting.plain_score(), "network": setting.score(network, "network")},
    }
    for name, one in tuned.items():
        assert one.tuning_ is not None
        row["evidence"][name] = one.tuning_.value
        row["test"][name] = setting.score(one, "network")
        row["test"][f"{name}, linear"] = setting.score(one, "linear")
        row[name] = {
            "precisions": one.tuning_.precisions,
            "noise": one.tuning_.noise,
            "converged": one.tuning_.converged,
            "residual": one.tuning_.residual,
            "rounds": one.tuning_.iterations,
            "mode_steps": sum(part.mode_steps for part in one.tuning_.rounds),
            "effective_dimension": one.effective_dimension(),
            "warnings": one.tuning_.warnings,
        }
    row["seconds"] = time.perf_counter() - start
    return row, tuned


def scaling(setting: Setting, tuned: dict[str, Laplace], factors: list[float]) -> dict[str, Any]:
    """How predictive standard deviations change when a scale-free group is scaled by each factor.

    It is the group that the data determine most under separate precisions. The network stays the same function: norms
    that see the factor are scaled alike, with their eps and running statistics. `change` is the largest relative change
    over inputs and outputs.
    """
    groups = [group for group in diagnose(tuned["separate"]).groups if group.scale_free]
    group = max(groups, key=lambda one: one.effective_dimension)
    found: dict[str, Any] = {"group": group.label, "factors": factors}
    for name, kind in (("shared", "scalar"), ("separate", "auto")):
        before = setting.spread(tuned[name])
        found[name] = {"std": [], "change": [], "precision": []}
        for factor in factors:
            model = scaled(setting.model, group.parameters, factor, setting.split.x_train[:50])
            moved = tuned[name] if factor == 1 else setting.tuned(setting.fit(model), kind)
            after = setting.spread(moved)
            assert moved.tuning_ is not None
            precisions = moved.tuning_.precisions
            found[name]["std"].append(float(after.mean()))
            level = before.clamp(min=1e-9 * float(before.max()))  # outputs that nothing moves have no spread
            found[name]["change"].append(float(((after - before).abs() / level).max()))
            found[name]["precision"].append(precisions.get(group.label, precisions.get("all")))
    return found


def scaled(model: nn.Module, names: tuple[str, ...], factor: float, x: Tensor) -> nn.Module:
    """The same function with some weights scaled: a norm whose input became `factor` times as large is scaled, too."""
    inputs: dict[str, Tensor] = {}
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name in names:
            other.get_parameter(name).mul_(factor)

        def keep(name: str) -> Any:
            return lambda _, args: inputs.__setitem__(name, args[0])

        def adapt(name: str) -> Any:
            def hook(norm: Any, args: tuple[Tensor, ...]) -> None:
                if torch.allclose(args[0], factor * inputs[name], rtol=1e-4, atol=1e-4 * factor):
                    norm.eps *= factor**2
                    if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
                        assert norm.running_mean is not None
                        assert norm.running_var is not None
                        norm.running_mean.mul_(factor)
                        norm.running_var.mul_(factor**2)

            return hook

        outputs = []
        for network, hook in ((model, keep), (other, adapt)):
            norms = [(name, module) for name, module in network.named_modules() if isinstance(module, NORMS)]
            handles = [module.register_forward_pre_hook(hook(name)) for name, module in norms]
            outputs.append(network(x))
            for handle in handles:
                handle.remove()
        assert torch.allclose(outputs[0], outputs[1], rtol=1e-3, atol=1e-3 * float(outputs[0].abs().max()))
    return other
