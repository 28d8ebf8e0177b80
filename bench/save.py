"""How long a save holds training up: copying to host memory, against waiting for the disk.

    python -m bench.save [--json] [--parameters 100000000] [--folder /tmp]

One process writes weights and moments of that many parameters (12 bytes each) as training does; the file is on the disk
(fsync) at `on_disk_s`. `loads_s` is reading it back. A first round warms up and is not shown.
"""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from xlme_ds.checkpoint.state_files import StateReader, StateWriter, state_file
from xlme_ds.engine.state import Bucket, Piece, read_state, write_state


@dataclass(frozen=True)
class Settings:
    """What is saved, and where."""

    parameters: int = 100_000_000
    folder: Path | None = None
    """Where the file goes; without it the folder for temporary files."""
    json: bool = False
    """Print JSON."""


def measure(parameters: int, folder: Path, buffer_bytes: int) -> dict[str, float]:
    """Seconds until a save gives control back, until it is on the disk, and of a load."""
    master = torch.nn.Parameter(torch.randn(parameters))
    bucket = Bucket([Piece("w", 0, parameters, 0)], torch.optim.AdamW([master], fused=True), master)
    bucket.step = 1
    begin = time.perf_counter()
    writer = StateWriter(folder / state_file(0, 1), buffer_bytes)
    write_state([bucket], writer)
    copied = time.perf_counter()
    writer.result()
    written = time.perf_counter()
    read_state([bucket], StateReader([writer.path]))
    return {"holds_up_s": copied - begin, "on_disk_s": written - begin, "loads_s": time.perf_counter() - written}


def main(settings: Settings) -> None:
    """Measure both ways and print them."""
    result: dict[str, object] = {"state_gib": settings.parameters * 12 / 2**30}
    for name, buffer_bytes in (("warm-up", 1 << 40), ("in the background", 1 << 40), ("waiting for the disk", 0)):
        with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
            measured = measure(settings.parameters, Path(folder), buffer_bytes)
        if name != "warm-up":
            result[name] = measured
    if settings.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key}: {value}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
