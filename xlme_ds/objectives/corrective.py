"""Replaced token detection with corrective language modelling (Meng et al., 2021, COCO-LM; Bajaj et al., 2022, METRO).
At each masked position the discriminator reads the generator's sample, and also predicts the original token. So the
discriminator learns more from a token than whether it was replaced.

L = L_MLM + L_TLM + λ·L_MRTD + λ·L_TRTD + L_CMLM + L_CTLM. L_CMLM is a mean over the masked positions of monolingual
text, L_CTLM a mean over the masked positions of pairs. As in METRO, the softmax alone predicts these tokens; COCO-LM
adds a probability of copying the token that is read.

B rows, T tokens, M masked positions, D width.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ..config import ModelConfig
from ..data.batch import Batch
from ..models.electra import ElectraOutput
from ..models.heads import TiedTable
from ..models.pipeline import Flops, masked_head_flops, scatter
from .all_tokens import AllTokensModel, AllTokensStage
from .electra import ElectraObjective
from .protocol import Quantity


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
