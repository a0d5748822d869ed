"""Tests run many tiny operations: one thread each, so that workers do not fight over the cores."""

from typing import Any

import pytest
import torch

from lapwing.tape import Tape

torch.set_num_threads(1)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many examples each recorded pass has."""
    seen: list[int] = []
    run = Tape.run

    def counted(self: Tape, inputs: Any, create_graph: bool = False) -> Any:
        record = run(self, inputs, create_graph)
        seen.append(record.examples)
        return record

    monkeypatch.setattr(Tape, "run", counted)
    return seen
