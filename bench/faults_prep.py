"""Data preparation in the fault campaign: the corpus that it trains on, and stages that are killed and called again."""

import hashlib
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from bench.faults_case import Verdict
from bench.faults_disk import damage, fill, flip, mounted
from bench.faults_ranks import Ranks, Result

_LETTERS = {"en": ["ka", "lo", "mi", "ter", "un"], "de": ["ve", "sa", "dor", "in", "pe"]}


def prepare(folder: Path) -> Path:
    """Made-up text in two languages and a pair, prepared; the mixed folder."""
    rng = random.Random(0)

    def line(language: str) -> str:
        return " ".join("".join(rng.choices(_LETTERS[language], k=rng.randint(1, 4))) for _ in range(8))

    for name in ("mono", "para"):
        (folder / "corpus" / name).mkdir(parents=True)
    for language in _LETTERS:
        text = "\n\n".join("\n".join(line(language) for _ in range(4)) for _ in range(160))
        (folder / "corpus/mono" / f"{language}.txt").write_text(text)
        (folder / "corpus/para" / f"de-en.{language}").write_text("\n".join(line(language)[:24] for _ in range(400)))
    for words in (["vocab", *_corpus(folder), "--size", "160", "--out", str(folder / "vocab")],
                  encode(folder, folder / "encoded"), mix(folder, folder / "encoded", folder / "mixed")):  # fmt: skip
        result = _stage(words, folder).wait()
        assert result.finished, result.said
    return folder / "mixed"


def _corpus(folder: Path) -> list[str]:
    return ["--mono", str(folder / "corpus/mono"), "--para", str(folder / "corpus/para")]


def encode(folder: Path, out: Path) -> list[str]:
    """Arguments of the stage."""
    return ["encode", *_corpus(folder), "--vocab", str(folder / "vocab"), "--out", str(out), "--processes", "2"]


def mix(folder: Path, encoded: Path, out: Path) -> list[str]:
    """Arguments of the stage: shards of 16 rows, so that a run reads many."""
    sizes = {"row-tokens": 32, "alpha": 0.7, "mono-rows": 100, "para-rows": 100, "rows-per-shard": 16, "processes": 2}
    words = [word for key, value in sizes.items() for word in (f"--{key}", str(value))]
    return ["mix", "--encoded", str(encoded), "--vocab", str(folder / "vocab"), "--out", str(out), *words]


def _stage(words: list[str], logs: Path) -> Ranks:
    def stage(rank: int) -> None:  # in a program of its own: its workers load again what the main program has loaded
        os.execv(sys.executable, [sys.executable, "-m", "data_prep", *words])

    return Ranks(stage, 1, logs, distributed=False)


def _bytes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _killed(folder: Path, words: Callable[[Path], list[str]], rng: random.Random) -> Verdict:
    """Kill a stage at random moments, up to three times, and call it again: the same bytes."""
    folder.mkdir()
    first = _stage(words(folder / "alone"), folder)
    result = first.wait()
    took = first.age
    assert result.finished, result.said
    for _ in range(rng.randint(1, 3)):
        ranks = _stage(words(folder / "killed"), folder)
        seconds = rng.uniform(0, took)
        ranks.until(lambda: ranks.age > seconds)  # noqa: B023 - called at once
        ranks.signal(signal.SIGKILL)
        ranks.wait()
    return _again(folder / "alone", folder / "killed", _stage(words(folder / "killed"), folder).wait())


def _failed(result: Result) -> Verdict:
    return Verdict(False, f"exit codes {result.codes}", said=result.said)


def encode_killed(folder: Path, data: Path, rng: random.Random) -> Verdict:
    """`data_prep encode`."""
    return _killed(folder, lambda out: encode(data.parent, out), rng)


def mix_killed(folder: Path, data: Path, rng: random.Random) -> Verdict:
    """`data_prep mix`."""
    return _killed(folder, lambda out: mix(data.parent, data.parent / "encoded", out), rng)


def verify_finds(folder: Path, data: Path, rng: random.Random) -> Verdict:
    """`data_prep verify` names a shard of which a byte was flipped."""
    folder.mkdir()
    shutil.copytree(data, folder / "mixed")
    path = rng.choice(sorted((folder / "mixed").glob("*/*.arrow")))
    flip(rng, path)
    result = _stage(["verify", "--data", str(folder / "mixed")], folder).wait()
    found = result.codes == [2] and path.name in result.said[0] and "Traceback" not in result.said[0]
    return Verdict(
        found, "named by verify" if found else "verify is content", silent_change=not found, said=result.said
    )


def disk_full(folder: Path, data: Path, rng: random.Random) -> Verdict:
    """The disk of a stage's output fills up at a random moment; with room again the same command ends with the same
    bytes."""
    folder.mkdir()
    words = _either(data, rng)
    first = _stage(words(folder / "alone"), folder)
    result = first.wait()
    assert result.finished, result.said
    with mounted(folder / "disk", "8m"):
        out = folder / "disk" / "out"
        ranks = _stage(words(out), folder)
        seconds = rng.uniform(0, first.age)
        ranks.until(lambda: ranks.age > seconds)
        fill(folder / "disk/filler")
        result = ranks.wait()
        if not result.finished and not result.clear_error("No space left on device"):
            return _failed(result)
        (folder / "disk/filler").unlink()
        return _again(folder / "alone", out, _stage(words(out), folder).wait())


def output_damaged(folder: Path, data: Path, rng: random.Random) -> Verdict:
    """A file of a stage's finished output is damaged: the same command mends it, or names what to delete first."""
    folder.mkdir()
    words, out = _either(data, rng), folder / "damaged"
    result = _stage(words(folder / "alone"), folder).wait()
    assert result.finished, result.said
    shutil.copytree(folder / "alone", out)
    path = rng.choice(
        [path for path in sorted(out.rglob("*")) if path.is_file() and path.suffix in (".arrow", ".json")]
    )
    damage(rng, path)
    result = _stage(words(out), folder).wait()
    if not result.finished:
        named = [path for path in [*out.rglob("*"), *out.rglob(".*")] if str(path) in result.said[0]]
        if not result.clear_error("delete") or not named:
            return _failed(result)
        for path in named:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        result = _stage(words(out), folder).wait()
    if result.finished and path.parent.name == "tasks" and not path.exists():  # which a finished folder does not need
        (folder / "alone" / path.relative_to(out)).unlink()
    return _again(folder / "alone", out, result)


def _either(data: Path, rng: random.Random) -> Callable[[Path], list[str]]:
    if rng.random() < 0.5:
        return lambda out: encode(data.parent, out)
    return lambda out: mix(data.parent, data.parent / "encoded", out)


def _again(alone: Path, out: Path, result: Result) -> Verdict:
    if not result.finished:
        return _failed(result)
    same = _bytes(alone) == _bytes(out)
    return Verdict(same, "same bytes" if same else "other bytes", silent_change=not same, said=result.said)


KINDS = {
    "encode killed": encode_killed,
    "mix killed": mix_killed,
    "byte flipped, then verify": verify_finds,
    "disk full in preparation": disk_full,
    "output of preparation damaged": output_damaged,
}
