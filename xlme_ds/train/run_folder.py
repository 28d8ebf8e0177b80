"""The folder of a run. It is locked while a process works in it, and its `config.json` records the run's settings and
versions. A resume with settings that would change finished steps is an error."""

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

from ..checkpoint_names import FINISHED, checkpoints_of, require_checkpoint, run_and_step, saved_step
from ..cli import command_line, note
from ..config import DataConfig, EngineConfig, RunConfig, ScheduleConfig, StartConfig, Training
from ..data.order import Phase, phases
from ..io.files import read_json, read_versioned, write_versioned
from ..io.folders import LOCK_FILE, is_locked, lock_folder, require_folder, require_writable
from .schedule import learning_rate

# Prefixes of the settings that may change on resume. Such settings change the loss curve by rounding at most, except
# `spike_sigma`, which decides which steps are skipped.
_CHANGEABLE_PREFIXES = (
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
_MUST_STAY = ("engine.precision",)  # exceptions to `_CHANGEABLE_PREFIXES`
# Prefix of a setting -> why a resume may not change the setting.
_REASONS_TO_STAY = {
    "train.steps": "with another, finished steps would have had another learning rate",
    "schedule.": "with another, finished steps would have had another learning rate",
    "data.phase": "with others, finished steps would have read other data",
    "engine.precision": "without this setting, engine.kind and the processor choose it",
    "base": "if --model still trains, name the checkpoint RUN@STEP that this run started from",
}
# A run appends its records to the files NAME.jsonl.
RECORDS = ("metrics", "heldout", "heldout_languages", "dimensions", "faults")
_PACKAGES = ("torch", "deepspeed", "sentencepiece", "pyarrow", "numpy", "numba")


class RunFolder:
    """The folder that `--out` names. Every rank has a RunFolder, but only rank 0 writes to the folder."""

    def __init__(self, path: Path, root: bool = True, writes: bool = True):
        """`root`: whether this process is rank 0; `writes`: whether rank 0 writes, which it does not in a dry run."""
        self.path = path
        self.root = root
        self.writes = writes
        self._lock: Any = None
        self._nvme_lock: Any = None
        self._created = False

    def claim(self, config: Training) -> None:
        """Check that a run with the settings `config` may use the folder, and lock it against other processes until
        `close` or the end of this process.

        Raises ValueError if a setting differs (the error names it), and if the folder is unusable or another process
        works in it.
        """
        if self.root:
            self._check_usable()
        if self.root and self.writes:
            self._created = not self.path.exists()
            self._lock = lock_folder(self.path)
        stored = self._read_config()
        if stored is not None:
            done: int | None = max(map(saved_step, checkpoints_of(self.path)), default=0)
            if (self.path / FINISHED).exists() and done != read_versioned(self.path / FINISHED)["steps"]:
                done = None  # the finished run has lost its last checkpoint, so no setting may change
            self._require_same_settings(f"{self.path} was started", stored["config"], config, done)

    def _check_usable(self) -> None:
        """Raise ValueError if the folder is an export, if it cannot be made or written, or, in a dry run, if another
        process works in it. Print a remark if the folder holds files but no run."""
        if not self.writes and is_locked(self.path):
            raise ValueError(f"another process is still working in {self.path}: wait for its end")
        require_writable(self.path)
        refuse_export(self.path, "choose another output folder")
        is_new = not (self.path / "config.json").exists() and not checkpoints_of(self.path)
        if is_new and any(path.name != "data" for path in self.path.glob("[!.]*")):  # the quickstart's data
            note(f"{self.path} has other files and no config.json: if they are not this run's, choose a new folder")

    def lock_nvme(self, engine: EngineConfig, rank: int) -> None:
        """If `engine` offloads to a disk, lock this rank's place there until `close` or the end of this process: the
        names of DeepSpeed's files there have the rank alone, so two runs would read each other's weights. Raises
        ValueError if another run uses the place."""
        if "nvme" in (engine.offload_optimizer, engine.offload_parameters):
            try:
                self._nvme_lock = lock_folder(Path(engine.nvme_folder) / f"rank{rank}")
            except ValueError as error:
                raise ValueError(f"engine.nvme_folder: {error}") from None

    def close(self) -> None:
        """Unlock the folders before the process ends; remove the run folder if `claim` made it and it is empty."""
        if self._nvme_lock is not None:
            self._nvme_lock.close()
            self._nvme_lock = None
        if self._lock is None:
            return
        if self._created and [path.name for path in self.path.iterdir()] == [LOCK_FILE]:
            (self.path / LOCK_FILE).unlink()
            self.path.rmdir()
        self._lock.close()
        self._lock = None

    def identity(self, config: Training, checkpoint: Path | None, saved: Mapping[str, Any]) -> str:
        """The run's identity, a random number that config.json and checkpoints store; a new run gets a new identity.

        `saved`: the state of the `checkpoint` from which the run continues. Raises ValueError if another run saved the
        checkpoint, or if this run saved it with other settings.
        """
        stored = self._read_config()
        if checkpoint is None:
            return uuid.uuid4().hex if stored is None else str(stored["run"])
        if stored is not None and stored["run"] != saved["run"]:
            raise ValueError(
                f"{checkpoint} was saved by another run: move it out of this folder, or choose another output folder"
            )
        self._require_same_settings(f"{checkpoint} was saved", saved["settings"], config, int(saved["step"]))
        return str(saved["run"])

    def write_config(
        self,
        config: Training,
        data: Mapping[str, Any],
        world: int,
        parameters: dict[str, int],
        identity: str | None = None,
        objective: Mapping[str, Any] | None = None,
    ) -> None:
        """Write `config.json`: resolved settings, versions and data. If the run has not done all its steps, also remove
        the model and the marker of an earlier end. Only rank 0 calls this method, after all checks have passed.

        `data`: fingerprints of the data and the vocabulary; `world`: number of ranks; `parameters`: numbers of
        parameters; `objective`: the result of `objectives.describe`.
        """
        # `Checkpoints.were_lost` takes a missing `checkpoints/` for a removed one, so it is made before the first step.
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES} | {"python": sys.version.split()[0]}
        now = datetime.datetime.now(datetime.UTC).isoformat(" ", "minutes").removesuffix("+00:00")
        content = {
            "config": asdict(config),
            "versions": versions,
            "world_size": world,
            "data": data,
            "parameters": parameters,
            "objective": objective,
            "run": identity,
            "started": (self._read_config() or {}).get("started", now),
            "command": command_line(),
        }
        marker = self.path / FINISHED
        finished_steps = read_versioned(marker)["steps"] if marker.exists() else None
        # If there is a model already, the run was made longer, or it was killed between writing the model and writing
        # the marker. The model can be removed, because the last checkpoint has its weights.
        if finished_steps != config.train.steps and checkpoints_of(self.path):
            (self.path / "model" / "model.safetensors").unlink(missing_ok=True)
            marker.unlink(missing_ok=True)
        write_versioned(self.path / "config.json", {key: value for key, value in content.items() if value is not None})

    def last_logged_step(self, name: str = "metrics") -> int:
        """The step of the last record in `NAME.jsonl`; 0 if there is no record."""
        path = self.path / f"{name}.jsonl"
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        return next((step for line in reversed(lines) if (step := step_of(line)) is not None), 0)

    def setting_at_last_start(self, name: str, otherwise: float) -> float:
        """The value of `train.NAME` when the run was last started; `otherwise` if config.json does not have it."""
        stored = self._read_config() or {"config": {}}
        return float(stored["config"].get("train", {}).get(name, otherwise))

    def put_records_aside(self) -> list[str]:
        """Rename the records (`metrics.jsonl` to `metrics.jsonl.1`, or the next free number); returns the new names."""
        new_names = []
        for name in RECORDS:
            path = self.path / f"{name}.jsonl"
            if path.exists() and path.stat().st_size:
                numbered = (path.with_name(f"{path.name}.{number}") for number in count(1))
                new = next(candidate for candidate in numbered if not os.path.lexists(candidate))
                path.rename(new)
                new_names.append(new.name)
        return new_names

    def finish(self, steps: int) -> None:
        """Mark the run finished; the last thing that a run does."""
        write_versioned(self.path / FINISHED, {"steps": steps})

    def _read_config(self) -> dict[str, Any] | None:
        """The content of `config.json`; None if it does not exist."""
        path = self.path / "config.json"
        try:
            content = read_versioned(path)
            if not isinstance(content["config"], dict):
                raise ValueError
        except FileNotFoundError:
            return None
        except (ValueError, KeyError):
            raise ValueError(f"{path} is damaged: restore it, or choose another output folder") from None
        return content

    def _require_same_settings(self, subject: str, stored: Any, config: Training, done: int | None) -> None:
        """Raise ValueError, with a remedy, if `stored` and `config` differ in settings that must be equal.

        `stored`: settings from config.json or from a checkpoint. `subject`: the beginning of the message. `done`:
        number of finished steps; settings of schedule and data may differ if they change only later steps. If `done` is
        None, these settings must be equal too.
        """
        earlier, current = flatten(stored), fixed_settings(config)
        if ("task" in earlier) != ("task" in current):
            kind = "fine-tuning" if "task" in earlier else "pre-training"
            raise ValueError(f"{self.path} is a run of {kind}: choose another output folder")
        if missing := sorted(current.keys() - earlier.keys()):
            raise ValueError(f"{subject} without {missing[0]}, by another version: choose another output folder")
        changeable = () if done is None else _prefixes_that_may_change(earlier, config, done)
        keys = sorted(current.keys() | {key for key in earlier if not _may_change(key)})
        different = [key for key in keys if current.get(key) != earlier.get(key) and not key.startswith(changeable)]
        if "task" in current:  # fine-tuning, where the number of training examples determines these two settings
            others = [key for key in different if key not in ("train.steps", "optimizer.warmup_steps")]
            if different and not others:
                raise ValueError(f"{subject} on other training examples: use the same data, or another output folder")
            different = others
        # In fine-tuning, the user gives the task, the model (`base`) and the settings of `tuning.`. The other settings
        # follow from these, so if any of these differ, the message names no others.
        tuning = [key for key in different if key.startswith("tuning.")]
        users_own = [key for key in ("task", "base") if key in different] + tuning
        different = users_own or different
        if different:
            shown = [
                "another model (--model, --random)"
                if key == "base"
                else f"{key} {earlier.get(key)}, this call has {current.get(key)}"
                for key in different[:5]
            ]
            more = "; …" if len(different) > 5 else ""
            raise ValueError(f"{subject} with {'; '.join(shown)}{more}: {self._remedy(different[0], config)}")

    def _remedy(self, key: str, config: Training) -> str:
        another = "another output folder"
        if isinstance(config, RunConfig):
            # `all`, because the recipes of translation take the encoder alone.
            another += f" (start.folder {self.path} with start.take all starts the new run from this run's weights)"
        if (self.path / FINISHED).exists():
            return f"the run is finished and stays as it is; choose {another}"
        reason = next((f" ({text})" for prefix, text in _REASONS_TO_STAY.items() if key.startswith(prefix)), "")
        return f"use the same settings to resume{reason}, or {another}"


def refuse_export(folder: Path, advice: str) -> None:
    """Raise ValueError, with `advice`, if `folder` is an export."""
    try:
        is_export = "model_type" in read_json(folder / "config.json", dict)
    except (OSError, ValueError):  # config.json is absent, or damaged, which its reader reports
        return
    if is_export:
        raise ValueError(f"{folder} is an export (a Hugging Face folder), not a run: {advice}")


def read_branch_config(source: Path, out: Path | None = None) -> RunConfig:
    """The settings of a branch from `source`, which is RUN@STEP: RUN's settings, with its checkpoint of STEP as start.

    If `out` already has this branch, the settings are read from `out`, because RUN may have been deleted. Raises
    ValueError if `source` names no step, or RUN has no settings or no checkpoint of STEP.
    """
    from ..trained.config_json import read_run_config  # it needs torch, which the other users of this module may lack

    run, step = run_and_step(source)
    if step is None:
        raise ValueError(f"--branch {source} names no step: write {run}@STEP")
    start = StartConfig(f"{run}@{step}", "state")
    if out is not None and (out / "config.json").exists():
        config = read_run_config(out)
        if config.start == start:
            return config
    require_folder(run, "name a run of pre-training with --branch")
    if not (run / "config.json").exists():
        raise ValueError(f"{run} has no config.json: name a run of pre-training with --branch")
    require_checkpoint(run, step)
    return replace(read_run_config(run), start=start)


def first_step(settings: Mapping[str, Any]) -> int:
    """The step at which the run with these `settings`, as config.json stores them, began: for a branch the step of its
    parent's checkpoint, else 0."""
    start = settings.get("start", {"take": "all"})
    # Not by `run_and_step`: if a folder has been named RUN@STEP since, it would take that folder for the run.
    return int(start["folder"].rpartition("@")[2]) if start["take"] == "state" else 0


def step_of(line: bytes) -> int | None:
    """The integer `step` of a line of JSON; None for a line without one."""
    step = json_object(line).get("step")
    return step if type(step) is int else None


def json_object(line: bytes) -> dict[str, Any]:
    """The JSON object in a line; empty if the line holds none, such as the half-written last line of a killed run."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def describe_missing_steps(logged: Iterable[int], every: int, last: int, done: int = 0) -> str:
    """The steps that lack a record, as text such as `20, 50 to 80`. The multiples of `every` after `done`, up to
    `last`, should have a record."""
    missing = sorted(set(range((done // every + 1) * every, last + 1, every)).difference(logged))
    ranges = []
    # Over consecutive missing steps, step - every * index is constant.
    for _, steps_in_range in groupby(enumerate(missing), key=lambda indexed: indexed[1] - every * indexed[0]):
        steps = [step for _, step in steps_in_range]
        ranges.append(f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}")
    return ", ".join(ranges[:10]) + (f" and {len(ranges) - 10} more ranges" if len(ranges) > 10 else "")


def fixed_settings(config: Training) -> dict[str, Any]:
    """The settings that may not change on resume, by `section.key`."""
    settings = flatten(json.loads(json.dumps(asdict(config))))  # turns tuples into lists, as in config.json
    return {key: value for key, value in settings.items() if not _may_change(key)}


def _prefixes_that_may_change(earlier: Mapping[str, Any], config: Training, done: int) -> tuple[str, ...]:
    """Prefixes of settings that may differ from `earlier` because they change none of the `done` steps: `train.steps`
    and `schedule.` if these steps have the same learning rates, `data.phase_` if these steps have equal phases."""

    def rates(steps: int, schedule: ScheduleConfig) -> list[float]:
        return [learning_rate(step, steps, config.optimizer, schedule) for step in range(done)]

    prefixes: list[str] = []
    schedule = ScheduleConfig(earlier["schedule.name"], earlier["schedule.decay_steps"])
    with suppress(KeyError, TypeError):  # raised if config.json is damaged
        steps = config.train.steps
        if done <= steps and rates(earlier["train.steps"], schedule) == rates(steps, config.schedule):
            prefixes += ["train.steps", "schedule."]
    if isinstance(config, RunConfig):
        earlier_data = DataConfig(
            phase_steps=tuple(earlier["data.phase_steps"]),
            phase_mask_fractions=tuple(earlier["data.phase_mask_fractions"]),
            phase_rotary_bases=tuple(earlier["data.phase_rotary_bases"]),
        )
        fraction, base = config.objective.mask_fraction, config.model.rotary_base

        def begun_phases(data: DataConfig) -> list[Phase]:
            return [
                phase._replace(rotary_base=phase.rotary_base or base)  # the last phase has None and uses `base`
                for phase in phases(data, fraction)
                if phase.first_step < done
            ]

        if begun_phases(earlier_data) == begun_phases(config.data):
            prefixes.append("data.phase_")
    return tuple(prefixes)


def _may_change(key: str) -> bool:
    return key.startswith(_CHANGEABLE_PREFIXES) and key not in _MUST_STAY


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as a flat dict, by `section.key`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
