"""How many layers of the encoder that is cut each part of a pipeline holds, from counted operations.

XLM-E's first part also runs the generator and the vocabulary softmax, which for XL are worth a dozen layers.
"""

from collections.abc import Sequence

from .config import EngineConfig
from .operations import Work


def stage_costs(work: Work, balance: Sequence[int], checkpointing: bool) -> list[float]:
    """Operations that each part executes a token, forward and backward, with what is computed again in the latter."""
    # Backward is twice forward; the softmax computes its logits again, and so do checkpointed layers.
    layers = 4.0 if checkpointing else 3.0
    costs = [(layers * work.layer + work.layer_ahead) * count for count in balance]
    costs[0] += layers * work.before + 4.0 * work.softmax_first
    costs[-1] += 4.0 * work.softmax_last + 3.0 * work.head + work.softmax_ahead
    return costs


def pipeline_balance(engine: EngineConfig, work: Work, checkpointing: bool) -> tuple[int, ...]:
    """Layers of the encoder by part: `engine.balance`, or the split whose costliest process costs least."""
    if engine.balance:
        return engine.balance
    balance = [0] + [1] * (engine.pipeline_parts - 1)
    for _ in range(work.layers - sum(balance)):  # equal pieces: always to where the cost is then least

        def grown(part: int) -> tuple[float, float]:
            more = [layers + (n == part) for n, layers in enumerate(balance)]
            costs = stage_costs(work, more, checkpointing)
            return process_costs(costs, engine.pipeline_stages)[_process(part, engine.pipeline_stages)], costs[part]

        balance[min(range(len(balance)), key=grown)] += 1
    return tuple(balance)


def process_costs(costs: Sequence[float], stages: int) -> list[float]:
    """The cost of every process of a replica, from that of every part."""
    sums = [0.0] * stages
    for part, cost in enumerate(costs):
        sums[_process(part, stages)] += cost
    return sums


def _process(part: int, stages: int) -> int:
    """Where DualPipeV's parts of the way back stand: the last one beside the first."""
    return part if part < stages else 2 * stages - 1 - part


def describe_balance(engine: EngineConfig, work: Work, checkpointing: bool) -> str:
    """One line for people: what each process of a replica holds, and its share of the operations."""
    balance = pipeline_balance(engine, work, checkpointing)
    held: list[list[str]] = [[] for _ in range(engine.pipeline_stages)]
    held[0].append("embedding, generator" if work.before else "embedding")
    start = 0
    for part, count in enumerate(balance):
        if count:
            last = start + count - 1
            held[_process(part, engine.pipeline_stages)].append(
                f"layers {start}-{last}" if count > 1 else f"layer {last}"
            )
        start += count
    costs = process_costs(stage_costs(work, balance, checkpointing), engine.pipeline_stages)
    shares = [f"{', '.join(names)} ({cost / sum(costs):.0%})" for names, cost in zip(held, costs, strict=True)]
    return f"pipeline ({engine.pipeline_schedule}), share of the operations: " + " | ".join(shares)
