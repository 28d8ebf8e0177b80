"""The numbers of stage `stats` by language or pair: size, tokens, shares, lengths and losses, as tables of text."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.parallel import run_tasks
from xlme_ds.data.schema import Manifest, read_manifest

TITLES = {"mono": "Languages", "para": "Language pairs"}

# Lower bounds of the bins of lengths in tokens, half an octave (a factor of √2) wide: 1, 2, 4, 5, 8, 11, 16, 22, 32 …
EDGES: tuple[int, ...] = tuple(sorted({int(2 ** (k / 2)) for k in range(45)}))

# Units of text -> the name in encode's counts of those that were lost, by reason.
_LOST = {"documents": "dropped", "paragraphs": "removed", "pairs": "dropped"}


@dataclass(frozen=True)
class Line:
    """One language or pair. Of the documents or pairs that were `read`, encode dropped some, mix found some pairs too
    long for a row, and `units` are left; `used` are the rows or pairs that training reads."""

    name: str
    bytes: int
    read: int
    units: int
    dropped: int
    too_long: int
    tokens: int
    unknown_rate: float
    tokens_per_character: float
    share_before: float
    share_after: float
    used: int
    repeat: float

    def cells(self) -> tuple[str, ...]:
        """The values as people read them, in the order of `columns`."""
        return (
            self.name,
            size_text(self.bytes),
            f"{self.read:,}",
            f"{self.dropped:,}",
            f"{self.too_long:,}",
            f"{self.units:,}",
            f"{self.tokens:,}",
            f"{self.unknown_rate:.3%}",
            f"{self.tokens_per_character:.3f}",
            f"{self.share_before:.3%}",
            f"{self.share_after:.3%}",
            f"{self.used:,}",
            f"{self.repeat:.2f}×",
        )


def columns(task: str) -> tuple[str, ...]:
    """Headings of a task's table."""
    name, units, used = ("language", "documents", "rows used") if task == "mono" else ("pair", "pairs", "pairs used")
    counts = (f"{units} read", "dropped", "too long", units, "tokens", "unknown", "tokens/char")
    return (name, "size", *counts, "share before α", "share after α", used, "repeat")


def lines_of(encoded_folder: Path, data_folder: Path, task: str) -> list[Line]:
    """One line a language or pair, largest first. Raises ValueError when the folders do not belong together."""
    encoded, mixed = read_manifest(encoded_folder / task), read_manifest(data_folder / task)
    if mixed.stage != "mix" or mixed.settings["encoded"] != encoded.fingerprint():
        raise ValueError(
            f"{data_folder / task} was not mixed from {encoded_folder / task}: name the folder it was mixed from"
        )
    units = "documents" if task == "mono" else "pairs"
    lines = []
    for name, counts in encoded.counts["by_language"].items():
        drawn = mixed.counts["by_language"].get(name, {})  # without those of which everything was dropped
        too_long = drawn.get("too_long", 0)
        lines.append(
            Line(
                name=name,
                bytes=counts["bytes"],
                read=counts[f"{units}_in"],
                units=counts[units] - too_long,
                dropped=sum(counts["dropped"].values()),
                too_long=too_long,
                tokens=counts["tokens"],
                unknown_rate=counts["unknown"] / max(counts["tokens"], 1),
                tokens_per_character=counts["tokens"] / max(counts["characters"], 1),
                share_before=drawn.get("share_before", 0.0),
                share_after=drawn.get("share_after", 0.0),
                used=drawn.get("used", 0),
                repeat=drawn.get("repeat", 0.0),
            )
        )
    return sorted(lines, key=lambda line: (-line.share_before, line.name))


def total(lines: list[Line]) -> Line:
    """The sum over all lines; rates are of all tokens."""
    sums = {key: sum(getattr(line, key) for line in lines) for key in Line.__dataclass_fields__ if key != "name"}
    tokens = max(sums["tokens"], 1)
    characters = sum(line.tokens / line.tokens_per_character for line in lines if line.tokens)
    available = sum(line.used / line.repeat for line in lines if line.repeat)
    sums["unknown_rate"] = sum(line.unknown_rate * line.tokens for line in lines) / tokens
    sums["tokens_per_character"] = sums["tokens"] / max(characters, 1)
    sums["repeat"] = sums["used"] / available if available else 0.0
    return Line("all", **sums)


def size_text(number: int) -> str:
    """Bytes with a decimal unit."""
    if number < 1000:
        return f"{number} B"
    power = min((len(str(number)) - 1) // 3, 4)
    return f"{number / 1000**power:.1f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def length_histograms(folder: Path, manifest: Manifest, processes: int) -> dict[str, np.ndarray]:
    """Lengths in tokens: records in each bin, int64 [len(EDGES)], by language or pair; both sides of a pair together.

    Raises ValueError for a shard that cannot be read.
    """
    names = [shard.name for shard in manifest.shards]
    sizes = [shard.bytes for shard in manifest.shards]
    counted = run_tasks(partial(_histogram, folder), names, sizes, processes, f"lengths {folder.name}")
    found = {name: np.zeros(len(EDGES), dtype=np.int64) for name in manifest.counts["by_language"]}
    for name, counts in zip(names, counted, strict=True):
        found[name.split("/")[0]] += counts
    return found


def _histogram(folder: Path, name: str) -> np.ndarray:
    """Of one shard, from its offsets alone."""
    counts = np.zeros(len(EDGES), dtype=np.int64)
    try:
        with pa.memory_map(str(folder / name)) as file:
            reader = pa.ipc.open_file(file)
            for batch in map(reader.get_batch, range(reader.num_record_batches)):
                lengths = sum(np.diff(column.offsets.to_numpy()) for column in batch.columns)
                counts += np.bincount(np.searchsorted(EDGES, lengths, side="right") - 1, minlength=len(EDGES))
    except pa.ArrowInvalid as error:
        raise ValueError(f"{folder / name} cannot be read ({error}): check the folder with verify") from None
    return counts


def median(histogram: np.ndarray) -> int:
    """Lower bound of the bin that holds the median; 0 of nothing."""
    cumulative = np.cumsum(histogram)
    return EDGES[int(np.searchsorted(cumulative, cumulative[-1] / 2))] if cumulative[-1] else 0


class Loss(NamedTuple):
    """One language or pair: how many were `read`, and how many of them each reason `lost`."""

    name: str
    read: int
    lost: dict[str, int]

    def percent(self, reason: str) -> float:
        """Lost for this reason, of those read."""
        return 100 * self.lost.get(reason, 0) / max(self.read, 1)

    @property
    def share(self) -> float:
        """Lost for any reason, of those read."""
        return sum(self.lost.values()) / max(self.read, 1)


class LossTable(NamedTuple):
    """Losses of documents, paragraphs or pairs wherever there are some, the largest share first, and as cells."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    """Cells of every loss, and of their sum at the end: name, read, share lost, each reason's number and share."""
    losses: list[Loss]
    reasons: list[str]
    """The one that lost most first."""


def loss_table(units: str, found: list[Loss]) -> LossTable:
    """The table of the losses of `units` of text."""
    losses = sorted(found, key=lambda loss: (-loss.share, loss.name))
    lost = sum((Counter(loss.lost) for loss in losses), Counter[str]())
    reasons = sorted(lost, key=lambda reason: (-lost[reason], reason))
    rows = []
    for loss in (*losses, Loss("all of these", sum(loss.read for loss in losses), lost)):
        each = ((loss.lost.get(reason), loss.percent(reason)) for reason in reasons)
        cells = (f"{number:,} ({percent:.2f}%)" if number else "" for number, percent in each)
        rows.append((loss.name, f"{loss.read:,}", f"{loss.share:.2%}", *cells))
    columns = ("pair" if units == "pairs" else "language", units, _LOST[units], *reasons)
    return LossTable(f"{units.capitalize()} {_LOST[units]}", columns, rows, losses, reasons)


def loss_tables(encoded: Manifest) -> list[LossTable]:
    """A table for each kind of thing that something was lost of, under the reasons' names in the counts of encode."""
    tables = []
    for units, lost in _LOST.items():
        found = [
            Loss(name, counts[f"{units}_in"], counts[lost])
            for name, counts in encoded.counts["by_language"].items()
            if f"{units}_in" in counts and any(counts[lost].values())
        ]
        if found:
            tables.append(loss_table(units, found))
    return tables
