"""Pre-training: `deepspeed --module xlme_ds.pretrain --recipe NAME --data DIR --out DIR [--section.key value ...]`.

The same with `python -m xlme_ds.pretrain` runs on one process. A second call with the same folder resumes.
"""

import importlib.metadata
import json
import sys
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from .cli import fail, parse
from .config import RunConfig
from .data.schema import write_json


@dataclass(frozen=True)
class Pretrain:
    """Arguments of the command."""

    data_folder: Annotated[Path, tyro.conf.arg(name="data")]
    """Folder that `data_prep mix` wrote."""
    out: Path
    """Run folder; an existing one is resumed."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    heldout: Path | None = None
    """Mixed folder of text kept out of training, for evaluation."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    try:
        command = parse(Pretrain, __doc__ or "", sys.argv[1:] if arguments is None else arguments)
        pretrain(command.run, command.data_folder, command.out, command.heldout)
    except ValueError as error:
        fail("xlme_ds.pretrain", error)


def pretrain(config: RunConfig, data: Path, out: Path, heldout: Path | None) -> None:
    """Train `config` on `data` into `out`, from its newest checkpoint if it has one; collective over the launched ranks."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed 0.19.8 on torch 2.13's renamed collectives
    from .data.loader import Loader
    from .engine.build import build_engine, resolve_precision
    from .engine.processes import process_group, together
    from .train.run import heldout_data, train

    with process_group(config.engine) as (rank, world):
        # A resumed run must not change its precision because the processor differs.
        precision = resolve_precision(config.engine.precision)
        config = replace(config, engine=replace(config.engine, precision=precision))

        def load() -> tuple[Loader, Loader | None]:
            check_run_folder(out, config)
            arguments = config.seed, config.objective.mask_fraction, rank, world
            unseen = None if heldout is None else Loader(heldout, heldout_data(config, heldout, world), *arguments)
            return Loader(data, config.data, *arguments), unseen

        loader, unseen = together(load)
        if rank == 0:
            write_run_folder(out, config, loader.fingerprints, world)
        engine = build_engine(config, loader, unseen)
        finished = train(engine, config, out, loader, unseen)
        state = engine.full_state() if finished else {}
    if finished and rank == 0:
        from .evaluate.showcase import showcase
        from .report.page import write_report

        showcase(out, config, state, data, heldout)
        print(f"{out}: finished; open {write_report(out)}", flush=True)


def check_run_folder(out: Path, config: RunConfig) -> None:
    """See that an existing run folder belongs to this run. Raises ValueError naming the setting that differs."""
    path = out / "config.json"
    if not path.exists():
        return
    ours, stored = flatten(asdict(config)), flatten(json.loads(path.read_text(encoding="utf-8"))["config"])
    for key in sorted(ours.keys() | stored.keys()):
        if ours.get(key) != stored.get(key) and not key.startswith(_MAY_CHANGE):
            raise ValueError(
                f"{out} was started with {key} {stored.get(key)}, this call has {ours.get(key)}: "
                "use the same settings to resume, or another --out"
            )


def write_run_folder(out: Path, config: RunConfig, fingerprints: dict[str, str], world: int) -> None:
    """Write `config.json`: the resolved settings, and what they ran with."""
    from .parameters import count_parameters

    out.mkdir(parents=True, exist_ok=True)
    versions = {
        name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "sentencepiece", "pyarrow", "numpy")
    }
    write_json(
        out / "config.json",
        {
            "config": asdict(config),
            "versions": versions | {"python": sys.version.split()[0]},
            "world_size": world,
            "data": {"fingerprints": fingerprints},
            "parameters": count_parameters(config.model),
        },
    )


# Settings that do not shape the curve; a run may be resumed with others.
_MAY_CHANGE = (
    "train.log_every",
    "train.eval_",
    "train.save_every",
    "train.keep_",
    "model.head_chunk",
    "model.activation_checkpointing",
    "data.micro_batch",
)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as `section.key`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


if __name__ == "__main__":
    main()
