"""The rehearsal's text: its proportions and its growth of words; data_prep counts the planted lines."""

import json
import lzma
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bench.rehearsal.checks import mixed_rows
from bench.rehearsal.text import CC100, Language, Planter, TextFile, files, repeated, write_text
from data_prep.encode.encode import EncodeConfig
from data_prep.encode.encode import run as encode
from data_prep.vocab.vocab import VocabConfig
from data_prep.vocab.vocab import run as vocab
from tests.rows import write_data
from xlme_ds.data.schema import read_manifest, write_manifest

SOURCE = Path(__file__).resolve().parents[2] / "shared" / "data" / "corpus"
CORPORA = ("cc100", "opus", "ccaligned")
FEW = {"de", "zh-Hans", "hi", "te_rom", "en-hi", "en-zh-Hans"}

pytestmark = pytest.mark.skipif(not SOURCE.is_dir(), reason="../shared/data/corpus is absent")


def chosen() -> list[TextFile]:
    """A few files of every layout, of a megabyte."""
    return [replace(file, text_bytes=1_000_000) for file in files(1) if file.name in FEW]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("text")
    for file in chosen():
        write_text(file, SOURCE, out, 0)
    return out


def test_sizes_are_the_published_ones() -> None:
    corpus = files(50)
    assert sum(file.text_bytes for file in corpus) == pytest.approx(50e9, rel=1e-3)
    mono = {file.name: file.text_bytes for file in corpus if file.corpus == "cc100"}
    assert len(mono) == 100 and sum(CC100.values()) == pytest.approx(2394, abs=1)
    assert mono["en"] / sum(mono.values()) == pytest.approx(300.8 / 2394.3, rel=1e-3)
    pairs = Counter[str]()
    for file in corpus:
        if file.corpus != "cc100":
            pairs[file.name] += file.text_bytes
    assert len(pairs) == 93
    assert pairs["en-fr"] / pairs["en-de"] == pytest.approx(13.7 / 10.7, rel=1e-3)
    assert sum(pairs.values()) / sum(mono.values()) == pytest.approx(150 / (2394.3 * 1.073741824), rel=1e-3)
    assert {file.corpus for file in corpus} == set(CORPORA)


def test_a_file_is_a_function_of_its_name_and_the_seed(text: Path, tmp_path: Path) -> None:
    file = next(file for file in reversed(chosen()) if file.name == "hi")
    write_text(file, SOURCE, tmp_path, 0)
    assert (tmp_path / file.path).read_bytes() == (text / file.path).read_bytes()
    write_text(file, SOURCE, tmp_path / "other", 1)
    assert (tmp_path / "other" / file.path).read_bytes() != (text / file.path).read_bytes()


def test_new_words_keep_coming(text: Path) -> None:
    """Heaps' law: from a tenth of the words to all of them, distinct ones grow with an exponent like real text's."""
    words = lzma.decompress((text / "cc100" / "de.txt.xz").read_bytes()).decode(errors="replace").split()
    tenth = len(words) // 10
    exponent = np.log10(len(set(words)) / len(set(words[:tenth])))
    assert 0.5 < exponent < 0.85
    lines = lzma.decompress((text / "cc100" / "zh-Hans.txt.xz").read_bytes()).decode(errors="replace").split("\n")
    assert np.mean([" " in line for line in lines]) < 0.6, "a script without spaces"


def test_encode_counts_the_planted_lines(text: Path, tmp_path: Path) -> None:
    names = sorted({file.corpus for file in chosen()})
    assert set(names) == set(CORPORA)
    flags = {"corpus": tuple(names), "where": tuple(f"{name}={text / name}" for name in names), "allow_missing": True}
    vocab(VocabConfig(tmp_path / "vocab", size=8000, sentences=20_000, **flags))
    encode(EncodeConfig(vocab=tmp_path / "vocab", out=tmp_path / "encoded", **flags))
    for task, read, lost in (("mono", "paragraphs_in", "removed"), ("para", "pairs_in", "dropped")):
        counts = read_manifest(tmp_path / "encoded" / task).counts["by_language"]
        for name, by_reason in counts.items():
            here = [file for file in chosen() if file.name == name]
            notes = {file.path: json.loads((text / "planted" / f"{file.path}.json").read_text()) for file in here}
            expected: Counter[str] = sum((Counter(note["damaged"]) for note in notes.values()), Counter())
            counted = Counter(by_reason[lost]) + Counter(by_reason["repaired"])
            by_tokens = counted.pop("length_ratio", 0) + counted.pop(
                "length", 0
            )  # of some pairs, before duplicates are sought
            assert by_tokens < 0.05 * by_reason[read]
            hashes = [np.load(text / "planted" / f"{path}.npy") for path in notes if task == "para"]
            planted = repeated(np.concatenate(hashes)) if hashes else sum(n["exact_duplicates"] for n in notes.values())
            assert planted - by_tokens <= counted.pop("exact_duplicates") <= planted
            assert planted > 0.01 * by_reason[read] == 0.01 * sum(note["lines"] for note in notes.values())
            assert counted == +expected, name


def test_no_word_fills_a_row() -> None:
    """A list of names without spaces is cut, so that different rows of text do not lie within copies of it."""
    for code, line in (("cs", ",".join(["Aban", "Seliandra"] * 200)), ("ja", "a, " * 400 + "あ" * 300)):
        assert max(map(len, Language.of([line] * 2, code).words)) <= 65


def test_duplicates_and_equal_sides_are_the_planted_ones() -> None:
    """Lines that are equal after cleaning are counted, and no others; the words are spaces and one letter."""
    language = Language(["a  ", "a", "A "], [["a  ", "a"], ["a", "A "]], ["a  ", "a", "A "])
    mono = Planter(Random(1), [language], ("script",), "x")
    lines = [sides[0] for block in mono.blocks(100_000, [3]) for sides, _ in block]
    kept = [line for line in lines if line not in (b"", b"x")]
    assert all(line == line.strip() for line in lines)
    assert repeated(np.array(mono.hashes)) == len(kept) - len(set(kept)) > 100
    assert lines.count(b"x") == mono.damaged["script"] > 0 and len(kept) == mono.lines - mono.damaged["script"]
    pairs = Planter(Random(2), [language, language], ("identical_sides",), "")
    sides = [sides for block in pairs.blocks(100_000) for sides, _ in block]
    assert sum(one.lower() == two.lower() for one, two in sides) == pairs.damaged["identical_sides"] > 0
    assert len(sides) == pairs.lines > 1000


@pytest.mark.parametrize(("first", "others"), [(11, "11 11 11 10 10 10 10 10"), (14, "10 " * 8), (7, "11 " * 7 + "10")])
def test_a_language_that_is_used_too_often_or_too_seldom_is_found(tmp_path: Path, first: int, others: str) -> None:
    """Of nine alike, while all others have their share of 94 to one."""
    folder = write_data(tmp_path, rows=40) / "mono"
    of_code = {"available": 1000, "repeat": 1.0, "share_before": 1 / 9, "share_after": 1 / 9}
    counts = {f"l{number}": of_code | {"used": used} for number, used in enumerate([first, *map(int, others.split())])}
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, counts={"by_language": counts, "sampled": 94, "fill": 1.0}))
    if first == 11:
        assert mixed_rows(tmp_path, "mono", 40)["worst_share"] < 1
        with pytest.raises(ValueError, match="holds 40 rows, 41 were asked for"):
            mixed_rows(tmp_path, "mono", 41)
    else:
        with pytest.raises(ValueError, match=f"l0 is used {first} times"):
            mixed_rows(tmp_path, "mono", 40)
