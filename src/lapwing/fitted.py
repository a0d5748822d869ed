"""What a fit leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapwing.errors import InputError
from lapwing.spectrum import Spectrum
from lapwing.tape import Tape


class Fitted:
    """The tape with the layers it found, the spectrum, the weights' values, and how the model looked."""

    def __init__(self, tape: Tape, spectrum: Spectrum) -> None:
        self.tape, self.spectrum = tape, spectrum
        self.weights = {name: parameter.detach().clone() for name, parameter in tape.parameters.items()}
        self.looks = Looks.of(tape.model)

    def check_unchanged(self) -> None:
        """Raise if a parameter or buffer of the model is not what it was at the fit."""
        self.looks.check(self.tape.model)


@dataclass(frozen=True)
class Looks:
    """How a model looked: a few sums over each of its parameters and buffers."""

    sums: dict[str, Tensor]

    @staticmethod
    def of(model: nn.Module) -> Looks:
        return Looks(_looks(model))

    def check(self, model: nn.Module) -> None:
        """Raise if a parameter or buffer is not what it was."""
        now = _looks(model)
        for name, before in self.sums.items():
            if not bool(((now[name] - before).abs() <= 1e-9 * before[0]).all()):
                raise InputError(
                    f"{name!r} of the model changed since the fit, so the posterior no longer belongs to it. Restore "
                    "its values, or call la.fit(loader) again."
                )


def _looks(model: nn.Module) -> dict[str, Tensor]:
    """Three sums over each parameter and buffer (of sizes, of values, of every other value): enough to notice
    a change, and quick. Rounding of sums may differ from run to run, so they are compared up to 1e-9.
    """
    found = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        numbers = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        numbers = numbers.to(torch.uint8) if numbers.dtype == torch.bool else numbers
        numbers = numbers.flatten().nan_to_num() if numbers.is_floating_point() else numbers.flatten()
        sums = (numbers.abs(), numbers, numbers[::2])
        found[name] = torch.stack([part.sum(dtype=torch.float64) for part in sums])
    return found
