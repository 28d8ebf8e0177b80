"""The loader next to its peers: rows a second, and the time to the first batch.

    python -m bench.loader --data DIR [--quick] [--json]     # DIR: what `data_prep mix` wrote

A pass goes from opening the data to its last row, in one process without workers, with one thread of torch and cached
files. The contenders run in turns. A peer that is not installed is left out, and named.

Lean, a peer makes the batch that the model takes by the least work that we could think of: masks drawn with 15% for
each token from torch's generator, positions and segments computed from the ids of a whole batch at once. Customary, it
is read row by row through torch's DataLoader, and transformers' DataCollatorForLanguageModeling masks (no positions, no
segments). Bare is reading alone. Their rows lie on the disk in the order in which they are read, which is kind to them.
Ours has masks that are exact and repeatable (15% of each item, without replacement, a function of the row's number),
and checks every shard's SHA-256 before it is used; the others check nothing.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro
from torch import Tensor
from torch.utils.data import DataLoader

from bench.workers import Figures, listing
from xlme_ds.config import DataConfig
from xlme_ds.data.loader import Loader
from xlme_ds.data.schema import BOS, EOS, PAD, TASKS, UNK
from xlme_ds.data.shards import RowStore

A_TASK = 16  # rows of each task a micro-batch, as Base has them
SIZE = 2 * A_TASK
MASK_FRACTION = 0.15
OURS = "ours"
KINDS = ("lean", "bare", "customary")
Made = tuple[Tensor, ...]
"""ids [B, T]; unless bare, masked positions [M]; if lean, positions and segments [B, T]; all int64."""


@dataclass(frozen=True)
class LoaderSettings:
    """What is measured."""

    data: Path  # a mixed folder, whose first rows are read
    rows: int = 16_384  # of each task
    rounds: int = 5  # of which the medians are taken
    quick: bool = False  # 2,048 rows of each task, fewer rounds
    json: bool = False  # print JSON


def our_batches(data: Path, rows: int, kind: str) -> Iterator[Made]:
    """One pass of ours, opened anew."""
    if kind == "bare":
        stores = [RowStore(data / task) for task in TASKS]
        for first in range(0, rows, A_TASK):
            parts = [store.read(np.arange(first, first + A_TASK)).tokens for store in stores]
            yield (torch.from_numpy(np.concatenate(parts).astype(np.int64)),)
        return
    loader = Loader(data, DataConfig(A_TASK, A_TASK, A_TASK), 1, MASK_FRACTION)
    for step in range(rows // A_TASK):
        (batch,) = loader.step(step)
        yield batch.tokens_BT, batch.masked_M, batch.positions_BT, batch.segments_BT


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


def peer_batch(kind: str, rows: Any) -> Made:
    """A batch of int32 ids [B, T]; customary, the collator makes it of examples, and the ids that it replaced are put
    back for the sum."""
    if kind == "customary":
        made = collator()([{"input_ids": row, "special_tokens_mask": row <= UNK} for row in rows])
        masked = made["labels"] >= 0
        return torch.where(masked, made["labels"], made["input_ids"]), masked.flatten().nonzero().squeeze(1)
    ids = np.asarray(rows)
    tokens = torch.from_numpy(ids.astype(np.int64))
    if kind == "bare":
        return (tokens,)
    chosen = (torch.rand(tokens.shape) < MASK_FRACTION) & (tokens > UNK)
    begins, used, column = ids == BOS, ids != PAD, np.arange(ids.shape[1])
    segments = np.cumsum(begins, axis=1) * used
    positions = (column - np.maximum.accumulate(np.where(begins, column, 0), axis=1)) * used
    return tokens, chosen.flatten().nonzero().squeeze(1), torch.from_numpy(positions), torch.from_numpy(segments)


def _write_megatron(folder: Path, tokens: np.ndarray) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder.mkdir()
    builder = IndexedDatasetBuilder(str(folder / "rows.bin"), dtype=np.int32)
    for row in torch.from_numpy(tokens):
        builder.add_item(row)
        builder.end_document()
    builder.finalize(str(folder / "rows.idx"))


def _open_megatron(folder: Path) -> Any:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(str(folder / "rows"), mmap=True)


def _write_datasets(folder: Path, tokens: np.ndarray) -> None:
    from datasets import Dataset, Features, List, Value

    features = Features({"tokens": List(Value("int32"), length=tokens.shape[1])})
    Dataset.from_dict({"tokens": tokens}, features=features).save_to_disk(str(folder))


def _open_datasets(folder: Path) -> Any:
    from datasets import load_from_disk

    return load_from_disk(str(folder)).with_format("numpy")


class LoaderPeer(NamedTuple):
    """A library that stores a row an index, memory mapped or in files of its own."""

    needs: str  # the module that must be there, and …
    package: str  # … what brings it
    write: Callable[[Path, np.ndarray], None]  # store the rows, [N, T] in reading order
    open: Callable[[Path], Any]  # the dataset; an item is a row of ids, alone or as `tokens`

    def missing(self) -> str:
        """Why it cannot run here; empty where it can."""
        absent = [module for module in (self.needs, "transformers") if find_spec(module) is None]
        return f"left out, module {absent[0]} is not there: pip install {self.package}" if absent else ""

    def batches(self, folder: Path, kind: str) -> Iterator[Made]:
        """One pass over the rows from front to back, opened anew; of `datasets`, unless customary, by slices."""
        data = self.open(folder)

        def together(rows: list[Any]) -> Made:
            return peer_batch(kind, [row["tokens"] if isinstance(row, dict) else row for row in rows])

        if self.needs == "datasets" and kind != "customary":
            for first in range(0, len(data), SIZE):
                yield peer_batch(kind, data[first : first + SIZE]["tokens"])
        else:
            yield from DataLoader(data, SIZE, collate_fn=together)


PEERS = {
    "datasets": LoaderPeer("datasets", "datasets transformers tokenizers", _write_datasets, _open_datasets),
    "megatron indexed dataset": LoaderPeer("megatron", "--no-deps megatron-core", _write_megatron, _open_megatron),
}


def in_training_order(data: Path, rows: int) -> np.ndarray:
    """Tokens int32 [2 · rows, T] as the peers store them: batch after batch, 16 rows of each task in each."""
    parts = [RowStore(data / task).read(np.arange(rows)).tokens for task in TASKS]
    row_tokens = parts[0].shape[1]
    return np.concatenate([part.reshape(-1, A_TASK, row_tokens) for part in parts], axis=1).reshape(-1, row_tokens)


def race(data: Path, rows: int, rounds: int, scratch: Path) -> Figures:
    """Every contender that is there, in turns."""
    tokens = in_training_order(data, rows)
    missing = {name: why for name, peer in PEERS.items() if (why := peer.missing())}
    contenders: dict[str, Callable[[str], Iterator[Made]]] = {OURS: partial(our_batches, data, rows)}
    peers = [name for name in PEERS if name not in missing]
    for name in peers:
        folder = scratch / name.split()[0]
        PEERS[name].write(folder, tokens)
        contenders[name] = partial(PEERS[name].batches, folder)
    turns: dict[tuple[str, str], list[Figures]] = {}
    for turn in range(rounds + 1):
        for name, batches in contenders.items():
            for kind in KINDS[:2] if name == OURS else KINDS:
                figures = one_pass(batches, kind)
                if (sum_of := figures.pop("sum")) != int(tokens.sum(dtype="int64")):
                    raise ValueError(f"{name} read other rows: their ids add up to {sum_of}")
                if turn:  # the first one warms caches
                    turns.setdefault((name, kind), []).append(figures)
    medians: Figures = {name: {} for name in contenders}
    for (name, kind), found in turns.items():
        medians[name][kind] = {figure: statistics.median(one[figure] for one in found) for figure in found[0]}

    def ratio(kind: str, figure: str, ours: str = "lean") -> float | None:
        """Ours over the best peer's, the median of the turns' ratios."""
        if not peers:
            return None
        best = max(peers, key=lambda name: medians[name][kind][figure])
        both = zip(turns[OURS, ours], turns[best, kind], strict=True)
        return statistics.median(one[figure] / other[figure] for one, other in both)

    return {
        "ratio_vs_best_peer": ratio("lean", "rows_per_s"),
        "ratio_vs_best_peer_in_cpu_time": ratio("lean", "rows_per_cpu_s"),
        "ratio_vs_best_customary": ratio("customary", "rows_per_s"),
        "ratio_vs_best_bare": ratio("bare", "rows_per_s", "bare"),
        "contenders": medians,
        "left_out": missing,
        "rows": len(tokens),
    }


def one_pass(batches: Callable[[str], Iterator[Made]], kind: str) -> Figures:
    """Rows a second on the clock and of CPU time, and milliseconds to the first batch."""
    total, rows, first, masked = 0, 0, 0.0, 0
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in batches(kind):
        first = first or time.perf_counter() - wall
        rows += len(batch[0])
        total += int(batch[0].sum())
        masked += batch[1].numel() if len(batch) > 1 else 0
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    speed = {"rows_per_s": rows / wall, "rows_per_cpu_s": rows / cpu, "first_batch_ms": 1e3 * first}
    return speed | {"masked_per_row": masked / rows, "sum": total}


def main() -> None:
    """Measure and print the figures, or JSON."""
    settings = tyro.cli(LoaderSettings, description=__doc__)
    rows, rounds = (min(settings.rows, 2048), 3) if settings.quick else (settings.rows, settings.rounds)
    torch.set_num_threads(1)
    load = round(os.getloadavg()[0], 2)
    try:
        with tempfile.TemporaryDirectory() as scratch, redirect_stdout(sys.stderr):
            figures = race(settings.data, rows, rounds, Path(scratch)) | {"load_before": load}
    except (ValueError, OSError) as error:
        sys.exit(f"bench.loader: error: {error}")
    print(json.dumps(figures, indent=1) if settings.json else listing(figures))


if __name__ == "__main__":
    main()
