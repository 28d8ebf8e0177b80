"""Parses command lines `--recipe NAME [--section.key value ...]`, which change the settings of a recipe or of a
settings file. Prints errors, remarks, progress and numbers in the form that all commands share."""

import os
import shlex
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from .config import RunConfig
from .io.arguments import HELP_FLAGS
from .io.errors import in_words, no_such
from .io.stdout import guard_stdout
from .io.toml import help_of
from .recipes import RECIPES, SUMMARIES, recipe
from .run_commands import LAUNCHED, LAUNCHER_VARIABLES
from .settings_file import read_values, with_values

Command = TypeVar("Command")
Item = TypeVar("Item")
_PROGRESS_SECONDS = 10.0  # seconds between two lines that `progress` prints
_RANK_0_SECONDS = 30.0  # how long the other ranks wait for rank 0 to find the mistake in the command line too
_CONFIG_HELP = "file of settings in place of a recipe: one that `xlme config` wrote, or a run's config.json."
_OFTEN_SET = (
    "train.steps",
    "data.mono_rows",
    "data.para_rows",
    "data.micro_batch",
    "optimizer.learning_rate",
    "optimizer.warmup_steps",
    "model.vocabulary",
    "model.max_positions",
    "model.activation_checkpointing",
    "engine.kind",
    "engine.deepspeed",
    "start.folder",
    "train.eval_every",
    "train.save_every",
    "seed",
)


def program(command: str) -> str:
    """Returns `xlme COMMAND`, also where `python -m` or a launcher started the command.

    Every command calls this function first, so it also calls `guard_stdout`. It removes launchers' variables from the
    environment of a command that launchers never start: they are left from another process, and `note` would print
    nothing if they named a rank other than 0.
    """
    guard_stdout()
    if command not in LAUNCHED:
        for name in LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
    return f"xlme {command}"


def command_line() -> str:
    """The command line of this process: `xlme …`, or `python FILE …` for another program."""
    parts = Path(sys.argv[0]).with_suffix("").parts
    if parts[-1:] == ("xlme",):
        start = ["xlme"]
    elif "xlme_ds" in parts[:-1]:  # the last such part counts: a clone's folder may be called xlme_ds too
        package = len(parts) - 1 - parts[::-1].index("xlme_ds")
        start = ["xlme", *(part for part in parts[package + 1 :] if part != "__main__")]
    else:
        start = ["python", Path(sys.argv[0]).name]
    return shlex.join([*start, *sys.argv[1:]])


def run_subcommand(
    prog: str,
    functions: Mapping[str, Callable[..., Any]],
    kind: str,
    arguments: list[str] | None,
    description: str | None = None,
) -> None:
    """Call the function that the first argument names, with the other arguments; without arguments, list the functions.
    A user's mistake ends the process with one sentence and exit code 2. `kind`: the word for such a function in errors,
    such as `command`."""
    import tyro

    from .io.help import call_from_command_line, wrapped_help

    argv = sys.argv[1:] if arguments is None else arguments
    if not argv or argv[0] in HELP_FLAGS:
        with wrapped_help():
            tyro.extras.subcommand_cli_from_dict(dict(functions), prog=prog, description=description, args=["--help"])
    elif argv[0].startswith("-"):
        fail(prog, ValueError(f"name a {kind} first: one of {', '.join(functions)}"))
    elif argv[0] not in functions:
        fail(prog, no_such(kind, argv[0], functions))
    else:
        try:
            call_from_command_line(functions[argv[0]], f"{prog} {argv[0]}", argv[1:])
        except (ValueError, OSError) as error:
            fail(f"{prog} {argv[0]}", error)


def parse(
    prog: str, command: type[Command], description: str, arguments: list[str], base: RunConfig | None = None
) -> Command:
    """The dataclass `command`, filled from `arguments`. Its field `run` has the settings of the --recipe, of the
    --config file or of `base`, changed by the other options.

    A value of the wrong type or an unknown setting ends the program with a message; for an unknown setting, the message
    suggests the nearest known one. A request for help ends the program too. Raises ValueError for an unknown recipe, if
    several of --recipe, --config and `base` are given, and, without a request for help, if none is given.
    `xlme_ds.validate` checks the values later.
    """
    import tyro

    from .io.help import READABLE, checked_arguments, wrapped_help

    rest, recipe_name = take_flag(without_local_rank(arguments), "--recipe")
    rest, file_name = take_flag(rest, "--config")
    values_by_flag = {"--recipe": recipe_name, "--config": file_name, "--branch": base}
    sources = [flag for flag, value in values_by_flag.items() if value is not None]
    if len(sources) > 1:
        raise ValueError(f"{' and '.join(sources)} exclude each other: give only one of them")
    asks_for_help = not HELP_FLAGS.isdisjoint(rest)
    usage = f"{prog} ({' | '.join(_sources(command))})"
    if without_value := [flag for flag in ("--recipe", "--config") if flag in rest]:
        raise ValueError(f"{without_value[0]} has no value: write one after it")
    if not sources and not asks_for_help:
        if rest[:1] and rest[0] in RECIPES:
            raise ValueError(f"--recipe is missing: did you mean --recipe {rest[0]}?")
        checked_arguments(command, rest, {"--recipe": "--recipe NAME (or --config FILE)"}, ["--name"])
    if file_name is not None:
        run = config_from_file(Path(file_name))
    elif recipe_name is not None:
        run = recipe(recipe_name)
    else:
        run = base or RunConfig(name="custom")
    if asks_for_help and "--help-all" not in rest:
        print(_short_help(usage, command, description, run))
        sys.exit(0)
    if not asks_for_help:
        rest = checked_arguments(command, rest, optional=["--name"])  # the settings have a name already
    defaults = {field.name: tyro.MISSING for field in fields(command) if field.default is MISSING}  # type: ignore[arg-type]
    with READABLE, wrapped_help():
        return tyro.cli(
            command,
            prog=usage,
            default=command(**defaults | {"run": run}),
            args=["--help" if argument == "--help-all" else argument for argument in rest],
            description=f"{description.rstrip()}\n\n--recipe NAME: one of {', '.join(RECIPES)}.\n\n--config FILE: "
            + _CONFIG_HELP,
            config=(tyro.conf.OmitSubcommandPrefixes,),
        )


def config_from_file(path: Path) -> RunConfig:
    """The settings in a file. A setting that is not in the file comes from the recipe that the file names; without a
    recipe, it has its default."""
    values = read_values(path)
    if not values.keys().isdisjoint(("task", "tuning")):
        raise ValueError(f"{path} has settings of fine-tuning: name a file with settings of pre-training")
    if not values:
        raise ValueError(f'{path} has no settings: name another file, or write at least `recipe = "base"` into it')
    named = values.pop("recipe", None)
    try:
        base = RunConfig(name=path.stem) if named is None else recipe(str(named))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return with_values(base, values, path)


def _sources(command: type) -> list[str]:
    """The options that say where the settings come from; a command line needs one of them."""
    others = {"branch": "--branch RUN@STEP", "budget": "--budget DOLLARS"}
    return ["--recipe NAME", "--config FILE", *(others[x.name] for x in fields(command) if x.name in others)]


def _short_help(usage: str, command: type, description: str, run: RunConfig) -> str:
    """Usage, the command's own options, and the settings that are often set, with their values in `run`."""
    helps = help_of(command)
    hints = get_type_hints(command, include_extras=True)
    options = [("--recipe NAME", "One of the recipes below."), ("--config FILE", _CONFIG_HELP.capitalize())]
    required = ""
    for field in fields(command):
        if field.name != "run":
            hint = hints[field.name]
            marks = getattr(hint, "__metadata__", ())
            names_given = [mark.name for mark in marks if getattr(mark, "name", None)]
            flag = "--" + (names_given or [field.name.replace("_", "-")])[0]
            value = ""
            if not isinstance(field.default, bool):
                value = next(filter(None, (getattr(mark, "metavar", None) for mark in marks)), "") or _placeholder(hint)
            if field.default is MISSING:
                required += f" {flag} {value}"
            default = "" if field.default in (MISSING, None, False) else f". Default: {field.default}"
            options.append((f"{flag} {value}", helps[field.name].rstrip(".") + default))
    often_set = []
    for name in _OFTEN_SET:
        section, _, key = name.rpartition(".")
        settings = getattr(run, section) if section else run
        first_sentence = help_of(type(settings))[key].partition(". ")[0]
        value = getattr(settings, key)
        shown = "" if isinstance(value, bool) else value or repr(value)
        often_set.append((f"--{name.replace('_', '-')} {shown}", first_sentence))
    values = f", with their values in {run.name}:"
    if run.name == "custom":
        values = ", and their defaults. With --recipe NAME, --help shows that recipe's values."
    return "\n".join(
        [
            f"usage: {usage}{required} [--section.key value ...]\n",
            *(_wrap(paragraph, "") + "\n" for paragraph in description.strip().split("\n\n")),
            *(_entry(*pair) for pair in options),
            "\n" + _wrap(f"Settings that are often set{values}", "") + "\n",
            *(_entry(*pair) for pair in often_set),
            "\nRecipes (memory: without offloading; smaller --data.micro-batch, less):\n",
            *(_wrap(summary, f"  {name:<20} ") for name, summary in SUMMARIES.items()),
            "\n--help-all lists all settings.",
        ]
    )


def _placeholder(hint: object) -> str:
    """The placeholder for the value of an option of type `hint` in its usage, such as `DIR` or `N`."""
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    names = {Path: "DIR", int: "N", float: "NUMBER", str: "NAME"}
    return next(name for type_, name in names.items() if type_.__name__ in str(hint))


def _entry(flag: str, about: str) -> str:
    """An option and its help; the help begins in column 38."""
    first_line = "" if len(flag) < 36 else f"  {flag}\n"
    return first_line + _wrap(about.rstrip(".") + ".", f"{'' if first_line else f'  {flag}':<38}")


def _wrap(text: str, start: str) -> str:
    """`text` in lines as wide as the terminal, at most 120 characters. The first line begins with `start`, the others
    with as many spaces. Indented text, which is a command, is returned unchanged, without `start`."""
    if text.startswith("  "):
        return text
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    return textwrap.fill(
        text,
        max(width, len(start) + 30),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
    )


def without_local_rank(arguments: list[str]) -> list[str]:
    """`arguments` without --local_rank, which DeepSpeed's launcher adds. The environment has the rank as LOCAL_RANK."""
    return [argument for argument in arguments if not argument.startswith("--local_rank")]


def take_flag(arguments: list[str], flag: str) -> tuple[list[str], str | None]:
    """Returns (`arguments` without `flag` and its value, the value); the value is None if `arguments` lack the flag or
    the value. Raises ValueError if the flag is given twice."""
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments) and not arguments[index + 1].startswith("--"):
            value, after = arguments[index + 1], arguments[index + 2 :]
        elif argument.startswith(f"{flag}="):
            value, after = argument.removeprefix(f"{flag}="), arguments[index + 1 :]
        else:
            continue
        if any(later.partition("=")[0] == flag for later in after):
            raise ValueError(f"{flag} is given twice: leave one out")
        return arguments[:index] + after, value
    return arguments, None


def without_flags(arguments: Sequence[str], *flags: str) -> list[str]:
    """`arguments` without `flags` and the flags' values."""
    rest: list[str] = []
    flag = ""  # the latest flag, up to and including the current argument
    for argument in arguments:
        if argument.startswith("--"):
            flag = argument.partition("=")[0].replace("_", "-")
        if flag not in flags:
            rest.append(argument)
    return rest


def fail(prog: str, error: Exception) -> None:
    """Print a user's mistake as one line and exit with code 2. Rank 0 prints; another rank prints if the error's
    `prints` is true.

    An error that is no SharedError is raised before the ranks have met. A launcher ends all ranks once one rank has
    failed, and rank 0 may have started later than the others. So the other ranks wait before they exit. A rank that is
    still running after the wait prints the mistake too, because rank 0 may not have found it.
    """
    prints = getattr(error, "prints", None)
    if prints is None and not on_rank_0():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's signal ends this rank: it has nothing to save
        time.sleep(_RANK_0_SECONDS)
        prints = True
    note(f"{prog}: error: {in_words(error)}", bool(prints))
    sys.exit(2)


def note(text: str, here: bool = False) -> None:
    """Print a remark for the user on stderr, on rank 0 only; with `here`, on the calling rank whatever its number."""
    if here or on_rank_0():
        print(text, file=sys.stderr, flush=True)


def on_rank_0() -> bool:
    """Whether this process is rank 0, by the variables of its launcher; true without a launcher."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def progress(
    items: Iterable[Item], total: int, unit: str, name: str = "", amount: Callable[[Item], int] = lambda _: 1
) -> Iterator[Item]:
    """Yield `items`. At most every ten seconds, print to stderr how much of `total` is done: the sum of `amount(item)`
    over the items so far."""
    done = 0
    last_printed = time.monotonic()
    for item in items:
        if time.monotonic() - last_printed >= _PROGRESS_SECONDS:
            note(f"{name}{': ' if name else ''}{done:,} of {total:,} {unit}")
            last_printed = time.monotonic()
        yield item
        done += amount(item)


def format_duration(seconds: float) -> str:
    """`seconds` in the two largest units that fit: `41 s`, `8 min 12 s`, `5 h 03 min`, `3 d 04 h`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def format_number(value: float) -> str:
    """A number with three significant digits: 1.23e-05, 0.0123, 12.3, 12.3K, 1.23M, 4.56T."""
    size = abs(value)
    if size >= 999.5e12 or 0 < size < 1e-3:
        return f"{value:.3g}"
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if size >= factor * 0.9995:  # from 999.5 on, three digits would give 1e+03
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"
