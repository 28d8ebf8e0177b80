"""Stage `mix` samples examples from encoded shards by temperature over languages, shuffles them, and writes training
shards with exactly the requested number of rows, in training order.

The output is a pure function of the encoded manifests and the settings. Any output shard can be made on its own,
because the example at each position of the order is computed, never stored (see `sampling.SampledOrder`).
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from data_prep.encode.encode import EncodeConfig
from data_prep.languages import language_of
from data_prep.mix.encoded import ExampleUnit, group_languages, scan_shard
from data_prep.mix.mixed_rows import (
    BATCH_ROWS,
    WINDOW_SLOTS,
    MixPlan,
    increase_total,
    with_enough_examples,
    with_total,
    write_shard,
)
from data_prep.parallel import run_tasks
from data_prep.progress import print_stdout, warn
from data_prep.sampling import SampledOrder
from data_prep.shares import Sampling
from data_prep.store import Stage, write_file
from xlme_ds.data.schema import LAYOUTS, TASKS, Manifest, Shard, read_manifest, write_manifest
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary
from xlme_ds.io.files import file_sha256

# A slot is a position in the sampled order, and has one example of the task's unit. A block is a run of this many
# slots. The slots of a block are shuffled together; their examples fill about 30,000 rows or more.
_BLOCK_SLOTS: dict[ExampleUnit, int] = {
    "slices": 1 << 16,
    "sentences": 1 << 18,
    "documents": 1 << 18,
    "pairs": 1 << 18,
}
# A stretch is a run of neighbouring examples of a language or pair, with about this many ids at most on each side;
# monolingual examples have one side. The examples of a stretch are usually in one block, so that one read gets all of
# them.
_STRETCH_IDS = 8192
# This description is one of the settings in a manifest: an output folder whose description differs is refused.
_ORDER_DESCRIPTION = (
    "every example of a language once a pass, pass after pass; blocks of {} slots, stretches of up to {} ids"
)
_TABLE_ROWS = 5  # the printed table has at most this many languages or pairs


@dataclass(frozen=True)
class MixConfig:
    """Sample, shuffle and pack encoded shards into training shards.

    xlme prep mix --encoded encoded --vocab vocab --out mixed --mono-rows 200000 --para-rows 50000
    """

    encoded: Path
    """Folder that `encode` wrote."""
    vocab: Path
    """Folder or file of the vocabulary that `encode` used; it is copied into the output."""
    out: Path
    """Output folder: mono/, para/ and vocab/."""
    mono_rows: int = 0
    """Number of monolingual rows to write; 0 leaves the task out. A training run that needs more rows reads these rows
    again."""
    para_rows: int = 0
    """Number of rows of packed translation pairs to write; 0 leaves the task out."""
    row_tokens: int = 512
    """Tokens of a row, special tokens included; at most the model's `max_positions`."""
    alpha: float = 0.7
    """Exponent of the sampling over languages and over pairs: 1 keeps each language's share of the text, 0 gives all
    languages the same share. A smaller exponent gives small languages larger shares."""
    share: tuple[str, ...] = ()
    """LANGUAGE=SHARE or PAIR=SHARE sets a share of the sampled examples, in place of the share that --alpha gives.
    sw+yo=0.02 sets the share of both languages together."""
    max_repeats: float = 0.0
    """Bound on the repeats of a language or pair, where repeats = sampled examples / available examples. A language
    that reaches this bound leaves the rest of its share to the others; 0 sets no bound."""
    layout: Literal["xlme", "xlm"] = "xlme"
    """Special tokens of an item; `model.layout` must be the same. xlme: `<s> text </s>`, pairs `<s> e </s> f </s>`;
    xlm: `</s> text </s>`, pairs with positions that restart on the second side, `</s> e </s></s> f </s>`."""
    seed: int = 0
    """Seed of the order of the examples, and of the choice which side of a pair comes first."""
    sentences: bool = False
    """Pack whole sentences into monolingual rows, as pairs are packed, for denoising and back-translation; needs
    `encode --sentences`."""
    documents: bool = False
    """Pack whole documents into monolingual rows, as pairs are packed, so that no token sees another document. A
    document that is longer than a row is cut. Without this flag, a row is a slice of a language's text."""
    into: str = ""
    """Language to translate into: it is the second side of every pair that has it. In other pairs, a random side comes
    first."""
    rows_per_shard: int = 65536
    """Rows of every shard except the last; a row of 512 tokens takes about 2 KB."""
    processes: int = 1
    """Worker processes on this machine; the output is the same for any number. Under MPI the ranks are the workers."""

    def validate(self) -> None:
        """Raise ValueError for settings that cannot work."""
        if not 8 <= self.row_tokens <= 32767:
            raise ValueError(f"--row-tokens is {self.row_tokens}: it must be between 8 and 32767")
        for name, rows in (("mono", self.mono_rows), ("para", self.para_rows)):
            if rows < 0:
                raise ValueError(f"--{name}-rows is {rows}: it must be at least 0")
        if self.mono_rows + self.para_rows == 0:
            raise ValueError(
                "no rows are asked for: set --mono-rows or --para-rows, or both, to the rows that training will read"
            )
        if self.rows_per_shard < 1:
            raise ValueError(f"--rows-per-shard is {self.rows_per_shard}: it must be at least 1")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"--alpha is {self.alpha}: it must be between 0 (uniform) and 1 (natural distribution)")
        for name in ("sentences", "documents"):
            if getattr(self, name) and not self.mono_rows:
                raise ValueError(f"--{name} is for monolingual rows, and --mono-rows is 0: leave it out, or give both")
        if self.sentences and self.documents:
            raise ValueError("--sentences and --documents both say what monolingual rows hold: give only one of them")
        if not 0 <= self.max_repeats < float("inf"):
            raise ValueError(f"--max-repeats is {self.max_repeats}: it must be a number above 0, or 0 for no bound")


def run(config: MixConfig) -> None:
    """Write the output folder, `config.out`. Raises ValueError for settings or inputs that cannot work."""
    config.validate()
    config = replace(config, into=language_of(config.into) if config.into else "")
    rows_by_task = {task: rows for task, rows in zip(TASKS, (config.mono_rows, config.para_rows), strict=True) if rows}
    encoded, vocabulary_path, languages = _read_inputs(config, list(rows_by_task))
    model = vocabulary_path.read_bytes()  # before hours of work, in which another file may take its place
    _check_text_settings(config, encoded)
    stages = {task: _stage(config, task, rows, encoded[task], languages) for task, rows in rows_by_task.items()}
    # New folders are planned before any is written, so that nearly all errors come before hours of work, and leave no
    # folder; too few examples for the gaps of packing are found later (`increase_total`). A folder that has a manifest
    # is usually complete, and needs no plan.
    plans = {
        task: _plan(config, task, rows, encoded[task], languages)
        for task, rows in rows_by_task.items()
        if not (stages[task].folder / "manifest.json").exists()
    }
    for task, rows in rows_by_task.items():
        stage = stages[task]
        with stage.open():
            if stage.check_finished(config.processes):
                print_stdout(f"{stage.folder} is complete")
            else:
                plan = plans.get(task) or _plan(config, task, rows, encoded[task], languages)
                _write_task(config, stage, rows, encoded[task], plan)
    copy = config.out / "vocab" / MODEL_FILE
    if not copy.exists() or copy.read_bytes() != model:
        write_file(copy, model, copy.parent)


def _read_inputs(config: MixConfig, tasks: list[str]) -> tuple[dict[str, Manifest], Path, tuple[str, ...]]:
    """Returns (manifest of each task, the vocabulary's file, sorted languages). Rows store a language as its index in
    the sorted languages."""
    encoded = {task: read_manifest(config.encoded / task, "`xlme prep encode`") for task in tasks}
    vocabulary = Vocabulary(config.vocab)
    for task, manifest in encoded.items():
        if manifest.stage != "encode":
            raise ValueError(
                f"{config.encoded / task} was written by stage {manifest.stage}, not encode: name the folder that "
                "`xlme prep encode` wrote by --encoded"
            )
        if manifest.vocabulary_sha256 != vocabulary.sha256:
            raise ValueError(
                f"{vocabulary.path} is not the vocabulary that {config.encoded / task} was encoded with: name the "
                "other vocabulary by --vocab, or encode again"
            )
        for name in _group_names(manifest):
            group_languages(name, manifest.languages)  # raises ValueError for a pair named in the wrong order
    _check_output(config, vocabulary.sha256, [task for task in TASKS if task not in tasks])
    # The two tasks share one list of languages, even if only one task is mixed, so that a language has the same index
    # in both.
    finished = [config.encoded / task for task in TASKS if (config.encoded / task / "manifest.json").exists()]
    languages = {code for folder in finished for code in read_manifest(folder).languages}
    return encoded, vocabulary.path, tuple(sorted(languages))


def _check_output(config: MixConfig, vocabulary_sha256: str, other_tasks: Sequence[str]) -> None:
    """Raise ValueError if vocab/ in --out has another vocabulary, which the copy of --vocab would replace. Raise it
    also if --out has rows of `other_tasks` that training could not read together with the new rows."""
    copy = config.out / "vocab" / MODEL_FILE
    stored_sha256 = vocabulary_sha256
    if (copy.parent / "manifest.json").exists():  # a folder of `vocab`, whose damaged model may be replaced
        stored_sha256 = read_manifest(copy.parent).vocabulary_sha256
    elif copy.exists() and not any((config.out / task / "settings.json").exists() for task in TASKS):
        stored_sha256 = file_sha256(copy)  # `mix` did not make this file: it has begun no task here
    if stored_sha256 != vocabulary_sha256:
        raise ValueError(f"{copy} is another vocabulary, which would be replaced: choose another --out")
    for folder in (config.out / task for task in other_tasks):
        if (folder / "manifest.json").exists():
            other = read_manifest(folder)
            if other.stage != "mix":
                raise ValueError(f"{folder} was written by stage {other.stage}, not mix: choose another --out")
            for setting, theirs, ours in (
                ("--vocab of SHA-256", other.vocabulary_sha256[:12], vocabulary_sha256[:12]),
                ("--row-tokens", other.settings.get("row_tokens"), config.row_tokens),
                ("--layout", other.settings.get("layout", "xlme"), config.layout),
            ):
                if theirs != ours:
                    raise ValueError(
                        f"{folder} was mixed with {setting} {theirs}, not {ours}, so training could not read it with "
                        "the new rows: choose another --out, or give the settings of that folder"
                    )


def _check_text_settings(config: MixConfig, encoded: dict[str, Manifest]) -> None:
    """Raise ValueError if --into, --sentences, --documents or --share does not fit the encoded text."""
    task_names = [_group_names(manifest) for manifest in encoded.values()]
    all_names = set().union(*task_names)
    pair_languages = encoded["para"].languages if "para" in encoded else ()
    if config.into and config.into not in pair_languages:
        raise ValueError(
            f"--into {config.into} is in no pair that is mixed from {config.encoded}: name a language of the pairs"
        )
    if config.sentences and not encoded["mono"].settings.get("sentences", False):
        raise ValueError(
            f"{config.encoded / 'mono'} was encoded without --sentences, which mix --sentences needs: encode it again "
            "with --sentences"
        )
    if config.documents and encoded["mono"].settings.get("sentences", False):
        raise ValueError(
            f"{config.encoded / 'mono'} was encoded with --sentences and has no documents: mix it with --sentences, or "
            "encode it without"
        )
    for entry_names in Sampling(config.alpha, config.share).parse_entries():
        for name in entry_names:
            if name not in all_names:
                # The other order of the same languages, such as de-en for en-de, is the best suggestion.
                reversed_pair = [pair for pair in all_names if sorted(pair.split("-")) == sorted(name.split("-"))]
                similar = reversed_pair or difflib.get_close_matches(name, all_names, n=1)
                first_names = ", ".join(sorted(all_names)[:8]) + (" …" if len(all_names) > 8 else "")
                hint = f"did you mean {similar[0]!r}?" if similar else f"there are {first_names}"
                raise ValueError(f"--share names {name!r}, of which nothing is mixed from {config.encoded}: {hint}")
        if not any(set(entry_names) <= names for names in task_names):
            raise ValueError(
                f"--share {'+'.join(entry_names)}=… has languages and pairs: give languages and pairs a --share each"
            )


def _group_names(encoded: Manifest) -> set[str]:
    """The names of the languages or pairs that have shards."""
    return {shard.name.split("/")[0] for shard in encoded.shards}


def _stage(config: MixConfig, task: str, rows: int, encoded: Manifest, languages: tuple[str, ...]) -> Stage:
    """The stage of one task. Raises ValueError if its folder was begun with other settings."""
    unit, sampling = _unit(config, task), _sampling(config, encoded)
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
        "window": WINDOW_SLOTS,
        "order": _ORDER_DESCRIPTION.format(_BLOCK_SLOTS[unit], _STRETCH_IDS),
    }
    settings |= {key: encoded.settings[key] for key in ("split", "heldout_share") if key in encoded.settings}
    optional = {
        "sentences": unit == "sentences",
        "documents": unit == "documents",
        "into": config.into if task == "para" else "",
        "share": list(sampling.share),
        "max_repeats": sampling.max_repeats,
    }
    settings |= {key: value for key, value in optional.items() if value}
    stage = Stage(config.out / task, "mix", settings)
    stage.check_settings()
    return stage


def _unit(config: MixConfig, task: str) -> ExampleUnit:
    """The unit of the task's examples: slices of a token stream, or pairs, sentences or documents to pack."""
    if task == "para":
        return "pairs"
    return "sentences" if config.sentences else "documents" if config.documents else "slices"


def _plan(config: MixConfig, task: str, rows: int, encoded: Manifest, languages: tuple[str, ...]) -> MixPlan:
    """Plan which examples are sampled. If rows are packed, `increase_total` may add examples later."""
    folder, unit, layout = config.encoded / task, _unit(config, task), LAYOUTS[config.layout]
    scan = partial(scan_shard, folder, config.row_tokens, layout, encoded.settings.get("max_pair_tokens"), unit)
    files = [shard.name for shard in encoded.shards]
    sizes = [shard.bytes for shard in encoded.shards]
    shards = run_tasks(scan, files, sizes, config.processes, f"survey {task}")
    too_long = sum(shard.too_long for shard in shards)
    if not any(shard.examples for shard in shards):
        if too_long:
            advice = "raise --row-tokens"
        elif encoded.settings.get("split") == "heldout":
            advice = "raise --heldout-share"
        else:
            advice = "encode some text first"
        raise ValueError(f"{folder} has nothing that fills a row of {config.row_tokens} tokens: {advice}")
    shards.sort(key=lambda shard: (shard.group, shard.batch_index.path.name))
    by_group = {group: list(members) for group, members in groupby(shards, key=lambda shard: shard.group)}
    examples = tuple(sum(shard.examples for shard in members) for members in by_group.values())
    tokens = tuple(sum(shard.tokens for shard in members) for members in by_group.values())
    mean_tokens = sum(tokens) / sum(examples)
    language_indices = tuple(group_languages(group, languages) for group in by_group)
    max_stretch = max(int(_STRETCH_IDS * len(language_indices[0]) / mean_tokens), 1)
    quotas = ()  # `with_total` and `with_enough_examples` set them
    order = SampledOrder(tuple(by_group), examples, quotas, config.seed, task, _BLOCK_SLOTS[unit], max_stretch)
    into = languages.index(config.into) if config.into in languages else None
    sampling = _sampling(config, encoded)
    plan = MixPlan(
        config.row_tokens, layout, language_indices, tuple(shards), tokens, mean_tokens, order, sampling, into
    )
    plan = with_total(plan, rows) if unit == "slices" else with_enough_examples(plan, rows)
    if too_long:
        warn(f"{folder}: {too_long:,} of its {unit} cannot fit a row of {config.row_tokens} tokens")
    return plan


def _sampling(config: MixConfig, encoded: Manifest) -> Sampling:
    """The sampling of one task, with the --share values that name the task's languages or pairs."""
    names = _group_names(encoded)
    share = [entry for entry in config.share if set(entry.rpartition("=")[0].split("+")) <= names]
    return Sampling(config.alpha, tuple(sorted(share)), config.max_repeats)


def _write_task(config: MixConfig, stage: Stage, rows: int, encoded: Manifest, plan: MixPlan) -> None:
    """Write the shards of a task, then its manifest."""
    task, languages = stage.settings["task"], tuple(stage.settings["languages"])
    rows_before = None
    if _unit(config, task) != "slices":
        plan, rows_before = increase_total(stage, plan, rows, config.processes)
    write = partial(write_shard, stage, plan, rows_before)
    sizes = [min(config.rows_per_shard, rows - start) for start in range(0, rows, config.rows_per_shard)]
    tasks = {f"shard-{number:05d}": number for number in range(len(sizes))}
    results = stage.run_unfinished(write, tasks, sizes, config.processes, f"mix {task}")
    shards = tuple(Shard(**result["shard"]) for result in results)
    counts = _counts(plan, rows, results)
    if "split" in stage.settings and task == "mono":
        # `encode --split` never divides a sentence, or the part of a document that is in one block. The manifest names
        # this unit: "sentences" or the size of the blocks, unless the size is the default.
        split_unit = "sentences" if encoded.settings.get("sentences") else encoded.settings["block_bytes"]
        if split_unit != EncodeConfig.block_bytes:
            counts["split_of"] = split_unit
    manifest = Manifest(
        "mix", stage.settings, encoded.vocabulary_size, encoded.vocabulary_sha256, languages, shards, counts
    )
    assert manifest.rows == rows
    write_manifest(stage.folder, manifest)
    _print_shares(counts["by_language"], task, _unit(config, task))
    size = f"{rows:,} row{'s' * (rows > 1)} in {len(shards)} shard{'s' * (len(shards) > 1)}"
    print_stdout(f"{stage.folder}: {size}, {100 * counts['fill']:.1f}% of the tokens are not padding")


def _counts(plan: MixPlan, rows: int, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's counts, summed over the `results` of `write_shard`."""
    order = plan.order
    used = [sum(column) for column in zip(*(result["used"] for result in results), strict=True)]
    tokens = sum(result["tokens"] for result in results)
    by_language = {
        name: {
            "available": available,
            "too_long": sum(shard.too_long for shard in plan.shards if shard.group == name),
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


def _print_shares(by_language: Mapping[str, Mapping[str, Any]], task: str, unit: ExampleUnit) -> None:
    """Print the counts of the largest languages or pairs; `xlme prep stats` shows all."""
    heading = "language" if task == "mono" else "pair"
    # Documents are counted as items, because each piece of a long document is an example of its own.
    examples_name = {"slices": "rows", "documents": "items"}.get(unit, unit)
    largest = sorted(by_language, key=lambda name: (-by_language[name]["available"], name))
    print_stdout(
        f"{heading:<12} {f'{examples_name} available':>19} {'share before':>12} {'share after':>12} {'repeats':>8}"
    )
    for name in largest[:_TABLE_ROWS]:
        counts = by_language[name]
        shares = f"{counts['share_before']:>12.3%} {counts['share_after']:>12.3%} {counts['repeat']:>7.2f}×"
        print_stdout(f"{name:<12} {counts['available']:>19,} {shares}")
    if len(largest) > _TABLE_ROWS:
        print_stdout(f"… {len(largest) - _TABLE_ROWS} more (`xlme prep stats` shows all)")
