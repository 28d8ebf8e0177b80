"""The run folder: one process at a time, one run for good, and a record of what it ran with."""

import fcntl
import importlib.metadata
import json
import sys
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from ..config import Training
from ..data.schema import write_json

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
    "model.attention",
    "model.compile",
    "model.head_chunk",
    "model.activation_checkpointing",
    "data.micro_batch",
    "engine.",
)
_MUST_STAY = ("engine.precision", "model.attention_dropout")
_PACKAGES = ("torch", "deepspeed", "sentencepiece", "pyarrow", "numpy", "numba")


class RunFolder:
    """The folder that `--out` names. Every rank has one; only the root writes."""

    def __init__(self, path: Path, root: bool = True):
        self.path = path
        self.root = root

    def claim(self, config: Training) -> None:
        """See that the folder belongs to `config`, and keep other runs out of it until this process ends.

        Raises ValueError naming the setting that differs, or when another process works in the folder.
        """
        if self.root:
            self._lock = lock(self.path)
        path = self.path / "config.json"
        if not path.exists():
            return
        try:
            # A setting that is younger than the run had its default in it.
            stored = _defaults(config) | flatten(json.loads(path.read_text(encoding="utf-8"))["config"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is damaged: restore it, or choose another --out") from None
        ours = flatten(json.loads(json.dumps(asdict(config))))  # tuples as the lists that JSON has
        for key in sorted(ours.keys() | stored.keys()):
            free = key.startswith(_MAY_CHANGE) and key not in _MUST_STAY
            if ours.get(key) != stored.get(key) and not free:
                raise ValueError(
                    f"{self.path} was started with {key} {stored.get(key)}, this call has {ours.get(key)}: "
                    "use the same settings to resume, or another --out"
                )

    def close(self) -> None:
        """Let other processes into the folder; the end of the process does the same."""
        if self.root:
            self._lock.close()

    def begin(self, config: Training, fingerprints: dict[str, Any], world: int, parameters: dict[str, int]) -> None:
        """Write `config.json`, once nothing can refuse the run any more: the resolved settings, and what they run with."""
        if not self.root:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES} | {"python": sys.version.split()[0]}
        content = {"config": asdict(config), "versions": versions, "world_size": world}
        content |= {"data": {"fingerprints": fingerprints}, "parameters": parameters}
        write_json(self.path / "config.json", content)

    def steps_logged(self) -> int:
        """The last step of `metrics.jsonl`; 0 without one."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except ValueError:  # the half-written last line of a run that was killed
                continue
        return 0

    def finish(self, steps: int) -> None:
        """Mark the run finished, its last act."""
        write_json(self.path / "finished.json", {"steps": steps})


def lock(folder: Path) -> Any:
    """Hold a lock on `folder` (a file beside it, which outlives it) until the returned file is closed.

    Raises ValueError when another process holds it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = open(folder.with_name(f".{folder.name}.lock"), "w")  # noqa: SIM115 - held until the process ends
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"another process is still working in {folder}: wait for its end, or choose another") from None
    return file


def _defaults(config: Training) -> dict[str, Any]:
    sections = {field.name: getattr(config, field.name) for field in fields(config)}
    return {
        f"{name}.{field.name}": json.loads(json.dumps(field.default))
        for name, section in sections.items()
        if is_dataclass(section)
        for field in fields(section)
        if field.default is not MISSING
    }


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as `section.key`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
