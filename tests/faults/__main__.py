"""A campaign of faults against real training, small: does each end as the run that was not disturbed, or in one clear
error?

    python -m tests.faults [--quick] [--json] [--count 200] [--minutes M] [--seed 0] [--kinds NAME ...]

Two ranks on the CPU in float32 (ZeRO-1, ZeRO-3 and a pipeline of two), 24 steps, a checkpoint every four. A fault is
survived when, with whatever it damaged repaired and the same command given again, final weights, moments and records
equal those of the run that was not disturbed bit for bit, and the audit finds every row read once (`lost_rows`: those
it does not). A `silent change` is another result without an error. Needs root for some (they mount small file systems);
as another user these are left out, and named.
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
from typing import Any

import tyro

# Before torch and DeepSpeed are loaded, which read them once; their processes are forked from this one.
os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}

from tests.faults import preparation, training
from tests.faults.case import LAYOUTS, STEPS, FaultCase, leaving_out
from tests.faults.forked import NotSurvived

_KINDS = [*training.KINDS, *preparation.KINDS]
_ROOT_ONLY = ("disk full", "disk full in preparation", "checkpoints read only", "no permission")


@dataclass(frozen=True)
class FaultsSettings:
    """How many faults, and which."""

    quick: bool = False  # one fault of every kind
    json: bool = False  # print JSON alone
    count: int = 200  # faults
    minutes: float = math.inf  # no fault is begun after so many
    seed: int = 0  # of the faults' random numbers
    kinds: tuple[str, ...] = ()  # these kinds alone, by name
    layouts: tuple[str, ...] = tuple(LAYOUTS)  # by turns
    folder: Path | None = None  # where runs are made; without it the folder for temporary files


class Campaign:
    """Cases and the runs they are compared with."""

    def __init__(self, seed: int, folder: Path):
        self.seed = seed
        self.folder = folder
        self.data = preparation.prepare(folder)
        self._references: dict[tuple[str, tuple[int, ...]], FaultCase] = {}

    def case(self, name: str, layout: str, seed: str) -> FaultCase:
        """A fresh one."""
        folder = self.folder / name
        folder.mkdir()
        return FaultCase(layout, random.Random(seed), folder, self.data, self.reference)

    def reference(self, layout: str, left_out: tuple[int, ...] = ()) -> FaultCase:
        """The run that was not disturbed, made once."""
        key = (layout, left_out)
        if key not in self._references:
            case = self.case(f"alone {layout} {len(left_out)} {sum(left_out)}", layout, "")
            patch = leaving_out(left_out) if left_out else None
            ended = case.run("--train.max-bad-steps", str(STEPS), patch=patch)
            assert ended.finished, "\n".join(ended.said)
            self._references[key] = case
        return self._references[key]

    def one(self, number: int, kind: str, layout: str) -> str:
        """Make fault `number`; how it ended."""
        case = self.case(f"case {number}", layout, f"{self.seed} {number}")
        try:
            with case.disks:
                if kind in preparation.KINDS:
                    return preparation.KINDS[kind](case)
                case.seconds = self.reference(layout).took
                in_the_middle, fault = training.KINDS[kind]
                if in_the_middle:
                    case.to_the_middle()
                fault(case)
                return case.finish()
        except AssertionError:  # what leads up to the fault went wrong
            raise NotSurvived(traceback.format_exc(), case.said) from None


def chosen_kinds(names: tuple[str, ...]) -> list[str]:
    """The kinds of this campaign."""
    unknown = [kind for kind in names if kind not in _KINDS]
    if unknown:
        raise ValueError(f"there is no fault {unknown[0]!r}, but {', '.join(_KINDS)}")
    chosen = list(names) or _KINDS
    if os.geteuid() != 0:
        print(f"left out, they need root: {', '.join(kind for kind in chosen if kind in _ROOT_ONLY)}", file=sys.stderr)
        chosen = [kind for kind in chosen if kind not in _ROOT_ONLY]
    return chosen


def run(settings: FaultsSettings, folder: Path) -> dict[str, Any]:
    """Do the campaign; the figures."""
    campaign, kinds, layouts = Campaign(settings.seed, folder), chosen_kinds(settings.kinds), settings.layouts
    done: Counter[str] = Counter()
    failures: list[tuple[dict[str, Any], NotSurvived]] = []
    start = time.monotonic()
    for number in range(len(kinds) if settings.quick else settings.count):
        kind = kinds[number % len(kinds)]
        layout = layouts[(number if settings.quick else number // len(kinds)) % len(layouts)]
        begin = time.monotonic()
        if begin - start > 60 * settings.minutes:
            break
        done[kind] += 1
        try:
            how = campaign.one(number, kind, layout)
            shutil.rmtree(folder / f"case {number}", ignore_errors=True)
        except NotSurvived as why:
            how = f"NOT SURVIVED, {why}"
            failures.append(({"number": number, "kind": kind, "layout": layout, "how": str(why)}, why))
            print("\n".join(text[-3000:] for text in why.said), file=sys.stderr, flush=True)
        print(f"{number:4d}  {kind} ({layout}): {how}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    failed = Counter(failure["kind"] for failure, _ in failures)
    return {
        "faults": done.total(),
        "survived": done.total() - len(failures),
        "lost_rows": sum(why.lost_rows for _, why in failures),
        "silent_changes": sum(why.silent_change for _, why in failures),
        "kinds": {kind: {"faults": made, "survived": made - failed[kind]} for kind, made in done.items()},
        "failures": [failure for failure, _ in failures],
    }


def main(settings: FaultsSettings) -> None:
    """Print the table or JSON; exit code 1 when a fault was not survived."""
    folder = Path(tempfile.mkdtemp(prefix="faults.", dir=settings.folder))
    folder.chmod(0o755)
    figures = run(settings, folder)
    if settings.json:
        print(json.dumps(figures))
    else:
        print("| fault | made | survived |\n|---|---|---|")
        for kind, counts in figures["kinds"].items():
            print(f"| {kind} | {counts['faults']} | {counts['survived']} |")
        print({key: figures[key] for key in ("faults", "survived", "lost_rows", "silent_changes")})
    if figures["failures"]:
        print(f"what was not survived is left in {folder}", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(tyro.cli(FaultsSettings))
