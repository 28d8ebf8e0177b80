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


def test_accuracies_are_those_of_our_retrieval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tatoeba's files from their language into English, and the same sentences as FLORES's files, both ways; and the
    model's name is no markup."""
    data, exported, out = (str(tmp_path / name) for name in ("data", "m[lr][/x]", "out"))
    export(["--run", str(write_run(tmp_path / "run", layers=3)), "--out", exported])
    for code, lines in (("eng", ENGLISH), ("deu", GERMAN), ("swh", SWAHILI)):
        write(Path(data) / "flores200" / "devtest" / f"{code}_Latn.devtest", lines)
    write_tatoeba(Path(data) / "laser", "deu", ENGLISH, GERMAN)
    write_tatoeba(Path(data) / "laser", "swh", ENGLISH, SWAHILI)
    main(["--model", exported, "--data", data, "--out", out])
    assert f"{exported}:mteb'sbitextmining" in "".join(capsys.readouterr().out.split())  # the title may be wrapped
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


def test_faults_are_named(tmp_path: Path) -> None:
    def fault() -> str:
        with pytest.raises(ValueError) as caught:
            tasks_of(tmp_path)
        return str(caught.value)

    assert "has no files of Tatoeba or FLORES-200" in fault()
    write(tmp_path / "deu_Latn.devtest", ["eins", "zwei"])
    write(tmp_path / "eng_Latn.devtest", ["one"])
    assert "deu_Latn.devtest has 2 lines but" in fault() and "eng_Latn.devtest has 1" in fault()


def test_a_mistake_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--model", str(tmp_path), "--data", str(tmp_path)])
    assert left.value.code == 2 and "name the folder above them" in capsys.readouterr().err
    for language in ("deu", "eng"):
        write(tmp_path / f"{language}_Latn.devtest", ["one"])
    with pytest.raises(SystemExit) as left:
        main(["--model", str(tmp_path / "none"), "--data", str(tmp_path)])
    assert left.value.code == 2 and "none is no folder of `xlme export`: name one by --model" in capsys.readouterr().err
    (tmp_path / "modules.json").touch()
    with pytest.raises(SystemExit) as left:
        main(["--model", str(tmp_path), "--data", str(tmp_path), "--out", str(tmp_path / "modules.json")])
    assert left.value.code == 2 and "modules.json is a file, not a folder" in capsys.readouterr().err
