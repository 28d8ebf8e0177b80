"""Scores an export by mteb's bitext mining: Tatoeba, BUCC, FLORES-200 and NTREX-128, from a local folder.

    python -m bench.peers.mteb --model EXPORT --data FOLDER [--out FOLDER]

mteb downloads its data from a hub; here its tasks read the published text files anywhere below the folder, without a
network. The tasks, the search and the scores are mteb's own:

* Tatoeba: LASER's tatoeba.deu-eng.deu with tatoeba.deu-eng.eng.
* BUCC.v2: de-en.training.de, de-en.training.en and de-en.training.gold; the pairs of the gold file.
* FLORES: deu_Latn.devtest, a file a language.
* NTREX: newstest2019-ref.deu.txt, newstest2019-src.eng.txt, a file a language.

Tasks without files are left out, and pairs of languages that mteb's task does not have.
"""

import fnmatch
import importlib.util
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, permutations
from pathlib import Path
from statistics import fmean
from typing import Any

import tyro
from rich.console import Console

from xlme_ds.cli import fail
from xlme_ds.evaluate.output import ResultTable, percent
from xlme_ds.evaluate.text_lines import read_sentence_pairs, require_same_length, split_lines

Sides = tuple[list[str], list[str]]  # sentences of the first language of a pair and of the second, line by line
_CHINESE = {"zho-CN": "zho_Hans", "zho-TW": "zho_Hant"}  # NTREX's names, of countries, by mteb's, of scripts


@dataclass(frozen=True)
class Bitext:
    """Arguments of the command."""

    model: Path
    """Folder of `xlme export`, or of a SentenceTransformer that was trained from one."""
    data: Path
    """Folder with the test sets, also below it."""
    out: Path | None = None
    """Folder for mteb's results, a JSON file a task."""


def _below(folder: Path, pattern: str) -> list[Path]:
    """The files with a matching name anywhere below `folder`, also through links, which rglob does not follow.

    Raises ValueError if two have the same name.
    """
    walked = os.walk(folder, followlinks=True)
    paths = sorted(Path(where, name) for where, _, names in walked for name in fnmatch.filter(names, pattern))
    by_name: dict[str, Path] = {}
    for path in paths:
        other = by_name.setdefault(path.name, path)
        if other != path:
            raise ValueError(f"{other} and {path} are the same test by their names: leave one below --data")
    return paths


def tatoeba(folder: Path) -> Iterator[tuple[str, Sides]]:
    """The pairs of languages of LASER's files, English second."""
    for path in _below(folder, "tatoeba.*-eng.eng"):
        pair = path.name.split(".")[1]
        yield pair, read_sentence_pairs(path.with_suffix(f".{pair.removesuffix('-eng')}"), path)


def bucc(folder: Path) -> Iterator[tuple[str, Sides]]:
    """The gold pairs of BUCC's training sets, English second."""
    for path in _below(folder, "*-en.training.gold"):
        pair = path.name.split(".")[0]
        gold = [line.partition("\t")[::2] for line in _lines(path)]
        sides = [path.with_suffix(f".{code}") for code in pair.split("-")]
        texts = [dict(line.partition("\t")[::2] for line in _lines(side)) for side in sides]
        for n, (a, b) in enumerate(gold, start=1):
            if a not in texts[0] or b not in texts[1]:
                raise ValueError(f"{path} line {n} names no sentence of {pair}: fetch the files again")
        yield pair, ([texts[0][a] for a, _ in gold], [texts[1][b] for _, b in gold])


def flores(folder: Path, languages: set[str]) -> Iterator[tuple[str, Path]]:
    """FLORES-200's files by mteb's codes of `languages`, which are in their names."""
    return ((path.stem, path) for path in _below(folder, "*.devtest") if path.stem in languages)


def ntrex(folder: Path, languages: set[str]) -> Iterator[tuple[str, Path]]:
    """NTREX-128's files by mteb's codes of `languages`; most names lack the script; without variants of a country."""
    for path in _below(folder, "newstest2019-*.txt"):
        code = path.stem.partition(".")[2]
        code = _CHINESE.get(code, code.replace("-", "_"))
        if not path.name.startswith("newstest2019-ref-2"):  # a second translation into Spanish
            yield from ((language, path) for language in languages if language in (code, f"{code}_{language[-4:]}"))


PAIRS = {"Tatoeba": tatoeba, "BUCC.v2": bucc}
# A file a language, all line by line: the split that mteb scores, and where the files are.
PARALLEL = {"FloresBitextMining": ("devtest", flores), "NTREXBitextMining": ("test", ntrex)}


def _lines(path: Path) -> list[str]:
    return split_lines(path.read_bytes(), path)


def tasks_of(folder: Path) -> list[Any]:
    """mteb's tasks with the data that `folder` has for them in place of their own, for the pairs of languages of both.

    Raises ValueError, naming the file, on damaged ones, and on a folder that has none.
    """
    import mteb
    from datasets import Dataset

    tasks = {name: mteb.get_task(name) for name in (*PAIRS, *PARALLEL)}
    pairs: dict[str, set[str]] = {}
    for name, read in PAIRS.items():
        texts = {pair: {"sentence1": first, "sentence2": second} for pair, (first, second) in read(folder)}
        pairs[name] = set(texts)
        tasks[name].dataset = {pair: {"test": Dataset.from_dict(columns)} for pair, columns in texts.items()}
    for name, (split, find) in PARALLEL.items():
        languages = {language for pair in tasks[name].hf_subsets for language in pair.split("-")}
        files = dict(sorted(find(folder, languages)))
        sentences = {language: _lines(path) for language, path in files.items()}
        for one, other in pairwise(sentences):
            require_same_length(sentences[one], files[one], sentences[other], files[other])
        pairs[name] = {f"{one}-{other}" for one, other in permutations(sentences, 2)}
        tasks[name].dataset = {split: Dataset.from_dict(sentences)}
    for name, task in tasks.items():
        task.hf_subsets = [pair for pair in task.hf_subsets if pair in pairs[name]]
        task.data_loaded = True
    having = [task for task in tasks.values() if task.hf_subsets]
    if not having:
        raise ValueError(f"{folder} has no files of Tatoeba, BUCC, FLORES-200 or NTREX-128: name the folder above them")
    return having


def evaluate(model: Path, data: Path) -> list[Any]:
    """mteb's result of every task that `data` has files for. Raises ValueError as `tasks_of`."""
    import mteb
    from sentence_transformers import SentenceTransformer

    tasks = tasks_of(data)
    encoder = SentenceTransformer(str(model), trust_remote_code=True)
    return list(mteb.evaluate(encoder, tasks, cache=None, co2_tracker=False, show_progress_bar=False).task_results)


def table(model: Path, results: list[Any]) -> ResultTable:
    """A row for each task, of means over its pairs of languages."""
    rows = []
    for result in results:
        scores = [one for split in result.scores.values() for one in split]
        means = [percent(fmean(one[measure] for one in scores)) for measure in ("accuracy", "f1")]
        rows.append([result.task_name, str(len(scores)), *means])
    note = "first language to second by cosine; mteb's main score is F1"
    return ResultTable(
        f"{model}: mteb's bitext mining (%)", ["task", "pairs of languages", "accuracy", "F1"], rows, [note]
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    options = tyro.cli(Bitext, prog="python -m bench.peers.mteb", description=__doc__, args=arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported
    warnings.filterwarnings("ignore", "To copy construct from a tensor", UserWarning)  # mteb's own, once a search
    try:
        if importlib.util.find_spec("mteb") is None:
            raise ValueError('mteb is missing: pip install -c constraints.txt ".[mteb]"')
        results = evaluate(options.model, options.data)
    except (ValueError, OSError) as error:
        fail("bench.peers.mteb", error)
    table(options.model, results).show(Console())
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        for result in results:
            result.to_disk(options.out / f"{result.task_name}.json")


if __name__ == "__main__":
    main()
