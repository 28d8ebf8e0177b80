"""New languages for a vocabulary that models were trained with: its pieces keep ids and scores, new ones follow them.

The new pieces are those of a vocabulary trained on the new languages' text alone which the old one does not have. A new
piece's score is that of a hundredth of its probability there: it is still far likelier than the two or more old pieces
that it takes the place of, and text of the old languages is cut almost as before (docs/lab/tokenizer.md).
"""

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as proto

from data_prep.vocab.word_counts import count_words

_SHARE = 0.01  # of its probability in the new text that a new piece gets
_SHRINK = 0.95  # from one size of the new text's vocabulary to the next that is tried
_LINES = 10_000  # of a language, whose tokens are counted


def room_in(path: Path, size: int) -> int:
    """Number of new pieces with which the SentencePiece model at `path` has `size` ids, `<pad>` and `<mask>` included.

    Raises ValueError for a size that it has already.
    """
    ids = len(proto.ModelProto.FromString(path.read_bytes()).pieces) + 2
    if size <= ids:
        raise ValueError(f"--size is {size}, but {path} has {ids} ids already: take a larger size")
    return size - ids


def extend(path: Path, sentences: Iterable[str], size: int, coverage: float) -> bytes:
    """The SentencePiece model at `path` with new pieces of `sentences`, `size` ids in all.

    Raises ValueError as `room_in`, and for a size that the text does not allow.
    """
    from data_prep.vocab.unigram import UnigramPath  # here: it loads numba, which other stages do without

    room, model = room_in(path, size), proto.ModelProto.FromString(path.read_bytes())
    old_pieces = {piece.piece for piece in model.pieces}
    normalize = spm.SentencePieceProcessor(model_proto=model.SerializeToString()).normalize
    text = UnigramPath(count_words(sentences, normalize=normalize), coverage, room)
    new_pieces = text.at(text.size).pieces
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
    smaller = room + len(new_pieces.keys() & old_pieces)  # this many have room for all new ones wanted
    while len(new) >= room:
        chosen = {piece: new_pieces[piece] for piece in new}
        if len(new) == room or smaller <= characters:  # no character is ever dropped
            break
        new_pieces = text.at(smaller).pieces
        new, smaller = new_pieces.keys() - old_pieces, int(smaller * _SHRINK)
    # The last vocabulary that had enough: its characters, then the most likely.
    ranked = sorted(chosen.items(), key=lambda item: (len(item[0]) > 1, -item[1], item[0]))[:room]
    for piece, score in sorted(ranked, key=lambda item: (-item[1], item[0])):
        model.pieces.add(piece=piece, score=score + math.log(_SHARE))
    model.trainer_spec.vocab_size = len(model.pieces)
    return bytes(model.SerializeToString(deterministic=True))


def cutting(model: bytes, lines: Iterable[str]) -> dict[str, float]:
    """`tokens_per_character` and the share of `unknown` tokens of the first lines, as a model cuts them."""
    processor = spm.SentencePieceProcessor(model_proto=model)
    some = list(islice(lines, _LINES))
    ids = [piece for line in processor.encode(some) for piece in line]
    characters = sum(map(len, some))
    unknown = ids.count(processor.unk_id())
    return {"tokens_per_character": len(ids) / max(characters, 1), "unknown": unknown / max(len(ids), 1)}


def described(code: str, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """One line that says how a language's segmentation changed."""
    old, new = before["tokens_per_character"], after["tokens_per_character"]
    return (
        f"{code}: {old:.3f} tokens a character and {before['unknown']:.1%} of them unknown, now {new:.3f} "
        f"({new / old - 1 if old else 0:+.1%}) and {after['unknown']:.1%}"
    )
