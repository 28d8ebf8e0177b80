"""Stage `verify`: read every shard of a folder that `encode` or `mix` wrote, and name the first fault."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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


@dataclass
class Found:
    """What shards hold: `items` by the languages of their sides, in rows alone; `unknown` ids in encoded text alone."""

    records: int = 0
    tokens: int = 0
    unknown: int = 0
    items: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def add(self, other: "Found") -> None:
        """Have the other's too."""
        self.records += other.records
        self.tokens += other.tokens
        self.unknown += other.unknown
        self.items.update(other.items)

    def count(self, batch: pa.RecordBatch, sides: int) -> None:
        """Have a sound record batch's too; `sides` 0 for encoded text."""
        self.records += batch.num_rows
        if not sides:
            ids = [column.flatten().to_numpy() for column in batch.columns]
            self.tokens += sum(map(len, ids))
            self.unknown += sum(int((column == UNK).sum()) for column in ids)
            return
        self.tokens += int(batch.column("lengths").flatten().to_numpy().sum(dtype=np.int64))
        codes = np.sort(batch.column("languages").flatten().to_numpy().reshape(-1, sides))
        kinds, numbers = np.unique(codes, axis=0, return_counts=True)
        self.items.update({tuple(kind): number for kind, number in zip(kinds.tolist(), numbers.tolist(), strict=True)})


def run(config: VerifyConfig) -> None:
    """Check `config.data`. Raises ValueError naming the file and the row of the first fault."""
    for folder in on_root(lambda: _stage_folders(config.data)):
        manifest = on_root(partial(_readable_manifest, folder))
        sizes = [shard.bytes for shard in manifest.shards]
        found = run_tasks(
            partial(check_shard, folder, manifest), manifest.shards, sizes, config.processes, f"verify {folder.name}"
        )
        on_root(partial(_check_manifest, folder, manifest, found))
        on_root(partial(say, f"{folder}: {len(manifest.shards)} shards, {manifest.rows:,} records, no fault"))


def _stage_folders(data: Path) -> list[Path]:
    folders = [folder for folder in (data, *(data / task for task in TASKS)) if _is_stage(folder)]
    if not folders:
        raise ValueError(f"{data} holds neither mono/ nor para/: name a folder that encode or mix wrote")
    return folders


def _is_stage(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("settings.json", "manifest.json"))


def _readable_manifest(folder: Path) -> Manifest:
    """The manifest, if the files next to it are those it lists."""
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


def _check_manifest(folder: Path, manifest: Manifest, found: Sequence[Found]) -> None:
    """Everything else that the manifest says, from what the shards hold and what settings and markers say."""
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
    """What to do about a file of a stage's folder."""
    folder = path.parent if path.name == "manifest.json" or path.parent.name in TASKS else path.parent.parent
    return f"delete it and give the command that wrote {folder} again"


def _check_vocabulary(folder: Path, manifest: Manifest) -> None:
    model = folder.parent / "vocab" / MODEL_FILE
    encoded_with = manifest.settings.get("vocabulary_sha256", manifest.vocabulary_sha256)
    if encoded_with != manifest.vocabulary_sha256:
        path = folder / "manifest.json"
        raise ValueError(
            f"{path} names two vocabularies, {encoded_with} and {manifest.vocabulary_sha256}: {_again(path)}"
        )
    if model.exists() and file_sha256(model) != manifest.vocabulary_sha256:
        raise ValueError(f"{model} is not the vocabulary that {folder} was made with: copy that one there")
    if manifest.stage == "mix" and not model.exists():
        raise ValueError(f"{model} is missing: copy the vocabulary that {folder} was made with there")
    if model.exists() and Vocabulary(model).size != manifest.vocabulary_size:
        path = folder / "manifest.json"
        raise ValueError(
            f"{path} has a vocabulary of {manifest.vocabulary_size} ids, but {model} has {Vocabulary(model).size}: {_again(path)}"
        )


def _check_record(folder: Path, manifest: Manifest) -> None:
    """settings.json and the markers of finished tasks, as far as they are there, say what the manifest says."""
    settings, path = folder / "settings.json", folder / "manifest.json"
    record = recorded(folder, manifest.stage, manifest.settings)
    if record is None:
        raise ValueError(
            f"{settings} is damaged, or has other settings than {path}: delete both and give the command that wrote {folder} again"
        )
    listed = {shard.name: shard for shard in manifest.shards}
    counts: dict[str, Any] = {}
    for task, result in record.items():
        for shard in written_files(result):
            if listed.get(shard.name) != shard:
                raise ValueError(f"{path} does not say of {shard.name} what {task}.json in tasks says: {_again(path)}")
        if manifest.stage == "encode":
            name = task.rpartition("-")[0]
            counts[name] = add_counts(counts.get(name, {}), result["counts"])
    tasks = {f"{source[0]}-{number:03d}" for source, number in _numbered(manifest.settings.get("inputs", ()))}
    if manifest.stage == "encode" and tasks == record.keys() and counts != manifest.counts["by_language"]:
        raise ValueError(f"{path} has other counts than the inputs' in tasks: {_again(path)}")


def _numbered(inputs: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    """Every input with its number among those of its name."""
    seen: Counter[str] = Counter()
    for source in inputs:
        yield source, seen[source[0]]
        seen[source[0]] += 1


def _check_encoded_counts(folder: Path, manifest: Manifest, found: Sequence[Found]) -> None:
    """The manifest counts what the shards hold, and nothing was lost between input and output."""
    unit, path = "documents" if folder.name == "mono" else "pairs", folder / "manifest.json"
    by_name = {name: Found() for name in manifest.counts["by_language"]}
    for shard, part in zip(manifest.shards, found, strict=True):
        name = shard.name.split("/")[0]
        if name not in by_name:
            raise ValueError(f"{path} lists shards of {name} but no counts: {_again(path)}")
        by_name[name].add(part)
    for name, counts in manifest.counts["by_language"].items():
        whole = by_name[name]
        for key, number in ((unit, whole.records), ("tokens", whole.tokens), ("unknown", whole.unknown)):
            if counts[key] != number:
                raise ValueError(f"the {key} of {name} counted in {path} and its shards differ: {_again(path)}")
        for read, kept, lost in ((f"{unit}_in", unit, "dropped"), ("paragraphs_in", "paragraphs", "removed")):
            if read in counts and counts[read] != counts[kept] + sum(counts[lost].values()):
                raise ValueError(f"the {read} of {name} in {path} are not those written and {lost}: {_again(path)}")


def _check_mixed_counts(folder: Path, manifest: Manifest, found: Sequence[Found]) -> None:
    """The manifest counts what the rows hold, and languages were sampled by its alpha."""
    path, counts, whole = folder / "manifest.json", manifest.counts, Found()
    for part in found:
        whole.add(part)
    by_name = {name: counts["by_language"][name] for name in sorted(counts["by_language"])}
    available, used = ([entry[key] for entry in by_name.values()] for key in ("available", "used"))
    by_languages: Counter[tuple[int, ...]] = Counter()
    for name, number in zip(by_name, used, strict=True):
        by_languages[tuple(sorted(group_languages(name, manifest.languages)))] += number
    if +by_languages != +whole.items or counts["examples"] != whole.items.total() or counts["tokens"] != whole.tokens:
        raise ValueError(
            f"the rows, by language, and tokens counted in {path} are not those of its shards: {_again(path)}"
        )
    shares = {
        "share_before": [n / sum(available) for n in available],
        "share_after": [n / sum(used) for n in used],
        "repeat": [n / m if m else 0.0 for n, m in zip(used, available, strict=True)],
    }
    derived = [{key: values[j] for key, values in shares.items()} for j in range(len(by_name))]
    given = [{key: entry[key] for key in shares} for entry in by_name.values()]
    if derived != given or counts["fill"] != whole.tokens / (manifest.rows * manifest.settings["row_tokens"]):
        raise ValueError(f"the shares in {path} do not follow from its own counts: {_again(path)}")
    sampled = counts.get("sampled", sum(used))  # of pairs, the last few have no row
    quotas = apportion(sampled, temperature_shares(available, manifest.settings["alpha"]))
    exact = manifest.settings["task"] == "mono"
    if ("sampled" in counts or exact) and any(n > q or (exact and n != q) for n, q in zip(used, quotas, strict=True)):
        raise ValueError(f"{path} says alpha {manifest.settings['alpha']}, which samples other amounts: {_again(path)}")


def check_shard(folder: Path, manifest: Manifest, shard: Shard) -> Found:
    """Read one shard whole; what it holds. Raises ValueError naming the file and the first faulty row."""
    path = folder / shard.name
    again = f"give the command that wrote {folder} again"
    if not path.exists():
        raise ValueError(f"{path} is missing: {again}")
    if path.stat().st_size != shard.bytes:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, the manifest says {shard.bytes}: {again}")
    if file_sha256(path) != shard.sha256:
        raise ValueError(f"{path} does not have the manifest's checksum, its bytes changed: {again}")
    schema, faults = _rules(folder, manifest)
    sides = 0 if manifest.stage == "encode" else 2 if manifest.settings["task"] == "para" else 1
    found = Found()
    try:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            if reader.schema != schema:
                raise ValueError(f"{path} has columns {_line(reader.schema)}, not {_line(schema)}: {_again(path)}")
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                batch.validate(full=True)
                _raise_first(path, found.records, list(faults(batch)))
                found.count(batch, sides)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not readable from row {found.records} on ({error}): {_again(path)}") from None
    if found.records != shard.rows:
        raise ValueError(f"{path} has {found.records} rows, the manifest says {shard.rows}: {_again(path)}")
    return found


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
        raise ValueError(f"{path}, row {first_row + row}: {words}: {_again(path)}")


def _line(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
