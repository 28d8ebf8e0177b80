"""Checkpoints of a run: written under a temporary name, renamed when whole, the newest found again.

A checkpoint folder holds what the engine wrote, `state.json` (position, data fingerprints, versions) and `complete.json`
(every file with its size), which is written last.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data.schema import write_json
from ..engine.protocol import Engine

_PREFIX = "step_"
_COMPLETE = "complete.json"


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    def __init__(self, run: Path, keep_last: int, keep_every: int):
        self.folder = run / "checkpoints"
        self.keep_last = keep_last
        self.keep_every = keep_every

    def save(self, engine: Engine, step: int, state: Mapping[str, Any]) -> None:
        """Save the state after `step` steps; collective."""
        final = self.folder / f"{_PREFIX}{step:08d}"
        partial = final.with_suffix(".partial")
        if engine.rank == 0:
            for folder in (partial, final):  # an earlier try at the same step
                shutil.rmtree(folder, ignore_errors=True)
            partial.mkdir(parents=True)
        engine.barrier()
        engine.save(partial)
        engine.barrier()
        if engine.rank == 0:
            write_json(partial / "state.json", {"step": step, "world": engine.world, **state})
            files = {str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()}
            write_json(partial / _COMPLETE, files)
            partial.rename(final)
            write_json(self.folder / "latest.json", {"checkpoint": final.name})
            self._prune(step)
        engine.barrier()

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest complete checkpoint or None, and a sentence for each newer one that cannot be used."""
        complaints: list[str] = []
        for folder in sorted(self.folder.glob(f"{_PREFIX}????????"), reverse=True):
            fault = _fault(folder)
            if fault is None:
                return folder, complaints
            complaints.append(f"{folder} is left out: {fault}")
        return None, complaints

    def load(self, engine: Engine, folder: Path, expected: Mapping[str, Any]) -> int:
        """Load `folder` into `engine` and return the number of steps done; collective.

        Raises ValueError when it belongs to other data (`expected` against the stored state) or another world size.
        """
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        for key, value in expected.items():
            if state.get(key) != value:
                raise ValueError(
                    f"{folder} was saved with {key} {state.get(key)}, this run has {value}: resume with the same, "
                    "or choose another --out"
                )
        if state["world"] != engine.world:
            raise ValueError(
                f"{folder} was saved by {state['world']} processes, there are {engine.world} now: "
                f"resume with {state['world']}"
            )
        engine.load(folder)
        return int(state["step"])

    def _prune(self, newest: int) -> None:
        steps = sorted(int(p.name.removeprefix(_PREFIX)) for p in self.folder.glob(f"{_PREFIX}????????"))
        for step in [step for step in steps if step > newest]:  # unusable: the run went on from one before it
            shutil.rmtree(self.folder / f"{_PREFIX}{step:08d}")
        steps = [step for step in steps if step <= newest]
        for step in steps[: -self.keep_last]:
            if not (self.keep_every and step % self.keep_every == 0):
                shutil.rmtree(self.folder / f"{_PREFIX}{step:08d}")
        for partial in self.folder.glob("*.partial"):
            shutil.rmtree(partial)


def _fault(folder: Path) -> str | None:
    try:
        files = json.loads((folder / _COMPLETE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{_COMPLETE} is missing or damaged"
    if not isinstance(files, dict):
        return f"{_COMPLETE} is missing or damaged"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None
