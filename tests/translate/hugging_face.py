"""Hugging Face's EncoderDecoderModel, which trains to translate like a run of `xlm_mt`.

BERT layers in float32, cross-entropy and torch's AdamW, on the pairs of each step, padded in batches of similar length.
XLM is BERT with vectors of languages in the place of token types, and a decoder's head without its dense layer.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.peers.electra import HuggingFacePeer, PeerParameters, map_layers, map_modules
from xlme_ds.config import ModelConfig, RunConfig
from xlme_ds.data.batch import Batch
from xlme_ds.translate.decoder import decoder_layers
from xlme_ds.translate.sides import Side, sources_of_pairs, targets

PAIRS = 32  # of a padded batch
INPUTS = ("input_ids", "position_ids", "token_type_ids")


class Peer(HuggingFacePeer):
    """Hugging Face's model and loop."""

    def __init__(self, run: RunConfig, state: dict[str, Tensor]):
        self.run, self.model = run, _bert(run.model)
        super().__init__(_by_our_names(self.model), state, run.optimizer)

    def step(self, batches: list[Batch], rate: float) -> float:
        """Train on the pairs of a step; returns the mean loss of the target tokens."""
        self.model.train()
        pairs = sorted((pair for batch in batches for pair in _pairs(batch)), key=lambda pair: len(pair[0]))
        tokens, loss = sum(len(pair[-1]) for pair in pairs), 0.0
        for first in range(0, len(pairs), PAIRS):
            columns = zip(*pairs[first : first + PAIRS], strict=True)
            *sides, labels = (nn.utils.rnn.pad_sequence(list(column), True, -1) for column in columns)
            names = [*INPUTS, *(f"decoder_{name}" for name in INPUTS)]
            inputs = {name: values.clamp(min=0) for name, values in zip(names, sides, strict=True)}
            masks = {"attention_mask": (sides[0] >= 0).long(), "decoder_attention_mask": (sides[3] >= 0).long()}
            logits = self.model(**inputs, **masks, use_cache=False).logits
            part = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum") / tokens
            part.backward()
            loss += part.item()
        self.update(rate)
        return loss


def _bert(cfg: ModelConfig) -> Any:
    from transformers import BertConfig, BertLMHeadModel, BertModel, EncoderDecoderModel

    if cfg.decoder != "xlm" or cfg.norm != "post" or cfg.relative_bias != "none" or cfg.masked_head == "dense":
        raise SystemExit("error: BERT has post-LN layers without a relative bias: name a run of the recipe xlm_mt")
    settings = dict(
        vocab_size=cfg.vocabulary, hidden_size=cfg.width, num_attention_heads=cfg.heads,
        intermediate_size=cfg.feed_forward, max_position_embeddings=cfg.max_positions,
        type_vocab_size=len(cfg.language_embeddings), layer_norm_eps=cfg.norm_epsilon, hidden_dropout_prob=cfg.dropout,
        attention_probs_dropout_prob=cfg.attention_dropout,
    )  # fmt: skip
    encoder = BertModel(BertConfig(**settings, num_hidden_layers=cfg.discriminator_layers), add_pooling_layer=False)
    layers = dict(num_hidden_layers=decoder_layers(cfg), is_decoder=True, add_cross_attention=True)
    decoder = BertLMHeadModel(BertConfig(**settings, **layers))
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder)
    predictions = decoder.cls.predictions
    predictions.transform = nn.Identity()
    embedding = encoder.embeddings.word_embeddings.weight
    decoder.bert.embeddings.word_embeddings.weight = predictions.decoder.weight = embedding
    predictions.decoder.bias = predictions.bias
    return model


def _by_our_names(model: Any) -> PeerParameters:
    """The peer's parameters by our names."""
    parts: PeerParameters = {"embedding_0": [model.encoder.embeddings.word_embeddings.weight]}
    parts["masked_head.bias"] = [model.decoder.cls.predictions.bias]
    for side, bert in (("encoder", model.encoder), ("decoder", model.decoder.bert)):
        parts[f"{side}.languages"] = [bert.embeddings.token_type_embeddings.weight]
        map_layers(parts, side, bert)
    for index, layer in enumerate(model.decoder.bert.encoder.layer):
        prefix, cross = f"decoder.layers.{index}", layer.crossattention
        map_modules(parts, f"{prefix}.cross_attention.query", cross.self.query)
        map_modules(parts, f"{prefix}.cross_attention.key_value", cross.self.key, cross.self.value)
        map_modules(parts, f"{prefix}.cross_attention.output", cross.output.dense)
        map_modules(parts, f"{prefix}.cross_norm", cross.output.LayerNorm)
    return parts


def _pairs(batch: Batch) -> Iterator[tuple[Tensor, ...]]:
    """Tokens, positions and languages of each source and of its decoder inputs, and the tokens to predict."""
    source, target = sources_of_pairs(batch), targets(batch)
    for row in range(len(batch.task_B)):
        for item in range(1, int(source.segments[row].max()) + 1):
            inputs = _item(target, row, item)
            yield *_item(source, row, item), *inputs, torch.cat([inputs[0][1:], inputs[0].new_full((1,), 2)])


def _item(side: Side, row: int, item: int) -> list[Tensor]:
    inside = side.segments[row] == item
    return [values[row][inside] for values in (side.tokens, side.positions, side.languages)]
