"""Trains Hugging Face's EncoderDecoderModel to translate like a run of ours, to compare losses and speed.

`python -m bench.peers.translation --run RUN --data MIXED` reads the settings and first weights of a run of `xlm_mt`,
and trains twice from them, in turns: with our engine, and with BERT layers in float32, cross-entropy and torch's AdamW,
on the same pairs in every step, padded in batches of similar length. It prints the losses and the ratio of the seconds
a step. XLM is BERT with vectors of languages in the place of token types, and a decoder's head without its dense layer.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measure import Figures, show
from bench.peers.hugging_face import HuggingFacePeer, Parts, add_layers
from xlme_ds.config import ModelConfig, RunConfig
from xlme_ds.data.batch import Batch
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.engine.build import build_engine, open_data
from xlme_ds.engine.engine import Engine
from xlme_ds.first_weights import starting_weights
from xlme_ds.models.decoder import decoder_layers
from xlme_ds.models.sides import Side, sources_of_pairs, targets
from xlme_ds.train.schedule import learning_rate
from xlme_ds.trained import read_run_config

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


def _by_our_names(model: Any) -> Parts:
    """The peer's parameters by our names."""
    parts: Parts = {"embedding_0": [model.encoder.embeddings.word_embeddings.weight]}
    parts["masked_head.bias"] = [model.decoder.cls.predictions.bias]
    for side, bert in (("encoder", model.encoder), ("decoder", model.decoder.bert)):
        parts[f"{side}.languages"] = [bert.embeddings.token_type_embeddings.weight]
        add_layers(parts, side, bert)
    return parts


def _pairs(batch: Batch) -> Iterator[tuple[Tensor, ...]]:
    """Tokens, positions and languages of each source and of its decoder inputs, and the tokens to predict."""
    source, target = sources_of_pairs(batch), targets(batch)
    for row in range(len(batch.task_B)):
        for item in range(1, int(source.items[row].max()) + 1):
            inputs = _item(target, row, item)
            yield *_item(source, row, item), *inputs, torch.cat([inputs[0][1:], inputs[0].new_full((1,), 2)])


def _item(side: Side, row: int, item: int) -> list[Tensor]:
    inside = side.items[row] == item
    return [values[row][inside] for values in (side.tokens, side.positions, side.languages)]


def race(engine: Engine, peer: Peer, run: RunConfig, steps: int, rounds: int) -> Figures:
    """Train both, in turns of steps // rounds steps: the losses at the ends of rounds, and seconds a step."""
    losses, seconds = [], []
    sides = (
        lambda step, rate: engine.train_batch(step, rate, detailed=True).metrics["mt"],
        lambda step, rate: peer.step(list(engine.loader.step(step)), rate),
    )
    for first in range(0, steps, steps // rounds):
        turn = range(first, min(first + steps // rounds, steps))
        last_losses, times = [], []
        for side in sides:
            begin = time.perf_counter()
            for step in turn:
                loss = side(step, learning_rate(step, run.train.steps, run.optimizer, run.schedule))
            times.append((time.perf_counter() - begin) / len(turn))
            last_losses.append(loss)
        losses.append(last_losses)
        seconds.append(times)
    ours, theirs = (statistics.median(times) for times in zip(*seconds, strict=True))
    ratio = statistics.median(their / our for our, their in seconds)
    return {"losses": losses, "xlme_seconds": ours, "hf_seconds": theirs, "ratio": ratio}


def main(arguments: list[str] | None = None) -> None:
    """Print a JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.translation", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of a run of xlm_mt")
    parser.add_argument("--data", type=Path, required=True, help="its data")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(arguments)
    run = read_run_config(options.run)
    loader, vocabulary = open_data(run, options.data), Vocabulary(options.data / "vocab")
    engine = build_engine(run, loader, None, starting_weights(run, vocabulary))
    show(race(engine, Peer(run, engine.full_state()), run, options.steps, options.rounds), True)


if __name__ == "__main__":
    main()
