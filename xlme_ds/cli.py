"""Parses command lines `--recipe NAME [--section.key value ...]`, which change the settings of a recipe or of a
settings file. Prints errors, remarks, progress and numbers in the form that all commands share."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from .config import RunConfig
from .io.arguments import HELP_FLAGS, Option
from .io.errors import in_words, no_such
from .io.stdout import guard_stdout
from .recipes import RECIPES, SUMMARIES, recipe
from .run_commands import LAUNCHED, LAUNCHER_VARIABLES
from .settings_file import read_values, with_values

Command = TypeVar("Command")
Item = TypeVar("Item")
_PROGRESS_SECONDS = 10.0  # seconds between two lines that `progress` prints
_RANK_0_SECONDS = 30.0  # how long the other ranks wait for rank 0 to find the mistake in the command line too
_SOURCES = (  # the options that say where the settings come from
    Option("--recipe", str, "NAME", "One of the recipes below.", None),
    Option(
        "--config",
        Path,
        "FILE",
        "File of settings in place of a recipe: one that `xlme config` wrote, or a run's config.json.",
        None,
    ),
)
_OFTEN_SET = (
    "--train.steps",
    "--data.mono-rows",
    "--data.para-rows",
    "--data.micro-batch",
    "--optimizer.learning-rate",
    "--optimizer.warmup-steps",
    "--model.vocabulary",
    "--model.max-positions",
    "--model.activation-checkpointing",
    "--engine.kind",
    "--engine.deepspeed",
    "--start.folder",
    "--train.eval-every",
    "--train.save-every",
    "--seed",
)


def program(command: str) -> str:
    """Returns `xlme COMMAND`, also where `python -m` or a launcher started the command.

    Every command calls this function first, so it also calls `guard_stdout`. A command that launchers never start
    ignores their variables, which then come from an outer process: otherwise `note` would print nothing on ranks above
    0 of that process.
    """
    guard_stdout()
    if command not in LAUNCHED:
        for name in LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
    return f"xlme {command}"


def command_line() -> str:
    """The command line of this process: `xlme …`, `python FILE …` for another program, or `python` for a session."""
    program = Path(sys.argv[0])
    parts = (*program.parts[:-1], program.stem)
    if parts[-1:] == ("xlme",):
        start = ["xlme"]
    elif "xlme_ds" in parts[:-1]:  # the last such part counts: a clone's folder may be called xlme_ds too
        package = len(parts) - 1 - parts[::-1].index("xlme_ds")
        start = ["xlme", *(part for part in parts[package + 1 :] if part != "__main__")]
    else:
        start = ["python", *filter(None, [program.name])]
    return shlex.join([*start, *sys.argv[1:]])


def run_subcommand(
    prog: str,
    functions: Mapping[str, Callable[..., Any]],
    kind: str,
    arguments: list[str] | None,
    description: str,
) -> None:
    """Call the function that the first argument names, with the other arguments; without arguments, list the functions.
    A user's mistake ends the process with one sentence and exit code 2. `kind`: the word for such a function in errors,
    such as `command`."""
    from .io.help import group_page, summary_of

    argv = sys.argv[1:] if arguments is None else arguments
    if not argv or argv[0] in HELP_FLAGS:
        members = [(name, summary_of(function)) for name, function in functions.items()]
        print(group_page(prog, kind.upper(), description, members))
    elif argv[0].startswith("-"):
        fail(prog, ValueError(f"name a {kind} first: one of {', '.join(functions)}"))
    elif argv[0] not in functions:
        fail(prog, no_such(kind, argv[0], functions))
    else:
        call_command(functions[argv[0]], f"{prog} {argv[0]}", argv[1:])


def call_command(function: Callable[..., Command], prog: str, arguments: list[str] | None) -> Command:
    """Call `function` with `arguments`, by default those of the process, and return the result. A user's mistake ends
    the process with one sentence and exit code 2."""
    from .io.help import call_from_command_line

    try:
        return call_from_command_line(function, prog, arguments)
    except (ValueError, OSError) as error:
        fail(prog, error)


def parse(
    prog: str, command: type[Command], description: str, arguments: list[str], base: RunConfig | None = None
) -> Command:
    """The dataclass `command`, filled from `arguments`. Its field `run` has the settings of the --recipe, of the
    --config file or of `base` (the run that --branch names), changed by the other options.

    A value of the wrong type or an unknown setting ends the program with a message; for an unknown setting, the message
    suggests the nearest known one. A request for help ends the program too. Raises ValueError for an unknown recipe, if
    several of --recipe, --config and `base` are given, and, without a request for help, if none is given.
    `xlme_ds.validate` checks the values later.
    """
    import tyro

    from .io.help import checked_arguments

    rest, recipe_name = take_flag(without_local_rank(arguments), "--recipe")
    rest, file_name = take_flag(rest, "--config")
    values_by_flag = {"--recipe": recipe_name, "--config": file_name, "--branch": base}
    sources = [flag for flag, value in values_by_flag.items() if value is not None]
    if len(sources) > 1:
        raise ValueError(f"{' and '.join(sources)} exclude each other: give only one of them")
    asks_for_help = not HELP_FLAGS.isdisjoint(rest)
    if without_value := [flag for flag in ("--recipe", "--config") if flag in rest]:
        raise ValueError(f"{without_value[0]} has no value: write one after it")
    if not sources and not asks_for_help:
        if rest[:1] and rest[0] in RECIPES:
            raise ValueError(f"--recipe is missing: did you mean --recipe {rest[0]}?")
        source = "--recipe NAME (or --config FILE)"
        _, out = take_flag(rest, "--out")
        if out is not None and (settings := Path(out) / "config.json").is_file():
            source = f"--recipe NAME (or --config {settings}, the settings of this run)"
        checked_arguments(command, rest, [source], ["--name"], _SOURCES)  # raises: `source` is missing
    if file_name is not None:
        run = config_from_file(Path(file_name))
    elif recipe_name is not None:
        if recipe_name not in RECIPES and Path(recipe_name).exists():
            raise ValueError(f"--recipe {recipe_name} is no recipe: did you mean --config {recipe_name}?")
        run = recipe(recipe_name)
    else:
        run = base or RunConfig(name="custom")
    if asks_for_help:
        print(_help(prog, command, description, run, everything="--help-all" in rest))
        sys.exit(0)
    rest = checked_arguments(command, rest, optional=["--name"], also=_SOURCES)  # the settings have a name already
    defaults = {field.name: tyro.MISSING for field in fields(command) if field.default is MISSING}  # type: ignore[arg-type]
    return tyro.cli(
        command,
        prog=prog,
        default=command(**defaults | {"run": run}),
        args=rest,
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )


def config_from_file(path: Path) -> RunConfig:
    """The settings in a file. A setting that is not in the file comes from the recipe that the file names; without a
    recipe, it has its default."""
    if (path / "config.json").is_file():
        raise ValueError(f"{path} is a folder: did you mean {path / 'config.json'}?")
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


def _help(prog: str, command: type, description: str, run: RunConfig, everything: bool) -> str:
    """The page of a command with the settings of a run: the command's own options, then `everything`, or the settings
    that are often set; all with their values in `run`."""
    from .io.help import entries, help_page, options_of, wrap

    settings = {option.flag: option for option in options_of(RunConfig, run)}
    own = [*_SOURCES, *(option for option in options_of(command) if option.flag not in settings)]
    flags = {option.flag: option for option in own}
    sources = [str(flags[flag]) for flag in ("--recipe", "--config", "--branch", "--budget") if flag in flags]
    required = [str(option) for option in own if option.required]
    usage = " ".join([prog, f"({' | '.join(sources)})", *required, "[--section.key value ...]"])
    recipes = "\n".join(
        ["Recipes (memory without offloading; a smaller --data.micro-batch needs less):\n", *entries(SUMMARIES.items())]
    )
    if everything:
        return help_page(usage, description, [*own, *settings.values()], recipes)
    heading = f"Settings that are often set, with their values in {run.name}:"
    if run.name == "custom":
        heading = (
            "Settings that are often set, and their defaults. With --recipe NAME, --help shows that recipe's values:"
        )
    often_set = []
    for flag in _OFTEN_SET:
        _, kind, _, text, value = settings[flag]
        shown = ("on" if value else "off") if kind is bool else value or repr(value)
        often_set.append((f"{flag} {shown}", text.partition(". ")[0].rstrip(".") + "."))
    ending = [wrap(heading) + "\n", *entries(often_set), "", recipes, "\n--help-all lists all settings."]
    return help_page(usage, description, own, "\n".join(ending))


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
    flag = ""  # the flag to which the current argument belongs
    for argument in arguments:
        if argument.startswith("--"):
            flag = argument.partition("=")[0].replace("_", "-")
        if flag not in flags:
            rest.append(argument)
    return rest


def fail(prog: str, error: Exception) -> NoReturn:
    """Print a user's mistake as one line and exit with code 2. The attribute `prints` of a SharedError tells whether
    this rank prints it.

    Other errors are raised before the ranks have met; rank 0 prints them. A launcher ends all ranks once one rank has
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
