"""The network linear in its weights on a whole data set: `h(x, θ̃ + δ) = f(x, θ̃) + J(x) δ`.

It is known by passes over the data: one Jacobian-vector product with a step in weight space, one vector-Jacobian
product with a vector in output space. The Jacobian is never formed; outputs of all examples are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.batches import Inputs, Unpack, check_targets, read
from lapwing.errors import InputError
from lapwing.jvp import Linearized, settle
from lapwing.likelihoods import Likelihood
from lapwing.replay import Replay
from lapwing.tape import Tape, agree


@dataclass
class LinearModel:
    """`outputs` f(x, θ̃) and `targets` of all batches, outputs in float64; `method` is how J v is computed."""

    tape: Tape
    likelihood: Likelihood
    passes: Replay
    unpack: Unpack | None
    show: bool
    outputs: list[Tensor]
    targets: list[Tensor]
    method: str

    @staticmethod
    def of(
        tape: Tape, likelihood: Likelihood, loader: Iterable[Any], unpack: Unpack | None, show: bool, what: str
    ) -> LinearModel:
        """Read the outputs in one pass. The model must be borrowed (see `guard`)."""
        model = LinearModel(tape, likelihood, Replay(loader, what), unpack, show, [], [], "")
        for where, inputs, targets in model._read("outputs"):
            if not model.method:
                linear = Linearized.at(tape, inputs)
                model.method = settle(linear, ("forward", "backward")).method
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
        for (_, inputs, _), outputs in zip(self._read("J v"), self.outputs, strict=True):
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
        for (where, inputs, _), outputs, vector in zip(self._read("J'v"), self.outputs, vectors, strict=True):
            linear = Linearized.at(self.tape, inputs)
            if not agree(linear.outputs.double(), outputs, outputs):
                raise InputError(
                    f"{where} differs from one pass over the loader to the next. Linearized models are found by many "
                    "passes over the same data: pass a loader without random augmentation."
                )
            for name, gradient in linear.pull(vector.to(linear.outputs)).items():
                total[name] += gradient
        return total

    def _read(self, title: str) -> Iterator[tuple[str, Inputs, Tensor]]:
        device = next(iter(self.tape.parameters.values())).device
        return read(self.passes, device, self.unpack, title, self.show)
