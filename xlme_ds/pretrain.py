"""Pre-training: `deepspeed --module xlme_ds.pretrain --recipe NAME --data DIR --out DIR [--section.key value ...]`.

The same with `python -m xlme_ds.pretrain` runs on one process. A second call with the same folder resumes.
"""

import os
import sys
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from .cli import fail, parse
from .config import RunConfig
from .train.stop import StopRequest


@dataclass(frozen=True)
class Pretrain:
    """Arguments of the command."""

    data_folder: Annotated[Path, tyro.conf.arg(name="data")]
    """Folder that `data_prep mix` wrote."""
    out: Path
    """Run folder; an existing one is resumed."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    heldout: Path | None = None
    """Mixed folder of text kept out of training, for evaluation."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    stop = StopRequest()  # before torch is loaded, which takes a while: a job may be told to leave at any time
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed 0.19.8 on torch 2.13's renamed collectives
    try:
        command = parse(Pretrain, __doc__ or "", sys.argv[1:] if arguments is None else arguments)
        from .engine.ranks import SharedError, rendezvous
        from .validate import validate

        validate(command.run, int(rendezvous(os.environ).get("WORLD_SIZE", 1)))
    except ValueError as error:
        fail("xlme_ds.pretrain", error)
    from .train.run import pretrain

    report = partial(_report, command)
    try:
        pretrain(command.run, command.data_folder, command.out, command.heldout, stop, report)
    except SharedError as error:
        fail("xlme_ds.pretrain", error)


def _report(command: Pretrain, state: dict[str, Any]) -> Path:
    """Write what is shown of a finished run, whose weights are `state`, into its folder; returns the page."""
    from .evaluate.showcase import showcase
    from .report.run_page import write_report

    showcase(command.out, command.run, state, command.data_folder, command.heldout)
    return write_report(command.out)


if __name__ == "__main__":
    main()
    from .engine.ranks import leave

    leave()
