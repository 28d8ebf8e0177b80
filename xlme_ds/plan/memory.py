"""Peak memory of one GPU by kind: the fullest of the moments that a step passes through.

tests/plan/test_memory.py compares it with what the engines allocate.
"""

from dataclasses import dataclass, fields, replace

from . import activations, states
from .layout import Layout

GIB = 2.0**30


@dataclass(frozen=True)
class Memory:
    """Bytes by kind at one moment."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(getattr(self, field.name) for field in fields(self))

    def plus(self, **kinds: float) -> "Memory":
        """With more bytes of some kinds."""
        return replace(self, **{kind: getattr(self, kind) + size for kind, size in kinds.items()})

    def gib(self) -> dict[str, float]:
        """GiB by kind, with the total."""
        names = [field.name for field in fields(self)] + ["total"]
        return {name: getattr(self, name) / GIB for name in names}


def peak(of: Layout) -> tuple[str, Memory]:
    """The fullest moment of the fullest stage: its name, and the bytes by kind."""
    found = [
        (f"{name}, stage {stage}" if len(of.stages) > 1 else name, memory)
        for stage in range(len(of.stages))
        for name, memory in moments(of, stage).items()
    ]
    return max(found, key=lambda pair: pair[1].total)


def moments(of: Layout, stage: int) -> dict[str, Memory]:
    """Bytes by kind at the moments that can be the fullest, for a step in the middle of a run."""
    idle = Memory(
        weights=states.weights(of, stage),
        gradients=states.standing_gradients(of, stage),
        optimizer=states.optimizer(of, stage),
        buffers=states.buckets(of, stage, backward=False),
    )
    filling = states.buckets(of, stage, backward=True) - states.buckets(of, stage, backward=False)
    busy = idle.plus(
        activations=(of.in_flight(stage) - 1) * activations.stage(of, stage),
        buffers=activations.between_stages(of, stage),
    )
    found = {
        "start of the backward pass": busy.plus(
            weights=states.gathered(of, stage, sum(states.reused(of, stage))),
            gradients=_waiting(of, stage),
            activations=activations.stage(of, stage) + activations.working(of),
            buffers=filling,
        ),
        "update": idle.plus(gradients=states.reduced_gradients(of, stage), buffers=states.updating(of, stage)),
    }
    if of.work.softmax_first and of.stages[stage].first:
        found |= _around_the_first_softmax(of, stage, busy, filling)
    if of.work.softmax_last and of.stages[stage].last:
        found |= _around_the_last_softmax(of, stage, busy, filling)
    if of.work.softmax_last and of.stages[stage].first:
        found["embedding, backward"] = _embedding_backward(of, stage, busy.plus(buffers=filling))
    return found | _reductions(of, stage, idle, busy, filling)


def _reductions(of: Layout, stage: int, idle: Memory, busy: Memory, filling: float) -> dict[str, Memory]:
    sizes, layers = of.sizes(stage), len(of.stages[stage].layers)
    everything = states.reduced_gradients(of, stage)
    if states.uses_bf16_optimizer(of):
        return {"reduction": idle.plus(gradients=everything, buffers=states.reducing(of, stage, sizes.total))}
    bucket = min(of.zero.reduce_bucket, sizes.total)
    # The backward pass is through so many layers when it has filled the first bucket.
    behind = min(layers, bucket * layers // max(1, sizes.discriminator))
    arrived = states.arriving_gradients(of, stage, bucket) + _waiting(of, stage)
    if of.element == states.FLOAT:  # what waits is one of those that are collected whole
        arrived = min(arrived, states.FLOAT * sizes.total)
    reduced = busy.plus(
        weights=states.gathered(of, stage, sum(states.reused(of, stage))),
        gradients=arrived,
        activations=activations.stage(of, stage) - behind * activations.kept_layer(of),
        buffers=filling,
    )
    return {
        "first reduction": reduced.plus(buffers=states.reducing(of, stage, bucket)),
        "behind the first reduction": reduced.plus(activations=activations.working(of)),
        # In fp32 under ZeRO 1 and 2 its gradient is one of those that are collected whole.
        "reduction of the largest parameter": idle.plus(
            weights=states.gathered(of, stage, 0),
            gradients=everything + (of.element * sizes.largest if of.element == 2 or of.zero.stage == 3 else 0),
            buffers=filling + states.reducing(of, stage, sizes.largest),
        ),
    }


def _waiting(of: Layout, stage: int) -> float:
    """The softmax's gradient of an embedding whose lookup has yet to give its own: autograd hands on their sum."""
    both = of.work.softmax_last and of.stages[stage].first and of.stages[stage].last
    return _softmax_gradient(of, stage) if both else 0.0


def _softmax_gradient(of: Layout, stage: int) -> float:
    """That of the stage's own embedding; BF16_Optimizer's sum takes it tile by tile."""
    return 0.0 if states.uses_bf16_optimizer(of) else of.element * of.sizes(stage).embedding


def _joined_by_lookup(of: Layout, stage: int) -> float:
    """The softmax's gradient of an embedding while a lookup's is added: on a GPU that is as large as a block, on the
    CPU sparse, and added in place where no engine partitions the table."""
    in_place = not of.fused and of.zero.stage < 3 and len(of.stages) == 1
    block = of.element * of.sizes(stage).embedding / of.model.vocabulary_blocks
    return _softmax_gradient(of, stage) + (0 if in_place else block)


def _embedding_backward(of: Layout, stage: int, start: Memory) -> Memory:
    arrived = states.arriving_gradients(of, stage, of.sizes(stage).discriminator)
    return start.plus(weights=states.gathered(of, stage, 0), gradients=arrived + _joined_by_lookup(of, stage))


def _around_the_last_softmax(of: Layout, stage: int, busy: Memory, filling: float) -> dict[str, Memory]:
    start = busy.plus(
        weights=states.gathered(of, stage, sum(states.reused(of, stage))), activations=activations.stage(of, stage)
    )
    table = _softmax_gradient(of, stage) if of.sizes(stage).embedding else of.element * of.borrowed
    return {
        "vocabulary softmax, forward": start.plus(logits=activations.logits(of, backward=False)),
        "vocabulary softmax, backward": start.plus(
            gradients=table, logits=activations.logits(of, backward=True), buffers=filling
        ),
    }


def _around_the_first_softmax(of: Layout, stage: int, busy: Memory, filling: float) -> dict[str, Memory]:
    sizes = of.sizes(stage)
    generator, _ = states.reused(of, stage)
    start = busy.plus(weights=states.gathered(of, stage, generator))
    # With the tables tied, the gradient of the discriminator's lookup is there already, on a GPU a whole table.
    lookup = of.element * sizes.embedding if of.fused and not sizes.difference else 0
    back = start.plus(
        gradients=states.arriving_gradients(of, stage, sizes.discriminator + sizes.difference), buffers=filling
    )
    return {
        "vocabulary softmax, forward": start.plus(
            activations=activations.generator(of), logits=activations.logits(of, backward=False)
        ),
        "vocabulary softmax, backward": back.plus(
            gradients=_softmax_gradient(of, stage) + lookup,
            activations=activations.generator(of),
            logits=activations.logits(of, backward=True),
        ),
        "embedding, backward": back.plus(gradients=_joined_by_lookup(of, stage)),
    }
