"""Records the rows that every step of a run reads, for `xlme audit`."""

import json
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..data.loader import Loader
from ..data.masking import TaskRows
from ..data.rows import TASKS
from ..engine.ranks import broadcast, on_all_ranks
from ..io.files import errors_naming
from .run_folder import json_object

# The folder of these records. Its files:
#
# `attempts.jsonl` has a line for every start of the run, except those before the first one with `train.audit`:
# {`start`: steps done by then, `world`: number of ranks that read rows, `audit`: whether `train.audit` was on}. The
# index of the attempt is the line's index, from 0, among the lines that `audit_lines` gives.
#
# `rank_RRRRR.jsonl` has a line for each step, {`attempt`, `step`, `rows`: {task: [[number of the first row, CRC-32 of
# the tokens of each row, ...], ...]}}. A task has an inner list for each micro-batch that has rows of the task. Lines
# are only added: a step that was repeated after a resume has a line for each attempt.
AUDIT_FOLDER = "audit"
ATTEMPTS = "attempts.jsonl"


def audit_reads(run: Path, loader: Loader, start: int, rank: int, audit: bool) -> Path | None:
    """Record this start of the run and make `loader` record the rows that it reads from now on. Without `audit`, record
    only the start, and only if an earlier start was recorded. Collective.

    Returns the file that gets this rank's rows, or None if there is none.
    """
    folder = run / AUDIT_FOLDER
    world = loader.plan.world
    attempt = broadcast(on_all_ranks(lambda: _begin_attempt(folder, start, world, audit) if rank == 0 else 0))
    if not audit or rank >= world:  # a later pipeline stage reads the same rows as the first
        return None
    path = rank_file(folder, rank)
    loader.on_read = lambda step, micro_batches: _record_rows(path, attempt, step, micro_batches)
    return path


def audit_lines(path: Path, keys: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The JSON object in each line of a file of the audit folder; an empty one for a damaged line, such as one that a
    killed process left half-written, or one that lacks any of `keys`. The step of a half-written line was not finished,
    and is done again."""
    with open(path, "rb") as file:
        for line in map(json_object, filter(bytes.strip, file)):
            yield line if line.keys() >= set(keys) else {}


def rank_file(folder: Path, rank: int) -> Path:
    """The file in the audit folder that gets the rows of a rank."""
    return folder / f"rank_{rank:05d}.jsonl"


def row_checksums(tokens: np.ndarray) -> list[int]:
    """CRC-32 of every row of ids, int [B, T]; each id counts as int32."""
    return [zlib.crc32(row.tobytes()) for row in np.ascontiguousarray(tokens, dtype=np.int32)]


def _begin_attempt(folder: Path, start: int, world: int, audit: bool) -> int:
    """Record a start of the run, as `audit_reads` says; returns the index of the attempt."""
    path = folder / ATTEMPTS
    if not audit and not path.exists():
        return 0
    folder.mkdir(exist_ok=True)
    attempt = sum(1 for _ in audit_lines(path)) if path.exists() else 0
    _append_line(path, {"start": start, "world": world, "audit": audit})
    return attempt


def _record_rows(path: Path, attempt: int, step: int, micro_batches: list[TaskRows]) -> None:
    by_task: dict[str, list[list[int]]] = {}
    for task_rows in micro_batches:
        for task, rows, row_numbers in task_rows:
            by_task.setdefault(TASKS[task], []).append([int(row_numbers[0]), *row_checksums(rows.tokens)])
    _append_line(path, {"attempt": attempt, "step": step, "rows": by_task})


def _append_line(path: Path, line: dict[str, Any]) -> None:
    with errors_naming(path), open(path, "a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(line))  # the line break ends a line that a killed process left half-written
