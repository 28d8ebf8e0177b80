"""SentencePiece unigram models from pieces and their scores, and back."""

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as proto

NORMALIZATION = "nmt_nfkc"
SPECIALS = ("<unk>", "<s>", "</s>")  # SentencePiece's first ids

Pieces = dict[str, float]  # piece -> natural logarithm of its probability


def serialize(pieces: Pieces, normalization: str = NORMALIZATION) -> bytes:
    """A SentencePiece model file: <unk>, <s>, </s>, then `pieces` in their order."""
    model = proto.ModelProto()
    model.ParseFromString(spm.SentencePieceNormalizer(rule_name=normalization).serialized_model_proto())
    # the normaliser's own flags are those of a tool that only normalises; these are a trained model's
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = True
    model.normalizer_spec.escape_whitespaces = True
    kind = proto.ModelProto.SentencePiece
    for piece in SPECIALS:
        model.pieces.add(piece=piece, score=0.0, type=kind.UNKNOWN if piece == "<unk>" else kind.CONTROL)
    for piece, score in pieces.items():
        model.pieces.add(piece=piece, score=score)
    trainer = model.trainer_spec
    trainer.model_type = proto.TrainerSpec.UNIGRAM
    trainer.vocab_size = len(model.pieces)
    trainer.unk_id, trainer.bos_id, trainer.eos_id, trainer.pad_id = 0, 1, 2, -1
    return bytes(model.SerializeToString(deterministic=True))


def parse(model: bytes) -> Pieces:
    """The pieces of a model file with their scores, without the specials."""
    processor = spm.SentencePieceProcessor(model_proto=model)
    return {processor.id_to_piece(i): processor.get_score(i) for i in range(len(SPECIALS), processor.get_piece_size())}
