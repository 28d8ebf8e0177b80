"""A training run of the fault campaign, and whether it ended as the one that was left alone."""

import contextlib
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - loaded here once, with much of torch, for all ranks to come
import torch

from bench.faults_ranks import Launched, Ranks, Result
from xlme_ds import pretrain
from xlme_ds.audit import examine
from xlme_ds.checkpoint.checkpoints import Checkpoints
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.engine.engine import Engine, StepStats
from xlme_ds.engine.pipeline_engine import PipelineEngine
from xlme_ds.evaluate import showcase  # noqa: F401
from xlme_ds.report import page
from xlme_ds.train import run as _run  # noqa: F401
from xlme_ds.train.run_folder import RunFolder

STEPS, SAVE_EVERY = 24, 4
LAYOUTS = {
    "zero1": ["--engine.deepspeed", "zero1"],
    "zero3": ["--engine.deepspeed", "zero3"],
    "pipeline": ["--engine.kind", "pipeline", "--engine.deepspeed", "pipe_zero1", "--engine.pipeline-stages", "2"],
}
_SETTINGS = {
    "model.width": 32,
    "model.heads": 4,
    "model.feed-forward": 64,
    "model.max-positions": 32,
    "model.discriminator-layers": 2,
    "data.mono-rows": 8,
    "data.para-rows": 4,
    "data.micro-batch": 2,
    "engine.precision": "fp32",
    "optimizer.warmup-steps": 4,
    "train.steps": STEPS,
    "train.log-every": 1,
    "train.save-every": SAVE_EVERY,
    "train.keep-last": 3,
    "train.keep-every": 0,
    "train.max-bad-steps": 3,
}
_TIMED = ("tokens_per_s", "flops_per_s")
Patch = Callable[[int], None]
"""Run in a rank before the command: makes losses or gradients bad there."""


def leaving_out(steps: tuple[int, ...]) -> Patch:
    """Steps that are not taken at all: what a run with bad ones must equal."""

    def apply(rank: int) -> None:
        for kind in (Engine, PipelineEngine):  # the two that say how a step is taken
            _without(kind, steps)

    return apply


def _without(kind: type, steps: tuple[int, ...]) -> None:
    take = kind.train_batch  # type: ignore[attr-defined]

    def train_batch(self, step, learning_rate, *arguments):  # type: ignore[no-untyped-def]
        if step in steps:
            self.loader.step(step)  # for the audit
            return StepStats({}, math.nan, learning_rate, applied=False)
        return take(self, step, learning_rate, *arguments)

    kind.train_batch = train_batch  # type: ignore[attr-defined]


def bad_steps(steps: tuple[int, ...], what: str, victim: int) -> Patch:
    """An infinite loss, or a gradient that is no number, in these steps on rank `victim` (a loss: where losses are)."""

    def apply(rank: int) -> None:
        now = {"step": -1}
        read = Engine._read

        def watched_read(self, step):  # type: ignore[no-untyped-def]
            now["step"] = step
            if what == "gradient" and rank == victim and not hasattr(self, "_spoilt"):
                self._spoilt = True
                for parameter in self.module.parameters():
                    parameter.register_hook(lambda g: g * math.nan if now["step"] in steps else g)
            return read(self, step)

        watched = Engine._watched

        def watched_loss(self, loss, batch):  # type: ignore[no-untyped-def]
            spoil = what == "loss" and now["step"] in steps and torch.is_grad_enabled()
            return watched(self, loss * math.inf if spoil else loss, batch)

        patch.object(Engine, "_read", watched_read).start()
        patch.object(Engine, "_watched", watched_loss).start()

    return apply


@dataclass
class Case:
    """A run folder, its data and its randomness; `reference` finds the run that was left alone."""

    layout: str
    rng: random.Random
    folder: Path
    data: Path
    reference: Callable[[str, tuple[int, ...]], "Case"]
    seconds: float = 10.0
    """What the run that was left alone took."""
    took: float = 0.0
    """What its last start took."""
    said: list[Result] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.logs = self.folder  # stays, where a fault moves the run to a disk of its own

    @property
    def out(self) -> Path:
        """The run folder."""
        return self.folder / "run"

    def words(self, *extra: str) -> list[str]:
        """Arguments of the command."""
        settings = _SETTINGS | {
            "model.vocabulary": Vocabulary(self.data / "vocab").size
        }  # the manifests may be damaged
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        place = ["--recipe", "quickstart", "--data", str(self.data), "--out", str(self.out)]
        return [*place, *words, "--train.audit", *LAYOUTS[self.layout], *extra]

    def start(self, *extra: str, patch: Patch | None = None) -> Ranks:
        """Start the command on two ranks; the same folder resumes."""
        words = self.words(*extra)

        def rank_main(rank: int) -> None:
            if patch is not None:
                patch(rank)
            page.write_report = lambda run: run / "report.html"  # drawing takes longer than training here
            pretrain.main(words)

        return Ranks(rank_main, 2, self.logs)

    def launch(self, *extra: str) -> Launched:
        """Start the command with DeepSpeed's launcher."""
        return Launched(["xlme_ds.pretrain", *self.words(*extra)], self.logs)

    def wait(self, ranks: Ranks) -> Result:
        """Its end, remembered."""
        self.said.append(ranks.wait())
        self.took = ranks.age
        return self.said[-1]

    def moment(self, ranks: Ranks) -> None:
        """Wait until a random moment of the run."""
        seconds = self.rng.uniform(0, self.seconds)
        ranks.until(lambda: ranks.age > seconds)

    def to_the_middle(self) -> None:
        """Have the run stop somewhere behind its second checkpoint, by SIGTERM."""
        ranks = self.start()
        step = self.rng.randint(2 * SAVE_EVERY, STEPS - 4)
        ranks.until(lambda: RunFolder(self.out).steps_logged() >= step)
        ranks.signal(15, self.rng.randrange(2))
        result = self.wait(ranks)
        assert result.finished, result.said

    def finish(self, patch: Patch | None = None, left_out: tuple[int, ...] = (), unread: int = 0) -> "Verdict":
        """Give the command once more, and compare all that it leaves with the run that was left alone."""
        result = self.wait(self.start(patch=patch))
        if not result.finished:
            return Verdict(False, "it did not go on", 0, False, result.said)
        return self.compare(left_out, unread)

    def compare(self, left_out: tuple[int, ...] = (), unread: int = 0) -> "Verdict":
        """Final state, records and rows against the run that was left alone (without the steps `left_out`).

        Step `unread`, whose record was damaged, is not compared.
        """
        reference = self.reference(self.layout, left_out)
        faults, _ = examine(self.out, self.data)
        same = self.final_state() == reference.final_state()
        ours, expected = ([line for line in case.records() if line["step"] != unread] for case in (self, reference))
        records = ours == expected
        how = "same weights" if same and records else ("other weights" if not same else "other records")
        return Verdict(
            same and records and not faults, how, len(faults), not same, self.said[-1].said if self.said else []
        )

    def final_state(self) -> dict[str, bytes]:
        """Weights and moments of every rank after the last step."""
        newest, _ = Checkpoints(self.out, 1, 0).newest()
        assert newest is not None and newest.name == f"step_{STEPS:08d}"
        return {path.name: path.read_bytes() for path in newest.glob("state_*")}

    def records(self) -> list[dict[str, float]]:
        """Lines of metrics.jsonl of the steps that were taken, without what depends on time."""
        lines = []
        for line in (self.out / "metrics.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # a damaged one: its step is missing
                lines.append(json.loads(line))
        return [
            {key: value for key, value in line.items() if key not in _TIMED} for line in lines if "grad_norm" in line
        ]

    def remove(self) -> None:
        """Delete all it wrote."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class Verdict:
    """How a fault ended."""

    survived: bool
    how: str
    lost_rows: int = 0
    silent_change: bool = False
    said: list[str] = field(default_factory=list)
