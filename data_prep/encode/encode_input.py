"""Encodes inputs to shards. Each input is read as blocks, and the next free process or rank encodes each block.
<name> is a language or pair, <file> the index of an input among the inputs of <name>, and <task> is <name>-<file>.

OUT/<name>/<file>-<block>.arrow          the shard of a block
OUT/staged/<name>/<file>-<block>.*       a block's shard and the hashes of its text, until duplicates are removed
OUT/tasks/<task>.begun.json              names and sizes of the input's files, recorded before its first block is read
OUT/tasks/<task>.<block>.json            marker: the block is encoded
OUT/tasks/<task>.encoded.json            marker: all blocks are encoded, but duplicates are not yet removed
OUT/tasks/<task>.<block>.final.json      marker: the block's duplicates are removed (remove_duplicates.py)
OUT/tasks/<task>.json                    marker: the input is finished; its other markers are then removed
OUT/work-<process>-<time>/               files by which processes share the work (shared_work.py); removed at the end
"""

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.encode.dedup import BlockHashes
from data_prep.encode.held_out import in_other_split, read_digests
from data_prep.encode.shared_work import EncodeBlock, SharedWork
from data_prep.encode.token_ids import IdEncoder
from data_prep.filters.clean import Counts, Filters, add_counts, make_filters
from data_prep.readers import READERS, DocumentReader, Input
from data_prep.readers.reader import Paragraphs, TextBlock
from data_prep.store import Stage, write_arrow
from xlme_ds.data.schema import DOCUMENTS, PAIRS
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.io.files import file_sha256

STAGED = "staged"
_BLOCK_FILE = re.compile(r"\d+-\d+\..+")  # <file>-<block>.*


@dataclass(frozen=True)
class EncodeTask:
    """The task of encoding one input. `index` is the input's index among the inputs of its language or pair."""

    source: Input
    index: int

    @property
    def name(self) -> str:
        """Name of the task and of its markers, unique in its stage folder."""
        return f"{self.source.name}-{self.index:03d}"

    @property
    def is_mono(self) -> bool:
        """True if the input has documents, False if it has pairs."""
        return len(self.source.languages) == 1

    @property
    def filters(self) -> Filters:
        """The filters that the input's corpus description names."""
        return make_filters(self.source.filters, "mono" if self.is_mono else "para", self.source.corpus)

    def block_name(self, number: int) -> str:
        """Name of the marker of the input's block `number`."""
        return f"{self.name}.{number:05d}"

    def shard_name(self, number: int) -> str:
        """Path of the shard of block `number`, relative to the stage's folder or to its subfolder STAGED."""
        return f"{self.source.name}/{self.index:03d}-{number:05d}.arrow"


def encode_inputs(
    stage: Stage,
    tasks: Sequence[EncodeTask],
    vocab: Path,
    shared_folder: Path,
    without: tuple[Path, ...],
    worker: int,
) -> None:
    """Encode the inputs of `tasks` together with other processes or ranks (workers). `worker` is this worker's number.
    Returns when all inputs are encoded, or when a worker has failed.

    `without` are files whose lines are left out. Raises ValueError if the vocabulary or one of these files changed
    since the command began.
    """
    shared = SharedWork(shared_folder, worker)
    by_name = {task.name: task for task in tasks}
    vocabulary = Vocabulary(vocab)
    excluded = read_digests(without, vocabulary)
    checksums = [stage.settings["vocabulary_sha256"], *stage.settings.get("without", ())]
    if [vocabulary.sha256, *sorted(map(file_sha256, without))] != checksums:
        changed = " or ".join(map(str, (vocab, *without)))
        raise ValueError(f"{changed} changed since the command began: give the command again")

    def encode_and_report(name: str, number: int, block: TextBlock) -> None:
        encode_block(stage, by_name[name], vocabulary, number, block, excluded)
        shared.report(sum(map(len, block.sides)), len(tasks), stage.folder.name)

    with shared.abort_on_error():
        for task in sorted(tasks, key=lambda task: -task.source.size):
            if not shared.failed and shared.claim(task.name):
                _read_input(stage, task, shared, encode_and_report)
        shared.take_until_all_finished(len(tasks), encode_and_report)


def _read_input(stage: Stage, task: EncodeTask, shared: SharedWork, encode: EncodeBlock) -> None:
    """Read one input; each block is encoded here or offered to other workers. Returns when all blocks are encoded, or
    when a worker has failed."""
    if stage.read_marker(f"{task.name}.begun") is None:  # `discard_changed` compares it with the files of a later run
        stage.write_marker(f"{task.name}.begun", {"inputs": task.source.files})
    block_count = 0
    try:
        blocks = READERS[task.source.format].blocks(task.source, stage.settings["block_bytes"])
        for number, block in enumerate(blocks):
            block_count = number + 1
            is_encoded = stage.read_marker(task.block_name(number)) is not None
            if not is_encoded and not shared.offer(task.name, number, block):
                encode(task.name, number, block)
            if shared.failed:
                return
    except ValueError:
        shared.drain(task.name, lambda *_: None)  # waits for other workers, and throws away the blocks on offer
        discard_blocks(stage, [task])  # the user will fetch the file again, and may get another version
        raise
    if shared.drain(task.name, encode):
        if task.filters.exact_duplicates:
            stage.write_marker(f"{task.name}.encoded", {"inputs": task.source.files, "blocks": block_count})
        else:
            finish_input(stage, task, block_count)
        shared.finish(task.name)


def encode_block(
    stage: Stage,
    task: EncodeTask,
    vocabulary: Vocabulary,
    number: int,
    block: TextBlock,
    excluded: Set[bytes] = frozenset(),
) -> None:
    """Write the shard of one block, then the block's marker. `excluded` are the digests of lines to leave out."""
    filters = task.filters
    hashes = BlockHashes() if filters.exact_duplicates else None
    settings = stage.settings
    in_other = partial(in_other_split, settings["split"], settings["heldout_share"]) if "split" in settings else None
    encoder = IdEncoder(vocabulary, task.source.languages, filters, hashes, in_other, excluded)
    counts = Counts("documents" if task.is_mono else "pairs")
    reader = READERS[task.source.format]
    if isinstance(reader, DocumentReader):
        paragraphs = reader.paragraphs(task.source, block, counts)
        if settings.get("sentences"):
            paragraphs = _as_documents(paragraphs, counts)
        schema, batches = DOCUMENTS, encoder.documents(paragraphs, counts)
    else:
        pairs = reader.pairs(task.source, block, counts)
        schema, batches = PAIRS, encoder.pairs(pairs, counts, settings["max_pair_tokens"])
    path = (stage.folder / STAGED if hashes else stage.folder) / task.shard_name(number)
    first_batch = next(batches, None)  # None if the filters leave no text; then no shard is written
    shard = None if first_batch is None else write_arrow(path, schema, chain([first_batch], batches), stage.folder)
    result = {
        "shard": shard and asdict(shard),
        "paragraphs": len(hashes.hashes) if hashes else 0,
        "files": hashes.save(path, stage.folder) if hashes else [],
        "counts": counts.as_json(),
    }
    stage.write_marker(task.block_name(number), result)


def _as_documents(documents: Iterable[Paragraphs], counts: Counts) -> Iterator[Paragraphs]:
    """Make every paragraph a document of its own, and add the new documents to `counts`."""
    for lines, paragraph_counts in documents:
        counts.units_in += len(lines) - len(paragraph_counts)
        yield Paragraphs(lines, np.ones(len(lines), np.int64))


def discard_changed(stage: Stage, tasks: Sequence[EncodeTask]) -> None:
    """Discard the blocks of those unfinished `tasks` whose input files have other names or sizes than in an interrupted
    run. Only one process calls this function, before any block is encoded."""
    begun = {task.name: {"inputs": [list(file) for file in task.source.files]} for task in tasks}
    discard_blocks(stage, [task for task in tasks if stage.read_marker(f"{task.name}.begun") != begun[task.name]])


def discard_blocks(stage: Stage, tasks: Sequence[EncodeTask]) -> None:
    """Remove the block files of `tasks`, their markers except <task>.json, and the markers of their languages' slices
    (remove_duplicates.py). Lists each folder once for all tasks."""
    names = {task.name for task in tasks}
    languages = {task.source.name for task in tasks}
    for path in (stage.folder / "tasks").glob("*.*.json"):
        if path.name.partition(".")[0] in names | languages:
            path.unlink(missing_ok=True)
    for folder in (stage.folder, stage.folder / STAGED):
        for path in folder.glob("*/*-*"):
            task_name = f"{path.parent.name}-{path.name.partition('-')[0]}"
            if _BLOCK_FILE.fullmatch(path.name) and task_name in names:
                path.unlink(missing_ok=True)


def has_all_blocks(stage: Stage, task: EncodeTask, suffix: str = "") -> bool:
    """True if all blocks of an input with the filter `exact_duplicates` are encoded or, with the suffix ".final", are
    written without their duplicates."""
    encoded = stage.read_marker(f"{task.name}.encoded")
    return encoded is not None and all(
        stage.read_marker(f"{name}{suffix}") is not None for name in map(task.block_name, range(encoded["blocks"]))
    )


def finished_result(stage: Stage, task_name: str) -> dict[str, Any]:
    """The result of a task of the stage that must have finished."""
    result = stage.read_marker(task_name)
    assert result is not None, f"{task_name} is not finished"
    return result


def finish_input(stage: Stage, task: EncodeTask, block_count: int, suffix: str = "") -> None:
    """Mark an input as finished. Its result has the shards and the summed counts of its blocks. The name of the marker
    that has a block's result is the block's name and `suffix`."""
    counts = Counts("documents" if task.is_mono else "pairs", files=1).as_json()
    shards, markers = [], [f"{task.name}.begun", f"{task.name}.encoded"]
    for name in map(task.block_name, range(block_count)):
        markers += [name, f"{name}.final"]
        block_result = finished_result(stage, name + suffix)
        counts = add_counts(counts, block_result["counts"])
        if block_result["shard"]:  # None if the filters left no text
            shards.append(block_result["shard"])
    result = {"inputs": task.source.files, "shards": shards, "counts": counts}
    # Flush a result of several shards before the blocks' markers are removed: if both were lost, all blocks would be
    # encoded again.
    stage.write_marker(task.name, result, flush=len(shards) > 1)
    stage.remove_markers(markers)
