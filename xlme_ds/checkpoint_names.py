"""Names of a run's checkpoints and of its last file, and the notation RUN@STEP for a checkpoint."""

import re
from pathlib import Path

from .io.folders import require_folder

FINISHED = "finished.json"  # the last file that a run writes
_PREFIX = "step_"
_NAME = re.compile(_PREFIX + r"(\d{8,})")
_RUN_AT_STEP = re.compile(r"(.+)@(\d+)", re.DOTALL)


def checkpoint_name(step: int) -> str:
    """Name of the folder of the checkpoint after `step` steps."""
    return f"{_PREFIX}{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether `name` has the form of a checkpoint's name: `step_` and at least eight digits."""
    return _NAME.fullmatch(name) is not None


def saved_step(folder: Path) -> int:
    """The number of steps after which a checkpoint was saved, as its folder's name says."""
    return int(folder.name.removeprefix(_PREFIX))


def checkpoints_of(run: Path) -> list[Path]:
    """Checkpoint folders of a run, whether complete or not, the oldest first."""
    try:
        folders = [path for path in (run / "checkpoints").iterdir() if is_checkpoint_name(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(folders, key=saved_step)


def run_and_step(folder: Path) -> tuple[Path, int | None]:
    """Split RUN@STEP into RUN and STEP. If `folder` exists or has another form, it is RUN, and STEP is None."""
    match = None if folder.exists() else _RUN_AT_STEP.fullmatch(str(folder))
    return (Path(match[1]), int(match[2])) if match else (folder, None)


def require_run_folder(run: Path, advice: str = "name a run folder") -> None:
    """Raise ValueError, with `advice`, unless `run` is a folder; if it is RUN@STEP, name RUN."""
    folder, step = run_and_step(run)
    if step is not None and folder.is_dir():
        raise ValueError(f"{run} names a step, but here the whole run is read: name {folder}")
    require_folder(run, advice)


def require_checkpoint(run: Path, step: int) -> None:
    """Raise ValueError if `run` has no checkpoint of `step`."""
    steps = [saved_step(checkpoint) for checkpoint in checkpoints_of(run)]
    if step not in steps:
        existing = f" (it has {', '.join(map(str, steps))}): name one of them"
        advice = existing if steps else ", and no other: wait for its first, or name another run"
        raise ValueError(f"{run} has no checkpoint of step {step}{advice}")
