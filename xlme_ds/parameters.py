"""Parameters by component, counted on the meta device: no memory is taken, whatever the size."""

import torch

from .config import ModelConfig, ObjectiveConfig, RunConfig
from .models.encoder import Part
from .objectives import objective_of


def parameter_sizes(objective: ObjectiveConfig, cfg: ModelConfig, part: Part | None = None) -> dict[str, int]:
    """Size of every parameter by its name, of the whole model that `objective` trains or of one `part`."""
    with torch.device("meta"):
        model = objective_of(objective).build(cfg, part)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def count_parameters(run: RunConfig) -> dict[str, int]:
    """`embedding`; every encoder with its head, the first one (of XLM-E the discriminator, which is what the paper
    publishes) with the token embedding, the other without; `trained_total`: every parameter once."""
    sizes = parameter_sizes(run.objective, run.model)

    def total(*prefixes: str) -> int:
        return sum(size for name, size in sizes.items() if name.startswith(prefixes))

    # With GDES the discriminator's table is the sum of two, of which one is trained by the generator.
    counts = {"embedding": total("embedding_")}
    for number, (which, head) in enumerate(objective_of(run.objective).encoders.items()):
        counts[which] = total(f"{which}.", head) + (0 if number else counts["embedding"])
    return counts | {"trained_total": sum(sizes.values())}
