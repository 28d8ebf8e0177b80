"""Command lines: recipes, overrides, and what a mistake answers."""

import argparse
import contextlib
import io
import json
import math
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.rehearsal.__main__ import Rehearsal
from bench.rehearsal.__main__ import main as rehearsal
from tests.engine.worker import tiny
from tests.launch import python
from tests.rows import train_vocabulary, write_data
from xlme_ds import __main__ as commands
from xlme_ds import cli
from xlme_ds.config import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    StartConfig,
    TrainConfig,
)
from xlme_ds.engine_file import deepspeed_settings, resolve_engine_file
from xlme_ds.io.help import call_from_command_line
from xlme_ds.pretrain import Pretrain
from xlme_ds.pretrain import main as pretrain
from xlme_ds.recipes import RECIPES, recipe
from xlme_ds.validate import validate


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "xlme_ds.pretrain", *arguments)


def test_unknown_override_names_the_nearest() -> None:
    result = command("--recipe", "quickstart", "--data", "d", "--out", "o", "--model.widht", "64")
    assert result.returncode == 2
    assert "--model.width" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "basse", "--data", "d", "--out", "o"], "there is no recipe 'basse': did you mean base?"),
        (["--data", "d", "--out", "o"], "--recipe is missing: add --recipe NAME (or --config FILE)"),
        (["--recipe", "--data", "d", "--out", "o"], "--recipe has no value: write one after it"),
        (
            [],
            "--recipe, --data and --out are missing: add --recipe NAME (or --config FILE) --data PATH [PATH ...] --out",
        ),
        (
            ["--recipe", "quickstart", "--data", "no/such", "--out", "o"],
            "no/such does not exist: name the folder that `xlme prep mix` wrote",
        ),
        (
            ["--recipe", "quickstart", "--data", ".", "--out", "o"],
            ". has no mono/: name the folder that `xlme prep mix`",
        ),
        (
            ["--recipe", "quickstart", "--data", ".", "--out", "o", "--model.heads", "5"],
            "model.width 128 is not a multiple of model.heads 5",
        ),
        (
            [
                "--recipe",
                "quickstart",
                "--data",
                ".",
                "--out",
                "o",
                "--engine.kind",
                "plain",
                "--engine.precision",
                "bf16",
            ],
            "engine.kind plain runs in fp32 only",
        ),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = command(*arguments)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("xlme pretrain: error: ") and message in line


@pytest.mark.parametrize("flag", ["--data", "--heldout"])
def test_a_folder_that_is_missing_is_named_before_torch_is_loaded(flag: str) -> None:
    words = ["--recipe", "quickstart", "--data", ".", "--out", "o", flag, "none"]
    code = f"""import sys
from xlme_ds.pretrain import main
try:
    main({words})
finally:
    assert "torch" not in sys.modules"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    message = "xlme pretrain: error: none does not exist: name the folder that `xlme prep mix` wrote"
    assert (result.returncode, result.stderr.splitlines()) == (2, [message])


def test_words_without_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    starts = {
        "help plan": "usage: xlme plan",
        "help": "usage: xlme ",
        "help version": "xlme_ds",
        "help help": "usage: xlme COMMAND",
        "prep": "usage: xlme prep",
    }
    starts |= {
        "evaluate": "usage: xlme evaluate TEST --flags ",
        "checkpoint": "usage: xlme checkpoint COMMAND --flags ",
    }
    starts |= {"help prep mix": "usage: xlme prep mix", "launch --gpus 2 pretrain -h": "usage: xlme pretrain "}
    starts |= {f"{name} --help-all": f"usage: xlme {name} " for name in commands.COMMANDS}
    for words, said in starts.items():
        try:
            assert commands.main(words.split()) == 0, words
        except SystemExit as left:
            assert not left.code, words
        assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--recipe", "base", "--gpus", "1e1"], "error: --gpus 1e1 is not a whole number: write 10\n"),
        (["plan", "--recipe", "base", "--train.steps", "ten"], "error: --train.steps ten is not a whole number\n"),
        (["plan", "--recipe", "base", "--budget", "1,5"], "error: --budget 1,5 is not a number\n"),
        (["plan", "--recipe", "base", "--data.phase-steps", "5", "six"],
         "error: --data.phase-steps six is not a whole number\n"),
        (["plan", "--recipe", "base", "--gpus", "8", "9"], "error: unexpected argument 9: --gpus takes one value\n"),
        (["plan", "--recipe", "base", "-gpus", "8"], "error: there is no -gpus: did you mean --gpus?\n"),
        (["config", "--recipe", "base", "--train.steps", "125,000"], "125,000 is not a whole number: write 125000\n"),
        (["prep", "encode", "--mono", "mono", "mono2"], "error: unexpected argument mono2: --mono takes one value\n"),
        (["prep", "encode", "--mono="], "xlme prep encode: error: --mono is empty: write a path after it\n"),
        (["pretrain", "--recipe", "base", "--data", "d", "", "--out", "o"],
         "xlme pretrain: error: --data is empty: write a path after it\n"),
        (["pretrain", "--recipe", "base"],
         "pretrain: error: --data and --out are missing: add --data PATH [PATH ...] --out PATH\n"),
        (["export", "--out", "o", "--out=p"], "xlme export: error: --out is given twice: leave one out\n"),
        (["plan", "--recipe", "base", "--json", "--no-json"], "error: --json is given twice: leave one out\n"),
        (["config", "--recipe", "base", "--recipe=large"], "error: --recipe is given twice: leave one out\n"),
        (["config", "--config", "a", "--config", "b"], "error: --config is given twice: leave one out\n"),
        (["finetune"], "error: --task, --model, --data and --out are missing: add --task "),
        (["export", "--run", "r"], "xlme export: error: --out is missing: add --out PATH\n"),
        (["evaluate", "pairs", "--data", "d"],
         "xlme evaluate pairs: error: --model is missing: add --model PATH [PATH ...]\n"),
        (["evaluate", "perplexity", "--model", "m", "--data", "d", "--passes", "0"],
         "xlme evaluate perplexity: error: passes 0 leaves nothing to read"),
        (["launch", "--gpus", "2", "pretrian", "--recipe", "base"],
         "xlme launch: error: only pretrain and finetune can be launched: did you mean pretrain?\n"),
        (["prep", "mix", "--encoded", "e", "--vocab", "v", "--out", "o", "--mono-rows", "1e6"],
         "xlme prep mix: error: --mono-rows 1e6 is not a whole number: write 1000000\n"),
        (["evaluate", "pairs", "--rows", "9", "--data", "d"], "there is no --rows: --help lists the flags"),
        (["evaluate", "pairs", "--models", "m"], "evaluate pairs: error: there is no --models: did you mean --model?"),
        (["export", "--model", "m"], "xlme export: error: there is no --model: did you mean --run?"),
        (["report", "xtreme", "--run", "r"], "report xtreme: error: there is no --run: did you mean --runs?"),
        (["pretrain", "--recipe", "base", "--model", "m"],
         "there is no --model: to start from a model, name it by --start.folder"),
        (["plan", "--recipe", "base", "--model.activation-checkpointing", "false"],
         "error: --model.activation-checkpointing takes no value: write --model.activation-checkpointing or "
         "--model.no-activation-checkpointing"),
        (["plan", "--recipe", "base", "--no-json=0"], "error: --no-json takes no value: write --json or --no-json"),
        (["export", "--onnx", "false"], "xlme export: error: --onnx takes no value: write --onnx or --no-onnx"),
        (["plan", "--recipe", "base", "--model.body", "xlm"],
         "xlme plan: error: --model.body cannot be 'xlm': did you mean xlme?"),
        (["pretrain", "--recipe", "base", "--optimizer", "3"],
         "there is no --optimizer: it is a section of settings, such as --optimizer.learning-rate\n"),
        (["evaluate", "pairs", "--data", "d", "--model", "--top"], "--model has no value: write one after it\n"),
        (["report", "--no-open"], "xlme report: error: there is no --no-open: --help lists the flags\n"),
        (["prep", "mix", "--alfa", "3"], "xlme prep mix: error: there is no --alfa: did you mean --alpha?\n"),
        (["finetune", "--tuning.epoch", "3"], "there is no --tuning.epoch: did you mean --tuning.epochs?\n"),
        (["pretrain", "--config", "none.json"], "error: none.json does not exist: name a run's config.json\n"),
        (["finetune", "--config"], "error: --config has no value: write one after it\n"),
        (["finetune", "--helpp"], "error: there is no --helpp: did you mean --help?\n"),
        (["--heldout", "x"], "name a command first, for example xlme pretrain --heldout x\n"),
        (["plan", "--recipe", "xl", "--train.stpes", "3"], "there is no --train.stpes: did you mean --train.steps?\n"),
        (["plan", "--recipe", "base", "--stpes", "3"], "there is no --stpes: did you mean --train.steps?\n"),
        (["plan", "--recipe", "base", "--no-jsn"], "there is no --no-jsn: did you mean --json?\n"),
        (["evaluate", "--model", "m"], "xlme evaluate: error: name a test first: one of tatoeba, pairs, align, "),
        (["prep", "vocab", "mono", "--out", "o"], "error: unexpected argument mono: did you mean --mono mono?\n"),
        (["prep", "vocab", "para", "--mono=m", "--out", "o"],
         "error: unexpected argument para: did you mean --para para?\n"),
        (["config", "--recipe", "base", "--model.layers", "2"],
         "there is no --model.layers: set --model.discriminator-layers and --model.generator-layers\n"),
        (["plan", "--recipe", "base", "--price", "2"], "there is no --price: did you mean --dollars-per-hour?\n"),
        (["plan", "--config", "none.toml"],
         "error: none.toml does not exist: `xlme config --recipe NAME > none.toml` writes such a file\n"),
        (["slurm", "mine", "--out", "o"], "error: unexpected argument mine: did you mean --out mine?\n"),
        (["pretrain", "--recipe", "base", "extra", "--data", "d", "--out", "o"],
         "error: unexpected argument extra: every value follows its flag\n"),
        (["slurm", "--out"], "xlme slurm: error: --out has no value: write one after it\n"),
        (["plan", "--recipe", "base", "--gpus", "--json"], "error: --gpus has no value: write one after it\n"),
        (["prep", "mix", "--layout=bert"], "error: --layout cannot be 'bert': choose one of xlme, xlm\n"),
        (["prep", "mix", "--encoded", "none", "--vocab", "v", "--out", "o", "--mono-rows", "1"],
         "none does not exist: name the folder that `xlme prep encode` wrote"),
        (["compare", "--recipes", "basee+xlme", "--budgets", "1e9", "--data", "none", "--heldout", "h", "--out", "o"],
         "there is no recipe 'basee': did you mean base?"),
        (["compare", "--recipes", "base", "--budgets", "1e9", "--data", "none", "--heldout", "h", "--out", "o"],
         "error: none does not exist: name the folder that `xlme prep mix` wrote"),
        (["evaluate", "pairs", "--model", "m", "--data", "d", "--which", "None"],
         "evaluate pairs: error: --which cannot be 'None': choose one of encoder, dis"),
        (["checkpoint", "convert", "--run", "none", "--out", "o"], "error: none does not exist: name a run folder"),
        (["checkpoint", "list", "--run", "none"], "error: none does not exist: name a run folder"),
        (["audit", "--run", "none", "--data", "d"], "error: none does not exist: name a run folder"),
        (["checkpoint", "lst"], "xlme checkpoint: error: there is no command 'lst': did you mean list?"),
        (["checkpoint", "list", "run"],
         "xlme checkpoint list: error: unexpected argument run: did you mean --run run?"),
        (["export", "run", "out"], "xlme export: error: unexpected argument run: did you mean --run run?"),
        (["prep", "show", "mixed"], "xlme prep show: error: unexpected argument mixed: did you mean --data mixed?"),
        (["export", "--output_dir", "o"], "xlme export: error: there is no --output_dir: did you mean --out?"),
        (["translate", "--input=a"], "xlme translate: error: there is no --input: did you mean --source?"),
        (["translate", "--tgt", "de"], "there is no --tgt: did you mean --to?"),
        (["prep", "vocab", "--vocab-size", "9"], "prep vocab: error: there is no --vocab-size: did you mean --size?"),
        (["prep", "vocab", "--mono", "m", "--out", "o", "--size", "0"],
         "error: --size is 0: at least 16 ids are needed\n"),
        (["prep", "vocab", "--mono", "m", "--out", "o", "--sentences", "0"],
         "error: --sentences is 0: it must be at least 1\n"),
        (["pretrain", "--recip", "base"], "there is no --recip: did you mean --recipe?"),
        (["config", "--confg", "run.toml"], "there is no --confg: did you mean --config?"),
        (["--recipe", "quickstart", "--data", "x"],
         "name a command first, for example xlme pretrain --recipe quickstart --data x"),
        (["--recipe", "quickstart", "pretrain", "--out", "o"],
         "xlme: error: the command comes first: xlme pretrain --recipe quickstart --out o\n"),
        (["encode"], "xlme: error: there is no command 'encode': did you mean xlme prep encode?\n"),
        (["finetune", "ner"], "unexpected argument ner: did you mean --task ner?"),
        (["finetune", "--train.stps", "5"], "there is no --train.stps: did you mean --train.max-bad-steps?"),
        (["evaluate", "losses", "run", "held"], "unexpected argument run: did you mean --model run?"),
        (["prep", "mix", "--data", "encoded"], "there is no --data: did you mean --encoded?"),
        (["prep", "--mono", "a", "encode"], "xlme prep: error: name a stage first: one of sample, "),
        (["compare", "--recipes", "xlme", "--model.width", "8"],
         "--model.width is a setting of xlme pretrain: write such settings last, after --\n"),
        (["plan", "--recipe", "setup.py"], "--recipe setup.py is no recipe: did you mean --config setup.py?"),
        (["finetune", "--num_train_epochs", "3"], "there is no --num_train_epochs: did you mean --tuning.epochs?"),
        (["pretrain", "--recipe", "base", "--checkpoint", "run"],
         "there is no --checkpoint: the same --out resumes a run, --branch RUN@STEP starts another from a checkpoint"),
        (["quickstart", "--out", "q", "--processes", "0"], "--processes is 0: choose one of 1, 2, 4, 8, which divide "),
        (["pretrain", "--branch", "a@1", "--branch=b@1"], "--branch is given twice: leave one out"),
        (["--recipe", "base"],
         "xlme: error: --recipe is not a command: name a command first, for example xlme pretrain --recipe base"),
        (["--flag", "base"], "xlme: error: --flag is not a command: name a command first (`xlme --help` lists them)\n"),
        (["-v"], "xlme: error: there is no -v: did you mean --version?\n"),
        (["--versoin"], "xlme: error: there is no --versoin: did you mean --version?\n"),
        (["version", "extra"], "xlme: error: unexpected argument extra: leave it out\n"),
        (["help", "pretrain", "extra"], "xlme: error: unexpected argument extra: leave it out\n"),
        (["help", "prep", "mix", "extra"], "xlme: error: unexpected argument extra: leave it out\n"),
        (["launch", "--gpus", "2", "pretrain", "--recipe", "bsae"],
         "xlme pretrain: error: there is no recipe 'bsae': did you mean base?\n"),
        (["launch", "--gpus", "2", "finetune", "--task", "nre"],
         "xlme finetune: error: --task cannot be 'nre': did you mean ner?\n"),
    ],
)  # fmt: skip
def test_a_mistake_names_the_flag_or_the_command(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        sys.exit(commands.main(arguments))
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_an_interrupted_command_has_no_traceback() -> None:
    """Python's import system meets the signal, as it does in the first second of a command."""
    code = """import signal, sys
from xlme_ds.__main__ import main
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "xlme_ds.export":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.exit(main(["export"]))"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (130, "xlme export: interrupted\n")


def test_options_after_two_dashes_are_of_another_program(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--gigabytes 1 --source text -- --output=log --nodes=2"
    assert call_from_command_line(Rehearsal, "rehearsal", words.split()).options == ("--output=log", "--nodes=2")
    with pytest.raises(SystemExit):
        rehearsal(["--help"])
    assert "[OPTIONS] [-- SBATCH OPTION ...]\n" in capsys.readouterr().out, "they may be left out"


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_legal(name: str) -> None:
    config = validate(recipe(name), world=4)
    assert deepspeed_settings(config.engine)["zero_optimization"]["stage"] in (1, 2, 3)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(recipe("quickstart"), data=DataConfig(0, 0, 1)), "both 0"),
        (
            RunConfig("x", data=DataConfig(8, 4, 4, alternate=True)),
            "data.alternate needs as many rows of one task as of the other",
        ),
        (replace(recipe("quickstart"), model=ModelConfig(relative_buckets=7)), "model.relative_buckets is 7"),
        (replace(recipe("quickstart"), train=TrainConfig(steps=10)), "optimizer.warmup_steps"),
        (RunConfig("x", model=ModelConfig(init_std=0.0)), "model.init_std is 0"),
        (RunConfig("x", model=ModelConfig(norm="middle")), "model.norm middle is not known: choose one of post, pre"),  # type: ignore[arg-type]
        (
            RunConfig("x", objective=ObjectiveConfig(pseudo_fractions=(0.5, math.nan))),
            r"objective.pseudo_fractions is \(0.5, nan\): each must be a number",
        ),
        (RunConfig("x", model=ModelConfig(language_embeddings=("de", "en", "de"))), "names a language twice"),
        (RunConfig("x", model=ModelConfig(norm_epsilon=0.0)), "model.norm_epsilon is 0"),
        (RunConfig("x", model=ModelConfig(attention_dropout=1.0)), "model.attention_dropout is 1.0"),
        (
            RunConfig("x", model=ModelConfig(attention_dropout=0.1, kernels="triton")),
            "model.kernels triton stores no attention weights .* set model.kernels to auto",
        ),
        (RunConfig("x", optimizer=OptimizerConfig(layer_decay=0.5)), "optimizer.layer_decay 0.5 is for fine-tuning"),
        (
            RunConfig("x", optimizer=OptimizerConfig(discriminator_rate=0.0)),
            "discriminator_rate is 0.0: it must be pos",
        ),
        (
            replace(recipe("large_pipe"), optimizer=OptimizerConfig(discriminator_rate=0.5)),
            "optimizer.discriminator_rate 0.5 is not for engine.kind pipeline",
        ),
        (
            replace(recipe("xlmr"), optimizer=OptimizerConfig(discriminator_rate=0.5)),
            "optimizer.discriminator_rate 0.5 is for .* objective.name mlm trains one network: leave it at 1",
        ),
        (
            RunConfig("x", optimizer=OptimizerConfig(learning_rate=math.inf)),
            "learning_rate is inf: it must be at most 1,0",
        ),
        (RunConfig("x", start=StartConfig(take="state")), "start.take state .* start.folder"),
        (
            RunConfig("x", engine=EngineConfig(pipeline_stages=4)),
            "engine.pipeline_stages 4 is for",
        ),
        (
            RunConfig("x", engine=EngineConfig(pipeline_schedule="dualpipev")),
            "engine.pipeline_schedule dualpipev is for engine.kind pipeline, but engine.kind is deepspeed",
        ),
        (
            RunConfig("x", model=ModelConfig(vocabulary=10, vocabulary_blocks=7)),
            "does not split into model.vocabulary_blocks 7",
        ),
    ],
)
def test_illegal_settings_are_named(broken: RunConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(broken)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"micro_batch": 0}, "data.micro_batch is 0: it must be at least 1"),
        ({"mono_rows": -8}, "data.mono_rows is -8: it must not be negative"),
        ({"mono_rows": 0, "para_rows": 0}, "data.mono_rows and data.para_rows are both 0: a step needs rows of a task"),
    ],
)
def test_rows_are_checked_before_they_choose_the_engine(data: dict[str, int], message: str) -> None:
    base = recipe("base")
    assert base.engine.deepspeed == "auto"
    with pytest.raises(ValueError, match=message):
        validate(replace(base, data=replace(base.data, **data)), world=1)


def test_pretraining_lets_the_memory_of_a_gpu_grow_in_place() -> None:
    """What somebody set stays."""
    code = (
        "import os\n"
        "from xlme_ds.pretrain import main\n"
        "names = 'PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF'\n"
        "for given in ({}, {'PYTORCH_ALLOC_CONF': 'a:b'}, {'PYTORCH_CUDA_ALLOC_CONF': 'c:d'}):\n"
        "    for name in names: os.environ.pop(name, None)\n"
        "    os.environ.update(given)\n"
        "    try: main(['--recipe', 'none'])\n"
        "    except SystemExit: print([(name, os.environ[name]) for name in names if name in os.environ])"
    )
    done = python("-c", code)
    assert done.stdout.splitlines() == [
        "[('PYTORCH_CUDA_ALLOC_CONF', 'expandable_segments:True')]",
        "[('PYTORCH_ALLOC_CONF', 'a:b')]",
        "[('PYTORCH_CUDA_ALLOC_CONF', 'c:d')]",
    ], done.stderr


def test_an_embedding_that_does_not_go_through_the_buffers_to_nvme() -> None:
    """XL's 524,288 × 1,536 through buffers of 50,331,648 elements: 16 of them, or that many processes."""
    xl = recipe("xl_zero3")
    engine = EngineConfig(deepspeed="zero3_offload", offload_parameters="nvme", nvme_folder="/nvme")
    config = replace(xl, engine=engine)
    with pytest.raises(ValueError, match=r"the embedding has 805306368: set model\.vocabulary_blocks to 16"):
        validate(config, world=1)
    with pytest.raises(ValueError, match=r"set model\.vocabulary_blocks to 2$"):
        validate(config, world=8)
    validate(config, world=16)
    validate(replace(config, model=replace(xl.model, vocabulary_blocks=16)), world=1)
    # A buffer takes 39,321 rows of 1,280, and five times as many are two fewer than these.
    shape = dict(vocabulary=196_607, width=1280, heads=20, feed_forward=5120)
    with pytest.raises(ValueError, match=r"set model\.vocabulary_blocks to 6$"):
        validate(replace(config, model=replace(xl.model, **shape)), world=1)
    validate(replace(config, model=replace(xl.model, **shape, vocabulary_blocks=6)), world=1)


PIPE = dict(kind="pipeline", deepspeed="pipe_zero1")
DUAL = PIPE | dict(pipeline_schedule="dualpipev")
ZERO_BF16 = dict(kind="deepspeed", deepspeed="zero1", precision="bf16", gradient_precision="bf16")
OFFLOADED = dict(kind="deepspeed", deepspeed="zero3_offload")
CLM = dict(name="clm", mask_fraction=1.0, random_fraction=0.1, keep_fraction=0.1)


@pytest.mark.parametrize(
    ("legal", "illegal"),
    [
        (dict(data=dict(phase_steps=(4, 5))), dict(data=dict(phase_steps=(4, 6)))),
        (dict(optimizer=dict(warmup_steps=10)), dict(optimizer=dict(warmup_steps=11))),
        (dict(schedule=dict(name="wsd", decay_steps=8)), dict(schedule=dict(name="wsd", decay_steps=9))),
        (dict(model=dict(relative_max_distance=9)), dict(model=dict(relative_max_distance=8))),
        (dict(objective=dict(random_fraction=0.5, keep_fraction=0.5)),
         dict(objective=dict(random_fraction=0.5, keep_fraction=0.51))),
        (dict(objective=dict(name="electra", random_fakes=("0:0.5", "5:1"))),
         dict(objective=dict(name="electra", random_fakes=("0:0.5", "5:1.01")))),
        (dict(model=dict(vocabulary_blocks=25)), dict(model=dict(vocabulary_blocks=26))),
        (dict(optimizer=dict(clip=math.inf)), dict(optimizer=dict(learning_rate=math.inf))),
        (dict(model=dict(relative_buckets=4)), dict(model=dict(relative_buckets=5))),
        (dict(model=dict(relative_buckets=6)), dict(model=dict(relative_buckets=2))),
        (dict(model=dict(local_window=2)), dict(model=dict(local_window=0))),
        (dict(optimizer=dict(beta2=0.99)), dict(optimizer=dict(beta2=1.0))),
        (dict(objective=dict(name="btmlm", pseudo_fractions=(1.0,)), data=dict(para_rows=0)),
         dict(objective=dict(name="btmlm", pseudo_fractions=(1.01,)), data=dict(para_rows=0))),
        (dict(data=dict(alternate=True), train=dict(steps=10, log_every=3)),
         dict(data=dict(alternate=True), train=dict(steps=10, log_every=2))),
        (dict(engine=PIPE | dict(pipeline_stages=4)), dict(engine=PIPE | dict(pipeline_stages=5))),
        (dict(engine=PIPE | dict(balance=(0, 3))), dict(engine=PIPE | dict(balance=(3, 0)))),
        (dict(engine=PIPE | dict(balance=(1, 2))), dict(engine=PIPE | dict(balance=(1, 1, 1)))),
        (dict(engine=DUAL, data=dict(micro_batch=2)), dict(engine=DUAL, data=dict(micro_batch=4))),
        (dict(model=dict(kernels="triton", heads=2)), dict(model=dict(kernels="triton", heads=4))),
        (dict(data=dict(phase_steps=(4, 1))), dict(data=dict(phase_steps=(4, 0)))),
        (dict(data=dict(phase_steps=(4,), phase_mask_fractions=(0.01, 0.99))),
         dict(data=dict(phase_steps=(4,), phase_mask_fractions=(0.0, 0.99)))),
        (dict(data=dict(phase_steps=(4,))), dict(data=dict(phase_steps=(4,), phase_mask_fractions=(0.01, 1.0)))),
        (dict(objective=CLM, data=dict(phase_steps=(4,))),
         dict(objective=CLM, data=dict(phase_steps=(4,), phase_mask_fractions=(0.5, 0.5)))),
        (dict(schedule=dict(name="wsd", decay_steps=1)), dict(schedule=dict(name="linear", decay_steps=1))),
        (dict(schedule=dict(name="cosine")), dict(schedule=dict(name="cosine", decay_steps=1))),
        (dict(schedule=dict(name="inverse_sqrt")), dict(schedule=dict(name="inverse_sqrt", decay_steps=1))),
        (dict(data=dict(mono_rows=16)), dict(data=dict(mono_rows=16, alternate=True), train=dict(log_every=1))),
        (dict(data=dict(para_rows=16)), dict(data=dict(para_rows=16, alternate=True), train=dict(log_every=1))),
        (dict(engine=ZERO_BF16), dict(engine=PIPE | dict(precision="bf16", gradient_precision="bf16"))),
        (dict(engine=ZERO_BF16 | dict(precision="auto")),
         dict(engine=dict(kind="plain", precision="auto", gradient_precision="bf16"))),
        (dict(engine=dict(kind="plain")), dict(engine=dict(kind="plain", offload_optimizer="cpu"))),
        (dict(engine=dict(kind="plain")), dict(engine=dict(kind="plain", offload_parameters="cpu"))),
        (dict(engine=OFFLOADED | dict(offload_parameters="nvme", nvme_folder="/nvme")),
         dict(engine=OFFLOADED | dict(offload_parameters="nvme"))),
        (dict(engine=OFFLOADED | dict(offload_optimizer="nvme", nvme_folder="/nvme")),
         dict(engine=OFFLOADED | dict(offload_optimizer="nvme", nvme_folder="/nvme", deepspeed="zero2"))),
    ],
)  # fmt: skip
def test_settings_at_their_border(legal: dict[str, dict], illegal: dict[str, dict]) -> None:
    """The last that fit, and the first that do not: of ten steps, of which two warm up; of three layers."""
    run = tiny(dict(kind="plain"), 8, steps=10)
    run = replace(run, optimizer=replace(run.optimizer, warmup_steps=2), model=replace(run.model, relative_buckets=32))
    run = replace(run, objective=replace(run.objective, name="mlm"), model=replace(run.model, vocabulary=100))

    def changed(settings: dict[str, dict]) -> RunConfig:
        return replace(run, **{name: replace(getattr(run, name), **values) for name, values in settings.items()})

    for settings, refusal in ((legal, contextlib.nullcontext()), (illegal, pytest.raises(ValueError))):
        with refusal:
            config = changed(settings)
            validate(config, config.engine.processes_per_replica)


@pytest.mark.parametrize("flag", ["--dry-run", "--dry_run"])
def test_a_dry_run_ends_by_the_first_signal(tmp_path: Path, flag: str) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        pretrain(["--recipe", "quickstart", "--data", f"{tmp_path}/none", "--out", f"{tmp_path}/run", flag])
    assert signal.getsignal(signal.SIGINT) is before


def test_engine_files_hold_engine_keys_only(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}))
    with pytest.raises(ValueError, match="gradient_clipping, which the recipe decides"):
        deepspeed_settings(EngineConfig(deepspeed=str(path)))
    for text, words in (
        ("{", "mine.json is not JSON: "),
        ("[]", "must be a JSON object with zero_optimization"),
        ('{"zero_optimization": 3}', "must be a JSON object with zero_optimization"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            deepspeed_settings(EngineConfig(deepspeed=str(path)))
    path.write_text(json.dumps({"zero_optimization": {"stage": 0}}))
    with pytest.raises(ValueError, match="stage to 1, 2 or 3"):
        deepspeed_settings(EngineConfig(deepspeed=str(path)))
    with pytest.raises(ValueError, match=r"nor one of: auto \(for pre-training\), .*zero1, zero2, zero3"):
        deepspeed_settings(EngineConfig(deepspeed="zero4"))
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, "torch_autocast": {"enabled": True}}))
    with pytest.raises(ValueError, match="torch_autocast, which the recipe decides"):
        deepspeed_settings(EngineConfig(deepspeed=str(path)))
    path.write_text(json.dumps({"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}))
    with pytest.raises(ValueError, match=r"sets zero_optimization\.reduce_bucket_size to auto"):
        deepspeed_settings(EngineConfig(deepspeed=str(path)))
    for key in ("offload_param", "offload_optimizer"):
        path.write_text(json.dumps({"zero_optimization": {"stage": 3, key: None}}))
        with pytest.raises(ValueError, match=r"sets an offload_\* of zero_optimization that is no object"):
            deepspeed_settings(EngineConfig(deepspeed=str(path)))
        path.write_text(json.dumps({"zero_optimization": {"stage": 3, key: {"device": "cpu"}}}))
        with pytest.raises(ValueError, match=rf"sets zero_optimization\.{key}\.device, which engine\.{key}"):
            deepspeed_settings(EngineConfig(deepspeed=str(path)))
    for key, setting in ("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_parameters"):
        for value in (True, False):
            path.write_text(json.dumps({"zero_optimization": {"stage": 3, key: value}}))
            with pytest.raises(ValueError, match=rf"sets zero_optimization\.{key}, which engine\.{setting} decides"):
                deepspeed_settings(EngineConfig(deepspeed=str(path)))
    for more in ({"gradient_predivide_factor": 8.0}, {"prescale_gradients": True}, {"zero_force_ds_cpu_optimizer": 1},
                 {"progressive_layer_drop": {"enabled": True}}, {"no such key": 1}):  # fmt: skip
        path.write_text(json.dumps({"zero_optimization": {"stage": 1}} | more))
        with pytest.raises(ValueError, match=f"sets {next(iter(more))}, which may change the loss curve: remove it"):
            deepspeed_settings(EngineConfig(deepspeed=str(path)))
    for more in (
        {"zenflow": {}},
        {"offload_optimizer": {"ratio": 0.5}},
        {"offload_optimizer": {"super_offload": True}},
    ):
        path.write_text(json.dumps({"zero_optimization": {"stage": 3} | more}))
        with pytest.raises(
            ValueError, match=r"sets (zenflow|ratio|super_offload), which works with DeepSpeed's own op"
        ):
            deepspeed_settings(EngineConfig(deepspeed=str(path)))
    harmless = {"zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 1, "super_offload": False}}}
    path.write_text(json.dumps(harmless))
    assert deepspeed_settings(EngineConfig(deepspeed=str(path))) == harmless
    lossy = ("quantized_weights", "quantized_nontrainable_weights", "quantized_gradients")
    for key in (*(f"zero_{name}" for name in lossy), "zeropp_loco_param", "fp16_master_weights_and_gradients"):
        path.write_text(json.dumps({"zero_optimization": {"stage": 3, key: True}}))
        with pytest.raises(ValueError, match=rf"zero_optimization\.{key}, which rounds"):
            deepspeed_settings(EngineConfig(deepspeed=str(path)))
    allowed = {"wall_clock_breakdown": True, "memory_breakdown": True, "dump_state": True, "aio": {"block_size": 4096}}
    allowed |= {name: {"enabled": True} for name in ("comms_logger", "csv_monitor", "flops_profiler", "tensorboard")}
    for stage in (1, 2, 3):
        settings = {"zero_optimization": {"stage": stage}} | allowed
        path.write_text(json.dumps(settings))
        assert deepspeed_settings(EngineConfig(deepspeed=str(path))) == settings
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match=r"folder\.json cannot be read \(Is a directory\)"):
        deepspeed_settings(EngineConfig(deepspeed=str(tmp_path / "folder.json")))


@pytest.mark.parametrize(
    ("world", "stages", "expected"), [(1, 1, "zero1"), (2, 1, "zero3"), (2, 2, "zero1"), (4, 2, "zero3")]
)
def test_auto_is_zero3_where_a_step_has_one_micro_batch(world: int, stages: int, expected: str) -> None:
    engine = EngineConfig("pipeline" if stages > 1 else "deepspeed", "auto", pipeline_stages=stages)
    config = RunConfig("x", data=DataConfig(8, 8, 4), engine=engine)
    assert resolve_engine_file(config, world) == replace(config, engine=replace(engine, deepspeed=expected))
    named = replace(config, engine=replace(engine, deepspeed="zero2"))
    assert resolve_engine_file(named, world) == named


def test_a_start_from_a_model_that_is_not_named(tmp_path: Path) -> None:
    """ERNIE-M begins with XLM-R: without it the run would begin with random weights."""
    data = write_data(tmp_path / "data", rows=16)
    words = f"--recipe ernie_m --data {data} --out {tmp_path}/run --engine.kind plain".split()
    for result in (command(*words), command(*words, "--dry-run")):
        assert result.returncode == 2 and not (tmp_path / "run").exists()
        assert "start.take encoder takes the weights of another model, and start.folder names none" in result.stderr


def test_what_deepspeed_does_not_take_of_a_file_is_said_before_training(tmp_path: Path) -> None:
    path, data = tmp_path / "mine.json", write_data(tmp_path / "data", rows=16)
    path.write_text(json.dumps({"zero_optimization": {"stage": 1, "overlap_com": True}}))
    model = "--model.vocabulary 200 --model.max-positions 32 --model.width 32 --model.heads 2 --data.micro-batch 4"
    words = f"--recipe quickstart --data {data} --out {tmp_path}/run {model} --engine.kind deepspeed --dry-run"
    result = command(*words.split(), "--engine.deepspeed", str(path))
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert f"{path}: zero_optimization.overlap_com: Extra inputs are not permitted" in result.stderr


def test_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten seconds apart; quick work has none."""
    batches = [[1, 2], [3], [4, 5, 6]]
    assert list(cli.progress(batches, 6, "rows", "mine", len)) == batches and capsys.readouterr().err == ""
    seconds = iter(range(0, 100, 6))
    monkeypatch.setattr(cli.time, "monotonic", lambda: next(seconds))
    assert list(cli.progress(batches, 6, "rows", "mine", len)) == batches
    assert capsys.readouterr() == ("", "mine: 2 of 6 rows\n")


def test_an_engine_has_processes_that_it_can_use() -> None:
    """Also where their number chooses the engine's file; where it is not known, both files must fit."""
    engines = EngineConfig("plain"), EngineConfig("pipeline", "pipe_zero1", pipeline_stages=2)
    for engine, legal, illegal in zip(engines, ((1,), (2, 4)), ((2, 3), (1, 3)), strict=True):
        config = RunConfig("x", data=DataConfig(8, 8, 1), engine=engine)
        for world in legal:
            validate(config, world)
        for world in illegal:
            for asked in (config, replace(config, engine=replace(engine, deepspeed="auto"))):
                with pytest.raises(ValueError, match=r"runs on one process|needs a multiple of 2 processes"):
                    validate(asked, world)
    auto = EngineConfig(deepspeed="auto")
    in_bf16 = replace(auto, gradient_precision="bf16", offload_optimizer="cpu")
    with pytest.raises(ValueError, match=r"set engine\.deepspeed to zero3"):
        validate(RunConfig("x", engine=in_bf16))


def test_commands_of_groups_are_known() -> None:
    """Those for which `xlme encode` suggests `xlme prep encode`."""
    from data_prep.__main__ import STAGES

    assert commands._MEMBERS["prep"] == tuple(STAGES)
    for group in ("checkpoint", "evaluate"):
        shown = python("-m", "xlme_ds", group).stdout
        assert commands._MEMBERS[group] == tuple(re.findall(r"^  (\w+)  ", shown, re.M))


def test_a_value_may_look_like_a_setting(tmp_path: Path) -> None:
    """`compare` takes flags of fine-tuning as a value; only a setting outside a value is misplaced."""
    words = ["compare", "--recipes", "xlme", "--budgets", "1e14", "--data", str(tmp_path / "no"), "--heldout", "h"]
    for tuning in (["--tuning", "--engine.kind plain"], ["--tuning=--tuning.epochs 1"]):
        done = python("-m", "xlme_ds", *words, "--out", str(tmp_path / "out"), *tuning)
        assert done.returncode == 2 and "a setting of xlme pretrain" not in done.stderr, done.stderr
        assert f"{tmp_path}/no" in done.stderr, done.stderr


def test_flags_are_taken_with_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both forms and both spellings; a flag at the end has none."""
    assert cli.take_flag(["a", "--b", "1", "c"], "--b") == (["a", "c"], "1")
    assert cli.take_flag(["a", "--b=1", "c"], "--b") == (["a", "c"], "1")
    assert cli.take_flag(["a", "--b"], "--b") == (["a", "--b"], None)
    with pytest.raises(ValueError, match=r"^--b is given twice: leave one out$"):
        cli.take_flag(["--b", "1", "--b=2"], "--b")
    words = ["--a", "1", "--b-c", "2", "3", "--d.b_c", "4", "--b_c=5", "--e"]
    assert cli.without_flags(words, "--b-c", "--e") == ["--a", "1", "--d.b_c", "4"]
    for argv, said in (
        (["/p/xlme_ds/pretrain.py", "a b"], "xlme pretrain 'a b'"),
        (["/p/xlme_ds/evaluate/__main__.py"], "xlme evaluate"),
        (["/p/bin/xlme", "plan"], "xlme plan"),
        (["/p/xlme_ds/.venv/bin/xlme", "plan"], "xlme plan"),
        (["/p/xlme_ds/xlme_ds/__main__.py", "evaluate"], "xlme evaluate"),
        (["/p/mine.py"], "python mine.py"),
        ([""], "python"),  # an interactive session
    ):
        monkeypatch.setattr(sys, "argv", argv)
        assert cli.command_line() == said


def test_a_pipeline_runs_with_zero_1() -> None:
    validate(RunConfig("x", engine=EngineConfig("pipeline", "zero1")))
    with pytest.raises(ValueError, match="zero3 is ZeRO-3, but a pipeline runs only with ZeRO-1: set engine"):
        validate(RunConfig("x", engine=EngineConfig("pipeline", "zero3")))


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a single rank has must not pass for a user's mistake: only the first process prints these."""
    from xlme_ds import api
    from xlme_ds.pretrain import main

    def broken(*arguments: object) -> None:
        raise ValueError("not every rank has this")

    monkeypatch.setattr(api.run, "pretrain", broken)
    words = [
        "--recipe",
        "quickstart",
        "--data",
        ".",
        "--out",
        "o",
        "--engine.kind",
        "plain",
        "--engine.precision",
        "fp32",
    ]
    with pytest.raises(ValueError, match="not every rank has this"):
        main(words)


@pytest.mark.parametrize(
    ("words", "required"),
    [
        ("finetune", "--task --model --data --out"),
        ("translate", "--model --source --from --to --out --pairs"),
        ("export", "--run --from-hf --out"),
        ("compare", "--recipes --budgets --data --heldout --out"),
        ("prep mix", "--encoded --vocab --out"),
        ("prep encode", "--vocab --out"),
        ("prep vocab", "--out"),
    ],
)
def test_help_has_the_required_flags_and_a_command(
    words: str, required: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        commands.main([*words.split(), "--help"])
    usage, shown = capsys.readouterr().out.split("[OPTIONS]")
    assert re.findall(r"--[\w-]+", usage) == required.split()
    assert not re.search(r"None|Default: \.|\[\w+ \[|--no-", shown)
    example = re.search(rf"^  xlme {words} (--.*)$", shown, re.M)
    assert example is not None, shown
    flags = set(re.findall(r"--[\w-]+", example[1]))
    assert (
        set(required.split()) - {"--from-hf", "--pairs"}
        <= flags
        <= set(re.findall(r"--[\w-]+", shown.replace(example[0], "")))
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("help", "In Python: import xlme_ds as xlme; help(xlme)"),
        ("help prep", "--split heldout"),
        ("audit --help", "a run with --train.audit"),
        ("evaluate pairs --help", "of training. Its `--data` is"),
        ("finetune --help", "a word, a tab and its tag"),
        ("finetune --help", "Fine-tune a model on one GPU, or on the CPU if there is none;"),
        ("translate --help", "on the GPU if there is one."),
        ("evaluate --help", "on the GPU if there is one."),
        ("evaluate words --help", "on the GPU if there is one."),
        (
            "report --help",
            "xlme report (--run PATH | --runs PATH [PATH ...]) [--out PATH] xlme report xtreme --runs PATH",
        ),
    ],
)
def test_help_has_what_a_newcomer_needs(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        commands.main(words.split())
    shown = capsys.readouterr().out
    assert said in " ".join(shown.split())
    assert "\n\n\n" not in shown and "Returns" not in shown and "\n- `" not in shown


@pytest.mark.parametrize("words", ["compare", "audit", "checkpoint check", "prep minhash", "finetune", "evaluate"])
def test_descriptions_are_wrapped(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the usage line, and commands to copy, are longer than the terminal is wide."""
    monkeypatch.setenv("COLUMNS", "70")
    with contextlib.suppress(SystemExit):
        commands.main([*words.split(), "--help"])
    usage, *shown = capsys.readouterr().out.splitlines()
    assert usage.startswith(f"usage: xlme {words} ")
    assert all(len(line) <= 70 or line.startswith(f"  xlme {words} ") for line in shown)


def test_help_of_a_function_marks_what_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(["evaluate", "perplexity", "--help"])
    usage, shown = capsys.readouterr().out.split("[OPTIONS]")
    assert usage == "usage: xlme evaluate perplexity --model PATH [PATH ...] --data PATH "
    assert shown.count("Required.") == 2 and "--model PATH [PATH ...]" in shown
    assert not re.search("None|True|False", shown)


@pytest.mark.parametrize(
    "words",
    [
        "--model a b --top 3",
        "--model a --top 3 --model b",
        "--model=a --model c d --top=3",
        "--top 3 --model a",
    ],
)
def test_a_list_may_be_given_in_parts(words: str) -> None:
    """argparse's action "extend" reads it so."""

    def evaluate(*, model: tuple[str, ...], top: int) -> dict[str, object]:
        return {"model": list(model), "top": top}

    reference = argparse.ArgumentParser()
    reference.add_argument("--model", nargs="+", action="extend")
    reference.add_argument("--top", type=int)
    assert call_from_command_line(evaluate, "x", words.split()) == vars(reference.parse_args(words.split()))


def test_of_a_setting_that_is_given_again_the_last_counts() -> None:
    """Also of a list of settings, with which `xlme compare` changes those of all recipes for one."""
    words = "--out o --data a --data.phase-steps 1 2 --train.steps 9 --data b --data.phase-steps 3 --train.steps 8"
    found = cli.parse("x", Pretrain, "", ["--recipe", "base", *words.split()])
    assert found.data_folders == (Path("a"), Path("b"))
    assert (found.run.data.phase_steps, found.run.train.steps) == ((3,), 8)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_no_terminal_ends_a_command(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Help has frames, memory has signs, and a run's name may have any letters."""
    data, out = tmp_path / "мир", tmp_path / "läufe in 東京"
    vocabulary = train_vocabulary(data / "vocab")
    write_data(data, rows=8, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    model = f"--recipe quickstart --model.vocabulary {vocabulary.size} --model.max-positions 32 --engine.kind plain"
    rows = "--data.mono-rows 2 --data.para-rows 2 --data.micro-batch 2"
    words = f"{model} {rows} --dry-run --data {data}".split()
    for main, arguments, said in (
        (commands.main, ["plan", "--recipe", "base", "--gpus", "8"], "base"),
        (commands.main, ["plan", "--recipe", "base", "--help"], "usage"),
        (pretrain, [*words, "--out", str(out)], out.name),
    ):
        terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", terminal)
        with contextlib.suppress(SystemExit):
            main(arguments)
        terminal.flush()
        assert isinstance(terminal.buffer, io.BytesIO)
        assert said.encode(encoding, "backslashreplace") in terminal.buffer.getvalue()
