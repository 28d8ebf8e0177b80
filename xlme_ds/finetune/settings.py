"""The settings of a fine-tuning run, and those of a published grid."""

from dataclasses import dataclass, field, fields, replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import NamedTuple, Self

from ..config import DataConfig, EngineConfig, ModelConfig, OptimizerConfig, TrainConfig, Training
from ..data.schema import LAYOUTS, Layout
from ..validate import validate
from .downstream_tasks import TASKS, DownstreamTask


class Windows(NamedTuple):
    """Lengths in tokens: of a whole input, from one window over a context to the next, of a question (cut to it)."""

    longest: int
    stride: int
    question: int
    layout: Layout = LAYOUTS["xlme"]


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
        for setting in fields(done):
            value = getattr(done, setting.name)
            if isinstance(value, int | float) and (value < 0 or (value == 0 and setting.name in _POSITIVE)):
                raise ValueError(f"tuning.{setting.name} is {value}: it must be {'positive' if value else 'above 0'}")
        if not 0 <= done.dropout < 1:
            raise ValueError(f"tuning.dropout is {done.dropout}: it must be at least 0 and below 1")
        if longest < 16:
            raise ValueError(f"tuning.max_tokens {longest} leaves no room for text: raise it to at least 16")
        return done

    def windows(self, model: ModelConfig) -> Windows:
        """The lengths to which texts are cut for `model`."""
        return Windows(self.max_tokens, self.stride, self.question_tokens, LAYOUTS[model.layout])


_POSITIVE = ("learning_rate", "batch", "epochs", "clip", "stride", "micro_batch")


@dataclass(frozen=True)
class FinetuneConfig(Training):
    """The configuration in the `config.json` of a run; `base`: SHA-256 of the weights that it starts from."""

    task: str = "ner"
    tuning: TuningConfig = field(default_factory=TuningConfig)
    base: str = ""


@dataclass(frozen=True)
class Job:
    """One run: a task, a model, a seed; `settings`: how many there are to choose from, of which these are one."""

    task: str
    model: Path
    data: tuple[Path, ...]
    out: Path
    seed: int
    tuning: TuningConfig
    engine: EngineConfig
    train: TrainConfig
    settings: int = 1

    @property
    def done(self) -> Path:
        """The file of the scores, the run's last act."""
        return self.out / "scores.json"

    @property
    def predictions(self) -> Path:
        """The folder of the predictions."""
        return self.out / "predictions"


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
    optimizer = OptimizerConfig(
        tuning.learning_rate, warmup, 0.9, 0.999, 1e-8, tuning.weight_decay, tuning.clip, tuning.layer_decay
    )
    data = DataConfig(tuning.batch, 0, tuning.micro_batch)
    model = replace(model, compile="none")  # every batch has a length of its own
    config = FinetuneConfig(
        f"{model.width}x{model.discriminator_layers}-{task}", seed, model, data, optimizer, engine,
        replace(train, steps=steps), task, tuning, base,
    )  # fmt: skip
    return validate(config)


def grid(task: str, tuning: TuningConfig) -> list[TuningConfig]:
    """The published settings of a task, those that `tuning` does not fix already."""
    of = TASKS[task]
    rates = (tuning.learning_rate,) if tuning.learning_rate else of.learning_rates
    batches = (tuning.batch,) if tuning.batch else of.batches
    epochs = (tuning.epochs,) if tuning.epochs else of.epochs
    return [
        replace(tuning, learning_rate=rate, batch=batch, epochs=number)
        for rate, batch, number in product(rates, batches, epochs)
    ]
