"""Does a pre-trained start help translation? One pair of languages, the same training from every start.

`python -m bench.translation --corpus CORPUS --out OUT` prepares the text, pre-trains XLM on it (MLM and TLM in turns),
trains to translate from random weights, with the pre-trained ones in the encoder, and in both networks, and writes BLEU
and chrF by steps to OUT/curve.json and OUT/curve.svg. Test sentences are in no training text, on either side. With
`--unsupervised` there are no pairs, in pre-training neither: each language has text of its own, of which the other has
no translation. What is done is not done again: the same command goes on.
"""

import json
import lzma
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import tyro
from matplotlib.figure import Figure

from data_prep.__main__ import main as data_prep
from xlme_ds.__main__ import main as xlme
from xlme_ds.evaluate.output import save_figure
from xlme_ds.io.files import write_json
from xlme_ds.translate.text import scores

ROWS = 16  # of a step, 128 tokens each
NAMES = {"random": "random", "encoder": "encoder pre-trained", "both": "encoder and decoder pre-trained"}
Score = dict[str, Any]  # a start, a step, and BLEU and chrF by direction


@dataclass(frozen=True)
class Settings:
    """One pair of languages."""

    corpus: Path
    """Folder with mono/<lang>.txt.xz and para/en-<lang>.txt.zip."""
    out: Path
    """Folder to write."""
    languages: tuple[str, str] = ("en", "de")
    """English and another; without pairs any two, whose test sentences share their English."""
    unsupervised: bool = False
    """Denoising and back-translation of text that has no translations, instead of pairs."""
    words: int = 16
    """Pairs with more words on a side are left out."""
    test: int = 600
    """Pairs of the test set."""
    vocabulary: int = 4096
    """Ids."""
    width: int = 128
    """Of the model; heads have 32 numbers."""
    layers: int = 3
    """Of encoder and decoder each."""
    pretrain_steps: int = 3000
    """Of XLM, on 2,048 tokens each."""
    steps: int = 4000
    """Of translation, on 2,048 tokens each."""
    every: int = 500
    """Steps from one score to the next."""
    relative_bias: Literal["none", "gated"] = "none"
    """Of all networks. MLM alone leaves its plateau sooner with the gated one."""
    denoising: tuple[str, ...] = ()
    """Weights by step without pairs, as `objective.denoising` has them; empty: XLM's, in proportion to the steps."""
    back_translation: tuple[str, ...] = ("0:1",)
    """The same, as `objective.back-translation`."""
    starts: tuple[Literal["random", "both", "encoder"], ...] = ("random", "both", "encoder")
    """What takes the pre-trained weights: nothing, encoder and decoder, the encoder alone."""


def main(arguments: list[str] | None = None) -> None:
    """Prepare, train and print the table."""
    cfg = tyro.cli(Settings, args=arguments)
    prepare(cfg)
    shape = ["--model.vocabulary", cfg.vocabulary, "--model.width", cfg.width, "--model.heads", cfg.width // 32,
             "--model.feed-forward", 4 * cfg.width, "--model.discriminator-layers", cfg.layers,
             "--engine.kind", "plain", "--model.max-positions", 128,
             "--model.language-embeddings", *sorted(cfg.languages), "--model.init-std", 0.05,
             "--model.relative-bias", cfg.relative_bias,
             "--train.eval-every", 0, "--train.keep-every", cfg.every, "--train.save-every", cfg.every]  # fmt: skip
    xlm = cfg.out / "xlm"
    tasks = ["--data.para-rows", ROWS]
    if cfg.unsupervised:
        tasks = ["--data.para-rows", 0, "--data.no-alternate", "--model.attention-dropout", 0]
    pretrain("--recipe", "xlm", *shape, "--data", cfg.out / "mixed", "--out", xlm, "--train.steps", cfg.pretrain_steps,
            "--optimizer.warmup-steps", cfg.pretrain_steps // 10, "--data.mono-rows", ROWS, *tasks,
            "--data.micro-batch", ROWS, "--optimizer.learning-rate", 2e-3, "--model.dropout", 0,
            "--train.log-every", 101)  # fmt: skip
    if cfg.unsupervised:
        denoising = cfg.denoising or ("0:1", f"{cfg.steps // 3}:0.1", f"{cfg.steps}:0")
        objective = ["--recipe", "xlm_umt", "--data", cfg.out / "sentences", "--data.mono-rows", ROWS,
                     "--objective.denoising", *denoising, "--objective.back-translation", *cfg.back_translation,
                     "--data.micro-batch", ROWS, "--model.dropout", 0, "--model.attention-dropout", 0]  # fmt: skip
    else:
        objective = ["--recipe", "xlm_mt", "--data", cfg.out / "mixed", "--data.para-rows", ROWS,
                     "--data.micro-batch", ROWS]  # fmt: skip
    found = [copied(cfg)]
    print(json.dumps(found[0]), flush=True)
    for name in cfg.starts:
        from_xlm = [] if name == "random" else ["--start.folder", xlm, "--start.into", name]
        pretrain(*objective, *shape, "--out", cfg.out / name, "--train.steps", cfg.steps,
                 "--optimizer.learning-rate", 1e-3, "--optimizer.warmup-steps", cfg.every, *from_xlm)  # fmt: skip
        found += curve(cfg, name)
        write_json(cfg.out / "curve.json", {"settings": described(cfg), "scores": found})
    plot(cfg, found)


def described(cfg: Settings) -> dict[str, Any]:
    """The settings that shape what is in OUT."""
    return {name: value for name, value in asdict(cfg).items() if name not in ("corpus", "out", "starts")}


def prepare(cfg: Settings) -> None:
    """Text without the test set, vocabulary, and rows. Ends the program where OUT was made with other settings."""
    settings, path = json.loads(json.dumps(described(cfg))), cfg.out / "settings.json"
    if path.exists() and json.loads(path.read_text()) != settings:
        raise SystemExit(f"error: {path} has other settings: name another --out")
    cfg.out.mkdir(parents=True, exist_ok=True)
    write_json(path, settings)
    if not (cfg.out / "text").exists():
        partial = cfg.out / "text.partial"
        for task in ("mono", "para", "sentences"):
            (partial / task).mkdir(parents=True, exist_ok=True)
        (write_halves if cfg.unsupervised else write_pairs)(cfg, partial)
        partial.rename(cfg.out / "text")
    text, out = cfg.out / "text", cfg.out
    vocab, mix = ["--vocab", out / "vocab"], ["--layout", "xlm", "--row-tokens", 128]
    corpus = ["--mono", text / "mono"] if cfg.unsupervised else ["--mono", text / "mono", "--para", text / "para"]
    rows = ["--mono-rows", 32768] if cfg.unsupervised else ["--mono-rows", 32768, "--para-rows", 32768]
    command(data_prep, "vocab", *corpus, "--size", cfg.vocabulary, "--sentences", 50000, "--out", out / "vocab")
    # The text has none of the test's lines; nor, so, those that the model reads alike.
    encode = [*vocab, "--max-pair-tokens", 120]
    encode += [word for code in cfg.languages for word in ("--without", text / f"test.{code}")]
    command(data_prep, "encode", *corpus, *encode, "--out", out / "encoded")
    command(data_prep, "mix", "--encoded", out / "encoded", *vocab, *mix, *rows, "--out", out / "mixed")
    if cfg.unsupervised:
        command(data_prep, "encode", "--mono", text / "sentences", *encode, "--sentences",
                "--out", out / "encoded_sentences")  # fmt: skip
        command(data_prep, "mix", "--encoded", out / "encoded_sentences", *vocab, *mix, "--sentences",
                "--mono-rows", ROWS * cfg.steps, "--out", out / "sentences")  # fmt: skip


def write_pairs(cfg: Settings, folder: Path) -> None:
    """Short pairs, cut into test and training by a hash; training text has no line of the test set."""
    pairs = sorted(((one, two) for one, two in read_pairs(cfg, cfg.languages[1]) if short(cfg, one, two)), key=by_hash)
    held = write_test(cfg, folder, pairs)
    train = [pair for pair in pairs if not held & set(pair)]
    for number, code in enumerate(cfg.languages):
        write_lines(folder / "para" / f"software.{'-'.join(sorted(cfg.languages))}.{code}", (p[number] for p in train))
        write_lines(folder / "mono" / f"{code}.txt", (line for line in read_text(cfg, code) if line not in held))
    print(f"{len(train)} pairs to train on", flush=True)


def write_halves(cfg: Settings, folder: Path) -> None:
    """For each language text whose translations the other has not.

    Of lines whose English is known, what both languages translate is the test set, or goes to one of them by a hash.
    Of documents, which all languages have in one order, the first has the first half, and the second what follows 55%.
    """
    sides = [dict(read_pairs(cfg, code)) for code in cfg.languages]
    common = sorted(sides[0].keys() & sides[1].keys(), key=lambda english: by_hash((english,)))
    pairs = [(sides[0][english], sides[1][english]) for english in common]
    held = write_test(cfg, folder, [pair for pair in pairs if short(cfg, *pair)])
    other_half = [{pair[number] for n, pair in enumerate(pairs) if n % 2 != number} for number in (0, 1)]
    for number, code in enumerate(cfg.languages):
        lines = list(read_text(cfg, code))
        share = lines[: len(lines) // 2] if number == 0 else lines[len(lines) * 55 // 100 :]
        left_out = held | other_half[number]
        share = [line for line in share if line not in left_out]
        known = sorted(set(sides[number].values()) - left_out)
        write_lines(folder / "mono" / f"{code}.txt", [*share, "", *known])
        sentences = sorted({line for line in [*share, *known] if short(cfg, line)})
        write_lines(folder / "sentences" / f"{code}.txt", sentences)
        print(f"{code}: {len(share) + len(known)} lines, {len(sentences)} sentences", flush=True)


def read_pairs(cfg: Settings, code: str) -> list[tuple[str, str]]:
    """Different pairs of English and the language."""
    with zipfile.ZipFile(cfg.corpus / "para" / f"en-{code}.txt.zip") as file:  # a line ends with a line feed alone
        sides = [file.read(f"SoftwareText.en-{code}.{side}").decode().split("\n") for side in ("en", code)]
    return [pair for pair in dict.fromkeys(zip(*sides, strict=True)) if all(pair)]


def read_text(cfg: Settings, code: str) -> list[str]:
    """Paragraphs, and an empty line after every document."""
    with lzma.open(cfg.corpus / "mono" / f"{code}.txt.xz", "rt", encoding="utf-8") as lines:
        return lines.read().split("\n")


def short(cfg: Settings, *sides: str) -> bool:
    """Whether all sides have words, and not too many."""
    return all(0 < len(side.split()) <= cfg.words for side in sides)


def by_hash(pair: Iterable[str]) -> bytes:
    """An order that has nothing to do with the text's."""
    return blake2b(next(iter(pair)).encode()).digest()


def write_test(cfg: Settings, folder: Path, pairs: list[tuple[str, str]]) -> set[str]:
    """The first pairs whose sides differ and have three words or more; returns their lines."""
    test = [pair for pair in pairs if pair[0] != pair[1] and len(pair[0].split()) > 2][: cfg.test]
    for number, code in enumerate(cfg.languages):
        write_lines(folder / f"test.{code}", (pair[number] for pair in test))
    print(f"{len(test)} pairs to test", flush=True)
    return {side for pair in test for side in pair}


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """UTF-8, each ended by a line feed."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def copied(cfg: Settings) -> Score:
    """What a source gets that is taken for its own translation."""
    test = cfg.out / "text"
    found = {f"{source}-{target}": score(cfg, test / f"test.{source}", target) for source, target in both(cfg)}
    return {"start": "copy", "step": 0} | found


def curve(cfg: Settings, name: str) -> list[Score]:
    """BLEU and chrF of the kept checkpoints, in both directions."""
    curve: list[Score] = []
    for step in range(cfg.every, cfg.steps + 1, cfg.every):
        found: Score = {"start": name, "step": step}
        for source, target in both(cfg):
            out = cfg.out / "translated" / f"{name}.{step}.{source}-{target}"
            out.parent.mkdir(exist_ok=True)
            if not out.exists():
                command(xlme, "translate", "--model", f"{cfg.out / name}@{step}", "--beam", 1, "--from", source,
                        "--to", target, "--source", cfg.out / "text" / f"test.{source}", "--out", out)  # fmt: skip
            found[f"{source}-{target}"] = score(cfg, out, target)
        print(json.dumps(found), flush=True)
        curve.append(found)
    return curve


def plot(cfg: Settings, scores: list[Score]) -> None:
    """OUT/curve.svg: BLEU and chrF by steps, a column for each direction, a line for each start."""
    figure = Figure(figsize=(9.6, 6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    for row, measure in enumerate(("BLEU", "chrF")):
        for axes, (source, target) in zip(panels[row], both(cfg), strict=True):
            by_start = {name: [one for one in scores if one["start"] == name] for name in ("copy", *cfg.starts)}
            for name, curve in by_start.items():
                values = [float(one[f"{source}-{target}"][row]) for one in curve]
                if name == "copy":
                    axes.axhline(values[0], color="grey", linestyle=":", label="the source as it is")
                else:
                    axes.plot([one["step"] for one in curve], values, "o-", markersize=3, label=NAMES[name])
            axes.set(title=f"{measure}, {source} to {target}", xlabel="steps")
            axes.tick_params(labelbottom=True)
            axes.grid(axis="y", alpha=0.3)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, cfg.out / "curve")


def both(cfg: Settings) -> list[tuple[str, str]]:
    """The two directions."""
    return [cfg.languages, cfg.languages[::-1]]


def score(cfg: Settings, translated: Path, target: str) -> list[str]:
    """BLEU and chrF of a file of translations."""
    lines, reference = (path.read_text().splitlines() for path in (translated, cfg.out / "text" / f"test.{target}"))
    return [line.split("=")[1].split()[0] for line in scores(lines, reference, target)]


def pretrain(*arguments: object) -> None:
    """Pre-train, in a process of its own, which ends with the run."""
    subprocess.run([sys.executable, "-m", "xlme_ds", "pretrain", *map(str, arguments)], check=True)


def command(program: Callable[[list[str]], int | None], *arguments: object) -> None:
    """Run a command of the project."""
    if program([str(argument) for argument in arguments]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
