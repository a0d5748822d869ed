"""What a fit leaves behind."""

from __future__ import annotations

import torch

from lapwing.errors import InputError
from lapwing.spectrum import Spectrum
from lapwing.tape import Tape


class Fitted:
    """What a fit leaves behind: the tape with the layers it found, the spectrum, the weights' values."""

    def __init__(self, tape: Tape, spectrum: Spectrum) -> None:
        self.tape, self.spectrum = tape, spectrum
        self.weights = {name: parameter.detach().clone() for name, parameter in tape.parameters.items()}
        self.versions = [parameter._version for parameter in tape.parameters.values()]

    def check_unchanged(self) -> None:
        versions = [parameter._version for parameter in self.tape.parameters.values()]
        if versions == self.versions:
            return
        for name, parameter in self.tape.parameters.items():
            if not torch.equal(parameter.detach(), self.weights[name]):
                raise InputError(
                    f"Parameter {name!r} changed since the fit, so the posterior no longer belongs to the model. "
                    "Restore the weights, or call la.fit(loader) again."
                )
        self.versions = versions
