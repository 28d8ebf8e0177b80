"""The second half of filter `exact_duplicates`: staged shards to final ones, without the duplicates of a language.

OUT/staged/<name>/<slice>.*.npy   duplicates in one slice of the hashes
OUT/tasks/<name>.<slice>.json     they are found
OUT/tasks/<task>.<block>.final.json   a block without its duplicates
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.dedup import duplicates_of, find_duplicates, noted, slices
from data_prep.encode_input import STAGED, Task, finish
from data_prep.executor import on_root, run_tasks
from data_prep.filters import EXACT_DUPLICATES
from data_prep.store import Stage, make_folder, write_arrow
from data_prep.token_ids import list_array
from xlme_ds.data.schema import DOCUMENTS, PAIRS, UNK, Shard, sync_folder


@dataclass(frozen=True)
class _Language:
    """All blocks of one language or pair, in input order; `found` are the slices of its duplicates."""

    blocks: tuple[tuple[Task, int], ...]
    runs: tuple[Path, ...]
    found: tuple[Path, ...]


def remove_duplicates(stage: Stage, tasks: Sequence[Task], processes: int) -> None:
    """Finish inputs whose blocks are all staged; collective under MPI."""
    languages = on_root(lambda: [_language(stage, list(same)) for _, same in groupby(tasks, lambda t: t.source.name)])
    merges = [(language, number) for language in languages for number in range(len(language.found))]
    run_tasks(
        partial(_merge, stage), merges, [len(language.runs) for language, _ in merges], processes, "find duplicates"
    )
    writes = [(language, number) for language in languages for number in range(len(language.blocks))]
    work = partial(_write_block, stage)
    run_tasks(work, writes, [1] * len(writes), processes, "remove duplicates")
    on_root(lambda: _finish(stage, tasks))


def is_final(stage: Stage, task: Task) -> bool:
    """Whether all blocks of an input are without their duplicates, and only its marker is missing."""
    encoded = stage.task_result(f"{task.name}.encoded")
    return encoded is not None and all(
        stage.task_result(f"{task.block_name(number)}.final") is not None for number in range(encoded["blocks"])
    )


def _language(stage: Stage, tasks: list[Task]) -> _Language:
    blocks = []
    paragraphs = 0
    for task in tasks:
        encoded = stage.task_result(f"{task.name}.encoded")
        assert encoded is not None, f"{task.name} is not encoded"
        for number in range(encoded["blocks"]):
            block = stage.task_result(task.block_name(number))
            assert block is not None, f"block {number} of {task.name} is not encoded"
            blocks.append((task, number))
            paragraphs += block["paragraphs"]
    staged = stage.folder / STAGED
    found = [staged / tasks[0].source.name / f"{i:05d}-of-{slices(paragraphs):05d}" for i in range(slices(paragraphs))]
    return _Language(tuple(blocks), tuple(staged / task.shard_name(number) for task, number in blocks), tuple(found))


def _merge(stage: Stage, item: tuple[_Language, int]) -> None:
    language, number = item
    out = language.found[number]
    marker = f"{out.parent.name}.{out.name}"
    if stage.task_result(marker) is None:
        files = find_duplicates(language.runs, number, len(language.found), out, stage.folder)
        stage.finish_task(marker, {"files": [asdict(file) for file in files]})


def _write_block(stage: Stage, item: tuple[_Language, int]) -> None:
    language, number = item
    task, block = language.blocks[number]
    marker = f"{task.block_name(block)}.final"
    if stage.task_result(marker) is not None:
        return
    result = stage.task_result(task.block_name(block))
    assert result is not None
    result.pop("files", None)  # its notes, which go with the staged shard
    if result["shard"] is not None:
        positions = duplicates_of(number, language.found)
        path = stage.folder / task.shard_name(block)
        staged = language.runs[number]
        if len(positions):
            keep = np.ones(result["paragraphs"], bool)
            keep[positions] = False
            write = _write_documents if task.mono else _write_pairs
            result = {**result, **write(stage.folder, staged, path, keep, noted(staged), result["counts"])}
        else:
            make_folder(path.parent)
            if staged.exists():  # else an interrupted run has moved it
                os.replace(staged, path)
                sync_folder(path.parent)
            shard = replace(Shard(**result["shard"]), name=task.shard_name(block))
            result = {**result, "shard": asdict(shard)}
    stage.finish_task(marker, result)


def _write_documents(
    root: Path, staged: Path, path: Path, keep: np.ndarray, notes: np.ndarray, counts: dict[str, Any]
) -> dict[str, Any]:
    """The shard without some paragraphs. A document that has no token left is dropped with all its paragraphs."""
    with pa.memory_map(str(staged)) as file:
        reader = pa.ipc.open_file(file)
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        records = sum(batch.num_rows for batch in batches)
        tokens = np.bincount(notes["document"], weights=notes["tokens"] * keep, minlength=records).astype(np.int64)
        keep &= (tokens > 0)[notes["document"]]
        written, unknown, first, begin = [], 0, 0, 0
        for batch in batches:
            last = first + batch.num_rows
            end = int(np.searchsorted(notes["document"], last))
            # a document's paragraphs and its `</s>`, one behind the other
            owner = np.concatenate([notes["document"][begin:end], np.arange(first, last, dtype=np.uint32)])
            order = np.argsort(owner, kind="stable")
            lengths = np.concatenate([notes["tokens"][begin:end], np.ones(last - first, np.uint32)])[order]
            kept = np.concatenate([keep[begin:end], tokens[first:last] > 0])[order]
            values = batch.column(0).flatten().to_numpy()
            kept_values = values[np.repeat(kept, lengths)]
            unknown += int((values == UNK).sum()) - int((kept_values == UNK).sum())
            left = tokens[first:last][tokens[first:last] > 0]
            if len(left):
                written.append(pa.record_batch([list_array((kept_values, left + 1))], schema=DOCUMENTS))
            first, begin = last, end
        shard = write_arrow(path, DOCUMENTS, written, root) if written else None
    dropped = int((tokens == 0).sum())
    return _result(shard, counts, "documents", dropped, int(tokens.sum()) + records - dropped, unknown, keep, notes)


def _write_pairs(
    root: Path, staged: Path, path: Path, keep: np.ndarray, notes: np.ndarray, counts: dict[str, Any]
) -> dict[str, Any]:
    """The shard without some pairs."""
    with pa.memory_map(str(staged)) as file:
        reader = pa.ipc.open_file(file)
        table = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        written, unknown, first = [], 0, 0
        for batch in table:
            kept = batch.filter(pa.array(keep[first : first + batch.num_rows]))
            unknown += _unknown(batch) - _unknown(kept)
            first += batch.num_rows
            if kept.num_rows:
                written.append(kept)
        shard = write_arrow(path, PAIRS, written, root) if written else None
    tokens = int(notes["tokens"][keep].sum(dtype=np.int64))
    return _result(shard, counts, "pairs", int((~keep).sum()), tokens, unknown, keep, notes)


def _unknown(batch: pa.RecordBatch) -> int:
    return sum(int((column.flatten().to_numpy() == UNK).sum()) for column in batch.columns)


def _result(
    shard: Shard | None,
    counts: dict[str, Any],
    unit: str,
    dropped: int,
    tokens: int,
    unknown: int,
    keep: np.ndarray,
    notes: np.ndarray,
) -> dict[str, Any]:
    """A block's result from what it was staged with."""
    lost = notes[~keep]
    counts = dict(counts)
    counts[unit] -= dropped
    counts["dropped"] = _add(counts["dropped"], dropped)
    if unit == "documents":
        counts["removed"] = _add(counts["removed"], len(lost))
    counts["paragraphs"] -= len(lost) * (1 if unit == "documents" else 2)
    counts["characters"] -= int(lost["characters"].sum(dtype=np.int64))
    counts["bytes"] -= int(lost["bytes"].sum(dtype=np.int64))
    counts["tokens"] = tokens
    counts["unknown"] -= unknown
    return {"shard": shard and asdict(shard), "counts": counts}


def _add(reasons: dict[str, int], number: int) -> dict[str, int]:
    total = {**reasons, EXACT_DUPLICATES: reasons.get(EXACT_DUPLICATES, 0) + number}
    return {reason: total[reason] for reason in sorted(total) if total[reason]}


def _finish(stage: Stage, tasks: Sequence[Task]) -> None:
    for task in tasks:
        encoded = stage.task_result(f"{task.name}.encoded")
        assert encoded is not None
        finish(stage, task, [stage.task_result(f"{task.block_name(n)}.final") for n in range(encoded["blocks"])])
