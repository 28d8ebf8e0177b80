"""Stage `vocap`: a vocabulary whose capacity is allocated to languages by what each gains from it (VoCap).

OUT/sentencepiece.model     the merged model, in the same layout as stage `vocab` writes
OUT/vocap.json, vocap.svg   curves and allocation
OUT/curves/<language>/      vocabularies on the curve, until the stage is complete
"""

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.corpus import TextConfig
from data_prep.executor import on_root, run_tasks
from data_prep.line_sample import SAMPLE, choose_lines, count_lines, read_lines, sampled_inputs
from data_prep.readers import Input
from data_prep.sampling import temperature_shares
from data_prep.store import Stage, write_file
from data_prep.vocab import tell
from data_prep.vocap.allocate import allocate
from data_prep.vocap.curve import curve, fitting_words
from data_prep.vocap.merge import piece_order, pool
from data_prep.vocap.model import SPECIALS, Pieces, parse, serialize
from data_prep.vocap.plot import plot
from xlme_ds.data.schema import Manifest, write_json, write_manifest
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary

CURVES = "curves"
_SETTINGS = ("size", "step", "largest", "shrink", "sentences", "alpha", "beta", "seed", "character_coverage")
_ADDED = 2  # <pad> and <mask> are ids of the vocabulary, not pieces


@dataclass(frozen=True)
class VocapConfig(TextConfig):
    """Make a vocabulary by VoCap: a curve a language, greedy allocation, one merged model."""

    out: Path
    """Output folder: sentencepiece.model, manifest.json, vocap.json and vocap.svg."""
    size: int = 524_288
    """Ids of the full vocabulary as the model sees it, <pad> and <mask> included."""
    step: int = 1000
    """Pieces a language is given at once."""
    largest: int = 50_000
    """Pieces of a language at most."""
    shrink: float = 0.8
    """Each vocabulary on a language's curve has this share of the pieces of the next larger one."""
    sentences: int = 1_000_000
    """Lines of a language at most."""
    alpha: float = 0.7
    """Exponent of the language distribution q over the numbers of lines: 1 natural, 0 uniform."""
    beta: float = 0.7
    """Exponent of q in the objective Σ q^β ALP: 0 counts every language the same."""
    seed: int = 0
    """Seed of the choice of lines."""
    character_coverage: float = 0.9995
    """Share of the characters of each language that get a piece of their own."""
    processes: int = 1
    """Local processes; the output is the same for any number. Not used under MPI."""

    def validate(self) -> None:
        """Raise ValueError for settings that cannot work."""
        if min(self.step, self.sentences) < 1 or self.largest < self.step:
            raise ValueError(
                f"--step is {self.step}, --largest {self.largest} and --sentences {self.sentences}: they must be at "
                "least 1, and --largest at least --step"
            )
        if not 0.5 <= self.shrink <= 0.98:
            raise ValueError(f"--shrink is {self.shrink}: it must be between 0.5 (fast) and 0.98 (many points)")
        if not 0 <= self.beta <= 1:
            raise ValueError(f"--beta is {self.beta}: it must be between 0 and 1")
        if self.size < 16:
            raise ValueError(f"--size is {self.size}: at least 16 ids are needed")
        if not 0.98 <= self.character_coverage <= 1:
            raise ValueError(f"--character-coverage is {self.character_coverage}: it must be between 0.98 and 1")
        temperature_shares([1], self.alpha)


@dataclass(frozen=True)
class _Task:
    """One language's curve."""

    name: str
    paths: tuple[Path, ...]


def run(config: VocapConfig) -> None:
    """Write `config.out`. Raises ValueError for settings or inputs that cannot work."""
    on_root(config.validate)
    inputs, text_settings = on_root(lambda: sampled_inputs(config))
    stage = Stage(config.out, "vocap", {name: getattr(config, name) for name in _SETTINGS} | text_settings)
    with stage.open():
        if not stage.finished(config.processes):
            _make(stage, config, inputs)
        on_root(lambda: _clear(stage))
    on_root(lambda: tell(config.out))


def _clear(stage: Stage) -> None:
    for name in (SAMPLE, CURVES):
        shutil.rmtree(stage.folder / name, ignore_errors=True)


def _make(stage: Stage, config: VocapConfig, inputs: Sequence[Input]) -> None:
    counted = count_lines(stage, inputs, config.processes)
    lines = dict(sorted(sum(counted, Counter[str]()).items()))
    quotas = {code: min(count, config.sentences) for code, count in lines.items()}
    chosen = choose_lines(stage, inputs, counted, quotas, config.seed, config.processes)
    tasks = [_Task(code, tuple(files[code] for files in chosen if code in files)) for code in lines]
    sizes = list(quotas.values())
    results = run_tasks(partial(_curve, stage, config), tasks, sizes, config.processes, "curves")
    curves = {code: result["curve"] for code, result in zip(lines, results, strict=True) if result["curve"]}
    sampled = {code: result["sentences"] for code, result in zip(lines, results, strict=True)}
    on_root(lambda: _finish(stage, config, lines, sampled, curves))


def _curve(stage: Stage, config: VocapConfig, task: _Task) -> dict[str, Any]:
    """Write the vocabularies of one language; the result is its curve, smallest first."""
    marker = f"curve-{task.name}"
    result = stage.task_result(marker)
    if result is None:
        folder = stage.folder / CURVES / task.name
        text = fitting_words(partial(read_lines, task.paths))
        points, files = [], []
        if text.words:
            for point in curve(text, config.largest, config.step, config.shrink, config.character_coverage):
                points.append((len(point.pieces), point.alp))
                path = folder / f"{len(point.pieces)}.model"
                files.append(asdict(write_file(path, serialize(point.pieces), stage.folder)))
        result = {"curve": points[::-1], "sentences": text.sentences, "words": len(text.words), "files": files}
        stage.finish_task(marker, result)
    return result


def _finish(
    stage: Stage, config: VocapConfig, lines: dict[str, int], sampled: dict[str, int], curves: dict[str, list[Any]]
) -> None:
    if not curves:
        raise ValueError(f"there is no text in the inputs of {stage.folder}: a vocabulary needs some words")
    shares = dict(zip(lines, map(float, temperature_shares(list(lines.values()), config.alpha)), strict=True))
    orders = {code: piece_order([_pieces(stage, code, size) for size, _ in curves[code]]) for code in curves}
    weights = {code: shares[code] ** config.beta for code in curves}
    allocation = allocate(orders, curves, weights, config.step, config.size - _ADDED - len(SPECIALS))
    chosen = {code: _chosen(stage, code, curves[code], orders[code], allocation.sizes[code]) for code in curves}
    path = stage.folder / MODEL_FILE
    written = write_file(path, serialize(pool(chosen, weights)), stage.folder)
    owners = Counter(piece for pieces in chosen.values() for piece in pieces)
    by_language = {
        code: {
            "lines": lines[code],
            "sampled": sampled[code],
            "share_before": lines[code] / sum(lines.values()),
            "share_after": shares[code],
            "pieces": len(chosen[code]),
            "own_pieces": sum(owners[piece] == 1 for piece in chosen[code]),
        }
        for code in chosen
    }
    write_json(stage.folder / "vocap.json", {"curves": curves, "by_language": by_language})
    write_file(stage.folder / "vocap.svg", plot(curves, by_language), stage.folder)
    vocabulary = Vocabulary(path)
    assert vocabulary.size == config.size, f"{vocabulary.size} ids instead of {config.size}"
    shard = replace(written, rows=vocabulary.processor.get_piece_size())
    counts = {"by_language": by_language}
    write_manifest(
        stage.folder,
        Manifest("vocap", stage.settings, vocabulary.size, shard.sha256, tuple(by_language), (shard,), counts),
    )


def _pieces(stage: Stage, code: str, size: int) -> Pieces:
    return parse((stage.folder / CURVES / code / f"{size}.model").read_bytes())


def _chosen(stage: Stage, code: str, curve: Sequence[tuple[int, float]], order: Sequence[str], size: int) -> Pieces:
    """The first `size` pieces with the probabilities of the smallest vocabulary that has them all."""
    pieces = _pieces(stage, code, min(points for points, _ in curve if points >= size))
    return {piece: pieces[piece] for piece in order[:size]}
