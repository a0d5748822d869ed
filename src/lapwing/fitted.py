"""What a fit leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapwing.errors import InputError
from lapwing.spectrum import Spectrum
from lapwing.tape import Tape

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_EVERY = 61


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
    """How a model looked: sums over each of its parameters and buffers."""

    sums: dict[str, Tensor]

    @staticmethod
    def of(model: nn.Module) -> Looks:
        return Looks(_looks(model))

    def check(self, model: nn.Module) -> None:
        """Raise if a parameter or buffer is not what it was."""
        now = _looks(model)
        for name, before in self.sums.items():
            if not torch.equal(now[name], before):
                raise InputError(
                    f"{name!r} of the model changed since the fit, so the posterior no longer belongs to it. Restore "
                    "its values, or call la.fit(loader) again."
                )


def _looks(model: nn.Module) -> dict[str, Tensor]:
    """Sums over the bits of each parameter and buffer, of every 61st word each, and of those left: quick, and exact.

    A prime number, so that neither a change nor a new order of rows or columns is lost in them. Words of eight bytes
    are summed as they are, modulo 2⁶⁴; smaller ones would be converted, which takes several times as long.
    """
    found = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        numbers = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        numbers = numbers.reshape(-1).contiguous()
        each = 8 // numbers.element_size()
        numbers = numbers if numbers.storage_offset() % each == 0 else numbers.clone()
        whole = len(numbers) // (each * _EVERY) * each * _EVERY
        words, rest = numbers[:whole].view(torch.int64), numbers[whole:].view(_BITS[numbers.element_size()])
        found[name] = torch.cat([words.view(-1, _EVERY).sum(0), rest.sum()[None]])
    return found
