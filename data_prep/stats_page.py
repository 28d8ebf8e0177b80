"""The page of stage `stats`: plots and tables in one self-contained HTML file."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.stats_table import TITLES, Line, columns, total
from xlme_ds.data.schema import Manifest

_BEFORE, _AFTER = "#b8c4d6", "#1f5fa8"
_SVG_STYLE = {
    "svg.hashsalt": "stats",
    "svg.fonttype": "path",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def plot(lines: Sequence[Line], alpha: float, kind: str = "svg") -> bytes:
    """Shares before and after α (log scale), repeats, unknown rate, tokens per character; an `svg` or `png` image."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SVG_STYLE):
        figure = Figure(figsize=(max(7.0, 0.155 * len(lines) + 1.6), 7.2), layout="constrained")
        shares, repeats, unknown, density = figure.subplots(4, 1, sharex=True, height_ratios=[3, 1.4, 1, 1.4])
        x = range(len(lines))
        shares.vlines(x, *zip(*[(line.share_before, line.share_after) for line in lines], strict=True), color="#cccccc")
        shares.scatter(x, [line.share_before for line in lines], s=16, color=_BEFORE, label="natural (α = 1)", zorder=2)
        shares.scatter(
            x, [line.share_after for line in lines], s=16, color=_AFTER, label=f"sampled (α = {alpha:g})", zorder=3
        )
        shares.set_yscale("log")
        shares.set_ylabel("share of the data")
        shares.legend(frameon=False, loc="upper right")
        for axes, values, label in (
            (repeats, [line.repeat for line in lines], "repeats"),
            (unknown, [100 * line.unknown_rate for line in lines], "unknown, %"),
            (density, [line.tokens_per_character for line in lines], "tokens / char"),
        ):
            axes.bar(x, values, color=_AFTER, width=0.7)
            axes.set_ylabel(label)
        repeats.axhline(1, color="#888888", linewidth=0.7, linestyle=":")
        density.set_xticks(list(x), [line.name for line in lines], rotation=90)
        density.set_xlim(-0.8, len(lines) - 0.2)
        for axes in (shares, repeats, unknown, density):
            axes.grid(axis="y", color="#eeeeee")
            axes.set_axisbelow(True)
        figure.align_ylabels()
        image = io.BytesIO()
        figure.savefig(image, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)
    return image.getvalue()


def html(tables: dict[str, list[Line]], mixed: Manifest) -> str:
    """The page, in one file that needs nothing else."""
    from jinja2 import Environment

    template = (Path(__file__).parent / "stats.html.jinja").read_text(encoding="utf-8")
    alpha = mixed.settings["alpha"]
    sections = [
        {
            "title": TITLES[task],
            "columns": columns(task),
            "rows": [line.cells() for line in lines],
            "total": total(lines).cells(),
            "plot": "data:image/svg+xml;base64," + base64.b64encode(plot(lines, alpha)).decode(),
        }
        for task, lines in tables.items()
    ]
    facts: dict[str, Any] = {
        "α": f"{alpha:g}",
        "row": f"{mixed.settings['row_tokens']} tokens",
        "vocabulary": f"{mixed.vocabulary_size:,} ids",
        "seed": mixed.settings["seed"],
    }
    return (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(template)
        .render(sections=sections, facts=facts)
    )
