"""Pre-training: `deepspeed --module xlme_ds.pretrain --recipe NAME --data DIR --out DIR [--section.key value ...]`.

The same with `python -m xlme_ds.pretrain` runs on one process. A second call with the same folder resumes.
"""

import os
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from .cli import fail, parse
from .config import RunConfig
from .train.stop import StopRequest, Watchdog


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
    try:
        command = parse(Pretrain, __doc__ or "", sys.argv[1:] if arguments is None else arguments)
        from .engine.ranks import rendezvous
        from .validate import validate

        validate(command.run, int(rendezvous(os.environ).get("WORLD_SIZE", 1)))
    except ValueError as error:
        fail("xlme_ds.pretrain", error)
    from .engine.ranks import SharedError

    try:
        pretrain(command.run, command.data_folder, command.out, command.heldout, stop)
    except SharedError as error:
        fail("xlme_ds.pretrain", error)


def pretrain(config: RunConfig, data: Path, out: Path, heldout: Path | None, stop: StopRequest) -> None:
    """Train `config` on `data` into `out`, from its newest checkpoint if it has one; collective over the launched
    ranks."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed 0.19.8 on torch 2.13's renamed collectives
    from .checkpoint.checkpoints import Checkpoints
    from .data.loader import Loader
    from .engine.build import build_engine, open_data, resolve_precision
    from .engine.ranks import SharedError, data_parallel, gather, on_all_ranks, process_group
    from .models.init import Known
    from .train.run import heldout_data, pretraining, train
    from .train.run_folder import RunFolder
    from .trained import starting_weights

    watchdog = Watchdog(config.train.watchdog_minutes, int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))))
    watchdog.beat("waiting for the other processes")
    with process_group(config.engine, config.train.watchdog_minutes) as (rank, world):
        watchdog.beat("reading the data and building the model")
        # A resumed run must not change its precision because the processor differs.
        config = replace(config, engine=replace(config.engine, precision=resolve_precision(config.engine)))
        folder = RunFolder(out, root=rank == 0)

        def load() -> tuple[Loader, Loader | None, Known | None]:
            folder.claim(config)
            share, shares = data_parallel(config.engine, rank, world)
            loader = open_data(config, data, share, shares)
            # A run that resumes needs the folder that it started from no more.
            started = Checkpoints(out, config.train.keep_last, config.train.keep_every).all()
            known = None if started else starting_weights(config, loader.vocabulary_sha256)
            if heldout is None:
                return loader, None, known
            rows = heldout_data(config, heldout, shares)
            return loader, open_data(config, heldout, share, shares, rows, like=loader), known

        try:
            loader, unseen, known = on_all_ranks(load)
        except SharedError:
            folder.close()
            raise
        if any(gather(stop.received is not None)):
            if rank == 0:
                print(f"{out}: told to stop before the first step; the same command starts again", flush=True)
            return
        engine = build_engine(config, loader, unseen, known)
        work = on_all_ranks(lambda: pretraining(config, loader, unseen, root=rank == 0))
        finished = train(engine, config, folder, loader, unseen, work, stop, watchdog)
        stop.release()  # the report may be interrupted
        state = engine.full_state() if finished else {}
    if finished and rank == 0:
        from .evaluate.showcase import showcase
        from .report.run_page import write_report

        def show() -> Path:
            showcase(out, config, state, data, heldout)
            page = write_report(out)
            folder.finish(config.train.steps)
            return page

        page = on_all_ranks(show)  # this process alone by now
        print(f"{out}: finished; open {page}", flush=True)


if __name__ == "__main__":
    main()
    from .engine.ranks import leave

    leave()
