"""Corpus descriptions: every format and compression, local and by URI; the ready ones; mistakes in words."""

import bz2
import codecs
import gzip
import lzma
import math
import re
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest

from data_prep.filters.clean import Counts, Sides, make_filters
from data_prep.filters.columns import column_filters
from data_prep.languages import CC100_LANGUAGES
from data_prep.readers import READERS, Input, documents
from data_prep.readers.corpus import TextConfig, corpus_inputs, find_sources
from data_prep.readers.corpus_files import CorpusPath, filesystem, list_folder
from data_prep.readers.description import read_corpora, ready_descriptions
from data_prep.readers.reader import ScoredPair
from tests.data_prep.conftest import pairs
from tests.rows import write_records

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "data" / "corpus"
PAIRS = [("one & two", "ein & zwei"), ("three", "drei")]


def describe(folder: Path, text: str, **values: str) -> str:
    path = folder / "a.toml"
    path.write_text("\n".join([*(f'{key} = "{value}"' for key, value in values.items()), text]), encoding="utf-8")
    return str(path)


def inputs(description: str, *where: str, allow_missing: bool = False) -> list[Input]:
    (corpus,) = read_corpora([description], where)
    return corpus_inputs(corpus, allow_missing)


def read_pairs(source: Input) -> tuple[list[tuple[str, str]], Counts]:
    counts = Counts("pairs")
    return list(pairs(source, counts)), counts


TMX = """<?xml version="1.0" encoding="UTF-8"?>
<tmx version="1.4"><header srclang="en"/><body>
<tu><tuv xml:lang="en"><seg>one &amp; <bpt i="1">&lt;b&gt;</bpt>two<ept i="1">x</ept></seg></tuv>
<tuv xml:lang="de"><prop type="a">no</prop><seg>ein &#38; <hi>zwei</hi></seg></tuv></tu>
<tu tuid="2"><tuv lang="DE"><seg>drei</seg></tuv><tuv
 lang="EN"><seg>three</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>alone</seg></tuv></tu></body></tmx>
"""


def write_para(folder: Path, layout: str) -> str:
    """Files of PAIRS; the description's file pattern."""
    sides = ["".join(pair[side] + "\n" for pair in PAIRS) for side in (0, 1)]
    if layout == "moses":
        (folder / "X.en-de.en.gz").write_bytes(gzip.compress(sides[0].encode()))
        (folder / "X.en-de.de.gz").write_bytes(gzip.compress(sides[1].encode()))
        return "X.{src}-{tgt}.{side}.gz"
    if layout == "moses_zip":
        with zipfile.ZipFile(folder / "en-de.txt.zip", "w") as archive:
            archive.writestr("X.en-de.en", sides[0])
            archive.writestr("X.en-de.de", sides[1])
        return "{src}-{tgt}.txt.zip"
    if layout == "wikimatrix_tsv":
        text = "".join(f"1.0{i}\t{a}\t{b}\n" for i, (a, b) in enumerate(PAIRS)) + "no number\ta\tb\n"
        (folder / "WikiMatrix.en-de.tsv.gz").write_bytes(gzip.compress(text.encode()))
        return "WikiMatrix.{src}-{tgt}.tsv.gz"
    if layout == "tsv":
        text = "".join(f"{i}\t{b}\t_\t1.0{i}\t{a}\tmore\n" for i, (a, b) in enumerate(PAIRS)) + "1\ttoo\tfew\n"
        (folder / "en-de.gz").write_bytes(gzip.compress(text.encode()))
        return "{src}-{tgt}.gz"
    if layout.endswith("_pairs"):
        rows = [{"translation": {"en": a, "de": b}, "margin": 1.01 + i} for i, (a, b) in enumerate(PAIRS)]
        return write_records(folder / f"en-de.{layout.removesuffix('_pairs')}", rows).replace("en-de", "{src}-{tgt}")
    if layout == "ccaligned_tsv":
        text = "".join(f"{a}\t{b}\t1.0{i}\n" for i, (a, b) in enumerate(PAIRS)) + "one column\n"
        (folder / "en_XX-de_DE.tsv.xz").write_bytes(lzma.compress(text.encode()))
        return "{src}-{tgt}.tsv.xz"
    (folder / "en-de.tmx.bz2").write_bytes(bz2.compress(TMX.encode()))
    return "{src}-{tgt}.tmx.bz2"


COLUMNS = {"tsv": "columns = {source = 5, target = 2, score = 4}"} | {
    f"{kind}_pairs": 'columns = {source = "translation.{src}", target = "translation.{tgt}", score = "margin"}'
    for kind in ("jsonl", "parquet", "arrow")
}


@pytest.mark.parametrize("wanted", ["any", "listed"])
@pytest.mark.parametrize("layout", [name for name, reader in READERS.items() if reader.task == "para"])
def test_every_format_of_pairs(tmp_path: Path, layout: str, wanted: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    pattern = write_para(data, layout)
    codes = "en_XX-de_DE" if layout == "ccaligned_tsv" else "en-de"
    line = 'pairs = "any"' if wanted == "any" else f'pairs = ["{codes}"]'
    line += "\n" + COLUMNS.get(layout, "")
    (source,) = inputs(describe(tmp_path, line, name="x", where=str(data), format=layout, files=pattern))
    assert (source.name, source.languages, source.format) == ("en-de", ("en", "de"), layout)
    found, counts = read_pairs(source)
    assert found == PAIRS
    assert dict(counts.dropped) == ({"malformed": 1} if layout.endswith("tsv") or layout == "tmx" else {})
    assert counts.units_in == len(PAIRS) + counts.dropped.total()


def read_tmx(folder: Path, data: bytes, name: str = "en-de.tmx") -> tuple[list[tuple[str, str]], Counts]:
    (folder / name).write_bytes(data)
    place = CorpusPath(str(folder), name)
    return read_pairs(Input("en-de", ("en", "de"), (place,), (), "tmx"))


def tmx(body: str, declaration: str = "") -> str:
    return f'{declaration}<tmx version="1.4"><header srclang="en"/><body>{body}</body></tmx>'


def unit(a: str, b: str, code_a: str = "en", code_b: str = "de") -> str:
    first, second = (f'<tuv xml:lang="{c}"><seg>{s}</seg></tuv>' for s, c in ((a, code_a), (b, code_b)))
    return f"<tu>{first}\n{second}</tu>"


ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "iso-8859-1", "windows-1252", "gb18030"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_tmx_in_any_encoding_is_that_in_utf8(tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a mark or a declaration, also where a chunk of the file ends inside of a character or reference."""
    monkeypatch.setattr("data_prep.readers.corpus_files.CHUNK", 1001)
    wide = encoding.startswith(("utf", "gb"))
    words = "尊厳 🙂 ß" if wide else "Würde ß ÿ"
    units = "".join(unit(f"{i} {words} &#8482;", f"&lt;{words}\r\n{i}") + "\r\n" for i in range(3000))
    declared = "utf-8" if encoding == "utf-8-sig" else encoding
    text = tmx(units, f"<?xml version='1.0' encoding='{declared}' ?>\n")
    found, counts = read_tmx(tmp_path, text.encode(encoding))
    assert found == [(f"{i} {words} ™", f"<{words} {i}") for i in range(3000)]
    assert not counts.repaired and not counts.dropped
    source = Input("en-de", ("en", "de"), (CorpusPath(str(tmp_path), "en-de.tmx"),), (), "tmx")
    sizes = [sum(map(len, block.sides)) for block in READERS[source.format].blocks(source, 10_000)]
    assert len(sizes) > 10 and max(sizes) < 10_100


def test_a_real_tmx_reads_as_a_tree_of_it_says(tmp_path: Path) -> None:
    """Against ElementTree: attributes, notes, several languages, region codes, inline elements, comments and CDATA."""
    body = "".join(
        f"""<tu tuid="{i}" srclang="*all*"><note>a &lt;seg> in a note</note><prop type="x">p</prop>
        <tuv xml:lang="fr-CA"><seg>oui {i}</seg></tuv><!-- {unit("no", "nein")} -->
        <tuv xml:lang="{("de-DE", "de", "DE_at", "deu")[i % 4]}"><prop>x</prop><seg>Ja <hi
        type="b">fett {i}</hi>.</seg></tuv>
        <tuv lang="{("en-US", "EN", "en", "en-GB")[i % 4]}"><seg><![CDATA[a <b> & {i} ]]>&amp;amp; d
        <hi><hi>e</hi></hi>f</seg></tuv></tu>"""
        for i in range(50)
    )
    text = tmx(body, "<!DOCTYPE tmx SYSTEM 'tmx14.dtd'>\n")
    expected = []
    for element in ElementTree.fromstring(text).iter("tu"):
        _, german, english = ("".join(seg.itertext()).replace("\n", " ") for seg in element.iter("seg"))
        expected.append((english, german))
    found, counts = read_tmx(tmp_path, text.encode())
    assert found == expected and "<b> & 7 &amp; d" in found[7][0] and not counts.dropped


@pytest.mark.parametrize(
    ("segment", "text"),
    [
        ('a<bpt i="1">{\\b <sub>inner</sub></bpt>b<ept i="1">}</ept>c', "abc"),
        ("a<ph><ph><sub>x</sub></ph>y</ph>b<it pos='begin'/>c<ut>z</ut>", "abc"),
        ("<hi>a<ph>x</ph></hi>b", "ab"),
        ("a&nbsp;b&eacute;", "a\u00a0bé"),  # HTML's, which tools write without declaring them
        ("a\x02&#x1F;&#2;b&#9;c", "ab\tc"),  # characters that XML does not have
        ("a<!-- b -->c<?d e?>", "ac"),
        ("a\x02&#x110000;&#99999999;b", "ab"),  # no characters at all
        ("a<ph>&unheardof;</ph>b", "ab"),
    ],
)
def test_what_is_text_in_a_segment(tmp_path: Path, segment: str, text: str) -> None:
    found, counts = read_tmx(tmp_path, tmx(unit(segment, "x")).encode())
    assert found == [(text, "x")]
    assert dict(counts.repaired) == ({"control_character": 3} if "\x02" in segment else {})


def test_units_of_no_use_are_counted(tmp_path: Path) -> None:
    units = [
        unit("a", "b"),
        unit("a", "b", "en", "fr"),  # malformed
        unit("a", "b", "en-Cyrl", "de"),  # malformed: another script
        unit("&unheardof;", "b"),  # malformed
        unit("&unheardof;&eacute;", "b"),  # malformed
        "<tu/>",  # malformed
        unit("a", " "),  # empty_side
        unit(" ", "b"),  # empty_side
        unit("a" * 100_001, "b"),  # long_line
        unit("a", "b" * 100_001),  # long_line
        unit("ü" * 50_001, "b"),  # long_line
        unit("ü" * 50_000, "b"),
        unit("one", "first").replace("</tu>", '<tuv xml:lang="en-GB"><seg>later</seg></tuv></tu>'),
    ]
    found, counts = read_tmx(tmp_path, tmx("".join(units)).encode())
    assert found == [("a", "b"), ("ü" * 50_000, "b"), ("one", "first")]
    assert dict(counts.dropped) == {"malformed": 5, "empty_side": 2, "long_line": 3}
    assert counts.units_in == len(units)


def test_elements_of_a_tmx_may_be_as_deep_as_is_allowed(tmp_path: Path) -> None:
    """A hundred of them, <seg> being the fifth; and a file without a byte is no text."""
    assert read_tmx(tmp_path, tmx(unit("<hi>" * 95 + "a" + "</hi>" * 95, "b")).encode())[0] == [("a", "b")]
    with pytest.raises(ValueError, match="over 100 elements inside of each other"):
        read_tmx(tmp_path, tmx(unit("<hi>" * 96 + "a" + "</hi>" * 96, "b")).encode())
    assert read_tmx(tmp_path, b"")[0] == []


def test_variants_and_extensions_of_a_tmx_language_are_left_out(tmp_path: Path) -> None:
    german = ["de-1996", "de-CH-1901", "DE_1901", "de-DE-u-co-phonebk", "de-x-mine", "de-Latn-1996"]
    units = [unit("a", code, "en-GB-oxendict", code) for code in german]
    others = [unit("a", "b", "en", code) for code in ("de-Cyrl-1996", "x-de", "nds-1996")]
    found, counts = read_tmx(tmp_path, tmx("".join(units + others)).encode())
    assert found == [("a", code) for code in german] and counts.dropped == {"malformed": 3}


def test_case_of_a_tmx_language_does_not_matter(tmp_path: Path) -> None:
    """Also of a language that CC-100 does not have, such as Maltese in DGT's translation memories."""
    text = tmx("".join(unit("a", code, "EN-GB", code) for code in ("MT-01", "mt", "Mt-MT")))
    (tmp_path / "en-mt.tmx").write_text(text)
    source = Input("en-mt", ("en", "mt"), (CorpusPath(str(tmp_path), "en-mt.tmx"),), (), "tmx")
    found, counts = read_pairs(source)
    assert found == [("a", "MT-01"), ("a", "mt"), ("a", "Mt-MT")] and not counts.dropped


def test_a_tmx_says_which_side_is_which_whatever_its_name(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "de-en.tmx").write_text(tmx(unit("one", "eins")))
    (source,) = inputs(
        describe(tmp_path, 'pairs = "any"', name="x", where=str(data), format="tmx", files="{src}-{tgt}.tmx")
    )
    assert source.languages == ("en", "de") and read_pairs(source)[0] == [("one", "eins")]


@pytest.mark.parametrize("order", ["le", "be"])
def test_the_mark_of_a_tmx_says_the_order_of_its_bytes(tmp_path: Path, order: str) -> None:
    mark = {"le": codecs.BOM_UTF16_LE, "be": codecs.BOM_UTF16_BE}[order]
    found, counts = read_tmx(tmp_path, mark + tmx(unit("Würde", "尊厳")).encode(f"utf-16-{order}"))
    assert found == [("Würde", "尊厳")] and not counts.repaired


def test_damaged_bytes_of_a_tmx_are_repaired_and_counted(tmp_path: Path) -> None:
    found, counts = read_tmx(tmp_path, tmx(unit("th\ud83dree", "drei")).encode("utf-16", "surrogatepass"))
    assert (found, counts.repaired["invalid_utf8"]) == ([("th\ufffdree", "drei")], 1)
    found, counts = read_tmx(tmp_path, tmx(unit("Würde", "für")).encode("latin-1"))
    assert (found, counts.repaired["invalid_utf8"]) == ([("W\ufffdrde", "f\ufffdr")], 2)
    (tmp_path / "en-de.tmx").write_bytes(tmx(unit("Würde", "für") + unit("one", "eins") * 3).encode("latin-1"))
    source = Input("en-de", ("en", "de"), (CorpusPath(str(tmp_path), "en-de.tmx"),), (), "tmx")
    repaired = [block.repaired["invalid_utf8"] for block in READERS["tmx"].blocks(source, 1)]
    assert repaired == [2, 0, 0, 0], "in the block that has the damage, once"


SOUND = tmx(unit("one", "eins") + unit("two", "zwei"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        *((SOUND[:end], r"line \d.*truncated or damaged") for end in (1, 40, 99, 150, SOUND.index("</body"), -1)),
        (SOUND.encode("utf-16")[:-1], "truncated or damaged"),
        (SOUND + "<tmx/>", r"line 3, column \d+ \(junk after document element\)"),
        (SOUND.replace("</tuv>", "", 1), "mismatched tag"),
        (tmx(unit("a & b", "c")), "not well-formed"),
        (tmx("<tu><tuv xml:lang='en'><seg>a"), "mismatched tag"),
        (tmx("<tu>" * 75_000), "over 100 elements inside of each other"),
        (tmx("<tu><tuv>" + "<seg/>" * 50_000), "mismatched tag"),
        (SOUND.replace("<body>", "<body><!--" + "x" * 9_000_000), "a tag or comment of over 8,000,000 bytes"),
        ("<!DOCTYPE tmx [<!ENTITY a 'b'>]>" + SOUND, "declares the entity 'a', but declarations are not read: replace"),
        ("<!DOCTYPE tmx [<!ENTITY a SYSTEM 'file:///etc/passwd'>]>" + SOUND, "declares the entity 'a'"),
        ("<!DOCTYPE tmx [<!ENTITY % a SYSTEM 'file:///etc/passwd'> %a;]>" + SOUND, "declares the entity 'a'"),
        ("<?xml version='1.0' encoding='klingon'?>" + SOUND, "encoding 'klingon', which is unknown: convert it"),
        ("<html><body/></html>", "it begins with <html>, not with <tmx>"),
    ],
)  # fmt: skip
def test_what_is_no_sound_tmx_is_an_error(tmp_path: Path, data: str | bytes, message: str) -> None:
    """At once: nothing here takes time that grows faster than the file, or reads anything else."""
    begun = time.process_time()
    with pytest.raises(ValueError, match=rf"en-de\.tmx .*{message}"):
        read_tmx(tmp_path, data if isinstance(data, bytes) else data.encode())
    assert time.process_time() - begun < 5


def test_memory_does_not_grow_with_a_tmx(tmp_path: Path) -> None:
    """Neither with its units nor with what one of them has in it; packed, for 22 MB are few bytes so."""
    many = (unit("many words " * 20, "viele Worte " * 20) * 1000).encode()
    long = b"<tu><prop>" + b"x" * 6_000_000 + b"</prop><tuv xml:lang='en'><seg>" + b"y " * 3_000_000
    head, tail = tmx("|").encode().split(b"|")
    with gzip.open(tmp_path / "en-de.tmx.gz", "wb", compresslevel=1) as file:
        file.write(head + many * 10 + long + b"</seg></tuv>" + b"<tuv xml:lang='fr'/>" * 100_000 + b"</tu>" + tail)
    place = CorpusPath(str(tmp_path), "en-de.tmx.gz")
    source = Input("en-de", ("en", "de"), (place,), (), "tmx")
    counts = Counts("pairs")
    tracemalloc.start()
    found = sum(1 for _ in pairs(source, counts))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found, dict(counts.dropped)) == (10_000, {"malformed": 1})
    assert peak < 6_000_000


def test_a_score_that_is_no_number_drops_the_pair(tmp_path: Path) -> None:
    scores = ["1.2", "nan", "NaN", "-nan", "inf", "", "x", "1.3"]
    (tmp_path / "en-de.tsv").write_text("".join(f"{score}\ta{i}\tb\n" for i, score in enumerate(scores)))
    path = describe(
        tmp_path, 'pairs = "any"', name="x", where=str(tmp_path), format="wikimatrix_tsv", files="{src}-{tgt}.tsv"
    )
    found, counts = read_pairs(inputs(path)[0])
    assert (found, dict(counts.dropped)) == ([("a0", "b"), ("a7", "b")], {"malformed": 6})


def test_a_row_is_never_cut_in_two(tmp_path: Path) -> None:
    """One of a megabyte is dropped whole, wherever a block ends; and one of 300,000 bytes with two short sides
    stays. One with a long side goes."""
    row = "1.1\ta\tb\n"
    for before in (0, 26_000, 29_000):  # rows
        long = "1.1\t" + "x " * 600_000 + row * 3  # its end looks like a row
        (tmp_path / "en-de.tsv").write_text(
            row * before + long + "y" * 300_000 + "\t1.2\tc\td\n" + row * 5 + "1.2\tc\td\te\n"
            f"1.2\tc\t{'d' * 100_001}\n1.2\t{'c' * 100_001}\td\n"
        )
        columns = 'pairs = "any"\ncolumns = ["score", "source", "target"]'
        path = describe(
            tmp_path, columns, name="x", where=str(tmp_path), format="wikimatrix_tsv", files="{src}-{tgt}.tsv"
        )
        found, counts = read_pairs(inputs(path)[0])
        assert found == [("a", "b")] * (before + 7)
        assert dict(counts.dropped) == {"long_line": 3, "malformed": 2}  # both have a column too many


def test_the_longest_rows_and_sides(tmp_path: Path) -> None:
    """In bytes: a row of 500,000 and a side of 100,000 stay, those of one more go."""
    side = "ü" * 50_000
    rows = ["a\tb\t" + "x" * (size - 4) for size in (500_000, 500_001)]
    rows += [f"{a}\t{b}" for a, b in ((side, "b"), ("a", side), (f"{side}x", "b"), ("a", f"{side}x"))]
    (tmp_path / "en-de.tsv").write_text("".join(f"{row}\n" for row in rows))
    text = 'pairs = "any"\ncolumns = {source = 1, target = 2}'
    (source,) = inputs(describe(tmp_path, text, name="x", where=str(tmp_path), format="tsv", files="{src}-{tgt}.tsv"))
    found, counts = read_pairs(source)
    assert found == [("a", "b"), (side, "b"), ("a", side)] and dict(counts.dropped) == {"long_line": 3}


def test_two_spellings_of_a_language_are_one_and_copies_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """en.txt next to eng.txt: two texts are one language; the same bytes are reported, in pairs too."""
    mono, para = tmp_path / "mono", tmp_path / "para"
    mono.mkdir()
    para.mkdir()
    for name, text in (("en.txt", "ab"), ("eng.txt", "xy"), ("de.txt", "ab"), ("fr.txt", ""), ("fra.txt", "")):
        (mono / name).write_text(text)
    for name, text in (("a.de-en.de", "x"), ("a.de-en.en", "y"), ("b.eng-deu.deu", "x"), ("b.eng-deu.eng", "z")):
        (para / name).write_text(text)
    sources = find_sources(TextConfig(mono=mono, para=para))
    assert [source.name for source in sources["mono"].inputs] == ["de", "en", "en", "fr", "fr"]
    assert [source.name for source in sources["para"].inputs] == ["en-de", "en-de"]
    assert capsys.readouterr().err == ""
    (mono / "eng.txt").write_text("ab")
    (para / "b.eng-deu.eng").write_text("y")
    find_sources(TextConfig(mono=mono, para=para))
    assert capsys.readouterr().err.splitlines() == [
        f"warning: the text of {mono}/eng.txt counts twice as en, because {mono}/en.txt has the same bytes: remove one",
        f"warning: the text of {para}/b.eng-deu.eng and {para}/b.eng-deu.deu counts twice as en-de, because "
        f"{para}/a.de-en.de and {para}/a.de-en.en have the same bytes: remove one",
    ]
    shared = {"where": str(mono), "format": "cc100", "files": "{lang}.txt"}
    for filters in (("", ""), ("[filters.exact_duplicates]", ""), ("[filters.exact_duplicates]",) * 2):
        corpora = []
        for code, own in zip(("en", "eng"), filters, strict=True):
            (tmp_path / code).mkdir(exist_ok=True)
            corpora.append(describe(tmp_path / code, f'languages = ["{code}"]\n{own}', name=code, **shared))
        find_sources(TextConfig(corpus=tuple(corpora)))  # the filter removes the copy where both have it
        assert ("eng.txt counts twice as en" in capsys.readouterr().err) == ("" in filters)


def test_two_columns_of_a_file_are_two_texts(tmp_path: Path) -> None:
    (tmp_path / "en.jsonl").write_text('{"title": "a", "text": "b"}\n')
    shared: dict[str, str] = {"where": str(tmp_path), "format": "jsonl", "files": "{lang}.jsonl"}
    corpora = []
    for column in ("title", "text"):
        (tmp_path / column).mkdir()
        columns = f'languages = ["en"]\ncolumns = ["{column}"]'
        corpora.append(describe(tmp_path / column, columns, name=column, **shared))
    inputs = find_sources(TextConfig(corpus=tuple(corpora)))["mono"].inputs
    assert [source.columns for source in inputs] == [("title",), ("text",)]


def test_a_file_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    """By the flags, by two descriptions, by two spellings of a list or through a link; but one file may be of two
    pairs."""
    (tmp_path / "de.txt").write_text("a")
    shared: dict[str, str] = {"where": str(tmp_path), "format": "cc100", "files": "{lang}.txt"}
    one = describe(tmp_path, 'languages = ["de"]', name="one", **shared)
    words = r"de\.txt is named twice for de \(by {} and by {}\), so its text would count twice: name it once"
    with pytest.raises(ValueError, match=words.format("--mono or --para", "corpus one")):
        find_sources(TextConfig(mono=tmp_path, corpus=(one,)))
    two = Path(one).rename(tmp_path / "two.toml")
    one = describe(tmp_path, 'languages = ["de"]', name="two", **shared)
    with pytest.raises(ValueError, match=words.format("corpus one", "corpus two")):
        find_sources(TextConfig(corpus=(str(two), one)))
    for link in (Path.symlink_to, Path.hardlink_to):
        link(tmp_path / "deu.txt", tmp_path / "de.txt")
        for listed in ('["de", "de"]', '["de", "deu"]'):
            with pytest.raises(ValueError, match="named twice for de"):
                find_sources(TextConfig(corpus=(describe(tmp_path, f"languages = {listed}", name="one", **shared),)))
        (tmp_path / "deu.txt").unlink()
    (tmp_path / "all.tmx").write_text(TMX)
    shared |= {"format": "tmx", "files": "all.tmx"}
    several = describe(tmp_path, 'pairs = ["en-de", "en-fr", "de-fr"]', name="one", **shared)
    assert len(find_sources(TextConfig(corpus=(several,)))["para"].inputs) == 3


@pytest.mark.parametrize(
    ("layout", "files", "codes", "columns", "message"),
    [
        ("cc100", "all.txt", 'languages = ["en", "de"]', "", "all.txt is named for en and for de"),
        ("cc100", "{lang}.txt", 'languages = ["fr", "it"]', "", "it.txt is named for fr and for it"),
        ("tsv", "all.tsv", 'pairs = ["en-de", "en-fr"]', "{source = 1, target = 2}", "for en-de and for en-fr"),
        ("jsonl_pairs", "all.jsonl", 'pairs = ["en-de", "en-fr"]', '{source = "{src}", target = "{tgt}"}', ""),
        ("moses", "*.{src}-{tgt}.*", 'pairs = "any"', "", "moses has a file for each side: write {side} where"),
        (
            "tsv",
            "T.{src}-{tgt}.{side}.tsv",
            'pairs = "any"\ncolumns = {source = 1, target = 2}',
            "",
            "only format moses has a file for each side: take",
        ),
    ],
)
def test_text_is_of_one_language(
    tmp_path: Path, layout: str, files: str, codes: str, columns: str, message: str
) -> None:
    """A file that is named for two is refused, but where columns or the file itself tell them apart."""
    for name in ("all.txt", "all.tsv", "all.jsonl", "it.txt", "X.en-de.en", "X.en-de.de"):
        (tmp_path / name).write_text("a\tb\n")
    (tmp_path / "fr.txt").symlink_to("it.txt")
    lines = f"{codes}\ncolumns = {columns}" if columns else codes
    path = describe(tmp_path, lines, name="x", where=str(tmp_path), format=layout, files=files)
    if message:
        with pytest.raises(ValueError, match=re.escape(message)):
            find_sources(TextConfig(corpus=(path,)))
    else:
        assert len(find_sources(TextConfig(corpus=(path,)))["para"].inputs) == 2


def test_members_of_a_zip_file_tell_its_pairs_apart(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for pair in ("de-en", "en-fr"):
            for code in pair.split("-"):
                archive.writestr(f"X.{pair}.{code}", f"{pair} {code}\n")
    values = {"name": "x", "where": str(tmp_path), "format": "moses_zip", "files": "all.zip"}
    corpus = describe(tmp_path, 'pairs = ["de-en", "en-fr"]', **values)
    found = find_sources(TextConfig(corpus=(corpus,)))["para"].inputs
    expected = [("en-de", [("de-en en", "de-en de")]), ("en-fr", [("en-fr en", "en-fr fr")])]
    assert [(source.name, read_pairs(source)[0]) for source in found] == expected


def test_the_settings_of_every_description_count(tmp_path: Path) -> None:
    """Of two of one kind of text, and of one of the other."""
    corpora = []
    for name, text in (("one", 'languages = ["de"]'), ("two", 'languages = ["en"]'), ("three", 'pairs = ["de-en"]')):
        (tmp_path / name).mkdir()
        for file in ("de", "en", "X.de-en.de", "X.de-en.en"):
            (tmp_path / name / file).write_text(name + file)
        kind = ("moses", "X.{src}-{tgt}.{side}") if name == "three" else ("lines", "{lang}")
        values = dict(zip(("format", "files"), kind, strict=True)) | {"name": name, "where": str(tmp_path / name)}
        corpora.append(describe(tmp_path / name, text, **values))
    sources = find_sources(TextConfig(corpus=tuple(corpora)))
    keys = {task: {key.partition(".")[0] for key in sources[task].settings} for task in sources}
    assert keys == {"mono": {"one", "two"}, "para": {"three"}}


def test_a_column_says_the_language(tmp_path: Path) -> None:
    """One file for two languages, whose records a filter of a column divides; the same filter twice is an error."""
    (tmp_path / "all.jsonl").write_text('{"text": "a", "code": "en"}\n{"text": "b", "code": "de"}\n')
    for second, error in (("de", ""), ("en", "is named for en and for de")):
        paths = []
        for name, code in (("en", "en"), ("de", second)):
            lines = f'languages = ["{name}"]\n[filters.column]\ncode.one_of = ["{code}"]'
            (tmp_path / name).mkdir(exist_ok=True)
            values = dict(name=name, where=str(tmp_path), format="jsonl", files="all.jsonl")
            paths.append(describe(tmp_path / name, lines, **values))
        if error:
            with pytest.raises(ValueError, match=error):
                find_sources(TextConfig(corpus=tuple(paths)))
        else:
            assert len(find_sources(TextConfig(corpus=tuple(paths)))["mono"].inputs) == 2


@pytest.mark.parametrize("layout", ["cc100", "tsv"])
def test_a_star_after_a_code_that_may_have_a_country(tmp_path: Path, layout: str) -> None:
    """The longest reading counts, and no file of a language is left out."""
    mono = layout == "cc100"
    names = ("en_0", "en_GB_0", "en_US_0", "kk_Arab_0") if mono else ("en_pt_br_0", "en_de_1", "en_fr_CA_0")
    for name in names:
        (tmp_path / f"{name}.txt").write_text("a\tb\n")
    lines = 'languages = "any"' if mono else 'pairs = "any"\ncolumns = {source = 1, target = 2}'
    files = "{lang}_*.txt" if mono else "{src}_{tgt}_*.txt"
    values = dict(name="x", where=str(tmp_path), format=layout, files=files)
    found = [(source.name, source.paths[0].name) for source in inputs(describe(tmp_path, lines, **values))]
    if mono:
        assert sorted(found) == [("en", f"{name}.txt") for name in names[:3]]
    else:
        assert sorted(found) == [("en-de", "en_de_1.txt"), ("en-fr", "en_fr_CA_0.txt"), ("en-pt", "en_pt_br_0.txt")]
        listed = describe(tmp_path, lines.replace('"any"', '["en-pt_br"]'), **values)
        assert [source.paths[0].name for source in inputs(listed)] == ["en_pt_br_0.txt"]


def test_a_name_that_shows_two_pairs_is_refused(tmp_path: Path) -> None:
    for name in ("en_de", "en_pt_br", "en_zh_tw"):  # en_pt and br would be a country's English, and Breton
        (tmp_path / f"{name}.tsv").write_text("a\tb\n")
    columns = "columns = {source = 1, target = 2}"
    values = dict(name="x", where=str(tmp_path), format="tsv", files="{src}_{tgt}.tsv")
    found = inputs(describe(tmp_path, f'pairs = "any"\n{columns}', **values))
    assert [source.name for source in found] == ["en-de", "en-pt", "en-zh-Hant"]
    (tmp_path / "en_fr_ca.tsv").write_text("a\tb\n")
    with pytest.raises(ValueError, match=r"en_fr_ca\.tsv may be of en_fr and ca or of en and fr_ca: rename it, or"):
        inputs(describe(tmp_path, f'pairs = "any"\n{columns}', **values))
    (source,) = inputs(describe(tmp_path, f'pairs = ["en-fr_ca"]\n{columns}', **values))
    assert source.name == "en-fr"


def test_an_empty_cell_at_the_end_of_a_row_is_a_side_without_text(tmp_path: Path) -> None:
    (tmp_path / "en-de.tsv").write_text("a\tb\nc\t\nd\t\t\n\te\nf\n")
    text = 'pairs = "any"\ncolumns = {source = 1, target = 2}'
    (source,) = inputs(describe(tmp_path, text, name="x", where=str(tmp_path), format="tsv", files="{src}-{tgt}.tsv"))
    found, counts = read_pairs(source)
    assert (found, dict(counts.dropped)) == ([("a", "b")], {"empty_side": 3, "malformed": 1})


def test_languages_whose_script_is_not_known_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is a filter of scripts, and those alone."""
    for name in ("en.txt", "qu.txt"):
        (tmp_path / name).write_text("a")
    values = {"name": "x", "where": str(tmp_path), "format": "lines", "files": "{lang}.txt"}
    for filters, told in (("[filters.script]", 1), ("[filters.length]", 0)):
        find_sources(TextConfig(corpus=(describe(tmp_path, f'languages = ["en", "qu"]\n{filters}', **values),)))
        assert capsys.readouterr().err.count("the filter `script` keeps all text in qu: it does not know") == told


def test_pages_of_ccaligned_by_their_columns(tmp_path: Path) -> None:
    (tmp_path / "en_XX-fr_XX.tsv").write_text("d\thttp://a\tOne.\thttp://b\tUn.\nd\thttp://a\t\thttp://b\tUn.\n")
    text = 'pairs = "any"\ncolumns = ["domain", "source_url", "source", "target_url", "target"]'
    path = describe(tmp_path, text, name="x", where=str(tmp_path), format="ccaligned_tsv", files="{src}-{tgt}.tsv")
    found, counts = read_pairs(inputs(path)[0])
    assert (found, dict(counts.dropped)) == ([("One.", "Un.")], {"empty_side": 1})


@pytest.mark.parametrize("layout", ["cc100", "lines"])
def test_formats_of_documents(tmp_path: Path, layout: str) -> None:
    (tmp_path / "zh_TW.txt.zst").write_bytes(pa.compress("一\n二\n\n三\n".encode(), codec="zstd", asbytes=True))
    text = 'languages = ["zh_TW"]'
    path = describe(tmp_path, text, name="x", where=str(tmp_path), format=layout, files="{lang}.txt.zst")
    (source,) = inputs(path)
    assert source.languages == ("zh-Hant",)
    found = list(documents(source, Counts("documents")))
    assert found == ([["一", "二"], ["三"]] if layout == "cc100" else [["一"], ["二"], ["三"]])


@pytest.mark.parametrize("layout", ["moses", "moses_zip", "wikimatrix_tsv", "tmx"])
@pytest.mark.parametrize("scheme", ["file", "mock"])
def test_the_same_through_a_uri(tmp_path: Path, layout: str, scheme: str) -> None:
    pattern = write_para(tmp_path, layout)
    where = f"file://{tmp_path}"
    if scheme == "mock":  # an object store that lives in memory
        where = f"mock:///{layout}/deep"
        system, root = filesystem(where)
        system.create_dir(root, recursive=True)
        for path in tmp_path.iterdir():
            with system.open_output_stream(f"{root}/sub-{path.name}", compression=None) as stream:
                stream.write(path.read_bytes())
        pattern = f"sub-{pattern}"
    description = describe(tmp_path, 'pairs = ["en-de"]', name="x", where="s3://nowhere", format=layout, files=pattern)
    (source,) = inputs(description, f"x={where}")
    assert source.size > 0
    assert read_pairs(source)[0] == PAIRS


def test_a_damaged_file_behind_a_uri_is_named() -> None:
    system, root = filesystem("mock:///damaged")
    system.create_dir(root)
    data = lzma.compress("".join(f"{i * 7919}\n" for i in range(200_000)).encode())
    with system.open_output_stream(f"{root}/de.txt.xz", compression=None) as stream:
        stream.write(data[: len(data) // 2])
    source = Input("de", ("de",), (CorpusPath("mock:///damaged", "de.txt.xz"),))
    with pytest.raises(ValueError, match=r"mock:///damaged/de\.txt\.xz cannot be read after line \d+"):
        list(documents(source, Counts("documents")))
    with pytest.raises(ValueError, match="cannot be reached"):
        list_folder("nonsense://x")


@pytest.mark.parametrize("scheme", ["", "file://", "mock://"])
def test_what_is_no_file_is_named_through_a_description(tmp_path: Path, scheme: str) -> None:
    where = f"{scheme}{tmp_path}"
    system, root = filesystem(where)
    system.create_dir(f"{root}/en-de.tmx", recursive=True)
    with system.open_output_stream(f"{root}/en-fr.tmx") as stream:
        stream.write(b"")
    if scheme != "mock://":
        (tmp_path / "en-fr.tmx").unlink()
        (tmp_path / "en-fr.tmx").symlink_to("nowhere")
    for pairs_, name in (('"any"', "en-de"), ('["en-de"]', "en-de"), ('["en-fr"]', "en-fr")):
        text = f"pairs = {pairs_}"
        path = describe(tmp_path, text, name="x", where=where, format="tmx", files="{src}-{tgt}.tmx")
        found = inputs(path)
        if scheme == "mock://" and name == "en-fr":
            assert [source.size for source in found] == [0]
        else:
            with pytest.raises(ValueError, match=rf"{name}\.tmx is a (folder|link to nowhere).*remove"):
                [source.size for source in found]


def test_the_ready_descriptions(tmp_path: Path) -> None:
    assert ready_descriptions() == [
        *("cc100", "ccaligned", "ccmatrix", "culturax", "fineweb2", "hplt2", "iitb", "madlad400", "multiun", "nllb"),
        *("opus", "wikimatrix"),
    ]
    for code in CC100_LANGUAGES:
        (tmp_path / f"{code}.txt.xz").write_bytes(b"")
    assert [source.name for source in inputs("cc100", f"cc100={tmp_path}")] == list(CC100_LANGUAGES)
    (tmp_path / "zh-Hant.txt.xz").rename(tmp_path / "zh_TW.txt.xz")
    for code, ending in (("af", "txt"), ("am", "txt.gz"), ("ar", "txt.bz2"), ("as", "txt.zst")):
        (tmp_path / f"{code}.txt.xz").rename(tmp_path / f"{code}.{ending}")
    assert [source.name for source in inputs("cc100", f"cc100={tmp_path}")] == list(CC100_LANGUAGES)
    corpora = read_corpora(ready_descriptions(), [f"{name}=x" for name in ready_descriptions()])
    assert {corpus.task for corpus in corpora} == {"mono", "para"}
    of_documents = {"boilerplate_length": {"min_bytes": 20}, "script": {"share": 0.5}, "exact_duplicates": {}}
    of_pairs = {
        "identical_sides": {},
        "length": {"min_characters": 2, "max_tokens": 256},
        "length_ratio": {"largest": 3, "above": 10},
        "script": {"share": 0.5},
        "exact_duplicates": {},
    }
    least = {"ccaligned": 1.04, "wikimatrix": 1.04, "ccmatrix": 1.06, "nllb": 1.06}
    for corpus in corpora:
        score = {"score": {"least": least[corpus.name]}} if corpus.name in least else {}
        expected = of_documents if corpus.task == "mono" else score | of_pairs
        assert list(corpus.filters.items()) == list(expected.items()), corpus.name


@pytest.mark.parametrize(
    ("name", "files", "score"),
    [
        ("wikimatrix", {"WikiMatrix.de-en.tsv.gz": "1.3\tja\tyes\n"}, 1.3),
        ("ccaligned", {"en_XX-de_DE.tsv.xz": "yes\tja\t1.2\n"}, 1.2),
        *(
            ("iitb", {f"IITB.en-hi.en{end}": "yes\n", f"IITB.en-hi.hi{end}": "ja\n"}, None)
            for end in ("", ".gz", ".xz")
        ),
        *(
            (name, {"de-en.txt.zip": {"X.de-en.de": "ja\n", "X.de-en.en": "yes\n"}}, None)
            for name in ("multiun", "opus")
        ),
    ],
)
def test_pairs_as_they_are_laid_out(tmp_path: Path, name: str, files: dict[str, Any], score: float | None) -> None:
    for file, content in files.items():
        if file.endswith("zip"):
            with zipfile.ZipFile(tmp_path / file, "w") as archive:
                for member, text in content.items():
                    archive.writestr(member, text)
        else:
            pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(file).suffix, bytes)
            (tmp_path / file).write_bytes(pack(content.encode()))
    (source,) = inputs(name, f"{name}={tmp_path}")
    assert (source.name, read_scored(source)) == ("en-hi" if name == "iitb" else "en-de", [("yes", "ja", score)])


NLLB = "{}\t{}\t{}\t0.99\t0.98\tcrawl-data/a.gz\thttps://a\tcrawl-data/b.gz\t{}\n"


def test_nllb_and_ccmatrix_as_they_are_laid_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files written in the shape that the releases document; a row may end in an empty column."""
    rows = [
        ("Guten Tag.", "Good day.", "1.2", "_"),
        ("Ja, das ist so.", "Yes, it is.", "1.05999", ""),
        ("", "b", 2, "_"),
    ]
    for name in ("deu_Latn-eng_Latn", "eng_Latn-zho_Hant", "ace_Latn-eng_Latn"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress("".join(NLLB.format(*row) for row in rows).encode()))
    for source in (found := inputs("nllb", f"nllb={tmp_path}")):
        scores = np.array([score for _, _, score in read_scored(source)])
        assert scores.tolist() == [1.2, 1.05999]
        (name, by_score), *_ = make_filters(source.filters, "para", "x").text
        assert name == "score" and by_score(Sides(([], []), source.languages, scores)).tolist() == [False, True]
    assert [source.name for source in found] == ["en-de", "en-zh-Hant"]
    assert "has 1 pair that nllb does not read: ace_Latn-eng_Latn" in capsys.readouterr().err
    (tmp_path / "ccm").mkdir()
    text = "".join(f"{score}\t{a}\t{b}\n" for a, b, score, _ in rows)
    (tmp_path / "ccm" / "de-en.bitextf.tsv.gz").write_bytes(gzip.compress(text.encode()))
    (source,) = inputs("ccmatrix", f"ccmatrix={tmp_path / 'ccm'}")
    assert read_scored(source) == [("Good day.", "Guten Tag.", 1.2), ("Yes, it is.", "Ja, das ist so.", 1.05999)]


def read_scored(source: Input) -> list[ScoredPair]:
    reader, counts = READERS[source.format], Counts("pairs")
    return [pair for block in reader.blocks(source, 1000) for pair in reader.pairs(source, block, counts)]


def test_a_table_by_numbers_does_not_mistake_one_column_for_another(tmp_path: Path) -> None:
    """White space at the ends of a row is no text, but its tabs are columns."""
    rows = ["id\t1.1\ta\tb", "\t1.2\tc\td", " \x00\t1.3\te\tf", "id\t1.4\tg\th\t\t", "id\t1.5\ti", "1.6\tj\tk\tl"]
    (tmp_path / "en-de.tsv").write_text("\n".join(rows) + "\n")
    text = 'pairs = "any"\ncolumns = {score = 2, source = 3, target = 4}'
    (source,) = inputs(describe(tmp_path, text, name="x", where=str(tmp_path), format="tsv", files="{src}-{tgt}.tsv"))
    found, counts = read_pairs(source)
    assert found == [("a", "b"), ("c", "d"), ("e", "f"), ("g", "h")]
    assert dict(counts.dropped) == {"malformed": 2}


def test_records_of_pairs_with_odd_text(tmp_path: Path) -> None:
    """Tabs and line ends inside of a side are a space; sides without text and pairs without a score are counted."""
    sides = [("a\tb\n\nc", "d\r\ne"), ("", "f"), (" \n", "g"), ("h", "i"), ("x" * 100_001, "j"), ("k\ud83d", "\u2028l")]
    sides += [("ü" * 50_000, "ü" * 50_000), ("o", "ü" * 50_001)]  # just as long as a side may be; longer
    rows = [{"pair": {"x": a, "y": b}, "n": {"score": i + 0.5}} for i, (a, b) in enumerate(sides)]
    rows[3]["n"] = {"score": None}
    rows.append({"pair": {"x": "m", "y": "n"}, "n": {"score": "1\n\ud800"}})
    columns = 'columns = {target = "pair.y", source = "pair.x", score = "n.score"}'
    for kind in ("jsonl", "parquet", "arrow"):
        kept = rows if kind == "jsonl" else [*rows[:5], *rows[6:-1]]  # pyarrow does not write lone surrogates
        name = write_records(tmp_path / f"en-de.{kind}", kept)
        values = {"name": "x", "where": str(tmp_path), "format": f"{kind}_pairs", "files": name}
        (source,) = inputs(describe(tmp_path, f'pairs = ["en-de"]\n{columns}', **values))
        counts, reader = Counts("pairs"), READERS[source.format]
        blocks = list(reader.blocks(source, 1))
        found = [pair for block in blocks for pair in reader.pairs(source, block, counts)]
        assert found[0] == ("a b c", "d  e", 0.5)
        others = [("k", "l", 5.5)] * (kind == "jsonl") + [("ü", "ü", 6.5)]
        assert [(a[0], b[-1], score) for a, b, score in found[1:]] == others
        assert dict(counts.dropped) == {"empty_side": 2, "long_line": 2, "malformed": 1 + (kind == "jsonl")}
        assert counts.units_in == len(kept) and len(blocks) == 4 + (kind == "jsonl")


@pytest.mark.parametrize("kind", ["jsonl_pairs", "parquet_pairs", "arrow_pairs", "tsv", "wikimatrix_tsv"])
def test_filters_of_columns_drop_pairs(tmp_path: Path, kind: str) -> None:
    values: list[tuple[Any, Any]] = [
        (0.9, "web"),
        (0.8, "book"),
        (0.79, "web"),
        (None, "web"),
        (1, "spam"),
        (0.2, "spam"),
    ]
    rows = [{"a": f"a{i}", "b": "b", "p": p, "kind": k} for i, (p, k) in enumerate(values)]
    if kind.endswith("tsv"):
        (tmp_path / "en-de.x").write_text("".join(f"{r['a']}\tb\t{r['p']}\t{r['kind']}\n" for r in rows))
        names = "{source = 1, target = 2, p = 3, kind = 4}" if kind == "tsv" else '["source", "target", "p", "kind"]'
    else:
        write_records(path := tmp_path / f"en-de.{kind.removesuffix('_pairs')}", rows)
        path.rename(tmp_path / "en-de.x")
        names = '{source = "a", target = "b"}'
    rules = '[filters.column.p]\nmin = 0.8\n[filters.column]\nkind.one_of = ["web", "book"]'
    text = f'pairs = "any"\ncolumns = {names}\n{rules}'
    (source,) = inputs(describe(tmp_path, text, name="x", where=str(tmp_path), format=kind, files="{src}-{tgt}.x"))
    found, counts = read_pairs(source)
    assert [a for a, _ in found] == ["a0", "a1"]
    assert dict(counts.dropped) == {"column p": 3, "column kind": 1} and counts.units_in == 6


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize(
    ("columns", "rules", "wrong", "advice"),
    [
        ("", "[filters.column.sc]\nmin = 1", "sc", "correct the name in columns or filters.column of the corpus"),
        ('["tekst"]', "", "tekst", r'name the column that has the text by columns = \["NAME"\] in a corpus'),
        (
            '{source = "a", target = "b"}',
            "[filters.column.sc]\nmin = 1",
            "sc",
            "correct the name in columns or filters.column of the corpus",
        ),
        (
            '{source = "a", target = "b", score = "scor"}',
            "",
            "scor",
            "correct the name in columns or filters.column of the corpus",
        ),
        (
            '{source = "a", target = "c"}',
            "",
            "c",
            'name the columns that have the text by columns = {source = "NAME", target = "NAME"} in a corpus',
        ),
    ],
)
def test_a_wrong_name_of_a_column_is_mended_where_it_is(
    tmp_path: Path, kind: str, columns: str, rules: str, wrong: str, advice: str
) -> None:
    pairs_wanted = columns.startswith("{")
    code = "en-de" if pairs_wanted else "de"
    write_records(tmp_path / f"{code}.{kind}", [{"text": "t", "a": "a", "b": "b", "score": 1.0}])
    text = f'{"pairs" if pairs_wanted else "languages"} = ["{code}"]\n'
    text += (f"columns = {columns}\n" if columns else "") + rules
    file_format = f"{kind}_pairs" if pairs_wanted else kind
    (source,) = inputs(
        describe(tmp_path, text, name="x", where=str(tmp_path), format=file_format, files=f"{code}.{kind}")
    )
    with pytest.raises(ValueError, match=f"has no (field|column) '{wrong}', but text, a, b, score: {advice}"):
        list(READERS[file_format].blocks(source, 1000))


def test_one_of_compares_numbers_and_truths_as_json_writes_them() -> None:
    one, true = (column_filters({"column": {"x": {"one_of": [value]}}})[0] for value in (1, True))
    values = (1, 1.0, "1", True, "true", "True", 0, None, "x")
    assert [value for value in values if not one.drops(value)] == [1, 1.0, "1"]
    assert [value for value in values if not true.drops(value)] == [True, "true", "True"]
    false, small = (column_filters({"column": {"x": {"one_of": [value]}}})[0] for value in (False, 1e-7))
    assert [value for value in (False, "false", "False", 0, None) if not false.drops(value)] == [
        False,
        "false",
        "False",
    ]
    assert not one.drops("1.0") and not one.drops("1.00") and one.drops("1.01")
    assert not small.drops("0.0000001") and not small.drops("1e-07") and not small.drops(1e-7) and small.drops(1e-6)
    (least,) = column_filters({"column": {"x": {"min": 0}}})
    assert least.drops(10**400) and not least.drops("7")


def test_bounds_of_a_column_are_kept() -> None:
    """A value equal to `min` or `max` stays, the next one out goes; as text, whole number and float."""
    (rule,) = column_filters({"column": {"x": {"min": 0.5, "max": 2}}})
    assert not any(map(rule.drops, (0.5, "0.5", 2, 2.0, "2", " 2.0", "5e-1")))
    assert all(map(rule.drops, (np.nextafter(0.5, 0), np.nextafter(2.0, 3), "2.0001", 0, 3, "nan", float("nan"), None)))
    (rule,) = column_filters({"column": {"x": {"min": 1, "max": 1}}})
    assert [value for value in (0, 1, 2) if not rule.drops(value)] == [1]
    for setting, inside in (("min", math.inf), ("max", -math.inf)):
        for bound in (0, 1):
            (rule,) = column_filters({"column": {"x": {setting: bound}}})
            assert not rule.drops(bound) and not rule.drops(inside) and rule.drops(-inside)
    (rule,) = column_filters({"column": {"x": {"one_of": [1, 5, 9], "min": 2, "max": 8}}})
    assert [value for value in (1, 3, 5, 9) if not rule.drops(value)] == [5]


def test_missing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "af.txt.xz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no file of cc100 for 99 of 100 languages \(am, ar, as.*--allow-missing"):
        inputs("cc100", f"cc100={tmp_path}")
    assert [source.name for source in inputs("cc100", f"cc100={tmp_path}", allow_missing=True)] == ["af"]
    assert "99 of 100" in capsys.readouterr().err
    (tmp_path / "af.txt.xz").unlink()
    with pytest.raises(ValueError, match="holds no file of cc100"):
        inputs("cc100", f"cc100={tmp_path}", allow_missing=True)


@pytest.mark.parametrize("missing", [1, 8, 9])
def test_of_missing_files_the_first_eight_are_named(tmp_path: Path, missing: int) -> None:
    (tmp_path / "en.txt").write_text("a")
    codes = ["en", "ar", "de", "es", "fr", "ha", "hi", "it", "ja", "ko"][: missing + 1]
    values = {"name": "x", "where": str(tmp_path), "format": "cc100", "files": "{lang}.txt"}
    named = ", ".join(codes[1:9]) + " …" * (missing > 8)
    words = rf"{tmp_path} has no file of x for {missing} of {missing + 1} languages \({named}\): fetch them"
    with pytest.raises(ValueError, match=words):
        inputs(describe(tmp_path, f"languages = {codes}", **values))


def test_numbers_of_columns() -> None:
    """From 1 to 1,000; those between the named ones have no name."""
    read_columns = READERS["tsv"].read_columns
    assert read_columns({"target": 1, "source": 4}) == ("target", "", "", "source")
    assert len(read_columns({"source": 1, "target": 1000})) == 1000
    for number in (0, 1001, 1.0, "2"):
        with pytest.raises(ValueError, match="give the columns' numbers, from 1 on"):
            read_columns({"source": 1, "target": number})


def test_any_pair_leaves_out_other_languages_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("en-fr", "en-zh-Hans", "zh_tw-en", "en-xx", "en-war", "pt-pt_br"):
        with zipfile.ZipFile(tmp_path / f"{name}.txt.zip", "w") as archive:
            for code in (name[: name.index("-")], name[name.index("-") + 1 :]):
                archive.writestr(f"X.{name}.{code}", "a\n")
    (tmp_path / "README").write_text("")
    assert [source.name for source in inputs("opus", f"opus={tmp_path}")] == ["en-fr", "en-zh-Hans", "en-zh-Hant"]
    warnings = capsys.readouterr().err
    assert "has 1 file that opus does not read: README" in warnings
    assert "has 3 pairs that opus does not read: en-war, en-xx, pt-pt_br" in warnings


@pytest.mark.parametrize(
    ("changes", "text", "message"),
    [
        (
            {"format": "moses2"},
            'pairs = "any"',
            "format 'moses2' is none of cc100, lines, jsonl, parquet, arrow, moses",
        ),
        ({"colour": "red"}, 'pairs = "any"', "there is no key 'colour'"),
        *(({key: ""}, 'pairs = "any"', f"{key} is missing: set it") for key in ("name", "format", "files")),
        ({"where": ""}, 'pairs = "any"', "give --where x=FOLDER"),
        ({}, "", 'set pairs = \\["en-fr", …\\] or pairs = "any"'),
        ({"format": "cc100"}, 'languages = ["zh-Hanss"]', "unknown language code 'zh-Hanss': did you mean 'zh-Hans'"),
        (
            {"format": "lines"},
            'languages = ["zh|zh_TW"]',
            "spellings of zh-Hans and zh-Hant: list the spellings of one language",
        ),
        ({}, 'pairs = "any"\n[filters.lenght]', "there is no filter 'lenght': did you mean length?"),
        ({}, 'pairs = "any"\n[filters.blank]', "there is no filter 'blank': choose one of length, length_ratio"),
        ({}, 'pairs = "any"\n[filters.length]\nmin = 3', "filter length has no setting 'min': it has min_characters"),
        ({}, 'pairs = "any"\n[filters.script]\nshare = "a"', "share of filter script is 'a': it must be a number"),
        ({}, 'pairs = "any"\n[filters.boilerplate_length]', "filter boilerplate_length is not for task para"),
        *(
            ({"format": "cc100"}, f'languages = ["en"]\n[filters.{name}]', f"filter {name} is not for task mono")
            for name in ("length_ratio", "identical_sides", "score")
        ),
        ({}, 'pairs = "any"\n[filters.column.p]\nmin = 1', "filter column needs a column 'p': take the filter out"),
        ({}, 'pairs = "any"\n[filters.column.p]\nleast = 1', r"write \[filters.column.NAME\] with numbers min or max"),
        ({}, 'pairs = "any"\n[filters.column]\np = 1', r"write \[filters.column.NAME\]"),
        ({}, 'pairs = "any"\n[filters]\ncolumn = 3', r"filters has column = 3: write \[filters.column.NAME\]"),
        ({}, 'pairs = "any"\n[filters]\nscript = 3', r"but script is 3: write \[filters.script\]"),
        ({}, 'pairs = "any"\nfilters = 3', r"filters must be a table for each filter, as \[filters.length\], not 3"),
        ({}, 'pairs = "any"\n[filters.column.p]\nmin = nan', "with numbers min or max, both finite"),
        ({}, 'pairs = "any"\n[filters.column.p]\nmin = 1\nmax = inf', "with numbers min or max, both finite"),
        ({}, 'pairs = "any"\n[filters.column.p]\nmin = -inf', "with numbers min or max, both finite"),
        ({}, 'pairs = "any"\n[filters.column.p]\nmax = true', "with numbers min or max, both finite"),
        ({}, 'pairs = "any"\n[filters.column.p]\none_of = "web"', "both finite, or a list one_of"),
        *(
            ({}, f'pairs = "any"\n[filters.column.p]\none_of = ["web", {entry}]', "one_of of strings, finite numbers")
            for entry in ("2024-01-01", "nan", "[1]")
        ),
        ({}, 'pairs = "any"\n[filters.column.p]', r"has p = {}: write \[filters.column.NAME\]"),
        *(
            ({"format": "cc100"}, f'languages = ["en"]\n[filters.language]\nprobability = {p}', "between 0 and 1")
            for p in (0, -0.5)
        ),
        ({}, 'pairs = "any"\n[filters.column.p]\nmin = 1' + 400 * "0", "with numbers min or max, both finite"),
        ({}, 'pairs = "any"\n[filters.column.p]\nmin = 2\nmax = 1', "keeps p from 2 to 1, which is nothing"),
        ({}, 'pairs = "any"\n[filters.length]\nmin_characters = 1' + 400 * "0", "must be a number"),
        ({}, 'pairs = "any"\n[filters.language]\nprobability = 1', "probability .* must be between 0 and 1"),
        *(
            ({}, f'pairs = "any"\n[filters.script]\nshare = {share}', f"is {share}: it must be between 0 and 1")
            for share in (50, -0.1)
        ),
        ({}, 'pairs = "any"\n[filters.length_ratio]\nlargest = 0.9', "largest .* is 0.9: it must be at least 1"),
        *(
            (
                {},
                f'pairs = "any"\n[filters.length]\nmin_{unit} = {least}\nmax_{unit} = {most}',
                f"filter length keeps {least} to {most} {unit}, which is nothing: set max_{unit} to at least",
            )
            for unit, least, most in (("characters", 200, 100), ("tokens", 3, 2), ("tokens", 0, -1))
        ),
        ({"format": "tsv"}, 'pairs = "any"\ncolumns = ["source", "target"]', "give the columns' numbers, from 1 on"),
        ({"format": "tsv"}, 'pairs = "any"\ncolumns = {source = 0, target = 1}', "give the columns' numbers"),
        ({"format": "tsv"}, 'pairs = "any"\ncolumns = {source = 1, target = 1}', "give the columns' numbers"),
        ({"format": "wikimatrix_tsv"}, 'pairs = "any"\ncolumns = ["a"]', "'source' and 'target' must be among them"),
        (
            {"format": "wikimatrix_tsv"},
            'pairs = "any"\ncolumns = [["source"], "target"]',
            "'source' and 'target' must be among them",
        ),
        (
            {"format": "tsv"},
            'pairs = "any"\ncolumns = {source = true, target = 2}',
            "give the columns' numbers, from 1 on",
        ),
        *(
            (
                {"format": "wikimatrix_tsv"},
                f'pairs = "any"\ncolumns = ["score", "source", "target", "{name}"]',
                "name each of source, target and score once",
            )
            for name in ("source", "target", "score")
        ),
        (
            {"format": "wikimatrix_tsv"},
            'pairs = "any"\ncolumns = ["_", "source", "target", "_"]\n[filters.column._]\nmin = 1',
            "filter column needs a column '_'",
        ),
        ({"format": "arrow_pairs"}, 'pairs = "any"', "name the column of each side, and of the score"),
        (
            {"format": "arrow_pairs"},
            'pairs = "any"\ncolumns = {source = "a", tgt = "b"}',
            "name the column of each side",
        ),
        (
            {"format": "jsonl_pairs"},
            'pairs = "any"\ncolumns = {source = "a", target = "a"}',
            "name the column of each side",
        ),
        (
            {"line_end": "|"},
            'pairs = "any"',
            "line_end is '|': it must be a string, and only jsonl, parquet and arrow have it",
        ),
        ({}, 'pairs = "any"\n[filters.score]', "filter score needs a column 'score'"),
        ({}, "pairs = any", "cannot be read"),
        ({}, 'pairs = [["en", "fr"]]', r"pairs has \['en', 'fr'\]: write a string"),
        ({}, 'pairs = "any"\ncolumns = ["a"]', r"columns are \['a'\]: files of this format have none"),
        ({}, 'pairs = "any"\nlanguages = ["en"]', "format moses has no languages: take languages out, and set pairs"),
        ({"format": "cc100"}, "languages = [3]", "languages has 3: write a string"),
        *(
            ({"files": f"{{src}}-{{tgt}}.{end}"}, 'pairs = "any"', "which are archives: unpack them")
            for end in ("tar.gz", "tar", "tgz")
        ),
        ({"files": "*_{src}-{tgt}.{side}"}, 'pairs = "any"', r"because \* and {side} cannot be in one"),
        ({"files": "data/*{src}-{tgt}.txt"}, 'pairs = "any"', r"\* could take letters of the code"),
        ({"files": "{src}.{side}"}, 'pairs = "any"', "needs {src} and {tgt} in the name"),
        ({"files": "*{src}-{tgt}.txt"}, 'pairs = "any"', r"\* could take letters of the code"),
        *(
            ({"format": "lines", "files": files}, f"languages = {codes}", rf"files are '{files}', but {words}")
            for files, words, codes in (
                ("{Lang}.txt", r"{Lang} is no placeholder: write \{lang\}", '["de"]'),
                ("{src}.txt", r"{src} is no placeholder: write \{lang\}", '"any"'),
                ("./m/{lang}.txt", "names begin in the corpus's folder: write it without //", '["de"]'),
                ("/m/{lang}.txt", "names begin in the corpus's folder: write it without //", '["de"]'),
                ("m//../{lang}.txt", "names begin in the corpus's folder: write it without //", '["de"]'),
            )
        ),
        ({"files": "{lang}.{side}"}, 'pairs = ["en-de"]', r"{lang} is no placeholder: write \{src\} and \{tgt\}"),
        ({"format": "lines"}, 'languages = ["any"]', r'languages is \["any"\]: write languages = "any"'),
        ({}, 'pairs = ["any"]', r'pairs is \["any"\]: write pairs = "any"'),
        ({"format": "lines"}, "languages = []", 'languages is an empty list: list at least one, or write "any"'),
        ({}, "pairs = []", 'pairs is an empty list: list at least one, or write "any"'),
        ({"name": "a=b"}, 'pairs = "any"', "name 'a=b' has =, which --where puts after the name: leave it out"),
        ({}, 'pairs = ["en-en"]', "both sides are 'en': name two languages, as en-de"),
    ],
)
def test_mistakes_in_a_description(tmp_path: Path, changes: dict[str, str], text: str, message: str) -> None:
    values = {"name": "x", "where": str(tmp_path), "format": "moses", "files": "{src}-{tgt}.{side}"} | changes
    with pytest.raises(ValueError, match=message):
        inputs(describe(tmp_path, text, **values))


def test_mistakes_in_the_call(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no ready description 'cc101'.*one of cc100, ccaligned"):
        inputs("cc101")
    with pytest.raises(ValueError, match="--where cc=… names no corpus that is described: the names are cc100"):
        inputs("cc100", f"cc100={tmp_path}", "cc=y")
    with pytest.raises(ValueError, match="--where cc100=… names no corpus that is described: name it by --corpus too"):
        read_corpora([], ["cc100=m"])
    with pytest.raises(ValueError, match=r"--where names a corpus twice \(cc100=a, cc100=b\): give each one place"):
        inputs("cc100", "cc100=a", "cc100=b")
    with pytest.raises(ValueError, match="two descriptions are named 'cc100'"):
        read_corpora(["cc100", "cc100"], ["cc100=x"])
    (corpus,) = read_corpora(["cc100"], ["cc100=s3://bucket/cc100?region=x&scheme=http"])
    assert corpus.where == "s3://bucket/cc100?region=x&scheme=http"


@pytest.mark.skipif(not CORPUS.exists(), reason="the corpus next to the repository is not there")
def test_real_corpora_through_their_descriptions() -> None:
    found = inputs("cc100", f"cc100={CORPUS / 'mono'}", allow_missing=True)
    assert len(found) == len(list((CORPUS / "mono").glob("*.txt.xz"))) > 80
    zipped = inputs("opus", f"opus={CORPUS / 'para'}")
    assert len(zipped) == len(list((CORPUS / "para").glob("*.zip"))) > 80
