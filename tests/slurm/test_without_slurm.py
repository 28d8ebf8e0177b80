"""The scripts in slurm/ where no Slurm started them: a sentence, and nothing is run."""

import os
import subprocess

import pytest

from tests.launch import ROOT

WITHOUT = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "XLME"))}


@pytest.mark.parametrize("script", ["pretrain_base", "pretrain_large", "pretrain_xl", "stage"])
def test_a_job_that_bash_starts(script: str) -> None:
    done = subprocess.run(["bash", f"slurm/{script}.sh"], cwd=ROOT, env=WITHOUT, capture_output=True, text=True)
    assert done.returncode and "SLURM_SUBMIT_DIR: is set by sbatch: submit this script with it" in done.stderr


def test_quotes_that_are_not_closed() -> None:
    words = WITHOUT | {"XLME_TEXT": "--mono l'oral --para para"}
    done = subprocess.run(["bash", "slurm/prep.sh"], cwd=ROOT, env=words, capture_output=True, text=True)
    assert done.returncode == 2 and "close the quotes in: --mono l'oral --para para" in done.stderr
