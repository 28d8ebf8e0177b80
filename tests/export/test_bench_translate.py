"""bench/translate.py: both searches run, and find the same translations."""

import json
from pathlib import Path

import pytest

from bench.translate import main
from tests.evaluate.folders import sentence, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("bench") / "run", objective="mt", language_embeddings=("de", "en"))


@pytest.mark.parametrize("text", [True, False])
def test_a_quick_run_has_its_figures(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bool) -> None:
    (tmp_path / "test.de").write_text("".join(f"{sentence(number)}\n\n" for number in range(5)))
    flags = f"--model {run} --sentences 6 --rows 2 --repeats 1 --json" + f" --source {tmp_path}/test.de" * text
    main(flags.split())
    greedy, beams = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert (greedy["beam"], beams["beam"]) == (1, 4)
    for found in (greedy, beams):
        assert found["alike"] > 0.6  # in float32 two tokens may be as likely
        ratio = found["xlme_tokens_per_s"] / found["hf_tokens_per_s"]
        assert found["ratio"] == pytest.approx(ratio)


def test_a_run_without_a_decoder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"was trained for mlm and has no decoder: name a run of objective\.name mt"):
        main(["--model", str(write_run(tmp_path / "run", objective="mlm"))])
