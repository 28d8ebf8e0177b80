"""Stage `verify` reads every shard of a folder that `encode` or `mix` wrote, and names the first fault."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.filters.clean import add_counts
from data_prep.inspect.shard_faults import RecordCounts, schema_and_checks
from data_prep.languages import CC100_LANGUAGES
from data_prep.mix.encoded import group_languages
from data_prep.parallel import run_tasks
from data_prep.progress import print_stdout
from data_prep.shares import Sampling, apportion
from data_prep.store import Stage, written_files
from xlme_ds.data.schema import TASKS, Manifest, Shard, read_manifest
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary
from xlme_ds.io.files import file_sha256, real_path
from xlme_ds.io.folders import require_folder


@dataclass(frozen=True)
class VerifyConfig:
    """Check checksums, schemas, counts and every token id of encoded or mixed data."""

    data: Path
    """Folder that `encode` or `mix` wrote, or one of its task folders."""
    processes: int = 1
    """Worker processes on this machine. Not used under MPI."""


def run(config: VerifyConfig) -> None:
    """Check `config.data`. Raises ValueError for the first fault; the error names the file and, for a faulty record,
    the row."""
    for folder in _task_folders(config.data):
        manifest = read_manifest(folder, "`xlme prep encode` or `mix`")
        _check_listing(folder, manifest)
        shards, check = manifest.shards, partial(_check_shard, folder, manifest)
        counts = run_tasks(check, shards, [shard.bytes for shard in shards], config.processes, f"verify {folder.name}")
        _check_manifest(folder, manifest, counts)
        listed = f"{len(shards)} shard{'s' * (len(shards) != 1)}, {manifest.rows:,} records"
        print_stdout(f"{folder}: {listed if shards else 'no shards, because encode kept no text'}, no fault")


def _require(passes: bool, sentence: str) -> None:
    """Raise ValueError with this sentence unless the check passes."""
    if not passes:
        raise ValueError(sentence)


def _task_folders(data: Path) -> list[Path]:
    """The task folders in `data`, or `data` itself if it is a task folder."""
    # The task folders come first, because `data` may also be the output folder of `vocab`.
    for folders in ([data / task for task in TASKS], [data]):
        found = [
            folder for folder in folders if any((folder / f"{name}.json").exists() for name in ("settings", "manifest"))
        ]
        if found:
            return found
    require_folder(data, "name a folder that encode or mix wrote")
    raise ValueError(f"{data} holds neither mono/ nor para/: name a folder that encode or mix wrote")


def _remedy(folder: Path) -> str:
    return f"delete it and give the command that wrote {folder} again"


def _check_listing(folder: Path, manifest: Manifest) -> None:
    """Check that `encode` or `mix` wrote the folder, that its vocabulary is the manifest's, that the manifest lists all
    shards in the folder, and, after `mix`, that the manifest's rows per shard follow from the settings."""
    path, stage, settings = folder / "manifest.json", manifest.stage, manifest.settings
    _require(
        stage in ("encode", "mix"), f"{folder} was written by stage {stage}: verify reads what encode or mix wrote"
    )
    sha256 = manifest.vocabulary_sha256
    encoded_with = settings.get("vocabulary_sha256", sha256)
    _require(encoded_with == sha256, f"{path} names two vocabularies, {encoded_with} and {sha256}: {_remedy(folder)}")
    model = real_path(folder).parent / "vocab" / MODEL_FILE  # mix always copies the vocabulary there, encode does not
    if stage == "mix" or model.exists():
        _require(model.exists(), f"{model} is missing: put the vocabulary that {folder} was made with there")
        _require(
            file_sha256(model) == sha256,
            f"{model} is not the vocabulary that {folder} was made with: put the original file there",
        )
        size, ids = Vocabulary(model).size, manifest.vocabulary_size
        _require(size == ids, f"{path} has a vocabulary of {ids} ids, but {model} has {size}: {_remedy(folder)}")
    listed = {shard.name for shard in manifest.shards}
    for arrow_file in sorted(folder.rglob("*.arrow")):
        _require(
            arrow_file.relative_to(folder).as_posix() in listed,
            f"{arrow_file} is not in the manifest: delete it, or write {folder} again",
        )
    if stage == "mix":
        rows, rows_per_shard = settings["rows"], settings["rows_per_shard"]
        expected = [min(rows_per_shard, rows - start) for start in range(0, rows, rows_per_shard)]
        _require(
            [shard.rows for shard in manifest.shards] == expected,
            f"{path} does not list {rows} rows, {rows_per_shard} per shard: {_remedy(folder)}",
        )


def _check_shard(folder: Path, manifest: Manifest, shard: Shard) -> RecordCounts:
    """Check a whole shard, and count its records, tokens and items. Raises ValueError for a fault; the error names the
    file and, for a faulty record, the first faulty row."""
    path, is_mixed = folder / shard.name, manifest.stage == "mix"
    index_path = path.with_suffix(".index")
    rewrite = f"give the command that wrote {folder} again"
    _require(path.exists(), f"{path} is missing: {rewrite}")
    size = path.stat().st_size
    _require(size == shard.bytes, f"{path} has {size} bytes, the manifest says {shard.bytes}: {rewrite}")
    _require(
        file_sha256(path) == shard.sha256,
        f"{path} does not have the manifest's checksum, so its bytes changed: {rewrite}",
    )
    if is_mixed:
        from xlme_ds.data.shards import group_checksums, index_bytes  # imported late: it loads numba

        _require(index_path.exists(), f"{index_path} is missing: {rewrite}")
    schema, faults_of, count = schema_and_checks(folder, manifest)
    counts: RecordCounts = Counter()
    checksums = []
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
            columns, expected = (", ".join(f"{c.name} {c.type}" for c in fields) for fields in (reader.schema, schema))
            _require(reader.schema == schema, f"{path} has columns {columns}, not {expected}: {_remedy(folder)}")
            for batch in map(reader.get_batch, range(reader.num_record_batches)):
                batch.validate(full=True)
                if is_mixed:
                    checksums.append(group_checksums(batch))
                faults = [(int(np.argmax(mask)), sentence) for mask, sentence in faults_of(batch) if mask.any()]
                if faults:
                    row, sentence = min(faults, key=lambda fault: fault[0])
                    raise ValueError(f"{path}, row {counts['records'] + row}: {sentence}: {_remedy(folder)}")
                counts += count(batch)
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise ValueError(
            f"{path} is not readable from row {counts['records']} on ({error}): {_remedy(folder)}"
        ) from None
    if is_mixed:
        _require(
            index_path.read_bytes() == index_bytes(path, shard.sha256, checksums),
            f"{index_path} is not the index of {path.name}: {_remedy(folder)}",
        )
    _require(
        counts["records"] == shard.rows,
        f"{path} has {counts['records']} rows, the manifest says {shard.rows}: {_remedy(folder)}",
    )
    return counts


def _check_manifest(folder: Path, manifest: Manifest, shard_counts: Sequence[RecordCounts]) -> None:
    """Check that the manifest agrees with the content of the shards, and with the folder's settings and markers."""
    path, settings = folder / "manifest.json", manifest.settings
    listed = [shard.name for shard in manifest.shards]
    if manifest.stage == "mix":
        expected = [f"{number:05d}.arrow" for number in range(len(listed))]
        languages = sorted(settings.get("languages", ()))
        check_counts = _check_mixed_counts
    else:
        expected = sorted(listed)
        codes, inputs = sorted({*CC100_LANGUAGES, *manifest.languages}), settings.get("inputs", ())
        languages = sorted({codes[index] for name, *_ in inputs for index in group_languages(name, codes)})
        check_counts = _check_encoded_counts
    _require(
        listed == expected, f"{path} lists the shards in another order than that of their names: {_remedy(folder)}"
    )
    _require(
        not languages or list(manifest.languages) == languages,
        f"{path} has the languages {' '.join(manifest.languages)}, not {' '.join(languages)}: {_remedy(folder)}",
    )
    check_counts(folder, manifest, shard_counts)
    _check_markers(folder, manifest)


def _check_markers(folder: Path, manifest: Manifest) -> None:
    """Check that the manifest agrees with settings.json and with the markers of finished tasks, if they exist."""
    path = folder / "manifest.json"
    results = Stage(folder, manifest.stage, manifest.settings).finished_results()
    listed = {shard.name: shard for shard in manifest.shards}
    for task, result in results.items():
        for shard in written_files(result):
            _require(
                listed.get(shard.name) == shard or shard.name.endswith(".index"),
                f"{path} and tasks/{task}.json disagree about {shard.name}: {_remedy(folder)}",
            )
    # `increase_total` raises the number of sampled examples until they fill all rows. Its markers have that number in
    # their names, so several numbers may be found.
    totals = {name.split("-")[1] for name in results if name.startswith("windows-")}
    _require(
        not totals or str(manifest.counts["sampled"]) in totals,
        f"{path} and the markers in tasks disagree about the number of sampled examples: {_remedy(folder)}",
    )
    if manifest.stage == "encode" and results:
        inputs = Counter(source[0] for source in manifest.settings.get("inputs", ()))
        tasks = {f"{name}-{index:03d}" for name, count in inputs.items() for index in range(count)}
        missing = sorted(tasks - results.keys())
        _require(not missing, f"{folder / 'tasks'} lacks {', '.join(missing[:8])}: {_remedy(folder)}")
        counts: dict[str, Any] = {}
        for task, result in results.items():
            name = task.rpartition("-")[0]
            counts[name] = add_counts(counts.get(name, {}), result["counts"])
        _require(
            counts == manifest.counts["by_language"],
            f"{path} and the markers in tasks disagree about the counts: {_remedy(folder)}",
        )


def _check_encoded_counts(folder: Path, manifest: Manifest, shard_counts: Sequence[RecordCounts]) -> None:
    """Check that the manifest's counts equal those of the shards, that all text that was read was written, dropped or
    removed, and that the counts of files, paragraphs, characters and bytes are possible."""
    is_mono = manifest.settings.get("task", folder.name) == "mono"
    unit, path = "documents" if is_mono else "pairs", folder / "manifest.json"
    by_name: dict[str, RecordCounts] = {name: Counter() for name in manifest.counts["by_language"]}
    for shard, counted_in_shard in zip(manifest.shards, shard_counts, strict=True):
        name = shard.name.split("/")[0]
        _require(name in by_name, f"{path} lists shards of {name} but no counts: {_remedy(folder)}")
        by_name[name] += counted_in_shard
    inputs = Counter(source[0] for source in manifest.settings.get("inputs", ()))
    for name, counts in manifest.counts["by_language"].items():
        for key, counted in ((unit, "records"), ("tokens", "tokens"), ("unknown", "unknown")):
            _require(
                counts[key] == by_name[name][counted],
                f"the {key} of {name} counted in {path} and its shards differ: {_remedy(folder)}",
            )
        for read, written, lost in ((f"{unit}_in", unit, "dropped"), ("paragraphs_in", "paragraphs", "removed")):
            _require(
                read not in counts or counts[read] == counts[written] + sum(counts[lost].values()),
                f"the {read} of {name} in {path} are not the sum of those written and {lost}: {_remedy(folder)}",
            )
        paragraphs, characters, size = counts["paragraphs"], counts["characters"], counts["bytes"]
        files_fit = not inputs or counts["files"] == inputs[name]
        paragraphs_fit = paragraphs >= counts[unit] if is_mono else paragraphs == 2 * counts[unit]
        bytes_fit = characters <= size <= 4 * characters  # UTF-8 stores a character in 1 to 4 bytes
        _require(
            files_fit and paragraphs_fit and bytes_fit,
            f"{path} counts files, paragraphs, characters or bytes of {name} that its text cannot have: "
            f"{_remedy(folder)}",
        )


def _check_mixed_counts(folder: Path, manifest: Manifest, shard_counts: Sequence[RecordCounts]) -> None:
    """Check that the manifest's counts equal those of the rows, and that they follow from alpha and the other settings
    of the sampling."""
    path, counts = folder / "manifest.json", manifest.counts
    total = sum(shard_counts, Counter[Any]())
    items = Counter({key: count for key, count in total.items() if isinstance(key, tuple)})  # by languages
    by_name = {name: counts["by_language"][name] for name in sorted(counts["by_language"])}
    available, used = ([entry[key] for entry in by_name.values()] for key in ("available", "used"))
    stated_items: Counter[tuple[int, ...]] = Counter()
    for name, uses in zip(by_name, used, strict=True):
        stated_items[tuple(sorted(group_languages(name, manifest.languages)))] += uses
    # `+` leaves out the languages without items.
    _require(
        +stated_items == items and counts["examples"] == items.total() and counts["tokens"] == total["tokens"],
        f"{path} counts other items of a language, or other tokens, than its shards have: {_remedy(folder)}",
    )
    derived = [
        (examples / sum(available), uses / sum(used), uses / examples if examples else 0.0)
        for examples, uses in zip(available, used, strict=True)
    ]
    stored = [(entry["share_before"], entry["share_after"], entry["repeat"]) for entry in by_name.values()]
    _require(
        derived == stored and counts["fill"] == total["tokens"] / (manifest.rows * manifest.settings["row_tokens"]),
        f"the shares in {path} do not follow from its own counts: {_remedy(folder)}",
    )
    too_long = [entry.get("too_long", 0) for entry in by_name.values()]
    settings = manifest.settings
    packed = settings["task"] == "para" or bool(manifest.packed_unit)
    _require(
        min(too_long) >= 0 and (packed or not any(too_long)),
        f"{path} counts text as too long, although this text is cut into rows: {_remedy(folder)}",
    )
    sampling = Sampling(settings["alpha"], tuple(settings.get("share", ())), settings.get("max_repeats", 0.0))
    sampled = counts["sampled"]
    quotas = apportion(sampled, sampling.shares(list(by_name), available, sampled))
    # If items are packed, the last of the sampled items may be in no row.
    fits = all(uses <= quota if packed else uses == quota for uses, quota in zip(used, quotas, strict=True))
    _require(fits, f"{path} has other amounts than its alpha {sampling.alpha} samples: {_remedy(folder)}")
