"""Stage `verify`: read every shard of a folder that `encode` or `mix` wrote, and name the first fault."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.clean import add_counts
from data_prep.encoded import group_languages
from data_prep.languages import LANGUAGES
from data_prep.parallel import on_root, run_tasks
from data_prep.progress import say
from data_prep.record_checks import Faults, document_faults, pair_faults, row_faults
from data_prep.sampling import apportion, temperature_shares
from data_prep.store import recorded, written_files
from xlme_ds.data.schema import (
    DOCUMENTS,
    LAYOUTS,
    PAIRS,
    TASKS,
    UNK,
    Manifest,
    Shard,
    file_sha256,
    read_manifest,
    row_schema,
)
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary


@dataclass(frozen=True)
class VerifyConfig:
    """Check checksums, schemas, counts and every token id of encoded or mixed data."""

    data: Path
    """Folder that `encode` or `mix` wrote, or one of its task folders."""
    processes: int = 1
    """Local processes. Not used under MPI."""


# What shards hold, by "records", "tokens" and (in encoded text alone) "unknown" ids; in rows also the items, by the
# sorted languages of their sides, a tuple of indices.
Found = Counter[Any]


def run(config: VerifyConfig) -> None:
    """Check `config.data`. Raises ValueError naming the file and the row of the first fault."""
    for folder in on_root(lambda: _stage_folders(config.data)):
        manifest = on_root(partial(_readable_manifest, folder))
        sizes = [shard.bytes for shard in manifest.shards]
        check = partial(check_shard, folder, manifest)
        found = run_tasks(check, manifest.shards, sizes, config.processes, f"verify {folder.name}")
        on_root(partial(_check_manifest, folder, manifest, found))
        on_root(partial(say, f"{folder}: {len(manifest.shards)} shards, {manifest.rows:,} records, no fault"))


def _stage_folders(data: Path) -> list[Path]:
    folders = [
        folder
        for folder in (data, *(data / task for task in TASKS))
        if (folder / "settings.json").exists() or (folder / "manifest.json").exists()
    ]
    if not folders:
        raise ValueError(f"{data} holds neither mono/ nor para/: name a folder that encode or mix wrote")
    return folders


def _readable_manifest(folder: Path) -> Manifest:
    """The manifest, after a check that it lists the files in the folder and their vocabulary."""
    manifest, path = read_manifest(folder), folder / "manifest.json"
    if manifest.stage not in ("encode", "mix"):
        raise ValueError(f"{folder} was written by stage {manifest.stage}: verify reads what encode or mix wrote")
    _check_vocabulary(folder, manifest)
    listed = {shard.name for shard in manifest.shards}
    for stray in sorted(folder.rglob("*.arrow")):
        if stray.relative_to(folder).as_posix() not in listed:
            raise ValueError(f"{stray} is not in the manifest: delete it, or write {folder} again")
    if manifest.stage == "mix":
        rows, full = manifest.settings["rows"], manifest.settings["rows_per_shard"]
        expected = [min(full, rows - start) for start in range(0, rows, full)]
        if [shard.rows for shard in manifest.shards] != expected:
            raise ValueError(f"{path} does not list {rows} rows, {full} a shard: {_again(path)}")
    return manifest


def _check_vocabulary(folder: Path, manifest: Manifest) -> None:
    model, path = folder.parent / "vocab" / MODEL_FILE, folder / "manifest.json"
    encoded_with = manifest.settings.get("vocabulary_sha256", manifest.vocabulary_sha256)
    if encoded_with != manifest.vocabulary_sha256:
        raise ValueError(
            f"{path} names two vocabularies, {encoded_with} and {manifest.vocabulary_sha256}: {_again(path)}"
        )
    if not model.exists():
        if manifest.stage == "mix":
            raise ValueError(f"{model} is missing: copy the vocabulary that {folder} was made with there")
        return
    if file_sha256(model) != manifest.vocabulary_sha256:
        raise ValueError(f"{model} is not the vocabulary that {folder} was made with: copy that one there")
    size = Vocabulary(model).size
    if size != manifest.vocabulary_size:
        raise ValueError(
            f"{path} has a vocabulary of {manifest.vocabulary_size} ids, but {model} has {size}: {_again(path)}"
        )


def check_shard(folder: Path, manifest: Manifest, shard: Shard) -> Found:
    """Read one shard whole, and count what it holds. Raises ValueError naming the file and the first faulty row."""
    path = folder / shard.name
    again = f"give the command that wrote {folder} again"
    if not path.exists():
        raise ValueError(f"{path} is missing: {again}")
    if path.stat().st_size != shard.bytes:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, the manifest says {shard.bytes}: {again}")
    if file_sha256(path) != shard.sha256:
        raise ValueError(f"{path} does not have the manifest's checksum, its bytes changed: {again}")
    schema, faults_of, count = _rules(folder, manifest)
    found: Found = Counter()
    try:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            if reader.schema != schema:
                raise ValueError(f"{path} has columns {_line(reader.schema)}, not {_line(schema)}: {_again(path)}")
            for batch in map(reader.get_batch, range(reader.num_record_batches)):
                batch.validate(full=True)
                faults = [(int(np.argmax(mask)), words) for mask, words in faults_of(batch) if mask.any()]
                if faults:
                    row, words = min(faults, key=lambda fault: fault[0])
                    raise ValueError(f"{path}, row {found['records'] + row}: {words}: {_again(path)}")
                found += count(batch)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not readable from row {found['records']} on ({error}): {_again(path)}") from None
    if found["records"] != shard.rows:
        raise ValueError(f"{path} has {found['records']} rows, the manifest says {shard.rows}: {_again(path)}")
    return found


def _rules(
    folder: Path, manifest: Manifest
) -> tuple[pa.Schema, Callable[[pa.RecordBatch], Faults], Callable[[pa.RecordBatch], Found]]:
    """The schema of a folder's shards, the faults of their records, and the counts of records without faults."""
    text_end = manifest.vocabulary_size - 1  # the last id is <mask>, which no text has
    if manifest.stage == "mix":
        sides = 2 if manifest.settings["task"] == "para" else 1
        layout = LAYOUTS[manifest.layout]
        faults = partial(row_faults, text_end=text_end, sides=sides, languages=len(manifest.languages), layout=layout)
        return row_schema(manifest.settings["row_tokens"]), faults, partial(_count_rows, sides)
    if folder.name == "para":
        return PAIRS, partial(pair_faults, text_end=text_end), _count_text
    return DOCUMENTS, partial(document_faults, text_end=text_end), _count_text


def _count_text(batch: pa.RecordBatch) -> Found:
    ids = np.concatenate([column.flatten().to_numpy() for column in batch.columns])
    return Counter(records=batch.num_rows, tokens=len(ids), unknown=int((ids == UNK).sum()))


def _count_rows(sides: int, batch: pa.RecordBatch) -> Found:
    _, lengths, languages = (column.flatten().to_numpy() for column in batch.columns)
    codes = np.sort(languages.reshape(-1, sides))
    kinds, numbers = np.unique(codes, axis=0, return_counts=True)
    found: Found = Counter(dict(zip(map(tuple, kinds.tolist()), numbers.tolist(), strict=True)))
    return found + Counter(records=batch.num_rows, tokens=int(lengths.sum(dtype=np.int64)))


def _line(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _check_manifest(folder: Path, manifest: Manifest, found: Sequence[Found]) -> None:
    """Compare the manifest with what the shards hold, and with the settings and markers of the folder."""
    path, settings = folder / "manifest.json", manifest.settings
    listed = [shard.name for shard in manifest.shards]
    languages = sorted(settings.get("languages", ()))
    ordered = [f"{number:05d}.arrow" for number in range(len(listed))]
    if manifest.stage == "encode":
        groups = [group_languages(source[0], LANGUAGES) for source in settings.get("inputs", ())]
        languages = sorted({LANGUAGES[index] for group in groups for index in group})
        ordered = sorted(listed)
    if listed != ordered:
        raise ValueError(f"{path} lists the shards in another order than that of their names: {_again(path)}")
    if languages and list(manifest.languages) != languages:
        raise ValueError(
            f"{path} has the languages {' '.join(manifest.languages)}, not {' '.join(languages)}: {_again(path)}"
        )
    (_check_mixed_counts if manifest.stage == "mix" else _check_encoded_counts)(folder, manifest, found)
    _check_record(folder, manifest)


def _again(path: Path) -> str:
    """Advice for a faulty file of a stage's folder."""
    folder = path.parent if path.name == "manifest.json" or path.parent.name in TASKS else path.parent.parent
    return f"delete it and give the command that wrote {folder} again"


def _check_record(folder: Path, manifest: Manifest) -> None:
    """Compare the manifest with settings.json and the markers of finished tasks, as far as they are there."""
    settings, path = folder / "settings.json", folder / "manifest.json"
    record = recorded(folder, manifest.stage, manifest.settings)
    if record is None:
        raise ValueError(
            f"{settings} is damaged, or has other settings than {path}: delete both and give the command that wrote "
            f"{folder} again"
        )
    listed = {shard.name: shard for shard in manifest.shards}
    for task, result in record.items():
        for shard in written_files(result):
            if listed.get(shard.name) != shard:
                raise ValueError(f"{path} does not say of {shard.name} what {task}.json in tasks says: {_again(path)}")
    inputs = Counter(source[0] for source in manifest.settings.get("inputs", ()))
    tasks = {f"{name}-{number:03d}" for name, total in inputs.items() for number in range(total)}
    if manifest.stage == "encode" and tasks == record.keys():
        counts: dict[str, Any] = {}
        for task, result in record.items():
            name = task.rpartition("-")[0]
            counts[name] = add_counts(counts.get(name, {}), result["counts"])
        if counts != manifest.counts["by_language"]:
            raise ValueError(f"{path} has other counts than the inputs' in tasks: {_again(path)}")


def _check_encoded_counts(folder: Path, manifest: Manifest, found: Sequence[Found]) -> None:
    """The manifest counts what the shards hold, and nothing was lost between input and output."""
    unit, path = "documents" if folder.name == "mono" else "pairs", folder / "manifest.json"
    by_name: dict[str, Found] = {name: Counter() for name in manifest.counts["by_language"]}
    for shard, part in zip(manifest.shards, found, strict=True):
        name = shard.name.split("/")[0]
        if name not in by_name:
            raise ValueError(f"{path} lists shards of {name} but no counts: {_again(path)}")
        by_name[name] += part
    for name, counts in manifest.counts["by_language"].items():
        for key, counted in ((unit, "records"), ("tokens", "tokens"), ("unknown", "unknown")):
            if counts[key] != by_name[name][counted]:
                raise ValueError(f"the {key} of {name} counted in {path} and its shards differ: {_again(path)}")
        for read, kept, lost in ((f"{unit}_in", unit, "dropped"), ("paragraphs_in", "paragraphs", "removed")):
            if read in counts and counts[read] != counts[kept] + sum(counts[lost].values()):
                raise ValueError(f"the {read} of {name} in {path} are not those written and {lost}: {_again(path)}")


def _check_mixed_counts(folder: Path, manifest: Manifest, found: Sequence[Found]) -> None:
    """The manifest counts what the rows hold, and languages were sampled by its alpha."""
    path, counts, whole = folder / "manifest.json", manifest.counts, sum(found, Counter[Any]())
    items = Counter({kind: number for kind, number in whole.items() if isinstance(kind, tuple)})
    by_name = {name: counts["by_language"][name] for name in sorted(counts["by_language"])}
    available, used = ([entry[key] for entry in by_name.values()] for key in ("available", "used"))
    by_languages: Counter[tuple[int, ...]] = Counter()
    for name, number in zip(by_name, used, strict=True):
        by_languages[tuple(sorted(group_languages(name, manifest.languages)))] += number
    if +by_languages != items or counts["examples"] != items.total() or counts["tokens"] != whole["tokens"]:
        raise ValueError(
            f"the rows, by language, and tokens counted in {path} are not those of its shards: {_again(path)}"
        )
    derived = [(n / sum(available), m / sum(used), m / n if n else 0.0) for n, m in zip(available, used, strict=True)]
    given = [(entry["share_before"], entry["share_after"], entry["repeat"]) for entry in by_name.values()]
    if derived != given or counts["fill"] != whole["tokens"] / (manifest.rows * manifest.settings["row_tokens"]):
        raise ValueError(f"the shares in {path} do not follow from its own counts: {_again(path)}")
    sampled = counts.get("sampled", sum(used))  # of pairs, the last few have no row
    quotas = apportion(sampled, temperature_shares(available, manifest.settings["alpha"]))
    exact = manifest.settings["task"] == "mono"
    if ("sampled" in counts or exact) and any(n > q or (exact and n != q) for n, q in zip(used, quotas, strict=True)):
        raise ValueError(f"{path} says alpha {manifest.settings['alpha']}, which samples other amounts: {_again(path)}")
