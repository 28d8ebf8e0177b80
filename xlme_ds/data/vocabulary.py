"""Text to ids and back with a SentencePiece model, in XLM-R's id layout.

`<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, then the pieces, and `<mask>` last.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as proto

from ..io.files import file_sha256
from .rows import PIECE_OFFSET
from .schema import EOS, UNK, read_manifest

if TYPE_CHECKING:
    from .segment import Segmenter

MODEL_FILE = "sentencepiece.model"
# Settings with which data_prep and XLM-R train a SentencePiece model. The fast tokenizer of an export
# (`export/tokenizer.py`) can reproduce only a model with these settings.
_REQUIRED_SETTINGS = {
    "normalizer_spec": {"add_dummy_prefix": True, "remove_extra_whitespaces": True, "escape_whitespaces": True},
    "trainer_spec": {
        "model_type": proto.TrainerSpec.UNIGRAM,
        "byte_fallback": False,
        "treat_whitespace_as_suffix": False,
    },
}


class Vocabulary:
    """A SentencePiece model with XLM-R's ids. `model` is a model file (XLM-R's own can be used too), or a folder with
    the file `sentencepiece.model`.

    Raises ValueError for a model that the tokenizer of an export could not reproduce, and for a file whose checksum
    differs from the one in the manifest that `data_prep` wrote next to the file.

    `size` counts the pieces, `<pad>` and `<mask>`; `mask_id` is the id of `<mask>`, the last one.
    """

    def __init__(self, model: Path):
        self.path = path = Path(model) / MODEL_FILE if Path(model).is_dir() else Path(model)
        if not path.exists():
            raise ValueError(
                f"{path} does not exist: make it with `xlme prep vocab`, or name a SentencePiece model file"
            )
        try:
            self.processor = spm.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} is not a SentencePiece model: {error}") from None
        if [self.processor.id_to_piece(i) for i in range(3)] != ["<unk>", "<s>", "</s>"]:
            raise ValueError(
                f"{path} does not start with the pieces <unk>, <s>, </s>: train it with unk_id=0, bos_id=1, eos_id=2"
            )
        self.size = self.processor.get_piece_size() + 2
        self.mask_id = self.size - 1
        _require_exportable(path)
        if path.with_name("manifest.json").exists():
            checksums = {shard.name: shard.sha256 for shard in read_manifest(path.parent).shards}
            if checksums.get(path.name, self.sha256) != self.sha256:
                raise ValueError(
                    f"{path} changed since it was written (checksum): restore it, or give the command that wrote "
                    f"{path.parent} again"
                )

    @property
    def sha256(self) -> str:
        """SHA-256 of the model file."""
        return file_sha256(self.path)

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of `text`, without special tokens."""
        return self.from_sentencepiece_ids(self.processor.encode(text))

    def encode_after_mask(self, text: str) -> np.ndarray:
        """int32 ids of a `text` right after a `<mask>`: the text begins a new word only if it starts with a space.

        A space is any character that the model normalises to a space, in most models U+200B too.
        """
        new_word = self._without_prefix.normalize(f"x{text}").startswith("x▁")
        return self.encode(text) if new_word else self.from_sentencepiece_ids(self._without_prefix.encode(text))

    @cached_property
    def _without_prefix(self) -> spm.SentencePieceProcessor:
        """The model without its dummy prefix, which is a space before every text."""
        model = proto.ModelProto.FromString(self.processor.serialized_model_proto())  # the file may have changed
        model.normalizer_spec.add_dummy_prefix = False
        return spm.SentencePieceProcessor(model_proto=model.SerializeToString())

    def encode_lines(self, lines: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """`encode` of many lines: the ids of all lines, concatenated (int32), and the number of ids of each line
        (int64)."""
        return self.encode_normalised(self.normalise(lines))

    def normalise(self, lines: list[str]) -> list[bytes]:
        """Each line as SentencePiece normalises it, in UTF-8."""
        # `normalize` calls the private function `_Normalize`, which takes and returns bytes: this saves time here.
        return list(map(self.processor._processor._Normalize, map(str.encode, lines)))  # type: ignore[attr-defined]

    @cached_property
    def encode_normalised(self) -> "Segmenter":
        """The function that turns lines that `normalise` returned into the result of `encode_lines`."""
        from .segment import Segmenter  # numba takes time to load

        return Segmenter(self.processor)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids, offsets): the ids of `text`, int32, and for each id the [start, end) of the characters of
        `text` that the id covers, int64 [ids, 2]. White space at the start of these characters is left out."""
        pieces = self.processor.encode(text, return_type="proto").pieces
        character_at = np.zeros(len(text.encode("utf-8")) + 1, np.int64)  # index of the character that starts at a byte
        character_at[np.cumsum([0, *(len(character.encode("utf-8")) for character in text)])] = np.arange(len(text) + 1)
        offsets = character_at[np.array([(piece.begin, piece.end) for piece in pieces], np.int64).reshape(-1, 2)]
        for span in offsets:
            while span[0] < span[1] and self._is_space(text[span[0]]):
                span[0] += 1
        return self.from_sentencepiece_ids([piece.id for piece in pieces]), offsets

    def _is_space(self, character: str) -> bool:
        """Whether a character is white space to Python or, such as U+200B and U+200F in most models, to this model."""
        return character.isspace() or not (character.isprintable() or self.processor.normalize(character))

    def begins_with(self, other: "Vocabulary") -> bool:
        """Whether this vocabulary begins with the pieces of `other`: each of them has the same id in both."""
        ids = list(range(other.processor.get_piece_size()))
        return self.size >= other.size and self.processor.id_to_piece(ids) == other.processor.id_to_piece(ids)

    def segment_pieces(self, pieces: Sequence[str]) -> list[np.ndarray]:
        """For each of another vocabulary's `pieces`, the int32 ids into which this vocabulary segments the piece; no
        space is added before it."""
        ids, id_counts = self.encode_normalised([piece.encode() for piece in pieces])
        return np.split(ids, np.cumsum(id_counts)[:-1]) if len(id_counts) else []

    @staticmethod
    def from_sentencepiece_ids(piece_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """SentencePiece's ids as int32 ids of XLM-R."""
        ids = np.asarray(piece_ids, dtype=np.int32) + np.int32(PIECE_OFFSET)
        ids[ids == PIECE_OFFSET] = UNK  # SentencePiece's <unk> has id 0
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; special tokens are left out."""
        return str(self.processor.decode([int(i) - PIECE_OFFSET for i in ids if EOS < i < self.mask_id and i != UNK]))

    def piece(self, token: int) -> str:
        """The piece of an id as SentencePiece writes it: `▁` is a space."""
        if token == self.mask_id:
            return "<mask>"
        if token <= UNK:
            return ("<s>", "<pad>", "</s>", "<unk>")[token]
        return str(self.processor.id_to_piece(int(token) - PIECE_OFFSET))


def _require_exportable(path: Path) -> None:
    model = proto.ModelProto.FromString(path.read_bytes())
    for spec, settings in _REQUIRED_SETTINGS.items():
        for name, expected in settings.items():
            value = getattr(getattr(model, spec), name)
            if value != expected:
                raise ValueError(
                    f"{path} was trained with {name} {value}, so the tokenizer of an export would give other ids: take "
                    f"a unigram model with {name} {expected}, such as XLM-R's model"
                )
    ordinary = proto.ModelProto.SentencePiece.NORMAL
    for piece in model.pieces[3:]:  # without <unk>, <s>, </s>
        if piece.type != ordinary or "▁" in piece.piece[1:]:
            fault = "no ordinary piece" if piece.type != ordinary else "longer than a word"
            raise ValueError(
                f"{path} has the piece {piece.piece!r}, which is {fault}, so the tokenizer of an export would give "
                "other ids: train a model without such pieces"
            )
