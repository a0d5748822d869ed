"""Coordinates of gradients, however these lie in memory, against sums over all indices."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from lapwing.basis import KroneckerBasis
from lapwing.gradients import Inputs, Pair, UseInputs, outer
from lapwing.layers.window import Images, Window

EXAMPLES, COLUMNS = 4, 3


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def layouts(groups: int, positions: int, outputs: int, columns: int) -> dict[str, Tensor]:
    """The same `g: [K, n, Q, R, O]` in different orders of memory."""
    g = random(columns, EXAMPLES, groups, positions, outputs)
    orders = {"rows": (0, 1, 2, 3, 4), "images": (0, 1, 2, 4, 3), "side by side": (1, 0, 2, 4, 3)}
    found = {}
    for name, order in orders.items():
        back = [order.index(axis) for axis in range(5)]
        found[name] = g.permute(order).contiguous().permute(back)
        assert torch.equal(found[name], g)
    return found


@pytest.mark.parametrize(("groups", "columns"), list(product((1, 2), (1, COLUMNS))))
def test_outer_products(groups: int, columns: int) -> None:
    a = random(EXAMPLES, groups, 6, 5)
    for g in layouts(groups, 6, 2, columns).values():
        torch.testing.assert_close(outer(g, a), torch.einsum("knqro,nqri->knqoi", g, a))
        part = slice(1, 3)
        torch.testing.assert_close(outer(g[:, part], a[part]), torch.einsum("knqro,nqri->knqoi", g[:, part], a[part]))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("groups", "columns"), list(product((1, 2), (1, COLUMNS))))
@pytest.mark.parametrize("positions", [1, 2, 3, 40])
def test_coordinates(positions: int, groups: int, columns: int, bias: bool) -> None:
    """Few positions are rotated before the gradients are formed, many after."""
    a = random(EXAMPLES, groups, positions, 5)
    inputs = Inputs((UseInputs(lambda part: a[part], lambda _: None),), EXAMPLES, bias)
    whole = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1) if bias else a
    width = whole.shape[-1]
    output, inner = (torch.linalg.qr(random(groups, size, size)).Q for size in (7, width))
    basis, scale = KroneckerBasis((groups, 7, width), output, inner), random(groups, 7, width).square()
    for g in layouts(groups, positions, 7, columns).values():
        pair = Pair(inputs, g)
        expected = torch.einsum("knqro,nqri,qop,qij->knqpj", g, whole, output, inner)
        torch.testing.assert_close(basis.coordinates(pair, 0, EXAMPLES), expected)
        torch.testing.assert_close(basis.coordinates(pair, 1, 3), expected[:, 1:3])
        torch.testing.assert_close(basis.squares(pair, 2**20), expected.square().sum((0, 1)))
        torch.testing.assert_close(basis.squares(pair, 1), expected.square().sum((0, 1)))
        covariance = torch.einsum("knqoi,lnqoi,qoi->nkl", expected, expected, scale)
        torch.testing.assert_close(basis.covariance(pair, scale, 2**20), covariance)
        variance = covariance.diagonal(dim1=1, dim2=2).T
        torch.testing.assert_close(basis.variance(pair, scale, 2**20), variance)
        joint = torch.einsum("knqoi,lmqoi,qoi->nkml", expected, expected, scale).flatten(0, 1).flatten(1)
        torch.testing.assert_close(basis.joint(pair, scale, 2**20), joint)
        left, right = basis._rotated(pair, 1, 3)
        torch.testing.assert_close(left, torch.einsum("knqro,qop->knqrp", g[:, 1:3], output))
        torch.testing.assert_close(right, torch.einsum("nqri,qij->nqrj", whole[1:3], inner))


@pytest.mark.parametrize(("groups", "bias"), list(product((1, 2), (False, True))))
def test_several_images_of_an_example(groups: int, bias: bool) -> None:
    """As the frames of a film: their positions are side by side."""
    x, window = random(EXAMPLES, 3, 2 * groups, 4, 5), Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    use = UseInputs(
        lambda part: window.patches(x[part], groups), lambda part: Images(window, x[part].flatten(0, 1), groups)
    )
    matrix = random(groups, 18 + bias, 7)
    a = window.patches(x, groups)
    whole = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1) if bias else a
    found = Inputs((use,), EXAMPLES, bias).times(1, 3, matrix)
    torch.testing.assert_close(found, torch.einsum("nqri,qij->nqrj", whole[1:3], matrix))
