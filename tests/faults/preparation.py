"""Data preparation in the fault campaign: the training corpus, and stages that are killed and called again."""

import hashlib
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.faults.case import DAMAGES, FaultCase, fill, flip
from tests.faults.forked import Ended, ForkedRanks

_LETTERS = {"en": ["ka", "lo", "mi", "ter", "un"], "de": ["ve", "sa", "dor", "in", "pe"]}
Stage = Callable[[Path], list[str]]  # the arguments of a stage that writes to this folder


def prepare(folder: Path) -> Path:
    """Prepare made-up text in two languages and a pair; returns the mixed folder."""
    rng = random.Random(0)

    def line(language: str) -> str:
        return " ".join("".join(rng.choices(_LETTERS[language], k=rng.randint(1, 4))) for _ in range(8))

    for name in ("mono", "para"):
        (folder / "corpus" / name).mkdir(parents=True)
    for language in _LETTERS:
        text = "\n\n".join("\n".join(line(language) for _ in range(4)) for _ in range(160))
        (folder / "corpus/mono" / f"{language}.txt").write_text(text)
        (folder / "corpus/para" / f"de-en.{language}").write_text("\n".join(line(language)[:24] for _ in range(400)))
    _whole(["vocab", *_corpus(folder), "--size", "160", "--out", str(folder / "vocab")], folder)
    _whole(_encode(folder / "encoded", folder), folder)
    _whole(_mix(folder / "mixed", folder), folder)
    return folder / "mixed"


def _corpus(folder: Path) -> list[str]:
    return ["--mono", str(folder / "corpus/mono"), "--para", str(folder / "corpus/para")]


def _encode(out: Path, folder: Path) -> list[str]:
    return ["encode", *_corpus(folder), "--vocab", str(folder / "vocab"), "--out", str(out), "--processes", "2"]


def _mix(out: Path, folder: Path) -> list[str]:
    """Arguments of `mix`, with shards of 16 rows, so that a run reads many."""
    sizes = "--row-tokens 32 --alpha 0.7 --mono-rows 100 --para-rows 100 --rows-per-shard 16 --processes 2"
    place = ["--encoded", str(folder / "encoded"), "--vocab", str(folder / "vocab"), "--out", str(out)]
    return ["mix", *place, *sizes.split()]


def _either(case: FaultCase) -> Stage:
    return partial(_encode if case.rng.random() < 0.5 else _mix, folder=case.data.parent)


def _start(words: list[str], logs: Path) -> ForkedRanks:
    # a program of its own, because its workers load the main program's modules again
    command = [sys.executable, "-m", "data_prep", *words]
    return ForkedRanks(lambda rank: os.execv(sys.executable, command), 1, logs, group=False)


def _whole(words: list[str], logs: Path) -> float:
    """Run a stage to its end; returns its seconds."""
    ranks = _start(words, logs)
    ended = ranks.wait()
    assert ended.finished, ended.said
    return ranks.age


def _hashes(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _same(ended: Ended, alone: Path, out: Path) -> str:
    ended.need(ended.finished)
    ended.need(_hashes(alone) == _hashes(out), "other bytes", silent_change=True)
    return "same bytes"


def _killed(case: FaultCase, stage: Callable[..., list[str]]) -> str:
    """Kill a stage at random moments, up to three times; called again, it writes the same bytes."""
    alone, out = case.folder / "alone", case.folder / "killed"
    took = _whole(stage(alone, case.data.parent), case.folder)
    words = stage(out, case.data.parent)
    for _ in range(case.rng.randint(1, 3)):
        ranks = _start(words, case.folder)
        ranks.until_age(case.rng.uniform(0, took))
        ranks.signal(signal.SIGKILL)
        ranks.wait()
    return _same(_start(words, case.folder).wait(), alone, out)


def verify_finds(case: FaultCase) -> str:
    """`xlme prep verify` names a shard of which a bit was flipped."""
    copy = case.folder / "mixed"
    shutil.copytree(case.data, copy)
    path = case.rng.choice(sorted(copy.glob("*/*.arrow")))
    flip(case.rng, path)
    ended = _start(["verify", "--data", str(copy)], case.folder).wait()
    is_named = ended.codes == [2] and path.name in ended.said[0] and "Traceback" not in ended.said[0]
    ended.need(is_named, "verify finds no fault", silent_change=True)
    return "named by verify"


def disk_full(case: FaultCase) -> str:
    """The disk of a stage's output fills up at a random moment; with room again the same command ends with the same
    bytes."""
    stage, alone, disk = _either(case), case.folder / "alone", case.folder / "disk"
    took = _whole(stage(alone), case.folder)
    case.mount(disk, "8m")
    ranks = _start(stage(disk / "out"), case.folder)
    ranks.until_age(case.rng.uniform(0, took))
    fill(disk / "filler")
    ended = ranks.wait()
    ended.need(ended.finished or ended.clear_error("No space left on device"))
    (disk / "filler").unlink()
    return _same(_start(stage(disk / "out"), case.folder).wait(), alone, disk / "out")


def output_damaged(case: FaultCase) -> str:
    """A file of a stage's finished output is damaged: the same command repairs it, or names what to delete first."""
    stage, alone, out = _either(case), case.folder / "alone", case.folder / "damaged"
    _whole(stage(alone), case.folder)
    shutil.copytree(alone, out)
    path = case.rng.choice([path for path in sorted(out.rglob("*")) if path.suffix in (".arrow", ".json")])
    case.rng.choice(DAMAGES)(case.rng, path)
    ended = _start(stage(out), case.folder).wait()
    if not ended.finished:
        damaged = [path for path in [*out.rglob("*"), *out.rglob(".*")] if str(path) in ended.said[0]]
        ended.need(ended.clear_error("delete") and bool(damaged))
        for place in damaged:
            shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        ended = _start(stage(out), case.folder).wait()
    if ended.finished and path.parent.name == "tasks" and not path.exists():  # a finished folder needs no marker
        (alone / path.relative_to(out)).unlink()
    return _same(ended, alone, out)


KINDS: dict[str, Callable[[FaultCase], str]] = {
    "encode killed": partial(_killed, stage=_encode),
    "mix killed": partial(_killed, stage=_mix),
    "byte flipped, then verify": verify_finds,
    "disk full in preparation": disk_full,
    "output of preparation damaged": output_damaged,
}
