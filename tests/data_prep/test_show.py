"""`show` prints rows as the text they hold, and marks exactly the positions that training masks."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.encode import encode
from data_prep.inspect.show import ShowConfig, rows_from, run, text_of
from data_prep.mix import mix
from tests.data_prep.conftest import TEXT
from xlme_ds.config import DataConfig, ObjectiveConfig, Training
from xlme_ds.data.loader import Loader
from xlme_ds.data.schema import BOS, EOS, TASKS, read_manifest, write_manifest
from xlme_ds.data.vocabulary import Vocabulary

ROWS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, vocab: Path) -> Path:
    """Rows of both tasks in several shards; documents of two sentences, French is the rarest language."""
    folder = tmp_path_factory.mktemp("show")
    (folder / "mono").mkdir()
    for code, text in (("en", TEXT * 9), ("de", TEXT * 4), ("fr", TEXT[2:3])):
        documents = ["\n".join(text[i : i + 2]) for i in range(0, len(text), 2)]
        (folder / "mono" / f"{code}.txt").write_text("\n\n".join(documents), encoding="utf-8")
    (folder / "para").mkdir()
    (folder / "para" / "X.de-en.de").write_text("\n".join(TEXT * 9), encoding="utf-8")
    (folder / "para" / "X.de-en.en").write_text("\n".join(TEXT[1:] * 9 + TEXT[:1] * 9), encoding="utf-8")
    encode.run(encode.EncodeConfig(vocab=vocab, out=folder / "encoded", mono=folder / "mono", para=folder / "para"))
    out = folder / "data"
    mix.run(mix.MixConfig(folder / "encoded", vocab, out, ROWS, ROWS, row_tokens=200, rows_per_shard=10))
    return out


def shown(capsys: pytest.CaptureFixture[str], config: ShowConfig) -> list[str]:
    capsys.readouterr()
    run(config)
    return [line for line in capsys.readouterr().out.splitlines() if line]


@pytest.mark.parametrize("task", TASKS)
def test_masked_positions_are_those_of_training(data: Path, task: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (ROWS, 0) if task == "mono" else (0, ROWS)
    batch = Loader(data, DataConfig(*rows, micro_batch=ROWS), seed=5, mask_fraction=0.15).micro_batches(0)[0]
    expected = [set() for _ in range(ROWS)]
    for position in batch.masked_M.tolist():
        expected[position // 200].add(position % 200)
    manifest = read_manifest(data / task)
    found = [row.masked(task, 5, 0.15) for row in rows_from(data / task, manifest, 0, None)]
    assert found == expected
    vocabulary = Vocabulary(data / "vocab")
    printed = "\n".join(shown(capsys, ShowConfig(data, task, rows=ROWS, seed=5, mask_fraction=0.15)))
    texts = re.split(rf"^{task} row \d+: .* tokens, (\d+) masked$", printed, flags=re.MULTILINE)[1:]
    assert [int(number) for number in texts[::2]] == list(map(len, expected))
    for text, tokens, positions in zip(texts[1::2], batch.tokens_BT.tolist(), expected, strict=True):
        pieces = [vocabulary.piece(tokens[position]).removeprefix("▁") or "▁" for position in sorted(positions)]
        assert re.findall("⟦(.*?)⟧", text) == pieces
    assert (ShowConfig.seed, ShowConfig.mask_fraction) == (Training.seed, ObjectiveConfig.mask_fraction)


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_their_text(data: Path, task: str, capsys: pytest.CaptureFixture[str]) -> None:
    vocabulary = Vocabulary(data / "vocab")
    manifest = read_manifest(data / task)
    lines = shown(capsys, ShowConfig(data, task, rows=ROWS, mask_fraction=0))
    for row in rows_from(data / task, manifest, 0, None):
        heading = lines.pop(0)
        items = len(row.lengths)
        assert heading.startswith(
            f"{task} row {row.index}: {items} item{'s' * (items > 1)}, {sum(row.lengths)} of 200 tokens"
        )
        texts = np.split(row.tokens, np.cumsum(row.lengths))[:-1]
        codes = iter(row.languages)
        for number, item in enumerate(texts, 1):
            assert item[0] == BOS and item[-1] == EOS
            parts = np.split(item, np.flatnonzero(item == EOS))[:-1] if task == "para" else [item]
            for part in parts:
                number_and_code, text = lines[0][:13].split(), lines.pop(0)[14:]
                assert number_and_code == [str(number), next(codes)]
                documents = map(vocabulary.decode, np.split(part, np.flatnonzero(part == EOS)))
                assert text == " </s> ".join(filter(None, documents))
    assert not lines


def test_sides_in_xlms_layout(data: Path, vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mix.run(mix.MixConfig(data.parent / "encoded", vocab, tmp_path, 0, ROWS, row_tokens=200, layout="xlm"))
    vocabulary = Vocabulary(vocab)
    lines = shown(capsys, ShowConfig(tmp_path, "para", rows=ROWS, mask_fraction=0))
    texts = {line[14:] for line in lines if not line.startswith("para row")}
    assert texts == {vocabulary.decode(vocabulary.encode(sentence)) for sentence in TEXT}


def test_text_without_marks_is_the_decoded_text(data: Path) -> None:
    vocabulary = Vocabulary(data / "vocab")
    for sentence in TEXT:
        tokens = vocabulary.encode(sentence)
        assert text_of(tokens, 0, len(tokens), set(), vocabulary, True).plain == vocabulary.decode(tokens)


def test_marks_enclose_the_masked_pieces(data: Path) -> None:
    vocabulary = Vocabulary(data / "vocab")
    tokens = vocabulary.encode(TEXT[0])
    masked = {0, 3, 4, len(tokens) - 1}
    text = text_of(tokens, 0, len(tokens), masked, vocabulary, True).plain
    assert re.findall("⟦(.*?)⟧", text) == [vocabulary.piece(int(tokens[i])).removeprefix("▁") for i in sorted(masked)]
    assert text.replace("⟦", "").replace("⟧", "") == vocabulary.decode(tokens)
    assert [span.style for span in text_of(tokens, 0, len(tokens), masked, vocabulary, False).spans] == ["reverse"] * 4
    pieces = [vocabulary.piece(token) for token in range(vocabulary.mask_id)]
    space = np.array([tokens[0], pieces.index("▁")], np.int32)
    assert text_of(space, 0, 2, {1}, vocabulary, True).plain.endswith(" ⟦▁⟧"), "a masked space can be seen"
    assert text_of(space, 0, 2, {1}, vocabulary, False).plain == f"{vocabulary.decode(tokens[:1])}  "


def test_language_and_start(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest(data / "mono")
    rows = list(rows_from(data / "mono", manifest, 0, None))
    assert [row.index for row in rows] == list(range(ROWS))
    french = [row.index for row in rows if row.languages == ["fr"]]
    assert french, "the test needs a row in French"
    lines = shown(capsys, ShowConfig(data, "mono", rows=ROWS, language="FR"))
    assert [int(line.split()[2][:-1]) for line in lines if "row" in line.split()[:2]] == french
    lines = shown(capsys, ShowConfig(data, "para", rows=2, start=9))
    assert [line.split(":")[0] for line in lines if line.startswith("para row")] == ["para row 9", "para row 10"]


@pytest.mark.parametrize("rows", [3, 10**30])
def test_a_language_of_one_task_is_shown(data: Path, capsys: pytest.CaptureFixture[str], rows: int) -> None:
    run(ShowConfig(data, rows=rows, language="fr"))
    printed = capsys.readouterr()
    assert "mono row" in printed.out and "para row" not in printed.out
    assert printed.err == f"warning: {data / 'para'} has no row in fr from row 0 on: it has {ROWS} rows\n"


def test_a_language_that_one_task_does_not_have(
    data: Path, vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "para").mkdir()
    for code, text in (("en", TEXT[0]), ("fr", TEXT[2])):
        (tmp_path / "para" / f"X.en-fr.{code}").write_text(text, encoding="utf-8")
    encode.run(encode.EncodeConfig(vocab=vocab, out=tmp_path / "encoded", para=tmp_path / "para"))
    mix.run(mix.MixConfig(tmp_path / "encoded", vocab, tmp_path / "data", para_rows=1, row_tokens=200))
    shutil.copytree(data / "mono", tmp_path / "data" / "mono")
    capsys.readouterr()
    run(ShowConfig(tmp_path / "data", rows=1, language="de"))
    printed = capsys.readouterr()
    assert printed.out.startswith("mono row")
    assert printed.err == f"warning: {tmp_path}/data/para has no text in de: its languages are en, fr\n"
    with pytest.raises(ValueError, match=r"has no row from row 1 on: it has 1 row$"):
        run(ShowConfig(tmp_path / "data", "para", start=1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": ROWS}, f"has no row from row {ROWS} on: it has {ROWS}"),
        ({"language": "sw"}, "has no text in sw: its languages are de, en, fr"),
        ({"language": "english"}, "has no text in english: its languages are de, en, fr"),
        ({"task": "para", "language": "fr"}, "has no row in fr from row 0 on"),
        ({"rows": 0}, "--rows is 0"),
        ({"mask_fraction": 1.0}, "--mask-fraction is 1.0"),
    ],
)
def test_mistakes_are_named(data: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(ShowConfig(data, **settings))  # type: ignore[arg-type]


def test_rows_of_another_vocabulary_or_width(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    manifest = read_manifest(tmp_path / "data" / "mono")
    for changed, message in (
        (replace(manifest, vocabulary_sha256="0" * 64), "sentencepiece.model is not the vocabulary that .*data was"),
        (replace(manifest, settings=manifest.settings | {"row_tokens": 201}), "00000.arrow does not have the columns"),
    ):
        write_manifest(tmp_path / "data" / "mono", changed)
        with pytest.raises(ValueError, match=message):
            run(ShowConfig(tmp_path / "data", "mono"))


def test_a_folder_that_mix_did_not_write(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name the folder that `xlme prep mix` wrote"):
        run(ShowConfig(tmp_path))
    with pytest.raises(ValueError, match="written by stage encode: show reads what mix wrote"):
        run(ShowConfig(data.parent / "encoded"))


def test_the_command_line(data: Path, data_prep) -> None:  # type: ignore[no-untyped-def]
    done = data_prep("show", "--data", data, "--rows", 1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" row 0: ") == 2 and "⟦" in done.stdout
    done = data_prep("show", "--data", data, "--language", "sw")
    assert done.returncode == 2 and done.stderr.startswith("xlme prep show: error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("task", TASKS)
def test_a_changed_shard_is_not_shown(data: Path, task: str, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    path = tmp_path / "data" / task / "00000.arrow"
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ValueError, match=r"00000\.arrow is missing, or not the file that the manifest lists: check"):
        run(ShowConfig(tmp_path / "data", task, rows=1))
    path.unlink()
    with pytest.raises(ValueError, match=r"00000\.arrow is missing"):
        run(ShowConfig(tmp_path / "data", task, rows=1))
    run(ShowConfig(tmp_path / "data", task, rows=1, start=12))  # of the next shard
