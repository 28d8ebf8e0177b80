"""One language's curve: nested unigram vocabularies of falling size, and the average log-probability (ALP) of each.

VoCap (Zheng et al., 2021) trains a vocabulary from nothing at each of fifty sizes. We follow one pruning path instead,
as SentencePiece itself does on its way from a million seeds to the size asked for: a vocabulary is trained
from the pieces of the next larger one, so each is a subset of those before it. The path ends at the characters alone.
"""

import io
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as proto

Pieces = dict[str, float]  # piece -> natural logarithm of its probability

SPECIALS = ("<unk>", "<s>", "</s>")  # SentencePiece's first ids
_NORMALIZATION = "nmt_nfkc"
_SEED_FACTOR = 1.25  # the first training goes to this times the largest size: room to prune by likelihood
_SEED_CHARACTERS = 10_000_000  # of all occurrences in the first training; its suffix array takes 20 to 40 bytes of each
_MEMORY = 900_000_000  # bytes for a language's distinct words, here and in SentencePiece
_WORD_BYTES, _CHARACTER_BYTES = 100, 20  # of each, a little more than measured
_LEAST_COUNT = 2.0  # expected occurrences of a piece longer than a character: a piece used once is memorized
_LONGEST_WORD = 16_384  # bytes; a line gives at most 1,000 characters
_UNKNOWN_PENALTY = 10.0  # as in SentencePiece: a run of unknown characters scores this less than the least likely piece
_WORDS = 50_000  # segmented at once


@dataclass(frozen=True)
class WordCounts:
    """Distinct normalised words with their occurrences, sorted; `sentences` is the number of lines they come from.

    No piece crosses white space, so training on words and their counts is training on the sentences, and a sentence's
    best segmentation is that of its words. A language written without spaces has whole sentences as words.
    """

    words: list[str]
    counts: list[int]
    sentences: int


def count_words(lines: Iterable[str], memory: float = math.inf) -> WordCounts:
    """Normalise lines of text and count their words.

    Raises MemoryError when training on them would take more than `memory` bytes.
    """
    normalize = spm.SentencePieceNormalizer(rule_name=_NORMALIZATION).normalize
    counts: Counter[str] = Counter()
    sentences = needed = 0
    for line in lines:
        words = [word for word in normalize(line).split("▁") if word]
        needed += sum(_WORD_BYTES + _CHARACTER_BYTES * len(word) for word in set(words) if word not in counts)
        if needed > memory:
            raise MemoryError
        counts.update(words)
        sentences += bool(words)
    return WordCounts(sorted(counts), [counts[word] for word in sorted(counts)], sentences)


def fitting_words(read: Callable[[], Iterable[str]]) -> WordCounts:
    """The words of all lines; or of every second, fourth or eighth … where training on more takes too much memory."""
    step = 1
    while True:
        try:
            return count_words(islice(read(), 0, None, step), _MEMORY)
        except MemoryError:
            step *= 2


@dataclass(frozen=True)
class CurvePoint:
    """A vocabulary on the curve: `alp` is the mean over sentences of their best segmentation's log-probability."""

    pieces: Pieces
    alp: float
    tokens: int


def curve(text: WordCounts, largest: int, least: int, shrink: float, coverage: float) -> Iterator[CurvePoint]:
    """Vocabularies from `largest` pieces by factors of `shrink` to `least` and last the characters, specials not
    counted.

    A text that has fewer pieces than `largest` starts where it can. Each one's pieces are among those of the one
    before.
    """
    point = measure(text, train(seed_text(text), round(largest * _SEED_FACTOR), coverage))
    frequent = math.log(_LEAST_COUNT / point.tokens)
    kept = {piece: score for piece, score in point.pieces.items() if len(piece) == 1 or score >= frequent}
    if _characters(kept) >= largest:
        raise _too_many_characters(_characters(kept))
    point = CurvePoint(kept, point.alp, point.tokens)
    first = min(largest, len(kept))
    grid = [round(largest * shrink**k) for k in range(math.ceil(math.log(least / largest, shrink)) + 1)]
    for size in [first, *(size for size in grid if least <= size < first)]:
        if size > _characters(point.pieces):
            point = measure(text, train(text, size, coverage, point))
            yield point
    yield measure(text, train(text, _characters(point.pieces), coverage, point))


def _characters(pieces: Pieces) -> int:
    return sum(len(piece) == 1 for piece in pieces)


def _too_many_characters(number: int) -> ValueError:
    return ValueError(
        f"--largest is too small for a language with {number} characters: take more, or lower --character-coverage"
    )


def seed_text(text: WordCounts) -> WordCounts:
    """The first training's text, which SentencePiece lays out with every word as often as it occurs.

    Counts are divided until that fits, but two occurrences stay two; then the words that occur most are taken.
    """
    counts = np.array(text.counts, np.int64)
    lengths = np.fromiter(map(len, text.words), np.int64, len(text.words))
    divided, divisor = counts, 1
    while (lengths * divided).sum() > _SEED_CHARACTERS and divided.max() > 2:
        divisor *= 2
        divided = np.minimum(counts, np.maximum(2, counts // divisor))
    ranked = np.argsort(-counts, kind="stable")
    kept = np.sort(ranked[np.cumsum((lengths * divided)[ranked]) <= _SEED_CHARACTERS]).tolist()
    return WordCounts([text.words[i] for i in kept], divided[kept].tolist(), text.sentences)


def train(text: WordCounts, size: int, coverage: float, seeds: CurvePoint | None = None) -> Pieces:
    """A unigram vocabulary of at most `size` pieces (specials not counted), from `seeds` or from all substrings."""
    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="\n", suffix=".seeds") as file:
        options: dict[str, Any] = {}
        if seeds is not None:
            options["seed_sentencepieces_file"] = file.name
            file.writelines(
                f"{piece}\t{max(1, round(math.exp(score) * seeds.tokens))}\n"
                for piece, score in seeds.pieces.items()
                if len(piece) > 1  # the characters are always seeds
            )
            file.flush()
        try:
            spm.SentencePieceTrainer.train(
                sentence_iterator=(f"{word}\t{count}" for word, count in zip(text.words, text.counts, strict=True)),
                input_format="tsv",
                model_writer=model,
                model_type="unigram",
                vocab_size=size + len(SPECIALS),
                hard_vocab_limit=False,
                character_coverage=coverage,
                normalization_rule_name="identity",  # the words are normalised
                unk_id=0,
                bos_id=1,
                eos_id=2,
                pad_id=-1,
                num_threads=1,  # languages are trained in parallel
                max_sentence_length=_LONGEST_WORD,
                input_sentence_size=0,
                shuffle_input_sentence=False,
                minloglevel=2,
                **options,
            )
        except RuntimeError as error:
            if found := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
                raise _too_many_characters(int(found[1]) - len(SPECIALS)) from None
            raise
    return parse(model.getvalue())


def measure(text: WordCounts, pieces: Pieces) -> CurvePoint:
    """The point of `pieces`: every word's best segmentation, times its occurrences."""
    processor = spm.SentencePieceProcessor(model_proto=serialize(pieces, "identity"))
    scores = np.array([0.0] * len(SPECIALS) + list(pieces.values()))
    scores[0] = min(pieces.values()) - _UNKNOWN_PENALTY
    total, tokens = 0.0, 0
    for start in range(0, len(text.words), _WORDS):
        ids = processor.encode(text.words[start : start + _WORDS])
        counts = np.repeat(text.counts[start : start + _WORDS], [len(word) for word in ids])
        total += float(np.dot(scores[np.concatenate(ids).astype(np.int64)], counts))
        tokens += int(counts.sum())
    return CurvePoint(pieces, total / text.sentences, tokens)


def serialize(pieces: Pieces, normalization: str = _NORMALIZATION) -> bytes:
    """A SentencePiece model file: <unk>, <s>, </s>, then `pieces` in their order."""
    model = proto.ModelProto()
    model.ParseFromString(spm.SentencePieceNormalizer(rule_name=normalization).serialized_model_proto())
    # the normaliser's own flags are those of a tool that only normalises; these are a trained model's
    model.normalizer_spec.MergeFrom(
        proto.NormalizerSpec(add_dummy_prefix=True, remove_extra_whitespaces=True, escape_whitespaces=True)
    )
    kind = proto.ModelProto.SentencePiece
    for piece in SPECIALS:
        model.pieces.add(piece=piece, score=0.0, type=kind.UNKNOWN if piece == "<unk>" else kind.CONTROL)
    for piece, score in pieces.items():
        model.pieces.add(piece=piece, score=score)
    unigram, size = proto.TrainerSpec.UNIGRAM, len(model.pieces)
    trainer = proto.TrainerSpec(model_type=unigram, vocab_size=size, unk_id=0, bos_id=1, eos_id=2, pad_id=-1)
    model.trainer_spec.MergeFrom(trainer)
    return bytes(model.SerializeToString(deterministic=True))


def parse(model: bytes) -> Pieces:
    """The pieces of a model file with their scores, without the specials."""
    processor = spm.SentencePieceProcessor(model_proto=model)
    return {processor.id_to_piece(i): processor.get_score(i) for i in range(len(SPECIALS), processor.get_piece_size())}
