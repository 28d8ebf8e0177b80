"""The ten-minute run: sample corpus, data preparation, pre-training, report. `make pretrain` calls it.

Every step is the command that a large run uses, and each is printed before it runs. Finished steps are skipped.
"""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from .cli import fail, program
from .folders import LOCK, empty, lock
from .recipes import recipe
from .run_commands import environment, launch, run

RUN = recipe("quickstart")
ROW_TOKENS = RUN.model.max_positions
# One pass for the whole run. The corpus is short: every language repeats in it, in new company and with new masks.
MONO_ROWS = RUN.train.steps * RUN.data.mono_rows
PARA_ROWS = RUN.train.steps * RUN.data.para_rows
_MARK = ".quickstart"  # a file in every folder that the quickstart made
HELDOUT_MONO_ROWS, HELDOUT_PARA_ROWS = 192, 280  # every held-out document and pair, about once


@dataclass(frozen=True)
class Quickstart:
    """Arguments of the command."""

    out: Path
    """Run folder; the prepared data go into its subfolder data/."""
    fresh: bool = False
    """Delete what is in the run folder first; refused for a folder that the quickstart did not make."""
    processes: int = 2
    """Training processes, and workers of data preparation."""


def preparation(folder: Path, processes: int) -> list[list[str]]:
    """Arguments of `python -m data_prep` for every stage, in order."""
    data = shlex.quote(str(folder))
    vocab, train, encoded = f"{data}/vocab", f"{data}/corpus/train", f"{data}/encoded"

    def prepare(split: str, mono_rows: int, para_rows: int, alpha: float) -> list[str]:
        text = f"{data}/corpus/{split}"
        return [
            f"encode --mono {text}/mono --para {text}/para --vocab {vocab} --out {encoded}/{split} --processes "
            f"{processes}",
            f"mix --encoded {encoded}/{split} --vocab {vocab} --out {data}/{split} --row-tokens {ROW_TOKENS} "
            f"--mono-rows {mono_rows} --para-rows {para_rows} --alpha {alpha} --processes {processes}",
        ]

    stages = [
        f"sample --out {data}/corpus",
        f"vocab --mono {train}/mono --para {train}/para --out {vocab} --size {RUN.model.vocabulary} "
        f"--sentences 100000 --processes {processes}",
        *prepare("train", MONO_ROWS, PARA_ROWS, alpha=0.7),
        *prepare("heldout", HELDOUT_MONO_ROWS, HELDOUT_PARA_ROWS, alpha=1.0),
        f"verify --data {data}/train",
        f"stats --encoded {encoded}/train --data {data}/train --out {data}/stats",
    ]
    return [shlex.split(stage) for stage in stages]


def training(data: Path, out: Path, processes: int) -> list[str]:
    """The training command."""
    folders = ["--data", str(data / "train"), "--heldout", str(data / "heldout"), "--out", str(out)]
    return launch("xlme_ds.pretrain", processes, ["--recipe", RUN.name, *folders])


def begin(out: Path, fresh: bool) -> None:
    """Mark the folder `out`, which is locked, as made by the quickstart if it is empty; with `fresh` empty it before.

    Raises ValueError where `fresh` would delete what has no such mark.
    """
    content = {path for path in out.iterdir() if path.name != LOCK}
    if fresh and content:
        if out / _MARK not in content:
            raise ValueError(
                f"{out} was not made by the quickstart (it has no {_MARK}): --fresh would delete what is in it, "
                "name another --out"
            )
        empty(out, keep=[_MARK])
    if fresh or not content:
        (out / _MARK).touch()


def main(words: list[str] | None = None) -> None:
    """Run every step that is not done yet."""
    arguments = tyro.cli(Quickstart, prog=program("quickstart"), description=__doc__, args=words)
    if arguments.processes < 1:
        fail("xlme_ds.quickstart", ValueError(f"--processes is {arguments.processes}: it must be at least 1"))
    out: Path = arguments.out
    try:
        with lock(out):
            begin(out, arguments.fresh)
    except (ValueError, OSError) as error:
        fail("xlme_ds.quickstart", error)
    # The quickstart is a run for processors, also where there is a GPU: its ZeRO settings and sizes are chosen for
    # them.
    settings = environment() | {"DS_ACCELERATOR": "cpu"}
    data = out / "data"
    if not (data / "stats" / "stats.html").exists():
        for stage in preparation(data, arguments.processes):
            run([sys.executable, "-m", "data_prep", *stage], settings, quiet=stage[0] == "stats")
    finished = out / "finished.json"
    if finished.exists():
        print(f"{out} is complete; open {out / 'report.html'} (make pretrain FRESH=1 starts over)")
        return
    threads = max((os.cpu_count() or 1) // arguments.processes, 1)
    settings |= {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    run(training(data, out, arguments.processes), settings)
    if not finished.exists():  # stopped, or the launcher was killed, which it does not tell
        sys.exit(1)


if __name__ == "__main__":
    main()
