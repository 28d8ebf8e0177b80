"""The rehearsal's text: its proportions, its growth of words, and that data_prep finds what is planted in it."""

import json
import lzma
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import rehearsal_text
from bench.rehearsal_lines import mono_block, pair_block
from bench.rehearsal_text import CC100, TextFile, files, repeated, write_text
from data_prep.encode.encode import EncodeConfig
from data_prep.encode.encode import run as encode
from data_prep.vocab.vocab import VocabConfig
from data_prep.vocab.vocab import run as vocab
from xlme_ds.data.schema import read_manifest

SOURCE = Path(__file__).resolve().parents[2] / "shared" / "data" / "corpus"
CORPORA = ("cc100", "multiun", "iitb", "opus", "wikimatrix", "ccaligned")
FEW = {"de", "zh-Hans", "hi", "te_rom", "en-hi", "en-zh-Hans", "en-sw"}

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


def test_sizes_are_those_published() -> None:
    found = files(50)
    assert sum(file.text_bytes for file in found) == pytest.approx(50e9, rel=1e-3)
    mono = {file.name: file.text_bytes for file in found if file.corpus == "cc100"}
    assert len(mono) == 100 and sum(CC100.values()) == pytest.approx(2394, abs=1)
    assert mono["en"] / sum(mono.values()) == pytest.approx(300.8 / 2394.3, rel=1e-3)
    pairs = Counter[str]()
    for file in found:
        if file.corpus != "cc100":
            pairs[file.name] += file.text_bytes
    assert len(pairs) == 93
    assert pairs["en-fr"] / pairs["en-de"] == pytest.approx(13.7 / 10.7, rel=1e-3)
    assert sum(pairs.values()) / sum(mono.values()) == pytest.approx(150 / (2394.3 * 1.073741824), rel=1e-3)
    assert {file.corpus for file in found} == set(CORPORA)


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


def test_encode_finds_what_is_planted(text: Path, tmp_path: Path) -> None:
    names = sorted({file.corpus for file in chosen()})
    assert set(names) == set(CORPORA)
    flags = {"corpus": tuple(names), "where": tuple(f"{name}={text / name}" for name in names), "allow_missing": True}
    vocab(VocabConfig(tmp_path / "vocab", size=8000, sentences=20_000, **flags))
    encode(EncodeConfig(vocab=tmp_path / "vocab", out=tmp_path / "encoded", **flags))
    for task, read, lost in (("mono", "paragraphs_in", "removed"), ("para", "pairs_in", "dropped")):
        counts = read_manifest(tmp_path / "encoded" / task).counts["by_language"]
        for name, found in counts.items():
            here = [file for file in chosen() if file.name == name]
            notes = {file.path: json.loads((text / "planted" / f"{file.path}.json").read_text()) for file in here}
            wanted: Counter[str] = sum((Counter(note["damaged"]) for note in notes.values()), Counter())
            got = Counter(found[lost]) + Counter(found["repaired"])
            by_tokens = got.pop("length_ratio", 0) + got.pop("length", 0)  # of some pairs, before duplicates are sought
            assert by_tokens < 0.05 * found[read]
            hashes = [np.load(text / "planted" / f"{path}.npy") for path in notes if task == "para"]
            planted = repeated(np.concatenate(hashes)) if hashes else sum(n["exact_duplicates"] for n in notes.values())
            assert planted - by_tokens <= got.pop("exact_duplicates") <= planted
            assert planted > 0.01 * found[read] == 0.01 * sum(note["lines"] for note in notes.values())
            assert got == +wanted, name


def test_no_word_fills_a_row() -> None:
    """A list of names without spaces is cut, so that different rows of text do not lie within copies of it."""
    for language, line in (("cs", ",".join(["Aban", "Seliandra"] * 200)), ("ja", "a, " * 400 + "あ" * 300)):
        words = rehearsal_text._words([line] * 2, np.ones(2, np.int64), language)
        assert np.diff(words.starts).max() <= 65


def test_lines_are_told_apart_as_they_are_read() -> None:
    """Words of spaces and one letter: lines that differ by spaces at their ends are one. Pairs of equal sides: none but
    those that are planted."""
    spaced = [np.frombuffer(b"a \x20a", np.uint8), np.array([0, 2, 4]), np.array([1, 3])]
    words = (*spaced, np.array([0, 1, 1, 0], np.int32), np.array([0, 2, 4]))
    out, other, state = np.empty(2_000_000, np.uint8), np.empty(2_000_000, np.uint8), np.array([1], np.uint64)
    planted = np.zeros(5, np.int64)
    none = np.zeros(0, np.uint8), np.zeros((0, 2), np.int64)
    size, hashes, _ = mono_block(out, words, np.array([3]), np.zeros(30, np.uint8), *none, state, 100_000, planted)
    lines = [line.strip() for line in out[:size].tobytes().decode("latin-1").split("\n") if set(line) <= {"a", " "}]
    assert any(line.startswith(" ") for line in out[:size].tobytes().decode("latin-1").split("\n"))
    lines = [line for line in lines if line]
    assert abs(repeated(hashes) - (len(lines) - len(set(lines)))) <= planted[1:].sum()
    low, planted = np.zeros(0, bool), np.zeros(6, np.int64)
    size, size2, pairs, _ = pair_block(out, other, words, words, state, 100_000, planted, low)
    sides = zip(*(each.tobytes().split(b"\n")[:-1] for each in (out[:size], other[:size2])), strict=True)
    assert sum(a == b for a, b in sides) == planted[2] and pairs > 1000
