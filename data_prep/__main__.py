"""`xlme prep STAGE --flags`, or `python -m data_prep STAGE --flags`: the stages of data preparation."""

import importlib
import sys
import time
import traceback
from types import ModuleType

from data_prep.parallel import (
    RetryError,
    TaskError,
    UserError,
    abort,
    is_root,
    launched_rank,
    on_root,
    user_facing_error,
)
from data_prep.progress import print_stderr, printable
from xlme_ds.io.arguments import HELP_FLAGS
from xlme_ds.io.errors import no_such
from xlme_ds.io.stdout import guard_stdout

# Stage -> (module, help), in the order of use. A module is imported only when its stage runs, so that worker processes
# load little.
STAGES = {
    "sample": ("sample", "fetch the sample corpus: the Universal Declaration of Human Rights in 91 languages"),
    "minhash": ("minhash", "remove near duplicates among documents, with datatrove"),
    "vocab": ("vocab.vocab", "train a SentencePiece vocabulary, or use one that exists"),
    "vocap": ("vocab.vocap", "train a vocabulary with a share for every language (VoCap)"),
    "encode": ("encode.encode", "turn text files into token ids"),
    "mix": ("mix.mix", "put token ids into rows in training order, sampled by language"),
    "verify": ("inspect.verify", "check checksums, counts and every token id"),
    "stats": ("inspect.stats", "write a page of tables: languages, dropped text, repetition"),
    "show": ("inspect.show", "print rows as text"),
}

_RESUMED = ("minhash", "vocab", "vocap", "encode", "mix")  # stages that keep finished work when they are interrupted

# Setting -> its largest value.
_LIMITS = {"processes": 1_024, "seed": 2**63 - 1, "block_bytes": 2**31 - 1, "rows_per_shard": 10**9}
_LIMITS |= dict.fromkeys(("mono_rows", "para_rows"), 10**11)
_OTHER_LIMIT = 10**15  # the largest value of every other setting

_EXAMPLES = (
    "vocab --mono mono --out vocab --size 32000",
    "encode --mono mono --para para --vocab vocab --out encoded --split train",
    "mix --encoded encoded --vocab vocab --out mixed --mono-rows 200000 --para-rows 50000",
    "encode --mono mono --para para --vocab vocab --out kept --split heldout",
    "mix --encoded kept --vocab vocab --out heldout --mono-rows 512 --para-rows 512",
)


def main(arguments: list[str]) -> int:
    """Run one stage. Returns the exit code: 0 for success, 2 if the user has to change something first, 1 for any other
    error.

    An error that the user can act on is printed as one line on stderr; a mistake in this program keeps its traceback.
    """
    guard_stdout()
    if not arguments or arguments[0] in HELP_FLAGS:
        print(_usage())
        return 0
    name = arguments[0]
    if name not in STAGES:
        is_flag = name.startswith("-")
        advice = f"name a stage first: one of {', '.join(STAGES)}" if is_flag else no_such("stage", name, STAGES)
        print(f"xlme prep: error: {printable(str(advice))}", file=sys.stderr)
        return 2
    from xlme_ds.io.help import call_from_command_line

    if name == "encode" and arguments[1:] and not arguments[1].startswith("-"):
        print(
            f"xlme prep encode: error: unexpected argument {printable(arguments[1])}: name a folder with --mono, in "
            "which each file is named by its language (en.txt, sw.txt), or with --para for pairs",
            file=sys.stderr,
        )
        return 2
    module = importlib.import_module(f"data_prep.{STAGES[name][0]}")
    config = call_from_command_line(getattr(module, f"{name.capitalize()}Config"), f"xlme prep {name}", arguments[1:])
    try:
        on_root(lambda: _run(module, config, arguments))
    except (Exception, KeyboardInterrupt) as error:
        return _report_error(name, error)
    except SystemExit as error:  # stdout cannot be written: `xlme_ds.io.stdout`
        abort(int(error.code or 0))
        raise
    return 0


def _run(module: ModuleType, config: object, arguments: list[str]) -> None:
    """Run the stage in `module`. Raises ValueError if an argument is not UTF-8, if a setting is above its limit, or if
    --processes is below 1. All stages have the same limits. Each stage itself checks for other numbers that are too
    small."""
    # Python turns invalid bytes into lone surrogates, which neither Arrow nor JSON can hold.
    for argument in arguments:
        if argument.encode(errors="ignore").decode() != argument:
            raise ValueError(f"{argument} is not a name in UTF-8: rename it")
    for name, value in vars(config).items():
        limit = _LIMITS.get(name, _OTHER_LIMIT)
        if isinstance(value, int | float) and value > limit:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: it must be at most {limit:,}")
        if name == "processes" and value < 1:
            raise ValueError(f"--processes is {value}: it must be at least 1")
    module.run(config)


def _report_error(stage: str, error: BaseException) -> int:
    """Print an error once, end all ranks if only this rank has the error, and return the exit code."""
    on_all_ranks = isinstance(error, UserError | RetryError | TaskError)
    try:
        root = is_root()
    except ValueError:  # MPI does not connect the launched processes, so each process has this error
        on_all_ranks, root = True, launched_rank() == 0
        if not root:
            time.sleep(1)  # so that rank 0 prints first: when one process fails, the launcher ends the other processes
    user_facing = user_facing_error(error)
    if user_facing is not None:
        message = f"xlme prep {stage}: error: {printable(str(user_facing))}"
    elif isinstance(error, KeyboardInterrupt):
        remedy = "continues where this one stopped" if stage in _RESUMED else "begins again"
        message = f"xlme prep {stage}: interrupted: the same command {remedy}"
    else:
        text = str(error) if isinstance(error, TaskError) else "".join(traceback.format_exception(error))
        message = "\n".join(map(printable, text.rstrip().split("\n")))
    code = 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(user_facing, UserError) else 1
    try:
        if root or not on_all_ranks:
            print_stderr(message)
    finally:  # even if stderr cannot be written
        if not on_all_ranks:
            abort(code)
    return code


def _usage() -> str:
    lines = [
        "usage: xlme prep STAGE --flags    (xlme prep STAGE --help lists the flags)\n",
        "Stages in the order of use (sample and minhash are optional; vocab or vocap):\n",
        *(f"  {name:<9}{about}" for name, (_, about) in STAGES.items()),
        "\nFor example, with texts such as mono/en.txt and para/en-de.txt.zip:\n",
        *(f"  xlme prep {example}" for example in _EXAMPLES),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
