"""A campaign of faults against real training, small: does each end as the run that was left alone, or in one clear
error?

    python -m bench.faults [--quick] [--json] [--count 200] [--minutes M] [--seed 0] [--kinds NAME ...]

Two ranks on the CPU in float32 (ZeRO-1, ZeRO-3 and a pipeline of two), 24 steps, a checkpoint every four. A fault is
survived when, with whatever it damaged repaired and the same command given again, final weights, moments and records
equal those of the run left alone bit for bit, and the audit finds every row read once (`lost_rows`: those it does not).
A `silent change` is another result without an error. Needs root for some (they mount small file systems); as another
user these are left out, and said.
"""

import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tyro

# Before torch and DeepSpeed are loaded, which read them once; their processes are forked from this one.
os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}

from bench import faults_prep
from bench.faults_case import LAYOUTS, STEPS, Case, Verdict, leaving_out
from bench.faults_kinds import KINDS

_ROOT_ONLY = ("disk full", "disk full in preparation", "checkpoints read only", "no permission")


@dataclass(frozen=True)
class Settings:
    """How much, and of what."""

    quick: bool = False
    """One fault of every kind."""
    json: bool = False
    """Print JSON alone."""
    count: int = 200
    minutes: float = math.inf
    """No fault is begun after so many."""
    seed: int = 0
    kinds: tuple[str, ...] = ()
    """These kinds alone, by name."""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    folder: Path | None = None
    """Where runs are made; without it the folder for temporary files."""


class Campaign:
    """Cases and the runs they are compared with."""

    def __init__(self, settings: Settings, folder: Path):
        self.settings = settings
        self.folder = folder
        self.data = faults_prep.prepare(folder)
        self._references: dict[tuple[str, tuple[int, ...]], Case] = {}

    def case(self, name: str, layout: str, rng: random.Random) -> Case:
        """A fresh one."""
        folder = self.folder / name
        folder.mkdir()
        return Case(layout, rng, folder, self.data, self.reference)

    def reference(self, layout: str, left_out: tuple[int, ...] = ()) -> Case:
        """The run that was left alone, made once."""
        key = (layout, left_out)
        if key not in self._references:
            case = self.case(f"alone {layout} {len(left_out)} {sum(left_out)}", layout, random.Random(0))
            patch = leaving_out(left_out) if left_out else None
            result = case.wait(case.start("--train.max-bad-steps", str(STEPS), patch=patch))
            assert result.finished, "\n".join(result.said)
            case.seconds = case.took
            self._references[key] = case
        return self._references[key]

    def one(self, number: int, kind: str, layout: str) -> Verdict:
        """Fault `number`."""
        rng = random.Random(f"{self.settings.seed} {number}")
        if kind in faults_prep.KINDS:
            return faults_prep.KINDS[kind](self.folder / f"case {number}", self.data, rng)
        case = self.case(f"case {number}", layout, rng)
        case.seconds = self.reference(layout).seconds
        try:
            verdict = KINDS[kind](case)
        except AssertionError:  # what leads up to the fault went wrong
            verdict = Verdict(False, traceback.format_exc(), said=case.said[-1].said if case.said else [])
        if verdict.survived:
            shutil.rmtree(self.folder / f"case {number}", ignore_errors=True)
        return verdict


def kinds(settings: Settings) -> list[str]:
    """The kinds of this campaign."""
    every = [*KINDS, *faults_prep.KINDS]
    unknown = [kind for kind in settings.kinds if kind not in every]
    if unknown:
        raise ValueError(f"there is no fault {unknown[0]!r}, but {', '.join(every)}")
    chosen = list(settings.kinds) or every
    if os.geteuid() != 0:
        print(f"left out, they need root: {', '.join(kind for kind in chosen if kind in _ROOT_ONLY)}", file=sys.stderr)
        chosen = [kind for kind in chosen if kind not in _ROOT_ONLY]
    return chosen


def run(settings: Settings, folder: Path) -> dict[str, object]:
    """Do the campaign; the figures."""
    campaign, chosen = Campaign(settings, folder), kinds(settings)
    done: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    lost = silent = 0
    failures = []
    start = time.monotonic()
    for number in range(len(chosen) if settings.quick else settings.count):
        kind, layout = chosen[number % len(chosen)], settings.layouts[number // len(chosen) % len(settings.layouts)]
        if settings.quick:
            layout = settings.layouts[number % len(settings.layouts)]
        begin = time.monotonic()
        if begin - start > 60 * settings.minutes:
            break
        verdict = campaign.one(number, kind, layout)
        done[kind] += 1
        survived[kind] += verdict.survived
        lost += verdict.lost_rows
        silent += verdict.silent_change
        line = f"{number:4d}  {kind} ({layout}): {'' if verdict.survived else 'NOT SURVIVED, '}{verdict.how}"
        print(f"{line}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        if not verdict.survived:
            failures.append({"number": number, "kind": kind, "layout": layout, "how": verdict.how})
            print("\n".join(text[-3000:] for text in verdict.said), file=sys.stderr, flush=True)
    return {
        "faults": sum(done.values()),
        "survived": sum(survived.values()),
        "lost_rows": lost,
        "silent_changes": silent,
        "kinds": {kind: {"faults": done[kind], "survived": survived[kind]} for kind in done},
        "failures": failures,
    }


def main(settings: Settings) -> None:
    """Print the table or JSON; exit code 1 when a fault was not survived."""
    folder = Path(tempfile.mkdtemp(prefix="faults.", dir=settings.folder))
    folder.chmod(0o755)
    figures = run(settings, folder)
    if settings.json:
        print(json.dumps(figures))
    else:
        print("| fault | made | survived |\n|---|---|---|")
        for kind, counts in figures["kinds"].items():  # type: ignore[attr-defined]
            print(f"| {kind} | {counts['faults']} | {counts['survived']} |")
        print({key: figures[key] for key in ("faults", "survived", "lost_rows", "silent_changes")})
    if figures["failures"]:
        print(f"what was not survived is left in {folder}", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(tyro.cli(Settings))
