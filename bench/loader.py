"""Compare our loader with Hugging Face's `datasets` (the peer): rows per second.

    xlme bench loader --data DIR [--quick] [--json]     # DIR: a folder that `xlme prep mix` wrote

A pass opens the data and reads it to the last row, in one process without workers, with one thread of torch and cached
files. The loaders take turns. The peer's rows lie on the disk in reading order, which helps the peer. Our masks are
exact (15% of each item, drawn without replacement) and repeatable (they depend on the row's index alone). Our loader
checks every shard's SHA-256 before it uses the shard; the peer checks nothing.

*datasets* makes the batch that the model needs with the least work that we could think of: torch's generator masks each
token with probability 15%, and positions and segments are computed from the ids of a whole batch at once. *customary*
reads the peer's rows one by one through torch's DataLoader, and masks with transformers'
DataCollatorForLanguageModeling; it makes no positions and no segments.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bench.measure import Figures, by_turns, printed, ratio, run_bench, timed
from xlme_ds.config import DataConfig
from xlme_ds.data.loader import Loader
from xlme_ds.data.schema import BOS, EOS, PAD, TASKS, UNK
from xlme_ds.data.shards import RowStore

ROWS = 32  # rows of a batch
ROWS_PER_TASK = ROWS // 2  # rows of each task in a micro-batch, as in Base
MASK_FRACTION = 0.15
Batches = Iterator[tuple[Tensor, ...]]
"""Batches of int64: ids [B, T] and masked positions [M]; except for the customary ones, also positions and segments
[B, T]."""


def our_batches(data: Path, rows: int) -> Batches:
    """Open the data, and yield the batches of one pass of our loader."""
    loader = Loader(data, DataConfig(ROWS_PER_TASK, ROWS_PER_TASK, ROWS_PER_TASK), 1, MASK_FRACTION)
    for step in range(rows // ROWS_PER_TASK):
        (batch,) = loader.micro_batches(step)
        yield batch.tokens_BT, batch.masked_M, batch.positions_BT, batch.segments_BT


def write_rows(folder: Path, tokens: np.ndarray) -> None:
    """Store the rows `tokens` int32 [N, T] as a data set of the peer, which reads them in this order."""
    from datasets import Dataset, Features, List, Value

    features = Features({"tokens": List(Value("int32"), length=tokens.shape[1])})
    Dataset.from_dict({"tokens": tokens}, features=features).save_to_disk(str(folder))


def peer_batches(folder: Path) -> Batches:
    """Open the peer's rows, and yield all of them in order, in batches that are read as slices."""
    from datasets import load_from_disk

    data = load_from_disk(str(folder)).with_format("numpy")
    for first in range(0, len(data), ROWS):
        yield peer_batch(data[first : first + ROWS]["tokens"])


def peer_batch(ids: np.ndarray) -> tuple[Tensor, ...]:
    """Make a batch of rows of the peer, int32 ids [B, T]."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    chosen = (torch.rand(tokens.shape) < MASK_FRACTION) & (tokens > UNK)
    begins, not_padding, column = ids == BOS, ids != PAD, np.arange(ids.shape[1])
    segments = np.cumsum(begins, axis=1) * not_padding
    positions = (column - np.maximum.accumulate(np.where(begins, column, 0), axis=1)) * not_padding
    return tokens, chosen.flatten().nonzero().squeeze(1), torch.from_numpy(positions), torch.from_numpy(segments)


@cache
def collator() -> Any:
    """transformers' collator."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    specials = {"<s>": BOS, "<pad>": PAD, "</s>": EOS, "<unk>": UNK, "<mask>": UNK + 1}  # the collator needs no others
    inner = Tokenizer(WordLevel(specials, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="<mask>", pad_token="<pad>")
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASK_FRACTION)


def customary_batches(folder: Path) -> Batches:
    """Open the peer's rows, and yield all of them in order, in batches that are read row by row and masked by
    transformers' collator. Where the collator masked an id, the original id is put back, as our batches have it."""
    from datasets import load_from_disk

    def collate(rows: Sequence[Any]) -> tuple[Tensor, ...]:
        batch = collator()([{"input_ids": row["tokens"], "special_tokens_mask": row["tokens"] <= UNK} for row in rows])
        masked = batch["labels"] >= 0
        return torch.where(masked, batch["labels"], batch["input_ids"]), masked.flatten().nonzero().squeeze(1)

    yield from DataLoader(load_from_disk(str(folder)).with_format("numpy"), ROWS, collate_fn=collate)


def in_training_order(data: Path, rows: int) -> np.ndarray:
    """Tokens int32 [2 · rows, T] as the peer stores them: batch after batch, each with 16 rows of each task."""
    parts = [RowStore(data / task).read(np.arange(rows)).tokens for task in TASKS]
    row_tokens = parts[0].shape[1]
    batches = np.concatenate([part.reshape(-1, ROWS_PER_TASK, row_tokens) for part in parts], axis=1)
    return batches.reshape(-1, row_tokens)


def measure(data: Path, rows: int = 16_384, rounds: int = 5, quick: bool = False, json: bool = False) -> str:
    """Run the command.

    Args:
        data: Folder that `xlme prep mix` wrote; its first rows are read.
        rows: Most rows of each task in a pass, which reads whole batches of 16 rows of each.
        rounds: Rounds to measure; each figure is the median over the rounds.
        quick: At most 2,048 rows of each task, three rounds.
        json: Print JSON.
    """
    return printed(race(data, min(rows, 2048), 3) if quick else race(data, rows, rounds), json)


def race(data: Path, most: int, rounds: int) -> Figures:
    """Run the passes of our loader and of the peer in turns. Every round gives the ratio of our rate to the peer's; the
    figure is the median over the rounds."""
    torch.set_num_threads(1)
    rows = min(most, *(RowStore(data / task).rows for task in TASKS)) // ROWS_PER_TASK * ROWS_PER_TASK
    if rows <= 0:
        raise ValueError(f"a batch needs {ROWS_PER_TASK} rows of each task: raise --rows, or name larger data")
    tokens = in_training_order(data, rows)
    checksum = int(tokens.sum(dtype="int64"))
    with tempfile.TemporaryDirectory() as scratch:
        stored = Path(scratch) / "datasets"
        write_rows(stored, tokens)
        contenders: dict[str, Callable[[], Batches]] = {
            "ours": partial(our_batches, data, rows),
            "datasets": partial(peer_batches, stored),
            "customary": partial(customary_batches, stored),
        }
        passes = {name: partial(timed, partial(read_all, name, batches, checksum))
                  for name, batches in contenders.items()}  # fmt: skip
        turns = by_turns(passes, rounds)
    return {
        "ratio_vs_datasets": ratio(turns, "datasets", "ours", "wall"),
        "ratio_vs_datasets_in_cpu_time": ratio(turns, "datasets", "ours", "cpu"),
        "ratio_vs_customary": ratio(turns, "customary", "ours", "wall"),
        "rows_per_s": {name: statistics.median(len(tokens) / turn[name]["wall"] for turn in turns) for name in passes},
        "rows": len(tokens),
    }


def read_all(name: str, batches: Callable[[], Batches], checksum: int) -> None:
    """Read all batches. Raises ValueError if their ids do not add up to `checksum`."""
    id_sum = sum(int(ids.sum()) for ids, *_ in batches())
    if id_sum != checksum:
        raise ValueError(f"{name} read other rows: their ids add up to {id_sum}, not {checksum}")


if __name__ == "__main__":
    run_bench("xlme bench loader", measure, __doc__)
