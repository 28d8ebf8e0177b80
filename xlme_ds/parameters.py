"""Parameters by component, counted on the meta device: no memory is taken, whatever the size."""

import torch

from .config import ModelConfig
from .models.electra import Electra
from .models.encoder import Part


def parameter_sizes(cfg: ModelConfig, part: Part | None = None) -> dict[str, int]:
    """Size of every parameter by its name, of the whole model or of one `part`."""
    with torch.device("meta"):
        model = Electra(cfg, part)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def count_parameters(cfg: ModelConfig) -> dict[str, int]:
    """`discriminator`: its encoder and head with the token embedding, which is what the paper publishes; `generator`:
    its own encoder and head, the tied embedding left out; `embedding`; `trained_total`: every parameter once."""
    sizes = parameter_sizes(cfg)

    def total(*prefixes: str) -> int:
        return sum(size for name, size in sizes.items() if name.startswith(prefixes))

    # With GDES the discriminator's table is the sum of two, of which one is trained by the generator.
    embedding = total("embedding_")
    return {
        "embedding": embedding,
        "discriminator": embedding + total("discriminator.", "replaced_head."),
        "generator": total("generator.", "masked_head."),
        "trained_total": sum(sizes.values()),
    }
