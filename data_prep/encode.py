"""Stage `encode`: corpora to Arrow shards of token ids, per language and per pair.

    OUT/mono/<lang>/<file>-<block>.arrow   schema DOCUMENTS: a record a document, ending in `</s>`
    OUT/para/<a>-<b>/<file>-<block>.arrow  schema PAIRS: a record a pair, in the order of the pair's name
    OUT/{mono,para}/manifest.json          written when all shards of that task are there

A shard is a block of an input: about `block_bytes` of its text. So the bytes depend on the input alone.
"""

import shutil
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from data_prep.clean import add_counts, doubts
from data_prep.corpus import Sources, TextConfig, find_sources
from data_prep.encode_input import STAGED, EncodeInputs, Task, discard, forget_encoded, moved_shards
from data_prep.executor import on_root, run_tasks, world_size
from data_prep.progress import say, warn
from data_prep.remove_duplicates import is_final, remove_duplicates
from data_prep.store import Stage
from data_prep.team import Team
from xlme_ds.data.schema import Manifest, Shard, write_manifest
from xlme_ds.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class EncodeConfig(TextConfig):
    """Encode documents (CC-100's layout) and pairs (OPUS's) to Arrow shards; under mpiexec or srun on MPI ranks."""

    vocab: Path
    """Folder of stage vocab, or a SentencePiece model file such as XLM-R's."""
    out: Path
    """Folder to write: mono/ and para/."""
    processes: int = 1
    """Local processes; the output is the same for any number. Under MPI the ranks are used instead."""
    max_pair_tokens: int = 509
    """Pairs with more tokens on both sides together are dropped, and counted: a row less its specials."""
    block_bytes: int = 64_000_000
    """A new shard begins after this many bytes of text."""


@dataclass(frozen=True)
class _Plan:
    """Everything the ranks must agree on before the work of one task (mono or para) begins."""

    stage: Stage
    tasks: list[Task]
    vocabulary_size: int
    vocabulary_sha256: str


def run(config: EncodeConfig) -> None:
    """Encode what is not encoded yet. Raises ValueError on bad input, or on settings other than the folder's."""
    if config.max_pair_tokens < 2 or config.block_bytes < 1:
        raise ValueError("--max-pair-tokens must be at least 2 and --block-bytes at least 1")
    plans = on_root(lambda: _plans(config))  # all of them first: a bad file name shows before hours of work
    for kind, plan in plans.items():
        with plan.stage.open():
            _run_plan(config, kind, plan)


def _plans(config: EncodeConfig) -> dict[str, _Plan]:
    vocabulary = Vocabulary(config.vocab)
    return {task: _plan(config, task, sources, vocabulary) for task, sources in find_sources(config).items()}


def _plan(config: EncodeConfig, task: str, sources: Sources, vocabulary: Vocabulary) -> _Plan:
    inputs = sources.inputs
    settings: dict[str, Any] = {
        "task": task,
        "vocabulary_sha256": vocabulary.sha256,
        "inputs": [[s.name, [name for name, _ in s.files], *([s.corpus] if s.corpus else [])] for s in inputs],
        "block_bytes": config.block_bytes,
    }
    if task == "para":
        settings["max_pair_tokens"] = config.max_pair_tokens
    settings |= sources.settings
    tasks = [Task(source, i) for _, same in groupby(inputs, lambda s: s.name) for i, source in enumerate(same)]
    return _Plan(Stage(config.out / task, "encode", settings), tasks, vocabulary.size, vocabulary.sha256)


def _run_plan(config: EncodeConfig, kind: str, plan: _Plan) -> None:
    stage = plan.stage
    on_root(lambda: _refuse_other_inputs(plan))
    if stage.finished(config.processes, on_root(lambda: moved_shards(stage))):
        return on_root(lambda: say(f"{stage.folder} is complete"))
    todo = on_root(lambda: _todo(plan))
    doubled = [task for task in todo if task.filters.exact_duplicates]
    team = on_root(lambda: Team.prepare(stage.folder))
    encoded = on_root(lambda: [task.name for task in doubled if stage.task_result(f"{task.name}.encoded")])
    open_tasks = tuple(task for task in todo if task.name not in encoded)
    members = world_size() if world_size() > 1 else config.processes
    work = EncodeInputs(stage, open_tasks, config.vocab, config.block_bytes, config.max_pair_tokens, team)
    if open_tasks:
        run_tasks(work, range(members), [1] * members, config.processes, f"encode {kind}", visible=False)
    if doubled:
        remove_duplicates(stage, doubled, config.processes)
    on_root(lambda: shutil.rmtree(team))
    on_root(lambda: _close(plan))


def _refuse_other_inputs(plan: _Plan) -> None:
    """Raise ValueError when an input has changed since it was encoded."""
    for task in plan.tasks:
        result = plan.stage.task_result(task.name) or plan.stage.task_result(f"{task.name}.encoded")
        for (name, size), (_, encoded) in zip(task.source.files, result["inputs"] if result else (), strict=False):
            if size != encoded:
                raise ValueError(
                    f"{name} had {encoded} bytes when it was encoded into {plan.stage.folder}, now it has {size}: restore "
                    "it, or choose another output folder"
                )


def _todo(plan: _Plan) -> list[Task]:
    """Inputs that are not finished; and those that are, where duplicates must be sought among all of them again."""
    todo = [task for task in plan.tasks if plan.stage.task_result(task.name) is None]
    for task in todo:
        forget_encoded(plan.stage, task)
    again = {task.source.name for task in todo if task.filters.exact_duplicates and not is_final(plan.stage, task)}
    for task in plan.tasks:
        if task not in todo and task.source.name in again and task.filters.exact_duplicates:
            discard(plan.stage, task)
            plan.stage.forget_task(task.name)
    return [task for task in plan.tasks if task in todo or plan.stage.task_result(task.name) is None]


def _close(plan: _Plan) -> None:
    """The manifest, from the tasks' markers."""
    wanted = {f"{task.name}.json" for task in plan.tasks}
    for path in (plan.stage.folder / "tasks").iterdir():
        if path.name not in wanted:
            path.unlink()  # of a block, by a process of a killed run that lived a moment longer
    if (plan.stage.folder / STAGED).exists():
        shutil.rmtree(plan.stage.folder / STAGED)
    shards: list[Shard] = []
    by_language: dict[str, dict[str, Any]] = {}
    for task in plan.tasks:
        result = plan.stage.task_result(task.name)
        assert result is not None, f"{task.name} has no result"
        shards += [Shard(**shard) for shard in result["shards"]]
        by_language[task.source.name] = add_counts(by_language.get(task.source.name, {}), result["counts"])
        if not result["shards"]:
            warn(f"{task.source.paths[0]} gave no text: see its counts in the manifest")
        _warn_of_doubts(task, result["counts"])
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
    say(f"{plan.stage.folder}: {len(plan.tasks)} inputs, {sum(c['tokens'] for c in by_language.values()):,} tokens")


def _warn_of_doubts(task: Task, counts: dict[str, Any]) -> None:
    lines = counts["paragraphs_in"] if task.mono else 2 * counts["pairs_in"]
    files = " and ".join(map(str, task.source.paths))
    for words in doubts(lines, counts["repaired"], counts["tokens"], counts["unknown"]):
        warn(f"{files}: {words}")
