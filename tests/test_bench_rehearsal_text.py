"""The rehearsal's text: its proportions and its growth of words; data_prep counts the planted lines."""

import json
import lzma
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bench.rehearsal.__main__ import Rehearsal, prepare
from bench.rehearsal.text import Language, Planter, TextFile, check_planted, files, write_text
from data_prep.encode.encode import EncodeConfig
from data_prep.encode.encode import run as encode
from data_prep.vocab.vocab import VocabConfig
from data_prep.vocab.vocab import run as vocab
from xlme_ds.data.schema import read_manifest

SOURCE = Path(__file__).resolve().parents[2] / "shared" / "data" / "corpus"
CORPORA = ("cc100", "ccaligned")
FEW = {"de", "zh", "hi", "en-hi", "en-zh"}

pytestmark = pytest.mark.skipif(not SOURCE.is_dir(), reason="../shared/data/corpus is absent")


def chosen() -> list[TextFile]:
    """A few files of every layout, of a megabyte."""
    return [replace(file, text_bytes=1_000_000) for file in files(1, SOURCE) if file.name in FEW]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("text")
    for file in chosen():
        write_text(file, out)
    return out


def test_sizes_are_those_of_the_source() -> None:
    corpus = {file.path: file.text_bytes for file in files(50, SOURCE)}
    assert sum(corpus.values()) == pytest.approx(50e9, rel=1e-3)
    real = [(SOURCE / name).stat().st_size for name in ("mono/de.txt.xz", "para/en-hi.txt.zip")]
    assert corpus["cc100/de.txt.xz"] / corpus["ccaligned/en-hi.tsv.xz"] == pytest.approx(real[0] / real[1], rel=1e-3)


def test_a_wrong_source_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none has no mono/.*: name another --source"):
        prepare(Rehearsal(0.01, tmp_path / "none", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_file_is_a_function_of_its_name_and_source(text: Path, tmp_path: Path) -> None:
    file = next(file for file in chosen() if file.name == "hi")
    write_text(file, tmp_path)
    assert (tmp_path / file.path).read_bytes() == (text / file.path).read_bytes()


def test_new_words_keep_coming(text: Path) -> None:
    """Heaps' law: from a tenth of the words to all of them, distinct ones grow with an exponent like real text's."""
    words = lzma.decompress((text / "cc100" / "de.txt.xz").read_bytes()).decode(errors="replace").split()
    tenth = len(words) // 10
    exponent = np.log10(len(set(words)) / len(set(words[:tenth])))
    assert 0.5 < exponent < 0.85
    lines = lzma.decompress((text / "cc100" / "zh.txt.xz").read_bytes()).decode(errors="replace").split("\n")
    assert np.mean([" " in line for line in lines]) < 0.6, "a script without spaces"


def test_encode_counts_the_planted_lines(text: Path, tmp_path: Path) -> None:
    names = sorted({file.corpus for file in chosen()})
    assert set(names) == set(CORPORA)
    flags = {"corpus": tuple(names), "where": tuple(f"{name}={text / name}" for name in names), "allow_missing": True}
    vocab(VocabConfig(tmp_path / "vocab", size=8000, sentences=20_000, **flags))
    encode(EncodeConfig(vocab=tmp_path / "vocab", out=tmp_path / "encoded", **flags))
    for file in chosen():
        task, read, lost = {
            "cc100": ("mono", "paragraphs_in", "removed"),
            "ccaligned": ("para", "pairs_in", "dropped"),
        }[file.corpus]
        name = file.name.replace("zh", "zh-Hans")
        by_reason = read_manifest(tmp_path / "encoded" / task).counts["by_language"][name]
        expected = Counter(json.loads((text / "planted" / f"{file.path}.json").read_text()))
        lines, planted = expected.pop("lines"), expected.pop("exact_duplicates")
        counted = Counter(by_reason[lost]) + Counter(by_reason["repaired"])
        # Some pairs, before duplicates are sought.
        by_tokens = counted.pop("length_ratio", 0) + counted.pop("length", 0)
        assert by_tokens < 0.05 * lines and lines == by_reason[read]
        assert planted - by_tokens <= counted.pop("exact_duplicates") <= planted
        assert planted > 0.01 * lines
        assert counted == +expected, name
    assert check_planted(text, chosen(), tmp_path / "encoded")["lines"] > 10_000
    note = text / "planted" / f"{chosen()[0].path}.json"
    wrong = tmp_path / "wrong"
    shutil.copytree(text / "planted", wrong / "planted")
    (wrong / note.relative_to(text)).write_text(note.read_text().replace('"lines": ', '"lines": 1'))
    with pytest.raises(ValueError, match="were planted"):
        check_planted(wrong, chosen(), tmp_path / "encoded")
    more = json.loads(note.read_text())
    more["exact_duplicates"] += more["lines"]  # more than were lost for their tokens
    (wrong / note.relative_to(text)).write_text(json.dumps(more))
    with pytest.raises(ValueError, match="were planted"):
        check_planted(wrong, chosen(), tmp_path / "encoded")


def test_no_word_fills_a_row() -> None:
    """A list of names without spaces is cut, so that different rows of text do not lie within copies of it."""
    for code, line in (("cs", ",".join(["Aban", "Seliandra"] * 200)), ("ja", "a, " * 400 + "あ" * 300)):
        assert max(map(len, Language([line] * 2, code).words)) <= 65


def test_duplicates_and_equal_sides_are_the_planted_ones() -> None:
    """Lines that are equal after cleaning are counted, and no others; the words are spaces and one letter."""
    language = Language(["a", "A", "a A"], "en")
    mono = Planter(Random(1), [language], ("script",), "x")
    lines = [line for block in mono.blocks(100_000) for line in block]
    kept = [line for line in lines if line not in (b"", b"x")]
    assert all(line == line.strip() for line in lines)
    planted = mono.planted()
    assert planted["exact_duplicates"] == len(kept) - len(set(kept)) > 100
    assert lines.count(b"x") == planted["script"] > 0 and len(kept) == planted["lines"] - planted["script"]
    pairs = Planter(Random(2), [language, language], ("identical_sides",))
    sides = [pair.split(b"\t") for block in pairs.blocks(100_000) for pair in block]
    planted = pairs.planted()
    assert sum(one.lower() == two.lower() for one, two, _ in sides) == planted["identical_sides"] > 0
    assert len(sides) == planted["lines"] > 1000
