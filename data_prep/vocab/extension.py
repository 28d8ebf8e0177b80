"""Add languages to a vocabulary that models were trained with: its pieces keep ids and scores, new ones follow them.

A vocabulary is trained on the new languages' text alone, and those of its pieces that the old one lacks are added. A
new piece gets a hundredth of its probability in that text. So it is still far likelier than the two or more old pieces
that it replaces, and text of the old languages is segmented almost as before (docs/lab/tokenizer.md).
"""

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as proto

from data_prep.vocab.word_counts import count_words

_SCORE_FACTOR = 0.01  # of the probability of a new piece, relative to the new text
_SHRINK = 0.95  # factor from one size that is tried for the new text's vocabulary to the next
_COUNTED_LINES = 10_000  # of each language; tokens are counted in these


def room_for_pieces(path: Path, size: int) -> int:
    """The number of new pieces that bring the SentencePiece model at `path` to `size` ids, with `<pad>` and `<mask>`.

    Raises ValueError unless `size` is larger than the model.
    """
    ids = len(proto.ModelProto.FromString(path.read_bytes()).pieces) + 2
    if size <= ids:
        raise ValueError(f"--size is {size}, but {path} has {ids} ids already: take a larger size")
    return size - ids


def extend(path: Path, sentences: Iterable[str], size: int, coverage: float) -> bytes:
    """Extend the SentencePiece model at `path` to `size` ids with pieces of `sentences`.

    Raises ValueError as `room_for_pieces` does, and if the text has too few pieces or too many characters for `size`.
    """
    from data_prep.vocab.unigram import UnigramPath  # here: it loads numba, which other stages do without

    room, model = room_for_pieces(path, size), proto.ModelProto.FromString(path.read_bytes())
    old_pieces = {piece.piece for piece in model.pieces}
    normalize = spm.SentencePieceProcessor(model_proto=model.SerializeToString()).normalize
    vocabularies = UnigramPath(count_words(sentences, normalize=normalize), coverage, room)
    new_pieces = vocabularies.at(vocabularies.size).pieces
    new = new_pieces.keys() - old_pieces
    characters = sum(len(piece) == 1 for piece in new)
    least, most = (size - room + number for number in (characters, len(new)))
    if characters > room:
        raise ValueError(
            f"--size is {size}, but with the new characters alone it is {least}: take a larger size, or lower "
            "--character-coverage"
        )
    if room > len(new):
        raise ValueError(f"--size is {size}, but the sampled text allows no more than {most}: take that")
    next_size = room + len(new_pieces.keys() & old_pieces)  # large enough for `room` new pieces
    while len(new) >= room:
        chosen = {piece: new_pieces[piece] for piece in new}
        if len(new) == room or next_size <= characters:  # characters are never pruned
            break
        new_pieces = vocabularies.at(next_size).pieces
        new, next_size = new_pieces.keys() - old_pieces, int(next_size * _SHRINK)
    # Of the last vocabulary with enough new pieces: all new characters, then the likeliest pieces.
    ranked = sorted(chosen.items(), key=lambda item: (len(item[0]) > 1, -item[1], item[0]))[:room]
    for piece, score in sorted(ranked, key=lambda item: (-item[1], item[0])):
        model.pieces.add(piece=piece, score=score + math.log(_SCORE_FACTOR))
    model.trainer_spec.vocab_size = len(model.pieces)
    return bytes(model.SerializeToString(deterministic=True))


def segmentation(model: bytes, lines: Iterable[str]) -> dict[str, float]:
    """Segment the first lines with a model: `tokens_per_character`, and the share of tokens that are `unknown`."""
    processor = spm.SentencePieceProcessor(model_proto=model)
    first_lines = list(islice(lines, _COUNTED_LINES))
    ids = [piece for line in processor.encode(first_lines) for piece in line]
    characters = sum(map(len, first_lines))
    unknown = ids.count(processor.unk_id())
    return {"tokens_per_character": len(ids) / max(characters, 1), "unknown": unknown / max(len(ids), 1)}


def describe_change(code: str, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """One line of text: how a language's segmentation changed."""
    old, new = before["tokens_per_character"], after["tokens_per_character"]
    return (
        f"{code}: {old:.3f} tokens a character and {before['unknown']:.1%} of them unknown, now {new:.3f} "
        f"({new / old - 1 if old else 0:+.1%}) and {after['unknown']:.1%}"
    )
