"""Settings in a file, the command that prints one, and the short help."""

import json
import math
import re
import tomllib
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path

import pytest

from tests.launch import python
from xlme_ds.config import OptimizerConfig, RunConfig
from xlme_ds.io.files import write_versioned
from xlme_ds.io.toml import to_toml
from xlme_ds.plan.__main__ import PlanSettings
from xlme_ds.recipes import RECIPES, SUMMARIES, recipe
from xlme_ds.settings_file import read_values, with_values


def settings(*words: str) -> RunConfig:
    from xlme_ds.cli import parse

    return parse("plan", PlanSettings, "", list(words)).run


def saved(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_was_printed_is_the_recipe(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "run.toml", to_toml(recipe(name)))
    assert settings("--config", str(path)) == recipe(name)


def test_settings_that_toml_writes_otherwise_than_json(tmp_path: Path) -> None:
    run = replace(
        recipe("xlm_mt"), name='мир "\\\n\x7f Infinity', optimizer=OptimizerConfig(clip=math.inf, learning_rate=1e-7)
    )
    assert settings("--config", str(saved(tmp_path / "a.toml", to_toml(run)))) == run


def test_every_setting_is_below_its_help() -> None:
    text = to_toml(recipe("base"))
    sections = [getattr(recipe("base"), field.name) for field in fields(RunConfig)]
    names = sum(len(fields(section)) if is_dataclass(section) else 1 for section in sections)
    blocks = [block.split("\n") for block in text.removesuffix("\n").split("\n\n")]
    assert len(blocks) == names > 80
    assert all(lines[0 if lines[0][0] == "#" else 1].startswith("# ") and " = " in lines[-1] for lines in blocks)
    assert tomllib.loads(text)["model"]["layout"] == "xlme" and "One of xlme, xlm." in text.replace("\n# ", " ")
    assert all(len(line) <= 112 for line in text.split("\n") if line.startswith("#"))


def test_the_printed_file_begins_with_its_command_in_one_line() -> None:
    text = python("-m", "xlme_ds", "config", "--recipe", "base", "--name", "a\nb").stdout
    assert text.startswith("# xlme config --recipe base --name 'a?b' (xlme_ds ")
    assert tomllib.loads(text)["name"] == "a\nb" and "# Default: 768." not in text
    assert "Default: 16." in text, "of data.micro_batch, which the recipe sets to 64"


def test_the_command_prints_it_with_the_overrides() -> None:
    done = python("-m", "xlme_ds", "config", "--recipe", "quickstart", "--train.steps", "7000")
    assert tomllib.loads(done.stdout)["train"]["steps"] == 7000, done.stderr
    wrong = python("-m", "xlme_ds", "config", "--recipe", "quickstart", "--train.steps", "2")
    assert wrong.returncode == 2 and "optimizer.warmup_steps" in wrong.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [("# nothing\n", "has no settings: name another file"), ('recipe = "bsae"\n', ": there is no recipe 'bsae'")],
)
def test_a_file_without_settings_or_with_an_unknown_recipe_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"my\.toml ?{said}"):
        settings("--config", str(tmp_path / "my.toml"))


def test_a_runs_config_json_without_settings_is_refused(tmp_path: Path) -> None:
    write_versioned(tmp_path / "config.json", {"config": None})
    with pytest.raises(ValueError, match=r"config\.json has no settings under `config`: restore the file"):
        settings("--config", str(tmp_path / "config.json"))


def test_a_runs_config_json_is_given_back_and_overridden(tmp_path: Path) -> None:
    run = replace(recipe("xlm_mt"), seed=5)
    write_versioned(tmp_path / "config.json", {"config": asdict(run), "versions": {}, "run": "x"})
    path = str(tmp_path / "config.json")
    assert settings("--config", path) == run
    assert settings("--config", path, "--seed", "6", "--train.steps", "99999").seed == 6
    assert settings(f"--config={path}", "--seed", "6") == replace(run, seed=6)


def test_a_file_may_name_a_recipe_and_what_differs(tmp_path: Path) -> None:
    path = saved(tmp_path / "mine.toml", 'recipe = "quickstart"\nname = "mine"\n[optimizer]\nlearning_rate = 1\n')
    run = settings("--config", str(path))
    assert run == replace(
        recipe("quickstart"), name="mine", optimizer=replace(recipe("quickstart").optimizer, learning_rate=1.0)
    )
    assert isinstance(run.optimizer.learning_rate, float)
    (tmp_path / "other.json").write_text(json.dumps({"train": {"steps": 9}}))
    other = settings("--config", str(tmp_path / "other.json"))
    assert (other.name, other.train.steps, other.model) == ("other", 9, RunConfig("x").model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nwidht = 3\n", "there is no setting 'model.widht': did you mean model.width?"),
        ("[modle]\nwidth = 3\n", "there is no setting 'modle': did you mean model?"),
        ("lr = 3\n", "there is no setting 'lr': did you mean optimizer.learning_rate?"),
        ("[train]\nsteps = 0\n", "run.toml: train.steps is 0: it must be at least 1"),
        ("zzz = 3\n", "there is no setting 'zzz': choose one of name, seed, model"),
        ("model = 3\n", "model is 3, but it must be a section of settings"),
        ("[model]\nwidth = 3.0\n", "model.width is 3.0, but it must be a whole number"),
        ("[model]\nwidth = true\n", "model.width is True, but it must be a whole number"),
        ("[optimizer]\nlearning_rate = true\n", "optimizer.learning_rate is True, but it must be a number"),
        ("[model]\ncompile = 1\n", "model.compile is 1, but it must be text in quotes"),
        ("[data]\nphase_steps = 3\n", "data.phase_steps is 3, but it must be a list"),
        ('[data]\nphase_steps = ["a"]\n', "data.phase_steps is ['a'], but each element must be a whole number"),
        ("[model]\nabsolute_positions = 1\n", "model.absolute_positions is 1, but it must be true or false"),
        ("[model\n", "is not TOML"),
        ("seed = " + "[" * 9999, "run.toml is nested too deeply"),
        (f"[optimizer]\nlearning_rate = 1{'0' * 400}\n", "it must be smaller"),
        ('recipe = "basse"\n', "there is no recipe 'basse': did you mean base?"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "run.toml", text)
    with pytest.raises(ValueError) as raised:
        settings("--config", str(path))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.toml does not exist: `xlme config"):
        read_values(tmp_path / "none.toml")
    (tmp_path / "a.toml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_values(tmp_path / "a.toml")
    with pytest.raises(ValueError, match="is not JSON"):
        read_values(saved(tmp_path / "a.json", "{"))
    with pytest.raises(ValueError, match=r"a\.json has seed twice in one object"):
        read_values(saved(tmp_path / "a.json", '{"seed": 3, "name": "a", "seed": 4}'))
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfseed = 3\r\n")
    assert read_values(tmp_path / "a.toml") == {"seed": 3}
    with pytest.raises(ValueError, match="there is no setting 'hub'"):
        with_values(RunConfig("x"), {"hub": 1}, tmp_path)


def test_one_source_of_settings(tmp_path: Path) -> None:
    path = saved(tmp_path / "run.toml", "")
    with pytest.raises(ValueError, match="--recipe and --config exclude each other"):
        settings("--config", str(path), "--recipe", "base")
    from xlme_ds.cli import parse

    branch = recipe("xlm_mt")
    assert parse("plan", PlanSettings, "", ["--seed", "3"], branch).run == replace(branch, seed=3)
    with pytest.raises(ValueError, match="--recipe and --branch exclude each other"):
        parse("plan", PlanSettings, "", ["--recipe", "base"], branch)
    with pytest.raises(ValueError, match=r"--recipe is missing: add --recipe NAME \(or --config FILE\)"):
        settings()
    with pytest.raises(ValueError, match=r"--recipe is missing: did you mean --recipe base\?"):
        settings("base", "--gpus", "8")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--steps", "there is no --steps: did you mean --train.steps?"),
        ("--mono_rows=8", "there is no --mono_rows: did you mean --data.mono-rows?"),
        ("--lr", "there is no --lr: did you mean --optimizer.learning-rate?"),
        ("--train.step", "there is no --train.step: did you mean --train.steps?"),
        ("--model.no-activation-checkpoint", "did you mean --model.activation-checkpointing?"),
        ("--optimizer.lr", "there is no --optimizer.lr: did you mean --optimizer.learning-rate?"),
        ("--model.hidden-size", "there is no --model.hidden-size: did you mean --model.width?"),
        ("--epochs=3", "there is no --epochs: a run is counted in steps: set --train.steps"),
        ("--batch_size", "there is no --batch_size: set --data.mono-rows, --data.para-rows and --data.micro-batch"),
        ("--bf16", "there is no --bf16: did you mean --engine.precision bf16?"),
        ("--out", "there is no --out: this command prints its result: add `> FILE` to the command"),
    ],
)
def test_a_setting_by_almost_its_name(flag: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        settings("--recipe", "base", flag, "8")
    assert not settings("--recipe", "base", "--model.no-activation-checkpointing").model.activation_checkpointing


def test_help_shows_the_settings_that_people_set() -> None:
    short = python("-m", "xlme_ds", "pretrain", "--help", COLUMNS=120).stdout
    assert len(short.splitlines()) < 75 + len(RECIPES) and short.count("\n  --") == 8 + 15
    assert "--train.steps 125000" in short and "--help-all" in short
    assert short.count("--data PATH [PATH ...] ") == 2 and "  --branch RUN@STEP " in short
    assert "--heldout PATH " in short and "the loss curve stays the same.\n" in short
    assert "relative-buckets" not in short and "  --model.activation-checkpointing off\n" in short
    assert "--engine.deepspeed zero1          auto, a file of ds_configs/" in short
    assert "Recipes (memory without offloading; a smaller --data.micro-batch needs less):" in short
    assert "their defaults. With --recipe NAME, --help shows that recipe's values:\n" in short
    sources = "usage: xlme pretrain (--recipe NAME | --config FILE | --branch RUN@STEP) "
    assert short.startswith(f"{sources}--data PATH [PATH ...] --out PATH [")
    narrow = python("-m", "xlme_ds", "plan", "--help", COLUMNS=80).stdout
    assert max(map(len, narrow.splitlines()[1:])) <= 80
    assert "  --gpu NAME " in narrow and "another. Default: a100-80g." in " ".join(narrow.split())
    assert narrow.startswith("usage: xlme plan (--recipe NAME | --config FILE | --budget DOLLARS) [")
    of_recipe = python("-m", "xlme_ds", "pretrain", "--recipe", "quickstart", "-h").stdout
    assert f"--train.steps {recipe('quickstart').train.steps} " in of_recipe
    for name, summary in SUMMARIES.items():
        assert f" {name} {summary} " in " ".join([*short.split(), ""]), name
    whole = python("-m", "xlme_ds", "pretrain", "--help-all").stdout
    assert "--model.relative-buckets" in whole and len(whole.splitlines()) > 300
    assert whole.startswith(sources) and "  --config FILE " in whole
