"""What autograd's graph says about a forward pass: which uses and parameters the output depends on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
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


# Operations that may put examples into an order that depends on the data.
_REORDERING = {
    "IndexBackward0", "IndexSelectBackward0", "GatherBackward0", "SortBackward0", "SortBackward1", "TakeBackward0",
    "MaskedSelectBackward0", "MaskedScatterBackward0", "IndexPutBackward0", "IndexAddBackward0", "ScatterBackward0",
    "ScatterAddBackward0", "IndexCopyBackward0", "TopkBackward0", "RollBackward0",
}  # fmt: skip


@dataclass(frozen=True)
class Graph:
    """`reached[i]`: the output depends on use i. `frontier`: the uses behind which there is no other,
    so that a backward pass towards them visits all. `leaves`: the parameters reached, by identity, and how often.
    `reorders`: some operation may have put the examples into an order of its own. `divided`: into which pieces tensors
    were split along their first dimension, as ragged batches are.
    """

    reached: tuple[bool, ...]
    frontier: tuple[int, ...]
    leaves: Mapping[int, int]
    batchable: bool
    reorders: bool
    divided: tuple[tuple[int, ...], ...] = ()


def walk(output: Tensor, edges: list[GradientEdge], stop: object = None) -> Graph:
    """Visit the graph behind `output` once, children first, and not beyond the node `stop`."""
    targets = {edge.node for edge in edges}
    behind: dict[Any, bool] = {}
    leaves: Counter[int] = Counter()
    kinds: set[str] = set()
    divided: list[tuple[int, ...]] = []
    stack: list[tuple[Any, bool]] = [(output.grad_fn, False)]
    while stack:
        node, children_done = stack.pop()
        if children_done:
            children = [child for child, _ in node.next_functions if child]
            behind[node] = any(child in targets or behind.get(child, False) for child in children)
            continue
        if node in behind or node is stop:
            continue
        behind[node] = False
        leaves.update(id(child.variable) for child, _ in node.next_functions if hasattr(child, "variable"))
        if not hasattr(node, "variable"):
            kinds.add(node.name())
            if node.name() == "SplitWithSizesBackward0" and node._saved_dim == 0:
                divided.append(tuple(node._saved_split_sizes))
        stack.append((node, True))
        stack.extend((child, False) for child, _ in node.next_functions if child and child not in behind)
    reached = tuple(edge.node in behind for edge in edges)
    frontier = tuple(i for i, edge in enumerate(edges) if reached[i] and not behind[edge.node])
    return Graph(reached, frontier, leaves, kinds <= _BATCHABLE, bool(kinds & _REORDERING), tuple(divided))


_PRODUCTS = ("mm", "Mv", "mv", "Convolution", "Rnn", "MkldnnLinear")  # parts of the names of products with a matrix


def nearest(output: Tensor, nodes: Collection[object]) -> set[object]:
    """Those of `nodes` from which a path leads to `output` that passes neither another of them nor any other product
    with a matrix of parameters (one that is computed, such as a normalized weight).
    """
    found: set[object] = set()
    seen: set[object] = set()
    stack: list[Any] = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        children = [child for child, _ in node.next_functions if child]
        if node in nodes:
            found.add(node)
        elif not (
            any(part in node.name() for part in _PRODUCTS) and any(_of_parameters(child, nodes) for child in children)
        ):
            stack.extend(children)
    return found


def _of_parameters(node: Any, nodes: Collection[object]) -> bool:
    """Whether parameters are behind a node, at least one of them a matrix, and none of `nodes`."""
    seen: set[object] = set()
    stack, matrices = [node], False
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        if node in nodes:
            return False
        seen.add(node)
        matrices |= hasattr(node, "variable") and node.variable.dim() > 1
        stack.extend(child for child, _ in node.next_functions if child)
    return matrices
