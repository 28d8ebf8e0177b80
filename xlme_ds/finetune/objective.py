"""The model and the objective of fine-tuning. The model is an encoder with the head of a task. The loss is the mean
cross-entropy over the labelled words, the pairs of texts, or the windows of questions' contexts in the global batch.

Letters of shapes: B inputs in a batch, T tokens of an input, D width of the encoder.
"""

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig, OptimizerConfig
from ..models.dropout import OUTSIDE, derive_seeds, drop
from ..models.layers import norm_of
from ..models.text_encoder import TextEncoder
from ..objectives.protocol import Objective
from .downstream_tasks import TaskKind
from .features import IGNORED, TaskBatch

_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")
_INPUT_PREFIXES = (  # a parameter that is used before the first layer has a name with one of these prefixes
    "encoder.embedding_",
    *(f"encoder.encoder.{name}" for name in ("positions", "languages", "relative", "input_norm")),
)


class TaskModel(nn.Module):
    """An encoder and a head. The head reads every token; for pairs, only the first token.

    The head is XLM-R's: linear for tokens and spans; dense, tanh and linear for pairs. After an encoder of `model.body
    modern` the head is ModernBERT's: dense, GELU, norm and linear. Every head has `label_count` outputs. The encoder is
    trained too. `dropout` is the rate in the encoder and before the head; attention weights get no dropout.
    """

    def __init__(self, cfg: ModelConfig, kind: TaskKind, label_count: int, dropout: float = 0.0):
        super().__init__()
        self.kind = kind
        self.encoder = TextEncoder(replace(cfg, dropout=dropout, attention_dropout=0.0))
        hidden: dict[str, nn.Module] = {}
        if cfg.body == "modern":
            dense = nn.Linear(cfg.width, cfg.width, bias=False)
            hidden = {"dense": dense, "gelu": nn.GELU(), "norm": norm_of(cfg)}
        elif kind == "pair":
            hidden = {"dense": nn.Linear(cfg.width, cfg.width), "tanh": nn.Tanh()}
        self.head = nn.Sequential(OrderedDict(**hidden, output=nn.Linear(cfg.width, label_count)))
        self.dropout = dropout

    def forward(self, batch: TaskBatch) -> Tensor:
        """Returns float32 logits. For tokens: [B, T, label_count]. For pairs: [B, label_count]. For spans: [B, T, 2],
        where the last dimension is (the answer begins at this token, the answer ends at this token)."""
        hidden_BTD = self.encoder(
            batch.tokens_BT, batch.positions_BT, batch.segments_BT, batch.languages_BT, batch.seeds_B
        )
        if self.training:
            hidden_BTD = drop(hidden_BTD, self.dropout, derive_seeds(batch.seeds_B, OUTSIDE))
        logits = self.head(hidden_BTD[:, 0] if self.kind == "pair" else hidden_BTD).float()
        # Mask padding, where no answer can begin or end.
        return logits.masked_fill((batch.segments_BT == 0)[..., None], -1e4) if self.kind == "span" else logits


class TaskObjective(Objective):
    """The objective of fine-tuning. For a span the model predicts two positions, of the first and of the last token.
    Each of these two predictions counts half."""

    terms: tuple[str, ...] = ("loss",)
    statistics_shape: tuple[int, ...] = (1,)

    def __init__(self, kind: TaskKind, label_count: int, dropout: float):
        self.kind = kind
        self.label_count = 2 if kind == "span" else label_count
        self.dropout = dropout
        self.weights = torch.ones(1, dtype=torch.float64)

    def learning_rate_scales(self, names: Sequence[str], cfg: OptimizerConfig) -> list[float]:
        """The factor that multiplies each parameter's learning rate: layer_decay ** depth (ERNIE-M, Tables 11 and 12).
        The depth is 0 for the parameters after the last layer, 1 in the last layer, 2 in the layer before it, and so
        on. Parameters before the first layer, such as the embedding, are one deeper than this layer."""
        layer_of = {name: int(match[1]) for name in names if (match := _LAYER.search(name))}
        layers = 1 + max(layer_of.values(), default=-1)
        depths = {name: layers - layer for name, layer in layer_of.items()}
        depths |= {name: layers + 1 for name in names if name.startswith(_INPUT_PREFIXES)}
        return [cfg.layer_decay ** depths.get(name, 0) for name in names]

    def build(self, cfg: ModelConfig) -> TaskModel:
        """The encoder with this task's head, uninitialised."""
        return TaskModel(cfg, self.kind, self.label_count, self.dropout)

    def counts(self, batch: TaskBatch) -> Tensor:
        """float64 [1]: the number of labelled words, pairs or windows in the batch."""
        count = (batch.labels != IGNORED).sum() if self.kind == "tokens" else torch.tensor(len(batch.labels))
        return count.double().view(1).to(batch.labels.device)

    def sums(self, output: Tensor, batch: TaskBatch) -> Tensor:
        """float32 [1]: the cross-entropy, summed over the batch; it carries the gradient."""
        logits, labels = self._flat(output, batch)
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return (loss / 2 if self.kind == "span" else loss).view(1)

    def statistics(self, output: Tensor, batch: TaskBatch) -> Tensor:
        """float64 [1]: the number of right predictions in the batch. A right first or last token of a span counts
        1/2."""
        logits, labels = self._flat(output, batch)
        right = (logits.argmax(-1) == labels).sum().double()
        return (right / 2 if self.kind == "span" else right).view(1)

    def summarise(self, sums: Tensor, counts: Tensor, statistics: Tensor) -> dict[str, float]:
        """`loss` and `accuracy` of a global batch, from the totals of `sums`, `counts` and `statistics` over it."""
        return {"loss": float(sums / counts.clamp(min=1)), "accuracy": float(statistics / counts.clamp(min=1))}

    def _flat(self, output: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """Returns (logits [N, classes], labels [N]) of N predictions. A span has two predictions; the classes of each
        are the T token positions."""
        if self.kind == "span":
            return output.transpose(1, 2).flatten(0, 1), batch.labels.flatten()
        return output.flatten(0, -2), batch.labels.flatten()
