"""Gathers the scores of fine-tuned models and of retrieval and alignment tests from the result files in folders.

If a task was fine-tuned with several settings, only the runs with the best setting count: the one with the highest
score on the dev sets, averaged over seeds.
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

from ..io.files import read_versioned, real_path, visible_paths
from ..io.folders import require_folder

ENGLISH = "en"
METRICS = {"f1": "F1", "em": "EM", "accuracy": "Acc."}  # a metric in scores.json -> its name in a table
RESULT_FILES = ("scores.json", "tatoeba.json", "align.json")
ALONE = "each sentence read alone"  # the value of `reading` in the align.json that `evaluate align --apart` writes


@dataclass(frozen=True)
class TaskRun:
    """The content of one `scores.json`."""

    path: Path
    seed: int
    split: str
    metrics: tuple[str, ...]
    languages: dict[str, tuple[float, ...]]  # language -> its scores in percent, in the order of `metrics`
    training_sha256: str = ""  # hash of the training set
    tests_sha256: str = ""  # hash of the test sets
    unlabelled: tuple[str, ...] = ()  # languages whose test sets have no labels, so that they have no scores
    setting: str = ""  # the tuning settings that affect the result, as text
    setting_count: int = 1  # how many different tuning settings the command was to run
    dev_score: float | None = None  # on the dev sets, to choose a setting by: first metric, mean over languages
    dev_name: str = ""  # name of the dev sets, such as `dev en`; `held-out en` if they are held-out training examples


@dataclass(frozen=True)
class TaskScores:
    """A task's runs with the chosen setting, one for each seed, all with the same languages."""

    runs: tuple[TaskRun, ...]
    choice: str  # how the setting was chosen, such as `best of 3 settings on dev en`; empty if there was one setting


@dataclass
class ModelScores:
    """One row of each table: the scores of one model, fine-tuned on one choice of languages and data."""

    name: str
    results: dict[str, TaskScores] = field(default_factory=dict)  # task -> its scores
    tatoeba: dict[str, Any] | None = None  # the model's entry in a tatoeba.json
    align: dict[str, Any] | None = None  # the model's entry in an align.json


def read_models(folders: Iterable[Path]) -> list[ModelScores]:
    """The models in all result files in `folders` and below them, sorted by name.

    A model is named after the last part of its path, or after the whole path if two models have the same last part.
    Suffixes tell models of one path apart: "untrained" if fine-tuning began with random weights, the languages of
    fine-tuning unless they are English alone, and the like. Raises ValueError, which names the file, for a damaged
    file, and for several files with scores for the same cells of the tables.
    """
    paths = {real_path(path): path for folder in folders for path in _result_files(folder)}
    contents = {path: read_versioned(path) for path in sorted(paths.values())}
    names = _Names(contents.values())
    models: dict[str, ModelScores] = {}
    runs: dict[tuple[str, str], list[TaskRun]] = defaultdict(list)  # (name of the model, task) -> its runs
    for path, content in contents.items():
        try:
            if path.name == "scores.json":
                run = _read_run(path, content)
                name = names.of(content, bool(content["random"])) + _languages_suffix(content["train_languages"])
                runs[name, content["task"]].append(run)
                continue
            for scores in content["models"]:
                name = names.of(scores)
                if content.get("reading") == ALONE:
                    name += f", {ALONE}"
                model = models.setdefault(name, ModelScores(name))
                if getattr(model, path.stem) is not None:
                    raise ValueError(
                        f"{path} has scores of {model.name}, as another file in --runs has: name only one of the two"
                    )
                setattr(model, path.stem, scores)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} has another form than the tables need ({error!r}): write it again or leave it out"
            ) from None
    for (name, task), task_runs in runs.items():
        for row_name, row_runs in _by_row(name, task, task_runs).items():
            models.setdefault(row_name, ModelScores(row_name)).results[task] = _choose_setting(task, row_runs)
    return sorted(models.values(), key=lambda model: model.name)


def _result_files(folder: Path) -> list[Path]:
    """The result files in a folder and below it. Raises ValueError if there are none."""
    require_folder(folder, f"--runs takes folders that hold {', '.join(RESULT_FILES)}")
    paths = [path for path in visible_paths(folder) if path.name in RESULT_FILES]
    if not paths:
        raise ValueError(f"{folder} holds no {', '.join(RESULT_FILES)}: fine-tune or evaluate a model into it first")
    return paths


class _Names:
    """The name of each model that has scores."""

    def __init__(self, contents: Iterable[Mapping[str, Any]]):
        self._first_paths: dict[str, str] = {}  # real path of a model -> the first of the paths that name it
        # (path of a model, whether it is untrained) -> the SHA-256 of each version of its weights that has scores
        self._weights: dict[tuple[str, bool], set[str]] = defaultdict(set)
        # name of an untrained model of `evaluate --random` -> the folders of the trained models whose shape it has
        self._shapes: dict[str, set[str]] = defaultdict(set)
        for content in contents:
            models = content.get("models", [content])  # a scores.json is about one model
            entries = models if isinstance(models, list) else []  # `read_models` reports a file of another form
            for scores in (entry for entry in entries if isinstance(entry, dict)):
                if path := self._path(scores):
                    self._weights[path, bool(scores.get("random"))].add(str(scores.get("weights", "")))
                elif "model" in scores:
                    self._shapes[str(scores["model"])].add(os.path.normpath(str(scores.get("folder", ""))))
        paths = {path for path, _ in self._weights}
        last_parts = Counter(Path(path).name for path in paths)
        self._by_path = {path: Path(path).name if last_parts[Path(path).name] == 1 else path for path in paths}

    def of(self, scores: Mapping[str, Any], untrained: bool = False) -> str:
        """The name of the model with these scores. `untrained`: fine-tuning began with random weights."""
        path = self._path(scores)
        name = self._by_path.get(path, scores["model"]) + (", untrained" if untrained else "")
        if len(self._shapes.get(name, ())) > 1:
            folder = str(scores.get("folder", ""))
            name += f", as {self._by_path.get(os.path.normpath(folder), folder)}"
        return name + _name_suffix("weights", str(scores.get("weights", "")), self._weights[path, untrained])

    def _path(self, scores: Mapping[str, Any]) -> str:
        """The path of the model with these scores; empty if they give only its name, as for an untrained model. Of
        several paths of one model, such as a link and a relative path, it is always the first."""
        name, folder = str(scores.get("model", "")), str(scores.get("folder", ""))
        step = scores.get("step")  # step of the checkpoint, if the run was not finished
        if "task" in scores:  # these are scores of fine-tuning, whose `model` is the path
            path = os.path.normpath(name)
        elif not folder or name not in (folder, Path(folder).name):
            return ""
        else:
            path = os.path.normpath(folder) + ("" if step is None or folder.endswith(f"@{step}") else f"@{step}")
        return self._first_paths.setdefault(os.path.realpath(path), path)


def _name_suffix(title: str, sha256: str, all_sha256: set[str]) -> str:
    """The end of a row's name: `title` and the first digits of `sha256`, which distinguish it from rows with other
    hashes in `all_sha256`; empty if there are no others."""
    return f", {title} {sha256[:8] or 'unknown'}" if len(all_sha256) > 1 else ""


def _by_row(name: str, task: str, runs: list[TaskRun]) -> dict[str, list[TaskRun]]:
    """Name of a row -> its runs. Runs with different training sets or different test sets are in different rows."""
    rows: dict[str, list[TaskRun]] = defaultdict(list)
    training_sets, tests = {run.training_sha256 for run in runs}, {run.tests_sha256 for run in runs}
    for run in runs:
        row_name = name + _name_suffix(f"{task}'s training set", run.training_sha256, training_sets)
        rows[row_name + _name_suffix(f"{task}'s tests", run.tests_sha256, tests)].append(run)
    return rows


def _digest(content: Mapping[str, Any], key: str) -> str:
    """One SHA-256 of the names and hashes of all files that `content` lists under `key`; empty if it lists none."""
    hashes = content.get(key)
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest() if hashes else ""


def _languages_suffix(languages: Iterable[str]) -> str:
    """The part of a row's name that gives the languages of fine-tuning; empty for English alone."""
    codes = sorted(languages)
    if codes == [ENGLISH]:
        return ""
    return f", fine-tuned on {' '.join(codes) if len(codes) <= 4 else f'{len(codes)} languages'}"


def _read_run(path: Path, content: Mapping[str, Any]) -> TaskRun:
    """The run that a scores.json describes. Raises ValueError if it has no languages or no metrics, or a score that is
    no percentage."""
    metrics = tuple(metric for metric in METRICS if metric in content["metric"])
    if content["task"] == "pos":
        metrics = ("f1",)  # XTREME's metric for this task
    languages = {
        language: tuple(float(scores[metric]) for metric in metrics)
        for language, scores in content["languages"].items()
    }
    unlabelled = tuple(sorted(content.get("unlabelled", ())))
    if not (languages or unlabelled) or not metrics:
        raise ValueError(f"{path} has scores of no language: write it again or leave it out")
    if not all(0 <= score <= 100 for scores in languages.values() for score in scores):  # also refuses NaN
        raise ValueError(f"{path} has a score that is no percentage: write it again or leave it out")
    dev_score, dev_name = None, ""
    if dev_scores := content.get("dev"):
        dev_score, codes = float(dev_scores["mean"][metrics[0]]), sorted(dev_scores["languages"])
        dev_languages = " ".join(codes) if len(codes) <= 4 else f"of {len(codes)} languages"
        dev_name = f"{'held-out' if dev_scores['held_out'] else 'dev'} {dev_languages}"
    tuning = {key: value for key, value in content.get("tuning", {}).items() if key != "micro_batch"}
    return TaskRun(
        path,
        seed=int(content["seed"]),
        split=content["split"],
        metrics=metrics,
        languages=languages,
        training_sha256=_digest(content, "training"),
        tests_sha256=_digest(content, "files"),
        unlabelled=unlabelled,
        setting=" ".join(f"{key}={value}" for key, value in sorted(tuning.items())),
        setting_count=int(content.get("settings", 1)),
        dev_score=dev_score,
        dev_name=dev_name,
    )


def _choose_setting(task: str, runs: list[TaskRun]) -> TaskScores:
    """The runs of the setting that is best on the dev sets. Raises ValueError for runs that cannot be compared."""
    first = runs[0]
    for run in runs[1:]:
        for name in ("split", "metrics"):
            if getattr(run, name) != getattr(first, name):
                raise ValueError(f"{run.path} has another {name} than {first.path}: average runs of one kind only")
        if run.languages.keys() != first.languages.keys() or run.unlabelled != first.unlabelled:
            raise ValueError(
                f"{run.path} has scores of other languages than {first.path}: score the same languages for every seed"
            )
    by_setting: dict[str, dict[int, TaskRun]] = defaultdict(dict)
    for run in runs:
        if (other := by_setting[run.setting].setdefault(run.seed, run)) is not run:
            raise ValueError(f"{run.path} and {other.path} are both {task} with seed {run.seed}: name only one of them")
    for by_seed in by_setting.values():
        if by_seed.keys() != by_setting[first.setting].keys():
            folder = next(iter(by_seed.values())).path.parent
            raise ValueError(
                f"{folder} and {first.path.parent} have different settings of {task}, and different seeds: "
                "finish every seed of all settings, or name the runs of one setting"
            )
    compared = len(by_setting)
    if compared == 1:
        return TaskScores(tuple(runs), f"1 of {first.setting_count} settings" if first.setting_count > 1 else "")
    for run in runs:
        if run.dev_score is None:
            raise ValueError(
                f"{run.path} has no score on a dev set, by which one of {compared} settings of {task} must be chosen: "
                "name the runs of one setting"
            )
        if run.dev_name != first.dev_name:
            raise ValueError(
                f"{run.path} has scores on {run.dev_name}, and {first.path} on {first.dev_name}: "
                "score all settings on the same dev sets"
            )
    best = max(by_setting.values(), key=lambda by_seed: fmean(run.dev_score or 0.0 for run in by_seed.values()))
    setting_count = max(compared, *(run.setting_count for run in runs))
    tried = f"{compared} of {setting_count}" if compared < setting_count else f"{setting_count}"
    return TaskScores(tuple(best.values()), f"best of {tried} settings on {first.dev_name}")
