"""Every check of a run's settings that needs neither its data nor its hardware, before anything is started.

A check is a pair: whether the settings fit, and the sentence that names the setting if they do not.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from .config import EngineConfig, ObjectiveConfig, RunConfig, StartConfig, Training
from .data.order import phases, plan_step
from .io.errors import Check, refuse
from .models.tiles import HEAD_SIZES
from .objectives import has_decoder, objective_of

Config = TypeVar("Config", bound=Training)

# What numbers must be, whether one is that, and the settings that it is asked of.
RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "be at least 1",
        lambda value: value >= 1,
        "model.vocabulary model.width model.heads model.feed_forward model.generator_layers model.discriminator_layers "
        "model.max_positions model.vocabulary_blocks model.head_chunk data.micro_batch train.steps train.log_every "
        "train.save_every train.keep_last train.eval_rows train.max_bad_steps",
    ),
    (
        "not be negative",
        lambda value: value >= 0,
        "objective.random_fraction objective.keep_fraction objective.discriminator_weight objective.z_loss "
        "data.mono_rows data.para_rows optimizer.warmup_steps schedule.decay_steps optimizer.weight_decay "
        "model.decoder_layers train.eval_every train.keep_every train.save_buffer_gib train.spike_sigma "
        "train.watchdog_minutes",
    ),
    (
        "be positive",
        lambda value: value > 0,
        "model.init_std model.norm_epsilon objective.generator_temperature optimizer.learning_rate optimizer.epsilon "
        "optimizer.clip optimizer.discriminator_rate",
    ),
    (
        "be at least 0 and below 1",
        lambda value: 0 <= value < 1,
        "model.dropout model.attention_dropout objective.generator_keep_fraction optimizer.beta1 optimizer.beta2",
    ),
    ("be above 0, up to 1", lambda value: 0 < value <= 1, "optimizer.layer_decay"),
)

CONFIG_FOLDER = Path(__file__).resolve().parents[1] / "ds_configs"
_OURS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "bf16",
    "fp16",
    "data_types",
    "communication_data_type",
    "torch_autocast",
)
# Keys of a user's file that change how a step is computed or what is printed of it, and not its result.
_OF_ENGINES = (
    "zero_optimization",
    "aio",
    "comms_logger",
    "csv_monitor",
    "dump_state",
    "flops_profiler",
    "memory_breakdown",
    "tensorboard",
    "wall_clock_breakdown",
)
_LOSSY = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zeropp_loco_param",
    "fp16_master_weights_and_gradients",
)


def validate(config: Config, world: int | None = None) -> Config:
    """`config`, if all its settings fit each other, and `world` processes where their number is known already.

    Raises ValueError, in one sentence that names the setting. `engine.deepspeed auto` is what it becomes on `world`
    processes, and all that it can become where their number is not known.
    """
    if config.engine.deepspeed == "auto":
        refuse([(isinstance(config, RunConfig), "engine.deepspeed auto is for pre-training: set it to zero1 or zero3")])
        if world is None:
            for name in ("zero1", "zero3"):
                validate(replace(config, engine=replace(config.engine, deepspeed=name)))
            return config
        refuse(processes_fit(config.engine, world))
        config = choose_engine(config, world)
    for checks in (_ranges, _model, _objective, _data, _engine, _engine_file, _pipeline):
        refuse(checks(config))
    if world is not None:
        engine = config.engine
        refuse(processes_fit(engine, world))
        refuse(_swap_fits(config, world))
        accumulation = plan_step(config.data, world // engine.processes_per_replica).accumulation
        needed = 2 * engine.pipeline_stages
        if engine.kind == "pipeline" and engine.pipeline_schedule == "dualpipev" and accumulation < needed:
            raise ValueError(
                f"engine.pipeline_schedule dualpipev needs at least {needed} micro-batches a step, data.micro_batch "
                f"{config.data.micro_batch} gives {accumulation}: lower it, or use 1f1b"
            )
    return config


def choose_engine(config: Config, world: int) -> Config:
    """`config` with the file that `engine.deepspeed auto` is on `world` processes.

    A step of one micro-batch sends the same under ZeRO-1 and ZeRO-3, which sends more of it while computing; with more
    micro-batches ZeRO-3 sends it in each one. Raises ValueError where the rows do not divide.
    """
    if config.engine.deepspeed != "auto":
        return config
    step = plan_step(config.data, world // config.engine.processes_per_replica)
    return replace(config, engine=replace(config.engine, deepspeed="zero3" if step.accumulation == 1 else "zero1"))


def _ranges(config: Training) -> list[Check]:
    checks = []
    for words, holds, names in RANGES:
        for name in names.split():
            section, setting = name.split(".")
            if hasattr(config, section):  # fine-tuning has no objective
                value = getattr(getattr(config, section), setting)
                checks.append((holds(value), f"{name} is {value}: it must {words}"))
                finite = value < math.inf or name == "optimizer.clip"  # which inf turns off
                checks.append((finite, f"{name} is {value}: it must be finite"))
    return checks


def _model(config: Training) -> list[Check]:
    model = config.model
    block, head_size = -(-model.vocabulary // model.vocabulary_blocks), model.width // model.heads
    return [
        (
            model.width % model.heads == 0,
            f"model.width {model.width} is not a multiple of model.heads {model.heads}: choose another number of heads",
        ),
        (
            model.relative_buckets >= 4 and model.relative_buckets % 2 == 0,
            f"model.relative_buckets is {model.relative_buckets}: it must be even and at least 4 (half for each "
            "direction)",
        ),
        (
            model.relative_max_distance > model.relative_buckets // 4,
            f"model.relative_max_distance {model.relative_max_distance} must exceed a quarter of "
            "model.relative_buckets",
        ),
        (
            block * (model.vocabulary_blocks - 1) < model.vocabulary,
            f"model.vocabulary {model.vocabulary} does not split into model.vocabulary_blocks "
            f"{model.vocabulary_blocks}: use {-(-model.vocabulary // block)}",
        ),
        (
            model.kernels != "triton" or head_size in HEAD_SIZES,
            "model.kernels triton takes heads of size 16, 32, 64 or 128, model.width / model.heads is "
            f"{head_size}: set it to auto",
        ),
        (
            model.compile != "graphs" or not model.activation_checkpointing,
            "model.compile graphs keeps the activations in its graphs: set it to layers, or leave "
            "model.activation_checkpointing off",
        ),
        (
            model.kernels != "triton" or not model.attention_dropout,
            "model.kernels triton never has attention weights whole, which model.attention_dropout drops from: set "
            "it to auto",
        ),
        (
            len(set(model.language_embeddings)) == len(model.language_embeddings),
            "model.language_embeddings names a language twice: name each once",
        ),
    ]


def _objective(config: Training) -> list[Check]:
    if not isinstance(config, RunConfig):
        return []
    settings = config.objective
    return [
        (
            settings.random_fraction + settings.keep_fraction <= 1,
            f"objective.random_fraction {settings.random_fraction} and objective.keep_fraction "
            f"{settings.keep_fraction} exceed 1 together: lower one",
        ),
        (
            all(0 < fraction <= 1 for fraction in settings.pseudo_fractions),
            f"objective.pseudo_fractions is {settings.pseudo_fractions}: each must be above 0, up to 1",
        ),
        (
            not (settings.denoising or settings.back_translation) or has_decoder(settings),
            f"objective.denoising and objective.back_translation are for objective.name mt, it is {settings.name}: "
            "leave them empty",
        ),
        (
            has_decoder(settings) or (config.model.decoder, config.model.decoder_layers) == ("xlm", 0),
            f"model.decoder and model.decoder_layers are for objective.name mt, it is {settings.name}: leave them at "
            "xlm and 0",
        ),
        (
            config.optimizer.layer_decay == 1,
            f"optimizer.layer_decay {config.optimizer.layer_decay} is for fine-tuning: leave it at 1",
        ),
        (
            config.optimizer.discriminator_rate == 1 or "generator" in objective_of(settings).encoders,
            f"optimizer.discriminator_rate {config.optimizer.discriminator_rate} is for a discriminator next to a "
            f"generator, and objective.name {settings.name} trains one network: leave it at 1",
        ),
        (
            config.optimizer.discriminator_rate == 1 or config.engine.kind != "pipeline",
            f"optimizer.discriminator_rate {config.optimizer.discriminator_rate} is not for engine.kind pipeline: its "
            "stages would hold other groups of parameters each and wait for each other: set it to deepspeed",
        ),
        *_start(config.start, settings),
        *objective_of(settings).checks(config),
    ]


def _start(start: StartConfig, objective: ObjectiveConfig) -> list[Check]:
    """What of a start is for a model with a decoder, each with its setting."""
    of_parts = {"start.into": (start.into, "both"), "start.decoder": (start.decoder, "")}
    checks = []
    for name, (value, usual) in of_parts.items():
        given, leave = f"{name} {value}", f"leave it {'empty' if not usual else f'at {usual}'}"
        checks += [
            (value == usual or has_decoder(objective), f"{given} is for objective.name mt, it is {objective.name}: "
             f"{leave}"),
            (value == usual or bool(start.folder), f"{given} is for a run that starts from another model: set "
             f"start.folder, or {leave}"),
            (value == usual or start.take not in ("all", "state"), f"{given} is for one encoder, and start.take "
             f"{start.take} takes the whole model: set start.take to the encoder's name"),
        ]  # fmt: skip
    checks.append(
        (
            start.take != "state" or bool(start.folder),
            "start.take state takes what another run has: name it by start.folder, or as --branch RUN@STEP",
        )
    )
    both = f"start.decoder {start.decoder} and start.into {start.into} both say what the decoder starts from"
    return [*checks, (not start.decoder or start.into == "both", f"{both}: leave start.into at both")]


def _data(config: Training) -> list[Check]:
    data, steps, schedule = config.data, config.train.steps, config.schedule
    decay, phased = schedule.decay_steps, sum(data.phase_steps)
    usual = config.objective.mask_fraction if isinstance(config, RunConfig) else 0.0
    fractions = [phase.mask_fraction for phase in phases(data, usual)]
    return [
        (
            all(length > 0 for length in data.phase_steps) and (phased < steps or not phased),
            f"data.phase_steps {' '.join(map(str, data.phase_steps))} must be positive and add up to less than "
            f"train.steps {steps}: the last folder is read to the end",
        ),
        (
            not data.phase_mask_fractions or (usual < 1 and all(0 < fraction < 1 for fraction in fractions)),
            f"data.phase_mask_fractions {' '.join(map(str, fractions))} must be between 0 and 1, and are not for an "
            "objective that predicts every token",
        ),
        (
            schedule.name == "wsd" or not decay,
            f"schedule.decay_steps {decay} is for schedule.name wsd, it is {schedule.name}: leave it 0",
        ),
        (
            config.optimizer.warmup_steps <= steps,
            f"optimizer.warmup_steps {config.optimizer.warmup_steps} exceeds train.steps {steps}: shorten the warm-up",
        ),
        (
            config.optimizer.warmup_steps + decay <= steps,
            f"optimizer.warmup_steps {config.optimizer.warmup_steps} and schedule.decay_steps {decay} exceed "
            f"train.steps {steps}: shorten one",
        ),
        (
            data.mono_rows + data.para_rows > 0,
            "data.mono_rows and data.para_rows are both 0: a step needs rows of a task",
        ),
        (
            not data.alternate or data.mono_rows == data.para_rows,
            f"data.alternate needs as many rows of both tasks, data.mono_rows is {data.mono_rows} and data.para_rows "
            f"{data.para_rows}: set them to the same",
        ),
        (
            not data.alternate or config.train.log_every % 2 == 1,
            f"train.log_every {config.train.log_every} would show one task alone under data.alternate: set it to an "
            "odd number",
        ),
    ]


def _engine(config: Training) -> list[Check]:
    engine = config.engine
    offloads = (engine.offload_optimizer, engine.offload_parameters)
    return [
        (
            not (engine.kind == "plain" and engine.precision == "bf16"),
            "engine.kind plain runs in fp32 only: set engine.precision to fp32, or engine.kind to deepspeed",
        ),
        (
            engine.pipeline_stages >= 2,
            f"engine.pipeline_stages is {engine.pipeline_stages}: it must be at least 2, or use engine.kind deepspeed",
        ),
        (
            engine.gradient_precision != "bf16" or (engine.kind == "deepspeed" and engine.precision != "fp32"),
            "engine.gradient_precision bf16 is for engine.kind deepspeed computing in bf16: set it to auto",
        ),
        (
            engine.kind == "deepspeed" or offloads == ("none", "none"),
            f"engine.kind {engine.kind} offloads nothing: set engine.offload_optimizer and engine.offload_parameters "
            "to none",
        ),
        (
            "nvme" not in offloads or bool(engine.nvme_folder),
            "offloading to nvme needs engine.nvme_folder: name a folder on a local disk",
        ),
        (
            config.model.compile != "graphs" or (engine.kind == "deepspeed" and engine.precision != "fp32"),
            f"model.compile graphs is for engine.kind deepspeed computing in bf16, engine.kind is {engine.kind} and "
            f"engine.precision {engine.precision}: set it to layers",
        ),
    ]


def _engine_file(config: Training) -> list[Check]:
    """What the file of DeepSpeed's settings, and the ZeRO stage in it, leave possible."""
    engine = config.engine
    if engine.kind == "plain":
        return []
    stage = zero_stage(engine)
    file, bf16 = f"engine.deepspeed {engine.deepspeed} is ZeRO-{stage}", engine.gradient_precision == "bf16"
    return [
        (engine.kind != "pipeline" or stage == 1, f"{file}, a pipeline runs with ZeRO-1: set it to pipe_zero1"),
        (
            stage != 3 or config.model.compile != "graphs",
            f"{file}, which gathers the weights somewhere else each time, and model.compile graphs reads them where "
            "they were: set it to layers",
        ),
        (
            stage != 2 or not bf16,
            f"{file}, engine.gradient_precision bf16 needs ZeRO-1 or ZeRO-3: set it to zero1 or zero3",
        ),
        (
            stage != 1 or not bf16 or engine.offload_optimizer == "none",
            "engine.gradient_precision bf16 needs ZeRO-3 where engine.offload_optimizer is set: set engine.deepspeed "
            "to zero3",
        ),
        (
            stage == 3 or (engine.offload_parameters == "none" and engine.offload_optimizer != "nvme"),
            f"{file}, which offloads the optimizer to cpu and nothing else: set it to zero3",
        ),
    ]


def _pipeline(config: Training) -> list[Check]:
    engine, layers = config.engine, config.model.discriminator_layers
    if engine.kind != "pipeline":
        of_parts = ("pipeline_stages", "pipeline_schedule")
        return [
            (not engine.balance, f"engine.balance is not for engine.kind {engine.kind}: leave it empty"),
            *(
                (
                    getattr(engine, name) == (usual := getattr(EngineConfig, name)),
                    f"engine.{name} {getattr(engine, name)} is for engine.kind pipeline, it is {engine.kind}: set "
                    f"that, or leave it at {usual}",
                )
                for name in of_parts
            ),
        ]
    parts, balance = engine.pipeline_parts, engine.balance
    return [
        (
            not balance or len(balance) == parts,
            f"engine.balance {balance} must have {parts} numbers, one for each part of the pipeline",
        ),
        (
            all(count >= min(part, 1) for part, count in enumerate(balance)),
            f"engine.balance {balance} leaves a part empty: only the first may have 0 layers",
        ),
        (
            parts <= layers + 1,
            f"engine.pipeline_stages {engine.pipeline_stages} ({engine.pipeline_schedule}) cuts the model into "
            f"{parts} parts, of which all but the first need one of model.discriminator_layers {layers}: "
            "use fewer stages",
        ),
        (
            not balance or sum(balance) == layers,
            f"engine.balance {balance} adds up to {sum(balance)}, model.discriminator_layers is {layers}",
        ),
    ]


def _swap_fits(config: Config, world: int) -> list[Check]:
    """Whether a process's share of the embedding goes through DeepSpeed's buffers to NVMe, which has no word for it."""
    model, engine = config.model, config.engine
    if engine.offload_parameters != "nvme":
        return []
    room = deepspeed_settings(engine)["zero_optimization"].get("offload_param", {}).get("buffer_size", 100_000_000)
    rows = -(-model.vocabulary // model.vocabulary_blocks)
    share = -(-rows * model.width // world)
    return [
        (
            share <= room,
            f"engine.offload_parameters nvme has buffers of {room} elements, and a process's share of an embedding of "
            f"{model.vocabulary_blocks} model.vocabulary_blocks has {share}: set these to "
            f"{-(-model.vocabulary * model.width // (world * room))}",
        )
    ]


def processes_fit(engine: EngineConfig, world: int) -> list[Check]:
    """Whether `engine` runs on `world` processes."""
    return [
        (
            engine.kind != "plain" or world == 1,
            f"engine.kind plain runs on one process, {world} were launched: use engine.kind deepspeed",
        ),
        (
            world % engine.processes_per_replica == 0,
            f"engine.pipeline_stages {engine.pipeline_stages} needs a multiple of as many processes, {world} were "
            "launched",
        ),
    ]


def deepspeed_settings(engine: EngineConfig) -> dict[str, Any]:
    """The engine keys of a file in ds_configs/ (by name) or at a path.

    Raises ValueError for a file that is missing, is no JSON, or holds keys that the recipe decides.
    """
    path = Path(engine.deepspeed) if engine.deepspeed.endswith(".json") else CONFIG_FOLDER / f"{engine.deepspeed}.json"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in CONFIG_FOLDER.glob("*.json")))
        raise ValueError(f"engine.deepspeed {engine.deepspeed} is neither a path to a .json file nor one of: {known}")
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name a file that can be") from None
    if not isinstance(settings, dict) or not isinstance(settings.get("zero_optimization"), dict):
        raise ValueError(f"{path} is no DeepSpeed configuration: it must be a JSON object with zero_optimization")
    ours = next((key for key in _OURS if key in settings), None)
    other = next((key for key in settings if key not in (*_OF_ENGINES, *_OURS)), None)
    zero = settings["zero_optimization"]
    offloads = [zero[key] for key in ("offload_optimizer", "offload_param") if key in zero]
    auto = next((key for key, value in zero.items() if value == "auto"), None)
    lossy = next((key for key in _LOSSY if zero.get(key)), None)
    refuse(
        [
            (
                settings["zero_optimization"].get("stage") in (1, 2, 3),
                f"{path} must set zero_optimization.stage to 1, 2 or 3",
            ),
            (
                all(isinstance(value, dict) for value in offloads),
                f"{path} sets an offload_* of zero_optimization that is no object: leave it out",
            ),
            (
                auto is None,
                f"{path} sets zero_optimization.{auto} to auto, which is for Hugging Face's trainer: give a number, or "
                "leave it out",
            ),
            (
                ours is None,
                f"{path} sets {ours}, which the recipe decides: remove it there and use the recipe's own setting",
            ),
            (
                other is None,
                f"{path} sets {other}, which may change the loss curve: remove it, only {', '.join(_OF_ENGINES)} leave "
                "it as it is",
            ),
            (
                lossy is None,
                f"{path} sets zero_optimization.{lossy}, which rounds what ranks send to each other: remove it",
            ),
        ]
    )
    return settings


def zero_stage(engine: EngineConfig) -> int:
    """The ZeRO stage of the engine's file."""
    return deepspeed_settings(engine)["zero_optimization"]["stage"]
