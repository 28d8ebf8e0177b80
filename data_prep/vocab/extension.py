"""Add languages to a vocabulary that models were trained with: old pieces keep their ids and scores, new ones follow.

A second vocabulary is trained on the new languages' text alone. Its pieces that the old vocabulary lacks are added,
each with a hundredth of its probability in the second vocabulary. Even so an added piece is far likelier than the two
or more old pieces that it replaces, and text of the old languages is segmented almost as before
(docs/lab/tokenizer.md).
"""

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as proto

from data_prep.vocab.word_counts import count_words

_PROBABILITY_FACTOR = 0.01  # a new piece's probability in the extended vocabulary / in the second vocabulary
_SHRINK = 0.95  # size of the second vocabulary that is tried next / size tried before
_COUNTED_LINES = 10_000  # number of a language's first lines in which `segmentation` counts tokens


def room_for_pieces(path: Path, size: int) -> int:
    """The number of new pieces that bring the model at `path` to `size` ids, `<pad>` and `<mask>` included.

    Raises ValueError unless `size` is larger than the model's number of ids.
    """
    ids = len(proto.ModelProto.FromString(path.read_bytes()).pieces) + 2
    if size <= ids:
        raise ValueError(f"--size is {size}, but {path} has {ids} ids already: take a larger size")
    return size - ids


def extend(path: Path, sentences: Iterable[str], size: int, coverage: float) -> bytes:
    """Extend the SentencePiece model at `path` to `size` ids with pieces of `sentences`; returns the new model file.

    `coverage` is the share of the text's characters that get a piece. Raises ValueError if `size` is not larger than
    the model's number of ids, or if the text has too few pieces or too many characters for `size`.
    """
    from data_prep.vocab.unigram import UnigramTrainer  # imported here, because it loads numba, which takes time

    room = room_for_pieces(path, size)
    model = proto.ModelProto.FromString(path.read_bytes())
    old_pieces = {piece.piece for piece in model.pieces}
    normalize = spm.SentencePieceProcessor(model_proto=model.SerializeToString()).normalize
    trainer = UnigramTrainer(count_words(sentences, normalize=normalize), coverage, room)
    trained = trainer.prune_to(trainer.size).pieces
    new = trained.keys() - old_pieces
    characters = sum(len(piece) == 1 for piece in new)
    old_ids = size - room
    if characters > room:
        raise ValueError(
            f"--size is {size}, but with the new characters alone it is {old_ids + characters}: take a larger size, or "
            "lower --character-coverage"
        )
    if room > len(new):
        allowed = old_ids + len(new)
        advice = "lower --size, or add text" if new else "add text with other words"
        raise ValueError(f"--size is {size}, but the sampled text allows no more than {allowed}: {advice}")
    # Try ever smaller vocabularies, and keep the smallest of them with at least `room` new pieces.
    next_size = room + len(trained.keys() & old_pieces)  # leaves at least `room` new pieces
    while len(new) >= room:
        candidates = {piece: trained[piece] for piece in new}
        if len(new) == room or next_size <= characters:  # characters are never pruned
            break
        trained = trainer.prune_to(next_size).pieces
        new, next_size = trained.keys() - old_pieces, int(next_size * _SHRINK)
    # Choose all new characters, then the likeliest longer pieces.
    chosen = sorted(candidates.items(), key=lambda item: (len(item[0]) > 1, -item[1], item[0]))[:room]
    for piece, score in sorted(chosen, key=lambda item: (-item[1], item[0])):
        model.pieces.add(piece=piece, score=score + math.log(_PROBABILITY_FACTOR))
    model.trainer_spec.vocab_size = len(model.pieces)
    return bytes(model.SerializeToString(deterministic=True))


def segmentation(model: bytes, lines: Iterable[str]) -> dict[str, float]:
    """Segment the first lines with a model; returns its `tokens_per_character` and the share of `unknown` tokens."""
    processor = spm.SentencePieceProcessor(model_proto=model)
    first_lines = list(islice(lines, _COUNTED_LINES))
    ids = [token_id for line_ids in processor.encode(first_lines) for token_id in line_ids]
    characters = sum(map(len, first_lines))
    unknown = ids.count(processor.unk_id())
    return {"tokens_per_character": len(ids) / max(characters, 1), "unknown": unknown / max(len(ids), 1)}


def describe_change(code: str, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """One line of text that says how a language's segmentation changed, from two results of `segmentation`."""
    old, new = before["tokens_per_character"], after["tokens_per_character"]
    return (
        f"{code}: {old:.3f} tokens a character, {before['unknown']:.1%} of the tokens unknown; now {new:.3f} "
        f"({round(new / old - 1, 3) + 0.0 if old else 0:+.1%}) and {after['unknown']:.1%}"
    )
