"""Tests of a model's lookup table as word embeddings of several languages (XLM: Conneau and Lample, 2019).

The tests are word pairs whose similarity people judged (SemEval-2017 Task 2, Camacho-Collados et al., 2017) and
translations (MUSE's dictionaries, Conneau et al., 2018). A word's vector is the mean of the token embeddings of its
pieces; position embeddings and norms are not applied.

N words, D width.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import EncoderName
from ..data.schema import UNK
from ..io.argument_types import check_argument_types
from ..io.files import real_path, visible_paths
from ..io.folders import require_folder
from ..trained.runs import TrainedEncoder
from .compared_models import Models, load_encoders
from .output import ResultTable
from .text_lines import require_same_length, split_lines
from .vectors import unit_vectors

WordPair = tuple[str, str]
JudgedPairs = tuple[list[WordPair], list[float]]  # pairs of words or phrases, the similarity that people gave each

_PAIRS_ENDING, _SCORES_ENDING = ".data.txt", ".gold.txt"  # endings of the names of SemEval's files
_DICTIONARY = re.compile(r"[a-z]{2,3}-[a-z]{2,3}(\.\d+-\d+)?\.txt")


@check_argument_types
def words(
    models: Models, data: Path | str, *, which: EncoderName | None = None, random: bool = False
) -> dict[str, Any]:
    """Scores of the lookup table on judged word pairs and on dictionaries.

    The folder `data` holds SemEval-2017's en-de.test.data.txt and en-de.test.gold.txt, or dictionaries such as
    en-de.txt, or both. Subfolders are searched too. `help(xlme.evaluate)` explains the other arguments, the errors and
    what is returned.
    """
    judged, dictionaries = read_word_tests(Path(data))
    results = []
    for model in load_encoders(models, None, random, which):
        trained = TrainedEncoder(model.encoder, model.vocabulary)
        scores = {
            "similarity": {name: similarity_scores(trained, *test) for name, test in judged.items()},
            "dictionaries": {name: translation_scores(trained, test) for name, test in dictionaries.items()},
        }
        results.append(model.metadata | scores)
    return {"test": "words", "models": results}


def read_word_tests(folder: Path) -> tuple[dict[str, JudgedPairs], dict[str, list[WordPair]]]:
    """Returns (similarity tests, dictionaries), by name, of `folder` and its subfolders.

    A similarity test is a file such as en-de.test.data.txt, with its scores in en-de.test.gold.txt; a dictionary is a
    file such as en-de.txt or en-de.5000-6500.txt. Raises ValueError for a missing or damaged file, for two tests of one
    name, and for a folder without any test.
    """
    require_folder(folder, "name a folder of word pairs or dictionaries")
    files = visible_paths(folder, "*.txt")
    pair_files = _by_name((path for path in files if path.name.endswith(_PAIRS_ENDING)), _PAIRS_ENDING)
    dictionary_files = _by_name((path for path in files if _DICTIONARY.fullmatch(path.name)), ".txt")
    judged = {name: _read_judged(path) for name, path in pair_files.items()}
    dictionaries = {name: _read_pairs(path, None) for name, path in dictionary_files.items()}
    for path in files:
        name = path.name.removesuffix(_SCORES_ENDING)
        if name != path.name and name not in judged:
            raise ValueError(f"{path} has scores for no words: put {name}{_PAIRS_ENDING} next to it, or remove it")
    if not judged and not dictionaries:
        raise ValueError(
            f"{folder} holds no word pairs: put SemEval's en-de.test.data.txt and en-de.test.gold.txt or a "
            "dictionary en-de.txt there"
        )
    return judged, dictionaries


def _by_name(paths: Iterable[Path], ending: str) -> dict[str, Path]:
    """The files by their names without `ending`. Raises ValueError if files of two folders have the same name."""
    by_name: dict[str, Path] = {}
    for path in sorted(paths):
        name = path.name.removesuffix(ending)
        if real_path(by_name.setdefault(name, path)) != real_path(path):
            raise ValueError(f"{path} is the second test named {name}: name a folder that holds it once")
    return by_name


def _read_judged(path: Path) -> JudgedPairs:
    """The pairs in the file `path` and their scores. SemEval's file of scores, the `key`, is in the folder of `path`
    or, as published, in ../keys."""
    name = path.name.removesuffix(_PAIRS_ENDING) + _SCORES_ENDING
    key = next((file for file in (path.with_name(name), path.parent.parent / "keys" / name) if file.is_file()), None)
    if key is None:
        raise ValueError(f"{path} has no key: put {name} next to it, or into {path.parent.parent / 'keys'}")
    lines = split_lines(key.read_bytes(), key)
    pairs = _read_pairs(path, "\t")
    require_same_length(pairs, path, lines, key)
    scores = []
    for line_number, line in enumerate(lines, start=1):
        try:
            scores.append(float(line))
        except ValueError:
            scores.append(math.nan)
        if not math.isfinite(scores[-1]):
            raise ValueError(f"{key} line {line_number} is {line.strip()!r} instead of a number: fetch the file again")
    if len(set(scores)) < 2:
        raise ValueError(f"{key} has the same score on every line, which gives no correlation: fetch the file again")
    return pairs, scores


def _read_pairs(path: Path, separator: str | None) -> list[WordPair]:
    """The two words of every line. `separator` is what divides them; None means any white space."""
    pairs = []
    for line_number, line in enumerate(split_lines(path.read_bytes(), path), start=1):
        fields = [word.strip() for word in line.split(separator)]
        if len(fields) != 2 or not all(fields):
            gap = "a tab" if separator else "a space or a tab"
            raise ValueError(
                f"{path} line {line_number} is {line.strip()!r}: it must be two words with {gap} between them"
            )
        pairs.append((fields[0], fields[1]))
    return pairs


def word_vectors(model: TrainedEncoder, texts: Sequence[str]) -> tuple[np.ndarray, int]:
    """Returns (the vectors of the words `texts`, float64 [N, D]; the number of words with an unknown piece).

    An unknown piece has the vector of `<unk>`. Raises ValueError for a word that has no piece at all.
    """
    ids, sizes = model.vocabulary.encode_lines(list(texts))
    if not sizes.all():
        raise ValueError(
            f"{texts[int(sizes.argmin())]!r} has no piece in {model.vocabulary.path}: take its pair out of the test"
        )
    used_ids, index = np.unique(ids, return_inverse=True)
    with torch.no_grad():
        tokens = torch.from_numpy(used_ids).long().to(model.encoder.embedding_blocks[0].device)
        table = model.encoder.embed(tokens).double().cpu().numpy()
    starts = np.cumsum(sizes) - sizes  # index in `ids` of each word's first piece
    vectors_ND = np.add.reduceat(table[index], starts) / sizes[:, None]
    return vectors_ND, int(np.maximum.reduceat(ids == UNK, starts).sum())


def _pair_vectors(model: TrainedEncoder, pairs: Sequence[WordPair]) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns (vectors of the first words [N, D], vectors of the second words [N, D], number of words with an unknown
    piece)."""
    first_words, second_words = zip(*pairs, strict=True)
    first_ND, first_unknown = word_vectors(model, first_words)
    second_ND, second_unknown = word_vectors(model, second_words)
    return first_ND, second_ND, first_unknown + second_unknown


def similarity_scores(model: TrainedEncoder, pairs: Sequence[WordPair], scores: Sequence[float]) -> dict[str, Any]:
    """Pearson's and Spearman's correlation of the pairs' cosines with the human `scores`, and SemEval's score: the
    harmonic mean of the two correlations if both are positive, else 0."""
    first_ND, second_ND, unknown = _pair_vectors(model, pairs)
    cosines = (unit_vectors(first_ND) * unit_vectors(second_ND)).sum(1)
    human_scores = np.array(scores)
    pearson, spearman = correlation(cosines, human_scores), correlation(ranks(cosines), ranks(human_scores))
    score = 2 * pearson * spearman / (pearson + spearman) if min(pearson, spearman) > 0 else 0.0
    return {"pearson": pearson, "spearman": spearman, "score": score, "pairs": len(pairs), "unknown": unknown}


def translation_scores(model: TrainedEncoder, pairs: Sequence[WordPair]) -> dict[str, Any]:
    """Mean cosine and mean Euclidean distance between a word and its translation, and precision@1.

    Precision@1 is the share of source words whose nearest target word in the dictionary, by cosine, translates them.
    """
    sources_ND, translations_ND, unknown = _pair_vectors(model, pairs)
    translations_of: dict[str, set[str]] = {}
    for word, translation in pairs:
        translations_of.setdefault(word, set()).add(translation)
    targets = sorted({translation for _, translation in pairs})
    unit_words_ND, unit_targets_ND = (
        unit_vectors(word_vectors(model, texts)[0]) for texts in (list(translations_of), targets)
    )
    blocks = np.split(unit_words_ND, range(1024, len(unit_words_ND), 1024))  # bounds the memory of the cosines
    nearest = np.concatenate([(block @ unit_targets_ND.T).argmax(1) for block in blocks])
    is_right = [targets[index] in allowed for index, allowed in zip(nearest, translations_of.values(), strict=True)]
    return {
        "cosine": float((unit_vectors(sources_ND) * unit_vectors(translations_ND)).sum(1).mean()),
        "distance": float(np.linalg.norm(sources_ND - translations_ND, axis=1).mean()),
        "precision": float(np.mean(is_right)),
        "words": len(translations_of),
        "candidates": len(targets),
        "pairs": len(pairs),
        "identical": sum(word == translation for word, translation in pairs),
        "unknown": unknown,
    }


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation of two series [N]; 0 if one of them does not vary."""
    a, b = a - a.mean(), b - b.mean()
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms > 1e-12 else 0.0


def ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each of N values, from 1; equal values share the mean of their ranks."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(counts)  # the last rank that each distinct value takes
    return (last_ranks - (counts - 1) / 2)[index]


def word_tables(results: Mapping[str, Any]) -> list[ResultTable]:
    """A table of the similarity tests and one of the dictionaries, if there are any: a row for each test and model."""
    similarity = _word_table(
        results["models"],
        "similarity",
        "Word similarity: cosines against people's scores",
        "test",
        {
            "pairs": ("pairs", "d"),
            "Pearson": ("pearson", ".3f"),
            "Spearman": ("spearman", ".3f"),
            "harmonic mean": ("score", ".3f"),
            "unknown": ("unknown", "d"),
        },
    )
    dictionaries = _word_table(
        results["models"],
        "dictionaries",
        "Translations in the lookup table",
        "dictionary",
        {
            "pairs": ("pairs", "d"),
            "identical": ("identical", "d"),
            "cosine": ("cosine", ".3f"),
            "L2 distance": ("distance", ".3f"),
            "P@1": ("precision", ".1%"),
            "candidates": ("candidates", "d"),
            "unknown": ("unknown", "d"),
        },
        "P@1 searches all target words of the dictionary; identical: pairs of two words that are spelled the same, so "
        "that their cosine is 1",
    )
    return [table for table in (similarity, dictionaries) if table.rows]


def _word_table(
    models: Sequence[Mapping[str, Any]],
    kind: str,
    title: str,
    test_column: str,
    columns: Mapping[str, tuple[str, str]],
    *notes: str,
) -> ResultTable:
    """The table of one `kind` of tests. `columns`: title of a column -> (key in a test's results, format)."""
    rows = [
        [name, model["model"], *(format(model[kind][name][key], spec) for key, spec in columns.values())]
        for name in models[0][kind]
        for model in models
    ]
    unknown_note = "unknown: words with a piece that the vocabulary lacks"
    return ResultTable(title, [test_column, "model", *columns], rows, [*notes, unknown_note])
