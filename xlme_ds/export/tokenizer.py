"""The vocabulary as Hugging Face's fast tokenizer: the same ids as SentencePiece's.

The differences: `<s>`, `<pad>`, `</s>`, `<unk>` and `<mask>` in a text are special tokens to the tokenizer and letters
to SentencePiece; of two segmentations with the same score each may choose another (one line in 73,000 of real text); a
letter with two or more marks of its own that no character combines may be read otherwise.
"""

import json
from typing import Any

from sentencepiece import sentencepiece_model_pb2 as proto

from ..data.schema import EOS, LAYOUTS, PAD, UNK, Layout
from ..data.vocabulary import Vocabulary

_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
# How data_prep and XLM-R train a model; the pipeline below knows no other.
_READABLE = {
    "normalizer_spec": {"add_dummy_prefix": True, "remove_extra_whitespaces": True, "escape_whitespaces": True},
    "trainer_spec": {
        "model_type": proto.TrainerSpec.UNIGRAM,
        "byte_fallback": False,
        "treat_whitespace_as_suffix": False,
    },
}
_ORDERED_MARKS = (
    "\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7"  # Hebrew points
    "\u0610-\u061a\u064b-\u0652\u0656-\u065f\u0670\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed"  # Arabic vowels
)
_GUARD = "\ue000"  # of the private use area: no text has it


def tokenizer_files(vocabulary: Vocabulary, longest: int, layout: Layout = LAYOUTS["xlme"]) -> dict[str, Any]:
    """JSON contents of the tokenizer's files by name; `longest` item in tokens, `layout` its special tokens.

    Raises ValueError without the package tokenizers, and for a SentencePiece model of another kind than XLM-R's.
    """
    opening = _SPECIALS[layout.opening]
    tokens = {
        "bos_token": opening,
        "cls_token": opening,
        "eos_token": "</s>",
        "sep_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    }
    config = tokens | {
        # It takes tokenizer.json as it is; XLMRobertaTokenizerFast would put parts of its own in place of some.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": _pipeline(vocabulary, layout),
        "tokenizer_config.json": config,
        "special_tokens_map.json": tokens,
    }


def _pipeline(vocabulary: Vocabulary, layout: Layout) -> Any:
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    except ImportError:
        raise ValueError("the package tokenizers is missing: pip install tokenizers") from None
    model = _read_model(vocabulary)
    pieces = [(piece.piece, piece.score) for piece in model.pieces[len(_SPECIALS) - 1 :]]
    scored = [*((special, 0.0) for special in _SPECIALS), *pieces, ("<mask>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=UNK, byte_fallback=False))
    charsmap = model.normalizer_spec.precompiled_charsmap
    # `Precompiled` composes letters and marks (Tamil vowels, decomposed Vietnamese) only in part, so NFC does it
    # before; but NFC would order Arabic and Hebrew marks anew, which SentencePiece leaves as they are: a guard before
    # each prevents it.
    compose = [
        normalizers.Replace(Regex(f"(?<=.)(?=[{_ORDERED_MARKS}])"), _GUARD),
        normalizers.NFC(),
        normalizers.Replace(_GUARD, ""),
        normalizers.Precompiled(charsmap),
    ]
    spaces = [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(" $"), "")]
    tokenizer.normalizer = normalizers.Sequence([*(compose if charsmap else []), *spaces])
    # "first": text after a <mask> without a space starts no new word, as at a masked position in training.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_SPECIALS[layout.opening]} $A </s>",
        pair=" ".join([_SPECIALS[layout.opening], "$A", *(_SPECIALS[each] for each in layout.between), "$B </s>"]),
        special_tokens=[("<s>", 0), ("</s>", EOS)],
    )
    tokenizer.add_special_tokens([AddedToken(special, normalized=False) for special in _SPECIALS])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    assert tokenizer.token_to_id("<mask>") == vocabulary.mask and tokenizer.token_to_id("<pad>") == PAD
    return json.loads(tokenizer.to_str())


def _read_model(vocabulary: Vocabulary) -> Any:
    model = proto.ModelProto()
    model.ParseFromString(vocabulary.path.read_bytes())
    for spec, settings in _READABLE.items():
        for name, wanted in settings.items():
            found = getattr(getattr(model, spec), name)
            if found != wanted:
                raise ValueError(
                    f"{vocabulary.path} was trained with {name} {found}: only models with {wanted}, as XLM-R's, can "
                    "be exported"
                )
    other = [piece.piece for piece in model.pieces[3:] if piece.type != proto.ModelProto.SentencePiece.NORMAL]
    if other:
        raise ValueError(
            f"{vocabulary.path} has the piece {other[0]!r}, which is no ordinary one: it cannot be exported"
        )
    return model
