"""What every test is told on the command line, and where its results go."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from ..data.schema import write_json
from ..models.text_encoder import Which
from . import tables
from .models import Compared, load


@dataclass(frozen=True)
class Options:
    """What all tests take."""

    models: Annotated[list[Path], tyro.conf.UseAppendAction, tyro.conf.arg(name="model")]
    """Folder of a finished run or of an export; give it several times to compare models."""
    data: Path
    """What the test reads, as said above."""
    random: bool = False
    """Compare with untrained models of the same shape and seed."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the results as JSON instead of tables."""
    out: Path | None = None
    """Folder for <test>.json, <test>.md and, of a test of layers, the plot over them, <test>.png and <test>.svg."""

    def deliver(
        self,
        results: Mapping[str, Any],
        shown: Sequence[tables.Table],
        curves: Sequence[tuple[str, Sequence[float], bool]] = (),
        label: str = "",
    ) -> None:
        """Print, and write into `out`: plot and tables first, the results that `report xtreme` reads last."""
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            if curves:
                tables.plot(curves, label, self.out / results["test"])
            tables.write_text(self.out / f"{results['test']}.md", "\n".join(table.markdown() for table in shown))
            write_json(self.out / f"{results['test']}.json", results)
        if self.as_json:
            json.dump(results, sys.stdout, indent=1, ensure_ascii=False)
            print()
            return
        console = Console(width=None if sys.stdout.isatty() else 120)
        for table in shown:
            table.show(console)


@dataclass(frozen=True)
class EncoderOptions(Options):
    """What tests of an encoder's vectors take."""

    which: Which | None = None
    """Which encoder of a pre-training run; by default the one that it is for, XLM-E's discriminator."""


@dataclass(frozen=True)
class LayerOptions(EncoderOptions):
    """What tests of every layer take."""

    layer: int | None = None
    """Layer that the tables quote, 0 for the embeddings; by default three quarters of the depth, the paper's 9 of
    12."""

    def load(self) -> list[Compared]:
        """The models."""
        return load(self.models, self.layer, self.random, self.which)
