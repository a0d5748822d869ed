"""A likelihood of one's own, from its log-probability alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lapwing.columns import Columns, given, random_signs
from lapwing.errors import InputError, choose
from lapwing.likelihoods.base import GaussianOutputs, Statistics, check_finite
from lapwing.predictive.draws import draw
from lapwing.predictive.mixture_of_outputs import OutputMixture


class CustomLikelihood:
    """Subclass it and write `log_prob`; the Hessian comes from autograd, predictions from Monte Carlo.

    `log_prob(outputs, targets)` gives `log p(y_n|f_n)` with all normalizers, `[N]`, from outputs `[N, *output]` and
    targets as the loader has them, by operations that autograd can differentiate twice; an example's value must
    depend on its own outputs alone. Per batch the Hessian takes as many backward passes (through `log_prob` only) as
    an example has outputs. It must be positive semi-definite; where it is not, an error names the example.

    Optional methods, each from outputs `[..., N, *output]` with any leading dimensions:

    - `sample(outputs, generator)`: targets drawn from p(y|f), for `curvature="fisher"`;
    - `mean(outputs)` and `variance(outputs)`: those of the targets given f, for `mean`, `aleatoric`, `epistemic`,
      `variance` and `std` of predictions.

    `name` is the class's unless set. A file does not hold the code: `Laplace.load(..., likelihood=MyLikelihood())`.
    """

    name = "custom"
    noise = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} needs a method log_prob(outputs, targets) -> [N].")

    def noise_scale(self, noise: float | Tensor) -> Tensor:
        raise InputError(f"The {self.name} likelihood has no noise to set.")

    def check(self, outputs: Tensor, targets: Tensor, where: str) -> None:
        check_finite(outputs, "the model's outputs hold", where)
        check_finite(targets, "the targets hold", where)
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            values = self.log_prob(leaf, targets)
            if values.shape != outputs.shape[:1]:
                raise InputError(
                    f"{where}: {self.name}.log_prob returned shape {list(values.shape)} for {len(outputs)} examples; "
                    f"it must return one value for each, [{len(outputs)}]: sum over outputs, not over examples."
                )
            check_finite(values.detach(), f"{self.name}.log_prob returned", where)
            if not values.requires_grad:
                raise InputError(f"{where}: {self.name}.log_prob does not depend on the outputs through autograd.")
            (first,) = torch.autograd.grad(values[0], leaf)
        if bool((first[1:] != 0).any()):
            raise InputError(
                f"{where}: {self.name}.log_prob mixes examples: that of example 0 depends on the outputs of others."
            )

    def statistics(self, outputs: Tensor, targets: Tensor) -> Statistics:
        doubled = targets.double() if targets.is_floating_point() else targets
        return Statistics(outputs.shape[0], float(self.log_prob(outputs.double(), doubled).sum()))

    def hessians(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`Λ_n = −∇²_f log p(y_n|f_n)`, the D outputs of an example flat: `[N, D, D]`."""
        with torch.enable_grad():
            leaf = outputs if outputs.requires_grad else outputs.detach().requires_grad_()
            (slope,) = torch.autograd.grad(-self.log_prob(leaf, targets).sum(), leaf, create_graph=True)
            entries = slope.reshape(len(slope), -1).unbind(1) if slope.requires_grad else ()
            rows = [
                torch.autograd.grad(one.sum(), leaf, retain_graph=True, create_graph=outputs.requires_grad)[0]
                for one in entries
            ]
        if not rows:  # linear in f
            return outputs.new_zeros(len(outputs), outputs[0].numel(), outputs[0].numel())
        matrices = torch.stack([row.reshape(len(row), -1) for row in rows], 1)
        return 0.5 * (matrices + matrices.mT)

    def _spectra(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues `[N, D]`, none below 0, and eigenvectors `[N, D, D]` of the Hessians."""
        matrices = self.hessians(outputs, targets).double()
        values, vectors = torch.linalg.eigh(matrices)
        lowest = values[:, 0].detach()
        size = values.detach().abs().amax(1)
        wrong = lowest < -1000 * torch.finfo(outputs.dtype).eps * size
        if bool(wrong.any()):
            n = int(wrong.nonzero()[0])
            raise InputError(
                f"The Hessian of −log p of the {self.name} likelihood is not positive semi-definite at example {n} of "
                f"the batch ({int(wrong.sum())} of {len(wrong)} examples): its smallest eigenvalue is "
                f"{float(lowest[n]):.3g}, its largest {float(values[n, -1]):.3g}. Use a parametrization in which "
                "log_prob is concave in the outputs, or curvature='fisher' (needs a method sample) or 'empirical'."
            )
        return values.clamp(min=0), vectors  # what is below 0 is rounding

    def _roots(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The columns of every `Λ_n^{1/2}`: `[D, N, *output]`."""
        values, vectors = self._spectra(outputs, targets)
        columns = (vectors * values.sqrt().unsqueeze(1)).permute(2, 0, 1).to(outputs.dtype)
        return columns.reshape(-1, *outputs.shape)

    def hessian_diagonal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._roots(outputs, targets).square().sum(0)

    def hessian_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._spectra(outputs, targets)
        return self.hessians(outputs, targets).sum(0)

    def hessian_columns(self, outputs: Tensor, targets: Tensor) -> Columns:
        return given(self._roots(outputs, targets))

    def signed_columns(self, outputs: Tensor, targets: Tensor, generator: torch.Generator | None) -> Columns:
        roots = self._roots(outputs, targets)
        signs = random_signs(roots.shape[:2], outputs, generator).reshape(*roots.shape[:2], *[1] * (outputs.dim() - 1))
        return given((roots * signs).sum(0, keepdim=True))

    def sampled_gradients(
        self, outputs: Tensor, targets: Tensor, samples: int, generator: torch.Generator | None
    ) -> Tensor:
        sample = getattr(self, "sample", None)
        if sample is None:
            raise InputError(
                f"curvature='fisher' draws targets, and the {self.name} likelihood has no method "
                "sample(outputs, generator). Write it, or use curvature='ggn', 'rademacher' or 'empirical'."
            )
        drawn: list[Tensor] = []
        for _ in range(samples):
            leaf = outputs.detach().requires_grad_()
            with torch.enable_grad():
                drawn += torch.autograd.grad(self.log_prob(leaf, sample(leaf.detach(), generator)).sum(), leaf)
        return torch.stack(drawn)

    def predict_gaussian(
        self, f: GaussianOutputs, noise: Tensor, link: str | None, samples: int, generator: torch.Generator | None
    ) -> OutputMixture:
        choose(link or "mc", ["mc"], f"link for the {self.name} likelihood")
        return OutputMixture(draw(f, samples, generator), self)

    def predict_samples(self, outputs: Tensor, noise: Tensor) -> OutputMixture:
        return OutputMixture(outputs, self)

    def config(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self) if dataclasses.is_dataclass(self) else vars(self)
        return {"name": self.name, **fields}
