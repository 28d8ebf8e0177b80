"""Write and read the SentencePiece model files of unigram vocabularies."""

from collections.abc import Mapping

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as proto

from data_prep.vocab.word_counts import NORMALIZATION

SPECIALS = ("<unk>", "<s>", "</s>")  # ids 0, 1 and 2


def serialize(pieces: Mapping[str, float]) -> bytes:
    """The bytes of a model file that has <unk>, <s> and </s>, then `pieces` in their order. `pieces` maps each piece to
    the logarithm of its probability."""
    normalizer = spm.SentencePieceNormalizer(rule_name=NORMALIZATION)
    model = proto.ModelProto.FromString(normalizer.serialized_model_proto())
    # The normaliser's model has the flags of a tool that only normalises. Set the flags that a trained model has.
    model.normalizer_spec.MergeFrom(
        proto.NormalizerSpec(add_dummy_prefix=True, remove_extra_whitespaces=True, escape_whitespaces=True)
    )
    types = proto.ModelProto.SentencePiece
    for piece in SPECIALS:
        model.pieces.add(piece=piece, score=0.0, type=types.UNKNOWN if piece == "<unk>" else types.CONTROL)
    for piece, score in pieces.items():
        model.pieces.add(piece=piece, score=score)
    unigram, size = proto.TrainerSpec.UNIGRAM, len(model.pieces)
    model.trainer_spec.MergeFrom(
        proto.TrainerSpec(model_type=unigram, vocab_size=size, unk_id=0, bos_id=1, eos_id=2, pad_id=-1)
    )
    return bytes(model.SerializeToString(deterministic=True))


def parse(model: bytes) -> dict[str, float]:
    """The pieces of a model file with their scores (log-probabilities), without SPECIALS."""
    processor = spm.SentencePieceProcessor(model_proto=model)
    return {processor.id_to_piece(i): processor.get_score(i) for i in range(len(SPECIALS), processor.get_piece_size())}
