"""The run's records: `metrics.jsonl`, `heldout.jsonl` and TensorBoard events, continued exactly on resume."""

import json
import os
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class MetricsLog:
    """Appends lines to a JSON-lines file and the same values to TensorBoard. Only rank 0 has one."""

    def __init__(self, run: Path, name: str, steps_done: int):
        """Continue `run/name.jsonl` after `steps_done` steps: later lines, of a run that was killed, are dropped."""
        self.name = name
        self.path = run / f"{name}.jsonl"
        kept = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= steps_done:
                        kept.append(line + "\n")
                except ValueError:  # the half-written last line of a run that was killed
                    break
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self.path)
        self.board = SummaryWriter(str(run / "tensorboard" / name), purge_step=steps_done + 1)

    def write(self, values: dict[str, Any]) -> None:
        """One line; `values` holds `step` and numbers."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        for key, value in values.items():
            if key != "step":
                self.board.add_scalar(key, value, values["step"])

    def close(self) -> None:
        """Flush what TensorBoard holds back."""
        self.board.close()
