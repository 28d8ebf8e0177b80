"""A sample of lines of the text, by quotas over languages.

The sample is uniform, without replacement: every distinct line of a language is hashed, and the lines with the
smallest hashes are chosen, so the sample does not depend on the number of processes. A line is a paragraph, or one side
of a pair, that passes the filters of its corpus. Equal lines of a language count once, because pairs repeat text: the
English of one corpus may be in a hundred others. Filters that count tokens need a vocabulary and are left out here.

Inputs are read once, and the lines that may be chosen, the candidates, are written to files.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from itertools import chain, compress
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from data_prep.filters.clean import Counts, Sides, make_filters, text_warnings
from data_prep.parallel import on_root, run_tasks
from data_prep.progress import warn
from data_prep.readers import CC100, READERS, Input
from data_prep.readers.corpus import TextConfig, find_sources
from data_prep.sampling import SmallestHashes, hashed, key_of
from data_prep.store import Stage, is_whole, new_file
from xlme_ds.data.schema import Shard

SAMPLE = ".sample"  # folder of the chosen lines, <language>.txt, and of the candidates, <language>/<input>.txt
_SPARE = 8  # an input may write this many times its share (by bytes) of the wanted lines as candidates
_LEAST_KEPT = 1000  # and these on top; distinct lines are counted from as many of an input's smallest hashes
_MAX_HASH = (1 << 64) - 1
_LINE_CHARACTERS = 1000  # of a line are kept; the rest would change little
_BLOCK = 1 << 18  # bytes of text that are read and filtered at once


def sampled_inputs(text: TextConfig) -> tuple[tuple[Input, ...], dict[str, Any]]:
    """The inputs that lines are sampled from, and what they add to a stage's settings.

    Raises ValueError for names that cannot work, and for a named pipe.
    """
    sources = find_sources(text).values()
    inputs = tuple(chain.from_iterable(task_sources.inputs for task_sources in sources))
    for path in chain.from_iterable(source.paths for source in inputs):
        if path.pipe:
            raise ValueError(
                f"{path} is a named pipe, but a vocabulary's lines are sampled from files: store it as a file"
            )
    settings = {key: value for task_sources in sources for key, value in task_sources.settings.items()}
    settings["inputs"] = input_names(inputs)
    return inputs, settings


def input_names(inputs: Iterable[Input]) -> list[Any]:
    """Names and sizes of the inputs' files, for a stage's settings."""
    return [
        [source.name, [list(file) for file in source.files], *([source.corpus] if source.corpus else [])]
        for source in inputs
    ]


def sample_lines(
    stage: Stage,
    inputs: Sequence[Input],
    quotas: Callable[[dict[str, int]], dict[str, int]],
    most: int,
    seed: int,
    processes: int,
) -> tuple[dict[str, int], dict[str, int], dict[str, Path]]:
    """Choose lines of each language: `quotas` maps numbers of distinct lines to numbers of lines to choose, each at
    most `most`.

    Returns, by language, the number of distinct lines, the number chosen, and the file of the chosen lines in input
    order. Raises ValueError when the inputs have no text.
    """
    numbers, sizes = range(len(inputs)), [source.size for source in inputs]
    bounds = _first_bounds(inputs, quotas, most)
    while True:
        read = partial(_read_lines, stage, inputs, bounds, seed)
        results = run_tasks(read, numbers, sizes, processes, "read lines")
        lines = _distinct_lines(results)
        if not lines:
            raise ValueError(f"there is no text in {inputs[0].paths[0].folder}: a vocabulary needs some lines")
        quota = quotas(lines)
        choose = partial(_choose_lines, stage, results, quota)
        numbers_chosen, missing = zip(
            *run_tasks(choose, list(lines), list(lines.values()), processes, "choose lines"), strict=True
        )
        if not any(missing):
            on_root(partial(_remove_candidates, stage))
            chosen = dict(zip(lines, numbers_chosen, strict=True))
            return lines, chosen, {code: _sample_file(stage, code) for code in lines}
        again = set(chain.from_iterable(missing))  # this is rare: too few candidates were kept, or a file is damaged
        bounds = [{code: max(number, quota.get(code, 0)) for code, number in bound.items()} for bound in bounds]
        on_root(partial(stage.forget_tasks, map(_read_task, again)))


def _first_bounds(
    inputs: Sequence[Input], quotas: Callable[[dict[str, int]], dict[str, int]], most: int
) -> list[dict[str, int]]:
    """Number of candidates that each input may write of each language, estimated from its bytes."""
    sizes = [source.size // len(source.languages) + 1 for source in inputs]
    total: Counter[str] = Counter()
    for source, size in zip(inputs, sizes, strict=True):
        total.update(dict.fromkeys(source.languages, size))
    guess = quotas(dict(total))
    return [
        {code: _LEAST_KEPT + min(_SPARE * guess[code] * size // total[code], most) for code in source.languages}
        for source, size in zip(inputs, sizes, strict=True)
    ]


def _distinct_lines(results: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Number of distinct lines of each language: exact where every input has fewer than `_LEAST_KEPT` of them, else
    estimated from the share of repeats among the lines with the smallest hashes."""
    lines = sum((Counter(result["lines"]) for result in results), Counter[str]())
    for code, number in lines.items():
        least = [result["least"][code] for result in results if code in result["lines"]]
        limit = min((hashes[-1] for hashes, _ in least if len(hashes) == _LEAST_KEPT), default=_MAX_HASH)
        occurrences = Counter[int]()
        for hashes, repeats in least:
            occurrences.update({value: n for value, n in zip(hashes, repeats, strict=True) if value <= limit})
        lines[code] = round(number * len(occurrences) / occurrences.total())
    return dict(sorted(lines.items()))


def _remove_candidates(stage: Stage) -> None:
    for path in (stage.folder / SAMPLE).iterdir():
        if path.is_dir():
            shutil.rmtree(path)


def read_lines(paths: Sequence[Path]) -> Iterator[str]:
    """The lines of some of the sample's files."""
    for path in paths:
        with open(path, encoding="utf-8", newline="\n") as file:
            yield from (line.rstrip("\n") for line in file)


def filtered_lines(source: Input, read: Counts) -> Iterator[tuple[list[str], ...]]:
    """Yield the cleaned lines that pass the filters, by side, a block at a time; `read` counts all that was read."""
    task = "mono" if len(source.languages) == 1 else "para"
    filters, reader = make_filters(source.filters, task, source.corpus).text, READERS[source.format]
    for block in reader.blocks(source, _BLOCK):
        if isinstance(reader, CC100):
            paragraphs = reader.paragraphs(source, block, read)
            sides = Sides(([line for lines, _ in paragraphs for line in lines],), source.languages)
        else:
            pairs = list(reader.pairs(source, block, read))
            scores = np.array([np.nan if score is None else score for _, _, score in pairs])
            sides = Sides(([a for a, _, _ in pairs], [b for _, b, _ in pairs]), source.languages, scores)
        passed = np.ones(len(sides.texts[0]), bool)
        if len(passed):
            for _, text_filter in filters:
                passed &= ~text_filter(sides)
            yield tuple(list(compress(side, passed)) for side in sides.texts)


def _read_task(number: int) -> str:
    return f"lines-{number:05d}"


def _sample_file(stage: Stage, language: str) -> Path:
    return stage.folder / SAMPLE / f"{language}.txt"


def _read_lines(
    stage: Stage, inputs: Sequence[Input], bounds: Sequence[dict[str, int]], seed: int, number: int
) -> dict[str, Any]:
    """Count the lines of one input, and write candidates and their hashes: all lines with hashes up to `limits`."""
    result = stage.task_result(_read_task(number))
    if result is not None:
        return result
    source, counts, read = inputs[number], Counter[str](), Counts("lines")
    keys = {code: key_of(seed, "lines", code) for code in source.languages}
    least = {code: SmallestHashes(bounds[number][code]) for code in source.languages}
    paths = [stage.folder / SAMPLE / code / f"{number:05d}.{kind}" for code in keys for kind in ("txt", "hashes")]
    with ExitStack() as stack:
        files = [stack.enter_context(new_file(path)) for path in paths]
        for sides in filtered_lines(source, read):
            for code, side, text_file, hash_file in zip(keys, sides, files[::2], files[1::2], strict=True):
                hashes = _line_hashes(keys[code], side, least[code].limit)
                is_candidate = least[code].add(hashes)
                candidates = compress(side, is_candidate)
                text_file.write("".join(line[:_LINE_CHARACTERS] + "\n" for line in candidates).encode())
                hash_file.write(hashes[is_candidate].tobytes())
                counts[code] += len(side)
    for warning in text_warnings(read.paragraphs_in + 2 * read.units_in * (len(keys) == 2), read.repaired):
        warn(f"{' and '.join(map(str, source.paths))}: {warning}")
    written = [asdict(file.shard(path, stage.folder)) for file, path in zip(files, paths, strict=True)]
    by_code = {code: written[2 * i : 2 * i + 2] for i, code in enumerate(keys)}
    limits = {code: int(smallest.limit) for code, smallest in least.items()}
    result = {"lines": dict(+counts), "limits": limits, "candidates": by_code, "least": {}}
    for code, path in zip(keys, paths[1::2], strict=True):
        with_repeats = np.unique(np.fromfile(path, np.uint64), return_counts=True)
        result["least"][code] = [values[:_LEAST_KEPT].tolist() for values in with_repeats]
    stage.finish_task(_read_task(number), result)
    return result


def _line_hashes(key: np.uint64, lines: Sequence[str], limit: np.uint64) -> np.ndarray:
    """uint64 hash of each line's text: half from CRC-32, and the slower second half only for hashes up to `limit`."""
    texts = [line.encode() for line in lines]
    hashes = hashed(key, np.fromiter(map(crc32, texts), np.uint64, len(texts))) & np.uint64(_MAX_HASH << 32 & _MAX_HASH)
    for number in np.flatnonzero(hashes <= limit).tolist():
        hashes[number] |= np.frombuffer(blake2b(texts[number], digest_size=4).digest(), "<u4")[0]
    return hashes


def _choose_lines(
    stage: Stage, results: Sequence[dict[str, Any]], quota: dict[str, int], code: str
) -> tuple[int, list[int]]:
    """Write the chosen lines of a language. Returns their number, and the inputs to read again: none, unless
    candidates are missing or damaged, and then nothing is written."""
    result = stage.task_result(f"chosen-{code}")
    if result is not None:
        return result["lines"], []
    by_input = {number: read for number, read in enumerate(results) if code in read["candidates"]}
    files = {number: [Shard(**file) for file in read["candidates"][code]] for number, read in by_input.items()}
    if damaged := [number for number, shards in files.items() if not all(is_whole(stage.folder, f) for f in shards)]:
        return 0, damaged
    paths = [[stage.folder / file.name for file in shards] for shards in files.values()]
    hashes = np.concatenate([np.fromfile(path, np.uint64) for _, path in paths])
    distinct, first = np.unique(hashes, return_index=True)
    # Every input has written all its lines with hashes up to the smallest limit.
    eligible = first[distinct <= np.uint64(min(read["limits"][code] for read in by_input.values()))]
    limited = [number for number, read in by_input.items() if read["limits"][code] < _MAX_HASH]
    if len(eligible) < quota[code] and limited:
        return 0, limited
    chosen = np.zeros(len(hashes), bool)
    chosen[eligible[: quota[code]]] = True
    with new_file(_sample_file(stage, code)) as file:
        for line in compress(read_lines([path for path, _ in paths]), chosen):
            file.write(f"{line}\n".encode())
    result = {"lines": int(chosen.sum()), "files": [asdict(file.shard(_sample_file(stage, code), stage.folder))]}
    stage.finish_task(f"chosen-{code}", result)
    return result["lines"], []
