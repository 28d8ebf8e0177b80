"""A stage's output folder: settings first, shards by atomic rename, a marker for every finished task, manifest last.

OUT/settings.json            stage name and settings; a relaunch must have the same
OUT/tasks/<task>.json        marker of a finished task with its result, written after the task's shards
OUT/manifest.json            completeness marker, written by the stage itself (`schema.write_manifest`)
"""

import hashlib
import io
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from data_prep.executor import on_root
from xlme_ds.data.schema import Shard, write_json


@dataclass(frozen=True)
class Stage:
    """One stage's folder. `settings` are JSON values that shape the bytes; never input paths or process counts."""

    folder: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    def open(self) -> None:
        """Create the folder, or take up an interrupted run in it; collective under MPI.

        Raises ValueError when the folder was begun by another stage or with other settings.
        """
        on_root(self._open)

    def _open(self) -> None:
        (self.folder / "tasks").mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.rglob(".*.tmp"):
            leftover.unlink()
        path = self.folder / "settings.json"
        wanted = json.loads(json.dumps({"stage": self.name, "settings": self.settings}))
        if path.exists():
            _refuse_changes(self.folder, json.loads(path.read_text(encoding="utf-8")), wanted)
        else:
            write_json(path, wanted)

    @property
    def complete(self) -> bool:
        """Whether the manifest, which is written last, exists."""
        return (self.folder / "manifest.json").exists()

    def task_result(self, task_name: str) -> dict[str, Any] | None:
        """The result of a finished task, None when it has not finished."""
        path = self._marker(task_name)
        result: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return result

    def finish_task(self, task_name: str, result: dict[str, Any]) -> None:
        """Mark a task as finished; call it when all its shards are in place."""
        write_json(self._marker(task_name), result)

    def forget_task(self, task_name: str) -> None:
        """Remove a task's mark: it will be done again."""
        self._marker(task_name).unlink(missing_ok=True)

    def _marker(self, task_name: str) -> Path:
        assert task_name and "/" not in task_name, f"a task name is a file name, not {task_name!r}"
        return self.folder / "tasks" / f"{task_name}.json"


def write_arrow(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], root: Path) -> Shard:
    """Write an uncompressed Arrow IPC file under a temporary name and rename it; its name is relative to `root`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    rows = 0
    try:
        with open(temporary, "wb", buffering=0) as file, _Hashing(file) as hashing:
            with pa.ipc.new_file(hashing, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
                    rows += batch.num_rows
            os.fsync(file.fileno())
        shard = Shard(path.relative_to(root).as_posix(), rows, temporary.stat().st_size, hashing.sha256.hexdigest())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return shard


class _Hashing(io.RawIOBase):
    """Writes to `file`, and hashes what is written while it is at hand."""

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.sha256 = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self.file.write(data)


def _refuse_changes(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    advice = "choose another output folder, or delete this one"
    if old["stage"] != new["stage"]:
        raise ValueError(f"{folder} was written by stage {old['stage']}, not {new['stage']}: {advice}")
    before, after = old["settings"], new["settings"]
    changed = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    if changed:
        words = "; ".join(f"{key} was {_short(before.get(key))}, now {_short(after.get(key))}" for key in changed)
        raise ValueError(f"{folder} was begun with other settings ({words}): {advice}")


def _short(value: Any, limit: int = 120) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 1] + "…"
