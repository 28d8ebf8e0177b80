"""Finishes filter `exact_duplicates`: finds the duplicates in all blocks of a language or pair, and writes the staged
shards again without them.

OUT/staged/<name>/<slice>.*.npy       the duplicates whose hash is in one slice of the range of hashes (dedup.py)
OUT/tasks/<name>.<slice>.json         marker: the duplicates in the slice are found
OUT/tasks/<task>.<block>.final.json   marker: the block is written without its duplicates; has the block's result
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.encode.dedup import find_duplicates, load_array, load_duplicates, number_of_slices
from data_prep.encode.encode_input import STAGED, EncodeTask, finish_input
from data_prep.encode.token_ids import list_array
from data_prep.filters.clean import EXACT_DUPLICATES
from data_prep.inspect.shard_faults import count_text
from data_prep.store import Stage, read_arrow, write_arrow
from xlme_ds.data.schema import DOCUMENTS, PAIRS
from xlme_ds.io.folders import make_folder


class _Language(NamedTuple):
    """One language or pair. `blocks` has (input, number of the block in the input) for each block, in input order.
    `slices` has the path of each slice's files, without suffix."""

    blocks: list[tuple[EncodeTask, int]]
    slices: list[Path]


def remove_duplicates(stage: Stage, tasks: Sequence[EncodeTask], processes: int) -> None:
    """Remove the duplicates of inputs whose blocks are all staged, and finish the inputs."""
    by_name = groupby(tasks, lambda task: task.source.name)
    languages = [_language_of_inputs(stage, list(inputs)) for _, inputs in by_name]
    slices = {
        f"{path.parent.name}.{path.name}": (language, number)
        for language in languages
        for number, path in enumerate(language.slices)
    }
    sizes = [len(language.blocks) for language, _ in slices.values()]
    stage.run_unfinished(partial(_find_in_slice, stage), slices, sizes, processes, "find duplicates")
    blocks = {
        f"{task.block_name(number)}.final": (language, index)
        for language in languages
        for index, (task, number) in enumerate(language.blocks)
    }
    stage.run_unfinished(partial(_write_block, stage), blocks, [1] * len(blocks), processes, "remove duplicates")
    for task in tasks:
        numbers = range(_result(stage, f"{task.name}.encoded")["blocks"])
        finish_input(stage, task, [stage.read_marker(f"{task.block_name(number)}.final") for number in numbers])


def is_deduplicated(stage: Stage, task: EncodeTask) -> bool:
    """True if all blocks of an input are written without their duplicates, and only the input's marker is missing."""
    encoded = stage.read_marker(f"{task.name}.encoded")
    return encoded is not None and all(
        stage.read_marker(f"{task.block_name(number)}.final") is not None for number in range(encoded["blocks"])
    )


def _language_of_inputs(stage: Stage, tasks: list[EncodeTask]) -> _Language:
    """The language or pair of these inputs, which must all be encoded."""
    blocks = [(task, number) for task in tasks for number in range(_result(stage, f"{task.name}.encoded")["blocks"])]
    paragraphs = sum(_result(stage, task.block_name(number))["paragraphs"] for task, number in blocks)
    slice_count = number_of_slices(paragraphs)
    folder = stage.folder / STAGED / tasks[0].source.name
    return _Language(blocks, [folder / f"{i:05d}-of-{slice_count:05d}" for i in range(slice_count)])


def _result(stage: Stage, task_name: str) -> dict[str, Any]:
    result = stage.read_marker(task_name)
    assert result is not None, f"{task_name} is not finished"
    return result


def _find_in_slice(stage: Stage, language_and_slice: tuple[_Language, int]) -> dict[str, Any]:
    """Find and write the duplicates in one slice of a language's hashes. Returns the task's result."""
    (blocks, slices), slice_number = language_and_slice
    staged = [stage.folder / STAGED / task.shard_name(number) for task, number in blocks]
    files = find_duplicates(staged, slice_number, len(slices), slices[slice_number], stage.folder)
    return {"files": [asdict(file) for file in files]}


def _write_block(stage: Stage, language_and_block: tuple[_Language, int]) -> dict[str, Any]:
    """Write a block of a language without its duplicates. The block is given by its index in the language. Returns the
    task's result."""
    (blocks, slices), index = language_and_block
    task, number = blocks[index]
    result = _result(stage, task.block_name(number))
    result.pop("files", None)  # files of hashes and lengths, which are removed with the staged shards
    if result["shard"] is not None:
        name = task.shard_name(number)
        path, staged = stage.folder / name, stage.folder / STAGED / name
        keep = np.ones(result["paragraphs"], bool)
        keep[load_duplicates(index, slices)] = False
        if not keep.all():
            result |= _rewrite(stage, task, staged, path, keep, result["counts"])
        else:
            make_folder(path.parent)
            if staged.exists():  # else an interrupted run has moved it already
                os.replace(staged, path)
            result["shard"]["name"] = name
    return result


def _rewrite(stage: Stage, task: EncodeTask, staged: Path, path: Path, keep: np.ndarray, counts: Any) -> dict[str, Any]:
    """Write the staged shard to `path` with only the paragraphs or pairs to `keep` (bool for each). `counts` are the
    block's counts, duplicates included.

    Returns the entries of the block's result that change.
    """
    lengths = np.array(load_array(staged.with_suffix(".lengths.npy")))
    batches = list(read_arrow(staged))
    kept_batches = _kept_documents(batches, lengths, keep) if task.is_mono else _kept_pairs(batches, keep)
    before = sum(map(count_text, batches), Counter[str]())
    after = sum(map(count_text, kept_batches), Counter[str]())
    shard = (
        write_arrow(path, DOCUMENTS if task.is_mono else PAIRS, kept_batches, stage.folder) if kept_batches else None
    )
    unit, sides = ("documents", 1) if task.is_mono else ("pairs", 2)
    removed_lengths, dropped_records = lengths[~keep], before["records"] - after["records"]
    reduced = {
        unit: counts[unit] - dropped_records,
        "dropped": _add_duplicates(counts["dropped"], dropped_records),
        "paragraphs": counts["paragraphs"] - len(removed_lengths) * sides,
        "characters": counts["characters"] - int(removed_lengths["characters"].sum(dtype=np.int64)),
        "bytes": counts["bytes"] - int(removed_lengths["bytes"].sum(dtype=np.int64)),
        "tokens": after["tokens"],
        "unknown": counts["unknown"] - before["unknown"] + after["unknown"],
    }
    if task.is_mono:
        reduced["removed"] = _add_duplicates(counts["removed"], len(removed_lengths))
    return {"shard": shard and asdict(shard), "counts": counts | reduced}


def _kept_documents(batches: Sequence[pa.RecordBatch], lengths: np.ndarray, keep: np.ndarray) -> list[pa.RecordBatch]:
    """Returns the batches with only the paragraphs to `keep`. `lengths` is the block's array of lengths (dedup.py).

    A document whose kept paragraphs have no tokens is dropped, and `keep` becomes False for all its paragraphs.
    """
    document_of = lengths["document"]  # index of each paragraph's document
    records = sum(batch.num_rows for batch in batches)
    tokens = np.bincount(document_of, weights=lengths["tokens"] * keep, minlength=records).astype(np.int64)
    keep &= (tokens > 0)[document_of]
    kept_batches, first_document, first_paragraph = [], 0, 0
    for batch in batches:
        next_document = first_document + batch.num_rows
        next_paragraph = int(np.searchsorted(document_of, next_document))
        documents, paragraphs = slice(first_document, next_document), slice(first_paragraph, next_paragraph)
        # The parts of a batch's ids: each paragraph is a part, and so is the `</s>` after a document's paragraphs.
        document_ends = np.arange(first_document, next_document, dtype=np.uint32)
        order = np.argsort(np.concatenate([document_of[paragraphs], document_ends]), kind="stable")
        part_lengths = np.concatenate([lengths["tokens"][paragraphs], np.ones(batch.num_rows, np.uint32)])[order]
        has_text = tokens[documents] > 0
        is_kept = np.concatenate([keep[paragraphs], has_text])[order]
        kept_tokens = tokens[documents][has_text]
        if len(kept_tokens):
            values = batch.column(0).flatten().to_numpy()[np.repeat(is_kept, part_lengths)]
            kept_batches.append(pa.record_batch([list_array((values, kept_tokens + 1))], schema=DOCUMENTS))
        first_document, first_paragraph = next_document, next_paragraph
    return kept_batches


def _kept_pairs(batches: Sequence[pa.RecordBatch], keep: np.ndarray) -> list[pa.RecordBatch]:
    stops = np.cumsum([batch.num_rows for batch in batches])
    masks = np.split(keep, stops[:-1])
    filtered = (batch.filter(pa.array(mask)) for batch, mask in zip(batches, masks, strict=True))
    return [batch for batch in filtered if batch.num_rows]


def _add_duplicates(reasons: dict[str, int], duplicates: int) -> dict[str, int]:
    """Returns the counts in `reasons` with a number of duplicates added, sorted by reason."""
    return dict(sorted((Counter(reasons) + Counter({EXACT_DUPLICATES: duplicates})).items()))
