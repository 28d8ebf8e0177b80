"""Perplexity by language on held-out monolingual rows (XLM; Conneau and Lample, 2019).

Perplexity is the exponential of the mean −log p of the tokens that a model's objective predicts. If every token is
predicted from all earlier tokens, it is the perplexity of the text. If masked tokens are predicted from both sides, it
is a pseudo-perplexity (Salazar et al., 2020, who mask one token at a time).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..cli import progress
from ..config import ObjectiveConfig
from ..data.collate import collate
from ..data.rows import TASKS, UNK, Rows, concatenated
from ..data.shards import RowStore
from ..data.unigram import unigram_nll_by_id
from ..data.vocabulary import Vocabulary
from ..io.argument_types import check_argument_types
from .compared_models import ComparedPredictor, Models, load_predictors, trained_on_entry, trained_on_notes
from .output import ResultTable

# For each language (mean, count): the mean −log p (nats) of the predicted tokens, and the number of these tokens.
MeanNlls = dict[str, tuple[float, int]]


@check_argument_types
def perplexity(
    models: Models,
    data: Path | str,
    *,
    passes: int = 1,
    seed: int = 1,
    limit: int | None = None,
    unigram: Path | str | None = None,
    random: bool = False,
) -> dict[str, Any]:
    """Perplexity by language on the monolingual text of the data folder `data`, which holds mono/.

    The first `limit` rows of each language (None: all) are read `passes` times, each time with other masks drawn from
    `seed`. `unigram`: the data folder that a unigram model is counted on, for comparison. `help(xlme.evaluate)`
    explains the other arguments, the errors and what is returned.
    """
    check_seed_and_counts(seed, passes=passes, limit=limit)
    store, predictors = open_monolingual(Path(data)), load_predictors(models, random)
    model_stores = []
    for model in predictors:
        quantity = model.objective.quantities[model.objective.terms[0]]
        if quantity.task == "para" or not model.objective.reads_whole_rows:
            raise ValueError(f"{model.folder} predicts no tokens of monolingual text: use `evaluate losses`")
        require_readable(model, store)
        model_stores.append(open_monolingual(Path(data), model.cfg.language_embeddings))
    rows, tokens_per_character, characters = text_statistics(store, predictors[0].vocabulary, limit)
    unigram_results = []
    if unigram is not None:
        train = open_monolingual(Path(unigram))
        if train.manifest.shares_text(store.manifest):
            raise ValueError(f"{unigram} and {data} have the same text: name the training data for the unigram model")
        metadata = {"model": "unigram", "folder": str(unigram), "term": "counted"}
        unigram_results = [metadata | perplexities(unigram_nlls(train, store, limit), tokens_per_character)]
    results = []
    for model, model_store in zip(predictors, model_stores, strict=True):
        nlls = mean_nlls(summed_nlls(model, model_store, seed, sum(rows.values()), passes, limit))
        metadata = model.metadata | {"term": model.objective.terms[0]} | trained_on_entry(model, store)
        rate = tokens_per_character
        if model.objective.mask_fraction == 1.0:  # the `</s>` between two documents of a row are predicted, too
            rate = {language: count / passes / characters[language] for language, (_, count) in nlls.items()}
        results.append(metadata | perplexities(nlls, rate))
    return {"test": "perplexity", "seed": seed, "passes": passes, "rows": rows, "models": results + unigram_results}


def open_monolingual(folder: Path, languages: Sequence[str] = ()) -> RowStore:
    """The monolingual rows of a mixed data folder. `languages`: as in `RowStore`. Raises ValueError for a folder
    without such rows, and for rows that hold texts of several languages."""
    if not (folder / "mono").is_dir():
        raise ValueError(f"{folder} has no mono/: name a data folder that `xlme prep mix` wrote, with monolingual rows")
    store = RowStore(folder / "mono", languages)
    if unit := store.manifest.packed_unit:
        raise ValueError(
            f"{store.folder} was mixed with --{unit}, so a row may have several languages: use `evaluate losses`"
        )
    return store


def rows_by_language(
    store: RowStore, limit: int | None = None, rows_per_batch: int = 16
) -> Iterator[tuple[str, Rows, np.ndarray]]:
    """Yield (language, rows, record numbers) for batches of up to `rows_per_batch` rows of one language. Together they
    are the first `limit` rows of every language, read in one pass over the store."""
    pending: dict[str, dict[int, Rows]] = defaultdict(dict)  # by language and record number
    left: dict[str, int] = defaultdict(lambda: store.rows if limit is None else limit)
    for record in range(store.rows):
        row = store.read(np.array([record]))
        language = store.languages[int(row.languages[0])]
        if left[language] == 0:
            continue
        left[language] -= 1
        pending[language][record] = row
        if len(pending[language]) == rows_per_batch:
            rows = pending.pop(language)
            yield language, concatenated(list(rows.values())), np.array(list(rows))
    for language, rows in pending.items():
        yield language, concatenated(list(rows.values())), np.array(list(rows))


def text_statistics(
    store: RowStore, vocabulary: Vocabulary, limit: int | None = None
) -> tuple[dict[str, int], dict[str, float], dict[str, int]]:
    """Returns three dicts by language: the number of rows, the number of ordinary tokens per character, and the number
    of characters. Characters are counted in the pieces of the ordinary tokens, spaces included.

    Raises ValueError for a language without a token to predict: a mean over languages would leave it out.
    """
    piece_lengths = np.array([len(vocabulary.piece(token)) for token in range(vocabulary.size)])
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(3, np.int64))  # rows, tokens, characters
    for language, rows, _ in rows_by_language(store, limit):
        tokens = rows.tokens[rows.tokens > UNK]  # no special tokens
        sums[language] += len(rows.tokens), len(tokens), piece_lengths[tokens].sum()
    if without_tokens := sorted(language for language, (_, tokens, _) in sums.items() if not tokens):
        raise ValueError(
            f"{store.folder} has no token of {', '.join(without_tokens)} that the vocabulary knows"
            f"{' in the first rows' if limit else ''}: "
            "mix without this language, or with a vocabulary that has its script"
        )
    return (
        {language: int(rows) for language, (rows, _, _) in sorted(sums.items())},
        {language: tokens / characters for language, (_, tokens, characters) in sums.items()},
        {language: int(characters) for language, (_, _, characters) in sums.items()},
    )


def unigram_nlls(train: RowStore, store: RowStore, limit: int | None = None) -> MeanNlls:
    """The mean −log p of a unigram model on the text in `store`. The model is counted on `train`, on all languages
    together.

    Raises ValueError if the two stores have different vocabularies.
    """
    if train.manifest.vocabulary_sha256 != store.manifest.vocabulary_sha256:
        raise ValueError(
            f"{train.folder} was encoded with another vocabulary than {store.folder}: name the data of the run"
        )
    nll_V = unigram_nll_by_id(train)
    tokens_read = ((language, rows.tokens[rows.tokens > UNK]) for language, rows, _ in rows_by_language(store, limit))
    return mean_nlls((language, nll_V[tokens].sum(), len(tokens)) for language, tokens in tokens_read)


def check_seed_and_counts(seed: int, **counts: int | None) -> None:
    """Raise ValueError for a count below 1, and for a seed that is negative or not below 2^63: cut to 64 bits, it could
    act as another seed."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} {count} leaves nothing to read: it must be at least 1")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}: it must be at least 0 and below 2^63")


def require_readable(predictor: ComparedPredictor, store: RowStore) -> None:
    """Raise ValueError for rows of another vocabulary or layout, and for rows that are too long for the model."""
    manifest, cfg = store.manifest, predictor.cfg
    if manifest.vocabulary_sha256 != predictor.vocabulary.sha256:
        raise ValueError(
            f"{store.folder} was encoded with another vocabulary than that of {predictor.folder}: "
            "encode held-out text with the model's vocabulary"
        )
    if store.row_tokens > cfg.max_positions:
        raise ValueError(
            f"{store.folder} has rows of {store.row_tokens} tokens, but the model in {predictor.folder} reads at "
            f"most {cfg.max_positions}: mix with a smaller --row-tokens"
        )
    if manifest.layout != cfg.layout:
        raise ValueError(
            f"{store.folder} was mixed with --layout {manifest.layout}, but the model in {predictor.folder} was "
            f"trained on {cfg.layout}: mix the held-out text with --layout {cfg.layout}"
        )


@torch.no_grad()
def summed_nlls(
    predictor: ComparedPredictor, store: RowStore, seed: int, total_rows: int, passes: int, limit: int | None
) -> Iterator[tuple[str, float, float]]:
    """Yield (language, a model's sum of −log p, number of predicted tokens) for batches of the first `limit` rows of
    each language. The masks depend only on (seed, pass, row), so they are the same for all models. `total_rows`: the
    number of rows, which the lines of progress show."""
    device = next(predictor.model.parameters()).device
    # Every model that masks has the same share of masked tokens, whatever share it was trained with.
    fraction = 1.0 if predictor.objective.mask_fraction == 1.0 else ObjectiveConfig().mask_fraction
    batches = rows_by_language(store, limit)
    for language, rows, records in progress(batches, total_rows, "rows", predictor.name, lambda batch: len(batch[2])):
        for pass_index in range(passes):  # each pass has its own record numbers, so its own masks, as in training
            numbers = records + pass_index * store.rows
            batch = collate([(TASKS.index("mono"), rows, numbers)], seed, fraction).to(device)
            sums = predictor.objective.sums(predictor.model(batch), batch)
            yield language, float(sums[0]), float(predictor.objective.counts(batch)[0])


def mean_nlls(batches: Iterable[tuple[str, float, float]]) -> MeanNlls:
    """MeanNlls from (language, sum of −log p, count) of batches; a language without predicted tokens is left out."""
    totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for language, nll, count in batches:
        totals[language] += nll, count
    return {
        language: (float(total / count), int(count)) for language, (total, count) in sorted(totals.items()) if count
    }


def _exp(nll: float) -> float:
    """e ** `nll`; infinity if `nll` is NaN, as after training that diverged, or the result too large for a float."""
    return math.exp(nll) if nll < 709 else math.inf


def perplexities(nlls: MeanNlls, tokens_per_character: Mapping[str, float]) -> dict[str, Any]:
    """The scores of one model: `languages` has them by language, and `overall` their means, in which every language has
    the same weight."""
    languages = {
        language: {
            "nll": nll,
            "perplexity": _exp(nll),
            "bits_per_character": nll * tokens_per_character[language] / math.log(2),
            "predicted": count,
        }
        for language, (nll, count) in nlls.items()
    }
    nll, bits = (
        float(np.mean([values[key] for values in languages.values()])) for key in ("nll", "bits_per_character")
    )
    return {
        "overall": {"nll": nll, "perplexity": _exp(nll), "bits_per_character": bits},
        "languages": languages,
    }


def perplexity_tables(results: Mapping[str, Any]) -> list[ResultTable]:
    """A table of perplexities and a table of bits per character. Each has a row per language and a column per model."""
    models, row_counts = results["models"], results["rows"]
    tables = []
    columns = ["language", "rows", *(f"{model['model']} ({model['term']})" for model in models)]
    for title, key, number_format in (
        ("Perplexity of a token", "perplexity", ",.1f"),
        ("Bits per character", "bits_per_character", ".3f"),
    ):
        rows = [
            [language, str(count), *(format(model["languages"][language][key], number_format) for model in models)]
            for language, count in row_counts.items()
        ]
        means = (format(model["overall"][key], number_format) for model in models)
        rows.append([f"mean of {len(row_counts)}", str(sum(row_counts.values())), *means])
        tables.append(ResultTable(title, columns, rows, means=1))
    tables[0].notes = [
        *trained_on_notes(models),
        "for masked tokens (mlm) it is a pseudo-perplexity, not to be compared with a causal model's; the mean is "
        "geometric",
    ]
    return tables
