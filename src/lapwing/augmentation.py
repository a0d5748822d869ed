"""A network made invariant by averaging its outputs over augmented copies of the input."""

from __future__ import annotations

from torch import Tensor, nn

from lapwing.batches import ReadOutput, read_output
from lapwing.errors import InputError


class Averaged(nn.Module):
    """`f̄(x_1, …, x_S) = (1/S) Σ_s f(x_s)`: a model whose examples are S copies each, `[N, S, ...]`.

    The weights are those of `model`, and the outputs have the shape of its outputs. A layer reads as one whose
    weight is shared by S positions of an example, so every structure takes its fast path. Use structure "ekfac", or
    "kron" with `kron="reduce"`, for which equal copies count as one; "expand" takes copies for independent and sees a
    curvature up to S times too small. `output` reads outputs from what the model returns, as in `Laplace`.

    Examples:
        >>> import torch
        >>> model = Averaged(torch.nn.Linear(3, 2))
        >>> model(torch.randn(5, 8, 3)).shape  # 5 examples, 8 copies
        torch.Size([5, 2])
    """

    def __init__(self, model: nn.Module, output: ReadOutput | None = None) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2:
            raise InputError(f"Averaged takes inputs [N, S, ...], S copies of N examples, got {list(x.shape)}.")
        outputs = read_output(self.model(x.flatten(0, 1)), self.output)
        return outputs.reshape(*x.shape[:2], *outputs.shape[1:]).mean(1)
