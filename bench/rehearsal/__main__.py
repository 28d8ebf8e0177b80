"""Rehearses data preparation and training on a synthetic corpus of any size, as Slurm jobs that it kills.

    python -m bench.rehearsal --gigabytes N [--source FOLDER] [--out FOLDER] [--no-kills] [-- SBATCH_OPTION...]

Text, vocap, vocab, encode, mix, verify, stats, and 20 steps of training that are interrupted: each stage is a job of
`slurm/stage.sh` or `slurm/pretrain_base.sh`, with the options of sbatch after `--`. While a stage runs that can resume,
one of its ranks, or the whole step, is killed with SIGKILL. `bench.rehearsal.checks` checks the results; the first
difference ends the rehearsal. After an interruption the same command continues: OUT/rehearsal.json records the finished
stages, and a table is printed at the end.

Unless --keep is given, text and encoded shards are deleted as soon as nothing needs them.
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

from bench.measure import ROOT, listing, markdown, stamp
from bench.rehearsal import checks
from bench.rehearsal.text import files
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
    def corpora(self) -> list[str]:
        """The flags of data_prep that name the corpora."""
        names = sorted({file.corpus for file in files(self.gigabytes)})
        return [flag for name in names
                for flag in ("--corpus", name, "--where", f"{name}={self.out / 'text' / name}")]  # fmt: skip


@dataclass(frozen=True)
class BatchJob:
    """A batch job of the rehearsal."""

    number: int
    log: Path

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


def slurm(*command: str, **variables: object) -> str:
    """The output of one of Slurm's commands. Raises ValueError if sbatch fails."""
    env = dict(os.environ, PYTHONPATH=os.environ.get("PYTHONPATH", str(ROOT)))
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=env | {k: str(v) for k, v in variables.items()},
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode and command[0] == "sbatch":
        raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@dataclass
class Killer:
    """Kills a job once, `seconds` after it finishes its first task."""

    job: BatchJob
    out: Path
    way: Callable[[BatchJob], None]
    seconds: float
    kills: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before, self.due = finished_tasks(self.out), 0.0

    def __call__(self) -> None:
        """Kill the job if it is time, and wait until Slurm has requeued it."""
        if self.kills or (not self.due and finished_tasks(self.out) == self.before):
            return
        self.due = self.due or time.time() + self.seconds
        if time.time() < self.due:
            return
        restarts = int(self.job.field("Restarts") or 0)
        self.way(self.job)
        deadline = time.time() + 120  # a rank that had ended before the signal leads to no restart
        while time.time() < deadline and self.job.field("JobState") not in OVER:
            if int(self.job.field("Restarts") or 0) > restarts:
                self.kills.append(self.way.__name__)
                return
            time.sleep(0.2)
        self.kills.append("none: too late")


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
        rehearsal.out.mkdir(parents=True, exist_ok=True)

    def once(self, part: str, name: str, work: Callable[[], Any]) -> None:
        """Do the work of a stage or check and store its result, unless it is stored."""
        if name not in self.done[part]:
            print(f"{time.strftime('%H:%M:%S')} {part.removesuffix('s')} {name}", flush=True)
            self.done[part][name] = work()
            write_json(self.path, self.done)

    def submit(self, name: str, script: Sequence[str], **variables: object) -> BatchJob:
        """`sbatch` of a script."""
        log = self.out / "logs" / f"{name}-%j.out"
        log.parent.mkdir(parents=True, exist_ok=True)
        options = [f"--job-name=rehearsal-{name}", f"--output={log}", *self.rehearsal.options]
        output = slurm("sbatch", "--parsable", *options, *script, OMP_NUM_THREADS=1, **variables)
        number = int(output.strip().split(";")[0])
        return BatchJob(number, Path(str(log).replace("%j", str(number))))

    def wait(self, job: BatchJob, disturb: Callable[[], None] = lambda: None) -> None:
        """Wait for the end of a job, and disturb it meanwhile. Raises ValueError if it fails."""
        while (state := job.field("JobState")) not in OVER:
            disturb()
            time.sleep(0.2)
        if state != "COMPLETED":
            raise ValueError(f"job {job.number} ended as {state}: see {job.log}")

    def stage(self, name: str, flags: Sequence[object], out: Path | None = None) -> None:
        """A stage of data preparation; `name` may have a part after a dot, for its second call."""
        kind = name.split(".")[0]
        arguments = [kind, *map(str, flags), *(["--out", str(out)] if out else [])]

        def work() -> dict[str, Any]:
            begin, job = time.time(), self.submit(name, ["slurm/stage.sh", *arguments])
            disturb: Any = None
            if self.rehearsal.kills and kind in RESUMABLE and out is not None and not name.endswith("many"):
                ways = (BatchJob.kill_rank, BatchJob.kill_step, *self.rehearsal.ways)
                share = random.Random(f"{self.rehearsal.seed} {name}").random()
                way = ways[len(self.done["stages"]) % len(ways)]
                disturb = Killer(job, out, way, share * min(30 * self.rehearsal.gigabytes, 600))
            self.wait(job, disturb or (lambda: None))
            return taken(begin, out, disturb.kills if disturb else [])

        self.once("stages", name, work)

    def text(self) -> dict[str, Any]:
        """Write the corpus, over all ranks."""
        begin, text = time.time(), self.out / "text"
        flags = ["-m", "bench.rehearsal.text", "--gigabytes", self.rehearsal.gigabytes, "--out", text]
        flags += ["--source", self.rehearsal.source.resolve(), "--seed", self.rehearsal.seed]
        run = shlex.join(map(str, flags))
        script = f'. slurm/job.sh; begin /dev/null; srun --mpi=$XLME_MPI_TYPE "${{python[@]}}" {run}'
        self.wait(self.submit("text", [f"--wrap=exec bash -c {shlex.quote(script)}"]))
        return taken(begin, text, [])

    def train(self) -> dict[str, Any]:
        """Train twenty narrow steps of Base's recipe with the whole vocabulary, stopped and resumed."""
        out, begin = self.out / "run", time.time()
        settings = TRAINING | {"model.vocabulary": self.rehearsal.ids}
        flags = ["--train.audit", *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]
        script = ["--gpus-per-node=1", "slurm/pretrain_base.sh", *flags]
        job = self.submit("train", script, XLME_DATA=self.out / "mixed", XLME_OUT=out, XLME_HELDOUT="")
        kills: list[str] = []

        def disturb() -> None:
            log = out / "metrics.jsonl"
            if self.rehearsal.kills and not kills and log.exists() and log.read_text().count("\n") >= STOP_AT:
                slurm("scancel", "--signal=USR1", str(job.number))
                kills.append("save and requeue")

        self.wait(job, disturb)
        return taken(begin, out, kills)


def taken(begin: float, out: Path | None, kills: list[str]) -> dict[str, Any]:
    """Seconds since `begin`, files written, and kills."""
    written = sum(path.is_file() for path in out.rglob("*")) if out else 0
    return {"seconds": time.time() - begin, "files": written, "kills": kills}


def prepare(rehearsal: Rehearsal) -> Jobs:
    """Rehearse data preparation, from text to rows."""
    jobs, out, corpus = Jobs(rehearsal), rehearsal.out, files(rehearsal.gigabytes)
    stage, check, vocap = jobs.stage, partial(jobs.once, "checks"), ["--vocab", out / "vocap"]
    jobs.once("stages", "text", jobs.text)
    check("slice", lambda: checks.cut_slice(out / "text", out / "slice", rehearsal.gigabytes))
    curves = ["--shrink", 0.5, "--largest", max(rehearsal.ids // 4, 16), "--step", max(rehearsal.ids // 500, 1)]
    sentences = ["--sentences", rehearsal.sentences, *(curves if rehearsal.ids < 100_000 else [])]
    stage("vocap", [*rehearsal.corpora, "--size", rehearsal.ids, *sentences], out / "vocap")
    sentences = ["--sentences", 10 * rehearsal.sentences]
    stage("vocab", [*rehearsal.corpora, "--size", min(250_002, rehearsal.ids // 2 + 2), *sentences], out / "vocab")
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
    jobs.once("stages", "train", jobs.train)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Rehearse, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.rehearsal", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--gigabytes", type=float, required=True, help="text before compression")
    add("--source", type=Path, default=ROOT.parent / "shared/data/corpus", help="real text: mono/, para/")
    add("--out", type=Path, default=Path("runs/rehearsal"), help="folder, on a file system of all nodes")
    add("--seed", type=int, default=0, help="seed of the text, the order and the moments of the kills")
    add("--ids", type=int, help=f"ids of vocap's vocabulary; by default what the text fills, up to {IDS:,}")
    add("--rows", type=int, default=10_000_000, help="rows of each task to mix")
    add("--sentences", type=int, default=1_000_000,
        help="most lines of a language for vocap; vocab samples ten times as many of all")  # fmt: skip
    add("--keep", action="store_true", help="delete neither text nor encoded shards")
    add("--no-kills", dest="kills", action="store_false", help="kill no job")
    add("options", nargs="*", help="options of sbatch, after --", default=list(Rehearsal.options))
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
