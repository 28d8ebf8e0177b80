"""Scores of fine-tuned models and of retrieval and alignment tests, gathered from their folders.

If a task was tuned with several settings, the one with the best mean over seeds on the dev sets counts.
"""

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from ..io.files import files_below, read_object

ENGLISH = "en"
METRICS = ("f1", "em", "accuracy")
FILES = ("scores.json", "tatoeba.json", "align.json")
ALONE = "each sentence read alone"  # the reading of `evaluate align --apart`


@dataclass(frozen=True)
class TaskRun:
    """One `scores.json`: percentages by language, each a tuple in the order of `metrics`.

    `weights`, `training`, `files`: hashes of the model that it started from, of its training set and of its tests.
    `unlabelled`: languages whose tests have no labels, so that they were predicted and not scored. `setting`: the
    tuning settings that affect the result; `settings`: the number of different ones that its command ran. `dev`: the
    mean over languages of the task's first metric, on the data that settings are chosen on; `dev_name`: `dev en`, or
    `held-out en` if these are held-out training examples.
    """

    path: Path
    seed: int
    split: str
    metrics: tuple[str, ...]
    languages: dict[str, tuple[float, ...]]
    weights: str = ""
    training: str = ""
    files: str = ""
    unlabelled: tuple[str, ...] = ()
    setting: str = ""
    settings: int = 1
    dev: float | None = None
    dev_name: str = ""


@dataclass(frozen=True)
class TaskScores:
    """A task's runs with the chosen setting, one for each seed, with the same languages.

    `compared`: the number of settings that it was chosen from; `settings`: the number that the command was to run.
    """

    runs: tuple[TaskRun, ...]
    compared: int = 1
    settings: int = 1


@dataclass
class Model:
    """The scores of a model under one kind of training."""

    name: str
    results: dict[str, TaskScores] = field(default_factory=dict)
    tatoeba: dict[str, Any] | None = None
    align: dict[str, Any] | None = None


def gather(folders: Iterable[Path]) -> list[Model]:
    """The models in all result files in `folders` and below them, sorted by name.

    A model is named after the last part of its path, or the whole path if two end alike; "untrained" is added if it
    started from random weights, and the languages that it was fine-tuned on unless that is only English. Raises
    ValueError, naming the file, for a damaged file, and for scores that exclude each other.
    """
    paths = {path.resolve(): path for folder in folders for path in _result_files(folder)}
    contents = {path: read_object(path) for path in sorted(paths.values())}
    names = _names(contents.values())
    models: dict[str, Model] = {}
    untrained = _untrained(contents.values())
    runs: dict[tuple[str, str], list[TaskRun]] = defaultdict(list)
    weights = _weights(contents.values())
    for path, content in contents.items():
        try:
            if path.name == "scores.json":
                run = _read_run(path, content)
                random = ", untrained" * content["random"]
                name = names[_model_path(content)] + random
                name += _name_suffix("weights", run.weights, weights[_model_path(content) + random])
                runs[name + _trained_on(content["train_languages"]), content["task"]].append(run)
                continue
            for scores in content["models"]:
                name, folder = names.get(_model_path(scores), scores["model"]), str(scores.get("folder", ""))
                if len(untrained.get(name, ())) > 1:
                    name += f", as {names.get(os.path.normpath(folder), folder)}"
                name += _name_suffix("weights", str(scores.get("weights", "")), weights[_model_path(scores)])
                name += f", {ALONE}" * (content.get("reading") == ALONE)
                model = models.setdefault(name, Model(name))
                if getattr(model, path.stem) is not None:
                    raise ValueError(f"{path} has scores of {model.name}, and so has a file before it: name one")
                setattr(model, path.stem, scores)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} lacks {error} or has another form: write it again or leave it out") from None
    for (name, task), of_task in runs.items():
        for row, alike in _by_row(name, task, of_task).items():
            models.setdefault(row, Model(row)).results[task] = _chosen(task, alike)
    return sorted(models.values(), key=lambda model: model.name)


def _result_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: --runs takes folders that hold {', '.join(FILES)}")
    paths = [path for name in FILES for path in files_below(folder, name)]
    if not paths:
        raise ValueError(f"{folder} holds no {', '.join(FILES)}: fine-tune or evaluate a model into it first")
    return paths


def _names(contents: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The name of each model's row, by the model's path."""
    each = [one for content in contents for one in (content, *content.get("models", ())) if isinstance(one, dict)]
    places = {place for one in each if (place := _model_path(one))}
    ends = Counter(Path(place).name for place in places)
    return {place: Path(place).name if ends[Path(place).name] == 1 else place for place in places}


def _untrained(contents: Iterable[Mapping[str, Any]]) -> dict[str, set[str]]:
    """For each untrained model, by name: the folders of the trained models whose shape it has."""
    folders: dict[str, set[str]] = defaultdict(set)
    for one in (one for content in contents for one in content.get("models", ()) if isinstance(one, dict)):
        if not _model_path(one):
            folders[str(one.get("model", ""))].add(os.path.normpath(str(one.get("folder", ""))))
    return folders


def _model_path(scores: Mapping[str, Any]) -> str:
    """The path of the model that has these scores; empty if they have only a name, as those of an untrained model."""
    name, folder = str(scores.get("model", "")), str(scores.get("folder", ""))
    if "task" in scores:
        return os.path.normpath(name)
    if not folder or name not in (folder, Path(folder).name):
        return ""
    step = scores.get("step")  # of a run that was not finished
    ending = "" if step is None or folder.endswith(f"@{step}") else f"@{step}"
    return os.path.normpath(folder) + ending


def _weights(contents: Iterable[Mapping[str, Any]]) -> dict[str, set[str]]:
    """SHA-256 of all weights that have scores under a model's path, by that path."""
    weights: dict[str, set[str]] = defaultdict(set)
    for one in (one for content in contents for one in (content, *content.get("models", ())) if isinstance(one, dict)):
        if place := _model_path(one):
            weights[place + ", untrained" * bool(one.get("random"))].add(str(one.get("weights", "")))
    return weights


def _name_suffix(what: str, one: str, all_of_them: set[str]) -> str:
    """The part of a row's name that distinguishes `one` from the others; empty if there are no others."""
    return f", {what} {one[:8] or 'unknown'}" if len(all_of_them) > 1 else ""


def _by_row(name: str, task: str, runs: list[TaskRun]) -> dict[str, list[TaskRun]]:
    """The runs by the name of their row: one row for each training set and each version of the tests."""
    rows: dict[str, list[TaskRun]] = defaultdict(list)
    sets = {kind: {getattr(run, kind) for run in runs} for kind in ("training", "files")}
    for run in runs:
        row = name + _name_suffix(f"{task}'s training set", run.training, sets["training"])
        rows[row + _name_suffix(f"{task}'s tests", run.files, sets["files"])].append(run)
    return rows


def _digest(content: Mapping[str, Any], key: str) -> str:
    """SHA-256 of the names and hashes of files; empty if `content` has none."""
    noted = content.get(key)
    return hashlib.sha256(json.dumps(noted, sort_keys=True).encode()).hexdigest() if noted else ""


def _trained_on(languages: Iterable[str]) -> str:
    codes = sorted(languages)
    if codes == [ENGLISH]:
        return ""
    return f", fine-tuned on {' '.join(codes) if len(codes) <= 4 else f'{len(codes)} languages'}"


def _read_run(path: Path, content: Mapping[str, Any]) -> TaskRun:
    metrics = tuple(metric for metric in METRICS if metric in content["metric"])
    if content["task"] == "pos":
        metrics = ("f1",)  # XTREME's
    languages = {
        language: tuple(float(scores[metric]) for metric in metrics)
        for language, scores in content["languages"].items()
    }
    unlabelled = tuple(sorted(content.get("unlabelled", ())))
    if not (languages or unlabelled) or not metrics:
        raise ValueError(f"{path} has scores of no language: write it again or leave it out")
    if not all(0 <= score <= 100 for scores in languages.values() for score in scores):  # nor a NaN
        raise ValueError(f"{path} has a score that is no percentage: write it again or leave it out")
    dev, dev_name = None, ""
    if of_dev := content.get("dev"):
        dev, codes = float(of_dev["mean"][metrics[0]]), sorted(of_dev["languages"])
        of = " ".join(codes) if len(codes) <= 4 else f"of {len(codes)} languages"
        dev_name = f"{'held-out' if of_dev['held_out'] else 'dev'} {of}"
    tuning = {key: value for key, value in content.get("tuning", {}).items() if key != "micro_batch"}
    return TaskRun(
        path,
        seed=int(content["seed"]),
        split=content["split"],
        metrics=metrics,
        languages=languages,
        weights=str(content.get("weights", "")),
        training=_digest(content, "training"),
        files=_digest(content, "files"),
        unlabelled=unlabelled,
        setting=" ".join(f"{key}={value}" for key, value in sorted(tuning.items())),
        settings=int(content.get("settings", 1)),
        dev=dev,
        dev_name=dev_name,
    )


def _chosen(task: str, runs: list[TaskRun]) -> TaskScores:
    """The runs of the setting that is best on the dev sets."""
    first = runs[0]
    for run in runs[1:]:
        for kind in ("split", "metrics"):
            if getattr(run, kind) != getattr(first, kind):
                raise ValueError(f"{run.path} has another {kind} than {first.path}: average runs of one kind only")
        if run.languages.keys() != first.languages.keys() or run.unlabelled != first.unlabelled:
            raise ValueError(
                f"{run.path} has scores of other languages than {first.path}: score the same for every seed"
            )
    by_setting: dict[str, dict[int, TaskRun]] = defaultdict(dict)
    for run in runs:
        if (other := by_setting[run.setting].setdefault(run.seed, run)) is not run:
            raise ValueError(f"{run.path} and {other.path} are both {task} with seed {run.seed}: name the chosen one")
    for of_setting in by_setting.values():
        if of_setting.keys() != by_setting[first.setting].keys():
            folder = next(iter(of_setting.values())).path.parent
            raise ValueError(
                f"{folder} has other settings of {task} than {first.path.parent} and other seeds: "
                "finish every seed of all settings, or name the runs of one"
            )
    compared = len(by_setting)
    if compared == 1:
        return TaskScores(tuple(runs), 1, first.settings)
    for run in runs:
        if run.dev is None:
            raise ValueError(
                f"{run.path} has no score on a dev set, which {compared} settings of {task} are chosen on: "
                "name the runs of one"
            )
        if run.dev_name != first.dev_name:
            raise ValueError(
                f"{run.path} has scores on {run.dev_name}, {first.path} on {first.dev_name}: "
                "choose on the same dev sets"
            )
    best = max(by_setting.values(), key=lambda seeds: fmean(run.dev or 0.0 for run in seeds.values()))
    return TaskScores(tuple(best.values()), compared, max(compared, *(run.settings for run in runs)))
