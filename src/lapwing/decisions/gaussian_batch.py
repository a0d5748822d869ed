"""What the targets of several candidates tell about the weights, in closed form for Gaussian outputs and noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.errors import InputError
from lapwing.predictive.joint import JointPrediction


@dataclass(frozen=True)
class GaussianBatch:
    """The outputs of N candidates given the (noisy) targets of those chosen so far.

    In units of the noise, `R = Σ^{-½} K Σ^{-½}` over the N·D outputs, the mutual information between the targets of a
    set S and the weights is `½ log det(I + R_SS)`. `blocks: [N, D, D]` are the diagonal blocks of R given the chosen
    ones, and `columns: [N, D, b·D]` what they took away: `R_given = R − columns columnsᵀ`. Memory is R's and N·D·b·D.
    """

    prior: Tensor  # R: [N, D, N, D]
    blocks: Tensor
    columns: Tensor

    @staticmethod
    def of(joint: JointPrediction) -> GaussianBatch:
        """Nothing chosen yet."""
        examples = len(joint.mean)
        noise = joint.marginals.aleatoric.detach().double().reshape(examples, -1)
        scale = noise.rsqrt().flatten()
        shape = (examples, noise.shape[1], examples, noise.shape[1])
        prior = (joint.covariance.detach().double() * scale[:, None] * scale).reshape(shape)
        blocks = prior.diagonal(dim1=0, dim2=2).movedim(-1, 0)
        return GaussianBatch(prior, blocks, prior.new_zeros(*noise.shape, 0))

    def gains(self) -> Tensor:
        """`½ log det(I + R_nn)` given the chosen: what each candidate adds, in nats: `[N]`."""
        return _information(self.blocks)

    def after(self, candidate: int) -> GaussianBatch:
        """Once the target of a candidate is known too: a step of block Cholesky."""
        column = self.prior[:, :, candidate] - self.columns @ self.columns[candidate].T  # [N, D, D]
        root = _root(self.blocks[candidate])
        step: Tensor = torch.linalg.solve_triangular(root, column.mT, upper=False).mT
        return replace(self, blocks=self.blocks - step @ step.mT, columns=torch.cat([self.columns, step], 2))


def independent_information(epistemic: Tensor, aleatoric: Tensor, covariance: Tensor | None) -> Tensor:
    """`½ log det(I + Σ^{-½} K Σ^{-½})` of each example by itself: `[N]`, from variances `[N, *output]`.

    `covariance: [N, D, D]` is K where it is known; else outputs are taken to be independent.
    """
    noise = aleatoric.reshape(len(aleatoric), math.prod(aleatoric.shape[1:]))
    if covariance is None:
        return 0.5 * torch.log1p(epistemic.reshape(noise.shape) / noise).sum(1)
    scale = noise.rsqrt()
    matrix = covariance * scale.unsqueeze(1) * scale.unsqueeze(2)
    return _information(matrix)


def _information(matrices: Tensor) -> Tensor:
    """`½ log det(I + R)` of each of `[N, D, D]`: `[N]`."""
    return _root(matrices).diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _root(matrices: Tensor) -> Tensor:
    """The Cholesky factor of `I + R`: `[..., D, D]`; or an error where there is none."""
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(matrices + eye)
    if bool(failed.any()) or bool(root.isnan().any()):
        raise InputError(
            "The covariance of the outputs in units of the noise is not positive semi-definite, or holds NaN: its "
            "rounding exceeds the noise. Use the model in float64 (model.double())."
        )
    return root
