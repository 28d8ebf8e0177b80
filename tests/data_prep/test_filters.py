"""Filters: what each drops, counted by name; scripts on real sentences of every script."""

import subprocess
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.filters.clean import Counts, Sides, make_filters
from data_prep.filters.language_id import Py3langid, labels_of, load_identifier
from data_prep.languages import CC100_LANGUAGES, SCRIPTS, count_letters, scripts_of
from data_prep.readers import documents, find_documents
from xlme_ds.data.schema import read_manifest

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "data" / "corpus"


def drops(
    name: str, settings: dict[str, Any], *sides: list[str], languages: tuple[str, ...] = ("en", "ru")
) -> list[bool]:
    filters = make_filters({name: settings}, "mono" if len(sides) == 1 else "para", "test")
    dropped = np.zeros(len(sides[0]), bool)
    for _, text_filter in filters.text:
        dropped |= text_filter(Sides(sides, languages[: len(sides)]))
    for _, token_filter in filters.tokens:
        dropped |= token_filter([np.array([len(text.split()) for text in side]) for side in sides])
    return [bool(drop) for drop in dropped]


def test_length_in_characters_and_tokens() -> None:
    lines = ["a", "ab", "abc", "a b c d"]
    assert drops("length", {"min_characters": 2, "max_characters": 3}, lines) == [True, False, False, True]
    assert drops("length", {"max_tokens": 3}, lines) == [False, False, False, True]
    for settings, fits, not_so in (({"min_tokens": 2}, "a b", "a"), ({"max_tokens": 2}, "a b", "a b c")):
        assert drops("length", settings, [fits, fits, not_so], [not_so, fits, fits]) == [True, False, True]
    assert drops("length", {}, lines) == [False] * 4


def test_the_strictest_settings_keep_some_text() -> None:
    """A share of 1, a ratio of 1, and one length only."""
    assert drops("script", {"share": 1}, ["ab", "aб"]) == [False, True]
    assert drops("length_ratio", {"largest": 1, "above": 0}, ["a b", "a b"], ["c d", "c"]) == [False, True]
    assert drops("length", {"min_characters": 2, "max_characters": 2}, ["a", "ab", "abc"]) == [True, False, True]
    assert drops("length", {"min_tokens": 2, "max_tokens": 0}, ["a b"]) == [False]


def test_length_ratio_spares_short_pairs() -> None:
    sides = ["a " * 40, "a " * 30, "a", "a", "a " * 11], ["b " * 10, "b " * 10, "b b b b b", "b " * 10, "b"]
    assert drops("length_ratio", {}, *sides) == [True, False, False, False, True]
    assert drops("length_ratio", {"largest": 2, "above": 3}, *sides) == [True] * 5


def test_identical_sides() -> None:
    assert drops("identical_sides", {}, ["a", "A b", "c"], ["a", "a B", "d"]) == [True, True, False]
    ours = ["Été  là", "ＡＢ", "1 000", "Straße", "Ⓐ ℌ ™", "a b"]
    theirs = ["E\u0301té la\u0300", "ab", "1\u202f000", "STRASSE", "ⓐ h tm", "ab"]
    assert drops("identical_sides", {}, ours, theirs) == [True] * 5 + [False]


def test_boilerplate_is_measured_in_bytes() -> None:
    assert drops("boilerplate_length", {"min_bytes": 6}, ["Home", "首页", "Ho me now"]) == [True, False, False]
    assert drops("boilerplate_length", {}, ["x" * 19, "x" * 20, "é" * 10]) == [True, False, False]


def test_scores() -> None:
    ((_, score),) = make_filters({"score": {"least": 1.1}}, "para", "test").text
    dropped = score(Sides((["a"] * 3, ["b"] * 3), ("en", "de"), np.array([1.0, 1.1, np.nan])))
    assert dropped.tolist() == [True, False, True]
    ((_, score),) = make_filters({"score": {}}, "para", "test").text
    assert score(Sides((["a"] * 2, ["b"] * 2), ("en", "de"), np.array([1.0399, 1.04]))).tolist() == [True, False]


def test_wrong_script_on_any_side() -> None:
    assert drops("script", {}, ["Hello", "Привет", "123 !", "Hello мир"]) == [False, True, False, False]
    sides = ["Hello", "Hello", "Hello", "Привет"], ["Привет", "Hello", "42", "Привет"]
    assert drops("script", {}, *sides) == [False, True, False, True]
    assert drops("script", {"share": 0.9}, ["Hello мир"]) == [True]
    assert drops("script", {}, ["abc где", "ab где"]) == [False, True], "just half of the letters are enough"


ENGLISH = "Everyone has the right to life, liberty and security of person."
GERMAN = "Jeder hat das Recht auf Leben, Freiheit und Sicherheit der Person."
RUSSIAN = "Каждый человек имеет право на жизнь, на свободу и на личную неприкосновенность."


def test_other_languages_go_and_unknown_ones_stay() -> None:
    pytest.importorskip("py3langid")
    lines = [ENGLISH, GERMAN, RUSSIAN, "12 345 / 67 %", "OK"]
    assert drops("language", {}, lines) == [False, True, True, False, False]
    assert drops("language", {}, lines, languages=("de",)) == [True, False, True, False, False]
    assert drops("language", {}, lines, languages=("sd",)) == [False] * 5, "the model does not know Sindhi"
    sides = [ENGLISH, ENGLISH, GERMAN], [RUSSIAN, GERMAN, RUSSIAN]
    assert drops("language", {}, *sides) == [False, True, True]
    chinese = "人人有权享有生命、自由和人身安全。"
    assert drops("language", {}, [chinese, ENGLISH], languages=("zh-Hans",)) == [False, True]


LABELLED = {
    "eng_Latn": "everyone has the right to life liberty and security of person",
    "deu_Latn": "jeder hat das recht auf leben freiheit und sicherheit der person",
    "arb_Arab": "لكل فرد الحق في الحياة والحرية وفي الأمان على شخصه",
    "ary_Arab": "بزاف ديال الناس كيبغيو يمشيو للمغرب باش يشوفو البحر",
    "zxx_Zyyy": "12 345 67 89 0x3f 100",
}


@pytest.fixture(scope="module")
def fasttext_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of fastText's format with GlotLID's kind of labels, trained on the words of LABELLED."""
    fasttext = pytest.importorskip("fasttext")
    if not hasattr(fasttext, "train_supervised"):
        pytest.skip("this package of fastText does not train: install fasttext-community")
    folder = tmp_path_factory.mktemp("fasttext")
    draw = np.random.default_rng(1)
    labelled = list(LABELLED.items()) * 300
    lines = [f"__label__{label} {' '.join(draw.choice(text.split(), 5))}\n" for label, text in labelled]
    (folder / "train.txt").write_text("".join(lines), encoding="utf-8")
    model = fasttext.train_supervised(str(folder / "train.txt"), dim=8, epoch=20, thread=1, verbose=0)
    model.save_model(str(folder / "model.bin"))
    return str(folder / "model.bin")


def test_a_model_file_in_fasttexts_format(fasttext_model: str) -> None:
    """Its labels are read as codes: of varieties, of another script, and of no language."""
    settings = {"model": fasttext_model, "probability": 0.9}
    lines = list(LABELLED.values())
    assert labels_of("ar", fasttext_model) == ("__label__arb_Arab", "__label__ary_Arab")
    assert drops("language", settings, lines) == [False, True, True, True, False]
    assert drops("language", settings, lines, languages=("ar",)) == [True, True, False, False, False]
    assert drops("language", settings, lines, languages=("sw",)) == [False] * 5, "the model does not know Swahili"
    both = f"{LABELLED['arb_Arab']} {LABELLED['ary_Arab']}"  # each label has less than the least share, 0.7
    alone, *_ = load_identifier(fasttext_model).probabilities([both], ["__label__arb_Arab"], 0.7)
    assert 0.3 < alone < 0.7
    assert drops("language", settings | {"probability": 0.3}, [both], languages=("ar",)) == [False], "together more"


def test_a_model_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"test: model of filter language is 'none.bin': it must name a file"):
        make_filters({"language": {"model": "none.bin"}}, "mono", "test")
    for folder_or_number in (str(tmp_path), 5):
        with pytest.raises(ValueError, match=r"model of filter language is .*: it must name a file"):
            make_filters({"language": {"model": folder_or_number}}, "mono", "test")
    pytest.importorskip("fasttext")
    (tmp_path / "m.bin").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"m.bin is no model of fastText"):
        labels_of("en", str(tmp_path / "m.bin"))


def test_a_model_file_that_is_cut_off_is_an_error(fasttext_model: str, tmp_path: Path) -> None:
    """fastText reads it, and its labels would be wrong."""
    data = Path(fasttext_model).read_bytes()
    for number, size in enumerate((len(data) - 1, len(data) - 4000, len(data) // 2)):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=rf"{number}\.bin is no model of fastText \(.*\): fetch it again"):
            labels_of("en", str(path))


def test_a_quantized_model_file_is_whole(tmp_path: Path) -> None:
    """As lid.176.ftz, which does not end with the numbers of its matrix."""
    fasttext = pytest.importorskip("fasttext")
    if not hasattr(fasttext, "train_supervised"):
        pytest.skip("this package of fastText does not train: install fasttext-community")
    lines = [f"__label__{label} {text}\n" for label, text in LABELLED.items()]
    (tmp_path / "train.txt").write_text("".join(lines * 3), encoding="utf-8")
    settings = {"dim": 8, "wordNgrams": 2, "bucket": 300, "thread": 1, "verbose": 0}  # it takes 256 rows to quantize
    model = fasttext.train_supervised(str(tmp_path / "train.txt"), **settings)
    model.quantize()
    model.save_model(str(tmp_path / "model.ftz"))
    assert labels_of("de", str(tmp_path / "model.ftz")) == ("__label__deu_Latn",)


def test_encode_names_a_model_file_by_its_bytes(
    fasttext_model: str, vocab: Path, tmp_path: Path, data_prep: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    """So the file may be moved, and another model is another stage."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/de.txt").write_text(f"{LABELLED['deu_Latn']}\n{LABELLED['eng_Latn']}\n")
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(Path(fasttext_model).read_bytes())
        (tmp_path / "x.toml").write_text(
            f'name = "x"\nwhere = "{tmp_path}/in"\nformat = "cc100"\nfiles = "{{lang}}.txt"\nlanguages = "any"\n'
            f'[filters.language]\nprobability = 0.9\nmodel = "{tmp_path / name}"\n'
        )
        done = data_prep("encode", "--corpus", tmp_path / "x.toml", "--vocab", vocab, "--out", tmp_path / "out")
        assert done.returncode == 0, done.stderr
    manifest = read_manifest(tmp_path / "out/mono")
    assert manifest.counts["by_language"]["de"]["removed"] == {"language": 1}
    assert manifest.settings["x.language_model"].startswith("fastText ")
    assert manifest.settings["x.language"] == {"probability": 0.9}


VARIETIES = {
    ("ar", "ary"): "بزاف ديال الناس كيبغيو يمشيو للمغرب باش يشوفو البحر و الجبال",
    ("ar", "arz"): "دا مش كويس خالص يا جماعة",
    ("ku", "sdh"): "ئەمڕۆ ڕووژ خاسیگە وەڵێ هەوا فرە سەردە",
    ("no", "nn"): "eg veit ikkje kva som skjer med desse husa",
    ("uz", "uzs"): "اوزبیکستان آتینگیزنینگ اسمی نیمه",
    ("zh-Hans", "wuu"): "侬今朝夜饭吃过了伐,阿拉一道去白相",
    ("zh-Hant", "yue"): "我哋今日去咗街市買餸,啲嘢好貴,佢唔肯減價",
}


def test_varieties_with_a_code_of_their_own_are_no_other_language() -> None:
    pytest.importorskip("py3langid")
    model = load_identifier()
    assert isinstance(model, Py3langid)
    for (language, variety), line in VARIETIES.items():
        best, _ = model._model.rank(line)[0]
        assert best == variety
        assert drops("language", {"probability": 0.5}, [line], languages=(language,)) == [False], variety
        assert drops("language", {"probability": 0.5}, [line], languages=("en",)) == [True], variety


def test_what_a_model_knows_and_what_it_does_not() -> None:
    """By the package's own answers to whole articles in the languages of CC-100."""
    langid = pytest.importorskip("py3langid.langid")
    labels = set(langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE).labels)
    known = {code for code in CC100_LANGUAGES if labels_of(code)}
    assert all(set(labels_of(code)) <= labels for code in known)
    unknown = set(CC100_LANGUAGES) - known
    assert unknown == {"bn_rom", "hi_rom", "my_zaw", "sd", "su", "ta_rom", "te_rom", "ur_rom", "yi"}


def test_letters_of_each_script() -> None:
    lines = ["Würde", "Ґанок", "尊厳とアジア", "가나 abc", "ꙮ1", "Ελλάδα", "…", "བོད་ཡིག a", "ᏣᎳᎩ", "Oʻzbək"]
    right, all_letters = count_letters(lines, ("Latin", "Han"))
    assert right.tolist() == [5, 0, 2, 3, 0, 0, 0, 1, 0, 5]
    # Tibetan has four letters and two vowel signs here. The sign after O is of no script.
    assert all_letters.tolist() == [5, 5, 6, 5, 1, 6, 0, 5, 3, 5]
    assert all(set(scripts_of(language)) <= set(SCRIPTS) for language in CC100_LANGUAGES)
    assert scripts_of("hi_rom") == ("Latin",)


@pytest.mark.parametrize(
    ("script", "first", "last", "number"),
    [
        ("Latin", "A", "Z", 26),
        ("Latin", "a", "z", 26),
        ("Latin", "À", "Ö", 23),
        ("Latin", "ø", "ʯ", 0x2AF - 0xF8 + 1),
        ("Latin", "Ḁ", "ỿ", 256),
        ("Cyrillic", "Ѐ", "ҁ", 130),
        ("Cyrillic", "Ҋ", "ԯ", 166),
        ("Armenian", "Ա", "Ֆ", 38),
        ("Hebrew", "א", "ת", 27),
        ("Arabic", "ؠ", "ي", 43),
        ("Devanagari", "ऄ", "ह", 54),
        ("Thai", "ก", "ะ", 48),
        ("Georgian", "ა", "ჺ", 43),
        ("Kana", "ァ", "ヺ", 90),
        ("Han", "一", "鿿", 0x9FFF - 0x4E00 + 1),
        ("Hangul", "가", "힣", 11_172),
    ],
)
def test_all_letters_of_an_alphabet_are_of_its_script(script: str, first: str, last: str, number: int) -> None:
    """By the counts of Unicode's charts, the first letter and the last one included."""
    text = "".join(map(chr, range(ord(first), ord(last) + 1)))
    assert [int(count[0]) for count in count_letters([text], (script,))] == [number, number]


@pytest.mark.parametrize(
    ("text", "script", "number"),
    [
        ("ที่นี่", "Thai", 2),  # two consonants, two vowel signs and two tones above them
        ("น้ำ", "Thai", 2),  # sara am is a letter of its own
        ("हिन्दी", "Devanagari", 3),  # ha, na, da
        ("தமிழ்", "Tamil", 3),
        ("ភាសាខ្មែរ", "Khmer", 5),  # pho, so, kho, mo, ro
        ("مُحَمَّدٌ", "Arabic", 4),
        ("٤٢، ؟", "Arabic", 0),
        ("שָׁלוֹם", "Hebrew", 4),
        (unicodedata.normalize("NFD", "Würde été ệ"), "Latin", 9),
        ("Würde été ệ", "Latin", 9),
        (unicodedata.normalize("NFD", "가나"), "Hangul", 4),  # jamo are letters
        ("।॥ ॐ", "Devanagari", 1),
        ("͵·;", "Greek", 0),
        ("1.ª, 2.º", "Latin", 2),
        ("10 µm", "Latin", 1),  # the micro sign belongs to no script
        ("ﾡￜ", "Hangul", 2),  # halfwidth
    ],
)
def test_letters_are_unicodes_without_marks(text: str, script: str, number: int) -> None:
    assert [int(count[0]) for count in count_letters([text], (script,))] == [number, number]


def test_vowel_signs_do_not_outweigh_letters() -> None:
    """Four of seven letters are Latin, whatever is written above, below and around the other three."""
    assert drops("script", {}, ["हिन्दी abcd"], languages=("hi",)) == [True]
    assert drops("script", {}, ["हिन्दी abc"], languages=("hi",)) == [False]


@pytest.mark.skipif(not CORPUS.exists(), reason="the corpus next to the repository is not there")
def test_real_text_is_in_its_language() -> None:
    """Of lines in the right script hardly any is taken for another language; nearly all would be among English ones."""
    pytest.importorskip("py3langid")
    wrong, caught = {}, {}
    for source in find_documents(CORPUS / "mono"):
        own, read = (source.name,), documents(source, Counts("documents"))
        lines = [line for document, _ in zip(read, range(40), strict=False) for line in document if len(line) > 60][:60]
        lines = [
            line for line, other in zip(lines, drops("script", {}, lines, languages=own), strict=True) if not other
        ]
        if labels_of(source.name) and source.name != "en":
            wrong[source.name] = np.mean(drops("language", {}, lines, languages=own))
            caught[source.name] = np.mean(drops("language", {}, lines, languages=("en",)))
    assert len(wrong) > 80
    assert np.mean(list(wrong.values())) < 0.005 and max(wrong.values()) < 0.1
    assert min(caught.values()) > 0.8 and np.mean(list(caught.values())) > 0.98


@pytest.mark.skipif(not CORPUS.exists(), reason="the corpus next to the repository is not there")
def test_real_text_is_in_the_script_of_its_language() -> None:
    strange = {}
    for source in find_documents(CORPUS / "mono"):
        read = documents(source, Counts("documents"))
        lines = [line for document, _ in zip(read, range(40), strict=False) for line in document]
        right, all_letters = count_letters(lines, scripts_of(source.name))
        strange[source.name] = 1 - right.sum() / all_letters.sum()
    assert len(strange) > 80
    assert {code: share for code, share in strange.items() if share > 0.5} == {}


def test_encode_counts_the_lines_in_other_languages(
    vocab: Path, tmp_path: Path, data_prep: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    """Under the filter's name; a language that the model does not know is named, and stays as it is."""
    pytest.importorskip("py3langid")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/de.txt").write_text(f"{GERMAN}\n{ENGLISH}\n\n{ENGLISH}\n\n{GERMAN}\n")
    (tmp_path / "in/yi.txt").write_text(f"{ENGLISH}\n")
    text = 'name = "x"\nwhere = "in"\nformat = "cc100"\nfiles = "{lang}.txt"\nlanguages = "any"\n[filters.language]\n'
    (tmp_path / "x.toml").write_text(text.replace('"in"', f'"{tmp_path}/in"'))
    flags = ["--corpus", tmp_path / "x.toml", "--vocab", vocab, "--out", tmp_path / "out"]
    done = data_prep("encode", *flags)
    assert done.returncode == 0, done.stderr
    assert "warning: the filter `language` keeps all text in yi: its model does not know" in done.stderr
    manifest = read_manifest(tmp_path / "out/mono")
    counts = manifest.counts["by_language"]
    assert counts["de"]["removed"] == {"language": 2} and counts["de"]["dropped"] == {"language": 1}
    assert counts["de"]["paragraphs"] == 2 and counts["yi"]["paragraphs"] == 1
    assert manifest.settings["x.language_model"].startswith("py3langid 0.4")
