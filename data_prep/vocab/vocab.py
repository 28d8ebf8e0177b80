"""Stage `vocab`: train a SentencePiece unigram vocabulary, extend an existing vocabulary with new pieces, or copy one.
The lines for training are sampled from the languages by temperature."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from data_prep.filters.clean import Counts
from data_prep.parallel import MachineError
from data_prep.progress import print_stdout
from data_prep.readers import Input, find_documents
from data_prep.readers.corpus import TextConfig
from data_prep.shares import apportion, temperature_shares
from data_prep.store import Stage, write_file
from data_prep.vocab.extension import describe_change, extend, room_for_pieces, segmentation
from data_prep.vocab.line_sample import (
    SAMPLE,
    Sample,
    filtered_lines,
    input_names,
    read_lines,
    sample_lines,
    sampled_inputs,
)
from data_prep.vocab.model_file import SPECIALS, serialize
from data_prep.vocab.word_counts import count_words
from xlme_ds.data.schema import Manifest, Shard, write_manifest
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary

T = TypeVar("T")

_SETTINGS = ("size", "alpha", "sentences", "seed", "character_coverage")  # the model's bytes depend on these
_MIN_IDS = 16  # fewest ids that a vocabulary may have
CURVES = ".curves"  # folder of the vocabularies on the languages' curves, which `vocap` makes


@dataclass(frozen=True)
class VocabConfig(TextConfig):
    """Train a vocabulary, take over an existing SentencePiece model, or extend one with new languages.

    xlme prep vocab --mono mono --out vocab --size 32000
    """

    out: Path
    """Output folder: sentencepiece.model and manifest.json."""
    model: Path | None = None
    """An existing SentencePiece model, such as XLM-R's. Without text, it is taken over as it is. With text, it is
    extended up to --size: its pieces keep their ids, and new pieces from the text follow."""
    compare: Path | None = None
    """Folder of text in languages of the old --model, laid out as for --mono. The command prints how the old and the
    extended model segment this text."""
    size: int = 250002
    """Number of ids in the whole vocabulary, <pad> and <mask> included; choose fewer for a small model or corpus."""
    alpha: float = 0.7
    """Exponent of the sampling over languages: 1 keeps the shares of the text, 0 samples every language equally; a
    smaller exponent helps small languages."""
    sentences: int = 10_000_000
    """Number of lines to sample from all languages together; fewer lines need less memory. Equal lines of a language,
    such as English in many pairs, count once. A language with fewer lines than its quota gives all of them."""
    seed: int = 0
    """Seed of the sample."""
    character_coverage: float = 0.9995
    """Share of the sample's characters that get a piece of their own; the rest become <unk>."""
    processes: int = 1
    """Worker processes on this machine; the output is the same for any number. Under MPI the ranks are the workers."""

    def validate(self) -> None:
        """Raise ValueError for settings that cannot work."""
        if self.model is None and not self.has_input:
            raise ValueError(
                "no text is given: set --mono, --para or --corpus to train a vocabulary, or --model to take one over"
            )
        if self.compare is not None and (self.model is None or not self.has_input):
            raise ValueError(
                "--compare is for a vocabulary that is extended: give --model and the new languages' text too"
            )
        if not self.has_input and self.size != VocabConfig.size:
            raise ValueError(f"--size is {self.size}, but --model without text is taken as it is: leave --size out")
        if self.sentences < 1:
            raise ValueError(f"--sentences is {self.sentences}: it must be at least 1")
        require_trainable(self.size, self.character_coverage, self.alpha)


def require_trainable(size: int, character_coverage: float, alpha: float) -> None:
    """Raise ValueError for settings with which no vocabulary can be trained."""
    if size < _MIN_IDS:
        raise ValueError(f"--size is {size}: at least {_MIN_IDS} ids are needed")
    if not 0.98 <= character_coverage <= 1:
        raise ValueError(f"--character-coverage is {character_coverage}: it must be between 0.98 and 1")
    temperature_shares([1], alpha)  # raises ValueError for a wrong alpha


def run(config: VocabConfig) -> None:
    """Write the vocabulary to `config.out`. Raises ValueError for settings or inputs that cannot work."""
    config.validate()
    if config.model is None or config.has_input:
        _train(config)
    else:
        source = Vocabulary(config.model)
        stage = Stage(config.out, "vocab", {"model": source.sha256})
        write_copy = partial(finish_vocabulary, stage, source.path.read_bytes())
        write_once(stage, config.processes, lambda: {}, write_copy)  # no text is sampled, so no language has counts
    print_size(config.out)


def _train(config: VocabConfig) -> None:
    inputs, text_settings = sampled_inputs(config)
    settings = {name: getattr(config, name) for name in _SETTINGS} | text_settings
    old = None if config.model is None else Vocabulary(config.model)
    compared = [] if config.compare is None else find_documents(config.compare)
    if old is not None:
        room_for_pieces(old.path, config.size)  # raises ValueError if there is no room
        settings |= {"model": old.sha256, "compare": input_names(compared)}
    stage = Stage(config.out, "vocab", settings)

    def find_quotas(lines: dict[str, int]) -> dict[str, int]:
        """The number of lines to sample from each language. A language with m = `lines[code]` distinct lines has a
        quota in proportion to m^alpha, but at most m."""
        unbounded = apportion(config.sentences, temperature_shares(list(lines.values()), config.alpha))
        return {code: min(quota, lines[code]) for code, quota in zip(lines, unbounded, strict=True)}

    def train(sample: Sample) -> None:
        distinct, chosen, files = sample
        by_language = {
            code: {
                "lines": count,
                "sampled": chosen[code],
                "share_before": count / sum(distinct.values()),
                "share_after": chosen[code] / sum(chosen.values()),
            }
            for code, count in distinct.items()
        }
        if old is None:
            model = _train_model(read_lines(list(files.values())), config)
            finish_vocabulary(stage, model, by_language)
        else:
            _write_extended(stage, config, old, files, compared, by_language)

    sample = partial(sample_lines, stage, inputs, find_quotas, config.sentences, config.seed, config.processes)
    write_once(stage, config.processes, sample, train)


def _write_extended(
    stage: Stage,
    config: VocabConfig,
    old: Vocabulary,
    files: Mapping[str, Path],
    compared: Sequence[Input],
    by_language: Mapping[str, Any],
) -> None:
    """Write the extended vocabulary. Print, and store in the manifest, how the old and the extended vocabulary segment
    the sampled lines and the lines of --compare. Raises ValueError if the old model changed since the command began."""
    model = extend(old.path, read_lines(list(files.values())), config.size, config.character_coverage)
    readers = {code: partial(read_lines, [path]) for code, path in files.items()}
    for code in sorted({source.name for source in compared}):
        of_code = [source for source in compared if source.name == code]
        readers[f"{code} of --compare" if code in files else code] = partial(_lines_of, of_code)
    old_model = old.path.read_bytes()
    if old.sha256 != stage.settings["model"]:
        raise ValueError(f"{old.path} changed since the command began: give the command again")
    changes = {
        name: {"before": segmentation(old_model, read()), "after": segmentation(model, read())}
        for name, read in readers.items()
    }
    finish_vocabulary(stage, model, by_language, {"segmentation": changes})
    for name, change in changes.items():  # printed last, because `head` may end the output early
        print_stdout(describe_change(name, **change))


def _lines_of(sources: Sequence[Input]) -> Iterator[str]:
    """The lines that pass the filters, from the monolingual inputs `sources`."""
    return (line for source in sources for (side,) in filtered_lines(source, Counts("lines")) for line in side)


def _train_model(lines: Iterator[str], config: VocabConfig) -> bytes:
    """Train a SentencePiece unigram model; returns the bytes of its file. Raises ValueError when the text does not
    allow `config.size`."""
    from data_prep.vocab.unigram import UnigramTrainer  # imported here, because it loads numba, which takes time

    other_ids = len(SPECIALS) + 2  # two more for <pad> and <mask>, which are in no SentencePiece file
    piece_count = config.size - other_ids
    trainer = UnigramTrainer(count_words(lines), config.character_coverage, piece_count)
    trained = trainer.prune_to(piece_count).pieces
    if trainer.characters > piece_count:
        raise ValueError(
            f"--size is {config.size}, but the characters alone need {trainer.characters + other_ids}: take "
            "a larger size, or lower --character-coverage"
        )
    if len(trained) < piece_count:
        allowed = len(trained) + other_ids
        advice = "lower --size to this number, or add text" if allowed >= _MIN_IDS else "add text"
        raise ValueError(f"--size is {config.size}, but the sampled text allows no more than {allowed}: {advice}")
    likeliest_first = sorted(trained.items(), key=lambda item: (-item[1], item[0]))
    return serialize(dict(likeliest_first))


def write_once(stage: Stage, processes: int, sample: Callable[[], T], write: Callable[[T], None]) -> None:
    """Unless the folder is complete, call `sample`, and then `write`, which writes a vocabulary from the sampled text.
    Then remove the working files.

    Raises ValueError if the folder has a model that no stage wrote, such as a user's.
    """
    path = stage.folder / MODEL_FILE
    if path.exists() and not any((stage.folder / name).exists() for name in ("settings.json", "manifest.json")):
        raise ValueError(f"{path} is a file that {stage.name} did not write: move it away, or choose another --out")
    with stage.open():
        if not stage.check_finished(processes):
            text = sample()
            try:
                write(text)
            except ValueError as error:
                if not isinstance(error, MachineError):
                    # The text does not allow the settings, such as --size: the folder must accept others.
                    stage.forget_settings()
                    _discard_work(stage)
                raise
        _discard_work(stage)


def _discard_work(stage: Stage) -> None:
    """Remove the working files of a stage that has ended. The tasks' markers list these files, so the markers are
    removed first."""
    stage.remove_all_markers()
    for name in (SAMPLE, CURVES):
        shutil.rmtree(stage.folder / name, ignore_errors=True)


def finish_vocabulary(
    stage: Stage,
    model: bytes,
    by_language: Mapping[str, Any],
    counts: Mapping[str, Any] | None = None,
    other_files: Sequence[Shard] = (),
) -> None:
    """Write the bytes of a SentencePiece model, then the manifest, which marks the folder as complete."""
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
            (shard, *other_files),
            {"by_language": by_language} | dict(counts or {}),
        ),
    )


def print_size(out: Path) -> None:
    """Print how many ids the vocabulary in `out` has."""
    vocabulary = Vocabulary(out)
    print_stdout(f"{vocabulary.path}: {vocabulary.size:,} ids")
