"""Inputs on their way to shards: read as blocks, each block encoded by whoever has time for it.

OUT/<name>/<file>-<block>.arrow          the shard of a block
OUT/staged/<name>/<file>-<block>.*       where duplicates will be removed: the shard, and its run
OUT/tasks/<task>.begun.json              the input's files, as they were when its first block was read
OUT/tasks/<task>.<block>.json            a block that is encoded
OUT/tasks/<task>.encoded.json            all blocks of an input are encoded, and duplicates will be removed
OUT/tasks/<task>.json                    an input that is finished; the others are removed then
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from data_prep.clean import Counts, add_counts
from data_prep.dedup import Run
from data_prep.filters import Filters, make_filters
from data_prep.readers import Input, TextBlock, block_pairs, block_paragraphs, text_blocks
from data_prep.store import Stage, make_folder, write_arrow
from data_prep.team import Team
from data_prep.token_ids import IdEncoder
from xlme_ds.data.schema import DOCUMENTS, PAIRS
from xlme_ds.data.vocabulary import Vocabulary

STAGED = "staged"


@dataclass(frozen=True)
class Task:
    """One input; `index` counts the inputs of the same language or pair."""

    source: Input
    index: int

    @property
    def name(self) -> str:
        """Unique in its stage folder."""
        return f"{self.source.name}-{self.index:03d}"

    @property
    def mono(self) -> bool:
        """Documents or pairs."""
        return len(self.source.languages) == 1

    @property
    def filters(self) -> Filters:
        """The input's filters."""
        return make_filters(self.source.filters, "mono" if self.mono else "para", self.source.corpus)

    def block_name(self, number: int) -> str:
        """Of the block's marker."""
        return f"{self.name}.{number:05d}"

    def shard_name(self, number: int) -> str:
        """Relative to the stage's folder, or to its staged part."""
        return f"{self.source.name}/{self.index:03d}-{number:05d}.arrow"


@dataclass(frozen=True)
class EncodeInputs:
    """The work of one member of the team; the same for all."""

    stage: Stage
    tasks: tuple[Task, ...]
    vocab: Path
    block_bytes: int
    max_pair_tokens: int
    team_folder: Path

    def __call__(self, member: int) -> None:
        """Encode what nobody else does, until all inputs are encoded or a member failed."""
        team = Team(self.team_folder, member)
        by_name = {task.name: task for task in self.tasks}

        def work(name: str, number: int, block: TextBlock) -> None:
            self.encode_block(by_name[name], number, block)
            team.report(sum(map(len, block.sides)), len(self.tasks), self.stage.folder.name)

        with team.telling():
            for task in sorted(self.tasks, key=lambda task: -task.source.size):
                if not team.failed and team.claim(task.name):
                    self._read(task, team, work)
            team.help_until(len(self.tasks), work)

    def _read(self, task: Task, team: Team, work: Callable[[str, int, TextBlock], None]) -> None:
        """Read one input, and see to it that all its blocks are encoded."""
        begin(self.stage, task)
        blocks = 0
        try:
            for number, block in enumerate(text_blocks(task.source, self.block_bytes)):
                blocks = number + 1
                if not block_done(self.stage, task, number) and not team.offer(task.name, number, block):
                    work(task.name, number, block)
                if team.failed:
                    return
        except ValueError:
            team.withdraw(task.name)
            discard(self.stage, task)  # it will be fetched again, and may be another one then
            raise
        if team.settle(task.name, work):
            if task.filters.exact_duplicates:
                self.stage.finish_task(f"{task.name}.encoded", {"inputs": task.source.files, "blocks": blocks})
            else:
                finish(self.stage, task, [self.stage.task_result(task.block_name(n)) for n in range(blocks)])
            team.finish(task.name)

    def encode_block(self, task: Task, number: int, block: TextBlock) -> None:
        """Write the shard of one block, then its marker."""
        filters = task.filters
        run = Run() if filters.exact_duplicates else None
        encoder = IdEncoder(_vocabulary(self.vocab), task.source.languages, filters, run)
        counts = Counts("documents" if task.mono else "pairs")
        if task.mono:
            schema, batches = DOCUMENTS, encoder.documents(block_paragraphs(task.source, block, counts), counts)
        else:
            units = block_pairs(task.source, block, counts)
            schema, batches = PAIRS, encoder.pairs(units, counts, self.max_pair_tokens)
        path = (self.stage.folder / STAGED if run else self.stage.folder) / task.shard_name(number)
        first = next(batches, None)
        shard = None if first is None else write_arrow(path, schema, chain([first], batches), self.stage.folder)
        result: dict[str, Any] = {"shard": shard and asdict(shard), "paragraphs": run.paragraphs if run else 0}
        notes = run.save(path, self.stage.folder) if run else ()
        result |= {"files": [asdict(note) for note in notes], "counts": counts.as_json()}
        self.stage.finish_task(task.block_name(number), result)


@cache
def _vocabulary(path: Path) -> Vocabulary:
    return Vocabulary(path)  # once a process


def begin(stage: Stage, task: Task) -> None:
    """Go on where an earlier run stopped, if the input is the same."""
    files = [list(file) for file in task.source.files]
    begun = stage.task_result(f"{task.name}.begun")
    if begun is None or begun["inputs"] != files:
        discard(stage, task)
        stage.finish_task(f"{task.name}.begun", {"inputs": files})


def discard(stage: Stage, task: Task) -> None:
    """Remove all that there is of an unfinished input."""
    clear_markers(stage, task)
    for folder in (stage.folder, stage.folder / STAGED):
        for path in (folder / task.source.name).glob(f"{task.index:03d}-*"):
            path.unlink()


def clear_markers(stage: Stage, task: Task) -> None:
    """Remove the markers that only an unfinished input needs."""
    for path in (stage.folder / "tasks").glob(f"{task.name}.*.json"):
        path.unlink()


def block_done(stage: Stage, task: Task, number: int) -> bool:
    """Whether a block is encoded."""
    return stage.task_result(task.block_name(number)) is not None


def moved_shards(stage: Stage) -> set[str]:
    """Staged shards that have their final place; one that got it without a marker is moved back."""
    moved = set()
    for path in (stage.folder / "tasks").glob("*.json"):
        result = stage.task_result(path.stem)
        name = result["shard"]["name"] if result and result.get("shard") else ""
        if name.startswith(f"{STAGED}/") and not (stage.folder / name).exists():
            if stage.task_result(f"{path.stem}.final"):
                moved.add(name)
            elif (final := stage.folder / name.removeprefix(f"{STAGED}/")).exists():
                make_folder((stage.folder / name).parent)
                os.replace(final, stage.folder / name)
    return moved


def forget_encoded(stage: Stage, task: Task) -> None:
    """Have the blocks of an input encoded that are lost, though all were encoded."""
    encoded = stage.task_result(f"{task.name}.encoded")
    for number in range(encoded["blocks"] if encoded else 0):
        name = task.block_name(number)
        result, final = stage.task_result(name), stage.task_result(f"{name}.final")
        gone = result and result["shard"] and not (stage.folder / result["shard"]["name"]).exists() and not final
        if result is None or gone:
            for lost in (name, f"{name}.final", f"{task.name}.encoded"):
                stage.forget_task(lost)


def finish(stage: Stage, task: Task, blocks: Iterable[dict[str, Any] | None]) -> None:
    """Mark an input as finished, from the results of its blocks."""
    counts = Counts("documents" if task.mono else "pairs", files=1).as_json()
    shards = []
    for block in blocks:
        assert block is not None, f"a block of {task.name} has no result"
        counts = add_counts(counts, block["counts"])
        shards += [block["shard"]] if block["shard"] else []
    stage.finish_task(task.name, {"inputs": task.source.files, "shards": shards, "counts": counts})
    clear_markers(stage, task)
