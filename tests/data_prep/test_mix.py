"""`mix` on small encoded folders whose every token is unique, so that each row tells where it comes from."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece as spm

from data_prep.encode.encode import EncodeConfig
from data_prep.inspect.verify import VerifyConfig
from data_prep.inspect.verify import run as run_verify
from data_prep.mix.encoded import ExampleUnit, scan_shard
from data_prep.mix.mix import MixConfig, _print_shares, _write_task, run
from data_prep.mix.mixed_rows import _rechunked
from data_prep.store import write_arrow
from data_prep.vocab.model_file import serialize
from data_prep.vocab.vocab import VocabConfig
from data_prep.vocab.vocab import run as train
from xlme_ds.data.schema import (
    BOS,
    DOCUMENTS,
    EOS,
    LAYOUTS,
    PAD,
    PAIRS,
    Manifest,
    read_manifest,
    row_schema,
    write_manifest,
)
from xlme_ds.io.files import file_sha256, write_checksummed

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 16
TEXT = WIDTH - 2
IDS = 20_000  # of the vocabulary
LANGUAGES = ("de", "en", "sw", "xh", "zh-Hans")


@dataclass(frozen=True)
class Corpus:
    """An encoded folder, and what it holds: `streams` of each language's shards, (source, target) pairs by name."""

    folder: Path
    vocab: Path
    streams: dict[str, list[list[int]]]
    pairs: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]

    def rows(self, language: str) -> list[tuple[int, ...]]:
        """A language's training rows, written down from the definition."""
        result = []
        for stream in self.streams[language]:
            for start in range(0, len(stream), TEXT):
                piece = stream[start : start + TEXT]
                while piece and piece[0] == EOS:
                    piece = piece[1:]
                while piece and piece[-1] == EOS:
                    piece = piece[:-1]
                if piece:
                    result.append((BOS, *piece, EOS))
        return result

    def config(self, out: Path, **settings: float) -> MixConfig:
        return replace(MixConfig(self.folder, self.vocab, out, row_tokens=WIDTH, rows_per_shard=64), **settings)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("encoded")
    rng = np.random.default_rng(0)
    (folder / "sentencepiece.model").write_bytes(serialize({f"{i:05d}": -1.0 for i in range(IDS - 5)}))
    sha256 = file_sha256(folder / "sentencepiece.model")
    fresh = iter(range(4, IDS - 1))

    def ids(count: int) -> list[int]:
        return [next(fresh) for _ in range(count)]

    documents = {
        "de": [[int(n) for n in rng.integers(1, 40, size)] for size in (90, 70)],
        "en": [[int(n) for n in rng.integers(1, 60, 250)]],
        "sw": [[int(n) for n in rng.integers(1, 9, 30)]],
        "xh": [
            [TEXT - 1, TEXT],
            [TEXT, TEXT - 1, TEXT],
        ],  # slices that start or end with </s>; a last slice of only </s>
    }
    streams: dict[str, list[list[int]]] = {}
    shards = []
    for language, shard_lengths in documents.items():
        streams[language] = []
        for number, lengths in enumerate(shard_lengths):
            texts = [[*ids(n), EOS] for n in lengths]
            streams[language].append([token for text in texts for token in text])
            parts = [pa.record_batch([pa.array(texts[i : i + 37])], schema=DOCUMENTS) for i in range(0, len(texts), 37)]
            path = folder / "mono" / language / f"{number:05d}.arrow"
            shards.append(write_arrow(path, DOCUMENTS, parts, folder / "mono"))
    assert any(len(stream) % TEXT == 1 for stream in streams["xh"])
    _manifest(folder / "mono", shards, sha256, tuple(documents))

    pairs, shards = {}, []
    for name, count in (("en-de", 500), ("en-zh-Hans", 60)):
        pairs[name] = [(tuple(ids(a)), tuple(ids(b))) for a, b in rng.integers(1, 9, (count, 2)).tolist()]
        columns = [[list(pair[side]) for pair in pairs[name]] for side in (0, 1)]
        parts = [
            pa.record_batch([pa.array(c[i : i + 101], pa.list_(pa.int32())) for c in columns], schema=PAIRS)
            for i in range(0, count, 101)
        ]
        shards.append(write_arrow(folder / "para" / name / "00000.arrow", PAIRS, parts, folder / "para"))
    _manifest(folder / "para", shards, sha256, ("de", "en", "zh-Hans"))
    return Corpus(folder, folder / "sentencepiece.model", streams, pairs)


def _manifest(folder: Path, shards: list, sha256: str, languages: tuple[str, ...], **settings: int) -> None:
    shards.sort(key=lambda shard: shard.name)
    write_manifest(folder, Manifest("encode", settings, IDS, sha256, tuple(sorted(languages)), tuple(shards), {}))


@dataclass(frozen=True)
class Row:
    tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    languages: tuple[str, ...]

    def items(self) -> list[tuple[int, ...]]:
        """The row cut at its lengths; the rest must be padding."""
        ends = np.cumsum((0, *self.lengths)).tolist()
        assert set(self.tokens[ends[-1] :]) <= {PAD}
        return [self.tokens[a:b] for a, b in pairwise(ends)]


def read_rows(folder: Path) -> list[Row]:
    manifest = read_manifest(folder)
    rows = []
    for shard in manifest.shards:
        assert file_sha256(folder / shard.name) == shard.sha256
        with pa.memory_map(str(folder / shard.name)) as file:
            table = pa.ipc.open_file(file).read_all()
        assert table.num_rows == shard.rows
        for row in table.to_pylist():
            languages = tuple(manifest.languages[i] for i in row["languages"])
            rows.append(Row(tuple(row["tokens"]), tuple(row["lengths"]), languages))
    return rows


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_alpha_one_and_all_rows_is_one_pass(corpus: Corpus, tmp_path: Path) -> None:
    expected = {row: language for language in corpus.streams for row in corpus.rows(language)}
    run(corpus.config(tmp_path, mono_rows=len(expected), alpha=1.0))
    rows = read_rows(tmp_path / "mono")
    assert Counter(row.items()[0] for row in rows) == Counter(expected.keys())
    assert all(row.languages == (expected[row.items()[0]],) and len(row.lengths) == 1 for row in rows)
    place = {row: i for i, row in enumerate(expected)}
    assert abs(np.corrcoef(np.arange(len(rows)), [place[row.items()[0]] for row in rows])[0, 1]) < 0.15, "not shuffled"


def test_temperature_repeats_low_resource_rows_evenly(corpus: Corpus, tmp_path: Path) -> None:
    total, alpha = 3001, 0.3
    run(corpus.config(tmp_path, mono_rows=total, alpha=alpha))
    manifest, rows = read_manifest(tmp_path / "mono"), read_rows(tmp_path / "mono")
    assert len(rows) == manifest.rows == total
    assert [shard.rows for shard in manifest.shards] == [64] * 46 + [total - 46 * 64]
    available = {language: len(corpus.rows(language)) for language in corpus.streams}
    weights = {language: count**alpha for language, count in available.items()}
    times = Counter(row.items()[0] for row in rows)
    for language, counts in manifest.counts["by_language"].items():
        used = sum(times[row] for row in corpus.rows(language))
        assert abs(used - total * weights[language] / sum(weights.values())) < 1
        assert counts["available"] == available[language] and counts["used"] == used
        assert counts["repeat"] == used / available[language]
        assert counts["share_before"] == pytest.approx(available[language] / sum(available.values()))
        assert counts["share_after"] == pytest.approx(used / total)
        own = set(corpus.rows(language))
        uses = [row.items()[0] for row in rows if row.items()[0] in own]
        for start in range(0, len(uses), len(own)):
            one = uses[start : start + len(own)]
            assert len(set(one)) == len(one), f"a row of {language} came again before all its others"
        each = [times[row] for row in corpus.rows(language)]
        assert min(each) == used // available[language] and max(each) == -(-used // available[language])
    assert manifest.counts["tokens"] == sum(sum(row.lengths) for row in rows)


def test_set_shares_and_a_bound_on_repeats(corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the rows that are written; the table says the same before."""
    total, settings = 2000, {"alpha": 0.5, "share": ("xh+sw=0.08", "en-de=0.6"), "max_repeats": 3.5}
    run(corpus.config(tmp_path / "1", mono_rows=total, para_rows=60, **settings))
    printed = capsys.readouterr().out
    available = {language: len(corpus.rows(language)) for language in corpus.streams}
    used = Counter(row.languages[0] for row in read_rows(tmp_path / "1" / "mono"))
    small = {code: int(3.5 * available[code]) for code in ("sw", "xh")}
    assert used["xh"] == small["xh"] < total * 0.08 * 0.3 and used["sw"] + used["xh"] <= total * 0.08
    assert used["sw"] == min(small["sw"], 160 - used["xh"])
    others = total - used["sw"] - used["xh"]
    weights = {code: available[code] ** 0.5 for code in ("de", "en")}
    assert all(abs(used[code] - others * weight / sum(weights.values())) <= 1 for code, weight in weights.items())
    for code, number in available.items():
        (line,) = (line.split() for line in printed.splitlines() if line.split()[0] == code)
        before, after = f"{number / sum(available.values()):.3%}", f"{used[code] / total:.3%}"
        assert line == [code, f"{number:,}", before, after, f"{used[code] / number:.2f}×"]
    assert printed.index("language") < printed.index("rows in 32 shards") < printed.index("pair ")
    pairs_used = {
        name: counts["used"] for name, counts in read_manifest(tmp_path / "1/para").counts["by_language"].items()
    }
    assert pairs_used["en-de"] / sum(pairs_used.values()) == pytest.approx(0.6, abs=0.05)  # by 60 rows
    run_verify(VerifyConfig(tmp_path / "1"))
    run(corpus.config(tmp_path / "2", mono_rows=total, para_rows=60, processes=2, **settings))
    assert folder_bytes(tmp_path / "1") == folder_bytes(tmp_path / "2")
    with pytest.raises(ValueError, match=r'max_repeats was 3\.5, now null; share was \["xh\+sw=0\.08"\], now null'):
        run(corpus.config(tmp_path / "1", mono_rows=total, alpha=0.5))
    run(corpus.config(tmp_path / "3", mono_rows=99))
    assert not {"share", "max_repeats"} & read_manifest(tmp_path / "3/mono").settings.keys()


def test_pairs_are_not_used_more_often_than_the_bound(corpus: Corpus, tmp_path: Path) -> None:
    """How many pairs fill the rows is not known before; the bound holds for those that do."""
    run(corpus.config(tmp_path / "free", para_rows=600, alpha=0))
    run(corpus.config(tmp_path / "bound", para_rows=600, alpha=0, max_repeats=4))
    repeats = {
        name: {
            pair: counts["repeat"]
            for pair, counts in read_manifest(tmp_path / name / "para").counts["by_language"].items()
        }
        for name in ("free", "bound")
    }
    assert repeats["free"]["en-zh-Hans"] > 5 and 3 < repeats["bound"]["en-zh-Hans"] <= 4
    assert repeats["free"]["en-de"] < repeats["bound"]["en-de"] <= 4
    run_verify(VerifyConfig(tmp_path / "bound"))


def test_the_rows_that_pairs_fill_within_a_bound(corpus: Corpus, tmp_path: Path) -> None:
    """By the tokens of the pairs that fit: just as many rows can be had, and one more is refused."""
    tokens = 0
    for pairs in corpus.pairs.values():
        sizes = [len(source) + len(target) + 3 for source, target in pairs]
        fitting = [size for size in sizes if size <= WIDTH]
        tokens += int(2.5 * len(fitting)) * sum(fitting) // len(fitting)
    most = tokens // WIDTH
    words = f"--para-rows is {most + 1:,}, but with --max-repeats 2.5 the pairs fill {most:,} rows without gaps"
    with pytest.raises(ValueError, match=words):
        run(corpus.config(tmp_path, para_rows=most + 1, max_repeats=2.5))
    run(corpus.config(tmp_path, para_rows=most, max_repeats=2.5))
    assert max(counts["repeat"] for counts in read_manifest(tmp_path / "para").counts["by_language"].values()) <= 2.5


def test_pairs_that_share_leaves_out_do_not_count_under_a_bound(corpus: Corpus, tmp_path: Path) -> None:
    """In rows of 16, 100 pairs of 16 tokens and 10 of 8 tokens fill 105 rows. 90 of 8 tokens are left out."""
    folder, shards = tmp_path / "encoded/para", []
    for name, size, number in (("de-fr", 8, 90), ("en-de", 16, 100), ("en-fr", 8, 10)):
        columns = [pa.array([ids] * number, pa.list_(pa.int32())) for ids in ([4] * (size - 5), [4, 4])]
        batch = pa.record_batch(columns, schema=PAIRS)
        shards.append(write_arrow(folder / name / "00000.arrow", PAIRS, [batch], folder))
    _manifest(folder, shards, file_sha256(corpus.vocab), ("de", "en", "fr"))
    config = corpus.config(tmp_path / "out", para_rows=105, max_repeats=1, share=("de-fr=0",), alpha=0)
    config = replace(config, encoded=tmp_path / "encoded")
    with pytest.raises(ValueError, match="the pairs fill 105 rows without gaps"):
        run(replace(config, para_rows=106))
    run(config)
    counts = read_manifest(tmp_path / "out/para").counts["by_language"]
    assert [entry["used"] for entry in counts.values()] == [0, 100, 10]
    run_verify(VerifyConfig(tmp_path / "out"))


def test_a_folder_accepts_another_bound_after_one_under_which_pairs_fill_too_few_rows(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Of 200 pairs, half have 16 tokens and half 8, without gaps in rows of 16. On average, 100 of them fill 75 rows;
    with some seeds they are shorter than that."""
    sizes = [(5, 8)] * 100 + [(2, 3)] * 100
    columns = [pa.array([[4] * pair[side] for pair in sizes], pa.list_(pa.int32())) for side in (0, 1)]
    folder, batch = tmp_path / "encoded/para", pa.record_batch(columns, schema=PAIRS)
    shard = write_arrow(folder / "en-de/00000.arrow", PAIRS, [batch], folder)
    _manifest(folder, [shard], file_sha256(corpus.vocab), ("de", "en"))
    refused = 0
    for seed in range(6):
        config = corpus.config(tmp_path / f"{seed}", para_rows=75, max_repeats=0.5, seed=seed)
        config = replace(config, encoded=tmp_path / "encoded")
        try:
            run(config)
        except ValueError as error:
            refused += 1
            assert "all languages together give only 100: raise --max-repeats, or ask for fewer rows" in str(error)
            run(replace(config, max_repeats=1.0))
    assert refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"share": ("dee=0.1",)}, r"--share names 'dee', of which nothing is mixed from .*: did you mean 'de'"),
        ({"share": ("xx=0.1",)}, r"--share names 'xx', of which nothing is mixed from .*: there are de, [^…]*$"),
        ({"share": ("en-zh-Hans=0.1",)}, "--share names 'en-zh-Hans', of which nothing is mixed"),
        ({"share": ("zh-Hans-en=0.1",), "para_rows": 5}, "names 'zh-Hans-en', .*: did you mean 'en-zh-Hans'"),
        ({"share": ("de=0.7", "en=0.4")}, r"sum to 1\.1, which leaves nothing for the other languages"),
        ({"share": ("de+en-de=0.1",), "para_rows": 5}, "has languages and pairs: give languages and pairs"),
        ({"max_repeats": 1.5, "mono_rows": 50_000}, "50,000 examples are asked for, but with --max-repeats 1.5"),
        (
            {"max_repeats": 2, "para_rows": 5000},
            r"the pairs fill \d+ rows without gaps: raise --max-repeats, or ask",
        ),
        ({"max_repeats": -1}, "--max-repeats is -1"),
    ],
)
def test_shares_that_cannot_be_had_leave_no_folder(corpus: Corpus, tmp_path: Path, settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(corpus.config(tmp_path / "out", **({"mono_rows": 100} | settings)))
    assert not (tmp_path / "out").exists()


def test_the_printed_table_has_the_five_largest(capsys: pytest.CaptureFixture[str]) -> None:
    """By the examples that there are, then by name; shares and repeats by hand."""
    examples = dict(zip("bcadefghij", (5, 90, 5, 10, 20, 30, 40, 50, 60, 90), strict=True))
    counts = {
        name: {"available": n, "share_before": n / 400, "share_after": 0.1, "repeat": 100 / n}
        for name, n in examples.items()
    }
    _print_shares(counts, "para", "pairs")
    heading, *lines, rest = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["pair", "pairs", "available"] and rest == "… 5 more (`xlme prep stats` shows all)"
    assert [line.split()[0] for line in lines] == list("cjihg")
    assert lines[2].split() == ["i", "60", "15.000%", "10.000%", "1.67×"]
    _print_shares({name: counts[name] for name in "bcade"}, "mono", "slices")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:3] == ["language", "rows", "available"]
    assert len(printed) == 6 and printed[-1].split()[0] == "b"


def test_repeats_are_printed_as_they_were_written(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packing ends when all rows are full, before some of the planned pairs are used."""
    run(corpus.config(tmp_path / "out", mono_rows=0, para_rows=60))
    lines = re.findall(r"^(en-\S+) +([\d,]+) .* ([\d.]+)×$", capsys.readouterr().out, re.MULTILINE)
    used = Counter(code for row in read_rows(tmp_path / "out/para") for code in row.languages)
    assert {name for name, *_ in lines} == {"en-de", "en-zh-Hans"}
    for name, available, repeat in lines:
        assert float(repeat) == pytest.approx(used[name[3:]] / int(available.replace(",", "")), abs=0.006), name


def test_a_language_has_one_number_whatever_is_mixed(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its index is among the languages of both tasks: a folder to which the other task is added, or that is evaluated
    by a model of both, has the same."""
    for name, rows in (("both", (20, 20)), ("mono", (20, 0)), ("para", (0, 20))):
        run(corpus.config(tmp_path / name, mono_rows=rows[0], para_rows=rows[1]))
    assert capsys.readouterr().out.count(": 20 rows in 1 shard, ") == 4
    for task in ("mono", "para"):
        assert read_manifest(tmp_path / task / task).languages == LANGUAGES
        assert folder_bytes(tmp_path / task / task) == folder_bytes(tmp_path / "both" / task)


def test_a_folder_whose_pairs_have_other_names_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    """As `encode` wrote them before pairs had one name: en-de and de-en would be two."""
    encoded = shutil.copytree(corpus.folder, tmp_path / "encoded")
    (encoded / "para/en-de").rename(encoded / "para/de-en")
    manifest = read_manifest(encoded / "para")
    names = [replace(shard, name=shard.name.replace("en-de", "de-en")) for shard in manifest.shards]
    write_manifest(encoded / "para", replace(manifest, shards=tuple(names)))
    with pytest.raises(ValueError, match="de-en is another name of the pair en-de: encode the data again"):
        run(replace(corpus.config(tmp_path / "out", para_rows=20), encoded=encoded))
    assert not (tmp_path / "out").exists()


def test_packed_rows_are_the_pairs(corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(corpus.config(tmp_path, para_rows=700, alpha=0.5))
    printed = capsys.readouterr().out
    manifest, rows = read_manifest(tmp_path / "para"), read_rows(tmp_path / "para")
    assert len(rows) == manifest.rows == 700
    known = {}
    for name, (a, b) in (("en-de", ("en", "de")), ("en-zh-Hans", ("en", "zh-Hans"))):
        for source, target in corpus.pairs[name]:
            known[(BOS, *source, EOS, *target, EOS)] = (name, (a, b))
            known[(BOS, *target, EOS, *source, EOS)] = (name, (b, a))
    times: Counter[frozenset[int]] = Counter()
    used: Counter[str] = Counter()
    reversed_sides = 0
    for row in rows:
        languages = iter(row.languages)
        for item in row.items():
            name, sides = known[item]
            assert (next(languages), next(languages)) == sides
            reversed_sides += sides != tuple(name.split("-", 1))
            used[name] += 1
            times[frozenset(item)] += 1
        assert next(languages, None) is None
    assert 0.4 < reversed_sides / used.total() < 0.6
    for name, counts in manifest.counts["by_language"].items():
        fitting = [pair for pair in corpus.pairs[name] if sum(map(len, pair)) + 3 <= WIDTH]
        assert counts["available"] == len(fitting)
        assert counts["too_long"] == len(corpus.pairs[name]) - len(fitting) > 0
        assert counts["used"] == used[name]
    weights = {name: counts["available"] ** 0.5 for name, counts in manifest.counts["by_language"].items()}
    for name, weight in weights.items():
        assert used[name] / used.total() == pytest.approx(weight / sum(weights.values()), abs=0.02)
        # sampled evenly; the rows cut off at the end leave out a few
        fitting = [frozenset((BOS, EOS, *s, *t)) for s, t in corpus.pairs[name] if len(s) + len(t) + 3 <= WIDTH]
        assert max(times[pair] for pair in fitting) <= -(-used[name] * 1.2 // len(fitting))
    filled = sum(sum(row.lengths) for row in rows) / (700 * WIDTH)
    assert manifest.counts["fill"] == filled < 0.99
    assert f"{tmp_path}/para: 700 rows in 11 shards, {filled:.1%} of the tokens are not padding\n" in printed


def test_pairs_come_once_before_any_comes_again_but_for_the_order_inside_a_window(
    corpus: Corpus, tmp_path: Path
) -> None:
    """A window is 8192 pairs that fill rows of their own: up to its end no pair came two times more than another."""
    run(corpus.config(tmp_path, para_rows=15000, alpha=0.5, rows_per_shard=4096))
    fitting = {name: [frozenset((BOS, EOS, *s, *t)) for s, t in corpus.pairs[name]] for name in corpus.pairs}
    fitting = {name: [pair for pair in pairs if len(pair) + 1 <= WIDTH] for name, pairs in fitting.items()}
    times: Counter[frozenset[int]] = Counter()
    ends = 0
    for row in read_rows(tmp_path / "para"):
        times.update(map(frozenset, row.items()))
        if times.total() == 8192 * (ends + 1):
            ends += 1
            for name, pairs in fitting.items():
                each = [times[pair] for pair in pairs]
                assert max(each) - min(each) == 1, f"{name} after {times.total()} pairs"
    assert ends == times.total() // 8192 > 1
    schema = row_schema(WIDTH)
    for shard in read_manifest(tmp_path / "para").shards:  # the bytes are what Arrow writes of the rows, and no more
        table = pa.ipc.open_file(tmp_path / "para" / shard.name).read_all()
        again = [pa.RecordBatch.from_pylist(batch.to_pylist(), schema) for batch in table.to_batches()]
        assert write_arrow(tmp_path / "again.arrow", schema, again, tmp_path).sha256 == shard.sha256


@pytest.fixture(scope="module")
def larger(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """37 MB: 60 shards of documents, the first two of them large, and one of pairs."""
    folder, rng = tmp_path_factory.mktemp("larger"), np.random.default_rng(0)
    sha256 = file_sha256(corpus.vocab)

    def column(lengths: np.ndarray, end: bool) -> pa.ListArray:
        ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
        values = rng.integers(4, 10**6, ends[-1], dtype=np.int32)
        if end:
            values[ends[1:] - 1] = EOS
        return pa.ListArray.from_arrays(ends, values)

    shards = []
    for number in range(60):
        documents = np.full(2500 if number < 2 else 5, 400)
        parts = [pa.record_batch([column(documents, True)], schema=DOCUMENTS) for _ in range(4)]
        shards.append(write_arrow(folder / f"mono/en/{number:05d}.arrow", DOCUMENTS, parts, folder / "mono"))
    _manifest(folder / "mono", shards, sha256, ("en",))
    sides = rng.integers(1, 60, (16, 2, 4000))
    parts = [pa.record_batch([column(a, False), column(b, False)], schema=PAIRS) for a, b in sides]
    shards = [write_arrow(folder / "para/en-de/00000.arrow", PAIRS, parts, folder / "para")]
    _manifest(folder / "para", shards, sha256, ("de", "en"), max_pair_tokens=118)
    return Corpus(folder, corpus.vocab, {}, {})


def _bytes_read() -> int:
    """From disks, by this process so far."""
    return int(re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.M)[1])


def test_cold_files_are_read_where_rows_are_taken_and_not_around_it(larger: Corpus, tmp_path: Path) -> None:
    """What comes from the disk is at most twice what the rows hold, with a quarter of the corpus used."""
    for task, rows in (("mono", 4500), ("para", 2000)):
        for path in (larger.folder / task).rglob("*.arrow"):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = _bytes_read()
        run(replace(larger.config(tmp_path, **{f"{task}_rows": rows}), row_tokens=512, rows_per_shard=65536))
        read, used = _bytes_read() - before, 4 * read_manifest(tmp_path / task).counts["tokens"]
        if read == 0:
            pytest.skip("the temporary folder is not on a disk: what is read of it is not counted")
        assert used < sum(shard.bytes for shard in read_manifest(larger.folder / task).shards) / 3
        assert used / 2 < read < 2 * used, f"{read} bytes were read for {used} of {task}"


def test_no_map_and_no_file_stays_open(larger: Corpus, tmp_path: Path) -> None:
    """60 shards within 16 descriptors; the number of maps that a process may have is a limit of the kernel's."""
    open_now = max(int(name) for name in os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 16, limits[1]))
    try:
        run(replace(larger.config(tmp_path, mono_rows=2000, para_rows=100), row_tokens=512))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert str(larger.folder) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("row_tokens", [121, 120, 60])
def test_pairs_that_fit_by_encodes_limit_are_counted_as_by_their_lengths(
    larger: Corpus, tmp_path: Path, row_tokens: int
) -> None:
    encoded = tmp_path / "encoded"
    shutil.copytree(larger.folder / "para", encoded / "para")
    manifest = read_manifest(encoded / "para")
    write_manifest(encoded / "para", replace(manifest, settings={}))
    configs = [
        replace(larger.config(tmp_path / name, para_rows=100), row_tokens=row_tokens) for name in ("limit", "lengths")
    ]
    run(configs[0])
    run(replace(configs[1], encoded=encoded))
    assert EncodeConfig.max_pair_tokens + 3 == MixConfig.row_tokens  # all that `encode` writes fits, by default
    limit, lengths = (read_manifest(config.out / "para") for config in configs)
    assert limit.counts == lengths.counts and limit.shards == lengths.shards
    assert (limit.counts["by_language"]["en-de"]["too_long"] > 0) == (row_tokens < 121)


@pytest.mark.parametrize("unit", ["slices", "sentences", "documents", "pairs"])
def test_a_shard_without_records_has_no_examples(tmp_path: Path, unit: ExampleUnit) -> None:
    (tmp_path / "en").mkdir()
    write_arrow(tmp_path / "en" / "0.arrow", PAIRS if unit == "pairs" else DOCUMENTS, [], tmp_path)
    shard = scan_shard(tmp_path, WIDTH, LAYOUTS["xlme"], None, unit, "en/0.arrow")
    assert (shard.examples, shard.tokens, shard.too_long) == (0, 0, 0)


def test_a_shard_that_cannot_be_read_is_named(larger: Corpus, tmp_path: Path) -> None:
    encoded = shutil.copytree(larger.folder, tmp_path / "encoded")
    config = replace(larger.config(tmp_path / "out", mono_rows=100), encoded=encoded)
    shard = encoded / "mono/en/00007.arrow"
    whole = shard.read_bytes()
    for damaged in (b"", whole[:1000], whole[:-5]):
        shard.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=rf"{shard} is not a readable Arrow file .*: delete it and give the encode"
        ):
            run(config)
    for spoil in (shard.unlink, shard.mkdir):
        spoil()
        with pytest.raises(ValueError, match=rf"{shard}: (No such file|Is a directory)"):
            run(config)


def test_layout_of_xlm(corpus: Corpus, tmp_path: Path) -> None:
    """The same texts as in XLM-E's layout, row by row, between other special tokens; pairs pack by their own length."""
    xlme, xlm = (corpus.config(tmp_path / name, mono_rows=300, para_rows=90, layout=name) for name in ("xlme", "xlm"))
    for config in (xlme, xlm):
        run(config)
    for ours, theirs in zip(read_rows(xlm.out / "mono"), read_rows(xlme.out / "mono"), strict=True):
        assert ours == replace(theirs, tokens=(EOS, *theirs.tokens[1:]))
    known = {
        item: codes
        for name, sides in (("en-de", ("en", "de")), ("en-zh-Hans", ("en", "zh-Hans")))
        for source, target in corpus.pairs[name]
        for item, codes in (
            ((EOS, *source, EOS, EOS, *target, EOS), sides),
            ((EOS, *target, EOS, EOS, *source, EOS), sides[::-1]),
        )
    }
    rows = read_rows(xlm.out / "para")
    assert max(len(row.lengths) for row in rows) > 1
    for row in rows:
        assert [code for item in row.items() for code in known[item]] == list(row.languages)
    run_verify(VerifyConfig(xlm.out))
    with pytest.raises(ValueError, match='layout was "xlm", now "xlme"'):
        run(replace(xlm, layout="xlme"))


@pytest.mark.parametrize("sizes", [[3, 4, 1, 0, 8, 1], [4, 4], [9], [1, 1, 1], [5, 5, 5, 5]])
def test_batches_are_cut_anew(sizes: list[int]) -> None:
    """Of four rows each and, last, what is left: one row in some of these."""
    schema = pa.schema([("n", pa.int64())])
    ends = np.cumsum([0, *sizes]).tolist()
    batches = [pa.record_batch([pa.array(range(a, b), pa.int64())], schema=schema) for a, b in pairwise(ends)]
    found = [batch.column(0).to_pylist() for batch in _rechunked(batches, 4, schema)]
    assert found == [[*range(a, min(a + 4, ends[-1]))] for a in range(0, ends[-1], 4)]


def test_bytes_do_not_depend_on_processes(corpus: Corpus, tmp_path: Path) -> None:
    for processes in (1, 2):
        run(corpus.config(tmp_path / str(processes), mono_rows=500, para_rows=300, processes=processes))
    assert folder_bytes(tmp_path / "1") == folder_bytes(tmp_path / "2")
    run(corpus.config(tmp_path / "seed", mono_rows=500, para_rows=300, seed=1))
    assert read_rows(tmp_path / "seed" / "mono") != read_rows(tmp_path / "1" / "mono")


def test_rows_do_not_depend_on_how_much_is_read_at_once(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard in several parts, a task for each of three windows, other reads."""
    settings = {"mono_rows": 2500, "para_rows": 14600, "rows_per_shard": 2300}
    run(corpus.config(tmp_path / "whole", **settings))
    for name, value in (
        ("mixed_rows._IDS_IN_MEMORY", 1),
        ("mixed_rows._WINDOWS_PER_TASK", 1),
        ("encoded._LARGEST_GAP", 0),
        ("encoded._READ_WORDS", 64),
        ("encoded._SHORT_SPAN", 0),
    ):
        monkeypatch.setattr(f"data_prep.mix.{name}", value)
    run(corpus.config(tmp_path / "parts", **settings))
    whole, parts = (
        {name: data for name, data in folder_bytes(tmp_path / folder).items() if "/tasks/" not in name}
        for folder in ("whole", "parts")
    )
    assert whole == parts and len(list((tmp_path / "parts/para/tasks").glob("windows-*"))) > 2


def test_mpi_ranks_write_the_same_bytes(corpus: Corpus, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if mpiexec is None:
        pytest.skip("mpiexec is not installed")
    config = corpus.config(tmp_path / "one", mono_rows=300, para_rows=200)
    run(config)
    command = [mpiexec, "-n", "2", *_command(replace(config, out=tmp_path / "two"))]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len({*lines}) == 10, "of four languages and two pairs, told by one rank"
    assert folder_bytes(tmp_path / "one") == folder_bytes(tmp_path / "two")


def _command(config: MixConfig) -> list[str]:
    flags = {name.replace("_", "-"): value for name, value in vars(config).items()}
    return [sys.executable, "-m", "data_prep", "mix", *(f"--{name}={value}" for name, value in flags.items() if value)]


def test_a_killed_run_goes_on_where_it_was(corpus: Corpus, tmp_path: Path) -> None:
    config = corpus.config(tmp_path / "killed", mono_rows=20000, rows_per_shard=100)
    process = subprocess.Popen(_command(config), cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    tasks = config.out / "mono" / "tasks"
    while not (tasks.is_dir() and len(list(tasks.iterdir())) > 5):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (config.out / "mono" / "manifest.json").exists()
    finished = {path.name: path.stat().st_mtime_ns for path in tasks.glob("shard-*.json")}
    assert finished
    run(config)
    assert all((tasks / name).stat().st_mtime_ns == changed for name, changed in finished.items()), (
        "work was done again"
    )
    run(replace(config, out=tmp_path / "alone"))
    assert folder_bytes(config.out) == folder_bytes(tmp_path / "alone")


def test_changed_settings_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    run(corpus.config(tmp_path, mono_rows=100))
    before = folder_bytes(tmp_path)
    run(corpus.config(tmp_path, mono_rows=100))
    assert folder_bytes(tmp_path) == before
    with pytest.raises(ValueError, match=r"alpha was 0\.7, now 0\.5"):
        run(corpus.config(tmp_path, mono_rows=100, alpha=0.5))
    with pytest.raises(ValueError, match="rows was 100, now 101"):
        run(corpus.config(tmp_path, mono_rows=101))
    settings = tmp_path / "mono" / "settings.json"
    old = {key: json.loads(settings.read_text())[key] for key in ("stage", "settings")}
    del old["settings"]["order"]
    write_checksummed(settings, old)
    (tmp_path / "mono" / "manifest.json").unlink()
    with pytest.raises(
        ValueError, match=r'order was null, now "every example of a language once .* delete this folder'
    ):
        run(corpus.config(tmp_path, mono_rows=100))


def test_another_vocabulary_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(["ab ba"] * 5), model_prefix=str(tmp_path / "other"), vocab_size=7, minloglevel=2
    )
    with pytest.raises(ValueError, match="is not the vocabulary that"):
        run(replace(corpus.config(tmp_path / "out", mono_rows=10), vocab=tmp_path / "other.model"))


def test_one_row_is_told_as_one(corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rows, words in ((1, "1 row in 1 shard, "), (2, "2 rows in 1 shard, ")):
        run(corpus.config(tmp_path / words, mono_rows=rows))
        assert f"mono: {words}" in capsys.readouterr().out


def test_rows_are_not_mixed_again(corpus: Corpus, tmp_path: Path) -> None:
    for task in ("mono", "para"):
        run(corpus.config(tmp_path / "mixed", **{f"{task}_rows": 10}))
        with pytest.raises(ValueError, match=f"mixed/{task} was written by stage mix, not encode: name the folder"):
            run(replace(corpus.config(tmp_path / "out", **{f"{task}_rows": 5}), encoded=tmp_path / "mixed"))
    assert not (tmp_path / "out").exists()


def test_the_folder_of_another_vocabulary_is_not_written_to(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/de.txt").write_text("abcdefghijklm ba\n", encoding="utf-8")
    train(VocabConfig(mono=tmp_path / "text", out=tmp_path / "vocab", size=19))
    before = file_sha256(tmp_path / "vocab/sentencepiece.model")
    with pytest.raises(ValueError, match=r"sentencepiece\.model is another vocabulary, which would be replaced"):
        run(corpus.config(tmp_path, mono_rows=10))
    assert file_sha256(tmp_path / "vocab/sentencepiece.model") == before and not (tmp_path / "mono").exists()
    (tmp_path / "vocab/manifest.json").unlink()  # as if a user had put the model there
    with pytest.raises(ValueError, match=r"sentencepiece\.model is another vocabulary, which would be replaced"):
        run(corpus.config(tmp_path, mono_rows=10))


def test_the_vocabulary_is_copied_as_it_was_at_the_start(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = tmp_path / "replaced.model"
    vocab.write_bytes(corpus.vocab.read_bytes())

    def write_and_replace(*arguments: object) -> None:
        _write_task(*arguments)
        vocab.write_bytes(b"another")

    monkeypatch.setattr("data_prep.mix.mix._write_task", write_and_replace)
    run(replace(corpus.config(tmp_path / "out", mono_rows=10), vocab=vocab))
    assert file_sha256(tmp_path / "out/vocab/sentencepiece.model") == file_sha256(corpus.vocab)


def test_rows_that_could_not_be_read_together_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    for task, other in (("para", "mono"), ("mono", "para")):
        out, asked = tmp_path / task, {f"{task}_rows": 10}
        run(corpus.config(out, **{f"{other}_rows": 10}))
        before = folder_bytes(out)
        for changed, difference in (
            ({"row_tokens": 48}, f"--row-tokens {WIDTH}, not 48"),
            ({"layout": "xlm"}, "--layout xlme, not xlm"),
        ):
            with pytest.raises(ValueError, match=f"{other} was mixed with {difference}, so training"):
                run(replace(corpus.config(out, **asked), **changed))
        manifest = read_manifest(out / other)
        write_manifest(out / other, replace(manifest, vocabulary_sha256="0" * 64))
        with pytest.raises(ValueError, match=f"{other} was mixed with --vocab of SHA-256 000000000000, not "):
            run(corpus.config(out, **asked))
        write_manifest(out / other, manifest)
        assert folder_bytes(out) == before
        run(corpus.config(out, **asked))
        assert before.items() < folder_bytes(out).items()
        with pytest.raises(ValueError, match=f"{other} was written by stage encode, not mix: choose another --out"):
            run(corpus.config(corpus.folder, **asked))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "no rows are asked for"),
        ({"mono_rows": -5, "para_rows": 5}, "--mono-rows is -5: it must be at least 0"),
        ({"para_rows": -5}, "--para-rows is -5: it must be at least 0"),
        ({"mono_rows": 5, "row_tokens": 4}, "--row-tokens is 4"),
        ({"mono_rows": 5, "alpha": 2.0}, "--alpha is 2.0"),
        ({"mono_rows": 5, "rows_per_shard": 0}, "--rows-per-shard is 0"),
        ({"para_rows": 5, "sentences": True}, "--sentences is for monolingual rows, and --mono-rows is 0"),
    ],
)
def test_impossible_settings_are_refused(corpus: Corpus, tmp_path: Path, settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(corpus.config(tmp_path, **settings))
