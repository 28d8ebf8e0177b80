"""The masked head's peak memory, counted in chunks, against plain torch's with all logits at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT

VOCABULARY, POSITIONS, WIDTH, CHUNK = 65_536, 256, 256, 8192
CHUNK_BYTES = POSITIONS * CHUNK * 4
# Loss, and bytes at the peak of a forward and backward pass beyond the weights, inputs and their gradients.
MEASURE = """
import sys
from pathlib import Path
import torch
import torch.nn.functional as F
from xlme_ds.models.masked_head import vocabulary_softmax

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

def measure(chunk, vocabulary, positions, width):
    generator = torch.Generator().manual_seed(0)
    sizes = [vocabulary // 4] * 4
    blocks = [torch.empty(size, width).normal_(0, 0.02, generator=generator).requires_grad_() for size in sizes]
    hidden = torch.empty(positions, width).normal_(generator=generator).requires_grad_()
    bias = torch.empty(vocabulary).normal_(0, 0.02, generator=generator).requires_grad_()
    targets = torch.randint(vocabulary, (positions,), generator=generator)
    uniforms = torch.rand(positions, generator=generator)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory("VmRSS")
    if chunk:
        nll = vocabulary_softmax(hidden, blocks, bias, targets, uniforms, chunk).nll_M
    else:
        logits = torch.cat([hidden @ block.t() for block in blocks], dim=1) + bias
        nll = F.cross_entropy(logits, targets, reduction="none")
        torch.multinomial(logits.detach().softmax(1), 1)
    loss = nll.mean()
    loss.backward()
    gradients = sum(4 * tensor.numel() for tensor in (*blocks, hidden, bias))
    return float(loss.detach()), memory("VmHWM") - before - gradients

chunk, *sizes = map(int, sys.argv[1:])
measure(chunk, 2048, 8, sizes[2])  # thread pools and libraries are not the head's memory
print(*measure(chunk, *sizes))
"""


def measured(chunk: int) -> tuple[float, int]:
    """Loss and bytes in a process of its own, which gives freed memory back at once."""
    words = map(str, (chunk, VOCABULARY, POSITIONS, WIDTH))
    variables = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *words], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loss, extra = done.stdout.split()
    return float(loss), int(extra)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_the_head_takes_no_more_than_a_few_chunks() -> None:
    full_loss, full = measured(0)
    loss, extra = measured(CHUNK)
    # One chunk, a product on its way into it, and some megabytes of the process's own; a chunk is 8 MiB here.
    assert extra <= 3 * CHUNK_BYTES
    # The measurement sees what it should: logits, their softmax and their gradient for all 256 positions are 8 chunks
    # each.
    assert full >= 2 * 8 * CHUNK_BYTES
    assert loss == pytest.approx(full_loss, rel=1e-6)
