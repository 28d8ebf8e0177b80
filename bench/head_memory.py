"""Peak memory of the vocabulary softmax at masked positions: in chunks, and with all logits at once.

    python -m bench.head_memory [--json] [--vocabulary 524288] [--positions 512] [--chunks 4096 8192 32768] [--dtype
    bfloat16]

Measured on the CPU as the growth of the process's largest resident set (VmHWM, Linux) over a forward and backward pass,
each in a process of its own; what the weights' and inputs' gradients take is subtracted, both forms need it. A chunk is
M × C float32 numbers.
"""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from xlme_ds.models.heads import MaskedTokens, masked_softmax

MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """Sizes of the measured head."""

    vocabulary: int = 524_288
    positions: int = 512
    width: int = 256
    chunks: tuple[int, ...] = (4096, 8192, 32_768)
    """Ids at once; 0 is added by itself: all logits at once, by plain torch."""
    blocks: int = 1
    """Parameters that the embedding is stored as."""
    dtype: str = "float32"
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Measured:
    """Of one form: `chunk` 0 is the full one; `extra` bytes at the peak beyond weights, inputs and gradients."""

    chunk: int
    extra: int
    chunk_bytes: int
    loss: float

    @property
    def in_chunks(self) -> float:
        """The extra memory as a number of chunks."""
        return self.extra / self.chunk_bytes


def full_softmax(hidden_MD: Tensor, blocks: list[Tensor], bias_V: Tensor, targets_M: Tensor) -> MaskedTokens:
    """The usual way: every logit at once, and a draw from their softmax."""
    logits_MV = (torch.cat([hidden_MD @ block.t() for block in blocks], dim=1) + bias_V).float()
    nll_M = F.cross_entropy(logits_MV, targets_M, reduction="none")
    with torch.no_grad():
        sample_M = torch.multinomial(logits_MV.softmax(1), 1).squeeze(1)
    return MaskedTokens(nll_M, sample_M, logits_MV.argmax(1))


def measure(settings: Settings, chunk: int) -> Measured:
    """Run one form in this process and read its peak."""
    run_once(settings, chunk, vocabulary=2048, positions=8)  # thread pools and libraries are not the head's memory
    loss, extra = run_once(settings, chunk, settings.vocabulary, settings.positions)
    return Measured(chunk, extra, settings.positions * (chunk or settings.vocabulary) * 4, loss)


def run_once(settings: Settings, chunk: int, vocabulary: int, positions: int) -> tuple[float, int]:
    """Loss, and bytes at the peak of a forward and backward pass beyond what was there and the gradients."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, settings.dtype)

    def parameter(*shape: int) -> Tensor:
        values = torch.empty(shape, dtype=dtype)
        return values.normal_(0.0, 0.02 if shape[0] != positions else 1.0, generator=generator).requires_grad_()

    size = -(-vocabulary // settings.blocks)
    blocks = [parameter(min(size, vocabulary - start), settings.width) for start in range(0, vocabulary, size)]
    hidden, bias = parameter(positions, settings.width), parameter(vocabulary)
    targets = torch.randint(vocabulary, (positions,), generator=generator)
    uniforms = torch.rand(positions, generator=generator)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory("VmRSS")
    arguments = hidden, blocks, bias, targets
    head = masked_softmax(*arguments, uniforms, chunk) if chunk else full_softmax(*arguments)
    loss = head.nll_M.mean()
    loss.backward()
    gradients = sum(t.numel() * t.element_size() for t in (*blocks, hidden, bias))
    return float(loss.detach()), memory("VmHWM") - before - gradients


def memory(field: str) -> int:
    """A field of this process's /proc status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}: this measurement needs Linux")


def measure_all(settings: Settings) -> list[Measured]:
    """The full form, then every chunk size, each in a fresh process."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = (
        "65536"  # freed memory goes back at once, so that peaks are the program's own
    )
    results = []
    for chunk in (0, *settings.chunks):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            results.append(pool.submit(measure, settings, chunk).result())
    return results


def main(arguments: list[str] | None = None) -> None:
    """Measure and print a table, or JSON."""
    settings = tyro.cli(Settings, description=__doc__, args=arguments)
    results = measure_all(settings)
    if settings.json:
        print(
            json.dumps(
                {"settings": asdict(settings), "results": [asdict(r) | {"in_chunks": r.in_chunks} for r in results]},
                indent=1,
            )
        )
        return
    print(
        f"V = {settings.vocabulary:,}, {settings.positions} masked positions, width {settings.width}, {settings.dtype}, "
        f"{settings.blocks} block(s); memory beyond weights and gradients at the peak of forward and backward"
    )
    print(f"{'form':<18}{'extra MiB':>12}{'chunk MiB':>12}{'chunks':>9}{'loss':>10}")
    for result in results:
        name = f"chunks of {result.chunk}" if result.chunk else "all logits"
        print(
            f"{name:<18}{result.extra / MIB:>12,.0f}{result.chunk_bytes / MIB:>12,.0f}{result.in_chunks:>9.2f}{result.loss:>10.5f}"
        )


if __name__ == "__main__":
    main()
