"""Writes docs/results/quickstart.json, docs/judge.svg and docs/report.png from a finished quickstart, and its figures
into the pages: `python docs/record_quickstart.py runs/quickstart` (needs chromium). tests/test_quickstart_record.py
compares them."""

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

import xlme_ds
from xlme_ds import predict, quickstart
from xlme_ds.data.schema import read_manifest
from xlme_ds.objectives import describe
from xlme_ds.report.run_files import read_records
from xlme_ds.train.console import Console

DOCS = Path(__file__).resolve().parent
RECORD, PICTURE, JUDGED = DOCS / "results" / "quickstart.json", DOCS / "report.png", DOCS / "judge.svg"
PAGES = [DOCS.parent / "README.md", *(DOCS / name for name in ("index.md", "tutorial.md", "howto/gpus.md"))]
KEY = "quickstart"  # of the record's last evaluation among the texts of the picture
_STEP = re.compile(r"^step (?P<step>\d+)/\d+  (?P<kind>loss|held-out text|dimensions).*$", re.M)
_MODEL = re.compile(r"^(?P<kind>judge|fill): .*$", re.M)
_AUC = re.compile(r"(?P<words>an AUC of )[\d.]+(?P<between> on held-out text and )[\d.]+(?= on pairs)")
_PIECES = re.compile(r"(?<=:\.2f}.\)  # … ).*$", re.M)
_FILLING = re.compile(r"(?<=:\.2f}.\)  # )▁.*$", re.M)
_FILLED = re.compile(r"ScoredPiece\(text='.*?', probability=[\d.]+…\)")
_FLAGGED = re.compile(r"replaced \d+ of [\d,]+ tokens, and of the \d+ .*?, \d+ are replacements \(chance: \d+\)")


def encoded_tokens(data: Path) -> dict[str, int]:
    """The number of tokens in each encoded part of the quickstart's data."""
    parts = [f"{split}/{task}" for split in ("train", "heldout") for task in ("mono", "para")]
    counts = {part: read_manifest(data / "encoded" / part).counts["by_language"] for part in parts}
    return {part: sum(language["tokens"] for language in by_language.values()) for part, by_language in counts.items()}


def flagged(samples: list[dict[str, Any]]) -> dict[str, int]:
    """Of the tokens in the report's sentences that the discriminator judged, without `<s>` and `</s>`: how many there
    are, how many the generator replaced, and how many of as many tokens with the highest probabilities are replaced."""
    tokens = (token for sample in samples for token in sample["tokens"])
    judged = [token for token in tokens if token["score"] is not None and token["original"] not in ("<s>", "</s>")]
    replaced = sum(token["replaced"] for token in judged)
    highest = sorted(judged, key=lambda token: -token["score"])[:replaced]
    return {"tokens": len(judged), "replaced": replaced, "hits": sum(token["replaced"] for token in highest)}


def record(run: Path) -> dict[str, Any]:
    """The figures of a finished quickstart that documents print."""
    model, said = xlme_ds.load(run), io.StringIO()
    with contextlib.redirect_stdout(said):
        predict.run(predict.PredictSettings(run, (quickstart.JUDGED_SENTENCE, quickstart.MASKED_SENTENCE)))
    return {
        "settings": json.loads((run / "config.json").read_text())["config"],
        "encoded_tokens": encoded_tokens(run / "data"),
        **{
            name: [values for values in read_records(run / f"{name}.jsonl") if values["step"] % 100 == 0]
            for name in ("metrics", "heldout", "dimensions")
        },
        "judged": [[piece.text, round(piece.probability, 4)] for piece in model.judge(quickstart.JUDGED_SENTENCE)],
        "filled": [[piece.text, round(piece.probability, 4)] for piece in model.fill(quickstart.MASKED_SENTENCE)[0]],
        "flagged": flagged(json.loads((run / "samples.json").read_text(encoding="utf-8"))["samples"]),
        "said": said.getvalue().splitlines(),
    }


def printed(figures: dict[str, Any]) -> Iterator[tuple[int, str, str]]:
    """(step, kind, line) of the lines that the run printed, as this version prints them."""
    console = Console(quickstart.RUN.train.steps, 0, describe(quickstart.RUN.objective))
    shows = {
        "loss": ("metrics", console.step),
        "held-out text": ("heldout", console.evaluation),
        "dimensions": ("dimensions", lambda values: console.dimensions(values, "")),
    }
    for kind, (name, show) in shows.items():
        for values in figures[name]:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                show(values)
            yield values["step"], kind, said.getvalue().rstrip("\n")


def with_figures(markdown: str, figures: dict[str, Any]) -> str:
    """A page with all figures of the quickstart replaced by those of the record."""
    said = {(step, kind): line for step, kind, line in printed(figures)}
    last, (best, *_), counts = figures["heldout"][-1], figures["filled"], figures["flagged"]
    tokens, replaced, hits = counts["tokens"], counts["replaced"], counts["hits"]
    words = (
        f"replaced {replaced} of {tokens:,} tokens, and of the {replaced} that the model ranks highest, "
        f"{hits} are replacements (chance: {replaced * replaced / tokens:.0f})"
    )
    pieces, fillings = (
        "  ".join(f"{piece} {probability:.2f}" for piece, probability in scored)
        for scored in (figures["judged"][-5:], figures["filled"])
    )
    mono, para = f"{last['auc_mono']:.2f}", f"{last['auc_para']:.2f}"
    model = {line.partition(":")[0]: line for line in figures["said"]}
    markdown = _STEP.sub(lambda line: said[int(line["step"]), line["kind"]], markdown)
    markdown = _MODEL.sub(lambda line: model[line["kind"]], markdown)
    markdown = _AUC.sub(lambda text: f"{text['words']}{mono}{text['between']}{para}", markdown)
    markdown = _FLAGGED.sub(words, _FILLING.sub(fillings, _PIECES.sub(pieces, markdown)))
    return _FILLED.sub(f"ScoredPiece(text={best[0]!r}, probability={best[1]:.2f}…)", markdown)


def judged(figures: dict[str, Any]) -> str:
    """The judged sentence as a picture: each piece on red, the stronger the likelier it is a replacement. Below a word
    is the highest probability of its pieces, in percent, from 10% on. The pieces of a word touch."""
    title = figures["said"][0].removeprefix("judge: ")
    parts, x, words = [f"<title>{title}</title>", '<rect width="100%" height="100%" fill="white"/>'], 2.0, []
    for piece, probability in figures["judged"]:
        text = piece.removeprefix("▁")
        if piece.startswith("▁"):
            x += 9.0
            words.append((x, x, 0.0))  # start, end and highest probability
        width = 9.0 * len(text)
        color = "white" if probability > 0.6 else "black"
        parts += [
            f'<rect x="{x}" y="8" width="{width}" height="24" fill="#d62728" fill-opacity="{probability:.2f}"/>',
            f'<text x="{x}" y="26" fill="{color}" textLength="{width}">{text}</text>',
        ]
        x += width
        words[-1] = words[-1][0], x, max(words[-1][2], probability)
    for start, end, highest in words:
        if highest >= 0.1:
            middle = f'x="{(start + end) / 2}" text-anchor="middle"'
            parts.append(f'<text {middle} y="46" font-size="11">{100 * highest:.0f}%</text>')
    size = f'width="{x + 11}" height="54"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="15">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def picture(page: Path, text: str) -> None:
    """Photograph the head of a report page, in 128 colours, with `text` inside the file."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,1022", f"--screenshot={shot}"]
        subprocess.run(["chromium", *flags, str(page)], check=True, stderr=subprocess.DEVNULL)
        image = Image.open(io.BytesIO(shot.read_bytes())).convert("RGB").quantize(128)
    texts = PngInfo()
    texts.add_text(KEY, text)
    image.save(PICTURE, pnginfo=texts, optimize=True)


def main(run: Path) -> None:
    """Write the record, the picture and the figures in the pages."""
    figures = record(run)
    picture(run / "report.html", json.dumps(figures["heldout"][-1]))
    JUDGED.write_text(judged(figures), encoding="utf-8")
    entries = (f" {json.dumps(name)}: {_text(value)}" for name, value in figures.items())
    RECORD.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")
    for page in PAGES:
        page.write_text(with_figures(page.read_text(encoding="utf-8"), figures), encoding="utf-8")


def _text(value: Any) -> str:
    """JSON with a line for each item of a list."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n  " + ",\n  ".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n ]"


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
