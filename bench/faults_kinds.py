"""The faults of the campaign. Each takes a fresh case, makes its fault at a random place or moment, and sees how the
run ends."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.faults_case import STEPS, Case, Verdict, bad_steps
from bench.faults_disk import damage, delete, fill, mounted, truncate
from bench.faults_ranks import Launched, Ranks, Result, obey_permissions
from xlme_ds.checkpoint import __main__ as checkpoint
from xlme_ds.checkpoint.checkpoints import Checkpoints
from xlme_ds.folders import LOCK
from xlme_ds.train.run_folder import RunFolder

Fault = Callable[[Case], Verdict]
KINDS: dict[str, Fault] = {}


def fault(function: Fault) -> Fault:
    """Add to the campaign."""
    KINDS[function.__name__.replace("_", " ")] = function
    return function


def _not_clear(result: Result) -> Verdict:
    return Verdict(False, f"exit codes {result.codes}, no one clear sentence", said=result.said)


def _over_or_error(case: Case, result: Result, repair: Callable[[], object], *words: str) -> Verdict:
    """A run that nothing disturbed is compared; one that ended with a clear error is repaired and goes on."""
    repair()
    if result.finished and (case.out / "finished.json").exists():
        return case.compare()
    if not result.clear_error(*words):
        return _not_clear(result)
    return case.finish()


# Killed and told to stop


@fault
def rank_killed(case: Case) -> Verdict:
    """SIGKILL of a random rank at a random moment, twice."""
    for _ in range(2):
        ranks = case.start()
        case.moment(ranks)
        ranks.signal(signal.SIGKILL, case.rng.randrange(2))
        case.wait(ranks)
    return case.finish()


@fault
def all_ranks_killed(case: Case) -> Verdict:
    """SIGKILL of all ranks at once, as when a machine loses its power."""
    ranks = case.start()
    case.moment(ranks)
    ranks.signal(signal.SIGKILL)
    case.wait(ranks)
    return case.finish()


@fault
def killed_inside_a_save(case: Case) -> Verdict:
    """A rank is killed within 20 ms after a checkpoint's folder appeared."""
    ranks, which = case.start(), case.rng.randint(1, 5)
    seen: set[str] = set()

    def saving() -> bool:
        seen.update(path.name for path in (case.out / "checkpoints").glob("*.partial"))
        return len(seen) >= which

    ranks.until(saving)
    wait = case.rng.uniform(0, 0.02)
    time.sleep(wait)
    ranks.signal(signal.SIGKILL, case.rng.randrange(2))
    case.wait(ranks)
    return case.finish()


@fault
def killed_inside_a_resume(case: Case) -> Verdict:
    """A rank is killed while the run starts again and loads its checkpoint."""
    case.to_the_middle()
    ranks = case.start()
    starts = len((case.out / "audit/attempts.jsonl").read_text().splitlines())
    seconds = case.rng.uniform(0, 0.5 * case.seconds)
    ranks.until(
        lambda: ranks.age > seconds or len((case.out / "audit/attempts.jsonl").read_text().splitlines()) > starts
    )
    ranks.signal(signal.SIGKILL, case.rng.randrange(2))
    case.wait(ranks)
    return case.finish()


@fault
def told_to_stop(case: Case) -> Verdict:
    """SIGTERM, SIGUSR1 or SIGINT to a random rank at a random moment, also while it starts: exit code 0, nothing
    lost."""
    ranks = case.start()
    ranks.until(lambda: any(log.exists() for log in ranks.logs))
    time.sleep(0.05)  # Python's own start is no part of the command: handlers are its first act
    case.moment(ranks)
    ranks.signal(case.rng.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]), case.rng.randrange(2))
    result = case.wait(ranks)
    if not result.finished:
        return Verdict(False, f"exit codes {result.codes} after a signal to stop", said=result.said)
    return case.finish()


@fault
def rank_hangs(case: Case) -> Verdict:
    """SIGSTOP of a random rank: the other's watchdog ends the run and shows its stacks."""
    ranks, victim = case.start("--train.watchdog-minutes", "0.15"), case.rng.randrange(2)
    step = case.rng.randint(1, STEPS - 4)
    ranks.until(lambda: RunFolder(case.out).steps_logged() >= step)
    ranks.signal(signal.SIGSTOP, victim)
    result = case.wait(ranks)
    other = result.said[1 - victim]
    if (
        result.hung
        or result.codes[1 - victim] != 1
        or "stood still" not in other
        or "most recent call first" not in other
    ):
        return Verdict(False, f"exit codes {result.codes}, the watchdog did not end it", said=result.said)
    return case.finish()


# The same under DeepSpeed's own launcher


@fault
def rank_killed_under_the_launcher(case: Case) -> Verdict:
    """SIGKILL of a random rank that `deepspeed` started: it ends the other and says that it failed."""
    ranks = case.launch()
    step = case.rng.randint(1, STEPS - 4)
    ranks.until(lambda: RunFolder(case.out).steps_logged() >= step)
    member = ranks.members().get(str(case.rng.randrange(2)))
    if member is not None:
        member.send_signal(signal.SIGKILL)
    return _launched(case, ranks, failed=member is not None)


@fault
def launcher_killed(case: Case) -> Verdict:
    """SIGKILL of `deepspeed` or of the process between it and the ranks, which must not live on by themselves."""
    ranks, who = case.launch(), case.rng.choice(["runner", "launch"])
    case.moment(ranks)
    member = ranks.members().get(who)
    if member is not None:
        member.send_signal(signal.SIGKILL)
    # Of a child that a signal killed deepspeed says nothing: its exit code is 0 (docs/reliability.md).
    return _launched(case, ranks, failed=member is not None and who == "runner")


@fault
def launcher_told_to_stop(case: Case) -> Verdict:
    """SIGTERM or SIGINT to `deepspeed`, to the process between, or to all of them as a terminal does."""
    ranks = case.launch()
    case.moment(ranks)
    number, who = case.rng.choice([signal.SIGTERM, signal.SIGINT]), case.rng.choice(["runner", "launch", "all"])
    if who == "all":
        ranks.signal(number)
    elif (member := ranks.members().get(who)) is not None:
        member.send_signal(number)
    return _launched(case, ranks, failed=False)


def _launched(case: Case, ranks: Launched, failed: bool) -> Verdict:
    result = case.wait(ranks)
    orphans = ranks.leftovers()
    if orphans:
        return Verdict(False, f"orphans: {orphans}", said=result.said)
    if failed and result.finished and not (case.out / "finished.json").exists():
        return Verdict(False, "the launcher says that all is well", silent_change=True, said=result.said)
    return case.finish()


# What is on the disk changes


@contextlib.contextmanager
def _own_data(case: Case) -> Iterator[None]:
    """Data of the case's own, to damage."""
    shared = case.data
    case.data = case.folder / "data"
    shutil.copytree(shared, case.data)
    try:
        yield
    finally:
        case.data = shared


def _repairing(path: Path) -> Callable[[], None]:
    content = path.read_bytes()

    def repair() -> None:
        path.write_bytes(content)

    return repair


@fault
def shard_damaged_while_training(case: Case) -> Verdict:
    """A byte is flipped, a shard cut short or deleted at a random moment of the run."""
    with _own_data(case):
        path = case.rng.choice(sorted(case.data.glob("*/*.arrow")))
        repair = _repairing(path)
        ranks = case.start()
        case.moment(ranks)
        if ranks.poll():
            damage(case.rng, path)
        result = case.wait(ranks)
        return _over_or_error(case, result, repair, path.name)


@fault
def shard_damaged_between_two_starts(case: Case) -> Verdict:
    """The same, between a stop and the next start."""
    case.to_the_middle()
    with _own_data(case):
        path = case.rng.choice(sorted(case.data.glob("*/*.arrow")))
        repair = _repairing(path)
        damage(case.rng, path)
        return _over_or_error(case, case.wait(case.start()), repair, path.name)


@fault
def manifest_damaged(case: Case) -> Verdict:
    """A manifest is damaged between two starts."""
    case.to_the_middle()
    with _own_data(case):
        path = case.rng.choice(sorted(case.data.glob("*/manifest.json")))
        repair = _repairing(path)
        damage(case.rng, path)
        return _over_or_error(case, case.wait(case.start()), repair, "manifest", "fingerprints", "vocabular", "rows")


@fault
def checkpoint_damaged(case: Case) -> Verdict:
    """A file of the newest checkpoint is damaged: the run goes on from the one before, without being asked to."""
    case.to_the_middle()
    newest, _ = Checkpoints(case.out, 1, 0).newest()
    assert newest is not None
    path = case.rng.choice(sorted(newest.iterdir()))
    damage(case.rng, path)
    return case.finish()


@fault
def run_folder_damaged(case: Case) -> Verdict:
    """A record of the run folder that a start reads is cut short or deleted."""
    case.to_the_middle()
    path = case.out / case.rng.choice(["config.json", "checkpoints/latest.json"])
    repair = _repairing(path)
    case.rng.choice([truncate, delete])(case.rng, path)
    return _over_or_error(case, case.wait(case.start()), repair, path.name)


@fault
def another_rate_without_a_configuration(case: Case) -> Verdict:
    """`config.json` is gone, and the command that follows has another rate: refused, the right one goes on."""
    case.to_the_middle()
    (case.out / "config.json").unlink()
    other = case.rng.choice([("optimizer.learning-rate", "1e-5"), ("engine.precision", "bf16"), ("train.seed", "77")])
    result = case.wait(case.start(f"--{other[0]}", other[1]))
    if result.finished:
        return Verdict(False, f"{other[0]} {other[1]} was accepted", silent_change=True, said=result.said)
    if not result.clear_error(other[0].replace("-", "_")):
        return _not_clear(result)
    return case.finish()


@fault
def checkpoint_of_another_run(case: Case) -> Verdict:
    """A checkpoint of a run with another rate is copied in as the newest: left out, or refused by name."""
    case.to_the_middle()
    place = case.out
    case.folder = case.logs / "other"
    case.folder.mkdir()
    result = case.wait(case.start("--optimizer.learning-rate", "1e-5", "--train.steps", str(STEPS)))
    assert result.finished, result.said
    theirs, _ = Checkpoints(case.out, 1, 0).newest()
    assert theirs is not None
    case.folder = case.logs
    copy = place / "checkpoints" / case.rng.choice([theirs.name, f"step_{STEPS - 1:08d}"])
    shutil.copytree(theirs, copy)
    result = case.wait(case.start())
    if result.finished:
        return case.compare()
    if not result.clear_error(copy.name):
        return _not_clear(result)
    shutil.rmtree(copy)
    return case.finish()


@fault
def record_damaged(case: Case) -> Verdict:
    """A line of `metrics.jsonl` is damaged: it is named, and all others stay."""
    case.to_the_middle()
    path = case.out / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    steps = [number for number, line in enumerate(lines[:-1]) if b"grad_norm" in line]
    victim = case.rng.choice(steps)
    step = int(json.loads(lines[victim])["step"])
    cut = case.rng.randrange(1, len(lines[victim]))
    lines[victim] = case.rng.choice([lines[victim][:cut], b"\0" * cut, b"\xff\xfe" + lines[victim]])
    path.write_bytes(b"\n".join(lines))
    verdict = case.finish(unread=step)
    named = any("metrics.jsonl" in text for text in verdict.said)
    return verdict if named or not verdict.survived else Verdict(False, "nothing was said of it", said=verdict.said)


@fault
def clock_jumped(case: Case) -> Verdict:
    """Between two starts every file of run and data gets a date of its own, up to ten years back or ahead."""
    case.to_the_middle()
    with _own_data(case):
        for path in [*case.out.rglob("*"), *case.data.rglob("*")]:
            date = time.time() + case.rng.uniform(-1, 1) * 3.15e8
            os.utime(path, (date, date))
        return case.finish()


# The disk and permissions


@fault
def disk_full(case: Case) -> Verdict:
    """The file system of the run folder fills up at a random moment; there is room again at the next start."""
    with mounted(case.out.parent / "disk", "24m"):
        case.folder = case.out.parent / "disk"
        ranks = case.start()
        case.moment(ranks)
        full = case.folder / "filler"
        fill(full)
        result = case.wait(ranks)
        return _over_or_error(case, result, lambda: full.unlink(missing_ok=True), "No space left on device")


@fault
def checkpoints_read_only(case: Case) -> Verdict:
    """The checkpoints' file system can no longer be written; later it can."""
    folder = case.out / "checkpoints"
    with mounted(folder, "24m"):
        ranks = case.start()
        case.moment(ranks)

        def mount(mode: str) -> bool:
            return subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], capture_output=True).returncode == 0

        ranks.until(lambda: mount("ro"))
        result = case.wait(ranks)
        return _over_or_error(case, result, lambda: mount("rw"), "Read-only file system")


@fault
def no_permission(case: Case) -> Verdict:
    """The run folder or its checkpoints belong to somebody else; then they do not."""
    case.to_the_middle()
    theirs = case.rng.choice([case.out, case.out / "checkpoints"])
    os.chown(theirs, 65534, 65534)
    (case.out / LOCK).unlink()
    ranks = case.start(patch=lambda rank: obey_permissions())
    result = case.wait(ranks)
    os.chown(theirs, 0, 0)
    if not result.clear_error("Permission denied"):
        return _not_clear(result)
    return case.finish()


@fault
def two_runs_in_one_folder(case: Case) -> Verdict:
    """The second, which may come by a link to the folder, is refused, and the first does not notice."""
    first = case.start()
    first.until(lambda: (case.out / LOCK).exists())
    case.moment(first)
    if not first.poll():
        case.wait(first)
        return case.compare()
    place = case.out
    if case.rng.random() < 0.5:
        case.folder = case.logs / "link"
        case.folder.mkdir()
        case.out.symlink_to(place)
    second = case.start()
    case.folder = case.logs
    refused = second.wait()
    result = case.wait(first)
    if not result.finished:
        return Verdict(False, f"the first ended with {result.codes}", said=result.said)
    late = refused.finished and "all 24 steps are done" in "".join(refused.said)
    if not late and not refused.clear_error("another process is still working"):
        return _not_clear(refused)
    return case.compare()


# Numbers


@fault
def loss_infinite(case: Case) -> Verdict:
    """Two steps have an infinite loss; a kill in between changes nothing."""
    return _bad(case, "loss")


@fault
def gradient_not_a_number(case: Case) -> Verdict:
    """Two steps have a gradient that is no number, on one rank."""
    return _bad(case, "gradient")


def _bad(case: Case, what: str) -> Verdict:
    steps = (5, 14)
    spoil = bad_steps(steps, what, case.rng.randrange(2))
    ranks = case.start(patch=spoil)
    if case.rng.random() < 0.5:
        case.moment(ranks)
        ranks.signal(signal.SIGKILL, case.rng.randrange(2))
    case.wait(ranks)
    return case.finish(spoil, left_out=steps)


@fault
def loss_infinite_for_good(case: Case) -> Verdict:
    """Three bad steps in a row end the run, its rows named; without what made them bad it goes on behind them."""
    steps = (9, 10, 11)
    result = case.wait(case.start(patch=bad_steps(steps, "loss", case.rng.randrange(2))))
    if not result.clear_error("mono 8"):  # step 11 reads rows 88 to 95
        return _not_clear(result)
    return case.finish(left_out=steps)


# Commands beside training


@fault
def killed_inside_a_conversion(case: Case) -> Verdict:
    """`checkpoint convert` is killed and called again: the same file."""
    case.to_the_middle()
    whole, broken = case.folder / "whole", case.folder / "broken"

    def convert(out: Path) -> Ranks:
        words = ["convert", "--run", str(case.out), "--out", str(out)]
        return Ranks(lambda rank: checkpoint.main(words), 1, case.folder, distributed=False)

    first = convert(whole)
    result = first.wait()
    assert result.finished, result.said
    ranks = convert(broken)
    if case.rng.random() < 0.5:
        ranks.until((case.folder / "broken.partial").exists)
    else:
        seconds = case.rng.uniform(0, 0.1)
        ranks.until(lambda: ranks.age > seconds)
    ranks.signal(signal.SIGKILL)
    ranks.wait()
    if not broken.exists():
        result = convert(broken).wait()
        if not result.finished:
            return Verdict(False, "it could not be done again", said=result.said)
    same = all((broken / path.name).read_bytes() == path.read_bytes() for path in whole.iterdir())
    if not same:
        return Verdict(False, "another conversion", silent_change=True)
    return case.finish()
