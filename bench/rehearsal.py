"""The whole road of data preparation on a synthetic corpus of any size, as Slurm jobs that are killed on the way.

    python -m bench.rehearsal --gigabytes N [--source FOLDER] [--out FOLDER] [--no-kills] [-- SBATCH_OPTION...]

Text, vocap, vocab, encode, mix, verify, stats, and 20 steps of training that are stopped in the middle: each stage is a
job of `slurm/stage.sh` or `slurm/pretrain_base.sh`, with the options of sbatch after `--`.
While a stage that leaves markers of its tasks runs, one of its ranks, or the whole step, is killed with SIGKILL. What
came out is checked by `bench.rehearsal_checks`; the first difference ends the rehearsal. The same command goes on after
an interruption: OUT/rehearsal.json has what is done, and a table is printed at the end.

Where nothing keeps them, text and encoded shards are deleted as soon as their last reader is done.
"""

import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench import rehearsal_checks as checks
from bench.rehearsal_report import report
from bench.rehearsal_text import files
from xlme_ds.io.files import write_json

ROOT = Path(__file__).resolve().parents[1]
STEPS, STOP_AT = 20, 8
GOES_ON = ("vocap", "vocab", "encode", "mix")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
TRAINING = {
    "model.width": 32, "model.heads": 4, "model.feed-forward": 64, "model.generator-layers": 1,
    "model.discriminator-layers": 2, "data.mono-rows": 8, "data.para-rows": 8, "data.micro-batch": 2,
    "engine.precision": "fp32", "optimizer.warmup-steps": 4, "train.steps": STEPS, "train.log-every": 1,
    "train.save-every": 4,
}  # fmt: skip


IDS = 524_288


def ids_of(gigabytes: float) -> int:
    """The size of a vocabulary that so much text gives: 0.06 GB have 333,158 different pieces."""
    return min(IDS, round(4e6 * gigabytes))


@dataclass(frozen=True)
class Rehearsal:
    """What is rehearsed, and how large."""

    gigabytes: float
    source: Path
    out: Path
    ids: int
    seed: int = 0
    rows: int = 10_000_000
    sentences: int = 1_000_000
    keep: bool = False
    kills: bool = True
    options: Sequence[str] = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0")
    ways: Sequence[Callable[["BatchJob"], None]] = ()
    """More ways to disturb a job than SIGKILL to a rank and to a step."""
    rows_per_shard: int = 65_536

    @property
    def text(self) -> list[str]:
        """The flags of data_prep that name the corpora."""
        names = sorted({file.corpus for file in files(self.gigabytes)})
        return [word for name in names
                for word in ("--corpus", name, "--where", f"{name}={self.out / 'text' / name}")]  # fmt: skip


@dataclass(frozen=True)
class BatchJob:
    """A batch job of the rehearsal."""

    number: int
    log: Path
    notes: Path

    def field(self, name: str) -> str:
        """A field of `scontrol show job`; empty once Slurm has forgotten the job."""
        found = re.search(rf"\b{name}=(\S*)", slurm("scontrol", "show", "job", "--oneliner", str(self.number)))
        return found[1] if found else ""

    def kill_rank(self) -> None:
        """SIGKILL to one of its processes, on its node."""
        now = time.time()
        alive = [note for path in self.notes.glob("*.json") if now - path.stat().st_mtime < 3 and (note := _read(path))]
        if alive:
            note = random.choice(alive)
            slurm("srun", "--overlap", f"--jobid={self.number}", "--mpi=none", "--nodes=1", "--ntasks=1",
                  f"--nodelist={note['host']}", "kill", "-9", str(note["pid"]))  # fmt: skip

    def kill_step(self) -> None:
        """SIGKILL to all of its ranks."""
        slurm("scancel", "--signal=KILL", f"{self.number}.0")


@dataclass
class Record:
    """OUT/rehearsal.json: what is done."""

    path: Path
    done: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(rehearsal: Rehearsal) -> "Record":
        """What an earlier call left."""
        made = Record(rehearsal.out / "rehearsal.json")
        settings = {
            key: str(value) for key, value in asdict(rehearsal).items() if key not in ("options", "ways", "keep")
        }
        if made.path.exists():
            found = json.loads(made.path.read_text())
            if found["settings"] != settings:
                raise ValueError(f"{made.path} is of another rehearsal: choose another --out, or delete that folder")
            made.done = found
        else:
            made.done = {"settings": settings, "stages": {}, "checks": {}}
            rehearsal.out.mkdir(parents=True, exist_ok=True)
        return made

    def note(self, part: str, name: str, value: Any) -> None:
        """Keep a stage's or a check's result."""
        self.done[part][name] = value
        write_json(self.path, self.done)


def slurm(*command: str, **variables: object) -> str:
    """What one of Slurm's commands printed; ValueError where sbatch refuses."""
    env = dict(os.environ, PYTHONPATH=os.environ.get("PYTHONPATH", str(ROOT)))
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=env | {k: str(v) for k, v in variables.items()},
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode and command[0] == "sbatch":
        raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def submit(rehearsal: Rehearsal, name: str, script: Sequence[str], **variables: object) -> BatchJob:
    """`sbatch` of a script, measured."""
    logs, notes = rehearsal.out / "logs", rehearsal.out / "measured" / name
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}-%j.out"
    python = f"{os.environ.get('XLME_PYTHON', 'python')} -m bench.measured '{notes}'"
    said = slurm("sbatch", "--parsable", f"--job-name=rehearsal-{name}", f"--output={log}", *rehearsal.options, *script,
                 XLME_PYTHON=python, OMP_NUM_THREADS=1, **variables)  # fmt: skip
    number = int(said.strip().split(";")[0])
    return BatchJob(number, Path(str(log).replace("%j", str(number))), notes)


def wait(job: BatchJob, disturb: Callable[[], None]) -> None:
    """Wait for the end of a job, and disturb it meanwhile; ValueError where it fails."""
    while (state := job.field("JobState")) not in OVER:
        disturb()
        time.sleep(0.2)
    if state != "COMPLETED":
        raise ValueError(f"job {job.number} ended as {state}: see {job.log}")


def finished_tasks(out: Path) -> int:
    """Markers of tasks in the folder of a stage."""
    return sum(not path.name.endswith(".begun.json") for path in out.glob("**/tasks/*.json"))


@dataclass
class Killer:
    """Kills a stage once, at a random moment after the first task that it finishes."""

    rehearsal: Rehearsal
    job: BatchJob
    out: Path
    way: Callable[["BatchJob"], None]
    at: float  # seconds after that task, then the time of the kill
    killed: list[str] = field(default_factory=list)
    before: int = field(init=False)
    due: bool = False

    def __post_init__(self) -> None:
        self.before = finished_tasks(self.out)

    def __call__(self) -> None:
        """Look whether the moment has come, and after the kill whether Slurm has requeued the job."""
        if self.killed or not self.rehearsal.kills:
            return
        if not self.due:
            if finished_tasks(self.out) > self.before and self.job.field("JobState") == "RUNNING":
                self.due, self.at = True, time.time() + self.at
        elif time.time() > self.at:
            restarts = int(self.job.field("Restarts") or 0)
            self.way(self.job)
            deadline = time.time() + 120  # a rank that had ended before the signal leads to no restart
            while time.time() < deadline and self.job.field("JobState") not in OVER:
                if int(self.job.field("Restarts") or 0) > restarts:
                    self.killed.append(self.way.__name__)
                    return
                time.sleep(0.2)
            self.killed.append("none: too late")


def stage(rehearsal: Rehearsal, progress: Record, name: str, words: Sequence[object], out: Path | None = None) -> None:
    """A stage of data preparation as a job; `name` may have a part after a dot, for its second call."""
    if name in progress.done["stages"]:
        return
    kind, begin = name.split(".")[0], time.time()
    print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
    job = submit(rehearsal, name, ["slurm/stage.sh", kind, *map(str, words), *(["--out", str(out)] if out else [])])
    killer = None
    if kind in GOES_ON and out is not None and not name.endswith("many"):
        ways = (BatchJob.kill_rank, BatchJob.kill_step, *rehearsal.ways)
        predicted = checks.predicted(rehearsal.gigabytes, rehearsal.rows)[kind]
        moment = random.Random(f"{rehearsal.seed} {name}").random() * min(predicted / 2, 600)
        killer = Killer(rehearsal, job, out, ways[len(progress.done["stages"]) % len(ways)], moment)
    wait(job, killer or (lambda: None))
    written = sum(path.is_file() for path in out.rglob("*")) if out else 0
    found = checks.measured(job.notes)
    found |= {"seconds": time.time() - begin, "files": written, "kills": killer.killed if killer else []}
    progress.note("stages", name, found)


def check(progress: Record, name: str, look: Callable[[], Any]) -> None:
    """A check, once; ValueError at the first difference."""
    if name not in progress.done["checks"]:
        print(f"{time.strftime('%H:%M:%S')} check {name}", flush=True)
        progress.note("checks", name, look())


def write_text_files(rehearsal: Rehearsal, progress: Record) -> None:
    """The corpus, over all ranks; and a slice of it for the case of many shards."""
    text, begin = rehearsal.out / "text", time.time()
    if "text" not in progress.done["stages"]:
        print(f"{time.strftime('%H:%M:%S')} text", flush=True)
        source = rehearsal.source.resolve()
        words = ["-m", "bench.rehearsal_text", "--gigabytes", rehearsal.gigabytes, "--source", source]
        words += ["--out", text, "--seed", rehearsal.seed]
        run = shlex.join(map(str, words))
        wrapped = f'. slurm/job.sh; begin /dev/null; srun --mpi=$XLME_MPI_TYPE "${{python[@]}}" {run}'
        job = submit(rehearsal, "text", [f"--wrap=exec bash -c {shlex.quote(wrapped)}"])
        wait(job, lambda: None)
        found = checks.measured(job.notes) | {"seconds": time.time() - begin, "kills": []}
        found["files"] = sum(path.is_file() for path in text.rglob("*"))
        progress.note("stages", "text", found)
    check(progress, "slice", lambda: checks.cut_slice(text, rehearsal.out / "slice", rehearsal.gigabytes))


def run(rehearsal: Rehearsal) -> dict[str, Any]:
    """The whole road; returns what OUT/rehearsal.json holds."""
    progress = prepare(rehearsal)
    train(rehearsal, progress)
    check(progress, "xl", lambda: checks.xl(rehearsal.ids))
    many(rehearsal, progress)
    return progress.done


def prepare(rehearsal: Rehearsal) -> Record:
    """From text to rows, checked."""
    progress, out = Record.of(rehearsal), rehearsal.out
    go, look = partial(stage, rehearsal, progress), partial(check, progress)
    write_text_files(rehearsal, progress)
    small = rehearsal.ids < 100_000
    curves = ["--shrink", 0.5, "--largest", max(rehearsal.ids // 4, 16), "--step", max(rehearsal.ids // 500, 1)]
    lines = ["--sentences", rehearsal.sentences, *(curves if small else [])]
    go("vocap", [*rehearsal.text, "--size", rehearsal.ids, *lines], out / "vocap")
    lines = ["--sentences", 10 * rehearsal.sentences]
    go("vocab", [*rehearsal.text, "--size", min(250_002, rehearsal.ids // 2 + 2), *lines], out / "vocab")
    go("vocab.large", [*rehearsal.text, "--size", rehearsal.ids, *lines], out / "vocab_large")
    look("tokens", lambda: checks.tokens(out, files(rehearsal.gigabytes)))
    go("encode", [*rehearsal.text, "--vocab", out / "vocap"], out / "encoded")
    look("planted", lambda: checks.planted(out / "text", files(rehearsal.gigabytes), out / "encoded"))
    if not rehearsal.keep:
        for name in {file.corpus for file in files(rehearsal.gigabytes)}:
            shutil.rmtree(out / "text" / name, ignore_errors=True)
    for task in ("mono", "para"):
        mix = ["--encoded", out / "encoded", "--vocab", out / "vocap", f"--{task}-rows", rehearsal.rows]
        go(f"mix.{task}", [*mix, "--seed", rehearsal.seed, "--rows-per-shard", rehearsal.rows_per_shard], out / "mixed")
        view = out / "views" / task
        view.mkdir(parents=True, exist_ok=True)
        if not (view / task).is_symlink():
            (view / task).symlink_to((out / "mixed" / task).resolve())
        go(f"stats.{task}", ["--encoded", out / "encoded", "--data", view], out / "stats" / task)
        look(f"rows.{task}", lambda task=task: checks.mixed_rows(out, task, rehearsal.rows))
        if not rehearsal.keep:  # the manifest stays: it names the languages of both tasks
            for folder in (out / "encoded" / task).iterdir():
                if folder.is_dir():
                    shutil.rmtree(folder)
    go("verify", ["--data", out / "mixed"])
    look("passes", lambda: checks.passes(out / "mixed" / "mono"))
    look("epoch", lambda: checks.epoch(rehearsal.rows))
    look("first batch", lambda: checks.first_batch(out / "mixed"))
    look("sha256", lambda: checks.sums(out))
    return progress


def train(rehearsal: Rehearsal, progress: Record) -> None:
    """Twenty narrow steps of Base's recipe with the whole vocabulary, stopped and resumed, and their audit."""
    if "train" in progress.done["stages"]:
        return
    out, begin = rehearsal.out / "run", time.time()
    print(f"{time.strftime('%H:%M:%S')} train", flush=True)
    settings = TRAINING | {"model.vocabulary": rehearsal.ids}
    words = ["--train.audit", *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]
    script = ["--gpus-per-node=1", "slurm/pretrain_base.sh", *words]
    job = submit(rehearsal, "train", script, XLME_DATA=rehearsal.out / "mixed", XLME_OUT=out, XLME_HELDOUT="")
    stopped: list[str] = []

    def disturb() -> None:
        log = out / "metrics.jsonl"
        if rehearsal.kills and not stopped and log.exists() and log.read_text().count("\n") >= STOP_AT:
            slurm("scancel", "--signal=USR1", str(job.number))
            stopped.append("save and requeue")

    wait(job, disturb)
    progress.note("checks", "audit", checks.audit(out, rehearsal.out / "mixed"))
    found = checks.measured(job.notes) | {"seconds": time.time() - begin, "kills": stopped, "files": 0}
    progress.note("stages", "train", found)


def many(rehearsal: Rehearsal, progress: Record) -> None:
    """As many shards as the whole corpus has, of a slice of the text."""
    out, go = rehearsal.out, partial(stage, rehearsal, progress)
    size = progress.done["checks"]["slice"]["block_bytes"]
    folder = out / "many"
    go("encode.many", ["--mono", out / "slice", "--vocab", out / "vocap", "--block-bytes", size], folder / "encoded")
    go("mix.many", ["--encoded", folder / "encoded", "--vocab", out / "vocap", "--mono-rows", 2000], folder / "mixed")
    go("verify.many", ["--data", folder / "encoded"])
    shards = checks.shards(folder / "encoded" / "mono")
    wanted = progress.done["checks"]["slice"]["shards"]
    if shards < 0.9 * wanted:
        raise ValueError(f"{folder / 'encoded'} has {shards} shards, not about {wanted}")
    for name in ("encode.many", "mix.many", "verify.many"):
        opened = progress.done["stages"][name]["open_files"]
        if opened > 500:
            raise ValueError(f"{name} held {opened} files open for {shards} shards")
    progress.note("checks", "many", {"shards": shards})


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.rehearsal", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gigabytes", type=float, required=True, help="of text before compression")
    parser.add_argument(
        "--source", type=Path, default=ROOT.parent / "shared/data/corpus", help="real text: mono/, para/"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/rehearsal"), help="folder, on a file system of all nodes"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the text, the order and the moments of the kills")
    parser.add_argument(
        "--ids", type=int, help=f"ids of vocap's vocabulary; by default what the text gives, up to {IDS:,}"
    )
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of each task to mix")
    parser.add_argument("--sentences", type=int, default=1_000_000, help="most lines that vocap samples of a language; "
                        "vocab samples ten times as many of all")  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="delete neither text nor encoded shards")
    parser.add_argument("--no-kills", dest="kills", action="store_false", help="leave the jobs alone")
    parser.add_argument("options", nargs="*", help="of sbatch, after --", default=list(Rehearsal.options))
    args = vars(parser.parse_args(argv))
    args["out"] = args["out"].resolve()
    args["ids"] = ids_of(args["gigabytes"]) if args["ids"] is None else args["ids"]
    try:
        if shutil.which("sbatch") is None:
            raise ValueError("sbatch is not here: start it on a login node of a Slurm cluster")
        print(report(run(Rehearsal(**args)), args["gigabytes"], args["rows"]))
    except (ValueError, OSError) as error:
        print(f"bench.rehearsal: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
