"""The vocabulary as Hugging Face's fast tokenizer. It gives the same ids as SentencePiece except in four cases.

`<s>`, `<pad>`, `</s>`, `<unk>` and `<mask>` in a text are special tokens to the tokenizer, but ordinary characters to
SentencePiece. If two segmentations have the same score, the tokenizer and SentencePiece may choose different ones (as
in 1 of 73,000 lines of real text). A letter with several marks that Unicode cannot combine into one character, or a
sign for several letters with a mark, may get other ids. A U+FFFF of the text is dropped.
"""

import json
from typing import Any

from sentencepiece import sentencepiece_model_pb2 as proto

from ..data.schema import EOS, LAYOUTS, PAD, UNK, Layout
from ..data.vocabulary import Vocabulary

_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
_ORDERED_MARKS = (
    "\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7"  # Hebrew points
    "\u0610-\u061a\u064b-\u0652\u0656-\u065f\u0670\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed"  # Arabic vowels
)
# Consonants that are finals of a syllable, or that NFKC makes such. SentencePiece does not join them to a composed
# syllable before them.
_FINALS = "\u11a8-\u11c2\u3133\u3135\u3136\u313a-\u313f\uffa3\uffa5\uffa6\uffaa-\uffaf"
_GUARD = "\ue000"  # NFC composes it with no other character; a U+E000 of the text itself stays
# Inserted before marks, and before text that starts no new word; Unicode assigns this code to no character.
_NONCHARACTER = "\uffff"


def tokenizer_files(vocabulary: Vocabulary, max_tokens: int, layout: Layout = LAYOUTS["xlme"]) -> dict[str, Any]:
    """The JSON contents of the tokenizer's files, by file name.

    `max_tokens`: maximum number of tokens of an input; `layout`: the special tokens around and between texts.

    Raises ValueError without the package tokenizers.
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
        # This class uses tokenizer.json as it is; XLMRobertaTokenizerFast would replace some of its parts.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": _tokenizer_json(vocabulary, layout),
        "tokenizer_config.json": config,
        "special_tokens_map.json": tokens,
    }


def _tokenizer_json(vocabulary: Vocabulary, layout: Layout) -> Any:
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    except ImportError:
        raise ValueError("the package tokenizers is missing: pip install tokenizers") from None
    model = proto.ModelProto.FromString(vocabulary.path.read_bytes())
    # SentencePiece's model begins with all of `_SPECIALS` except <pad>.
    pieces = [(piece.piece, piece.score) for piece in model.pieces[len(_SPECIALS) - 1 :]]
    pieces = [*((special, 0.0) for special in _SPECIALS), *pieces, ("<mask>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=UNK, byte_fallback=False))
    charsmap = model.normalizer_spec.precompiled_charsmap
    # `Precompiled` composes only some letters with their marks and leaves others apart (Tamil vowels, decomposed
    # Vietnamese), so NFC composes these first. NFC would also reorder Arabic and Hebrew marks, whose order
    # SentencePiece keeps; a guard before each of these marks prevents the reordering. `Precompiled` reads a short
    # letter with its marks at once, and drops the marks if it replaces the letter (U+00BD with U+FE0F), so it gets the
    # marks apart. What it replaces is composed after it (halfwidth katakana, Korean letters).
    compose = [
        normalizers.Replace(Regex(f"(?<=.)(?=[{_ORDERED_MARKS}])|(?<=[가-힣{_GUARD}])(?=[{_FINALS}])"), _GUARD),
        normalizers.NFC(),
        normalizers.Replace(Regex(r"(?<=.)(?=[\p{M}\u200d\uff9e\uff9f])"), _NONCHARACTER),
        normalizers.Precompiled(charsmap),
        normalizers.Replace(_NONCHARACTER, ""),
        normalizers.NFC(),
        normalizers.Replace(Regex(f"{_GUARD}(?=[{_ORDERED_MARKS}\u11a8-\u11c2])"), ""),
    ]
    spaces = [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(" $"), "")]
    tokenizer.normalizer = normalizers.Sequence([*(compose if charsmap else []), *spaces])
    # "first" inserts ▁ only at the start of the input, so text that follows a <mask> without a space starts no new
    # word, as at a masked position in training. The later steps replace each space's ▁ by one that has the offsets of
    # the next letter, so that no token's offsets include a space.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first"),
            pre_tokenizers.Metaspace(replacement=_NONCHARACTER, prepend_scheme="always", split=False),
            pre_tokenizers.Split(Regex(f"^{_NONCHARACTER}▁(?=.)"), "removed"),
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=False),
            pre_tokenizers.Split(Regex(f"^▁{_NONCHARACTER}"), "removed"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_SPECIALS[layout.opening]} $A </s>",
        pair=" ".join([_SPECIALS[layout.opening], "$A", *(_SPECIALS[token] for token in layout.between), "$B </s>"]),
        special_tokens=[("<s>", 0), ("</s>", EOS)],
    )
    tokenizer.add_special_tokens([AddedToken(special, normalized=False) for special in (*_SPECIALS, "<mask>")])
    assert tokenizer.token_to_id("<mask>") == vocabulary.mask_id and tokenizer.token_to_id("<pad>") == PAD
    return json.loads(tokenizer.to_str())
