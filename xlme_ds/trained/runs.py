"""Reads the model of a run: the finished model, or the one in the newest complete checkpoint if the run is unfinished.
RUN@STEP names the model in the checkpoint of that step."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoint.state_files import MASTER_WEIGHTS, StateReader, checkpoint_fault, read_state, state_files
from ..checkpoint_names import checkpoints_of, run_and_step, saved_step
from ..cli import note
from ..config import EncoderName, ModelConfig, ObjectiveConfig, RunConfig
from ..data.order import phase_index, phases
from ..data.vocabulary import MODEL_FILE, Vocabulary
from ..io.files import atomic_write, fsync
from ..io.folders import require_folder
from ..models.encoder import block_sizes
from ..models.text_encoder import TextEncoder, encoder_from_state, take_encoder
from ..objectives import objective_of
from .config_json import (
    CONFIG_FILE,
    ModelSettings,
    explain_mismatch,
    read_config,
    read_model_settings,
    read_run_config,
    read_vocabulary,
    without_prefix,
)
from .weights import SETTINGS_KEY, WEIGHTS_FILE, read_weights, require_same_settings, save_weights

MODEL_FOLDER = "model"  # in a run folder: the vocabulary, and after the last step the weights, in float32
# Settings of a model that do not change what it computes once it is trained: how it runs, and its initialisation.
RUNTIME_SETTINGS = {"kernels", "compile", "head_chunk", "activation_checkpointing", "vocabulary_blocks", "init_std"}


class TrainedEncoder(NamedTuple):
    """A trained encoder and the vocabulary that it reads."""

    encoder: TextEncoder
    vocabulary: Vocabulary


class TrainedRun(NamedTuple):
    """The whole model of a run, or of an export."""

    folder: Path
    state: dict[str, Tensor]  # the parameters by name
    model: ModelConfig
    vocabulary: Vocabulary
    task: str  # name of the fine-tuning task; empty after pre-training
    objective: ObjectiveConfig  # the objective of pre-training; after fine-tuning the default, which is not used
    step: int | None = None  # step of the checkpoint that was read; None: a finished model was read

    @property
    def encoders(self) -> Mapping[EncoderName, str]:
        """Name of each encoder -> prefix of its head's parameters (see `Pretraining`). After fine-tuning there is one
        encoder."""
        return {"encoder": "head."} if self.task else objective_of(self.objective).encoders

    def encoder(self, which: EncoderName | None = None) -> TextEncoder:
        """An encoder, by default the main one, in evaluation mode. Raises ValueError if the run does not have it."""
        which = which or main_encoder(self.encoders)
        if self.task and which == "generator":
            raise ValueError(f"{self.folder} was fine-tuned and has no generator: name the run that it started from")
        if not self.task and which not in self.encoders:
            raise ValueError(
                f"{self.folder} was trained for {self.objective.name} and has no {which}: set --which or start.take to "
                f"{' or '.join(self.encoders)}"
            )
        with explain_mismatch(self.folder, self.folder):
            if self.task:
                return encoder_from_state(without_prefix(self.state, "encoder."), self.model)
            return take_encoder(self.state, self.model, which)

    def load_into(self, whole_model: nn.Module) -> None:
        """Copy the parameters into `whole_model`, as the objective builds it. Raises ValueError if they do not fit."""
        with explain_mismatch(self.folder, self.folder):
            whole_model.load_state_dict(self.state)


def main_encoder(encoders: Mapping[EncoderName, str]) -> EncoderName:
    """The encoder that is used after pre-training: the first of `encoders`, which is the discriminator if there is a
    generator."""
    return next(iter(encoders))


def load_run(folder: Path) -> TrainedRun:
    """The weights (float32, on the CPU), settings and vocabulary of a run, or of its checkpoint that RUN@STEP names.

    Raises ValueError when the folder holds no run, or the run lacks the checkpoint.
    """
    (run, step), settings = run_and_step(folder), read_model_settings(folder)
    model = settings.model
    weights = run / MODEL_FOLDER / WEIGHTS_FILE
    if step is None and weights.exists():
        require_same_settings(weights, read_config(run)["config"]["model"], run / CONFIG_FILE)
        state = read_weights(weights)
    elif settings.task and step is not None:
        raise ValueError(f"{run} was fine-tuned, and only its finished model can be read: leave out @{step}")
    elif settings.task:
        raise ValueError(f"{run} was fine-tuned, and {weights} does not exist: finish it by the same command")
    else:
        step, state = _load_checkpoint(run, step, settings)
        model = model_after(read_run_config(run), step)
        note(f"{folder}: reading the model of its checkpoint of step {step}")
    path = run / MODEL_FOLDER / MODEL_FILE
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: copy it from the folder vocab of the run's data, or start its command again"
        )
    # The weights of a finished run may have another number of vocabulary blocks than its config.json names.
    state = split_vocabulary_tables(state, model)
    return TrainedRun(folder, state, model, read_vocabulary(run, path), settings.task, settings.objective, step)


def model_after(config: RunConfig, steps: int) -> ModelConfig:
    """The model's settings after `steps` steps, with the rotary base of the last step's phase."""
    run_phases = phases(config.data, config.objective.mask_fraction)
    base = run_phases[phase_index(run_phases, max(steps - 1, 0))].rotary_base
    return config.model if base is None else replace(config.model, rotary_base=base)


def split_vocabulary_tables(state: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """`state` with the vocabulary tables split into `model.vocabulary_blocks` blocks.

    Tables whose number of rows is not the size of the vocabulary stay as they are.
    """
    for first_block in [name for name in state if name.endswith(("embedding_0", "difference_0"))]:
        table = first_block.removesuffix("0")
        names = [name for n in range(len(state)) if (name := f"{table}{n}") in state]
        if sum(len(state[name]) for name in names) == model.vocabulary and len(names) != model.vocabulary_blocks:
            blocks = torch.cat([state[name] for name in names]).split(block_sizes(model))
            state = {name: value for name, value in state.items() if name not in names}
            state |= {f"{table}{n}": block for n, block in enumerate(blocks)}
    return state


def pin_step(folder: Path) -> Path:
    """A name that means the same model on every rank and at any time: RUN@STEP for an unfinished run of pre-training,
    else `folder`."""
    run, step = run_and_step(folder)
    if step is None and not (run / MODEL_FOLDER / WEIGHTS_FILE).exists():
        config = read_config(folder).get("config")
        if config is not None and "task" not in config:
            return Path(f"{run}@{saved_step(find_complete_checkpoint(run))}")
    return folder


def find_complete_checkpoint(run: Path, step: int | None = None) -> Path:
    """The newest complete checkpoint of a run, or its checkpoint of `step`. Raises ValueError if there is none.

    The run may still be training and delete checkpoints meanwhile.
    """
    require_folder(run, "name a run folder")
    checkpoints = checkpoints_of(run)
    for folder in reversed(checkpoints):
        if step is None or saved_step(folder) == step:
            fault = checkpoint_fault(folder)
            if fault is None:
                identity = read_config(run).get("run") if (run / CONFIG_FILE).exists() else None
                if identity not in (None, read_state(folder).get("run")):
                    raise ValueError(f"{folder} was saved by another run: move it out of this folder")
                return folder
            if checkpoints_of(run) != checkpoints:
                return find_complete_checkpoint(run, step)
            note(f"{folder} is left out: {fault}")
    if step is None:
        raise ValueError(
            f"{run} has no complete checkpoint: wait for its first, or start its command again (train.save_every says "
            "when it saves)"
        )
    names = ", ".join(str(saved_step(folder)) for folder in checkpoints if saved_step(folder) != step)
    raise ValueError(
        f"{run} has no complete checkpoint of step {step}: "
        + (f"it has those of step {names}" if names else "it has none at all, wait for its first")
    )


def read_checkpoint(folder: Path, settings: ModelSettings) -> dict[str, Tensor]:
    """The float32 parameters of the whole model from a checkpoint that any engine wrote."""
    with torch.device("meta"):
        whole_model = objective_of(settings.objective).build(settings.model)
    state = {name: torch.empty(value.shape) for name, value in whole_model.state_dict().items()}
    sizes = {name: value.numel() for name, value in state.items()}
    pieces = ((name, MASTER_WEIGHTS, 0, value.view(-1)) for name, value in state.items())
    StateReader(state_files(folder)).read(pieces, sizes)
    return state


def _load_checkpoint(run: Path, step: int | None, settings: ModelSettings) -> tuple[int, dict[str, Tensor]]:
    """Returns (step, parameters) of the checkpoint that `find_complete_checkpoint` finds."""
    while True:
        source = find_complete_checkpoint(run, step)
        try:
            return saved_step(source), read_checkpoint(source, settings)
        except (ValueError, OSError):
            if checkpoint_fault(source, checksums=False) is None:
                raise
            # The run has saved a newer checkpoint meanwhile and deleted this one: try again.


def write_model(folder: Path, model: ModelConfig, state: Mapping[str, Tensor], vocabulary: Path) -> None:
    """Write the folder `model` of a run: a copy of the SentencePiece file, then the float32 parameters of the whole
    model. The file of parameters comes last: it marks the folder as complete."""
    settings = {name: value for name, value in asdict(model).items() if name not in RUNTIME_SETTINGS}
    write_vocabulary(folder, vocabulary)
    weights = folder / WEIGHTS_FILE
    partial = weights.with_name(f"{weights.name}.tmp")
    save_weights(state, partial, {SETTINGS_KEY: json.dumps(settings, sort_keys=True)})
    fsync(partial)
    partial.rename(weights)


def write_vocabulary(folder: Path, vocabulary: Path) -> None:
    """Copy the SentencePiece file into the folder `model` of a run; a run does this at its start."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / MODEL_FILE) as file:
        file.write(vocabulary.read_bytes())
