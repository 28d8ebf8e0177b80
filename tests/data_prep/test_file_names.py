"""Whose text a file is, by its name; each once; a pair in one direction; and what is not read is named."""

import gc
import gzip
import json
import os
import sys
import zipfile
from itertools import combinations
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from data_prep.filters.clean import Counts
from data_prep.languages import CC100_LANGUAGES, language_of
from data_prep.readers import Input, documents, find_documents, find_pairs
from data_prep.readers.corpus import TextConfig, corpus_inputs, find_sources
from data_prep.readers.corpus_files import CorpusPath, list_folder
from data_prep.readers.description import read_corpora
from data_prep.readers.file_names import FileNames
from tests.data_prep.conftest import pairs

TABLE = "\ncolumns = {source = 1, target = 2}"


def inputs(folder: Path, layout: str, files: str | list[str], codes: str, *names: str, more: str = "") -> list[Input]:
    """What a description finds in a folder with files of these names."""
    for name in names:
        (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "in" / name).write_text("a\tb\n")
    kind = "languages" if layout in ("cc100", "jsonl") else "pairs"
    text = f'name = "x"\nwhere = "{folder / "in"}"\nformat = "{layout}"\nfiles = {json.dumps(files)}\n{kind} = {codes}'
    (folder / "x.toml").write_text(text + (TABLE if layout == "tsv" else "") + more)
    return corpus_inputs(read_corpora([str(folder / "x.toml")], [])[0])


def by_name(found: list[Input]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for source in found:
        names.setdefault(source.name, []).extend(path.name for path in source.paths)
    return names


CODES = {
    "zh-Hant": "zh_TW zh-tw zh_Hant_TW zh-Hant-CN zho_TW cmn_HK zh_Hani_TW zho_Hant",
    "zh-Hans": "zh zh_CN zh-Hans-TW zh_SG zho cmn_Hani",
    "pt": "pt_BR pt-br por_BR por_Latn_BR",
    "en": "en_US en-GB en_XX eng_Latn en_EN en_001",
    "sr": "sr_Latn sr-Latn-RS sr_Cyrl srp_Cyrl",
    "hi_rom": "hi_rom hi_Latn hin_Latn_IN hi-latn",
    "ja": "ja_JP jpn_Jpan ja_Jpan_JP",
    "es": "es_419 es-MX",
    "gsw-Latn": "gsw_Latn gsw-Latn-CH gsw_latn",
    "qu": "qu qu_PE",
}


@pytest.mark.parametrize("code", CODES)
def test_a_code_is_language_script_and_region(code: str) -> None:
    assert {language_of(spelling) for spelling in CODES[code].split()} == {code}


@pytest.mark.parametrize(
    "code", ["ru_Latn", "de_en", "hi_Arab", "pa_Arab", "zh_Latn", "en_Test", "de_DEU", "kk_Arab_KZ"]
)
def test_what_is_no_code_of_a_language_is_none_of_another(code: str) -> None:
    with pytest.raises(ValueError, match=f"unknown language code '{code}': did you mean"):
        language_of(code)
    with pytest.raises(ValueError, match="unknown language code 'qu_rom': write one of CC-100 or ISO 639"):
        language_of("qu_rom")  # CC-100's word for five of its own


WHOLE = [  # pattern, names, what is read under "any", the codes that are named instead
    ("{lang}*.x", "fr1 frr1 ka2 kab1", {"fr": ["fr1"], "ka": ["ka2"]}, "frr, kab"),
    ("{lang}_*.x", "ru_0 ru_Latn_0 ru_latn_1", {"ru": ["ru_0"]}, "ru_Latn, ru_latn"),
    ("{lang}-*.x", "zh-0 zh-TW-0 zh-Hant-HK-1", {"zh-Hans": ["zh-0"], "zh-Hant": ["zh-Hant-HK-1", "zh-TW-0"]}, ""),
    ("{lang}_*.x", "en_0 en_US_1 pt_BR_0 en_Test_2", {"en": ["en_0", "en_Test_2", "en_US_1"], "pt": ["pt_BR_0"]}, ""),
    ("{lang}_*.x", "sr_Latn_RS_0 bn_0 bn_rom_1", {"bn": ["bn_0"], "bn_rom": ["bn_rom_1"], "sr": ["sr_Latn_RS_0"]}, ""),
    ("*_{lang}.x", "a_pt_br b_br a_foo_br", {"br": ["a_foo_br", "b_br"], "pt": ["a_pt_br"]}, ""),
    ("*-{lang}.x", "a-zh-tw a-hi-latn a-ru-latn", {"hi_rom": ["a-hi-latn"], "zh-Hant": ["a-zh-tw"]}, "ru-latn"),
    ("{lang}/*/{lang}_*.x", "de/a/de_0 de/a/fr_0 de_AT/b/de_AT_0", {"de": ["de/a/de_0", "de_AT/b/de_AT_0"]}, ""),
    ("{src}-{tgt}*.x", "en-fr1 en-frr1 en-ru_Latn_0 en-ru_0", {"en-fr": ["en-fr1"], "en-ru": ["en-ru_0"]}, "en-frr, "),
    ("{src}-{tgt}_*.x", "en-zh-TW_0 en-zh_0", {"en-zh-Hans": ["en-zh_0"], "en-zh-Hant": ["en-zh-TW_0"]}, ""),
    ("{src}-{tgt}.x", "en-pt-br zh-Hant-TW-en", {"en-pt": ["en-pt-br"], "en-zh-Hant": ["zh-Hant-TW-en"]}, ""),
    ("*_{src}_{tgt}.x", "a_en_pt_br b_en_de", {"en-pt": ["a_en_pt_br"], "en-de": ["b_en_de"]}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "names", "read", "named"), WHOLE)
def test_a_name_shows_whole_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pattern: str, names: str, read: dict[str, list[str]], named: str
) -> None:
    """No file is read as another language's or twice, and all others are named."""
    files = [f"{name}.x" for name in names.split()]
    found = inputs(tmp_path, "cc100" if "{lang}" in pattern else "tsv", pattern, '"any"', *files)
    assert {name: sorted(paths) for name, paths in by_name(found).items()} == {
        name: [f"{path}.x" for path in paths] for name, paths in read.items()
    }
    left = len(files) - sum(map(len, read.values()))
    warned = capsys.readouterr().err
    assert named in warned and (left > 0) == ("not read" in warned)


LISTED = [  # pattern, listed, names, read, left
    ("{lang}*.x", "fr ka", "fr1 frr1 ka2 kab1 kabyle", {"fr": ["fr1"], "ka": ["ka2"]}, ["frr", "kab", "kabyle.x"]),
    ("{lang}_*.x", "en pt", "en_US_1 pt_BR_0 en_0", {"en": ["en_0", "en_US_1"], "pt": ["pt_BR_0"]}, []),
    ("{lang}_*.x", "en en_US", "en_US_1 en_GB_0", {"en": ["en_GB_0", "en_US_1"]}, []),
    ("{lang}_*.x", "ru", "ru_0 ru_Latn_0", {"ru": ["ru_0"]}, ["ru_Latn"]),
    ("{lang}_*.x", "gsw", "gsw_0 gsw_Latn_0", {"gsw": ["gsw_0"]}, ["gsw_Latn"]),
    ("{lang}-*.x", "zh zh_TW DE", "zh-0 zh-TW-0 zh_TW-1 DE-0",
     {"zh-Hans": ["zh-0"], "zh-Hant": ["zh_TW-1"], "de": ["DE-0"]}, ["zh-TW"]),
    ("*_{lang}.x", "br", "a_pt_br b_br", {"br": ["b_br"]}, ["pt_br"]),
    ("{lang}.x", "de", "de fr en_US README", {"de": ["de"]}, ["en_US", "fr", "README.x"]),
    ("{lang}.x", "my_zaw|my_zg", "my_zaw my_zg", {"my_zaw": ["my_zaw"]}, ["my_zg.x"]),
    ("{src}-{tgt}_*.x", "en-ru", "en-ru_0 en-ru_RU_1 en-ru_Latn_0",
     {"en-ru": ["en-ru_0", "en-ru_RU_1"]}, ["en-ru_Latn"]),
    ("{src}/*.x", "en-de fr-de", "en/1 fr/1 sw/1", {"en-de": ["en/1"], "de-fr": ["fr/1"]}, ["sw"]),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "listed", "names", "read", "left"), LISTED)
def test_what_a_list_leaves_out_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pattern: str,
    listed: str,
    names: str,
    read: dict[str, list[str]],
    left: list[str],
) -> None:
    layout = "cc100" if "{lang}" in pattern else "tsv"
    found = inputs(tmp_path, layout, pattern, json.dumps(listed.split()), *(f"{name}.x" for name in names.split()))
    assert {name: sorted(paths) for name, paths in by_name(found).items()} == {
        name: [f"{path}.x" for path in paths] for name, paths in read.items()
    }
    warned = capsys.readouterr().err
    for name in left:
        assert name in warned
    assert bool(left) == ("that x does not read" in warned)


def test_a_name_of_two_languages_is_refused(tmp_path: Path) -> None:
    """Canadian English, or Catalan: after a star both may be meant."""
    with pytest.raises(
        ValueError, match=r"a_en_ca\.x may be of en_ca or of ca: rename it, or list the languages in pl"
    ):
        inputs(tmp_path, "cc100", "*_{lang}.x", '"any"', "a_en_ca.x", "a_en_US.x")
    assert by_name(inputs(tmp_path, "cc100", "*_{lang}.x", '["ca"]')) == {"ca": ["a_en_ca.x"]}
    for name, words in (
        ("en_fr_ca", "en_fr and ca or of en and fr_ca"),
        ("en_se_no", "en_se and no or of en and se_no"),
    ):
        with pytest.raises(ValueError, match=f"{name}.x may be of {words}: rename it, or list the pairs"):
            inputs(tmp_path / name, "tsv", "{src}_{tgt}.x", '"any"', f"{name}.x")
    assert by_name(inputs(tmp_path / "en_se_no", "tsv", "{src}_{tgt}.x", '["en-se_no"]')) == {"en-se": ["en_se_no.x"]}


@pytest.mark.parametrize("name", ["de_en", "en_de", "en-fr", "en_ca", "fr_it", "deu_en"])
def test_the_name_of_a_pair_is_none_of_a_language(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.txt").write_text("a")
    with pytest.raises(ValueError, match=rf"{name}\.txt may be of a pair of languages: put it into --para's folder"):
        find_documents(tmp_path)


def test_a_country_is_none_of_a_pair(tmp_path: Path) -> None:
    for name in ("en_CA", "pt_br", "nl_nl", "en_us", "sr_Latn_RS", "es_419"):
        (tmp_path / f"{name}.txt").write_text("a")
    assert [source.name for source in find_documents(tmp_path)] == ["en", "en", "es", "nl", "pt", "sr"]


def test_all_patterns_of_a_language_count(tmp_path: Path) -> None:
    """Those of the first come first, as if there were no other."""
    files, names = ["{lang}/*.x.gz", "{lang}.x", "{lang}/*.x"], ["de/1.x.gz", "de/0.x", "de/2.x.gz", "de.x", "fr/0.x"]
    found = by_name(inputs(tmp_path, "cc100", files, '"any"', *names))
    assert found == {"de": ["de/1.x.gz", "de/2.x.gz", "de.x", "de/0.x"], "fr": ["fr/0.x"]}
    found = by_name(inputs(tmp_path, "cc100", ["{lang}.x", "{lang}/*.x"], '"any"'))
    assert found == {"de": ["de.x", "de/0.x"], "fr": ["fr/0.x"]}, "files of folders, by a later pattern too"


def test_the_first_pattern_that_a_name_fits_counts(tmp_path: Path) -> None:
    """de_AT is Austrian German, not a part AT of the German text."""
    names = ["de.x", "de_0.x", "de_AT.x"]
    assert by_name(inputs(tmp_path, "cc100", ["{lang}.x", "{lang}_*.x"], '"any"', *names)) == {"de": names}
    found = by_name(inputs(tmp_path, "cc100", ["{lang}_*.x", "{lang}.x"], '"any"'))
    assert found == {"de": ["de_0.x", "de_AT.x", "de.x"]}


def test_a_text_that_is_packed_and_unpacked_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the order of the patterns; within one nobody can say which is the newer."""
    files = ["{lang}/*.x.gz", "{lang}/*.x"]
    assert by_name(inputs(tmp_path, "cc100", files, '["de"]', "de/0.x", "de/0.x.gz")) == {"de": ["de/0.x.gz"]}
    assert "has 1 file that x does not read: de/0.x\n" in capsys.readouterr().err
    for pattern, more in (("{lang}/*", ()), ("{lang}/*.x*", ("de/0.x.zst",))):
        with pytest.raises(ValueError, match=r"de/0\.x and .*de/0\.x\.(gz|zst) have names of the same text"):
            inputs(tmp_path, "cc100", pattern, '["de"]', *more)


@pytest.mark.parametrize("pattern", ["{src}-{tgt}_*.x", "*_*_{src}-{tgt}*_*.x"])
def test_the_work_grows_with_the_number_of_names(pattern: str) -> None:
    """Calls of functions, for eight times as many pairs; and for a name in which stars may end at many places."""
    codes = [code for code in CC100_LANGUAGES if code.isalpha()]

    def calls(number: int, more: str = "0") -> int:
        pairs = list(combinations(codes, 2))[:number]
        names = [pattern.format(src=a, tgt=b).replace("*", more) for a, b in pairs]
        counted = []
        gc.disable()  # else what it finalizes of other tests' would be counted
        sys.setprofile(lambda frame, event, argument: counted.append(event))
        try:
            found = FileNames([pattern], {name: CorpusPath("in", name) for name in names}, pairs)
            assert sum(len(found.files_of(pair)) for pair in pairs) == number
        finally:
            sys.setprofile(None)
            gc.enable()
        return len(counted)

    few, many = calls(100), calls(800)
    assert 7 * few < many < 10 * few
    assert calls(1, "0" + "_a" * 30) < 200_000


def test_hidden_folders_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["de/0.x", "de/.snapshot/0.x", ".cache/de/0.x", "de/a/.b/c/1.x", "de/.2.x"]
    assert by_name(inputs(tmp_path, "cc100", "{lang}/*.x", '"any"', *names)) == {"de": ["de/0.x"]}
    entries = list_folder(f"file://{tmp_path / 'in'}", recursive=True)
    assert {place.name for place in entries} == {"de", "de/0.x", "de/a"}
    assert capsys.readouterr().err == ""
    hidden = tmp_path / "in" / ".cache"
    assert [place.name for place in list_folder(str(hidden), recursive=True)] == ["de", "de/0.x"]  # for who names it


def lay_out_pairs(folder: Path, name: str) -> None:
    for code, lines in (("en", "one\ntwo\n"), ("de", "eins\nzwei\n")):
        (folder / f"{name}.{code}").write_text(lines)


SEGMENT = '<tuv xml:lang="{}"><seg>{}</seg></tuv>'


@pytest.mark.parametrize("layout", ["moses", "moses_zip", "tsv", "jsonl_pairs", "tmx"])
def test_a_pair_is_in_one_direction(tmp_path: Path, layout: str) -> None:
    """Whatever the names of its files say: English first, else by the alphabet."""
    (tmp_path / "in").mkdir()
    lay_out_pairs(tmp_path / "in", "X.de-en")
    (tmp_path / "in" / "de-en.tsv").write_text("eins\tone\nzwei\ttwo\n")
    rows = ({"t": {"de": "eins", "en": "one"}}, {"t": {"de": "zwei", "en": "two"}})
    (tmp_path / "in" / "de-en.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with zipfile.ZipFile(tmp_path / "in" / "de-en.txt.zip", "w") as archive:
        for code in ("de", "en"):
            archive.write(tmp_path / "in" / f"X.de-en.{code}", f"X.de-en.{code}")
    units = (SEGMENT.format("de", a) + SEGMENT.format("en", b) for a, b in (("eins", "one"), ("zwei", "two")))
    (tmp_path / "in" / "de-en.tmx").write_text(f"<tmx>{''.join(f'<tu>{both}</tu>' for both in units)}</tmx>")
    files = {"moses": "X.{src}-{tgt}.{side}", "moses_zip": "{src}-{tgt}.txt.zip", "jsonl_pairs": "{src}-{tgt}.jsonl"}
    more = '\ncolumns = {source = "t.{src}", target = "t.{tgt}"}' if layout == "jsonl_pairs" else ""
    for codes in ('"any"', '["de-en"]'):
        (source,) = inputs(tmp_path, layout, files.get(layout, f"{{src}}-{{tgt}}.{layout}"), codes, more=more)
        assert (source.name, source.languages) == ("en-de", ("en", "de"))
        assert list(pairs(source, Counts("pairs"))) == [("one", "eins"), ("two", "zwei")]


def test_pairs_of_others_than_english_go_by_the_alphabet(tmp_path: Path) -> None:
    names = [f"{pair}.x" for pair in ("sw-de", "fr-de", "zh_TW-ar", "sw-en", "en-zh-Hans")]
    found = inputs(tmp_path, "tsv", "{src}-{tgt}.x", '"any"', *names)
    assert [source.name for source in found] == ["en-zh-Hans", "de-fr", "de-sw", "en-sw", "ar-zh-Hant"]


@pytest.mark.parametrize(
    ("layout", "files", "codes", "names", "words"),
    [
        ("moses", "t.{side}", '["en-de", "de-en"]', ["t.en", "t.de"], r"t\.(en|de) is named twice for en-de"),
        ("tsv", "all.x", '["en-de", "de-en"]', ["all.x"], r"all\.x is named twice for en-de"),
        ("tsv", "{src}-{tgt}.x", '"any"', ["en-de.x", "de-en.x"], r"de-en\.x and .*en-de\.x have names of the same"),
        ("tsv", "{src}-{tgt}_*.x", '"any"', ["en-de_1.x", "de-en_1.x"], r"de-en_1\.x and .*en-de_1\.x have names of"),
        ("tsv", "{src}-{tgt}*.x", '"any"', ["en-de\n.x", "de-en\n.x"], "have names of the same text"),
        ("moses", "X.{src}-{tgt}.{side}", '["en-de", "de-en"]',
         [f"X.{pair}.{code}" for pair in ("en-de", "de-en") for code in ("en", "de")], "have names of the same text"),
    ],
)  # fmt: skip
def test_a_pair_in_both_directions_would_count_twice(
    tmp_path: Path, layout: str, files: str, codes: str, names: list[str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        inputs(tmp_path, layout, files, codes, *names)
        find_sources(TextConfig(corpus=(str(tmp_path / "x.toml"),)))


def test_a_direction_that_is_not_listed_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inputs(tmp_path, "tsv", "{src}-{tgt}.x", '["en-de"]', "en-de.x", "de-en.x")
    assert by_name(found) == {"en-de": ["en-de.x"]}
    assert "has 1 file that x does not read: de-en.x\n" in capsys.readouterr().err


def test_a_folder_of_pairs_in_both_directions(tmp_path: Path) -> None:
    """The same name twice is refused; others are one pair."""
    lay_out_pairs(tmp_path, "X.de-en")
    lay_out_pairs(tmp_path, "Y.en-de")
    assert [source.name for source in find_pairs(tmp_path)] == ["en-de", "en-de"]
    assert [list(pairs(source, Counts("pairs"))) for source in find_pairs(tmp_path)] == [
        [("one", "eins"), ("two", "zwei")]
    ] * 2
    for code in ("en", "pt"):
        (tmp_path / f"Z.en-pt.{code}").write_text("a\n")
        (tmp_path / f"Z.pt_br-en.{code.replace('pt', 'pt_br')}").write_text("b\n")
    assert [source.name for source in find_pairs(tmp_path)] == ["en-de", "en-de", "en-pt", "en-pt"]
    lay_out_pairs(tmp_path, "X.en-de")
    with pytest.raises(ValueError, match=r"X\.de-en\.de and .*X\.en-de\.de have names of the same text"):
        find_pairs(tmp_path)


@pytest.mark.parametrize("name", ["de.txt", "de.txt.gz", "de.jsonl", "de.parquet"])
def test_an_input_that_grows_or_shrinks_while_it_is_read_is_an_error(tmp_path: Path, name: str) -> None:
    text = "a b " * 200
    line = (json.dumps({"text": text}) + "\n" if name.endswith("jsonl") else f"{text}\n\n").encode()
    packed = gzip.compress if name.endswith("gz") else bytes
    path = tmp_path / name
    if name.endswith("parquet"):
        parquet.write_table(pa.table({"text": [text] * 2000}), path, row_group_size=100)
    else:
        path.write_bytes(packed(line * 2000))
    (source,) = find_documents(tmp_path)
    before, found = source.size, documents(source, Counts("documents"))
    next(found)
    with path.open("ab") as file:
        file.write(packed(line))
    words = rf"{name} had {before} bytes before it was read, and has {path.stat().st_size} after it: give the command"
    with pytest.raises(ValueError, match=words):
        list(found)
    if name in ("de.txt", "de.jsonl"):  # what is left of the others is damaged
        (source,) = find_documents(tmp_path)
        before, found = source.size, documents(source, Counts("documents"))
        next(found)
        os.truncate(path, 1000 * len(line))
        with pytest.raises(ValueError, match=rf"{name} had {before} bytes .* has {1000 * len(line)} after it"):
            list(found)


def test_a_field_that_a_json_object_has_twice(tmp_path: Path) -> None:
    """It is nobody's guess which one counts; of fields that nobody reads it is no matter."""
    lines = ['{"id": 1, "id": 2, "text": "a"}', '{"text": "b", "m": {"k": 1, "k": 2}}']
    (tmp_path / "de.jsonl").write_text("\n".join(lines))
    assert list(documents(find_documents(tmp_path)[0], Counts("documents"))) == [["a"], ["b"]]
    (tmp_path / "de.jsonl").write_text('{"text": "a"}\n{"text": "a", "id": 1, "text": "b"}\n')
    with pytest.raises(ValueError, match=r"de\.jsonl, line 2 has the field 'text' twice in one object: remove one"):
        list(documents(find_documents(tmp_path)[0], Counts("documents")))
    names = {
        "in/de.jsonl": '{"text": "a", "m": {"k": 1, "k": 2}}\n',
        "in/fr.jsonl": '{"text": "a", "m": 1, "m": {"k": 1}}',
    }
    (tmp_path / "in").mkdir()
    for name, line in names.items():
        (tmp_path / name).write_text(line.strip() + '\n{"text": "b", "m": {"k": 1}}\n')
    more = '\n[filters.column."m.k"]\nmin = 0'
    for source in inputs(tmp_path, "jsonl", "{lang}.jsonl", '"any"', more=more):
        with pytest.raises(ValueError, match=r"line 1 has the field '[mk]' twice in one object"):
            list(documents(source, Counts("documents")))
