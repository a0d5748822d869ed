"""Time in turns with a plain pass, peak memory, and exponents of growth."""

from __future__ import annotations

import gc
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.workloads import Batch

Result = dict[str, Any]


def plain_pass(model: nn.Module, batches: Iterable[Batch]) -> None:
    """One forward and backward pass in training mode; the model comes back as it was."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    model.train()
    for x, y in batches:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
    model.zero_grad()
    model.eval()
    with torch.no_grad():
        for buffer, kept in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(kept)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass
class Stopwatch:
    """Time spent inside some function during a call, to be taken off."""

    total: float = 0.0

    @contextmanager
    def around(self, owner: Any, name: str) -> Iterator[None]:
        """Time every call of `owner.name` while the block runs."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.total += time.perf_counter() - start

        setattr(owner, name, timed)
        try:
            yield
        finally:
            setattr(owner, name, inner)


def in_turns(
    plain: Callable[[], object],
    call: Callable[[], object],
    repeats: int,
    budget: float,
    apart: Stopwatch | None = None,
) -> Result:
    """Medians of `plain` and `call`, run by turns, and their ratio; what `apart` saw is taken off the call.

    At most `repeats` turns, at least one, and none is begun after `budget` seconds.
    """
    apart = apart or Stopwatch()
    plains: list[float] = []
    calls: list[float] = []
    off: list[float] = []
    start = time.perf_counter()
    while not calls or (len(calls) < repeats and time.perf_counter() - start < budget):
        plains.append(seconds(plain))
        before = apart.total
        whole = seconds(call)
        off.append(apart.total - before)
        calls.append(whole - off[-1])
    result: Result = {"plain_s": statistics.median(plains), "seconds": statistics.median(calls), "runs": len(calls)}
    result["ratio"] = result["seconds"] / result["plain_s"]
    if any(off):
        result["decompose_s"] = statistics.median(off)
    return result


def kernels() -> str:
    """Which vector instructions torch uses, and whose processor of which family has them: some libraries use fewer on
    others', and some families do half as much with the same instructions.
    """
    told = Path("/proc/cpuinfo")
    lines = [line.partition(":") for line in told.read_text().splitlines()] if told.is_file() else []
    said = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    whose = [said.get("vendor_id", ""), f"family {said['cpu family']}" if "cpu family" in said else ""]
    return torch.backends.cpu.get_cpu_capability() + (f" ({', '.join(filter(None, whose))})" if any(whose) else "")


def peak_mb() -> float:
    """The most memory this process has had, resident, in MB."""
    status = Path("/proc/self/status")
    if status.is_file():  # Linux, where getrusage begins with the peak of the process that started this one
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS


def forget_peak() -> None:
    """Count the peak from now on, where the system can."""
    gc.collect()
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def limit_memory(share: float = 0.8) -> None:
    """Let an allocation fail rather than the machine, where the system can."""
    if sys.platform == "linux":
        pages = {line.split()[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
        most = int(pages["MemTotal:"] * 1024 * share)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def megabytes(tensors: Iterable[torch.Tensor]) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log value on log size by least squares: 1 is linear, 0 constant."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
