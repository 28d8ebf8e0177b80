"""Stage `stats`: tables and a page of what was encoded and what training will read, by language and by pair."""

import base64
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.filesize import decimal

from data_prep.parallel import on_root, run_tasks
from data_prep.progress import refuse, shown
from data_prep.store import read_arrow, write_file
from xlme_ds.data.schema import TASKS, Manifest, Shard, read_manifest

TITLES = {"mono": "Languages", "para": "Language pairs"}

# Lower bounds of the bins of lengths in tokens, half an octave (a factor of √2) wide: 1, 2, 4, 5, 8, 11, 16, 22, 32 …
EDGES: tuple[int, ...] = tuple(sorted({int(2 ** (k / 2)) for k in range(45)}))

# Units of text -> the name in encode's counts of those that were lost, by reason.
_LOST = {"documents": "dropped", "paragraphs": "removed", "pairs": "dropped"}

_BEFORE, _AFTER = "#b8c4d6", "#1f5fa8"
_REASONS = ("#1f5fa8", "#e08a3c", "#6aa84f", "#b8548c", "#8a7fc0", "#c9b03c", "#4fa5a5", "#999999")
_STYLE = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}


@dataclass(frozen=True)
class StatsConfig:
    """Show size, tokens, lengths, losses, unknown rate, tokens per character, sampling shares and repeats."""

    encoded: Path
    """Folder that `encode` wrote."""
    data: Path
    """Folder that `mix` wrote from it."""
    out: Path
    """Folder for the page, stats.html."""
    processes: int = 1
    """Worker processes on this machine. Not used under MPI."""


class Line(NamedTuple):
    """One language or pair, or the sum of many.

    Of the documents or pairs that were `read`, encode dropped some, mix found some pairs too long for a row, and
    `units` are left. `available` are the rows or pairs that they fill once, `used` those that training reads.
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
        """The values as people read them, by the headings of a task's table; `packed`: documents were, into rows."""
        name, units = ("language", "documents") if task == "mono" else ("pair", "pairs")
        used = "rows" if task == "mono" and not packed else units
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
            f"{used} used": f"{self.used:,}",
            "repeat": f"{self.used / max(self.available, 1):.2f}×",
        }


def lines_of(encoded_folder: Path, data_folder: Path, task: str) -> list[Line]:
    """One line a language or pair, largest first. Raises ValueError when the folders do not belong together."""
    encoded, mixed = read_manifest(encoded_folder / task), read_manifest(data_folder / task)
    refuse(
        [
            (
                mixed.stage == "mix" and mixed.settings["encoded"] == encoded.fingerprint(),
                f"{data_folder / task} was not mixed from {encoded_folder / task}: name the folder it was mixed from",
            )
        ]
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
                unknown=counts["unknown"],
                characters=counts["characters"],
                share_before=drawn.get("share_before", 0.0),
                share_after=drawn.get("share_after", 0.0),
                used=drawn.get("used", 0),
                available=drawn.get("available", 0),
            )
        )
    return sorted(lines, key=lambda line: (-line.share_before, line.name))


def total(lines: list[Line]) -> Line:
    """The sum over all lines."""
    _, *columns = zip(*lines, strict=True)
    return Line("all", *map(sum, columns))


def length_histograms(folder: Path, manifest: Manifest, processes: int) -> dict[str, np.ndarray]:
    """Lengths in tokens: records in each bin, int64 [len(EDGES)], by language or pair; both sides of a pair together.

    Raises ValueError for a shard that cannot be read.
    """
    sizes = [shard.bytes for shard in manifest.shards]
    counted = run_tasks(partial(_histogram, folder), manifest.shards, sizes, processes, f"lengths {folder.name}")
    histograms = {name: np.zeros(len(EDGES), dtype=np.int64) for name in manifest.counts["by_language"]}
    for shard, counts in zip(manifest.shards, counted, strict=True):
        histograms[shard.name.split("/")[0]] += counts
    return histograms


def _histogram(folder: Path, shard: Shard) -> np.ndarray:
    """Records of one shard in each bin of lengths; only the offsets are read."""
    counts = np.zeros(len(EDGES), dtype=np.int64)
    for batch in read_arrow(folder / shard.name):
        lengths = sum(np.diff(column.offsets.to_numpy()) for column in batch.columns)
        counts += np.bincount(np.searchsorted(EDGES, lengths, side="right") - 1, minlength=len(EDGES))
    return counts


def median(histogram: np.ndarray) -> int:
    """Lower bound of the bin that holds the median; 0 of nothing."""
    cumulative = np.cumsum(histogram)
    return EDGES[int(np.searchsorted(cumulative, cumulative[-1] / 2))] if cumulative[-1] else 0


class LossTable(NamedTuple):
    """Losses of documents, paragraphs or pairs wherever there are some, the largest share first.

    `rows` are cells by heading, the sum of all in the last; `percents` are lost of each of `names` for each reason, the
    reason that lost most first.
    """

    title: str
    rows: list[dict[str, str]]
    names: list[str]
    percents: dict[str, list[float]]


def loss_table(units: str, read: dict[str, int], lost: dict[str, Counter[str]]) -> LossTable:
    """The table of how many `units` of text were read and, by reason, lost, from both by language or pair."""
    names = sorted(read, key=lambda name: (-lost[name].total() / max(read[name], 1), name))
    everything = sum(lost.values(), Counter[str]())
    reasons = sorted(everything, key=lambda reason: (-everything[reason], reason))
    percents = {reason: [100 * lost[name][reason] / max(read[name], 1) for name in names] for reason in reasons}
    rows, heading = [], "pair" if units == "pairs" else "language"
    rows_of_names = [(name, read[name], lost[name]) for name in names]
    for name, number, by_reason in (*rows_of_names, ("all of these", sum(read.values()), everything)):
        lost_of = {reason: f"{count:,} ({count / max(number, 1):.2%})" for reason, count in by_reason.items() if count}
        row = {heading: name, units: f"{number:,}", _LOST[units]: f"{by_reason.total() / max(number, 1):.2%}"}
        rows.append(row | {reason: lost_of.get(reason, "") for reason in reasons})
    return LossTable(f"{units.capitalize()} {_LOST[units]}", rows, names, percents)


def loss_tables(encoded: Manifest) -> list[LossTable]:
    """A table for each kind of thing that something was lost of, under the reasons' names in the counts of encode."""
    tables = []
    for units, lost in _LOST.items():
        by_language = encoded.counts["by_language"].items()
        lossy = {name: counts for name, counts in by_language if f"{units}_in" in counts and any(counts[lost].values())}
        read = {name: counts[f"{units}_in"] for name, counts in lossy.items()}
        if lossy:
            tables.append(loss_table(units, read, {name: Counter(counts[lost]) for name, counts in lossy.items()}))
    return tables


class Section(NamedTuple):
    """The numbers of one task: a line a language, lengths by language in the same order, and losses."""

    task: str
    lines: list[Line]
    lengths: dict[str, np.ndarray]
    losses: list[LossTable]
    packed: bool = False

    @property
    def rows(self) -> list[dict[str, str]]:
        """Cells of every line, and of their sum at the end."""
        return [line.cells(self.task, self.packed) for line in (*self.lines, total(self.lines))]


def run(config: StatsConfig) -> None:
    """Print the tables and write `stats.html`. Raises ValueError when the two folders do not belong together."""
    tasks = on_root(lambda: [task for task in TASKS if (config.data / task / "manifest.json").exists()])
    refuse(
        [
            (
                bool(tasks),
                f"{config.data} holds neither mono/manifest.json nor para/manifest.json: run mix to its end first",
            )
        ]
    )
    sections = [_section(config, task) for task in tasks]
    on_root(lambda: _show(config, sections))


def _section(config: StatsConfig, task: str) -> Section:
    lines = on_root(lambda: lines_of(config.encoded, config.data, task))
    encoded = on_root(lambda: read_manifest(config.encoded / task))
    lengths = length_histograms(config.encoded / task, encoded, config.processes)
    packed = on_root(lambda: "sentences" in read_manifest(config.data / task).settings)
    return Section(task, lines, {line.name: lengths[line.name] for line in lines}, loss_tables(encoded), packed)


def _show(config: StatsConfig, sections: Sequence[Section]) -> None:
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 160)  # a file has room for every column
    for section in sections:
        histograms = [*section.lengths.values(), np.sum(list(section.lengths.values()), axis=0)]
        medians = ({"median tokens": f"{median(histogram):,}+"} for histogram in histograms)
        rows = [cells | middle for cells, middle in zip(section.rows, medians, strict=True)]
        console.print(_table(TITLES[section.task], rows))
        for losses in section.losses:
            console.print(_table(losses.title, losses.rows))
    page = config.out / "stats.html"
    write_file(page, html(sections, read_manifest(config.data / sections[0].task)).encode(), config.out)
    console.print(f"open {shown(str(page))}", soft_wrap=True, markup=False)


def _table(title: str, rows: Sequence[dict[str, str]]) -> object:
    """A table of the terminal; its last row is the sum."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    first, *others = rows[0]
    columns = Column(first, no_wrap=True), *(Column(heading, justify="right") for heading in others)
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row.values(), style="bold" if row is rows[-1] else None)
    return table


def html(sections: Sequence[Section], mixed: Manifest) -> str:
    """The page, with its plots, in one file that needs nothing else."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["inline"] = lambda svg: "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    return environment.get_template("stats.html.jinja").render(
        sections=sections,
        mixed=mixed,
        titles=TITLES,
        share_plot=share_plot,
        length_plot=length_plot,
        loss_plot=loss_plot,
    )


def share_plot(lines: Sequence[Line], alpha: float) -> bytes:
    """Shares before and after α (log scale), repeats, unknown rate, tokens per character; an SVG image."""
    with svg_figure((_width(len(lines)), 7.2), "stats") as (figure, image):
        shares, repeats, unknown, density = figure.subplots(4, 1, sharex=True, height_ratios=[3, 1.4, 1, 1.4])
        x = range(len(lines))
        before, after = [line.share_before for line in lines], [line.share_after for line in lines]
        shares.vlines(x, before, after, color="#cccccc")
        shares.scatter(x, before, s=16, color=_BEFORE, label="natural (α = 1)", zorder=2)
        shares.scatter(x, after, s=16, color=_AFTER, label=f"sampled (α = {alpha:g})", zorder=3)
        shares.set(yscale="log", ylabel="share of the data")
        shares.legend(frameon=False, loc="upper right")
        for axes, values, label in (
            (repeats, [line.used / max(line.available, 1) for line in lines], "repeats"),
            (unknown, [100 * line.unknown / max(line.tokens, 1) for line in lines], "unknown, %"),
            (density, [line.tokens / max(line.characters, 1) for line in lines], "tokens / char"),
        ):
            axes.bar(x, values, color=_AFTER, width=0.7)
            axes.set_ylabel(label)
        repeats.axhline(1, color="#888888", linewidth=0.7, linestyle=":")
        _name_columns(density, [line.name for line in lines])
        for axes in (shares, repeats, unknown, density):
            _rule(axes)
        figure.align_ylabels()
    return image.getvalue()


def length_plot(histograms: dict[str, np.ndarray]) -> bytes:
    """Lengths in tokens (log scale): of all records as bars, and the share of each bin in every language as shade."""
    counts = np.stack(list(histograms.values()), axis=1)
    used = np.flatnonzero(counts.sum(1))
    low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
    shares = counts[low:high] / np.maximum(counts.sum(0), 1)
    with svg_figure((_width(counts.shape[1]), 3.6), "stats") as (figure, image):
        by_name, overall = figure.subplots(1, 2, sharey=True, width_ratios=[6, 1])
        by_name.imshow(shares, aspect="auto", origin="lower", cmap="Blues", interpolation="nearest")
        _name_columns(by_name, list(histograms))
        octaves = [at for at in range(low, high) if EDGES[at] & (EDGES[at] - 1) == 0]
        by_name.set_yticks([at - low for at in octaves], [f"{EDGES[at]:,}" for at in octaves])
        by_name.set_ylabel("tokens, from")
        overall.barh(range(high - low), counts[low:high].sum(1), color=_AFTER, height=0.9)
        overall.set_xlabel("records")
        overall.tick_params(axis="x", rotation=90)
    return image.getvalue()


def loss_plot(table: LossTable) -> bytes:
    """Share of what was read that each reason lost, stacked, by language."""
    with svg_figure((_width(len(table.names)), 3.2), "stats") as (figure, image):
        axes = figure.subplots()
        base = np.zeros(len(table.names))
        for number, (reason, heights) in enumerate(table.percents.items()):
            color = _REASONS[number % len(_REASONS)]
            axes.bar(range(len(heights)), heights, bottom=base, color=color, width=0.7, label=reason)
            base += heights
        axes.set_ylabel("lost, %")
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=8, borderpad=0)
        _rule(axes)
        _name_columns(axes, table.names)
    return image.getvalue()


def _rule(axes: Any) -> None:
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)


def _name_columns(axes: Any, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_xlim(-0.8, len(names) - 0.2)


def _width(columns: int) -> float:
    return max(7.0, 0.155 * columns + 1.6)


@contextmanager
def svg_figure(size: tuple[float, float], salt: str, fonttype: str = "path") -> Iterator[tuple[Any, io.BytesIO]]:
    """A figure to draw into, its size in inches, and where its SVG image will be: the same bytes each time."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": salt, "svg.fonttype": fonttype}):
        figure, image = Figure(figsize=size, layout="constrained"), io.BytesIO()
        yield figure, image
        figure.savefig(image, format="svg", dpi=110, metadata={"Date": None})
