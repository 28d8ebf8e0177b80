"""One fine-tuning run: read, train through the same engines and checkpoints as pre-training, score or predict every
language."""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config import Training, refuse
from ..data.schema import read_json, write_json
from ..data.vocabulary import Vocabulary
from ..engine.build import Fill, assemble, resolve_precision
from ..engine.ranks import SharedError, broadcast, gather, on_all_ranks
from ..models.init import Whole, initialise
from ..models.pipeline import encoder_forward
from ..models.text_encoder import TextEncoder, language_index
from ..train.run import RunFacts, train
from ..train.run_folder import RunFolder
from ..train.stop import StopRequest, Watchdog
from ..trained import (
    CONFIG_FILE,
    MODEL_FOLDER,
    WEIGHTS_FILE,
    TrainedEncoder,
    load_encoder,
    mismatch,
    read_weights,
    write_model,
)
from ..validate import processes_fit, validate
from .downstream_tasks import TASKS, DownstreamTask
from .features import Feature, TaskLoader, featurise
from .objective import TaskModel, TaskObjective
from .predictions import check_scorer, predict, predictions_file, score, write_predictions
from .settings import FinetuneConfig, Job, TuningConfig, settings
from .task_files import Example, TaskSets, choose, dev_examples, find, labelled, read, training_examples

PIVOT = "en"


class Prepared(NamedTuple):
    """All that is read before the model is built; `bare`: of this rank's share of the tests, the languages without
    labels."""

    saved: TrainedEncoder
    sets: TaskSets
    config: FinetuneConfig
    loader: TaskLoader
    bare: list[str]


def finetune(job: Job, rank: int, world: int, stop: StopRequest) -> dict[str, Any] | None:
    """Do the whole job; collective over the ranks, which have joined. Returns its scores on rank 0 (see
    docs/reference/data-formats.md), None elsewhere and after a request to stop. Nothing is done twice. Raises SharedError."""
    doing = "reading the examples and building the model"
    with closing(Watchdog(job.train.watchdog_minutes, rank, doing)) as watchdog:
        return _finetune(job, rank, world, stop, watchdog)


def _finetune(job: Job, rank: int, world: int, stop: StopRequest, watchdog: Watchdog) -> dict[str, Any] | None:
    task, folder = TASKS[job.task], RunFolder(job.out, root=rank == 0)
    try:
        prepared = on_all_ranks(lambda: _prepare(job, folder, rank, world))
    except SharedError:
        folder.close()
        raise
    saved, sets, config, loader, _ = prepared
    bare = {language for part in gather(prepared.bare) for language in part}
    if broadcast(job.done.exists()):
        found = on_all_ranks(lambda: _finished(job, sets) if rank == 0 else None)
        folder.close()
        return found
    if rank == 0:
        _announce(job, task, sets, bare)
    if any(gather(stop.received is not None)):
        return None
    weights = job.out / MODEL_FOLDER / WEIGHTS_FILE
    objective = TaskObjective(task.kind, len(task.labels), config.tuning.dropout)
    if not broadcast(weights.exists()):
        engine = assemble(config, objective, _start(saved.encoder.state_dict(), config), loader, None)
        if not train(engine, config, folder, loader, None, _work(config, loader, saved.vocabulary), stop, watchdog):
            return None
        state = engine.full_state()
        on_all_ranks(lambda: write_model(weights.parent, state, saved.vocabulary.path) if rank == 0 else None)
    watchdog.close()  # scoring takes as long as it takes
    # No predictions of other tests may stay from before: the folder is ready to submit.
    on_all_ranks(lambda: shutil.rmtree(job.predictions) if rank == 0 and job.predictions.exists() else None)
    model = objective.build(config.model)
    on_all_ranks(lambda: _load_weights(model, weights))
    mine = on_all_ranks(lambda: _scores(model, prepared, job, (rank, world), stop))
    scores = {asked: one for part in gather(mine) for asked, one in part.items()}
    if rank != 0 or len(scores) < len(sets.test) + len(sets.dev):  # a request to stop came on the way
        return None
    result = _summary(job, config.tuning, sets, scores)
    write_json(job.done, result)
    folder.finish(config.train.steps)
    folder.close()
    return result


def _prepare(job: Job, folder: RunFolder, rank: int, world: int) -> Prepared:
    """Read everything and check it, also the files that are read after training. Raises ValueError."""
    task = TASKS[job.task]
    engine = replace(job.engine, precision=resolve_precision(job.engine))
    if job.train.audit:
        raise ValueError("train.audit is for pre-training, whose rows have numbers: leave it off")
    check_scorer(job.task)
    validate(Training(job.task, engine=engine))
    refuse(processes_fit(engine, world))
    saved, sources = load_encoder(job.model), find(task, list(job.data))
    sets = choose(sources, job.task, job.tuning, job.settings > 1)
    tuning = replace(job.tuning, held_out=sets.held_out).completed(task, saved.encoder.cfg)
    features: list[Feature] = []
    count = 0
    for source in sets.train:
        examples = training_examples(source, task, tuning)
        features += _features(examples, task, tuning, saved, source.language, count)
        count += len(examples)
    base = _sha256(saved.encoder)
    config = settings(job.task, tuning, saved.encoder.cfg, engine, job.train, job.seed, len(features), base)
    folder.claim(config)
    done = [path.name for path in (job.out / MODEL_FOLDER, job.done) if path.exists()]
    if done and not (job.out / CONFIG_FILE).exists():
        raise ValueError(
            f"{job.out} has {' and '.join(done)} but no {CONFIG_FILE}, which says how it was trained: "
            "restore it, or choose another --out"
        )
    loader = TaskLoader(features, task.kind, config.data, job.seed, rank, world)
    if (job.out / CONFIG_FILE).exists():
        started = read_json(job.out / CONFIG_FILE, dict).get("data", {}).get("fingerprints")
        if started not in (None, loader.fingerprints):
            raise ValueError(f"{job.out} was started on other training examples: use the same --data, or another --out")
    bare = []
    for source in [*sets.test, *sets.dev][rank::world]:
        language_index(saved.encoder.cfg, source.language)
        examples = read(source, task)
        if source in sets.test and not labelled(examples):
            bare.append(source.language)
    return Prepared(saved, sets, config, loader, bare)


def _finished(job: Job, sets: TaskSets) -> dict[str, Any]:
    """The scores that are there already. Raises ValueError where they are of other files than this call asks for."""
    try:
        found: dict[str, Any] = read_json(job.done, dict)
    except ValueError:
        raise ValueError(f"{job.done} is damaged: remove it, and the same command scores the model again") from None
    before, now = found.get("files", {}), sets.fingerprints()
    other = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if other:
        raise ValueError(
            f"{job.done} is of other test files ({', '.join(other[:3])}{' …' * (len(other) > 3)}): "
            "remove it to score the model on these, or choose another --out"
        )
    print(f"{job.done} is there already", flush=True)
    return found


def _announce(job: Job, task: DownstreamTask, sets: TaskSets, bare: set[str]) -> None:
    notes = []
    names = [source.path.name for source in sets.test if source.language in bare]
    if names:
        where = predictions_file(job.predictions, task, "test", "xx").parent
        notes.append(
            f"no labels in {', '.join(names)} ({len(names)} of {len(sets.test)} test sets): no scores of these, their "
            f"predictions go to {where} in the form that XTREME evaluates"
        )
    if sets.unused:
        notes.append(f"no test set of {', '.join(sets.unused)}, only a dev set: neither scored nor predicted")
    if sets.held_out:
        notes.append("every tenth training example is held out, as the dev set that settings are chosen on")
    for note in notes:
        print(f"{job.out}: {note}", flush=True)


def _load_weights(model: nn.Module, weights: Path) -> None:
    try:
        model.load_state_dict(read_weights(weights))
    except RuntimeError as error:
        raise mismatch(weights, weights.parent.parent, error) from None


def _work(config: FinetuneConfig, loader: TaskLoader, vocabulary: Vocabulary) -> RunFacts:
    tokens = loader.row_tokens
    forward = tokens * encoder_forward(config.model, config.model.discriminator_layers, tokens)
    with torch.device("meta"):
        encoder = TextEncoder(config.model)
    parameters = {"encoder": sum(p.numel() for p in encoder.parameters())}
    return RunFacts(3 * config.tuning.batch * forward, parameters, vocabulary.sha256)


def _features(
    examples: Sequence[Example],
    task: DownstreamTask,
    tuning: TuningConfig,
    saved: TrainedEncoder,
    language: str,
    first: int = 0,
) -> list[Feature]:
    cfg = saved.encoder.cfg
    return featurise(examples, task, saved.vocabulary, tuning.windows(cfg), language_index(cfg, language), first)


def _sha256(encoder: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in encoder.state_dict().items():
        digest.update(name.encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _start(encoder: Mapping[str, Tensor], config: FinetuneConfig) -> Fill:
    """The saved weights of the encoder, and those of the head drawn from the seed."""

    def fill(model: nn.Module, whole: Whole | None) -> None:
        assert isinstance(model, TaskModel)
        initialise(model.head, config.seed, config.model.init_std, whole)
        for name, parameter in model.encoder.named_parameters():
            with nullcontext() if whole is None else whole(parameter), torch.no_grad():
                if parameter.numel():  # not the other ranks of a partitioned parameter
                    parameter.copy_(encoder[name])

    return fill


def _scores(
    model: TaskModel,
    prepared: Prepared,
    job: Job,
    place: tuple[int, int],
    stop: StopRequest,
) -> dict[tuple[str, str], dict[str, float] | None]:
    """Scores of the share of rank `place[0]` of `place[1]`, by purpose and language, up to a request to stop; None
    without labels.

    Writes the predictions of tests into the run folder.
    """
    task, (rank, world) = TASKS[job.task], place
    saved, sets, tuning = prepared.saved, prepared.sets, prepared.config.tuning
    files = [("test", source) for source in sets.test] + [("dev", source) for source in sets.dev]
    scores: dict[tuple[str, str], dict[str, float] | None] = {}
    for purpose, source in files[rank::world]:
        if stop.received is not None:
            break
        examples = read(source, task) if purpose == "test" else dev_examples(source, task, tuning)
        features = _features(examples, task, tuning, saved, source.language)
        predictions = predict(model, examples, features, task)
        if purpose == "test":
            path = predictions_file(job.predictions, task, source.split, source.language)
            write_predictions(path, examples, predictions)
        scores[purpose, source.language] = None
        if labelled(examples):
            scores[purpose, source.language] = score(job.task, task, examples, predictions, source.language)
    return scores


def _summary(
    job: Job, tuning: TuningConfig, sets: TaskSets, scores: Mapping[tuple[str, str], dict[str, float] | None]
) -> dict[str, Any]:
    """The content of `scores.json`, see docs/reference/data-formats.md."""
    task, split = TASKS[job.task], sets.test[0].split
    languages = {code: one for (purpose, code), one in sorted(scores.items()) if purpose == "test" and one is not None}
    bare = sorted(code for (_, code), one in scores.items() if one is None)
    dev = {code: one for (purpose, code), one in sorted(scores.items()) if purpose == "dev" and one is not None}
    result: dict[str, Any] = {
        "task": job.task, "model": str(job.model), "seed": job.seed, "split": split,
        "train_languages": [source.language for source in sets.train], "metric": list(task.metrics),
        "tuning": asdict(tuning), "settings": job.settings, "languages": languages, "files": sets.fingerprints(),
        "unlabelled": {code: str(predictions_file(Path("predictions"), task, split, code)) for code in bare},
        "dev": {"languages": dev, "mean": _mean(task, dev), "held_out": sets.held_out} if dev else None,
    }  # fmt: skip
    if languages:
        result["mean"] = _mean(task, languages)
    others = {code: one for code, one in languages.items() if code != PIVOT}
    if PIVOT in languages and others:
        result["gap"] = {metric: languages[PIVOT][metric] - mean for metric, mean in _mean(task, others).items()}
    return result


def _mean(task: DownstreamTask, languages: Mapping[str, dict[str, float]]) -> dict[str, float]:
    return {metric: fmean(one[metric] for one in languages.values()) for metric in task.metrics}
