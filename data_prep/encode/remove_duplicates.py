"""Finishes filter `exact_duplicates`: finds the duplicates in all blocks of a language or pair, and writes the staged
shards again without them.

OUT/staged/<name>/<slice>.*.npy       the duplicates whose hash is in one slice of the range of hashes (dedup.py)
OUT/tasks/<name>.<slice>.json         marker: the duplicates in the slice are found
OUT/tasks/<task>.<block>.final.json   marker: the block is written without its duplicates; has the block's result
"""

import operator
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.encode.dedup import find_duplicates, load_duplicates, number_of_slices
from data_prep.encode.encode_input import STAGED, EncodeTask, finish_input, finished_result
from data_prep.encode.token_ids import list_array
from data_prep.filters.clean import EXACT_DUPLICATES
from data_prep.inspect.shard_faults import count_text
from data_prep.store import Stage, read_arrow, write_arrow
from xlme_ds.data.schema import DOCUMENTS, PAIRS
from xlme_ds.io.folders import make_folder


def remove_duplicates(stage: Stage, tasks: Sequence[EncodeTask], processes: int) -> None:
    """Remove the duplicates of inputs whose blocks are all staged, and finish the inputs. Inputs of one language or
    pair are neighbours in `tasks`."""
    block_counts = {task.name: finished_result(stage, f"{task.name}.encoded")["blocks"] for task in tasks}
    find_tasks, find_sizes, write_tasks = {}, [], {}
    for name, inputs in groupby(tasks, lambda task: task.source.name):
        # Each block of the language or pair, in input order: its input, and its number in the input.
        blocks = [(task, number) for task in inputs for number in range(block_counts[task.name])]
        staged = [stage.folder / STAGED / task.shard_name(number) for task, number in blocks]
        paragraphs = sum(finished_result(stage, task.block_name(number))["paragraphs"] for task, number in blocks)
        slice_count = number_of_slices(paragraphs)
        slices = [stage.folder / STAGED / name / f"{i:05d}-of-{slice_count:05d}" for i in range(slice_count)]
        for i, path in enumerate(slices):
            find_tasks[f"{name}.{path.name}"] = partial(find_duplicates, staged, i, slice_count, path, stage.folder)
        find_sizes += [len(blocks)] * slice_count
        for index, (task, number) in enumerate(blocks):
            write_tasks[f"{task.block_name(number)}.final"] = partial(_write_block, stage, task, number, index, slices)
    stage.run_unfinished(operator.call, find_tasks, find_sizes, processes, "find duplicates")
    stage.run_unfinished(operator.call, write_tasks, [1] * len(write_tasks), processes, "remove duplicates")
    for task in tasks:
        finish_input(stage, task, block_counts[task.name], ".final")


def _write_block(stage: Stage, task: EncodeTask, number: int, index: int, slices: Sequence[Path]) -> dict[str, Any]:
    """Write block `number` of an input without its duplicates. `index` is the block's index among the blocks of the
    language or pair, and `slices` has the path of each slice's files, without suffix. Returns the block's result."""
    result = finished_result(stage, task.block_name(number))
    result.pop("files", None)  # files of hashes and lengths, which are removed with the staged shards
    if result["shard"] is not None:
        name = task.shard_name(number)
        path, staged = stage.folder / name, stage.folder / STAGED / name
        keep = np.ones(result["paragraphs"], bool)
        keep[load_duplicates(index, slices)] = False
        if keep.all() and _link_shard(staged, path):
            result["shard"]["name"] = name  # the staged shard's name began with STAGED
        else:
            result |= _rewrite_shard(stage, task, staged, path, keep, result["counts"])
    return result


def _link_shard(staged: Path, path: Path) -> bool:
    """Give a staged shard the second name `path`, which saves writing it again. Returns False where the file system has
    no hard links."""
    make_folder(path.parent)
    path.unlink(missing_ok=True)  # the link of an interrupted run
    try:
        os.link(staged, path)
    except OSError:
        return False
    return True


def _rewrite_shard(
    stage: Stage, task: EncodeTask, staged: Path, path: Path, keep: np.ndarray, counts: dict[str, Any]
) -> dict[str, Any]:
    """Write the staged shard to `path` with only the paragraphs or pairs to `keep` (bool for each). `counts` are the
    block's counts, duplicates included.

    Returns the entries of the block's result that change.
    """
    lengths = np.load(staged.with_suffix(".lengths.npy"))
    batches = list(read_arrow(staged))
    if task.is_mono:
        unit, sides, schema, new_batches = "documents", 1, DOCUMENTS, _filter_documents(batches, lengths, keep)
    else:
        unit, sides, schema, new_batches = "pairs", 2, PAIRS, _filter_pairs(batches, keep)
    shard = write_arrow(path, schema, new_batches, stage.folder) if new_batches else None
    written = sum(map(count_text, new_batches), Counter[str]())
    removed_lengths = lengths[~keep]
    new_counts = {
        unit: written["records"],
        "dropped": _add_duplicates(counts["dropped"], counts[unit] - written["records"]),
        "paragraphs": counts["paragraphs"] - len(removed_lengths) * sides,
        "characters": counts["characters"] - int(removed_lengths["characters"].sum(dtype=np.int64)),
        "bytes": counts["bytes"] - int(removed_lengths["bytes"].sum(dtype=np.int64)),
        "tokens": written["tokens"],
        "unknown": written["unknown"],
    }
    if task.is_mono:
        new_counts["removed"] = _add_duplicates(counts["removed"], len(removed_lengths))
    return {"shard": shard and asdict(shard), "counts": counts | new_counts}


def _filter_documents(batches: Sequence[pa.RecordBatch], lengths: np.ndarray, keep: np.ndarray) -> list[pa.RecordBatch]:
    """Returns the batches with only the paragraphs to `keep`. `lengths` is the block's array of lengths (dedup.py).

    A document is dropped if none of its paragraphs to keep has a token; `keep` then becomes False for all of them.
    """
    document_of, tokens = lengths["document"], lengths["tokens"]
    documents = sum(batch.num_rows for batch in batches)
    old_sizes = np.bincount(document_of, weights=tokens, minlength=documents).astype(np.int64)  # ids without `</s>`
    new_sizes = np.bincount(document_of, weights=tokens * keep, minlength=documents).astype(np.int64)
    has_text = new_sizes > 0
    keep &= has_text[document_of]
    # Bool for each id: those of the paragraphs to keep, and the `</s>` of each document that has text.
    is_written = np.insert(np.repeat(keep, tokens), np.cumsum(old_sizes), has_text)
    new_batches, first_document, first_id = [], 0, 0
    for batch in batches:
        ids = batch.column(0).flatten().to_numpy()
        sizes = new_sizes[first_document : first_document + batch.num_rows]
        if sizes.any():
            new_ids = ids[is_written[first_id : first_id + len(ids)]]
            new_batches.append(pa.record_batch([list_array((new_ids, sizes[sizes > 0] + 1))], schema=DOCUMENTS))
        first_document += batch.num_rows
        first_id += len(ids)
    return new_batches


def _filter_pairs(batches: Sequence[pa.RecordBatch], keep: np.ndarray) -> list[pa.RecordBatch]:
    stops = np.cumsum([batch.num_rows for batch in batches])
    masks = np.split(keep, stops[:-1])
    filtered = (batch.filter(pa.array(mask)) for batch, mask in zip(batches, masks, strict=True))
    return [batch for batch in filtered if batch.num_rows]


def _add_duplicates(reasons: dict[str, int], duplicates: int) -> dict[str, int]:
    """Returns the counts in `reasons` with a number of duplicates added, sorted by reason."""
    return dict(sorted((Counter(reasons) + Counter({EXACT_DUPLICATES: duplicates})).items()))
