"""Reading a run folder: every file may be absent; a damaged one is an error that names the file and the line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunFolder:
    """What a run left behind. JSON files are None and line files empty where the run did not write them."""

    name: str
    config: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    heldout: list[dict[str, Any]]
    retrieval: dict[str, Any] | None
    samples: list[dict[str, Any]] | None
    languages: dict[str, Any] | None


def read_run(run: Path) -> RunFolder:
    """Read the run folder `run`; ValueError when it is no folder or a file in it is damaged."""
    if not run.is_dir():
        raise ValueError(f"{run} is not a folder: name the --out folder of a pre-training run")
    return RunFolder(
        name=run.resolve().name,
        config=read_json(run / "config.json", dict),
        metrics=read_steps(run / "metrics.jsonl"),
        heldout=read_steps(run / "heldout.jsonl"),
        retrieval=read_json(run / "retrieval.json", dict),
        samples=read_json(run / "samples.json", list),
        languages=read_json(run / "languages.json", dict),
    )


def read_json(path: Path, kind: type) -> Any:
    """The value of a JSON file that holds a `kind`, or None when there is no such file."""
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} line {error.lineno} is not JSON ({error.msg}): restore or remove the file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8: restore the file or remove it") from None
    if not isinstance(value, kind):
        found = type(value).__name__
        raise ValueError(f"{path} holds a JSON {found}, not a {kind.__name__}: restore the file or remove it")
    return value


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The records of a line file in step order; of a step that was logged twice (a resumed run) the later one."""
    if not path.exists():
        return []
    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not JSON ({error}): restore or remove that line") from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError(f"{path} line {number} has no whole number `step`: restore or remove that line")
        records[record["step"]] = record
    return [records[step] for step in sorted(records)]
