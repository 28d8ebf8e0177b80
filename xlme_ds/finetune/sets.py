"""Which files a run trains on, is scored on, and is chosen on among others."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from .examples import Example, Question, Source, read
from .settings import TuningConfig
from .tasks import Task

TENTH = 10


class Sets(NamedTuple):
    """The files of a run by what they are for."""

    train: list[Source]
    test: list[Source]
    """Scored: tests, and dev sets where the task has no test."""
    dev: list[Source]
    """Of the languages trained on, what a choice among settings goes by; the training files where a tenth of them is
    held out."""
    held_out: bool
    unused: list[str]
    """Languages with a dev set and no test where others have one."""

    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of the files that are scored, by name."""
        return {
            source.path.name: hashlib.sha256(source.path.read_bytes()).hexdigest()
            for source in [*self.test, *(source for source in self.dev if source.split == "dev")]
        }


def choose(sources: Sequence[Source], name: str, tuning: TuningConfig, of_several: bool) -> Sets:
    """What a run of the task `name` does with each file; `of_several`: its settings are one choice among several.

    Dev sets are the task's own or, for a language that has none, those of the set that is trained on. What is scored is
    never chosen on: without a dev set apart from the tests every tenth training example is held out. Raises ValueError.
    """
    train = _train(sources, tuning)
    own = [source for source in sources if source.own]
    test = [source for source in own if source.split == "test"] or [source for source in own if source.split == "dev"]
    if not test:
        raise ValueError(f"no test or dev set of {name} in --data: add the folder that has one")
    dev: dict[str, Source] = {}
    for source in sorted(sources, key=lambda source: not source.own):
        if source.split == "dev" and source not in test and source.language in {one.language for one in train}:
            dev.setdefault(source.language, source)
    scored = {source.language for source in test}
    unused = sorted({source.language for source in own if source.split == "dev"} - scored)
    held_out = tuning.held_out or (of_several and not dev)
    return Sets(train, test, train if held_out else [dev[code] for code in sorted(dev)], held_out, unused)


def _train(sources: Sequence[Source], tuning: TuningConfig) -> list[Source]:
    wanted, there = tuning.train_languages, [source for source in sources if source.split == "train"]
    chosen = {source.language: source for source in there if wanted == ("all",) or source.language in wanted}
    missing = [language for language in wanted if language != "all" and language not in chosen]
    if missing or not chosen:
        raise ValueError(
            f"no training set of {', '.join(missing) or 'any language'} in --data, only of "
            f"{', '.join(sorted({source.language for source in there})) or 'none'}: add its folder, or set tuning.train_languages"
        )
    return [chosen[language] for language in sorted(chosen)]


def training_examples(source: Source, task: Task, tuning: TuningConfig) -> list[Example]:
    """What is trained on of a training file."""
    examples = read(source, task)[: tuning.train_examples or None]
    return _apart(examples, source)[0] if tuning.held_out else examples


def dev_examples(source: Source, task: Task, tuning: TuningConfig) -> list[Example]:
    """What is chosen on of a dev file, or of a training file."""
    if source.split == "dev":
        return read(source, task)
    return _apart(read(source, task)[: tuning.train_examples or None], source)[1]


def _apart(examples: list[Example], source: Source) -> tuple[list[Example], list[Example]]:
    """(nine tenths, every tenth); questions on one context stay together."""
    groups: dict[object, int] = {}
    numbers = [
        groups.setdefault(example.context if isinstance(example, Question) else place, len(groups))
        for place, example in enumerate(examples)
    ]
    if len(groups) < TENTH:
        raise ValueError(
            f"{source.path} has {len(groups)} examples, too few to hold out every tenth: add a dev set to --data"
        )
    held = [number % TENTH == TENTH - 1 for number in numbers]
    return (
        [example for example, out in zip(examples, held, strict=True) if not out],
        [example for example, out in zip(examples, held, strict=True) if out],
    )
