"""The documentation runs: every ```python block of a page, in order, in one namespace.

A block with `<!-- notest -->` on the line above is shown but not run.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lapwing import __version__

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "lapwing"
FENCE = re.compile(
    r"^(?P<indent>[ \t]*)(?P<skip><!-- notest -->\n(?P=indent))?```python\n(?P<code>.*?)^(?P=indent)```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> list[str]:
    """The blocks to run, each after as many empty lines as make its line numbers those of the page."""
    return [
        "\n" * text.count("\n", 0, match.start("code")) + textwrap.dedent(match["code"])
        for match in FENCE.finditer(text)
        if match["skip"] is None
    ]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def has_code(page: Path) -> bool:
    return bool(blocks(page.read_text(encoding="utf-8")))


def modules() -> list[str]:
    """The dotted names of all module files of the package, `__init__` and `version` left out."""
    names = []
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        if parts[-1] not in ("__init__", "version"):
            names.append(".".join(parts))
    return names


@pytest.fixture
def reproducible() -> Iterator[None]:
    """A seed, and one thread: small matrices run faster so, and the same on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", [page for page in PAGES if has_code(page)], ids=name)
def test_page_runs(page: Path, reproducible: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "documentation"}
    for block in blocks(page.read_text(encoding="utf-8")):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_fence_that_is_neither_run_nor_rendered(page: Path) -> None:
    # Words after "```python" keep mkdocs from seeing the fence, and the block from being run.
    assert re.findall(r"^[ \t]*```python[^\n]+", page.read_text(encoding="utf-8"), re.MULTILINE) == []


def test_blocks_are_found_in_order_and_marked_ones_left_out() -> None:
    text = "# A\n\n```python\na = 1\n```\n\n<!-- notest -->\n```python\nraise\n```\n\n"
    text += "    ```python\n    b = a\n    ```\n\n```text\nno\n```\n"
    assert [block.strip() for block in blocks(text)] == ["a = 1", "b = a"]
    assert blocks(text)[0].count("\n", 0, blocks(text)[0].index("a")) == 3


@pytest.mark.parametrize("module", modules())
def test_module_has_a_reference_page(module: str) -> None:
    directive = re.compile(rf"^::: {re.escape(module)}$", re.MULTILINE)
    pages = [page for page in (ROOT / "docs" / "reference").rglob("*.md") if directive.search(page.read_text("utf-8"))]
    assert len(pages) == 1, f"{module} is on {len(pages)} pages of docs/reference; it belongs on exactly one."


def test_reference_has_no_page_of_a_module_that_is_gone() -> None:
    known = set(modules())
    for page in (ROOT / "docs" / "reference").rglob("*.md"):
        named = re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE)
        gone = [name for name in named if name not in known and not (PACKAGE.parent / Path(*name.split("."))).is_dir()]
        assert not gone, f"{page.name} documents {gone}, which do not exist."


def test_changelog_speaks_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[(Unreleased|{re.escape(__version__)})\]", text, re.MULTILINE)
