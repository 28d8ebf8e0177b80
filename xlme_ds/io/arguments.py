"""Options of a command line, and a check before tyro reads it, so that a frequent mistake gives one sentence with
advice."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from .errors import near_settings, no_such

# (flags of other programs and commands, advice: what to write instead). An entry fits a command that has all flags
# which the advice names outside backticks. The error gives the advice of the first entry that fits.
_ADVICE = (
    ("output output_dir", "did you mean --out?"),
    ("out output output_dir", "this command prints its result: add `> FILE` to the command"),
    ("input", "did you mean --source?"),
    ("src", "did you mean --source for the file, or --from for its language?"),
    ("tgt", "did you mean --to?"),
    ("epochs num_epochs num_train_epochs max_steps", "did you mean --tuning.epochs?"),
    ("epochs num_epochs num_train_epochs", "a run is counted in steps: set --train.steps"),
    ("max_steps", "did you mean --train.steps?"),
    ("batch_size", "did you mean --tuning.batch?"),
    ("per_device_train_batch_size gradient_accumulation_steps", "set --tuning.batch and --tuning.micro-batch"),
    (
        "batch_size per_device_train_batch_size gradient_accumulation_steps",
        "set --data.mono-rows, --data.para-rows and --data.micro-batch",
    ),
    ("bf16 fp16", "did you mean --engine.precision bf16?"),
    ("hidden_size", "did you mean --model.width?"),
    ("layers num_layers num_hidden_layers", "set --model.discriminator-layers and --model.generator-layers"),
    ("vocab_size", "did you mean --size?"),
    ("vocab_size", "did you mean --model.vocabulary?"),
    ("checkpoint", "the same --out resumes a run, --branch RUN@STEP starts another from a checkpoint"),
    ("checkpoint", "name it by --model RUN@STEP"),
    ("resume", "give the same command again with the same --out"),
    ("model models folder", "did you mean --run?"),
    ("run runs models folder", "did you mean --model?"),
    ("run model models folder", "did you mean --runs?"),
    ("model", "to start from a model, name it by --start.folder"),
    ("run", "the same --out resumes a run, --branch RUN@STEP starts another from a checkpoint"),
    ("price cost dollars", "did you mean --dollars-per-hour?"),
    ("gpus", "did you mean --processes?"),
    ("gpus", "to train on N GPUs, write `xlme launch --gpus N pretrain …`"),
    ("data", "did you mean --encoded?"),
    ("encoded", "did you mean --data?"),
    ("device", "a GPU is used if there is one: the variable `CUDA_VISIBLE_DEVICES` chooses it"),
)
HELP_FLAGS = {"-h", "--help", "--help-all"}
_FLAG = re.compile(r"--[\w.-]+(?==|$)")


class Option(NamedTuple):
    """A flag of a command."""

    flag: str
    kind: Any
    """Type of its value."""
    value: str
    """Name of its value in the help; empty for a flag without a value."""
    help: str
    default: Any = Parameter.empty
    """`Parameter.empty` if the flag is required."""

    def __str__(self) -> str:
        return f"{self.flag} {self.value}".rstrip()

    @property
    def required(self) -> bool:
        """Whether the flag has no default."""
        return self.default is Parameter.empty

    @property
    def entry(self) -> tuple[str, str]:
        """The flag with the name of its value, and its help with the default."""
        if self.required:
            default = "Required."
        elif self.default is True:
            default = f"On by default; {negative(self.flag)} turns it off."
        elif self.default is None or self.default is False or self.default in ("", (), []):
            default = ""
        else:
            values = self.default if isinstance(self.default, tuple | list) else [self.default]
            texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
            default = f"Default: {' '.join(texts).removesuffix('.')}."
        return str(self), " ".join(filter(None, (self.help, default)))


def refuse_mistakes(arguments: Sequence[str], kinds: Mapping[str, Any], also: Sequence[str] = ()) -> None:
    """Raise ValueError for a mistake in the `arguments` before `--`: an unknown flag, a flag that is given twice, a
    value that its flag does not take, a missing value, or a value too many. The message says what to write instead.

    A list, and a setting with a section (--train.steps), may be given twice: see `join_lists`.

    These unknown flags get advice: a flag of other programs or commands, a setting without its section (--steps for
    --train.steps) or with initials in place of its name (--lr for --optimizer.learning-rate), a section without a
    setting (--train), and a misspelt flag.

    `kinds`: for each flag of the command, the type of its value. `also`: further flags that a misspelt one may mean.
    """
    before = list(takewhile("--".__ne__, arguments))
    given: set[str] = set()
    for index, argument in enumerate(before):
        flag, equals, value = argument.partition("=")
        if re.fullmatch(r"-[a-z][\w.-]+", flag) and f"-{flag.replace('_', '-')}" in kinds:
            raise ValueError(f"there is no {flag}: did you mean -{flag}?")
        values = [value] if equals else list(takewhile(lambda later: not _FLAG.match(later), before[index + 1 :]))
        if _FLAG.match(argument) and flag not in HELP_FLAGS:
            kind = _kind_of(flag, kinds, also)
            _refuse_values(flag, values, kind)
            name = positive(flag.replace("_", "-")) if kind is bool else flag.replace("_", "-")
            if name in given:
                is_split = name in ("--mono", "--para") and "--corpus" in kinds  # probably for text in several folders
                advice = "put the files into one folder, or describe them with --corpus"
                raise ValueError(f"{name} is given twice: {advice if is_split else 'leave one out'}")
            if "." not in name and not _is_list(kind):
                given.add(name)


def join_lists(arguments: Sequence[str], kinds: Mapping[str, Any]) -> list[str]:
    """`arguments` with the values of each list in one place: `--model A --top 3 --model B` becomes `--model A B --top
    3`, because tyro would keep only B. A setting with a section (--train.steps) is not joined: its last value counts.

    `kinds`: for each flag of the command, the type of its value."""
    groups: list[list[str]] = [[]]  # each is a flag and its values
    lists: dict[str, list[str]] = {}
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        name = flag.replace("_", "-")
        if argument == "--":
            groups.append(list(arguments[index:]))
            break
        if argument.startswith("--") and not _FLAG.match(argument) and len(groups[-1]) == 1:
            groups[-1][0] += f"={argument}"  # a value such as "--tuning.epochs 1", which tyro would take for a flag
        elif not _FLAG.match(argument):
            groups[-1].append(argument)
        elif "." in flag or not _is_list(kinds.get(name)):
            groups.append([argument])
        else:
            groups.append(lists.setdefault(name, [flag]))
            groups[-1].extend([value] if equals else [])
    unique = {id(group): group for group in groups}
    return [argument for group in unique.values() for argument in group]


def _is_list(kind: Any) -> bool:
    return not {get_origin(part) for part in (kind, *get_args(kind))}.isdisjoint((tuple, list))


def _kind_of(flag: str, kinds: Mapping[str, Any], also: Sequence[str]) -> Any:
    """The type of the value of `flag`, which may be the negative form --no-x of a flag without a value. Raises
    ValueError, with advice, for a flag that the command does not have."""
    name = flag.replace("_", "-")
    if name in kinds or kinds.get(positive(name)) is bool:
        return kinds.get(name, bool)
    last = name[2:].rpartition(".")[2].replace("-", "_")
    for names, advice in _ADVICE:
        if last in names.split() and kinds.keys() >= set(re.findall(r"--[\w.-]*\w", re.sub("`.*?`", "", advice))):
            raise ValueError(f"there is no {flag}: {advice}")
    if setting := next((option for option in kinds if option.startswith(f"{name}.")), None):
        raise ValueError(f"there is no {flag}: it is a section of settings, such as {setting}")
    flags_of_settings = {option[2:].replace("-", "_"): option for option in kinds}
    named = [flags_of_settings[key] for key in near_settings(name[2:].replace("-", "_"), flags_of_settings)]
    # A misspelt flag may lack its section, as --stesp for --train.steps.
    spellings = {f"--{option[2:].rpartition('.')[2]}": option for option in kinds}
    spellings |= {option: option for option in (*kinds, "--help", *also)}
    written = positive(name)
    close = get_close_matches(written, spellings, n=1, cutoff=0.75) or get_close_matches(written, [*kinds, *also], n=1)
    near = " or ".join(named or [spellings[spelling] for spelling in close])
    raise ValueError(f"there is no {flag}: {f'did you mean {near}?' if near else '--help lists the flags'}")


def positive(flag: str) -> str:
    """The form --x of a flag without a value, which may be given as --no-x."""
    return re.sub(r"^--(.*\.)?no-", r"--\1", flag)


def negative(flag: str) -> str:
    """The form --no-x of a flag --x without a value."""
    return re.sub(r"^--(.*\.)?", r"--\1no-", flag)


def _refuse_values(flag: str, values: Sequence[str], kind: Any) -> None:
    if kind is bool and values:
        name = positive(flag.replace("_", "-"))
        raise ValueError(f"{flag} takes no value: write {name} or {negative(name)}")
    may_be_empty = kind is bool or ("." in flag and _is_list(kind))
    if not values and not may_be_empty:
        raise ValueError(f"{flag} has no value: write one after it")
    if len(values) > 1 and not _is_list(kind):
        raise ValueError(f"unexpected argument {values[1]}: {flag} takes one value")
    members = (kind, *get_args(kind))
    choices = next((get_args(member) for member in members if get_origin(member) is Literal), ())
    number = next((member for member in members if member in (int, float)), None)
    for value in values:
        if choices and value not in choices:
            raise no_such(flag, value, choices)
        if not value and Path in members:
            raise ValueError(f"{flag} is empty: write a path after it")
        if number is not None and not (value == "None" and NoneType in members):
            try:
                parse_number(value, number)
            except ValueError as error:
                raise ValueError(f"{flag} {error}") from None


def parse_number(text: str, kind: type[int] | type[float]) -> int | float:
    """`text` as a number of the type `kind`. Raises ValueError if `text` is no such number. If `kind` is int and `text`
    is 1e6, the error advises to write 1000000."""
    try:
        return kind(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if re.fullmatch(r"\d{1,3}(,\d{3})+", text):
            value = float(text.replace(",", ""))
        advice = f": write {int(value)}" if value.is_integer() else ""
        raise ValueError(f"{text} is not a {'whole ' if kind is int else ''}number{advice}") from None
