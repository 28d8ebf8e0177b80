"""All legal layouts of a recipe on a number of GPUs, the fitting ones ranked by the estimated speed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..config import EngineConfig, RunConfig
from .hardware import GPU
from .layout import Layout
from .memory import GIB, Memory, peak
from .speed import Speed, speed

RESERVED = 0.1
"""Assumed share of a GPU's memory that the driver, NCCL and the allocator's fragments take."""


@dataclass(frozen=True)
class Candidate:
    """A layout with what it costs."""

    run: RunConfig
    layout: Layout
    memory: Memory
    moment: str
    """When the memory is fullest."""
    speed: Speed
    fits: bool

    def flags(self) -> str:
        """The settings of this layout, ready for the command line of the recipe."""
        engine, checkpointing = self.run.engine, self.run.model.activation_checkpointing
        words = [f"--engine.kind {engine.kind}", f"--engine.deepspeed {engine.deepspeed}"]
        if engine.kind == "pipeline":
            words.append(f"--engine.pipeline-stages {engine.pipeline_stages}")
        for name in ("gradient_precision", "offload_optimizer", "offload_parameters"):
            if getattr(engine, name) != getattr(EngineConfig, name):
                words.append(f"--engine.{name.replace('_', '-')} {getattr(engine, name)}")
        words.append(f"--data.micro-batch {self.run.data.micro_batch}")
        words.append(f"--model.{'' if checkpointing else 'no-'}activation-checkpointing")
        return " ".join(words)


def candidate(run: RunConfig, gpus: int, gpu: GPU, utilisation: float, row_tokens: int) -> Candidate:
    """What `run` costs as it stands. Raises ValueError where it is not legal on that many GPUs."""
    layout = Layout.of(run, gpus, gpu.precision, row_tokens)
    moment, memory = peak(layout)
    fits = memory.total <= (1 - RESERVED) * gpu.memory_gib * GIB
    return Candidate(run, layout, memory, moment, speed(run, layout, gpu, utilisation), fits)


def search(run: RunConfig, gpus: int, gpu: GPU, utilisation: float, row_tokens: int) -> list[Candidate]:
    """The layouts that are legal and fit, the fastest first; of equals that with fewer micro-batches, then less
    memory."""
    found = []
    for variant in variants(run, gpus):
        try:
            found.append(candidate(variant, gpus, gpu, utilisation, row_tokens))
        except ValueError:  # not legal: the rows do not divide, or a stage would be empty
            continue
    fitting = [one for one in found if one.fits]
    return sorted(
        fitting, key=lambda one: (round(-one.speed.tokens_per_s, -2), one.layout.accumulation, one.memory.total)
    )


def variants(run: RunConfig, gpus: int) -> Iterator[RunConfig]:
    """`run` under every engine, micro-batch and choice of checkpointing that may be legal."""
    for engine in engines(run.engine, gpus):
        largest = max(run.data.mono_rows, run.data.para_rows) // (gpus // engine.processes_per_replica)
        micro_batch = 1
        while micro_batch <= max(1, largest):
            for checkpointing in (False, True):
                yield replace(
                    run,
                    engine=engine,
                    data=replace(run.data, micro_batch=micro_batch),
                    model=replace(run.model, activation_checkpointing=checkpointing),
                )
            micro_batch *= 2


def engines(engine: EngineConfig, gpus: int) -> Iterator[EngineConfig]:
    """ZeRO 1, 2 and 3, the last two also with the optimizer offloaded; pipelines of 2, 4, 8, … stages that divide
    `gpus`."""
    plain = replace(engine, balance=(), pipeline_stages=EngineConfig.pipeline_stages, pipeline_schedule="1f1b")
    plain = replace(plain, gradient_precision="auto", offload_optimizer="none", offload_parameters="none")
    for name in ("zero1", "zero2", "zero3"):
        yield replace(plain, kind="deepspeed", deepspeed=name)
    yield replace(plain, kind="deepspeed", deepspeed="zero2", offload_optimizer="cpu")
    yield replace(plain, kind="deepspeed", deepspeed="zero3_offload", offload_optimizer="cpu")
    stages = 2
    while gpus % stages == 0:
        yield replace(plain, kind="pipeline", deepspeed="pipe_zero1", pipeline_stages=stages)
        stages *= 2
