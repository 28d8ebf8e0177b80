"""Loads rows with Hugging Face's `datasets`, to compare with our loader.

There are three kinds of loading. *Lean* makes the batch that the model needs with the least work that we could think
of: torch's generator masks each token with probability 15%, and positions and segments are computed from the ids of a
whole batch at once. *Customary* reads row by row through torch's DataLoader, and masks with transformers'
DataCollatorForLanguageModeling; it makes no positions and no segments. *Bare* only reads.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from xlme_ds.data.schema import BOS, EOS, PAD, UNK

ROWS = 32  # rows of a batch
MASK_FRACTION = 0.15
Tensors = tuple[Tensor, ...]
"""A batch, all int64. Bare: ids [B, T]. Customary: ids, masked positions [M]. Lean: ids, masked positions, positions
[B, T], segments [B, T]."""


@cache
def collator() -> Any:
    """transformers' collator. Its tokenizer has only special tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    ids = {"<s>": BOS, "<pad>": PAD, "</s>": EOS, "<unk>": UNK, "<mask>": UNK + 1}
    inner = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="<mask>", pad_token="<pad>")
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASK_FRACTION)


def peer_batch(kind: str, rows: Any) -> Tensors:
    """Make a batch of `rows`, int32 ids [B, T]. In a customary batch, the original ids are put back where the collator
    masked them, because our batches have original ids and masked positions."""
    if kind == "customary":
        batch = collator()([{"input_ids": row, "special_tokens_mask": row <= UNK} for row in rows])
        masked = batch["labels"] >= 0
        return torch.where(masked, batch["labels"], batch["input_ids"]), masked.flatten().nonzero().squeeze(1)
    ids = np.asarray(rows)
    tokens = torch.from_numpy(ids.astype(np.int64))
    if kind == "bare":
        return (tokens,)
    chosen = (torch.rand(tokens.shape) < MASK_FRACTION) & (tokens > UNK)
    begins, not_padding, column = ids == BOS, ids != PAD, np.arange(ids.shape[1])
    segments = np.cumsum(begins, axis=1) * not_padding
    positions = (column - np.maximum.accumulate(np.where(begins, column, 0), axis=1)) * not_padding
    return tokens, chosen.flatten().nonzero().squeeze(1), torch.from_numpy(positions), torch.from_numpy(segments)


def write_rows(folder: Path, tokens: np.ndarray) -> None:
    """Store the rows `tokens` [N, T] in the order in which they will be read."""
    from datasets import Dataset, Features, List, Value

    features = Features({"tokens": List(Value("int32"), length=tokens.shape[1])})
    Dataset.from_dict({"tokens": tokens}, features=features).save_to_disk(str(folder))


def peer_batches(folder: Path, kind: str) -> Iterator[Tensors]:
    """Open the stored rows, and yield all of them in order, in batches. Customary batches are read row by row, the
    others as slices."""
    from datasets import load_from_disk

    data = load_from_disk(str(folder)).with_format("numpy")
    if kind == "customary":
        yield from DataLoader(data, ROWS, collate_fn=lambda rows: peer_batch(kind, [row["tokens"] for row in rows]))
    else:
        for first in range(0, len(data), ROWS):
            yield peer_batch(kind, data[first : first + ROWS]["tokens"])
