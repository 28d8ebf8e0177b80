"""`xlme slurm --out DIR` copies the package's job scripts to DIR/slurm, where a user adapts them to a cluster."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from .cli import fail, program
from .io.help import call_from_command_line

# A wheel has the scripts in the package, a clone next to the package.
_FOLDERS = (Path(__file__).parent / "slurm", Path(__file__).parents[1] / "slurm")


@dataclass(frozen=True)
class SlurmSettings:
    """Write job scripts for Slurm to the folder slurm/: data preparation, pre-training, fine-tuning. Set what differs
    between sites in slurm/env.sh, then submit them, for example `XLME_DATA=mixed XLME_OUT=runs/base sbatch
    slurm/pretrain_base.sh`."""

    out: Path = Path(".")
    """Folder in which slurm/ is made, and from which jobs are submitted."""


def main(arguments: list[str] | None = None) -> None:
    """Copy the scripts and print their names; a user's mistake ends in one line on stderr and exit code 2."""
    folder = call_from_command_line(SlurmSettings, program("slurm"), arguments).out / "slurm"
    source = next(candidate for candidate in _FOLDERS if candidate.is_dir())
    try:
        if folder.exists():
            raise ValueError(f"{folder} exists already: remove it, or choose another --out")
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    except (ValueError, OSError) as error:
        fail("xlme slurm", error)
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


if __name__ == "__main__":
    main()
