"""A stage's output folder: settings first, shards by atomic rename, a marker for every finished task, manifest last.

OUT/.lock                    held by the one process that works in the folder
OUT/settings.json            stage name and settings, which a later run must have too
OUT/tasks/<task>.json        marker of a finished task with its result, written after the task's shards
OUT/manifest.json            completeness marker, written by the stage itself (`schema.write_manifest`)

Each of these JSON files holds a checksum of its content; a marker's checksum covers the settings too. Every run checks
all files that markers list against their checksums. So the same command, given again, rewrites what is missing or
damaged.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, TypeVar

import pyarrow as pa

from data_prep.parallel import run_tasks
from data_prep.progress import warn
from xlme_ds.data.schema import TASKS, Manifest, Shard, read_manifest
from xlme_ds.io.files import TEMPORARY, atomic_write, file_sha256, fsync, read_checksummed, write_checksummed
from xlme_ds.io.folders import LOCK_FILE, lock_folder, make_folder, require_folder

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """One stage's folder. `settings` holds the JSON values on which the content of its files depends. So the paths of
    inputs and the number of processes are not among them."""

    folder: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Create the folder, or open the folder of an earlier run, and lock it for the `with` block.

        Raises ValueError if another process works in the folder, or if another stage or other settings began it.
        """
        make_folder(self.folder / "tasks")
        with lock_folder(self.folder):
            for leftover in self.folder.rglob(".*.tmp"):
                # A folder in this folder may be a run's or another stage's, whose process may still write its files.
                subfolders = [parent for parent in leftover.parents if self.folder in parent.parents]
                is_foreign = any((subfolder / LOCK_FILE).exists() for subfolder in subfolders)
                if TEMPORARY.fullmatch(leftover.name) and not is_foreign:
                    leftover.unlink()
            self.check_settings()
            path = self.folder / "settings.json"
            if _read_or_none(path) is None:
                # The folder may have markers of other settings, because a stage removes settings.json when it finds
                # a damaged input, which may get another size.
                self.remove_markers(name for name, result in self._results_of_markers().items() if result is None)
                write_checksummed(path, self._settings_json)
            yield

    def check_settings(self) -> None:
        """Raise ValueError if a run of another stage or with other settings began the folder."""
        # The manifest stands in for settings.json if that file is lost or damaged.
        old = _read_or_none(self.folder / "settings.json") or _read_or_none(self.folder / "manifest.json")
        if not old:
            return
        advice = "choose another output folder, or delete this folder"
        if old["stage"] != self.name:
            raise ValueError(f"{self.folder} was written by stage {old['stage']}, not {self.name}: {advice}")
        before, after = old["settings"], self._settings_json["settings"]
        changed = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
        if changed:
            changes = "; ".join(f"{key} was {_short(before.get(key))}, now {_short(after.get(key))}" for key in changed)
            raise ValueError(f"{self.folder} was begun with other settings ({changes}): {advice}")

    def check_finished(self, processes: int) -> bool:
        """Whether the stage is complete and every file has its recorded checksum.

        If not, a warning names the missing or damaged files, and the manifest and the markers of their tasks are
        removed, so that the tasks run again.
        """
        manifest = self._read_manifest()
        results = self._results_of_markers()
        damaged = [task for task, result in results.items() if result is None]
        for task in damaged:
            warn(f"{self._marker(task)} is damaged: its task is done again")
        files = [(task, file) for task, result in results.items() if result for file in written_files(result)]
        if manifest is not None:
            in_markers = {file for _, file in files}
            files += [("", file) for file in manifest.shards if file not in in_markers]  # "": of no task
        sizes = [file.bytes for _, file in files]
        check, label = partial(is_intact, self.folder), f"check {self.folder.name}"
        intact = run_tasks(check, [file for _, file in files], sizes, processes, label)
        lost = [task_and_file for task_and_file, is_whole in zip(files, intact, strict=True) if not is_whole]
        if lost:
            names = ", ".join(file.name for _, file in lost[:8]) + (" …" if len(lost) > 8 else "")
            subject = "file is" if len(lost) == 1 else "files are"
            warn(f"{len(lost)} {subject} missing or damaged in {self.folder}; made again: {names}")
        is_finished = manifest is not None and not damaged and not lost
        if manifest is not None and not is_finished:
            (self.folder / "manifest.json").unlink()
        self.remove_markers({*damaged, *(task for task, _ in lost)} - {""})
        return is_finished

    def _read_manifest(self) -> Manifest | None:
        """The manifest; None if it is missing or damaged. A damaged one is removed."""
        path = self.folder / "manifest.json"
        content = _read_or_none(path)
        if content is not None and all(content.get(key) == value for key, value in self._settings_json.items()):
            return read_manifest(self.folder)
        if path.exists():
            warn(f"{path} is damaged: it is written again")
            path.unlink()
        return None

    def _results_of_markers(self) -> dict[str, dict[str, Any] | None]:
        """The result in each marker, by task name; None for a damaged marker."""
        return {path.stem: self.read_marker(path.stem) for path in sorted((self.folder / "tasks").glob("*.json"))}

    def run_unfinished(
        self,
        function: Callable[[T], dict[str, Any]],
        tasks: Mapping[str, T],
        sizes: Sequence[int],
        processes: int,
        label: str,
    ) -> list[dict[str, Any]]:
        """Run tasks as `parallel.run_tasks` does, but not those that have a marker; returns the results of all.

        `tasks` maps the name of each task to the argument of `function`, which returns the task's result.
        """
        return run_tasks(partial(self._run_unless_finished, function), list(tasks.items()), sizes, processes, label)

    def _run_unless_finished(
        self, function: Callable[[T], dict[str, Any]], name_and_argument: tuple[str, T]
    ) -> dict[str, Any]:
        name, argument = name_and_argument
        result = self.read_marker(name)
        if result is None:
            result = function(argument)
            self.write_marker(name, result)
        return result

    def finished_results(self) -> dict[str, dict[str, Any]]:
        """The results of the finished tasks, by task name; a folder without settings.json has none. Raises ValueError
        if settings.json or a marker is damaged, and if settings.json has another stage or other settings."""
        path = self.folder / "settings.json"
        if not path.exists():
            return {}
        again = f"give the command that wrote {self.folder} again"
        if _read_or_none(path) != self._settings_json:
            manifest = self.folder / "manifest.json"
            raise ValueError(f"{path} is damaged, or has other settings than {manifest}: delete both and {again}")
        results = {}
        for name, result in self._results_of_markers().items():
            if result is None:
                raise ValueError(f"{self._marker(name)} is damaged: delete it and the manifest, and {again}")
            results[name] = result
        return results

    def read_marker(self, task_name: str) -> dict[str, Any] | None:
        """The result of a task; None if the task has not finished, or if its marker is damaged."""
        return _read_or_none(self._marker(task_name), self._context)

    def check_sizes(self, result: Mapping[str, Any] | None, files: Iterable[tuple[str, int]], done: str) -> None:
        """Raise ValueError if one of `files`, names and sizes, does not have the size that `inputs` of a task's
        `result` gives. `done`: what the task did with a file, in words that precede this folder."""
        for (name, size), (_, size_then) in zip(files, result["inputs"] if result else (), strict=False):
            if size != size_then:
                raise ValueError(
                    f"{name} had {size_then} bytes when {done} {self.folder}, now it has {size}: restore it, or choose "
                    "another output folder"
                )

    def write_marker(self, task_name: str, result: dict[str, Any], flush: bool = False) -> None:
        """Mark a task as finished; call it when all its shards are in place.

        Without `flush` the marker may not be on the disk yet. If a crash loses it, or a file that it lists, the task
        runs again.
        """
        write_checksummed(self._marker(task_name), result, self._context, flush)

    def remove_markers(self, task_names: Iterable[str]) -> None:
        """Remove the markers of tasks, so that they run again."""
        for name in task_names:
            self._marker(name).unlink(missing_ok=True)

    def remove_all_markers(self) -> None:
        """Remove the markers of all tasks."""
        self.remove_markers(path.stem for path in (self.folder / "tasks").glob("*.json"))

    def forget_settings(self) -> None:
        """Remove settings.json and all markers, so that the folder accepts other settings."""
        (self.folder / "settings.json").unlink()
        self.remove_all_markers()

    def _marker(self, task_name: str) -> Path:
        return self.folder / "tasks" / f"{task_name}.json"

    @cached_property
    def _context(self) -> str:
        """Hash of stage and settings. Each marker's checksum covers this hash, so a marker is invalid under other
        settings."""
        return hashlib.sha256(json.dumps(self._settings_json, sort_keys=True).encode()).hexdigest()

    @cached_property
    def _settings_json(self) -> dict[str, Any]:
        """The content that settings.json must have, with lists in place of tuples, as JSON is read."""
        return json.loads(json.dumps({"stage": self.name, "settings": self.settings}))


def _read_or_none(path: Path, context: str = "") -> dict[str, Any] | None:
    """Read an object that `write_checksummed` wrote; None if the file is missing or damaged."""
    try:
        return read_checksummed(path, context)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def is_unfinished(folder: Path, stage: str) -> bool:
    """Whether `stage` began to write into the folder and has not completed it."""
    recorded = _read_or_none(folder / "settings.json")
    return recorded is not None and recorded["stage"] == stage and not (folder / "manifest.json").exists()


def mixed_tasks(data: Path) -> list[str]:
    """The tasks that stage `mix` has completed in `data`. Raises ValueError if there are none."""
    tasks = [task for task in TASKS if (data / task / "manifest.json").exists()]
    if not tasks:
        require_folder(data, "name the folder that `xlme prep mix` wrote")
        raise ValueError(
            f"{data} holds neither mono/manifest.json nor para/manifest.json: name the folder that `xlme prep mix` "
            "wrote"
        )
    return tasks


def written_files(result: dict[str, Any]) -> list[Shard]:
    """The files that a task wrote, as its result lists them."""
    files = result.get("shard"), *result.get("shards", ()), *result.get("files", ())
    return [Shard(**file) for file in files if file]


def is_intact(root: Path, file: Shard) -> bool:
    """Whether a file exists and has its recorded size and checksum."""
    path = root / file.name
    return path.is_file() and path.stat().st_size == file.bytes and file_sha256(path) == file.sha256


@contextmanager
def new_file(path: Path, flush: bool = True) -> Iterator["_HashingFile"]:
    """Yield a new file for writing, which hashes all that is written. When the block ends, the file is renamed to
    `path`; with `flush` it is flushed to the disk first."""
    make_folder(path.parent)
    with atomic_write(path, flush) as file, _HashingFile(file) as hashing:
        yield hashing
        file.flush()
        if os.fstat(file.fileno()).st_size != hashing.bytes:
            raise OSError(None, f"the file system did not keep all of {hashing.bytes} bytes", str(path))


def write_file(path: Path, data: bytes, root: Path) -> Shard:
    """Write a file that has no rows, and flush its data and its name to the disk. Returns the file's entry for a
    marker, with the name relative to `root`."""
    with new_file(path) as file:
        file.write(data)
    fsync(path.parent)
    return file.shard(path, root)


def write_arrow(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], root: Path) -> Shard:
    """Write an uncompressed Arrow IPC file, and flush its data to the disk; `write_manifest` later flushes its name.
    Returns the file's entry for a marker, with the name relative to `root`."""
    rows = 0
    with new_file(path) as file, pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
    return file.shard(path, root, rows)


def read_arrow(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an Arrow IPC file. Each is validated in full, because a damaged offset could point
    outside the memory. Raises ValueError for a damaged file."""
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
            for batch in map(reader.get_batch, range(reader.num_record_batches)):
                batch.validate(full=True)
                yield batch
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # the disk failed or access was denied: the file may be undamaged
            raise
        raise ValueError(f"{path} cannot be read ({error}): check the folder with `xlme prep verify`") from None


class _HashingFile(io.RawIOBase):
    """Writes all bytes to `file`, or raises an error, and hashes them."""

    def __init__(self, file: IO[bytes]):
        self.file = file  # buffered: when the disk takes only part of the data, it writes the rest or raises an error
        self.bytes = 0
        self.sha256 = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = self.file.write(data)
        self.sha256.update(data)
        self.bytes += size
        return size

    def shard(self, path: Path, root: Path, rows: int = 0) -> Shard:
        """The file's entry for a marker."""
        return Shard(path.relative_to(root).as_posix(), rows, self.bytes, self.sha256.hexdigest())


def _short(value: Any, limit: int = 120) -> str:
    """A setting as JSON, cut to `limit` characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 1] + "…"
