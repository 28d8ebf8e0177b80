"""Settings of fine-tuning: the command's options, its runs, the configuration of a run, and the published grids."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise, product
from math import ceil
from pathlib import Path
from typing import Annotated, Literal, Self

import tyro

from ..cli import take_flag, without_flags
from ..config import (
    PRETRAINING_ONLY,
    Count,
    DataConfig,
    DropoutRate,
    EngineConfig,
    ModelConfig,
    NotNegative,
    OptimizerConfig,
    PositiveOrInfinite,
    Seed,
    TrainConfig,
    Training,
    UpToOne,
)
from ..io.arguments import Option, negative, positive
from ..io.help import call_from_command_line
from ..settings_file import read_values
from ..train.run_folder import flatten
from .downstream_tasks import DOWNSTREAM_TASKS, DownstreamTask

_TRAIN_DEFAULTS = TrainConfig(log_every=20, eval_every=0, save_every=500, keep_last=1, keep_every=0)


@dataclass(frozen=True)
class TuningConfig:
    """Settings of one run; where an option says so, 0 takes the task's first published value (XLM-E, Table 11)."""

    learning_rate: NotNegative[float] = 0.0
    """Peak learning rate; 0: the task's first published one. Small models want a higher one (5e-4 at width 128)."""
    batch: NotNegative[int] = 0
    """Examples per step; for questions, windows of contexts per step; 0: the task's first published number."""
    epochs: NotNegative[int] = 0
    """Number of passes over the training examples; 0: the task's first published number."""
    warmup: NotNegative[float] | None = None
    """Fraction of the steps in which the learning rate rises. By default the task's published value: a tenth of the
    steps, but 12,500 steps for XNLI."""
    layer_decay: UpToOne = 1.0
    """The learning rate of each layer is this factor times that of the layer above it (ERNIE-M: 0.8 or 0.9); 1: all
    layers have the same."""
    dropout: DropoutRate = 0.1
    """Dropout of the embedded tokens, of each sublayer's output and of the head's input."""
    weight_decay: NotNegative[float] = 0.0
    """Weight decay, decoupled as in AdamW (ERNIE-M on CoNLL: 0.01)."""
    clip: PositiveOrInfinite = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""
    max_tokens: NotNegative[int] = 0
    """Longest input in tokens; 0: 384 for questions, else 128. It is at most the longest input of the model."""
    stride: Count = 128
    """Tokens between the starts of two successive windows of a long context, at most half of `max_tokens`. A smaller
    stride makes more windows."""
    question_tokens: NotNegative[int] = 64
    """Longest question in tokens, at most a quarter of `max_tokens`; the rest of a longer question is cut off."""
    micro_batch: Count = 32
    """Examples that one process runs at once. Lower it if memory runs out: the result stays the same."""
    train_languages: tuple[str, ...] = ("en",)
    """Languages whose training sets are read; `all`: every one in --data (translate-train-all)."""
    train_examples: NotNegative[int] = 0
    """Read only this many training examples of each language, from the start, for a quick try; 0: all."""
    held_out: bool = False
    """Train on nine tenths of the training examples and use the rest as dev set. If --data has no dev set on which
    settings can be chosen, --grid turns this on."""

    def completed(self, task: DownstreamTask, model: ModelConfig) -> Self:
        """These settings with the task's values in place of zeros, and with lengths that `model` can read. Raises
        ValueError if the longest input is too short for text."""
        longest = min(self.max_tokens or task.max_tokens, model.max_positions)
        if longest < 16:
            raise ValueError(f"tuning.max_tokens {longest} leaves no room for text: raise it to at least 16")
        return replace(
            self,
            learning_rate=self.learning_rate or task.learning_rates[0],
            batch=self.batch or task.batch_sizes[0],
            epochs=self.epochs or task.epochs[0],
            warmup=0.1 if self.warmup is None and not task.warmup_steps else self.warmup,
            max_tokens=longest,
            question_tokens=min(self.question_tokens, longest // 4),
            stride=min(self.stride, longest // 2),
        )


@dataclass(frozen=True)
class FinetuneConfig(Training):
    """The whole configuration of one run, as its `config.json` stores it."""

    task: str = "ner"
    """Task that the model was fine-tuned on."""
    tuning: TuningConfig = field(default_factory=TuningConfig)
    base: str = ""
    """SHA-256 of the weights that the run starts from."""


@dataclass(frozen=True)
class FinetuneSettings:
    """Options of the command."""

    task: Literal["pos", "ner", "conll", "xquad", "mlqa", "tydiqa", "xnli", "pawsx"]
    """Task to fine-tune on: parts of speech, entities (PAN-X or CoNLL), questions, inference or paraphrases."""
    model: Path
    """Folder of a pre-training run (RUN@STEP: of one of its checkpoints), or of an export."""
    data: tuple[Path, ...]
    """Folders with the task's files, which have XTREME's names, such as train-en.tsv and test-de.tsv for `ner`. For
    tags, a line has a word, a tab and its tag, and an empty line ends a sentence; for pairs, two texts and a label with
    tabs between them; questions are in SQuAD's JSON, and their training files may be in a folder of their own."""
    out: Path
    """Folder for scores, predictions and weights. If there are several runs, each has its own folder below it. Give it
    again to resume."""
    random: bool = False
    """To measure what pre-training gains, start from random weights in the model's shape. If the model is that of a
    run, the run's seed draws them."""
    split: Literal["test", "dev"] = "test"
    """Sets to score and predict. dev: the dev sets of all languages, because XTREME's tests have no labels."""
    seeds: tuple[Seed, ...] = (1,)
    """Seeds of the head's weights, the order of examples and dropout; one run for each."""
    grid: bool = False
    """Run every combination of the task's published settings (XLM-E, Table 11); a setting that --tuning gives stays as
    given."""
    number: int | None = None
    """Do only the run at this index, from 0, of the runs that --list prints. In a job array each job has its index."""
    list: Annotated[bool, tyro.conf.arg(name="list")] = False
    """Print the folders of the runs and end."""
    tuning: TuningConfig = field(default_factory=TuningConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = _TRAIN_DEFAULTS


_PRETRAINING_FLAGS = [
    f"--{section}.{setting.name}".replace("_", "-")
    for section, config_type in (("engine", EngineConfig), ("train", TrainConfig))
    for setting in fields(config_type)
    if setting.metadata == PRETRAINING_ONLY
]
_NARROWED_SETTINGS = {  # a setting with fewer values than in pre-training -> its type, their names and the help
    "--engine.kind": (
        Literal["deepspeed", "plain"],
        "deepspeed|plain",
        "deepspeed: data parallel with ZeRO; plain: torch on one process.",
    ),
    "--engine.deepspeed": (
        str,
        "NAME",
        "A file of ds_configs/ by name (zero1, zero2, zero3, zero3_cpu …), or a path to a DeepSpeed JSON with engine "
        "keys only; a higher stage partitions more state.",
    ),
}
_CONFIG = Option("--config", Path, "FILE", "A run's config.json, or a TOML file with the names of the flags.", None)


def _without_pretraining(option: Option) -> Option | None:
    """The option as fine-tuning has it; None if only pre-training reads it."""
    if option.flag in _PRETRAINING_FLAGS:
        return None
    kind, value, text = _NARROWED_SETTINGS.get(option.flag, (option.kind, option.value, option.help))
    return option._replace(kind=kind, value=value, help=text)


def parse(prog: str, arguments: list[str], description: str = "") -> FinetuneSettings:
    """Parse the --config file and the command line, whose flags replace settings of the file. Raises ValueError if the
    file has no settings of fine-tuning, and for a flag or a value that only pre-training reads."""
    arguments, file_name = take_flag(arguments, "--config")
    if "--config" in arguments:
        raise ValueError("--config has no value: write one after it")
    if file_name is not None:
        flags = {positive(argument.partition("=")[0].replace("_", "-")) for argument in arguments}
        arguments = [*_arguments_of(Path(file_name), flags), *arguments]
    for flag in _PRETRAINING_FLAGS:
        if without_flags(arguments, flag) != arguments:
            raise ValueError(f"{flag} is for pre-training and has no effect here: leave it out")
    if "--engine.kind=pipeline" in arguments or ("--engine.kind", "pipeline") in pairwise(arguments):
        raise ValueError("engine.kind pipeline is for pre-training: fine-tune with engine.kind deepspeed")
    return call_from_command_line(
        FinetuneSettings, prog, arguments, description, also=[_CONFIG], shown=_without_pretraining
    )


def _arguments_of(path: Path, replaced_flags: Container[str]) -> Iterator[str]:
    """The settings in a TOML file or in a run's config.json, as arguments; without `replaced_flags`."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file: name a run's config.json, or a TOML file")
    values = read_values(path)
    is_run_config = "base" in values and "seed" in values
    if is_run_config:  # the other settings follow from these, the model and the data
        values["seeds"] = [values["seed"]]
        values = {name: values[name] for name in ("task", "seeds", "tuning", "engine", "train")}
    elif "objective" in values:
        raise ValueError(f"{path} has settings of pre-training: name a file with settings of fine-tuning")
    for name, value in flatten(values).items():
        flag = f"--{name}".replace("_", "-")
        if flag in replaced_flags or value is None or (is_run_config and flag in _PRETRAINING_FLAGS):
            continue
        if isinstance(value, bool):
            yield flag if value else negative(flag)
        else:
            yield from (flag, *map(str, value if isinstance(value, list) else [value]))


@dataclass(frozen=True)
class Job:
    """One run of a command."""

    command: FinetuneSettings
    out: Path  # folder of this run
    seed: int
    tuning: TuningConfig
    tuning_count: int = 1  # the number of different `tuning` among the command's runs

    @property
    def scores_file(self) -> Path:
        """The file of the scores; a run that has it is complete."""
        return self.out / "scores.json"


def jobs(command: FinetuneSettings) -> list[Job]:
    """All runs of the command, or the one that --number names. Their folders are below --out; a run without --grid and
    with one seed has --out itself. Raises ValueError for a seed that is named twice, and for a number without a run."""
    if len(set(command.seeds)) < len(command.seeds):
        raise ValueError("--seeds names a number twice: name each once")
    tunings = grid(command.task, command.tuning) if command.grid else [command.tuning]
    runs = []
    for tuning, seed in product(tunings, command.seeds):
        tuning_folder = f"lr{tuning.learning_rate:g}_b{tuning.batch}_e{tuning.epochs}" if command.grid else ""
        out = command.out / tuning_folder / (f"seed{seed}" if len(command.seeds) > 1 else "")
        runs.append(Job(command, out, seed, tuning, len(tunings)))
    if command.number is None or command.list:
        return runs
    if not 0 <= command.number < len(runs):
        raise ValueError(f"--number is {command.number}: the last run is {len(runs) - 1}, counted from 0")
    return [runs[command.number]]


def run_config(
    task: str,
    tuning: TuningConfig,
    model: ModelConfig,
    engine: EngineConfig,
    train: TrainConfig,
    seed: int,
    feature_count: int,
    base: str,
) -> FinetuneConfig:
    """The configuration of a run. `tuning` must be what `completed` returned. `feature_count` is the number of inputs
    that the run trains on, `base` the SHA-256 of the weights that it starts from. Raises ValueError for settings that
    `validate` refuses."""
    from ..validate import validate  # it loads torch, and --help should not

    steps = ceil(feature_count * tuning.epochs / tuning.batch)
    # If the published value is a number of steps, a short run warms up for at most half of its steps.
    warmup = (
        min(DOWNSTREAM_TASKS[task].warmup_steps, steps // 2) if tuning.warmup is None else int(steps * tuning.warmup)
    )
    return validate(
        FinetuneConfig(
            name=f"{model.width}x{model.discriminator_layers}-{task}",
            seed=seed,
            model=replace(model, compile="none"),  # batches differ in length, and each length would be compiled anew
            data=DataConfig(tuning.batch, 0, tuning.micro_batch),
            optimizer=OptimizerConfig(
                learning_rate=tuning.learning_rate,
                warmup_steps=warmup,
                beta2=0.999,
                epsilon=1e-8,
                weight_decay=tuning.weight_decay,
                clip=tuning.clip,
                layer_decay=tuning.layer_decay,
            ),
            engine=engine,
            train=replace(train, steps=steps),
            task=task,
            tuning=tuning,
            base=base,
        )
    )


def grid(task: str, tuning: TuningConfig) -> list[TuningConfig]:
    """Every combination of the task's published learning rates, batches and epochs. A value that `tuning` sets replaces
    the published ones."""
    published = DOWNSTREAM_TASKS[task]
    choices = product(
        (tuning.learning_rate,) if tuning.learning_rate else published.learning_rates,
        (tuning.batch,) if tuning.batch else published.batch_sizes,
        (tuning.epochs,) if tuning.epochs else published.epochs,
    )
    return [replace(tuning, learning_rate=rate, batch=batch, epochs=epochs) for rate, batch, epochs in choices]
