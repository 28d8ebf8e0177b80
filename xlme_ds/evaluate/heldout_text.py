"""Losses and perplexity of whole models, with their heads, on held-out rows.

All models read the same rows, and models that mask tokens see the same masks. The masks cover 15% of the tokens,
whatever share a model's run masked, and every masked token is shown as `<mask>`. A model that was trained to predict
every token predicts every token here, too.

The losses are the terms that a run reports while it trains. Perplexity, by language on monolingual rows (XLM; Conneau
and Lample, 2019), is the exponential of the mean −log p of the tokens that a model's objective predicts. If every token
is predicted from all earlier tokens, it is the perplexity of the text. If masked tokens are predicted from both sides,
it is a pseudo-perplexity (Salazar et al., 2020, who mask one token at a time).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..cli import progress
from ..data.collate import collate
from ..data.rows import TASKS, UNK, Rows
from ..data.shards import RowStore, concatenated
from ..data.unigram import unigram_nll_by_id
from ..data.vocabulary import Vocabulary
from ..io.argument_types import check_argument_types
from ..io.folders import require_folder
from .compared_models import ComparedPredictor, Models, load_predictors, trained_on_entry, trained_on_notes
from .output import ResultTable

_ROWS_PER_BATCH = 16
# For each language (mean, count): the mean −log p (nats) of the predicted tokens, and the number of these tokens.
MeanNlls = dict[str, tuple[float, int]]


@check_argument_types
def losses(models: Models, data: Path | str, *, rows: int = 512, seed: int = 1, random: bool = False) -> dict[str, Any]:
    """Losses on the first `rows` rows of each task in the data folder `data`, overall and by language, with masks
    drawn from `seed`. `help(xlme.evaluate)` explains the other arguments, the errors and what is returned."""
    folder = Path(data)
    check_seed_and_counts(seed, rows=rows)
    require_folder(folder, "name a data folder that `xlme prep mix` wrote")
    tasks = [task for task in TASKS if (folder / task).is_dir()]
    if not tasks:
        raise ValueError(f"{folder} has neither mono/ nor para/: name a data folder that `xlme prep mix` wrote")
    predictors = load_predictors(models, random)
    # For all models before the first is scored, so that an error comes early.
    stores_of_predictors = [_open_stores(predictor, folder, tasks) for predictor in predictors]
    results = []
    for predictor, stores in zip(predictors, stores_of_predictors, strict=True):
        metadata = predictor.metadata
        for store in stores.values():
            metadata |= trained_on_entry(predictor, store)
        weight_of_term = dict(zip(predictor.objective.terms, predictor.objective.weights.tolist(), strict=True))
        results.append(metadata | {"terms": weight_of_term} | _losses(predictor, stores, rows, seed))
    return {"test": "losses", "seed": seed, "rows": rows, "models": results}


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
    store = open_monolingual(Path(data))
    predictors = load_predictors(models, random)
    stores_of_predictors = []  # the same rows, with each model's own indices of the languages
    for predictor in predictors:
        quantity = predictor.objective.quantities[predictor.objective.terms[0]]
        if quantity.task == "para" or not predictor.objective.reads_whole_rows:
            raise ValueError(f"{predictor.folder} predicts no tokens of monolingual text: use `evaluate losses`")
        require_readable(predictor, store)
        stores_of_predictors.append(open_monolingual(Path(data), predictor.cfg.language_embeddings))
    rows, tokens_per_character, characters = text_statistics(store, predictors[0].vocabulary, limit)
    unigram_results = []
    if unigram is not None:
        train = open_monolingual(Path(unigram))
        if train.manifest.shares_text(store.manifest):
            raise ValueError(f"{unigram} and {data} have the same text: name the training data for the unigram model")
        metadata = {"model": "unigram", "folder": str(unigram), "term": "counted"}
        unigram_results = [metadata | perplexities(unigram_nlls(train, store, limit), tokens_per_character)]
    results = []
    for predictor, predictor_store in zip(predictors, stores_of_predictors, strict=True):
        nlls = mean_nlls(summed_nlls(predictor, predictor_store, seed, sum(rows.values()), passes, limit))
        metadata = predictor.metadata | {"term": predictor.objective.terms[0]} | trained_on_entry(predictor, store)
        predicted_per_character = tokens_per_character
        if predictor.objective.mask_fraction == 1.0:  # the `</s>` between two documents of a row are predicted, too
            predicted_per_character = {
                language: count / passes / characters[language] for language, (_, count) in nlls.items()
            }
        results.append(metadata | perplexities(nlls, predicted_per_character))
    return {"test": "perplexity", "seed": seed, "passes": passes, "rows": rows, "models": results + unigram_results}


def check_seed_and_counts(seed: int, **counts: int | None) -> None:
    """Raise ValueError for a count below 1, and for a seed that is negative or not below 2^63, because such a seed, cut
    to 64 bits, could act as another seed."""
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


def _open_stores(predictor: ComparedPredictor, folder: Path, tasks: Sequence[str]) -> dict[str, RowStore]:
    """The rows of those `tasks` that the model was trained to predict, by task. Raises ValueError if there are none, if
    the model cannot read the rows of one of the `tasks`, and if its objective cannot."""
    stores = {task: RowStore(folder / task, predictor.cfg.language_embeddings) for task in tasks}
    for store in stores.values():
        require_readable(predictor, store)
    predicted_tasks = {predictor.objective.quantities[term].task for term in predictor.objective.terms}
    predicted_stores = {task: store for task, store in stores.items() if task in predicted_tasks}
    if not predicted_stores:
        raise ValueError(
            f"{folder} has no rows that {predictor.folder} was trained to predict "
            f"({', '.join(predictor.objective.terms)}): name other data"
        )
    for store in predicted_stores.values():
        predictor.objective.check_rows(store, "compare")
    return predicted_stores


@torch.no_grad()
def _losses(predictor: ComparedPredictor, stores: Mapping[str, RowStore], rows: int, seed: int) -> dict[str, Any]:
    """Returns {"overall": the values that a run reports, over all rows; "languages": the loss of each term, by
    language}. `stores` has the rows of each task; the first `rows` of each are read."""
    objective, model = predictor.objective, predictor.model
    device = next(model.parameters()).device
    max_languages = max(len(store.languages) for store in stores.values())
    sums = torch.zeros(len(objective.terms), dtype=torch.float64)
    counts = torch.zeros_like(sums)
    statistics = torch.zeros(objective.statistics_shape, dtype=torch.float64)
    by_language = torch.zeros(2, len(objective.terms), max_languages, dtype=torch.float64)  # sums, then counts
    for task, store in stores.items():
        make_batch = objective.collate_for(store, "compare")
        total = min(rows, store.rows)
        starts = range(0, total, _ROWS_PER_BATCH)
        for start in progress(starts, len(starts), f"batches of {task}", predictor.name):
            records = np.arange(start, min(start + _ROWS_PER_BATCH, total))
            task_rows = [(TASKS.index(task), store.read(records), records)]
            batch = make_batch(task_rows, seed, objective.mask_fraction, 0).to(device)
            output = model(batch)
            sums += objective.sums(output, batch).double().cpu()
            counts += objective.counts(batch).cpu()
            statistics += objective.statistics(output, batch).cpu()
            by_language += objective.by_language(output, batch, max_languages).cpu()
    losses_by_term: dict[str, dict[str, float]] = {}
    for term, loss_sums, token_counts in zip(objective.terms, *by_language.numpy(), strict=True):
        task = objective.quantities[term].task
        if task in stores:
            # Not strict: the sums have `max_languages` entries, and the task may have fewer languages.
            losses_by_term[term] = {
                language: float(loss_sum / count)
                for language, loss_sum, count in zip(stores[task].languages, loss_sums, token_counts, strict=False)
                if count
            }
    return {"overall": objective.summarise(sums, counts, statistics), "languages": losses_by_term}


def loss_tables(results: Mapping[str, Any]) -> list[ResultTable]:
    """A table of all reported values, then a table by language for each term, with a column for each model."""
    models = results["models"]
    names = [model["model"] for model in models]
    keys = list(dict.fromkeys(key for model in models for key in model["overall"]))
    if any(model["terms"] != models[0]["terms"] for model in models) and "loss" in keys:
        keys.remove("loss")  # sums of different terms, or of terms with different weights, cannot be compared
    tables = [_table("Held-out text", "", keys, [model["overall"] for model in models], names)]
    for term in dict.fromkeys(term for model in models for term in model["languages"]):
        losses_by_model = [model["languages"].get(term, {}) for model in models]
        languages = sorted(set().union(*losses_by_model))
        tables.append(_table(f"{term} by language", "language", languages, losses_by_model, names))
    tables[0].notes += [
        "losses in nats a token",
        "all models read the same rows; those that mask tokens mask the same 15%, the others predict every token",
        *trained_on_notes(models),
    ]
    return tables


def _table(
    title: str, row_title: str, keys: Sequence[str], values_by_model: list[dict[str, float]], names: list[str]
) -> ResultTable:
    """A table with a row for each key and a column for each model; a cell is empty where a model has no such value."""
    rows = [[key, *(f"{values[key]:.4f}" if key in values else "" for values in values_by_model)] for key in keys]
    return ResultTable(title, [row_title, *names], rows)


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


@torch.no_grad()
def summed_nlls(
    predictor: ComparedPredictor, store: RowStore, seed: int, total_rows: int, passes: int, limit: int | None
) -> Iterator[tuple[str, float, float]]:
    """Yield (language, a model's sum of −log p, number of predicted tokens) for batches of the first `limit` rows of
    each language. The masks depend only on (seed, pass, row), so they are the same for all models. `total_rows`: the
    number of rows, which the lines of progress show."""
    objective, model = predictor.objective, predictor.model
    device = next(model.parameters()).device
    batches = rows_by_language(store, limit)
    for language, rows, records in progress(batches, total_rows, "rows", predictor.name, lambda batch: len(batch[2])):
        for pass_index in range(passes):  # each pass has its own record numbers, so its own masks, as in training
            numbers = records + pass_index * store.rows
            batch = collate([(TASKS.index("mono"), rows, numbers)], seed, objective.mask_fraction).to(device)
            loss_sums, counts = objective.sums(model(batch), batch), objective.counts(batch)
            yield language, float(loss_sums[0]), float(counts[0])  # of the first term, the −log p of tokens


def rows_by_language(
    store: RowStore, limit: int | None = None, rows_per_batch: int = _ROWS_PER_BATCH
) -> Iterator[tuple[str, Rows, np.ndarray]]:
    """Yield (language, rows, record numbers) for batches of up to `rows_per_batch` rows of one language. Together the
    batches are the first `limit` rows of every language, read in one pass over the store."""
    pending: dict[str, dict[int, Rows]] = defaultdict(dict)  # by language and record number
    rows_left: dict[str, int] = defaultdict(lambda: store.rows if limit is None else limit)
    for record in range(store.rows):
        row = store.read(np.array([record]))
        language = store.languages[int(row.languages[0])]
        if rows_left[language] == 0:
            continue
        rows_left[language] -= 1
        pending[language][record] = row
        if len(pending[language]) == rows_per_batch:
            rows = pending.pop(language)
            yield language, concatenated(list(rows.values())), np.array(list(rows))
    for language, rows in pending.items():
        yield language, concatenated(list(rows.values())), np.array(list(rows))


def mean_nlls(batches: Iterable[tuple[str, float, float]]) -> MeanNlls:
    """MeanNlls from (language, sum of −log p, count) of batches; a language without predicted tokens is left out."""
    totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for language, nll, count in batches:
        totals[language] += nll, count
    return {
        language: (float(total / count), int(count)) for language, (total, count) in sorted(totals.items()) if count
    }


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


def _exp(nll: float) -> float:
    """e ** `nll`; infinity if `nll` is NaN, as after training that diverged, or the result too large for a float."""
    return math.exp(nll) if nll < 709 else math.inf


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
