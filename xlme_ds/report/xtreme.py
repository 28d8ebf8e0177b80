"""Scores of fine-tuned models and of retrieval and alignment tests, gathered from their folders, averaged over seeds.

Of several settings of a task the one with the best mean over seeds on the dev sets counts.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from .folder import read_optional

ENGLISH = "en"
METRICS = ("f1", "em", "accuracy")
FILES = ("scores.json", "tatoeba.json", "align.json")


class Dev(NamedTuple):
    """What a run scored on the data that settings are chosen on."""

    score: float
    """The task's first metric, the mean over languages."""
    name: str
    """`dev en`, or `held-out en` where it was taken from the training examples."""


@dataclass(frozen=True)
class Run:
    """One `scores.json`: percentages by language, each a tuple in the order of `metrics`."""

    path: Path
    seed: int
    split: str
    metrics: tuple[str, ...]
    languages: dict[str, tuple[float, ...]]
    unlabelled: tuple[str, ...] = ()
    """Languages whose tests have no labels, so that they were predicted and not scored."""
    setting: str = ""
    """The settings of tuning, without what does not shape the curve."""
    settings: int = 1
    """How many settings the run was one of."""
    dev: Dev | None = None

    def gap(self) -> float | None:
        """English minus the mean of the other languages, of exact matches where there are any (XLM-E Table 7)."""
        metric = self.metrics.index("em") if "em" in self.metrics else 0
        others = [values[metric] for language, values in self.languages.items() if language != ENGLISH]
        return self.languages[ENGLISH][metric] - fmean(others) if others and ENGLISH in self.languages else None


@dataclass(frozen=True)
class Result:
    """A task's scores over seeds, of the chosen setting; languages count the same."""

    runs: tuple[Run, ...]
    found: int = 1
    settings: int = 1
    """How many settings it was chosen from, and how many there were to try."""

    @property
    def languages(self) -> dict[str, tuple[float, ...]]:
        """By language, the mean over seeds of every metric."""
        return {
            language: tuple(map(fmean, zip(*(run.languages[language] for run in self.runs), strict=True)))
            for language in self.runs[0].languages
        }

    @property
    def means(self) -> list[tuple[float, ...]]:
        """For every seed, the mean over languages of every metric; nothing where no test has labels."""
        return [tuple(map(fmean, zip(*run.languages.values(), strict=True))) for run in self.runs if run.languages]


@dataclass
class Model:
    """What is known of a model under one kind of training."""

    name: str
    results: dict[str, Result] = field(default_factory=dict)
    tatoeba: dict[str, Any] | None = None
    align: dict[str, Any] | None = None


def spread(values: Iterable[float]) -> float | None:
    """Standard deviation of a sample of two or more."""
    numbers = list(values)
    return stdev(numbers) if len(numbers) > 1 else None


def gather(folders: Iterable[Path]) -> list[Model]:
    """The models in all result files in `folders` and below them, sorted by name.

    A model is named after the last part of its path, or all of it where two end alike, with the languages that it was
    fine-tuned on unless that is English. Raises ValueError, naming the file, on one that is damaged, and on scores that
    exclude each other.
    """
    found = _contents(folders)
    names = _names(found)
    models: dict[str, Model] = {}
    runs: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for path, content in found.items():
        try:
            if path.name == "scores.json":
                name, task, run = _read_run(path, content, names)
                models.setdefault(name, Model(name))
                runs[name, task].append(run)
            else:
                test = path.name.removesuffix(".json")
                for scores in content["models"]:
                    name = names.get(_place(scores), scores["model"])
                    model = models.setdefault(name, Model(name))
                    if getattr(model, test) is not None:
                        raise ValueError(f"{path} has scores of {model.name}, and so has a file before it: name one")
                    setattr(model, test, scores)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} lacks {error} or has another form: write it again or leave it out") from None
    for (name, task), of_task in runs.items():
        models[name].results[task] = _chosen(task, of_task)
    return sorted(models.values(), key=lambda model: model.name)


def _contents(folders: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Every result file once, by path."""
    paths = {path.resolve(): path for folder in folders for path in _result_files(folder)}
    return {path: read_optional(path, dict) for path in sorted(paths.values())}


def _names(found: Mapping[Path, Mapping[str, Any]]) -> dict[str, str]:
    """By the path of a model the name of its row."""
    each = [one for content in found.values() for one in (content, *content.get("models", ())) if isinstance(one, dict)]
    places = {place for one in each if (place := _place(one))}
    ends = Counter(Path(place).name for place in places)
    return {place: Path(place).name if ends[Path(place).name] == 1 else place for place in places}


def _place(scores: Mapping[str, Any]) -> str:
    """The path of the model that has these scores; nothing where they have a name alone, as those of an untrained
    model."""
    name, folder = str(scores.get("model", "")), str(scores.get("folder", ""))
    if "task" in scores:
        return os.path.normpath(name)
    return os.path.normpath(folder) if folder and name in (folder, Path(folder).name) else ""


def _result_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: --runs takes folders that hold {', '.join(FILES)}")
    found = [path for name in FILES for path in folder.rglob(name)]
    if not found:
        raise ValueError(f"{folder} holds no {', '.join(FILES)}: fine-tune or evaluate a model into it first")
    return found


def _read_run(path: Path, content: Mapping[str, Any], names: Mapping[str, str]) -> tuple[str, str, Run]:
    metrics = tuple(metric for metric in METRICS if metric in content["metric"])
    task = content["task"]
    if task == "pos":
        if "accuracy" not in metrics:
            raise ValueError(
                f"{path} has POS's accuracy under the name of F1, from an older version: remove it and fine-tune again there"
            )
        metrics = ("f1",)  # XTREME's
    languages = {
        language: tuple(float(scores[metric]) for metric in metrics)
        for language, scores in content["languages"].items()
    }
    unlabelled = tuple(sorted(content.get("unlabelled", ())))
    if not (languages or unlabelled) or not metrics:
        raise ValueError(f"{path} has scores of no language: write it again or leave it out")
    trained = sorted(content["train_languages"])
    name = names[_place(content)]
    if trained != [ENGLISH]:
        name += f", fine-tuned on {' '.join(trained) if len(trained) <= 4 else f'{len(trained)} languages'}"
    tuning = {key: value for key, value in content.get("tuning", {}).items() if key != "micro_batch"}
    run = Run(
        path, int(content["seed"]), content["split"], metrics, languages, unlabelled,
        " ".join(f"{key}={value}" for key, value in sorted(tuning.items())), int(content.get("settings", 1)), _dev(content, metrics),
    )  # fmt: skip
    return name, task, run


def _dev(content: Mapping[str, Any], metrics: tuple[str, ...]) -> Dev | None:
    dev = content.get("dev")
    if not dev:
        return None
    codes = sorted(dev["languages"])
    of = " ".join(codes) if len(codes) <= 4 else f"of {len(codes)} languages"
    return Dev(float(dev["mean"][metrics[0]]), f"{'held-out' if dev['held_out'] else 'dev'} {of}")


def _chosen(task: str, runs: list[Run]) -> Result:
    """The runs of the setting that is best on the dev sets, its seeds averaged."""
    first = runs[0]
    for run in runs[1:]:
        for what in ("split", "metrics"):
            if getattr(run, what) != getattr(first, what):
                raise ValueError(f"{run.path} has another {what} than {first.path}: average runs of one kind only")
        if run.languages.keys() != first.languages.keys() or run.unlabelled != first.unlabelled:
            raise ValueError(
                f"{run.path} has scores of other languages than {first.path}: score the same for every seed"
            )
    by_setting: dict[str, dict[int, Run]] = defaultdict(dict)
    for run in runs:
        if (other := by_setting[run.setting].setdefault(run.seed, run)) is not run:
            raise ValueError(f"{run.path} and {other.path} are both {task} with seed {run.seed}: name the chosen one")
    seeds = by_setting[first.setting].keys()
    for of_setting in by_setting.values():
        here = next(iter(of_setting.values()))
        if of_setting.keys() != seeds:
            raise ValueError(
                f"{here.path.parent} has other settings of {task} than {first.path.parent} and other seeds: finish every seed of "
                "all settings, or name the runs of one"
            )
    if len(by_setting) == 1:
        return Result(tuple(runs), 1, first.settings)
    if bare := [run for run in runs if run.dev is None]:
        raise ValueError(
            f"{bare[0].path} has no score on a dev set, which {len(by_setting)} settings of {task} are chosen on: name the runs of one"
        )
    if odd := [run for run in runs if _chosen_on(run) != _chosen_on(first)]:
        raise ValueError(
            f"{odd[0].path} has scores on {_chosen_on(odd[0])}, {first.path} on {_chosen_on(first)}: choose on the same dev sets"
        )
    means = {
        setting: fmean(run.dev.score for run in found.values() if run.dev) for setting, found in by_setting.items()
    }
    best = max(means, key=lambda setting: means[setting])
    found = len(by_setting)
    return Result(tuple(by_setting[best].values()), found, max(found, *(run.settings for run in runs)))


def _chosen_on(run: Run) -> str:
    return run.dev.name if run.dev else ""
