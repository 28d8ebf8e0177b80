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
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from data_prep.filters.clean import Counts, Sides, make_filters, text_warnings
from data_prep.parallel import MachineError, run_tasks
from data_prep.progress import warn
from data_prep.readers import READERS, DocumentReader, Input
from data_prep.readers.corpus import TextConfig, find_sources
from data_prep.sampling import SmallestHashes, derive_key, keyed_hash
from data_prep.store import Stage, is_intact, new_file
from xlme_ds.data.schema import Shard

SAMPLE = ".sample"  # folder of the chosen lines, <language>.txt, and of the candidates, <language>/<input>.txt
# The candidates are the lines with the N smallest hashes of each language in each input. N is _COUNTED_HASHES +
# min(_CANDIDATE_FACTOR × the language's quota × the input's share of the language's bytes, largest quota). The factor
# leaves a margin, so that the candidates are rarely too few.
_CANDIDATE_FACTOR = 8
# The number of distinct lines is estimated from this many smallest hashes of each language in each input.
_COUNTED_HASHES = 1000
_MAX_HASH = (1 << 64) - 1
_UPPER_HALF = np.uint64(0xFFFFFFFF << 32)
_LINE_CHARACTERS = 1000  # a longer line is cut: the rest would change a vocabulary little
_BLOCK_BYTES = 1 << 18  # bytes of text read and filtered in one step


class Sample(NamedTuple):
    """By language: the number of distinct lines, the number of chosen lines, and the file of the chosen lines."""

    distinct: dict[str, int]
    chosen: dict[str, int]
    files: dict[str, Path]


def sampled_inputs(text: TextConfig) -> tuple[tuple[Input, ...], dict[str, Any]]:
    """Returns (inputs, settings): the inputs from which lines are sampled, and the settings that a stage records to
    recognise this text.

    Raises ValueError if `text` names an input that cannot be used, such as a named pipe.
    """
    sources = find_sources(text).values()
    inputs = tuple(chain.from_iterable(task_sources.inputs for task_sources in sources))
    settings: dict[str, Any] = {"inputs": input_names(inputs)}
    for task_sources in sources:
        settings |= task_sources.settings
    return inputs, settings


def input_names(inputs: Iterable[Input]) -> list[Any]:
    """Each input's name, its files' names and sizes, and its corpus if it has one, for a stage's settings.

    Raises ValueError for a named pipe: a vocabulary's text may be read more than once.
    """
    for path in chain.from_iterable(source.paths for source in inputs):
        if path.is_pipe:
            raise ValueError(f"{path} is a named pipe, but a vocabulary may read its text twice: store it as a file")
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
    tasks = {f"lines-{index:05d}": index for index in range(len(inputs))}
    candidate_counts = _candidate_counts(inputs, find_quotas, max_quota)
    while True:
        write = partial(_write_candidates, stage, inputs, candidate_counts, seed)
        try:
            results = stage.run_unfinished(write, tasks, [source.size for source in inputs], processes, "read lines")
        except ValueError as error:
            if not isinstance(error, MachineError):  # an input is damaged: the folder must accept it in another size
                (stage.folder / "settings.json").unlink()
            raise
        distinct = _distinct_lines(results)
        if not distinct:
            stage.forget_settings()  # the folder must accept inputs with text
            raise ValueError(f"there is no text in {inputs[0].paths[0].folder}: a vocabulary needs some lines")
        quotas = find_quotas(distinct)
        choose = partial(_choose_lines, stage, results, quotas)
        numbers_chosen, to_read_again = zip(
            *run_tasks(choose, list(distinct), list(distinct.values()), processes, "choose lines"), strict=True
        )
        if not any(to_read_again):
            break
        # In rare cases an input gave too few candidates, or their files are damaged. Read these inputs again.
        indices = set(chain.from_iterable(to_read_again))
        stage.remove_markers(name for name, index in tasks.items() if index in indices)
        candidate_counts = [
            {code: max(count, quotas.get(code, 0)) for code, count in by_code.items()} for by_code in candidate_counts
        ]
    for code in chain.from_iterable(source.languages for source in inputs):
        shutil.rmtree(stage.folder / SAMPLE / code, ignore_errors=True)  # the candidates
    chosen = dict(zip(distinct, numbers_chosen, strict=True))
    return Sample(distinct, chosen, {code: stage.folder / SAMPLE / f"{code}.txt" for code in distinct})


def _candidate_counts(
    inputs: Sequence[Input], find_quotas: Callable[[dict[str, int]], dict[str, int]], max_quota: int
) -> list[dict[str, int]]:
    """One dict per input: for each language, the number of smallest hashes whose lines are candidates. This number
    depends on the quotas, which are estimated from the bytes of the inputs."""
    sizes = [source.size // len(source.languages) + 1 for source in inputs]  # bytes of each language of an input
    total_sizes: Counter[str] = Counter()
    for source, size in zip(inputs, sizes, strict=True):
        total_sizes.update(dict.fromkeys(source.languages, size))
    quotas = find_quotas(dict(total_sizes))  # as if each byte were a line
    return [
        {
            code: _COUNTED_HASHES + min(_CANDIDATE_FACTOR * quotas[code] * size // total_sizes[code], max_quota)
            for code in source.languages
        }
        for source, size in zip(inputs, sizes, strict=True)
    ]


def _distinct_lines(results: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The number of distinct lines of each language. The number is exact if every input has fewer than
    `_COUNTED_HASHES` distinct lines of the language. Else it is estimated from the share of repeats among the lines
    with the smallest hashes."""
    distinct = {}
    for code in sorted(set(chain.from_iterable(results))):
        entries = [result[code] for result in results if code in result]
        # A full list of an input leaves out the hashes above its last one, so only hashes up to `limit` are counted.
        hash_lists = [entry["smallest"][0] for entry in entries]
        limit = min((hashes[-1] for hashes in hash_lists if len(hashes) == _COUNTED_HASHES), default=_MAX_HASH)
        occurrences = Counter[int]()
        for entry in entries:
            hashes_and_counts = zip(*entry["smallest"], strict=True)
            occurrences.update({value: count for value, count in hashes_and_counts if value <= limit})
        line_count = sum(entry["lines"] for entry in entries)
        distinct[code] = round(line_count * len(occurrences) / occurrences.total())
    return distinct


def read_lines(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the lines of files that hold a sample, without line ends."""
    for path in paths:
        with open(path, encoding="utf-8", newline="\n") as file:
            yield from (line.rstrip("\n") for line in file)


def filtered_lines(source: Input, read_counts: Counts) -> Iterator[tuple[list[str], ...]]:
    """Yield, for each block, the cleaned lines that pass the filters, as a list for each side. The text before the
    filters is counted in `read_counts`."""
    reader = READERS[source.format]
    filters = make_filters(source.filters, reader.task, source.corpus).text
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


def _write_candidates(
    stage: Stage, inputs: Sequence[Input], candidate_counts: Sequence[dict[str, int]], seed: int, index: int
) -> dict[str, Any]:
    """Read input `index`, and write its candidates and their hashes. Returns a dict for each language that has lines:

    `lines`: the number of lines. `limit`: the hash up to which all lines are candidates. `files`: the file of the
    candidates and the file of their hashes. `smallest`: the smallest distinct hashes, and how often each occurs.
    """
    source = inputs[index]
    line_counts, read_counts = Counter[str](), Counts("lines")
    keys = {code: derive_key(seed, "lines", code) for code in source.languages}
    smallest = {code: SmallestHashes(candidate_counts[index][code]) for code in keys}
    text_paths = {code: stage.folder / SAMPLE / code / f"{index:05d}.txt" for code in keys}
    hash_paths = {code: path.with_suffix(".hashes") for code, path in text_paths.items()}
    with ExitStack() as stack:
        text_files = {code: stack.enter_context(new_file(path)) for code, path in text_paths.items()}
        hash_files = {code: stack.enter_context(new_file(path)) for code, path in hash_paths.items()}
        for sides in filtered_lines(source, read_counts):
            for code, side in zip(keys, sides, strict=True):
                hashes = _line_hashes(keys[code], side, smallest[code].limit)
                is_candidate = smallest[code].add(hashes)
                candidates = compress(side, is_candidate)
                text_files[code].write("".join(line[:_LINE_CHARACTERS] + "\n" for line in candidates).encode())
                hash_files[code].write(hashes[is_candidate].tobytes())
                line_counts[code] += len(side)
    reader = READERS[source.format]
    read = read_counts.paragraphs_in if reader.task == "mono" else read_counts.units_in
    lines_cleaned = reader.lines_cleaned(read, read_counts.dropped)
    for warning in text_warnings(lines_cleaned, read_counts.repaired):
        warn(f"{' and '.join(map(str, source.paths))}: {warning}")
    results = {}
    for code, line_count in (+line_counts).items():  # `+` leaves out the languages without lines
        text_shard = text_files[code].shard(text_paths[code], stage.folder)
        hash_shard = hash_files[code].shard(hash_paths[code], stage.folder)
        hashes, counts = np.unique(np.fromfile(hash_paths[code], np.uint64), return_counts=True)  # sorted by hash
        results[code] = {
            "lines": line_count,
            "limit": int(smallest[code].limit),
            "files": [asdict(text_shard), asdict(hash_shard)],
            "smallest": [hashes[:_COUNTED_HASHES].tolist(), counts[:_COUNTED_HASHES].tolist()],
        }
    return results


def _line_hashes(key: np.uint64, lines: Sequence[str], limit: np.uint64) -> np.ndarray:
    """uint64 hash of each line: its upper half from `key` and CRC-32, its lower half from BLAKE2b. The lower half is
    needed because some of millions of lines have the same CRC-32. BLAKE2b is slow, so this half stays 0 where the upper
    half alone is over `limit`."""
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
    previous = stage.read_marker(f"chosen-{code}")
    if previous is not None:
        return previous["lines"], []
    entries = {index: result[code] for index, result in enumerate(results) if code in result}
    files = {index: [Shard(**file) for file in entry["files"]] for index, entry in entries.items()}
    if damaged := [index for index, shards in files.items() if not all(map(partial(is_intact, stage.folder), shards))]:
        return 0, damaged
    text_paths = [stage.folder / text_file.name for text_file, _ in files.values()]
    hashes = np.concatenate([np.fromfile(stage.folder / file.name, np.uint64) for _, file in files.values()])
    distinct_hashes, first_index = np.unique(hashes, return_index=True)
    # Up to the smallest limit, all lines of every input are candidates. `eligible` has the indices of these lines, each
    # distinct line once, by rising hash.
    limits = {index: entry["limit"] for index, entry in entries.items()}
    eligible = first_index[distinct_hashes <= np.uint64(min(limits.values()))]
    limited = [index for index, limit in limits.items() if limit < _MAX_HASH]
    if len(eligible) < quotas[code] and limited:
        return 0, limited
    is_chosen = np.zeros(len(hashes), bool)
    is_chosen[eligible[: quotas[code]]] = True
    path = stage.folder / SAMPLE / f"{code}.txt"
    with new_file(path) as file:
        for line in compress(read_lines(text_paths), is_chosen):
            file.write(f"{line}\n".encode())
    number = int(is_chosen.sum())
    stage.write_marker(f"chosen-{code}", {"lines": number, "files": [asdict(file.shard(path, stage.folder))]})
    return number, []
