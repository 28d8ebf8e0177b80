"""One fine-tuning run: read, train through the same engines and checkpoints as pre-training, score every language."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ..config import EngineConfig, TrainConfig
from ..data.schema import write_json
from ..data.vocabulary import Vocabulary
from ..engine.build import Fill, assemble, check_engine, resolve_precision
from ..engine.processes import broadcast, gather, together
from ..models.init import Whole, initialise
from ..models.text_encoder import TextEncoder, language_index
from ..operations import encoder_forward
from ..saved import CONFIG_FILE, MODEL_FOLDER, WEIGHTS_FILE, Saved, load_encoder, mismatch, read_weights, write_model
from ..train.folder import RunFolder
from ..train.run import Work, train
from ..train.stop import StopRequest
from ..train.watchdog import Watchdog
from .batches import TaskLoader
from .examples import Example, Source, find, read
from .features import Feature, featurise
from .model import TaskModel
from .objective import TaskObjective
from .predict import check_scorer, predict, score
from .settings import FinetuneConfig, TuningConfig, settings
from .tasks import TASKS, Task

PIVOT = "en"


@dataclass(frozen=True)
class Job:
    """One run: a task, a model, a seed."""

    task: str
    model: Path
    data: tuple[Path, ...]
    out: Path
    seed: int
    tuning: TuningConfig
    engine: EngineConfig
    train: TrainConfig


def finetune(job: Job, rank: int, world: int, stop: StopRequest) -> dict[str, Any] | None:
    """Do the whole job; collective over the ranks, which have joined. Returns its scores on rank 0 (see docs/finetuning.md),
    None elsewhere and when it was told to stop. What is done is not done again. Raises SharedError."""
    watchdog = Watchdog(job.train.watchdog_minutes, rank)
    watchdog.beat("reading the examples and building the model")
    try:
        return _finetune(job, rank, world, stop, watchdog)
    finally:
        watchdog.close()


def _finetune(job: Job, rank: int, world: int, stop: StopRequest, watchdog: Watchdog) -> dict[str, Any] | None:
    task, folder = TASKS[job.task], RunFolder(job.out, root=rank == 0)
    prepared = together(lambda: _prepare(job, folder, rank, world))
    saved, sources, config, loader = prepared
    if any(gather(stop.received is not None)):
        return None
    weights = job.out / MODEL_FOLDER / WEIGHTS_FILE
    objective = TaskObjective(task.kind, len(task.labels), config.tuning.dropout)
    if not broadcast(weights.exists()):
        engine = assemble(config, objective, _start(saved.encoder.state_dict(), config), loader, None)
        if not train(engine, config, folder, loader, None, _work(config, loader, saved.vocabulary), stop, watchdog):
            return None
        state = engine.full_state()
        together(lambda: write_model(weights.parent, state, saved.vocabulary.path) if rank == 0 else None)
    together(lambda: (job.out / "predictions").mkdir(exist_ok=True) if rank == 0 else None)
    model = objective.build(config.model)
    together(lambda: _load(model, weights))
    mine = together(lambda: _scores(model, sources, saved, job, config.tuning, rank, world, stop))
    languages = {language: one for part in gather(mine) for language, one in part.items()}
    if rank != 0 or len(languages) < len(_tests(sources)):  # told to stop on the way
        return None
    result = _summary(job, config.tuning, sources, languages)
    write_json(job.out / "scores.json", result)
    folder.finish(config.train.steps)
    folder.close()
    return result


def _prepare(
    job: Job, folder: RunFolder, rank: int, world: int
) -> tuple[Saved, list[Source], FinetuneConfig, TaskLoader]:
    """All that is read before the model is built. Raises ValueError for what cannot be run."""
    task = TASKS[job.task]
    engine = replace(job.engine, precision=resolve_precision(job.engine))
    if job.train.audit:
        raise ValueError("train.audit is for pre-training, whose rows have numbers: leave it off")
    check_scorer(job.task)
    check_engine(engine)
    saved, sources = load_encoder(job.model), find(task, list(job.data))
    if not _tests(sources):
        raise ValueError(f"no test or dev set of {job.task} in --data: add the folder that has one")
    tuning = job.tuning.completed(task, saved.encoder.cfg)
    features = _training_features(sources, task, tuning, saved)
    base = _sha256(saved.encoder)
    config = settings(job.task, tuning, saved.encoder.cfg, engine, job.train, job.seed, len(features), base)
    folder.claim(config)
    if (job.out / MODEL_FOLDER).exists() and not (job.out / CONFIG_FILE).exists():
        raise ValueError(f"{job.out} has a model but no {CONFIG_FILE}, which says how it was trained: restore it, or choose another --out")
    return saved, sources, config, TaskLoader(features, task.kind, config.data, job.seed, rank, world)


def _load(model: nn.Module, weights: Path) -> None:
    try:
        model.load_state_dict(read_weights(weights))
    except RuntimeError as error:
        raise mismatch(weights, weights.parent.parent, error) from None


def _work(config: FinetuneConfig, loader: TaskLoader, vocabulary: Vocabulary) -> Work:
    tokens = loader.row_tokens
    forward = tokens * encoder_forward(config.model, config.model.discriminator_layers, tokens)
    with torch.device("meta"):
        encoder = TextEncoder(config.model)
    parameters = {"encoder": sum(p.numel() for p in encoder.parameters())}
    return Work(3 * config.tuning.batch * forward, parameters, vocabulary.sha256)


def _training_features(
    sources: Sequence[Source], task: Task, tuning: TuningConfig, saved: Saved
) -> list[Feature]:
    wanted, there = tuning.train_languages, [source for source in sources if source.split == "train"]
    chosen: dict[str, Source] = {}
    for source in there:
        if wanted == ("all",) or source.language in wanted:
            chosen[source.language] = source
    missing = [language for language in wanted if language != "all" and language not in chosen]
    if missing or not chosen:
        raise ValueError(
            f"no training set of {', '.join(missing) or 'any language'} in --data, only of "
            f"{', '.join(sorted({source.language for source in there})) or 'none'}: add its folder, or set tuning.train_languages"
        )
    features: list[Feature] = []
    count = 0
    for language in sorted(chosen):
        examples = read(chosen[language], task)[: tuning.train_examples or None]
        features += _features(examples, task, tuning, saved, language, count)
        count += len(examples)
    return features


def _features(
    examples: Sequence[Example], task: Task, tuning: TuningConfig, saved: Saved, language: str, first: int = 0
) -> list[Feature]:
    cfg = saved.encoder.cfg
    return featurise(examples, task, saved.vocabulary, tuning.windows(cfg), language_index(cfg, language), first)


def _tests(sources: Sequence[Source]) -> list[Source]:
    """The files that are scored: tests, and dev sets where a task has no test."""
    own = [source for source in sources if source.own]
    return [s for s in own if s.split == "test"] or [s for s in own if s.split == "dev"]


def _sha256(encoder: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in encoder.state_dict().items():
        digest.update(name.encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _start(encoder: Mapping[str, Tensor], config: FinetuneConfig) -> Fill:
    """The encoder's weights as they were left, the head's drawn from the seed."""

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
    sources: Sequence[Source],
    saved: Saved,
    job: Job,
    tuning: TuningConfig,
    rank: int,
    world: int,
    stop: StopRequest,
) -> dict[str, dict[str, float]]:
    """Scores of this rank's share of the languages, up to a request to stop; the predictions are left in the run folder."""
    task = TASKS[job.task]
    scores: dict[str, dict[str, float]] = {}
    for source in _tests(sources)[rank::world]:
        if stop.received is not None:
            break
        examples = read(source, task)
        features = _features(examples, task, tuning, saved, source.language)
        predictions = predict(model, examples, features, task)
        write_json(job.out / "predictions" / f"{source.language}.json", predictions)
        scores[source.language] = score(job.task, task, examples, predictions, source.language)
    return scores


def _summary(
    job: Job, tuning: TuningConfig, sources: Sequence[Source], languages: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """What `scores.json` holds: by language, their mean, and how far the others lie behind English (the transfer gap)."""
    metrics = TASKS[job.task].metrics
    others = [language for language in languages if language != PIVOT]
    result: dict[str, Any] = {
        "task": job.task, "model": str(job.model), "seed": job.seed, "split": _tests(sources)[0].split,
        "train_languages": list(tuning.train_languages), "metric": list(metrics),
        "tuning": asdict(tuning), "languages": dict(sorted(languages.items())),
        "mean": {metric: fmean(one[metric] for one in languages.values()) for metric in metrics},
    }  # fmt: skip
    if PIVOT in languages and others:
        result["gap"] = {
            metric: languages[PIVOT][metric] - fmean(languages[other][metric] for other in others) for metric in metrics
        }
    return result
