"""Stage `vocab`: a SentencePiece unigram vocabulary from lines sampled by temperature over languages."""

import io
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sentencepiece as spm

from data_prep.corpus import TextConfig
from data_prep.line_sample import SAMPLE, sample_lines, sampled_inputs
from data_prep.parallel import on_root
from data_prep.progress import say
from data_prep.store import Stage, write_file
from xlme_ds.data.schema import Manifest, write_manifest
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary

_SETTINGS = ("size", "alpha", "sentences", "seed", "character_coverage")  # those that shape the bytes
_THREADS = 16  # a constant: SentencePiece sums by thread, so another number gives other bytes


@dataclass(frozen=True)
class VocabConfig(TextConfig):
    """Train a vocabulary, or take over an existing SentencePiece model."""

    out: Path
    """Output folder: sentencepiece.model and manifest.json."""
    model: Path | None = None
    """An existing SentencePiece model, such as XLM-R's, to take instead of training one."""
    size: int = 250002
    """Ids of the full vocabulary as the model sees it, <pad> and <mask> included."""
    alpha: float = 0.7
    """Exponent of the sampling over languages: 1 natural, 0 uniform."""
    sentences: int = 10_000_000
    """Lines to sample over all languages; a language with fewer than its quota gives all it has, once."""
    seed: int = 0
    """Seed of the sample."""
    character_coverage: float = 0.9995
    """Share of the characters of the sample that get a piece of their own."""
    processes: int = 1
    """Local processes for reading; the output is the same for any number. Not used under MPI."""

    def validate(self) -> None:
        """Raise ValueError for settings that cannot work."""
        if self.model is None and not self.names_text:
            raise ValueError(
                "no text is given: set --mono, --para or --corpus to train a vocabulary, or --model to take one over"
            )
        if self.model is not None and self.names_text:
            raise ValueError(
                "--model takes a vocabulary over as it is: leave out --mono, --para and --corpus, or leave out --model"
            )
        if self.size < 16 or self.sentences < 1:
            raise ValueError(f"--size is {self.size} and --sentences {self.sentences}: at least 16 and 1 are needed")
        if not 0.98 <= self.character_coverage <= 1:
            raise ValueError(f"--character-coverage is {self.character_coverage}: it must be between 0.98 and 1")


def run(config: VocabConfig) -> None:
    """Write `config.out`. Raises ValueError for settings or inputs that cannot work."""
    on_root(config.validate)
    if config.model is not None:
        _take_over(config, config.model)
    else:
        _train(config)
    on_root(lambda: say_size(config.out))


def say_size(out: Path) -> None:
    """Print how many ids the vocabulary in `out` has."""
    vocabulary = Vocabulary(out)
    say(f"{vocabulary.path}: {vocabulary.size:,} ids")


def _take_over(config: VocabConfig, model: Path) -> None:
    source = on_root(lambda: Vocabulary(model))
    stage = Stage(config.out, "vocab", {"model": source.sha256})
    with stage.open():
        if not stage.finished(config.processes):
            on_root(lambda: finish_vocabulary(stage, source.path.read_bytes(), {}))


def _train(config: VocabConfig) -> None:
    inputs, text_settings = on_root(lambda: sampled_inputs(config))
    stage = Stage(config.out, "vocab", {name: getattr(config, name) for name in _SETTINGS} | text_settings)
    with stage.open():
        if not stage.finished(config.processes):
            lines, by_language = sample_lines(
                stage, inputs, config.sentences, config.alpha, config.seed, config.processes
            )
            on_root(lambda: finish_vocabulary(stage, train_model(lines, config), by_language))


def train_model(sentences: Iterator[str], config: VocabConfig) -> bytes:
    """Bytes of a SentencePiece unigram model. Raises ValueError when the text does not allow the size asked for."""
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=sentences,
            model_writer=model,
            model_type="unigram",
            vocab_size=config.size - 2,  # <pad> and <mask> are ids of the model, not pieces
            character_coverage=config.character_coverage,
            normalization_rule_name="nmt_nfkc",
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=_THREADS,
            input_sentence_size=0,
            shuffle_input_sentence=False,
            train_extremely_large_corpus=config.sentences > 10_000_000,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise _size_error(str(error), config.size) or error from None
    return model.getvalue()


def _size_error(words: str, size: int) -> ValueError | None:
    if found := re.search(r"value <= (\d+)", words):
        return ValueError(
            f"--size is {size}, but the sampled text allows no more than {int(found[1]) + 2}: take that, or more text"
        )
    if found := re.search(r"required_chars\D*\d+\D+(\d+)", words):
        return ValueError(
            f"--size is {size}, but the characters alone need more than {int(found[1]) + 2}: take a larger size, "
            "or lower --character-coverage"
        )
    return None


def finish_vocabulary(stage: Stage, model: bytes, by_language: Mapping[str, Any]) -> None:
    """Write a SentencePiece model, then the manifest that marks the folder as complete."""
    path = stage.folder / MODEL_FILE
    written = write_file(path, model, stage.folder)
    vocabulary = Vocabulary(path)
    shard = replace(written, rows=vocabulary.processor.get_piece_size())
    shutil.rmtree(stage.folder / SAMPLE, ignore_errors=True)  # before the marker, so that a killed run leaves none
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
