"""The two examples of docs/howto/extend.md, an objective and a corpus format, work as they are written there."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from data_prep.__main__ import main as data_prep
from data_prep.readers import READERS
from tests.launch import ROOT
from tests.objectives.test_toy import SETTINGS
from tests.rows import train_vocabulary, write_data
from xlme_ds.objectives import OBJECTIVES
from xlme_ds.pretrain import main as pretrain

PAGE = (ROOT / "docs/howto/extend.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def load(name: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`code` as the module `name`, whose file would be in the package."""
    path = folder / f"{name.rpartition('.')[2]}.py"
    path.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_the_objective_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _ = blocks("python")
    ((name, place),) = re.findall(r'`"(\w+)": "(\S+:\w+)"` to `OBJECTIVES`', PAGE)
    load(place.partition(":")[0], code, tmp_path, monkeypatch)
    monkeypatch.setitem(OBJECTIVES, name, place)
    vocabulary = train_vocabulary(tmp_path / "data" / "vocab")
    write_data(tmp_path / "data", rows=16, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    settings = SETTINGS.replace(".name toy", f".name {name}").replace("--train.eval-every 2 ", "")
    words = f"{settings} --model.vocabulary {vocabulary.size} --data {tmp_path}/data --out {tmp_path}/run"
    pretrain(words.split())
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["loss"] == pytest.approx(last["mlm"] + (last["tlm_first"] + last["tlm_second"]) / 2)
    assert last["tlm_first"] != last["tlm_second"] and "accuracy_second" in last


def test_the_corpus_format_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, code = blocks("python")
    (description,) = blocks("toml")
    reader = load("data_prep.readers.alternating", code, tmp_path, monkeypatch).Alternating()
    monkeypatch.setitem(READERS, "alternating", reader)
    monkeypatch.chdir(tmp_path)
    train_vocabulary(tmp_path / "vocab")
    (tmp_path / "talks.toml").write_text(description)
    (tmp_path / "downloads").mkdir()
    talks = tmp_path / "downloads/talks.en-de.txt"
    talks.write_text("Good morning.\nGuten Morgen.\nThank you.\nDanke.\n")
    (command,) = re.findall(r"^xlme prep (encode .*)$", PAGE, re.M)
    assert not data_prep(command.split())
    manifest = json.loads((tmp_path / "encoded-talks/para/manifest.json").read_text())
    assert manifest["counts"]["by_language"]["en-de"]["pairs"] == 2
    talks.write_text("Good morning.\nGuten Morgen.\nThank you.\n")
    assert data_prep([*command.split()[:-1], "odd"]) == 2
    assert "ends after a source line" in capsys.readouterr().err
