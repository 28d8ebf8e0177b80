"""The tests of a trained model: check that they can be done, make their commands, and find those that are left to
do."""

import hashlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from ..cli import program
from ..config import ModelConfig
from ..data.schema import TASKS
from ..data.vocabulary import Vocabulary
from ..evaluate.alignment import read_gold_alignments
from ..evaluate.retrieval import FEWEST_PAIRS, group_by_language, heldout_pairs, read_tatoeba
from ..finetune.downstream_tasks import DOWNSTREAM_TASKS
from ..finetune.finetune_run import require_scorer
from ..finetune.settings import FinetuneSettings, parse, run_config
from ..finetune.task_files import choose_sets, find_task_files, have_labels, read_examples, training_examples
from ..io.files import file_sha256, read_optional, visible_paths, write_versioned
from ..objectives import objective_of
from ..settings_file import check_ranges
from ..validate import check_processes
from .results import LOSSES, SCORES_FOLDER, UNTRAINED_SUFFIX, finetune_score_files
from .systems import CompareSettings, System

COMMANDS_FILE = "commands.json"  # next to the scores: name of a test -> its command, and a hash of its data


def require_tests(settings: CompareSettings) -> set[str]:
    """Raise ValueError if a test could not be done after training. Returns the languages of the tests."""
    pairs = settings.pairs or settings.heldout
    languages = {"en", *group_by_language(heldout_pairs(pairs, Vocabulary(settings.data_folder / "vocab")))}
    if languages == {"en"}:
        raise ValueError(f"{pairs} has no language with {FEWEST_PAIRS} pairs with English: name data with more pairs")
    if settings.tatoeba is not None:
        languages |= read_tatoeba(settings.tatoeba).keys()
    if settings.align is not None:
        languages |= {code for name in read_gold_alignments(settings.align) for code in name.split("-", 1)}
    try:
        options = shlex.split(settings.tuning)
    except ValueError as error:
        raise ValueError(f"--tuning {settings.tuning}: {error}") from None
    required = ["--task", "pos", "--model", ".", "--data", ".", "--out", "."]
    prog = program("compare --tuning")
    default, tuned = parse(prog, required), parse(prog, [*required, *options])
    # The options may change only these three sections.
    if replace(tuned, tuning=default.tuning, engine=default.engine, train=default.train) != default:
        raise ValueError(f"--tuning {settings.tuning} may have only settings of --tuning., --engine. and --train.")
    if settings.pos is None and settings.ner is None and (options or settings.tuning_seeds != 1):
        raise ValueError(
            "--tuning and --tuning-seeds are for --pos and --ner: name a folder with --pos or --ner, or leave the "
            "--tuning settings out"
        )
    for task in ("pos", "ner"):
        if (folder := getattr(settings, task)) is not None:
            languages |= require_tunable(folder, task, tuned)
    return languages


def require_tunable(folder: Path, name: str, finetune_settings: FinetuneSettings) -> set[str]:
    """Raise ValueError if a model could not be fine-tuned on the task `name` with `finetune_settings`, or if `folder`
    has no labelled test in a language other than English: the score is a mean over these languages. Returns the
    languages of the task's files."""
    task = DOWNSTREAM_TASKS[name]
    check_ranges(finetune_settings.tuning, "tuning.")
    check_processes(finetune_settings.engine, 1)
    require_scorer(task)
    sets = choose_sets(find_task_files(task, [folder]), name, finetune_settings.tuning, several_settings=False)
    tuning = finetune_settings.tuning.completed(task, ModelConfig())
    examples = sum(len(training_examples(source, task, tuning)) for source in sets.train)
    run_config(name, tuning, ModelConfig(), finetune_settings.engine, finetune_settings.train, 1, examples, "")
    for source in sets.dev:
        read_examples(source, task)
    labelled = [source.language for source in sets.test if have_labels(read_examples(source, task))]
    if not set(labelled) - {"en"}:
        raise ValueError(
            f"--{name} {folder} has no test with labels in a language other than English: name a folder with such a "
            "test"
        )
    return {source.language for source in (*sets.train, *sets.dev, *sets.test)}


def pending_tests(system: System, settings: CompareSettings) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, [module, *arguments]) of every test whose scores are missing, or come from another command or other
    data.

    The caller runs these commands. An evaluation is simply repeated. A fine-tuning ends with an error if its folder has
    the result of another command or other data.
    """
    recorded = read_optional(system.model_folder / SCORES_FOLDER / COMMANDS_FILE)
    for name, command in _tests(system, settings):
        if recorded.get(name) != _entry(command) or not _has_scores(system, name, settings):
            yield name, command


def record_if_scored(system: System, name: str, command: list[str], settings: CompareSettings) -> bool:
    """Record the command of a test that has ended. Returns False, and records nothing, if the test wrote no scores."""
    path = system.model_folder / SCORES_FOLDER / COMMANDS_FILE
    if written := _has_scores(system, name, settings):
        write_versioned(path, read_optional(path) | {name: _entry(command)})
    return written


def _entry(command: list[str]) -> dict[str, Any]:
    """The entry of a test in COMMANDS_FILE: its command, and the current hash of its data."""
    return {"command": command, "data": data_sha256(Path(command[command.index("--data") + 1]))}


def data_of(system: System, settings: CompareSettings) -> dict[str, str]:
    """SHA-256 of the system's data by use: `training`, and the name of each test that `settings` ask for; and of each
    fine-tuning's settings: `--tuning for` its task."""
    commands = dict(_tests(system, settings))
    hashes = {"training": data_sha256(settings.data_folder)}
    hashes |= {name: _entry(command)["data"] for name, command in commands.items()}
    tuned = [task for task in ("pos", "ner") if task in commands]
    return hashes | {f"--tuning for {task}": _tuning_sha256(task, settings.tuning) for task in tuned}


@cache  # parsing takes a tenth of a second, and all systems are fine-tuned alike
def _tuning_sha256(task: str, options: str) -> str:
    """SHA-256 of the settings of fine-tuning on `task` with the `options` of --tuning; micro-batches do not count."""
    required = ["--task", task, "--model", ".", "--data", ".", "--out", "."]
    tuning = parse(program("compare --tuning"), [*required, *shlex.split(options)]).tuning
    values = asdict(replace(tuning, micro_batch=1).completed(DOWNSTREAM_TASKS[task], ModelConfig()))
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


@cache
def data_sha256(folder: Path) -> str:
    """SHA-256 of the names and bytes of all visible files in a folder; of mixed data, only of the manifests."""
    manifests = [folder / task / "manifest.json" for task in TASKS if (folder / task / "manifest.json").exists()]
    paths = manifests or [path for path in visible_paths(folder) if path.is_file()]
    hashes = [(str(path.relative_to(folder)), file_sha256(path)) for path in paths]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def _has_scores(system: System, name: str, settings: CompareSettings) -> bool:
    out = system.model_folder / SCORES_FOLDER
    is_finetuning = name.removesuffix(UNTRAINED_SUFFIX) in ("pos", "ner")
    files = finetune_score_files(out, name, settings.tuning_seeds) if is_finetuning else [out / f"{name}.json"]
    return all(file.exists() for file in files)


def _tests(system: System, settings: CompareSettings) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, [module, *arguments]) of all tests of a system. At the smallest budget the untrained model is tested
    too."""
    out = system.model_folder / SCORES_FOLDER
    untrained = ["--random"] if system.budget == min(settings.budgets) else []
    predicts_masked = set(LOSSES) & set(objective_of(system.runs[-1].config.objective).terms)
    folders = {
        "losses": settings.heldout if predicts_masked else None,
        "pairs": settings.pairs or settings.heldout,
        "tatoeba": settings.tatoeba,
        "align": settings.align,
    }
    for test, data in folders.items():
        if data is not None:
            options = ["--model", str(system.model_folder), "--data", str(data), "--out", str(out)]
            yield test, ["xlme_ds.evaluate", test, *options, *(untrained if test != "losses" else [])]
    # Untrained models are fine-tuned for one seed of the system only, because no other test costs as much.
    random_starts = [False, True] if untrained and system.seed == 1 else [False]
    for random, task in product(random_starts, ("pos", "ner")):
        name = task + UNTRAINED_SUFFIX if random else task
        if (data := getattr(settings, task)) is not None:
            options = ["--task", task, "--model", str(system.model_folder), "--data", str(data)]
            seeds = ["--seeds", *map(str, range(1, settings.tuning_seeds + 1))]
            start = ["--random"] if random else []
            yield (
                name,
                ["xlme_ds.finetune", *options, "--out", str(out / name), *start, *seeds, *shlex.split(settings.tuning)],
            )
