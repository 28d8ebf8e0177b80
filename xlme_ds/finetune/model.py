"""An encoder with the head of a task.

B rows, T tokens, D width.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..models.dropout import APART, derive, drop
from ..models.text_encoder import TextEncoder
from .batches import TaskBatch
from .tasks import Kind

OUTSIDE = -1e4
"""Logit of a position where no answer can be."""


class TaskHead(nn.Module):
    """Tokens and spans: one linear layer on every token. Pairs: dense, tanh and linear on `<s>`."""

    def __init__(self, cfg: ModelConfig, kind: Kind, labels: int):
        super().__init__()
        self.dense = nn.Linear(cfg.width, cfg.width) if kind == "pair" else None
        self.output = nn.Linear(cfg.width, labels)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Logits: [B, T, labels], or [B, labels] of pairs."""
        if self.dense is None:
            return self.output(hidden_BTD)
        return self.output(torch.tanh(self.dense(hidden_BTD[:, 0])))


class TaskModel(nn.Module):
    """The encoder goes on being trained, with this dropout in place of pre-training's; attention weights are not
    dropped."""

    def __init__(self, cfg: ModelConfig, kind: Kind, labels: int, dropout: float = 0.0):
        super().__init__()
        self.kind = kind
        self.encoder = TextEncoder(replace(cfg, dropout=dropout, attention_dropout=0.0))
        self.head = TaskHead(cfg, kind, labels)
        self.dropout = dropout

    def forward(self, batch: TaskBatch) -> Tensor:
        """float32 logits: [B, T, labels] of tokens, [B, labels] of pairs, [B, T, 2] of spans (first and last token)."""
        hidden_BTD = self.encoder(
            batch.tokens_BT, batch.positions_BT, batch.segments_BT, batch.languages_BT, batch.keys_B
        )
        if self.training:
            hidden_BTD = drop(hidden_BTD, self.dropout, derive(batch.keys_B, APART))
        logits = self.head(hidden_BTD).float()
        return logits.masked_fill((batch.segments_BT == 0)[..., None], OUTSIDE) if self.kind == "span" else logits
