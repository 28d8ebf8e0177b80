"""Reads the scores of all runs of a comparison, and joins those of several comparisons."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from ..data.schema import TASKS, read_manifest
from ..evaluate.retrieval import mean_of_directions
from ..io.files import read_versioned
from ..train.run_folder import fixed_settings
from .systems import System

# Held-out losses in nats; for XLM-E, those of the generator. Training losses cannot be compared, because systems mask
# different tokens.
LOSSES = ("mlm", "tlm")
_SEED_SETTINGS = ("seed", "start.folder")  # settings that differ between the seeds of a system
SCORES_FOLDER = "scores"  # subfolder of a run's folder
UNTRAINED_SUFFIX = "-untrained"  # suffix of the folder of a fine-tuning that starts from random weights


@dataclass(frozen=True)
class RunScores:
    """The cost and the scores of one trained system."""

    system: str
    budget: float
    seed: int
    flops: float  # operations that the runs of the system spent: the budget to the nearest step
    steps: int
    tokens: float  # number of token positions in the rows that the runs read
    passes: dict[str, float]  # task (mono, para) -> mean number of times that training read an example
    losses: dict[str, float]  # loss term (mlm, tlm) -> loss on held-out text
    languages: dict[str, dict[str, float]]  # loss term -> language -> loss on held-out text
    scores: dict[str, float]  # measure -> score
    untrained: dict[str, float]  # measure -> score of the untrained model; empty if this model was not tested
    # For each run of the system, the settings that do not depend on the seed.
    settings: list[dict[str, Any]] = field(default_factory=list, compare=False)
    # SHA-256 of the data by use: `training`, or the name of a test; and of the settings of fine-tuning (`data_of`)
    data: dict[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def read(cls, system: System, folder: Path, tuning_seeds: int, data: Mapping[str, str]) -> Self:
        """Read the scores of the tests in `data` (the field) from the last run's folder, and the passes over the data
        from the manifests in `folder`."""
        rows_read = {
            task: sum(round(run.config.train.steps * run.config.data.mean_rows[index]) for run in system.runs)
            for index, task in enumerate(TASKS)
        }
        return cls(
            system=system.name,
            budget=system.budget,
            seed=system.seed,
            flops=sum(run.config.train.steps * run.step_flops for run in system.runs),
            steps=sum(run.config.train.steps for run in system.runs),
            tokens=sum(run.config.train.steps * run.step_tokens for run in system.runs),
            passes={
                task: mean for task, rows in rows_read.items() if rows and (mean := mean_passes(folder / task, rows))
            },
            **read_scores(system.model_folder / SCORES_FOLDER, tuning_seeds, data),
            data=dict(data),
            settings=[
                {key: value for key, value in fixed_settings(run.config).items() if key not in _SEED_SETTINGS}
                for run in system.runs
            ],
        )


def mean_passes(folder: Path, rows: int) -> float | None:
    """The mean number of times, over the examples of all languages, that training reads an example if it reads `rows`
    rows of a mixed folder: the passes over its rows, times the share of the available examples in them. None if the
    folder's manifest lacks the counts that `xlme prep mix` writes."""
    manifest = read_manifest(folder)
    if "examples" not in manifest.counts:
        return None
    used, available = (
        sum(counts[key] for counts in manifest.counts["by_language"].values()) for key in ("used", "available")
    )
    return rows / manifest.rows * used / available


def finetune_score_files(folder: Path, task: str, seeds: int) -> list[Path]:
    """The score files that `xlme finetune --out FOLDER/TASK --seeds 1 2 …` writes with this number of seeds."""
    return [folder / task / (f"seed{n}" if seeds > 1 else "") / "scores.json" for n in range(1, seeds + 1)]


def read_scores(folder: Path, tuning_seeds: int, tests: Collection[str]) -> dict[str, dict[str, Any]]:
    """The fields `losses`, `languages`, `scores` and `untrained` of a `RunScores`, from the files of the `tests` in
    `folder`. A test without a file has no scores. The losses are empty for a model that does not predict masked tokens.
    Raises ValueError for a malformed file, and if the files of one fine-tuning task are from several models, training
    sets or tests."""
    fields: dict[str, dict[str, Any]] = {"losses": {}, "languages": {}, "scores": {}, "untrained": {}}
    models = (fields["scores"], ""), (fields["untrained"], UNTRAINED_SUFFIX)  # where the scores of each model go
    path = folder  # an error names the file that is being read; before the first file, it names `folder`
    try:
        for (model_scores, suffix), task in product(models, ("pos", "ner")):
            files = finetune_score_files(folder, task + suffix, tuning_seeds) if task + suffix in tests else []
            files = [path for path in files if path.exists()]
            first = read_versioned(files[0]) if files else {}
            means = []
            for path in files:
                content = read_versioned(path)
                for key in ("weights", "training", "files"):
                    if content.get(key) != first.get(key):
                        raise ValueError(
                            f"{path} and {files[0]} have scores of different {key}: score one model on the same test "
                            "files"
                        )
                means.append(fmean(metrics["f1"] for code, metrics in content["languages"].items() if code != "en"))
            if means:
                model_scores[task] = fmean(means)
        for test in (test for test in ("align", "pairs", "tatoeba") if test in tests):
            path = folder / f"{test}.json"
            for (model_scores, _), result in zip(models, _model_entries(path), strict=False):
                layer = result["layer"]
                if test == "align":
                    model_scores[test] = 100 * result["overall"]["aer"][layer]
                else:
                    model_scores[test] = 100 * mean_of_directions(result)[layer]
                    model_scores[f"{test}_centred"] = 100 * mean_of_directions(result, centred=True)[layer]
        path = folder / "losses.json"
        if "losses" in tests and path.exists():
            result = _model_entries(path)[0]
            for term in (term for term in LOSSES if term in result["languages"]):  # tlm needs held-out pairs
                fields["losses"][term], fields["languages"][term] = result["overall"][term], result["languages"][term]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{path} lacks {error} or has another form: delete it, and give the same command again"
        ) from None
    return fields


def _model_entries(path: Path) -> list[dict[str, Any]]:
    """The models' entries in the file of a test, the trained model first; an empty list if there is no file."""
    return list(read_versioned(path)["models"]) if path.exists() else []


def read_results(path: Path) -> list[RunScores]:
    """The runs in a compare.json. Raises ValueError for a file of another form."""
    try:
        return [RunScores(**run) for run in read_versioned(path)["runs"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a compare.json of this version ({error}): write it again") from None


def join_runs(runs: Sequence[tuple[str, RunScores]]) -> list[RunScores]:
    """The `runs`, each given with its source (the name of a folder or file), without duplicates. Raises ValueError for
    two different runs of one system, budget and seed, and if `require_comparable` does."""
    require_comparable(runs)
    first_runs: dict[tuple[str, float, int], tuple[str, RunScores]] = {}
    for source, run in runs:
        first_source, first = first_runs.setdefault((run.system, run.budget, run.seed), (source, run))
        if run != first:
            raise ValueError(
                f"{first_source} and {source} have different runs of {run.system} with {run.budget:.3g} operations "
                f"and seed {run.seed}: leave one of them out"
            )
    return [run for _, run in first_runs.values()]


def require_comparable(runs: Sequence[tuple[str, RunScores]]) -> None:
    """Raise ValueError if two `runs` were trained or tested on different data, or fine-tuned with different settings,
    or if two of one system and budget differ in a setting that does not depend on the seed, or in their steps or
    tokens. Scores do not matter."""
    first_data: dict[str, tuple[str, str]] = {}
    first_runs: dict[tuple[str, float], tuple[str, RunScores]] = {}
    for source, run in runs:
        for use, sha256 in run.data.items():
            first_source, first_sha256 = first_data.setdefault(use, (source, sha256))
            if sha256 != first_sha256:
                of_test = use if use.startswith("--") else f"data for the test {use}"
                kind = "training data" if use == "training" else of_test
                raise ValueError(f"{first_source} and {source} have different {kind}: leave one of them out")
        first_source, first = first_runs.setdefault((run.system, run.budget), (source, run))
        expected, settings = _shared_by_seeds(first), _shared_by_seeds(run)
        for key in expected:
            if key in settings and expected[key] != settings[key]:
                raise ValueError(
                    f"{first_source} and {source} have runs of {run.system} with {run.budget:.3g} operations, but "
                    f"with {key} {expected[key]} and {settings[key]}: leave one of them out"
                )


def _shared_by_seeds(run: RunScores) -> dict[str, Any]:
    """The settings and sizes that all seeds of a system and budget share, by name. In a chain, the names of a later
    run's settings begin with the run's number."""
    shared = dict(run.settings[0]) if run.settings else {}
    for number, settings in enumerate(run.settings[1:], start=2):
        shared |= {f"{number}. run: {key}": value for key, value in settings.items()}
    return shared | {"steps": run.steps, "tokens": run.tokens}
