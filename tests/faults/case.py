"""A training run of the fault campaign, and whether it ended as the one that was not disturbed; bad steps, damaged
files, small disks."""

import contextlib
import json
import math
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

# Loaded here once, with much of torch, for all ranks to come.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import torch

from tests.faults.forked import Ended, ForkedRanks, LaunchedRanks, NotSurvived
from tests.launch import TIMED
from xlme_ds.audit import examine
from xlme_ds.checkpoint.checkpoints import Checkpoints
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.engine.engine import Engine, StepStats
from xlme_ds.engine.step import StepContext
from xlme_ds.evaluate import report_data  # noqa: F401
from xlme_ds.pretrain import main as pretrain
from xlme_ds.report import run_page
from xlme_ds.train import run as _run  # noqa: F401
from xlme_ds.train.run_folder import RunFolder

STEPS, SAVE_EVERY = 24, 4
LAYOUTS = {
    "zero1": ["--engine.deepspeed", "zero1"],
    "zero3": ["--engine.deepspeed", "zero3"],
    "pipeline": ["--engine.kind", "pipeline", "--engine.deepspeed", "pipe_zero1", "--engine.pipeline-stages", "2"],
}
_MODEL = (
    "--model.width 32 --model.heads 4 --model.feed-forward 64 --model.max-positions 32 --model.discriminator-layers 2"
)
_DATA = "--data.mono-rows 8 --data.para-rows 4 --data.micro-batch 2 --engine.precision fp32 --optimizer.warmup-steps 4"
_TRAIN = (
    f"--train.steps {STEPS} --train.log-every 1 --train.save-every {SAVE_EVERY} --train.keep-last 3 "
    "--train.keep-every 0 --train.max-bad-steps 3 --train.audit"
)
Patch = Callable[[int], None]  # run in a rank before the command: makes losses or gradients bad there
Started = TypeVar("Started", bound=ForkedRanks)


def leaving_out(steps: tuple[int, ...]) -> Patch:
    """Leave these steps out: a run in which they are bad must equal this one."""

    def apply(rank: int) -> None:
        take = Engine.train_batch

        def train_batch(self, step, learning_rate, *arguments):  # type: ignore[no-untyped-def]
            if step in steps:
                self.loader.micro_batches(step)  # for the audit
                return StepStats({}, math.nan, learning_rate, applied=False)
            return take(self, step, learning_rate, *arguments)

        Engine.train_batch = train_batch  # type: ignore[method-assign]

    return apply


def bad_steps(steps: tuple[int, ...], what: str, victim: int) -> Patch:
    """An infinite loss, or a gradient that is no number, in these steps on rank `victim` (a loss: where losses are)."""

    def apply(rank: int) -> None:
        now = {"step": -1}
        read, loss_of = Engine._read, StepContext.loss

        def watched_read(self, step):  # type: ignore[no-untyped-def]
            now["step"] = step
            if what == "gradient" and rank == victim and not hasattr(self, "_spoilt"):
                self._spoilt = True
                for parameter in self.module.parameters():
                    parameter.register_hook(lambda g: g * math.nan if now["step"] in steps else g)
            return read(self, step)

        def watched_loss(self, output, batch):  # type: ignore[no-untyped-def]
            if what == "loss" and now["step"] in steps and torch.is_grad_enabled():
                self.weights = self.weights * math.inf
            return loss_of(self, output, batch)

        patch.object(Engine, "_read", watched_read).start()
        patch.object(StepContext, "loss", watched_loss).start()

    return apply


@dataclass
class FaultCase:
    """A run folder, its data and its random numbers; `reference` finds the run that was not disturbed."""

    layout: str
    rng: random.Random
    folder: Path
    data: Path
    reference: Callable[[str, tuple[int, ...]], "FaultCase"]
    seconds: float = 10.0  # what the run that was not disturbed took
    took: float = 0.0  # what its last start took
    said: list[str] = field(default_factory=list)  # what its last start printed

    patch: Patch | None = None  # for the last start
    left_out: tuple[int, ...] = ()  # bad steps, which the run that was not disturbed leaves out
    unread: int = 0  # a step whose record was damaged, which is not compared
    done: bool = False  # the run is at its end: no further start

    def __post_init__(self) -> None:
        self.logs = self.folder  # stays, where a fault moves the run to a disk of its own
        self.disks = contextlib.ExitStack()

    @property
    def out(self) -> Path:
        """The run folder."""
        return self.folder / "run"

    def words(self, *extra: str) -> list[str]:
        """Arguments of the command."""
        place = ["--recipe", "quickstart", "--data", str(self.data), "--out", str(self.out)]
        # The vocabulary itself says its size: the manifests may be damaged.
        place += ["--model.vocabulary", str(Vocabulary(self.data / "vocab").size)]
        return [*place, *_MODEL.split(), *_DATA.split(), *_TRAIN.split(), *LAYOUTS[self.layout], *extra]

    def start(self, *extra: str, patch: Patch | None = None) -> ForkedRanks:
        """Start the command on two ranks; the same folder resumes."""
        words = self.words(*extra)

        def rank_main(rank: int) -> None:
            if patch is not None:
                patch(rank)
            run_page.write_report = lambda run: run / "report.html"  # drawing takes longer than training here
            pretrain(words)

        return ForkedRanks(rank_main, 2, self.logs)

    def launch(self, *extra: str) -> LaunchedRanks:
        """Start the command with DeepSpeed's launcher."""
        return LaunchedRanks(["xlme_ds.pretrain", *self.words(*extra)], self.logs)

    def wait(self, ranks: ForkedRanks) -> Ended:
        """Wait for the end, and remember what was printed."""
        ended = ranks.wait()
        self.said, self.took = ended.said, ranks.age
        return ended

    def run(self, *extra: str, patch: Patch | None = None) -> Ended:
        """Start the command and wait for its end."""
        return self.wait(self.start(*extra, patch=patch))

    def moment(self, ranks: Started) -> Started:
        """Wait until a random moment of the run; the ranks themselves."""
        ranks.until_age(self.rng.uniform(0, self.seconds))
        return ranks

    def until_step(self, ranks: ForkedRanks, first: int) -> None:
        """Wait until a random step, at least `first`, was logged."""
        step = self.rng.randint(first, STEPS - 4)
        ranks.until(lambda: RunFolder(self.out).last_logged_step() >= step)

    def to_the_middle(self) -> None:
        """Have SIGTERM stop the run somewhere after its second checkpoint."""
        ranks = self.start()
        self.until_step(ranks, 2 * SAVE_EVERY)
        ranks.signal(15, self.rng.randrange(2))
        ended = self.wait(ranks)
        assert ended.finished, ended.said

    def own_data(self) -> None:
        """Copy the data, to damage them."""
        shared, self.data = self.data, self.folder / "data"
        shutil.copytree(shared, self.data)

    def mount(self, folder: Path, size: str) -> Path:
        """Make `folder` a small file system until the case is closed."""
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
        self.disks.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)
        return folder

    def repaired(self, ended: Ended, repair: Callable[[], object], *words: str) -> None:
        """Repair what a fault damaged: the run was done before it, or ended with a clear error that has one of
        `words`."""
        repair()
        self.done = ended.finished and (self.out / "finished.json").exists()
        if not self.done:
            ended.need_error(*words)

    def finish(self) -> str:
        """Give the command once more, and compare final state, records and rows with those of the run that was not
        disturbed. Raises NotSurvived where anything differs."""
        if not self.done:
            ended = self.run(patch=self.patch)
            ended.need(ended.finished, "it did not go on")
        reference = self.reference(self.layout, self.left_out)
        faults, _ = examine(self.out, (self.data,))
        same = self.final_state() == reference.final_state()
        ours, theirs = ([line for line in case.records() if line["step"] != self.unread] for case in (self, reference))
        if not same or ours != theirs or faults:
            how = "other weights" if not same else "other records" if ours != theirs else "same weights"
            raise NotSurvived(how, self.said, len(faults), not same)
        return "same weights"

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
            {key: value for key, value in line.items() if key not in TIMED} for line in lines if "grad_norm" in line
        ]


def flip(rng: random.Random, path: Path) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(rng: random.Random, path: Path) -> None:
    """Cut a file short."""
    os.truncate(path, rng.randrange(path.stat().st_size))


def delete(rng: random.Random, path: Path) -> None:
    """Delete a file."""
    path.unlink()


DAMAGES = (flip, truncate, delete)


def fill(path: Path) -> None:
    """Write to `path` until its file system is full."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass
