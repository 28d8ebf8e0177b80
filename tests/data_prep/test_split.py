"""`encode --split`: both parts together are the corpus, and equal texts are on one side, by hashes taken here."""

import json
import lzma
import shutil
import unicodedata
from collections import Counter
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece as spm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.encode.encode import EncodeConfig, run
from data_prep.mix.mix import MixConfig
from data_prep.mix.mix import run as mix
from tests.data_prep.test_encode import Run, records, tree
from xlme_ds.config import DataConfig, ModelConfig
from xlme_ds.data.loader import Loader
from xlme_ds.data.schema import read_manifest
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.train.data import require_fitting_data

SHARE = 0.25
PARTS = ("train", "heldout")


def held_out(text: str) -> bool:
    """All lines in the letters of the small vocabulary, whose normal form has a mark before each word."""
    form = "".join(f"▁{word}" for word in text.split())
    digest = blake2b(form.encode(), digest_size=8, person=b"xlme held out").digest()
    return int.from_bytes(digest, "little") < SHARE * 2**64


DIGITS = ["one", "two", "three", "four", "five", "ten", "nine", "human", "being", "rights"]


def spelt(number: int) -> str:
    """In the letters of the small vocabulary."""
    return " ".join(DIGITS[int(digit)] for digit in f"{number:02}")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty documents, the first twenty in all three files; English sentences with German, French and no English."""
    folder = tmp_path_factory.mktemp("split")
    words = [spelt(n) for n in range(60)]
    documents = [[text, "", "same line everywhere"] if n % 3 else [text] for n, text in enumerate(words)]
    (folder / "mono").mkdir()
    (folder / "para").mkdir()
    lines = ["\n".join(filter(None, document)) for document in documents]
    (folder / "mono" / "en.txt").write_text("\n\n".join(lines[:40]))
    (folder / "mono" / "de.txt.xz").write_bytes(lzma.compress("\n\n".join(lines[:20]).encode()))
    whole = [*lines[:20], *lines[40:]]
    (folder / "mono" / "fr.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in whole))
    for pair, first, second in (
        ("de-en", [f"Satz {spelt(n)}" for n in range(60)], words),
        ("en-fr", words[::-1], [f"phrase {spelt(n)}" for n in range(59, -1, -1)]),
        ("de-fr", [f"Satz {spelt(n)}" for n in range(60)], [f"phrase {spelt(n)}" for n in range(60)]),
    ):
        for code, side in zip(pair.split("-"), (first, second), strict=True):
            (folder / "para" / f"X.{pair}.{code}").write_text("\n".join(side) + "\n")
    return folder


@pytest.fixture(scope="module")
def encoded(corpus: Path, vocab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("encoded")
    asked = EncodeConfig(vocab, out, mono=corpus / "mono", para=corpus / "para", heldout_share=SHARE)
    for part in ("all", *PARTS):
        run(replace(asked, out=out / part, split=part))  # type: ignore[arg-type]
    return out


def test_both_parts_are_the_corpus(encoded: Path, corpus: Path) -> None:
    for task, names in (("mono", ("en", "de", "fr")), ("para", ("en-de", "en-fr", "de-fr"))):
        for name in names:
            whole, train, heldout = (
                Counter(map(str, records(encoded / part / task, name))) for part in ("all", *PARTS)
            )
            assert train + heldout == whole and not train.keys() & heldout.keys() and train and heldout
            for part in PARTS:
                counts = read_manifest(encoded / part / task).counts["by_language"][name]
                unit = "documents" if task == "mono" else "pairs"
                assert counts[f"{unit}_in"] == counts[unit] + counts["dropped"]["other_split"] == whole.total()
    settings = read_manifest(encoded / "train/mono").settings
    assert (settings["split"], settings["heldout_share"]) == ("train", SHARE)
    assert "split" not in read_manifest(encoded / "all/mono").settings


def test_the_text_alone_decides(encoded: Path, corpus: Path, vocab: Path) -> None:
    vocabulary = Vocabulary(vocab)

    def ids(text: str) -> list[int]:
        return [token for line in text.split("\n") for token in vocabulary.encode(line).tolist()]

    documents = (corpus / "mono/en.txt").read_text().split("\n\n")
    expected = [ids(text) for text in documents if held_out(text)]
    found = [record[0][:-1] for record in records(encoded / "heldout/mono", "en")]
    assert found == expected and 3 < len(found) < 30
    shared = Counter(map(str, found)) & Counter(str(ids(text)) for text in documents[:20])
    for language in ("de", "fr"):  # other files, formats and compression
        there = Counter(str(record[0][:-1]) for record in records(encoded / "heldout/mono", language))
        assert there & Counter(str(ids(text)) for text in documents[:20]) == shared
    english = [line for line in (corpus / "para/X.de-en.en").read_text().splitlines() if held_out(line)]
    for name in ("en-de", "en-fr"):
        there = [record[0] for record in records(encoded / "heldout/para", name)]
        assert sorted(there) == sorted(ids(line) for line in english)
    german = [line for line in (corpus / "para/X.de-fr.de").read_text().splitlines() if held_out(line)]
    assert [record[0] for record in records(encoded / "heldout/para", "de-fr")] == [ids(line) for line in german]


FORMS = {  # as files have the same text, and the model reads it
    "as it is": str,
    "no-break spaces": lambda text: text.replace(" ", "\u00a0"),
    "two spaces": lambda text: text.replace(" ", "  "),
    "a tab": lambda text: text.replace(" ", "\t"),
    "decomposed": lambda text: unicodedata.normalize("NFD", text),
    "full width": lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text),
    "zero-width spaces": lambda text: text.replace(" ", "\u200b"),
    "a mark inside": lambda text: text.replace(" ", "\ufeff"),
    "of two paragraphs": lambda text: text.replace(" ", "\n", 1),
}


@pytest.fixture(scope="module")
def in_all_forms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Forty sentences, a document each, in French and with English; a file for each form."""
    folder, sentences = tmp_path_factory.mktemp("forms"), [f"dignité {spelt(n)}" for n in range(40)]
    for form, change in FORMS.items():
        part = folder / form
        (part / "mono").mkdir(parents=True)
        lines = [change(sentence) for sentence in sentences]
        (part / "mono" / "fr.txt").write_text("\n\n".join(lines))
        for code, side in (("en", [line.replace("\n", " ") for line in lines]), ("fr", [str(n) for n in range(40)])):
            (part / f"X.en-fr.{code}").write_text("".join(f"{line}\n" for line in side))
    return folder, sentences


def in_form(config: EncodeConfig, folder: Path, form: str) -> EncodeConfig:
    return replace(config, mono=folder / form / "mono", para=folder / form, out=config.out / form)


@pytest.mark.parametrize("form", FORMS)
def test_text_that_the_model_reads_alike_is_on_one_side(
    in_all_forms: tuple[Path, list[str]], vocab: Path, tmp_path: Path, form: str
) -> None:
    folder, sentences = in_all_forms
    asked = EncodeConfig(vocab, tmp_path, heldout_share=SHARE, split="heldout")
    numbers = [n for n, sentence in enumerate(sentences) if held_out(sentence)]
    run(in_form(asked, folder, form))
    assert 3 < len(numbers) < 20
    processor = spm.SentencePieceProcessor(model_file=str(vocab / "sentencepiece.model"))
    ids = [Vocabulary.from_sentencepiece_ids(processor.encode(sentences[n])).tolist() for n in numbers]
    found = records(tmp_path / form / "mono", "fr")
    assert [record[0][:-1] for record in found] == ids
    assert [record[0] for record in records(tmp_path / form / "para", "en-fr")] == ids


LINES = st.lists(
    st.text(st.sampled_from(" aeé\u0301\u00a0\u200b\ufeff\u2581Ａﬁ가\u1100\u1161\0\a\t人ᚠ1½<>s/"), max_size=9)
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES)
def test_normal_forms_are_cut_as_their_lines(vocab: Path, lines: list[str]) -> None:
    vocabulary = Vocabulary(vocab)
    ids, lengths = vocabulary.encode_normalised(vocabulary.normalise(lines))
    expected = [Vocabulary.from_sentencepiece_ids(vocabulary.processor.encode(line)).tolist() for line in lines]
    assert ids.tolist() == [token for line in expected for token in line]
    assert lengths.tolist() == list(map(len, expected))


def test_a_test_set_is_left_out_in_every_form(
    in_all_forms: tuple[Path, list[str]], vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty of forty sentences; also where some letters are unknown, which the model reads as one another."""
    folder, sentences = in_all_forms
    (tmp_path / "test.fr").write_text("".join(f"{sentence}\n" for sentence in [*sentences[:20], "ᚠ rights"]))
    asked = EncodeConfig(vocab, tmp_path, without=(tmp_path / "test.fr",))
    for form in FORMS:
        if form == "of two paragraphs":
            continue  # a line of the test is a paragraph, or a side
        run(in_form(asked, folder, form))
        for task, name in (("mono", "fr"), ("para", "en-fr")):
            counts = read_manifest(tmp_path / form / task).counts["by_language"][name]
            assert counts["dropped"] == {"held_out_text": 20}, form
    assert "is a line of --without" not in capsys.readouterr().err
    (tmp_path / "test.csv").write_text("".join(f'1,"{sentence}"\n' for sentence in sentences[:20]))
    run(in_form(replace(asked, without=(tmp_path / "test.csv",), out=tmp_path / "csv"), folder, next(iter(FORMS))))
    warned = capsys.readouterr().err
    assert all(f"{task} is a line of --without: do these files have" in warned for task in ("mono", "para"))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "fr.txt").write_text("ᛏ rights\n\nᛏ equal\n")
    run(replace(asked, mono=tmp_path / "odd", out=tmp_path / "unknown"))
    counts = read_manifest(tmp_path / "unknown" / "mono").counts["by_language"]["fr"]
    assert counts["dropped"] == {"held_out_text": 1} and counts["documents"] == 1
    (tmp_path / "longer").mkdir()
    (tmp_path / "longer" / "fr.txt").write_text(f"{sentences[0]}\n{sentences[30]}\n")
    run(replace(asked, mono=tmp_path / "longer", out=tmp_path / "paragraph"))
    counts = read_manifest(tmp_path / "paragraph" / "mono").counts["by_language"]["fr"]
    assert (counts["dropped"], counts["removed"], counts["documents"]) == ({}, {"held_out_text": 1}, 1)
    assert "mono is a line of --without" not in capsys.readouterr().err


def test_texts_that_the_model_reads_alike_are_duplicates(
    in_all_forms: tuple[Path, list[str]], vocab: Path, tmp_path: Path
) -> None:
    """Over files and blocks; of paragraphs that were two no word is lost."""
    folder, sentences = in_all_forms
    for form in FORMS:
        (tmp_path / f"{form}.toml").write_text(
            f'name = "{form}"\nwhere = "{folder}/{form}"\nformat = "moses"\nfiles = "X.{{src}}-{{tgt}}.{{side}}"\n'
            'pairs = ["en-fr"]\n[filters.exact_duplicates]\n'
        )
        mono = 'format = "cc100"\nfiles = "mono/{lang}.txt"\nlanguages = ["fr"]\n[filters.exact_duplicates]\n'
        (tmp_path / f"mono {form}.toml").write_text(f'name = "mono {form}"\nwhere = "{folder}/{form}"\n{mono}')
    corpora = tuple(str(path) for path in sorted(tmp_path.glob("*.toml")))
    for block_bytes in (200, 64_000_000):
        run(EncodeConfig(vocab, tmp_path / str(block_bytes), corpus=corpora, block_bytes=block_bytes))
        dropped = (len(FORMS) - 1) * 40
        counts = read_manifest(tmp_path / str(block_bytes) / "para").counts["by_language"]["en-fr"]
        assert counts["dropped"] == {"exact_duplicates": dropped}
        counts = read_manifest(tmp_path / str(block_bytes) / "mono").counts["by_language"]["fr"]
        two = 1 + len({sentence.partition(" ")[2] for sentence in sentences})  # the parts of the one in two paragraphs
        assert counts["paragraphs"] == 40 + two


def test_a_line_without_tokens_leaves_out_nothing(vocab: Path, tmp_path: Path) -> None:
    """Next to one with tokens; a document of a zero-width space is dropped for another reason."""
    (tmp_path / "mono").mkdir()
    (tmp_path / "mono" / "en.txt").write_text("\u200b\n\nhuman\n\nrights\n")
    (tmp_path / "test").write_text("\u200b\nrights\n")
    run(EncodeConfig(vocab, tmp_path / "out", mono=tmp_path / "mono", without=(tmp_path / "test",)))
    counts = read_manifest(tmp_path / "out" / "mono").counts["by_language"]["en"]
    assert (counts["documents"], counts["dropped"]) == (1, {"held_out_text": 1, "no_token": 1})


NOTHING = {
    "empty": (b"", "has no text"),
    "blank": (b"\n \n\r\n", "has no text"),
    "table.tsv": (b"all human\tbeings\nborn\tfree\n", "is a table, JSON or XML"),
    "lines.jsonl": (b'{"text": "born free"}\n{"text": "and equal"}\n', "is a table, JSON or XML"),
    "test.sgm": (b"<doc>\n<seg id=1>born free</seg>\n</doc>\n", "is a table, JSON or XML"),
    "mac": (b"born free\rand equal", "ends its lines by carriage returns alone"),
    "mixed": (b"born\rfree\nequal\n", "50% of its lines have carriage returns inside"),
    "utf16": ("born free\nand equal\n".encode("utf-16-le"), "is it UTF-16"),
    "latin": ("in Würde\n".encode("latin-1"), "is not UTF-8"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_file_that_leaves_out_nothing_is_refused(corpus: Path, vocab: Path, tmp_path: Path, name: str) -> None:
    data, words = NOTHING[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name}\b.* {words}"):
        run(EncodeConfig(vocab, tmp_path / "out", mono=corpus / "mono", without=(tmp_path / name,)))
    assert not (tmp_path / "out").exists()


def test_text_to_leave_out_is_in_a_file(corpus: Path, vocab: Path, tmp_path: Path) -> None:
    for place in (Path("/dev/null"), tmp_path):
        with pytest.raises(ValueError, match=f"^--without {place} is not a file: name a file with text$"):
            run(EncodeConfig(vocab, tmp_path / "out", mono=corpus / "mono", without=(place,)))


@pytest.mark.parametrize("data", ["born\tfree\r\nand equal\r\n", "born free", "born\rfree\n" + 10 * "equal\n"])
def test_a_file_that_leaves_out_something_is_taken(corpus: Path, vocab: Path, tmp_path: Path, data: str) -> None:
    (tmp_path / "test").write_bytes(data.encode())
    run(EncodeConfig(vocab, tmp_path / "out", mono=corpus / "mono", without=(tmp_path / "test",)))
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize("ranks", [0, 3])
def test_the_same_bytes_for_any_number_of_processes(
    encoded: Path, corpus: Path, vocab: Path, tmp_path: Path, data_prep: Run, ranks: int
) -> None:
    folders = ("--mono", corpus / "mono", "--para", corpus / "para", "--vocab", vocab, "--out", tmp_path / "out")
    processes = () if ranks else ("--processes", 3)
    split = ("--split", "heldout", "--heldout-share", SHARE)
    done = data_prep("encode", *folders, *split, *processes, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert "gave no text" not in done.stderr
    assert tree(tmp_path / "out") == tree(encoded / "heldout")


def test_duplicates_are_removed_on_each_side_alone(corpus: Path, vocab: Path, tmp_path: Path) -> None:
    """The line that two thirds of the documents share stays once in each part, and moves no document."""
    (tmp_path / "c.toml").write_text(
        f'name = "c"\nwhere = "{corpus}/mono"\nformat = "cc100"\nfiles = "{{lang}}.txt"\nlanguages = ["en"]\n'
        "[filters.exact_duplicates]\n"
    )
    documents = (corpus / "mono/en.txt").read_text().split("\n\n")
    for part in PARTS:
        asked = EncodeConfig(vocab, tmp_path / part, corpus=(str(tmp_path / "c.toml"),), heldout_share=SHARE)
        run(replace(asked, split=part))  # type: ignore[arg-type]
        own = [text.split("\n") for text in documents if held_out(text) == (part == "heldout")]
        counts = read_manifest(tmp_path / part / "mono").counts["by_language"]["en"]
        assert counts["documents"] == len(own)
        assert counts["removed"]["exact_duplicates"] == sum(len(lines) - 1 for lines in own) - 1


def test_what_decides_a_split_is_in_the_rows(
    corpus: Path, vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence, or the part of a document that is in a block; and nothing held out is no row."""
    asked = EncodeConfig(vocab, tmp_path / "encoded", mono=corpus / "mono", para=corpus / "para", heldout_share=1e-9)
    run(replace(asked, split="heldout"))
    assert "mono has no text: for little text, give both parts a larger --heldout-share" in capsys.readouterr().err
    rows = MixConfig(asked.out, vocab, tmp_path / "none", mono_rows=4, para_rows=4, row_tokens=64)
    with pytest.raises(ValueError, match="mono has nothing that fills a row of 64 tokens: raise --heldout-share"):
        mix(rows)
    for name, changes, unit in (("s", {"sentences": True}, "sentences"), ("b", {"block_bytes": 100}, 100)):
        changed = replace(asked, out=tmp_path / name, heldout_share=SHARE, split="train", **changes)  # type: ignore[arg-type]
        run(changed)
        mix(replace(rows, encoded=changed.out, out=tmp_path / f"mixed-{name}"))
        mono, para = (read_manifest(tmp_path / f"mixed-{name}" / task).counts for task in ("mono", "para"))
        assert mono["split_of"] == unit and "split_of" not in para


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5, -0.1])
def test_a_share_of_nothing(corpus: Path, vocab: Path, tmp_path: Path, share: float) -> None:
    with pytest.raises(ValueError, match=r"--heldout-share is .*: it must be between 0 and 1"):
        run(EncodeConfig(vocab, tmp_path, mono=corpus / "mono", split="train", heldout_share=share))


def test_another_share_into_the_folder(encoded: Path, corpus: Path, vocab: Path) -> None:
    asked = EncodeConfig(vocab, encoded / "train", mono=corpus / "mono", split="train", heldout_share=0.1)
    with pytest.raises(ValueError, match=r"heldout_share was 0\.25, now 0\.1"):
        run(asked)


def test_held_out_text_is_not_trained_on(encoded: Path, corpus: Path, vocab: Path, tmp_path: Path) -> None:
    """Of the folders that mix makes of the parts, only those of one share go together."""
    loaders = {}
    for part in ("all", *PARTS):
        asked = MixConfig(encoded / part, vocab, tmp_path / part, mono_rows=4, para_rows=4, row_tokens=64, alpha=0.0)
        mix(asked)
        loaders[part] = Loader(tmp_path / part, DataConfig(4, 4, micro_batch=4), 1, 0.15)
    model = ModelConfig(vocabulary=loaders["all"].vocabulary_size, max_positions=64)
    for theirs, ours in (("heldout", "train"), ("all", "train")):
        require_fitting_data(loaders[theirs], model, loaders[ours])
    with pytest.raises(ValueError, match="have the same text, so no text is held out"):
        require_fitting_data(loaders["all"], model, loaders["all"])
    for theirs, ours in (("heldout", "all"), ("heldout", "heldout"), ("train", "train"), ("train", "all")):
        with pytest.raises(ValueError, match=rf"was encoded with --split {theirs} .* with --split {ours}"):
            require_fitting_data(loaders[theirs], model, loaders[ours])
    units = "mixed/mono and .* with different --sentences or --block-bytes"
    for other, words in (  # under which other texts are held out
        ({"sentences": True}, units),
        ({"block_bytes": 100}, units),
        ({"heldout_share": 0.5}, r"--heldout-share 0\.5, but .* with --split train --heldout-share 0\.25"),
    ):
        odd = EncodeConfig(vocab, tmp_path / "odd", mono=corpus / "mono", para=corpus / "para", heldout_share=SHARE)
        shutil.rmtree(odd.out, ignore_errors=True)
        shutil.rmtree(tmp_path / "mixed", ignore_errors=True)
        run(replace(odd, split="heldout", **other))  # type: ignore[arg-type]
        mix(MixConfig(odd.out, vocab, tmp_path / "mixed", mono_rows=4, para_rows=4, row_tokens=64, alpha=0.0))
        loader = Loader(tmp_path / "mixed", DataConfig(4, 4, micro_batch=4), 1, 0.15)
        with pytest.raises(ValueError, match=words):
            require_fitting_data(loader, model, loaders["train"])
    assert "split_of" not in read_manifest(tmp_path / "mixed/mono").counts, "where documents are whole"
    used = read_manifest(tmp_path / "heldout/mono").counts["by_language"]
    assert used.keys() == {"de", "en", "fr"} and max(c["used"] for c in used.values()) <= 2  # alpha 0
    for part in PARTS:
        batch = pa.ipc.open_file(next((tmp_path / part / "mono").glob("*.arrow"))).read_all()
        assert np.shape(batch["tokens"].to_pylist()) == (4, 64)
