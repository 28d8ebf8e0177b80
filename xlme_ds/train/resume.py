"""Resumes a run: chooses and loads its checkpoint, and reports missing records. A run without a checkpoint starts from
its first step again, and its records (metrics.jsonl and the like) are renamed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpoint.checkpoints import PROBE_TOLERANCE, Checkpoints, require_match
from ..checkpoint.state_files import checkpoint_fault, read_state
from ..checkpoint_names import run_and_step, saved_step
from ..cli import note
from ..config import RunConfig, TrainConfig, Training
from ..data.loader import Loader
from ..data.rows import TASKS
from ..engine.build import require_kernels, resolve_precision
from ..engine.engine import Engine
from ..engine.ranks import all_gather, broadcast, on_all_ranks
from ..models.tiles import tilings, use_tilings
from ..objectives.protocol import BatchSource
from ..trained.runs import find_complete_checkpoint
from .records import StepLog
from .run_folder import RunFolder, describe_missing_steps, first_step, fixed_settings


def data_fingerprints(loader: BatchSource, heldout: BatchSource | None, steps: int) -> dict[str, Any]:
    """Fingerprints of the data that the first `steps` steps read, and of the held-out data; checkpoints store them."""
    training = loader.fingerprints_until(steps) if isinstance(loader, Loader) else loader.fingerprints
    return {"fingerprints": training, "heldout": None if heldout is None else heldout.fingerprints}


def resume(
    engine: Engine,
    config: Training,
    folder: RunFolder,
    checkpoints: Checkpoints,
) -> tuple[int, dict[str, Any]]:
    """Load the run's newest complete checkpoint. If the run has none and is a branch (`start.take state`), load the
    checkpoint from which it branches.

    Returns (number of steps done, saved state). The saved state is that of the run's own checkpoint. If the run has
    none, it is only `run`, the run's identity, and in a branch the parent's `tokens` and `guard`.
    """
    newest, complaints = checkpoints.newest(engine.rank, engine.world)
    if engine.rank == 0 and complaints:
        print("\n".join(complaints))
    saved = on_all_ranks(lambda: {} if newest is None else read_state(newest))
    _use_tilings(config, saved)
    identity = broadcast(on_all_ranks(lambda: folder.identity(config, newest, saved)))
    tolerance = PROBE_TOLERANCE[resolve_precision(config.engine)]
    if newest is not None:
        on_all_ranks(lambda: _warn_of_changes(config.train, folder, checkpoints) if engine.rank == 0 else None)
        expected = data_fingerprints(engine.loader, engine.heldout, saved["step"])
        return checkpoints.load(engine, newest, expected, tolerance), saved
    on_all_ranks(lambda: _begin_anew(config, folder, checkpoints, bool(complaints)) if engine.rank == 0 else None)
    if isinstance(config, RunConfig) and config.start.take == "state":
        start, parent = _branch(engine, config, checkpoints, tolerance)
        return start, {"run": identity, "tokens": parent["tokens"], "guard": parent.get("guard", {})}
    return 0, {"run": identity}


def check_resume(config: RunConfig, loader: Loader, heldout: Loader | None, folder: RunFolder) -> int:
    """The number of steps after which `resume` would continue. Raises ValueError if `resume` would fail because the
    newest checkpoint does not match the run, because the run has lost its checkpoints, or because a branch's parent has
    lost the one to begin with. Only rank 0 calls this."""
    checkpoints = Checkpoints(folder.path, config.train.keep_last, config.train.keep_every)
    damaged = False
    for checkpoint in reversed(checkpoints.all()):
        if (fault := checkpoint_fault(checkpoint)) is None:
            saved = read_state(checkpoint)
            expected = data_fingerprints(loader, heldout, saved["step"])
            folder.identity(config, checkpoint, require_match(saved, checkpoint, expected))
            return int(saved["step"])
        damaged = True
        note(f"{checkpoint} is left out: {fault}")
    _require_none_lost(config, folder, checkpoints, damaged)
    if config.start.take == "state":
        find_complete_checkpoint(*run_and_step(Path(config.start.folder)))
    return first_step(asdict(config))


def _use_tilings(config: Training, saved: Mapping[str, Any]) -> None:
    """Use the tilings of the kernels in a checkpoint's state `saved`; without any, those of the package."""
    tilings_checked = tilings()
    use_tilings(saved.get("tilings", {}))
    if any(all_gather(tilings() != tilings_checked)):
        # `require_engine` has checked the kernels with other tilings than this run uses.
        on_all_ranks(lambda: require_kernels(config))


def _require_none_lost(config: Training, folder: RunFolder, checkpoints: Checkpoints, damaged: bool = False) -> None:
    """Called for a run without a usable checkpoint. Raises ValueError if the run had one earlier. `damaged`: whether a
    damaged checkpoint was found."""
    steps = folder.last_logged_step() - first_step(asdict(config))
    # `save_every` may have changed since the run last started.
    save_every = folder.setting_at_last_start("save_every", config.train.save_every)
    if damaged or checkpoints.were_lost(steps, save_every):
        raise ValueError(
            f"{folder.path} has records but no usable checkpoint: restore one, or choose another output folder"
        )


def _warn_of_changes(config: TrainConfig, folder: RunFolder, checkpoints: Checkpoints) -> None:
    """Warn if `eval_rows` has changed, and if a changed `keep_every` makes the next save delete checkpoints that its
    former value kept."""
    rows = int(folder.setting_at_last_start("eval_rows", config.eval_rows))
    if rows != config.eval_rows:
        print(
            f"{folder.path}: train.eval_rows was {rows} and is {config.eval_rows}: held-out losses from now on are not "
            "comparable with earlier ones",
            flush=True,
        )
    before = int(folder.setting_at_last_start("keep_every", 0))
    now, saved = config.keep_every, checkpoints.all()
    to_delete = [
        checkpoint.name
        for checkpoint in saved[: max(len(saved) + 1 - config.keep_last, 0)]  # + 1: the next checkpoint
        if before and saved_step(checkpoint) % before == 0 and not (now and saved_step(checkpoint) % now == 0)
    ]
    if to_delete:
        print(
            f"{folder.path}: train.keep_every was {before} and is {now}: the next save deletes {', '.join(to_delete)}. "
            f"Copy what you want to keep, or start the run again with train.keep_every {before}",
            flush=True,
        )


def _begin_anew(config: Training, folder: RunFolder, checkpoints: Checkpoints, damaged: bool) -> None:
    _require_none_lost(config, folder, checkpoints, damaged)
    if aside := folder.put_records_aside():
        print(f"{folder.path} has no checkpoint yet and begins anew: its records are kept as {', '.join(aside)}")


def _branch(
    engine: Engine,
    config: RunConfig,
    checkpoints: Checkpoints,
    tolerance: float,
) -> tuple[int, dict[str, Any]]:
    """Load the checkpoint that `start.folder` names. Returns (its step, its saved state)."""
    parent = on_all_ranks(lambda: find_complete_checkpoint(*run_and_step(Path(config.start.folder))))
    saved = on_all_ranks(lambda: read_state(parent))
    _use_tilings(config, saved)  # so that the branch is, bit for bit, the run that its parent would have been
    # `load` compares the loss of a probe batch with the loss that the parent stored. The two can be equal only if rows,
    # masks and objective are equal; otherwise the tolerance is infinite. A setting that the parent did not store counts
    # as equal.
    theirs_by_name = saved.get("fingerprints", {}).items()
    first_phase = {name: value for name, value in theirs_by_name if name in TASKS}  # it has the probe's rows
    same_rows = first_phase == data_fingerprints(engine.loader, engine.heldout, 0)["fingerprints"]
    ours = fixed_settings(config)
    theirs = saved.get("settings", {})
    # The parent computed the stored loss in its own precision.
    tolerance = max(tolerance, PROBE_TOLERANCE.get(theirs.get("engine.precision"), 0.0))
    prefixes = ("seed", "objective.", "data.phase_", "model.rotary_base")
    probe_settings = [key for key in ours if key.startswith(prefixes)]
    comparable = same_rows and all(ours[key] == theirs.get(key, ours[key]) for key in probe_settings)
    any_data: dict[str, Any] = {}  # a branch may read other data than its parent
    start = checkpoints.load(engine, parent, any_data, tolerance if comparable else math.inf)
    if engine.rank == 0:
        print(f"{parent}: the run begins with its weights and its optimizer state", flush=True)
    return start, saved


def report_missing_records(logs: Sequence[StepLog], config: Training, start: int, saved: Mapping[str, Any]) -> None:
    """Print which logs have fewer lines than they had when the checkpoint of step `start` was saved, and which steps
    are missing in these logs. `saved`: the checkpoint's state."""
    every = config.train.eval_every
    intervals = {"metrics": config.train.log_every, "heldout": every, "heldout_languages": every}
    first = first_step(asdict(config))
    for log in logs:
        name = log.path.stem
        saved_lines = saved.get("records", {}).get(name, 0)
        if len(log.steps) < saved_lines:
            steps = describe_missing_steps(log.steps, intervals[name], start, first) if intervals.get(name) else ""
            print(
                f"{log.path} has {len(log.steps)} of the {saved_lines} lines that it had at step {start}"
                + (f", and no record of step {steps}" if steps else ""),
                flush=True,
            )
