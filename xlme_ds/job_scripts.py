"""`xlme slurm --out DIR` copies the package's job scripts to DIR/slurm, where a user adapts them to a cluster."""

import shutil
from pathlib import Path

from .cli import call_command, program

# A wheel has the scripts in the package, a clone next to the package.
_FOLDERS = (Path(__file__).parent / "slurm", Path(__file__).parents[1] / "slurm")


def write_job_scripts(out: Path = Path(".")) -> None:
    """Write job scripts for Slurm to the folder slurm/: data preparation, pre-training, fine-tuning. Set what differs
    between sites in slurm/env.sh, then submit them, for example `XLME_DATA=mixed XLME_OUT=runs/base sbatch
    slurm/pretrain_base.sh`.

    Args:
        out: Folder in which slurm/ is made, and from which jobs are submitted.
    """
    folder = out / "slurm"
    if folder.exists():
        raise ValueError(f"{folder} exists already: remove it, or choose another --out")
    source = next(candidate for candidate in _FOLDERS if candidate.is_dir())
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def main(arguments: list[str] | None = None) -> None:
    """Copy the scripts and print their names; a user's mistake ends in one line on stderr and exit code 2."""
    call_command(write_job_scripts, program("slurm"), arguments)


if __name__ == "__main__":
    main()
