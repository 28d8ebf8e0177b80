"""bench/at_scale.sh end to end in small: stopped on the way and called again."""

import lzma
import os
import subprocess
import zipfile
from pathlib import Path

from tests.finetune.tasks import write_entities
from tests.launch import FORKED_PYTHON, ROOT, Python, environment
from tests.translate.test_command import english, german, sentences
from xlme_ds.compare.results import read_results
from xlme_ds.trained.config_json import read_config

SMALL = {
    "RECIPES": "xlmr_tlm xlme",
    "BUDGETS": "1e9", "SEEDS": "1", "TUNING_SEEDS": "1", "VOCABULARY": "46", "ROWS": "4", "MICRO": "2",
    "TRAIN_ROWS": "64", "HELDOUT_ROWS": "8", "HELDOUT_SHARE": "0.2", "PROCESSES": "1", "WARMUP": "2", "LOG": "5",
    "MODEL": "--model.width 16 --model.heads 2 --model.feed-forward 32 --model.discriminator-layers 2 "
    "--model.generator-layers 1", "TUNING": "--engine.kind plain --tuning.epochs 1",
    "SETTINGS": "--engine.kind plain --engine.precision fp32",
}  # fmt: skip


def write_text(folder: Path) -> None:
    words = sentences(600, 0)
    sides = {"de": [german(one) for one in words], "en": [english(one) for one in words]}
    for task in ("mono", "para"):
        (folder / task).mkdir(parents=True)
    for code, lines in sides.items():  # a document of three lines each
        documents = "".join(f"{line}\n" + "\n" * (number % 3 == 2) for number, line in enumerate(lines))
        (folder / "mono" / f"{code}.txt.xz").write_bytes(lzma.compress(documents.encode()))
    with zipfile.ZipFile(folder / "para/en-de.txt.zip", "w") as file:
        for code, lines in sides.items():
            file.writestr(f"Text.en-de.{code}", "".join(f"{line}\n" for line in lines))


def test_in_small(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    for task in ("panx", "udpos"):
        write_entities(tmp_path / "eval" / task, sentences=20)
    for path in (tmp_path / "eval/udpos").iterdir():  # names and places are nouns
        path.write_text(path.read_text().replace("B-PER", "PROPN").replace("B-LOC", "NOUN").replace("\tO\n", "\tADJ\n"))

    def call(minutes: str) -> "subprocess.CompletedProcess[str]":
        words = [
            "bash",
            ROOT / "bench/at_scale.sh",
            "text",
            "eval",
            "out",
            minutes,
            "--own",
            "xlme: --optimizer.learning-rate 1e-3 --objective.generator-keep-fraction 0.25",
        ]
        place = environment(**SMALL, PYTHON=FORKED_PYTHON, **Python.forking())
        return subprocess.run(words, cwd=tmp_path, env=place, capture_output=True, text=True)

    first = call("0.05")  # three seconds: not even the first run
    assert first.returncode == 75 and "call it again with the same OUT" in first.stdout, first.stderr
    assert not (tmp_path / "out/compare/compare.json").exists()
    last = call("60")
    assert last.returncode == 0 and "entities, F1" in last.stdout and "call it again" not in last.stdout, last.stderr
    runs = read_results(tmp_path / "out/compare/compare.json")
    assert [run.system for run in runs] == ["xlmr_tlm", "xlme"]
    configs = [
        read_config(next((tmp_path / "out/compare/runs").glob(f"{name}-*/seed1")))["config"]
        for name in ("xlme", "xlmr_tlm")
    ]
    assert [config["optimizer"]["learning_rate"] for config in configs] == [1e-3, 5e-4]
    assert [config["objective"]["generator_keep_fraction"] for config in configs] == [0.25, 0.0]
    assert configs[1]["objective"]["mask_fraction"] == 0.15, "settings of ours, which --own replaces"
    assert all(run.scores.keys() == {"pairs", "pairs_centred", "pos", "ner"} for run in runs)


def test_each_system_has_its_settings(tmp_path: Path) -> None:
    """With `echo` in Python's place."""
    for recipes, own in (
        (
            "xlme xlmr_tlm",
            "--own xlme: --objective.generator-keep-fraction 0.15 xlmr_tlm: --objective.mask-fraction 0.3",
        ),
        ("xlmr_tlm xlme_all_tokens", "--own xlmr_tlm: --objective.mask-fraction 0.3"),
        ("xlme_all_tokens", ""),
        (
            "xlmr xlmr_tlm+xlme",
            "--own xlme: --objective.generator-keep-fraction 0.15 xlmr_tlm: --objective.mask-fraction 0.3",
        ),
    ):
        place = os.environ | {"PYTHON": "echo", "RECIPES": recipes}
        words = ["bash", ROOT / "bench/at_scale.sh", ".", ".", tmp_path / "out", "1", "--processes", "2"]
        done = subprocess.run(words, cwd=tmp_path, env=place, capture_output=True, text=True)
        assert f"--tuning.epochs 3 {own} --processes 2 -- ".replace("  ", " ") in done.stdout, done
