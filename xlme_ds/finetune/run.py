"""One fine-tuning run: read, train through the same engines and checkpoints as pre-training, score or predict every
language."""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config import EngineConfig, TrainConfig
from ..data.schema import read_json, write_json
from ..data.vocabulary import Vocabulary
from ..engine.build import Fill, assemble, check_engine, resolve_precision
from ..engine.ranks import SharedError, broadcast, gather, together
from ..models.init import Whole, initialise
from ..models.text_encoder import TextEncoder, language_index
from ..operations import encoder_forward
from ..saved import CONFIG_FILE, MODEL_FOLDER, WEIGHTS_FILE, Saved, load_encoder, mismatch, read_weights, write_model
from ..train.run import RunFacts, train
from ..train.run_folder import RunFolder
from ..train.stop import StopRequest, Watchdog
from .batches import TaskLoader
from .examples import Example, find, labelled, read
from .features import Feature, featurise
from .model import TaskModel
from .objective import TaskObjective
from .predict import check_scorer, predict, predictions_file, score, write_predictions
from .sets import Sets, choose, dev_examples, training_examples
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
    settings: int = 1
    """How many settings there are to choose from, of which these are one."""

    @property
    def done(self) -> Path:
        """The file of the scores, the run's last act."""
        return self.out / "scores.json"

    @property
    def predictions(self) -> Path:
        """The folder of the predictions."""
        return self.out / "predictions"


class Prepared(NamedTuple):
    """All that is read before the model is built."""

    saved: Saved
    sets: Sets
    config: FinetuneConfig
    loader: TaskLoader
    bare: list[str]
    """Of this rank's share of the tests, the languages without labels."""


def finetune(job: Job, rank: int, world: int, stop: StopRequest) -> dict[str, Any] | None:
    """Do the whole job; collective over the ranks, which have joined. Returns its scores on rank 0 (see
    docs/finetuning.md), None elsewhere and when it was told to stop. What is done is not done again. Raises
    SharedError."""
    watchdog = Watchdog(job.train.watchdog_minutes, rank)
    watchdog.beat("reading the examples and building the model")
    try:
        return _finetune(job, rank, world, stop, watchdog)
    finally:
        watchdog.close()


def _finetune(job: Job, rank: int, world: int, stop: StopRequest, watchdog: Watchdog) -> dict[str, Any] | None:
    task, folder = TASKS[job.task], RunFolder(job.out, root=rank == 0)
    try:
        prepared = together(lambda: _prepare(job, folder, rank, world))
    except SharedError:
        folder.close()
        raise
    saved, sets, config, loader, _ = prepared
    bare = {language for part in gather(prepared.bare) for language in part}
    if broadcast(job.done.exists()):
        found = together(lambda: _finished(job, sets) if rank == 0 else None)
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
        together(lambda: write_model(weights.parent, state, saved.vocabulary.path) if rank == 0 else None)
    # Of other tests that were predicted before nothing may stay: the folder is what somebody submits.
    together(lambda: shutil.rmtree(job.predictions) if rank == 0 and job.predictions.exists() else None)
    model = objective.build(config.model)
    together(lambda: _load(model, weights))
    mine = together(lambda: _scores(model, sets, saved, job, config.tuning, (rank, world), stop))
    scores = {asked: one for part in gather(mine) for asked, one in part.items()}
    if rank != 0 or len(scores) < len(sets.test) + len(sets.dev):  # told to stop on the way
        return None
    result = _summary(job, config.tuning, sets, scores)
    write_json(job.done, result)
    folder.finish(config.train.steps)
    folder.close()
    return result


def _prepare(job: Job, folder: RunFolder, rank: int, world: int) -> Prepared:
    """Raises ValueError for what cannot be run, also for what could not be read after training."""
    task = TASKS[job.task]
    engine = replace(job.engine, precision=resolve_precision(job.engine))
    if job.train.audit:
        raise ValueError("train.audit is for pre-training, whose rows have numbers: leave it off")
    check_scorer(job.task)
    check_engine(engine)
    saved, sources = load_encoder(job.model), find(task, list(job.data))
    sets = choose(sources, job.task, job.tuning, job.settings > 1)
    tuning = replace(job.tuning, held_out=sets.held_out).completed(task, saved.encoder.cfg)
    features = _training_features(sets, task, tuning, saved)
    base = _sha256(saved.encoder)
    config = settings(job.task, tuning, saved.encoder.cfg, engine, job.train, job.seed, len(features), base)
    folder.claim(config)
    done = [path.name for path in (job.out / MODEL_FOLDER, job.done) if path.exists()]
    if done and not (job.out / CONFIG_FILE).exists():
        raise ValueError(
            f"{job.out} has {' and '.join(done)} but no {CONFIG_FILE}, which says how it was trained: restore it, or choose another --out"
        )
    loader = TaskLoader(features, task.kind, config.data, job.seed, rank, world)
    _require_same_examples(job.out / CONFIG_FILE, loader)
    bare = []
    for source in [*sets.test, *sets.dev][rank::world]:
        language_index(saved.encoder.cfg, source.language)
        examples = read(source, task)
        if source in sets.test and not labelled(examples):
            bare.append(source.language)
    return Prepared(saved, sets, config, loader, bare)


def _require_same_examples(path: Path, loader: TaskLoader) -> None:
    """Raise ValueError where the run of a `config.json` was started on other training examples."""
    if path.exists():
        started = read_json(path, dict).get("data", {}).get("fingerprints")
        if started not in (None, loader.fingerprints):
            raise ValueError(
                f"{path.parent} was started on other training examples: use the same --data, or another --out"
            )


def _finished(job: Job, sets: Sets) -> dict[str, Any]:
    """The scores that are there already. Raises ValueError where they are not what this call asks for."""
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


def _announce(job: Job, task: Task, sets: Sets, bare: set[str]) -> None:
    """Say before the first step what will have no score."""
    names = [source.path.name for source in sets.test if source.language in bare]
    if names:
        where = predictions_file(job.predictions, task, "test", "xx").parent
        print(
            f"{job.out}: no labels in {', '.join(names)} ({len(names)} of {len(sets.test)} test sets): no scores of these, their "
            f"predictions go to {where} in the form that XTREME evaluates",
            flush=True,
        )
    if sets.unused:
        print(
            f"{job.out}: no test set of {', '.join(sets.unused)}, only a dev set: neither scored nor predicted",
            flush=True,
        )
    if sets.held_out:
        print(
            f"{job.out}: every tenth training example is held out, as the dev set that settings are chosen on",
            flush=True,
        )


def _load(model: nn.Module, weights: Path) -> None:
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


def _training_features(sets: Sets, task: Task, tuning: TuningConfig, saved: Saved) -> list[Feature]:
    features: list[Feature] = []
    count = 0
    for source in sets.train:
        examples = training_examples(source, task, tuning)
        features += _features(examples, task, tuning, saved, source.language, count)
        count += len(examples)
    return features


def _features(
    examples: Sequence[Example], task: Task, tuning: TuningConfig, saved: Saved, language: str, first: int = 0
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
    sets: Sets,
    saved: Saved,
    job: Job,
    tuning: TuningConfig,
    place: tuple[int, int],
    stop: StopRequest,
) -> dict[tuple[str, str], dict[str, float] | None]:
    """Scores of the share of rank `place[0]` of `place[1]`, by purpose and language, up to a request to stop; None
    without labels.

    The predictions of tests are left in the run folder.
    """
    task, (rank, world) = TASKS[job.task], place
    asked = [("test", source) for source in sets.test] + [("dev", source) for source in sets.dev]
    scores: dict[tuple[str, str], dict[str, float] | None] = {}
    for purpose, source in asked[rank::world]:
        if stop.received is not None:
            break
        examples = read(source, task) if purpose == "test" else dev_examples(source, task, tuning)
        features = _features(examples, task, tuning, saved, source.language)
        predictions = predict(model, examples, features, task)
        if purpose == "test":
            write_predictions(
                predictions_file(job.predictions, task, source.split, source.language), examples, predictions
            )
        known = labelled(examples)
        scores[purpose, source.language] = (
            score(job.task, task, examples, predictions, source.language) if known else None
        )
    return scores


def _summary(
    job: Job, tuning: TuningConfig, sets: Sets, scores: Mapping[tuple[str, str], dict[str, float] | None]
) -> dict[str, Any]:
    """What `scores.json` holds, see docs/finetuning.md."""
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


def _mean(task: Task, languages: Mapping[str, dict[str, float]]) -> dict[str, float]:
    return {metric: fmean(one[metric] for one in languages.values()) for metric in task.metrics}
