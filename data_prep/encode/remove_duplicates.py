"""The second half of filter `exact_duplicates`: write staged shards again, without the duplicates in a language.

OUT/staged/<name>/<slice>.*.npy       duplicates in one slice of the hashes
OUT/tasks/<name>.<slice>.json         marker: the duplicates in that slice are found
OUT/tasks/<task>.<block>.final.json   result of a block without its duplicates
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.encode.dedup import duplicates_of, find_duplicates, load_notes, number_of_slices
from data_prep.encode.encode_input import STAGED, EncodeTask, finish
from data_prep.encode.token_ids import list_array
from data_prep.filters.clean import EXACT_DUPLICATES
from data_prep.inspect.shard_faults import count_text
from data_prep.parallel import on_root, run_tasks
from data_prep.store import Stage, read_arrow, write_arrow
from xlme_ds.data.schema import DOCUMENTS, PAIRS
from xlme_ds.io.folders import make_folder


@dataclass(frozen=True)
class _Language:
    """All blocks of one language or pair, in input order: (task, number in it) and the staged shard of each.

    `slices` are the files of its duplicates.
    """

    blocks: tuple[tuple[EncodeTask, int], ...]
    staged: tuple[Path, ...]
    slices: tuple[Path, ...]


def remove_duplicates(stage: Stage, tasks: Sequence[EncodeTask], processes: int) -> None:
    """Remove the duplicates of inputs whose blocks are all staged, and finish the inputs; collective under MPI."""
    languages = on_root(lambda: [_language(stage, list(same)) for _, same in groupby(tasks, lambda t: t.source.name)])
    merges = [(language, number) for language in languages for number in range(len(language.slices))]
    sizes = [len(language.blocks) for language, _ in merges]
    run_tasks(partial(_merge, stage), merges, sizes, processes, "find duplicates")
    writes = [(language, number) for language in languages for number in range(len(language.blocks))]
    run_tasks(partial(_write_block, stage), writes, [1] * len(writes), processes, "remove duplicates")
    on_root(lambda: _finish(stage, tasks))


def is_final(stage: Stage, task: EncodeTask) -> bool:
    """Whether all blocks of an input are written without their duplicates, so that only its marker is missing."""
    encoded = stage.task_result(f"{task.name}.encoded")
    return encoded is not None and all(
        stage.task_result(f"{task.block_name(number)}.final") is not None for number in range(encoded["blocks"])
    )


def _language(stage: Stage, tasks: list[EncodeTask]) -> _Language:
    blocks = [(t, number) for t in tasks for number in range(_result(stage, f"{t.name}.encoded")["blocks"])]
    paragraphs = sum(_result(stage, task.block_name(number))["paragraphs"] for task, number in blocks)
    staged, total = stage.folder / STAGED, number_of_slices(paragraphs)
    slices = tuple(staged / tasks[0].source.name / f"{i:05d}-of-{total:05d}" for i in range(total))
    return _Language(tuple(blocks), tuple(staged / task.shard_name(number) for task, number in blocks), slices)


def _result(stage: Stage, task_name: str) -> dict[str, Any]:
    result = stage.task_result(task_name)
    assert result is not None, f"{task_name} is not finished"
    return result


def _merge(stage: Stage, item: tuple[_Language, int]) -> None:
    language, number = item
    out = language.slices[number]
    marker = f"{out.parent.name}.{out.name}"
    if stage.task_result(marker) is None:
        files = find_duplicates(language.staged, number, len(language.slices), out, stage.folder)
        stage.finish_task(marker, {"files": [asdict(file) for file in files]})


def _write_block(stage: Stage, item: tuple[_Language, int]) -> None:
    language, number = item
    task, block = language.blocks[number]
    marker = f"{task.block_name(block)}.final"
    if stage.task_result(marker) is not None:
        return
    result = _result(stage, task.block_name(block))
    result.pop("files", None)  # the notes are removed with the staged shards
    if result["shard"] is not None:
        path, staged = stage.folder / task.shard_name(block), language.staged[number]
        keep = np.ones(result["paragraphs"], bool)
        keep[duplicates_of(number, language.slices)] = False
        if not keep.all():
            result |= _rewrite(stage, task, staged, path, keep, result["counts"])
        else:
            make_folder(path.parent)
            if staged.exists():  # else an interrupted run has moved it already
                os.replace(staged, path)
            result["shard"]["name"] = task.shard_name(block)
    stage.finish_task(marker, result)


def _rewrite(stage: Stage, task: EncodeTask, staged: Path, path: Path, keep: np.ndarray, counts: Any) -> dict[str, Any]:
    """Write a shard with only the paragraphs or pairs to `keep`; returns the entries of its result that change."""
    notes = load_notes(staged)
    batches = list(read_arrow(staged))
    kept_batches = _kept_documents(batches, notes, keep) if task.mono else _kept_pairs(batches, keep)
    before, after = (sum(map(count_text, part), Counter[str]()) for part in (batches, kept_batches))
    shard = write_arrow(path, DOCUMENTS if task.mono else PAIRS, kept_batches, stage.folder) if kept_batches else None
    unit, sides = ("documents", 1) if task.mono else ("pairs", 2)
    lost, dropped = notes[~keep], before["records"] - after["records"]
    reduced = {
        unit: counts[unit] - dropped,
        "dropped": _add_duplicates(counts["dropped"], dropped),
        "paragraphs": counts["paragraphs"] - len(lost) * sides,
        "characters": counts["characters"] - int(lost["characters"].sum(dtype=np.int64)),
        "bytes": counts["bytes"] - int(lost["bytes"].sum(dtype=np.int64)),
        "tokens": after["tokens"],
        "unknown": counts["unknown"] - before["unknown"] + after["unknown"],
    }
    if task.mono:
        reduced["removed"] = _add_duplicates(counts["removed"], len(lost))
    return {"shard": shard and asdict(shard), "counts": counts | reduced}


def _kept_documents(batches: Sequence[pa.RecordBatch], notes: np.ndarray, keep: np.ndarray) -> list[pa.RecordBatch]:
    """Build documents of the paragraphs to `keep`. A document left without tokens is dropped: then all its paragraphs
    are cleared in `keep`, too."""
    records = sum(batch.num_rows for batch in batches)
    tokens = np.bincount(notes["document"], weights=notes["tokens"] * keep, minlength=records).astype(np.int64)
    keep &= (tokens > 0)[notes["document"]]
    written, first_document, first_paragraph = [], 0, 0
    for batch in batches:
        next_document = first_document + batch.num_rows
        next_paragraph = int(np.searchsorted(notes["document"], next_document))
        documents, paragraphs = slice(first_document, next_document), slice(first_paragraph, next_paragraph)
        # put each document's `</s>` after its paragraphs
        owner = np.concatenate(
            [notes["document"][paragraphs], np.arange(first_document, next_document, dtype=np.uint32)]
        )
        order = np.argsort(owner, kind="stable")
        lengths = np.concatenate([notes["tokens"][paragraphs], np.ones(batch.num_rows, np.uint32)])[order]
        has_text = tokens[documents] > 0
        is_kept = np.concatenate([keep[paragraphs], has_text])[order]
        kept_tokens = tokens[documents][has_text]
        if len(kept_tokens):
            values = batch.column(0).flatten().to_numpy()[np.repeat(is_kept, lengths)]
            written.append(pa.record_batch([list_array((values, kept_tokens + 1))], schema=DOCUMENTS))
        first_document, first_paragraph = next_document, next_paragraph
    return written


def _kept_pairs(batches: Sequence[pa.RecordBatch], keep: np.ndarray) -> list[pa.RecordBatch]:
    ends = np.cumsum([batch.num_rows for batch in batches])
    filtered = (batch.filter(pa.array(part)) for batch, part in zip(batches, np.split(keep, ends[:-1]), strict=True))
    return [batch for batch in filtered if batch.num_rows]


def _add_duplicates(reasons: dict[str, int], number: int) -> dict[str, int]:
    """Add `number` duplicates to counts by reason, sorted."""
    return dict(sorted((Counter(reasons) + Counter({EXACT_DUPLICATES: number})).items()))


def _finish(stage: Stage, tasks: Sequence[EncodeTask]) -> None:
    for task in tasks:
        blocks = range(_result(stage, f"{task.name}.encoded")["blocks"])
        finish(stage, task, [stage.task_result(f"{task.block_name(number)}.final") for number in blocks])
