"""A whole training run: opens the data, builds the engine, resumes, trains and records."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint.checkpoints import Checkpoints
from ..checkpoint_names import checkpoints_of
from ..cli import note
from ..config import RunConfig, Training
from ..data.loader import Loader
from ..data.order import phase_index
from ..engine.build import build_engine, require_engine, with_shared_precision
from ..engine.engine import Engine
from ..engine.ranks import SharedError, all_gather, broadcast, on_all_ranks, process_group
from ..io.files import fsync
from ..models.tiles import tilings
from ..objectives import objective_of
from .console import Console
from .loop import BadStepGuard, Callback, Dimensions, Evaluate, Profile, Record, Save, UpdateReport, fit
from .opening import RunInfo, opening_lines, pretraining_info, read_inputs, starting_folders, write_run_config
from .read_audit import audit_reads
from .records import LanguageLog, MetricsLog, StepLog, Tracker, measure_matmul_peak
from .resume import data_fingerprints, report_missing_records, resume
from .run_folder import RECORDS, RunFolder, first_step, fixed_settings
from .stop import StopRequest, Watchdog


def pretrain(
    config: RunConfig,
    data: Sequence[Path],
    out: Path,
    heldout: Path | None,
    stop: StopRequest,
    report: Callable[[dict[str, Tensor]], Path],
    profiled: int = 0,
) -> bool:
    """Train `config` on `data` in the run folder `out`, from its newest checkpoint if it has one; collective.
    Returns whether the run is finished: false after a signal to stop.

    `report`: writes the page of a finished run from its weights and returns the page's path; `profiled`: number of
    steps to profile.
    """
    minutes = config.train.watchdog_minutes
    # The rank as the launcher's variables give it: the lock and the watchdog start before the process group.
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    with closing(RunFolder(out, root=rank == 0)) as folder:  # also after an error: a notebook may try again
        with (
            closing(Watchdog(minutes, rank, "waiting for the other processes")) as watchdog,
            process_group(config.engine, minutes) as (rank, world),
        ):
            watchdog.beat("reading the data and building the model")
            # Replace `engine.precision auto`, so that config.json stores the choice: a resume on another processor must
            # not change the precision.
            config = replace(config, engine=with_shared_precision(config.engine))
            # Rank 0 names the sources, because a source run may save a newer checkpoint meanwhile, and all ranks must
            # take the first weights from the same one.
            sources = broadcast(on_all_ranks(lambda: starting_folders(config, out) if rank == 0 else []))
            loader, heldout_loader, initial_values = on_all_ranks(
                lambda: read_inputs(config, data, heldout, folder, sources, rank, world)
            )
            if any(all_gather(stop.received is not None)):
                if rank == 0:
                    begun = bool(checkpoints_of(out))
                    place, outcome = ("next", "continues") if begun else ("first", "starts again")
                    print(f"{out}: stopped before the {place} step; the same command {outcome}", flush=True)
                return False
            if heldout is None:
                note(
                    "no heldout folder: nothing will show whether the model gets better on text that it has not read; "
                    "`xlme prep encode --split` keeps some text out of training"
                )
            require_engine(config)
            on_all_ranks(lambda: folder.lock_nvme(config.engine, rank))
            folders = (data[0],) if heldout is None else (data[0], heldout)
            engine = build_engine(config, loader, heldout_loader, initial_values)
            info = on_all_ranks(lambda: pretraining_info(config, loader, heldout_loader, rank == 0, folders))
            finished = Trainer(engine, config, folder, info, profiled).train(stop, watchdog)
            watchdog.close()
            state = engine.full_state() if finished else {}
            engine.close()  # not after an error: it waits for the GPU, which may wait for a rank that has ended
        if finished and rank == 0:
            stop.at_once = True  # a signal may end the process now, because the same command writes the page again
            try:
                # The process has left the group, so `on_all_ranks` only turns an error into SharedError.
                page = on_all_ranks(lambda: report(state))
            except SystemExit:
                print(f"{out}: stopped while the report was written; the same command writes it", flush=True)
                raise
            on_all_ranks(lambda: folder.finish(config.train.steps))
            print(f"{out}: finished; open {page}", flush=True)
    return finished


@dataclass
class Trainer:
    """Trains a run from its newest complete checkpoint, records it, and saves checkpoints."""

    engine: Engine
    config: Training
    folder: RunFolder
    info: RunInfo
    profiled: int = 0  # number of steps to profile
    start: int = field(init=False)  # number of steps that are done when this process begins to train
    saved: dict[str, Any] = field(init=False)  # the state that the run saved after these steps, from `resume`

    def train(self, stop: StopRequest, watchdog: Watchdog) -> bool:
        """Train to the end, or until stopped; returns whether the run is finished.

        Raises SharedError when the run cannot continue.
        """
        watchdog.beat("resuming from a checkpoint")
        engine, config, out, root = self.engine, self.config, self.folder.path, self.engine.rank == 0
        settings = config.train
        checkpoints = Checkpoints(out, settings.keep_last, settings.keep_every, int(settings.save_buffer_gib * 2**30))
        self.start, self.saved = resume(engine, config, self.folder, checkpoints)
        identity = self.saved["run"]
        # Only rank 0 writes files, but all ranks call `on_all_ranks`, because an error must end all of them.
        on_all_ranks(lambda: write_run_config(self.folder, config, engine, self.info, identity) if root else None)
        last_logged = on_all_ranks(lambda: self.folder.last_logged_step() if root else 0)
        if self.start >= settings.steps:
            on_all_ranks(lambda: _drop_later_records(self.folder, self.start) if root else None)
            if root:
                print(f"{out}: all {self.start} steps are done")
            return True
        if root:
            print("\n".join(opening_lines(config, out, self.start, engine.loader, engine.world, self.info)), flush=True)
        peak_flops_per_s = measure_matmul_peak(engine.device, config.engine.precision)  # all ranks measure together
        audit_file = None
        if isinstance(engine.loader, Loader):  # `train.audit` is only for pre-training
            audit_file = audit_reads(out, engine.loader, self.start, engine.rank, settings.audit)
        if last_logged > self.start:  # so this is rank 0
            print(
                f"{out}: steps {self.start + 1} to {min(last_logged, settings.steps)} are done again: the newest "
                f"checkpoint is of step {self.start}"
            )
        with ExitStack() as outputs:
            guard, callbacks = on_all_ranks(lambda: self._callbacks(peak_flops_per_s, outputs))
            logs = [log for callback in (guard, *callbacks) for log in callback.logs]
            report_missing_records(logs, config, self.start, self.saved)
            state_after = partial(self._state_after, guard, logs, audit_file)
            callbacks.append(Save(checkpoints, engine, settings.save_every, state_after, self.start))
            if root and self.info.folders:
                # After Save, because the page shows the checkpoint that was just saved.
                callbacks.append(UpdateReport(out, settings, checkpoints))
            done = fit(engine, config, guard, callbacks, self.start, stop, watchdog)
        if guard.fault is not None:
            raise SharedError(f"{out}: {guard.fault}")
        if root and done < settings.steps:
            has_saved = done > first_step(asdict(config))
            print(
                f"{out}: stopped after step {done} of {settings.steps} and saved; the same command continues from there"
                if has_saved
                else f"{out}: stopped before the first step; the same command starts again"
            )
        return done >= settings.steps

    def _tokens_until(self, done: int) -> int:
        """Tokens of the first `done` steps."""
        tokens_per_step = int(sum(self.config.data.mean_rows)) * self.engine.loader.row_tokens
        # The steps of a branch's parent may have had another number of tokens.
        tokens_before = self.saved["tokens"] if self.start else 0
        return tokens_before + (done - self.start) * tokens_per_step

    def _callbacks(self, peak_flops_per_s: float | None, outputs: ExitStack) -> tuple[BadStepGuard, list[Callback]]:
        """Returns (guard, callbacks that record the run). Only rank 0 has a console and files. `outputs` closes the
        console, whose bar would leave the terminal without a cursor, and the tracker. Raises OSError if a file cannot
        be written."""
        engine, config, out, start = self.engine, self.config, self.folder.path, self.start
        settings, info, root = config.train, self.info, engine.rank == 0
        faults = StepLog(out, "faults", start) if root else None
        guard = BadStepGuard(settings, self.saved.get("guard", {}), engine.loader.describe_rows, faults)
        callbacks: list[Callback] = []
        tracker = Tracker(settings.wandb, out, self.saved["run"], asdict(config)) if root and settings.wandb else None
        console = Console(settings.steps, start, info.objective) if root else None
        for output in (tracker, console):
            if output is not None:
                outputs.callback(output.close)
        if console is not None:
            callbacks.append(
                Record(
                    log=MetricsLog(out, "metrics", start, tracker),
                    config=config,
                    start=start,
                    engine=engine,
                    tokens_until=self._tokens_until,
                    flops_of_step=lambda step: info.flops[phase_index(engine.loader.phases, step)],
                    peak_flops_per_s=peak_flops_per_s,
                    show=console.step,
                    skipped_steps=lambda: guard.skipped,
                )
            )
        if info.summarise is not None:
            heldout_logs: list[MetricsLog] = []
            if root:
                heldout_logs.append(MetricsLog(out, "heldout", start, tracker))
                heldout_logs.append(LanguageLog(out, "heldout_languages", start, tracker))
            callbacks.append(Evaluate(engine, settings, info.summarise, console, heldout_logs))
            if isinstance(config, RunConfig) and objective_of(config.objective).reads_whole_rows:
                dimension_logs = [MetricsLog(out, "dimensions", start, tracker)] if root else []
                callbacks.append(Dimensions(engine, settings, first_step(asdict(config)), console, dimension_logs))
        if root and self.profiled:
            callbacks.append(Profile(out, self.profiled, engine.device))
        return guard, callbacks

    def _state_after(
        self, guard: BadStepGuard, logs: Sequence[StepLog], audit_file: Path | None, done: int
    ) -> dict[str, Any]:
        """The run's own state after `done` steps, stored next to the engine's. Flushes the records and `audit_file`, so
        that the files are not older than the checkpoint."""
        if audit_file is not None and audit_file.exists():
            fsync(audit_file)
        return {
            "run": self.saved["run"],
            "settings": fixed_settings(self.config),
            "tilings": tilings(),
            **data_fingerprints(self.engine.loader, self.engine.heldout, done),
            "tokens": self._tokens_until(done),
            "guard": guard.state,
            "records": {log.path.stem: log.sync() for log in logs},
        }


def _drop_later_records(folder: RunFolder, step: int) -> None:
    """Drop the records of steps after `step`: `train.steps` may have been lowered since they were written."""
    for name in RECORDS:
        if folder.last_logged_step(name) > step:
            StepLog(folder.path, name, step)  # opening a log drops them, and moves damaged lines away
