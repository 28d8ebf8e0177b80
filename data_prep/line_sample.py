"""A temperature-sampled sample of a corpus's lines, exact, without replacement, and in constant memory.

Lines are counted once, then read again and chosen by a keyed permutation of their numbers, so the sample is the same
whatever the number of processes. A line is a paragraph, or a side of a pair, that the filters of its corpus leave.
Filters that count tokens need a vocabulary and are left out here; equal lines stay.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.clean import Counts, Sides, doubts, make_filters
from data_prep.corpus import TextConfig, find_sources
from data_prep.parallel import run_tasks
from data_prep.progress import warn
from data_prep.readers import DOCUMENT_READERS, PAIR_READERS, READERS, Input
from data_prep.sampling import apportion, key_of, permute, temperature_shares
from data_prep.store import Stage, new_file

SAMPLE = "sample"  # folder of the chosen lines, SAMPLE/<language>/<input>.txt in the stage's folder
_LINE_CHARACTERS = 1000  # SentencePiece skips lines over 4,192 bytes; longer ones are cut instead
_BLOCK = 1 << 18  # bytes of text that are filtered and chosen from at once


def read_lines(paths: Sequence[Path]) -> Iterator[str]:
    """The lines of some of the sample's files."""
    for path in paths:
        with open(path, encoding="utf-8", newline="\n") as file:
            yield from (line.rstrip("\n") for line in file)


def sampled_inputs(text: TextConfig) -> tuple[tuple[Input, ...], dict[str, Any]]:
    """The inputs that lines are sampled from, and what they add to a stage's settings.

    Raises ValueError for names that cannot work, and for a named pipe.
    """
    sources = find_sources(text).values()
    inputs = tuple(chain.from_iterable(found.inputs for found in sources))
    for path in chain.from_iterable(source.paths for source in inputs):
        if path.pipe:
            raise ValueError(f"{path} is a named pipe, but lines are sampled in two passes: store it as a file")
    settings = {key: value for found in sources for key, value in found.settings.items()}
    settings["inputs"] = [
        [source.name, [list(file) for file in source.files], *([source.corpus] if source.corpus else [])]
        for source in inputs
    ]
    return inputs, settings


def sample_lines(
    stage: Stage, inputs: Sequence[Input], sentences: int, alpha: float, seed: int, processes: int
) -> tuple[Iterator[str], dict[str, Any]]:
    """Choose `sentences` lines, m_j^alpha of each language's m_j; a language with fewer than its quota gives all, once.

    Returns them, and by language the lines there were and the lines chosen. Raises ValueError when the inputs have no
    text.
    """
    counted = count_lines(stage, inputs, processes)
    lines: Counter[str] = sum(counted, Counter())
    codes = sorted(lines)
    quotas = apportion(sentences, temperature_shares([lines[code] for code in codes], alpha))
    chosen = {code: min(quota, lines[code]) for code, quota in zip(codes, quotas, strict=True)}
    chosen_files = choose_lines(stage, inputs, counted, chosen, seed, processes)
    by_language = {
        code: {
            "lines": lines[code],
            "sampled": chosen[code],
            "share_before": lines[code] / lines.total(),
            "share_after": chosen[code] / sum(chosen.values()),
        }
        for code in codes
    }
    return read_lines(list(chain.from_iterable(files.values() for files in chosen_files))), by_language


def count_lines(stage: Stage, inputs: Sequence[Input], processes: int) -> list[Counter[str]]:
    """Lines of each language, an entry an input. Raises ValueError when the inputs have no text."""
    sizes = [source.size for source in inputs]
    counted = run_tasks(partial(_count, stage, inputs), range(len(inputs)), sizes, processes, "count lines")
    if not any(counted):
        raise ValueError(f"there is no text in {inputs[0].paths[0].folder}: a vocabulary needs some lines")
    return [Counter(counts) for counts in counted]


def choose_lines(
    stage: Stage,
    inputs: Sequence[Input],
    counted: Sequence[Counter[str]],
    quotas: dict[str, int],
    seed: int,
    processes: int,
) -> list[dict[str, Path]]:
    """Files of the chosen lines by language, an entry an input; as many lines of each language as `quotas` has."""
    choose = partial(_choose, stage, inputs, counted, dict(sum(counted, Counter())), quotas, seed)
    sizes = [source.size for source in inputs]
    return run_tasks(choose, range(len(inputs)), sizes, processes, "sample lines")


def _sides(source: Input, read: Counts) -> Iterator[tuple[list[str], ...]]:
    """Cleaned lines that the filters leave, by side, from some text at once; `read` counts what there was."""
    task = "mono" if len(source.languages) == 1 else "para"
    filters = make_filters(source.filters, task, source.corpus).text
    for block in READERS[source.format].blocks(source, _BLOCK):
        sides: tuple[list[str], ...]
        scores = None
        if task == "mono":
            paragraphs = DOCUMENT_READERS[source.format].paragraphs(source, block, read)
            sides = ([line for lines, _ in paragraphs for line in lines],)
        else:
            pairs = list(PAIR_READERS[source.format].pairs(source, block, read))
            sides = ([a for a, _, _ in pairs], [b for _, b, _ in pairs])
            scores = np.array([np.nan if score is None else score for _, _, score in pairs])
        kept = np.ones(len(sides[0]), bool)
        if len(kept):
            for _, text_filter in filters:
                kept &= ~text_filter(Sides(sides, source.languages, scores))
            yield tuple(list(compress(side, kept)) for side in sides)


def _count(stage: Stage, inputs: Sequence[Input], number: int) -> dict[str, int]:
    """Lines of each language in one input."""
    name = f"count-{number:05d}"
    result = stage.task_result(name)
    if result is None:
        counts: Counter[str] = Counter()
        source, read = inputs[number], Counts("lines")
        for sides in _sides(source, read):
            counts.update(dict(zip(source.languages, map(len, sides), strict=True)))
        for words in doubts(read.paragraphs_in + 2 * read.units_in * (len(source.languages) == 2), read.repaired):
            warn(f"{' and '.join(map(str, source.paths))}: {words}")
        result = dict(+counts)
        stage.finish_task(name, result)
    return result


def _choose(
    stage: Stage,
    inputs: Sequence[Input],
    counted: Sequence[dict[str, int]],
    lines: dict[str, int],
    quotas: dict[str, int],
    seed: int,
    number: int,
) -> dict[str, Path]:
    """Write the chosen lines of one input; a language's lines are numbered through all inputs."""
    languages = inputs[number].languages
    paths = {code: stage.folder / SAMPLE / code / f"{number:05d}.txt" for code in languages}
    name = f"{SAMPLE}-{number:05d}"
    if stage.task_result(name) is not None:
        return paths
    done = sum((Counter(counts) for counts in counted[:number]), Counter())
    with ExitStack() as stack:
        files = [stack.enter_context(new_file(path)) for path in paths.values()]
        for sides in _sides(inputs[number], Counts("lines")):
            for language, side, file in zip(languages, sides, files, strict=True):
                if not side:
                    continue
                index = done[language] + np.arange(len(side))
                chosen = permute(index, lines[language], key_of(seed, "vocab", language)) < quotas[language]
                text = "".join(line[:_LINE_CHARACTERS] + "\n" for line in compress(side, chosen))
                file.write(text.encode())
                done[language] += len(side)
    written = [file.shard(path, stage.folder) for file, path in zip(files, paths.values(), strict=True)]
    stage.finish_task(name, {"files": [asdict(file) for file in written]})
    return paths
