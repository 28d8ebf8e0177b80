"""The comparison, by its command: equal operations, scores on the way, the second call, and how the table is read
off."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.finetune.tasks import write_entities
from tests.launch import python
from tests.rows import train_vocabulary, write_data
from xlme_ds.compare.__main__ import CompareSettings, planned
from xlme_ds.compare.results import Value, overtaken
from xlme_ds.compare.systems import Budget, system
from xlme_ds.folders import lock

BUDGET = 4e8
SETTINGS = (
    "--engine.kind plain --engine.precision fp32 --optimizer.warmup-steps 1 --optimizer.learning-rate 1e-3 "
    "--data.micro-batch 2 "
    "--train.log-every 5 --model.width 16 --model.heads 2 --model.feed-forward 32 --model.discriminator-layers 2 "
    "--model.generator-layers 1 --model.max-positions 64 --model.init-std 0.1"
)


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return python("-m", *words)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """The folder, the command's arguments, and what its first call said."""
    folder = tmp_path_factory.mktemp("compare")
    vocabulary = train_vocabulary(folder / "data" / "vocab")
    for name, rows in (("data", 40), ("heldout", 16)):
        write_data(folder / name, rows=rows, vocabulary=vocabulary.size, seed=rows, sha256=vocabulary.sha256)
    (folder / "heldout" / "vocab").symlink_to(folder / "data" / "vocab")
    words = [
        "xlme_ds.compare",
        "--recipes",
        "xlme,xlmr_tlm+ernie_m",
        "--budget",
        str(BUDGET),
        "--rows",
        "4",
        "--points",
        "2",
    ]
    words += [*(word for name in ("data", "heldout", "out") for word in (f"--{name}", str(folder / name)))]
    words += [
        "--ner",
        str(write_entities(folder / "panx", sentences=20)),
        "--tuning=--engine.kind plain --tuning.epochs 1",
    ]
    words += ["--", *SETTINGS.split(), "--model.vocabulary", str(vocabulary.size)]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return folder, words, done.stdout


def test_equal_operations(compared: tuple[Path, list[str], str]) -> None:
    runs = compared[0] / "out" / "runs"
    of_xlme, *chain = sorted(runs.iterdir())
    assert [folder.name.rsplit("-", 1)[0] for folder in (of_xlme, *chain)] == [
        "xlme",
        "xlmr_tlm",
        f"{chain[0].name}+ernie_m",
    ]
    lines = [json.loads((folder / "seed1/metrics.jsonl").read_text().splitlines()[-1]) for folder in (of_xlme, *chain)]
    spent = [line["flops_per_s"] / line["tokens_per_s"] * line["tokens"] for line in lines]
    configs = [json.loads((folder / "seed1/config.json").read_text())["config"] for folder in (of_xlme, *chain)]
    assert [config["train"]["steps"] for config in configs] == [
        int(folder.name.rsplit("-", 1)[1]) for folder in (of_xlme, *chain)
    ]
    assert spent[0] == pytest.approx(BUDGET, rel=0.1) and spent[1] + spent[2] == pytest.approx(BUDGET, rel=0.1)
    assert configs[2]["start"] == {"folder": str(chain[0] / "seed1"), "take": "encoder", "into": "both"}
    assert configs[2]["seed"] == 1001
    assert [(config["data"]["mono_rows"], config["data"]["para_rows"]) for config in configs] == [(2, 2)] * 3


def test_points_hold_the_models_of_their_steps(compared: tuple[Path, list[str], str]) -> None:
    folder = next((compared[0] / "out" / "runs").glob("xlme-*")) / "seed1"
    half, end = (load_file(point / "model/model.safetensors") for point in sorted((folder / "points").iterdir()))
    final = load_file(folder / "model/model.safetensors")
    assert final.keys() == end.keys() and all(torch.equal(end[name], value) for name, value in final.items())
    assert half.keys() == end.keys() and not torch.equal(half["embedding_0"], end["embedding_0"])


def test_tables(compared: tuple[Path, list[str], str]) -> None:
    folder, _, said = compared
    found = json.loads((folder / "out/compare.json").read_text())
    assert [result["name"] for result in found["systems"]] == ["xlme", "xlmr_tlm+ernie_m"]
    for result in found["systems"]:
        assert len(result["curves"]["pairs"]) == 2 and len(result["curves"]["ner"]) == 1
        assert result["untrained"].keys() == {"pairs", "pairs_centred"}
        flops = [value[0] for value in result["curves"]["pairs"]]
        assert flops[1] == pytest.approx(2 * flops[0], rel=0.1)  # to the nearest step
    page = (folder / "out/compare.md").read_text()
    assert "xlmr_tlm+ernie_m, untrained" in page and "Share of the budget at which xlme has the final score" in page
    assert "entities, F1" in said and (folder / "out/compare.svg").stat().st_size > 5000


def test_done_is_not_done_again(compared: tuple[Path, list[str], str]) -> None:
    done = run(*compared[1])
    assert done.returncode == 0 and "$ " not in done.stdout
    with lock(compared[0] / "out"):
        done = run(*compared[1])
    assert done.returncode == 2 and "another process is still working in" in done.stderr and "$ " not in done.stdout
    assert (compared[0] / "out/compare.md").exists()


def test_overtaken() -> None:
    curve = [Value(flops, mean, mean, mean) for flops, mean in ((1e10, 10.0), (1e12, 30.0), (4e12, 20.0))]
    assert overtaken(curve, 5.0, True) == 1e10
    assert overtaken(curve, 20.0, True) == pytest.approx(1e11)  # half of the way over the logarithm
    assert overtaken(curve, 31.0, True) is None
    assert overtaken(curve, 9.0, False) is None
    assert overtaken(curve[1:], 25.0, False) == pytest.approx(2e12)


def test_data_that_do_not_fit_are_refused_before_anything_runs(
    compared: tuple[Path, list[str], str], tmp_path: Path
) -> None:
    folder, words, _ = compared
    command = CompareSettings("xlme,xlm", 1e9, folder / "data", folder / "heldout", tmp_path, rows=4)
    with pytest.raises(ValueError, match=r"was mixed with --layout xlme, model.layout is xlm: set it to xlme"):
        planned(command, words[words.index("--") + 1 :])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "budget", "rows", "message"),
    [
        ("xlme+nothing", 1e18, 4096, "recipe nothing is not known"),
        (
            "xlmr+xlme",
            1e21,
            4096,
            "xlme starts from xlmr, whose model.relative_bias is none and its own gated: give both the same",
        ),
        ("xlme", 1e6, 4096, "are less than 4 steps of xlme"),
        ("xlme", 1e18, 7, "xlme reads 2048 rows of text to 2048 of pairs: --rows 7 does not divide so"),
    ],
)
def test_what_cannot_be_compared(name: str, budget: float, rows: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        system(name, 1, Budget(budget, 4, rows, 512), [], tmp_path)
