"""Loads our weights into models of Hugging Face's transformers, and trains these models with torch's AdamW."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from xlme_ds.config import ModelConfig, OptimizerConfig
from xlme_ds.models.init import has_weight_decay

PeerParameters = dict[str, Sequence[nn.Parameter]]
"""The name of our parameter -> the peer's parameters that, concatenated in this order, equal our parameter."""


def electra_networks(cfg: ModelConfig, **settings: Any) -> tuple[Any, Any]:
    """transformers' generator and discriminator without dropout; both, and the generator's head, have one token
    embedding. `settings` are transformers'."""
    from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

    networks = []
    layers_of = {ElectraForMaskedLM: cfg.generator_layers, ElectraForPreTraining: cfg.discriminator_layers}
    for network, layers in layers_of.items():
        config = ElectraConfig(
            vocab_size=cfg.vocabulary, embedding_size=cfg.width, hidden_size=cfg.width, num_hidden_layers=layers,
            num_attention_heads=cfg.heads, intermediate_size=cfg.feed_forward,
            max_position_embeddings=cfg.max_positions, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            **settings,
        )  # fmt: skip
        networks.append(network(config))
    generator, discriminator = networks
    table = generator.electra.embeddings.word_embeddings.weight
    generator.generator_lm_head.weight = table
    discriminator.electra.embeddings.word_embeddings.weight = table
    return generator, discriminator


class HuggingFacePeer:
    """A model of Hugging Face that starts from our weights and trains with torch's AdamW, to compare with ours."""

    def __init__(self, parameters: PeerParameters, weights: Mapping[str, Tensor], optimizer: OptimizerConfig):
        self.parameters, self.clip = parameters, optimizer.clip
        groups: dict[float, list[nn.Parameter]] = {optimizer.weight_decay: [], 0.0: []}  # weight decay -> parameters
        for name, parts in parameters.items():
            groups[optimizer.weight_decay if has_weight_decay(parts[0].dim()) else 0.0] += parts
            with torch.no_grad():
                for part, weight in zip(parts, weights[name].chunk(len(parts)), strict=True):
                    part.copy_(weight)
        self.optimizer = torch.optim.AdamW(
            [{"params": group, "weight_decay": weight_decay} for weight_decay, group in groups.items()],
            betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.epsilon, fused=True)  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        """The peer's weights under our names."""
        return {name: torch.cat([part.detach() for part in parts]) for name, parts in self.parameters.items()}

    def update(self, rate: float) -> None:
        """Clip the gradients, take a step at this learning rate, and zero the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        nn.utils.clip_grad_norm_(list(chain(*self.parameters.values())), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def map_modules(parts: PeerParameters, name: str, *modules: nn.Module) -> None:
    """Record that our `name.weight` and `name.bias` are the concatenated weights and biases of `modules`."""
    for kind in ("weight", "bias"):
        parts[f"{name}.{kind}"] = [getattr(module, kind) for module in modules]


def map_layers(parts: PeerParameters, encoder: str, bert: Any) -> None:
    """Record the parameters of `bert`, an encoder of BERT or ELECTRA, under the names of our `encoder`: positions,
    input norm, and layers without cross-attention."""
    parts[f"{encoder}.positions"] = [bert.embeddings.position_embeddings.weight]
    map_modules(parts, f"{encoder}.input_norm", bert.embeddings.LayerNorm)
    for index, layer in enumerate(bert.encoder.layer):
        prefix = f"{encoder}.layers.{index}"
        attention = layer.attention
        map_modules(parts, f"{prefix}.attention.qkv", attention.self.query, attention.self.key, attention.self.value)
        map_modules(parts, f"{prefix}.attention.output", attention.output.dense)
        map_modules(parts, f"{prefix}.attention_norm", attention.output.LayerNorm)
        map_modules(parts, f"{prefix}.up", layer.intermediate.dense)
        map_modules(parts, f"{prefix}.down", layer.output.dense)
        map_modules(parts, f"{prefix}.feed_forward_norm", layer.output.LayerNorm)
