"""A fixed set of weights from the posterior as one module, to deploy: `p(y|x) = (1/S) Σ_s p(y|f(x, θ_s))`."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from lapwing import likelihoods
from lapwing.batches import Inputs, ReadOutput, asked, outputs_of
from lapwing.errors import ExportWarning, InputError, positive, warn
from lapwing.examples import few_examples
from lapwing.guard import one_attention
from lapwing.laplace import Laplace
from lapwing.layers.per_example import RefuseData
from lapwing.layers.rule import tolerance
from lapwing.likelihoods import Likelihood
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, Prediction
from lapwing.weights import unwrap

logger = logging.getLogger("lapwing")
_COMPILED = "_orig_mod."  # in front of every name of a model that went through torch.compile
_REFUSALS = (RuntimeError, ValueError, NotImplementedError, TypeError, IndexError, UserWarning)


class Ensemble(nn.Module):
    """S networks in one: the model with each of S weight samples, and the average of what they predict.

    Called like the model, it returns class probabilities `[N, *output]`, or the mean and the variance of numbers,
    `[N, *output]` each: those of `la.predict(x, method="sampled", samples=weights)`. `predict` returns all of that
    prediction, `outputs` the networks' own.

    The samples are buffers `samples.<name>`, `[S, *shape]`; all else is held once, in a copy of the model in eval mode.
    They are evaluated together by `torch.func.vmap`, which does once what no sampled weight has reached: all but the
    last layer, if only that is Bayesian. Networks that vmap refuses (recurrent layers, branches on data) are evaluated
    sample by sample; `parallel` and the repr say which, `refusal` why.

    Args:
        model: the trained network; it is copied.
        likelihood: as for `Laplace`.
        weights: name → `[S, *shape]`, from `la.sample(S)` or `sample_by_optimization(...).samples`.
        noise: the noise variance of a Gaussian likelihood, as for `la.at`, by default its own.
        example: a few inputs, as for `predict`, on which vmap is tried.
        parallel: True for vmap, False for sample by sample, None to try vmap on `example`.
        chunk: how many samples are evaluated together; by default all. Memory grows with it.
        output: `fn(returned) -> tensor [N, ...]`, as for `Laplace`.

    Examples:
        >>> import torch
        >>> from lapwing import Ensemble, Laplace
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,)))]
        >>> la = Laplace(torch.nn.Linear(3, 2), "classification").fit(data)
        >>> ensemble = Ensemble.of(la, samples=10)
        >>> ensemble
        Ensemble(10 samples of 8 weights, categorical, in parallel)
        >>> ensemble(torch.randn(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        weights: Mapping[str, Tensor],
        noise: float | Tensor | None = None,
        *,
        example: Any = None,
        parallel: bool | None = None,
        chunk: int | None = None,
        output: ReadOutput | None = None,
    ) -> None:
        super().__init__()
        self.likelihood, self.output = likelihoods.resolve(likelihood), output
        model = unwrap(model)
        self.count = _checked(model, weights)
        if chunk is not None and chunk < 1:
            raise InputError(f"Ensemble(chunk=...) needs at least 1, got {chunk}.")
        self.chunk = chunk
        self.model = _skeleton(model)
        self.names = tuple(name.removeprefix(_COMPILED) for name in weights)
        self.samples = _store({name.removeprefix(_COMPILED): value for name, value in weights.items()})
        default = self.likelihood.noise or 1.0
        scale = positive(default, "noise") if noise is None else self.likelihood.noise_scale(noise)
        self.noise: Tensor
        self.register_buffer("noise", scale.detach().clone().to(self._weights()[self.names[0]]))
        self.refusal: str | None = None
        self.eval()
        self.parallel = self._settled(example) if parallel is None else parallel

    @staticmethod
    def of(
        la: Laplace,
        samples: int | Mapping[str, Tensor] = 20,
        generator: torch.Generator | None = None,
        center: str | None = None,
        *,
        example: Any = None,
        parallel: bool | None = None,
        chunk: int | None = None,
    ) -> Ensemble:
        """An ensemble of weights drawn from a fitted posterior.

        Args:
            la: the posterior.
            samples: how many, or the weights themselves, drawn by `la.at(center=...).sample(n, generator)`.
            generator: the source of randomness of the draws; None consumes torch's global one.
            center: of the draws, as for `la.predict`.
            example: a few inputs; needed only where `la` was read from a file, which keeps none.
            parallel: as above.
            chunk: as above.
        """
        la._unchanged()
        if not isinstance(samples, int) and (generator is not None or center is not None):
            raise InputError(
                "Ensemble.of draws nothing where it is given weights: give generator and center to what drew them, "
                "la.at(center=...).sample(n, generator)."
            )
        weights = la.at(center=center).sample(samples, generator) if isinstance(samples, int) else samples
        return Ensemble(
            la.model, la.likelihood, weights, None if la.likelihood.noise is None else la._noise,
            example=few_examples(la) if example is None else example, parallel=parallel, chunk=chunk, output=la.output,
        )  # fmt: skip

    # ---------------------------------------------------------------------------------- predictions

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Probabilities `[N, *output]`, or mean and variance, `[N, *output]` each; the arguments are the model's."""
        found = self.predict_outputs(self.outputs(*args, **kwargs))
        if isinstance(found, ClassPrediction | BinaryPrediction):
            return found.probs
        return found.mean, found.variance

    def predict(self, x: Any) -> Prediction:
        """The same as a `Prediction`, with the parts of its uncertainty; `x` as for `Laplace.predict`."""
        inputs = asked(x, self._device)
        return self.predict_outputs(self.outputs(*inputs.args, **inputs.kwargs))

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        """`f(x, θ_s)`: `[S, N, *output]`."""
        inputs = Inputs(args, kwargs)
        with self._explained(inputs):
            return self._outputs(self._weights(), inputs, self.parallel)

    def predict_outputs(self, outputs: Tensor) -> Prediction:
        """The prediction from outputs `[S, N, *output]`, for a module of one's own around this one."""
        return self.likelihood.predict_samples(outputs, self.noise)

    def _outputs(self, weights: dict[str, Tensor], inputs: Inputs, parallel: bool) -> Tensor:
        def one(drawn: dict[str, Tensor]) -> Tensor:
            return outputs_of(self.model, inputs, self.output, drawn)

        with one_attention():
            if parallel:
                with sdpa_kernel(SDPBackend.MATH):  # the only attention that vmap knows
                    together: Tensor = torch.func.vmap(one, chunk_size=self.chunk)(weights)
                    return together
            count = next(iter(weights.values())).shape[0]
            return torch.stack([one({name: value[s] for name, value in weights.items()}) for s in range(count)])

    @contextmanager
    def _explained(self, inputs: Inputs) -> Iterator[None]:
        try:
            yield
        except RuntimeError as failure:
            inputs.explain(failure, self._weights()[self.names[0]].dtype)
            raise

    def _weights(self) -> dict[str, Tensor]:
        return {name: self.samples.get_buffer(name) for name in self.names}

    @property
    def _device(self) -> torch.device:
        return self.samples.get_buffer(self.names[0]).device

    def _settled(self, example: Any) -> bool:
        """Whether vmap gives what a loop gives, on two of the samples; why not is kept in `refusal`."""
        if example is None:
            raise InputError(
                "Whether vmap takes this network is tried on a few inputs, and there are none: give example=x, or "
                "choose parallel=True or False."
            )
        inputs = asked(example, self._device)
        two = {name: value[:2] for name, value in self._weights().items()}
        with torch.no_grad():
            with self._explained(inputs):
                expected = self._outputs(two, inputs, parallel=False)
            try:
                # Of an operation that it has no rule for, vmap says that it loops: then the whole may as well.
                with RefuseData(), warnings.catch_warnings():
                    warnings.filterwarnings("error", "There is a performance drop")
                    found = self._outputs(two, inputs, parallel=True)
            except _REFUSALS as refusal:
                self.refusal = str(refusal).strip().partition("\n")[0].partition(". ")[0]
                logger.info("vmap refused, the ensemble goes sample by sample: %s", self.refusal)
                return False
        scale = expected.nan_to_num(posinf=0.0, neginf=0.0).abs().amax().clamp(min=1e-30)
        off = 10 * tolerance(found.dtype) * float(scale)
        if found.shape != expected.shape or not torch.isclose(found, expected, rtol=0.0, atol=off).all():
            self.refusal = "its results differ from those of a loop"
            return False
        return True

    # --------------------------------------------------------------------------------- housekeeping

    def export(self, *args: Any, **kwargs: Any) -> torch.export.ExportedProgram:
        """`torch.export.export` with a free number of examples, for arguments of the model such as these.

        The program is called like the model. Inputs whose first dimension is the number of examples of the first tensor
        keep it free. In parallel, if this is; where torch fixes that number under vmap (norms, pooling, embeddings,
        attention), sample by sample, and an `ExportWarning` says so.
        """
        inputs = Inputs(args, kwargs)
        examples = inputs.examples()
        if examples < 2:
            raise InputError("export needs inputs of at least 2 examples: torch takes a size of 1 for a fixed one.")
        free = torch.export.Dim("examples")

        def shape(leaf: Any) -> Any:
            batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == examples
            return {0: free} if batched else None

        program, signature = copy.copy(self), inspect.signature(self.model.forward)

        def forward(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
            return Ensemble.forward(program, *args, **kwargs)

        # torch.export reads the arguments' names off the signature, and takes no free sizes for those of **kwargs.
        setattr(forward, "__signature__", signature)  # noqa: B010
        setattr(program, "forward", forward)  # noqa: B010
        shapes = tree_map(shape, dict(signature.bind(*args, **kwargs).arguments))
        if program.parallel:
            try:
                return torch.export.export(program, args, kwargs, dynamic_shapes=shapes)
            except RuntimeError as refusal:
                logger.info("torch.export refused the samples in parallel: %s", refusal)
                warn(
                    "torch.export does not take this network in parallel with a free number of examples: the program "
                    f"goes through its {self.count} samples one after another. The numbers are the same. An Ensemble "
                    "with parallel=False is exported so without a warning.",
                    ExportWarning,
                )
                program.parallel = False
        return torch.export.export(program, args, kwargs, dynamic_shapes=shapes)

    def train(self, mode: bool = True) -> Ensemble:
        """The model inside stays in eval mode, as it was fitted."""
        super().train(mode)
        self.model.eval()
        return self

    def __repr__(self) -> str:
        size = sum(value[0].numel() for value in self._weights().values())
        chunks = "" if self.chunk is None else f", {self.chunk} at a time"
        how = f"in parallel{chunks}" if self.parallel else "one after another"
        why = "" if self.refusal is None else f" (vmap refused: {self.refusal})"
        return f"Ensemble({self.count} samples of {size:,} weights, {self.likelihood.name}, {how}{why})"


def _checked(model: nn.Module, weights: Mapping[str, Tensor]) -> int:
    """The number of samples, once it is known that they are samples of the model's parameters."""
    parameters = dict(model.named_parameters())
    counts = {value.shape[0] if value.dim() else 0 for value in weights.values()}
    if len(counts) != 1 or 0 in counts:
        raise InputError("An Ensemble needs weights by name, the same number of samples of each: la.sample(20).")
    for name, value in weights.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.shape != value.shape[1:]:
            raise InputError(
                f"Samples of {name!r} have shape {list(value.shape[1:])}, in the model it is "
                f"{'no parameter' if parameter is None else list(parameter.shape)}."
            )
        if parameter.dtype != value.dtype:
            raise InputError(
                f"Samples of {name!r} are {value.dtype}, in the model it is {parameter.dtype}. Convert them: "
                f"value.to({parameter.dtype})."
            )
    return counts.pop()


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy that nobody trains."""
    inner = getattr(model, _COMPILED.removesuffix("."), model)
    try:
        copied: nn.Module = copy.deepcopy(inner)
    except Exception as refusal:
        raise InputError(
            f"An Ensemble holds a copy of the model, and copy.deepcopy of {type(inner).__name__} failed: {refusal}. "
            "Hold tensors as parameters or buffers, not as results of computations (torch.nn.utils.parametrizations, "
            "not the older hooks), or give the model a method __deepcopy__."
        ) from refusal
    for parameter in copied.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    return copied


def _store(weights: dict[str, Tensor]) -> nn.Module:
    """Buffers of these names, in modules as deep as the names have dots."""
    root = nn.Module()
    for name, value in weights.items():
        *path, leaf = name.split(".")
        place = root
        for part in path:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_buffer(leaf, value.detach().clone())
    return root
