"""One fine-tuning run: read the examples, train with the engines and checkpoints of pre-training, and score or predict
every language."""

import gc
import importlib.util
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from torch import nn

from ..checkpoint_names import checkpoints_of
from ..config import Training
from ..data.schema import LAYOUTS
from ..engine.build import build_data_parallel_engine, require_engine, with_shared_precision
from ..engine.ranks import all_gather, broadcast, extend_timeout, on_all_ranks, on_gpu
from ..io.files import read_versioned, write_versioned
from ..models.init import GatherParameter, initialise
from ..models.pipeline import encoder_flops
from ..models.text_encoder import language_index
from ..train.opening import RunInfo
from ..train.run import Trainer
from ..train.run_folder import RunFolder
from ..train.stop import StopRequest, Watchdog
from ..trained.config_json import CONFIG_FILE, objective_and_seed
from ..trained.encoders import initial_encoder, load_encoder
from ..trained.runs import MODEL_FOLDER, TrainedEncoder, load_run, write_model
from ..trained.weights import WEIGHTS_FILE, has_intact_weights, weights_sha256
from ..validate import check_processes, validate
from .downstream_tasks import DOWNSTREAM_TASKS, DownstreamTask
from .features import Feature, TaskLoader, featurise
from .objective import TaskModel, TaskObjective
from .predictions import PREDICTIONS_FOLDER, predict, predictions_file, score_predictions, write_predictions
from .settings import FinetuneConfig, Job, run_config
from .task_files import (
    TaskSets,
    choose_sets,
    find_task_files,
    fingerprints,
    have_labels,
    read_examples,
    training_examples,
)

ENGLISH = "en"  # the language whose scores `gap` compares with those of the others
# ("test" or "dev", language) -> metrics; None for a set without labels.
Scores = dict[tuple[str, str], dict[str, float] | None]


class TuningInputs(NamedTuple):
    """Everything that is read before the model is built."""

    initial: TrainedEncoder
    sets: TaskSets
    config: FinetuneConfig
    loader: TaskLoader
    unlabelled: list[str]  # languages of the test files without labels that this rank predicts


def finetune(job: Job, rank: int, world: int, stop: StopRequest) -> dict[str, Any] | None:
    """Train, score and predict. Training continues where an earlier call stopped; scoring starts anew, unless
    scores.json exists and the model is intact. Collective over the ranks, which have joined their process group.

    Rank 0 returns the scores (docs/reference/data-formats.md). The other ranks return None; after a request to stop,
    all ranks do. Raises SharedError.
    """
    if any(all_gather(stop.received is not None)):
        return None
    task = DOWNSTREAM_TASKS[job.command.task]
    weights = job.out / MODEL_FOLDER / WEIGHTS_FILE
    activity = "reading the examples and building the model"
    with (
        closing(Watchdog(job.command.train.watchdog_minutes, rank, activity)) as watchdog,
        closing(RunFolder(job.out, root=rank == 0)) as folder,
    ):
        job = replace(job, command=replace(job.command, engine=with_shared_precision(job.command.engine)))
        inputs = on_all_ranks(lambda: _read_inputs(job, folder, rank, world))
        sets, config = inputs.sets, inputs.config
        unlabelled = {language for of_rank in all_gather(inputs.unlabelled) for language in of_rank}
        has_model = broadcast(on_all_ranks(lambda: rank == 0 and has_intact_weights(weights)))
        earlier = on_all_ranks(lambda: _earlier_scores(job, sets) if rank == 0 else None)
        has_predictions = all(
            (job.out / predictions_file(task, source.split, source.language)).is_file() for source in sets.test
        )
        # A user may have removed both model and checkpoints to save room; a damaged model is never passed over.
        was_removed = not weights.exists() and not checkpoints_of(job.out)
        is_done = earlier is not None and (was_removed or (has_model and has_predictions))
        if broadcast(is_done):
            if rank == 0:
                print(f"{job.scores_file} exists already: nothing to do", flush=True)
            # The earlier call may have been killed before it wrote finished.json, so this call writes the file.
            on_all_ranks(lambda: folder.finish(config.train.steps) if rank == 0 else None)
            return earlier
        if rank == 0:
            _announce(job, task, sets, unlabelled)
        if any(all_gather(stop.received is not None)):
            return None
        objective = TaskObjective(task.kind, len(task.labels), config.tuning.dropout)
        if not has_model and not _train(objective, inputs, weights.parent, folder, rank, stop, watchdog):
            return None
        gc.collect()  # frees the engine, whose parts refer to each other, before scoring and the next run
        watchdog.close()  # scoring has no time limit, and takes different times on different ranks
        extend_timeout()
        # Users submit the folder of predictions as it is, so an earlier call's predictions for other tests must go.
        predictions_folder = job.out / PREDICTIONS_FOLDER
        on_all_ranks(lambda: shutil.rmtree(predictions_folder) if rank == 0 and predictions_folder.exists() else None)
        model = objective.build(config.model)
        on_all_ranks(lambda: load_run(job.out).load_into(model))
        model.to("cuda" if on_gpu() else "cpu")
        scores_of_rank = on_all_ranks(lambda: _score_share(model, inputs, job, rank, world, stop))
        scores = {key: metrics for of_rank in all_gather(scores_of_rank) for key, metrics in of_rank.items()}
        if len(scores) < len(sets.test) + len(sets.dev):  # after a request to stop
            return None
        return on_all_ranks(lambda: _write_scores(job, folder, config, sets, scores) if rank == 0 else None)


def _read_inputs(job: Job, folder: RunFolder, rank: int, world: int) -> TuningInputs:
    """Read and check the training files, and the files that this rank will score, so that a mistake in them stops the
    run before training. Raises ValueError."""
    command, task = job.command, DOWNSTREAM_TASKS[job.command.task]
    engine = command.engine
    check_processes(engine, world)
    require_scorer(task)
    validate(Training(command.task, engine=engine))
    initial = load_encoder(command.model)
    sources = find_task_files(task, list(command.data))
    cfg = initial.encoder.cfg
    if command.random:
        initial = initial._replace(encoder=initial_encoder(cfg, *objective_and_seed(command.model)))
    sets = choose_sets(sources, command.task, job.tuning, job.tuning_count > 1, command.split)
    tuning = replace(job.tuning, held_out=sets.held_out).completed(task, cfg)
    features: list[Feature] = []
    examples_before = 0
    for source in sets.train:
        examples = training_examples(source, task, tuning)
        language = language_index(cfg, source.language)
        features += featurise(
            examples, task, initial.vocabulary, tuning, LAYOUTS[cfg.layout], language, examples_before
        )
        examples_before += len(examples)
    config = run_config(
        command.task, tuning, cfg, engine, command.train, job.seed, len(features), weights_sha256(initial.encoder)
    )
    folder.claim(config)
    loader = TaskLoader(features, task.kind, config.data, job.seed, rank, world)
    if (job.out / CONFIG_FILE).exists():
        recorded = read_versioned(job.out / CONFIG_FILE).get("data", {}).get("fingerprints")
        if recorded not in (None, loader.fingerprints):
            raise ValueError(
                f"{job.out} was started on other training examples: use the same data, or another output folder"
            )
    elif results := [path.name for path in (job.out / MODEL_FOLDER, job.scores_file) if path.exists()]:
        raise ValueError(
            f"{job.out} has {' and '.join(results)} but no {CONFIG_FILE}, which says how it was trained: "
            "restore it, or choose another output folder"
        )
    unlabelled = []
    for source in [*sets.test, *sets.dev][rank::world]:
        language_index(cfg, source.language)  # raises ValueError for a language that the model does not have
        examples = read_examples(source, task)
        if source in sets.test and not have_labels(examples):
            unlabelled.append(source.language)
    return TuningInputs(initial, sets, config, loader, unlabelled)


def require_scorer(task: DownstreamTask) -> None:
    """Raise ValueError if the package that scores tags is missing."""
    if task.kind == "tokens" and importlib.util.find_spec("seqeval") is None:
        raise ValueError("tags are scored by seqeval, which is missing: pip install --use-pep517 seqeval")


def _earlier_scores(job: Job, sets: TaskSets) -> dict[str, Any] | None:
    """The scores that an earlier call wrote, or None. Raises ValueError if they come from other files than this
    call's."""
    if not job.scores_file.exists():
        return None
    try:
        scores = read_versioned(job.scores_file)
    except ValueError:
        raise ValueError(
            f"{job.scores_file} is damaged: remove it, and the same command scores the model again"
        ) from None
    before, now = scores.get("files", {}), sets.fingerprints()
    different = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if different:
        names = ", ".join(different[:3]) + (" …" if len(different) > 3 else "")
        raise ValueError(
            f"{job.scores_file} has scores of other test files ({names}): remove it to score the model on this call's "
            "files, or choose another output folder"
        )
    return scores


def _announce(job: Job, task: DownstreamTask, sets: TaskSets, unlabelled: set[str]) -> None:
    """Print which files are not scored, and whether settings are chosen on held-out training examples."""
    if names := [source.path.name for source in sets.test if source.language in unlabelled]:
        predictions_folder = (job.out / predictions_file(task, "test", "xx")).parent  # the same for every language
        print(
            f"{job.out}: no labels in {', '.join(names)} ({len(names)} of {len(sets.test)} test sets): they get no "
            f"scores; their predictions go to {predictions_folder} in the form "
            f"that XTREME evaluates{'; --split dev scores the dev sets instead' if sets.has_dev else ''}",
            flush=True,
        )
    if sets.dev_only:
        print(
            f"{job.out}: {', '.join(sets.dev_only)} have only a dev set and no test set: neither scored nor predicted",
            flush=True,
        )
    if sets.held_out:
        print(
            f"{job.out}: every tenth training example is held out, as the dev set that settings are chosen on",
            flush=True,
        )


def _train(
    objective: TaskObjective,
    inputs: TuningInputs,
    model_folder: Path,
    folder: RunFolder,
    rank: int,
    stop: StopRequest,
    watchdog: Watchdog,
) -> bool:
    """Train the model and write it into `model_folder`; after a request to stop, return False. Collective."""
    initial, config, loader = inputs.initial, inputs.config, inputs.loader
    require_engine(config)
    on_all_ranks(lambda: folder.lock_nvme(config.engine, rank))
    tokens = loader.row_tokens
    forward_flops = tokens * encoder_flops(config.model, config.model.discriminator_layers, tokens)
    parameters = {"encoder": sum(p.numel() for p in initial.encoder.parameters())}
    # 3: one for the forward pass, and two for the backward pass, which costs twice as much.
    info = RunInfo([3 * config.tuning.batch * forward_flops], parameters, initial.vocabulary.sha256)
    fill = partial(_initialise, initial.encoder, config)
    engine = build_data_parallel_engine(config, objective, fill, loader, None)
    finished = Trainer(engine, config, folder, info).train(stop, watchdog)
    state = engine.full_state() if finished else {}  # collective, so outside of the function that only rank 0 runs
    engine.close()  # not after an error: it waits for the GPU, which may wait for a rank that has ended
    if not finished:
        return False
    on_all_ranks(lambda: write_model(model_folder, config.model, state, initial.vocabulary.path) if rank == 0 else None)
    return True


def _initialise(
    initial: nn.Module, config: FinetuneConfig, model: nn.Module, gather_parameter: GatherParameter | None
) -> None:
    """Give the encoder the initial weights, and draw the head's weights from the seed."""
    assert isinstance(model, TaskModel)
    initialise(model.head, config.seed, config.model.init_std, gather_parameter)
    initialise(
        model.encoder, config.seed, config.model.init_std, gather_parameter, initial_values=initial.state_dict().get
    )


def _score_share(model: TaskModel, inputs: TuningInputs, job: Job, rank: int, world: int, stop: StopRequest) -> Scores:
    """Score this rank's share of the test and dev sets, and write the predictions for tests into the run folder.
    Returns the scores; after a request to stop, only the scores so far."""
    vocabulary, sets, config = inputs.initial.vocabulary, inputs.sets, inputs.config
    task, cfg, tuning = DOWNSTREAM_TASKS[config.task], config.model, config.tuning
    files = [("test", source) for source in sets.test] + [("dev", source) for source in sets.dev]
    share = files[rank::world]
    scores: Scores = {}
    for count, (purpose, source) in enumerate(share, start=1):
        if stop.received is not None:
            break
        if rank == 0:
            print(f"{job.out}: scoring {source.path.name}, {count} of {len(share)}", flush=True)
        held_out = source.split == "train"  # then a tenth of this training file is the dev set
        examples = training_examples(source, task, tuning, held_out) if held_out else read_examples(source, task)
        features = featurise(
            examples, task, vocabulary, tuning, LAYOUTS[cfg.layout], language_index(cfg, source.language)
        )
        predictions = predict(model, examples, features, task)
        if purpose == "test":
            write_predictions(job.out / predictions_file(task, source.split, source.language), examples, predictions)
        scores[purpose, source.language] = (
            score_predictions(config.task, task, examples, predictions, source.language)
            if have_labels(examples)
            else None
        )
    return scores


def _write_scores(
    job: Job, folder: RunFolder, config: FinetuneConfig, sets: TaskSets, scores: Scores
) -> dict[str, Any]:
    """Write scores.json, mark the run finished, and return the content of scores.json."""
    task, split = DOWNSTREAM_TASKS[config.task], sets.test[0].split
    in_order = sorted(scores.items())
    languages = {code: metrics for (purpose, code), metrics in in_order if purpose == "test" and metrics is not None}
    dev = {code: metrics for (purpose, code), metrics in in_order if purpose == "dev" and metrics is not None}
    result: dict[str, Any] = {
        "task": config.task, "model": str(job.command.model), "random": job.command.random, "seed": job.seed,
        "split": split, "train_languages": [source.language for source in sets.train], "metric": list(task.metrics),
        "tuning": asdict(config.tuning), "settings": job.tuning_count, "languages": languages,
        "weights": config.base, "training": fingerprints(sets.train), "files": sets.fingerprints(),
        "unlabelled": {
            code: str(predictions_file(task, split, code)) for (_, code), metrics in in_order if metrics is None
        },
        "dev": {"languages": dev, "mean": _mean(task, dev), "held_out": sets.held_out} if dev else None,
    }  # fmt: skip
    if languages:
        result["mean"] = _mean(task, languages)
    others = {code: metrics for code, metrics in languages.items() if code != ENGLISH}
    if ENGLISH in languages and others:
        result["gap"] = {metric: languages[ENGLISH][metric] - mean for metric, mean in _mean(task, others).items()}
    write_versioned(job.scores_file, result)
    folder.finish(config.train.steps)
    return result


def _mean(task: DownstreamTask, languages: Mapping[str, dict[str, float]]) -> dict[str, float]:
    return {metric: fmean(scores[metric] for scores in languages.values()) for metric in task.metrics}
