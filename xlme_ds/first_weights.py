"""The first weights that a run takes from another model (`start.folder`): a run, an export, or XLM-R.

A vocabulary may grow: where the data's begins with all the pieces of the model's, the embedding of a new
piece is the mean of those of the pieces that the old vocabulary cuts it into. A gated or plain relative bias that the
model does not have begins at 0, so that at first it changes nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cli import note
from .config import ModelConfig, RunConfig, StartConfig
from .counting import parameter_sizes
from .data.vocabulary import Vocabulary
from .folders import at_step, checkpoints_of, saved_step
from .io.errors import Check, refuse
from .models.init import InitialValues
from .models.text_encoder import TextEncoder, Which, encoder_of
from .objectives import has_decoder, objective_of
from .trained.encoders import load_encoder, load_translating_export
from .trained.exports import (
    DIFFERENCE,
    DIFFERENCE_FILE,
    EXPORTED_SETTINGS,
    GENERATOR_FOLDER,
    WHICH,
    read_heads,
    translates,
)
from .trained.runs import MODEL_FOLDER, TrainedRun, in_blocks, load_run, main_encoder
from .trained.settings import read_config, read_settings, read_vocabulary
from .trained.weights import read_weights
from .translate.decoder import decoder_depth, decoder_from_encoder

_MAY_DIFFER = ("discriminator_layers", "init_std", "layout", "language_embeddings")
# Settings of a model that must be those of the one that it starts from.
SHAPE = [name for name in EXPORTED_SETTINGS if name not in _MAY_DIFFER]
_BY_TOKEN = ("embedding_", "difference_", "masked_head.bias", "token_head.bias")  # parameters with a row for every id


class _Part(NamedTuple):
    """One encoder, its heads under their names, and its vocabulary."""

    encoder: TextEncoder
    heads: Mapping[str, Tensor]
    vocabulary: Vocabulary


def starting_weights(config: RunConfig, vocabulary: Vocabulary, sources: Sequence[Path] = ()) -> InitialValues | None:
    """The first value of every parameter that `config.start` names; None when it names no folder.

    `vocabulary`: that of the data. `sources`: the folders by the names that `pinned` gives. Raises ValueError for one
    whose model has another shape, or a vocabulary that is not the beginning of this one.
    """
    if not config.start.folder:
        return None
    (folder, *others), take = sources or named(config.start), config.start.take
    names: list[str] = list(objective_of(config.objective).encoders)
    if take == "state":  # which the engine loads, with the optimizer's
        _check_state(folder, config, vocabulary)
        return None
    if take == "all":
        values, there = _everything(folder, config, vocabulary)
    else:
        values, there = _one_for_all(folder, take, config, vocabulary)
    of = dict.fromkeys(names, there)
    if has_decoder(config.objective):
        refuse([_same_layout(folder, there, config.model)])
        of |= {"decoder": there} if config.start.into != "encoder" else {}
    for other in others:
        encoder, _, its = _part(other)
        state, of["decoder"] = _grown(encoder.state_dict(), encoder.cfg, its, vocabulary)
        refuse(_start_checks(other, of["decoder"], config.model, its, vocabulary))
        refuse([_same_layout(other, of["decoder"], config.model)])
        values |= _decoder_weights(other, encoder_of(state, of["decoder"]), config.model)
    if config.model.relative_bias != "none":
        zeros = torch.zeros(config.model.relative_buckets, config.model.heads)
        values |= {f"{which}.relative.weight": zeros for which, cfg in of.items() if cfg.relative_bias == "none"}
    return (values | in_blocks(values, config.model)).get


def named(start: StartConfig) -> list[Path]:
    """The folders that a run starts from: of the model, and of the decoder where that is another."""
    return [Path(folder) for folder in (start.folder, start.decoder) if folder]


def _one_for_all(
    folder: Path, take: Which, config: RunConfig, vocabulary: Vocabulary
) -> tuple[dict[str, Tensor], ModelConfig]:
    """Embedding and layers of one encoder for every one here, and its heads; with its settings."""
    encoders = objective_of(config.objective).encoders
    encoder, heads, its = _part(folder, take)
    of_encoder, there = _grown(encoder.state_dict(), encoder.cfg, its, vocabulary)
    refuse(_start_checks(folder, there, config.model, its, vocabulary))
    values, _ = _grown(heads, encoder.cfg, its, vocabulary)
    values = {name: value for name, value in values.items() if name.startswith(tuple(encoders.values()))}
    taken, into = encoder_of(of_encoder, there), config.start.into  # of a model with a decoder
    values |= _as_first_weights(folder, taken, config.model, [] if into == "decoder" else list(encoders))
    if has_decoder(config.objective) and into != "encoder" and not config.start.decoder:
        values |= _decoder_weights(folder, taken, config.model)
    return values, there


def _everything(folder: Path, config: RunConfig, vocabulary: Vocabulary) -> tuple[dict[str, Tensor], ModelConfig]:
    """Every parameter of a pre-training model, and its settings."""
    encoders = objective_of(config.objective).encoders
    run = load_run(folder) if "config" in read_config(folder) else _whole(folder, config)
    alone = " or ".join(encoders)
    if run.task:
        raise ValueError(
            f"{folder} is not a pre-training run, of which start.take all takes every parameter: set start.take to "
            f"{alone}"
        )
    if run.encoders != encoders or has_decoder(run.objective) != has_decoder(config.objective):
        raise ValueError(
            f"{folder} was trained for {run.objective.name}, whose model has other parts than that of "
            f"{config.objective.name}: set start.take to {' or '.join(run.encoders)}"
        )
    state, there = _grown(run.state, run.model, run.vocabulary, vocabulary)
    refuse(_start_checks(folder, there, config.model, run.vocabulary, vocabulary))
    refuse(_layer_checks(folder, there, config, f", or start.take to {alone}"))
    # A relative bias and languages that it does not have are no parts; the embedding may be in other blocks.
    model = replace(config.model, relative_bias=there.relative_bias, language_embeddings=there.language_embeddings)
    sizes = parameter_sizes(config.objective, model)
    blocks = "embedding_", "difference_"
    lacking = {name.split(".")[0] for name in sizes if name not in state and not name.startswith(blocks)}
    words = (
        f"{folder} has no {' and no '.join(sorted(lacking))}, which start.take all takes for {config.objective.name}"
    )
    whole = "" if "config" in read_config(folder) else "start.folder to the run that it is an export of, or "
    if lacking:
        raise ValueError(f"{words}: set {whole}start.take to {alone}")
    return state, there


def _layer_checks(folder: Path, there: ModelConfig, config: RunConfig, instead: str = "") -> Iterator[Check]:
    of_two = ("generator_layers", "embedding_sharing") if len(objective_of(config.objective).encoders) > 1 else ()
    of_decoder = ("decoder", "decoder_layers") if has_decoder(config.objective) else ()
    for name in (*of_two, *of_decoder, "discriminator_layers"):
        its, ours = getattr(there, name), getattr(config.model, name)
        if name == "decoder_layers" and decoder_depth(there) == decoder_depth(config.model):
            continue  # 0 is a number too
        yield its == ours, f"{folder} has model.{name} {its}, this run has {ours}: set it to that{instead}"


def _check_state(folder: Path, config: RunConfig, vocabulary: Vocabulary) -> None:
    """Raise ValueError where a run of `config` cannot take the state of the run in `folder`, the optimizer's too."""
    settings, (run, _) = read_settings(folder), at_step(folder)
    _, step = at_step(Path(config.start.folder))
    words = f"start.take state goes on from a step: name it, {config.start.folder}@STEP, or give --branch"
    if step is None:
        raise ValueError(words)
    steps = [saved_step(each) for each in checkpoints_of(run)]
    there = ", ".join(map(str, steps)) or "none at all"
    now = config.train.steps
    refuse(
        [
            (step in steps, f"{run} has no checkpoint of step {step}, it has {there}: name one of them"),
            (step is None or now > step, f"train.steps {now} are over at step {step}, where the run begins: raise it"),
        ]
    )
    name = settings.task or settings.objective.name
    words = f"{folder} was trained for {name}, whose state start.take state cannot take for {config.objective.name}"
    if name != config.objective.name:
        raise ValueError(f"{words}: set start.take to an encoder")
    its = read_vocabulary(run, run / MODEL_FOLDER)
    words = f"{folder} has another vocabulary than the data, and start.take state takes it as it is: set it to all"
    if its.sha256 != vocabulary.sha256:
        raise ValueError(words)
    refuse(_start_checks(folder, settings.model, config.model, its, vocabulary))
    refuse(_layer_checks(folder, settings.model, config))
    for setting in ("relative_bias", "language_embeddings"):
        theirs, ours = getattr(settings.model, setting), getattr(config.model, setting)
        words = f"{folder} has model.{setting} {theirs}, this run has {ours}: set it to that, or start.take to all"
        if theirs != ours:
            raise ValueError(words)


def _part(folder: Path, which: Which | None = None) -> _Part:
    """One encoder of a run, an export or XLM-R, by default the first; the heads are those that were trained on it."""
    config = read_config(folder)
    if "config" in config:
        run = load_run(folder)
        encoder, prefix = run.encoder(which), () if run.task else run.encoders[which or main_encoder(run.encoders)]
        heads = {name: value for name, value in run.state.items() if name.startswith(prefix)}
        return _Part(encoder, heads, run.vocabulary)
    encoder, vocabulary = load_encoder(folder, which)
    return _Part(encoder, read_heads(folder, which), vocabulary)


def _whole(folder: Path, config: RunConfig) -> TrainedRun:
    """The whole model of an export, or of XLM-R, with the parts that the objective of `config` has."""
    if translates(folder):
        return load_translating_export(folder)
    encoders, state = objective_of(config.objective).encoders, dict[str, Tensor]()
    words = f"{folder} has no decoder, which start.take all takes: set start.take to encoder"
    if has_decoder(config.objective):
        raise ValueError(words)
    two = (folder / GENERATOR_FOLDER).is_dir()
    instead = f"set start.take to {'discriminator or generator' if two else 'encoder'}"
    there = read_config(folder).get(WHICH)
    lacking = [which for which in encoders if not (two if which == "generator" else there in (None, which))]
    if lacking:
        raise ValueError(f"{folder} has no {' and no '.join(lacking)}, which start.take all takes: {instead}")
    parts = [_part(folder, which) for which in encoders]
    for part, (which, head) in zip(parts, encoders.items(), strict=True):
        own = {name: value for name, value in part.heads.items() if name.startswith(head)}
        words = f"the {which} in {folder} has no {head.removesuffix('.')}, which start.take all takes"
        if not own:
            raise ValueError(f"{words}: {instead}")
        state |= own | {f"{which}.{name}": value for name, value in part.encoder.encoder.state_dict().items()}
    first, last = parts[0], parts[-1]  # the discriminator and the generator, or one encoder
    layers = last.encoder.cfg.discriminator_layers
    same = replace(first.encoder.cfg, discriminator_layers=layers) == last.encoder.cfg
    if not same:
        raise ValueError(f"{folder / GENERATOR_FOLDER} is of another model than {folder}: export the run again")
    model = replace(first.encoder.cfg, generator_layers=layers, embedding_sharing="tied")
    embedding = torch.cat(last.encoder.table).detach()
    state["embedding_0"] = read = embedding
    if two and (folder / DIFFERENCE_FILE).exists():
        model = replace(model, embedding_sharing="gdes")
        state["difference_0"] = difference = read_weights(folder / DIFFERENCE_FILE)[DIFFERENCE]
        read = embedding + difference
    words = f"the discriminator's embedding in {folder} is not the generator's and {DIFFERENCE_FILE} together"
    fits = torch.equal(read, torch.cat(first.encoder.table))
    if not fits:
        raise ValueError(f"{words}: export the run again, or {instead}")
    return TrainedRun(folder, state, model, first.vocabulary, "", config.objective)


def _grown(
    state: Mapping[str, Tensor], cfg: ModelConfig, old: Vocabulary, new: Vocabulary
) -> tuple[dict[str, Tensor], ModelConfig]:
    """`state` and its settings for the vocabulary `new`, if that begins with the pieces of `old`; else as they are."""
    if new.size <= old.size or not new.begins_with(old):
        return dict(state), cfg
    cuts = old.cut([new.piece(token) for token in range(old.mask, new.mask)])
    sizes, ids = torch.tensor(list(map(len, cuts))), torch.from_numpy(np.concatenate(cuts)).long()
    owners = torch.arange(len(cuts)).repeat_interleave(sizes)

    def longer(rows: Tensor) -> Tensor:
        """With the means before the row of `<mask>`."""
        sums = rows.new_zeros(len(cuts), *rows.shape[1:]).index_add_(0, owners, rows[ids])
        means = sums / sizes.view(-1, *(1 for _ in rows.shape[1:]))
        return torch.cat([rows[: old.mask], means, rows[old.mask :]])

    cfg_there = replace(cfg, vocabulary_blocks=1)
    values = in_blocks(dict(state), cfg_there)
    values = {name: longer(value) if name.startswith(_BY_TOKEN) else value for name, value in values.items()}
    return values, replace(cfg_there, vocabulary=new.size)


def _start_checks(
    folder: Path, there: ModelConfig, here: ModelConfig, its: Vocabulary, vocabulary: Vocabulary
) -> Iterator[Check]:
    """That a model of `here` can start from the one of `there`."""
    model, languages = f"the model in {folder}", there.language_embeddings
    same = its.sha256 == vocabulary.sha256 or (its.size < vocabulary.size and vocabulary.begins_with(its))
    yield (
        same,
        f"{model} has another vocabulary than the data: encode the data with its own, or with one that extends it",
    )
    yield (
        not languages or languages == here.language_embeddings,
        f"{model} has embeddings of the languages {' '.join(languages)}: set model.language_embeddings to those",
    )
    for name in SHAPE:
        if there.relative_bias == "none" and name.startswith("relative_"):
            continue
        setting, ours = getattr(there, name), getattr(here, name)
        yield setting == ours, f"{model} has {name} {setting}, model.{name} is {ours}: set it to the same"


def _same_layout(folder: Path, there: ModelConfig, here: ModelConfig) -> Check:
    """A decoder reads and writes the special tokens that it starts with knowing."""
    words = f"the model in {folder} has layout {there.layout}, model.layout is {here.layout}, and its decoder needs one"
    return there.layout == here.layout, f"{words}: set it to {there.layout}, and mix the data with --layout so"


def _as_first_weights(
    folder: Path, encoder: TextEncoder, model: ModelConfig, names: Sequence[Which]
) -> dict[str, Tensor]:
    """The embedding, and the encoder under `names`: of the layers the first."""
    layers = encoder.cfg.discriminator_layers
    for name in reversed(names):
        setting = "generator_layers" if name == "generator" else "discriminator_layers"
        asked = getattr(model, setting)
        if asked > layers:
            raise ValueError(f"the model in {folder} has {layers} layers, model.{setting} is {asked}: lower it")
        _note_cut(folder, layers, asked, which=name)
    values = {"embedding_0": torch.cat(encoder.table).detach()}
    for which in names:
        values |= {f"{which}.{name}": value for name, value in encoder.encoder.state_dict().items()}
    return values


def _decoder_weights(folder: Path, encoder: TextEncoder, model: ModelConfig) -> dict[str, Tensor]:
    """The decoder's first weights, taken from the encoder, by name."""
    layers, asked = encoder.cfg.discriminator_layers, decoder_depth(model)
    words = f"the model in {folder} has {layers} layers, and the decoder takes {asked}"
    if asked > layers:
        raise ValueError(f"{words}: lower model.decoder_layers, or set start.into to encoder")
    _note_cut(folder, layers, asked, "decoder")
    found = decoder_from_encoder(encoder.encoder.state_dict(), model)
    return {f"decoder.{name}": value for name, value in found.items()}


def _note_cut(folder: Path, layers: int, taken: int, which: str) -> None:
    if taken < layers:
        note(f"the model in {folder} has {layers} layers: the {which} starts from its first {taken}")
