"""Stage `encode`: a corpus to Arrow shards of token ids, per language and per pair.

    OUT/mono/<lang>/<file>-<block>.arrow   schema DOCUMENTS: a record a document, ending in `</s>`
    OUT/para/<a>-<b>/<file>-<block>.arrow  schema PAIRS: a record a pair, in the order of the pair's name
    OUT/{mono,para}/manifest.json          written when all shards of that task are there

A task is one input file, written as blocks of about `shard_tokens` tokens, so the bytes depend on the input alone.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep import readers
from data_prep.blocks import document_blocks, pair_blocks
from data_prep.clean import Counts, add_counts
from data_prep.executor import on_root, run_tasks
from data_prep.readers import Input
from data_prep.store import Stage, write_arrow
from xlme_ds.data.schema import DOCUMENTS, PAIRS, Manifest, Shard, write_manifest
from xlme_ds.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class EncodeConfig:
    """Encode documents (CC-100's layout) and pairs (OPUS's) to Arrow shards; under mpiexec or srun on MPI ranks."""

    vocab: Path
    """Folder of stage vocab, or a SentencePiece model file such as XLM-R's."""
    out: Path
    """Folder to write: mono/ and para/."""
    mono: Path | None = None
    """Folder of <lang>.txt[.xz|.gz|.bz2|.zst]: a paragraph a line, an empty line between documents."""
    para: Path | None = None
    """Folder of a-b.txt.zip (OPUS), or of X.a-b.a and X.a-b.b."""
    processes: int = 1
    """Local processes; the output is the same for any number. Under MPI the ranks are used instead."""
    max_pair_tokens: int = 509
    """Pairs with more tokens on both sides together are dropped, and counted: a row less its specials."""
    shard_tokens: int = 64_000_000
    """A new shard begins after this many tokens."""


@dataclass(frozen=True)
class Task:
    """One input file on its way to shards; `index` counts the files of the same language or pair."""

    source: Input
    index: int

    @property
    def name(self) -> str:
        """Unique in its stage folder."""
        return f"{self.source.name}-{self.index:03d}"


@dataclass(frozen=True)
class _Plan:
    """Everything the ranks must agree on before the work of one task (mono or para) begins."""

    stage: Stage
    tasks: list[Task]
    vocabulary_size: int
    vocabulary_sha256: str


def run(config: EncodeConfig) -> None:
    """Encode what is not encoded yet. Raises ValueError on bad input, or on settings other than the folder's."""
    if config.mono is None and config.para is None:
        raise ValueError("neither --mono nor --para is given: name at least one corpus folder")
    if config.max_pair_tokens < 2 or config.shard_tokens < 1:
        raise ValueError("--max-pair-tokens must be at least 2 and --shard-tokens at least 1")
    plans = on_root(lambda: _plans(config))  # all of them first: a bad file name shows before hours of work
    for kind, plan in plans.items():
        plan.stage.open()
        _run_plan(config, kind, plan)


def _plans(config: EncodeConfig) -> dict[str, _Plan]:
    vocabulary = Vocabulary(config.vocab)
    plans = {}
    if config.mono:
        plans["mono"] = _plan(config, "mono", readers.find_documents(config.mono), vocabulary)
    if config.para:
        plans["para"] = _plan(config, "para", readers.find_pairs(config.para), vocabulary)
    return plans


def _plan(config: EncodeConfig, kind: str, sources: list[Input], vocabulary: Vocabulary) -> _Plan:
    settings: dict[str, Any] = {
        "task": kind,
        "vocabulary_sha256": vocabulary.sha256,
        "inputs": [[source.name, [name for name, _ in source.files]] for source in sources],
        "shard_tokens": config.shard_tokens,
    }
    if kind == "para":
        settings["max_pair_tokens"] = config.max_pair_tokens
    tasks = [Task(source, i) for _, same in groupby(sources, lambda s: s.name) for i, source in enumerate(same)]
    return _Plan(Stage(config.out / kind, "encode", settings), tasks, vocabulary.size, vocabulary.sha256)


def _run_plan(config: EncodeConfig, kind: str, plan: _Plan) -> None:
    todo = on_root(lambda: [task for task in plan.tasks if _finished(plan.stage, task) is None])
    if not todo and on_root(lambda: plan.stage.complete):
        return on_root(lambda: print(f"{plan.stage.folder} is complete"))
    work = partial(_encode, plan.stage, kind, config.vocab, config.max_pair_tokens, config.shard_tokens)
    run_tasks(work, todo, [task.source.size for task in todo], config.processes, f"encode {kind}")
    on_root(lambda: _close(plan))


def _close(plan: _Plan) -> None:
    """The manifest, from the tasks' markers."""
    shards: list[Shard] = []
    by_language: dict[str, dict[str, Any]] = {}
    for task in plan.tasks:
        result = _finished(plan.stage, task)
        assert result is not None, f"{task.name} has no result"
        shards += [Shard(**shard) for shard in result["shards"]]
        by_language[task.source.name] = add_counts(by_language.get(task.source.name, {}), result["counts"])
        if not result["shards"]:
            print(f"warning: {task.source.paths[0]} gave no text: see its counts in the manifest", file=sys.stderr)
    write_manifest(
        plan.stage.folder,
        Manifest(
            stage="encode",
            settings=plan.stage.settings,
            vocabulary_size=plan.vocabulary_size,
            vocabulary_sha256=plan.vocabulary_sha256,
            languages=tuple(sorted({language for task in plan.tasks for language in task.source.languages})),
            shards=tuple(sorted(shards, key=lambda shard: shard.name)),
            counts={"by_language": by_language},
        ),
    )
    print(f"{plan.stage.folder}: {len(plan.tasks)} inputs, {sum(c['tokens'] for c in by_language.values()):,} tokens")


def _finished(stage: Stage, task: Task) -> dict[str, Any] | None:
    """The task's result, if its shards are there in full. Raises ValueError when its input has changed since."""
    result = stage.task_result(task.name)
    for (name, size), (_, encoded) in zip(task.source.files, result["inputs"] if result else (), strict=False):
        if size != encoded:
            raise ValueError(
                f"{name} had {encoded} bytes when it was encoded into {stage.folder}, now it has {size}: restore it, or choose "
                "another output folder"
            )
    for shard in result["shards"] if result else ():
        path = stage.folder / shard["name"]
        if not path.exists() or path.stat().st_size != shard["bytes"]:
            return None
    return result


@cache
def _vocabulary(path: Path) -> Vocabulary:
    return Vocabulary(path)  # once a process


def _encode(stage: Stage, kind: str, vocab: Path, max_pair_tokens: int, shard_tokens: int, task: Task) -> None:
    """Write the shards of one input, then its marker."""
    vocabulary = _vocabulary(vocab)
    counts = Counts("documents" if kind == "mono" else "pairs", files=1)
    if kind == "mono":
        schema, batches = DOCUMENTS, document_blocks(vocabulary, readers.documents(task.source, counts), counts)
    else:
        texts = readers.pairs(task.source, counts)
        schema, batches = PAIRS, pair_blocks(vocabulary, texts, counts, max_pair_tokens)
    shards: list[Shard] = []
    name = f"{task.source.name}/{task.index:03d}"
    try:
        for block, part in enumerate(_parts(batches, shard_tokens)):
            path = stage.folder / f"{name}-{block:05d}.arrow"
            shards.append(write_arrow(path, schema, part, stage.folder))
    except BaseException:
        for shard in shards:  # no task, no shard
            (stage.folder / shard.name).unlink()
        raise
    result = {"inputs": task.source.files, "shards": [asdict(shard) for shard in shards], "counts": counts.as_json()}
    stage.finish_task(task.name, result)


def _parts(batches: Iterator[pa.RecordBatch], shard_tokens: int) -> Iterator[Iterator[pa.RecordBatch]]:
    """Batches shard by shard; each part must be read to its end before the next is asked for."""
    for first in batches:

        def part(batch: pa.RecordBatch | None = first) -> Iterator[pa.RecordBatch]:
            tokens = 0
            while batch is not None:
                yield batch
                tokens += sum(len(column.values) for column in batch.columns)
                batch = next(batches, None) if tokens < shard_tokens else None

        yield part()
