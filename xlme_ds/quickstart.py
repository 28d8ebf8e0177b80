"""Train a small model on sample text: fetch text, prepare it, pre-train, draw the report.

It takes 10 to 15 minutes on two cores. Then open report.html in the run folder. Every stage is a command that a large
run uses, too; data/prepare.log has the commands of data preparation and their output. Finished stages are skipped.
"""

import os
import shlex
import sys
import time
from pathlib import Path

from . import predict
from .cli import fail, program
from .io.files import real_path
from .io.folders import LOCK_FILE, clear_folder, lock_folder
from .io.help import call_from_command_line
from .recipes import recipe
from .run_commands import child_environment, launch_command, run
from .train.run_folder import fixed_settings

RUN = recipe("quickstart")
ROW_TOKENS = RUN.model.max_positions
# Numbers of rows that training reads, each row once. The corpus is small, so each sentence is in many rows, every time
# next to other text and with other masks.
MONO_ROWS = RUN.train.steps * RUN.data.mono_rows
PARA_ROWS = RUN.train.steps * RUN.data.para_rows
_MARK = ".quickstart"  # an empty file in every run folder that the quickstart made
_SHORT_TRIAL = 3.0  # seconds; if two trial steps together took less than this, a third one is run
_OVERHEAD = 1.2  # time of training / time of its forward and backward passes; measured (docs/lab/quickstart.md)
_LOG = "prepare.log"  # in data/: the commands of data preparation and their output
JUDGED_SENTENCE = "Everyone has the right to life, liberty and Recht of person."
MASKED_SENTENCE = "Everyone has the <mask> to education."
HELDOUT_MONO_ROWS, HELDOUT_PARA_ROWS = 192, 280  # enough rows for every held-out document and pair about once


def preparation(folder: Path, processes: int) -> list[list[str]]:
    """The arguments of `python -m data_prep`, one list per stage, in the order of the stages."""
    data = shlex.quote(str(folder))
    vocab, train, encoded = f"{data}/vocab", f"{data}/corpus/train", f"{data}/encoded"

    def prepare(split: str, mono_rows: int, para_rows: int, alpha: float) -> list[str]:
        text = f"{data}/corpus/{split}"
        return [
            f"encode --mono {text}/mono --para {text}/para --vocab {vocab} --out {encoded}/{split} --processes "
            f"{processes}",
            f"mix --encoded {encoded}/{split} --vocab {vocab} --out {data}/{split} --row-tokens {ROW_TOKENS} "
            f"--mono-rows {mono_rows} --para-rows {para_rows} --alpha {alpha} --processes {processes}",
        ]

    stages = [
        f"sample --out {data}/corpus",
        f"vocab --mono {train}/mono --out {vocab} --size {RUN.model.vocabulary} --sentences 100000 "
        f"--processes {processes}",
        *prepare("train", MONO_ROWS, PARA_ROWS, alpha=0.7),
        *prepare("heldout", HELDOUT_MONO_ROWS, HELDOUT_PARA_ROWS, alpha=1.0),
        f"verify --data {data}/train",
        f"stats --encoded {encoded}/train --data {data}/train --out {data}/stats",
    ]
    return [shlex.split(stage) for stage in stages]


def training(data: Path, out: Path, processes: int) -> list[str]:
    """The training command."""
    folders = ["--data", str(data / "train"), "--heldout", str(data / "heldout"), "--out", str(out)]
    return launch_command("xlme_ds.pretrain", processes, ["--recipe", RUN.name, *folders])


def begin(out: Path, fresh: bool) -> None:
    """Prepare the folder `out`, which the caller has locked: empty it if `fresh` is set, and mark it as made by the
    quickstart.

    Raises ValueError if `out` has content but no mark, or if its run has other settings than the quickstart.
    """
    content = {path.name for path in out.iterdir()} - {LOCK_FILE}
    if content and _MARK not in content:
        raise ValueError(f"{out} has files that the quickstart did not make (no {_MARK}): name another --out")
    if fresh:
        clear_folder(out, keep=[_MARK])
    (out / _MARK).touch()
    if (out / "config.json").exists():
        from .trained.config_json import read_run_config  # imported only here, because it loads torch

        theirs = fixed_settings(read_run_config(out))
        ours = fixed_settings(RUN)
        del ours["engine.precision"]  # the run's value depends on the CPU
        changed = next((key for key, value in ours.items() if theirs.get(key) != value), None)
        if changed is not None:
            raise ValueError(
                f"the run in {out} has {changed} {theirs.get(changed)}, and the quickstart has {ours[changed]}: start "
                "over with --fresh, or name another --out"
            )


def trial_seconds() -> float:
    """Seconds that the forward and backward pass of a training step take on this machine, with all cores and random
    tokens. Two or three steps are timed, and the fastest one counts: the first is slow, because it allocates memory."""
    import numpy as np

    from .data.collate import collate
    from .data.rows import BOS, EOS, UNK, Rows
    from .models.init import initialise
    from .objectives import objective_of

    row_count = RUN.data.mono_rows + RUN.data.para_rows
    tokens = np.random.default_rng(0).integers(
        UNK + 1, RUN.model.vocabulary - 1, (row_count, ROW_TOKENS), dtype=np.int32
    )
    tokens[:, 0], tokens[:, -1] = BOS, EOS
    rows = Rows(tokens, np.ones(row_count, int), np.full(row_count, ROW_TOKENS), np.zeros(row_count, int))
    batch = collate([(0, rows, np.arange(row_count))], RUN.seed, RUN.objective.mask_fraction)
    objective = objective_of(RUN.objective)
    model = objective.build(RUN.model)
    initialise(model, RUN.seed, RUN.model.init_std)
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < 3 and sum(seconds) < _SHORT_TRIAL):
        begun = time.perf_counter()
        objective.sums(model(batch), batch).sum().backward()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def announce(out: Path) -> None:
    """Print what the command will do, and how long it takes on this machine."""
    step_seconds = trial_seconds()
    minutes = max(round(_OVERHEAD * RUN.train.steps * step_seconds / 60), 1)
    print(
        f"This fetches 1.5 MB of text in 91 languages, prepares it, pre-trains a small XLM-E for {RUN.train.steps:,} "
        f"steps and draws its report, all in {out}.\nIt takes about {minutes} minutes here (forward and backward pass "
        f"of a step: {step_seconds:.2f} s). Stop it at any time; the same command continues.",
        flush=True,
    )


def run_stage(stage: list[str], data: Path, variables: dict[str, str]) -> None:
    """Run a stage of data preparation; append its output to prepare.log, and print in one line which files it made."""
    print(f"{stage[0]:<6} ", end="", flush=True)
    data.mkdir(exist_ok=True)
    with open(data / _LOG, "ab+") as log:
        stage_start = log.seek(0, os.SEEK_END)
        try:
            run([sys.executable, "-m", "data_prep", *stage], variables, log=log)
        except SystemExit:
            print(f"stopped; {data / _LOG} ends with:", flush=True)
            log.seek(stage_start)
            sys.stderr.write("".join(log.read().decode(errors="replace").splitlines(keepends=True)[-10:]))
            raise
        log.seek(stage_start)
        printed = [line.partition(f"{data}/") for line in log.read().decode(errors="replace").splitlines()]
    # The stage names the files that it made in lines `{data}/FILE …` or `open {data}/FILE`. Other lines are left out.
    print("; ".join(file for before, _, file in printed if file and before in ("", "open ")), flush=True)


def next_steps(out: Path) -> list[list[str]]:
    """The commands to try on the finished run, each as the list of its arguments."""
    relative = os.path.relpath(sys.executable)
    python = relative if relative.startswith(".venv") else sys.executable
    script = Path(python).with_name("xlme")  # by its path, because a new terminal has not activated the environment
    xlme = [str(script)] if script.exists() else [python, "-m", "xlme_ds"]
    base = out if out.name not in ("", "..") else real_path(out)
    export, vectors = (str(base.with_name(f"{base.name}-{name}")) for name in ("export", "vectors"))
    steps = [[*xlme, "predict", "--model", str(out), "--text", JUDGED_SENTENCE]]
    steps.append([*xlme, "export", "--run", str(out), "--out", export])
    program = Path(__file__).resolve().parents[1] / "docs/howto/sentence_vectors.py"
    if program.exists():  # an installed package lacks it
        pairs = str(out / "data/corpus/train/para")
        steps.append([python, os.path.relpath(program), export, pairs, vectors, "1e-3"])
    return steps


def main(arguments: list[str] | None = None) -> None:
    """Run every stage that is not done yet."""
    call_from_command_line(quickstart, program("quickstart"), arguments, __doc__)


def quickstart(out: Path, fresh: bool = False, processes: int = 2) -> None:
    """Run every stage that is not done yet.

    Args:
        out: Run folder; the prepared data go into its subfolder data/.
        fresh: Start again: empty the run folder first, if the quickstart made it.
        processes: Number of training processes, and of workers that prepare the data.
    """
    try:
        rows = RUN.data.mono_rows  # the same as `para_rows`
        possible = [count for count in range(1, rows + 1) if rows % count == 0]
        if processes not in possible:
            raise ValueError(
                f"--processes is {processes}: choose one of {', '.join(map(str, possible))}, which divide the "
                f"{rows} rows of each task in a step"
            )
        with lock_folder(out):
            begin(out, fresh)
    except (ValueError, OSError) as error:
        fail("xlme quickstart", error)
    # Training uses CPUs even if there is a GPU: the recipe's sizes and ZeRO settings are chosen for CPUs.
    variables = child_environment() | {"DS_ACCELERATOR": "cpu"}
    data = out / "data"
    finished = out / "finished.json"
    if not (out / "config.json").exists():  # training has not begun
        announce(out)
    stages = preparation(data, processes)
    if not (data / "stats" / "stats.html").exists():  # written by the last stage of data preparation
        for number, stage in enumerate(stages, start=1):
            print(f"[{number}/{len(stages) + 1}] ", end="")
            try:
                run_stage(stage, data, variables)
            except OSError as error:
                fail("xlme quickstart", error)
    if finished.exists():
        print(f"{out} is complete; open {out / 'report.html'} (--fresh starts over; with make: FRESH=1)")
        return
    threads = max((os.cpu_count() or 1) // processes, 1)
    variables |= {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    print(f"[{len(stages) + 1}/{len(stages) + 1}] ", end="")
    run(training(data, out, processes), variables)
    if not finished.exists():  # the run was stopped, or its launcher was killed; neither shows in an exit code
        sys.exit(1)
    predict.run(predict.PredictSettings(out, (JUDGED_SENTENCE, MASKED_SENTENCE)))
    print("What to try next:", *map(shlex.join, next_steps(out)), sep="\n  ")


if __name__ == "__main__":
    main()
