"""Rehearse data preparation and training on a synthetic corpus of any size, as Slurm jobs that are killed and resumed.

    xlme bench rehearsal --gigabytes N --source FOLDER [--out FOLDER] [--no-kills] [-- SBATCH_OPTION...]

The stages are text, vocap, vocab, encode, mix, stats, verify and train. Each stage is a Slurm job, submitted by sbatch
with the options after `--`; data stages run `slurm/stage.sh`, training runs `slurm/pretrain_base.sh`. While vocap,
vocab, encode or mix runs, SIGKILL ends one rank or all ranks, and the job restarts. Training has 20 steps, on one
process a node of at most two nodes; the signal that Slurm sends before a time limit interrupts it once. The results
are checked, and the first difference ends the rehearsal.

OUT/rehearsal.json records the finished stages: the same command continues an interrupted rehearsal. At the end, a table
of the stages is printed.

Unless --keep is given, text and encoded shards are deleted as soon as nothing needs them.
"""

import json
import random
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from bench.measure import ROOT, listing, markdown, one_sentence, stamp
from bench.rehearsal.text import check_planted, files
from xlme_ds.audit import examine
from xlme_ds.io.files import write_json
from xlme_ds.io.help import call_from_command_line
from xlme_ds.report.run_files import read_records
from xlme_ds.run_commands import child_environment

STOP_AT = 8  # number of training steps before the interruption
RESUMABLE = ("vocap", "vocab", "encode", "mix")
END_STATES = {  # Slurm's states of a job that has ended
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
# Options that replace settings of Base's recipe: a narrow model with the whole vocabulary takes 20 steps.
TRAINING = (
    "--model.width 32 --model.heads 4 --model.feed-forward 64 "
    "--model.generator-layers 1 --model.discriminator-layers 2 "
    "--data.mono-rows 8 --data.para-rows 8 --data.micro-batch 2 --engine.precision fp32 --optimizer.warmup-steps 4 "
    "--train.steps 20 --train.log-every 1 --train.save-every 4 --train.audit"
)
_USAGE = "xlme bench rehearsal --gigabytes NUMBER --source PATH [OPTIONS] [-- SBATCH OPTION ...]"


@dataclass(frozen=True)
class Rehearsal:
    """Settings of a rehearsal."""

    gigabytes: float
    """10^9 bytes of text before compression."""
    source: Path
    """Folder of real text, with mono/ and para/, that the synthetic text resembles."""
    out: Path = Path("runs/rehearsal")
    """Folder on a file system that all nodes share."""
    ids: int | None = None
    """Size of vocap's vocabulary; by default 2,500,000 per gigabyte of text, at most 524,288."""
    rows: int = 10_000_000
    """Rows of each task that mix writes."""
    sentences: int = 1_000_000
    """Most lines of each language that vocap reads; vocab samples ten times as many in all."""
    keep: bool = False
    """Delete neither text nor encoded shards."""
    kills: bool = True
    """Kill each stage that can resume, and interrupt training."""
    options: tyro.conf.Positional[tuple[str, ...]] = (
        "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0",
    )  # fmt: skip
    """Options of sbatch."""

    @property
    def vocabulary(self) -> int:
        """The size of vocap's vocabulary. The text must have that many pieces; 0.06 GB of text have 333,158."""
        return min(round(2_500_000 * self.gigabytes), 524_288) if self.ids is None else self.ids


@dataclass(frozen=True)
class BatchJob:
    """A batch job of the rehearsal."""

    number: int

    def field(self, name: str) -> str:
        """A field of `scontrol show job`; empty if Slurm does not know the job or the field."""
        match = re.search(rf"\b{name}=(\S*)", slurm("scontrol", "show", "job", "--oneliner", str(self.number)))
        return match[1] if match else ""

    def kill_rank(self) -> None:
        """Send SIGKILL to the first process of the job's first node."""
        node = slurm("scontrol", "show", "hostnames", self.field("NodeList")).split()[0]
        kill = f"kill -9 $(scontrol listpids {self.number}.0 {node} | awk '$4 == 0 {{ print $1 }}')"
        step = f"srun --overlap --jobid={self.number} --mpi=none --nodes=1 --ntasks=1 --nodelist={node} bash -c"
        slurm(*step.split(), kill)

    def kill_step(self) -> None:
        """Send SIGKILL to all ranks of the job."""
        slurm("scancel", "--signal=KILL", f"{self.number}.0")

    def save_and_requeue(self) -> None:
        """Send the signal that Slurm sends before a time limit: the job saves, and is requeued."""
        slurm("scancel", "--signal=USR1", str(self.number))

    def restart(self, disturb: Callable[["BatchJob"], None]) -> str:
        """Call `disturb` on the job, and wait until Slurm has requeued the job. Returns the name of `disturb`, or
        "none: too late" if the job was not requeued."""
        restarts = int(self.field("Restarts") or 0)
        disturb(self)
        deadline = time.time() + 120  # if the rank ended before the signal, the job is never requeued
        while time.time() < deadline and self.field("JobState") not in END_STATES:
            if int(self.field("Restarts") or 0) > restarts:
                return disturb.__name__
            time.sleep(0.2)
        return "none: too late"


KILL_METHODS = [BatchJob.kill_rank, BatchJob.kill_step]  # the stages use them in turn


def slurm(*command: str, **variables: object) -> str:
    """Run one of Slurm's commands with environment `variables`; returns its output. Raises ValueError if sbatch
    fails."""
    env = child_environment() | {name: str(value) for name, value in variables.items()}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode and command[0] == "sbatch":
        raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def finished_tasks(out: Path) -> int:
    """Number of finished tasks of the stage that writes to `out`, counted by their marker files."""
    return sum(not path.name.endswith(".begun.json") for path in out.glob("**/tasks/*.json"))


class Jobs:
    """The jobs and checks of a rehearsal. Each runs only once, because OUT/rehearsal.json stores its result.

    Raises ValueError if that file was written with other settings.
    """

    def __init__(self, rehearsal: Rehearsal):
        self.rehearsal, self.out, self.path = rehearsal, rehearsal.out, rehearsal.out / "rehearsal.json"
        settings = {key: str(value) for key, value in asdict(rehearsal).items() if key not in ("options", "keep")}
        self.done: dict[str, Any] = {"settings": settings, "stages": {}, "checks": {}}
        if self.path.exists():
            self.done = json.loads(self.path.read_text())
            if self.done["settings"] != settings:
                raise ValueError(f"{self.path} has other settings: choose another --out, or delete {self.out}")
        (self.out / "logs").mkdir(parents=True, exist_ok=True)

    def once(self, part: str, name: str, work: Callable[[], Any]) -> None:
        """Do the work of a stage or check and store its result, unless the result is stored already."""
        if name not in self.done[part]:
            print(f"{time.strftime('%H:%M:%S')} {part.removesuffix('s')} {name}", flush=True)
            self.done[part][name] = work()
            write_json(self.path, self.done)

    def job(
        self,
        name: str,
        script: Sequence[object],
        out: Path,
        kill: Callable[[BatchJob], None] | None = None,
        ready: Callable[[], bool] = lambda: True,
        delay: float = 0.0,
        **variables: object,
    ) -> None:
        """Run a script as a job with environment `variables`. `delay` seconds after `ready()` has become true, call
        `kill` on the job, once. Stores the job's seconds, the number of files in `out`, and the name of `kill`.

        Raises ValueError if the job fails.
        """

        def work() -> dict[str, Any]:
            begin, log = time.time(), self.out / "logs" / f"{name}-%j.out"
            options = [f"--job-name=rehearsal-{name}", f"--output={log}", *self.rehearsal.options]
            words = ["sbatch", "--parsable", *options, *map(str, script)]
            job, kills = BatchJob(int(slurm(*words, OMP_NUM_THREADS=1, **variables).strip().split(";")[0])), []
            while (state := job.field("JobState")) not in END_STATES:
                if self.rehearsal.kills and kill and not kills and ready():
                    time.sleep(delay)
                    kills.append(job.restart(kill))
                time.sleep(0.2)
            if state != "COMPLETED":
                raise ValueError(f"job {job.number} ended as {state}: see {str(log).replace('%j', str(job.number))}")
            written = sum(path.is_file() for path in out.rglob("*"))
            return {"seconds": time.time() - begin, "files": written, "kills": kills}

        self.once("stages", name, work)

    def stage(self, name: str, *flags: object, out: Path) -> None:
        """Run a stage of data preparation. A stage that can resume is killed once, a random time after it has finished
        its first task."""
        kill = KILL_METHODS[len(self.done["stages"]) % len(KILL_METHODS)] if name in RESUMABLE else None
        finished_before = finished_tasks(out)
        delay = random.Random(name).random() * min(30 * self.rehearsal.gigabytes, 600)
        script = ["slurm/stage.sh", name, *flags, *([] if name == "verify" else ["--out", out])]
        self.job(name, script, out, kill, lambda: finished_tasks(out) != finished_before, delay)

    def text(self) -> None:
        """Run the job that writes the corpus. The job's ranks divide the files among themselves."""
        text, source = self.out / "text", self.rehearsal.source.resolve()
        flags = ["--gigabytes", self.rehearsal.gigabytes, "--out", text, "--source", source]
        run = shlex.join(map(str, ["-m", "bench.rehearsal.text", *flags]))
        script = f'. slurm/job.sh; begin /dev/null; srun --mpi=$XLME_MPI_TYPE "${{python[@]}}" {run}'
        self.job("text", [f"--wrap=exec bash -c {shlex.quote(script)}"], text)

    def train(self) -> None:
        """Run the training job, which is interrupted once and resumes."""
        out = self.out / "run"
        # The last options of sbatch count: 8 rows are enough for two processes, not for all ranks of the data stages.
        places = ["--nodes=1-2", "--ntasks-per-node=1", "--gpus-per-node=1"]
        model = ["--model.vocabulary", self.rehearsal.vocabulary]
        self.job("train", [*places, "slurm/pretrain_base.sh", *TRAINING.split(), *model], out,
                 BatchJob.save_and_requeue, lambda: len(read_records(out / "metrics.jsonl")) >= STOP_AT,
                 XLME_DATA=self.out / "mixed", XLME_OUT=out, XLME_HELDOUT="")  # fmt: skip


def prepare(rehearsal: Rehearsal) -> Jobs:
    """Rehearse data preparation, from text to mixed rows. Returns the `Jobs`, with which `run` then trains."""
    corpus = files(rehearsal.gigabytes, rehearsal.source)  # a wrong source fails here, before a folder is made
    jobs, out = Jobs(rehearsal), rehearsal.out
    ids, rows, sentences = rehearsal.vocabulary, rehearsal.rows, rehearsal.sentences
    text: list[object] = ["--allow-missing"]
    for name in sorted({file.corpus for file in corpus}):
        text += ["--corpus", name, "--where", f"{name}={out / 'text' / name}"]
    encoded, vocap = ["--encoded", out / "encoded"], ["--vocab", out / "vocap"]
    jobs.text()
    curves = ["--shrink", 0.5, "--largest", max(ids // 4, 16), "--step", max(ids // 500, 1)] if ids < 100_000 else []
    jobs.stage("vocap", *text, "--size", ids, "--sentences", sentences, *curves, out=out / "vocap")
    joint = ["--size", min(250_002, ids // 2 + 2), "--sentences", 10 * sentences]
    jobs.stage("vocab", *text, *joint, out=out / "vocab")
    jobs.stage("encode", *text, *vocap, out=out / "encoded")
    jobs.once("checks", "planted", lambda: check_planted(out / "text", corpus, out / "encoded"))
    if not rehearsal.keep:
        for name in {file.corpus for file in corpus}:
            shutil.rmtree(out / "text" / name, ignore_errors=True)
    mix = ["--mono-rows", rows, "--para-rows", rows, "--rows-per-shard", min(max(rows // 20, 1), 65_536)]
    jobs.stage("mix", *encoded, *vocap, *mix, out=out / "mixed")
    jobs.stage("stats", *encoded, "--data", out / "mixed", out=out / "stats")
    if not rehearsal.keep:
        shutil.rmtree(out / "encoded", ignore_errors=True)
    jobs.stage("verify", "--data", out / "mixed", out=out / "mixed")
    return jobs


def run(rehearsal: Rehearsal) -> dict[str, Any]:
    """Rehearse everything; returns the contents of OUT/rehearsal.json."""
    jobs, out = prepare(rehearsal), rehearsal.out

    def audit() -> str:
        faults, summary = examine(out / "run", (out / "mixed",))
        if faults:
            raise ValueError(f"{out / 'run'}: {'; '.join(faults)[:400]}")
        return f"{summary}: each was read once"

    jobs.train()
    jobs.once("checks", "audit", audit)
    return jobs.done


def report(done: dict[str, Any]) -> str:
    """A table of the stages: seconds, files and kills."""
    lines = [
        [name, f"{row['seconds']:.0f}", str(row["files"]), ", ".join(row["kills"]) or "-"]
        for name, row in done["stages"].items()
    ]
    return f"{markdown(['stage', 'seconds', 'files', 'killed'], lines)}\n{listing(done['settings'] | stamp())}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Rehearse, and print the table; a user's mistake ends it with one sentence and exit code 2."""
    rehearsal = call_from_command_line(Rehearsal, "xlme bench rehearsal", arguments, __doc__, _USAGE)
    with one_sentence("xlme bench rehearsal"):
        if shutil.which("sbatch") is None:
            raise ValueError("there is no sbatch here: start the rehearsal on a login node of a Slurm cluster")
        print(report(run(replace(rehearsal, out=rehearsal.out.resolve()))))


if __name__ == "__main__":
    main()
