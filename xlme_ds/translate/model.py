"""Machine translation: an encoder over the source of every sentence and a decoder that predicts the target (XLM:
Conneau and Lample, 2019). Only the target language's embedding tells the decoder which language to write.

`CachedDecoder` decodes token by token; `translate_greedily` uses it to write the translations for back-translation.

B rows; per row T tokens, S source tokens and R target tokens; M target tokens in all rows, D width, V vocabulary; N
hypotheses or sentences in decoding, where each of them is a row of the model's input, so that B is N.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..data.batch import Batch
from ..data.rows import BOS, EOS, LAYOUTS, PAD, TASKS, UNK
from ..models.attention import TorchBias, attention_bias, causal_mask
from ..models.dropout import OUTSIDE, derive_seeds
from ..models.encoder import lookup, with_dense_gradient
from ..models.heads import MaskedLanguageModelHead, TiedTable
from ..models.text_encoder import TextEncoder
from .decoder import Decoder, KeysAndValues, SharedInputs
from .sides import (
    Side,
    cross_attention_mask,
    noised_sources,
    rows_of,
    sources_of_pairs,
    target_mask,
    targets,
    translated_sources,
)

TERMS = ("ae", "bt", "mt")  # denoising, back-translation, pairs
LENGTH_FACTOR = 3  # upper bound of (tokens in the translations of a row's sentences) / (tokens in the row)
_TERMS_OF_TASK = {"mono": ("ae", "bt"), "para": ("mt",)}  # task of a row -> the terms that it can have
TENSOR_OF_TERM = {"ae": "noised_BT", "bt": "target_languages_BT"}  # term -> the tensor in `Batch.added` that it needs


class TranslationOutput(NamedTuple):
    """Output of one forward pass, from which the objective computes the losses."""

    nll_M: Tensor  # float32, −log p of the target token
    predicted_M: Tensor  # int64, the most likely token
    places_M: Tensor  # int64, each target token's index into the flattened [B, T] tokens, ascending within a term
    terms_M: Tensor  # int64, the loss term of each target token, as an index into TERMS


class TranslationModel(TextEncoder):
    """`TextEncoder` with a decoder and a head that predicts the target's tokens; all three share one embedding."""

    # Whether a flag is true on any process. This default is for one process. Under ZeRO-3 each pass needs all
    # processes, so the engine replaces this function, and all processes decode until the last one is done.
    any_rank: Callable[[bool], bool] = staticmethod(bool)

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.decoder = Decoder(cfg)
        self.masked_head = MaskedLanguageModelHead(cfg)

    def forward(self, batch: Batch) -> TranslationOutput:  # type: ignore[override]
        """Predict every target token from its source and the target tokens before it. The target of a pair is predicted
        once. A monolingual sentence is predicted once from each source that it has in the batch: from its noised copy,
        from a translation that the model writes, or from both."""
        blocks = with_dense_gradient(self.embedding_blocks)
        empty = torch.empty(0, dtype=torch.int64, device=batch.tokens_BT.device)
        outputs = [TranslationOutput(empty.float(), empty, empty, empty)]
        for task, terms in _TERMS_OF_TASK.items():
            rows = rows_of(batch, task)
            if len(rows.task_B):
                places_M = (target_mask(batch) & (batch.task_B == TASKS.index(task))[:, None]).flatten().nonzero()
                of_task = rows, targets(rows), batch.tokens_BT.flatten(), places_M.squeeze(1), blocks
                outputs += [
                    self._predicted(term, *of_task)
                    for term in terms
                    if term == "mt" or TENSOR_OF_TERM[term] in batch.added
                ]
        return TranslationOutput(*(torch.cat(parts) for parts in zip(*outputs, strict=True)))

    def _predicted(
        self, term: str, rows: Batch, target: Side, tokens: Tensor, places_M: Tensor, blocks: list[Tensor]
    ) -> TranslationOutput:
        """The output for one loss term of `rows`; the term determines the sources. `target`: the decoder's inputs;
        `tokens[places_M]`: the tokens to predict; `blocks`: the embedding."""
        source = {"ae": noised_sources, "bt": self.back_translated_sources, "mt": sources_of_pairs}[term](rows)
        seeds_B, row_tokens = rows.seeds_B, rows.tokens_BT.shape[1]
        if term == "bt":
            seeds_B = derive_seeds(seeds_B, OUTSIDE - 1)  # other dropout than in denoising the same sentences
            row_tokens *= LENGTH_FACTOR
        source_BSD = self.encode(source, seeds_B, row_tokens)
        target_BRD = self.decode(target, source_BSD, source.segments, seeds_B, row_tokens)
        hidden_MD = target_BRD.flatten(0, 1)[target.segments.flatten().nonzero().squeeze(1)]
        predicted = self.masked_head(hidden_MD, TiedTable(blocks), tokens[places_M], None)
        terms_M = torch.full_like(places_M, TERMS.index(term))
        return TranslationOutput(predicted.nll_M, predicted.predicted_M, places_M, terms_M)

    def back_translated_sources(self, rows: Batch) -> Side:
        """Sources for back-translation: a greedy translation of each monolingual sentence, written in evaluation mode
        and without gradient."""
        training = self.training
        self.eval()
        sources = translated_sources(rows, partial(translate_greedily, self), LAYOUTS[self.cfg.layout].opening)
        self.train(training)
        return sources

    def encode(self, source: Side, seeds_B: Tensor | None = None, row_tokens: int | None = None) -> Tensor:
        """The encoder's last hidden states, [B, S, D]; `seeds_B` and `row_tokens` determine dropout."""
        embedded_BSD = lookup(source.tokens, self.embedding_blocks, sparse=True)
        x_BSD = self.encoder.first_layer_input(embedded_BSD, source.positions, source.languages, seeds_B)
        position_bias_HW = self.encoder.bias_by_distance(source.tokens.shape[1])
        return self.encoder.run_layers(x_BSD, source.segments, position_bias_HW, seeds_B=seeds_B, row_tokens=row_tokens)

    def decode(
        self,
        target: Side,
        source_BSD: Tensor,
        sources_BS: Tensor,
        seeds_B: Tensor | None = None,
        row_tokens: int | None = None,
    ) -> Tensor:
        """The decoder's last hidden states of whole targets, [B, R, D]. `sources_BS`: each source token's item number,
        0 for padding."""
        decoder, seeds_B = self.decoder, None if seeds_B is None else derive_seeds(seeds_B, OUTSIDE)
        embedded_BRD = lookup(target.tokens, self.embedding_blocks, sparse=True)
        x_BRD = decoder.first_layer_input(embedded_BRD, target.positions, target.languages, seeds_B)
        position_bias_HW = decoder.bias_by_distance(target.tokens.shape[1])
        self_bias = attention_bias(self.cfg, target.segments, position_bias_HW, x_BRD.dtype, causal_mask, row_tokens)
        cross_bias = TorchBias(cross_attention_mask(target.segments, sources_BS), None, row_tokens=row_tokens)
        return decoder.run_layers_with(x_BRD, SharedInputs(self_bias, source_BSD, cross_bias), seeds_B)


def max_translation_tokens(source_tokens: int) -> int:
    """The largest number of tokens of a translation of `source_tokens` ordinary tokens (XLM's rule)."""
    return int(1.3 * source_tokens + 5)


class CachedDecoder:
    """Hypotheses of several sentences, which the decoder reads token by token."""

    def __init__(self, model: TranslationModel, source: Side, languages_N: Tensor):
        self.model, self.languages_N = model, languages_N
        self.source_NSD = model.encode(source)
        self.allowed_N11S = (source.segments > 0)[:, None, None]  # whether a source token may be read
        self.past: dict[nn.Module, KeysAndValues] = {}
        self.position = 0  # position of the next token that the decoder reads

    def log_probabilities(self, tokens_N: Tensor) -> Tensor:
        """Read `tokens_N`; returns the log-probabilities of the next tokens, float32 or wider [N, V]. All tokens except
        ordinary ones and `</s>` have −∞."""
        decoder, blocks = self.model.decoder, self.model.embedding_blocks
        position_N1 = torch.full_like(tokens_N, self.position)[:, None]
        x_N1D = decoder.first_layer_input(lookup(tokens_N[:, None], blocks), position_N1, self.languages_N[:, None])
        self.position += 1
        position_bias_HW = decoder.bias_by_distance(self.position)
        # The biases by distance from the new token to each token of the target: from the first token to the new one.
        position_bias_H1R = (
            None if position_bias_HW is None else position_bias_HW[:, None, : self.position].to(x_N1D.dtype)
        )
        self_bias = TorchBias(self.allowed_N11S.new_ones(1, 1, 1, self.position), position_bias_H1R)
        shared = SharedInputs(self_bias, self.source_NSD, TorchBias(self.allowed_N11S, None), self.past)
        logits_NV = self.model.masked_head.logits(decoder.run_layers_with(x_N1D, shared)[:, 0], blocks)
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        logits_NV[:, [BOS, PAD, UNK, -1]] = float("-inf")  # -1: <mask>
        return logits_NV.log_softmax(-1)

    def reorder(self, rows: list[int]) -> None:
        """Replace the hypotheses by those of `rows`, in this order; a row may occur several times."""
        rows_N = torch.tensor(rows, device=self.source_NSD.device)
        self.source_NSD, self.allowed_N11S = self.source_NSD[rows_N], self.allowed_N11S[rows_N]
        self.languages_N = self.languages_N[rows_N]
        self.past = {module: (keys[rows_N], values[rows_N]) for module, (keys, values) in self.past.items()}


@torch.no_grad()
def translate_greedily(model: TranslationModel, source: Side, languages_N: Tensor) -> list[list[int]]:
    """Translate each row of `source`, which is one sentence, greedily into its language in `languages_N`; returns the
    ordinary tokens of each translation. A translation has at most `max_translation_tokens` tokens, and at most as many
    as the model can read."""
    decoder, tokens_N = CachedDecoder(model, source, languages_N), torch.full_like(languages_N, EOS)
    lengths = (source.segments > 0).sum(1).tolist()  # including the two special tokens
    limits = [min(max_translation_tokens(length - 2), model.cfg.max_positions - 2) for length in lengths]
    translations: list[list[int]] = [[] for _ in limits]
    live = list(range(len(limits)))  # index of the sentence in each of the decoder's rows; finished ones are removed
    while model.any_rank(bool(live)):
        tokens_N = decoder.log_probabilities(tokens_N).argmax(-1)
        unfinished_rows = []
        for row, (sentence, token) in enumerate(zip(live, tokens_N.tolist(), strict=False)):
            if token != EOS:
                translations[sentence].append(token)
                if len(translations[sentence]) < limits[sentence]:
                    unfinished_rows.append(row)
        live = [live[row] for row in unfinished_rows]
        if len(unfinished_rows) < len(tokens_N):
            rows = unfinished_rows or [0]  # a rank that is done keeps decoding one row until the other ranks are done
            decoder.reorder(rows)
            tokens_N = tokens_N[rows]
    return translations
