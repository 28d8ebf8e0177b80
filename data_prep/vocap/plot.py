"""The picture of stage `vocap`: every language's curve with the size it was given, and sizes against amounts of
text."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

_CURVE, _CHOSEN = "#c3cddc", "#1f5fa8"
_STYLE = {
    "svg.hashsalt": "vocap",
    "svg.fonttype": "none",  # a third of the size
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def plot(curves: Mapping[str, Sequence[tuple[int, float]]], by_language: Mapping[str, Mapping[str, Any]]) -> bytes:
    """An SVG image; the same bytes for the same numbers."""
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        lines = [by_language[code]["lines"] for code in curves]
        pieces = [by_language[code]["pieces"] for code in curves]
        for curve in curves.values():
            left.plot(*zip(*curve, strict=True), color=_CURVE, linewidth=0.7)
        at = [
            np.interp(n, [size for size, _ in curve], [alp for _, alp in curve])
            for n, curve in zip(pieces, curves.values(), strict=True)
        ]
        left.plot(pieces, at, "o", markersize=2.5, color=_CHOSEN)
        right.plot(lines, pieces, "o", markersize=2.5, color=_CHOSEN)
        for code, x, y in zip(curves, lines, pieces, strict=True):
            right.annotate(code, (x, y), fontsize=5, xytext=(2, 1), textcoords="offset points")
        left.set_xscale("log")
        left.set_xlabel("pieces")
        left.set_ylabel("ALP: mean log-probability of a sentence, nats")
        left.set_title("curves, and the sizes chosen")
        right.set_xscale("log")
        right.set_yscale("log")
        right.set_xlabel("lines of text")
        right.set_ylabel("pieces given")
        right.set_title("allocation")
        image = io.BytesIO()
        figure.savefig(image, format="svg", metadata={"Date": None})
    return image.getvalue()
