"""Computes the numbers of stage `stats`: a line for each language or pair, lengths in tokens, lost text by reason."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.filesize import decimal

from data_prep.parallel import run_tasks
from data_prep.store import read_arrow
from xlme_ds.data.schema import Manifest, Shard, read_manifest

# Lower bounds of the bins of lengths in tokens: 1, 2, 4, 5, 8, 11, 16, 22, 32 … Each is about √2 times the one before.
EDGES: tuple[int, ...] = tuple(sorted({int(2 ** (k / 2)) for k in range(45)}))
# Unit of text -> the key under which encode counts, by reason, the units that were lost.
_DROPPED_KEYS = {"documents": "dropped", "paragraphs": "removed", "pairs": "dropped"}


class StatsLine(NamedTuple):
    """The numbers of one language or pair, or their sums over several.

    Encode read `read` documents or pairs, and dropped `dropped` of them. Mix left out `too_long` more, and `units`
    remain. From these, mix can make `available` rows or items. The training data have `used` rows or items; if these
    are more, some are repeated. `share_before` is the fraction of all available rows or items, `share_after` the
    fraction of all used ones.
    """

    name: str
    bytes: int
    read: int
    units: int
    dropped: int
    too_long: int
    tokens: int
    unknown: int
    characters: int
    share_before: float
    share_after: float
    used: int
    available: int

    def cells(self, task: str, packed: bool = False) -> dict[str, str]:
        """A dict from a column's heading to its human-readable value. `packed` tells whether documents or sentences
        were packed into rows."""
        name, units = ("language", "documents") if task == "mono" else ("pair", "pairs")
        # An item is a sentence, or a document or a piece of one.
        used_units = units if task == "para" else "items" if packed else "rows"
        return {
            name: self.name,
            "size": decimal(self.bytes),
            f"{units} read": f"{self.read:,}",
            "dropped": f"{self.dropped:,}",
            "too long": f"{self.too_long:,}",
            units: f"{self.units:,}",
            "tokens": f"{self.tokens:,}",
            "unknown": f"{self.unknown / max(self.tokens, 1):.3%}",
            "tokens/char": f"{self.tokens / max(self.characters, 1):.3f}",
            "share before α": f"{self.share_before:.3%}",
            "share after α": f"{self.share_after:.3%}",
            f"{used_units} used": f"{self.used:,}",
            "repeat": f"{self.used / max(self.available, 1):.2f}×",
        }


def stats_lines(encoded_folder: Path, data_folder: Path, task: str) -> list[StatsLine]:
    """A line for each language or pair, the largest `share_before` first. Raises ValueError if `data_folder` was not
    mixed from `encoded_folder`."""
    encoded = read_manifest(encoded_folder / task, "`xlme prep encode`")
    mixed = read_manifest(data_folder / task)
    if mixed.stage != "mix" or mixed.settings["encoded"] != encoded.fingerprint():
        raise ValueError(
            f"{data_folder / task} was not mixed from {encoded_folder / task}: name the encoded folder that was mixed"
        )
    units = "documents" if task == "mono" else "pairs"
    lines = []
    for name, counts in encoded.counts["by_language"].items():
        mixed_counts = mixed.counts["by_language"].get(name, {})  # empty if encode dropped all text of the language
        too_long = mixed_counts.get("too_long", 0)
        lines.append(
            StatsLine(
                name=name,
                bytes=counts["bytes"],
                read=counts[f"{units}_in"],
                units=counts[units] - too_long,
                dropped=sum(counts["dropped"].values()),
                too_long=too_long,
                tokens=counts["tokens"],
                unknown=counts["unknown"],
                characters=counts["characters"],
                share_before=mixed_counts.get("share_before", 0.0),
                share_after=mixed_counts.get("share_after", 0.0),
                used=mixed_counts.get("used", 0),
                available=mixed_counts.get("available", 0),
            )
        )
    return sorted(lines, key=lambda line: (-line.share_before, line.name))


def total(lines: list[StatsLine]) -> StatsLine:
    """The sum over all lines."""
    _, *columns = zip(*lines, strict=True)
    return StatsLine("all", *map(sum, columns))


def length_histograms(folder: Path, manifest: Manifest, processes: int) -> dict[str, np.ndarray]:
    """Count the records of each language or pair in each bin of lengths in tokens. Returns counts by name, int64
    [len(EDGES)] each. The length of a pair is the sum of both sides.

    Raises ValueError for a shard that cannot be read.
    """
    sizes = [shard.bytes for shard in manifest.shards]
    by_shard = run_tasks(partial(_histogram, folder), manifest.shards, sizes, processes, f"lengths {folder.name}")
    histograms = {name: np.zeros(len(EDGES), dtype=np.int64) for name in manifest.counts["by_language"]}
    for shard, counts in zip(manifest.shards, by_shard, strict=True):
        histograms[shard.name.split("/")[0]] += counts
    return histograms


def _histogram(folder: Path, shard: Shard) -> np.ndarray:
    counts = np.zeros(len(EDGES), dtype=np.int64)
    for batch in read_arrow(folder / shard.name):
        lengths = sum(np.diff(column.offsets.to_numpy()) for column in batch.columns)
        counts += np.bincount(np.searchsorted(EDGES, lengths, side="right") - 1, minlength=len(EDGES))
    return counts


def median(histogram: np.ndarray) -> int:
    """Lower bound of the bin that holds the median; 0 for an empty histogram."""
    cumulative = np.cumsum(histogram)
    return EDGES[int(np.searchsorted(cumulative, cumulative[-1] / 2))] if cumulative[-1] else 0


class DroppedTextTable(NamedTuple):
    """A table of lost units (documents, paragraphs or pairs) of the languages or language pairs `names`. The name with
    the largest share of lost units comes first.

    `rows` has one dict per table row, from a column's heading to the row's cell; the last row is the sum.
    `percents[reason]` has, for each of `names`, the percentage that was lost for the reason. The reason with the
    largest loss comes first.
    """

    title: str
    rows: list[dict[str, str]]
    names: list[str]
    percents: dict[str, list[float]]


def dropped_text_table(units: str, read: dict[str, int], lost: dict[str, Counter[str]]) -> DroppedTextTable:
    """Make the table of lost `units`: documents, paragraphs or pairs. For each language or pair, `read` has the number
    of units that were read, and `lost` the numbers of lost units by reason."""
    names = sorted(read, key=lambda name: (-lost[name].total() / max(read[name], 1), name))
    lost_in_all = sum(lost.values(), Counter[str]())
    reasons = sorted(lost_in_all, key=lambda reason: (-lost_in_all[reason], reason))
    percents = {reason: [100 * lost[name][reason] / max(read[name], 1) for name in names] for reason in reasons}
    rows, heading = [], "pair" if units == "pairs" else "language"
    rows_of_names = [(name, read[name], lost[name]) for name in names]
    for name, total_read, by_reason in (*rows_of_names, ("all of these", sum(read.values()), lost_in_all)):
        divisor = max(total_read, 1)
        row = {heading: name, units: f"{total_read:,}", _DROPPED_KEYS[units]: f"{by_reason.total() / divisor:.2%}"}
        cells = {reason: f"{count:,} ({count / divisor:.2%})" for reason, count in by_reason.items() if count}
        rows.append(row | dict.fromkeys(reasons, "") | cells)
    return DroppedTextTable(f"{units.capitalize()} {_DROPPED_KEYS[units]}", rows, names, percents)


def dropped_text_tables(encoded: Manifest) -> list[DroppedTextTable]:
    """Make the tables of the documents, paragraphs and pairs that encode lost. Languages, pairs and tables without a
    loss are left out."""
    tables = []
    for units, key in _DROPPED_KEYS.items():
        by_language = encoded.counts["by_language"].items()
        lossy = {name: counts for name, counts in by_language if f"{units}_in" in counts and any(counts[key].values())}
        read = {name: counts[f"{units}_in"] for name, counts in lossy.items()}
        if lossy:
            tables.append(
                dropped_text_table(units, read, {name: Counter(counts[key]) for name, counts in lossy.items()})
            )
    return tables
