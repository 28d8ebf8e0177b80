"""docs/tutorial.md, command by command, with two training steps in place of 500 and 300."""

import re
import subprocess
import sys
from pathlib import Path

from tests.launch import ROOT, environment


def test_every_command_of_the_tutorial(tmp_path: Path) -> None:
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python)?\n(.*?)^```", text, re.M | re.S)
    said = ""
    (tmp_path / "docs/howto").mkdir(parents=True)
    program = (ROOT / "docs/howto/sentence_vectors.py").read_text(encoding="utf-8")
    assert "max_steps=300" in program
    (tmp_path / "docs/howto/sentence_vectors.py").write_text(program.replace("max_steps=300", "max_steps=2"))
    for python, block in blocks:
        if not python and not block.startswith(("python ", "for ", "xlme ")):
            continue  # what a command prints, or a listing
        script = re.sub(r"^( *)xlme ", r"\1python -m xlme_ds ", block, flags=re.M).replace(
            "steps 500", "steps 2 --optimizer.warmup-steps 1"
        )
        command = [sys.executable, "-c", block] if python else ["bash", "-euc", script]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), text=True, capture_output=True)
        assert done.returncode == 0, f"{script}\n{done.stderr[-3000:]}"
        said += done.stdout
    assert "no fault" in said and "tutorial/export" in said
    assert len(re.findall(r"^\S+ [01]\.\d+$", said, re.M)) > 10, "a line for each token judged, and for each filling"
    assert (tmp_path / "tutorial/retrieval/pairs.json").read_text().count("tutorial/vectors") >= 1, "it has scores"
    assert (tmp_path / "tutorial/run/report.html").exists()
