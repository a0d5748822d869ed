"""The network linear in its weights on a whole data set: `h(x, θ̃ + δ) = f(x, θ̃) + J(x) δ`.

It is known by passes over the data: one Jacobian-vector product with a step in weight space, one vector-Jacobian
product with a vector in output space. The Jacobian is never formed; outputs of all examples are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.batches import Inputs, Unpack, check_targets, read
from lapwing.errors import DataWarning, InputError, warn
from lapwing.guard import random_state_kept, twice_differentiable
from lapwing.jvp import Linearized, settle
from lapwing.likelihoods import Likelihood, Statistics
from lapwing.probe import agree
from lapwing.replay import Replay
from lapwing.subnetwork import Subnetwork
from lapwing.tape import Tape

if TYPE_CHECKING:
    from lapwing.laplace import Laplace

_NEEDED = "use center='network' or 'newton', which need no J v"
_OTHER_DATA = (
    "The data differ from one pass over the loader to the next. Linearized models are found by many passes over the "
    "same data: pass a loader without random augmentation, or one whose randomness is torch's alone (not NumPy's or "
    "Python's, no persistent_workers), which is drawn alike at every pass."
)


@dataclass
class LinearModel:
    """`outputs` f(x, θ̃) and `targets` of all batches, outputs in float64; `method` is how J v is computed."""

    tape: Tape
    likelihood: Likelihood
    passes: Replay
    unpack: Unpack | None
    outputs: list[Tensor]
    targets: list[Tensor]
    method: str

    @staticmethod
    def of(tape: Tape, likelihood: Likelihood, passes: Replay, unpack: Unpack | None, show: bool) -> LinearModel:
        """Read the outputs in one pass. The model must be borrowed (see `guard`)."""
        model = LinearModel(tape, likelihood, passes, unpack, [], [], "")
        for where, inputs, targets in model._read("outputs", show):
            if not model.method:
                linear = Linearized.at(tape, inputs)
                model.method = settle(linear, ("forward", "backward"), _NEEDED).method
                outputs = linear.outputs
            else:
                with torch.no_grad():
                    outputs = tape.forward({}, inputs)
            check_targets(where, outputs, targets)
            likelihood.check(outputs.detach(), targets, where)
            model.outputs.append(outputs.detach().double())
            model.targets.append(targets)
        if not model.outputs:
            raise InputError("The loader is empty: it yielded no batch.")
        return model

    @property
    def examples(self) -> int:
        """How many there are."""
        return sum(len(outputs) for outputs in self.outputs)

    def push(self, step: dict[str, Tensor]) -> list[Tensor]:
        """`J δ` for a step by parameter name: `[N, *output]` of every batch, float64."""
        tangents = {name: step[name].to(parameter).unsqueeze(0) for name, parameter in self.tape.parameters.items()}
        dtype = next(iter(tangents.values())).dtype
        moved = []
        for inputs, outputs in self._again():
            if self.method == "backward":
                linear = Linearized.at(self.tape, inputs, self.method)
            else:  # needs no graph of the outputs
                linear = Linearized(self.tape, inputs, outputs.to(dtype), self.method)
            moved.append(linear.push(tangents)[0].double())
        return moved

    def pull(self, vectors: list[Tensor]) -> dict[str, Tensor]:
        """`Σ_n J_nᵀ u_n` for vectors `[N, *output]` of every batch: by parameter name, float64."""
        total = {
            name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in self.tape.parameters.items()
        }
        for (inputs, outputs), vector in zip(self._again(), vectors, strict=True):
            linear = Linearized.at(self.tape, inputs)
            if not agree(linear.outputs, outputs.to(linear.outputs.dtype), linear.outputs):
                raise InputError(_OTHER_DATA)
            for name, gradient in linear.pull(vector.to(linear.outputs)).items():
                total[name] += gradient
        return total

    def _again(self) -> Iterator[tuple[Inputs, Tensor]]:
        """The inputs of all batches, with the outputs that they had."""
        known = iter(self.outputs)
        for _, inputs, targets in self._read("", False):
            outputs = next(known, None)
            if outputs is None or len(outputs) != len(targets):
                raise InputError(_OTHER_DATA)
            yield inputs, outputs
        if next(known, None) is not None:
            raise InputError(_OTHER_DATA)

    def _read(self, title: str, show: bool) -> Iterator[tuple[str, Inputs, Tensor]]:
        device = next(iter(self.tape.parameters.values())).device
        return read(self.passes, device, self.unpack, title, show)


@contextmanager
def linear_model(la: Laplace, loader: Iterable[Any], what: str) -> Iterator[LinearModel]:
    """The linear model of a fitted posterior on the data of its fit; the network is borrowed while it is in use."""
    if isinstance(la.weights, Subnetwork):
        raise InputError(f"{what} moves whole parameters, not a subnetwork: use center='newton'.")
    state = la._unchanged()
    with (
        random_state_kept(),
        closing(Replay(loader, what)) as passes,
        la._borrow(state.weights),
        twice_differentiable(la.model),
    ):
        model = LinearModel.of(state.tape, la.likelihood, passes, la.unpack, la.progress)
        _check_data(model, la.curvature.statistics, what)
        yield model


def _check_data(model: LinearModel, fitted: Statistics, what: str) -> None:
    """The evidence of one posterior is that of one data set."""
    if model.examples != fitted.examples:
        raise InputError(
            f"{what} saw {model.examples} examples, the fit {fitted.examples:g}: the evidence of one posterior is that "
            "of one data set. Pass the loader of the fit."
        )
    pairs = zip(model.outputs, model.targets, strict=True)
    found = sum(model.likelihood.statistics(outputs, targets).log_likelihood for outputs, targets in pairs)
    if abs(found - fitted.log_likelihood) > 1e-2 * (abs(fitted.log_likelihood) + fitted.examples):
        warn(
            f"The log-likelihood of the network on the data of {what} is {found:.4g}, on those of the fit it was "
            f"{fitted.log_likelihood:.4g}: they are other data, or augmented otherwise. Pass the loader of the fit.",
            DataWarning,
        )
