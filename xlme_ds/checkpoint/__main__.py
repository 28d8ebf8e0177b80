"""List, check or convert the checkpoints of a run that has stopped, write their weights, or average several models.

A run resumes without any of these commands, because every engine reads every checkpoint as it is.
"""

import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from ..checkpoint_names import (
    FINISHED,
    checkpoints_of,
    is_checkpoint_name,
    require_run_folder,
    run_and_step,
    saved_step,
)
from ..cli import program, run_subcommand
from ..config import ModelConfig
from ..data.vocabulary import MODEL_FILE, Vocabulary
from ..io.errors import in_words
from ..io.files import file_sha256, write_versioned
from ..io.folders import atomic_folder, require_new
from ..trained.config_json import (
    CONFIG_FILE,
    SENTENCEPIECE_FILE,
    read_config,
    read_model_settings,
    read_run_config,
    read_vocabulary,
)
from ..trained.exports import DIFFERENCE, DIFFERENCE_FILE, GENERATOR_FOLDER, embedding_name, require_exported_files
from ..trained.runs import (
    MODEL_FOLDER,
    RUNTIME_SETTINGS,
    TrainedRun,
    find_complete_checkpoint,
    load_run,
    model_after,
    read_checkpoint,
    split_vocabulary_tables,
    write_model,
)
from ..trained.weights import WEIGHTS_FILE, read_metadata, read_weights, save_weights
from .checkpoints import write_state_and_marker
from .state_files import StateReader, StateWriter, checkpoint_fault, merge_state, read_state, state_file, state_files

_ORIGIN = {"_name_or_path", "transformers_version"}  # in the config.json of transformers: where a model is from


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    commands: dict[str, Callable[..., Any]] = {
        "list": list_checkpoints,
        "check": check,
        "convert": convert,
        "weights": weights,
        "average": average,
    }
    run_subcommand(program("checkpoint"), commands, "command", arguments, description=__doc__)


def list_checkpoints(run: Path) -> None:
    """List the checkpoints of a run, each with its size and the number of processes that saved it, or with its fault.

    Args:
        run: Run folder.
    """
    _print_checkpoints(run, checksums=False)


def check(run: Path) -> None:
    """Compare the files of every checkpoint, and of the model of a finished run or an export, with their checksums. The
    exit code is 1 if a file is damaged.

    Args:
        run: Run folder, or an export.
    """
    models = sorted(path for path in run.rglob("*.safetensors") if "checkpoints" not in path.relative_to(run).parts)
    model = run / MODEL_FOLDER / WEIGHTS_FILE
    if (run / FINISHED).exists() and model not in models:
        models.append(model)  # missing: `read_weights` says so below
    sound = True
    if checkpoints_of(run) or not models:  # an export has models alone; a folder with neither is an error
        sound = _print_checkpoints(run, checksums=True)
    for path in models:
        try:
            read_weights(path)
            _require_unchanged_files(path)
            print(f"{path.relative_to(run)}  {path.stat().st_size / 2**20:,.1f} MiB")
        except (ValueError, OSError) as error:
            sound = False
            print(f"{path.relative_to(run)}  not usable: {in_words(error)}")
    if not sound:
        sys.exit(1)


def _require_unchanged_files(path: Path) -> None:
    """Raise ValueError if a model was not trained with the vocabulary next to it, or if a file of an export has changed
    since the export."""
    folder = path.parent
    is_export = (folder / CONFIG_FILE).exists()
    read_vocabulary(folder if is_export else folder.parent, folder / (SENTENCEPIECE_FILE if is_export else MODEL_FILE))
    if is_export and path.name == WEIGHTS_FILE:
        require_exported_files(folder)


def convert(run: Path, out: Path) -> None:
    """Write a checkpoint as one file of complete parameters, however many ranks saved the checkpoint.

    Any engine resumes from the new checkpoint if it lies in `checkpoints/` of a run. The command needs 0.2 GiB of
    memory, whatever the size of the model.

    Args:
        run: A checkpoint as RUN@STEP, or a run, of which the newest undamaged checkpoint is taken.
        out: Folder to make.
    """
    run, step = run_and_step(run)
    require_new(out)  # before the checkpoint is read, which may take long
    source = find_complete_checkpoint(run, step)
    if is_checkpoint_name(out.name) and saved_step(out) != saved_step(source):
        raise ValueError(
            f"--out {out.name} names step {saved_step(out)}, but {source} has another step: name the new folder "
            f"{source.name}"
        )
    with atomic_folder(out) as partial:
        writer = StateWriter(partial / state_file(0, 1), buffer_bytes=0)
        merge_state(StateReader(state_files(source)), writer)
        write_state_and_marker(partial, read_state(source) | {"world": 1}, {writer.path.name: writer.result()})
    print(f"{out}: {source.name} as complete parameters")


def weights(run: Path, out: Path, vocab: Path | None = None) -> None:
    """Write the model of a checkpoint as a folder like that of a finished run, for example to share it.

    Evaluation, fine-tuning and export read RUN@STEP themselves.

    Args:
        run: A checkpoint of pre-training as RUN@STEP, or a run, of which the newest undamaged checkpoint is taken.
        out: Folder to make.
        vocab: Folder or file of the vocabulary, if the run has no vocabulary.
    """
    run, step = run_and_step(run)
    require_new(out)  # before the checkpoint is read, which may take long
    settings = read_model_settings(run)
    if settings.task:
        raise ValueError(f"{run} was fine-tuned on {settings.task}: name a run of pre-training")
    vocabulary = read_vocabulary(run, run / MODEL_FOLDER if vocab is None else vocab)
    source = find_complete_checkpoint(run, step)
    state = read_checkpoint(source, settings)
    model = model_after(read_run_config(run), saved_step(source))
    with atomic_folder(out) as partial:
        _write_run(partial, run, model, state, vocabulary)
    print(f"{out}: the model of {source.name}")


def _write_run(out: Path, run: Path, model: ModelConfig, state: Mapping[str, Tensor], vocabulary: Vocabulary) -> None:
    """Write the folder of a finished run: the model's folder, and the config.json of `run` with the model settings
    `model`, whose rotary base may be that of an earlier phase."""
    content = read_config(run)
    content["config"]["model"] = asdict(model)
    write_versioned(out / CONFIG_FILE, content)
    write_model(out / MODEL_FOLDER, model, state, vocabulary.path)


def average(models: Annotated[list[Path], tyro.conf.arg(name="model")], out: Path) -> None:
    """Write the mean of the weights of several models as a new model, which every command reads.

    Compare the new model with these models by `xlme evaluate losses`.

    Args:
        models: Runs, checkpoints (RUN@STEP) or exports, all of one kind and shape.
        out: Folder to make.
    """
    if len(models) < 2 or len(set(models)) < len(models):
        raise ValueError("there is nothing to average: --model takes two or more models, each once")
    are_exports = ["config" not in read_config(folder) for folder in models]
    if any(are_exports) and not all(are_exports):
        raise ValueError(
            f"{models[are_exports.index(True)]} is an export, but other models are runs: name exports only, or runs "
            "only"
        )
    write_average = _average_exports if all(are_exports) else _average_runs
    with atomic_folder(out) as partial:
        write_average(models, partial)
    print(f"{out}: the mean of {len(models)} models")


def _average_runs(models: Sequence[Path], out: Path) -> None:
    """Write the mean of runs as a run folder."""
    first = load_run(models[0])

    def kind_of(run: TrainedRun) -> dict[str, Any]:
        return {"task": run.task or "pre-training", "objective": run.objective.name} | asdict(run.model)

    def state_of(folder: Path) -> dict[str, Tensor]:
        run = first if folder == models[0] else load_run(folder)
        _require_same_vocabulary(run.vocabulary.path, first.vocabulary.path, folder, models[0])
        _require_alike(folder, kind_of(run), models[0], kind_of(first))
        return split_vocabulary_tables(run.state, first.model)

    state, checksums = _mean(models, state_of)
    _require_different(models, checksums)
    _write_run(out, models[0], first.model, state, first.vocabulary)


def _average_exports(models: Sequence[Path], out: Path) -> None:
    """Write a copy of the first export, without its ONNX model, in which each file of weights has the mean over all
    exports."""
    names = sorted(path.relative_to(models[0]) for path in models[0].rglob("*.safetensors"))
    networks = sorted({name.parent for name in names})  # the generator has a folder of its own
    for folder in models:
        _require_same_vocabulary(folder / SENTENCEPIECE_FILE, models[0] / SENTENCEPIECE_FILE, folder, models[0])
        if path := next(folder.rglob("pytorch_model*.bin"), None):
            raise ValueError(
                f"{path} cannot be averaged: save the model's weights as {WEIGHTS_FILE}, and remove this file"
            )
        if not names or sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors")) != names:
            raise ValueError(
                f"{folder} and {models[0]} differ in the names of their files of weights: average exports of one kind"
            )
        for network in networks:
            _require_alike(folder, read_config(folder / network), models[0], read_config(models[0] / network))
    shutil.copytree(models[0], out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.onnx", "*.onnx.data"))
    checksums = [""] * len(models)  # for each model, the checksums of its files joined
    for name in names:
        mean, file_checksums = _mean([folder / name for folder in models], read_weights)
        save_weights(mean, out / name, read_metadata(out / name))
        checksums = [joined + checksum for joined, checksum in zip(checksums, file_checksums, strict=True)]
    _require_different(models, checksums)
    if (out / DIFFERENCE_FILE).exists():
        # The discriminator's embedding is the generator's plus the difference, rounded. The mean of rounded sums has
        # other rounding errors than the rounded sum of the two means, which replaces it.
        generator = read_weights(out / GENERATOR_FOLDER / WEIGHTS_FILE)
        discriminator = read_weights(out / WEIGHTS_FILE)
        difference = read_weights(out / DIFFERENCE_FILE)[DIFFERENCE]
        discriminator[embedding_name(discriminator)] = generator[embedding_name(generator)] + difference
        save_weights(discriminator, out / WEIGHTS_FILE, read_metadata(out / WEIGHTS_FILE))
    if (card := out / "README.md").exists():
        averaged = ", ".join(f"`{folder.name}`" for folder in models)
        notice = f"The weights are the mean of the weights of {averaged}. What follows is the card of the first model."
        text = card.read_text(encoding="utf-8")
        header = "".join(re.findall(r"\A---\n.*?\n---\n+", text, re.S))  # YAML, or empty
        card.write_text(f"{header}{notice}\n\n{text.removeprefix(header)}", encoding="utf-8")


def _require_same_vocabulary(path: Path, expected: Path, folder: Path, first: Path) -> None:
    """Raise ValueError if the vocabulary files `path` of the model in `folder` and `expected` of `first` differ, or if
    one is missing."""
    for needed in (path, expected):
        if not needed.is_file():
            raise ValueError(f"{needed} is missing: copy the vocabulary that the model was trained with to this place")
    if file_sha256(path) != file_sha256(expected):
        raise ValueError(f"{folder} has another vocabulary than {first}: average models that have the same vocabulary")


def _require_alike(folder: Path, settings: Mapping[str, Any], first: Path, expected: Mapping[str, Any]) -> None:
    """Raise ValueError if the models in `folder` and `first` differ in a setting that changes what a model computes."""
    for key in sorted(settings.keys() | expected.keys()):
        ignored = key in RUNTIME_SETTINGS | _ORIGIN or "dropout" in key  # ours and transformers' dropout
        if settings.get(key) != expected.get(key) and not ignored:
            raise ValueError(
                f"{folder} has {key} {settings.get(key)}, {first} has {expected.get(key)}: average models of one kind"
            )


def _require_different(models: Sequence[Path], checksums: Sequence[str]) -> None:
    """Raise ValueError if two models have the same checksum."""
    for index, checksum in enumerate(checksums):
        if checksum in checksums[:index]:
            raise ValueError(
                f"{models[checksums.index(checksum)]} and {models[index]} have the same weights: name each model once"
            )


def _mean(paths: Sequence[Path], read: Callable[[Path], dict[str, Tensor]]) -> tuple[dict[str, Tensor], list[str]]:
    """Returns (means, checksums). `read` returns the tensors of a path by name. For each name, `means` has the mean
    over the paths; for each path, `checksums` has a checksum of its tensors.

    Memory holds the float64 sums, and the tensors of two paths: the path that is read, and the one before.
    Raises ValueError if the tensors of two paths differ in names or shapes.
    """
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    checksums: list[str] = []
    for path in paths:
        tensors = read(path)
        dtypes = dtypes or {name: value.dtype for name, value in tensors.items()}
        sums = sums or {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in tensors.items()}
        unlike = [name for name in {**sums, **tensors} if name not in tensors or name not in sums]
        unlike += [name for name in sums if name in tensors and tensors[name].shape != sums[name].shape]
        if unlike:
            raise ValueError(f"{path} differs from {paths[0]} in {unlike[0]}: average models of one shape")
        digest = sha256()
        for name, value in sorted(tensors.items()):
            sums[name] += value
            digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().data)
        checksums.append(digest.hexdigest())
    return {name: (value / len(paths)).to(dtypes[name]) for name, value in sums.items()}, checksums


def _print_checkpoints(run: Path, checksums: bool) -> bool:
    """Print a line for every checkpoint of `run`. Returns True if no checkpoint has a fault. Raises ValueError if there
    are no checkpoints."""
    require_run_folder(run)
    folders = checkpoints_of(run)
    sound = True
    if not folders:
        raise ValueError(f"{run / 'checkpoints'} has no checkpoint: --run must name a run folder")
    for folder in folders:
        fault = checkpoint_fault(folder, checksums=checksums)
        sound &= fault is None
        if fault is None:
            size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
            world = read_state(folder)["world"]
            print(f"{folder.name}  {size:,.1f} MiB  saved by {world} process{'es' * (world != 1)}")
        else:
            print(f"{folder.name}  not usable: {fault}")
    return sound


if __name__ == "__main__":
    main()
