"""Stage `encode` turns corpora into Arrow shards of token ids. Each language and each pair has a folder.

    OUT/mono/<lang>/<file>-<block>.arrow   schema DOCUMENTS: each record is a document, which ends in `</s>`
    OUT/para/<a>-<b>/<file>-<block>.arrow  schema PAIRS: each record is a pair, with a's side first
    OUT/{mono,para}/manifest.json          written when all shards of its folder are written

A shard has the token ids of one block of an input: about `block_bytes` bytes of text. The shard's bytes do not depend
on the number of workers.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from data_prep.encode.encode_input import (
    STAGED,
    EncodeTask,
    discard_blocks,
    discard_changed,
    encode_inputs,
    finished_result,
    has_all_blocks,
)
from data_prep.encode.held_out import HELD_OUT_TEXT, OTHER_SPLIT, read_digests
from data_prep.encode.remove_duplicates import remove_duplicates
from data_prep.encode.shared_work import SharedWork
from data_prep.filters.clean import add_counts, text_warnings
from data_prep.parallel import run_tasks, world_size
from data_prep.progress import print_stdout, warn
from data_prep.readers import READERS
from data_prep.readers.corpus import Sources, TextConfig, find_sources
from data_prep.store import Stage
from xlme_ds.data.schema import Manifest, Shard, write_manifest
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.io.files import file_sha256, real_path


@dataclass(frozen=True)
class EncodeConfig(TextConfig):
    """Encode documents (CC-100's layout) and pairs (OPUS's layout) to Arrow shards. Under mpiexec or srun, the MPI
    ranks share the work.

    xlme prep encode --mono mono --para para --vocab vocab --out encoded
    """

    vocab: Path
    """Folder that `vocab` or `vocap` wrote, or a SentencePiece model file such as XLM-R's."""
    out: Path
    """Folder to write: mono/ and para/."""
    processes: int = 1
    """Worker processes on this machine; the output is the same for any number. Under MPI the ranks are the workers."""
    max_pair_tokens: int = 509
    """Most tokens of a pair, both sides together; longer pairs are dropped and counted. It should be at most the
    --row-tokens of `mix` minus 3."""
    block_bytes: int = 64_000_000
    """Bytes of text that a worker encodes at a time, and that a shard holds."""
    split: Literal["all", "train", "heldout"] = "all"
    """Part of the text to encode: heldout encodes the documents and pairs that --heldout-share holds out, train encodes
    the others. A hash of the document's text, or of the pair's English side, decides which are held out."""
    heldout_share: float = 0.001
    """Share of the documents and of the pairs that is held out; give the same share for train and heldout."""
    without: tuple[Path, ...] = ()
    """Files of UTF-8 text, such as the sides of a test set. Paragraphs that have the same token ids as one of their
    lines are dropped and counted, and so are pairs with such a side."""
    sentences: bool = False
    """Make every paragraph of monolingual text a record of its own, for `mix --sentences`."""


def run(config: EncodeConfig) -> None:
    """Encode the inputs that are not encoded yet. Raises ValueError on bad input, or if the output folder was written
    with other settings."""
    if config.max_pair_tokens < 2 or config.block_bytes < 1:
        raise ValueError("--max-pair-tokens must be at least 2 and --block-bytes at least 1")
    if not 0 < config.heldout_share < 1:
        raise ValueError(f"--heldout-share is {config.heldout_share}: it must be between 0 and 1")
    # Plan both kinds of text before encoding either: a bad file name fails before hours of work.
    vocabulary_size, plans = _plans(config)
    for kind, (stage, tasks) in plans.items():
        with stage.open():
            _run_plan(config, kind, stage, tasks, vocabulary_size)


def _plans(config: EncodeConfig) -> tuple[int, dict[str, tuple[Stage, list[EncodeTask]]]]:
    """Returns (the vocabulary's size, plans). `plans` maps each kind of text (mono, para) to its stage and the tasks of
    all its inputs. Raises ValueError on bad input."""
    vocabulary = Vocabulary(config.vocab)
    read_digests(config.without, vocabulary)  # raises for a bad file before anything is written
    without_sha256 = sorted(file_sha256(path) for path in config.without)
    plans = {}
    sources_by_kind = find_sources(config)
    if config.sentences and "mono" not in sources_by_kind:
        raise ValueError("--sentences is for monolingual text: leave it out for pairs")
    inputs = [source for sources in sources_by_kind.values() for source in sources.inputs]
    if not any(path.is_pipe or path.size for source in inputs for path in source.paths):
        raise ValueError(f"all inputs are empty, such as {inputs[0].paths[0]}: name files that have text")
    for kind, sources in sources_by_kind.items():
        settings = _settings(config, kind, sources, vocabulary.sha256, without_sha256)
        stage = Stage(config.out / kind, "encode", settings)
        for path in (path for source in sources.inputs for path in source.paths):
            parents = real_path(path.local_path).parents if path.local_path else ()
            if real_path(stage.folder) in parents:
                raise ValueError(f"{path} is in {stage.folder}, where the shards would be: choose another --out")
            if real_path(config.out) in parents[:1]:
                raise ValueError(f"{path} is in {config.out}: choose another --out")
        by_name = groupby(sources.inputs, lambda source: source.name)
        tasks = [EncodeTask(source, index) for _, same_name in by_name for index, source in enumerate(same_name)]
        plans[kind] = stage, tasks
    return vocabulary.size, plans


def _settings(
    config: EncodeConfig, kind: str, sources: Sources, vocabulary_sha256: str, without_sha256: list[str]
) -> dict[str, Any]:
    """The settings on which the shards of one kind of text depend."""
    settings: dict[str, Any] = {
        "task": kind,
        "vocabulary_sha256": vocabulary_sha256,
        # for each input: its language or pair, the names of its files, and the name of its corpus, if it has one
        "inputs": [
            [source.name, [name for name, _ in source.files], *([source.corpus] if source.corpus else [])]
            for source in sources.inputs
        ],
        "block_bytes": config.block_bytes,
    }
    if config.split != "all":
        settings |= {"split": config.split, "heldout_share": config.heldout_share}
    if config.without:
        settings["without"] = without_sha256
    if config.sentences and kind == "mono":
        settings["sentences"] = True
    if kind == "para":
        settings["max_pair_tokens"] = config.max_pair_tokens
    return settings | sources.settings


def _run_plan(config: EncodeConfig, kind: str, stage: Stage, tasks: Sequence[EncodeTask], vocabulary_size: int) -> None:
    """Encode the unfinished inputs of one kind of text, and write the manifest."""
    _check_sizes(stage, tasks)
    if stage.check_finished(config.processes):
        return print_stdout(f"{stage.folder} is complete")
    unfinished = _tasks_to_do(stage, tasks)
    to_deduplicate = [task for task in unfinished if task.filters.exact_duplicates]
    shared = SharedWork.begin(stage.folder)
    # If all blocks of an input are encoded, only its duplicates remain to be removed.
    to_encode = tuple(task for task in unfinished if not has_all_blocks(stage, task))
    workers = world_size() if world_size() > 1 else config.processes
    if to_encode:
        discard_changed(stage, to_encode)
        work = partial(encode_inputs, stage, to_encode, config.vocab, shared, config.without)
        run_tasks(work, range(workers), [1] * workers, config.processes, f"encode {kind}", show_progress=False)
    if to_deduplicate:
        remove_duplicates(stage, to_deduplicate, config.processes)
    shutil.rmtree(shared)
    _write_manifest(stage, tasks, vocabulary_size)


def _check_sizes(stage: Stage, tasks: Sequence[EncodeTask]) -> None:
    """Raise ValueError if a file does not have the size that it had when it was encoded."""
    for task in tasks:
        result = stage.read_marker(task.name) or stage.read_marker(f"{task.name}.encoded")
        stage.check_sizes(result, task.source.files, "it was encoded into")


def _tasks_to_do(stage: Stage, tasks: Sequence[EncodeTask]) -> list[EncodeTask]:
    """Returns the tasks that have work left, in the order of `tasks`. These are the unfinished tasks and, if the
    duplicates of a language or pair must be found again, all of its tasks with the filter `exact_duplicates`. Removes
    the results of finished tasks that are done again."""
    unfinished = {task.name for task in tasks if stage.read_marker(task.name) is None}
    filtered = [task for task in tasks if task.filters.exact_duplicates]
    languages_to_search = {  # languages or pairs whose duplicates must be found again
        task.source.name for task in filtered if task.name in unfinished and not has_all_blocks(stage, task, ".final")
    }
    redone = [task for task in filtered if task.source.name in languages_to_search and task.name not in unfinished]
    discard_blocks(stage, redone)
    stage.remove_markers(task.name for task in redone)
    to_do = unfinished.union(task.name for task in redone)
    return [task for task in tasks if task.name in to_do]


def _write_manifest(stage: Stage, tasks: Sequence[EncodeTask], vocabulary_size: int) -> None:
    """Remove temporary files and all markers but those of inputs, warn of doubtful inputs, and write the manifest."""
    markers = {f"{task.name}.json" for task in tasks}
    for path in (stage.folder / "tasks").iterdir():
        if path.name not in markers:
            path.unlink()  # the marker of a slice, or of a block from a process that outlived its killed run
    if (stage.folder / STAGED).exists():
        shutil.rmtree(stage.folder / STAGED)
    shards: list[Shard] = []
    by_language: dict[str, dict[str, Any]] = {}
    for task in tasks:
        result = finished_result(stage, task.name)
        shards += [Shard(**shard) for shard in result["shards"]]
        counts = result["counts"]
        by_language[task.source.name] = add_counts(by_language.get(task.source.name, {}), counts)
        is_left_out = any(counts["dropped"].get(reason) for reason in (OTHER_SPLIT, HELD_OUT_TEXT))
        if not result["shards"] and not is_left_out:
            warn(f"{task.source.paths[0]} gave no text: see its counts in the manifest")
        read = counts["paragraphs_in" if task.is_mono else "pairs_in"]
        lines = READERS[task.source.format].lines_cleaned(read, counts["dropped"])
        for warning in text_warnings(lines, counts["repaired"], counts["tokens"], counts["unknown"]):
            warn(f"{' and '.join(map(str, task.source.paths))}: {warning}")
    # `removed` counts paragraphs of documents; pairs have only `dropped`.
    held_out = (counts.get("removed", counts["dropped"]).get(HELD_OUT_TEXT) for counts in by_language.values())
    if "without" in stage.settings and not any(held_out):
        warn(f"no text of {stage.folder} is a line of --without: do these files have only sentences, one per line?")
    write_manifest(
        stage.folder,
        Manifest(
            stage="encode",
            settings=stage.settings,
            vocabulary_size=vocabulary_size,
            vocabulary_sha256=stage.settings["vocabulary_sha256"],
            languages=tuple(sorted({language for task in tasks for language in task.source.languages})),
            shards=tuple(sorted(shards, key=lambda shard: shard.name)),
            counts={"by_language": by_language},
        ),
    )
    inputs = f"{len(tasks)} input{'s' * (len(tasks) != 1)}"
    tokens = sum(counts["tokens"] for counts in by_language.values())
    if not tokens and stage.settings.get("split") == "heldout":
        share = stage.settings["heldout_share"]
        warn(f"{stage.folder} has no text: for little text, give both parts a larger --heldout-share than {share}")
    print_stdout(f"{stage.folder}: {inputs}, {tokens:,} tokens")
