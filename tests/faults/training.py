"""The faults of the campaign in training. Each takes a fresh case and makes its fault at a random place or moment; the
same command once more, and the comparison, follow it (`FaultCase.finish`). It raises `NotSurvived` where the run ended
in another way than it should."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.faults.case import DAMAGES, STEPS, FaultCase, bad_steps, delete, fill, truncate
from tests.faults.forked import ForkedRanks, LaunchedRanks, obey_permissions
from xlme_ds.checkpoint import __main__ as checkpoint
from xlme_ds.checkpoint.checkpoints import Checkpoints
from xlme_ds.train.run_folder import LOCK_FILE


def _kill(case: FaultCase, ranks: ForkedRanks, every: bool = False) -> None:
    ranks.signal(signal.SIGKILL, None if every else case.rng.randrange(2))
    case.wait(ranks)


def killed(case: FaultCase, times: int, every: bool) -> None:
    """SIGKILL at a random moment: of a random rank, or of all at once, as when a machine loses its power."""
    for _ in range(times):
        _kill(case, case.moment(case.start()), every)


def killed_inside_a_save(case: FaultCase) -> None:
    """A rank is killed within 20 ms after a checkpoint's folder appeared."""
    ranks, which = case.start(), case.rng.randint(1, 5)
    seen: set[str] = set()

    def saving() -> bool:
        seen.update(path.name for path in (case.out / "checkpoints").glob("*.partial"))
        return len(seen) >= which

    ranks.until(saving)
    time.sleep(case.rng.uniform(0, 0.02))
    _kill(case, ranks)


def killed_inside_a_resume(case: FaultCase) -> None:
    """A rank is killed while the run starts again and loads its checkpoint."""
    ranks, attempts = case.start(), case.out / "audit/attempts.jsonl"
    starts = attempts.read_bytes().count(b"\n")
    seconds = case.rng.uniform(0, 0.5 * case.seconds)
    ranks.until(lambda: ranks.age > seconds or attempts.read_bytes().count(b"\n") > starts)
    _kill(case, ranks)


def told_to_stop(case: FaultCase) -> None:
    """SIGTERM, SIGUSR1 or SIGINT to a random rank at a random moment, also while it starts: exit code 0, nothing
    lost."""
    ranks = case.start()
    ranks.until(lambda: any(log.exists() for log in ranks.logs))
    time.sleep(0.05)  # Python's own start is no part of the command: handlers are its first act
    case.moment(ranks)
    ranks.signal(case.rng.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]), case.rng.randrange(2))
    ended = case.wait(ranks)
    ended.need(ended.finished, f"exit codes {ended.codes} after a signal to stop")


def rank_hangs(case: FaultCase) -> None:
    """SIGSTOP of a random rank: the other's watchdog ends the run and shows its stacks."""
    ranks, victim = case.start("--train.watchdog-minutes", "0.3"), case.rng.randrange(2)
    case.until_step(ranks, 1)
    ranks.signal(signal.SIGSTOP, victim)
    ended = case.wait(ranks)
    other = ended.said[1 - victim]
    seen = not ended.hung and ended.codes[1 - victim] == 1
    seen = seen and "stood still" in other and "most recent call first" in other
    ended.need(seen, f"exit codes {ended.codes}, the watchdog did not end it")


def _send(ranks: LaunchedRanks, who: str, number: int) -> bool:
    member = ranks.members().get(who)
    if member is not None:
        member.send_signal(number)
    return member is not None


def rank_killed_under_the_launcher(case: FaultCase) -> None:
    """SIGKILL of a random rank that `deepspeed` started: it ends the other and says that it failed."""
    ranks = case.launch()
    case.until_step(ranks, 1)
    _launched(case, ranks, failed=_send(ranks, str(case.rng.randrange(2)), signal.SIGKILL))


def launcher_killed(case: FaultCase) -> None:
    """SIGKILL of `deepspeed` or of the process between it and the ranks, which must not live on by themselves."""
    ranks, who = case.launch(), case.rng.choice(["runner", "launch"])
    case.moment(ranks)
    # deepspeed does not report a child that a signal killed: its exit code is 0 (docs/howto/resume.md).
    _launched(case, ranks, failed=_send(ranks, who, signal.SIGKILL) and who == "runner")


def launcher_told_to_stop(case: FaultCase) -> None:
    """SIGTERM or SIGINT to `deepspeed`, to the process between, or to all of them as a terminal does."""
    ranks = case.moment(case.launch())
    number, who = case.rng.choice([signal.SIGTERM, signal.SIGINT]), case.rng.choice(["runner", "launch", "all"])
    if who == "all":
        ranks.signal(number)
    else:
        _send(ranks, who, number)
    _launched(case, ranks, failed=False)


def _launched(case: FaultCase, ranks: LaunchedRanks, failed: bool) -> None:
    ended = case.wait(ranks)
    orphans = ranks.leftovers()
    ended.need(not orphans, f"orphans: {orphans}")
    unnoticed = failed and ended.finished and not (case.out / "finished.json").exists()
    ended.need(not unnoticed, "the launcher says that all is well", silent_change=True)


def shard_damaged_while_training(case: FaultCase) -> None:
    """A bit is flipped, a shard cut short or deleted at a random moment of the run."""
    case.own_data()
    path = case.rng.choice(sorted(case.data.glob("*/*.arrow")))
    content = path.read_bytes()
    ranks = case.moment(case.start())
    if ranks.running():
        case.rng.choice(DAMAGES)(case.rng, path)
    case.repaired(case.wait(ranks), lambda: path.write_bytes(content), path.name)


def data_damaged(case: FaultCase, files: str, words: tuple[str, ...] = ()) -> None:
    """One of these files of the data is damaged."""
    case.own_data()
    _damaged(case, sorted(case.data.glob(files)), DAMAGES, words)


def run_folder_damaged(case: FaultCase) -> None:
    """A record of the run folder that a start reads is cut short or deleted."""
    _damaged(case, [case.out / "config.json", case.out / "checkpoints/latest.json"], (truncate, delete))


def _damaged(
    case: FaultCase, files: list[Path], ways: tuple[Callable[..., None], ...], words: tuple[str, ...] = ()
) -> None:
    path = case.rng.choice(files)
    content = path.read_bytes()
    case.rng.choice(ways)(case.rng, path)
    case.repaired(case.run(), lambda: path.write_bytes(content), *(words or (path.name,)))


def checkpoint_damaged(case: FaultCase) -> None:
    """A file of the newest checkpoint is damaged: the run goes on from the one before by itself."""
    newest, _ = Checkpoints(case.out, 1, 0).newest()
    assert newest is not None
    path = case.rng.choice(sorted(newest.iterdir()))
    case.rng.choice(DAMAGES)(case.rng, path)


def another_rate_without_a_configuration(case: FaultCase) -> None:
    """`config.json` is gone, and the command that follows has another rate: refused, the right one goes on."""
    (case.out / "config.json").unlink()
    others = [("optimizer.learning-rate", "1e-5"), ("engine.precision", "bf16"), ("seed", "77")]
    name, value = case.rng.choice(others)
    ended = case.run(f"--{name}", value)
    ended.need(not ended.finished, f"{name} {value} was accepted", silent_change=True)
    ended.need_error(name.replace("-", "_"))


def checkpoint_of_another_run(case: FaultCase) -> None:
    """A checkpoint of a run with another rate is copied in as the newest: left out, or refused by name."""
    place = case.out
    case.folder = case.logs / "other"
    case.folder.mkdir()
    ended = case.run("--optimizer.learning-rate", "1e-5")
    assert ended.finished, ended.said
    theirs, _ = Checkpoints(case.out, 1, 0).newest()
    assert theirs is not None
    case.folder = case.logs
    copy = place / "checkpoints" / case.rng.choice([theirs.name, f"step_{STEPS - 1:08d}"])
    shutil.copytree(theirs, copy)
    ended = case.run()
    case.done = ended.finished
    if not case.done:
        ended.need_error(copy.name)
        shutil.rmtree(copy)


def record_damaged(case: FaultCase) -> None:
    """A line of `metrics.jsonl` is damaged: it is named, and all others stay."""
    path = case.out / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    victim = case.rng.choice([number for number, line in enumerate(lines[:-1]) if b"grad_norm" in line])
    line = lines[victim]
    case.unread = int(json.loads(line)["step"])
    cut = case.rng.randrange(1, len(line))
    lines[victim] = case.rng.choice([line[:cut], b"\0" * cut, b"\xff\xfe" + line])
    path.write_bytes(b"\n".join(lines))
    ended = case.run()
    ended.need(ended.finished, "it did not go on")
    ended.need(any("metrics.jsonl" in text for text in ended.said), "the damaged line was not named")
    case.done = True


def clock_jumped(case: FaultCase) -> None:
    """Every file of run and data gets a date of its own, up to ten years back or ahead."""
    case.own_data()
    for path in [*case.out.rglob("*"), *case.data.rglob("*")]:
        date = time.time() + case.rng.uniform(-1, 1) * 3.15e8
        os.utime(path, (date, date))


def disk_full(case: FaultCase) -> None:
    """The file system of the run folder fills up at a random moment; there is room again at the next start."""
    case.folder = case.mount(case.logs / "disk", "24m")
    ranks, full = case.moment(case.start()), case.folder / "filler"
    fill(full)
    case.repaired(case.wait(ranks), partial(full.unlink, missing_ok=True), "No space left on device")


def checkpoints_read_only(case: FaultCase) -> None:
    """The checkpoints' file system can no longer be written; later it can."""
    folder = case.mount(case.out / "checkpoints", "24m")
    ranks = case.moment(case.start())

    def remount(mode: str) -> bool:
        return subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], capture_output=True).returncode == 0

    ranks.until(lambda: remount("ro"))
    case.repaired(case.wait(ranks), lambda: remount("rw"), "Read-only file system")


def no_permission(case: FaultCase) -> None:
    """The run folder or its checkpoints belong to somebody else; then they do not."""
    theirs = case.rng.choice([case.out, case.out / "checkpoints"])
    os.chown(theirs, 65534, 65534)
    (case.out / LOCK_FILE).unlink()
    ended = case.run(patch=lambda rank: obey_permissions())
    os.chown(theirs, 0, 0)
    ended.need_error("Permission denied")


def two_runs_in_one_folder(case: FaultCase) -> None:
    """The second, which may come by a link to the folder, is refused, and the first does not notice."""
    first, case.done = case.start(), True
    first.until(lambda: (case.out / LOCK_FILE).exists())
    case.moment(first)
    if not first.running():
        case.wait(first)
        return
    place = case.out
    if case.rng.random() < 0.5:
        case.folder = case.logs / "link"
        case.folder.mkdir()
        case.out.symlink_to(place)
    second = case.start()
    case.folder = case.logs
    refused, ended = second.wait(), case.wait(first)
    ended.need(ended.finished, f"the first ended with {ended.codes}")
    if not refused.finished or "all 24 steps are done" not in "".join(refused.said):  # it did not come too late
        refused.need_error("another process is still working")


def bad_numbers(case: FaultCase, what: str) -> None:
    """Two steps have an infinite loss, or on one rank a gradient that is no number; a kill in between changes
    nothing."""
    case.left_out = (5, 14)
    case.patch = bad_steps(case.left_out, what, case.rng.randrange(2))
    ranks = case.start(patch=case.patch)
    if case.rng.random() < 0.5:
        case.moment(ranks).signal(signal.SIGKILL, case.rng.randrange(2))
    case.wait(ranks)


def loss_infinite_for_good(case: FaultCase) -> None:
    """Three bad steps in a row end the run, and it names their rows; with the cause gone it goes on after them."""
    case.left_out = (9, 10, 11)
    ended = case.run(patch=bad_steps(case.left_out, "loss", case.rng.randrange(2)))
    ended.need_error("mono 8")  # step 11 reads rows 88 to 95


def killed_inside_a_conversion(case: FaultCase) -> None:
    """`checkpoint convert` is killed and called again: the same file."""
    whole, broken = case.folder / "whole", case.folder / "broken"

    def convert(out: Path) -> ForkedRanks:
        words = ["convert", "--run", str(case.out), "--out", str(out)]
        return ForkedRanks(lambda rank: checkpoint.main(words), 1, case.folder, group=False)

    ended = convert(whole).wait()
    assert ended.finished, ended.said
    ranks = convert(broken)
    if case.rng.random() < 0.5:
        ranks.until((case.folder / "broken.partial").exists)
    else:
        ranks.until_age(case.rng.uniform(0, 0.1))
    ranks.signal(signal.SIGKILL)
    ranks.wait()
    if not broken.exists():
        ended = convert(broken).wait()
        ended.need(ended.finished, "it could not be done again")
    same = all((broken / path.name).read_bytes() == path.read_bytes() for path in whole.iterdir())
    ended.need(same, "another conversion", silent_change=True)


_SHARDS, _MANIFESTS = "*/*.arrow", "*/manifest.json"
_OF_A_MANIFEST = ("manifest", "fingerprints", "vocabular", "rows")
FRESH, MIDDLE = False, True  # whether the run was stopped in its middle before the fault
KINDS: dict[str, tuple[bool, Callable[[FaultCase], None]]] = {
    "rank killed": (FRESH, partial(killed, times=2, every=False)),
    "all ranks killed": (FRESH, partial(killed, times=1, every=True)),
    "killed inside a save": (FRESH, killed_inside_a_save),
    "killed inside a resume": (MIDDLE, killed_inside_a_resume),
    "told to stop": (FRESH, told_to_stop),
    "rank hangs": (FRESH, rank_hangs),
    "rank killed under the launcher": (FRESH, rank_killed_under_the_launcher),
    "launcher killed": (FRESH, launcher_killed),
    "launcher told to stop": (FRESH, launcher_told_to_stop),
    "shard damaged while training": (FRESH, shard_damaged_while_training),
    "shard damaged between two starts": (MIDDLE, partial(data_damaged, files=_SHARDS)),
    "manifest damaged": (MIDDLE, partial(data_damaged, files=_MANIFESTS, words=_OF_A_MANIFEST)),
    "checkpoint damaged": (MIDDLE, checkpoint_damaged),
    "run folder damaged": (MIDDLE, run_folder_damaged),
    "another rate without a configuration": (MIDDLE, another_rate_without_a_configuration),
    "checkpoint of another run": (MIDDLE, checkpoint_of_another_run),
    "record damaged": (MIDDLE, record_damaged),
    "clock jumped": (MIDDLE, clock_jumped),
    "disk full": (FRESH, disk_full),
    "checkpoints read only": (FRESH, checkpoints_read_only),
    "no permission": (MIDDLE, no_permission),
    "two runs in one folder": (FRESH, two_runs_in_one_folder),
    "loss infinite": (FRESH, partial(bad_numbers, what="loss")),
    "gradient not a number": (FRESH, partial(bad_numbers, what="gradient")),
    "loss infinite for good": (FRESH, loss_infinite_for_good),
    "killed inside a conversion": (MIDDLE, killed_inside_a_conversion),
}
