"""Read the files of a run folder that a report shows, and fill in the templates of this package."""

import json
from pathlib import Path
from typing import Any

import jinja2

from ..checkpoint_names import require_run_folder
from ..io.files import read_optional, real_path, require_writable_file
from ..train.run_folder import refuse_export


class RunFiles:
    """The content of the files in the run folder `run`. For a file that the run did not write, the content is an empty
    dict (JSON) or an empty list (JSON Lines). Raises ValueError if `run` is not a folder or a file in it is damaged."""

    def __init__(self, run: Path):
        require_run_folder(run, "name the --out folder of a pre-training run")
        self.name = real_path(run).name
        self.finished = (run / "finished.json").exists()
        self.config_json = read_optional(run / "config.json")
        self.settings = self.config_json.get("config", {})
        self.metrics = read_records(run / "metrics.jsonl")
        self.heldout = read_records(run / "heldout.jsonl")
        self.dimensions = read_records(run / "dimensions.jsonl")
        self.heldout_languages = read_records(run / "heldout_languages.jsonl")
        self.retrieval = read_optional(run / "retrieval.json")
        self.samples = read_optional(run / "samples.json").get("samples", [])
        self.languages = read_optional(run / "languages.json")
        self.scores = read_optional(run / "scores.json")

    @property
    def objective(self) -> dict[str, Any]:
        """The description of the run's objective (see `objectives.describe`). A fine-tuning run has no objective."""
        return {"description": None, "quantities": {}} | dict(self.config_json.get("objective", {}))


def require_run(folder: Path) -> None:
    """Raise ValueError unless `folder` is a run folder. Every run writes config.json when it starts. An export has a
    config.json too, but no records to draw, so it is refused with the same advice."""
    advice = "name the --out folder of a run"
    require_run_folder(folder, advice)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json: {advice}")
    refuse_export(folder, advice)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON Lines file in step order. If a resumed run logged a step again, the later record counts.

    Blank lines are skipped. A last line without a line feed is left out: the run is still writing it, or was killed
    while it wrote it. Without a file there are no records.
    """
    records: dict[int, dict[str, Any]] = {}
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for line_number, line in enumerate(lines[:-1], start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} line {line_number} is not JSON ({error}): restore or remove that line") from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError(f"{path} line {line_number} has no whole number `step`: restore or remove that line")
        records[record["step"]] = record
    return [records[step] for step in sorted(records)]


def render(template: str, **values: Any) -> str:
    """The text of a template in this folder with `values` filled in; in an HTML page the values are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def require_page(out: Path) -> None:
    """Raise ValueError if `out` cannot be written, or is a file other than a page, such as a run's settings."""
    require_writable_file(out, "--out")
    if out.is_file() and out.read_bytes().lstrip()[:14].lower() not in (b"", b"<!doctype html"):
        raise ValueError(f"--out {out} is a file but no page: name another")
