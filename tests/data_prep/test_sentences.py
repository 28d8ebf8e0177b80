"""Data of translation: sentences as records and items, lines that are nowhere, and a language to translate into, all
against the text itself."""

import gzip
import json
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.encode.encode import EncodeConfig, run
from data_prep.inspect.verify import VerifyConfig
from data_prep.inspect.verify import run as verify
from data_prep.mix.mix import MixConfig
from data_prep.mix.mix import run as mix
from tests.data_prep.test_split import spelt
from xlme_ds.config import DataConfig, ModelConfig, ObjectiveConfig, RunConfig
from xlme_ds.data.loader import Loader
from xlme_ds.data.schema import EOS, PAD, TASKS, read_manifest
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.train.data import open_loader

Text = dict[str, list[str]]


@pytest.fixture(scope="module")
def text() -> Text:
    """Sentences of one to four words, three in a document, a few of them twice."""
    rng = np.random.default_rng(0)
    return {
        code: [" ".join(spelt(int(n)) for n in rng.integers(0, 100, rng.integers(1, 5))) for _ in range(90)]
        for code in ("de", "en", "fr")
    }


@pytest.fixture(scope="module")
def corpus(text: Text, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for task in TASKS:
        (folder / task).mkdir()
    for code, lines in text.items():
        documents = ["\n".join(lines[n : n + 3]) for n in range(0, len(lines), 3)]
        (folder / "mono" / f"{code}.txt").write_text("\n\n".join(documents) + "\n")
    for pair in ("de-en", "en-fr"):
        for code in pair.split("-"):
            (folder / "para" / f"X.{pair}.{code}").write_text("\n".join(text[code]) + "\n")
    (folder / "test.de").write_text(f"\ufeff{text['de'][4]}  \n\n{text['de'][50]}\n")
    (folder / "test.en").write_text(f"{text['en'][10]}\n")
    return folder


@pytest.fixture(scope="module")
def encoded(corpus: Path, vocab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("encoded") / "all"
    without = tuple(corpus / f"test.{code}" for code in ("de", "en"))
    asked = EncodeConfig(vocab, out, mono=corpus / "mono", para=corpus / "para", without=without, sentences=True)
    run(asked)
    before = (out / "mono" / "manifest.json").stat().st_mtime_ns
    run(replace(asked, without=without[::-1]))
    assert (out / "mono" / "manifest.json").stat().st_mtime_ns == before, "in either order"
    (corpus / "test.en").write_text("another\n")
    with pytest.raises(ValueError, match="other settings"):
        run(asked)
    return out


def kept(text: Text) -> tuple[dict[str, Counter[str]], dict[str, Counter[tuple[str, str]]]]:
    held = {text["de"][4], text["de"][50], text["en"][10]}
    mono = {code: Counter(line for line in lines if line not in held) for code, lines in text.items()}
    pairs = {pair: Counter(both for both in zip(*(text[code] for code in pair.split("-")), strict=True)
             if not held & set(both)) for pair in ("en-de", "en-fr")}  # fmt: skip
    return mono, pairs


def test_what_is_encoded(text: Text, encoded: Path) -> None:
    mono, pairs = kept(text)
    of_mono, of_pairs = (read_manifest(encoded / task) for task in TASKS)
    assert of_mono.settings["sentences"] is True and "sentences" not in of_pairs.settings
    assert len(of_mono.settings["without"]) == 2
    for manifest, expected, unit in ((of_mono, mono, "documents"), (of_pairs, pairs, "pairs")):
        for name, lines in expected.items():
            counts = manifest.counts["by_language"][name]
            assert counts[unit] == lines.total() and counts["dropped"].get("held_out_text", 0) == 90 - lines.total()
    assert sum(mono["de"].values()) <= 88 and sum(pairs["en-de"].values()) <= 87


def rows(out: Path, task: str, size: int) -> list[tuple[list[list[int]], list[str]]]:
    """Items and languages of every row, as a model reads them."""
    counts = DataConfig(*((size, 0) if task == "mono" else (0, size)), micro_batch=size)
    (batch,) = Loader(out, counts, 0, 1.0).micro_batches(0)
    codes, found = read_manifest(out / task).languages, []
    for tokens, items, places, languages in zip(
        *(value.tolist() for value in batch[:3]), batch[4].tolist(), strict=True
    ):
        of = [[n for n, item in enumerate(places) if item == number] for number in range(1, max(places) + 1)]
        assert all(items[n] == n - where[0] for where in of for n in where)
        found.append(([[tokens[n] for n in where] for where in of], [codes[languages[where[0]]] for where in of]))
        assert all(token == PAD for token, item in zip(tokens, places, strict=True) if not item)
    return found


@pytest.mark.parametrize("layout", ["xlme", "xlm"])
def test_items_are_sentences(text: Text, encoded: Path, vocab: Path, tmp_path: Path, layout: str) -> None:
    """A little more than one pass: each comes once, or twice; a row has as many as fit."""
    mono, _ = kept(text)
    asked = MixConfig(encoded, vocab, tmp_path / "mixed", mono_rows=60, row_tokens=96, alpha=1.0, sentences=True,
                      layout=layout)  # fmt: skip
    mix(asked)
    verify(VerifyConfig(asked.out))
    report = tmp_path / "stats.html"
    assert not main(["stats", "--encoded", str(encoded), "--data", str(asked.out), "--out", str(report)])
    assert report.exists()
    vocabulary, found = Vocabulary(vocab), Counter[tuple[str, tuple[int, ...]]]()
    known = {code: Counter(tuple(vocabulary.encode(line).tolist()) for line in lines.elements())
             for code, lines in mono.items()}  # fmt: skip
    read = rows(asked.out, "mono", 60)
    for items, codes in read:
        for one, code in zip(items, codes, strict=True):
            assert one[0] == (EOS if layout == "xlm" else 0) and one[-1] == EOS and EOS not in one[1:-1]
            found[code, tuple(one[1:-1])] += 1
    assert max(len(items) for items, _ in read) > 2
    assert {code for code, _ in found} == known.keys()
    for (code, line), number in found.items():
        assert number <= 3 * known[code][line]
    manifest = read_manifest(asked.out / "mono")
    assert manifest.settings["sentences"] is True and manifest.counts["examples"] == found.total()
    # As pairs are: a block of as many slots as text is cut into would be a sixth of the rows.
    assert "blocks of 262144 slots" in manifest.settings["order"]
    assert main(["show", "--data", str(asked.out), "--rows", "1"]) in (0, None)
    model = ModelConfig(vocabulary.size, max_positions=96, layout=layout)  # type: ignore[arg-type]
    stream = replace(asked, out=tmp_path / "stream", sentences=False)
    mix(stream)
    for out, is_so, must_be in ((asked.out, "with", "without"), (stream.out, "without", "with")):
        for sentences in (True, False):
            back, places = ObjectiveConfig("mt", denoising=("0:1",)), ObjectiveConfig("btmlm", pseudo_fractions=(0.1,))
            run = replace(
                RunConfig("x"), model=model, data=DataConfig(8, 0, 8), objective=back if sentences else places
            )
            if sentences == (is_so == "with"):
                open_loader(run, out)
            else:
                message = (
                    f"was mixed {is_so} --sentences, and this objective reads what was mixed {must_be} --sentences"
                )
                with pytest.raises(ValueError, match=message):
                    open_loader(run, out)


def test_items_are_documents(vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each whole, or, if it is longer than a row, in pieces of a row; a little more than one pass."""
    rng, vocabulary = np.random.default_rng(1), Vocabulary(vocab)
    lengths = [1, 2, 30, 7, 200, 55, 3, 3, 90, 12] * 4
    (tmp_path / "mono").mkdir()
    pieces: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for code in ("de", "en"):
        documents = [[spelt(int(n)) for n in rng.integers(0, 100, words)] for words in lengths]
        (tmp_path / "mono" / f"{code}.txt").write_text("".join(" ".join(words) + "\n\n" for words in documents))
        for words in documents:
            ids = vocabulary.encode(" ".join(words)).tolist()
            pieces.update((code, tuple(ids[first : first + 62])) for first in range(0, len(ids), 62))
    run(EncodeConfig(vocab, tmp_path / "encoded", mono=tmp_path / "mono"))
    fill = sum(number * (len(ids) + 2) for (_, ids), number in pieces.items()) // 64
    asked = MixConfig(
        tmp_path / "encoded", vocab, tmp_path / "mixed", mono_rows=fill + fill // 4, row_tokens=64, alpha=1.0,
        documents=True,
    )  # fmt: skip
    mix(asked)
    heading, *lines = capsys.readouterr().out.splitlines()[-4:-1]  # the last line tells how many rows there are
    of_language = Counter(code for code, _ in pieces.elements())
    assert heading.split()[:3] == ["language", "items", "available"]
    assert {line.split()[0]: int(line.split()[1]) for line in lines} == of_language != {"de": 40, "en": 40}
    verify(VerifyConfig(asked.out))
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    read = rows(asked.out, "mono", asked.mono_rows)
    for items, codes in read:
        for one, code in zip(items, codes, strict=True):
            assert one[0] == 0 and one[-1] == EOS and EOS not in one[1:-1]
            found[code, tuple(one[1:-1])] += 1
    assert found.keys() == pieces.keys() and all(pieces[one] <= found[one] <= 2 * pieces[one] for one in found)
    assert max(len(items) for items, _ in read) >= 4
    manifest = read_manifest(asked.out / "mono")
    assert manifest.counts["fill"] > 0.95 and manifest.packed_unit == "documents"
    cut = replace(asked, out=tmp_path / "cut", documents=False)
    mix(cut)
    assert not read_manifest(cut.out / "mono").packed_unit
    btmlm = replace(
        RunConfig("x"),
        model=ModelConfig(vocabulary.size, max_positions=64),
        data=DataConfig(8, 0, 8),
        objective=ObjectiveConfig("btmlm", pseudo_fractions=(0.1,)),
    )
    with pytest.raises(ValueError, match=r"mixed with --documents, .* mixed without --sentences or --documents: mix"):
        open_loader(btmlm, asked.out)
    with pytest.raises(ValueError, match="--sentences and --documents both say what monolingual rows hold"):
        mix(replace(asked, sentences=True))
    with pytest.raises(ValueError, match="--documents is for monolingual rows, and --mono-rows is 0"):
        mix(replace(asked, mono_rows=0, para_rows=8))
    run(EncodeConfig(vocab, tmp_path / "sentences", mono=tmp_path / "mono", sentences=True))
    with pytest.raises(ValueError, match="was encoded with --sentences and has no documents: mix it with --sentences"):
        mix(replace(asked, encoded=tmp_path / "sentences", out=tmp_path / "none"))


def test_the_language_to_translate_into(text: Text, encoded: Path, vocab: Path, tmp_path: Path) -> None:
    asked = MixConfig(encoded, vocab, tmp_path / "mixed", 8, 64, row_tokens=64, into="fr_FR")
    mix(asked)
    seen = Counter[tuple[str, str]]()
    store = Loader(asked.out, DataConfig(0, 64, 64), 0, 1.0).stores[1]
    read = store.read(np.arange(64))
    languages = [store.languages[n] for n in read.languages.tolist()]
    vocabulary, known = Vocabulary(vocab), {code: {tuple(Vocabulary(vocab).encode(line).tolist()) for line in lines}
                                            for code, lines in text.items()}  # fmt: skip
    flat = [token for row in read.tokens.tolist() for token in row if token not in (0, PAD)]
    sides = [tuple(side) for end, side in groupby(flat, lambda token: token == EOS) if not end]
    assert len(sides) == len(languages) and vocabulary.size
    assert all(side in known[code] for side, code in zip(sides, languages, strict=True))
    seen.update(zip(languages[::2], languages[1::2], strict=True))
    assert seen["en", "fr"] and not seen["fr", "en"] and seen["de", "en"] and seen["en", "de"]
    assert json.loads((asked.out / "para" / "manifest.json").read_text())["settings"]["into"] == "fr"
    assert "into" not in read_manifest(asked.out / "mono").settings, "the rows of which are the same"
    with pytest.raises(ValueError, match="--into xh is in no pair that is mixed"):
        mix(replace(asked, out=tmp_path / "other", into="xh"))
    with pytest.raises(ValueError, match="--into fr is in no pair that is mixed"):
        mix(replace(asked, out=tmp_path / "other", para_rows=0))


def test_mistakes(corpus: Path, vocab: Path, tmp_path: Path) -> None:
    asked = EncodeConfig(vocab, tmp_path / "encoded", mono=corpus / "mono")
    (tmp_path / "bytes").write_bytes(b"abc\xff\n")
    with pytest.raises(ValueError, match="bytes is not UTF-8: convert it"):
        run(replace(asked, without=(tmp_path / "bytes",)))
    with pytest.raises(OSError, match="none"):
        run(replace(asked, without=(tmp_path / "none",)))
    with pytest.raises(ValueError, match="--sentences is for monolingual text: leave it out for pairs"):
        run(replace(asked, mono=None, para=corpus / "para", sentences=True))
    assert not asked.out.exists()
    run(asked)
    with pytest.raises(ValueError, match="was encoded without --sentences"):
        mix(MixConfig(asked.out, vocab, tmp_path / "mixed", mono_rows=8, row_tokens=32, sentences=True))
    assert not (tmp_path / "mixed").exists()


def test_what_is_too_long_is_told(tmp_path: Path, vocab: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A sentence that fills a row is used; one of a token more is left out, and counted."""
    (tmp_path / "mono").mkdir()
    line, vocabulary = spelt(1), Vocabulary(vocab)
    size = len(vocabulary.encode(line))
    lines = [line, f"{line} {spelt(2)}"]
    assert len(vocabulary.encode(lines[1])) > size
    for code, more in (("de", [f"{line} {spelt(3)}"]), ("en", [])):
        (tmp_path / "mono" / f"{code}.txt").write_text("\n".join(lines + more))
    asked = EncodeConfig(vocab, tmp_path / "encoded", mono=tmp_path / "mono", sentences=True)
    run(asked)
    row = max(size + 2, 8)
    mix(MixConfig(asked.out, vocab, tmp_path / "mixed", mono_rows=4, row_tokens=row, sentences=True))
    assert f"3 of its sentences cannot fit a row of {row} tokens" in capfd.readouterr().err
    with pytest.raises(ValueError, match=f"nothing that fills a row of {row - 1} tokens: raise --row-tokens"):
        mix(MixConfig(asked.out, vocab, tmp_path / "none", mono_rows=4, row_tokens=row - 1, sentences=True))
    verify(VerifyConfig(tmp_path / "mixed"))
    counts = read_manifest(tmp_path / "mixed" / "mono").counts["by_language"]
    assert [(counts[code]["too_long"], counts[code]["available"]) for code in ("de", "en")] == [(2, 1), (1, 1)]


def test_a_file_of_held_out_lines_alone(tmp_path: Path, vocab: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its text is where it should be, so there is nothing to warn of."""
    (tmp_path / "mono").mkdir()
    for path in (tmp_path / "mono" / "de.txt", tmp_path / "test.de"):
        path.write_text(f"{spelt(1)}\n{spelt(2)}\n")
    (tmp_path / "mono" / "en.txt").write_text(f"{spelt(3)}\n")
    (tmp_path / "test.de.gz").write_bytes(gzip.compress((tmp_path / "test.de").read_bytes()))
    run(EncodeConfig(vocab, tmp_path / "encoded", mono=tmp_path / "mono", without=(tmp_path / "test.de.gz",)))
    warned = capfd.readouterr().err
    assert "gave no text" not in warned and "is a line of --without" not in warned
    assert {shard.name.split("/")[0] for shard in read_manifest(tmp_path / "encoded" / "mono").shards} == {"en"}
