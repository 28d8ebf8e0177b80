"""`vocap`: curves against SentencePiece's own trainings, allocation against brute force, the merged model in use."""

import errno
import io
import itertools
import json
import lzma
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece as spm

from data_prep.encode.encode import EncodeConfig
from data_prep.encode.encode import run as encode
from data_prep.parallel import MachineError
from data_prep.store import Stage, write_file
from data_prep.vocab import unigram
from data_prep.vocab.allocation import allocate, concave_hull, hull_steps, piece_order, pool_probabilities
from data_prep.vocab.model_file import parse, serialize
from data_prep.vocab.unigram import UnigramModel, UnigramTrainer, _read_words, _seeds
from data_prep.vocab.unigram_loops import MAX_WORD_LENGTH, build_trie
from data_prep.vocab.vocap import VocapConfig, _curve_file, _scored_pieces, nested_vocabularies, plot, run
from data_prep.vocab.word_counts import WordCounts, count_words, count_words_within_memory
from tests.data_prep.test_stats_plots import parts, places, ticks
from xlme_ds.data.schema import EOS, read_manifest
from xlme_ds.data.vocabulary import Vocabulary

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "corpus" / "mono"
HARD = [
    "ﬁne ｆｕｌｌｗｉｄｔｈ ①②③ ½",
    "tabs\tand  several   spaces ",
    "\u200bzero\u200dwidth",
    "İstanbul ǅ ß",
    "e\u0301",
]


def compose(text: str, copies: int) -> list[str]:
    """Sentences of words that are put together from two or three parts of a text's words, some often and most
    seldom."""
    random = np.random.default_rng(copies)
    parts = sorted({word[i : i + 3] for word in text.replace("、", " ").split() for i in range(0, len(word), 3)})
    words = ["".join(random.choice(parts, random.integers(2, 4))) for _ in range(200)]
    joint = " " if len(text.split()) > 3 else ""
    return [joint.join(words[min(int(n), 199)] for n in random.zipf(1.3, 8)) for _ in range(copies)]


@pytest.fixture(scope="module")
def lines(sentences: list[str]) -> dict[str, list[str]]:
    codes = ("en", "de", "fr", "ru", "ja", "ur")
    copies = (400, 120, 60, 60, 40, 20)
    return {code: compose(text, n) for code, text, n in zip(codes, sentences, copies, strict=True)}


@pytest.fixture(scope="module")
def corpus(lines: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for code, texts in lines.items():
        (folder / f"{code}.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    return folder


def config(corpus: Path, out: Path, /, **settings: object) -> VocapConfig:
    base = VocapConfig(out, mono=corpus, size=230, step=5, largest=120, sentences=300, character_coverage=1.0)
    return replace(base, **settings)


def made(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# curves


def real_lines(code: str, number: int) -> list[str]:
    if not SHARED.is_dir():
        pytest.skip("../shared/data/corpus/mono is absent")
    with lzma.open(SHARED / f"{code}.txt.xz", "rt", encoding="utf-8") as file:
        return [line.strip()[:1000] for line in itertools.islice(file, number) if line.strip()]


def by_sentencepiece(texts: list[str], model: bytes) -> tuple[float, int]:
    """(mean log-probability of a line's best segmentation, tokens of all) by SentencePiece's own processor."""
    processor = spm.SentencePieceProcessor(model_proto=model)
    ids = processor.encode([text for text in texts if text])
    unknown = min(processor.get_score(i) for i in range(3, processor.get_piece_size())) - 10
    scores = [sum(processor.get_score(i) if i else unknown for i in line) for line in ids]
    return float(np.mean(scores)), sum(map(len, ids))


def points(texts: list[str], largest: int, least: int) -> list[UnigramModel]:
    return list(nested_vocabularies(count_words(texts), largest, least, 0.8, 0.9995))


def test_words_are_counted_as_sentencepiece_normalises_them(
    lines: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.vocab.word_counts._BATCH_LINES", 7)
    texts = [*HARD, "", " ", *lines["de"], *lines["ja"]]
    normalize = spm.SentencePieceNormalizer(rule_name="nmt_nfkc").normalize
    counted = Counter(word for text in texts for word in normalize(text).split("▁") if word)
    found = count_words(texts)
    assert dict(zip(found.words.to_pylist(), found.counts.tolist(), strict=True)) == counted
    assert found.words.to_pylist() == sorted(counted)
    assert found.sentences == sum(bool(normalize(text)) for text in texts)
    assert count_words([]).sentences == len(count_words([""]).words) == 0


def test_a_curve_is_nested_rises_with_size_and_ends_at_the_characters(lines: dict[str, list[str]]) -> None:
    for texts in lines.values():
        found = points([*texts, ""], 100, 5)
        sizes = [len(point.pieces) for point in found]
        assert sizes[0] <= 100 and len(sizes) > 2 and sizes == sorted(set(sizes), reverse=True)
        for larger, smaller in itertools.pairwise(found):
            assert smaller.pieces.keys() < larger.pieces.keys()
            assert smaller.log_likelihood < larger.log_likelihood
        words = count_words(texts).words.to_pylist()
        assert found[-1].pieces.keys() == {letter for word in words for letter in f"▁{word}"}
        for point in (found[0], found[-1]):  # of whole lines, by another implementation
            assert (point.log_likelihood / len(texts), point.tokens) == pytest.approx(
                by_sentencepiece(texts, serialize(point.pieces)), rel=1e-6
            )


def test_rare_characters_are_unknown_and_so_is_a_run_of_them() -> None:
    texts = ["abab ab ba abba " * 50] * 20 + ["ab ЖШЖ ab", "abЖЖbШ"]
    point = UnigramTrainer(count_words(texts), 0.999).prune_to(30)
    assert not {"Ж", "Ш"} & set("".join(point.pieces))
    alp, tokens = by_sentencepiece(texts, serialize(point.pieces))
    assert (point.log_likelihood / len(texts), point.tokens) == (pytest.approx(alp, rel=1e-6), tokens)


def test_a_long_word_is_cut() -> None:
    """At most a piece more at each cut."""
    texts = ["abab ab ba abba " * 50] * 20 + ["abba" * 2500]
    point = UnigramTrainer(count_words(texts), 1.0).prune_to(30)
    alp, tokens = by_sentencepiece(texts, serialize(point.pieces))
    assert point.log_likelihood / len(texts) == pytest.approx(alp, rel=0.02)
    assert tokens <= point.tokens <= tokens + 9


def brute_force(words: dict[str, int], pieces: dict[str, float]) -> tuple[dict[str, float], float]:
    """Expected occurrences of pieces over all segmentations, and the log-probability of all words."""

    def cuts(word: str) -> Iterator[list[str]]:
        if not word:
            yield []
        for n in range(1, len(word) + 1):
            if word[:n] in pieces:
                yield from ([word[:n], *rest] for rest in cuts(word[n:]))

    expected, total = dict.fromkeys(pieces, 0.0), 0.0
    for word, count in words.items():
        ways = list(cuts(f"▁{word}"))
        chances = np.exp([sum(pieces[piece] for piece in way) for way in ways])
        total += count * np.log(chances.sum())
        for way, chance in zip(ways, chances / chances.sum(), strict=True):
            for piece in way:
                expected[piece] += count * chance
    return expected, total


def test_expectation_and_maximisation_against_all_segmentations() -> None:
    """One round from known probabilities, counted by hand; digamma from SciPy's definition by differences."""
    words = {"abab": 5, "aab": 3, "bba": 2, "b": 7}
    text = WordCounts(pa.array(sorted(words), pa.large_string()), np.array([words[w] for w in sorted(words)]), 17)
    trainer = UnigramTrainer(text, 1.0)
    before = dict(zip(trainer._pieces, trainer._scores[1:].tolist(), strict=True))
    expected, _ = brute_force(words, before)
    trainer._reestimate(0.0)
    after = trainer.prune_to(1000)
    for _ in range(1):
        floored = {piece: max(count, 0.5) for piece, count in expected.items()}
        whole = digamma(sum(floored.values()))
        before = {piece: digamma(count) - whole for piece, count in floored.items()}
        expected, _ = brute_force(words, before)
    floored = {piece: max(count, 0.5) for piece, count in expected.items()}
    whole = digamma(sum(floored.values()))
    assert after.pieces == pytest.approx({piece: digamma(count) - whole for piece, count in floored.items()}, rel=1e-9)


def digamma(x: float) -> float:
    """By the recurrence far up, where ln x - 1/2x - 1/12x² is exact."""
    steps = [x + n for n in range(3000)]
    far = x + 3000
    return math.log(far) - 0.5 / far - 1 / (12 * far**2) - math.fsum(1 / step for step in steps)


def test_seeds_are_the_substrings_that_branch(lines: dict[str, list[str]]) -> None:
    """Against a count of all substrings of one script."""
    texts = lines["de"][:40]
    words = count_words(texts)
    counted: Counter[str] = Counter()
    for word, count in zip(words.words.to_pylist(), words.counts.tolist(), strict=True):
        spaced = f"▁{word}"
        for start in range(len(spaced)):
            for stop in range(start + 1, len(spaced) + 1):
                counted[spaced[start:stop]] += count

    def alike(piece: str) -> bool:
        kinds = {character.isalpha() for character in piece.removeprefix("▁")}
        return len(kinds) < 2

    follow: Counter[str] = Counter()
    for piece, count in counted.items():
        follow[piece[:-1]] = max(follow[piece[:-1]], count * alike(piece))
    wanted = {p for p, n in counted.items() if 2 <= len(p) <= 16 and n >= 2 and follow[p] < n and alike(p)}
    found, _ = unigram._seeds(unigram._read_words(words, 1.0), 1_000_000)
    assert set(found) == wanted and len(found) > 100


def test_pieces_join_every_letter_of_a_language() -> None:
    """Azerbaijani's ə and Hausa's ɗ and ɓ are in Unicode's block after the other Latin letters."""
    words = count_words(["məktəb məktəblər ɗalibi ɗalibai ɓera ɓeraye"] * 2)
    found, _ = unigram._seeds(unigram._read_words(words, 1.0), 1000)
    assert {"▁məktəb", "▁ɗalib", "▁ɓera"} <= set(found)


def test_a_large_vocabulary_begins_with_more_seeds(
    lines: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maximisation drops half of the seeds at once, so a number of them that is fixed bounds the vocabulary."""
    monkeypatch.setattr(unigram, "_SEEDS", 120)
    words = count_words(lines["de"])
    fixed = unigram.UnigramTrainer(words, 1.0).size
    assert fixed < 110 <= unigram.UnigramTrainer(words, 1.0, 110).size
    assert len(unigram.UnigramTrainer(words, 1.0, 110).prune_to(110).pieces) == 110


def test_lines_are_thinned_until_their_words_fit_into_memory() -> None:
    """Evenly over the text, and no more than needed; repeated words cost nothing."""
    lines = [f"wort{i} das {'x' * (i % 7)}" for i in range(1000)]
    whole = count_words(lines)
    needed = sum(60 + 45 * len(word) for word in whole.words.to_pylist())
    for memory, step in ((needed, 1), (needed - 1, 2), (needed // 3, 4)):
        thinned = count_words_within_memory(lambda: iter(lines), memory)
        assert thinned.words.equals(count_words(lines[::step]).words) and thinned.sentences == 1000 // step


def test_seeds_are_ranked_by_occurrences_times_length(lines: dict[str, list[str]]) -> None:
    text = count_words(lines["en"])
    words = {f"▁{word}": int(times) for word, times in zip(text.words.to_pylist(), text.counts, strict=True)}
    pieces, guesses = _seeds(_read_words(text, 1.0), 300)

    def score(piece: str) -> int:
        return len(piece) * sum(
            n * sum(word.startswith(piece, i) for i in range(len(word))) for word, n in words.items()
        )

    scores = [score(piece) for piece in pieces]
    assert len(pieces) > 200 and scores == sorted(scores, reverse=True) == guesses[-len(pieces) :].tolist()


def test_more_substrings_than_the_tables_have_room_for_at_first() -> None:
    """Of all words of three out of 35 letters, twice each: every substring is a seed, and is found where it begins."""
    letters = "abcdefghijklmnopqrstuvwxyzßàáâãäåæç"
    spelt = sorted(map("".join, itertools.product(letters, repeat=3)))
    text = WordCounts(pa.array(spelt, pa.large_string()), np.full(len(spelt), 2), len(spelt))
    words = _read_words(text, 1.0)
    pieces, guesses = _seeds(words, 1_000_000)
    expected = Counter(f"▁{word}"[i:j] for word in spelt for i in range(4) for j in range(i + 2, 5))
    assert set(pieces) == set(expected) and len(pieces) == 88_235
    scores = [2 * len(piece) * expected[piece] for piece in pieces]
    assert scores == guesses[-len(pieces) :].tolist() == sorted(scores, reverse=True)
    numbers = {character: number for number, character in enumerate(words.alphabet, 1)}
    characters = np.array([numbers[character] for piece in pieces for character in piece], np.int32)
    trie = build_trie(characters, np.cumsum([0, *map(len, pieces)]), len(numbers))
    lattice = unigram._find_pieces(trie, words.characters, words.starts, words.reach)
    assert lattice.fan.tolist() == [4, 3, 2, 1] * len(spelt)
    alphabet = [*words.alphabet, *pieces]
    for word in spelt[::1000]:
        begin = 10 * spelt.index(word)
        arcs = [alphabet[number - 1] for number in lattice.arcs[begin : begin + 10].tolist()]
        assert arcs == [f"▁{word}"[i:j] for i in range(4) for j in range(i + 1, 5)]
    assert len(lattice.arcs) == 10 * len(spelt)


def test_every_part_of_a_long_word_of_unknown_characters_has_one() -> None:
    """Of unknown characters in a row one stays, but in each part of a word."""
    words = _read_words(count_words(["ab " * 9999 + "ж" * (2 * MAX_WORD_LENGTH)]), 0.9)
    sizes = np.diff(words.starts)
    assert sorted(sizes.tolist()) == [1, 1, 2, 3] and (words.characters == 0).sum() == 3


def test_a_curve_has_all_sizes_from_the_largest_to_the_least(lines: dict[str, list[str]]) -> None:
    """Each is four fifths of the one before, of 125 down to just the least; then the characters."""
    points = [len(point.pieces) for point in nested_vocabularies(count_words(lines["en"]), 125, 64, 0.8, 1.0)]
    assert points[:-1] == [125, 100, 80, 64] and points[-1] == len({*"".join(lines["en"]), "▁"} - {" "})


def test_no_size_of_a_curve_repeats() -> None:
    """Below 42 pieces a shrinkage of 0.98 is less than a piece."""
    points = [len(point.pieces) for point in nested_vocabularies(count_words(["aba bab ab ba"] * 9), 40, 4, 0.98, 1.0)]
    assert len(points) > 2 and points == sorted(set(points), reverse=True)


def test_too_small_a_largest_size_for_the_characters(lines: dict[str, list[str]]) -> None:
    letters = {letter for line in lines["ja"] for letter in f"▁{line}"}
    for largest in (20, len(letters) - 1):
        with pytest.raises(ValueError, match=rf"--largest is too small for a language with {len(letters)} characters"):
            list(nested_vocabularies(count_words(lines["ja"]), largest, 5, 0.8, 1.0))


@pytest.mark.parametrize(("code", "least"), [("sw", 500), ("hi", 500), ("ja", 1500)])
def test_the_path_is_no_worse_than_sentencepiece_s_trainings(code: str, least: int) -> None:
    """At every size against one of SentencePiece's own, on the text and on text held out."""
    texts = real_lines(code, 3000)
    heldout, texts = texts[::10], [text for n, text in enumerate(texts) if n % 10]
    found = list(nested_vocabularies(count_words(texts), 4000, least, 0.6, 0.9995))
    assert len(found) > 2
    for point in found[:-1]:
        model = io.BytesIO()
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=len(point.pieces) + 3,
            hard_vocab_limit=False,
            character_coverage=0.9995,
            minloglevel=2,
        )
        ours, theirs = serialize(point.pieces), model.getvalue()
        if len(parse(theirs)) == len(point.pieces):
            for some in (texts, heldout):
                assert by_sentencepiece(some, ours)[0] > 1.02 * by_sentencepiece(some, theirs)[0], len(point.pieces)


# allocation


def test_concave_hull() -> None:
    curve = [(10, -100.0), (20, -90.0), (30, -60.0), (40, -50.0), (50, -45.0), (60, -46.0)]
    assert concave_hull(curve) == [(10, -100.0), (30, -60.0), (40, -50.0), (50, -45.0)]
    assert concave_hull([(7, -3.0)]) == [(7, -3.0)]
    assert concave_hull([(10, -5.0), (20, -3.0), (30, -3.0)]) == [(10, -5.0), (20, -3.0)], "pieces that gain nothing"


def test_chosen_pieces_have_the_scores_of_the_smallest_vocabulary_that_has_all(tmp_path: Path) -> None:
    stage, curve = Stage(tmp_path, "vocap"), [(2, -9.0), (3, -8.0), (12, -7.0)]
    for size, _ in curve:
        pieces = {f"{n:02d}": -float(size) - n for n in range(size)}
        write_file(_curve_file(stage, "de", size), serialize(pieces), tmp_path)
    for count, size in ((1, 2), (2, 2), (3, 3), (4, 12), (12, 12)):
        names = [f"{n:02d}" for n in range(count)]
        assert _scored_pieces(stage, "de", curve, names) == {name: -float(size) - n for n, name in enumerate(names)}


def test_steps_are_the_optimum_for_every_budget() -> None:
    """Against all allocations in whole steps of three random concave curves."""
    random = np.random.default_rng(0)
    for _ in range(20):
        curves, weights = {}, {}
        for code in ("a", "b", "c"):
            gains = np.sort(random.uniform(0.1, 10, 4))[::-1]
            curves[code] = [(2 + 3 * i, float(alp)) for i, alp in enumerate([-50, *(-50 + np.cumsum(gains))])]
            weights[code] = float(random.uniform(0.1, 1))
        taken = hull_steps(curves, weights, 3)
        for number in range(len(taken) + 1):
            sizes = {code: 2 + 3 * sum(step[0] == code for step in taken[:number]) for code in curves}
            values = {code: dict(curve) for code, curve in curves.items()}
            objective = sum(weights[code] * values[code][size] for code, size in sizes.items())
            best = max(
                sum(weights[code] * alp for code, (_, alp) in zip(curves, choice, strict=True))
                for choice in itertools.product(*curves.values())
                if sum(size for size, _ in choice) <= sum(sizes.values())
            )
            assert objective == pytest.approx(best)


def test_steps_end_at_the_points_of_the_hull() -> None:
    found = hull_steps({"a": [(2, -20.0), (9, -6.0), (14, -1.0)]}, {"a": 1.0}, 3)
    assert found == [("a", 2, 5), ("a", 5, 8), ("a", 8, 9), ("a", 9, 12), ("a", 12, 14)]


def test_shared_pieces_are_paid_once_and_the_union_is_exact() -> None:
    orders = {"x": [f"p{i}" for i in range(40)], "y": [f"p{i}" for i in range(20)] + [f"q{i}" for i in range(20)]}
    curves = {"x": [(4, -9.0), (40, -1.0)], "y": [(4, -9.0), (40, -2.0)]}
    for size in range(4, 61):
        found = allocate(orders, curves, {"x": 1.0, "y": 1.0}, 6, size)
        union = {piece for code, order in orders.items() for piece in order[: found[code]]}
        assert len(union) == size
    assert found == {"x": 40, "y": 40}
    with pytest.raises(ValueError, match="the curves end at 60: take a smaller --size"):
        allocate(orders, curves, {"x": 1.0, "y": 1.0}, 6, 61)
    with pytest.raises(ValueError, match="the characters of 2 languages are 4: take a larger --size"):
        allocate(orders, curves, {"x": 1.0, "y": 1.0}, 6, 3)


def test_the_plot_has_the_chosen_sizes_on_the_curves_and_against_the_lines() -> None:
    """Twenty pieces are between the points of ten and thirty; sizes and lines are on log scales."""
    curves = {"aa": [(10, -50.0), (30, -30.0)], "bb": [(5, -80.0), (50, -20.0), (100, -10.0)]}
    given = {"aa": {"lines": 100, "pieces": 20}, "bb": {"lines": 10_000, "pieces": 50}}
    left, right = parts(plot(curves, given), "axes")
    marks = [[places(line) for line in parts(ElementTree.tostring(axes), "line2d")] for axes in (left, right)]
    ((aa, bb),), ((few, many),) = ([two for two in found if len(two) == 2] for found in marks)
    alps, sizes = ticks(left, "ytick"), ticks(left, "xtick")
    assert (aa[1], bb[1]) == pytest.approx((alps["−40"], alps["−20"]), abs=0.01)
    decade = sizes["10^{2}"] - sizes["10^{1}"]
    assert [(x - sizes["10^{1}"]) / decade for x, _ in (aa, bb)] == pytest.approx(np.log10([2, 5]), abs=0.01)
    lines, pieces = ticks(right, "xtick"), ticks(right, "ytick")
    assert (few[0], many[0], few[1]) == pytest.approx((lines["10^{2}"], lines["10^{4}"], pieces[r"2\times10^{1}"]))
    octave = pieces[r"4\times10^{1}"] - few[1]
    assert (many[1] - few[1]) / octave == pytest.approx(math.log2(2.5), abs=0.01)


def test_order_and_pool() -> None:
    small, large = {"a": -1.0, "b": -0.5}, {"a": -2.0, "b": -3.0, "ab": -1.0, "ba": -4.0}
    assert piece_order([small, large]) == ["b", "a", "ab", "ba"]
    pooled = pool_probabilities(
        {"x": {"a": np.log(0.2), "b": np.log(0.2)}, "y": {"b": 0.0}}, {"x": 3.0, "y": 1.0, "unused": 9.0}
    )
    assert list(pooled) == ["b", "a"]
    assert np.exp(list(pooled.values())) == pytest.approx([0.75 * 0.5 + 0.25, 0.75 * 0.5])


# the stage


def test_the_model_has_the_size_and_bytes_do_not_depend_on_processes(corpus: Path, tmp_path: Path) -> None:
    run(config(corpus, tmp_path / "one"))
    run(config(corpus, tmp_path / "two", processes=2))
    assert made(tmp_path / "one") == made(tmp_path / "two")
    vocabulary, manifest = Vocabulary(tmp_path / "one"), read_manifest(tmp_path / "one")
    assert vocabulary.size == manifest.vocabulary_size == 230
    assert vocabulary.sha256 == manifest.vocabulary_sha256 == manifest.shards[0].sha256
    by_language = manifest.counts["by_language"]
    assert manifest.languages == tuple(sorted(by_language)) == ("de", "en", "fr", "ja", "ru", "ur")
    assert by_language["en"]["sampled"] == 300 and by_language["ur"]["sampled"] == by_language["ur"]["lines"] == 20
    lines, own, pieces = (
        {code: counts[key] for code, counts in by_language.items()} for key in ("lines", "own_pieces", "pieces")
    )
    shared = sum(pieces.values()) - sum(own.values())  # of the 225, each in two to six languages
    assert 0 < shared / 6 <= 225 - sum(own.values()) <= shared / 2
    weights = {code: number**0.7 for code, number in lines.items()}
    for code, counts in by_language.items():
        assert counts["share_before"] == lines[code] / sum(lines.values())
        assert counts["share_after"] == pytest.approx(weights[code] / sum(weights.values()))
    curves = json.loads((tmp_path / "one" / "vocap.json").read_text(encoding="utf-8"))["curves"]
    assert all(curves[code][0][0] <= by_language[code]["pieces"] <= curves[code][-1][0] for code in curves)


def test_under_mpi(corpus: Path, tmp_path: Path, data_prep: Callable[..., object]) -> None:
    flags = ["--mono", corpus, "--size", 230, "--step", 5, "--largest", 120, "--sentences", 300]
    result = data_prep("vocap", *flags, "--character-coverage", 1.0, "--out", tmp_path / "ranks", ranks=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{tmp_path}/ranks/sentencepiece.model: 230 ids\n"
    run(config(corpus, tmp_path / "one"))
    assert made(tmp_path / "one") == made(tmp_path / "ranks")


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full", "a")])
def test_a_relaunch_keeps_finished_languages(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    """Interrupted at the third language, or out of disk, then taken up: same bytes, and finished curves are not made
    again."""
    begun: list[int] = []

    def interrupted(text: WordCounts, *settings: float) -> Iterator[UnigramModel]:
        begun.append(text.sentences)
        if len(begun) == 3:
            raise stop
        return nested_vocabularies(text, *settings)

    run(config(corpus, tmp_path / "whole"))
    monkeypatch.setattr("data_prep.vocab.vocap.nested_vocabularies", interrupted)
    with pytest.raises((KeyboardInterrupt, MachineError)):
        run(config(corpus, tmp_path / "again"))
    assert len(list((tmp_path / "again" / "tasks").glob("path-*.json"))) == 2
    run(config(corpus, tmp_path / "again"))
    assert len(begun) == 3 + 4
    assert made(tmp_path / "again") == made(tmp_path / "whole")
    run(config(corpus, tmp_path / "again"))
    assert len(begun) == 3 + 4  # and a finished folder is kept
    with pytest.raises(ValueError, match=r"beta was 0\.7, now 0\.5"):
        run(config(corpus, tmp_path / "again", beta=0.5))


def test_beta_moves_pieces_between_large_and_small_languages(corpus: Path, tmp_path: Path) -> None:
    given = {}
    for beta in (0.0, 1.0):
        run(config(corpus, tmp_path / str(beta), beta=beta))
        counts = read_manifest(tmp_path / str(beta)).counts["by_language"]
        given[beta] = {code: counts[code]["pieces"] for code in counts}
    assert given[0.0]["en"] < given[1.0]["en"]
    assert given[0.0]["ur"] > given[1.0]["ur"]


def test_the_merged_model_goes_through_encode(corpus: Path, lines: dict[str, list[str]], tmp_path: Path) -> None:
    run(config(corpus, tmp_path / "vocap"))
    encode(EncodeConfig(mono=corpus, vocab=tmp_path / "vocap", out=tmp_path / "encoded"))
    manifest = read_manifest(tmp_path / "encoded" / "mono")
    assert manifest.vocabulary_sha256 == Vocabulary(tmp_path / "vocap").sha256
    assert all(counts["unknown"] == 0 for counts in manifest.counts["by_language"].values())
    vocabulary = Vocabulary(tmp_path / "vocap")
    for shard in manifest.shards:
        table = pa.ipc.open_file(tmp_path / "encoded" / "mono" / shard.name).read_all()
        texts = lines[shard.name.split("/")[0]]
        ids = [token for line in texts for token in vocabulary.encode(line).tolist()]
        assert table["tokens"].to_pylist() == [[*ids, EOS]]
        assert (
            vocabulary.decode(vocabulary.encode(texts[0]))
            == vocabulary.processor.normalize(texts[0]).replace("▁", " ").strip()
        )


def test_text_is_normalised_as_a_trained_model_does(vocab: Path, corpus: Path, tmp_path: Path) -> None:
    run(config(corpus, tmp_path))
    trained, merged = Vocabulary(vocab).processor, Vocabulary(tmp_path).processor
    for line in [*HARD, " a  b c "]:
        assert merged.normalize(line) == trained.normalize(line), line


def test_pairs_are_text_of_both_languages(corpus: Path, lines: dict[str, list[str]], tmp_path: Path) -> None:
    (tmp_path / "para").mkdir()
    for code in ("de", "en"):
        text = "\n".join(lines[code][:100]) + "\n"
        (tmp_path / "para" / f"X.de-en.{code}").write_text(text, encoding="utf-8")
    run(config(corpus, tmp_path / "out", para=tmp_path / "para"))
    counts = read_manifest(tmp_path / "out").counts["by_language"]
    assert (counts["de"]["lines"], counts["en"]["lines"], counts["ru"]["lines"]) == (120, 400, 60)


def test_a_described_corpus_behind_its_filters(corpus: Path, lines: dict[str, list[str]], tmp_path: Path) -> None:
    """Lines in another script and short ones are dropped before they are counted: the model is that of the others."""
    (tmp_path / "dirty").mkdir()
    for code, texts in lines.items():
        foreign = lines["ja" if code != "ja" else "en"][0]
        text = "".join(f"{line}\n{foreign}\n\n!\n" for line in texts)
        (tmp_path / "dirty" / f"{code}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "web.toml").write_text(
        'name = "web"\nformat = "cc100"\nfiles = "{lang}.txt"\nlanguages = ["en", "de", "fr", "ru", "ja", "ur", "sw"]\n'
        "[filters.script]\n[filters.boilerplate_length]\nmin_bytes = 2\n"
    )
    text = {"mono": None, "corpus": (str(tmp_path / "web.toml"),), "where": (f"web={tmp_path / 'dirty'}",)}
    run(config(corpus, tmp_path / "clean"))
    run(config(corpus, tmp_path / "described", allow_missing=True, processes=2, **text))
    names = ("sentencepiece.model", "vocap.json", "vocap.svg")
    assert [made(tmp_path / "described")[n] for n in names] == [made(tmp_path / "clean")[n] for n in names]
    with pytest.raises(ValueError, match=r"web\.filters was .*script.*, now .*length"):
        description = (tmp_path / "web.toml").read_text()
        (tmp_path / "web.toml").write_text(description.replace("[filters.script]", "[filters.length]"))
        run(config(corpus, tmp_path / "described", allow_missing=True, **text))


def test_a_language_without_words_has_no_pieces(corpus: Path, tmp_path: Path) -> None:
    """Of others the vocabulary is as without it; alone it is an error."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/sw.txt").write_text("\u200b\n")
    with pytest.raises(ValueError, match=r"there is no text in the inputs of .*alone: a vocabulary needs some words"):
        run(config(tmp_path / "in", tmp_path / "alone"))
    for code in ("en", "ur"):
        (tmp_path / "in" / f"{code}.txt").write_bytes((corpus / f"{code}.txt").read_bytes())
    run(config(tmp_path / "in", tmp_path / "with", size=120, largest=80))
    (tmp_path / "in/sw.txt").unlink()
    run(config(tmp_path / "in", tmp_path / "without", size=120, largest=80))
    assert read_manifest(tmp_path / "with").languages == ("en", "ur")
    model = "sentencepiece.model"
    assert (tmp_path / "with" / model).read_bytes() == (tmp_path / "without" / model).read_bytes()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": 5000}, "the curves end at"),
        ({"size": 40}, "the characters of 6 languages are"),
        ({"largest": 10, "step": 5}, "de: --largest is too small for a language with"),
        ({"mono": None}, "neither --mono nor --para nor --corpus is given"),
        ({"shrink": 1.0}, "--shrink is 1.0"),
        ({"beta": 1.5}, "--beta is 1.5"),
        ({"step": 200}, "--largest at least as large as --step"),
    ],
)
def test_settings_that_cannot_work(corpus: Path, tmp_path: Path, settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(config(corpus, tmp_path, **settings))
    if settings.keys() & {"size", "largest"}:  # the folder accepts others
        run(config(corpus, tmp_path))
