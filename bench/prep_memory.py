"""Peak memory of a process, and time, of every stage of data preparation.

    python -m bench.prep_memory --mono ../shared/data/corpus/mono --para ../shared/data/corpus/para --out runs/memory

A stage that is complete in --out is not run again, and then left out of the table.
"""

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Settings:
    """What is run."""

    mono: Path
    """Folder of documents, `<lang>.txt[.xz|...]`."""
    para: Path
    """Folder of translation pairs."""
    out: Path
    """Folder to work in."""
    processes: int = 2
    size: int = 65_536
    """Ids of the vocabularies."""
    sentences: int = 1_000_000
    """Lines for stage vocab, and of a language at most for stage vocap."""
    rows: int = 20_000
    """Rows of mix, of each task."""
    stages: tuple[str, ...] = ("vocab", "encode", "mix", "verify", "stats", "vocap")


def commands(settings: Settings) -> dict[str, tuple[list[object], Path | None]]:
    """Flags of every stage, and the file that it writes last."""
    out, text = settings.out, ["--mono", settings.mono, "--para", settings.para]
    size = ["--size", settings.size, "--sentences", settings.sentences]
    rows = ["--mono-rows", settings.rows, "--para-rows", settings.rows]
    vocab = ["--vocab", out / "vocab"]
    return {
        "vocab": ([*text, *size, "--out", out / "vocab"], out / "vocab" / "manifest.json"),
        "encode": ([*text, *vocab, "--out", out / "encoded"], out / "encoded" / "para" / "manifest.json"),
        "mix": (
            ["--encoded", out / "encoded", *vocab, *rows, "--out", out / "mixed"],
            out / "mixed" / "para" / "manifest.json",
        ),
        "verify": (["--data", out / "mixed"], None),
        "stats": (["--encoded", out / "encoded", "--data", out / "mixed", "--out", out / "stats"], None),
        "vocap": ([*text, *size, "--out", out / "vocap"], out / "vocap" / "manifest.json"),
    }


def run(stage: str, flags: list[object], processes: int) -> tuple[float, float, float]:
    """(peak memory of one process in MiB, seconds, seconds of processor time); also of a stage that is interrupted."""
    command = [sys.executable, "-m", "data_prep", stage, *map(str, flags), "--processes", str(processes)]
    started = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # the stage has it too, and ends
            _, _, usage = os.wait4(child.pid, 0)
            break
    # ru_maxrss is the largest of the process and of all that it has waited for, in KiB
    return usage.ru_maxrss / 1024, time.monotonic() - started, usage.ru_utime + usage.ru_stime


def main(settings: Settings) -> None:
    """Print a Markdown table."""
    print("| stage | peak of a process, MiB | s | s of processor time |\n|---|---|---|---|", flush=True)
    for stage, (flags, written) in commands(settings).items():
        if stage in settings.stages and not (written and written.exists()):
            peak, seconds, processor = run(stage, flags, settings.processes)
            print(f"| {stage} | {peak:,.0f} | {seconds:.0f} | {processor:.0f} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Settings))
