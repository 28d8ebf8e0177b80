"""The first weights that a run takes from another model (`start.folder`). That model is a run, an export, or XLM-R.

A vocabulary may grow: the data's vocabulary may begin with all pieces of the other model's vocabulary and have more.
Each new piece is then segmented into old pieces, and its embedding starts as the mean of their embeddings. If the run
has a relative position bias and the other model has none, the bias starts at 0, so that at first it changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checkpoint_names import require_checkpoint, run_and_step
from .cli import note
from .config import EncoderName, ModelConfig, RunConfig
from .counting import parameter_sizes
from .data.vocabulary import Vocabulary
from .models.init import InitialValues
from .objectives import objective_of
from .objectives.protocol import WeightSource
from .trained.config_json import read_config, read_model_settings, read_vocabulary, without_prefix
from .trained.encoders import load_encoder, load_whole_export
from .trained.exports import DIFFERENCE, DIFFERENCE_FILE, EXPORTED_SETTINGS, GENERATOR_FOLDER, WHICH_KEY, read_heads
from .trained.runs import MODEL_FOLDER, TrainedEncoder, TrainedRun, load_run, main_encoder, split_vocabulary_tables
from .trained.weights import read_weights

# Exported settings in which a run and the model that it starts from may differ.
_MAY_DIFFER = ("discriminator_layers", "init_std", "layout", "language_embeddings")
# Settings of the layers. `rotary_base` is not among them, because a run may raise it.
_BODY = ("body", "local_window", "global_every", "local_rotary_base")
# Settings in which a run must be equal to the model that it starts from.
SHAPE = [*_BODY, *(name for name in EXPORTED_SETTINGS if name not in _MAY_DIFFER)]
# Prefixes of the parameters that have a row for every token id.
_TOKEN_PARAMETERS = ("embedding_", "difference_", "masked_head.bias", "token_head.bias")


# (parameter name -> first value, part -> settings of the model from which the part starts). A part is an encoder or a
# decoder of the run's model, such as `generator`.
_FirstValues = tuple[dict[str, Tensor], dict[str, ModelConfig]]


def starting_weights(config: RunConfig, vocabulary: Vocabulary, sources: Sequence[Path] = ()) -> InitialValues | None:
    """Returns a function from a parameter's name to its first value, or to None if the parameter starts at random.
    Returns None instead of the function if `config.start` names no folder, or if the engine loads the weights later
    (`start.take state`).

    `vocabulary` is that of the data. `sources`: what `pin_step` returned for each of `source_folders`; by default the
    folders themselves. Raises ValueError for a model of another shape, or with a vocabulary that is not the beginning
    of the data's vocabulary.
    """
    folders = source_folders(config)
    take = config.start.take
    if not folders:
        return None
    pinned = dict(zip(folders, sources or folders, strict=True))
    folder = pinned[folders[0]]
    if take == "state":  # the engine loads the weights later, with the optimizer's state
        _check_state(folder, config, vocabulary)
        return None
    if take == "all":
        values, models = _all_parameters(folder, config, vocabulary)
    else:
        values, models = _from_encoders(pinned, take, config, vocabulary)
    if config.model.relative_bias != "none":
        zeros = torch.zeros(config.model.relative_buckets, config.model.heads)
        values |= {f"{part}.relative.weight": zeros for part, cfg in models.items() if cfg.relative_bias == "none"}
    return (values | split_vocabulary_tables(values, config.model)).get


def source_folders(config: RunConfig) -> list[Path]:
    """The folders of the models that a run starts from. The first one gives the embedding and the heads."""
    if not config.start.folder:
        return []
    parts = objective_of(config.objective).weight_sources(config.start, config.model)
    return list(dict.fromkeys(map(Path, (config.start.folder, *(part.folder for part in parts.values())))))


def _from_encoders(
    folders: Mapping[Path, Path], take: EncoderName, config: RunConfig, vocabulary: Vocabulary
) -> _FirstValues:
    """First values if `start.take` names an encoder. The embedding and the heads come from the encoder `take`, and each
    part of the run's model starts from the encoder that the objective chooses for it.

    `folders`: source folder -> what `pin_step` returned for it.
    """
    objective = objective_of(config.objective)
    main_folder = Path(config.start.folder)

    def read(folder: Path, which: EncoderName | None) -> tuple[dict[str, Tensor], dict[str, Tensor], ModelConfig]:
        """Read and check an encoder. Returns (state, heads, settings): state and heads have rows for all pieces of the
        data's vocabulary, and the settings have the size of that vocabulary."""
        (encoder, old_vocabulary), old_heads = _source_encoder(folders[folder], which)
        state, cfg = _with_new_pieces(encoder.state_dict(), encoder.cfg, old_vocabulary, vocabulary)
        _check_start(folders[folder], cfg, config, old_vocabulary, vocabulary)
        return state, _with_new_pieces(old_heads, encoder.cfg, old_vocabulary, vocabulary)[0], cfg

    state, heads, cfg = read(main_folder, take)
    values = {name: value for name, value in heads.items() if name.startswith(tuple(objective.encoders.values()))}
    values["embedding_0"] = split_vocabulary_tables(state, replace(cfg, vocabulary_blocks=1))["embedding_0"]
    models = dict[str, ModelConfig]()
    for part, origin in objective.weight_sources(config.start, config.model).items():
        folder = Path(origin.folder)
        was_read = (folder, origin.encoder_name) == (main_folder, take)
        part_state, _, models[part] = (state, heads, cfg) if was_read else read(folder, origin.encoder_name)
        _check_layers(folders[folder], models[part], part, origin)
        encoder_state = origin.convert(without_prefix(part_state, "encoder."))
        values |= {f"{part}.{name}": value for name, value in encoder_state.items()}
    return values, models


def _all_parameters(folder: Path, config: RunConfig, vocabulary: Vocabulary) -> _FirstValues:
    """Every parameter of the pre-training model in `folder` (`start.take all`)."""
    objective = objective_of(config.objective)
    is_run = "config" in read_config(folder)
    source = load_run(folder) if is_run else _whole_export(folder, config)
    if source.task:
        raise ValueError(
            f"{folder} is a fine-tuning run, but start.take all takes a pre-training model: set start.take to "
            f"{' or '.join(source.encoders)}"
        )
    parts = objective.weight_sources(config.start, config.model)
    their_parts = objective_of(source.objective).weight_sources(config.start, source.model)
    if source.encoders != objective.encoders or their_parts.keys() != parts.keys():
        raise ValueError(
            f"{folder} was trained for {source.objective.name}, whose model has other parts than that of "
            f"{config.objective.name}: set start.take to {' or '.join(source.encoders)}"
        )
    state, cfg = _with_new_pieces(source.state, source.model, source.vocabulary, vocabulary)
    _check_start(folder, cfg, config, source.vocabulary, vocabulary)
    shape = objective.shape_settings
    encoders = " or ".join(objective.encoders)
    _require_equal(folder, shape(cfg), shape(config.model), f", or start.take to {encoders}")
    # The other model may lack the relative bias and the language embeddings, and may store its vocabulary tables in
    # other blocks: these do not count as missing.
    model = replace(config.model, relative_bias=cfg.relative_bias, language_embeddings=cfg.language_embeddings)
    missing_names = parameter_sizes(config.objective, model).keys() - state.keys()
    missing = {name.split(".")[0] for name in missing_names if not name.startswith(("embedding_", "difference_"))}
    if missing:
        remedy = "" if is_run else "start.folder to the run that it is an export of, or "
        raise ValueError(
            f"{folder} has no {' and no '.join(sorted(missing))}, which start.take all takes for "
            f"{config.objective.name}: set {remedy}start.take to {encoders}"
        )
    return state, dict.fromkeys(parts, cfg)


def _check_state(folder: Path, config: RunConfig, vocabulary: Vocabulary) -> None:
    """Raise ValueError if a run of `config` cannot continue from the state of the run in `folder` (`start.take
    state`)."""
    settings = read_model_settings(folder)
    run, _ = run_and_step(folder)
    _, step = run_and_step(Path(config.start.folder))  # `folder` may have a step that the user did not name
    if step is None:
        raise ValueError(
            f"start.take state continues from a step: name the step as {config.start.folder}@STEP, or give --branch"
        )
    require_checkpoint(run, step)
    if config.train.steps <= step:
        raise ValueError(f"train.steps is {config.train.steps}, but the run begins at step {step}: raise train.steps")
    trained_for = settings.task or settings.objective.name
    if trained_for != config.objective.name:
        raise ValueError(
            f"{folder} was trained for {trained_for}, whose state start.take state cannot take for "
            f"{config.objective.name}: set start.take to an encoder"
        )
    old_vocabulary = read_vocabulary(run, run / MODEL_FOLDER)
    if old_vocabulary.sha256 != vocabulary.sha256:
        raise ValueError(
            f"{folder} has another vocabulary than the data, and start.take state cannot change it: set start.take to "
            "all"
        )
    _check_start(folder, settings.model, config, old_vocabulary, vocabulary)
    shape = objective_of(config.objective).shape_settings
    _require_equal(folder, shape(settings.model), shape(config.model))
    # Only `start.take all` can add the parameters that these settings give a model.
    theirs, ours = (
        {name: getattr(model, name) for name in ("relative_bias", "language_embeddings")}
        for model in (settings.model, config.model)
    )
    _require_equal(folder, theirs, ours, ", or start.take to all")


def _source_encoder(folder: Path, which: EncoderName | None) -> tuple[TrainedEncoder, Mapping[str, Tensor]]:
    """One encoder of a run, an export or XLM-R, by default its main one, and the parameters of its heads by name. A
    fine-tuning run gives no heads."""
    if "config" not in read_config(folder):
        return load_encoder(folder, which), read_heads(folder, which)
    run = load_run(folder)
    encoder = TrainedEncoder(run.encoder(which), run.vocabulary)
    if run.task:
        return encoder, {}
    prefix = run.encoders[which or main_encoder(run.encoders)]
    return encoder, {name: value for name, value in run.state.items() if name.startswith(prefix)}


def _whole_export(folder: Path, config: RunConfig) -> TrainedRun:
    """The whole model of an export, or of XLM-R, with the parts that the objective of `config` has."""
    if run := load_whole_export(folder):
        return run
    objective = objective_of(config.objective)
    has_generator = (folder / GENERATOR_FOLDER).is_dir()
    exported = read_config(folder).get(WHICH_KEY)  # name of the encoder that was exported, if the file says it
    instead = f"set start.take to {'discriminator or generator' if has_generator else exported or 'encoder'}"

    def has(part: str) -> bool:
        return has_generator if part == "generator" else part in objective.encoders and exported in (None, part)

    missing = [part for part in objective.weight_sources(config.start, config.model) if not has(part)]
    if missing:
        raise ValueError(f"{folder} has no {' and no '.join(missing)}, which start.take all takes: {instead}")
    sources = [_source_encoder(folder, which) for which in objective.encoders]
    state = dict[str, Tensor]()
    for (source, heads), (which, head) in zip(sources, objective.encoders.items(), strict=True):
        head_values = {name: value for name, value in heads.items() if name.startswith(head)}
        if not head_values:
            raise ValueError(
                f"the {which} in {folder} has no {head.removesuffix('.')}, which start.take all takes: {instead}"
            )
        state |= head_values
        state |= {f"{which}.{name}": value for name, value in source.encoder.encoder.state_dict().items()}
    # If the model has only one encoder, both names mean it.
    discriminator, vocabulary = sources[0][0]
    generator, _ = sources[-1][0]
    layers = generator.cfg.discriminator_layers
    if replace(discriminator.cfg, discriminator_layers=layers) != generator.cfg:
        raise ValueError(f"{folder / GENERATOR_FOLDER} is of another model than {folder}: export the run again")
    model = replace(discriminator.cfg, generator_layers=layers, embedding_sharing="tied")
    state["embedding_0"] = expected_embedding = torch.cat(generator.embedding_blocks).detach()
    if has_generator and (folder / DIFFERENCE_FILE).exists():
        model = replace(model, embedding_sharing="gdes")
        state["difference_0"] = read_weights(folder / DIFFERENCE_FILE)[DIFFERENCE]
        expected_embedding = expected_embedding + state["difference_0"]
    if not torch.equal(expected_embedding, torch.cat(discriminator.embedding_blocks)):
        raise ValueError(
            f"the discriminator's embedding in {folder} is not the generator's and {DIFFERENCE_FILE} together: export "
            f"the run again, or {instead}"
        )
    return TrainedRun(folder, state, model, vocabulary, "", config.objective)


def _with_new_pieces(
    state: Mapping[str, Tensor], cfg: ModelConfig, old: Vocabulary, new: Vocabulary
) -> tuple[dict[str, Tensor], ModelConfig]:
    """Returns (`state` with rows for all pieces of `new` and with vocabulary tables in one block, settings that fit
    this state). If `new` does not extend `old`, returns `state` and `cfg` unchanged."""
    if new.size <= old.size or not new.begins_with(old):
        return dict(state), cfg
    # `<mask>` has the last id of a vocabulary, so the new pieces have the ids from `old.mask_id` on. For each new
    # piece, `old_ids` has the ids of the old pieces into which it is segmented.
    old_ids = old.segment_pieces([new.piece(token) for token in range(old.mask_id, new.mask_id)])
    ids = torch.from_numpy(np.concatenate(old_ids)).long()
    sizes = torch.tensor(list(map(len, old_ids)))
    new_pieces = torch.arange(len(old_ids)).repeat_interleave(sizes)  # for each of `ids`, the index of its new piece

    def with_new_rows(rows: Tensor) -> Tensor:
        """`rows` with a row for each new piece inserted before the row of `<mask>`. A new piece's row is the mean of
        its old pieces' rows."""
        sums = rows.new_zeros(len(old_ids), *rows.shape[1:]).index_add_(0, new_pieces, rows[ids])
        means = sums / sizes.view(-1, *(1 for _ in rows.shape[1:]))
        return torch.cat([rows[: old.mask_id], means, rows[old.mask_id :]])

    whole_tables = replace(cfg, vocabulary_blocks=1)
    values = split_vocabulary_tables(dict(state), whole_tables)
    values |= {name: with_new_rows(rows) for name, rows in values.items() if name.startswith(_TOKEN_PARAMETERS)}
    return values, replace(whole_tables, vocabulary=new.size)


def _check_start(folder: Path, their_cfg: ModelConfig, config: RunConfig, old: Vocabulary, new: Vocabulary) -> None:
    """Raise ValueError if a model of `config` with the vocabulary `new` cannot start from the model in `folder`, whose
    vocabulary is `old`. `their_cfg`: the settings of the model in `folder`, as `_with_new_pieces` returned them."""
    named = f"the model in {folder}"
    languages = their_cfg.language_embeddings
    if old.sha256 != new.sha256 and not (old.size < new.size and new.begins_with(old)):
        raise ValueError(
            f"{named} has another vocabulary than the data: encode the data with its own, or with one that extends it"
        )
    if languages and languages != config.model.language_embeddings:
        raise ValueError(
            f"{named} has embeddings of the languages {' '.join(languages)}: set model.language_embeddings to those"
        )
    for name in SHAPE:
        theirs, ours = getattr(their_cfg, name), getattr(config.model, name)
        # Without a table of positions or a relative bias, a model has no parameters whose shape this setting gives.
        no_parameters = name == "max_positions" and not their_cfg.absolute_positions
        no_parameters |= name.startswith("relative_") and their_cfg.relative_bias == "none"
        if theirs != ours and not no_parameters:
            raise ValueError(f"{named} has {name} {theirs}, model.{name} is {ours}: set it to the same")
    needs_layout = objective_of(config.objective).starts_in_layout and config.start.take != "state"
    if needs_layout and their_cfg.layout != config.model.layout:
        raise ValueError(
            f"{named} has layout {their_cfg.layout}, model.layout is {config.model.layout}, and objective.name "
            f"{config.objective.name} needs equal layouts: set it to {their_cfg.layout}, and mix the data with "
            f"--layout {their_cfg.layout}"
        )


def _require_equal(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], instead: str = "") -> None:
    """Raise ValueError if `theirs`, settings of the model in `folder`, differ from `ours`. The message ends with
    `instead`, another remedy."""
    for name, value in ours.items():
        if theirs[name] != value:
            raise ValueError(
                f"{folder} has model.{name} {theirs[name]}, this run has {value}: set it to the same{instead}"
            )


def _check_layers(folder: Path, their_cfg: ModelConfig, part: str, origin: WeightSource) -> None:
    """Raise ValueError if an encoder has too few layers for `part`; print a note if it has more than the part takes."""
    layers = their_cfg.discriminator_layers
    if origin.layers > layers:
        raise ValueError(
            f"the model in {folder} has {layers} layers, and the {part} takes {origin.layers}: {origin.remedy}"
        )
    if origin.layers < layers:
        note(f"the model in {folder} has {layers} layers; the {part} starts from the first {origin.layers}")
