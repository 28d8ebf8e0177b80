"""The tests that a model on the way is put through, each a command of its own, and what of its answer is compared."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..data.schema import read_json
from ..evaluate.retrieval import both_ways
from ..finetune.downstream_tasks import TASKS
from ..finetune.settings import TuningConfig
from ..finetune.task_files import choose, find, labelled, read


class Measure(NamedTuple):
    """A figure of a model, in per cent."""

    title: str
    higher_is_better: bool = True


MEASURES = {
    "pairs": Measure("retrieval of held-out pairs, accuracy@1"),
    "pairs_centred": Measure("the same, centred"),
    "tatoeba": Measure("Tatoeba, accuracy@1"),
    "tatoeba_centred": Measure("the same, centred"),
    "align": Measure("word alignment, error rate", higher_is_better=False),
    "ner": Measure("entities, F1 of other languages than English"),
}
"""In the order of tables."""


@dataclass(frozen=True)
class Tests:
    """Folders of test data; None leaves a test out."""

    pairs: Path | None
    tatoeba: Path | None
    align: Path | None
    ner: Path | None
    tuning: str
    """Settings of fine-tuning."""

    def commands(self, model: Path, untrained: bool, tuned: bool) -> list[list[str]]:
        """What is still to do for the model in `model`, whose answers are put beside it."""
        found = []
        for test in ("pairs", "tatoeba", "align"):
            data = getattr(self, test)
            if data is not None and not (model / f"{test}.json").exists():
                words = ["--model", str(model), "--data", str(data), "--out", str(model)]
                found.append(["xlme_ds.evaluate", test, *words, *(["--random"] if untrained else [])])
        if self.ner is not None and tuned and not (model / "ner" / "scores.json").exists():
            words = ["--model", str(model), "--data", str(self.ner), "--out", str(model / "ner")]
            found.append(["xlme_ds.finetune", "--task", "ner", *words, *shlex.split(self.tuning)])
        return [[sys.executable, "-W", "ignore", "-m", *words] for words in found]


def require_labels(ner: Path) -> None:
    """Raise ValueError where no test of --ner in another language than English has labels: the measure is the mean over
    those."""
    tests = choose(find(TASKS["ner"], [ner]), "ner", TuningConfig(), of_several=False).test
    if not any(labelled(read(source, TASKS["ner"])) for source in tests if source.language != "en"):
        raise ValueError(
            f"--ner {ner} has no test with labels in a language other than English: name a folder that has some"
        )


def scores(model: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The measures of the model in `model`, and of the untrained one that was tested beside it, if there was one."""
    ours: dict[str, float] = {}
    untrained: dict[str, float] = {}
    paths = {test: model / f"{test}.json" for test in ("pairs", "tatoeba", "align")} | {
        "ner": model / "ner" / "scores.json"
    }
    for test, path in paths.items():
        if not path.exists():
            continue
        content = read_json(path, dict)
        try:
            if test == "ner":
                ours[test] = float(np.mean([of["f1"] for code, of in content["languages"].items() if code != "en"]))
                continue
            for found, scored in zip((ours, untrained), content["models"], strict=False):
                found |= _of_layer(test, scored)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{path} lacks {error} or has another form: delete it, and the test is done again"
            ) from None
    return ours, untrained


def _of_layer(test: str, scored: Mapping[str, Any]) -> dict[str, float]:
    layer = scored["layer"]
    if test == "align":
        return {test: 100 * scored["overall"]["aer"][layer]}
    return {test + suffix: 100 * both_ways(scored, bool(suffix))[layer] for suffix in ("", "_centred")}
