"""Stage `verify`: read every shard of a folder that `encode` or `mix` wrote, and name the first fault."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.filters.clean import add_counts
from data_prep.languages import LANGUAGES
from data_prep.mix.encoded import group_languages
from data_prep.parallel import on_root, run_tasks
from data_prep.progress import refuse, say
from data_prep.sampling import Sampling, apportion
from data_prep.store import recorded, written_files
from xlme_ds.data.schema import (
    BOS,
    DOCUMENTS,
    EOS,
    LAYOUTS,
    PAD,
    PAIRS,
    TASKS,
    UNK,
    Layout,
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
    """Worker processes on this machine. Not used under MPI."""


# What shards hold, by "records", "tokens" and (in encoded text alone) "unknown" ids; in rows also the items, by the
# sorted languages of their sides, a tuple of indices.
Found = Counter[Any]
Faults = Iterator[tuple[np.ndarray, str]]  # a bool a record, and the fault where it is true
Checks = Iterator[tuple[bool, str]]  # for `refuse`, in an order in which each may rely on those before it


def run(config: VerifyConfig) -> None:
    """Check `config.data`. Raises ValueError naming the file and the row of the first fault."""
    for folder in on_root(lambda: _stage_folders(config.data)):
        manifest = on_root(partial(_readable_manifest, folder))
        shards, check = manifest.shards, partial(_check_shard, folder, manifest)
        counts = run_tasks(check, shards, [s.bytes for s in shards], config.processes, f"verify {folder.name}")
        on_root(partial(refuse, _manifest_checks(folder, manifest, counts)))
        on_root(partial(say, f"{folder}: {len(shards)} shards, {manifest.rows:,} records, no fault"))


def _stage_folders(data: Path) -> list[Path]:
    folders = [
        folder
        for folder in (data, *(data / task for task in TASKS))
        if (folder / "settings.json").exists() or (folder / "manifest.json").exists()
    ]
    refuse([(bool(folders), f"{data} holds neither mono/ nor para/: name a folder that encode or mix wrote")])
    return folders


def _again(folder: Path) -> str:
    return f"delete it and give the command that wrote {folder} again"


def _readable_manifest(folder: Path) -> Manifest:
    """The manifest, after a check that it lists the files in the folder and their vocabulary."""
    manifest = read_manifest(folder)
    refuse(_listing_checks(folder, manifest))
    return manifest


def _listing_checks(folder: Path, manifest: Manifest) -> Checks:
    path, stage, settings = folder / "manifest.json", manifest.stage, manifest.settings
    yield stage in ("encode", "mix"), f"{folder} was written by stage {stage}: verify reads what encode or mix wrote"
    sha256 = manifest.vocabulary_sha256
    encoded_with = settings.get("vocabulary_sha256", sha256)
    yield encoded_with == sha256, f"{path} names two vocabularies, {encoded_with} and {sha256}: {_again(folder)}"
    model = folder.parent / "vocab" / MODEL_FILE  # encode keeps no copy
    if stage == "mix" or model.exists():
        yield model.exists(), f"{model} is missing: copy the vocabulary that {folder} was made with there"
        yield (
            file_sha256(model) == sha256,
            f"{model} is not the vocabulary that {folder} was made with: copy that one there",
        )
        size, ids = Vocabulary(model).size, manifest.vocabulary_size
        yield size == ids, f"{path} has a vocabulary of {ids} ids, but {model} has {size}: {_again(folder)}"
    listed = {shard.name for shard in manifest.shards}
    for stray in sorted(folder.rglob("*.arrow")):
        yield (
            stray.relative_to(folder).as_posix() in listed,
            f"{stray} is not in the manifest: delete it, or write {folder} again",
        )
    if stage == "mix":
        rows, full = settings["rows"], settings["rows_per_shard"]
        expected = [min(full, rows - start) for start in range(0, rows, full)]
        yield (
            [shard.rows for shard in manifest.shards] == expected,
            f"{path} does not list {rows} rows, {full} a shard: {_again(folder)}",
        )


def _check_shard(folder: Path, manifest: Manifest, shard: Shard) -> Found:
    """Read one shard whole, and count what it holds. Raises ValueError naming the file and the first faulty row."""
    path = folder / shard.name
    again = f"give the command that wrote {folder} again"
    refuse([(path.exists(), f"{path} is missing: {again}")])
    size = path.stat().st_size
    refuse([(size == shard.bytes, f"{path} has {size} bytes, the manifest says {shard.bytes}: {again}")])
    changed = f"{path} does not have the manifest's checksum, its bytes changed: {again}"
    refuse([(file_sha256(path) == shard.sha256, changed)])
    schema, faults_of, count = _rules(folder, manifest)
    found: Found = Counter()
    index, checks = path.with_suffix(".index"), list[np.ndarray]()
    if manifest.stage == "mix":
        refuse([(index.exists(), f"{index} is missing: {again}")])
        from xlme_ds.data.row_index import group_checks, index_of  # here: it loads numba, which others do without
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
            columns, schema_words = (", ".join(f"{c.name} {c.type}" for c in one) for one in (reader.schema, schema))
            refuse([(reader.schema == schema, f"{path} has columns {columns}, not {schema_words}: {_again(folder)}")])
            for batch in map(reader.get_batch, range(reader.num_record_batches)):
                batch.validate(full=True)
                if manifest.stage == "mix":
                    checks.append(group_checks(batch))
                faults = [(int(np.argmax(mask)), sentence) for mask, sentence in faults_of(batch) if mask.any()]
                if faults:
                    row, sentence = min(faults, key=lambda fault: fault[0])
                    raise ValueError(f"{path}, row {found['records'] + row}: {sentence}: {_again(folder)}")
                found += count(batch)
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        sentence = f"{path} is not readable from row {found['records']} on ({error}): {_again(folder)}"
        raise ValueError(sentence) from None
    if manifest.stage == "mix":
        fits = index.read_bytes() == index_of(path, shard.sha256, checks)
        refuse([(fits, f"{index} is not the index of {path.name}: {_again(folder)}")])
    rows = found["records"]
    refuse([(rows == shard.rows, f"{path} has {rows} rows, the manifest says {shard.rows}: {_again(folder)}")])
    return found


def _rules(
    folder: Path, manifest: Manifest
) -> tuple[pa.Schema, Callable[[pa.RecordBatch], Faults], Callable[[pa.RecordBatch], Found]]:
    """The schema of a folder's shards, the faults of their records, and the counts of records without faults."""
    text_end = manifest.vocabulary_size - 1  # the last id is <mask>, which no text has
    if manifest.stage == "mix":
        sides = 2 if manifest.settings["task"] == "para" else 1
        faults = partial(
            _row_faults,
            text_end=text_end,
            sides=sides,
            languages=len(manifest.languages),
            layout=LAYOUTS[manifest.layout],
            packed=sides == 2 or manifest.settings.get("sentences", False),
        )
        return row_schema(manifest.settings["row_tokens"]), faults, partial(_count_rows, sides)
    if folder.name == "para":
        return PAIRS, partial(_pair_faults, text_end=text_end), count_text
    return DOCUMENTS, partial(_document_faults, text_end=text_end), count_text


def count_text(batch: pa.RecordBatch) -> Found:
    """Counts of a record batch of documents or pairs."""
    ids = np.concatenate([column.flatten().to_numpy() for column in batch.columns])
    return Counter(records=batch.num_rows, tokens=len(ids), unknown=int((ids == UNK).sum()))


def _count_rows(sides: int, batch: pa.RecordBatch) -> Found:
    _, lengths, languages = (column.flatten().to_numpy() for column in batch.columns)
    items: Found = Counter(map(tuple, np.sort(languages.reshape(-1, sides)).tolist()))
    return items + Counter(records=batch.num_rows, tokens=int(lengths.sum(dtype=np.int64)))


def _document_faults(batch: pa.RecordBatch, text_end: int) -> Faults:
    ids, lengths, record = _flat(batch.column("tokens"))
    yield lengths < 2, "a document without text"
    yield _any(record, (ids < 0) | (ids >= text_end), batch.num_rows), f"an id outside [0, {text_end})"
    yield _any(record, (ids == BOS) | (ids == PAD), batch.num_rows), "<s> or <pad> inside a document"
    last = np.zeros(len(ids), dtype=bool)
    last[np.cumsum(lengths)[lengths > 0] - 1] = True
    yield _any(record, (ids == EOS) != last, batch.num_rows), "a document that does not have one </s>, at its end"


def _pair_faults(batch: pa.RecordBatch, text_end: int) -> Faults:
    for side in ("source", "target"):
        ids, lengths, record = _flat(batch.column(side))
        yield lengths == 0, f"an empty {side} side"
        outside = _any(record, (ids < 0) | (ids >= text_end), batch.num_rows)
        yield outside, f"an id outside [0, {text_end}) on the {side} side"
        special = (ids == BOS) | (ids == PAD) | (ids == EOS)
        yield _any(record, special, batch.num_rows), f"<s>, <pad> or </s> on the {side} side"


def _row_faults(
    batch: pa.RecordBatch, text_end: int, sides: int, languages: int, layout: Layout, packed: bool
) -> Faults:
    """Faults of training rows; `sides` 1 for monolingual rows, 2 for pairs; `packed`: a row may have several items."""
    width = batch.schema.field("tokens").type.list_size
    rows = batch.column("tokens").flatten().to_numpy().reshape(-1, width)
    lengths, items, record = _flat(batch.column("lengths"))
    codes, sides_of, code_record = _flat(batch.column("languages"))
    used = np.bincount(record, weights=lengths, minlength=len(rows)).astype(np.int64)
    yield ((rows < 0) | (rows >= text_end)).any(1), f"an id outside [0, {text_end})"
    yield (items == 0) | ((items > 1) & (not packed)), "an impossible number of items"
    yield _any(record, lengths < 1 + 2 * sides, len(rows)) | (used > width), "lengths that the row cannot have"
    padding = (np.arange(width) >= used[:, None]) != (rows == PAD)
    yield padding.any(1), "<pad> where text belongs, or text after the last item"
    yield sides_of != items * sides, "not one language a side"
    yield _any(code_record, (codes < 0) | (codes >= languages), len(rows)), f"a language index outside [0, {languages})"
    opening = "<s>" if layout.opening == BOS else "</s>"
    yield (
        _item_faults(rows, lengths.astype(np.int64), record, used, sides, layout, packed),
        f"an item that does not start with {opening}, end with </s>, or have the separators of its task",
    )


def _item_faults(
    rows: np.ndarray,
    lengths: np.ndarray,
    record: np.ndarray,
    used: np.ndarray,
    sides: int,
    layout: Layout,
    packed: bool,
) -> np.ndarray:
    """Whether a row has an item that is not laid out as its kind is; impossible lengths are left out."""
    width = rows.shape[1]
    stop = np.cumsum(lengths) - (np.cumsum(used) - used)[record]  # within the row
    start = stop - lengths
    sound = (lengths > 0) & (start >= 0) & (stop <= width)
    record, flat = record[sound], rows.ravel()
    first, last = record * width + start[sound], record * width + stop[sound] - 1  # of an item, in all rows
    begins = np.zeros(flat.size, dtype=bool)
    begins[first] = True
    bad = _any(record, (flat[first] != layout.opening) | (flat[last] != EOS), len(rows))
    bad |= ((rows == BOS) & ~begins.reshape(rows.shape)).any(1)
    if packed:
        separators = np.concatenate([[0], np.cumsum(flat == EOS)])
        wanted = len(layout.between) if sides == 2 else 0
        bad |= _any(record, separators[last] - separators[first + 1] != wanted, len(rows))
        bad |= _any(record, (flat[first + 1] == EOS) | (flat[last - 1] == EOS), len(rows))
    if sides == 2:
        between = np.append(np.flatnonzero(flat == EOS), flat.size)[separators[first + 1]]
        ends = np.minimum(between + len(layout.between) - 1, flat.size - 1)
        bad |= _any(record, flat[ends] != EOS, len(rows))
    return bad


def _flat(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The values of a list column, how many each record has, and the record of each value."""
    lengths = np.diff(column.offsets.to_numpy()).astype(np.int64)
    return column.flatten().to_numpy(), lengths, np.repeat(np.arange(len(lengths)), lengths)


def _any(record: np.ndarray, fault: np.ndarray, records: int) -> np.ndarray:
    return np.bincount(record[fault], minlength=records)[:records] > 0


def _manifest_checks(folder: Path, manifest: Manifest, found: Sequence[Found]) -> Checks:
    """Compare the manifest with what the shards hold, and with the settings and markers of the folder."""
    path, settings = folder / "manifest.json", manifest.settings
    listed = [shard.name for shard in manifest.shards]
    languages = sorted(settings.get("languages", ()))
    ordered = [f"{number:05d}.arrow" for number in range(len(listed))]
    if manifest.stage == "encode":
        names = [source[0] for source in settings.get("inputs", ())]
        codes = sorted({*LANGUAGES, *manifest.languages})
        languages = sorted({codes[index] for name in names for index in group_languages(name, codes)})
        ordered = sorted(listed)
    yield listed == ordered, f"{path} lists the shards in another order than that of their names: {_again(folder)}"
    yield (
        not languages or list(manifest.languages) == languages,
        f"{path} has the languages {' '.join(manifest.languages)}, not {' '.join(languages)}: {_again(folder)}",
    )
    yield from (_mixed_checks if manifest.stage == "mix" else _encoded_checks)(folder, manifest, found)
    yield from _record_checks(folder, manifest)


def _record_checks(folder: Path, manifest: Manifest) -> Checks:
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
            yield (
                listed.get(shard.name) == shard or shard.name.endswith(".index"),
                f"{path} does not say of {shard.name} what {task}.json in tasks says: {_again(folder)}",
            )
    inputs = Counter(source[0] for source in manifest.settings.get("inputs", ()))
    tasks = {f"{name}-{number:03d}" for name, total in inputs.items() for number in range(total)}
    sampled = {name.split("-")[1] for name in record if name.startswith("windows-")}
    yield (
        not sampled or str(manifest.counts["sampled"]) in sampled,
        f"{path} has another number of examples sampled than tasks: {_again(folder)}",
    )
    if manifest.stage == "encode" and record:
        lost = sorted(tasks - record.keys())
        yield not lost, f"{folder / 'tasks'} lacks {', '.join(lost[:8])}: {_again(folder)}"
        counts: dict[str, Any] = {}
        for task, result in record.items():
            name = task.rpartition("-")[0]
            counts[name] = add_counts(counts.get(name, {}), result["counts"])
        yield (
            counts == manifest.counts["by_language"],
            f"{path} has other counts than the inputs' in tasks: {_again(folder)}",
        )


def _encoded_checks(folder: Path, manifest: Manifest, found: Sequence[Found]) -> Checks:
    """The manifest counts what the shards hold, and nothing was lost between input and output."""
    unit, path = "documents" if folder.name == "mono" else "pairs", folder / "manifest.json"
    by_name: dict[str, Found] = {name: Counter() for name in manifest.counts["by_language"]}
    for shard, part in zip(manifest.shards, found, strict=True):
        name = shard.name.split("/")[0]
        yield name in by_name, f"{path} lists shards of {name} but no counts: {_again(folder)}"
        by_name[name] += part
    inputs = Counter(source[0] for source in manifest.settings.get("inputs", ()))
    for name, counts in manifest.counts["by_language"].items():
        for key, counted in ((unit, "records"), ("tokens", "tokens"), ("unknown", "unknown")):
            yield (
                counts[key] == by_name[name][counted],
                f"the {key} of {name} counted in {path} and its shards differ: {_again(folder)}",
            )
        for read, kept, lost in ((f"{unit}_in", unit, "dropped"), ("paragraphs_in", "paragraphs", "removed")):
            yield (
                read not in counts or counts[read] == counts[kept] + sum(counts[lost].values()),
                f"the {read} of {name} in {path} are not those written and {lost}: {_again(folder)}",
            )
        paragraphs, characters, size = counts["paragraphs"], counts["characters"], counts["bytes"]
        yield (
            (not inputs or counts["files"] == inputs[name])
            and (paragraphs >= counts[unit] if unit == "documents" else paragraphs == 2 * counts[unit])
            and characters <= size <= 4 * characters,
            f"{path} counts files, paragraphs, characters or bytes of {name} that its text cannot have: "
            f"{_again(folder)}",
        )


def _mixed_checks(folder: Path, manifest: Manifest, found: Sequence[Found]) -> Checks:
    """The manifest counts what the rows hold, and languages were sampled by its alpha."""
    path, counts, whole = folder / "manifest.json", manifest.counts, sum(found, Counter[Any]())
    items = Counter({kind: number for kind, number in whole.items() if isinstance(kind, tuple)})
    by_name = {name: counts["by_language"][name] for name in sorted(counts["by_language"])}
    available, used = ([entry[key] for entry in by_name.values()] for key in ("available", "used"))
    by_languages: Counter[tuple[int, ...]] = Counter()
    for name, number in zip(by_name, used, strict=True):
        by_languages[tuple(sorted(group_languages(name, manifest.languages)))] += number
    yield (
        +by_languages == items and counts["examples"] == items.total() and counts["tokens"] == whole["tokens"],
        f"the rows, by language, and tokens counted in {path} are not those of its shards: {_again(folder)}",
    )
    derived = [(n / sum(available), m / sum(used), m / n if n else 0.0) for n, m in zip(available, used, strict=True)]
    given = [(entry["share_before"], entry["share_after"], entry["repeat"]) for entry in by_name.values()]
    yield (
        derived == given and counts["fill"] == whole["tokens"] / (manifest.rows * manifest.settings["row_tokens"]),
        f"the shares in {path} do not follow from its own counts: {_again(folder)}",
    )
    too_long = [entry.get("too_long", 0) for entry in by_name.values()]
    settings = manifest.settings
    packed = settings["task"] == "para" or "sentences" in settings
    yield (
        min(too_long) >= 0 and (packed or not any(too_long)),
        f"{path} counts text as too long, which is cut into rows: {_again(folder)}",
    )
    sampling = Sampling(settings["alpha"], tuple(settings.get("share", ())), settings.get("max_repeats", 0.0))
    sampled = counts["sampled"]  # of what is packed, the last few have no row
    quotas = apportion(sampled, sampling.shares(list(by_name), available, sampled))
    fits = all(n <= q if packed else n == q for n, q in zip(used, quotas, strict=True))
    yield fits, f"{path} says alpha {sampling.alpha}, which samples other amounts: {_again(folder)}"
