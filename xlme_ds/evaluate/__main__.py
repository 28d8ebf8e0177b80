"""Command line: `python -m xlme_ds.evaluate tatoeba|pairs|align --model DIR --data DIR`.

Sentence retrieval and word alignment with the vectors of every layer, for one model or several side by side.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console

from ..cli import fail
from ..data.schema import write_json
from ..models.text_encoder import Which
from . import tables
from .align import MEASURES, align_test
from .gold import read_gold
from .models import Compared, load
from .pairs import heldout_pairs
from .retrieval import Groups, by_language, mean_over, retrieve
from .tatoeba import SETS, read_tatoeba


@dataclass(frozen=True)
class Options:
    """What all tests take."""

    models: Annotated[list[Path], tyro.conf.UseAppendAction, tyro.conf.arg(name="model")]
    """Folder of a finished run or of an export; give it several times to compare models."""
    data: Path
    """What the test reads, as said above."""
    layer: int | None = None
    """Layer that the tables quote, 0 for the embeddings; by default three quarters of the depth, the paper's 9 of 12."""
    which: Which | None = None
    """Which encoder of a pre-training run; by default the one that it is for, XLM-E's discriminator."""
    random: bool = False
    """Compare with untrained models of the same shape and seed."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the results as JSON instead of tables."""
    out: Path | None = None
    """Folder for <test>.json, <test>.md and the plot over layers, <test>.png and <test>.svg."""

    def load(self) -> list[Compared]:
        """The models."""
        return load(self.models, self.layer, self.random, self.which)


Common = Annotated[Options, tyro.conf.arg(name="")]


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    commands: dict[str, Callable[..., Any]] = {"tatoeba": tatoeba, "pairs": pairs, "align": align}
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands,
            prog="python -m xlme_ds.evaluate",
            description=__doc__,
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except (ValueError, OSError) as error:
        fail("xlme_ds.evaluate", error)


def tatoeba(options: Common) -> None:
    """Sentence retrieval on the Tatoeba test set, English with every language that `--data` has.

    `--data`: folder of LASER's v1 files, tatoeba.xxx-eng.xxx and tatoeba.xxx-eng.eng.
    """
    compared, text = options.load(), read_tatoeba(options.data)

    def groups(model: Compared) -> Groups:
        return {
            language: (
                [model.vocabulary.encode(line) for line in ours],
                [model.vocabulary.encode(line) for line in theirs],
            )
            for language, (ours, theirs) in text.items()
        }

    _retrieval("tatoeba", [_retrieved(model, groups(model)) for model in compared], options)


def pairs(options: Common, limit: int = 1000) -> None:
    """The same on translation pairs kept out of training.

    `--data`: data folder that holds para/, or folder of line-aligned text: X.en-de.en with X.en-de.de, or en-de.txt.zip.

    Args:
        limit: The first so many pairs of a language, repetitions left out.
    """
    if limit < 1:
        raise ValueError(f"--limit {limit} leaves no pair: it must be at least 1")
    scored = []
    for model in options.load():
        groups = by_language(heldout_pairs(options.data, model.vocabulary))
        if not groups:
            raise ValueError(f"{options.data} has no language with 5 pairs or more: an accuracy needs candidates")
        scored.append(_retrieved(model, {code: (a[:limit], b[:limit]) for code, (a, b) in groups.items()}))
    _retrieval("pairs", scored, options)


def align(options: Common, apart: bool = False) -> None:
    """Word alignment by optimal transport, scored against links made by hand.

    `--data`: folder of tests named a-b, each with test.a, test.b and alignv2.txt or align.txt; or one such folder.

    Args:
        apart: Read both sentences of a pair as items of their own instead of one.
    """
    compared, gold = options.load(), read_gold(options.data)
    sizes = {name: len(test) for name, test in gold.items()}
    scored = []
    for model in compared:
        tests = {
            name: align_test(model.encoder, model.vocabulary, test, apart, tuple(name.split("-", 1)))
            for name, test in gold.items()
        }
        overall = {
            measure: np.mean([test[measure] for test in tests.values()], axis=0).tolist() for measure in MEASURES
        }
        cut = sum(test.pop("cut") for test in tests.values())
        scored.append(_facts(model) | {"overall": overall, "tests": tests, "cut": cut, "pairs": sizes})
    results = {
        "test": "align",
        "reading": "each sentence read alone" if apart else "a pair read as one item",
        "models": scored,
    }
    curves = [(model["model"], tables.error_rates(model), False) for model in scored]
    _deliver(results, tables.alignment_tables(results), curves, "mean alignment error rate (%)", options)


def _facts(model: Compared) -> dict[str, Any]:
    return {"model": model.name, "folder": model.folder, "depth": model.depth, "layer": model.layer}


def _retrieved(model: Compared, groups: Groups) -> dict[str, Any]:
    scores = retrieve(model.encoder, groups, centred=True)
    sizes = {language: len(ours) for language, (ours, _) in groups.items()}
    longest = model.encoder.cfg.max_positions - 2
    cut = sum(len(sentence) > longest for group in groups.values() for side in group for sentence in side)
    sets = {}
    for name, codes in SETS.items():
        found = [code for code in codes if code in groups]
        if found:
            sets[name] = mean_over(scores["languages"], found) | {"found": len(found), "of": len(codes)}
    return _facts(model) | scores | {"sets": sets, "cut": cut, "pairs": sizes}


def _retrieval(test: str, scored: list[dict[str, Any]], options: Options) -> None:
    results = {"test": test, "models": scored}
    curves = [
        (model["model"], tables.both_ways(model, centred), centred) for model in scored for centred in (False, True)
    ]
    _deliver(results, tables.retrieval_tables(results), curves, "accuracy@1, mean of both directions (%)", options)


def _deliver(
    results: Mapping[str, Any],
    shown: Sequence[tables.Table],
    curves: Sequence[tuple[str, Sequence[float], bool]],
    label: str,
    options: Options,
) -> None:
    """Print, and write into `out`: the plot and the tables first, the results that `report xtreme` reads last."""
    if (out := options.out) is not None:
        out.mkdir(parents=True, exist_ok=True)
        tables.plot(curves, label, out / results["test"])
        tables.write_text(out / f"{results['test']}.md", "\n".join(table.markdown() for table in shown))
        write_json(out / f"{results['test']}.json", results)
    if options.as_json:
        json.dump(results, sys.stdout, indent=1, ensure_ascii=False)
        print()
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in shown:
        table.show(console)


if __name__ == "__main__":
    main()
