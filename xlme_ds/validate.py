"""Every check of a run's settings that needs neither its data nor its hardware, made before anything starts.

Each check raises ValueError with one sentence that names the setting and a remedy. A single setting is checked against
the range or the choices that its type in `xlme_ds.config` gives; the other checks relate settings to each other.
"""

from dataclasses import is_dataclass, replace
from typing import Any, TypeVar, get_type_hints

from .config import EngineConfig, RunConfig, Training, weight_at
from .data.order import phases, plan_step
from .engine_file import deepspeed_settings, resolve_engine_file, zero_stage
from .models.encoder import layer_class
from .models.tiles import HEAD_SIZES
from .objectives import objective_of
from .settings_file import check_ranges

Config = TypeVar("Config", bound=Training)


def validate(config: Config, world: int | None = None) -> Config:
    """Check that the settings of `config` fit each other, and `world` processes if that is given; returns `config`.

    In the result, `engine.deepspeed auto` is replaced by the file that it chooses for `world` processes. Without
    `world` the setting stays auto, and both files that it can choose are checked. Raises ValueError if settings do not
    fit.
    """
    check_class(config)
    check_ranges(config)
    _check_data(config)  # comes before `resolve_engine_file`, which divides by numbers of rows
    if config.engine.deepspeed == "auto":
        if not isinstance(config, RunConfig):
            raise ValueError("engine.deepspeed auto is for pre-training: set it to zero1 or zero3")
        if world is None:
            for name in ("zero1", "zero3"):
                validate(replace(config, engine=replace(config.engine, deepspeed=name)))
            return config
        check_processes(config.engine, world)
        config = resolve_engine_file(config, world)
    _check_model(config)
    if isinstance(config, RunConfig):
        _check_objective(config)
    _check_engine(config)
    _check_pipeline(config)
    if world is not None:
        _check_world(config, world)
    return config


def check_class(config: Any) -> None:
    """Raise ValueError if `config` is not an object with a run's settings (but, say, the name of a recipe), or if one
    of its sections has the wrong class."""
    if not isinstance(config, Training):
        given = config if isinstance(config, str) else "base"
        raise ValueError(f'config is a {type(config).__name__}: give a RunConfig, such as xlme.recipe("{given}")')
    for name, kind in get_type_hints(type(config)).items():
        settings = getattr(config, name)
        if is_dataclass(kind) and isinstance(kind, type) and not isinstance(settings, kind):
            raise ValueError(
                f"{name} is a {type(settings).__name__}: give a {kind.__name__}, such as replace(config.{name}, ...)"
            )


def _check_model(config: Training) -> None:
    model = config.model
    head_size = model.width // model.heads
    if model.width % model.heads:
        raise ValueError(
            f"model.width {model.width} is not a multiple of model.heads {model.heads}: choose another number of heads"
        )
    if model.relative_max_distance <= model.relative_buckets // 4:
        raise ValueError(
            f"model.relative_max_distance {model.relative_max_distance} must exceed a quarter of model.relative_buckets"
        )
    block_size = _divide_up(model.vocabulary, model.vocabulary_blocks)
    if block_size * (model.vocabulary_blocks - 1) >= model.vocabulary:
        raise ValueError(
            f"model.vocabulary {model.vocabulary} does not split into model.vocabulary_blocks "
            f"{model.vocabulary_blocks}: use {_divide_up(model.vocabulary, block_size)}"
        )
    layer_class(model).check(model)
    if model.kernels == "triton" and head_size not in HEAD_SIZES:
        raise ValueError(
            "model.kernels triton takes heads of size 16, 32, 64 or 128, but model.width / model.heads is "
            f"{head_size}: set model.kernels to auto"
        )
    if model.kernels == "triton" and model.attention_dropout:
        raise ValueError(
            "model.kernels triton stores no attention weights that model.attention_dropout could drop: set "
            "model.kernels to auto"
        )
    if len(set(model.language_embeddings)) < len(model.language_embeddings):
        raise ValueError("model.language_embeddings names a language twice: name each once")


def _divide_up(dividend: int, divisor: int) -> int:
    """`dividend` / `divisor`, rounded up."""
    return -(-dividend // divisor)


def _check_objective(config: RunConfig) -> None:
    objective, optimizer, start = config.objective, config.optimizer, config.start
    for name in ("random_fakes", "denoising", "back_translation"):
        try:
            weight_at(getattr(objective, name), 0)
        except ValueError as error:
            raise ValueError(f"objective.{name}: {error}") from None
    if objective.random_fraction + objective.keep_fraction > 1:
        raise ValueError(
            f"objective.random_fraction {objective.random_fraction} and objective.keep_fraction "
            f"{objective.keep_fraction} exceed 1 together: lower one"
        )
    if optimizer.layer_decay != 1:
        raise ValueError(f"optimizer.layer_decay {optimizer.layer_decay} is for fine-tuning: leave it at 1")
    rate = f"optimizer.discriminator_rate {optimizer.discriminator_rate}"
    if optimizer.discriminator_rate != 1 and "generator" not in objective_of(objective).encoders:
        raise ValueError(
            f"{rate} is for a discriminator next to a generator, and objective.name {objective.name} trains one "
            "network: leave it at 1"
        )
    if optimizer.discriminator_rate != 1 and config.engine.kind == "pipeline":
        raise ValueError(
            f"{rate} is not for engine.kind pipeline, whose stages would hold different groups of parameters and wait "
            "for each other: set engine.kind to deepspeed"
        )
    if start.take == "state" and not start.folder:
        raise ValueError(
            "start.take state takes the state of another run: name it by start.folder, or as --branch RUN@STEP"
        )
    objective_of(objective).check(config)


def _check_data(config: Training) -> None:
    data, steps, schedule, warmup = config.data, config.train.steps, config.schedule, config.optimizer.warmup_steps
    if any(length <= 0 for length in data.phase_steps) or (data.phase_steps and sum(data.phase_steps) >= steps):
        raise ValueError(
            f"data.phase_steps {' '.join(map(str, data.phase_steps))} must be positive and add up to less than "
            f"train.steps {steps}: the last folder is read to the end"
        )
    mask_fraction = config.objective.mask_fraction if isinstance(config, RunConfig) else 0.0
    fractions = [phase.mask_fraction for phase in phases(data, mask_fraction)]
    if data.phase_mask_fractions and (mask_fraction >= 1 or any(not 0 < fraction < 1 for fraction in fractions)):
        raise ValueError(
            f"data.phase_mask_fractions {' '.join(map(str, fractions))} must be between 0 and 1, and are not for an "
            "objective that predicts every token"
        )
    if data.phase_rotary_bases and config.model.body != "modern":
        raise ValueError(
            f"data.phase_rotary_bases is for rotary positions, and model.body {config.model.body} has none: leave it "
            "empty"
        )
    decay_setting = f"schedule.decay_steps {schedule.decay_steps}"
    if schedule.decay_steps and schedule.name != "wsd":
        raise ValueError(f"{decay_setting} is not for schedule.name {schedule.name}, only for wsd: leave it at 0")
    if warmup > steps:
        raise ValueError(f"optimizer.warmup_steps {warmup} exceeds train.steps {steps}: shorten the warm-up")
    if warmup + schedule.decay_steps > steps:
        raise ValueError(f"optimizer.warmup_steps {warmup} and {decay_setting} exceed train.steps {steps}: shorten one")
    if data.mono_rows + data.para_rows == 0:
        raise ValueError("data.mono_rows and data.para_rows are both 0: a step needs rows of a task")
    if data.alternate and data.mono_rows != data.para_rows:
        raise ValueError(
            "data.alternate needs as many rows of one task as of the other, but data.mono_rows is "
            f"{data.mono_rows} and data.para_rows {data.para_rows}: set both to the same number"
        )
    if data.alternate and config.train.log_every % 2 == 0:
        raise ValueError(
            f"train.log_every {config.train.log_every} is even, so with data.alternate every logged step would be of "
            "one task: set it to an odd number"
        )


def _check_engine(config: Training) -> None:
    engine = config.engine
    deepspeed_bf16 = engine.kind == "deepspeed" and engine.precision != "fp32"
    offloads = engine.offload_optimizer, engine.offload_parameters
    if engine.kind == "plain" and engine.precision == "bf16":
        raise ValueError(
            "engine.kind plain runs in fp32 only: set engine.precision to fp32, or engine.kind to deepspeed"
        )
    if engine.gradient_precision == "bf16" and not deepspeed_bf16:
        raise ValueError(
            "engine.gradient_precision bf16 is for engine.kind deepspeed computing in bf16: set it to auto"
        )
    if engine.kind != "deepspeed" and offloads != ("none", "none"):
        raise ValueError(
            f"engine.kind {engine.kind} offloads nothing: set engine.offload_optimizer and engine.offload_parameters to"
            " none"
        )
    if "nvme" in offloads and not engine.nvme_folder:
        raise ValueError("offloading to nvme needs engine.nvme_folder: name a folder on a local disk")
    if engine.kind == "plain":
        return
    stage = zero_stage(engine)
    bf16_gradients = engine.gradient_precision == "bf16"
    subject = f"engine.deepspeed {engine.deepspeed} is ZeRO-{stage}"
    if engine.kind == "pipeline" and stage != 1:
        raise ValueError(f"{subject}, but a pipeline runs only with ZeRO-1: set engine.deepspeed to pipe_zero1")
    if stage == 2 and bf16_gradients:
        raise ValueError(
            f"{subject}, but engine.gradient_precision bf16 needs ZeRO-1 or ZeRO-3: set engine.deepspeed to zero1 or "
            "zero3"
        )
    if stage == 1 and bf16_gradients and engine.offload_optimizer != "none":
        raise ValueError(
            "engine.gradient_precision bf16 needs ZeRO-3 where engine.offload_optimizer is set: set engine.deepspeed "
            "to zero3"
        )
    if stage != 3 and (engine.offload_parameters != "none" or engine.offload_optimizer == "nvme"):
        raise ValueError(
            f"{subject}, which can offload only the optimizer and only to cpu: set engine.deepspeed to zero3"
        )


def _check_pipeline(config: Training) -> None:
    engine, layers = config.engine, config.model.discriminator_layers
    parts, balance = engine.pipeline_parts, engine.balance
    if engine.kind != "pipeline":
        if balance:
            raise ValueError(f"engine.balance is not for engine.kind {engine.kind}: leave it empty")
        for name in ("pipeline_stages", "pipeline_schedule"):
            value, default = getattr(engine, name), getattr(EngineConfig, name)
            if value != default:
                raise ValueError(
                    f"engine.{name} {value} is for engine.kind pipeline, but engine.kind is {engine.kind}: set "
                    f"engine.kind to pipeline, or leave engine.{name} at {default}"
                )
        return
    if balance and len(balance) != parts:
        raise ValueError(f"engine.balance {balance} must have {parts} numbers, one for each part of the pipeline")
    if any(count < min(part, 1) for part, count in enumerate(balance)):
        raise ValueError(f"engine.balance {balance} leaves a part empty: only the first part may have 0 layers")
    if parts > layers + 1:
        raise ValueError(
            f"engine.pipeline_stages {engine.pipeline_stages} ({engine.pipeline_schedule}) cuts the model into {parts} "
            f"parts, and all but the first need one of model.discriminator_layers {layers}: use fewer stages"
        )
    if balance and sum(balance) != layers:
        raise ValueError(
            f"engine.balance {balance} adds up to {sum(balance)}: it must add up to the {layers} layers of "
            "model.discriminator_layers"
        )


def check_processes(engine: EngineConfig, world: int) -> None:
    """Raise ValueError if `engine` cannot run on `world` processes."""
    if engine.kind == "plain" and world != 1:
        raise ValueError(f"engine.kind plain runs on one process, but {world} run: set engine.kind to deepspeed")
    if world % engine.processes_per_replica:
        raise ValueError(
            f"engine.pipeline_stages {engine.pipeline_stages} needs a multiple of {engine.processes_per_replica} "
            f"processes, and {world} run: launch another number of them, or change engine.pipeline_stages"
        )


def _check_world(config: Training, world: int) -> None:
    engine, model = config.engine, config.model
    check_processes(engine, world)
    if engine.offload_parameters == "nvme":  # DeepSpeed's own error names no setting
        zero = deepspeed_settings(engine)["zero_optimization"]
        buffer = zero.get("offload_param", {}).get("buffer_size", 100_000_000)
        block_size = _divide_up(model.vocabulary, model.vocabulary_blocks) * model.width
        share = _divide_up(block_size, world)
        most_rows = max(1, world * buffer // model.width)  # the most rows of a block that fit into the buffers
        if share > buffer:
            raise ValueError(
                f"engine.offload_parameters nvme has buffers of {buffer} elements, but with model.vocabulary_blocks "
                f"{model.vocabulary_blocks} a process's share of a block of the embedding has {share}: set "
                f"model.vocabulary_blocks to {_divide_up(model.vocabulary, most_rows)}"
            )
    accumulation = plan_step(config.data, world // engine.processes_per_replica).accumulation
    needed = 2 * engine.pipeline_stages
    if engine.kind == "pipeline" and engine.pipeline_schedule == "dualpipev" and accumulation < needed:
        raise ValueError(
            f"engine.pipeline_schedule dualpipev needs at least {needed} micro-batches a step, but data.micro_batch "
            f"{config.data.micro_batch} gives {accumulation}: lower it, or set engine.pipeline_schedule to 1f1b"
        )
