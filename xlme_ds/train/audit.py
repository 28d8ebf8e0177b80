"""Which rows every step read, written down while they are read: what `python -m xlme_ds.audit` proves exactly-once
from.

`audit/attempts.jsonl` has a line for every start of the run, {`start`: steps done by then, `world`}; its number is the
attempt. `audit/rank_RRRRR.jsonl` has a line a step, {`attempt`, `step`, `rows`: {task: [[first row, CRC-32 of each
row's tokens, ...], ...]}}. Files only grow: what was done again after a resume stands there twice, under two attempts.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..data.corrupt import Parts
from ..data.loader import Loader
from ..data.rows import TASKS
from ..data.schema import naming
from ..engine.ranks import broadcast, together

FOLDER = "audit"
ATTEMPTS = "attempts.jsonl"


def audit(run: Path, loader: Loader, start: int, rank: int, world: int) -> Path | None:
    """Have `loader` write down what it reads from now on, once for every share of the rows; the file of this rank;
    collective."""
    folder = run / FOLDER
    attempt = broadcast(together(lambda: _begin(folder, start, world) if rank == 0 else 0))
    if rank >= loader.plan.world:  # the other stages of a pipeline read the same
        return None
    path = folder / f"rank_{rank:05d}.jsonl"
    loader.watch = lambda step, read: _record(path, attempt, step, read)
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of one of the files."""
    found = []
    for text in path.read_bytes().split(b"\n"):
        try:
            found.append(json.loads(text))
        except (
            ValueError,
            RecursionError,
        ):  # empty, or half-written: then its step was not finished, and is done again
            continue
    return found


def checksums(tokens: np.ndarray) -> list[int]:
    """CRC-32 of every row of int [B, T] ids."""
    return [zlib.crc32(row.tobytes()) for row in np.ascontiguousarray(tokens, dtype=np.int32)]


def _begin(folder: Path, start: int, world: int) -> int:
    folder.mkdir(exist_ok=True)
    path = folder / ATTEMPTS
    attempt = len(lines(path)) if path.exists() else 0
    _append(path, {"start": start, "world": world})
    return attempt


def _record(path: Path, attempt: int, step: int, read: list[Parts]) -> None:
    rows: dict[str, list[list[int]]] = {}
    for parts in read:
        for task, part, numbers in parts:
            rows.setdefault(TASKS[task], []).append([int(numbers[0]), *checksums(part.tokens)])
    _append(path, {"attempt": attempt, "step": step, "rows": rows})


def _append(path: Path, line: dict[str, Any]) -> None:
    with naming(path), open(path, "a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(line))  # behind what a killed process may have left half-written
