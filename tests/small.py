"""Small models with lively weights, and batches made from written-out items, for tests that compare two
computations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from xlme_ds.config import EncoderName, ModelConfig, RunConfig
from xlme_ds.data.batch import Batch
from xlme_ds.data.collate import collate
from xlme_ds.data.pseudo_parallel import PseudoSides
from xlme_ds.data.schema import BOS, EOS, PAD
from xlme_ds.data.shards import Rows
from xlme_ds.models.electra import Electra
from xlme_ds.models.execution import wrap_layers
from xlme_ds.models.text_encoder import LanguageModel, Masking, TextEncoder, take_encoder
from xlme_ds.validate import validate

# On tensors this small a second thread costs more than it does.
torch.set_num_threads(1)

Module = TypeVar("Module", bound=nn.Module)
SMALL = ModelConfig(
    vocabulary=97,
    width=24,
    heads=3,
    feed_forward=40,
    generator_layers=1,
    discriminator_layers=2,
    max_positions=40,
    relative_buckets=8,
    relative_max_distance=12,
    head_chunk=5,
)

# ModernBERT's body: the first and the third layer are global, the others see 4 tokens on each side.
MODERN = dict(
    body="modern", norm="pre", embedding_norm=True, absolute_positions=False, relative_bias="none", local_window=8,
    global_every=2,
)  # fmt: skip


def lively(module: Module, seed: int = 0, std: float = 0.3) -> Module:
    """Fill every parameter with N(0, std²), LayerNorm weights around 1: nothing is zero or alike by chance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std + centre)
    return module


def model(seed: int = 0, **changes: object) -> Electra:
    """A small lively pre-training model with settings of `SMALL` changed."""
    cfg = replace(SMALL, **changes)  # type: ignore[arg-type]
    validate(RunConfig("small", model=cfg))
    return lively(wrap_layers(Electra(cfg), cfg), seed)


def language_model(seed: int = 0, random: float = 0.1, keep: float = 0.1, **changes: object) -> LanguageModel:
    """A small lively language model: one encoder with a masked head, with settings of `SMALL` changed."""
    cfg = replace(SMALL, **changes)  # type: ignore[arg-type]
    validate(RunConfig("small", model=cfg))
    return lively(wrap_layers(LanguageModel(cfg, Masking(random, keep)), cfg), seed)


def encoder_of(whole: Electra | LanguageModel, which: EncoderName = "discriminator") -> TextEncoder:
    """One encoder of a pre-training model."""
    return take_encoder(whole.state_dict(), whole.cfg, which)


def item(rng: np.random.Generator, *sides: int, vocabulary: int = SMALL.vocabulary) -> list[int]:
    """`<s> … </s>`, one stretch of random ordinary tokens a side."""
    tokens = [BOS]
    for side in sides:
        tokens += [*rng.integers(4, vocabulary - 1, side).tolist(), EOS]
    return tokens


LANGUAGES = 3


def rows_of(packed: Sequence[Sequence[list[int]]], width: int, task: int = 0) -> Rows:
    """Rows from lists of items, padded to `width`; their sides have one of `LANGUAGES` after the other."""
    tokens = np.full((len(packed), width), PAD, dtype=np.int32)
    for row, items in zip(tokens, packed, strict=True):
        flat = [token for one in items for token in one]
        row[: len(flat)] = flat
    lengths = np.array([len(one) for items in packed for one in items], dtype=np.int64)
    languages = np.arange(len(lengths) * (1 + task)) % LANGUAGES
    return Rows(tokens, np.array([len(items) for items in packed]), lengths, languages)


def batch_of(
    mono: Sequence[Sequence[list[int]]],
    para: Sequence[Sequence[list[int]]],
    width: int,
    seed: int = 3,
    mask_fraction: float = 0.15,
) -> Batch:
    """A batch with rows of both tasks, corrupted as in training."""
    parts = [
        (task, rows_of(packed, width, task), np.arange(len(packed)) + 10)
        for task, packed in enumerate((mono, para))
        if packed
    ]
    return collate(parts, seed, mask_fraction)


def usual_batch(width: int = 40, seed: int = 3) -> Batch:
    """Two monolingual rows and two packed ones, with padding."""
    rng = np.random.default_rng(seed)
    mono = [[item(rng, width - 2)], [item(rng, width - 9)]]
    para = [[item(rng, 5, 6), item(rng, 1, 2), item(rng, 7, 3)], [item(rng, 15, 16)]]
    return batch_of(mono, para, width, seed)


def open_batch(
    lengths: Sequence[int], width: int = 40, fractions: tuple[float, ...] = (0.1, 0.3), seed: int = 3
) -> Batch:
    """Monolingual rows with sentences of the given lengths, or shorter to leave room, and open places after them
    (BTMLM)."""
    rng = np.random.default_rng(seed)
    rows = rows_of([[item(rng, length)] for length in lengths], width)
    return PseudoSides(fractions, tuple(range(LANGUAGES))).collate(
        [(0, rows, np.arange(len(lengths)) + 10)], seed, 0.15
    )
