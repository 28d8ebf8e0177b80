"""A temperature-sampled sample of a corpus's lines, exact, without replacement, and in constant memory.

Lines are counted once, then read again and chosen by a keyed permutation of their numbers, so the sample is the same
whatever the number of processes.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from data_prep.clean import Counts
from data_prep.executor import run_tasks
from data_prep.permutation import key_of, permute
from data_prep.readers import Input, documents, pairs
from data_prep.sampling import apportion, temperature_shares
from data_prep.store import Stage

SAMPLE = "sample"  # folder of the chosen lines, a file an input, inside the stage's folder
_LINE_CHARACTERS = 1000  # SentencePiece skips lines over 4,192 bytes; longer ones are cut instead
_BLOCK = 4096  # lines chosen at once


@dataclass(frozen=True)
class LineSample:
    """Files of chosen lines; `by_language` has the lines there were and the lines chosen."""

    paths: tuple[Path, ...]
    by_language: dict[str, Any]

    def lines(self) -> Iterator[str]:
        """The chosen lines."""
        for path in self.paths:
            with open(path, encoding="utf-8", newline="\n") as file:
                yield from (line.rstrip("\n") for line in file)


def sample_lines(
    stage: Stage, inputs: Sequence[Input], sentences: int, alpha: float, seed: int, processes: int
) -> LineSample:
    """Choose `sentences` lines, m_j^alpha of each language's m_j; a language with fewer than its quota gives all, once.

    Raises ValueError when the inputs have no text.
    """
    counted = count_lines(stage, inputs, processes)
    lines: Counter[str] = sum(counted, Counter())
    codes = sorted(lines)
    quotas = apportion(sentences, temperature_shares([lines[code] for code in codes], alpha))
    chosen = {code: min(quota, lines[code]) for code, quota in zip(codes, quotas, strict=True)}
    chosen_files = choose_lines(stage, inputs, counted, chosen, seed, processes, split=False)
    paths = [path for files in chosen_files for path in dict.fromkeys(files.values())]
    by_language = {
        code: {
            "lines": lines[code],
            "sampled": chosen[code],
            "share_before": lines[code] / lines.total(),
            "share_after": chosen[code] / sum(chosen.values()),
        }
        for code in codes
    }
    return LineSample(tuple(paths), by_language)


def count_lines(stage: Stage, inputs: Sequence[Input], processes: int) -> list[Counter[str]]:
    """Lines of each language, an entry an input. Raises ValueError when the inputs have no text."""
    sizes = [source.size for source in inputs]
    counted = run_tasks(partial(_count, stage, inputs), range(len(inputs)), sizes, processes, "count lines")
    if not any(counted):
        raise ValueError(f"there is no text in {inputs[0].paths[0].parent}: a vocabulary needs some lines")
    return [Counter(counts) for counts in counted]


def choose_lines(
    stage: Stage,
    inputs: Sequence[Input],
    counted: Sequence[Counter[str]],
    quotas: dict[str, int],
    seed: int,
    processes: int,
    split: bool,
) -> list[dict[str, Path]]:
    """Files of the chosen lines by language, an entry an input; as many lines of each language as `quotas` has.

    `split`: every language of an input has a file of its own; else they share one.
    """
    choose = partial(_choose, stage, inputs, counted, dict(sum(counted, Counter())), quotas, seed, split)
    sizes = [source.size for source in inputs]
    return run_tasks(choose, range(len(inputs)), sizes, processes, "sample lines")


def _language_lines(source: Input) -> Iterator[tuple[str, str]]:
    """(language, line) of a corpus file, cleaned."""
    if len(source.languages) == 1:
        for document in documents(source, Counts("documents")):
            for line in document:
                yield source.languages[0], line
    else:
        for sides in pairs(source, Counts("pairs")):
            yield from zip(source.languages, sides, strict=True)


def _count(stage: Stage, inputs: Sequence[Input], number: int) -> dict[str, int]:
    """Lines of each language in one input."""
    name = f"count-{number:05d}"
    result = stage.task_result(name)
    if result is None:
        result = dict(Counter(language for language, _ in _language_lines(inputs[number])))
        stage.finish_task(name, result)
    return result


def _choose(
    stage: Stage,
    inputs: Sequence[Input],
    counted: Sequence[dict[str, int]],
    lines: dict[str, int],
    quotas: dict[str, int],
    seed: int,
    split: bool,
    number: int,
) -> dict[str, Path]:
    """Write the chosen lines of one input; a language's lines are numbered through all inputs."""
    folder = stage.folder / SAMPLE
    paths = {code: (folder / code if split else folder) / f"{number:05d}.txt" for code in inputs[number].languages}
    if all(path.exists() for path in paths.values()):
        return paths
    done = sum((Counter(counts) for counts in counted[:number]), Counter())
    stream = _language_lines(inputs[number])
    with ExitStack() as stack:
        opened = {path: stack.enter_context(_open_temporary(path)) for path in set(paths.values())}
        while block := list(islice(stream, _BLOCK)):
            chosen = np.zeros(len(block), dtype=bool)
            for language in {language for language, _ in block}:
                at = np.array([i for i, (code, _) in enumerate(block) if code == language])
                index = done[language] + np.arange(len(at))
                chosen[at] = permute(index, lines[language], key_of(seed, "vocab", language)) < quotas[language]
                done[language] += len(at)
            for i in np.flatnonzero(chosen):
                opened[paths[block[i][0]]].write(block[i][1][:_LINE_CHARACTERS] + "\n")
    for path in opened:
        os.replace(_temporary(path), path)
    return paths


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _open_temporary(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(_temporary(path), "w", encoding="utf-8", newline="\n")
