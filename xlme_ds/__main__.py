"""`xlme COMMAND --flags`, or `python -m xlme_ds COMMAND --flags`: all commands of the package."""

import importlib
import shlex
import sys
from difflib import get_close_matches
from itertools import takewhile

from . import __version__
from .cli import fail, note
from .io.arguments import HELP_FLAGS
from .io.errors import no_such
from .io.stdout import guard_stdout
from .run_commands import LAUNCHED

# For each command, in the order of use: the module whose `main` takes the arguments, and a line for the help.
COMMANDS = {
    "quickstart": ("xlme_ds.quickstart", "fetch sample text, prepare it, train a small model and draw its report"),
    "prep": ("data_prep.__main__", "prepare text for training, stage by stage: encode, mix, verify, ..."),
    "plan": (
        "xlme_ds.plan.__main__",
        "estimate time, memory and cost on GPUs, and print the command to train",
    ),
    "config": ("xlme_ds.print_config", "print the settings of a recipe as a commented file for --config"),
    "pretrain": ("xlme_ds.pretrain", "pre-train a recipe, or continue a run"),
    "launch": ("xlme_ds.launch", "run pretrain or finetune on several GPUs, by DeepSpeed's launcher"),
    "slurm": ("xlme_ds.job_scripts", "write job scripts for Slurm, which you can adapt to your cluster"),
    "checkpoint": (
        "xlme_ds.checkpoint.__main__",
        "list, check, convert and average checkpoints, or write their weights",
    ),
    "audit": ("xlme_ds.audit", "check that a run with --train.audit read every row exactly once"),
    "evaluate": (
        "xlme_ds.evaluate.__main__",
        "score models: retrieval, word alignment, losses, perplexity, word embeddings",
    ),
    "predict": ("xlme_ds.predict", "fill the masks of sentences, or mark the words that a model takes for replaced"),
    "finetune": ("xlme_ds.finetune.__main__", "fine-tune on XTREME's tasks and score every language"),
    "translate": ("xlme_ds.translate.__main__", "translate a file with a model that has a decoder, and score it"),
    "compare": ("xlme_ds.compare.__main__", "train several recipes with equal compute and score them"),
    "report": ("xlme_ds.report.__main__", "draw the page of a run, or the XTREME tables"),
    "export": ("xlme_ds.export.__main__", "write a model for transformers and sentence-transformers"),
    "bench": (
        "xlme_ds.benchmarks",
        "measure speed and memory; only a clone of the repository has the benchmarks",
    ),
}
_MEMBERS = {  # of the commands that have commands of their own, those whose names say what is meant
    "prep": ("sample", "minhash", "vocab", "vocap", "encode", "mix", "verify", "stats", "show"),
    "checkpoint": ("list", "check", "convert", "weights", "average"),
    "evaluate": ("tatoeba", "pairs", "align", "losses", "perplexity", "words"),
}
_GROUPS = (*_MEMBERS, "launch", "report", "bench")  # commands that have commands of their own


def main(arguments: list[str] | None = None) -> int:
    """Run one command; without arguments, list all commands. Returns the exit code."""
    guard_stdout()
    argv = sys.argv[1:] if arguments is None else arguments
    if argv[:1] == ["help"]:
        subject = [argument for argument in argv[1:] if argument != "help"]
        names = list(takewhile(lambda argument: not argument.startswith("-"), subject))
        _refuse_more(names, 2 if names and names[0] in _GROUPS else 1)
        argv = [*subject, "--help"]
    if not argv or argv[0] in HELP_FLAGS:
        lines = [f"  {name:<12}{about}" for name, (_, about) in COMMANDS.items()]
        print("\n".join(["usage: xlme COMMAND --flags    (xlme help COMMAND lists the flags)\n", *lines]))
        print("\nTo begin: xlme quickstart --out runs/first. The version: xlme version.")
        print("In Python: import xlme_ds as xlme; help(xlme)")
        return 0
    if argv[0] in ("--version", "version"):
        _refuse_more([argument for argument in argv if argument not in HELP_FLAGS], 1)
        print(f"xlme_ds {__version__}")
        return 0
    name, *rest = argv
    if name.startswith("-"):
        fail("xlme", _no_command(argv))
    if name not in COMMANDS:
        if name in ("recipe", "recipes"):
            fail("xlme", ValueError(f"there is no command {name!r}: `xlme pretrain --help` lists the recipes"))
        if group := next((group for group, members in _MEMBERS.items() if name in members), None):
            fail("xlme", ValueError(f"there is no command {name!r}: did you mean xlme {group} {name}?"))
        fail("xlme", no_such("command", name, COMMANDS))
    try:
        code = int(importlib.import_module(COMMANDS[name][0]).main(rest) or 0)
    except KeyboardInterrupt:
        note(f"xlme {name}: interrupted")
        return 130  # as a shell reports SIGINT
    if name in LAUNCHED:  # these commands return only after success; their threads could crash at Python's own exit
        from .engine.ranks import exit_now

        exit_now()
    return code


def _refuse_more(arguments: list[str], most: int) -> None:
    """End the program with an error if there are more than `most` arguments."""
    if len(arguments) > most:
        fail("xlme", ValueError(f"unexpected argument {arguments[most]}: leave it out"))


def _no_command(argv: list[str]) -> ValueError:
    """The error for a command line that begins with a flag."""
    from .io.help import options_of
    from .pretrain import Pretrain

    flag = argv[0].partition("=")[0]
    # The place of the first argument that may be a command, and not the value of a flag.
    place = next((i for i, name in enumerate(argv) if name in COMMANDS and not argv[i - 1].startswith("-")), None)
    if place is not None:
        corrected = shlex.join(["xlme", argv[place], *argv[:place], *argv[place + 1 :]])
        return ValueError(f"the command comes first: {corrected}")
    if flag in ("--recipe", "--config") or flag.replace("_", "-") in [option.flag for option in options_of(Pretrain)]:
        example = shlex.join(["xlme", "pretrain", *argv])
        return ValueError(f"{flag} is not a command: name a command first, for example {example}")
    near = ["--version"] if flag in ("-v", "-V") else get_close_matches(flag, ["--version", "--help"], n=1, cutoff=0.7)
    if near:
        return ValueError(f"there is no {flag}: did you mean {near[0]}?")
    return ValueError(f"{flag} is not a command: name a command first (`xlme --help` lists them)")


if __name__ == "__main__":
    sys.exit(main())
