"""The axes that pictures are drawn on, and the house's colors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lapwing.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRAY, FAINT = "#22303c", "#8a949e", "#d7dce0"
COLORS = ("#00798c", "#d1495b", "#e09f3e", "#5e548e", "#6a994e", "#3d5a80")

_STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.titlepad": 10, "axes.titlecolor": INK, "axes.edgecolor": GRAY, "axes.labelcolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "text.color": INK,
    "xtick.color": GRAY, "ytick.color": GRAY, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
}  # fmt: skip


@contextmanager
def house_style() -> Iterator[None]:
    """Make axes and figures inside in the house's style."""
    try:
        import matplotlib
    except ModuleNotFoundError as missing:
        raise InputError('Pictures need matplotlib: pip install "lapwing[plot]".') from missing
    with matplotlib.rc_context(_STYLE):
        yield


def canvas(ax: Axes | None = None, width: float = 5.5, height: float = 3.6) -> Axes:
    """`ax` itself, or the axes of a new figure of this size in inches, which no window opens for."""
    if ax is not None:
        return ax
    with house_style():
        from matplotlib.figure import Figure

        return Figure(figsize=(width, height), layout="constrained").add_subplot()
