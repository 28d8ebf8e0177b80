"""The contenders of `bench.loader`: each reads the same rows from its own files.

Lean, a peer makes the batch that the model takes by the least work that we could think of: masks drawn with 15% for
each token from torch's generator, positions and segments computed from the ids of a whole batch at once. Customary, it
is read row by row through torch's DataLoader, and transformers' DataCollatorForLanguageModeling masks (no positions, no
segments). Bare is reading alone. Their rows lie on the disk in the order in which they are read, which is kind to them.
Ours has masks that are exact and repeatable (15% of each item, without replacement, a function of the row's number),
and checks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.loader_rows import ROW_TOKENS
from xlme_ds.config import DataConfig
from xlme_ds.data.loader import Loader
from xlme_ds.data.schema import BOS, EOS, PAD, TASKS, UNK
from xlme_ds.data.shards import RowStore

MASK_FRACTION = 0.15
Kind = Literal["lean", "customary", "bare"]
Made = tuple[
    Tensor, ...
]  # ids [B, T]; unless bare, masked positions [M]; if lean, positions and segments [B, T]; all int64


class Contender(ABC):
    """`write` once, then `batches` any number of times."""

    needs: tuple[str, ...] = ()
    """Modules that must be there, and …"""
    package = ""
    """… what brings them."""

    def __init__(self, folder: Path, rows: int, a_task: int):
        self.folder = folder
        self.rows = rows
        self.a_task = a_task

    @classmethod
    def missing(cls) -> str:
        """Why it cannot run here; empty where it can."""
        absent = [module for module in cls.needs if find_spec(module) is None]
        return f"left out, module {absent[0]} is not there: pip install {cls.package}" if absent else ""

    @abstractmethod
    def write(self, tokens: np.ndarray) -> None:
        """Store the rows, [N, T] in reading order."""

    @abstractmethod
    def batches(self, kind: Kind, workers: int) -> Iterator[Made]:
        """One pass over the data, opened anew."""


class Ours(Contender):
    """`Loader` on the mixed folder; checks every shard's SHA-256 before it is used, the others check nothing."""

    def write(self, tokens: np.ndarray) -> None:
        """The folder is there."""

    def batches(self, kind: Kind, workers: int) -> Iterator[Made]:
        """Step after step of one micro-batch; there are no workers and no other way to use it."""
        assert workers == 0 and kind != "customary"
        if kind == "bare":
            stores = [RowStore(self.folder / task) for task in TASKS]
            for first in range(0, self.rows, self.a_task):
                parts = [store.read(np.arange(first, first + self.a_task)) for store in stores]
                yield (torch.from_numpy(np.concatenate([part.tokens for part in parts]).astype(np.int64)),)
            return
        loader = Loader(self.folder, DataConfig(self.a_task, self.a_task, self.a_task), 1, MASK_FRACTION)
        for step in range(self.rows // self.a_task):
            (batch,) = loader.step(step)
            yield batch.tokens_BT, batch.masked_M, batch.positions_BT, batch.segments_BT


def lean(ids: np.ndarray, mask: Callable[[Tensor], Tensor]) -> Made:
    """A batch of int32 ids [B, T]."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    begins, used = ids == BOS, ids != PAD
    column = np.arange(ids.shape[1])
    segments = np.cumsum(begins, axis=1) * used
    positions = (column - np.maximum.accumulate(np.where(begins, column, 0), axis=1)) * used
    return tokens, mask(tokens), torch.from_numpy(positions), torch.from_numpy(segments)


def bare(ids: np.ndarray) -> Made:
    """The ids alone."""
    return (torch.from_numpy(ids.astype(np.int64)),)


def plain_mask(tokens: Tensor) -> Tensor:
    """Masked positions by one uniform a token."""
    return ((torch.rand(tokens.shape) < MASK_FRACTION) & (tokens > UNK)).flatten().nonzero().squeeze(1)


@cache
def collator() -> Any:
    """Transformers' collator, with a tokenizer that knows the special tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    words = {"<s>": BOS, "<pad>": PAD, "</s>": EOS, "<unk>": UNK, "<mask>": UNK + 1}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="<mask>", pad_token="<pad>")
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASK_FRACTION)


def collator_mask(tokens: Tensor) -> Tensor:
    """Masked positions by the collator's inner function, called for a whole batch."""
    labels = collator().torch_mask_tokens(tokens.clone(), tokens <= UNK)[1]
    return (labels >= 0).flatten().nonzero().squeeze(1)


def customary(rows: Sequence[np.ndarray]) -> Made:
    """A batch as the collator makes it of examples; ids that it replaced are put back for the sum."""
    made = collator()([{"input_ids": row, "special_tokens_mask": row <= UNK} for row in rows])
    masked = made["labels"] >= 0
    return torch.where(masked, made["labels"], made["input_ids"]), masked.flatten().nonzero().squeeze(1)


class _Rowwise(Contender):
    """A peer with one row an index, under torch's DataLoader."""

    @abstractmethod
    def dataset(self) -> Any:
        """What DataLoader reads; an item is a row of ids."""

    def batches(self, kind: Kind, workers: int) -> Iterator[Made]:
        """The rows from front to back."""

        def together(rows: Sequence[np.ndarray]) -> Made:
            if kind == "customary":
                return customary(rows)
            return bare(np.stack(rows)) if kind == "bare" else lean(np.stack(rows), plain_mask)

        yield from DataLoader(self.dataset(), 2 * self.a_task, num_workers=workers, collate_fn=together)


class Megatron(_Rowwise):
    """Megatron-core's IndexedDataset, memory mapped: a sequence a row."""

    needs, package = ("megatron",), "--no-deps megatron-core"

    def write(self, tokens: np.ndarray) -> None:
        """See `Contender`."""
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.folder.mkdir()
        builder = IndexedDatasetBuilder(str(self.folder / "rows.bin"), dtype=np.int32)
        for row in torch.from_numpy(tokens):
            builder.add_item(row)
            builder.end_document()
        builder.finalize(str(self.folder / "rows.idx"))

    def dataset(self) -> Any:
        """See `_Rowwise`."""
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        return IndexedDataset(str(self.folder / "rows"), mmap=True)


class Streaming(_Rowwise):
    """mosaicml-streaming's StreamingDataset over MDS files on the local disk."""

    needs, package = ("streaming",), "mosaicml-streaming (in an environment of its own: it wants an older numpy)"

    def write(self, tokens: np.ndarray) -> None:
        """See `Contender`."""
        from streaming import MDSWriter

        with MDSWriter(out=str(self.folder), columns={"tokens": f"ndarray:int32:{ROW_TOKENS}"}) as writer:
            for row in tokens:
                writer.write({"tokens": row})

    def dataset(self) -> Any:
        """See `_Rowwise`; one canonical node: else it would jump between 64 places."""
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        class Ids(StreamingDataset):
            def __getitem__(self, at: Any) -> Any:
                return super().__getitem__(at)["tokens"]

        clean_stale_shared_memory()
        return Ids(local=str(self.folder), shuffle=False, batch_size=2 * self.a_task, num_canonical_nodes=1)


class HuggingFace(Contender):
    """`datasets`, memory mapped; lean, a batch is a slice of the table, and masked by transformers' function."""

    needs, package = ("datasets", "transformers", "tokenizers"), "datasets transformers tokenizers"

    def write(self, tokens: np.ndarray) -> None:
        """See `Contender`."""
        from datasets import Dataset, Features, List, Value

        features = Features({"tokens": List(Value("int32"), length=ROW_TOKENS)})
        Dataset.from_dict({"tokens": tokens}, features=features).save_to_disk(str(self.folder))

    def batches(self, kind: Kind, workers: int) -> Iterator[Made]:
        """Slices, unless customary."""
        from datasets import load_from_disk

        data = load_from_disk(str(self.folder)).with_format("numpy")
        size = 2 * self.a_task

        def rows(examples: Sequence[dict[str, np.ndarray]]) -> Made:
            return customary([example["tokens"] for example in examples])

        def together(ids: Any) -> Made:
            return bare(ids["tokens"]) if kind == "bare" else lean(ids["tokens"], collator_mask)

        if kind == "customary":
            yield from DataLoader(data, size, num_workers=workers, collate_fn=rows)
        else:
            yield from DataLoader(_Slices(data, size), batch_size=None, num_workers=workers, collate_fn=together)


class _Slices(Dataset[Any]):
    """Slices of `size` rows of a dataset, by number."""

    def __init__(self, data: Any, size: int):
        self.data, self.size = data, size

    def __len__(self) -> int:
        return -(-len(self.data) // self.size)

    def __getitem__(self, number: int) -> Any:
        return self.data[number * self.size : (number + 1) * self.size]


PEERS: dict[str, type[Contender]] = {
    "mosaicml-streaming": Streaming,
    "datasets": HuggingFace,
    "megatron indexed dataset": Megatron,
}
