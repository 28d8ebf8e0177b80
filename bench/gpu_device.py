"""The device that `bench.gpu` measures: what it is, its clock, its memory and the rate of its matrix products."""

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GIB = 2**30


@dataclass(frozen=True)
class Device:
    """`kind` is cuda (the first visible GPU) or cpu."""

    kind: str

    @property
    def torch(self) -> torch.device:
        """As torch names it."""
        return torch.device(self.kind)

    def machine(self) -> dict[str, Any]:
        """The machine in words."""
        words: dict[str, Any] = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        }
        if self.kind == "cpu":
            return {"device": f"CPU, {platform.machine()}"} | words
        gpu = torch.cuda.get_device_properties(0)
        return {
            "device": gpu.name,
            "gpus": f"{torch.cuda.device_count()} visible, one used",
            "memory_gib": round(gpu.total_memory / GIB, 1),
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        } | words

    def seconds(self, run: Callable[[], object], rounds: int, warm_up: int = 2) -> float:
        """Median time of `run`, on the GPU between events in its stream."""
        for _ in range(warm_up):
            run()
        return statistics.median(self._once(run) for _ in range(rounds))

    def _once(self, run: Callable[[], object]) -> float:
        if self.kind == "cpu":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def release(self) -> None:
        """Give freed memory back, and let the peak count from here."""
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """The most memory allocated by tensors since `release`; None where torch does not count it."""
        return torch.cuda.max_memory_allocated() / GIB if self.kind == "cuda" else None


def matmul(device: Device, dtype: str, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Rate of the product [M, K] × [K, N] of normal random numbers (zeros would run faster), in TFLOP/s."""
    m, k, n = shape
    a, b = (torch.randn(size, device=device.torch).to(DTYPES[dtype]) for size in ((m, k), (k, n)))
    several = 10
    seconds = device.seconds(lambda: [torch.mm(a, b) for _ in range(several)], rounds) / several
    return {"tflops": 2 * m * k * n / seconds / 1e12}
