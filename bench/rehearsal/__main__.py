"""Rehearses data preparation and training on a synthetic corpus of any size, as Slurm jobs that it kills.

    python -m bench.rehearsal --gigabytes N [--source FOLDER] [--out FOLDER] [--no-kills] [-- SBATCH_OPTION...]

Text, vocap, vocab, encode, mix, verify, stats, and 20 steps of training that are interrupted: each stage is a job of
`slurm/stage.sh` or `slurm/pretrain_base.sh`, with the options of sbatch after `--`. While a stage runs that can resume,
one of its ranks, or the whole step, is killed with SIGKILL. `bench.rehearsal.checks` checks the results; the first
difference ends the rehearsal. After an interruption the same command continues: OUT/rehearsal.json records the finished
stages, and a table is printed at the end.

Unless --keep is given, text and encoded shards are deleted as soon as nothing needs them.
"""

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
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Any

import tyro

from bench.measure import ROOT, listing, markdown, stamp
from bench.rehearsal import checks
from bench.rehearsal.text import files
from xlme_ds.cli import fail
from xlme_ds.io.files import write_json

STEPS, STOP_AT = 20, 8
RESUMABLE = ("vocap", "vocab", "encode", "mix")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
TRAINING = {
    "model.width": 32, "model.heads": 4, "model.feed-forward": 64, "model.generator-layers": 1,
    "model.discriminator-layers": 2, "data.mono-rows": 8, "data.para-rows": 8, "data.micro-batch": 2,
    "engine.precision": "fp32", "optimizer.warmup-steps": 4, "train.steps": STEPS, "train.log-every": 1,
    "train.save-every": 4,
}  # fmt: skip
IDS = 524_288
WHOLE_TEXT, WHOLE_ROWS = 2_394 * 1024**3 + 150e9, 256e6  # bytes of the real corpus, and rows of a task


def ids_of(gigabytes: float) -> int:
    """The size of a vocabulary that so much text fills: 0.06 GB have 333,158 different pieces."""
    return min(IDS, round(4e6 * gigabytes))


@dataclass(frozen=True)
class Rehearsal:
    """Settings of a rehearsal."""

    gigabytes: float  # text before compression
    source: Path = ROOT.parent / "shared/data/corpus"  # real text: mono/, para/
    out: Path = Path("runs/rehearsal")  # folder, on a file system of all nodes
    ids: int | None = None  # ids of vocap's vocabulary; by default what the text fills, up to 524,288
    seed: int = 0  # seed of the text, the order and the moments of the kills
    rows: int = 10_000_000  # rows of each task to mix
    sentences: int = 1_000_000  # most lines of a language for vocap; vocab samples ten times as many of all
    keep: bool = False  # delete neither text nor encoded shards
    kills: bool = True  # kill jobs
    # options of sbatch, after --
    options: tyro.conf.Positional[tuple[str, ...]] = (
        "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0",
    )  # fmt: skip
    # more ways to disturb a job than SIGKILL to a rank and to a step
    ways: Annotated[Sequence[Callable[["BatchJob"], None]], tyro.conf.Suppress] = ()
    rows_per_shard: int = 65_536  # of mix

    @property
    def vocabulary(self) -> int:
        """Ids of vocap's vocabulary."""
        return ids_of(self.gigabytes) if self.ids is None else self.ids

    @property
    def corpora(self) -> list[str]:
        """The flags of data_prep that name the corpora."""
        names = sorted({file.corpus for file in files(self.gigabytes)})
        return [flag for name in names
                for flag in ("--corpus", name, "--where", f"{name}={self.out / 'text' / name}")]  # fmt: skip


@dataclass(frozen=True)
class BatchJob:
    """A batch job of the rehearsal."""

    number: int

    def field(self, name: str) -> str:
        """A field of `scontrol show job`; empty if Slurm does not know it."""
        match = re.search(rf"\b{name}=(\S*)", slurm("scontrol", "show", "job", "--oneliner", str(self.number)))
        return match[1] if match else ""

    def kill_rank(self) -> None:
        """Send SIGKILL to the first process of the job's first node."""
        node = slurm("scontrol", "show", "hostnames", self.field("NodeList")).split()[0]
        kill = f"kill -9 $(scontrol listpids {self.number}.0 {node} | awk '$4 == 0 {{ print $1 }}')"
        slurm("srun", "--overlap", f"--jobid={self.number}", "--mpi=none", "--nodes=1", "--ntasks=1",
              f"--nodelist={node}", "bash", "-c", kill)  # fmt: skip

    def kill_step(self) -> None:
        """Send SIGKILL to all ranks."""
        slurm("scancel", "--signal=KILL", f"{self.number}.0")

    def restart(self, way: Callable[["BatchJob"], None]) -> str:
        """Kill the job in a `way`, and wait until Slurm has requeued it; returns the name of the way."""
        restarts = int(self.field("Restarts") or 0)
        way(self)
        deadline = time.time() + 120  # a rank that had ended before the signal leads to no restart
        while time.time() < deadline and self.field("JobState") not in OVER:
            if int(self.field("Restarts") or 0) > restarts:
                return way.__name__
            time.sleep(0.2)
        return "none: too late"

    def save_and_requeue(self) -> str:
        """Send the signal that comes before a time limit."""
        slurm("scancel", "--signal=USR1", str(self.number))
        return "save and requeue"


def slurm(*command: str, **variables: object) -> str:
    """The output of one of Slurm's commands. Raises ValueError if sbatch fails."""
    env = dict(os.environ, PYTHONPATH=os.environ.get("PYTHONPATH", str(ROOT)))
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=env | {k: str(v) for k, v in variables.items()},
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode and command[0] == "sbatch":
        raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def delayed(out: Path, seconds: float) -> Callable[[], bool]:
    """A function that says whether `seconds` have passed since the stage with this folder finished a task."""
    before, due = finished_tasks(out), inf

    def ready() -> bool:
        nonlocal due
        if due == inf and finished_tasks(out) != before:
            due = time.time() + seconds
        return time.time() >= due

    return ready


def finished_tasks(out: Path) -> int:
    """Number of markers of tasks in the folder of a stage."""
    return sum(not path.name.endswith(".begun.json") for path in out.glob("**/tasks/*.json"))


class Jobs:
    """The jobs and checks of a rehearsal, each run once; OUT/rehearsal.json has their results.

    Raises ValueError if that file is of other settings.
    """

    def __init__(self, rehearsal: Rehearsal):
        self.rehearsal, self.out, self.path = rehearsal, rehearsal.out, rehearsal.out / "rehearsal.json"
        left_out = ("options", "ways", "keep")
        settings = {key: str(value) for key, value in asdict(rehearsal).items() if key not in left_out}
        self.done: dict[str, Any] = {"settings": settings, "stages": {}, "checks": {}}
        if self.path.exists():
            self.done = json.loads(self.path.read_text())
            if self.done["settings"] != settings:
                raise ValueError(f"{self.path} is of another rehearsal: choose another --out, or delete that folder")
        (self.out / "logs").mkdir(parents=True, exist_ok=True)

    def once(self, part: str, name: str, work: Callable[[], Any]) -> None:
        """Do the work of a stage or check and store its result, unless it is stored."""
        if name not in self.done[part]:
            print(f"{time.strftime('%H:%M:%S')} {part.removesuffix('s')} {name}", flush=True)
            self.done[part][name] = work()
            write_json(self.path, self.done)

    def job(
        self,
        name: str,
        script: Sequence[str],
        out: Path | None,
        kill: Callable[[BatchJob], str] | None = None,
        ready: Callable[[], bool] = lambda: True,
        **variables: object,
    ) -> None:
        """Run a script by sbatch, and kill it once when it is `ready`; stores its seconds, files in `out` and kills.

        Raises ValueError if it fails.
        """

        def work() -> dict[str, Any]:
            begin, log = time.time(), self.out / "logs" / f"{name}-%j.out"
            options = [f"--job-name=rehearsal-{name}", f"--output={log}", *self.rehearsal.options]
            output = slurm("sbatch", "--parsable", *options, *script, OMP_NUM_THREADS=1, **variables)
            job, kills = BatchJob(int(output.strip().split(";")[0])), list[str]()
            while (state := job.field("JobState")) not in OVER:
                if self.rehearsal.kills and kill and not kills and ready():
                    kills.append(kill(job))
                time.sleep(0.2)
            if state != "COMPLETED":
                raise ValueError(f"job {job.number} ended as {state}: see {str(log).replace('%j', str(job.number))}")
            written = sum(path.is_file() for path in out.rglob("*")) if out else 0
            return {"seconds": time.time() - begin, "files": written, "kills": kills}

        self.once("stages", name, work)

    def stage(self, name: str, flags: Sequence[object], out: Path | None = None) -> None:
        """A stage of data preparation; `name` may have a part after a dot, for its second call."""
        kind, rehearsal = name.split(".")[0], self.rehearsal
        script = ["slurm/stage.sh", kind, *map(str, flags), *(["--out", str(out)] if out else [])]
        if kind not in RESUMABLE or out is None or name.endswith("many"):
            return self.job(name, script, out)
        ways = (BatchJob.kill_rank, BatchJob.kill_step, *rehearsal.ways)
        way = ways[len(self.done["stages"]) % len(ways)]
        share = random.Random(f"{rehearsal.seed} {name}").random()
        ready = delayed(out, share * min(30 * rehearsal.gigabytes, 600))
        self.job(name, script, out, lambda job: job.restart(way), ready)

    def text(self) -> None:
        """Write the corpus, over all ranks."""
        flags = ["-m", "bench.rehearsal.text", "--gigabytes", self.rehearsal.gigabytes, "--out", self.out / "text"]
        flags += ["--source", self.rehearsal.source.resolve(), "--seed", self.rehearsal.seed]
        run = shlex.join(map(str, flags))
        script = f'. slurm/job.sh; begin /dev/null; srun --mpi=$XLME_MPI_TYPE "${{python[@]}}" {run}'
        self.job("text", [f"--wrap=exec bash -c {shlex.quote(script)}"], self.out / "text")

    def train(self) -> None:
        """Train twenty narrow steps of Base's recipe with the whole vocabulary, stopped and resumed."""
        out = self.out / "run"
        settings = TRAINING | {"model.vocabulary": self.rehearsal.vocabulary}
        flags = ["--train.audit", *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]

        def ready() -> bool:
            log = out / "metrics.jsonl"
            return log.exists() and log.read_text().count("\n") >= STOP_AT

        self.job("train", ["--gpus-per-node=1", "slurm/pretrain_base.sh", *flags], out, BatchJob.save_and_requeue,
                 ready, XLME_DATA=self.out / "mixed", XLME_OUT=out, XLME_HELDOUT="")  # fmt: skip


def prepare(rehearsal: Rehearsal) -> Jobs:
    """Rehearse data preparation, from text to rows."""
    jobs, out, corpus = Jobs(rehearsal), rehearsal.out, files(rehearsal.gigabytes)
    stage, check, vocap = jobs.stage, partial(jobs.once, "checks"), ["--vocab", out / "vocap"]
    ids = rehearsal.vocabulary
    jobs.text()
    check("slice", lambda: checks.cut_slice(out / "text", out / "slice", rehearsal.gigabytes))
    curves = ["--shrink", 0.5, "--largest", max(ids // 4, 16), "--step", max(ids // 500, 1)]
    sentences = ["--sentences", rehearsal.sentences, *(curves if ids < 100_000 else [])]
    stage("vocap", [*rehearsal.corpora, "--size", ids, *sentences], out / "vocap")
    sentences = ["--sentences", 10 * rehearsal.sentences]
    stage("vocab", [*rehearsal.corpora, "--size", min(250_002, ids // 2 + 2), *sentences], out / "vocab")
    stage("encode", [*rehearsal.corpora, *vocap], out / "encoded")
    check("planted", lambda: checks.planted(out / "text", corpus, out / "encoded"))
    if not rehearsal.keep:
        for name in {file.corpus for file in corpus}:
            shutil.rmtree(out / "text" / name, ignore_errors=True)
    mix = ["--encoded", out / "encoded", *vocap, "--seed", rehearsal.seed, "--rows-per-shard", rehearsal.rows_per_shard]
    for task in ("mono", "para"):
        stage(f"mix.{task}", [*mix, f"--{task}-rows", rehearsal.rows], out / "mixed")
        view = out / "views" / task
        view.mkdir(parents=True, exist_ok=True)
        if not (view / task).is_symlink():
            (view / task).symlink_to((out / "mixed" / task).resolve())
        stage(f"stats.{task}", ["--encoded", out / "encoded", "--data", view], out / "stats" / task)
        check(f"rows.{task}", partial(checks.mixed_rows, out / "mixed", task, rehearsal.rows))
        if not rehearsal.keep:  # the manifest stays: it names the languages of both tasks
            for folder in (out / "encoded" / task).iterdir():
                if folder.is_dir():
                    shutil.rmtree(folder)
    stage("verify", ["--data", out / "mixed"])
    check("sha256", lambda: checks.sums(out))
    return jobs


def run(rehearsal: Rehearsal) -> dict[str, Any]:
    """Rehearse everything; returns the contents of OUT/rehearsal.json."""
    jobs, out = prepare(rehearsal), rehearsal.out
    jobs.train()
    jobs.once("checks", "audit", lambda: checks.audit(out / "run", out / "mixed"))
    # As many shards as the whole corpus has, of a slice of the text.
    folder, vocap, part = out / "many", ["--vocab", out / "vocap"], jobs.done["checks"]["slice"]
    mono = ["--mono", out / "slice", "--block-bytes", part["block_bytes"]]
    jobs.stage("encode.many", [*mono, *vocap], folder / "encoded")
    jobs.stage("mix.many", ["--encoded", folder / "encoded", *vocap, "--mono-rows", 2000], folder / "mixed")
    jobs.stage("verify.many", ["--data", folder / "encoded"])
    jobs.once("checks", "many", lambda: checks.shards(folder / "encoded" / "mono", part["shards"]))
    return jobs.done


def report(done: dict[str, Any], gigabytes: float, rows: int) -> str:
    """A table of the stages: seconds, files and kills, and hours of CC-100 and 150 GB of pairs on the same nodes."""
    scales = dict.fromkeys(("text", "vocap", "encode"), WHOLE_TEXT / (gigabytes * 1e9))
    scales |= dict.fromkeys(("mix", "verify"), WHOLE_ROWS / rows)
    lines = []
    for name, row in done["stages"].items():
        scale = None if name.endswith("many") else scales.get(name.split(".")[0])
        hours = f"{scale * row['seconds'] / 3600:.1f}" if scale else "-"
        lines.append([name, f"{row['seconds']:.0f}", str(row["files"]), ", ".join(row["kills"]) or "-", hours])
    table = markdown(["stage", "seconds", "files", "killed", "whole corpus, h"], lines)
    return f"{table}\n{listing({'gigabytes': gigabytes, 'rows of a task': rows} | stamp())}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Rehearse, and print the table; a user's mistake ends it with one sentence and exit code 2."""
    rehearsal = tyro.cli(Rehearsal, prog="python -m bench.rehearsal", description=__doc__, args=arguments)
    rehearsal = replace(rehearsal, out=rehearsal.out.resolve())
    try:
        if shutil.which("sbatch") is None:
            raise ValueError("sbatch is not here: start it on a login node of a Slurm cluster")
        print(report(run(rehearsal), rehearsal.gigabytes, rehearsal.rows))
    except (ValueError, OSError) as error:
        fail("bench.rehearsal", error)


if __name__ == "__main__":
    main()
