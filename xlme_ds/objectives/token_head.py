"""Two objectives in which ELECTRA's discriminator also has a softmax over the vocabulary, and predicts original tokens.

All-tokens masked language modelling (Clark et al., 2020, ELECTRA, section 3.4) is a control for replaced token
detection. The discriminator reads a text in which the generator has replaced tokens. But instead of judging each token,
it predicts the original token x_t at every position t:

    p(x_t) = c_t · 1[position t still shows x_t] + (1 − c_t) · softmax_t(x_t)

In ELECTRA the discriminator's head gives the probability that the token at position t is original. Here this head gives
c_t, the probability of copying that token. The loss is L = L_MLM + L_TLM + λ·L_AMLM + λ·L_ATLM. L_AMLM is the mean of
−log p(x_t) over all tokens of monolingual text, L_ATLM the mean over all tokens of pairs. The discriminator's softmax
runs at all positions, so it costs 1 / mask_fraction times as much as the generator's.

Replaced token detection with corrective language modelling (Meng et al., 2021, COCO-LM; Bajaj et al., 2022, METRO)
judges each token, and at each masked position the discriminator also predicts the original token. So it learns more
from a token than whether it was replaced. L = L_MLM + L_TLM + λ·L_MRTD + λ·L_TRTD + L_CMLM + L_CTLM. L_CMLM is a mean
over the masked positions of monolingual text, L_CTLM a mean over the masked positions of pairs. As in METRO, the
softmax alone predicts these tokens; COCO-LM adds a probability of copying the token that is read.

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
from ..models.pipeline import ElectraStage, Flops, masked_head_flops, scatter
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

    prefixes_after = (*ElectraStage.prefixes_after, "token_head")
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
    why_no_gdes = "needs one embedding for generator and discriminator, but model.embedding_sharing gdes makes two"

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


class CorrectiveModel(AllTokensModel):
    """`AllTokensModel` whose discriminator predicts only the masked tokens. `token_nll_BT` is 0 at all other
    positions."""

    @staticmethod
    def targets(batch: Batch) -> Tensor:
        """The original tokens at the masked positions, 0 elsewhere, [B, T]."""
        return scatter(batch.tokens_BT.flatten()[batch.masked_M], batch.masked_M, batch.tokens_BT)

    def judge(
        self, hidden_BTD: Tensor, targets_BT: Tensor, blocks: list[Tensor], masked_M: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Returns (`replaced_logits_BT`, `token_nll_BT`) of `ElectraOutput`."""
        if masked_M is None:  # in a pipeline; the positions with a target are the masked ones
            masked_M = targets_BT.flatten().nonzero().squeeze(1)
        hidden_MD, targets_M = hidden_BTD.flatten(0, 1)[masked_M], targets_BT.flatten()[masked_M]
        predicted = self.token_head(hidden_MD, TiedTable(blocks), targets_M, None)
        return self.replaced_head(hidden_BTD), scatter(predicted.nll_M, masked_M, targets_BT)


class CorrectiveStage(AllTokensStage, CorrectiveModel):
    """The part of `CorrectiveModel` that one pipeline stage runs."""


class CorrectiveObjective(ElectraObjective):
    """`ElectraObjective` with two more terms, for masked language modelling by the discriminator."""

    description = (
        "replaced token detection with corrective language modelling: a generator fills masked tokens, a discriminator "
        "finds the replaced ones and predicts the original ones"
    )
    terms: tuple[str, ...] = (*ElectraObjective.terms, "cmlm", "ctlm")
    quantities: Mapping[str, Quantity] = {
        **ElectraObjective.quantities,
        "cmlm": Quantity("Discriminator: loss of masked tokens", "nats a token", "mono"),
        "ctlm": Quantity("Discriminator: loss of masked tokens", "nats a token", "para"),
    }
    model_classes = CorrectiveModel, CorrectiveStage
    means_over = ("masked", "tokens", "masked")

    def flops(self, cfg: ModelConfig, row_tokens: int) -> Flops:
        """The operations per token of ELECTRA, plus those of a second softmax at the masked positions, in a pipeline's
        last part."""
        return replace(super().flops(cfg, row_tokens), softmax_last=masked_head_flops(cfg, self.mask_fraction))

    @classmethod
    def losses(cls, output: ElectraOutput, batch: Batch) -> list[Tensor]:
        """The losses of ELECTRA, and the discriminator's loss of the masked tokens, float32 [B, T]."""
        return [*super().losses(output, batch), output.token_nll_BT]
