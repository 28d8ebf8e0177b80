"""The look of the figures: matplotlib draws, and the SVG takes its colours and font from the page.

Colours become CSS variables of the template, so that one picture serves the light and the dark page.
"""

import io
import re

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Drawn colour -> the template's variable. Every colour a figure uses is one of these.
INK, MUTED, GRID, SURFACE = "#1f2430", "#6b7280", "#e3e6eb", "#fefefe"
MONO, PARA, TOTAL = "#2f6fdb", "#d9622b", "#5b5f97"
_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", SURFACE: "surface", MONO: "mono", PARA: "para", TOTAL: "total"}

_STYLE = {
    "svg.fonttype": "none",  # text stays text: the page's font, selectable, small
    "svg.hashsalt": "xlme_ds",  # the same data gives the same bytes
    "font.size": 11,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.solid_capstyle": "round",
}


def new_axes(width: float, height: float) -> Axes:
    """Axes of a new figure of `width` by `height` inches in the report's style."""
    with matplotlib.rc_context(_STYLE):
        return Figure(figsize=(width, height), layout="constrained").add_subplot()


def svg(axes: Axes, label: str) -> Markup:
    """The figure of `axes` as an `<svg>` element that scales with the page; `label` is read out in its place."""
    buffer = io.StringIO()
    figure = axes.get_figure(root=True)
    assert figure is not None
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r' id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|PathCollection)_\d+"', "", text)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.S)  # it would style the whole page
    text = re.sub(r" font-family: [^;]*;", "", text)
    text = re.sub(r'width="([\d.]+)pt" height="[\d.]+pt"', "", text, count=1)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    # Safe as it stands: matplotlib escapes the texts it draws.
    return Markup(text.replace("<svg", Markup('<svg role="img" aria-label="{}"').format(label), 1))
