"""A model of Hugging Face's transformers, from our weights, with torch's AdamW: what the two peers have in common."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from xlme_ds.config import OptimizerConfig
from xlme_ds.models.init import has_weight_decay

Parts = dict[str, Sequence[nn.Parameter]]


class HuggingFacePeer:
    """`parameters` are those of another model that each of ours is, by our names and in its order."""

    def __init__(self, parameters: Parts, weights: Mapping[str, Tensor], rule: OptimizerConfig):
        self.parameters, self.clip = parameters, rule.clip
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parts in parameters.items():
            groups[has_weight_decay(name, parts[0].dim())] += parts
            with torch.no_grad():
                for part, of_part in zip(parts, weights[name].chunk(len(parts)), strict=True):
                    part.copy_(of_part)
        self.optimizer = torch.optim.AdamW(
            [{"params": each, "weight_decay": rule.weight_decay * decays} for decays, each in groups.items()],
            betas=(rule.beta1, rule.beta2), eps=rule.epsilon, fused=True)  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        """The weights under our names."""
        return {name: torch.cat([part.detach() for part in parts]) for name, parts in self.parameters.items()}

    def update(self, rate: float) -> None:
        """Clip the gradients, make a step at this rate, forget them."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        nn.utils.clip_grad_norm_(list(chain(*self.parameters.values())), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def add(found: Parts, name: str, *modules: nn.Module) -> None:
    """Our weight and bias of this name are those of the modules, one after the other."""
    for kind in ("weight", "bias"):
        found[f"{name}.{kind}"] = [getattr(module, kind) for module in modules]


def add_layers(found: Parts, side: str, bert: Any) -> None:
    """The positions, input norm and layers of BERT or ELECTRA; cross-attention where a layer has it."""
    found[f"{side}.positions"] = [bert.embeddings.position_embeddings.weight]
    add(found, f"{side}.input_norm", bert.embeddings.LayerNorm)
    for number, layer in enumerate(bert.encoder.layer):
        start, own = f"{side}.layers.{number}", layer.attention
        add(found, f"{start}.attention.qkv", own.self.query, own.self.key, own.self.value)
        add(found, f"{start}.attention.output", own.output.dense)
        add(found, f"{start}.attention_norm", own.output.LayerNorm)
        add(found, f"{start}.up", layer.intermediate.dense)
        add(found, f"{start}.down", layer.output.dense)
        add(found, f"{start}.feed_forward_norm", layer.output.LayerNorm)
        cross = getattr(layer, "crossattention", None)
        if cross is not None:
            add(found, f"{start}.cross_attention.query", cross.self.query)
            add(found, f"{start}.cross_attention.key_value", cross.self.key, cross.self.value)
            add(found, f"{start}.cross_attention.output", cross.output.dense)
            add(found, f"{start}.cross_norm", cross.output.LayerNorm)
