"""Segmentation next to SentencePiece's own, id for id, where rounding decides."""

import lzma
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import sentencepiece as spm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as proto

from tests.launch import ROOT
from tests.rows import train_vocabulary
from xlme_ds.data.segment import Segmenter
from xlme_ds.data.vocabulary import Vocabulary

SYLLABLES = [
    "a",
    "ab",
    "aba",
    "b",
    "ba",
    "bab",
    "aa",
    "bb",
    "abab",
    "ü",
    "üa",
    "語",
    "語語",
    "語a",
    "▁",
    "▁a",
    "▁ab",
    "▁語",
    ".",
]
SHARED = ROOT.parent / "shared/data/corpus/mono"


@pytest.fixture(scope="module")
def ties() -> spm.SentencePieceProcessor:
    """A model of which many segmentations have sums that only rounding tells apart: scores are multiples of 0.1."""
    model = proto.ModelProto()
    for piece, kind in (("<unk>", "UNKNOWN"), ("<s>", "CONTROL"), ("</s>", "CONTROL")):
        model.pieces.add(piece=piece, type=getattr(proto.ModelProto.SentencePiece, kind))
    for number, piece in enumerate(SYLLABLES):
        model.pieces.add(piece=piece, score=-0.1 * (1 + len(piece) + number % 3))
    model.trainer_spec.model_type = proto.TrainerSpec.UNIGRAM
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    return spm.SentencePieceProcessor(model_proto=model.SerializeToString())


def same(segmenter: Segmenter, processor: spm.SentencePieceProcessor, lines: Sequence[str]) -> None:
    ids, numbers = segmenter([line.encode() for line in lines])
    expected = [Vocabulary.from_sentencepiece_ids(processor.encode(line)) for line in lines]
    assert numbers.tolist() == list(map(len, expected))
    assert np.array_equal(ids, np.concatenate([np.empty(0, np.int32), *expected]))


LINES = st.lists(st.text(st.sampled_from("abbaü語語x▁▁.\0🙂"), max_size=40), max_size=6)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES)
def test_any_text(ties: spm.SentencePieceProcessor, lines: list[str]) -> None:
    same(Segmenter(ties, words=16), ties, lines)


def test_words_that_are_remembered(ties: spm.SentencePieceProcessor) -> None:
    """Long lines, whose sums lose digits at their end, so that a word is segmented in another way there than at the
    start; and more words than fit, of up to 70 bytes."""
    draw = random.Random(5)
    words = ["▁" + "".join(draw.choices("aabb語ü.x", k=draw.randint(1, 23))) for _ in range(400)]
    starts = [ties.encode(word) for word in words]
    moved = 0
    segmenter, small = Segmenter(ties), Segmenter(ties, words=64)
    for _ in range(30):
        chosen = draw.choices(range(len(words)), k=1500)
        line = "".join(words[n] for n in chosen)
        same(segmenter, ties, [line, line[:100], line])
        same(small, ties, [line, line[:100]])
        moved += ties.encode(line) != [piece for n in chosen for piece in starts[n]]
    assert moved == 30  # else remembering would need no care


def test_sums_that_begin_at_0_again(ties: spm.SentencePieceProcessor) -> None:
    """SentencePiece begins the sum at 0 again where it falls below -100,000, also inside a word."""
    draw = random.Random(6)
    words = ["▁" + "".join(draw.choices("ab.x", k=draw.randint(1, 20))) for _ in range(400)]
    segmenter = Segmenter(ties)
    for _ in range(5):
        line = "".join(draw.choices(words, k=10_000))
        same(segmenter, ties, [line, line[2:]])


def test_a_trained_vocabulary(tmp_path: Path) -> None:
    """Of the pieces of the trained model none is missing in the trie; each alone is what SentencePiece makes of it."""
    vocabulary = train_vocabulary(tmp_path / "vocab")
    pieces = [vocabulary.piece(token) for token in range(4, vocabulary.mask_id)]
    model = proto.ModelProto.FromString(vocabulary.path.read_bytes())
    model.normalizer_spec.CopyFrom(proto.NormalizerSpec(add_dummy_prefix=False, remove_extra_whitespaces=False))
    processor = spm.SentencePieceProcessor(model_proto=model.SerializeToString())
    same(Segmenter(vocabulary.processor), processor, pieces)


@pytest.mark.skipif(not SHARED.exists(), reason="the shared corpus is not there")
def test_real_text(tmp_path: Path) -> None:
    lines = []
    for path in sorted(SHARED.glob("*.txt.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            lines += [line.rstrip("\n") for line, _ in zip(file, range(300), strict=False)]
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines[::4]), model_prefix=str(tmp_path / "sentencepiece"), vocab_size=12_000,
        character_coverage=0.9995, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    vocabulary = Vocabulary(tmp_path)
    ids, numbers = vocabulary.encode_lines(lines)
    expected = [Vocabulary.from_sentencepiece_ids(vocabulary.processor.encode(line)) for line in lines]
    assert numbers.tolist() == list(map(len, expected)) and np.array_equal(ids, np.concatenate(expected))
