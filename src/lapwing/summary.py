"""A table of what was fitted and how."""

from __future__ import annotations

from lapwing.curvature import Block
from lapwing.gradients import Layer
from lapwing.posterior import Posterior
from lapwing.priors import FactoredDamping
from lapwing.tape import Tape


def summarize(tape: Tape, posterior: Posterior) -> str:
    """One line per layer: parameters, size, path of the gradients, structure, prior precision."""
    rows = [("layer", "parameters", "size", "gradients", "structure", "prior precision")]
    for block in posterior.spectrum.blocks:
        for layer in block.layers:
            path = f"fallback ({tape.fallback().method})" if layer.path == "fallback" else layer.path
            rows.append((
                layer.name, ", ".join(name.rpartition(".")[2] for name in layer.parameters), _size(block, layer),
                path, block.accumulator.kind, _precision(posterior, layer.parameters),
            ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    curvature = posterior.spectrum.curvature
    lines.insert(1, "  ".join("-" * width for width in widths))
    dropped = f" (without {100 * curvature.dropped:.2g} % of its trace)" if curvature.dropped else ""
    lines.append(
        f"{curvature.size:,} Bayesian parameters, {curvature.examples:g} examples, structure {curvature.structure}, "
        f"curvature {curvature.kind}{dropped}, temperature {float(posterior.temperature):g} (multiplies the likelihood)"
    )
    return "\n".join(lines)


def _size(block: Block, layer: Layer) -> str:
    chosen = block.chosen_of(layer)
    return f"{layer.size:,}" if chosen is None else f"{chosen.numel():,} of {layer.size:,}"


def _precision(posterior: Posterior, names: tuple[str, ...]) -> str:
    if isinstance(posterior.prior, FactoredDamping):
        return repr(posterior.prior)
    values = [posterior.precisions[name].detach() for name in names]
    low, high = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
