"""Sample lines from the text: of each language, as many as its quota.

The sample of a language is uniform and without replacement: every distinct line is hashed, and the lines with the
smallest hashes are chosen, so the sample does not depend on the number of processes. A line is a paragraph, or one side
of a pair, that passes the filters of its corpus. Equal lines of a language count once, because pairs repeat text: the
English of one corpus may be in a hundred others. Filters that count tokens need a vocabulary and are left out here.

The lines of an input that may be chosen (candidates) are written to files, with their hashes, so one reading of the
input is enough. Rarely the candidates turn out too few: then the input is read again.
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
from data_prep.parallel import run_tasks
from data_prep.progress import warn
from data_prep.readers import READERS, DocumentReader, Input
from data_prep.readers.corpus import TextConfig, find_sources
from data_prep.sampling import SmallestHashes, derive_key, keyed_hash
from data_prep.store import Stage, is_intact, new_file
from xlme_ds.data.schema import Shard

SAMPLE = ".sample"  # folder of the chosen lines, <language>.txt, and of the candidates, <language>/<input>.txt
# The candidates are the lines with the N smallest hashes of each language in each input. N is _COUNTED_HASHES +
# min(_CANDIDATE_FACTOR × the language's quota × the input's share of the language's bytes, largest quota).
_CANDIDATE_FACTOR = 8
_COUNTED_HASHES = 1000  # smallest hashes, for each language in each input, from which distinct lines are estimated
_MAX_HASH = (1 << 64) - 1
_UPPER_HALF = np.uint64(0xFFFFFFFF << 32)
_LINE_CHARACTERS = 1000  # a longer line is cut: the rest would change a vocabulary little
_BLOCK_BYTES = 1 << 18  # bytes of text read and filtered in one step
# By language: the number of distinct lines, the number of chosen lines, and the file of the chosen lines.
Sample = tuple[dict[str, int], dict[str, int], dict[str, Path]]


def sampled_inputs(text: TextConfig) -> tuple[tuple[Input, ...], dict[str, Any]]:
    """Returns (inputs, settings): the inputs from which lines are sampled, and the settings that a stage records to
    recognise this text.

    Raises ValueError if `text` names an input that cannot be used, such as a named pipe.
    """
    sources = find_sources(text).values()
    inputs = tuple(chain.from_iterable(task_sources.inputs for task_sources in sources))
    refuse_pipes(inputs)
    settings = {key: value for task_sources in sources for key, value in task_sources.settings.items()}
    settings["inputs"] = input_names(inputs)
    return inputs, settings


def refuse_pipes(inputs: Iterable[Input]) -> None:
    """Raise ValueError for a named pipe: a vocabulary's text may be read more than once."""
    for path in chain.from_iterable(source.paths for source in inputs):
        if path.is_pipe:
            raise ValueError(f"{path} is a named pipe, but a vocabulary may read its text twice: store it as a file")


def input_names(inputs: Iterable[Input]) -> list[Any]:
    """Names and sizes of the inputs' files, for a stage's settings."""
    return [
        [source.name, [list(file) for file in source.files], *([source.corpus] if source.corpus else [])]
        for source in inputs
    ]


def sample_lines(
    stage: Stage,
    inputs: Sequence[Input],
    find_quotas: Callable[[dict[str, int]], dict[str, int]],
    max_quota: int,
    seed: int,
    processes: int,
) -> Sample:
    """Choose lines of each language. `find_quotas` takes the number of distinct lines of each language and returns the
    number of lines to choose from each, at most `max_quota`.

    The chosen lines of a language are in input order. Raises ValueError if the inputs have no text.
    """
    tasks = {_task_name(index): index for index in range(len(inputs))}
    candidate_counts = _candidate_counts(inputs, find_quotas, max_quota)
    while True:
        read = partial(_read_lines, stage, inputs, candidate_counts, seed)
        results = stage.run_unfinished(read, tasks, [source.size for source in inputs], processes, "read lines")
        distinct = _distinct_lines(results)
        if not distinct:
            stage.forget_settings()  # the folder must accept inputs with text
            raise ValueError(f"there is no text in {inputs[0].paths[0].folder}: a vocabulary needs some lines")
        quotas = find_quotas(distinct)
        choose = partial(_choose_lines, stage, results, quotas)
        numbers_chosen, missing = zip(
            *run_tasks(choose, list(distinct), list(distinct.values()), processes, "choose lines"), strict=True
        )
        if not any(missing):
            for path in (stage.folder / SAMPLE).iterdir():
                if path.is_dir():  # the candidates of a language
                    shutil.rmtree(path)
            chosen = dict(zip(distinct, numbers_chosen, strict=True))
            return distinct, chosen, {code: _sample_file(stage, code) for code in distinct}
        # In rare cases an input gave too few candidates, or their files are damaged. Read these inputs again.
        unread = set(chain.from_iterable(missing))
        candidate_counts = [
            {code: max(count, quotas.get(code, 0)) for code, count in by_code.items()} for by_code in candidate_counts
        ]
        stage.remove_markers(map(_task_name, unread))


def _candidate_counts(
    inputs: Sequence[Input], find_quotas: Callable[[dict[str, int]], dict[str, int]], max_quota: int
) -> list[dict[str, int]]:
    """One dict per input: for each language, the number of smallest hashes whose lines are candidates. This number
    depends on the quotas, which are estimated from the bytes of the inputs."""
    sizes = [source.size // len(source.languages) + 1 for source in inputs]
    total: Counter[str] = Counter()
    for source, size in zip(inputs, sizes, strict=True):
        total.update(dict.fromkeys(source.languages, size))
    quotas = find_quotas(dict(total))  # as if each byte were a line
    return [
        {
            code: _COUNTED_HASHES + min(_CANDIDATE_FACTOR * quotas[code] * size // total[code], max_quota)
            for code in source.languages
        }
        for source, size in zip(inputs, sizes, strict=True)
    ]


def _distinct_lines(results: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The number of distinct lines of each language. The number is exact if every input has fewer than
    `_COUNTED_HASHES` distinct lines of the language. Else it is estimated from the share of repeats among the lines
    with the smallest hashes."""
    line_counts = sum((Counter(result["lines"]) for result in results), Counter[str]())
    for code, line_count in line_counts.items():
        smallest = [result["least"][code] for result in results if code in result["lines"]]
        # A full list of an input leaves out the hashes above its last one, so only hashes up to `limit` are counted.
        limit = min((hashes[-1] for hashes, _ in smallest if len(hashes) == _COUNTED_HASHES), default=_MAX_HASH)
        occurrences = Counter[int]()
        for hashes, counts in smallest:
            occurrences.update({value: count for value, count in zip(hashes, counts, strict=True) if value <= limit})
        line_counts[code] = round(line_count * len(occurrences) / occurrences.total())
    return dict(sorted(line_counts.items()))


def read_lines(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the lines of files that hold a sample, without line ends."""
    for path in paths:
        with open(path, encoding="utf-8", newline="\n") as file:
            yield from (line.rstrip("\n") for line in file)


def filtered_lines(source: Input, read_counts: Counts) -> Iterator[tuple[list[str], ...]]:
    """Yield, for each block, the cleaned lines that pass the filters, as a list for each side. The text before the
    filters is counted in `read_counts`."""
    task = "mono" if len(source.languages) == 1 else "para"
    filters, reader = make_filters(source.filters, task, source.corpus).text, READERS[source.format]
    for block in reader.blocks(source, _BLOCK_BYTES):
        if isinstance(reader, DocumentReader):
            paragraphs = reader.paragraphs(source, block, read_counts)
            sides = Sides(([line for lines, _ in paragraphs for line in lines],), source.languages)
        else:
            pairs = list(reader.pairs(source, block, read_counts))
            scores = np.array([np.nan if score is None else score for _, _, score in pairs])
            sides = Sides(([a for a, _, _ in pairs], [b for _, b, _ in pairs]), source.languages, scores)
        passed = np.ones(len(sides.texts[0]), bool)
        if len(passed):
            for _, text_filter in filters:
                passed &= ~text_filter(sides)
            yield tuple(list(compress(side, passed)) for side in sides.texts)


def _task_name(index: int) -> str:
    return f"lines-{index:05d}"


def _sample_file(stage: Stage, language: str) -> Path:
    return stage.folder / SAMPLE / f"{language}.txt"


def _read_lines(
    stage: Stage, inputs: Sequence[Input], candidate_counts: Sequence[dict[str, int]], seed: int, index: int
) -> dict[str, Any]:
    """Read input `index`, and write its candidates and their hashes. Returns a dict of four dicts by language:

    `lines`: the number of lines. `limits`: the hash up to which all lines are candidates. `candidates`: the file of the
    candidates and the file of their hashes. `least`: the smallest distinct hashes, and how often each occurs.
    """
    source = inputs[index]
    line_counts, read_counts = Counter[str](), Counts("lines")
    keys = {code: derive_key(seed, "lines", code) for code in source.languages}
    smallest = {code: SmallestHashes(candidate_counts[index][code]) for code in source.languages}
    text_paths = {code: stage.folder / SAMPLE / code / f"{index:05d}.txt" for code in keys}
    paths = {code: (path, path.with_suffix(".hashes")) for code, path in text_paths.items()}
    with ExitStack() as stack:
        files = {code: [stack.enter_context(new_file(path)) for path in paths[code]] for code in keys}
        for sides in filtered_lines(source, read_counts):
            for code, side in zip(keys, sides, strict=True):
                text_file, hash_file = files[code]
                hashes = _line_hashes(keys[code], side, smallest[code].limit)
                is_candidate = smallest[code].add(hashes)
                candidates = compress(side, is_candidate)
                text_file.write("".join(line[:_LINE_CHARACTERS] + "\n" for line in candidates).encode())
                hash_file.write(hashes[is_candidate].tobytes())
                line_counts[code] += len(side)
    reader = READERS[source.format]
    read = read_counts.paragraphs_in if reader.task == "mono" else read_counts.units_in
    lines = reader.lines_cleaned(read, read_counts.dropped)
    for warning in text_warnings(lines, read_counts.repaired):
        warn(f"{' and '.join(map(str, source.paths))}: {warning}")
    by_code = {
        code: [asdict(file.shard(path, stage.folder)) for file, path in zip(files[code], paths[code], strict=True)]
        for code in keys
    }
    limits = {code: int(hashes.limit) for code, hashes in smallest.items()}
    # `+` leaves out the languages without lines.
    result: dict[str, Any] = {"lines": dict(+line_counts), "limits": limits, "candidates": by_code, "least": {}}
    for code, (_, hash_path) in paths.items():
        hashes, counts = np.unique(np.fromfile(hash_path, np.uint64), return_counts=True)  # sorted by hash
        result["least"][code] = [hashes[:_COUNTED_HASHES].tolist(), counts[:_COUNTED_HASHES].tolist()]
    return result


def _line_hashes(key: np.uint64, lines: Sequence[str], limit: np.uint64) -> np.ndarray:
    """uint64 hash of each line: its upper half from `key` and CRC-32, its lower half from BLAKE2b. BLAKE2b is slow, so
    the lower half stays 0 where the upper half alone is over `limit`."""
    texts = [line.encode() for line in lines]
    hashes = keyed_hash(key, np.fromiter(map(crc32, texts), np.uint64, len(texts))) & _UPPER_HALF
    for i in np.flatnonzero(hashes <= limit).tolist():
        hashes[i] |= np.frombuffer(blake2b(texts[i], digest_size=4).digest(), "<u4")[0]
    return hashes


def _choose_lines(
    stage: Stage, results: Sequence[dict[str, Any]], quotas: dict[str, int], code: str
) -> tuple[int, list[int]]:
    """Write the chosen lines of a language. Returns (number of chosen lines, []).

    If there are too few candidates, or their files are damaged, writes nothing and returns (0, indices of the inputs to
    read again).
    """
    result = stage.read_marker(f"chosen-{code}")
    if result is not None:
        return result["lines"], []
    by_input = {index: entry for index, entry in enumerate(results) if code in entry["candidates"]}
    files = {index: [Shard(**file) for file in entry["candidates"][code]] for index, entry in by_input.items()}
    if damaged := [index for index, shards in files.items() if not all(map(partial(is_intact, stage.folder), shards))]:
        return 0, damaged
    paths = [[stage.folder / file.name for file in shards] for shards in files.values()]
    hashes = np.concatenate([np.fromfile(path, np.uint64) for _, path in paths])
    distinct_hashes, first_index = np.unique(hashes, return_index=True)
    # Up to the smallest limit, all lines of every input are candidates. `distinct_hashes` is sorted, so the first
    # entries of `eligible` have the smallest hashes.
    eligible = first_index[distinct_hashes <= np.uint64(min(entry["limits"][code] for entry in by_input.values()))]
    limited = [index for index, entry in by_input.items() if entry["limits"][code] < _MAX_HASH]
    if len(eligible) < quotas[code] and limited:
        return 0, limited
    chosen = np.zeros(len(hashes), bool)
    chosen[eligible[: quotas[code]]] = True
    with new_file(_sample_file(stage, code)) as file:
        for line in compress(read_lines([path for path, _ in paths]), chosen):
            file.write(f"{line}\n".encode())
    result = {"lines": int(chosen.sum()), "files": [asdict(file.shard(_sample_file(stage, code), stage.folder))]}
    stage.write_marker(f"chosen-{code}", result)
    return result["lines"], []
