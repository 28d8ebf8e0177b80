"""All-tokens masked language modelling (Clark et al., 2020, ELECTRA, section 3.4): a control for replaced token
detection. As in ELECTRA, the discriminator reads a text in which the generator has replaced tokens. But instead of
judging each token, the discriminator predicts the original token x_t at every position t:

    p(x_t) = c_t · 1[position t still shows x_t] + (1 − c_t) · softmax_t(x_t)

In ELECTRA the discriminator's head gives the probability that the token at position t is original. Here this head gives
c_t, the probability of copying that token. The loss is L = L_MLM + L_TLM + λ·L_AMLM + λ·L_ATLM. L_AMLM is the mean of
−log p(x_t) over all tokens of monolingual text, L_ATLM the mean over all tokens of pairs. The discriminator's softmax
runs at all positions, so it costs 1 / mask_fraction times as much as the generator's.

B rows, T tokens, M masked positions, D width.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from ..data.batch import Batch
from ..models.electra import Electra, ElectraOutput
from ..models.heads import MaskedLanguageModelHead, TiedTable
from ..models.pipeline import ElectraStage, Flops, masked_head_flops
from .electra import ElectraObjective
from .protocol import Quantity


class AllTokensModel(Electra):
    """`Electra` whose discriminator also has a head over the vocabulary, tied to the embedding."""

    def __init__(self, cfg: ModelConfig, z_loss: float = 0.0, temperature: float = 1.0, keep_fraction: float = 0.0):
        super().__init__(cfg, z_loss, temperature, keep_fraction)
        self.token_head = MaskedLanguageModelHead(cfg)

    def judge(
        self, hidden_BTD: Tensor, targets_BT: Tensor, blocks: list[Tensor], masked_M: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Returns (`replaced_logits_BT`, `token_nll_BT`) of `ElectraOutput`."""
        predicted = self.token_head(hidden_BTD.flatten(0, 1), TiedTable(blocks), targets_BT.flatten(), None)
        return self.replaced_head(hidden_BTD), predicted.nll_M.view_as(targets_BT)


class AllTokensStage(ElectraStage, AllTokensModel):
    """The part of `AllTokensModel` that one pipeline stage runs. It sends the tensors of `ElectraStage` and, before the
    seeds, the targets [B, T]."""

    after = (*ElectraStage.after, "token_head")
    ties_embedding = True

    def _start(self, batch: Batch) -> tuple[Tensor, ...]:
        *sent, seeds_B = super()._start(batch)
        return *sent, self.targets(batch), seeds_B


class AllTokensObjective(ElectraObjective):
    """`ElectraObjective` with another loss of the discriminator."""

    description = (
        "all-tokens masked language modelling: a generator fills masked tokens, a discriminator predicts every token, "
        "which it copies or takes from the vocabulary"
    )
    terms: tuple[str, ...] = ("mlm", "tlm", "amlm", "atlm")
    quantities: Mapping[str, Quantity] = {
        **{name: quantity for name, quantity in ElectraObjective.quantities.items() if name not in ("mrtd", "trtd")},
        "amlm": Quantity("Discriminator: loss of every token, copied or predicted", "nats a token", "mono"),
        "atlm": Quantity("Discriminator: loss of every token, copied or predicted", "nats a token", "para"),
    }

    model_classes = AllTokensModel, AllTokensStage
    # Both softmaxes use the same embedding.
    no_gdes = "needs one embedding for generator and discriminator, but model.embedding_sharing gdes makes two"

    def flops(self, cfg: ModelConfig, row_tokens: int) -> Flops:
        """ELECTRA's operations per token, plus those of a softmax at every position, run by a pipeline's last part."""
        return replace(super().flops(cfg, row_tokens), softmax_last=masked_head_flops(cfg, 1.0), predicted_last=1.0)

    @staticmethod
    def discriminator_loss(output: ElectraOutput, batch: Batch) -> Tensor:
        """−log p(x_t) of the original token at every position, float32 [B, T]."""
        logits_BT = output.replaced_logits_BT.float()
        log_p_replaced_BT = F.logsigmoid(logits_BT) - output.token_nll_BT  # if the token was replaced: no copying
        log_p_original_BT = torch.logaddexp(F.logsigmoid(-logits_BT), log_p_replaced_BT)  # if it was not
        return -torch.where(output.corrupted_BT == batch.tokens_BT, log_p_original_BT, log_p_replaced_BT)
