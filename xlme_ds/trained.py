"""Trained models from the folders that hold them: of a run, or in Hugging Face's form.

The model of a finished run is that of its last step, of any other run that of its newest whole checkpoint; RUN@STEP in
place of its folder names the checkpoint of that step.

Hugging Face's form is written by `xlme_ds.export`; this file says what its names mean, for both directions.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .checkpoint.state_files import WEIGHTS, StateReader, fault_of, state_files
from .cli import note
from .config import ModelConfig, ObjectiveConfig, RunConfig, from_json
from .data.vocabulary import MODEL_FILE, Vocabulary
from .folders import at_step, checkpoints_of, saved_step
from .io.errors import refuse
from .io.files import read_json
from .models.electra import block_sizes
from .models.init import initialise
from .models.text_encoder import TextEncoder, Which, encoder_of, take_encoder
from .objectives import objective_of

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MODEL_FOLDER = "model"  # of a run: its vocabulary, and float32 weights when the last step is done

MODEL_TYPE = "xlme"  # `model_type` in the `config.json` of an export
GENERATOR_FOLDER = "generator"  # of an export: the generator, an export of its own
SENTENCEPIECE_FILE = "sentencepiece.bpe.model"
PREFIX = f"{MODEL_TYPE}."  # of the encoder's parameters in an export; a bare AutoModel saves them without it
EMBEDDING = "embedding.weight"
# Of an export whose discriminator has an embedding of its own (GDES): its difference from the generator's. A sum of
# floats does not give back what was added.
DIFFERENCE_FILE = "difference.safetensors"
DIFFERENCE = "difference.weight"
# What of ModelConfig shapes one encoder, under its name in an export.
EXPORTED_SETTINGS = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "discriminator_layers": "num_hidden_layers",
    "max_positions": "max_position_embeddings",
    "init_std": "initializer_range",
    "norm": "norm",
    "norm_epsilon": "layer_norm_eps",
    "masked_head": "masked_head",
    "embedding_norm": "embedding_norm",
    "absolute_positions": "absolute_positions",
    "relative_bias": "relative_bias",
    "relative_buckets": "relative_buckets",
    "relative_max_distance": "relative_max_distance",
    "layout": "layout",
    "language_embeddings": "languages",
}
WHICH = "which"  # encoder of the run, in the `config.json` of an export
DECODER_FORM = "decoder_form"  # `model.decoder` in the `config.json` of a translating export
_CHECKSUM = "crc32"  # in the metadata of a file of weights
# Of exports that were written before they could have these.
_YOUNGER = {"layout": "xlme", "languages": (), "masked_head": "dense"}


def first_of(encoders: Mapping[Which, str]) -> Which:
    """The encoder that a pre-trained model is for."""
    return next(iter(encoders))


class TrainedEncoder(NamedTuple):
    """A trained encoder and the vocabulary that it reads."""

    encoder: TextEncoder
    vocabulary: Vocabulary


class RunSettings(NamedTuple):
    """What of a run's settings says what its model is."""

    model: ModelConfig
    task: str
    objective: ObjectiveConfig


class TrainedRun(NamedTuple):
    """The whole model of a run."""

    folder: Path
    state: dict[str, Tensor]
    model: ModelConfig
    vocabulary: Vocabulary
    task: str  # what it was fine-tuned on; empty after pre-training
    objective: ObjectiveConfig  # what it was pre-trained for
    step: int | None = None  # of the checkpoint that was read; None: the model of its last step

    @property
    def encoders(self) -> Mapping[Which, str]:
        """Its encoders and their heads (see `Pretraining`); the one encoder of a fine-tuned run."""
        return {"encoder": "head."} if self.task else objective_of(self.objective).encoders

    def encoder(self, which: Which | None = None) -> TextEncoder:
        """One of its encoders, by default the first, in evaluation mode. Raises ValueError when it is not there."""
        which = which or first_of(self.encoders)
        refuse(
            [
                (
                    not self.task or which != "generator",
                    f"{self.folder} was fine-tuned and has no generator: name the run that it started from",
                ),
                (
                    bool(self.task) or which in self.encoders,
                    f"{self.folder} was trained for {self.objective.name} and has no {which}: name "
                    f"{' or '.join(self.encoders)}",
                ),
            ]
        )
        try:
            if not self.task:
                return take_encoder(self.state, self.model, which)
            return encoder_of(_without_prefix(self.state, "encoder."), self.model)
        except (KeyError, RuntimeError) as error:
            raise mismatch(self.folder / MODEL_FOLDER / WEIGHTS_FILE, self.folder, error) from None

    def load_into(self, whole: nn.Module) -> None:
        """Its parameters into the whole model that its objective builds. Raises ValueError when they do not fit."""
        try:
            whole.load_state_dict(self.state)
        except RuntimeError as error:
            raise mismatch(self.folder / MODEL_FOLDER / WEIGHTS_FILE, self.folder, error) from None


def load_encoder(folder: Path, which: Which | None = None) -> TrainedEncoder:
    """The encoder in `folder`, by default the first that it has, float32 on the CPU in evaluation mode.

    Raises ValueError in one sentence when the folder holds none.
    """
    return load_encoder_and_step(folder, which)[0]


def load_encoder_and_step(folder: Path, which: Which | None = None) -> tuple[TrainedEncoder, int | None]:
    """`load_encoder`, and the step of the checkpoint that was read (see `TrainedRun`)."""
    if read_config(folder).get("model_type") == MODEL_TYPE:
        return _load_export(_exported(folder, which)), None
    run = load_run(folder)
    return TrainedEncoder(run.encoder(which), run.vocabulary), run.step


def weights_sha256(encoder: nn.Module) -> str:
    """SHA-256 of the parameters of an encoder, which tells a model from another of the same name."""
    digest = hashlib.sha256()
    for name, value in encoder.state_dict().items():
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def start_of(folder: Path) -> tuple[str, int]:
    """The objective and the seed of the run in `folder`, the usual ones for a model that is no run."""
    config, usual = read_config(folder).get("config", {}), RunConfig(name="")
    return config.get("objective", {}).get("name", usual.objective.name), int(config.get("seed", usual.seed))


def initial_encoder(cfg: ModelConfig, objective: str, seed: int, which: Which | None = None) -> TextEncoder:
    """The random encoder that a run with these settings draws first, float32 on the CPU; `cfg.discriminator_layers` is
    its depth, whichever it is."""
    built = objective_of(ObjectiveConfig(objective))
    cfg = replace(cfg, generator_layers=cfg.discriminator_layers)
    model = built.build(cfg)
    initialise(model, seed, cfg.init_std)
    there = which if which is not None and which in built.encoders else first_of(built.encoders)
    return take_encoder(model.state_dict(), cfg, there)


def require_finite(model: nn.Module, folder: Path) -> None:
    """Raise ValueError, naming the parameter, for weights that are not numbers."""
    refuse(
        (
            bool(parameter.isfinite().all()),
            f"{folder}: {name} is not finite, the training diverged: name an earlier checkpoint's weights",
        )
        for name, parameter in model.named_parameters()
    )


def translates(folder: Path) -> bool:
    """Whether `folder` is an export of a translating run, with its decoder."""
    config = read_config(folder)
    return config.get("model_type") == MODEL_TYPE and bool(config.get(DECODER_FORM))


def load_translating_export(folder: Path) -> TrainedRun:
    """The whole model of an export that `translates`, as that of the run that it was. Raises as `load_encoder`."""
    config, (encoder, vocabulary) = read_config(folder), load_encoder(folder)
    model = replace(encoder.cfg, decoder=config[DECODER_FORM], decoder_layers=config["decoder_layers"])
    state = encoder.state_dict() | read_heads(folder)
    return TrainedRun(folder, state, model, vocabulary, "", ObjectiveConfig("mt", mask_fraction=1.0))


def load_run(folder: Path) -> TrainedRun:
    """Weights (float32, on the CPU), settings and vocabulary of a run, or of one of its checkpoints, RUN@STEP.

    Raises ValueError when the folder is of no run, or the run has no such checkpoint.
    """
    (run, step), settings = at_step(folder), read_settings(folder)
    weights = run / MODEL_FOLDER / WEIGHTS_FILE
    if step is None and weights.exists():
        state = read_weights(weights)
    elif settings.task:
        raise ValueError(f"{run} was fine-tuned, and {weights} does not exist: start its command again, to its end")
    else:
        step, state = _checkpoint(run, step, settings)
        note(f"{run}: the model of its checkpoint of step {step} is read")
    path = run / MODEL_FOLDER / MODEL_FILE
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: copy it from the folder vocab of the run's data, or start its command again"
        )
    state = in_blocks(state, settings.model)  # a finished run may have been called again with other blocks
    return TrainedRun(folder, state, vocabulary=known_vocabulary(run, path), step=step, **settings._asdict())


def in_blocks(state: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """`state` with each table of the vocabulary in the blocks of `model`; what is not of its size is left as it is."""
    for first in [name for name in state if name.endswith(("embedding_0", "difference_0"))]:
        table = first.removesuffix("0")
        names = [name for n in range(len(state)) if (name := f"{table}{n}") in state]
        if sum(len(state[name]) for name in names) == model.vocabulary and len(names) != model.vocabulary_blocks:
            blocks = torch.cat([state[name] for name in names]).split(block_sizes(model))
            state = {name: value for name, value in state.items() if name not in names}
            state |= {f"{table}{n}": block for n, block in enumerate(blocks)}
    return state


def pinned(folder: Path) -> Path:
    """What `load_run` would read now, by a name that means the same on every rank: RUN@STEP for a run that is not
    finished."""
    run, step = at_step(folder)
    if step is None and not (run / MODEL_FOLDER / WEIGHTS_FILE).exists() and "config" in read_config(folder):
        return Path(f"{run}@{saved_step(whole_checkpoint(run))}")
    return folder


def whole_checkpoint(run: Path, step: int | None = None) -> Path:
    """The newest whole checkpoint of a run, or that of `step`. Raises ValueError where there is none.

    The run may be going on: what it deletes meanwhile is not there.
    """
    found = checkpoints_of(run)
    for folder in reversed(found):
        if step is None or saved_step(folder) == step:
            fault = fault_of(folder)
            if fault is None:
                return folder
            if checkpoints_of(run) != found:
                return whole_checkpoint(run, step)
            note(f"{folder} is left out: {fault}")
    if step is None:
        raise ValueError(
            f"{run} has no whole checkpoint: wait for its first, or start its command again (train.save_every says "
            "when it saves)"
        )
    names = ", ".join(str(saved_step(folder)) for folder in found if saved_step(folder) != step)
    raise ValueError(
        f"{run} has no whole checkpoint of step {step}: "
        + (f"it has those of step {names}" if names else "it has none at all, wait for its first")
    )


def read_checkpoint(folder: Path, settings: RunSettings) -> dict[str, Tensor]:
    """The float32 parameters of the whole model from a checkpoint of any engine, one tensor at a time."""
    reader = StateReader(state_files(folder))
    with torch.device("meta"):
        state = objective_of(settings.objective).build(settings.model).state_dict()
    for name, there in state.items():
        state[name] = torch.empty(there.shape)
    sizes = {name: value.numel() for name, value in state.items()}
    reader.read(((name, WEIGHTS, 0, value.view(-1)) for name, value in state.items()), sizes)
    return state


def _checkpoint(run: Path, step: int | None, settings: RunSettings) -> tuple[int, dict[str, Tensor]]:
    while True:
        source = whole_checkpoint(run, step)
        try:
            return saved_step(source), read_checkpoint(source, settings)
        except (ValueError, OSError):
            if fault_of(source, checksums=False) is None:
                raise
            # The run deleted it meanwhile, for a newer one.


def known_vocabulary(folder: Path, path: Path) -> Vocabulary:
    """The vocabulary at `path`, if it is that of the run or export in `folder`. Raises ValueError where it is another.

    Where an older version wrote the folder without its fingerprint any is taken, with a note.
    """
    config, vocabulary = read_config(folder), Vocabulary(path)
    data = config if config.get("model_type") == MODEL_TYPE else config.get("data")
    known = data.get("vocabulary_sha256") if isinstance(data, dict) else None
    if known is None:
        note(
            f"{folder / CONFIG_FILE} is of an older version and does not tell the vocabulary: {vocabulary.path} is "
            "taken as it is"
        )
    elif known != vocabulary.sha256:
        raise ValueError(
            f"{vocabulary.path} is not the vocabulary that the model in {folder} was trained with: restore or name "
            "that one"
        )
    return vocabulary


def read_settings(folder: Path) -> RunSettings:
    """What a run, finished or not, is; ValueError when the folder holds none."""
    config = read_config(folder)
    if "config" not in config:
        raise ValueError(f"{folder / CONFIG_FILE} is not of a run: name the folder of one")
    settings = config["config"]
    try:
        model = model_config(settings["model"])
        objective = from_json(ObjectiveConfig, settings.get("objective", {}))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG_FILE} was written by another version of this package: {error!r}") from None
    return RunSettings(model, settings.get("task", ""), objective)


def read_run_config(folder: Path) -> RunConfig:
    """All settings of a pre-training run, of this version or an older one. Raises ValueError for any other folder."""
    config = read_config(folder)
    try:
        settings = config["config"]
        return from_json(RunConfig, settings | {"model": asdict(model_config(settings["model"]))})
    except (TypeError, KeyError, AttributeError) as error:
        words = f"{folder / CONFIG_FILE} is not of a pre-training run of this version or an earlier one"
        raise ValueError(f"{words} ({error!r}): name the folder of one") from None


def model_config(settings: Mapping[str, Any]) -> ModelConfig:
    """From what JSON has, which are lists for tuples, of this version or an older one."""
    settings = dict(settings)
    kernels = settings.pop("attention", None)  # the name before kernels
    model = ModelConfig(**settings if kernels is None else {"kernels": kernels.replace("sdpa", "torch"), **settings})
    return replace(model, language_embeddings=tuple(model.language_embeddings))


def save_weights(state: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with a checksum of its tensors, which others may read as they may other new files; the
    library's is for its owner."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(state), path, {**(metadata or {}), _CHECKSUM: _checksum(state)})
    _order_header(path)
    path.chmod(mode)


def _order_header(path: Path) -> None:
    """The library writes metadata in an order of chance: equal weights are to be equal files."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size, "the tensors follow"
        file.seek(8)
        file.write(text.ljust(size))


def _checksum(state: Mapping[str, Tensor]) -> str:
    """CRC-32 of the tensors, by name in order, each after its name, type and shape."""
    crc = 0
    for name, value in sorted(state.items()):
        crc = zlib.crc32(f"{name} {value.dtype} {list(value.shape)}".encode(), crc)
        crc = zlib.crc32(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def write_model(folder: Path, state: Mapping[str, Tensor], vocabulary: Path) -> None:
    """Write the folder `model` of a run: float32 parameters of the whole model, and a copy of the SentencePiece
    file."""
    write_vocabulary(folder, vocabulary)
    # Last: the weights say that the folder is whole.
    _write_whole(folder / WEIGHTS_FILE, lambda partial: save_weights(state, partial))


def write_vocabulary(folder: Path, vocabulary: Path) -> None:
    """The part of the folder `model` that a run has from its start."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_whole(folder / MODEL_FILE, lambda partial: shutil.copyfile(vocabulary, partial))


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    partial = path.with_name(f"{path.name}.tmp")
    write(partial)  # safetensors renames a file of its own to it: so it is opened only then
    with open(partial, "rb+") as file:
        os.fsync(file.fileno())
    partial.rename(path)


def read_heads(folder: Path, which: Which | None = None) -> dict[str, Tensor]:
    """What an export holds next to its encoder, under the names of the heads (`masked_head.bias`, …)."""
    folder = _exported(folder, which)
    return {name: value for name, value in read_model(folder / WEIGHTS_FILE).items() if not name.startswith(PREFIX)}


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a run, which RUN@STEP names as well, or an export; ValueError when there is none."""
    folder, step = at_step(folder)
    try:
        content: dict[str, Any] = read_json(folder / CONFIG_FILE, dict)
        refuse([(step is None or "config" in content, f"{folder} is not a run and has no steps: leave out @{step}")])
        return content
    except (FileNotFoundError, NotADirectoryError):
        hub = "" if folder.exists() else f"; a model on the Hub is fetched by `hf download {folder} --local-dir DIR`"
        message = f"{folder} has no {CONFIG_FILE}: name the folder of a run or of an export{hub}"
        raise ValueError(message) from None


def shards_of(path: Path) -> list[Path]:
    """The weights file at `path`, or the shards that transformers makes of a large one; none where neither is there.

    Raises ValueError where the index of the shards is none, or one of them is missing.
    """
    index = path.with_name(f"{path.name}.index.json")
    if path.exists() or not index.exists():
        return [path] * path.exists()
    try:
        names = sorted({str(name) for name in read_json(index, dict)["weight_map"].values()})
    except (KeyError, AttributeError):
        raise ValueError(f"{index} has no weight_map: fetch the file again") from None
    shards = [path.with_name(Path(name).name) for name in names]  # never below or above the folder
    refuse(
        (shard.exists(), f"{path.parent} lacks {shard.name}, which {index.name} names: fetch it") for shard in shards
    )
    return shards


def read_model(path: Path) -> dict[str, Tensor]:
    """The tensors of the model at `path`, in one safetensors file or in shards. Raises ValueError as the two do."""
    return {name: value for shard in shards_of(path) for name, value in read_weights(shard).items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises ValueError when it is none, or its checksum, where it has one as every
    file of `save_weights`, is not theirs."""
    try:
        with safe_open(path, "pt") as file:
            stored = (file.metadata() or {}).get(_CHECKSUM)
        state = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    words = f"{path} has changed since it was written (checksum): copy it again, or write it anew"
    refuse([(stored is None or stored == _checksum(state), f"{words} (of a run: start its command again)")])
    return state


def export_state(encoder: TextEncoder) -> dict[str, Tensor]:
    """The parameters of an encoder under their names in an export."""
    layers = {f"{PREFIX}encoder.{name}": value for name, value in encoder.encoder.state_dict().items()}
    return {PREFIX + EMBEDDING: torch.cat(encoder.table).detach()} | layers


def _exported(folder: Path, which: Which | None) -> Path:
    """The folder in an export that has the encoder. Raises ValueError where it is not there; an export of a fine-tuned
    run, of XLM-R or by an older version does not say which it has."""
    if which == "generator" and (folder / GENERATOR_FOLDER).is_dir():
        return folder / GENERATOR_FOLDER
    there = read_config(folder).get(WHICH)
    has = there == which or (there is None and which != "generator")
    refuse([(which is None or has, f"{folder} has no {which}: name {there or 'the run that it was exported from'}")])
    return folder


def _load_export(folder: Path) -> TrainedEncoder:
    config = read_config(folder)
    for name, there in (
        (WEIGHTS_FILE, bool(shards_of(folder / WEIGHTS_FILE))),
        (SENTENCEPIECE_FILE, (folder / SENTENCEPIECE_FILE).exists()),
    ):
        advice = "copy it from the folder that `python -m xlme_ds.export` wrote"
        refuse([(there, f"{folder} has no {name}: {advice}")])
    state = read_model(folder / WEIGHTS_FILE)
    state = _without_prefix(state, PREFIX) if PREFIX + EMBEDDING in state else state
    try:
        state["embedding_0"] = state.pop(EMBEDDING)
        cfg = model_config({ours: (_YOUNGER | config)[theirs] for ours, theirs in EXPORTED_SETTINGS.items()})
        encoder = encoder_of(state, cfg)
    except (KeyError, RuntimeError) as error:
        raise mismatch(folder / WEIGHTS_FILE, folder, error) from None
    vocabulary = known_vocabulary(folder, folder / SENTENCEPIECE_FILE)
    words = f"{folder} has embeddings of {cfg.vocabulary} tokens, its vocabulary {vocabulary.size}"
    refuse(
        [(cfg.vocabulary == vocabulary.size, f"{words}: call resize_token_embeddings({vocabulary.size}) and save it")]
    )
    return TrainedEncoder(encoder, vocabulary)


def _without_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """What `prefix` marks, without it; the rest is a head's."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def mismatch(weights: Path, folder: Path, error: Exception) -> ValueError:
    """What to raise when parameters lack (KeyError) or do not fit (torch's RuntimeError)."""
    lines = str(error).splitlines()  # of load_state_dict the second is the first that says something
    why = f"no {error}" if isinstance(error, KeyError) else lines[1 % len(lines)].strip()[:200]
    return ValueError(f"{weights} does not hold the model of {folder / CONFIG_FILE}: {why}")
