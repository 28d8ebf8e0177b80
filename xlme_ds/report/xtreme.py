"""Scores of fine-tuned models and of retrieval and alignment tests, gathered from their folders, averaged over seeds."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from .folder import read_optional

ENGLISH = "en"
METRICS = ("f1", "em", "accuracy")
FILES = ("scores.json", "tatoeba.json", "align.json")


@dataclass(frozen=True)
class Run:
    """One `scores.json`: percentages by language, each a tuple in the order of `metrics`."""

    path: Path
    seed: int
    split: str
    metrics: tuple[str, ...]
    languages: dict[str, tuple[float, ...]]

    def gap(self) -> float | None:
        """English minus the mean of the other languages, of exact matches where there are any (XLM-E Table 7)."""
        metric = self.metrics.index("em") if "em" in self.metrics else 0
        others = [values[metric] for language, values in self.languages.items() if language != ENGLISH]
        return self.languages[ENGLISH][metric] - fmean(others) if others and ENGLISH in self.languages else None


@dataclass(frozen=True)
class Result:
    """A task's scores over seeds; languages count the same."""

    runs: tuple[Run, ...]

    @property
    def languages(self) -> dict[str, tuple[float, ...]]:
        """By language, the mean over seeds of every metric."""
        return {
            language: tuple(map(fmean, zip(*(run.languages[language] for run in self.runs), strict=True)))
            for language in self.runs[0].languages
        }

    @property
    def means(self) -> list[tuple[float, ...]]:
        """For every seed, the mean over languages of every metric."""
        return [tuple(map(fmean, zip(*run.languages.values(), strict=True))) for run in self.runs]


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

    A model is named after the last part of its path, with the languages that it was fine-tuned on unless that is English.
    Raises ValueError, naming the file, on one that is damaged, and on scores that exclude each other.
    """
    models: dict[str, Model] = {}
    runs: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for path in sorted({path.resolve(): path for folder in folders for path in _result_files(folder)}.values()):
        content = read_optional(path, dict)
        try:
            if path.name == "scores.json":
                name, task, run = _read_run(path, content)
                models.setdefault(name, Model(name))
                runs[name, task].append(run)
            else:
                test = path.name.removesuffix(".json")
                for scores in content["models"]:
                    model = models.setdefault(scores["model"], Model(scores["model"]))
                    if getattr(model, test) is not None:
                        raise ValueError(f"{path} has scores of {model.name}, and so has a file before it: name one")
                    setattr(model, test, scores)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} lacks {error} or has another form: write it again or leave it out") from None
    for (name, task), found in runs.items():
        models[name].results[task] = _over_seeds(task, found)
    return sorted(models.values(), key=lambda model: model.name)


def _result_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: --runs takes folders that hold {', '.join(FILES)}")
    found = [path for name in FILES for path in folder.rglob(name)]
    if not found:
        raise ValueError(f"{folder} holds no {', '.join(FILES)}: fine-tune or evaluate a model into it first")
    return found


def _read_run(path: Path, content: Mapping[str, Any]) -> tuple[str, str, Run]:
    metrics = tuple(metric for metric in METRICS if metric in content["metric"])
    languages = {
        language: tuple(float(scores[metric]) for metric in metrics)
        for language, scores in content["languages"].items()
    }
    if not languages or not metrics:
        raise ValueError(f"{path} has scores of no language: write it again or leave it out")
    trained = sorted(content["train_languages"])
    name = Path(content["model"]).name
    if trained != [ENGLISH]:
        name += f", fine-tuned on {' '.join(trained) if len(trained) <= 4 else f'{len(trained)} languages'}"
    return name, content["task"], Run(path, int(content["seed"]), content["split"], metrics, languages)


def _over_seeds(task: str, runs: list[Run]) -> Result:
    first = runs[0]
    for run in runs[1:]:
        for what in ("split", "metrics"):
            if getattr(run, what) != getattr(first, what):
                raise ValueError(f"{run.path} has another {what} than {first.path}: average runs of one kind only")
        if run.languages.keys() != first.languages.keys():
            raise ValueError(
                f"{run.path} has scores of other languages than {first.path}: score the same for every seed"
            )
    seeds: dict[int, Run] = {}
    for run in runs:
        if run.seed in seeds:
            raise ValueError(
                f"{run.path} and {seeds[run.seed].path} are both {task} with seed {run.seed}: name the chosen one"
            )
        seeds[run.seed] = run
    return Result(tuple(runs))
