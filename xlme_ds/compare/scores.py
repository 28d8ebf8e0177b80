"""The scores of one point of a system: read from the files that its tests left in its folder."""

from pathlib import Path
from typing import NamedTuple

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
FILES = {"pairs": "pairs.json", "tatoeba": "tatoeba.json", "align": "align.json", "ner": "ner/scores.json"}
"""By test the file of its scores, below the folder of the model."""


def require_labels(ner: Path) -> None:
    """Raise ValueError where no test of --ner in another language than English has labels: the measure is the mean over
    those."""
    tests = choose(find(TASKS["ner"], [ner]), "ner", TuningConfig(), of_several=False).test
    if not any(labelled(read(source, TASKS["ner"])) for source in tests if source.language != "en"):
        raise ValueError(
            f"--ner {ner} has no test with labels in a language other than English: name a folder that has some"
        )


def scores(model: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The measures of the model in `model`, and of the untrained one that was tested with it, if there was one."""
    trained: dict[str, float] = {}
    untrained: dict[str, float] = {}
    for test, file in FILES.items():
        path = model / file
        if not path.exists():
            continue
        content = read_json(path, dict)
        try:
            if test == "ner":
                trained[test] = float(np.mean([of["f1"] for code, of in content["languages"].items() if code != "en"]))
                continue
            for found, scored in zip((trained, untrained), content["models"], strict=False):
                layer = scored["layer"]
                if test == "align":
                    found[test] = 100 * scored["overall"]["aer"][layer]
                    continue
                for suffix in ("", "_centred"):
                    found[test + suffix] = 100 * both_ways(scored, bool(suffix))[layer]
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{path} lacks {error} or has another form: delete it, and the test is done again"
            ) from None
    return trained, untrained
