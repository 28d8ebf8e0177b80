"""The plots of `bench.scaling`."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

LABELS = {
    "layers": "layers of the discriminator",
    "width": "width",
    "tokens": "tokens of a row",
    "vocabulary": "vocabulary",
}


def draw(found: dict[str, Any], out: Path) -> None:
    """Write cost.svg, one panel an axis, and gpus.svg, the computed curve."""
    with matplotlib.rc_context({"svg.hashsalt": "xlme_ds", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.6, 6.4), layout="constrained")
        for axes, name in zip(figure.subplots(2, 2).flatten(), LABELS, strict=True):
            values = [one[name] for one in found[name]]
            # Per token: rows of other lengths do not fill the step's positions alike.
            measured = [1e6 * one["step_s"] / one["positions"] for one in found[name]]
            counted = [1e6 * one["predicted_s"] / one["positions"] for one in found[name]]
            axes.plot(values, measured, "o-", markersize=4, label="measured")
            axes.plot(values, counted, "--", linewidth=0.9, color="0.4", label="in proportion to operations")
            axes.set_xscale("log", base=2)
            axes.set_xticks(values, [f"{value:,}" for value in values])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.set_xlabel(LABELS[name])
            axes.set_ylabel("µs a token")
            axes.grid(axis="y", alpha=0.3)
            axes.legend(frameon=False, fontsize=8)
        figure.savefig(out / "cost.svg", metadata={"Date": None, "Creator": None})
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        for zero in ("zero1", "zero2", "zero3"):
            rows = [one for one in found["computed"] if one["zero"] == zero]
            axes.plot(
                [one["gpus"] for one in rows], [100 * one["efficiency"] for one in rows], "o-", markersize=4, label=zero
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks([one["gpus"] for one in rows], [str(one["gpus"]) for one in rows])
        axes.minorticks_off()
        axes.set_ylim(0, 100)
        axes.set_xlabel("GPUs (computed)")
        axes.set_ylabel("% of a step not spent sending")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
        figure.savefig(out / "gpus.svg", metadata={"Date": None, "Creator": None})
