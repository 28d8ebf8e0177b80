"""Perplexity by language on held-out monolingual rows (XLM; Conneau and Lample, 2019).

The exponential of the mean −log p of the tokens that a model's objective predicts: of masked tokens from both of their
sides a pseudo-perplexity (Salazar et al., 2020, there one mask at a time), of all tokens from those before them the
perplexity itself.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..config import ObjectiveConfig
from ..data.collate import collate
from ..data.shards import RowStore
from .monolingual import MONO, Costs, Facts, by_language, means
from .predictors import Predictor
from .tables import Table

FRACTION = ObjectiveConfig().mask_fraction
"""Of the tokens masked, for every model the same, whatever share it was trained with; one that predicts every token does here."""


def require_readable(predictor: Predictor, store: RowStore) -> None:
    """Raise ValueError for rows of another vocabulary, and for rows that are too long for the model."""
    if store.manifest.vocabulary_sha256 != predictor.vocabulary.sha256:
        raise ValueError(
            f"{store.folder} was encoded with another vocabulary than that of {predictor.folder}: encode held-out text with the model's"
        )
    if store.row_tokens > predictor.cfg.max_positions:
        raise ValueError(
            f"{store.folder} has rows of {store.row_tokens} tokens, and the model in {predictor.folder} reads at most "
            f"{predictor.cfg.max_positions}: mix with a smaller --row-tokens"
        )
    if store.manifest.layout != predictor.cfg.layout:
        raise ValueError(
            f"{store.folder} was mixed with --layout {store.manifest.layout}, and the model in {predictor.folder} was trained on "
            f"{predictor.cfg.layout}: mix the held-out text with --layout {predictor.cfg.layout}"
        )


@torch.no_grad()
def mean_costs(predictor: Predictor, store: RowStore, seed: int, passes: int = 1, limit: int | None = None) -> Costs:
    """What a model costs on the first `limit` rows of a language; masks are a function of (seed, pass, row), the same
    for all models."""
    totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    device = next(predictor.model.parameters()).device
    fraction = 1.0 if predictor.objective.mask_fraction == 1.0 else FRACTION
    for language, rows, records in by_language(store, limit):
        for number in range(passes):  # a further pass has row numbers of its own, as in training
            batch = collate([(MONO, rows, records + number * store.rows)], seed, fraction).to(device)
            sums = predictor.objective.sums(predictor.model(batch), batch)
            totals[language] += float(sums[0]), float(predictor.objective.counts(batch)[0])
    return means(totals)


def perplexities(costs: Costs, known: Mapping[str, Facts]) -> dict[str, Any]:
    """What is reported of a model: by language and over all, every language counting the same."""
    languages = {
        language: {
            "nll": nll,
            "perplexity": math.exp(nll),
            "bits_per_character": nll * known[language].tokens_per_character / math.log(2),
            "predicted": count,
        }
        for language, (nll, count) in costs.items()
    }
    nll = float(np.mean([values["nll"] for values in languages.values()]))
    bits = float(np.mean([values["bits_per_character"] for values in languages.values()]))
    return {"overall": {"nll": nll, "perplexity": math.exp(nll), "bits_per_character": bits}, "languages": languages}


def perplexity_tables(results: Mapping[str, Any]) -> list[Table]:
    """Perplexity and bits per character: a row for each language, a column for each model."""
    tokens = _table(results, "Perplexity of a token", "perplexity", ",.1f")
    tokens.notes.append(
        "of masked tokens (mlm) a pseudo-perplexity, not to be compared with a causal model's; the mean is geometric"
    )
    return [tokens, _table(results, "Bits per character", "bits_per_character", ".3f")]


def _table(results: Mapping[str, Any], title: str, value: str, form: str) -> Table:
    models, rows = results["models"], results["rows"]
    table = Table(title, ["language", "rows", *(f"{model['model']} ({model['term']})" for model in models)])
    for language, count in rows.items():
        cells = [format(model["languages"][language][value], form) for model in models]
        table.rows.append([language, str(count), *cells])
    overall = [format(model["overall"][value], form) for model in models]
    table.rows.append([f"mean of {len(rows)}", str(sum(rows.values())), *overall])
    return table
