"""What the terminal shows of a run: a rich progress bar, or plain lines when the output is no terminal."""

import sys
from collections.abc import Mapping
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Console:
    """Shows logged steps and evaluations; only rank 0 has one."""

    def __init__(self, steps: int, start: int, plain_every: int, objective: Mapping[str, Any]):
        """`objective`: it in words (`objectives.described`), whose terms are explained once; empty in fine-tuning."""
        self.terms = objective.get("terms", ())
        for name in self.terms:
            quantity = objective["quantities"][name]
            print(f"{name}: {quantity['title']} ({quantity['unit']}), {quantity['task']}", flush=True)
        self.plain_every = plain_every
        self.shown = start
        self.progress = None
        if sys.stderr.isatty():
            self.progress = Progress(
                TextColumn("{task.fields[line]}"), BarColumn(), TimeRemainingColumn(), transient=True
            )
            self.task = self.progress.add_task("train", total=steps, completed=start, line="starting")
            self.progress.start()

    def step(self, values: dict[str, Any], steps: int) -> None:
        """A logged step."""
        line = f"step {values['step']}/{steps}  loss {values['loss']:.3f}  {self._terms(values)}  {values['tokens_per_s']:,.0f} tokens/s"
        if self.progress is not None:
            self.progress.update(self.task, completed=values["step"], line=line)
        elif values["step"] - self.shown >= self.plain_every or values["step"] == steps:
            self.shown = values["step"]
            print(line, flush=True)

    def evaluation(self, values: dict[str, Any], steps: int) -> None:
        """An evaluation on held-out text."""
        aucs = "  ".join(
            f"AUC {key.removeprefix('auc_')} {values[key]:.3f}" for key in values if key.startswith("auc_")
        )
        line = f"step {values['step']}/{steps}  held-out text: {self._terms(values)}  {aucs}"
        (self.progress.console.print if self.progress is not None else print)(line)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.progress is not None:
            self.progress.stop()

    def _terms(self, values: dict[str, Any]) -> str:
        return "  ".join(f"{name} {values[name]:.3f}" for name in self.terms if name in values)
