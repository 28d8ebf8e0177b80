"""The fast tokenizer gives SentencePiece's ids, and its special tokens stand where ours do."""

import lzma
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece as spm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.launch import ROOT
from tests.small import encoder_of, model
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary
from xlme_ds.export.exported_folder import ExportedModel, write_folder
from xlme_ds.export.tokenizer import tokenizer_files

CORPUS = ROOT.parent / "shared/data/corpus/mono"
HARD = [
    "",
    " ",
    "  two  spaces   and\ta tab ",
    "\n",
    "ends with a next line\x85",
    "\ufeffbyte order mark",
    "non\u00a0breaking\u3000and ideographic space",
    "zero\u200bwidth\u200d joiner",
    "ﬁne ligature, Ｆｕｌｌ width ㎏ ½ ① … ™",
    "e\u0301 cafe\u0301",  # one mark a letter
    "▁ meta▁symbol ▁▁",
    "한국어 𝔘nicode 𝄞 👩‍👩‍👧 🇩🇪",
    "क़लम फ़िल्म",
    "نصًّا مُشَكَّل نصّيًّا",
    "שָׁלוֹם בְּרֵאשִׁית",
    "ப\u0bc7\u0bbeது க\u0bc6\u0bbe",  # Tamil vowels in two parts
    unicodedata.normalize("NFD", "Thay đổi các thuật ngữ ở Việt Nam"),
    unicodedata.normalize("NFD", "한국어"),
    "a\x00b\x01c",
    "private \ue000use\ue000 area\uf8ff",
    "\ue000\u064e a\ue000\u064e\ue000",  # one before a mark
    "ka" * 300,
]


def write(vocabulary: Vocabulary, to: Path, separators: int = 1) -> Any:
    whole = model(vocabulary=vocabulary.size)
    write_folder(to, ExportedModel(encoder_of(whole), "XLMEModel", separators=separators), vocabulary, "")
    return AutoTokenizer.from_pretrained(to, trust_remote_code=True)


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write(vocabulary, tmp_path_factory.mktemp("tokenizer") / "x")


def test_special_tokens(tokenizer: Any, vocabulary: Vocabulary) -> None:
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    ids = [tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert ids == [0, 1, 2, 3] == [tokenizer.cls_token_id, 1, tokenizer.sep_token_id, 3]
    assert tokenizer.mask_token_id == vocabulary.mask_id and len(tokenizer) == vocabulary.size
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == [
        vocabulary.piece(i) for i in range(len(tokenizer))
    ]
    assert tokenizer.model_max_length == 40


def test_a_mask_is_as_in_training(tokenizer: Any, vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode("kalo miter, dorin")
    pieces = [vocabulary.piece(int(i)) for i in ids]
    at = next(i for i, piece in enumerate(pieces) if not piece.startswith("▁"))  # what follows the mask starts no word
    text = "".join(["<mask>" if i == at - 1 else piece for i, piece in enumerate(pieces)]).replace("▁", " ").strip()
    expected = ids.tolist()
    expected[at - 1] = vocabulary.mask_id
    assert tokenizer(text)["input_ids"] == [0, *expected, 2]


@pytest.mark.parametrize(
    "space", ["", " ", "\u200b", "\ufeff", "\u00a0", "\t ", "\x07 ", "\u200b\u200b", "\u0301", "\x85", "\u2028"]
)
def test_what_follows_a_mask_begins_a_word_where_the_tokenizer_says_so(
    tokenizer: Any, vocabulary: Vocabulary, space: str
) -> None:
    """U+200B and others are spaces to SentencePiece and none to Python, U+0085 the other way."""
    for rest in ("miter", "mi ter", ""):
        expected = [*vocabulary.encode("kalo"), vocabulary.mask_id, *vocabulary.encode_after_mask(space + rest)]
        assert tokenizer(f"kalo<mask>{space}{rest}")["input_ids"] == [0, *expected, 2], (space, rest)


def test_pairs_padding_and_places(tokenizer: Any, vocabulary: Vocabulary, tmp_path: Path) -> None:
    first, second = "kalo mi", "ter  unve"
    a, b = vocabulary.encode(first).tolist(), vocabulary.encode(second).tolist()
    assert tokenizer(first, second)["input_ids"] == [0, *a, 2, *b, 2]
    assert write(vocabulary, tmp_path / "two", separators=2)(first, second)["input_ids"] == [0, *a, 2, 2, *b, 2]
    both = tokenizer([first, "ter"], padding=True)
    assert both.keys() == {"input_ids", "attention_mask"}
    assert both["input_ids"][1][-1] == 1 and both["attention_mask"][1][-1] == 0
    assert tokenizer.decode(tokenizer(first)["input_ids"], skip_special_tokens=True) == first


def test_places_are_sentencepieces(tokenizer: Any, vocabulary: Vocabulary) -> None:
    """Without the space before a word, which pipelines would show as part of an entity or an answer."""
    for line in ("kalo mi", "ter  unve ", " a, kalo\u00a0b", "sa \ue000 ter", "ter\u200bmi \u200f\ufeffkalo"):
        ids, expected = vocabulary.encode_with_offsets(line)
        found = tokenizer(line, return_offsets_mapping=True)
        assert found["input_ids"][1:-1] == ids.tolist()
        for token, place, wanted in zip(ids, found["offset_mapping"][1:-1], expected.tolist(), strict=True):
            if vocabulary.piece(token) != "▁":  # which has no letter
                assert list(place) == wanted, (line, vocabulary.piece(token))
    text = "kalo <mask> sa<mask>, a"
    found = tokenizer(text, return_offsets_mapping=True)
    places = list(zip(found["input_ids"], found["offset_mapping"], strict=True))
    assert [place for token, place in places if token == vocabulary.mask_id] == [(5, 11), (14, 20)]
    assert not any(text[start:end].startswith(" ") for _, (start, end) in places)


def test_hard_lines(tokenizer: Any, vocabulary: Vocabulary) -> None:
    for line in HARD:
        assert tokenizer(line)["input_ids"] == [0, *vocabulary.encode(line).tolist(), 2], ascii(line)


def test_characters_that_are_replaced_keep_their_marks(tokenizer: Any, vocabulary: Vocabulary) -> None:
    """And are composed with what follows them. Ids would not show it: the vocabulary lacks most of these letters."""
    for line in (
        "\xbd\ufe0f a\xa0\u0301 \xaa\u0301 \u338f\ufe0f \uff21\u0301\u0301",
        "\xa0\u200d \xb2\u200dx",
        "\ufe8d\u064b \ufefb\u064e\u0651 \xa0\u0651\u064e",  # Arabic forms with vowels
        "\xa0\u093f \ufb2a\u05b0",
        "ｶﾞｷﾞ ﾊﾟﾝ ｳﾞ ﾞ",
        "ㅋㅏㄴㅏ ㅋㅋㅋ ㅇㅏㄴ ﾡￂ 안ㄴㅕㅇ",
        "a\ue000\u3133 \ue000\u11a8 \uac00\u11a8",
        "완료ㄳ ㄱㅏㄳ ㄳ 아ㅄ 가ﾪ " + unicodedata.normalize("NFD", "갃"),
    ):
        normalised = tokenizer.backend_tokenizer.normalizer.normalize_str(line).strip()
        assert "▁" + normalised.replace(" ", "▁") == vocabulary.processor.normalize(line), ascii(line)


@pytest.mark.skipif(not CORPUS.is_dir(), reason="../shared/data/corpus/mono is absent")
def test_real_lines_of_all_languages(tmp_path: Path) -> None:
    lines = []
    for path in sorted(CORPUS.glob("*.txt.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            lines += [line.rstrip("\n") for line, _ in zip(file, range(20), strict=False)]
    assert len(lines) > 1500
    (tmp_path / "vocab").mkdir()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str((tmp_path / "vocab" / MODEL_FILE).with_suffix("")),
        vocab_size=5000,
        character_coverage=0.9995,  # some characters stay unknown
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    vocabulary = Vocabulary(tmp_path / "vocab")
    tokenizer = write(vocabulary, tmp_path / "x")
    found = tokenizer(lines)["input_ids"]
    expected = [[0, *vocabulary.encode(line).tolist(), 2] for line in lines]
    assert sum(3 in ids for ids in expected) > 5  # unknown characters are among them
    score = vocabulary.processor.get_score
    for line, ours, theirs in zip(lines, expected, found, strict=True):
        if ours != theirs:  # only where two segmentations are worth the same
            one, other = (sum(score(i - 1) for i in ids[1:-1] if i != 3) for ids in (ours, theirs))
            assert abs(one - other) < 1e-3 and len(ours) == len(theirs), line
    assert sum(ours != theirs for ours, theirs in zip(expected, found, strict=True)) < 5
    # Text in other forms of Unicode: SentencePiece normalises as well.
    for form in ("NFD", "NFC"):
        other_form = [unicodedata.normalize(form, line) for line in lines]
        theirs = tokenizer(other_form)["input_ids"]
        differ = [
            ids != [0, *vocabulary.encode(line).tolist(), 2] for line, ids in zip(other_form, theirs, strict=True)
        ]
        assert sum(differ) < 5, form
    # Every character there is; U+0344 alone, which Unicode advises against, is composed with the letter before it.
    texts = [f"a{chr(code)}b" for code in range(1, 0x30000) if unicodedata.category(chr(code)) not in ("Cs", "Cn")]
    found = tokenizer(texts, add_special_tokens=False)["input_ids"]
    differing = [text for text, ids in zip(texts, found, strict=True) if ids != vocabulary.encode(text).tolist()]
    assert differing == ["a\u0344b"]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        tokenizer_files(vocabulary, 40)
