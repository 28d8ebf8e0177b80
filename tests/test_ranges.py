"""The legal numbers of every setting: the last one that is allowed, and the first that is not."""

import math
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from importlib import import_module
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from data_prep.__main__ import STAGES
from data_prep.__main__ import main as prepare
from xlme_ds.config import Range, RunConfig, Training
from xlme_ds.finetune.settings import FinetuneConfig
from xlme_ds.settings_file import check_ranges
from xlme_ds.validate import validate

# Checks of relations between settings bound these: a sum of steps, a number of layers, a fraction below 1.
RELATIONS = {"objective.mask_fraction", "data.phase_steps", "data.phase_mask_fractions", "engine.balance"}


def numbers(kind: type, prefix: str = "") -> Iterator[tuple[str, type, Range | None]]:
    """Every numeric setting of a dataclass and its sections, with its type and its range."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        hint = get_args(hint)[0] if get_origin(hint) in (Union, tuple) else hint
        plain = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
        if is_dataclass(hint):
            yield from numbers(hint, f"{prefix}{name}.")
        elif plain in (int, float):
            yield prefix + name, plain, next(iter(getattr(hint, "__metadata__", ())), None)


SETTINGS = {name: (plain, allowed) for kind in (RunConfig, FinetuneConfig) for name, plain, allowed in numbers(kind)}


def test_every_number_has_a_range() -> None:
    assert {name for name, (_, allowed) in SETTINGS.items() if allowed is None} == RELATIONS
    assert len(SETTINGS) >= 70


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - RELATIONS))
def test_numbers_at_and_beyond_the_end_of_a_range(name: str) -> None:
    plain, allowed = SETTINGS[name]
    config: Training = FinetuneConfig("x") if name.startswith("tuning") else RunConfig("x")
    section, _, key = name.rpartition(".")
    settings: Any = getattr(config, section) if section else config
    several = isinstance(getattr(settings, key), tuple)
    beyond: list[float] = [math.nan, -math.inf, -1] if plain is float else [-1]
    assert allowed is not None
    if allowed.most < math.inf and allowed.contains(int(allowed.most) + 1):
        beyond += [int(allowed.most) + 1, 10**30, *([math.inf] * (plain is float))]
    if several:
        assert allowed.contains(1)
    for value in beyond:
        changed = replace(settings, **{key: (1, value) if several else value})
        with pytest.raises(ValueError, match=rf"{name} is .*{'each' if several else 'it'} must ") as refused:
            validate(replace(config, **{section: changed}) if section else changed)
        assert math.isnan(value) == ("must be a number" in str(refused.value))
        if most := re.search("at most ([0-9,]+)$", str(refused.value)):
            legal = plain(most[1].replace(",", ""))
            check_ranges(replace(settings, **{key: (legal,) if several else legal}))
    for value in ("1", True, *([2.0] if plain is int else [])):
        given = (value,) if several else value
        with pytest.raises(ValueError, match=rf"{name} is {re.escape(repr(given))}: .* be a (whole )?number"):
            check_ranges(replace(settings, **{key: given}), f"{section}." if section else "")
    if several:
        with pytest.raises(ValueError, match=rf"{name} is 1: it must be a list"):
            check_ranges(replace(settings, **{key: 1}), f"{section}." if section else "")
    last = min(allowed.most, 1e9) if allowed.contains(min(allowed.most, 1e9)) else None
    if last is not None:
        check_ranges(replace(settings, **{key: (plain(last),) if several else plain(last)}))


LEAST = 5e-324
# What an error says of a range, with numbers that are in it and others that are not.
RANGES: dict[str, tuple[list[float], list[float]]] = {
    "be at least 1": ([1], [0]),
    "not be negative": ([0], [-1, -LEAST]),
    "be positive": ([LEAST], [0]),
    "be at least 0 and below 1": ([0, 1 - 2**-53], [-LEAST, 1]),
    "be at least 0 and at most 0.9999": ([0, 0.9999], [-LEAST, 0.99991]),
    "be above 0, up to 1": ([LEAST, 1], [0, 1 + 2**-52]),
    "be even and at least 4": ([4, 6], [2, 3, 5]),
    "be even and at least 2": ([2, 4], [0, 1, 3]),
    "be at least 2, or use engine.kind deepspeed": ([2], [1]),
}


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - RELATIONS))
def test_a_range_is_what_its_error_says(name: str) -> None:
    _, allowed = SETTINGS[name]
    assert allowed is not None
    legal, illegal = RANGES[allowed.wording.partition(" (")[0]]
    assert [allowed.contains(number) for number in (*legal, *illegal)] == [True] * len(legal) + [False] * len(illegal)


@pytest.mark.parametrize("stage", STAGES)
def test_a_number_that_no_stage_of_preparation_can_use(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag alone; nothing is read before."""
    kind = getattr(import_module(f"data_prep.{STAGES[stage][0]}"), f"{stage.capitalize()}Config")
    needed = [word for field in fields(kind) if field.default is MISSING for word in (_flag(field.name), "nowhere")]
    flags = [_flag(name) for name, hint in get_type_hints(kind).items() if hint in (int, float)]
    for flag in flags:
        for value in (str(10**30), *(["inf"] if get_type_hints(kind)[flag[2:].replace("-", "_")] is float else [])):
            assert prepare([stage, *needed, flag, value]) == 2
            assert f"xlme prep {stage}: error: {flag} is " in (said := capsys.readouterr().err), said
            assert ": it must be at most " in said
    if "--processes" in flags:
        assert prepare([stage, *needed, "--processes", "1025"]) == 2
        assert "--processes is 1025: it must be at most 1,024" in capsys.readouterr().err


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
