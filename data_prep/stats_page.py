"""The page of stage `stats`: plots and tables in one self-contained HTML file."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.stats_figures import length_plot, loss_plot, share_plot
from data_prep.stats_losses import LossTable
from data_prep.stats_table import TITLES, Line, columns, total
from xlme_ds.data.schema import Manifest


@dataclass(frozen=True)
class Section:
    """What the page says of one task: a line a language, lengths by language in the same order, and losses."""

    task: str
    lines: Sequence[Line]
    lengths: dict[str, np.ndarray]
    losses: Sequence[LossTable]


def html(sections: Sequence[Section], mixed: Manifest) -> str:
    """The page, in one file that needs nothing else."""
    from jinja2 import Environment

    template = (Path(__file__).parent / "stats.html.jinja").read_text(encoding="utf-8")
    facts: dict[str, Any] = {
        "α": f"{mixed.settings['alpha']:g}",
        "row": f"{mixed.settings['row_tokens']} tokens",
        "vocabulary": f"{mixed.vocabulary_size:,} ids",
        "seed": mixed.settings["seed"],
    }
    return (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(template)
        .render(sections=[_blocks(section, mixed.settings["alpha"]) for section in sections], facts=facts)
    )


def _blocks(section: Section, alpha: float) -> dict[str, Any]:
    """The plots and tables of one task, as the template has them."""
    units = "documents" if section.task == "mono" else "pairs"
    main = {
        "columns": columns(section.task),
        "rows": [line.cells() for line in section.lines],
        "total": total(section.lines).cells(),
    }
    blocks = [
        {
            "plot": _inline(share_plot(section.lines, alpha)),
            "words": "Shares, repeats, unknown rate, tokens per character",
        },
        {"table": main},
        {"title": f"Lengths of {units}", "plot": _inline(length_plot(section.lengths)), "words": "Tokens by language"},
    ]
    for losses in section.losses:
        *rows, total_row = losses.rows
        table = {"columns": losses.columns, "rows": rows, "total": total_row}
        blocks.append({"title": losses.title, "plot": _inline(loss_plot(losses)), "words": "Share lost by reason"})
        blocks.append({"table": table})
    return {"title": f"{TITLES[section.task]} ({len(section.lines)})", "blocks": blocks}


def _inline(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
