"""docs/tutorial.md, command by command, with 2 steps of training in place of 1,100 and 300, and the output it shows."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.launch import ROOT, environment


def test_every_command_of_the_tutorial(tmp_path: Path) -> None:
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8").partition("## Your own corpus")[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    said = ""
    printed = [line for language, block in blocks if language == "output" for line in block.splitlines()]
    (tmp_path / "docs/howto").mkdir(parents=True)
    program = (ROOT / "docs/howto/sentence_vectors.py").read_text(encoding="utf-8")
    assert "max_steps=300" in program
    (tmp_path / "docs/howto/sentence_vectors.py").write_text(program.replace("max_steps=300", "max_steps=2"))
    for language, block in blocks:
        if language == "output" or not (language or block.startswith(("python ", "for ", "xlme "))):
            continue  # what a command prints, or a listing
        script = re.sub(r"^( *)xlme ", r"\1python -m xlme_ds ", block, flags=re.M)
        script = script.replace("--recipe quickstart", "--recipe quickstart --train.steps 2 --optimizer.warmup-steps 1")
        command = [sys.executable, "-c", block] if language else ["bash", "-euc", script]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), text=True, capture_output=True)
        assert done.returncode == 0, f"{script}\n{done.stderr[-3000:]}"
        said += done.stdout
    assert len(printed) > 3
    assert not [line for line in printed if line.partition("…")[0].rstrip() not in said], said
    assert "tutorial/export" in said
    assert len(re.findall(r"^\S+ [01]\.\d+$", said, re.M)) > 10, "a line for each token judged, and for each filling"
    models = json.loads((tmp_path / "tutorial/retrieval/pairs.json").read_text())["models"]
    assert [(model["folder"], model["layer"]) for model in models][1] == ("tutorial/vectors", 4) and len(models) == 3
    assert (tmp_path / "tutorial/run/report.html").exists()
