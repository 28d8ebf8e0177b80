"""Checkpoints of a run. Threads write a checkpoint into a folder with a temporary name; rank 0 then renames the folder.

A checkpoint folder has one state file for each rank (`state_files.py`), `state.json` (step, data fingerprints, loss of
the probe) and `complete.json` (bytes and CRC-32 of every file). The probe is a fixed batch, whose loss shows whether a
loaded model is the saved one. `complete.json` is the marker: it is written once everything else is on the disk.
`checkpoints/` also has entries that are no checkpoints, which their names show: `latest.json`, failed saves, and users'
files.
"""

import math
import shutil
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint_names import checkpoint_name, checkpoints_of, is_checkpoint_name, saved_step
from ..engine.engine import Engine
from ..engine.ranks import SharedError, all_gather, broadcast, on_all_ranks
from ..io.errors import in_words
from ..io.files import errors_naming, fsync, write_versioned
from .state_files import (
    MARKER_FILE,
    STATE_JSON,
    StateReader,
    StateWriter,
    checkpoint_fault,
    read_headers,
    read_state,
    state_file,
    state_files,
)

_PARTIAL_SUFFIX = ".partial"
_LATEST_FILE = "latest.json"

# The largest relative difference allowed between the probe's loss after loading and the stored loss. The losses may
# differ a little: in fp32 because another number of ranks adds in another order, in bf16 because another processor or
# kernel rounds differently.
PROBE_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


class Checkpoints:
    """The folder `checkpoints/` of a run. Methods that take the engine are collective."""

    def __init__(self, run: Path, keep_last: int, keep_every: int, buffer_bytes: int = 1 << 30):
        """`keep_last`: how many of the newest checkpoints to keep; `keep_every`: also keep checkpoints whose step is a
        multiple of this number (0: none); `buffer_bytes`: see `StateWriter`."""
        self.folder = run / "checkpoints"
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.buffer_bytes = buffer_bytes
        # Of the checkpoint that is being written: the content of `state.json`, and the writer of this rank's file.
        self._saving: tuple[dict[str, Any], StateWriter] | None = None

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._saving is not None

    def save(self, engine: Engine, step: int, state: Mapping[str, Any]) -> None:
        """Copy the engine's state after `step` steps and write it from a thread; `poll` or `wait` completes the
        checkpoint. `state`: further values for `state.json`. Raises SharedError if the probe's loss is not finite."""
        self.wait(engine)
        probe = engine.probe_loss()
        if not math.isfinite(probe):
            raise SharedError(
                f"{self.folder.parent}: after {step} steps the loss of the probe batch is {probe}, so nothing is saved "
                "any more: start a run with a lower optimizer.learning_rate (in fine-tuning tuning.learning_rate)"
            )
        partial = self.folder / f"{checkpoint_name(step)}{_PARTIAL_SUFFIX}"
        on_all_ranks(lambda: self._begin(partial) if engine.rank == 0 else None)
        writer = StateWriter(partial / state_file(engine.rank, engine.world), self.buffer_bytes)
        engine.save(writer)
        self._saving = {"step": step, "world": engine.world, "probe": probe, **state}, writer

    def poll(self, engine: Engine) -> None:
        """Complete the checkpoint that is being written, if every rank has written its part."""
        if self._saving is not None and not engine.any_rank(self._saving[1].running):
            self.wait(engine)

    def wait(self, engine: Engine) -> None:
        """Complete the checkpoint that is being written, if there is one. Raises SharedError if writing it failed."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        state, writer = saving
        files = dict(all_gather((writer.path.name, on_all_ranks(writer.result))))
        on_all_ranks(lambda: self._finish(writer.path.parent, state, files) if engine.rank == 0 else None)

    def newest(self, rank: int = 0, world: int = 1) -> tuple[Path | None, list[str]]:
        """The newest sound checkpoint or None, and a sentence for each newer, damaged checkpoint; collective."""
        complaints: list[str] = []
        for folder in reversed(broadcast(on_all_ranks(self.all))):
            faults = [fault for fault in all_gather(checkpoint_fault(folder, rank, world)) if fault]
            if not faults:
                return folder, complaints
            complaints.append(f"{folder} is left out: {faults[0]}")
        return None, complaints

    def load(self, engine: Engine, folder: Path, expected: Mapping[str, Any], tolerance: float) -> int:
        """Load the checkpoint `folder` into `engine`; another kind of engine or number of ranks may have saved it.
        Returns the number of steps done.

        `expected`: the fingerprints of the data that the stored state must have; `tolerance`: the largest relative
        difference allowed between the loaded model's probe loss and the stored loss. Raises SharedError if a
        fingerprint or the loss differs.
        """
        state = on_all_ranks(lambda: require_match(read_state(folder), folder, expected))
        files = broadcast(on_all_ranks(lambda: state_files(folder) if engine.rank == 0 else []))
        headers = all_gather(on_all_ranks(lambda: read_headers(files, engine.rank, engine.world)))
        engine.load(on_all_ranks(lambda: StateReader(files, headers)))
        engine.prepare_step(state["step"] - 1)  # the stored loss was computed in the phase of the last step
        probe = broadcast(engine.probe_loss())
        if not math.isclose(probe, state["probe"], rel_tol=tolerance):
            raise SharedError(
                f"the loss of the probe batch was {state['probe']:.7g} when {folder} was saved and is {probe:.7g} "
                "after loading it, so the loaded state is not the saved one: resume from another checkpoint, or with "
                "the engine and version that saved this one"
            )
        return int(state["step"])

    def were_lost(self, steps_logged: int, save_every: float) -> bool:
        """Whether a run that has no usable checkpoint had one earlier. A run that never had a checkpoint may start
        anew.

        `steps_logged`: number of steps that the run recorded; `save_every`: steps between its checkpoints.
        """
        run = self.folder.parent
        ended = any((run / name).exists() for name in ("finished.json", "model/model.safetensors"))
        removed = steps_logged > 0 and not self.folder.is_dir()  # a run makes this folder before its first step
        saved = (self.folder / _LATEST_FILE).exists()
        interrupted = any(self.folder.glob(f"*{_PARTIAL_SUFFIX}"))  # the first save may not have been completed
        return ended or removed or saved or (steps_logged > save_every and not interrupted)

    def all(self) -> list[Path]:
        """Checkpoint folders, sound or damaged, by step, the lowest first."""
        return checkpoints_of(self.folder.parent)

    def _begin(self, partial: Path) -> None:
        """Delete failed saves, which may take the space that the new checkpoint needs. Then make the folder
        `partial`. Raises ValueError if the run folder is gone: a user may have moved it meanwhile."""
        if not self.folder.parent.is_dir():
            raise ValueError(f"{self.folder.parent} is gone: if you moved it, start the run again with its new place")
        for leftover in self.folder.glob(f"*{_PARTIAL_SUFFIX}"):
            if is_checkpoint_name(leftover.stem):
                _remove(leftover)
        self.folder.mkdir(exist_ok=True)
        partial.mkdir()

    def _finish(self, partial: Path, state: Mapping[str, Any], files: dict[str, dict[str, int]]) -> None:
        """Complete the checkpoint, write its name into latest.json, and delete checkpoints that the settings do not
        keep."""
        final = complete(partial, state, files)
        with errors_naming(self.folder / _LATEST_FILE):
            write_versioned(self.folder / _LATEST_FILE, {"checkpoint": final.name})
            fsync(self.folder)
        own = [folder for folder in self.all() if not _was_copied(folder, state.get("run"))]
        until_now = [folder for folder in own if saved_step(folder) <= state["step"]]
        later = own[len(until_now) :]  # saved before the run was resumed at an earlier step
        for folder in later:
            _remove(folder)
        for folder in until_now[: -self.keep_last]:
            if not (self.keep_every and saved_step(folder) % self.keep_every == 0):
                _remove(folder)


def _was_copied(folder: Path, run: str | None) -> bool:
    """Whether a user copied or renamed the checkpoint: the run in its state is not `run`, or the step in its state is
    not the step in its name. False if the state cannot be read."""
    try:
        state = read_state(folder)
    except (ValueError, OSError):
        return False
    return state.get("run") != run or state["step"] != saved_step(folder)


def _remove(path: Path) -> None:
    """Delete a checkpoint, or, if `path` is a link, only the link. On failure, print the reason to stderr."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        print(f"{path} cannot be deleted and stays: {in_words(error)}", file=sys.stderr, flush=True)


def complete(partial: Path, state: Mapping[str, Any], files: Mapping[str, Mapping[str, int]]) -> Path:
    """Turn the folder `X.partial` into the checkpoint `X`, and return the path of `X`. The state files, listed in
    `files`, are on the disk already."""
    final = partial.with_suffix("")
    with errors_naming(partial):
        write_state_and_marker(partial, state, files)
        if final.is_symlink() or final.is_dir():  # a damaged checkpoint of the same step
            _remove(final)
        elif final.exists():  # a user's file
            final.rename(final.with_name(f"{final.name}.moved"))
        partial.rename(final)
        fsync(final.parent)
    return final


def write_state_and_marker(folder: Path, state: Mapping[str, Any], files: Mapping[str, Mapping[str, int]]) -> None:
    """Turn `folder` into a checkpoint: write `state` and the marker. The state files, listed in `files`, are on the
    disk already."""
    write_versioned(folder / STATE_JSON, state)
    content = (folder / STATE_JSON).read_bytes()
    fsync(folder / STATE_JSON, folder)
    write_versioned(folder / MARKER_FILE, {**files, STATE_JSON: {"bytes": len(content), "crc32": zlib.crc32(content)}})
    fsync(folder / MARKER_FILE, folder)


def require_match(state: dict[str, Any], folder: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state`, the state of the checkpoint in `folder`. Raises ValueError if a fingerprint of the data differs
    from `expected`."""
    for key, value in expected.items():
        before, now = state.get(key) or {}, value or {}  # the value is None without held-out data
        different = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        if different:
            option = "--heldout" if key == "heldout" else "--data"
            raise ValueError(
                f"{folder} was saved with another {option} ({', '.join(different)}): resume with the data of "
                "that checkpoint, or choose another --out"
            )
    return state
