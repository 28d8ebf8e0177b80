"""The settings of fine-tuning: of the command, of each of its runs, and of a published grid."""

from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import Annotated, Literal, Self

import tyro

from ..config import DataConfig, EngineConfig, ModelConfig, OptimizerConfig, TrainConfig, Training, refuse
from ..validate import validate
from .downstream_tasks import TASKS, DownstreamTask

_TRAIN = TrainConfig(log_every=20, eval_every=0, save_every=500, keep_last=1, keep_every=0)
_POSITIVE = ("learning_rate", "batch", "epochs", "clip", "stride", "micro_batch")


@dataclass(frozen=True)
class TuningConfig:
    """Settings of one run; 0 takes the task's first published value (XLM-E, Table 11)."""

    learning_rate: float = 0.0
    batch: int = 0
    """Examples that one step consumes (windows, for questions)."""
    epochs: int = 0
    warmup: float | None = None
    """Share of the steps in which the learning rate rises; None takes the task's published one, a tenth, or XNLI's
    12,500 steps."""
    layer_decay: float = 1.0
    """The learning rate falls by this factor from layer to layer downwards (ERNIE-M: 0.8 or 0.9)."""
    dropout: float = 0.1
    weight_decay: float = 0.0
    clip: float = 1.0
    max_tokens: int = 0
    """Longest input; 0: the task's (128, of questions 384), or the model's longest where that is less."""
    stride: int = 128
    """Tokens from a window over a context to the next, at most half a window."""
    question_tokens: int = 64
    micro_batch: int = 32
    """Examples that one process runs at once."""
    train_languages: tuple[str, ...] = ("en",)
    """Languages whose training sets are read; `all`: every one there is (translate-train-all)."""
    train_examples: int = 0
    """Read only so many of each language's training examples, from the start; 0: all."""
    held_out: bool = False
    """Train on nine tenths and score the rest as the dev set; --grid does so where --data has no dev set to choose
    on."""

    def completed(self, task: DownstreamTask, model: ModelConfig) -> Self:
        """With the task's values in place of zeros. Raises ValueError for values that cannot be used."""
        longest = min(self.max_tokens or task.max_tokens, model.max_positions)
        done = replace(
            self,
            learning_rate=self.learning_rate or task.learning_rates[0],
            batch=self.batch or task.batches[0],
            epochs=self.epochs or task.epochs[0],
            warmup=0.1 if self.warmup is None and not task.warmup_steps else self.warmup,
            max_tokens=longest,
            question_tokens=min(self.question_tokens, longest // 4),
            stride=min(self.stride, longest // 2),
        )
        numbers = {name: value for name, value in asdict(done).items() if isinstance(value, int | float)}
        refuse(
            (
                value > 0 or (value == 0 and name not in _POSITIVE),
                f"tuning.{name} is {value}: it must be {'positive' if value else 'above 0'}",
            )
            for name, value in numbers.items()
        )
        refuse(
            [
                (
                    0 <= done.dropout < 1,
                    f"tuning.dropout is {done.dropout}: it must be at least 0 and below 1",
                ),
                (longest >= 16, f"tuning.max_tokens {longest} leaves no room for text: raise it to at least 16"),
            ]
        )
        return done


@dataclass(frozen=True)
class FinetuneConfig(Training):
    """The configuration in the `config.json` of a run; `base`: SHA-256 of the weights that it starts from."""

    task: str = "ner"
    tuning: TuningConfig = field(default_factory=TuningConfig)
    base: str = ""


@dataclass(frozen=True)
class FinetuneSettings:
    """Options of the command."""

    task: Literal["pos", "ner", "conll", "xquad", "mlqa", "tydiqa", "xnli", "pawsx"]
    model: Path
    """Folder of a pre-training run (RUN@STEP: of one of its checkpoints), or of an export."""
    data: tuple[Path, ...]
    """Folders with the task's files by their usual names; questions may be trained on those of another folder."""
    out: Path
    seeds: tuple[int, ...] = (1,)
    grid: bool = False
    """Every published setting of the task (XLM-E, Table 11) that --tuning does not fix."""
    number: int | None = None
    """Do one run of the list alone, counted from 0."""
    list: Annotated[bool, tyro.conf.arg(name="list")] = False
    """Print the folders of the runs and end."""
    tuning: TuningConfig = field(default_factory=TuningConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=lambda: _TRAIN)


@dataclass(frozen=True)
class Job:
    """One run of a command, in the folder `out`; `settings`: how many there are to choose from, of which these are
    one."""

    command: FinetuneSettings
    out: Path
    seed: int
    tuning: TuningConfig
    settings: int = 1

    @property
    def done(self) -> Path:
        """The file of the scores, the run's last act."""
        return self.out / "scores.json"


def jobs(command: FinetuneSettings) -> list[Job]:
    """All runs of the command; a single one has --out itself as its folder."""
    chosen = grid(command.task, command.tuning) if command.grid else [command.tuning]
    found = []
    for tuning in chosen:
        name = f"lr{tuning.learning_rate:g}_b{tuning.batch}_e{tuning.epochs}"
        for seed in command.seeds:
            parts = [name] * command.grid + [f"seed{seed}"] * (len(command.seeds) > 1)
            found.append(Job(command, command.out.joinpath(*parts), seed, tuning, len(chosen)))
    return found


def settings(
    task: str,
    tuning: TuningConfig,
    model: ModelConfig,
    engine: EngineConfig,
    train: TrainConfig,
    seed: int,
    features: int,
    base: str,
) -> FinetuneConfig:
    """The whole configuration of one run on `features` inputs; `tuning` is completed. Raises ValueError."""
    steps = ceil(features * tuning.epochs / tuning.batch)
    # A run of few steps has none left of XNLI's after its half.
    warmup = min(TASKS[task].warmup_steps, steps // 2) if tuning.warmup is None else int(steps * tuning.warmup)
    return validate(
        FinetuneConfig(
            name=f"{model.width}x{model.discriminator_layers}-{task}",
            seed=seed,
            model=replace(model, compile="none"),  # every batch has a length of its own
            data=DataConfig(tuning.batch, 0, tuning.micro_batch),
            optimizer=OptimizerConfig(
                tuning.learning_rate, warmup, 0.9, 0.999, 1e-8, tuning.weight_decay, tuning.clip, tuning.layer_decay
            ),
            engine=engine,
            train=replace(train, steps=steps),
            task=task,
            tuning=tuning,
            base=base,
        )
    )


def grid(task: str, tuning: TuningConfig) -> list[TuningConfig]:
    """The published settings of a task, those that `tuning` does not fix already."""
    published = TASKS[task]
    choices = product(
        (tuning.learning_rate,) if tuning.learning_rate else published.learning_rates,
        (tuning.batch,) if tuning.batch else published.batches,
        (tuning.epochs,) if tuning.epochs else published.epochs,
    )
    return [replace(tuning, learning_rate=rate, batch=batch, epochs=epochs) for rate, batch, epochs in choices]
