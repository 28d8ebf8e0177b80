"""The same training to translate by xlme_ds and by Hugging Face's EncoderDecoderModel, side by side.

`python -m bench.translation_peer --run RUN --data MIXED --text TEXT` takes the settings of a run of `xlm_mt` and its
first weights, and trains twice from them: with our engine, and with BERT layers in float32, cross-entropy and torch's
AdamW, on the same pairs in every step, padded in batches of similar length. It prints the losses, BLEU and chrF of
TEXT/test.<lang> in both directions, and the ratio of the seconds a step takes; the two train in turns.

XLM is BERT with vectors of languages in the place of token types, and the head of a decoder without its dense layer.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.peer import HuggingFacePeer, Parts, add_layers
from xlme_ds.config import ModelConfig, RunConfig
from xlme_ds.data.batch import Batch
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.engine.build import build_engine, open_data
from xlme_ds.engine.engine import Engine
from xlme_ds.first_weights import starting_weights
from xlme_ds.objectives import objective_of
from xlme_ds.train.schedule import learning_rate
from xlme_ds.trained import read_run_config
from xlme_ds.translate.decoder import decoder_layers
from xlme_ds.translate.model import TranslationModel
from xlme_ds.translate.sides import Side, sources_of_pairs, targets
from xlme_ds.translate.text import Translator, read_lines, scores, translate_lines

PAIRS = 32  # of a padded batch


class Peer(HuggingFacePeer):
    """Hugging Face's model and loop."""

    def __init__(self, run: RunConfig, state: dict[str, Tensor]):
        self.run, self.model = run, _bert(run.model)
        super().__init__(_by_our_names(self.model), state, run.optimizer)

    def step(self, batches: list[Batch], rate: float) -> float:
        """Train on the pairs of a step; its loss, the mean over target tokens."""
        self.model.train()
        pairs = sorted((pair for batch in batches for pair in _pairs(batch)), key=lambda pair: len(pair[0]))
        tokens, loss = sum(len(pair[-1]) for pair in pairs), 0.0
        for first in range(0, len(pairs), PAIRS):
            names = ("input_ids", "position_ids", "token_type_ids")
            *sides, labels = (nn.utils.rnn.pad_sequence(list(of), True, -1) for of in
                              zip(*pairs[first : first + PAIRS], strict=True))  # fmt: skip
            asked = {
                f"{side}{name}": values.clamp(min=0)
                for side, three in (("", sides[:3]), ("decoder_", sides[3:]))
                for name, values in zip(names, three, strict=True)
            }
            masks = {"attention_mask": (sides[0] >= 0).long(), "decoder_attention_mask": (sides[3] >= 0).long()}
            logits = self.model(**asked, **masks, use_cache=False).logits
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
        vocab_size=cfg.vocabulary,
        hidden_size=cfg.width,
        num_attention_heads=cfg.heads,
        intermediate_size=cfg.feed_forward,
        max_position_embeddings=cfg.max_positions,
        type_vocab_size=len(cfg.language_embeddings),
        layer_norm_eps=cfg.norm_epsilon,
        hidden_dropout_prob=cfg.dropout,
        attention_probs_dropout_prob=cfg.attention_dropout,
    )
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
    """The parameters that each of ours is, in its order."""
    found: Parts = {"embedding_0": [model.encoder.embeddings.word_embeddings.weight]}
    found["masked_head.bias"] = [model.decoder.cls.predictions.bias]
    for side, bert in (("encoder", model.encoder), ("decoder", model.decoder.bert)):
        found[f"{side}.languages"] = [bert.embeddings.token_type_embeddings.weight]
        add_layers(found, side, bert)
    return found


def _pairs(batch: Batch) -> Iterator[tuple[Tensor, ...]]:
    """Of each pair the tokens, positions and languages of the source, the same of what the decoder reads, and the
    tokens that it predicts."""
    source, target = sources_of_pairs(batch), targets(batch)
    for row in range(len(batch.task_B)):
        for item in range(1, int(source.items[row].max()) + 1):
            read = _item(target, row, item)
            yield *_item(source, row, item), *read, torch.cat([read[0][1:], read[0].new_full((1,), 2)])


def _item(side: Side, row: int, item: int) -> list[Tensor]:
    there = side.items[row] == item
    return [values[row][there] for values in (side.tokens, side.positions, side.languages)]


def race(engine: Engine, peer: Peer, run: RunConfig, steps: int, rounds: int) -> dict[str, Any]:
    """Train both, in turns of steps // rounds steps: the losses at the ends of rounds, and seconds a step."""
    losses: list[tuple[float, float]] = []
    seconds: tuple[list[float], list[float]] = ([], [])
    for first in range(0, steps, steps // rounds):
        last = min(first + steps // rounds, steps)
        found = [0.0, 0.0]
        for which in (0, 1):
            begun = time.perf_counter()
            for step in range(first, last):
                rate = learning_rate(step, run.train.steps, run.optimizer, run.schedule)
                if which == 0:
                    found[0] = engine.train_batch(step, rate, detailed=True).metrics["mt"]
                else:
                    found[1] = peer.step(list(engine.loader.step(step)), rate)
            seconds[which].append((time.perf_counter() - begun) / (last - first))
        losses.append((found[0], found[1]))
    ours, theirs = (statistics.median(each) for each in seconds)
    ratio = statistics.median(their / our for our, their in zip(*seconds, strict=True))
    return {"losses": losses, "xlme_seconds": ours, "hf_seconds": theirs, "ratio": ratio}


def translated(run: RunConfig, state: dict[str, Tensor], vocabulary: Vocabulary, text: Path) -> dict[str, list[str]]:
    """BLEU and chrF of greedy translations in both directions."""
    model = objective_of(run.objective).build(run.model)
    model.load_state_dict(state)
    assert isinstance(model, TranslationModel)
    translator, codes = Translator(text, model.eval(), vocabulary), run.model.language_embeddings
    lines = [read_lines(text / f"test.{code}") for code in codes]
    found = {}
    for source, target in ((0, 1), (1, 0)):
        out = translate_lines(translator, lines[source], (source, target), 1, 1.0).lines
        found[f"{codes[source]}-{codes[target]}"] = [
            line.split("=")[1].split()[0] for line in scores(out, lines[target], codes[target])
        ]
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print a JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.translation_peer", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of a run of xlm_mt, whose settings are taken")
    parser.add_argument("--data", type=Path, required=True, help="its data")
    parser.add_argument("--text", type=Path, help="folder with test.<lang> of its two languages")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(arguments)
    run = read_run_config(options.run)
    loader, vocabulary = open_data(run, options.data), Vocabulary(options.data / "vocab")
    engine = build_engine(run, loader, None, starting_weights(run, vocabulary))
    peer = Peer(run, engine.full_state())
    found = race(engine, peer, run, options.steps, options.rounds)
    if options.text:
        found |= {"xlme": translated(run, engine.full_state(), vocabulary, options.text),
                  "hf": translated(run, peer.state(), vocabulary, options.text)}  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
