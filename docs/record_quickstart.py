"""Writes docs/results/quickstart.json and docs/report.png from a finished quickstart: `python docs/record_quickstart.py
runs/quickstart`. The documents print figures of this record (tests/test_quickstart_record.py); needs chromium."""

import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

import xlme_ds
from xlme_ds.data.schema import read_manifest
from xlme_ds.quickstart import FILLED, JUDGED

DOCS = Path(__file__).resolve().parent
RECORD, PICTURE = DOCS / "results" / "quickstart.json", DOCS / "report.png"
KEY = "quickstart"  # of the record's last evaluation among the texts of the picture


def encoded_tokens(data: Path) -> dict[str, int]:
    """The number of tokens in each encoded part of the quickstart's data."""
    parts = [f"{split}/{task}" for split in ("train", "heldout") for task in ("mono", "para")]
    counts = {part: read_manifest(data / "encoded" / part).counts["by_language"] for part in parts}
    return {part: sum(language["tokens"] for language in by_language.values()) for part, by_language in counts.items()}


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file, of every hundredth step."""
    records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [record for record in records if record["step"] % 100 == 0]


def record(run: Path) -> dict[str, Any]:
    """The figures of a finished quickstart that documents print."""
    model = xlme_ds.load(run)
    return {
        "settings": json.loads((run / "config.json").read_text())["config"],
        "encoded_tokens": encoded_tokens(run / "data"),
        **{name: lines(run / f"{name}.jsonl") for name in ("metrics", "heldout", "dimensions")},
        "judged": [[piece.text, round(piece.probability, 4)] for piece in model.judge(JUDGED)],
        "filled": [[piece.text, round(piece.probability, 4)] for piece in model.fill(FILLED)[0]],
    }


def picture(page: Path, text: str) -> None:
    """Photograph the head of a report page, in 128 colours, with `text` inside the file."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,1390", f"--screenshot={shot}"]
        subprocess.run(["chromium", *flags, str(page)], check=True, stderr=subprocess.DEVNULL)
        image = Image.open(io.BytesIO(shot.read_bytes())).convert("RGB").quantize(128)
    texts = PngInfo()
    texts.add_text(KEY, text)
    image.save(PICTURE, pnginfo=texts, optimize=True)


def main(run: Path) -> None:
    """Write both files."""
    figures = record(run)
    picture(run / "report.html", json.dumps(figures["heldout"][-1]))
    entries = (f" {json.dumps(name)}: {_text(value)}" for name, value in figures.items())
    RECORD.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


def _text(value: Any) -> str:
    """JSON with a line for each item of a list."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n  " + ",\n  ".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n ]"


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
