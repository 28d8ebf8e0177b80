"""A recipe on a number of GPUs, as the sizes that memory, communication and time follow from."""

import functools
from dataclasses import dataclass

from ..config import EngineConfig, ModelConfig, ObjectiveConfig, RunConfig
from ..counting import parameter_sizes, work_of
from ..data.order import plan_step
from ..engine.build import resolve_gradient_precision
from ..models.operations import Work
from ..models.pipeline import Part, parts, pipeline_balance
from ..objectives import objective_of
from ..validate import deepspeed_settings, validate


@dataclass(frozen=True)
class Sizes:
    """Parameters of one stage, heads with their encoders; an encoder that stands alone counts as discriminator."""

    embedding: int
    difference: int
    generator: int
    discriminator: int
    largest: int
    """The largest single parameter."""

    @property
    def total(self) -> int:
        """All parameters of the stage."""
        return self.embedding + self.difference + self.generator + self.discriminator

    @property
    def tables(self) -> int:
        """Token tables: the embedding and, with GDES, the difference."""
        return self.embedding + self.difference


@functools.cache
def stage_sizes(objective: ObjectiveConfig, cfg: ModelConfig, part: Part) -> Sizes:
    """Sizes of the parameters that `part` of the model holds."""
    sizes = parameter_sizes(objective, cfg, part)
    main, *others = objective_of(objective).encoders.items()

    def total(*prefixes: str) -> int:
        return sum(size for name, size in sizes.items() if name.startswith(prefixes))

    return Sizes(
        embedding=total("embedding_"),
        difference=total("difference_"),
        generator=sum(total(f"{which}.", head) for which, head in others),
        discriminator=total(f"{main[0]}.", main[1]),
        largest=max(sizes.values()),
    )


@dataclass(frozen=True)
class Zero:
    """What the engine's file and settings say, with DeepSpeed 0.19.8's defaults; sizes in elements."""

    stage: int
    overlap: bool
    reduce_bucket: int
    prefetch_bucket: int
    reuse_distance: int
    live: int
    sub_group: int
    gradient_bytes: int
    """Of an element of the gradients that micro-batches add up in."""
    offload_optimizer: bool
    offload_parameters: bool

    @staticmethod
    def of(engine: EngineConfig, precision: str, accumulation: int) -> "Zero":
        """Read the section zero_optimization of the engine's file, and the settings beside it."""
        zero = deepspeed_settings(engine)["zero_optimization"]
        return Zero(
            stage=zero["stage"],
            overlap=zero.get("overlap_comm", zero["stage"] == 3),
            reduce_bucket=int(zero.get("reduce_bucket_size", 5e8)),
            prefetch_bucket=int(zero.get("stage3_prefetch_bucket_size", 5e7)),
            reuse_distance=int(zero.get("stage3_max_reuse_distance", 1e9)),
            live=int(zero.get("stage3_max_live_parameters", 1e9)),
            sub_group=int(zero.get("sub_group_size", 1e9)),
            gradient_bytes=2 if resolve_gradient_precision(engine, precision, accumulation) == "bf16" else 4,
            offload_optimizer=engine.offload_optimizer != "none",
            offload_parameters=engine.offload_parameters != "none",
        )


@dataclass(frozen=True)
class Layout:
    """How the work is spread: `replicas` of a pipeline of `len(stages)` stages, `rows` of both tasks a micro-batch.

    `element` is the size of a weight or activation in bytes; `fused`: attention runs in the GPU's fused kernel.
    """

    objective: ObjectiveConfig
    model: ModelConfig
    zero: Zero
    stages: tuple[Part, ...]
    replicas: int
    rows: int
    accumulation: int
    row_tokens: int
    element: int
    fused: bool

    @staticmethod
    def of(run: RunConfig, gpus: int, precision: str, row_tokens: int, fused: bool = True) -> "Layout":
        """The layout of `run` on `gpus` processes. Raises ValueError, in the words of the run, where it is not
        legal."""
        validate(run)
        if run.engine.kind == "plain":
            raise ValueError("engine.kind plain is for comparisons on one process: plan for deepspeed or pipeline")
        if run.engine.pipeline_schedule != "1f1b":
            raise ValueError(
                f"engine.pipeline_schedule {run.engine.pipeline_schedule} is not counted by the planner: set it to 1f1b"
            )
        group = run.engine.processes_per_replica
        if gpus % group:
            raise ValueError(f"--gpus {gpus} is not a multiple of engine.pipeline_stages {group}: choose one that is")
        if run.engine.kind == "pipeline":
            balance = pipeline_balance(run.engine, work_of(run, row_tokens), run.model.activation_checkpointing)
            stages = tuple(parts(balance))
        else:
            stages = (Part(range(run.model.discriminator_layers)),)
        step = plan_step(run.data, gpus // group)
        return Layout(
            objective=run.objective,
            model=run.model,
            zero=Zero.of(run.engine, precision, step.accumulation),
            stages=stages,
            replicas=gpus // group,
            rows=step.micro_rows,
            accumulation=step.accumulation,
            row_tokens=row_tokens,
            element=2 if precision == "bf16" else 4,
            fused=fused,
        )

    @property
    def triton(self) -> bool:
        """Whether attention runs in the Triton kernels."""
        return self.fused and self.model.attention == "triton"

    @property
    def gpus(self) -> int:
        """Processes in all."""
        return self.replicas * len(self.stages)

    @property
    def tokens(self) -> int:
        """Positions of a micro-batch."""
        return self.rows * self.row_tokens

    @property
    def work(self) -> Work:
        """Operations of the forward pass, a token."""
        return objective_of(self.objective).work(self.model, self.row_tokens)

    @property
    def softmax_stage(self) -> int:
        """Where the vocabulary softmax stands."""
        return 0 if self.work.softmax_first else len(self.stages) - 1

    @property
    def borrowed(self) -> int:
        """Elements of the embedding that the last stage reads and the first one owns."""
        return self.sizes(0).embedding if self.softmax_stage > 0 else 0

    def sizes(self, stage: int = 0) -> Sizes:
        """Parameters of a stage."""
        return stage_sizes(self.objective, self.model, self.stages[stage])

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage holds at once under the 1F1B schedule (PipeDream-Flush)."""
        return min(len(self.stages) - stage, self.accumulation)
