"""One encoder with its token embedding. `TextEncoder` is for evaluation, fine-tuning and export. `LanguageModel` also
has a masked-token head; it is the pre-training model of XLM, XLM-R and ERNIE-M.

B rows, T tokens, M masked positions of the batch, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import EncoderName, ModelConfig
from ..data.batch import Batch
from ..data.rows import EOS, LAYOUTS, PAD, UNK
from .attention import item_mask
from .encoder import EmbeddingModel, Encoder, lookup, with_dense_gradient
from .heads import MaskedLanguageModelHead, TiedTable


class TextEncoder(EmbeddingModel):
    """Maps tokens to hidden states. It has `cfg.discriminator_layers` layers and ignores the generator's settings."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.encoder = Encoder(cfg, cfg.discriminator_layers)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Token embeddings, [B, T, D]."""
        return lookup(tokens_BT, self.embedding_blocks)

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        segments_BT: Tensor,
        languages_BT: Tensor | None = None,
        seeds_B: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states, [B, T, D]. The arguments are tensors of `Batch`. A token sees the tokens of its row
        with the same segment.

        Models with language embeddings need `languages_BT` (indices into `cfg.language_embeddings`). Dropout needs
        `seeds_B`.
        """
        return self.encoder(self.embed(tokens_BT), positions_BT, segments_BT, languages_BT, seeds_B)

    def hidden_states(
        self, tokens_BT: Tensor, positions_BT: Tensor, segments_BT: Tensor, languages_BT: Tensor | None = None
    ) -> list[Tensor]:
        """The input of the first layer (index 0) and the output of every layer, each [B, T, D]."""
        return self.encoder.hidden_states(self.embed(tokens_BT), positions_BT, segments_BT, languages_BT)


class LanguageModelOutput(NamedTuple):
    """The result of a forward pass, from which the objective computes the losses."""

    nll_M: Tensor  # float32, −log p of the original token
    predicted_M: Tensor  # int64, the most likely token


@dataclass(frozen=True)
class Masking:
    """The masking of a batch: each masked position shows `<mask>`, a random token, or the original token.

    Subclasses have another attention mask, or predict from other positions.
    """

    random_fraction: float  # fraction of the masked positions that show a random token
    keep_fraction: float  # fraction of the masked positions that show the original token

    def apply(self, batch: Batch, vocabulary: int) -> Tensor:
        """The tokens that the model reads, [B, T]. Each masked position has a uniform random number u in
        `uniforms_M`. It shows the original token if u < `keep_fraction`, else a random token if u < `keep_fraction` +
        `random_fraction`, else `<mask>`."""
        targets_M = batch.tokens_BT.flatten()[batch.masked_M]
        uniforms_M = batch.uniforms_M.double()
        first, count = UNK + 1, vocabulary - UNK - 2  # the first ordinary id, and the number of ordinary ids
        # u is one of 2^24 values. The values from `keep_fraction` to `keep_fraction` + `random_fraction` are spread
        # over all ordinary ids.
        ids_per_unit = count / self.random_fraction if self.random_fraction else 0.0
        offset_M = (uniforms_M - self.keep_fraction) * ids_per_unit
        random_M = first + offset_M.long().clamp(0, count - 1)
        random_or_mask_M = torch.where(uniforms_M < self.keep_fraction + self.random_fraction, random_M, vocabulary - 1)
        shown_M = torch.where(uniforms_M < self.keep_fraction, targets_M, random_or_mask_M)
        return batch.tokens_BT.flatten().index_copy(0, batch.masked_M, shown_M).view_as(batch.tokens_BT)

    def predicted_from(self, masked_M: Tensor) -> Tensor:
        """The position of the hidden state from which each masked token is predicted, [M]; here the masked position."""
        return masked_M

    def groups(self, batch: Batch) -> Tensor:
        """A number for every position, int64 [B, T], in this class the number of its item. `attention_mask` makes the
        mask from these numbers."""
        return batch.segments_BT

    # A function from the groups to an attention mask, bool [B, 1, T, T]. In this class a query sees the keys of its
    # item.
    attention_mask = staticmethod(item_mask)


class LanguageModel(TextEncoder):
    """`TextEncoder` with a head, tied to the embedding, that predicts masked tokens."""

    exclude_special = False  # if true, only ordinary tokens are predicted, because they become part of a text (BTMLM)

    def __init__(self, cfg: ModelConfig, masking: Masking, z_loss: float = 0.0):
        super().__init__(cfg)
        self.masking = masking
        self.masked_head = MaskedLanguageModelHead(cfg, z_loss)

    def forward(self, batch: Batch) -> LanguageModelOutput:  # type: ignore[override]
        """Mask the batch and predict the masked tokens."""
        blocks = with_dense_gradient(self.embedding_blocks)
        embedded_BTD = lookup(self.masking.apply(batch, self.cfg.vocabulary), self.embedding_blocks, sparse=True)
        hidden_BTD = self.encoder(
            embedded_BTD,
            batch.positions_BT,
            self.masking.groups(batch),
            batch.languages_BT,
            batch.seeds_B,
            self.masking.attention_mask,
        )
        return self.predict(hidden_BTD, batch.masked_M, batch.tokens_BT.flatten()[batch.masked_M], blocks)

    def predict(
        self, hidden_BTD: Tensor, masked_M: Tensor, targets_M: Tensor, blocks: list[Tensor]
    ) -> LanguageModelOutput:
        """Predict the masked tokens from the last hidden states. `blocks` are those of the tied embedding."""
        hidden_MD = hidden_BTD.flatten(0, 1)[self.masking.predicted_from(masked_M)]
        predicted = self.masked_head(hidden_MD, TiedTable(blocks), targets_M, None, self.exclude_special)
        return LanguageModelOutput(predicted.nll_M, predicted.predicted_M)


def positions_and_segments(tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (`positions_BT`, `segments_BT`) of `Batch` for rows that hold one item each, then padding."""
    segments_BT = (tokens_BT != PAD).long()
    positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) * segments_BT
    if LAYOUTS["xlm"].opening == tokens_BT[0, 0]:  # in XLM's layout, positions restart at the second text of a pair
        second_BT = second_sides(tokens_BT) * segments_BT
        positions_BT = torch.where(second_BT > 0, second_BT.cumsum(1) - 1, positions_BT)
    return positions_BT, segments_BT


def second_sides(tokens_BT: Tensor) -> Tensor:
    """int64 [B, T], for rows of one item each: 1 in the item's second text and in all padding, else 0."""
    is_end_BT = (tokens_BT == EOS).long()
    is_end_BT[:, 0] = 0  # in XLM's layout `</s>` also opens the item
    ends_before_BT = is_end_BT.cumsum(1) - is_end_BT
    return ends_before_BT.clamp(max=1)


def language_index(cfg: ModelConfig, code: str) -> int:
    """The index of a language in `cfg.language_embeddings` (`zh` also finds `zh-Hans`). For a model without language
    embeddings it is 0. Raises ValueError for a language that the model does not have."""
    codes = cfg.language_embeddings
    if not codes:
        return 0
    matches = [longer_code for longer_code in codes if longer_code.startswith(f"{code}-")]
    if code not in codes and not matches:
        raise ValueError(
            f"model.language_embeddings has no {code}, only {' '.join(codes)}: leave out the data in that language"
        )
    return codes.index(code if code in codes else matches[0])


def languages_of(cfg: ModelConfig, codes: Sequence[tuple[str, ...]], tokens_BT: Tensor) -> Tensor:
    """`languages_BT` of `Batch` for rows of one item each. `codes` has for each row the language of its text, or the
    two languages of its pair."""
    # A text has one code, which is then both the first and the last.
    indices = [[language_index(cfg, code) for code in (row_codes[0], row_codes[-1])] for row_codes in codes]
    first_B, second_B = torch.tensor(indices, device=tokens_BT.device).unbind(1)
    languages_BT = torch.where(second_sides(tokens_BT) > 0, second_B[:, None], first_B[:, None])
    return languages_BT * (tokens_BT != PAD)


def take_encoder(state: Mapping[str, Tensor], cfg: ModelConfig, encoder_name: EncoderName) -> TextEncoder:
    """One encoder of a pre-training model, in evaluation mode. `state`: all parameters of the model, by name.

    Under gradient-disentangled sharing the discriminator's embedding is the generator's plus the `difference_n`.
    """
    layers = cfg.generator_layers if encoder_name == "generator" else cfg.discriminator_layers
    prefix = f"{encoder_name}."
    taken = {"encoder." + name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    for n in range(cfg.vocabulary_blocks):
        taken[f"embedding_{n}"] = state[f"embedding_{n}"]
        if encoder_name == "discriminator" and cfg.embedding_sharing == "gdes":
            taken[f"embedding_{n}"] = taken[f"embedding_{n}"] + state[f"difference_{n}"]
    return encoder_from_state(taken, replace(cfg, discriminator_layers=layers))


def encoder_from_state(state: Mapping[str, Tensor], cfg: ModelConfig) -> TextEncoder:
    """The encoder with the parameters `state`, in evaluation mode."""
    encoder = TextEncoder(cfg)
    encoder.load_state_dict(state)
    return encoder.eval()
