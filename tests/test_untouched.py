"""Nothing of the user's is touched: parameters, buffers, modes, hooks, gradients, flags, random state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import InputError, Laplace
from lapwing.fitted import Looks
from tests import networks


class Counting(nn.Module):
    """BatchNorm, dropout, a frozen layer, and a buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh())
        self.frozen = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.frozen(self.body(x)))


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "identity": [id(p) for p in model.parameters()] + [id(b) for b in model.buffers()],
        "modes": [module.training for module in model.modules()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "flags": [p.requires_grad for p in model.parameters()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "random": torch.get_rng_state(),
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def check(before: dict[str, Any], after: dict[str, Any], where: str) -> None:
    changed = [what for what in before if not same(before[what], after[what])]
    assert not changed, f"{where} changed {changed}"


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = Counting()
    model(torch.randn(8, 3)).sum().backward()
    model.body.eval()
    model.body[2].train()
    model.head.register_forward_hook(lambda *_: None)
    return model


DATA = [(torch.randn(6, 3), torch.randint(3, (6,))) for _ in range(2)]
BROKEN = [(torch.randn(6, 3), torch.randint(3, (6,))), (torch.full((6, 3), float("nan")), torch.zeros(6).long())]


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "block", "full", "lowrank"])
@pytest.mark.parametrize("curvature", ["ggn", "rademacher", "fisher", "empirical"])
def test_public_calls_leave_the_model_alone(model: nn.Module, structure: str, curvature: str, tmp_path: Path) -> None:
    if structure == "lowrank" and curvature != "ggn":
        pytest.skip("made of products with the GGN")
    generator = torch.Generator().manual_seed(0)
    la = Laplace(model, "classification", structure, curvature, progress=False)
    path = tmp_path / "posterior.safetensors"
    x = torch.randn(4, 3)
    calls: list[Callable[[], Any]] = [
        lambda: la.fit(DATA),
        lambda: la.predict(x).probs,
        lambda: la.predict(x, method="sampled", samples=3, generator=generator),
        lambda: la.predict(x, link="mc", samples=3, generator=generator),
        lambda: la.latent(x, joint=True),
        lambda: la.predict(x.clone().requires_grad_()).probs.sum().backward(),
        lambda: la.sample(2, generator),
        lambda: la.log_evidence(),
        lambda: la.tune_prior(),
        lambda: la.tune_prior(method="validation", loader=DATA, candidates=[0.1, 1.0]),
        lambda: la.summary(),
        lambda: la.save(path),
        lambda: Laplace.load(path, model),
    ]
    for number, call in enumerate(calls):
        before = state(model)
        call()
        check(before, state(model), f"call {number}")


def test_calls_that_raise_leave_the_model_and_posterior_alone(model: nn.Module) -> None:
    la = Laplace(model, "classification", progress=False).fit(DATA)
    evidence, wide = la.log_evidence(), torch.randn(2, 5)
    for call in (
        lambda: la.fit(BROKEN),
        lambda: la.fit([]),
        lambda: la.fit([DATA[0], (DATA[0][0], torch.full((6,), 7))]),
        lambda: la.predict(torch.full((2, 3), float("inf"))),
        lambda: la.predict(wide),
        lambda: la.at(prior=-1.0),
    ):
        before = state(model)
        with pytest.raises((ValueError, RuntimeError)):
            call()
        check(before, state(model), "a call that raised")
        assert torch.equal(la.log_evidence(), evidence)


def test_fit_leaves_the_random_state_alone_and_is_reproducible() -> None:
    model = networks.make("mlp")
    x, y = networks.inputs("mlp", 12), networks.targets("classification", 12)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5, shuffle=True)
    before = torch.get_rng_state()
    evidences = [
        float(
            Laplace(model, "classification", curvature="fisher", progress=False)
            .fit(loader, generator=torch.Generator().manual_seed(seed))
            .log_evidence()
        )
        for seed in (1, 1, 2)
    ]
    assert torch.equal(before, torch.get_rng_state())
    assert evidences[0] == evidences[1] != evidences[2]


def test_same_seed_same_result_and_none_consumes_the_global_generator() -> None:
    model = networks.make("mlp")
    x = networks.inputs("mlp", 5)
    la = Laplace(model, "classification").fit([(x, networks.targets("classification", 5))])

    def draws(generator: torch.Generator | None) -> list[Tensor]:
        return [
            la.sample(2, generator)["0.weight"],
            la.predict(x, method="sampled", samples=2, generator=generator).probs,
            la.predict(x, link="mc", samples=2, generator=generator).probs,
            la.predict(x, samples=2, generator=generator).epistemic,
        ]

    seeded = [draws(torch.Generator().manual_seed(3)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*seeded, strict=True))
    torch.manual_seed(3)
    free = draws(None)
    assert not torch.equal(free[0], draws(None)[0])
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(free, draws(None), strict=True))


def test_changed_weights_are_noticed() -> None:
    model = networks.make("mlp")
    x, y = networks.inputs("mlp", 5), networks.targets("classification", 5)
    la = Laplace(model, "classification").fit([(x, y)])
    model[0].weight.data.mul_(2)  # type: ignore[index,operator,union-attr]  # which autograd does not see
    with pytest.raises(ValueError, match=r"'0\.weight' of the model changed since the fit"):
        la.predict(x)


def test_changed_buffers_and_backbones_are_noticed() -> None:
    model = networks.make("batchnorm")
    x, y = networks.inputs("batchnorm", 5), networks.targets("classification", 5)
    la = Laplace(model, "classification", weights="last_layer").fit([(x, y)])
    model.norm.running_mean += 1  # type: ignore[union-attr,operator]
    with pytest.raises(ValueError, match=r"'norm\.running_mean' of the model changed"):
        la.predict(x)


def test_predict_inside_inference_mode() -> None:
    model = networks.make("mlp")
    x, y = networks.inputs("mlp", 5), networks.targets("classification", 5)
    la = Laplace(model, "classification").fit([(x, y)])
    with torch.inference_mode():
        inside = la.predict(x.clone()).probs
    torch.testing.assert_close(inside, la.predict(x).probs)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [1, 2, 60, 61, 122, 123, 977, 200_000])
@pytest.mark.parametrize("form", ["plain", "shifted", "apart"])
def test_looks_change_with_every_element_and_with_its_place(form: str, dtype: torch.dtype, size: int) -> None:
    model = nn.Module()
    numbers = (100 * torch.rand(2 * size + 1, generator=torch.Generator().manual_seed(0))).to(dtype)
    value = {"plain": numbers[:size], "shifted": numbers[1:][:size], "apart": numbers[1::2]}[form]
    model.register_buffer("value", value)
    looks = Looks.of(model)
    looks.check(model)
    changes = [(slice(n, n + 1), value[n : n + 1] + 1) for n in sorted({0, size // 2, size - 1})]
    if dtype != torch.uint8:
        changes += [(slice(None, None, step), -value[::step]) for step in (1, 61, 122)]
    changes += [(slice(0, 2), value[:2].flip(0)), (slice(None), value.flip(0)), (slice(None), value.roll(1))]
    before = value.clone()
    for place, new in changes:
        value[place] = new.clone()
        if not torch.equal(value, before):
            with pytest.raises(InputError, match="'value' of the model changed since the fit"):
                looks.check(model)
        value.copy_(before)
    looks.check(model)


def test_signs_and_boolean_buffers_count() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.mask: Tensor
            self.register_buffer("mask", torch.tensor([True, True, False]))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * self.mask)

    torch.manual_seed(0)
    model = Masked()
    x = torch.randn(4, 3)
    la = Laplace(model, "classification").fit([(x, torch.tensor([0, 1, 2, 0]))])
    la.predict(x)
    model.mask.logical_not_()
    with pytest.raises(ValueError, match="'mask' of the model changed"):
        la.predict(x)
    model.mask.logical_not_()
    model.linear.weight.data.neg_()
    with pytest.raises(ValueError, match=r"'linear\.weight' of the model changed"):
        la.predict(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.neg_(),
        lambda w: w.copy_(w.flip(0)),
        lambda w: w.copy_(w.flip(1)),
        lambda w: w.copy_(w[:, [2, 1, 0, 3, 4, 5]]),
        lambda w: w.mul_(1 + 1e-6),
        lambda w: w[0, 0].add_(1e-6),
    ],
)
def test_a_change_after_the_fit_is_noticed(change: Callable[[Tensor], object]) -> None:
    """Whatever moves no sum over all weights, too."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 40), torch.randn(5, 6)
    la = Laplace(model, "classification").fit([(x, torch.arange(5))])
    la.predict(x)
    change(model.weight.data)
    with pytest.raises(InputError, match="'weight' of the model changed since the fit"):
        la.predict(x)
