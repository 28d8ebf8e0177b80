"""Stage `mix`: encoded shards -> training shards in training order, sampled by temperature, shuffled, exactly N rows.

A pure function of the encoded manifests and the settings. Every output shard can be made alone: the example of a slot
is computed, never stored (see `sampling.Order`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_prep.encoded import EncodedShard, survey
from data_prep.mixed_rows import (
    BATCH_ROWS,
    BLOCK,
    ORDER,
    STRETCH,
    WINDOW,
    MixPlan,
    count_rows,
    plan_rows,
    with_total,
    write_shard,
)
from data_prep.parallel import on_root, run_tasks
from data_prep.progress import say
from data_prep.store import Stage, write_file
from xlme_ds.data.schema import LAYOUTS, TASKS, Manifest, Shard, file_sha256, read_manifest, write_manifest
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary

_WINDOWS_A_TASK = 64


@dataclass(frozen=True)
class MixConfig:
    """Sample, shuffle and pack encoded shards into training shards."""

    encoded: Path
    """Folder that `encode` wrote."""
    vocab: Path
    """Folder or file of the vocabulary that `encode` used; it is copied into the output."""
    out: Path
    """Output folder: mono/, para/ and vocab/."""
    mono_rows: int = 0
    """Monolingual rows to write, exactly; 0 leaves the task out. A run that needs more reads the data again."""
    para_rows: int = 0
    """Rows of packed translation pairs to write, exactly; 0 leaves the task out."""
    row_tokens: int = 512
    """Tokens of a row, special tokens included; at most the model's `max_positions`."""
    alpha: float = 0.7
    """Exponent of the sampling over languages and over pairs: 1 takes text as it is, 0 gives each the same; less helps
    small languages."""
    layout: Literal["xlme", "xlm"] = "xlme"
    """Special tokens of an item; `model.layout` must be the same. xlme: `<s> text </s>`, pairs `<s> e </s> f </s>`;
    xlm: `</s> text </s>`, pairs with positions that restart on the second side, `</s> e </s></s> f </s>`."""
    seed: int = 0
    """Seed of the order, and of which side of a pair comes first."""
    rows_per_shard: int = 65536
    """Rows of every shard but the last; a file is about 2 KB times as large, for rows of 512 tokens."""
    processes: int = 1
    """Worker processes on this machine; the output is the same for any number. Under MPI the ranks work instead."""

    def validate(self) -> None:
        """Raise ValueError for settings that cannot work."""
        if not 8 <= self.row_tokens <= 32767:
            raise ValueError(f"--row-tokens is {self.row_tokens}: it must be between 8 and 32767")
        if min(self.mono_rows, self.para_rows) < 0 or self.mono_rows + self.para_rows == 0:
            raise ValueError(
                "no rows are asked for: set --mono-rows or --para-rows, or both, to the rows that training will read"
            )
        if self.rows_per_shard < 1:
            raise ValueError(f"--rows-per-shard is {self.rows_per_shard}: it must be at least 1")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"--alpha is {self.alpha}: it must be between 0 (uniform) and 1 (natural distribution)")


def run(config: MixConfig) -> None:
    """Write `config.out`. Raises ValueError for settings or inputs that cannot work."""
    on_root(config.validate)
    wanted = {task: rows for task, rows in zip(TASKS, (config.mono_rows, config.para_rows), strict=True) if rows}
    encoded, vocabulary, languages = on_root(lambda: _read_inputs(config, list(wanted)))
    for task, rows in wanted.items():
        _mix(config, task, rows, encoded[task], languages)
    on_root(lambda: _copy(vocabulary, config.out / "vocab" / MODEL_FILE))


def _read_inputs(config: MixConfig, tasks: list[str]) -> tuple[dict[str, Manifest], Path, tuple[str, ...]]:
    """The manifests of the encoded tasks, the vocabulary's file, and the languages in the order of their indices."""
    encoded = {task: read_manifest(config.encoded / task) for task in tasks}
    vocabulary = Vocabulary(config.vocab)
    for task, manifest in encoded.items():
        if manifest.vocabulary_sha256 != vocabulary.sha256:
            raise ValueError(
                f"{vocabulary.path} is not the vocabulary that {config.encoded / task} was encoded with: name that one "
                "with --vocab, or encode again"
            )
    # one list for both tasks, mixed or not, so that a language has the same index in both
    finished = [config.encoded / task for task in TASKS if (config.encoded / task / "manifest.json").exists()]
    languages = {code for folder in finished for code in read_manifest(folder).languages}
    return encoded, vocabulary.path, tuple(sorted(languages))


def _copy(source: Path, target: Path) -> None:
    if not target.exists() or file_sha256(target) != file_sha256(source):
        write_file(target, source.read_bytes(), target.parent)


def _mix(config: MixConfig, task: str, rows: int, encoded: Manifest, languages: tuple[str, ...]) -> None:
    settings = {
        "task": task,
        "rows": rows,
        "row_tokens": config.row_tokens,
        "rows_per_shard": config.rows_per_shard,
        "alpha": config.alpha,
        "layout": config.layout,
        "seed": config.seed,
        "encoded": encoded.fingerprint(),
        "languages": list(languages),
        "batch_rows": BATCH_ROWS,
        "window": WINDOW,
        "order": ORDER.format(BLOCK[task], STRETCH),
    }
    settings |= {key: encoded.settings[key] for key in ("split", "heldout_share") if key in encoded.settings}
    stage = Stage(config.out / task, "mix", settings)
    with stage.open():
        if stage.finished(config.processes):
            on_root(lambda: say(f"{stage.folder} is complete"))
        else:
            _write(config, stage, rows, encoded, languages)


def _write(config: MixConfig, stage: Stage, rows: int, encoded: Manifest, languages: tuple[str, ...]) -> None:
    task = stage.settings["task"]
    plan = _plan(config, task, encoded, languages)
    first_rows = None
    if task == "mono":
        plan = with_total(plan, rows)
    else:
        plan, first_rows = _sampled_pairs(stage, plan, rows, config.processes)
    count = -(-rows // config.rows_per_shard)
    sizes = [min(config.rows_per_shard, rows - i * config.rows_per_shard) for i in range(count)]
    write = partial(write_shard, stage, plan, first_rows, config.rows_per_shard, rows)
    results = run_tasks(write, range(count), sizes, config.processes, f"mix {task}")
    shards = tuple(Shard(**result["shard"]) for result in results)
    counts = _counts(plan, task, rows, results)
    manifest = Manifest(
        "mix", stage.settings, encoded.vocabulary_size, encoded.vocabulary_sha256, languages, shards, counts
    )
    assert manifest.rows == rows
    on_root(partial(write_manifest, stage.folder, manifest))
    words = f"{rows:,} rows in {count} shards, {100 * counts['fill']:.1f}% of the tokens are not padding"
    on_root(lambda: say(f"{stage.folder}: {words}"))


def _plan(config: MixConfig, task: str, encoded: Manifest, languages: tuple[str, ...]) -> MixPlan:
    folder = config.encoded / task
    names = [shard.name for shard in encoded.shards]
    sizes = [shard.bytes for shard in encoded.shards]
    look = partial(survey, folder, config.row_tokens, LAYOUTS[config.layout], encoded.settings.get("max_pair_tokens"))
    shards: Sequence[EncodedShard] = run_tasks(look, names, sizes, config.processes, f"survey {task}")
    if not any(shard.examples for shard in shards):
        more = "raise --heldout-share" if encoded.settings.get("split") == "heldout" else "encode some text first"
        raise ValueError(f"{folder} has nothing that fills a row of {config.row_tokens} tokens: {more}")
    return plan_rows(shards, config.row_tokens, config.layout, languages, task, config.alpha, config.seed)


def _sampled_pairs(stage: Stage, plan: MixPlan, rows: int, processes: int) -> tuple[MixPlan, np.ndarray]:
    """Sample as many pairs as pack into at least `rows` rows; (plan, rows before each window [windows + 1])."""
    groups = zip(plan.order.shares, plan.tokens, plan.order.examples, strict=True)
    mean = sum(float(share) * tokens / examples for share, tokens, examples in groups if examples)
    total = int(rows * plan.row_tokens / mean) + 1  # packing leaves gaps, so these nearly always suffice
    while True:
        plan = with_total(plan, total)
        windows = -(-total // WINDOW)
        parts = range(0, windows, _WINDOWS_A_TASK)
        count = partial(_count_windows, stage, plan, windows)
        results = run_tasks(
            count, parts, [min(_WINDOWS_A_TASK, windows - part) for part in parts], processes, "pack para"
        )
        first_rows = np.cumsum([0] + [number for result in results for number in result["rows"]])
        if first_rows[-1] >= rows:
            return plan, first_rows
        total = int(total * 1.002 * rows / max(int(first_rows[-1]), 1)) + 1


def _count_windows(stage: Stage, plan: MixPlan, windows: int, start: int) -> dict[str, Any]:
    name = f"windows-{plan.order.total}-{start}"
    result = stage.task_result(name)
    if result is None:
        result = {"rows": count_rows(plan, start, min(start + _WINDOWS_A_TASK, windows))}
        stage.finish_task(name, result)
    return result


def _counts(plan: MixPlan, task: str, rows: int, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    order = plan.order
    used = [sum(column) for column in zip(*(result["used"] for result in results), strict=True)]
    tokens = sum(result["tokens"] for result in results)
    by_language = {
        name: {
            "available": available,
            "too_long": sum(len(shard.unfit) for shard in plan.shards if shard.group == name),
            "used": used[j],
            "repeat": used[j] / available if available else 0.0,
            "share_before": available / sum(order.examples),
            "share_after": used[j] / sum(used),
        }
        for j, (name, available) in enumerate(zip(order.names, order.examples, strict=True))
    }
    return {
        "by_language": by_language,
        "tokens": tokens,
        "fill": tokens / (rows * plan.row_tokens),
        "examples": sum(used),
        "sampled": order.total,
    }
