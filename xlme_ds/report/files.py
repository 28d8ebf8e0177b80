"""A report's input and output: the files of a run folder, and pages made from the templates of this package."""

import json
from pathlib import Path
from typing import Any

import jinja2

from ..config import ObjectiveConfig
from ..io.files import read_json


class RunFiles:
    """The records in the run folder `run`. JSON files are None and line files empty where the run did not write them.

    ValueError where it is no folder or a file in it is damaged.
    """

    def __init__(self, run: Path):
        if not run.is_dir():
            raise ValueError(f"{run} is not a folder: name the --out folder of a pre-training run")
        self.name = run.resolve().name
        self.finished = (run / "finished.json").exists()
        self.config = read_optional(run / "config.json", dict)
        self.metrics = read_steps(run / "metrics.jsonl")
        self.heldout = read_steps(run / "heldout.jsonl")
        self.dimensions = read_steps(run / "dimensions.jsonl")
        self.heldout_languages = read_steps(run / "heldout_languages.jsonl")
        self.retrieval = read_optional(run / "retrieval.json", dict)
        self.samples = read_optional(run / "samples.json", list)
        self.languages = read_optional(run / "languages.json", dict)

    @property
    def objective(self) -> dict[str, Any]:
        """What the run was trained for, in words (see `objectives.described`); of an unknown objective nothing.

        A run of an older version recorded the objective's settings alone.
        """
        config = self.config or {}
        nothing: dict[str, Any] = {"description": None, "quantities": {}}
        if "objective" in config or "task" in config.get("config", {}):
            return nothing | dict(config.get("objective", {}))
        from ..objectives import OBJECTIVES, described  # which loads torch

        name = config.get("config", {}).get("objective", {}).get("name", "electra")
        return described(ObjectiveConfig(name)) if name in OBJECTIVES else nothing


def read_optional(path: Path, kind: type) -> Any:
    """The value of a JSON file that holds a `kind`, or None when there is no such file. Raises ValueError for any other
    content."""
    return read_json(path, kind) if path.exists() else None


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The records of a line file in step order; of a step that was logged twice (a resumed run) the later one.

    A last line without its end is left out: the run writes it, or was killed meanwhile.
    """
    records: dict[int, dict[str, Any]] = {}
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines[:-1], start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} line {number} is not JSON ({error}): restore or remove that line") from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError(f"{path} line {number} has no whole number `step`: restore or remove that line")
        records[record["step"]] = record
    return [records[step] for step in sorted(records)]


def render(template: str, **values: Any) -> str:
    """A template of this package filled in; in a page of HTML the values are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
