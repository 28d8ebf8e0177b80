"""Names of a run's checkpoints, and RUN@STEP."""

import re
from pathlib import Path

_PREFIX = "step_"
_NAME = re.compile(_PREFIX + r"(\d{8,})")
_AT = re.compile(r"(.+)@(\d+)", re.DOTALL)


def checkpoint_name(step: int) -> str:
    """Name of the folder of the checkpoint after `step` steps."""
    return f"{_PREFIX}{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a checkpoint may have it."""
    return _NAME.fullmatch(name) is not None


def saved_step(folder: Path) -> int:
    """The steps after which a checkpoint was saved, by its name."""
    return int(folder.name.removeprefix(_PREFIX))


def checkpoints_of(run: Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first; whole or not."""
    try:
        found = [path for path in (run / "checkpoints").iterdir() if is_checkpoint_name(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=saved_step)


def at_step(folder: Path) -> tuple[Path, int | None]:
    """The parts of RUN@STEP; the step is None where the folder's name has none, or exists with it."""
    found = None if folder.exists() else _AT.fullmatch(str(folder))
    return (Path(found[1]), int(found[2])) if found else (folder, None)
