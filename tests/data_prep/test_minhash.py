"""Near duplicates: which documents datatrove's MinHash removes, from the files that `encode` reads to such files."""

import gzip
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.encode.encode import EncodeConfig
from data_prep.encode.encode import run as encode
from data_prep.languages import CC100_LANGUAGES, scripts_of
from data_prep.minhash import _NO_SPACES, MinhashConfig, run
from xlme_ds.data.schema import read_manifest

needs_datatrove = pytest.mark.skipif(
    importlib.util.find_spec("datatrove") is None, reason="datatrove is missing: pip install 'xlme-ds[minhash]'"
)
Prep = Callable[..., "subprocess.CompletedProcess[str]"]


def original(words: str, length: int, seed: int) -> list[str]:
    """Words of a document that shares hardly five in a row with any of another seed."""
    return [str(word) for word in np.random.default_rng(seed).choice(words.split(), length)]


GERMAN = "alle menschen sind frei und gleich an würde rechten geboren sie vernunft gewissen begabt sollen einander"
CHINESE = " ".join("人人生而自由在尊严和权利上一律平等他们赋有理性良心并应以兄弟关系的精神相对待")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Twenty documents a language; every one has a copy with one word changed, German's in another file and of two
    paragraphs."""
    (tmp_path / "mono").mkdir()
    chinese = []
    german: dict[str, list[str]] = {"de": [], "deu": []}
    for seed in range(20):
        words = original(GERMAN, 120, seed)
        for name, ending in (("de", "eins"), ("deu", "zwei")):
            german[name].append("\n".join([" ".join(words[:60]), " ".join([*words[60:], ending])]))
        characters = "".join(original(CHINESE, 200, seed))
        chinese += [characters, characters[:-1] + "无"]
    for name, documents in german.items():
        (tmp_path / f"mono/{name}.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    with gzip.open(tmp_path / "mono/zh-Hans.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(chinese))
    return tmp_path / "mono"


def texts(path: Path) -> list[str]:
    """The documents in a file of the stage."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


@needs_datatrove
def test_one_of_each_pair_of_near_duplicates_stays(corpus: Path, tmp_path: Path, vocab: Path, data_prep: Prep) -> None:
    """`encode` reads what is left; the bytes do not depend on the number of processes."""
    out = tmp_path / "out"
    done = data_prep("minhash", "--mono", corpus, "--out", out, "--processes", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "de: 40 documents, 20 of them removed",
        "zh-Hans: 40 documents, 20 of them removed",
    ]
    counted = {"documents": 40, "removed": 20}
    assert read_manifest(out).counts["by_language"] == {"de": counted, "zh-Hans": counted}
    german = texts(out / "mono/de.jsonl.gz")
    assert {text.rpartition(" ")[0] for text in german} == {
        text.rpartition(" ")[0] for text in (corpus / "de.txt").read_text(encoding="utf-8").split("\n\n")
    }
    assert len(german) == len(texts(out / "mono/zh-Hans.jsonl.gz")) == 20
    assert {path.name for path in out.iterdir()} == {".lock", "manifest.json", "mono", "settings.json", "tasks"}
    run(MinhashConfig(corpus, tmp_path / "alone"))
    for name in ("de", "zh-Hans"):
        path = f"mono/{name}.jsonl.gz"
        assert (out / path).read_bytes() == (tmp_path / "alone" / path).read_bytes()
    done = data_prep("encode", "--mono", out / "mono", "--vocab", vocab, "--out", tmp_path / "encoded")
    assert done.returncode == 0, done.stderr
    counts = read_manifest(tmp_path / "encoded/mono").counts["by_language"]
    assert (counts["de"]["documents"], counts["de"]["paragraphs"], counts["zh-Hans"]["documents"]) == (20, 40, 20)


@needs_datatrove
def test_languages_that_are_not_written_yet_are_missed(corpus: Path, tmp_path: Path, vocab: Path) -> None:
    """Else `encode` would take those of a run that ended early for all. A file that was cut off is fetched again, and
    the other languages stay."""
    whole = (corpus / "zh-Hans.jsonl.gz").read_bytes()
    (corpus / "zh-Hans.jsonl.gz").write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=r"zh-Hans\.jsonl\.gz cannot be read"):
        run(MinhashConfig(corpus, tmp_path / "out"))
    written = (tmp_path / "out/mono/de.jsonl.gz").stat().st_mtime_ns
    assert [path.name for path in (tmp_path / "out/mono").glob("*.gz")] == ["de.jsonl.gz"]
    config = EncodeConfig(vocab, tmp_path / "encoded", mono=tmp_path / "out/mono")
    with pytest.raises(
        ValueError, match="out/mono lacks documents, because minhash did not finish: give the command of"
    ):
        encode(config)
    (corpus / "zh-Hans.jsonl.gz").write_bytes(whole)
    run(MinhashConfig(corpus, tmp_path / "out"))
    assert (tmp_path / "out/mono/de.jsonl.gz").stat().st_mtime_ns == written
    encode(config)
    assert set(read_manifest(tmp_path / "encoded/mono").counts["by_language"]) == {"de", "zh-Hans"}


@needs_datatrove
def test_a_damaged_file_is_written_again(corpus: Path, tmp_path: Path) -> None:
    config = MinhashConfig(corpus, tmp_path / "out")
    run(config)
    path = config.out / "mono/de.jsonl.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    other = (config.out / "mono/zh-Hans.jsonl.gz").stat().st_mtime_ns
    run(config)
    assert path.read_bytes() == whole and (config.out / "mono/zh-Hans.jsonl.gz").stat().st_mtime_ns == other


@needs_datatrove
def test_text_that_is_hardly_utf8_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its share of the lines, not of the documents; and only once, though documents are read twice."""
    (tmp_path / "mono").mkdir()
    (tmp_path / "mono/de.txt").write_bytes(b"in W\xfcrde\n" * 3 + b"frei und gleich\n" * 7 + b"\nEnde\n")
    (tmp_path / "mono/en.txt").write_text("free and equal\n")
    run(MinhashConfig(tmp_path / "mono", tmp_path / "out"))
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    words = "27% of its lines have bytes that are no UTF-8: is it in another encoding, or compressed?"
    assert warned == [f"warning: {tmp_path}/mono/de.txt: {words}"]


@needs_datatrove
def test_the_input_is_not_overwritten(corpus: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in corpus.iterdir()}
    with pytest.raises(ValueError, match="where the documents go: choose another --out"):
        run(MinhashConfig(corpus, tmp_path))
    assert {path: path.read_bytes() for path in corpus.iterdir()} == before


@needs_datatrove
def test_files_that_it_did_not_write_stay(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out/mono").mkdir(parents=True)
    own = tmp_path / "out/mono/de.jsonl.gz"
    own.write_bytes(b"my only copy")
    with pytest.raises(ValueError, match=r"out/mono has files that minhash did not write: choose another --out"):
        run(MinhashConfig(corpus, tmp_path / "out"))
    assert own.read_bytes() == b"my only copy" and list((tmp_path / "out").iterdir()) == [own.parent]


@needs_datatrove
@pytest.mark.parametrize("name", [".", "raw", "work"])
def test_out_may_be_the_input_or_the_folder_around_it(corpus: Path, tmp_path: Path, name: str) -> None:
    """The same command continues a run that did not finish, and no file of the user's is lost."""
    folder = tmp_path / "data" / name
    shutil.copytree(corpus, folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    run(MinhashConfig(folder, tmp_path / "data"))
    (tmp_path / "data/manifest.json").unlink()
    run(MinhashConfig(folder, tmp_path / "data"))
    (tmp_path / "data/settings.json").unlink()  # the manifest has them too
    run(MinhashConfig(folder, tmp_path / "data"))
    assert len(texts(tmp_path / "data/mono/de.jsonl.gz")) == 20
    assert {path: path.read_bytes() for path in before} == before


@needs_datatrove
def test_a_named_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mono").mkdir()
    os.mkfifo(tmp_path / "mono/de.txt")
    with pytest.raises(ValueError, match=r"de\.txt is a named pipe, but documents are read twice: store it as a file"):
        run(MinhashConfig(tmp_path / "mono", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@needs_datatrove
def test_an_input_of_another_size_is_another_one(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is another version of datatrove."""
    config = MinhashConfig(corpus, tmp_path / "out")
    run(config)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r'datatrove was ".*", now "0"'):
        patch.setattr("data_prep.minhash.version", lambda _: "0")
        run(config)
    text = (corpus / "de.txt").read_bytes()
    (corpus / "de.txt").write_bytes(text + b"ein satz\n")
    words = (
        rf"de\.txt had {len(text)} bytes when its documents were written into .*, now it has {len(text) + 9}: restore"
    )
    with pytest.raises(ValueError, match=words):
        run(config)
    (corpus / "de.txt").write_bytes(text)
    (corpus / "en.txt").write_text("a sentence")
    with pytest.raises(ValueError, match="was begun with other settings"):
        run(config)


@pytest.mark.skipif(importlib.util.find_spec("datatrove") is not None, reason="datatrove is there")
def test_without_datatrove_a_sentence_says_how_to_get_it(corpus: Path, tmp_path: Path, data_prep: Prep) -> None:
    done = data_prep("minhash", "--mono", corpus, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "minhash needs the package datatrove" in done.stderr and "pip install 'xlme-ds[minhash]'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_characters_are_words_in_scripts_without_spaces() -> None:
    spaceless = {"Thai", "Lao", "Khmer", "Myanmar", "Han", "Kana"}
    assert {*_NO_SPACES} == {code for code in CC100_LANGUAGES if spaceless & {*scripts_of(code)} and code != "ko"}
