"""Stage `vocap`: a vocabulary whose pieces are allocated to languages by how much each language gains (VoCap).

OUT/sentencepiece.model     the merged model, in the layout that stage `vocab` writes
OUT/vocap.json, vocap.svg   curves and allocation
OUT/.curves/<language>/     the vocabularies on the language's curve; removed when the stage is complete

The objective is VoCap's, max Σ_i q_i^β ALP_i(t_i) (Zheng et al., 2021). For language i:

    q_i         its share of the lines, after the exponent `alpha`
    t_i         its number of pieces
    ALP_i(t_i)  the mean log-probability of a sentence with these pieces; as a function of t_i, the language's curve

A step gives a language more pieces along its curve. If the curves are concave, taking steps in order of falling gain,
q_i^β × slope, is optimal for every Σ t_i. A piece that languages share counts once: steps are taken until the union of
the languages' pieces has the requested size, so the last step may end early.

The probability of a piece x in the union is pooled: p(x) = Σ_i w_i p_i(x). Here p_i are the probabilities of language
i's chosen pieces, and w_i is q_i^β; the p_i of each language and the w_i are scaled to a sum of 1. This is the unigram
model of a text in which language i has the share w_i.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.inspect.stats_plots import svg_figure
from data_prep.readers.corpus import TextConfig
from data_prep.shares import temperature_shares
from data_prep.store import Stage, write_file
from data_prep.vocab.allocation import Curve, Pieces, allocate, piece_order, pool_probabilities
from data_prep.vocab.line_sample import Sample, read_lines, sample_lines, sampled_inputs
from data_prep.vocab.model_file import SPECIALS, parse, serialize
from data_prep.vocab.vocab import CURVES, finish_vocabulary, print_size, require_trainable, write_once
from data_prep.vocab.word_counts import WordCounts, count_words_within_memory
from xlme_ds.data.schema import Shard
from xlme_ds.io.files import file_sha256, read_versioned, write_versioned

if TYPE_CHECKING:
    from data_prep.vocab.unigram import UnigramModel


# Rare pieces are dropped once, from a vocabulary of `largest` × this factor, so that enough other pieces are left.
_RARE_REMOVED_AT = 1.25
_MIN_OCCURRENCES = 2.0  # a longer piece with fewer expected occurrences is rare: a piece used once memorizes its text
_TRAINING_MEMORY = 900_000_000  # bytes for the training of one language's vocabularies
_SETTINGS = ("size", "step", "largest", "shrink", "sentences", "alpha", "beta", "seed", "character_coverage")
_GREY, _BLUE = "#c3cddc", "#1f5fa8"


@dataclass(frozen=True)
class VocapConfig(TextConfig):
    """Make a vocabulary by VoCap: a curve for each language, greedy allocation, one merged model."""

    out: Path
    """Output folder: sentencepiece.model, manifest.json, vocap.json and vocap.svg."""
    size: int = 524_288
    """Number of ids in the whole vocabulary, <pad> and <mask> included."""
    step: int = 1000
    """Largest number of pieces that a language gets in one step of the allocation; choose fewer with a small --size."""
    largest: int = 50_000
    """Largest number of pieces that a language can get; choose fewer with a small --size or little text."""
    shrink: float = 0.8
    """Ratio of the sizes of neighbouring vocabularies on a language's curve; nearer to 1 gives a finer curve and takes
    more time."""
    sentences: int = 1_000_000
    """Largest number of lines to sample from a language; fewer lines need less time."""
    alpha: float = 0.7
    """Exponent that turns the languages' numbers of lines into their shares q: 1 keeps the shares of the text, 0 makes
    all shares equal."""
    beta: float = 0.7
    """Exponent of q in the objective Σ q^β ALP: 0 weights every language the same, 1 by its share q."""
    seed: int = 0
    """Seed of the choice of lines."""
    character_coverage: float = 0.9995
    """Share of each language's characters that get a piece of their own; the rest become <unk>."""
    processes: int = 1
    """Worker processes on this machine; the output is the same for any number. Under MPI the ranks are the workers."""

    def validate(self) -> None:
        """Raise ValueError for settings that cannot work."""
        if min(self.step, self.sentences) < 1 or self.largest < self.step:
            raise ValueError(
                f"--step is {self.step}, --largest {self.largest} and --sentences {self.sentences}: each must be at "
                "least 1, and --largest at least as large as --step"
            )
        if not 0.5 <= self.shrink <= 0.98:
            raise ValueError(f"--shrink is {self.shrink}: it must be between 0.5 (fast) and 0.98 (many points)")
        if not 0 <= self.beta <= 1:
            raise ValueError(f"--beta is {self.beta}: it must be between 0 and 1")
        require_trainable(self.size, self.character_coverage, self.alpha)


def run(config: VocapConfig) -> None:
    """Write `config.out`. Raises ValueError for settings or inputs that cannot work."""
    config.validate()
    inputs, text_settings = sampled_inputs(config)
    stage = Stage(config.out, "vocap", {name: getattr(config, name) for name in _SETTINGS} | text_settings)

    def find_quotas(lines: dict[str, int]) -> dict[str, int]:
        return {code: min(number, config.sentences) for code, number in lines.items()}

    def train(sample: Sample) -> None:
        distinct, chosen, files = sample
        tasks = {f"path-{code}": path for code, path in files.items()}
        write = partial(_write_curve, stage, config)
        results = stage.run_unfinished(write, tasks, list(chosen.values()), config.processes, "curves")
        _merge(stage, config, distinct, dict(zip(distinct, results, strict=True)))

    sample = partial(sample_lines, stage, inputs, find_quotas, config.sentences, config.seed, config.processes)
    write_once(stage, config.processes, sample, train)
    plot_path = config.out / "vocap.svg"
    if not plot_path.exists():  # the manifest does not list the plot, so that a deleted plot is simply made again
        content = read_versioned(config.out / "vocap.json")
        with stage.open():
            write_file(plot_path, plot(content["curves"], content["by_language"]), config.out)
    print_size(config.out)


def _write_curve(stage: Stage, config: VocapConfig, path: Path) -> dict[str, Any]:
    """Write the vocabularies of the language whose lines are in the file `path`. Returns the task's result, which has
    the `curve` from the smallest vocabulary to the largest."""
    code = path.stem
    text = count_words_within_memory(partial(read_lines, [path]), _TRAINING_MEMORY)
    points, files = [], []
    if len(text.words):
        coverage = config.character_coverage
        try:
            for model in nested_vocabularies(text, config.largest, config.step, config.shrink, coverage):
                size = len(model.pieces)
                points.append((size, model.log_likelihood / text.sentences))
                file = write_file(_curve_file(stage, code, size), serialize(model.pieces), stage.folder)
                files.append(asdict(file))
        except ValueError as error:
            raise ValueError(f"{code}: {error}") from None
    return {"curve": points[::-1], "sentences": text.sentences, "words": len(text.words), "files": files}


def nested_vocabularies(
    text: WordCounts, largest: int, smallest: int, shrink: float, coverage: float
) -> Iterator["UnigramModel"]:
    """Yield nested vocabularies of largest × shrink^k pieces, down to `smallest`, and finally a vocabulary of the
    characters alone.

    `smallest` is the setting `step`. Special pieces do not count. If the text has fewer than `largest` pieces, the
    first vocabulary has all of them. The paper trains fifty vocabularies from scratch. We prune one vocabulary
    repeatedly, because each training from scratch would also start with many pieces and prune them.
    """
    from data_prep.vocab.unigram import UnigramTrainer  # imported here, because it loads numba, which takes time

    trainer = UnigramTrainer(text, coverage, largest)
    if trainer.characters >= largest:
        raise ValueError(
            f"--largest is too small for a language with {trainer.characters} characters: raise --largest, or "
            "lower --character-coverage"
        )
    trainer.prune_to(round(largest * _RARE_REMOVED_AT), _MIN_OCCURRENCES)
    first = min(largest, trainer.size)
    exponents = range(math.ceil(math.log(smallest / largest, shrink)) + 1)
    grid = dict.fromkeys(round(largest * shrink**k) for k in exponents)  # without the repeats of small sizes
    for size in [first, *(size for size in grid if smallest <= size < first)]:
        vocabulary = trainer.prune_to(size)
        if trainer.size > trainer.characters:  # else it is the last vocabulary, the characters alone
            yield vocabulary
    yield trainer.prune_to(trainer.characters)


def _curve_file(stage: Stage, code: str, size: int) -> Path:
    return stage.folder / CURVES / code / f"{size}.model"


def _merge(stage: Stage, config: VocapConfig, distinct: dict[str, int], results: dict[str, dict[str, Any]]) -> None:
    """Allocate pieces to the languages, and write the merged model and vocap.json. `distinct` is the number of distinct
    lines of each language."""
    curves: dict[str, Curve] = {code: result["curve"] for code, result in results.items() if result["curve"]}
    if not curves:
        raise ValueError(f"there is no text in the inputs of {stage.folder}: a vocabulary needs some words")
    shares = dict(zip(distinct, map(float, temperature_shares(list(distinct.values()), config.alpha)), strict=True))
    orders = {code: piece_order([_read_pieces(stage, code, size) for size, _ in curves[code]]) for code in curves}
    weights = {code: shares[code] ** config.beta for code in curves}
    union_size = config.size - len(SPECIALS) - 2  # two less for <pad> and <mask>, which are in no SentencePiece file
    sizes = allocate(orders, curves, weights, config.step, union_size)
    chosen = {code: _scored_pieces(stage, code, curves[code], orders[code][: sizes[code]]) for code in curves}
    owner_counts = Counter(piece for pieces in chosen.values() for piece in pieces)
    by_language = {
        code: {
            "lines": distinct[code],
            "sampled": results[code]["sentences"],
            "share_before": distinct[code] / sum(distinct.values()),
            "share_after": shares[code],
            "pieces": len(chosen[code]),
            "own_pieces": sum(owner_counts[piece] == 1 for piece in chosen[code]),
        }
        for code in chosen
    }
    path = stage.folder / "vocap.json"
    write_versioned(path, {"curves": curves, "by_language": by_language})
    path.with_suffix(".svg").unlink(missing_ok=True)  # a plot of other curves
    curves_file = Shard(path.name, 0, path.stat().st_size, file_sha256(path))
    model = serialize(pool_probabilities(chosen, weights))
    finish_vocabulary(stage, model, by_language, other_files=[curves_file])


def _read_pieces(stage: Stage, code: str, size: int) -> Pieces:
    return parse(_curve_file(stage, code, size).read_bytes())


def _scored_pieces(stage: Stage, code: str, points: Curve, pieces: Sequence[str]) -> Pieces:
    """Returns `pieces`, the first ones in a language's order, with their log-probabilities. These are taken from the
    smallest vocabulary on the language's curve that has all the pieces."""
    vocabulary = _read_pieces(stage, code, min(size for size, _ in points if size >= len(pieces)))
    return {piece: vocabulary[piece] for piece in pieces}


def plot(curves: Mapping[str, Curve], by_language: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Plot the languages' curves with the chosen sizes, and the sizes against the numbers of lines. Returns an SVG
    image; equal input gives equal bytes."""
    # "none" stores letters as text. Stored as paths, they would make the file three times as large.
    with svg_figure((9.6, 4.2), "vocap", "none") as (figure, image):
        left, right = figure.subplots(1, 2)
        lines = [by_language[code]["lines"] for code in curves]
        pieces = [by_language[code]["pieces"] for code in curves]
        chosen_alps = []
        for points, chosen in zip(curves.values(), pieces, strict=True):
            sizes, alps = zip(*points, strict=True)
            left.plot(sizes, alps, color=_GREY, linewidth=0.7)
            chosen_alps.append(np.interp(chosen, sizes, alps))
        left.plot(pieces, chosen_alps, "o", markersize=2.5, color=_BLUE)
        right.plot(lines, pieces, "o", markersize=2.5, color=_BLUE)
        for code, x, y in zip(curves, lines, pieces, strict=True):
            right.annotate(code, (x, y), fontsize=5, xytext=(2, 1), textcoords="offset points")
        left.set(
            xscale="log",
            xlabel="pieces",
            ylabel="ALP: mean log-probability of a sentence, nats",
            title="curves, and the sizes chosen",
        )
        right.set(xscale="log", yscale="log", xlabel="lines of text", ylabel="pieces given", title="allocation")
    return image.getvalue()
