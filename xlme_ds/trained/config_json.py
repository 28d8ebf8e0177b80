"""Read config.json of a run or an export: the model's shape, its objective and its vocabulary."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..checkpoint_names import is_checkpoint_name, run_and_step, saved_step
from ..config import ModelConfig, ObjectiveConfig, RunConfig, from_json
from ..data.vocabulary import Vocabulary
from ..io.files import read_json, read_versioned, real_path

CONFIG_FILE = "config.json"
SENTENCEPIECE_FILE = "sentencepiece.bpe.model"  # the vocabulary of an export
MODEL_TYPE = "xlme"  # `model_type` in an export's config.json


class ModelSettings(NamedTuple):
    """The settings of a run that determine its model."""

    model: ModelConfig
    task: str  # name of the fine-tuning task; empty for pre-training
    objective: ObjectiveConfig  # the objective of pre-training; the default for fine-tuning


def read_config(folder: Path) -> dict[str, Any]:
    """The content of the config.json of a run, which may be named as RUN@STEP, or of an export. Raises ValueError if
    there is no such file."""
    folder, step = run_and_step(folder)
    try:
        content: dict[str, Any] = read_json(folder / CONFIG_FILE, dict)
        if "config" in content:  # a run's file has our format number, which read_versioned checks; an export's has none
            content = read_versioned(folder / CONFIG_FILE)
        elif step is not None:
            raise ValueError(f"{folder} is not a run and has no steps: leave out @{step}")
        return content
    except (FileNotFoundError, NotADirectoryError):
        checkpoint = real_path(folder)
        run = checkpoint.parent.parent
        if is_checkpoint_name(checkpoint.name) and checkpoint.is_dir() and (run / CONFIG_FILE).exists():
            raise ValueError(f"{folder} is a checkpoint: write it as {run}@{saved_step(checkpoint)}") from None
        run_name, _, step_name = str(folder).rpartition("@")
        if run_name and Path(run_name).is_dir() and not folder.exists():
            raise ValueError(
                f"{folder}: {step_name} is not a step: name one that `xlme checkpoint list --run {run_name}` prints"
            ) from None
        fault = f"has no {CONFIG_FILE}" if folder.is_dir() else "is no folder" if folder.exists() else "does not exist"
        if (folder.parent / CONFIG_FILE).is_file():  # a part of a run
            raise ValueError(f"{folder} {fault}: name the run, {real_path(folder.parent)}") from None
        place = folder if folder.is_dir() else folder.parent
        folders = [path.parent for path in sorted(place.glob(f"*/{CONFIG_FILE}"))]
        near = [str(path) for path in folders if path.suffix != ".partial"][:3]
        advice = f", such as {', '.join(near)}" if near else ""
        may_be_on_hub = len(folder.parts) == 1 or not folder.parent.exists()
        if may_be_on_hub and not (near or folder.exists() or folder.is_absolute()):
            advice = f"; a model on the Hub is fetched by `hf download {folder} --local-dir DIR`"
        raise ValueError(f"{folder} {fault}: name the folder of a run or of an export{advice}") from None


def is_export(folder: Path) -> bool:
    """Whether `folder` is an export or another model in Hugging Face's form, rather than a run."""
    return "model_type" in read_config(folder)


def read_model_settings(folder: Path) -> ModelSettings:
    """The settings that determine a run's model; the run may be unfinished. Raises ValueError for any other folder."""
    config = read_config(folder)
    if "config" not in config:
        raise ValueError(f"{folder} is an export (a Hugging Face folder), not a run: name the folder of a run")
    settings = config["config"]
    try:
        task = settings.get("task", "")
        objective = ObjectiveConfig() if task else from_json(ObjectiveConfig, settings["objective"])
        return ModelSettings(from_json(ModelConfig, settings["model"]), task, objective)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG_FILE} lacks a setting or has an unknown one: {error!r}") from None


def read_run_config(folder: Path) -> RunConfig:
    """All settings of a pre-training run. Raises ValueError for any other folder."""
    try:
        return from_json(RunConfig, read_config(folder)["config"])
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{folder / CONFIG_FILE} does not belong to a pre-training run ({error!r}): name the folder of one"
        ) from None


def objective_and_seed(folder: Path) -> tuple[str, int]:
    """Returns (name of the objective, seed) of the run in `folder`; the defaults for an export, which has neither."""
    config, defaults = read_config(folder).get("config", {}), RunConfig(name="")
    return config.get("objective", {}).get("name", defaults.objective.name), int(config.get("seed", defaults.seed))


def read_vocabulary(folder: Path, path: Path) -> Vocabulary:
    """The vocabulary at `path`. Raises ValueError if the run or export in `folder` was trained with another one."""
    config, vocabulary = read_config(folder), Vocabulary(path)
    data = config if is_export(folder) else config.get("data")
    if not isinstance(data, dict) or "vocabulary_sha256" not in data:
        raise ValueError(f"{folder / CONFIG_FILE} has no vocabulary_sha256: restore the file")
    if data["vocabulary_sha256"] != vocabulary.sha256:
        raise ValueError(
            f"{vocabulary.path} is not the vocabulary that the model in {folder} was trained with: restore or name "
            "that one"
        )
    return vocabulary


@contextmanager
def explain_mismatch(weights: Path, folder: Path) -> Iterator[None]:
    """Turn errors of the block into ValueError: KeyError, if `weights` (a file or a folder) lacks a parameter or
    config.json a setting, and torch's RuntimeError, if a parameter has another shape than the settings in `folder`
    give."""
    try:
        yield
    except (KeyError, RuntimeError) as error:
        # Quote the second line of an error of load_state_dict, which is the first that names a parameter, or the only
        # line of another error.
        lines = str(error).splitlines()
        why = f"no {error}" if isinstance(error, KeyError) else lines[1 % len(lines)].strip()[:200]
        raise ValueError(f"{weights} does not hold the model of {folder / CONFIG_FILE}: {why}") from None


def without_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries of `state` whose names begin with `prefix`, which is removed from the names."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
