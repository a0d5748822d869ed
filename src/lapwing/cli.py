"""The `lapwing` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lapwing import demo
from lapwing.errors import LapwingError
from lapwing.version import __version__


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `arguments` default to those of the process."""
    options = _parser().parse_args(arguments)
    try:
        demo.run(options.output, options.seed, options.noise)
    except LapwingError as error:
        raise SystemExit(f"lapwing {options.command}: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lapwing", description="Laplace approximations that turn any trained PyTorch network into a Bayesian one."
    )
    parser.add_argument("--version", action="version", version=f"lapwing {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    show = commands.add_parser(
        "demo",
        help="a plain network against its Laplace approximation, in a minute and one picture",
        description="Train a small network on scikit-learn's digits, make it Bayesian, compare the two in a table and "
        "one picture.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    show.add_argument("--output", type=Path, default=Path("lapwing-demo.png"), help="the picture: .png, .pdf or .svg")
    show.add_argument("--seed", type=int, default=0, help="of data splits, noise and initial weights")
    show.add_argument("--noise", type=float, default=demo.NOISE, help="standard deviation of the noise on the pixels")
    return parser


if __name__ == "__main__":
    main()
