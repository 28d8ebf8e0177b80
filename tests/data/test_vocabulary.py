"""A vocabulary whose ids no export could give is refused where it is first named, before anything is prepared."""

from pathlib import Path
from typing import Any

import pytest
import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as proto

from data_prep.vocab import vocab
from tests.rows import train_vocabulary
from xlme_ds.data.schema import Manifest, Shard, write_manifest
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary

SENTENCES = [f"{a} {b}" for a in ("kalo", "miter", "unve", "sador") for b in ("inpe", "dorin", "lomi")] * 5


def trained(folder: Path, **settings: Any) -> Path:
    folder.mkdir()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(folder / Path(MODEL_FILE).stem),
        vocab_size=300,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return folder


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"unk_id": 1, "bos_id": 0}, "does not start with the pieces <unk>, <s>, </s>: train it with unk_id=0"),
        ({"model_type": "bpe"}, "model_type 2"),
        ({"model_type": "word"}, "model_type 3"),
        ({"byte_fallback": True}, "byte_fallback True"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix True"),
        ({"remove_extra_whitespaces": False}, "remove_extra_whitespaces False"),
        ({"add_dummy_prefix": False}, "add_dummy_prefix False"),
        ({"user_defined_symbols": ["<special>"]}, "the piece '<special>', which is no ordinary piece"),
        ({"control_symbols": ["<mask>"]}, "the piece '<mask>', which is no ordinary piece"),
        ({"split_by_whitespace": False}, "which is longer than a word"),
    ],
)
def test_vocabularies_of_other_kinds_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    model = trained(tmp_path / "other", **settings)
    with pytest.raises(ValueError, match=words):
        Vocabulary(model)
    with pytest.raises(ValueError, match=words):  # the first command that reads one
        vocab.run(vocab.VocabConfig(tmp_path / "out", model=model))
    assert not (tmp_path / "out").exists()


def test_the_usual_kind_is_taken(tmp_path: Path) -> None:
    usual = Vocabulary(trained(tmp_path / "usual"))
    assert usual.size > 20
    model = proto.ModelProto.FromString(usual.path.read_bytes())
    model.normalizer_spec.escape_whitespaces = False  # the trainer has no setting for it
    usual.path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="was trained with escape_whitespaces False"):
        Vocabulary(usual.path)


def test_a_flipped_bit_is_an_error(tmp_path: Path) -> None:
    """Also where the file is still a SentencePiece model, whose ids may be others."""
    made = train_vocabulary(tmp_path / "vocab")
    shard = Shard(MODEL_FILE, 0, made.path.stat().st_size, made.sha256)
    write_manifest(tmp_path / "vocab", Manifest("vocab", {}, made.size, made.sha256, (), (shard,), {}))
    assert Vocabulary(tmp_path / "vocab").size == made.size
    content = bytearray(made.path.read_bytes())
    content[content.index(b"ka")] ^= 2  # another letter in a piece
    made.path.write_bytes(content)
    for name in (tmp_path / "vocab", made.path):
        with pytest.raises(ValueError, match=r"sentencepiece\.model changed since it was written"):
            Vocabulary(name)
