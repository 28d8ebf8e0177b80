"""Hand-made alignments: the format, the error rate by hand and by nltk, and the faults that are named."""

from pathlib import Path

import numpy as np
import pytest
from nltk.translate.metrics import alignment_error_rate

from tests.evaluate.folders import write_alignment
from xlme_ds.evaluate.alignment import GoldPair, Links, error_rates, read_gold_alignments

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared/data/eval/align"


def test_error_rate_by_hand() -> None:
    sure, predicted = {(0, 0), (1, 2)}, {(0, 0), (2, 1), (2, 2)}
    rates = error_rates([predicted], [GoldPair([""] * 3, [""] * 3, sure, sure | {(2, 1)})])
    # 1 − (|A∩S| + |A∩P|) / (|A| + |S|) = 1 − (1 + 2) / (3 + 2); |A∩P| / |A|; |A∩S| / |S|
    assert rates == {"aer": pytest.approx(0.4), "precision": pytest.approx(2 / 3), "recall": pytest.approx(1 / 2)}
    assert error_rates([set()], [GoldPair([""], [""], {(0, 0)}, {(0, 0)})]) == {"aer": 1, "precision": 0, "recall": 0}


def test_error_rate_is_nltks_over_a_whole_test() -> None:
    rng = np.random.default_rng(0)
    gold, predicted = [], []
    for _ in range(30):
        links = [tuple(map(int, link)) for link in np.argwhere(rng.random((6, 8)) < 0.4)]
        sure = {link for link in links if rng.random() < 0.6}
        gold.append(GoldPair([""] * 6, [""] * 8, sure, set(links)))
        predicted.append({tuple(map(int, link)) for link in np.argwhere(rng.random((6, 8)) < 0.3)})

    def shifted(pairs: list[Links]) -> set[tuple[int, int]]:  # nltk knows one pair: sentences become places
        return {(100 * n + i, 100 * n + j) for n, links in enumerate(pairs) for i, j in links}

    reference, possible = shifted([pair.sure for pair in gold]), shifted([pair.possible for pair in gold])
    expected = alignment_error_rate(reference, shifted(predicted), possible)
    assert error_rates(predicted, gold)["aer"] == pytest.approx(expected, abs=1e-12)


def test_links_count_words_from_one_and_sure_ones_are_possible(tmp_path: Path) -> None:
    write_alignment(tmp_path / "de-en", ["a b c", "d"], ["e f", "g h i"], "1 1 2 S\n1 3 1 P\n2 1 3\n")
    (pairs,) = read_gold_alignments(tmp_path).values()
    assert pairs == [
        GoldPair(["a", "b", "c"], ["e", "f"], {(0, 1)}, {(0, 1), (2, 0)}),
        GoldPair(["d"], ["g", "h", "i"], {(0, 2)}, {(0, 2)}),
    ]


def test_a_link_to_a_test_has_its_own_name(tmp_path: Path) -> None:
    folder = write_alignment(tmp_path / "gold-1", ["a"], ["b"], "1 1 1 S\n")
    for side, code in (("gold", "de"), ("1", "en")):
        (folder / f"test.{side}").rename(folder / f"test.{code}")
    (tmp_path / "de-en").symlink_to(folder)
    assert list(read_gold_alignments(tmp_path / "de-en")) == ["de-en"]


def test_a_no_break_space_is_inside_a_word(tmp_path: Path) -> None:
    write_alignment(tmp_path / "de-en", ["10\u00a0000 \tAutos "], ["10,000 cars"], "1 1 1 S\n1 2 2 S\n")
    (pair,) = read_gold_alignments(tmp_path)["de-en"]
    assert pair.source == ["10\u00a0000", "Autos"] and pair.sure == {(0, 0), (1, 1)}


def test_sentences_count_from_zero_where_one_has_number_zero(tmp_path: Path) -> None:
    write_alignment(tmp_path / "de-en", ["a", "b"], ["c", "d"], "0 1 1 S\r\n1 1 -99 S\r\n1 -1 1 S\r\n")
    pairs = read_gold_alignments(tmp_path / "de-en")["de-en"]
    assert [pair.sure for pair in pairs] == [{(0, 0)}, set()]  # negative: no word


@pytest.mark.parametrize(
    ("link", "linked", "said"),
    [
        ("1 2 2 S", 1, False),  # the words exist only in the sentence with index 1
        ("1 1 1 S", 0, True),
        ("3 1 1 S", 2, False),  # sentence 3 exists only if sentences count from 1
    ],
)
def test_without_a_link_of_sentence_zero_the_words_tell_how_sentences_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], link: str, linked: int, said: bool
) -> None:
    write_alignment(tmp_path / "de-en", ["a", "b c", "d"], ["e", "f g", "h"], f"{link}\n")
    pairs = read_gold_alignments(tmp_path / "de-en")["de-en"]
    assert [bool(pair.sure) for pair in pairs] == [index == linked for index in range(3)]
    note = f"{tmp_path}/de-en/alignv2.txt has no link of sentence 0 or 3: its sentences are taken as counted from 1\n"
    assert capsys.readouterr().err == (note if said else "")


def test_numbers_are_left_out_where_every_sentence_has_links(tmp_path: Path) -> None:
    """As in two of the paper's four tests: en-hi has 90 sentences with numbers from 26 to 123, ro-en 199 up to 203."""
    write_alignment(tmp_path / "ro-en", ["a b", "c", "d"], ["e", "f", "g h"], "26 2 1 S\n29 1 1 S\n123 1 2 S\n")
    (pairs,) = read_gold_alignments(tmp_path).values()
    assert [pair.sure for pair in pairs] == [{(1, 0)}, {(0, 0)}, {(0, 1)}]


def test_one_link_of_a_missing_word_in_a_thousand_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Published files have single ones, such as sentence 68 of en-hi; a file in the wrong direction has many."""
    words = [f"w{number}" for number in range(33)]
    links = "".join(f"1 {source} {target}\n" for source in range(1, 34) for target in range(1, 34))
    write_alignment(tmp_path / "en-hi", [" ".join(words)], [" ".join(words)], links + "1 33 34\n")
    (pair,) = read_gold_alignments(tmp_path)["en-hi"]
    assert pair.sure == pair.possible == {(source, target) for source in range(33) for target in range(33)}
    assert capsys.readouterr().err == (
        f"{tmp_path}/en-hi/alignv2.txt line 1090 has target word 34, but sentence 1 has 33 target words, counted from "
        "1: 1 of 1090 links are left out for such words\n"
    )
    (tmp_path / "en-hi/alignv2.txt").write_text(links + "1 33 34\n1 34 33\n")
    with pytest.raises(ValueError, match=r"line 1090 has target word 34.*the source language first"):
        read_gold_alignments(tmp_path)


def test_the_file_that_tells_sure_from_possible_comes_first(tmp_path: Path) -> None:
    folder = write_alignment(tmp_path / "en-fr", ["a b"], ["c d"], "1 1 1\n1 2 2\n", file="align.txt")
    assert len(read_gold_alignments(tmp_path)["en-fr"][0].sure) == 2
    (folder / "alignv2.txt").write_text("1 1 1 S\n1 2 2 P\n")
    (pair,) = read_gold_alignments(tmp_path)["en-fr"]
    assert pair.sure == {(0, 0)} and pair.possible == {(0, 0), (1, 1)}


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ("1 1 1 S\n1 2 3 S\n", ("alignv2.txt line 2", "target word 3", "2 target words")),
        ("1 0 1 S\n", ("line 1", "source word 0", "counted from 1")),
        ("1 1 1\n2 1 1\n3 1 1\n", ("line 3", "sentence 3", "only 2 sentences, counted from 1")),
        ("0 1 1\n1 1 1\n2 1 1\n", ("line 3", "sentence 2", "only 2 sentences, counted from 0")),
        ("3 1 1\n", ("line 1", "sentence 3", "only 2 sentences, counted from 1")),
        ("1 1 1 X\n", ("line 1", "S or P")),
        ("1 1\n", ("line 1", "source word, target word")),
        ("1 1 one\n", ("line 1", "'1 1 one'")),
        ("1 1 1 P\n", ("no sure link",)),
        ("", ("alignv2.txt is empty",)),
    ],
)
def test_faults_in_links_are_named(tmp_path: Path, links: str, words: tuple[str, ...]) -> None:
    write_alignment(tmp_path / "de-en", ["a b c", "d e f"], ["g h", "i j"], links)
    with pytest.raises(ValueError) as caught:
        read_gold_alignments(tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value


def test_faults_in_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no word alignments"):
        read_gold_alignments(tmp_path)
    folder = write_alignment(tmp_path / "de-en", ["a", "b"], ["c"], "1 1 1\n")
    with pytest.raises(ValueError, match=r"test\.de has 2 lines but .*test\.en has 1"):
        read_gold_alignments(tmp_path)
    (folder / "test.en").unlink()
    with pytest.raises(ValueError, match=r"test\.en cannot be read"):
        read_gold_alignments(tmp_path)
    write_alignment(tmp_path / "en-fr", ["a"], ["c"], "1 1 1\n", file="links.txt")
    (folder / "test.en").write_text("c\nd\n")
    with pytest.raises(ValueError, match=r"en-fr has sentences but no alignv2\.txt or align\.txt"):
        read_gold_alignments(tmp_path)
    (tmp_path / "en-fr/test.en").unlink()
    (tmp_path / "en-fr/test.fr").unlink()
    assert read_gold_alignments(tmp_path).keys() == {"de-en"}
    folder.rename(tmp_path / "german")
    with pytest.raises(ValueError, match="name it after its languages"):
        read_gold_alignments(tmp_path)


@pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} is absent: the real files are not part of the repository")
def test_real_files() -> None:
    sizes = {
        name: (len(pairs), sum(len(pair.sure) for pair in pairs), sum(len(pair.possible) for pair in pairs))
        for name, pairs in read_gold_alignments(REAL).items()
    }
    # Lines of the files by their fourth field; one of the 9,613 sure ones of de-en has the word -99.
    assert sizes == {"de-en": (508, 9612, 10533), "en-fr": (447, 4038, 17438)}
