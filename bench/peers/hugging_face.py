"""Models of Hugging Face's transformers that train from our weights with torch's AdamW."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from xlme_ds.config import ModelConfig, OptimizerConfig
from xlme_ds.models.init import has_weight_decay

Parts = dict[str, Sequence[nn.Parameter]]


def electra_config(cfg: ModelConfig, layers: int, **settings: Any) -> Any:
    """transformers' configuration of one of our networks, without dropout."""
    from transformers import ElectraConfig

    return ElectraConfig(
        vocab_size=cfg.vocabulary, embedding_size=cfg.width, hidden_size=cfg.width, num_hidden_layers=layers,
        num_attention_heads=cfg.heads, intermediate_size=cfg.feed_forward, max_position_embeddings=cfg.max_positions,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings,
    )  # fmt: skip


class HuggingFacePeer:
    """Weights, optimizer and update of a peer.

    `parameters` maps the name of each of our parameters to the peer's parameters that it is made of, in its order.
    """

    def __init__(self, parameters: Parts, weights: Mapping[str, Tensor], rule: OptimizerConfig):
        self.parameters, self.clip = parameters, rule.clip
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parts in parameters.items():
            groups[has_weight_decay(parts[0].dim())] += parts
            with torch.no_grad():
                for part, weight in zip(parts, weights[name].chunk(len(parts)), strict=True):
                    part.copy_(weight)
        self.optimizer = torch.optim.AdamW(
            [{"params": group, "weight_decay": rule.weight_decay * decays} for decays, group in groups.items()],
            betas=(rule.beta1, rule.beta2), eps=rule.epsilon, fused=True)  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        """The weights under our names."""
        return {name: torch.cat([part.detach() for part in parts]) for name, parts in self.parameters.items()}

    def update(self, rate: float) -> None:
        """Clip the gradients, take a step at this learning rate, and zero the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        nn.utils.clip_grad_norm_(list(chain(*self.parameters.values())), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def add(parts: Parts, name: str, *modules: nn.Module) -> None:
    """Map our weight and bias of this name to those of the modules, one after the other."""
    for kind in ("weight", "bias"):
        parts[f"{name}.{kind}"] = [getattr(module, kind) for module in modules]


def add_layers(parts: Parts, side: str, bert: Any) -> None:
    """Map the positions, input norm and layers of BERT or ELECTRA; cross-attention if a layer has it."""
    parts[f"{side}.positions"] = [bert.embeddings.position_embeddings.weight]
    add(parts, f"{side}.input_norm", bert.embeddings.LayerNorm)
    for number, layer in enumerate(bert.encoder.layer):
        start, own = f"{side}.layers.{number}", layer.attention
        add(parts, f"{start}.attention.qkv", own.self.query, own.self.key, own.self.value)
        add(parts, f"{start}.attention.output", own.output.dense)
        add(parts, f"{start}.attention_norm", own.output.LayerNorm)
        add(parts, f"{start}.up", layer.intermediate.dense)
        add(parts, f"{start}.down", layer.output.dense)
        add(parts, f"{start}.feed_forward_norm", layer.output.LayerNorm)
        cross = getattr(layer, "crossattention", None)
        if cross is not None:
            add(parts, f"{start}.cross_attention.query", cross.self.query)
            add(parts, f"{start}.cross_attention.key_value", cross.self.key, cross.self.value)
            add(parts, f"{start}.cross_attention.output", cross.output.dense)
            add(parts, f"{start}.cross_norm", cross.output.LayerNorm)
