"""Perplexity by language on held-out monolingual rows (XLM; Conneau and Lample, 2019).

It is the exponential of the mean −log p of the tokens that a model's objective predicts. Masked tokens, predicted from
both sides, give a pseudo-perplexity (Salazar et al., 2020, who mask one token at a time); tokens that are all predicted
from those before them give the perplexity itself.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..cli import progress
from ..config import ObjectiveConfig
from ..data.collate import collate
from ..data.rows import TASKS, UNK, Rows
from ..data.shards import RowStore, concatenated, unigram_costs
from ..data.vocabulary import Vocabulary
from .compared_models import Models, Predictor, load_predictors, trained_on, trained_on_note
from .output import ResultTable

Costs = dict[str, tuple[float, int]]  # by language: mean −log p (nats) of the predicted tokens, and their number


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

    `limit` rows of each language (None: all) are read `passes` times, each time with other masks drawn from `seed`.
    `unigram`: a data folder on which a unigram model is counted, for comparison.
    """
    for name, value in (("passes", passes), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} leaves nothing to read: it must be at least 1")
    check_seed(seed)
    predictors, store = load_predictors(models, random), open_text(Path(data))
    for model in predictors:
        quantity = model.objective.quantities[model.objective.terms[0]]
        if quantity.task == "para" or not model.objective.reads_whole_rows:
            raise ValueError(f"{model.folder} predicts no tokens of monolingual text: use `evaluate losses`")
        require_readable(model, store)
    rows, tokens_per_character = text_statistics(store, predictors[0].vocabulary, limit)
    counted_costs = None if unigram is None else unigram_costs_by_language(open_text(Path(unigram)), store, limit)
    scored = []
    for model in predictors:
        text = open_text(Path(data), model.cfg.language_embeddings)
        costs = mean_costs(model, text, seed, sum(rows.values()), passes, limit)
        description: dict[str, Any] = {"model": model.name, "folder": str(model.folder), "step": model.step}
        description |= {"term": model.objective.terms[0]} | trained_on(model, store)
        scored.append(description | perplexities(costs, tokens_per_character))
    if counted_costs is not None:
        description = {"model": "unigram", "folder": str(unigram), "term": "counted"}
        scored.append(description | perplexities(counted_costs, tokens_per_character))
    return {"test": "perplexity", "seed": seed, "passes": passes, "rows": rows, "models": scored}


def open_text(folder: Path, languages: Sequence[str] = ()) -> RowStore:
    """The monolingual rows of a mixed data folder; `languages`: see `RowStore`. Raises ValueError where there are
    none, and for rows that hold texts of several languages."""
    if not (folder / "mono").is_dir():
        raise ValueError(f"{folder} has no mono/: name a data folder that `xlme prep mix` wrote, with monolingual rows")
    store = RowStore(folder / "mono", languages)
    if unit := store.manifest.packed:
        raise ValueError(
            f"{store.folder} was mixed with --{unit}, so its rows have no one language: use `evaluate losses`"
        )
    return store


def rows_by_language(
    store: RowStore, limit: int | None = None, most: int = 16
) -> Iterator[tuple[str, Rows, np.ndarray]]:
    """Yield (language, up to `most` of its rows, their record numbers) until the first `limit` rows of every language
    are read, in one pass over the store."""
    pending: dict[str, dict[int, Rows]] = defaultdict(dict)
    left: dict[str, int] = defaultdict(lambda: store.rows if limit is None else limit)
    for record in range(store.rows):
        row = store.read(np.array([record]))
        language = store.languages[int(row.languages[0])]
        if left[language] == 0:
            continue
        left[language] -= 1
        pending[language][record] = row
        if len(pending[language]) == most:
            rows = pending.pop(language)
            yield language, concatenated(list(rows.values())), np.array(list(rows))
    for language, rows in pending.items():
        yield language, concatenated(list(rows.values())), np.array(list(rows))


def text_statistics(
    store: RowStore, vocabulary: Vocabulary, limit: int | None = None
) -> tuple[dict[str, int], dict[str, float]]:
    """Number of rows, and ordinary tokens per character of their pieces (a space counts as one), both by language.

    Raises ValueError for a language without a token to predict: a mean over languages would leave it out.
    """
    characters = np.array([len(vocabulary.piece(token)) for token in range(vocabulary.size)])
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(3, np.int64))
    for language, rows, _ in rows_by_language(store, limit):
        tokens = rows.tokens[rows.tokens > UNK]
        sums[language] += len(rows.tokens), len(tokens), characters[tokens].sum()
    if without_tokens := sorted(code for code, (_, tokens, _) in sums.items() if not tokens):
        raise ValueError(
            f"{store.folder} has no token of {', '.join(without_tokens)} that the vocabulary knows"
            f"{' in the first rows' if limit else ''}: "
            "mix without it, or with a vocabulary that has its script"
        )
    return (
        {code: int(rows) for code, (rows, _, _) in sorted(sums.items())},
        {code: tokens / letters for code, (_, tokens, letters) in sums.items()},
    )


def unigram_costs_by_language(train: RowStore, store: RowStore, limit: int | None = None) -> Costs:
    """Costs, by language of `store`, of one unigram model that is counted on the rows of all languages in `train`.

    Raises ValueError when the two have different vocabularies.
    """
    if train.manifest.vocabulary_sha256 != store.manifest.vocabulary_sha256:
        raise ValueError(
            f"{train.folder} was encoded with another vocabulary than {store.folder}: name the data of the run"
        )
    costs_V = unigram_costs(train)
    totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for language, rows, _ in rows_by_language(store, limit):
        tokens = rows.tokens[rows.tokens > UNK]
        totals[language] += costs_V[tokens].sum(), len(tokens)
    return _means(totals)


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed that does not fit in the 64-bit random counters: it would equal another seed."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed {seed}: it must be at least 0 and below 2^63")


def require_readable(predictor: Predictor, store: RowStore) -> None:
    """Raise ValueError for rows of another vocabulary, and for rows that are too long for the model."""
    text, model = store.manifest, predictor.cfg
    if text.vocabulary_sha256 != predictor.vocabulary.sha256:
        raise ValueError(
            f"{store.folder} was encoded with another vocabulary than that of {predictor.folder}: "
            "encode held-out text with the model's"
        )
    if store.row_tokens > model.max_positions:
        raise ValueError(
            f"{store.folder} has rows of {store.row_tokens} tokens, and the model in {predictor.folder} reads at "
            f"most {model.max_positions}: mix with a smaller --row-tokens"
        )
    if text.layout != model.layout:
        raise ValueError(
            f"{store.folder} was mixed with --layout {text.layout}, and the model in {predictor.folder} was "
            f"trained on {model.layout}: mix the held-out text with --layout {model.layout}"
        )


@torch.no_grad()
def mean_costs(predictor: Predictor, store: RowStore, seed: int, total: int, passes: int, limit: int | None) -> Costs:
    """A model's costs of the first `limit` rows of a language, `total` rows in all; masks are a function of (seed,
    pass, row), the same for all models."""
    totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    device = next(predictor.model.parameters()).device
    # All models have the same masked share, whatever they were trained with, except those that predict every token.
    fraction = 1.0 if predictor.objective.mask_fraction == 1.0 else ObjectiveConfig().mask_fraction
    batches = rows_by_language(store, limit)
    for language, rows, records in progress(batches, total, "rows", predictor.name, lambda item: len(item[2])):
        for number in range(passes):  # each pass has its own row numbers, so its own masks, as in training
            batch = collate([(TASKS.index("mono"), rows, records + number * store.rows)], seed, fraction).to(device)
            sums = predictor.objective.sums(predictor.model(batch), batch)
            totals[language] += float(sums[0]), float(predictor.objective.counts(batch)[0])
    return _means(totals)


def _means(totals: Mapping[str, np.ndarray]) -> Costs:
    """Costs from (sum, count) by language; a language without predicted tokens is left out."""
    return {
        language: (float(total / count), int(count)) for language, (total, count) in sorted(totals.items()) if count
    }


def perplexities(costs: Costs, tokens_per_character: Mapping[str, float]) -> dict[str, Any]:
    """Results of one model: by language, and overall, where every language has the same weight."""
    languages = {
        language: {
            "nll": nll,
            "perplexity": math.exp(nll),
            "bits_per_character": nll * tokens_per_character[language] / math.log(2),
            "predicted": count,
        }
        for language, (nll, count) in costs.items()
    }
    nll = float(np.mean([values["nll"] for values in languages.values()]))
    overall = {
        "nll": nll,
        "perplexity": math.exp(nll),
        "bits_per_character": float(np.mean([values["bits_per_character"] for values in languages.values()])),
    }
    return {"overall": overall, "languages": languages}


def perplexity_tables(results: Mapping[str, Any]) -> list[ResultTable]:
    """Perplexity and bits per character: a row for each language, a column for each model."""
    models, counts, tables = results["models"], results["rows"], []
    columns = ["language", "rows", *(f"{model['model']} ({model['term']})" for model in models)]
    for title, key, number_format in (
        ("Perplexity of a token", "perplexity", ",.1f"),
        ("Bits per character", "bits_per_character", ".3f"),
    ):
        rows = [
            [language, str(count), *(format(model["languages"][language][key], number_format) for model in models)]
            for language, count in counts.items()
        ]
        means = (format(model["overall"][key], number_format) for model in models)
        rows.append([f"mean of {len(counts)}", str(sum(counts.values())), *means])
        tables.append(ResultTable(title, columns, rows))
    tables[0].notes += trained_on_note(models)
    tables[0].notes.append(
        "of masked tokens (mlm) a pseudo-perplexity, not to be compared with a causal model's; the mean is geometric"
    )
    return tables
