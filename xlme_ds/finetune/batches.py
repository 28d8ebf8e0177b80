"""Batches of a step as a function of its number: epochs in an order of their own, rows cut over ranks as in
pre-training.

B rows, T tokens.
"""

import hashlib
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..config import DataConfig
from ..data.order import StepPlan, plan_step
from ..data.schema import PAD
from ..models.text_encoder import one_item_a_row
from .features import IGNORED, Feature
from .tasks import Kind


class TaskBatch(NamedTuple):
    """A micro-batch. All integers are int64."""

    tokens_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor
    languages_BT: Tensor
    labels: Tensor
    """[B, T] of tokens, IGNORED where none is; [B] of pairs; [B, 2] of spans: first and last token."""
    keys_B: Tensor
    """See `data.batch.Batch`."""

    def to(self, device: torch.device) -> "TaskBatch":
        """The same batch on `device`."""
        return TaskBatch(*(tensor.to(device, non_blocking=True) for tensor in self))


def collate(features: Sequence[Feature], kind: Kind, keys: Sequence[int] = ()) -> TaskBatch:
    """Features padded to the longest of them; `keys`, one each, are for training."""
    width = max(len(feature.ids) for feature in features)
    tokens_BT = np.full((len(features), width), PAD, np.int64)
    labels = np.full((len(features), width), IGNORED, np.int64)
    for row, feature in enumerate(features):
        tokens_BT[row, : len(feature.ids)] = feature.ids
        labels[row, : len(feature.labels)] = feature.labels
    if kind == "pair":
        labels = labels[:, 0]
    elif kind == "span":
        labels = labels[:, :2]
    tokens = torch.from_numpy(tokens_BT)
    keys_B = torch.tensor(keys or [0] * len(features))
    positions_BT, inside_BT = one_item_a_row(tokens)
    languages_BT = torch.tensor([feature.language for feature in features])[:, None] * inside_BT
    return TaskBatch(tokens, positions_BT, inside_BT, languages_BT, torch.from_numpy(labels), keys_B)


class TaskLoader:
    """The training features for one of `world` ranks; holds no position.

    Step s reads numbers [s·B, (s+1)·B); number n is feature n mod N in the order of epoch n div N, which (seed, epoch)
    give.
    """

    def __init__(self, features: Sequence[Feature], kind: Kind, data: DataConfig, seed: int, rank: int, world: int):
        self.features = features
        self.kind = kind
        self.plan: StepPlan = plan_step(data, world)
        self.rank = rank
        self.row_tokens = round(fmean(len(feature.ids) for feature in features))
        self.seed = seed
        self._orders: dict[int, np.ndarray] = {}

    @property
    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of all features."""
        digest = hashlib.sha256()
        for feature in self.features:
            digest.update(feature.ids.tobytes())
            digest.update(feature.labels.tobytes())
            if feature.language:
                digest.update(str(feature.language).encode())
        return {"features": digest.hexdigest()}

    def _feature(self, number: int) -> Feature:
        epoch, place = divmod(number, len(self.features))
        if epoch not in self._orders:
            shuffle = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._orders = {epoch: shuffle.permutation(len(self.features))}
        return self.features[self._orders[epoch][place]]

    def batch(self, step: int, micro_batch: int) -> TaskBatch:
        """Micro-batch `micro_batch` (of `plan.accumulation`) of this rank in step `step`."""
        numbers = self.plan.numbers(step, self.rank, micro_batch, 0).tolist()
        return collate([self._feature(n) for n in numbers], self.kind, [_key(self.seed, n) for n in numbers])

    def step(self, step: int) -> list[TaskBatch]:
        """All micro-batches of this rank in step `step`."""
        return [self.batch(step, micro) for micro in range(self.plan.accumulation)]

    def rows_of(self, step: int, micro_batch: int | None = None) -> str:
        """The examples of that micro-batch of this rank, or of the whole step, in words."""
        if micro_batch is None:
            numbers = np.arange(step * self.plan.rows[0], (step + 1) * self.plan.rows[0])
        else:
            numbers = self.plan.numbers(step, self.rank, micro_batch, 0)
        return "examples " + ", ".join(str(self._feature(int(n)).example) for n in numbers)

    def probe(self) -> TaskBatch:
        """The first feature: the same on all ranks, whatever their number."""
        return collate(self.features[:1], self.kind)


def _key(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:7], "little")
