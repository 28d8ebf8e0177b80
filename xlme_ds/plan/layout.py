"""The parallel layout of a recipe on a number of GPUs: the sizes that determine memory, communication and time."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..config import EngineConfig, ModelConfig, ObjectiveConfig, RunConfig
from ..counting import flops_of, parameter_sizes, total_size
from ..data.order import phases, plan_step
from ..engine.build import resolve_gradient_precision
from ..engine_file import deepspeed_settings, resolve_engine_file
from ..models.attention import item_mask, uses_triton
from ..models.layers import MicroBatchShape
from ..models.pipeline import Flops, PipelinePart, pipeline_balance, split_layers
from ..objectives import objective_of
from ..validate import validate


@dataclass(frozen=True)
class StageSizes:
    """Element counts of the parameters of one stage."""

    total: int
    tables: int  # the embedding and the difference
    embedding: int
    difference: int  # GDES adds it to the embedding for the discriminator; 0 without GDES
    generator: int  # the generator with its head
    discriminator: int  # the discriminator, or a model's only encoder, with its head
    largest: int  # element count of the largest single parameter


@functools.cache
def stage_sizes(objective: ObjectiveConfig, cfg: ModelConfig, part: PipelinePart) -> StageSizes:
    """Sizes of the parameters that `part` of the model holds."""
    (main, main_head), *others = objective_of(objective).encoders.items()
    # A first part that has no layers holds just the parameters that come before the layers.
    before_layers = parameter_sizes(objective, cfg, PipelinePart(range(0), last=False))

    def is_held(name: str) -> bool:
        if name.startswith(f"{main}.layers."):
            return int(name.split(".")[2]) in part.layers
        return part.first if name in before_layers else part.last

    sizes = {name: size for name, size in parameter_sizes(objective, cfg).items() if is_held(name)}
    return StageSizes(
        total=sum(sizes.values()),
        tables=total_size(sizes, "embedding_", "difference_"),
        embedding=total_size(sizes, "embedding_"),
        difference=total_size(sizes, "difference_"),
        generator=sum(total_size(sizes, f"{which}.", head) for which, head in others),
        discriminator=total_size(sizes, f"{main}.", main_head),
        largest=max(sizes.values()),
    )


# DeepSpeed 0.19.8's defaults, in elements.
_ZERO_DEFAULTS = {
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_max_reuse_distance": 1e9,
    "stage3_max_live_parameters": 1e9,
    "sub_group_size": 1e9,
}


def zero_settings(engine: EngineConfig) -> dict[str, int]:
    """The zero_optimization settings that the planner reads. A setting that the engine's file lacks has DeepSpeed's
    default."""
    section = deepspeed_settings(engine)["zero_optimization"]
    zero = {"overlap_comm": section["stage"] == 3} | _ZERO_DEFAULTS | section
    return {name: int(zero[name]) for name in ("stage", "overlap_comm", *_ZERO_DEFAULTS)}


def _uses_triton(run: RunConfig, precision: str) -> bool:
    # An objective without `masking` lets every token attend to its whole item.
    masking = getattr(objective_of(run.objective), "masking", None)
    make_mask = item_mask if masking is None else masking.attention_mask
    return uses_triton(run.model, make_mask, on_gpu=True, in_16_bit=precision == "bf16")


@dataclass(frozen=True)
class ParallelLayout(MicroBatchShape):
    """The layout of a run: `replicas` copies of the model, each on `len(stages)` processes, so that `gpus` is the
    product of the two numbers. The inherited fields describe one micro-batch."""

    objective: ObjectiveConfig
    model: ModelConfig
    engine: EngineConfig
    flops: Flops  # operations per token
    zero: Mapping[str, int]  # ZeRO's settings under DeepSpeed's names
    gradient_element_bytes: int  # bytes of one element of the gradients while they add up over micro-batches
    reduced_element_bytes: int  # bytes of one element of the gradients while they are summed over ranks
    stages: tuple[PipelinePart, ...]
    replicas: int
    gpus: int
    accumulation: int  # number of micro-batches in a step
    offloads_optimizer: bool  # whether the optimizer's state is in the host's memory

    @staticmethod
    def of(run: RunConfig, gpus: int, precision: str, row_tokens: int, on_gpu: bool = True) -> "ParallelLayout":
        """The layout of `run` on `gpus` processes, with rows of `row_tokens` tokens. `on_gpu`: as in `MicroBatchShape`.
        Raises ValueError for settings that the run itself would refuse, and for engines that the planner has no
        formulas for."""
        run = resolve_engine_file(validate(run), gpus)
        if run.engine.kind == "plain":
            raise ValueError("engine.kind plain is for comparisons on one process: plan for deepspeed or pipeline")
        if run.engine.pipeline_schedule != "1f1b":
            raise ValueError(
                f"engine.pipeline_schedule {run.engine.pipeline_schedule} is not counted by the planner: set it to 1f1b"
            )
        per_replica = run.engine.processes_per_replica
        if gpus % per_replica:
            raise ValueError(
                f"gpus {gpus} is not a multiple of engine.pipeline_stages {per_replica}: choose one that is"
            )
        validate(run, gpus)  # with the checks that depend on the number of processes
        flops = flops_of(run, row_tokens)
        stages = [PipelinePart(range(run.model.discriminator_layers))]
        if run.engine.kind == "pipeline":
            stages = split_layers(pipeline_balance(run.engine, flops, run.model.activation_checkpointing))
        step = plan_step(run.data, gpus // per_replica)
        gradient_precision = resolve_gradient_precision(run.engine, precision, step.accumulation)
        # The phase that masks the largest fraction of the tokens needs the most memory.
        fraction = max(phase.mask_fraction for phase in phases(run.data, run.objective.mask_fraction))
        return ParallelLayout(
            objective=replace(run.objective, mask_fraction=fraction),
            model=run.model,
            engine=run.engine,
            flops=flops,
            zero=zero_settings(run.engine),
            gradient_element_bytes=2 if gradient_precision == "bf16" else 4,
            reduced_element_bytes=2 if run.engine.gradient_precision == "bf16" else 4,
            stages=tuple(stages),
            replicas=gpus // per_replica,
            gpus=gpus,
            rows=step.micro_batch_size,
            pairs=step.micro_batch_size - step.rows_per_micro_batch[0],
            accumulation=step.accumulation,
            row_tokens=row_tokens,
            tokens=step.micro_batch_size * row_tokens,
            element_bytes=2 if precision == "bf16" else 4,
            on_gpu=on_gpu,
            triton=on_gpu and _uses_triton(run, precision),
            offloads_optimizer=run.engine.offload_optimizer != "none",
        )

    @property
    def embedding_copy_size(self) -> int:
        """Element count of the copy of the embedding that a pipeline's last stage holds for its softmax; 0 if there is
        no copy."""
        return self.sizes(0).embedding if self.flops.softmax_last and len(self.stages) > 1 else 0

    def sizes(self, stage: int) -> StageSizes:
        """Sizes of a stage. They do not depend on activation checkpointing, so `stage_sizes` is always called without
        it: one cached result then serves runs with and without it."""
        return stage_sizes(self.objective, replace(self.model, activation_checkpointing=False), self.stages[stage])

    def neighbours(self, stage: int) -> int:
        """Number of stages with which a stage exchanges hidden states; in the middle of a pipeline it is two."""
        return (stage > 0) + (stage < len(self.stages) - 1)

    def in_flight(self, stage: int) -> int:
        """Number of micro-batches whose activations a stage holds at once in the 1F1B schedule (PipeDream-Flush)."""
        return min(len(self.stages) - stage, self.accumulation)
