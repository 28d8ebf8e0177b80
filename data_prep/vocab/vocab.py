"""Stage `vocab`: a SentencePiece unigram vocabulary from lines sampled by temperature over languages, or more pieces
for one that there is.

The sample is uniform, without replacement: every line has a hash of the seed, its language, its input and its number
there, and the lines with the least hashes are chosen, so it is the same whatever the number of processes. Inputs are
read once: the lines that may be among the chosen are kept aside meanwhile. A line is a paragraph, or a side of a pair,
that the filters of its corpus leave. Filters that count tokens need a vocabulary and are left out here; equal lines
stay.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.filters.clean import Counts, Sides, doubts, make_filters
from data_prep.parallel import on_root, run_tasks
from data_prep.progress import refuse, say, warn
from data_prep.readers import CC100, READERS, Input, find_documents
from data_prep.readers.corpus import TextConfig, find_sources
from data_prep.sampling import Least, apportion, hashed, key_of, temperature_shares
from data_prep.store import Stage, is_whole, new_file, write_file
from data_prep.vocab.extension import cutting, described, extend, room_in
from data_prep.vocab.model_file import SPECIALS, serialize
from data_prep.vocab.word_counts import count_words
from xlme_ds.data.schema import Manifest, Shard, write_manifest
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary

SAMPLE = ".sample"  # folder of the chosen lines, <language>.txt, and of the candidates, <language>/<input>.txt
_SPARE = 8  # candidates that an input may keep, as a multiple of the lines it gives by its share of the bytes
_LEAST_KEPT = 1000  # and these more
_ALL = (1 << 64) - 1  # the largest hash
_LINE_CHARACTERS = 1000  # of a line count; the rest would change little
_BLOCK = 1 << 18  # bytes of text that are filtered and chosen from at once
_SETTINGS = ("size", "alpha", "sentences", "seed", "character_coverage")  # those that shape the bytes


@dataclass(frozen=True)
class VocabConfig(TextConfig):
    """Train a vocabulary, take over an existing SentencePiece model, or extend one by new languages."""

    out: Path
    """Output folder: sentencepiece.model and manifest.json."""
    model: Path | None = None
    """An existing SentencePiece model, such as XLM-R's, to take instead of training one; with text, to extend: its
    pieces keep their ids, and new ones of the text follow up to --size."""
    compare: Path | None = None
    """Folder of text laid out as for --mono, in the languages of the --model that is extended, to see how much its
    segmentation changes."""
    size: int = 250002
    """Ids of the whole vocabulary as the model counts them, <pad> and <mask> included; smaller for small models and
    corpora."""
    alpha: float = 0.7
    """Exponent of the sampling over languages: 1 takes text as it is, 0 gives every language the same; less helps small
    languages."""
    sentences: int = 10_000_000
    """Lines to sample over all languages; a language with fewer than its quota gives all it has, once. Fewer need less
    memory."""
    seed: int = 0
    """Seed of the sample."""
    character_coverage: float = 0.9995
    """Share of the sample's characters that get a piece of their own; the rest become <unk>."""
    processes: int = 1
    """Worker processes on this machine; the output is the same for any number. Under MPI the ranks work instead."""

    def validate(self) -> None:
        """Raise ValueError for settings that cannot work."""
        refuse(
            [
                (
                    self.model is not None or self.names_text,
                    "no text is given: set --mono, --para or --corpus to train a vocabulary, or --model to take one "
                    "over",
                ),
                (
                    self.compare is None or (self.model is not None and self.names_text),
                    "--compare is for a vocabulary that is extended: give --model and the new languages' text too",
                ),
                (
                    self.size >= 16 and self.sentences >= 1,
                    f"--size is {self.size} and --sentences {self.sentences}: at least 16 and 1 are needed",
                ),
                (
                    0.98 <= self.character_coverage <= 1,
                    f"--character-coverage is {self.character_coverage}: it must be between 0.98 and 1",
                ),
            ]
        )
        temperature_shares([1], self.alpha)


def run(config: VocabConfig) -> None:
    """Write `config.out`. Raises ValueError for settings or inputs that cannot work."""
    on_root(config.validate)
    if config.model is None or config.names_text:
        _train(config)
    else:
        source = on_root(partial(Vocabulary, config.model))
        stage = Stage(config.out, "vocab", {"model": source.sha256})
        with stage.open():
            if not stage.finished(config.processes):
                on_root(lambda: finish_vocabulary(stage, source.path.read_bytes(), {}))
    on_root(lambda: say_size(config.out))


def say_size(out: Path) -> None:
    """Print how many ids the vocabulary in `out` has."""
    vocabulary = Vocabulary(out)
    say(f"{vocabulary.path}: {vocabulary.size:,} ids")


def _train(config: VocabConfig) -> None:
    inputs, text_settings = on_root(lambda: sampled_inputs(config))
    settings = {name: getattr(config, name) for name in _SETTINGS} | text_settings
    old = None if config.model is None else on_root(partial(Vocabulary, config.model))
    compared = [] if config.compare is None else on_root(partial(find_documents, config.compare))
    if old is not None:
        on_root(partial(room_in, old.path, config.size))
        settings |= {"model": old.sha256, "compare": _names(compared)}
    stage = Stage(config.out, "vocab", settings)

    def quotas(lines: dict[str, int]) -> dict[str, int]:
        """m_j^alpha of each language's m_j lines; one with fewer than its quota gives all, once."""
        shares = apportion(config.sentences, temperature_shares(list(lines.values()), config.alpha))
        return {code: min(quota, lines[code]) for code, quota in zip(lines, shares, strict=True)}

    with stage.open():
        if not stage.finished(config.processes):
            lines, chosen, files = sample_lines(stage, inputs, quotas, config.sentences, config.seed, config.processes)
            by_language = {
                code: {
                    "lines": number,
                    "sampled": chosen[code],
                    "share_before": number / sum(lines.values()),
                    "share_after": chosen[code] / sum(chosen.values()),
                }
                for code, number in lines.items()
            }
            sentences = read_lines(list(files.values()))
            if old is None:
                on_root(lambda: finish_vocabulary(stage, _train_model(sentences, config), by_language))
            else:
                on_root(partial(_finish_extended, stage, config, old, files, compared, by_language))
        on_root(lambda: discard_work(stage, SAMPLE))


def _finish_extended(
    stage: Stage,
    config: VocabConfig,
    old: Vocabulary,
    files: Mapping[str, Path],
    compared: Sequence[Input],
    by_language: Mapping[str, Any],
) -> None:
    """Extend the old vocabulary, and say how the sampled lines, and those to compare, are cut before and after."""
    model = extend(old.path, read_lines(list(files.values())), config.size, config.character_coverage)
    before, changes = old.path.read_bytes(), {}
    lines = {code: partial(read_lines, [path]) for code, path in files.items()}
    for code in sorted({source.name for source in compared}):
        of_code = [source for source in compared if source.name == code]
        lines[f"{code} of --compare" if code in files else code] = partial(_lines_of, of_code)
    for code, read in lines.items():
        cuts = cutting(before, read()), cutting(model, read())
        changes[code] = dict(zip(("before", "after"), cuts, strict=True))
        say(described(code, *cuts))
    finish_vocabulary(stage, model, by_language, {"segmentation": changes})


def _lines_of(sources: Sequence[Input]) -> Iterator[str]:
    return (line for source in sources for (side,) in _sides(source, Counts("lines")) for line in side)


def _train_model(sentences: Iterator[str], config: VocabConfig) -> bytes:
    """Bytes of a SentencePiece unigram model. Raises ValueError when the text does not allow the size asked for."""
    from data_prep.vocab.unigram import UnigramPath  # here: it loads numba, which other stages do without

    size = config.size - len(SPECIALS) - 2  # <pad> and <mask> are ids of the model, not pieces
    path = UnigramPath(count_words(sentences), config.character_coverage, size)
    trained = path.at(size).pieces
    refuse(
        [
            (
                path.characters <= size,
                f"--size is {config.size}, but the characters alone need {config.size + path.characters - size}: take "
                "a larger size, or lower --character-coverage",
            ),
            (
                len(trained) >= size,
                f"--size is {config.size}, but the sampled text allows no more than "
                f"{config.size + len(trained) - size}: take that, or more text",
            ),
        ]
    )
    return serialize(dict(sorted(trained.items(), key=lambda piece: (-piece[1], piece[0]))))


def sampled_inputs(text: TextConfig) -> tuple[tuple[Input, ...], dict[str, Any]]:
    """The inputs that lines are sampled from, and what they add to a stage's settings.

    Raises ValueError for names that cannot work, and for a named pipe.
    """
    sources = find_sources(text).values()
    inputs = tuple(chain.from_iterable(task_sources.inputs for task_sources in sources))
    refuse(
        (not path.pipe, f"{path} is a named pipe, but a vocabulary's lines are sampled from files: store it as one")
        for path in chain.from_iterable(source.paths for source in inputs)
    )
    settings = {key: value for task_sources in sources for key, value in task_sources.settings.items()}
    settings["inputs"] = _names(inputs)
    return inputs, settings


def _names(inputs: Iterable[Input]) -> list[Any]:
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
    """Choose lines by `quotas`, which gives the lines wanted of each language, `most` or less, from those it has.

    Returns both by language, and the file of the chosen lines, in input order. Raises ValueError when the inputs have
    no text.
    """
    numbers, sizes = range(len(inputs)), [source.size for source in inputs]
    bounds = _first_bounds(inputs, quotas, most)
    while True:
        read = partial(_read_lines, stage, inputs, bounds, seed)
        results = run_tasks(read, numbers, sizes, processes, "read lines")
        lines = dict(sorted((+sum((Counter(result["lines"]) for result in results), Counter[str]())).items()))
        refuse([(bool(lines), f"there is no text in {inputs[0].paths[0].folder}: a vocabulary needs some lines")])
        quota = quotas(lines)
        choose = partial(_choose_lines, stage, results, quota)
        missing = run_tasks(choose, list(lines), list(lines.values()), processes, "choose lines")
        if not any(missing):
            on_root(partial(_remove_candidates, stage))
            return lines, quota, {code: _chosen(stage, code) for code in lines}
        again = set(chain.from_iterable(missing))  # rarely: too few candidates were kept, or a file is damaged
        bounds = [{code: max(most, quota.get(code, 0)) for code, most in bound.items()} for bound in bounds]
        on_root(partial(stage.forget_tasks, map(_read_task, again)))


def _first_bounds(
    inputs: Sequence[Input], quotas: Callable[[dict[str, int]], dict[str, int]], most: int
) -> list[dict[str, int]]:
    """Most lines that each input may give of each language, guessed from its bytes."""
    sizes = [source.size // len(source.languages) + 1 for source in inputs]
    total: Counter[str] = Counter()
    for source, size in zip(inputs, sizes, strict=True):
        total.update(dict.fromkeys(source.languages, size))
    guess = quotas(dict(total))
    return [
        {code: min(_LEAST_KEPT + _SPARE * guess[code] * size // total[code], most) for code in source.languages}
        for source, size in zip(inputs, sizes, strict=True)
    ]


def _remove_candidates(stage: Stage) -> None:
    for path in (stage.folder / SAMPLE).iterdir():
        if path.is_dir():
            shutil.rmtree(path)


def read_lines(paths: Sequence[Path]) -> Iterator[str]:
    """The lines of some of the sample's files."""
    for path in paths:
        with open(path, encoding="utf-8", newline="\n") as file:
            yield from (line.rstrip("\n") for line in file)


def _sides(source: Input, read: Counts) -> Iterator[tuple[list[str], ...]]:
    """Cleaned lines that the filters leave, by side, from some text at once; `read` counts what there was."""
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
        kept = np.ones(len(sides.texts[0]), bool)
        if len(kept):
            for _, text_filter in filters:
                kept &= ~text_filter(sides)
            yield tuple(list(compress(side, kept)) for side in sides.texts)


def _read_task(number: int) -> str:
    return f"lines-{number:05d}"


def _chosen(stage: Stage, language: str) -> Path:
    return stage.folder / SAMPLE / f"{language}.txt"


def _read_lines(
    stage: Stage, inputs: Sequence[Input], bounds: Sequence[dict[str, int]], seed: int, number: int
) -> dict[str, Any]:
    """Count the lines of one input, and write those that may be chosen, and their hashes; all up to `limits`."""
    result = stage.task_result(_read_task(number))
    if result is not None:
        return result
    source, counts, read = inputs[number], Counter[str](), Counts("lines")
    keys = {code: key_of(seed, "lines", code, str(number)) for code in source.languages}
    least = {code: Least(bounds[number][code]) for code in source.languages}
    paths = [stage.folder / SAMPLE / code / f"{number:05d}.{kind}" for code in keys for kind in ("txt", "hashes")]
    with ExitStack() as stack:
        files = [stack.enter_context(new_file(path)) for path in paths]
        for sides in _sides(source, read):
            for code, side, text, numbers in zip(keys, sides, files[::2], files[1::2], strict=True):
                hashes = hashed(keys[code], counts[code] + np.arange(len(side)))
                among = least[code].among(hashes)
                text.write("".join(line[:_LINE_CHARACTERS] + "\n" for line in compress(side, among)).encode())
                numbers.write(hashes[among].tobytes())
                counts[code] += len(side)
    for words in doubts(read.paragraphs_in + 2 * read.units_in * (len(source.languages) == 2), read.repaired):
        warn(f"{' and '.join(map(str, source.paths))}: {words}")
    written = [asdict(file.shard(path, stage.folder)) for file, path in zip(files, paths, strict=True)]
    candidates = {code: written[2 * i : 2 * i + 2] for i, code in enumerate(keys)}
    limits = {code: int(kept.limit) for code, kept in least.items()}
    result = {"lines": dict(+counts), "limits": limits, "candidates": candidates}
    stage.finish_task(_read_task(number), result)
    return result


def _choose_lines(stage: Stage, found: Sequence[dict[str, Any]], wanted: dict[str, int], code: str) -> list[int]:
    """Write the chosen lines of a language; if they are not all among the candidates, the inputs to be read again."""
    if stage.task_result(f"chosen-{code}") is not None:
        return []
    of = {number: result for number, result in enumerate(found) if code in result["candidates"]}
    files = {number: [Shard(**file) for file in result["candidates"][code]] for number, result in of.items()}
    if damaged := [number for number, both in files.items() if not all(is_whole(stage.folder, f) for f in both)]:
        return damaged
    paths = [[stage.folder / file.name for file in both] for both in files.values()]
    hashes = np.concatenate([np.fromfile(path, np.uint64) for _, path in paths])
    complete = np.flatnonzero(hashes <= np.uint64(min(result["limits"][code] for result in of.values())))
    if len(complete) < wanted[code]:
        return [number for number, result in of.items() if result["limits"][code] < _ALL]
    chosen = np.zeros(len(hashes), bool)
    chosen[complete[np.argsort(hashes[complete], kind="stable")[: wanted[code]]]] = True
    with new_file(_chosen(stage, code)) as file:
        for line in compress(read_lines([path for path, _ in paths]), chosen):
            file.write(f"{line}\n".encode())
    stage.finish_task(f"chosen-{code}", {"files": [asdict(file.shard(_chosen(stage, code), stage.folder))]})
    return []


def finish_vocabulary(
    stage: Stage, model: bytes, by_language: Mapping[str, Any], counts: Mapping[str, Any] | None = None
) -> None:
    """Write a SentencePiece model, then the manifest that marks the folder as complete."""
    path = stage.folder / MODEL_FILE
    written = write_file(path, model, stage.folder)
    vocabulary = Vocabulary(path)
    shard = replace(written, rows=vocabulary.processor.get_piece_size())
    write_manifest(
        stage.folder,
        Manifest(
            stage.name,
            stage.settings,
            vocabulary.size,
            shard.sha256,
            tuple(by_language),
            (shard,),
            {"by_language": by_language} | dict(counts or {}),
        ),
    )


def discard_work(stage: Stage, *folders: str) -> None:
    """Remove the working files of a finished stage: its markers first, for they vouch for the files."""
    stage.forget_tasks(path.stem for path in (stage.folder / "tasks").glob("*.json"))
    for folder in folders:
        shutil.rmtree(stage.folder / folder, ignore_errors=True)
