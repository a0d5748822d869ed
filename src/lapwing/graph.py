"""What autograd's graph says about a forward pass: which uses and parameters the output depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

# Backward formulas that are known to run under `is_grads_batched` and gain from it.
_BATCHABLE = {
    "AddBackward0", "AddmmBackward0", "MmBackward0", "TBackward0", "ReluBackward0",
    "TanhBackward0", "SigmoidBackward0", "GeluBackward0", "SiluBackward0", "SoftplusBackward0",
    "EluBackward0", "LeakyReluBackward0", "ViewBackward0", "UnsafeViewBackward0", "MulBackward0",
    "SubBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "CloneBackward0", "ReshapeAliasBackward0",
}  # fmt: skip


@dataclass(frozen=True)
class Graph:
    """`reached[i]`: the output depends on use i. `frontier`: the uses behind which there is no other,
    so that a backward pass towards them visits all. `leaves`: identities of the parameters reached.
    """

    reached: tuple[bool, ...]
    frontier: tuple[int, ...]
    leaves: frozenset[int]
    batchable: bool


def walk(output: Tensor, edges: list[GradientEdge]) -> Graph:
    """Visit the graph behind `output` once, children first."""
    targets = {edge.node for edge in edges}
    behind: dict[Any, bool] = {}
    leaves: set[int] = set()
    kinds: set[str] = set()
    stack: list[tuple[Any, bool]] = [(output.grad_fn, False)]
    while stack:
        node, children_done = stack.pop()
        if children_done:
            behind[node] = any(child in targets or behind[child] for child, _ in node.next_functions if child)
            continue
        if node in behind:
            continue
        behind[node] = False
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        else:
            kinds.add(node.name())
        stack.append((node, True))
        stack.extend((child, False) for child, _ in node.next_functions if child and child not in behind)
    reached = tuple(edge.node in behind for edge in edges)
    frontier = tuple(i for i, edge in enumerate(edges) if reached[i] and not behind[edge.node])
    return Graph(reached, frontier, frozenset(leaves), kinds <= _BATCHABLE)
