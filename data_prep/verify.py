"""Stage `verify`: read every shard of a folder that `encode` or `mix` wrote, and name the first fault."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_prep.executor import is_root, run_tasks
from data_prep.faults import Faults, document_faults, pair_faults, row_faults
from xlme_ds.data.schema import (
    DOCUMENTS,
    LAYOUTS,
    PAIRS,
    TASKS,
    Manifest,
    Shard,
    file_sha256,
    read_manifest,
    row_schema,
)
from xlme_ds.data.vocabulary import MODEL_FILE


@dataclass(frozen=True)
class VerifyConfig:
    """Check checksums, schemas, counts and every token id of encoded or mixed data."""

    data: Path
    """Folder that `encode` or `mix` wrote, or one of its task folders."""
    processes: int = 1
    """Local processes. Not used under MPI."""


def run(config: VerifyConfig) -> None:
    """Check `config.data`. Raises ValueError naming the file and the row of the first fault."""
    folders = [folder for folder in (config.data, *(config.data / task for task in TASKS)) if _is_stage(folder)]
    if not folders:
        raise ValueError(f"{config.data} holds neither mono/ nor para/: name a folder that encode or mix wrote")
    for folder in folders:
        manifest = read_manifest(folder)
        if manifest.stage not in ("encode", "mix"):
            raise ValueError(f"{folder} was written by stage {manifest.stage}: verify reads what encode or mix wrote")
        _check_folder(folder, manifest)
        sizes = [shard.bytes for shard in manifest.shards]
        run_tasks(
            partial(check_shard, folder, manifest), manifest.shards, sizes, config.processes, f"verify {folder.name}"
        )
        if is_root():
            print(f"{folder}: {len(manifest.shards)} shards, {manifest.rows:,} records, no fault", flush=True)


def _is_stage(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("settings.json", "manifest.json"))


def _check_folder(folder: Path, manifest: Manifest) -> None:
    """What the manifest says of itself, and the files beside it."""
    model = folder.parent / "vocab" / MODEL_FILE
    if model.exists() and file_sha256(model) != manifest.vocabulary_sha256:
        raise ValueError(f"{model} is not the vocabulary that {folder} was made with: copy that one there")
    listed = {shard.name for shard in manifest.shards}
    for path in sorted(folder.rglob("*.arrow")):
        if path.relative_to(folder).as_posix() not in listed:
            raise ValueError(f"{path} is not in the manifest: delete it, or write {folder} again")
    if manifest.stage == "mix":
        rows, full = manifest.settings["rows"], manifest.settings["rows_per_shard"]
        expected = [min(full, rows - start) for start in range(0, rows, full)]
        if [shard.rows for shard in manifest.shards] != expected:
            raise ValueError(
                f"{folder / 'manifest.json'} does not list {rows} rows, {full} a shard: write {folder} again"
            )
    else:
        _check_counts(folder, manifest)


def _check_counts(folder: Path, manifest: Manifest) -> None:
    """Encoded shards have as many records of each language or pair as the manifest counted."""
    unit = "documents" if folder.name == "mono" else "pairs"
    written: Counter[str] = Counter()
    for shard in manifest.shards:
        written[shard.name.split("/")[0]] += shard.rows
    for name, counts in manifest.counts["by_language"].items():
        if written.pop(name, 0) != counts[unit]:
            raise ValueError(
                f"the {unit} of {name} counted in {folder / 'manifest.json'} and its shards differ: encode again"
            )
    if written:
        raise ValueError(f"{folder / 'manifest.json'} lists shards of {min(written)} but no counts: encode again")


def check_shard(folder: Path, manifest: Manifest, shard: Shard) -> dict[str, int]:
    """Read one shard whole; its records. Raises ValueError naming the file and the first faulty row."""
    path = folder / shard.name
    if not path.exists():
        raise ValueError(f"{path} is missing: write {folder} again")
    if path.stat().st_size != shard.bytes:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, the manifest says {shard.bytes}: write {folder} again"
        )
    if file_sha256(path) != shard.sha256:
        raise ValueError(f"{path} does not have the manifest's checksum, its bytes changed: write {folder} again")
    schema, faults = _rules(folder, manifest)
    records = 0
    try:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            if reader.schema != schema:
                raise ValueError(
                    f"{path} has columns {_line(reader.schema)}, not {_line(schema)}: write {folder} again"
                )
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                batch.validate(full=True)
                _raise_first(path, records, list(faults(batch)))
                records += batch.num_rows
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not readable from row {records} on ({error}): write {folder} again") from None
    if records != shard.rows:
        raise ValueError(f"{path} has {records} rows, the manifest says {shard.rows}: write {folder} again")
    return {"records": records}


def _rules(folder: Path, manifest: Manifest) -> tuple[pa.Schema, Callable[[pa.RecordBatch], Faults]]:
    text_end = manifest.vocabulary_size - 1  # the last id is <mask>, which no text has
    if manifest.stage == "mix":
        schema = row_schema(manifest.settings["row_tokens"])
        sides = 2 if manifest.settings["task"] == "para" else 1
        codes, layout = len(manifest.languages), LAYOUTS[manifest.layout]
        return schema, partial(row_faults, text_end=text_end, sides=sides, languages=codes, layout=layout)
    if folder.name == "para":
        return PAIRS, partial(pair_faults, text_end=text_end)
    return DOCUMENTS, partial(document_faults, text_end=text_end)


def _raise_first(path: Path, first_row: int, faults: list[tuple[np.ndarray, str]]) -> None:
    found = [(int(np.argmax(mask)), words) for mask, words in faults if mask.any()]
    if found:
        row, words = min(found, key=lambda fault: fault[0])
        raise ValueError(f"{path}, row {first_row + row}: {words}: write {path.parent} again")


def _line(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
