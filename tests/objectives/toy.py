"""An objective that this file alone knows: `python -m tests.objectives.toy MODULE ...` runs a command that has it."""

import runpy
import sys

import torch
from torch import Tensor

from xlme_ds.config import ObjectiveConfig, RunConfig
from xlme_ds.data.batch import Batch
from xlme_ds.models.text_encoder import Masking
from xlme_ds.objectives import OBJECTIVES
from xlme_ds.objectives.mlm import MaskedLanguageModelling
from xlme_ds.objectives.protocol import Quantity


class SeesThePast(Masking):
    """Every masked token shows `<mask>`, and a position sees itself and what comes before it in its item."""

    def attention_mask(self, groups_BT: Tensor) -> Tensor:
        return (
            super().attention_mask(groups_BT)
            & torch.ones(groups_BT.shape[1], groups_BT.shape[1], dtype=torch.bool).tril()
        )


class Toy(MaskedLanguageModelling):
    """Masked tokens of the first half of a row and of the second, as terms of their own."""

    description = "a toy of the tests: masked tokens from those before them"
    terms = ("toy_near", "toy_far")
    accuracies = ("toy_found_near", "toy_found_far")
    quantities = {  # noqa: RUF012
        "toy_near": Quantity("Toy loss of the first half", "nats a token", "mono", unigram=True),
        "toy_far": Quantity("Toy loss of the second half", "nats a token", "mono"),
    }

    def __init__(self, cfg: ObjectiveConfig):
        super().__init__(cfg)
        self.masking = SeesThePast(random_fraction=0.0, keep_fraction=0.0)
        self.weights = torch.tensor([1.0, 0.5], dtype=torch.float64)

    def check(self, run: RunConfig) -> None:
        super().check(run)
        if run.data.micro_batch >= 100:
            raise ValueError("a toy has small micro-batches")

    def term_of_masked(self, batch: Batch) -> Tensor:
        tokens = batch.tokens_BT.shape[1]
        return (batch.masked_M % tokens >= tokens // 2).long()


OBJECTIVES["toy"] = "tests.objectives.toy:Toy"

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
