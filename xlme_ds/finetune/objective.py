"""Cross-entropy of a task as (sum, count): a mean over labelled words, pairs or questions of the global batch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from .batches import TaskBatch
from .features import IGNORED
from .model import TaskModel
from .tasks import Kind


class TaskObjective:
    """See `objectives.protocol.Objective`. Of a span both ends count half."""

    terms: tuple[str, ...] = ("loss",)
    statistics_shape: tuple[int, ...] = (1,)

    def __init__(self, kind: Kind, labels: int, dropout: float):
        self.kind = kind
        self.labels = 2 if kind == "span" else labels
        self.dropout = dropout
        self.weights = torch.ones(1, dtype=torch.float64)

    def build(self, cfg: ModelConfig) -> TaskModel:
        """The encoder with this task's head, uninitialised."""
        return TaskModel(cfg, self.kind, self.labels, self.dropout)

    def counts(self, batch: TaskBatch) -> Tensor:
        """float64 [1]: labelled words, pairs or windows."""
        number = (batch.labels != IGNORED).sum() if self.kind == "tokens" else torch.tensor(len(batch.labels))
        return number.double().view(1).to(batch.labels.device)

    def sums(self, output: Tensor, batch: TaskBatch) -> Tensor:
        """float32 [1], with the gradient."""
        logits, labels = self._flat(output, batch)
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return (loss / 2 if self.kind == "span" else loss).view(1)

    def statistics(self, output: Tensor, batch: TaskBatch) -> Tensor:
        """float64 [1]: how many are right; of spans, ends."""
        logits, labels = self._flat(output, batch)
        right = (logits.argmax(-1) == labels).sum().double()
        return (right / 2 if self.kind == "span" else right).view(1)

    def summarise(self, sums: Tensor, counts: Tensor, statistics: Tensor) -> dict[str, float]:
        """`loss` and `accuracy` of a global batch."""
        return {"loss": float(sums / counts.clamp(min=1)), "accuracy": float(statistics / counts.clamp(min=1))}

    def _flat(self, output: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """Logits [N, classes] and labels [N]; the classes of a span are the positions."""
        if self.kind == "span":
            return output.transpose(1, 2).flatten(0, 1), batch.labels.flatten()
        return output.flatten(0, -2), batch.labels.flatten()
