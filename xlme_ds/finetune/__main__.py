"""Fine-tune a model on one GPU, or on the CPU if there is none; `xlme launch --gpus N finetune …` uses several GPUs.

xlme finetune --task ner --model runs/base --data xtreme/panx --out runs/base-ner

Trains on English, scores every language that has labels, and writes predictions and scores.json. A second call with the
same folder resumes. With several seeds or --grid, every run has its own folder in --out; --number N does only run N,
counted from 0, as in a job array. --config FILE gives the settings of a run's config.json, or of a TOML file with the
names of the flags; flags replace them.
"""

import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..cli import fail, on_rank_0, program, without_local_rank
from ..io.arguments import HELP_FLAGS
from ..train.stop import StopRequest
from .settings import FinetuneSettings, Job, jobs, parse


def check_flags(argv: list[str]) -> None:
    """Check a command line. A mistake raises ValueError or ends the program; --help prints the help and ends the
    program."""
    parse(program("finetune"), argv, __doc__ or "")


def main(arguments: list[str] | None = None) -> None:
    """Run the command. A user's mistake ends it with one sentence and exit code 2."""
    options = without_local_rank(sys.argv[1:] if arguments is None else arguments)
    stop = None if {*HELP_FLAGS, "--list"} & set(options) else StopRequest()  # those flags only print
    try:
        command = parse(program("finetune"), options, __doc__ or "")
        runs = jobs(command)
    except ValueError as error:
        fail("xlme finetune", error)
    if command.list or stop is None:
        if on_rank_0():
            print("\n".join(str(job.out) for job in runs))
        return
    from ..engine.ranks import SharedError

    try:
        run_all(command, runs, stop)
    except SharedError as error:
        fail("xlme finetune", error)


def run_all(command: FinetuneSettings, runs: list[Job], stop: StopRequest) -> list[dict[str, Any] | None]:
    """Do the `runs` of `command` one after the other. On rank 0, returns each run's scores, or None for a run that was
    stopped; on the other ranks, None for each run. Collective over the ranks. Raises SharedError."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed 0.19.8 uses old names of torch's collectives
    from ..engine.ranks import SharedError, broadcast, on_all_ranks, process_group
    from ..settings_file import check_ranges
    from ..trained.runs import pin_step

    try:
        check_ranges(command)
    except ValueError as error:  # every rank raises it
        raise SharedError(str(error)) from None
    # All runs share one process group, so that the ranks need to find each other only once.
    with process_group(command.engine, command.train.watchdog_minutes) as (rank, world):
        # All runs and ranks start from one checkpoint, even if `command.model` is a run that still saves new ones.
        model = broadcast(on_all_ranks(lambda: pin_step(command.model) if rank == 0 else command.model))
        scores = [_run(replace(job, command=replace(job.command, model=model)), rank, world, stop) for job in runs]
    if rank == 0 and None in scores:
        unscored = f"{scores.count(None)} of {len(runs)} runs without scores"
        print(f"{command.out}: stopped with {unscored}; the same command continues", flush=True)
    return scores


def _run(job: Job, rank: int, world: int, stop: StopRequest) -> dict[str, Any] | None:
    """Do one run and print its scores. Returns them on rank 0; on other ranks, and after a request to stop, None."""
    from .finetune_run import finetune

    scores = finetune(job, rank, world, stop)
    if scores is not None:
        if "mean" in scores or scores["dev"]:
            print("\n".join([*score_table(scores), str(job.scores_file)]), flush=True)
        for code, path in scores["unlabelled"].items():
            print(f"{code}: no labels: predictions in {job.out / path}", flush=True)
    return scores


def score_table(scores: Mapping[str, Any]) -> list[str]:
    """The lines of a table of scores in per cent: a row for each language, their mean, English minus the mean of the
    others, and the mean of the dev sets. `scores` is the content of scores.json."""
    languages, metrics = scores["languages"], scores["metric"]
    rows = dict(languages)
    if "mean" in scores:  # not if no test set has labels
        rows[f"mean of {len(languages)}"] = scores["mean"]
    if "gap" in scores:
        rows["en - others"] = scores["gap"]
    if scores["dev"]:
        rows["mean of dev sets"] = scores["dev"]["mean"]
    width = max(map(len, rows))
    lines = [f"{name:<{width}}" + "".join(f"{row[metric]:>10.1f}" for metric in metrics) for name, row in rows.items()]
    return [f"{scores['task']:<{width}}" + "".join(f"{metric:>10}" for metric in metrics), *lines]


if __name__ == "__main__":
    main()
    from ..engine.ranks import exit_now

    exit_now()
