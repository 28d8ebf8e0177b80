"""Compare our loader with Hugging Face's `datasets` (the peer): rows per second, and the time to the first batch.

    xlme bench loader --data DIR [--quick] [--json]     # DIR: a folder that `xlme prep mix` wrote

A pass opens the data and reads it to the last row, in one process without workers, with one thread of torch and cached
files. The two loaders take turns. The peer's rows lie on the disk in reading order, which helps the peer. Our masks are
exact (15% of each item, drawn without replacement) and repeatable (they depend on the row's index alone). Our loader
checks every shard's SHA-256 before it uses the shard; the peer checks nothing.

There are three kinds of loading. *Lean* makes the batch that the model needs; the peer does so with the least work that
we could think of: torch's generator masks each token with probability 15%, and positions and segments are computed from
the ids of a whole batch at once. *Customary*, of the peer alone, reads row by row through torch's DataLoader, and masks
with transformers' DataCollatorForLanguageModeling; it makes no positions and no segments. *Bare* only reads.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bench.measure import Figures, by_turns, ratio, run_bench
from xlme_ds.config import DataConfig
from xlme_ds.data.loader import Loader
from xlme_ds.data.schema import BOS, EOS, PAD, TASKS, UNK
from xlme_ds.data.shards import RowStore

ROWS = 32  # rows of a batch
ROWS_PER_TASK = ROWS // 2  # rows of each task in a micro-batch, as in Base
MASK_FRACTION = 0.15
Tensors = tuple[Tensor, ...]
"""A batch, all int64. Bare: ids [B, T]. Customary: ids, masked positions [M]. Lean: ids, masked positions, positions
[B, T], segments [B, T]."""
OURS, PEER = "ours", "datasets"


@dataclass(frozen=True)
class LoaderSettings:
    """Arguments of the command."""

    data: Path
    """Folder that `xlme prep mix` wrote; its first rows are read."""
    rows: int = 16_384
    """Most rows of each task in a pass, which reads whole batches of 16 rows of each."""
    rounds: int = 5
    """Rounds to measure; each figure is the median over the rounds."""
    quick: bool = False
    """At most 2,048 rows of each task, three rounds."""
    json: bool = False
    """Print JSON."""


def our_batches(data: Path, rows: int, kind: str) -> Iterator[Tensors]:
    """Open the data, and yield the batches of one pass of our loader. If `kind` is "bare", the batches are read without
    the loader, and have only ids."""
    if kind == "bare":
        stores = [RowStore(data / task) for task in TASKS]
        for first in range(0, rows, ROWS_PER_TASK):
            parts = [store.read(np.arange(first, first + ROWS_PER_TASK)).tokens for store in stores]
            yield (torch.from_numpy(np.concatenate(parts).astype(np.int64)),)
        return
    loader = Loader(data, DataConfig(ROWS_PER_TASK, ROWS_PER_TASK, ROWS_PER_TASK), 1, MASK_FRACTION)
    for step in range(rows // ROWS_PER_TASK):
        (batch,) = loader.micro_batches(step)
        yield batch.tokens_BT, batch.masked_M, batch.positions_BT, batch.segments_BT


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
    """Store the rows `tokens` int32 [N, T] as a data set of the peer, which reads them in this order."""
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


def in_training_order(data: Path, rows: int) -> np.ndarray:
    """Tokens int32 [2 · rows, T] as the peer stores them: batch after batch, each with 16 rows of each task."""
    parts = [RowStore(data / task).read(np.arange(rows)).tokens for task in TASKS]
    row_tokens = parts[0].shape[1]
    batches = np.concatenate([part.reshape(-1, ROWS_PER_TASK, row_tokens) for part in parts], axis=1)
    return batches.reshape(-1, row_tokens)


def race(settings: LoaderSettings) -> Figures:
    """Run the passes of our loader and of the peer in turns. Every round gives the ratio of our rate to the peer's; the
    figure is the median over the rounds."""
    torch.set_num_threads(1)
    most, rounds = (min(settings.rows, 2048), 3) if settings.quick else (settings.rows, settings.rounds)
    rows = min(most, *(RowStore(settings.data / task).rows for task in TASKS)) // ROWS_PER_TASK * ROWS_PER_TASK
    if rows <= 0:
        raise ValueError(f"a batch needs {ROWS_PER_TASK} rows of each task: raise --rows, or name larger data")
    tokens = in_training_order(settings.data, rows)
    checksum = int(tokens.sum(dtype="int64"))
    contenders = [(OURS, "lean"), (OURS, "bare"), (PEER, "lean"), (PEER, "bare"), (PEER, "customary")]
    with tempfile.TemporaryDirectory() as scratch:
        stored = Path(scratch) / PEER
        write_rows(stored, tokens)
        batches = {OURS: partial(our_batches, settings.data, rows), PEER: partial(peer_batches, stored)}
        passes = {(name, kind): partial(one_pass, name, batches[name], kind, checksum) for name, kind in contenders}
        turns = by_turns(passes, rounds)
    medians: Figures = {OURS: {}, PEER: {}}
    for name, kind in contenders:
        of_rounds = [turn[name, kind] for turn in turns]
        medians[name][kind] = {figure: statistics.median(row[figure] for row in of_rounds) for figure in of_rounds[0]}
    lean = (OURS, "lean"), (PEER, "lean")
    return {
        "ratio_vs_datasets": ratio(turns, *lean, "rows_per_s"),
        "ratio_vs_datasets_in_cpu_time": ratio(turns, *lean, "rows_per_cpu_s"),
        "ratio_vs_customary": ratio(turns, (OURS, "lean"), (PEER, "customary"), "rows_per_s"),
        "ratio_vs_bare": ratio(turns, (OURS, "bare"), (PEER, "bare"), "rows_per_s"),
        "contenders": medians,
        "rows": len(tokens),
    }


def one_pass(name: str, batches: Callable[[str], Iterator[Tensors]], kind: str, checksum: int) -> Figures:
    """Rows per second of wall time and per second of CPU time, milliseconds to the first batch, and masked tokens per
    row.

    Raises ValueError if the ids of all rows do not add up to `checksum`.
    """
    id_sum, rows, first_seconds, masked = 0, 0, 0.0, 0
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in batches(kind):
        first_seconds = first_seconds or time.perf_counter() - wall
        rows += len(batch[0])
        id_sum += int(batch[0].sum())
        masked += batch[1].numel() if len(batch) > 1 else 0
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if id_sum != checksum:
        raise ValueError(f"{name} read other rows: their ids add up to {id_sum}, not {checksum}")
    return {
        "rows_per_s": rows / wall, "rows_per_cpu_s": rows / cpu, "first_batch_ms": 1e3 * first_seconds,
        "masked_per_row": masked / rows,
    }  # fmt: skip


if __name__ == "__main__":
    run_bench("xlme bench loader", LoaderSettings, __doc__, race)
