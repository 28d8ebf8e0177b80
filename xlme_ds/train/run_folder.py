"""The run folder: one process at a time, one run for good, and a record of what it ran with."""

import datetime
import importlib.metadata
import json
import os
import sys
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

from ..cli import called
from ..config import DataConfig, RunConfig, ScheduleConfig, StartConfig, Training
from ..data.order import phases
from ..folders import at_step, checkpoints_of, saved_step
from ..io.files import read_object, replacing, write_object
from ..io.folders import LOCK, in_use, lock
from .schedule import learning_rate

# Settings that do not shape the curve; a run may be resumed with others.
_MAY_CHANGE = (
    "train.log_every",
    "train.eval_",
    "train.save_",
    "train.keep_",
    "train.max_bad_steps",
    "train.spike_sigma",
    "train.watchdog_minutes",
    "train.audit",
    "train.wandb",
    "model.kernels",
    "model.compile",
    "model.head_chunk",
    "model.vocabulary_blocks",
    "model.activation_checkpointing",
    "data.micro_batch",
    "tuning.micro_batch",
    "engine.",
)
_MUST_STAY = ("engine.precision",)
FINISHED = "finished.json"  # written last
RECORDS = ("metrics", "heldout", "heldout_languages", "dimensions", "faults")
_PACKAGES = ("torch", "deepspeed", "sentencepiece", "pyarrow", "numpy", "numba")


class RunFolder:
    """The folder that `--out` names. Every rank has one; only the root writes."""

    def __init__(self, path: Path, root: bool = True, writes: bool = True):
        """`root`: whether this rank writes; without `writes` none does."""
        self.path = path
        self.root = root
        self.writes = writes
        self._lock: Any = None
        self._made = False

    def claim(self, config: Training) -> None:
        """See that the folder belongs to `config`, and keep other runs out of it until this process ends.

        Raises ValueError naming the setting that differs, or when another process works in the folder.
        """
        if self.root:
            self._look()
        if self.root and self.writes:
            self._made = not self.path.exists()
            self._lock = lock(self.path)
        stored = self._stored()
        if stored is not None:
            done: int | None = max(map(saved_step, checkpoints_of(self.path)), default=0)
            if (self.path / FINISHED).exists() and done != read_object(self.path / FINISHED)["steps"]:
                done = None  # its last checkpoint is gone: it can only stay as it is
            self._require_same(f"{self.path} was started", stored["config"], config, done)

    def _look(self) -> None:
        """Raise ValueError for what would stop `lock`, as far as it can be checked before."""
        place = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not self.writes and in_use(self.path):
            raise ValueError(f"another process is still working in {self.path}: wait for its end")
        if not place.is_dir():
            raise ValueError(f"{place} is no folder: choose another --out")
        if not os.access(place, os.W_OK):
            raise ValueError(f"{place} cannot be written: choose another --out")

    def close(self) -> None:
        """Let other processes into the folder; the end of the process does the same."""
        if self._lock is None:
            return
        if self._made and [path.name for path in self.path.iterdir()] == [LOCK]:
            (self.path / LOCK).unlink()
            self.path.rmdir()
        self._lock.close()
        self._lock = None

    def identity(self, config: Training, checkpoint: Path | None, saved: Mapping[str, Any]) -> str:
        """The run's identity, which all its files hold: a new run draws one.

        `saved`: the state of the `checkpoint` from which the run continues. Raises ValueError when another run saved
        it, or this one with other settings.
        """
        stored = self._stored()
        if checkpoint is None:
            return uuid.uuid4().hex if stored is None else str(stored["run"])
        if stored is not None and stored["run"] != saved["run"]:
            raise ValueError(
                f"{checkpoint} was saved by another run: move it out of this folder, or choose another --out"
            )
        self._require_same(f"{checkpoint} was saved", saved["settings"], config, int(saved["step"]))
        return str(saved["run"])

    def begin(
        self,
        config: Training,
        data: Mapping[str, Any],
        world: int,
        parameters: dict[str, int],
        identity: str | None = None,
        objective: Mapping[str, Any] | None = None,
    ) -> None:
        """Write `config.json`, once all checks have passed: the resolved settings, and what they run with. The root's.

        `data`: fingerprints of its data and vocabulary; `objective`: it in words (`objectives.described`).
        """
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)  # where it is missing later, somebody removed it
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES} | {"python": sys.version.split()[0]}
        content = {"config": asdict(config), "versions": versions, "world_size": world, "data": data}
        content |= {"parameters": parameters, "objective": objective, "run": identity}
        now = datetime.datetime.now(datetime.UTC).isoformat(" ", "minutes").removesuffix("+00:00")
        content |= {"started": (self._stored() or {}).get("started", now), "command": called()}
        done = self.path / FINISHED
        ended = read_object(done)["steps"] if done.exists() else None
        if ended != config.train.steps and checkpoints_of(self.path):  # it was made longer, or stopped in its report
            (self.path / "model" / "model.safetensors").unlink(missing_ok=True)  # its last checkpoint has them
            done.unlink(missing_ok=True)
        write_object(self.path / "config.json", {key: value for key, value in content.items() if value is not None})

    def steps_logged(self) -> int:
        """The last step of `metrics.jsonl`; 0 without one."""
        path = self.path / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        return next((step for line in reversed(lines) if (step := step_of(line)) is not None), 0)

    def last_started_with(self, name: str, otherwise: float) -> float:
        """The value of train.`name` when the run was last started."""
        stored = self._stored() or {"config": {}}
        return float(stored["config"].get("train", {}).get(name, otherwise))

    def put_records_aside(self) -> list[str]:
        """Rename the records (`metrics.jsonl` to `metrics.jsonl.1`, or the next free number); returns the new names."""
        aside = []
        for name in RECORDS:
            path = self.path / f"{name}.jsonl"
            if path.exists() and path.stat().st_size:
                free = (path.with_name(f"{path.name}.{number}") for number in count(1))
                new = next(path for path in free if not os.path.lexists(path))
                path.rename(new)
                aside.append(new.name)
        return aside

    def drop_records(self, after: int) -> None:
        """Leave out the records of steps that the run does not have."""
        for path in (self.path / f"{name}.jsonl" for name in RECORDS):
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            earlier = [line for line in lines if (step_of(line) or 0) <= after]
            if len(earlier) < len(lines):
                with replacing(path) as file:
                    file.writelines(earlier)

    def finish(self, steps: int) -> None:
        """Mark the run finished, its last act."""
        write_object(self.path / FINISHED, {"steps": steps})

    def _stored(self) -> dict[str, Any] | None:
        """The content of `config.json`; None if it does not exist."""
        path = self.path / "config.json"
        try:
            content = read_object(path)
            if not isinstance(content["config"], dict):
                raise ValueError
        except FileNotFoundError:
            return None
        except (ValueError, KeyError):
            raise ValueError(f"{path} is damaged: restore it, or choose another --out") from None
        return content

    def _require_same(self, what: str, stored: Any, config: Training, done: int | None) -> None:
        """Raise ValueError naming the first setting that `what` has otherwise, and what to do instead. `done`: the
        steps from which another schedule or other data may follow, None where none may."""
        theirs, ours = flatten(stored), settled(config)
        if missing := sorted(ours.keys() - theirs.keys()):
            raise ValueError(f"{what} without {missing[0]}: it is of another version, choose another --out")
        ahead = () if done is None else _ahead(theirs, config, done)
        for key in sorted(ours.keys() | {key for key in theirs if not _may_change(key)}):
            if ours.get(key) != theirs.get(key) and not key.startswith(ahead):
                raise ValueError(
                    f"{what} with {key} {theirs.get(key)}, this call has {ours.get(key)}: {self._instead(key, config)}"
                )

    def _instead(self, key: str, config: Training) -> str:
        another = "another --out"
        if isinstance(config, RunConfig):
            another += f" (--start.folder {self.path} has it start from this run's weights)"
        if (self.path / FINISHED).exists():
            return f"the run is finished and stays as it is, choose {another}"
        schedule = ""
        if key in ("train.steps", "schedule.name", "schedule.decay_steps"):
            schedule = " (with another, finished steps would have had another learning rate)"
        elif key.startswith("data.phase"):
            schedule = " (with others, finished steps would have read other data)"
        return f"use the same settings to resume{schedule}, or {another}"


def branched(source: Path, out: Path | None = None) -> RunConfig:
    """The settings of the run of which RUN@STEP is a checkpoint, as those of a new run that takes its state there; of
    a branch that `out` holds already its own, whatever has become of the parent. Raises ValueError where there are
    none."""
    from ..trained.settings import read_run_config  # here: reports are written where there is no torch

    run, step = at_step(source)
    if step is None:
        raise ValueError(f"--branch {source} names no step: write {run}@STEP")
    start = StartConfig(f"{run}@{step}", "state")
    if out is not None and (out / "config.json").exists():
        config = read_run_config(out)
        if config.start == start:
            return config
    there = (run / "config.json").exists()
    if not there:
        raise ValueError(f"{run} has no config.json: name a run of pre-training with --branch")
    config = read_run_config(run)
    return replace(config, start=start)


def first_step(config: RunConfig) -> int:
    """The steps that were done when the run began: those of the checkpoint whose state a branch takes, else 0."""
    return first_step_of({"start": asdict(config.start)})


def first_step_of(settings: Mapping[str, Any]) -> int:
    """`first_step` from the settings in a run's config.json."""
    start = settings.get("start", {"take": "all"})
    return (at_step(Path(start["folder"]))[1] or 0) if start["take"] == "state" else 0


def step_of(line: bytes) -> int | None:
    """The whole number `step` of a line of JSON; None where it has none, as the half-written last line of a run that
    was killed."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if type(step) is int else None


def missing_steps(logged: Iterable[int], every: int, last: int, done: int = 0) -> str:
    """The steps after `done` up to `last` that should have a record, one every `every`, and have none, in words."""
    missing = sorted(set(range((done // every + 1) * every, last + 1, every)).difference(logged))
    stretches = []
    for _, stretch in groupby(enumerate(missing), key=lambda place: place[1] - every * place[0]):
        steps = [step for _, step in stretch]
        stretches.append(f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}")
    return ", ".join(stretches[:10]) + (f" and {len(stretches) - 10} more stretches" if len(stretches) > 10 else "")


def settled(config: Training) -> dict[str, Any]:
    """The settings that a run has for good, as `section.key`."""
    ours = flatten(json.loads(json.dumps(asdict(config))))  # tuples as the lists that JSON has
    return {key: value for key, value in ours.items() if not _may_change(key)}


def _ahead(theirs: Mapping[str, Any], config: Training, done: int) -> tuple[str, ...]:
    """Prefixes of settings that may change because the `done` steps would have been the same: those of the schedule if
    each step had the same rate, those of phases if each step read the same rows."""
    free: list[str] = []
    then = ScheduleConfig(theirs["schedule.name"], theirs["schedule.decay_steps"])
    lengths = (theirs["train.steps"], then), (config.train.steps, config.schedule)
    with suppress(KeyError, TypeError):  # a damaged config.json
        if done <= config.train.steps:
            rates = [
                [learning_rate(step, steps, config.optimizer, at) for step in range(done)] for steps, at in lengths
            ]
            free += ["train.steps", "schedule."] * (rates[0] == rates[1])
    if isinstance(config, RunConfig):
        data = DataConfig(
            phase_steps=tuple(theirs["data.phase_steps"]),
            phase_mask_fractions=tuple(theirs["data.phase_mask_fractions"]),
            phase_rotary_bases=tuple(theirs["data.phase_rotary_bases"]),
        )
        fraction = config.objective.mask_fraction
        begun = [
            [phase for phase in phases(settings, fraction) if phase.first < done] for settings in (data, config.data)
        ]
        free += ["data.phase_"] * (begun[0] == begun[1])
    return tuple(free)


def _may_change(key: str) -> bool:
    return key.startswith(_MAY_CHANGE) and key not in _MUST_STAY


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as `section.key`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
