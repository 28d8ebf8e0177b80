"""The comparison, by its command: equal operations, scores of every run, the second call, tables, and what is
refused."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.finetune.tasks import write_entities
from tests.launch import python
from tests.rows import train_vocabulary, write_data
from xlme_ds.compare import __main__ as compare
from xlme_ds.compare.__main__ import plan_systems
from xlme_ds.compare.results import (
    RunScores,
    join_runs,
    mean_passes,
    read_results,
    read_scores,
)
from xlme_ds.compare.scoring import (
    _has_scores,
    _tests,
    data_of,
    data_sha256,
    pending_tests,
    record_if_scored,
    require_tests,
)
from xlme_ds.compare.summary import write_results
from xlme_ds.compare.systems import Budget, CompareSettings, own_settings, plan_system
from xlme_ds.data.schema import TASKS, Manifest, Shard, write_manifest
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.evaluate.heldout_text import losses
from xlme_ds.io.folders import lock_folder

BUDGETS = (2e8, 4e8)
SETTINGS = (
    "--engine.kind plain --engine.precision fp32 --optimizer.warmup-steps 1 --optimizer.learning-rate 1e-3 "
    "--data.micro-batch 2 "
    "--train.log-every 5 --model.width 16 --model.heads 2 --model.feed-forward 32 --model.discriminator-layers 2 "
    "--model.generator-layers 1 --model.max-positions 64 --model.init-std 0.1"
)
CHAIN = "xlmr_tlm+ernie_m"


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
    words = ["xlme_ds.compare", "--recipes", "xlme", CHAIN, "--budgets", *map(str, BUDGETS), "--rows", "4"]
    words += ["--own", "xlme: --optimizer.learning-rate 2e-3"]
    words += [*(word for name in ("data", "heldout", "out") for word in (f"--{name}", str(folder / name)))]
    entities = write_entities(folder / "panx", sentences=20)
    (entities / "test-sw.tsv").write_text((entities / "test-de.tsv").read_text().replace("B-PER", "B-LOC"))
    words += ["--ner", str(entities), "--tuning-seeds", "2"]
    words += ["--tuning=--engine.kind plain --tuning.epochs 1"]
    words += ["--", *SETTINGS.split(), "--model.vocabulary", str(vocabulary.size)]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return folder, words, done.stdout


def test_equal_operations(compared: tuple[Path, list[str], str]) -> None:
    runs = read_results(compared[0] / "out/compare.json")
    assert [(run.system, run.budget, run.seed) for run in runs] == [
        ("xlme", 2e8, 1), (CHAIN, 2e8, 1), ("xlme", 4e8, 1), (CHAIN, 4e8, 1),
    ]  # fmt: skip
    by_folder = {folder.name: folder for folder in (compared[0] / "out/runs").iterdir()}
    assert len(by_folder) == 6  # of two budgets, xlme and both parts of the chain
    for budget in BUDGETS:
        of_xlme, of_chain = (next(run for run in runs if (run.system, run.budget) == (name, budget))
                             for name in ("xlme", CHAIN))  # fmt: skip
        chain = next(name for name in by_folder if "+" in name and f"-{of_chain.steps // 2}+" in name)
        folders = [by_folder[f"xlme-{of_xlme.steps}"], by_folder[chain.split("+")[0]], by_folder[chain]]
        lines = [json.loads((folder / "seed1/metrics.jsonl").read_text().splitlines()[-1]) for folder in folders]
        spent = [line["flops_per_s"] / line["tokens_per_s"] * line["tokens"] for line in lines]
        assert spent[0] == pytest.approx(budget, rel=0.1) and sum(spent[1:]) == pytest.approx(budget, rel=0.1)
        assert (of_xlme.flops, of_chain.flops) == pytest.approx((spent[0], sum(spent[1:])))
        assert (of_xlme.tokens, of_chain.tokens) == (lines[0]["tokens"], lines[1]["tokens"] + lines[2]["tokens"])
        assert lines[0]["lr"] < 1e-3  # each budget's own schedule is at its end
        configs = [json.loads((folder / "seed1/config.json").read_text())["config"] for folder in folders]
        assert [config["optimizer"]["learning_rate"] for config in configs] == [2e-3, 1e-3, 1e-3]
        assert configs[2]["start"] == {
            "folder": str(folders[1] / "seed1"),
            "take": "encoder",
            "into": "both",
            "decoder": "",
        }
        assert configs[2]["seed"] == 1001
        assert [(config["data"]["mono_rows"], config["data"]["para_rows"]) for config in configs] == [(2, 2)] * 3


@pytest.mark.parametrize(
    ("recipe", "settings", "rows"),
    [("xlme", "", 8), ("xlme", "--data.mono-rows 8 --data.para-rows 0", 8), ("xlm", "", 4)],
)
def test_tokens_of_a_step_are_those_of_its_rows(recipe: str, settings: str, rows: int, tmp_path: Path) -> None:
    """A step of XLM reads the rows of one task, four or four."""
    words = [*SETTINGS.split(), "--model.vocabulary", "99", *settings.split()]
    (planned,) = plan_system(recipe, 1, Budget(1e9, 8, 32), words, {}, tmp_path).runs
    assert planned.step_tokens == rows * 32


def test_pairs_too_few_to_score_are_refused_before_training(
    compared: tuple[Path, list[str], str], tmp_path: Path
) -> None:
    folder, words, _ = compared
    for code in ("de", "en"):
        (tmp_path / f"X.en-de.{code}").write_text("kalo\nmiter\nunve\n")
    command = CompareSettings(("xlme",), (4e8,), folder / "data", folder / "heldout", tmp_path / "out", rows=4)
    with pytest.raises(ValueError, match="has no language with 5 pairs with English: name data with more pairs"):
        plan_systems(replace(command, pairs=tmp_path), words[words.index("--") + 1 :])


def test_scores_of_two_versions_of_a_test_are_not_averaged(tmp_path: Path) -> None:
    for seed, version in ((1, "a"), (2, "a"), (3, "b")):
        (tmp_path / f"pos/seed{seed}").mkdir(parents=True)
        content = {"format": 1, "languages": {"de": {"f1": 10.0 * seed}}, "files": {"test-de.tsv": version}}
        (tmp_path / f"pos/seed{seed}/scores.json").write_text(json.dumps(content))
    assert read_scores(tmp_path, 2, ["pos"])["scores"] == {"pos": 15.0}
    with pytest.raises(
        ValueError, match=r"seed3/scores\.json and \S+seed1/scores\.json have scores of different files"
    ):
        read_scores(tmp_path, 3, ["pos"])


def test_scores_are_per_cent_at_the_layer_that_a_test_quotes(tmp_path: Path) -> None:
    """The trained model's come first; retrieval is the mean of both directions, and English counts in no task."""
    tests = "pos", "ner-untrained", "pairs", "tatoeba", "align", "losses"
    assert not any(read_scores(tmp_path, 1, tests).values())
    for n, name in enumerate(("pairs", "tatoeba")):
        models = [
            {"layer": 1, "sets": {}, "overall": {
                "en_xx": [0.0, first], "xx_en": [0.0, first + 0.2],
                "en_xx_centred": [0.0, first + 0.4], "xx_en_centred": [0.0, first + 0.4],
            }} for first in (0.3 + n / 4, 0.1)
        ]  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps({"format": 1, "models": models}))
    models = [{"layer": layer, "overall": {"aer": [0.9, 0.25]}} for layer in (1, 0)]
    (tmp_path / "align.json").write_text(json.dumps({"format": 1, "models": models}))
    for name, f1 in (("pos", 20.0), ("ner-untrained", 5.0)):
        (tmp_path / name).mkdir()
        content = {"format": 1, "languages": {"de": {"f1": f1}, "en": {"f1": 99.0}, "sw": {"f1": f1 + 20}}}
        (tmp_path / name / "scores.json").write_text(json.dumps(content))
    found = read_scores(tmp_path, 1, tests)
    assert found["scores"] == pytest.approx(
        {"pos": 30, "align": 25, "pairs": 40, "pairs_centred": 70, "tatoeba": 65, "tatoeba_centred": 95}
    )
    of_both = {"pairs": 20, "pairs_centred": 50, "tatoeba": 20, "tatoeba_centred": 50}
    assert found["untrained"] == pytest.approx({"ner": 15, "align": 90} | of_both)
    assert read_scores(tmp_path, 1, ["align"])["scores"] == pytest.approx({"align": 25}), "of the tests asked for alone"


def test_scores_and_tables(compared: tuple[Path, list[str], str]) -> None:
    folder, _, said = compared
    runs = read_results(folder / "out/compare.json")
    for each in runs:
        assert each.scores.keys() == {"pairs", "pairs_centred", "ner"}
        folders = {"training": "data", "losses": "heldout", "pairs": "heldout", "ner": "panx"}
        folders |= {"ner-untrained": "panx"} if each.budget == 2e8 else {}
        hashes = dict(each.data)
        assert hashes.pop("--tuning for ner")
        assert hashes == {use: data_sha256(folder / name) for use, name in folders.items()}
        assert each.untrained.keys() == (set() if each.budget == 4e8 else {"pairs", "pairs_centred", "ner"})
        # not the losses of training, in which each system has masks of its own
        name = f"xlme-{each.steps}" if each.system == "xlme" else f"*-{each.steps // 2}+*"
        (place,) = (folder / "out/runs").glob(f"{name}/seed1")
        scored = losses([place], folder / "heldout")["models"][0]
        assert each.losses == {term: scored["overall"][term] for term in ("mlm", "tlm")}
        assert each.languages == {term: scored["languages"][term] for term in ("mlm", "tlm")}
    first = runs[0]
    place = folder / f"out/runs/xlme-{first.steps}/seed1"
    starts = []
    for score, name in ((first.scores["ner"], "ner"), (first.untrained["ner"], "ner-untrained")):
        folders = [place / "scores" / name / f"seed{seed}" for seed in (1, 2)]
        tuned = [json.loads((folder / "scores.json").read_text())["languages"] for folder in folders]
        others = [[languages[code]["f1"] for code in ("de", "sw")] for languages in tuned]
        assert score == pytest.approx(sum(map(sum, others)) / sum(map(len, others)))
        starts += [json.loads((folder / "config.json").read_text())["config"]["base"] for folder in folders]
    assert starts[0] == starts[1] != starts[2] == starts[3]
    assert first.languages["mlm"].keys() > {"en"}
    page = (folder / "out/compare.md").read_text()
    assert f"{CHAIN}, untrained" in page and "a tenfold" not in page  # two runs are no more than a line needs
    assert "Untrained models are fine-tuned for the first seed alone" in page
    assert "entities, F1" in said and (folder / "out/compare.svg").stat().st_size > 5000


def test_passes_are_counted_by_uses(tmp_path: Path) -> None:
    """100 uses of 40 pairs, of which four or five are in a row."""
    uses = {"de": {"available": 30, "used": 60}, "sw": {"available": 10, "used": 40}}
    shards = tuple(Shard(f"{number}.arrow", rows, 1, "") for number, rows in enumerate((16, 4)))
    counts = {"examples": 100, "by_language": uses}
    write_manifest(tmp_path, Manifest("encode", {}, 9, "", ("de", "sw"), shards, counts))
    assert mean_passes(tmp_path, 20) == 2.5 and mean_passes(tmp_path, 4) == 0.5
    (tmp_path / "older").mkdir()
    write_manifest(tmp_path / "older", Manifest("encode", {}, 9, "", ("de",), shards, {}))
    assert mean_passes(tmp_path / "older", 20) is None
    for task in TASKS:
        (tmp_path / task).mkdir()
        shutil.copy(tmp_path / "manifest.json", tmp_path / task)
    chain = plan_system(CHAIN, 1, Budget(1e9, 6, 32), [*SETTINGS.split(), "--model.vocabulary", "99"], {}, tmp_path)
    steps = [planned.config.train.steps for planned in chain.runs]
    assert min(steps) > 9 and len(steps) == 2
    read = RunScores.read(chain, tmp_path, 1, {})  # every step of both runs reads three rows of each task
    assert read.passes == {task: pytest.approx(3 * sum(steps) / 20 * 2.5) for task in TASKS}


def test_done_is_not_done_again(compared: tuple[Path, list[str], str]) -> None:
    done = run(*compared[1])
    assert done.returncode == 0 and "$ " not in done.stdout
    with lock_folder(compared[0] / "out"):
        done = run(*compared[1])
    assert done.returncode == 2 and "another process is still working in" in done.stderr and "$ " not in done.stdout
    assert (compared[0] / "out/compare.md").exists()


def test_data_are_known_by_names_and_bytes(tmp_path: Path) -> None:
    """Also where neither a name nor a size changes."""
    folders = [tmp_path / str(number) for number in range(5)]
    contents = ({"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1", "b": ""}, {"x/a": "1"})
    for folder, files in zip(folders, contents, strict=True):
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
    assert len(set(map(data_sha256, folders))) == len(folders)
    shutil.copytree(folders[0], tmp_path / "copy")
    (tmp_path / "copy/.a.swp").write_text("of an editor")
    assert data_sha256(tmp_path / "copy") == data_sha256(folders[0])
    (tmp_path / "links").mkdir()
    (tmp_path / "links/x").symlink_to(folders[0])
    assert data_sha256(tmp_path / "links") == data_sha256(folders[4])


@pytest.mark.parametrize("share", [0.4, 0.6, 1.4, 1.6])
def test_a_budget_is_met_to_the_nearest_step(tmp_path: Path, share: float) -> None:
    brief = ["--optimizer.warmup-steps", "0"]
    (planned,) = plan_system("xlme", 1, Budget(1e18, 8, 512), brief, {}, tmp_path).runs
    one = plan_system("xlme", 1, Budget((20 + share) * planned.step_flops, 8, 512), brief, {}, tmp_path)
    assert one.runs[0].config.train.steps == 20 + round(share)
    assert one.runs[0].step_flops == planned.step_flops
    both = plan_system("xlmr_tlm+ernie_m", 1, Budget(1e18, 8, 512), brief, {}, tmp_path)
    spent = sum(planned.config.train.steps * planned.step_flops for planned in both.runs)
    assert spent == pytest.approx(1e18, abs=sum(planned.step_flops for planned in both.runs) / 2)
    assert one.runs[0].config.train.save_every == math.ceil((20 + round(share)) / 10), "a tenth of its steps"


def test_a_chain_of_one_objective_takes_all_of_the_model_before(tmp_path: Path) -> None:
    chain = plan_system("xlme+xlme", 3, Budget(1e18, 8, 512), ["--optimizer.warmup-steps", "0"], {}, tmp_path)
    starts, seeds = ([get(planned.config) for planned in chain.runs] for get in (lambda c: c.start, lambda c: c.seed))
    assert [start.take for start in starts] == ["all", "all"] and seeds == [3, 1003]
    assert [start.folder for start in starts] == ["", str(chain.runs[0].folder)]


def test_what_was_made_otherwise_is_not_taken_for_this(compared: tuple[Path, list[str], str], tmp_path: Path) -> None:
    folder, words, _ = compared
    settings = words[words.index("--") + 1 :]
    command = CompareSettings(
        ("xlme", CHAIN), BUDGETS, folder / "data", folder / "heldout", folder / "out", rows=4,
        own=("xlme: --optimizer.learning-rate 2e-3",), ner=folder / "panx", tuning_seeds=2,
        tuning="--engine.kind plain --tuning.epochs 1",
    )  # fmt: skip
    systems = plan_systems(command, settings)
    assert not [name for one in systems for name, _ in pending_tests(one, command)]
    with pytest.raises(
        ValueError, match=r"started with optimizer.learning_rate 0.002, this call has 0.001: the run is"
    ):
        plan_systems(replace(command, own=()), settings)
    twice = replace(command, rows=8, budgets=tuple(2 * budget for budget in BUDGETS))  # as many steps
    with pytest.raises(ValueError, match=r"was started with data.mono_rows 2, this call has 4"):
        plan_systems(twice, settings)
    vocabulary = Vocabulary(folder / "data" / "vocab")
    other = write_data(tmp_path / "other", rows=40, vocabulary=vocabulary.size, seed=7, sha256=vocabulary.sha256)
    (other / "vocab").symlink_to(folder / "data" / "vocab")
    for name, option in (("data_folder", "--data"), ("heldout", "--heldout")):
        with pytest.raises(ValueError, match=f"was started with another {option}: give the same"):
            plan_systems(replace(command, **{name: other}), settings)
    # Evaluation is done again; fine-tuning refuses what it was not started with.
    assert [name for name, _ in pending_tests(systems[0], replace(command, pairs=other))] == ["pairs"]
    (folder / "panx/more").write_text("a file of the test")
    data_sha256.cache_clear()  # as in another call
    assert [name for name, _ in pending_tests(systems[0], command)] == ["ner", "ner-untrained"]
    (folder / "panx/more").unlink()
    data_sha256.cache_clear()
    dropout = " --tuning.dropout 0.2"
    otherwise = replace(command, tuning=command.tuning + dropout)
    assert [name for name, _ in pending_tests(systems[0], otherwise)] == ["ner", "ner-untrained"]
    done = run(*(word + dropout if word.startswith("--tuning=") else word for word in words))
    assert done.returncode == 2 and "was started with tuning.dropout 0.1, this call has 0.2" in done.stderr


def test_held_out_text_without_pairs_has_losses_of_one_kind(
    compared: tuple[Path, list[str], str], tmp_path: Path
) -> None:
    folder = compared[0]
    (tmp_path / "text").mkdir()
    for name in ("mono", "vocab"):
        (tmp_path / "text" / name).symlink_to(folder / "heldout" / name)
    place = next((folder / "out/runs").glob("xlme-*/seed1"))
    (tmp_path / "losses.json").write_text(json.dumps({"format": 1, **losses([place], tmp_path / "text")}))
    found = read_scores(tmp_path, 1, ["losses"])
    assert found["losses"].keys() == found["languages"].keys() == {"mlm"}


def test_runs_of_two_places_count_once() -> None:
    first, second = (RunScores("xlme", 1e14, seed, 1e14, 10, 1e6, {}, {}, {}, {"ner": 9.0}, {}) for seed in (1, 2))
    assert join_runs([("here", first), ("a", first), ("a", second), ("b", second)]) == [first, second]
    with pytest.raises(ValueError, match=r"here and b have different runs of xlme with 1e\+14 operations and seed 1"):
        join_runs([("here", first), ("b", replace(first, scores={"ner": 9.5}))])


def test_runs_with_other_settings_are_no_seeds_of_one_system(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=8)
    small = [*SETTINGS.split(), "--model.vocabulary", "99"]

    def read(seed: int, rows: int, *settings: str) -> RunScores:
        budget = Budget(1e9 * rows, rows, 32)  # as many steps, whatever the rows
        system = plan_system(CHAIN, seed, budget, [*small, *settings], {}, tmp_path / str(rows))
        return replace(RunScores.read(system, tmp_path / "data", 1, {"training": "a", "align": "b"}), budget=1e9)

    first, second = read(1, 4), read(2, 4)
    assert join_runs([("here", first), ("there", second)]) == [first, second]
    write_results([replace(first, scores={"pairs": 9.0})], tmp_path)
    (stored,) = read_results(tmp_path / "compare.json")
    assert [settings["data.mono_rows"] for settings in stored.settings] == [2, 2]
    at = small.index("--engine.precision")
    del small[at : at + 2]  # auto chooses fp32 too
    assert join_runs([("here", first), ("there", read(2, 4))]) == [first, second]
    for other, message in (
        (read(2, 8), "data.mono_rows 2 and 4: leave one of them out"),
        (read(2, 4, "--model.dropout", "0.2"), "model.dropout 0.0 and 0.2: leave"),
        (replace(second, settings=[], tokens=9.0), "with tokens .* and 9.0: leave"),  # of an earlier version
    ):
        with pytest.raises(ValueError, match=rf"here and there have runs of .* with 1e\+09 operations, .*{message}"):
            join_runs([("here", stored), ("there", other)])
    for data, message in (
        ({"training": "c"}, "training data"),
        ({"training": "a", "align": "c"}, "data for the test align"),
    ):
        other = replace(second, system="xlme", data=data)
        with pytest.raises(ValueError, match=f"here and there have different {message}: leave one of them out"):
            join_runs([("here", stored), ("there", other)])


def test_scores_of_other_fine_tuning_are_not_compared(tuned: CompareSettings, tmp_path: Path) -> None:
    small = [*SETTINGS.split(), "--model.vocabulary", "120"]

    def tuned_with(name: str, tuning: str) -> RunScores:
        system = plan_system(name, 1, Budget(4e8, 4, 32), small, {}, tmp_path)
        data = data_of(system, replace(tuned, tuning=tuning))
        return RunScores(name, 4e8, 1, 4e8, 9, 1e6, {}, {}, {}, {"ner": 9.0}, {}, data=data)

    # 10 epochs are what the task's published settings have.
    first, same = tuned_with("xlme", ""), tuned_with("xlmr", "--tuning.epochs 10 --tuning.micro-batch 2")
    assert join_runs([("here", first), ("there", same)]) == [first, same]
    with pytest.raises(ValueError, match="here and there have different --tuning for ner: leave one of them out"):
        join_runs([("here", first), ("there", tuned_with("xlmr", "--tuning.epochs 1"))])


def test_other_runs_that_cannot_be_joined_are_refused_before_training(
    tuned: CompareSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results([RunScores("xlme", 4e8, 2, 4e8, 9, 1e6, {}, {}, {}, {"pairs": 9.0}, {})], tmp_path)
    words = ["--recipes", "xlme", "--budgets", "4e8", "--rows", "4", "--data", str(tuned.data_folder)]
    words += ["--heldout", str(tuned.heldout), "--out", str(tmp_path / "out"), "--also", str(tmp_path / "compare.json")]
    with pytest.raises(SystemExit) as left:
        compare.main([*words, "--", *SETTINGS.split(), "--model.vocabulary", "120"])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and re.search(r"runs of xlme with 4e\+08 operations, but with steps \d+ and 9: ", line)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budgets": (float("inf"),)}, "--budgets has inf: it must be above 0 and finite"),
        ({"budgets": (float("nan"),)}, "--budgets has nan: it must be above 0 and finite"),
        (
            {"budgets": (1e9, 1.0001e9)},
            r"--budgets 1e\+09 and 1.0001e\+09 give xlme the same number of steps: leave one",
        ),
        ({"align": Path("nowhere")}, "nowhere"),
        ({"tatoeba": Path("nowhere")}, "nowhere does not exist: name the folder of LASER"),
        ({"pairs": Path("nowhere")}, "nowhere does not exist: name a data folder with para/, or a folder of text"),
        ({"tuning": "--tuning.epochs '1"}, "--tuning --tuning.epochs '1: No closing quotation"),
        ({"tuning": "--train.steps 5"}, "--train.steps is for pre-training and has no effect here"),
        ({"tuning": "--tuning.epochs 1"}, "--tuning and --tuning-seeds are for --pos and --ner"),
        ({"tuning_seeds": 2}, "--tuning and --tuning-seeds are for --pos and --ner"),
        ({"tuning": "--grid"}, "--tuning --grid may have only settings of --tuning., --engine. and --train."),
    ],
)
def test_tests_that_would_fail_are_refused_before_training(
    changes: dict[str, Any], message: str, compared: tuple[Path, list[str], str], tmp_path: Path
) -> None:
    folder, words, _ = compared
    command = CompareSettings(("xlme",), (4e8,), folder / "data", folder / "heldout", tmp_path, rows=4)
    with pytest.raises(ValueError, match=message):
        plan_systems(replace(command, **changes), words[words.index("--") + 1 :])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> CompareSettings:
    """A comparison with a test of entities."""
    folder = tmp_path_factory.mktemp("tuned")
    vocabulary = train_vocabulary(folder / "data/vocab")
    data, heldout = (
        write_data(folder / name, rows=16, vocabulary=vocabulary.size, sha256=vocabulary.sha256, seed=seed)
        for seed, name in enumerate(("data", "heldout"))
    )
    (heldout / "vocab").symlink_to(data / "vocab")
    write_entities(folder / "panx", sentences=20)
    return CompareSettings(("xlme",), (4e8,), data, heldout, folder / "out", rows=4, ner=folder / "panx")


@pytest.mark.parametrize(("languages", "missing"), [("de en", "fr"), ("de en fr", "sw")])
def test_tests_in_languages_that_a_model_lacks_are_refused_before_training(
    languages: str, missing: str, tuned: CompareSettings, tmp_path: Path
) -> None:
    """The held-out pairs are in German and French, the entities in English and Swahili."""
    entities = write_entities(tmp_path / "panx", sentences=20)
    for name in ("train-de", "test-de"):
        (entities / f"{name}.tsv").rename(entities / f"{name.replace('de', 'sw')}.tsv")
    settings = f"{SETTINGS} --model.vocabulary 120 --model.language-embeddings {languages}"
    with pytest.raises(ValueError, match=f"model.language_embeddings has no {missing}, only {languages}: leave out"):
        plan_systems(replace(tuned, ner=entities), settings.split())


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        ("--tuning.train-languages sw", "no training set of sw in the data, only of de, en"),
        ("--tuning.train-languages de --tuning.train-examples 9 --tuning.held-out", "too few to hold out every tenth"),
        ("--tuning.learning-rate -1", "tuning.learning_rate is -1.0: it must"),
        ("--tuning.max-tokens 8", "tuning.max_tokens 8 leaves no room for text"),
        ("--tuning.warmup 2", "optimizer.warmup_steps"),
        ("--train.save-every -1", "train.save_every is -1: it must"),
        ("--engine.deepspeed auto", "engine.deepspeed auto is for pre-training"),
    ],
)
def test_fine_tuning_that_would_fail_is_refused_before_training(
    tuning: str, message: str, tuned: CompareSettings
) -> None:
    with pytest.raises(ValueError, match=message):
        require_tests(replace(tuned, tuning=tuning))


def test_fine_tuning_reads_the_training_sets_that_its_settings_name(tuned: CompareSettings, tmp_path: Path) -> None:
    shutil.copytree(tuned.ner or "", tmp_path / "panx")
    (tmp_path / "panx/train-en.tsv").write_text("kalo\tnone\n")
    with pytest.raises(ValueError, match=r"train-en\.tsv, line 1: tag 'none' is none of"):
        require_tests(replace(tuned, ner=tmp_path / "panx"))
    (tmp_path / "panx/train-en.tsv").unlink()
    require_tests(replace(tuned, ner=tmp_path / "panx", tuning="--tuning.train-languages de"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipes": ("xlme", "xlmr", "xlme")}, "--recipes xlme xlmr xlme names a system twice"),
        ({"recipes": ("xlme", "a+xlmr")}, "there is no recipe 'a'"),
        ({"budgets": (1e9, 2e9, 1e9)}, "--budgets names an amount twice"),
        ({"budgets": (1e9, 0.0)}, "--budgets has 0: it must be above 0"),
        ({"budgets": (1e9, -1.0)}, "--budgets has -1: it must be above 0"),
        ({"seeds": (1, 0)}, "--seeds has 0: it must be at least 1"),
        ({"rows": 0}, "--rows is 0: it must be at least 1"),
        ({"processes": 0}, "--processes is 0: it must be at least 1"),
        ({"tuning_seeds": 0}, "--tuning-seeds is 0: it must be at least 1"),
    ],
)
def test_numbers_are_refused_before_data_are_read(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    none = tmp_path / "none"
    with pytest.raises(ValueError, match=message):
        plan_systems(replace(CompareSettings(("xlme",), (1e9, 2e9), none, none, none), **changes), [])


def test_gpus_that_the_user_did_not_choose_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(ValueError, match=r"--processes 2 takes the machine's first GPUs, not those of CUDA.*=2,3"):
        plan_systems(CompareSettings(("xlme",), (1e9,), *[tmp_path / "none"] * 3, processes=2), [])


def test_runs_of_other_folders_are_shown_with_these(tmp_path: Path) -> None:
    def made(system: str, budget: float, seed: int, score: float, error: float) -> RunScores:
        read, untrained = {"para": 0.25, "mono": 1.5}, {"ner": 3.25} if budget < 1e15 and seed == 1 else {}
        scores = {"ner": score, "align": error}
        return RunScores(
            system, budget, seed, budget * 1.001, 10, 2.5e6, read, {"mlm": 5.0 + seed}, {}, scores, untrained
        )

    here = [made("xlme", 1e14, seed, 10 + seed / 5, 80 - seed / 5) for seed in (1, 2)]
    here += [made("xlmr_tlm", 1e14, seed, 13 + seed / 5, 70 - seed / 5) for seed in (1, 2)]
    here += [made("steep", 1e14, seed, 1 + seed / 5, 90 - seed / 5) for seed in (1, 2)]
    here += [made("even", 1e14, seed, 5 + seed / 5, 90 - seed / 5) for seed in (1, 2)]
    there = [made("xlme", 1e15, 1, 16.3, 67.7), made("xlmr_tlm", 1e15, 1, 17.3, 65.7)]
    there += [made("steep", 1e15, 1, 27.3, 59.7), made("even", 1e15, 1, 11.3, 77.7)]
    (tmp_path / "there").mkdir()
    write_results(there, tmp_path / "there")
    shown = write_results([*here, *read_results(tmp_path / "there/compare.json")], tmp_path)
    assert [asdict(run) for run in read_results(tmp_path / "compare.json")] == [asdict(run) for run in (*here, *there)]
    scores, growth = shown
    names = ("xlme", "xlmr_tlm", "steep", "even")
    assert [row[:3] for row in scores.rows if row[0]] == [
        *(["1e+14", name, "2"] for name in names), *(["1e+15", name, "1"] for name in names),
    ]  # fmt: skip
    read = ["2.5", "1.50, 0.25"]
    assert scores.rows[0][3:] == [*read, "6.50 (6.00 to 7.00)", "10.3 (10.2 to 10.4)", "79.7 (79.6 to 79.8)"]
    assert scores.rows[1] == ["", "xlme, untrained", "1", "0", "", "", "3.2", ""]
    assert scores.rows[-1][3:] == [*read, "6.00", "11.3", "77.7"]
    by_name = {row[0]: row[1:] for row in growth.rows}
    assert by_name["xlme, a tenfold of operations"][0].startswith("+6.0 ±")
    # 3 points behind at 1e14 and 1 at 1e15: two more points, two more tenfolds; the same for errors, which fall.
    entities, errors = by_name["xlme against xlmr_tlm"]
    assert entities.startswith("ahead from 3e15 (") and errors.startswith("ahead from 2e15 (")
    # Steeper by 20 points a tenfold from 9 points behind, by 18 from 10.3 of an error rate.
    entities, errors = by_name["xlme against steep"]
    assert entities.startswith("behind from 3e14 (") and errors.startswith("behind from 4e14 (")
    assert by_name["xlme against even"] == ["the slopes cannot be told apart"] * 2
    (tmp_path / "there/compare.json").write_text('{"systems": []}')
    with pytest.raises(ValueError, match=r"compare\.json has format None, this version reads 1: make it again"):
        read_results(tmp_path / "there/compare.json")
    (tmp_path / "there/compare.json").write_text('{"format": 1, "systems": []}')
    with pytest.raises(ValueError, match=r"compare\.json is not a compare\.json of this version"):
        read_results(tmp_path / "there/compare.json")


def test_data_that_do_not_fit_are_refused_before_anything_runs(
    compared: tuple[Path, list[str], str], tmp_path: Path
) -> None:
    folder, words, _ = compared
    command = CompareSettings(("xlme", "xlm"), (1e9,), folder / "data", folder / "heldout", tmp_path, rows=4)
    with pytest.raises(
        ValueError, match=r"was mixed with --layout xlme, but model.layout is xlm: set model.layout to xlme"
    ):
        plan_systems(command, words[words.index("--") + 1 :])
    assert not list(tmp_path.iterdir())


def test_what_predicts_no_masked_tokens_is_not_tested_for_it(
    compared: tuple[Path, list[str], str], tmp_path: Path
) -> None:
    folder, words, _ = compared
    command = CompareSettings(("xlme", "xlmr_tlm"), (4e8,), folder / "data", folder / "heldout", tmp_path, rows=4)
    command = replace(command, own=("xlme: --objective.name rts",))
    found = [
        [name for name, _ in pending_tests(one, command)]
        for one in plan_systems(command, words[words.index("--") + 1 :])
    ]
    assert found == [["pairs"], ["losses", "pairs"]]


def test_which_tests_the_untrained_models_have(tmp_path: Path) -> None:
    """All of the smallest budget, but fine-tuning, which takes longest, of the first seed alone; losses never."""
    data = {name: tmp_path / name for name in ("heldout", "tatoeba", "align", "pos", "ner")}
    settings = CompareSettings(
        ("xlme",), (2e18, 1e18), tmp_path / "data", out=tmp_path, tuning="--tuning.epochs 2", tuning_seeds=2, **data
    )

    def asked(budget: float, seed: int) -> dict[str, list[str]]:
        one = plan_system("xlme", seed, Budget(budget, 8, 512), ["--optimizer.warmup-steps", "0"], {}, tmp_path)
        return dict(_tests(one, settings))

    evaluated, tuned = ["losses", "pairs", "tatoeba", "align"], ["pos", "ner"]
    for budget, seed, random in ((1e18, 1, evaluated[1:]), (1e18, 2, evaluated[1:]), (2e18, 1, [])):
        found = asked(budget, seed)
        untrained = ["pos-untrained", "ner-untrained"] if (budget, seed) == (1e18, 1) else []
        assert list(found) == [*evaluated, *tuned, *untrained]
        assert [name for name, command in found.items() if "--random" in command] == [*random, *untrained]
    for name, command in asked(1e18, 1).items():
        task = name.removesuffix("-untrained")
        where = command[command.index("--data") + 1]
        assert where == str(data["heldout" if task in ("losses", "pairs") else task])
        if task in tuned:
            assert command[-5:] == ["--seeds", "1", "2", "--tuning.epochs", "2"]
            assert command[command.index("--out") + 1].endswith(f"seed1/scores/{name}")
    system = plan_system("xlme", 1, Budget(1e18, 8, 512), ["--optimizer.warmup-steps", "0"], {}, tmp_path)
    for seed in (1, 2):
        assert not _has_scores(system, "pos", settings), "until all seeds are scored"
        (folder := system.model_folder / f"scores/pos/seed{seed}").mkdir(parents=True)
        (folder / "scores.json").write_text("{}")
    assert _has_scores(system, "pos", settings)
    settings = replace(settings, pairs=tmp_path / "other")
    assert str(tmp_path / "other") in asked(1e18, 1)["pairs"] and str(data["heldout"]) in asked(1e18, 1)["losses"]


def test_what_was_stopped_ends_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run without its last step, and a test without its scores, which is not recorded as done."""
    data = {name: tmp_path / name for name in ("data", "heldout", "align")}
    settings = CompareSettings("xlme", (1e18, 2e18), data["data"], data["heldout"], tmp_path, align=data["align"])
    system = plan_system("xlme", 1, Budget(2e18, 8, 512), ["--optimizer.warmup-steps", "0"], {}, tmp_path)
    called: list[list[str]] = []
    monkeypatch.setattr(compare, "run", lambda words, *_, **__: called.append(words))
    for number in (1, 2):
        with pytest.raises(SystemExit) as left:
            compare._train_and_test(system, settings)
        assert left.value.code == 1 and len(called) == number
        system.model_folder.mkdir(parents=True, exist_ok=True)
        (system.model_folder / "finished.json").touch()
    assert "xlme_ds.pretrain" in called[0] and "losses" in called[1]
    assert "xlme_ds.evaluate was stopped before it wrote its scores: give the same" in capsys.readouterr().err
    commands = dict(pending_tests(system, settings))
    assert list(commands) == ["losses", "pairs", "align"]
    assert not record_if_scored(system, "pairs", commands["pairs"], settings) and list(pending_tests(system, settings))
    for name in ("pairs", "losses"):
        (system.model_folder / "scores").mkdir(exist_ok=True)
        (system.model_folder / f"scores/{name}.json").touch()
        assert record_if_scored(system, name, commands[name], settings)
    assert [name for name, _ in pending_tests(system, settings)] == ["align"]


def test_seeds_are_a_number_for_each_budget(compared: tuple[Path, list[str], str], tmp_path: Path) -> None:
    folder, words, _ = compared
    command = CompareSettings(("xlme",), BUDGETS, folder / "data", folder / "heldout", tmp_path, rows=4, seeds=(2, 1))
    settings = words[words.index("--") + 1 :]
    found = plan_systems(command, settings)
    assert [(one.budget, one.seed) for one in found] == [(2e8, 1), (2e8, 2), (4e8, 1)]
    assert [one.runs[0].config.seed for one in found] == [1, 2, 1] and len({one.model_folder for one in found}) == 3
    with pytest.raises(ValueError, match="--seeds has 3 numbers for 2 budgets: give one, or one for each"):
        plan_systems(replace(command, seeds=(1, 1, 1)), settings)


@pytest.mark.parametrize(
    ("name", "budget", "rows", "message"),
    [
        ("xlme+nothing", 1e18, 4096, "there is no recipe 'nothing': choose one of quickstart, base, "),
        (
            "xlmr+xlme",
            1e21,
            4096,
            "xlme has model.relative_bias gated, but starts from xlmr, which has none: give both the same",
        ),
        ("xlme", 1e6, 4096, "are less than a step of xlme"),
        ("xlme", 1e15, 4096, r"1e\+15 operations buy 1 step of xlme, and .*: shorten .*, or raise --budgets"),
        ("xlme", 1e18, 7, "xlme reads 2048 rows of text for every 2048 rows of pairs, but --rows 7 cannot be divided"),
    ],
)
def test_what_cannot_be_compared(name: str, budget: float, rows: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        plan_system(name, 1, Budget(budget, rows, 512), [], {}, tmp_path)
    for given in ("--train.steps", "--train.save-every", "--train.save_every", "--seed"):
        flag = given.replace("_", "-")
        with pytest.raises(ValueError, match=f"{flag} follows from --budgets and --seeds: leave {flag} out"):
            plan_system("xlme", 1, Budget(1e18, 8, 512), [], {"xlme": [f"{given}=5"]}, tmp_path)
    with pytest.raises(ValueError, match=r"xlme has 4 \+ 0 rows in a step, but --rows says 8: leave"):
        plan_system("xlme", 1, Budget(1e18, 8, 512), ["--data.para-rows", "0"], {}, tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["xlme --seed 1"], 'write "RECIPE: SETTINGS"'),
        (["xlm: --seed 1"], "--own names xlm, which is not in --recipes: name one of xlme, xlmr, ernie_m"),
        (["xlme: --seed 1", "xlme: --seed 2"], "--own names xlme twice"),
        (["xlme: --x 'a"], "--own xlme: --x 'a: No closing quotation"),
    ],
)
def test_own_settings_name_a_recipe(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_settings(words, ["xlme", "xlmr+ernie_m"])
    assert own_settings(["ernie_m: --a 1"], ["xlme", "xlmr+ernie_m"]) == {"ernie_m": ["--a", "1"]}
