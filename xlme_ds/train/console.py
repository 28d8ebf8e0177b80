"""Shows a run in the terminal."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from ..cli import format_duration, format_number


class Console:
    """Shows logged steps and evaluations; only rank 0 has one. A terminal shows a bar, any other output gets a line for
    each logged step."""

    def __init__(self, steps: int, start: int, objective: Mapping[str, Any] | None):
        """`objective`: the result of `objectives.describe`; None in fine-tuning, whose loss has no terms."""
        self.steps = steps
        self.objective: Mapping[str, Any] = objective or {"terms": (), "quantities": {}}
        self.progress: Progress | None = None
        self.show: Callable[[str], None] = print
        if sys.stdout.isatty():
            line_column = TextColumn(
                "{task.fields[line]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
            )
            self.progress = Progress(line_column, BarColumn(10), TextColumn("{task.fields[left]}"), transient=True)
            self.task = self.progress.add_task("train", total=steps, completed=start, line="starting", left="")
            self.progress.start()
            self.show = self.progress.console.print

    def step(self, values: dict[str, Any]) -> None:
        """Show a logged step."""
        step = f"{values['step']}/{self.steps}"
        loss = f"loss {values['loss']:.3f}"
        speed = f"{format_number(values['tokens_per_s'])} tokens/s"
        peak = f"{values['peak_fraction']:.0%} of matmul" if "peak_fraction" in values else ""
        left = f"{format_duration(values['seconds_left'])} left"
        if self.progress is not None:
            line = "  ".join(filter(None, (step, loss, speed, peak)))
            self.progress.update(self.task, line=line, completed=values["step"], left=left)
            return
        parts = [f"step {step}", loss, self._terms(values), f"lr {values['lr']:.2e}", speed, peak]
        parts += [f"data {values['data_wait']:.1%}", f"{values['memory_gib']:.1f} GiB", left]
        print("  ".join(filter(None, parts)), flush=True)

    def evaluation(self, values: dict[str, Any]) -> None:
        """Show an evaluation on held-out text."""
        aucs = ", ".join(f"{key.removeprefix('auc_')} {values[key]:.3f}" for key in values if key.startswith("auc_"))
        aucs = f"AUC {aucs} (chance 0.5)" if aucs else ""
        line = f"step {values['step']}/{self.steps}  held-out text: {self._terms(values)}  {aucs}".rstrip()
        self.show(line)

    def dimensions(self, values: Mapping[str, float], warning: str) -> None:
        """Show the effective number of dimensions of each layer's token states, and the warning if there is one."""
        layers = [f"{value:.0f}" for name, value in values.items() if name != "step"]
        self.show(f"step {values['step']}/{self.steps}  dimensions by layer: {', '.join(layers)}")
        if warning:
            self.show(f"WARNING: step {values['step']}: {warning}")

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self.progress is not None:
            self.progress.stop()

    def _terms(self, values: dict[str, Any]) -> str:
        """The text of the terms in `values`. A unigram model's loss follows each term that can be compared with it."""
        shown = []
        for name in filter(values.__contains__, self.objective["terms"]):
            quantity = self.objective["quantities"][name]
            unigram = values.get(f"unigram_nll_{quantity['task']}")
            comparable = unigram is not None and quantity["unigram"]
            shown.append(f"{name} {values[name]:.3f}" + (f" (unigram {unigram:.2f})" if comparable else ""))
        return "  ".join(shown)
