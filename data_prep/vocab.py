"""Stage `vocab`: a SentencePiece unigram vocabulary from lines sampled by temperature over languages.

The sample is exact, without replacement, and takes constant memory: lines are counted once, then read again and chosen
by a keyed permutation of their numbers, so it is the same whatever the number of processes. A line is a paragraph, or a
side of a pair, that the filters of its corpus leave. Filters that count tokens need a vocabulary and are left out here;
equal lines stay.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.clean import Counts, Sides, doubts, make_filters
from data_prep.corpus import TextConfig, find_sources
from data_prep.model_file import SPECIALS, serialize
from data_prep.parallel import on_root, run_tasks
from data_prep.progress import refuse, say, warn
from data_prep.readers import DOCUMENT_READERS, PAIR_READERS, READERS, Input
from data_prep.sampling import apportion, key_of, permute, temperature_shares
from data_prep.store import Stage, new_file, write_file
from data_prep.word_counts import count_words
from xlme_ds.data.schema import Manifest, write_manifest
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary

_SAMPLE = "sample"  # folder of the chosen lines, sample/<language>/<input>.txt in the stage's folder
_LINE_CHARACTERS = 1000  # of a line count; the rest would change little
_BLOCK = 1 << 18  # bytes of text that are filtered and chosen from at once
_SETTINGS = ("size", "alpha", "sentences", "seed", "character_coverage")  # those that shape the bytes


@dataclass(frozen=True)
class VocabConfig(TextConfig):
    """Train a vocabulary, or take over an existing SentencePiece model."""

    out: Path
    """Output folder: sentencepiece.model and manifest.json."""
    model: Path | None = None
    """An existing SentencePiece model, such as XLM-R's, to take instead of training one."""
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
                    self.model is None or not self.names_text,
                    "--model takes a vocabulary over as it is: leave out --mono, --para and --corpus, or leave out "
                    "--model",
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


def run(config: VocabConfig) -> None:
    """Write `config.out`. Raises ValueError for settings or inputs that cannot work."""
    on_root(config.validate)
    if config.model is None:
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
    stage = Stage(config.out, "vocab", {name: getattr(config, name) for name in _SETTINGS} | text_settings)

    def quotas(lines: dict[str, int]) -> dict[str, int]:
        """m_j^alpha of each language's m_j lines; one with fewer than its quota gives all, once."""
        shares = apportion(config.sentences, temperature_shares(list(lines.values()), config.alpha))
        return {code: min(quota, lines[code]) for code, quota in zip(lines, shares, strict=True)}

    with stage.open():
        if not stage.finished(config.processes):
            lines, chosen, files = sample_lines(stage, inputs, quotas, config.seed, config.processes)
            by_language = {
                code: {
                    "lines": number,
                    "sampled": chosen[code],
                    "share_before": number / sum(lines.values()),
                    "share_after": chosen[code] / sum(chosen.values()),
                }
                for code, number in lines.items()
            }
            sentences = read_lines(list(chain.from_iterable(paths.values() for paths in files)))
            on_root(lambda: finish_vocabulary(stage, _train_model(sentences, config), by_language))


def _train_model(sentences: Iterator[str], config: VocabConfig) -> bytes:
    """Bytes of a SentencePiece unigram model. Raises ValueError when the text does not allow the size asked for."""
    from data_prep.unigram import UnigramPath  # here: it loads numba, which other stages do without

    size = config.size - len(SPECIALS) - 2  # <pad> and <mask> are ids of the model, not pieces
    path = UnigramPath(count_words(sentences), config.character_coverage)
    found = path.at(size).pieces
    refuse(
        [
            (
                path.characters <= size,
                f"--size is {config.size}, but the characters alone need {config.size + path.characters - size}: take "
                "a larger size, or lower --character-coverage",
            ),
            (
                len(found) >= size,
                f"--size is {config.size}, but the sampled text allows no more than {config.size + len(found) - size}: "
                "take that, or more text",
            ),
        ]
    )
    return serialize(dict(sorted(found.items(), key=lambda piece: (-piece[1], piece[0]))))


def sampled_inputs(text: TextConfig) -> tuple[tuple[Input, ...], dict[str, Any]]:
    """The inputs that lines are sampled from, and what they add to a stage's settings.

    Raises ValueError for names that cannot work, and for a named pipe.
    """
    sources = find_sources(text).values()
    inputs = tuple(chain.from_iterable(found.inputs for found in sources))
    refuse(
        (not path.pipe, f"{path} is a named pipe, but lines are sampled in two passes: store it as a file")
        for path in chain.from_iterable(source.paths for source in inputs)
    )
    settings = {key: value for found in sources for key, value in found.settings.items()}
    settings["inputs"] = [
        [source.name, [list(file) for file in source.files], *([source.corpus] if source.corpus else [])]
        for source in inputs
    ]
    return inputs, settings


def sample_lines(
    stage: Stage,
    inputs: Sequence[Input],
    quotas: Callable[[dict[str, int]], dict[str, int]],
    seed: int,
    processes: int,
) -> tuple[dict[str, int], dict[str, int], list[dict[str, Path]]]:
    """Choose lines by `quotas`, which gives the lines wanted of each language from the lines that it has.

    Returns both by language, and the files of the chosen lines by language, an entry an input. Raises ValueError when
    the inputs have no text.
    """
    numbers, sizes = range(len(inputs)), [source.size for source in inputs]
    counted = run_tasks(partial(_count_lines, stage, inputs), numbers, sizes, processes, "count lines")
    lines = dict(sorted(sum(counted, Counter[str]()).items()))
    refuse([(bool(lines), f"there is no text in {inputs[0].paths[0].folder}: a vocabulary needs some lines")])
    wanted = quotas(lines)
    choose = partial(_choose_lines, stage, inputs, counted, lines, wanted, seed)
    return lines, wanted, run_tasks(choose, numbers, sizes, processes, "sample lines")


def read_lines(paths: Sequence[Path]) -> Iterator[str]:
    """The lines of some of the sample's files."""
    for path in paths:
        with open(path, encoding="utf-8", newline="\n") as file:
            yield from (line.rstrip("\n") for line in file)


def _sides(source: Input, read: Counts) -> Iterator[tuple[list[str], ...]]:
    """Cleaned lines that the filters leave, by side, from some text at once; `read` counts what there was."""
    task = "mono" if len(source.languages) == 1 else "para"
    filters = make_filters(source.filters, task, source.corpus).text
    for block in READERS[source.format].blocks(source, _BLOCK):
        if task == "mono":
            paragraphs = DOCUMENT_READERS[source.format].paragraphs(source, block, read)
            sides = Sides(([line for lines, _ in paragraphs for line in lines],), source.languages)
        else:
            pairs = list(PAIR_READERS[source.format].pairs(source, block, read))
            scores = np.array([np.nan if score is None else score for _, _, score in pairs])
            sides = Sides(([a for a, _, _ in pairs], [b for _, b, _ in pairs]), source.languages, scores)
        kept = np.ones(len(sides.texts[0]), bool)
        if len(kept):
            for _, text_filter in filters:
                kept &= ~text_filter(sides)
            yield tuple(list(compress(side, kept)) for side in sides.texts)


def _count_lines(stage: Stage, inputs: Sequence[Input], number: int) -> Counter[str]:
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
    return Counter(result)


def _choose_lines(
    stage: Stage,
    inputs: Sequence[Input],
    counted: Sequence[Counter[str]],
    lines: dict[str, int],
    quotas: dict[str, int],
    seed: int,
    number: int,
) -> dict[str, Path]:
    """Write the chosen lines of one input; a language's lines are numbered through all inputs."""
    paths = {code: stage.folder / _SAMPLE / code / f"{number:05d}.txt" for code in inputs[number].languages}
    name = f"{_SAMPLE}-{number:05d}"
    if stage.task_result(name) is not None:
        return paths
    done = sum(counted[:number], Counter[str]())
    with ExitStack() as stack:
        files = [stack.enter_context(new_file(path)) for path in paths.values()]
        for sides in _sides(inputs[number], Counts("lines")):
            for language, side, file in zip(paths, sides, files, strict=True):
                if side:
                    index = done[language] + np.arange(len(side))
                    chosen = permute(index, lines[language], key_of(seed, "vocab", language)) < quotas[language]
                    text = "".join(line[:_LINE_CHARACTERS] + "\n" for line in compress(side, chosen))
                    file.write(text.encode())
                    done[language] += len(side)
    written = (file.shard(path, stage.folder) for file, path in zip(files, paths.values(), strict=True))
    stage.finish_task(name, {"files": list(map(asdict, written))})
    return paths


def finish_vocabulary(stage: Stage, model: bytes, by_language: Mapping[str, Any]) -> None:
    """Write a SentencePiece model, then the manifest that marks the folder as complete."""
    path = stage.folder / MODEL_FILE
    written = write_file(path, model, stage.folder)
    vocabulary = Vocabulary(path)
    shard = replace(written, rows=vocabulary.processor.get_piece_size())
    shutil.rmtree(stage.folder / _SAMPLE, ignore_errors=True)  # before the marker, so that a killed run leaves none
    write_manifest(
        stage.folder,
        Manifest(
            stage.name,
            stage.settings,
            vocabulary.size,
            shard.sha256,
            tuple(by_language),
            (shard,),
            {"by_language": by_language},
        ),
    )
