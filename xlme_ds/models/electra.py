"""Generator and discriminator in one module: they share an engine, a backward pass and a checkpoint.

B rows, T tokens, M masked positions of the batch, D width.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import ModelConfig
from ..data.batch import Batch
from ..data.rows import UNK
from .encoder import EmbeddingModel, Encoder, lookup, with_dense_gradient
from .heads import MaskedLanguageModelHead, ReplacedTokenHead, TiedTable


class ElectraOutput(NamedTuple):
    """Result of a forward pass, from which the objective computes the losses."""

    nll_M: Tensor  # float32, the generator's −log p of the original token
    predicted_M: Tensor  # int64, the generator's most likely token
    corrupted_BT: Tensor  # int64, the tokens with the generator's samples at the masked positions
    replaced_logits_BT: Tensor  # the discriminator's logits; positive means replaced
    # float32, −log p of the original token in the discriminator's own softmax; empty if the discriminator has none.
    token_nll_BT: Tensor = torch.empty(0)


class Electra(EmbeddingModel):
    """XLM-E's pre-training model.

    The embedding's parameters belong to this module, because both encoders and the masked head read them: an engine
    that partitions parameters gathers them while this module's forward runs.
    """

    has_generator = True  # if false, the model replaces tokens without a generator

    def __init__(self, cfg: ModelConfig, z_loss: float = 0.0, temperature: float = 1.0, keep_fraction: float = 0.0):
        super().__init__(cfg, ("embedding", "difference") if cfg.embedding_sharing == "gdes" else ("embedding",))
        self.keep_fraction = keep_fraction
        if self.has_generator:
            without_dropout = replace(cfg, dropout=0.0, attention_dropout=0.0)  # dropout would make the samples worse
            self.generator = Encoder(without_dropout, cfg.generator_layers)
            self.masked_head = MaskedLanguageModelHead(cfg, z_loss, temperature)
        self.discriminator = Encoder(cfg, cfg.discriminator_layers)
        self.replaced_head = ReplacedTokenHead(cfg)

    def embed_for_discriminator(self, ids_BT: Tensor) -> Tensor:
        """The discriminator's token embeddings, [B, T, D]. They are the generator's embeddings or, under
        gradient-disentangled sharing, a copy of these without gradient plus a difference."""
        # With a generator, on a CPU, the gradient is sparse: it is added to the dense gradient that the masked head
        # gives the embedding.
        shared = lookup(ids_BT, self.embedding_blocks, sparse=self.has_generator)
        if self.cfg.embedding_sharing == "tied":
            return shared
        differences = [getattr(self, f"difference_{n}") for n in range(self.cfg.vocabulary_blocks)]
        return shared.detach() + lookup(ids_BT, differences)

    def generate(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Mask, predict, sample (XLM-E equations (1) to (3)). Returns the first three fields of `ElectraOutput`."""
        tied_blocks = with_dense_gradient(self.embedding_blocks)
        tokens_N = batch.tokens_BT.flatten()
        targets_M, uniforms_M = tokens_N[batch.masked_M], batch.uniforms_M
        shown_M = torch.full_like(targets_M, self.cfg.vocabulary - 1)  # `<mask>`
        if self.keep_fraction:  # some masked positions show the original token
            shows_original_M = uniforms_M < self.keep_fraction
            shown_M = torch.where(shows_original_M, targets_M, shown_M)
            uniforms_M = rescale_uniforms(shows_original_M, uniforms_M, self.keep_fraction)
        masked_BT = tokens_N.index_copy(0, batch.masked_M, shown_M).view_as(batch.tokens_BT)
        hidden_BTD = self.generator(
            lookup(masked_BT, self.embedding_blocks, sparse=True),
            batch.positions_BT,
            batch.segments_BT,
            batch.languages_BT,
        )
        hidden_MD = hidden_BTD.flatten(0, 1)[batch.masked_M]
        random_M, uniforms_M = random_replacements(batch.added.get("random_1"), uniforms_M, self.cfg.vocabulary)
        generated = self.masked_head(hidden_MD, TiedTable(tied_blocks), targets_M, uniforms_M)
        sample_M = torch.where(random_M < 0, generated.sample_M, random_M)
        corrupted_BT = tokens_N.index_copy(0, batch.masked_M, sample_M).view_as(batch.tokens_BT)
        return generated.nll_M, generated.predicted_M, corrupted_BT

    def forward(self, batch: Batch) -> ElectraOutput:
        """Generate, then discriminate (XLM-E equations (1) to (5))."""
        blocks = with_dense_gradient(self.embedding_blocks)  # for a softmax in `judge`; before the sparse lookups
        nll_M, predicted_M, corrupted_BT = self.generate(batch)
        hidden_BTD = self.discriminator(
            self.embed_for_discriminator(corrupted_BT),
            batch.positions_BT,
            batch.segments_BT,
            batch.languages_BT,
            batch.seeds_B,
        )
        judged = self.judge(hidden_BTD, self.targets(batch), blocks, batch.masked_M)
        return ElectraOutput(nll_M, predicted_M, corrupted_BT, *judged)

    @staticmethod
    def targets(batch: Batch) -> Tensor:
        """The tokens that a discriminator with a softmax predicts, [B, T]: the original token at every position."""
        return batch.tokens_BT

    def judge(
        self, hidden_BTD: Tensor, targets_BT: Tensor, blocks: list[Tensor], masked_M: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The last fields of `ElectraOutput`, from `replaced_logits_BT` on. The discriminator of this class has no
        softmax: only subclasses read `targets_BT`, `blocks` (of the tied embedding) and `masked_M`, which a pipeline
        does not give."""
        return (self.replaced_head(hidden_BTD),)


def random_replacements(share_1: Tensor | None, uniforms_M: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Choose the masked positions at which a random ordinary token replaces the generator's sample.

    `share_1` is the probability of each position to be chosen, float32 [1]; None means 0. Returns (tokens, uniforms),
    both [M]. `tokens` (int64) has the random tokens, and −1 where the sample stays. `uniforms` (float32) has the random
    numbers with which the generator draws its samples, and 0 where the sample does not stay.
    """
    no_token_M = torch.full_like(uniforms_M, -1, dtype=torch.int64)
    if share_1 is None:
        return no_token_M, uniforms_M
    share_1 = share_1.detach()  # DeepSpeed's pipeline engine makes all floating-point inputs require a gradient
    first, count = UNK + 1, vocabulary - UNK - 2  # the first ordinary id, and the number of ordinary ids
    is_chosen_M = uniforms_M < share_1
    rescaled_M = rescale_uniforms(is_chosen_M, uniforms_M, share_1)
    tokens_M = first + (rescaled_M.double() * count).long().clamp(0, count - 1)
    return torch.where(is_chosen_M, tokens_M, no_token_M), torch.where(is_chosen_M, 0.0, rescaled_M)


def rescale_uniforms(below_M: Tensor, uniforms_M: Tensor, bound: float | Tensor) -> Tensor:
    """Each uniform rescaled to [0, 1): from [0, bound) where `below_M` is true, else from [bound, 1).

    The result is again uniform and independent of `below_M`, so one uniform serves two random choices.
    """
    rescaled_M = torch.where(below_M, uniforms_M / bound, (uniforms_M - bound) / (1.0 - bound))
    return rescaled_M.clamp(max=1.0 - 2.0**-24)  # rounding could give 1
