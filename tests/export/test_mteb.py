"""mteb's bitext mining reads published files from a folder, and agrees with our retrieval on the same sentences."""

import json
from pathlib import Path

import pytest

import xlme_ds as xlme
from tests.evaluate.folders import sentence, write_run, write_tatoeba
from xlme_ds.export.__main__ import main as export

pytest.importorskip("mteb", reason="mteb is absent: pip install -c constraints.txt '.[mteb]'")
from bench.peers.mteb import main, tasks_of

NUMBERS = range(7, 10_000, 157)
ENGLISH = [sentence(number, 4) for number in NUMBERS]
GERMAN = [f"{sentence(number * 7 % 10, 1)} {sentence(number // 10, 3)}" for number in NUMBERS]  # a word is another
SWAHILI = [f"{text} {sentence(number * 7 % 10, 1)}" for text, number in zip(ENGLISH, NUMBERS, strict=True)]


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def test_accuracies_are_those_of_our_retrieval(tmp_path: Path) -> None:
    """Tatoeba's files from their language into English, and the same sentences as FLORES's files, both ways."""
    data, exported, out = (str(tmp_path / name) for name in ("data", "exported", "out"))
    export(["--run", str(write_run(tmp_path / "run", layers=3)), "--to", exported])
    for code, lines in (("eng", ENGLISH), ("deu", GERMAN), ("swh", SWAHILI)):
        write(Path(data) / "flores200" / "devtest" / f"{code}_Latn.devtest", lines)
    write_tatoeba(Path(data) / "laser", "deu", ENGLISH, GERMAN)
    write_tatoeba(Path(data) / "laser", "swh", ENGLISH, SWAHILI)
    main(["--model", exported, "--data", data, "--out", out])
    accuracies = {}
    for path in Path(out).iterdir():
        (scores,) = json.loads(path.read_text())["scores"].values()
        accuracies |= {one["hf_subset"]: one["accuracy"] for one in scores}
    (ours,) = xlme.evaluate.tatoeba(exported, Path(data) / "laser")["models"]
    for language, code in (("de", "deu"), ("sw", "swh")):
        last = {way: layers[-1] for way, layers in ours["languages"][language].items()}
        assert 0.05 < last["xx_en"] < 0.95 and last["xx_en"] != last["en_xx"]
        assert (
            accuracies[f"{code}-eng"] == accuracies[f"{code}_Latn-eng_Latn"] == pytest.approx(last["xx_en"], abs=1e-6)
        )
        assert accuracies[f"eng_Latn-{code}_Latn"] == pytest.approx(last["en_xx"], abs=1e-6)
    assert len(accuracies) == 2 + 6


def test_published_names_are_mtebs_languages(tmp_path: Path) -> None:
    """NTREX-128's as in its repository; scripts, countries and second translations."""
    published = ("src.eng", "ref.deu", "ref.zho-CN", "ref.srp-Latn", "ref.eng-GB", "ref-2.spa")
    for name in published:
        write(tmp_path / f"newstest2019-{name}.txt", [name, "b"])
    (task,) = tasks_of(tmp_path)
    assert task.metadata.name == "NTREXBitextMining"
    columns = {language: text[0] for language, text in task.dataset["test"].to_dict().items()}
    names = {"eng_Latn": "src.eng", "deu_Latn": "ref.deu", "zho_Hans": "ref.zho-CN", "srp_Latn": "ref.srp-Latn"}
    assert columns == names
    assert {"deu_Latn-eng_Latn", "eng_Latn-zho_Hans"} <= set(task.hf_subsets)
    assert {code for pair in task.hf_subsets for code in pair.split("-")} == set(names)


def write_bucc(folder: Path, gold: list[str]) -> None:
    write(folder / "de-en.training.de", ["de-1\teins", "de-2\tzwei", "de-3\tdrei"])
    write(folder / "de-en.training.en", ["en-1\tthree", "en-2\ttwo", "en-3\tnobody's"])
    write(folder / "de-en.training.gold", gold)


def test_bucc_has_the_gold_pairs(tmp_path: Path) -> None:
    write_bucc(tmp_path / "bucc2018" / "de-en", ["de-2\ten-2", "de-3\ten-1"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bucc").symlink_to(tmp_path / "bucc2018")
    (task,) = tasks_of(tmp_path / "data")
    assert task.metadata.name == "BUCC.v2" and task.hf_subsets == ["de-en"]
    assert task.dataset["de-en"]["test"].to_dict() == {"sentence1": ["zwei", "drei"], "sentence2": ["two", "three"]}


def test_faults_are_named(tmp_path: Path) -> None:
    def fault() -> str:
        with pytest.raises(ValueError) as caught:
            tasks_of(tmp_path)
        return str(caught.value)

    assert "has no files of Tatoeba, BUCC, FLORES-200 or NTREX-128" in fault()
    write_bucc(tmp_path, ["de-2\ten-2", "de-3\ten-9"])
    assert "de-en.training.gold line 2 names no sentence of de-en" in fault()
    write_bucc(tmp_path, ["de-2\ten-2"])
    write(tmp_path / "deu_Latn.devtest", ["eins", "zwei"])
    write(tmp_path / "eng_Latn.devtest", ["one"])
    assert "deu_Latn.devtest has 2 lines but" in fault() and "eng_Latn.devtest has 1" in fault()
    write(tmp_path / "copy" / "deu_Latn.devtest", ["eins"])
    assert "copy/deu_Latn.devtest and" in fault() and "are the same test by their names: leave one" in fault()


def test_a_mistake_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--model", str(tmp_path), "--data", str(tmp_path)])
    assert left.value.code == 2 and "name the folder above them" in capsys.readouterr().err
