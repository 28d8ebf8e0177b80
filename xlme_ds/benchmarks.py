"""`xlme bench NAME --flags`: the benchmarks in a clone of the repository; an installed package has none."""

import ast
import os
import re
import sys
from pathlib import Path

from .cli import fail
from .io.arguments import HELP_FLAGS
from .io.errors import no_such
from .run_commands import child_environment

_FOLDER = Path(__file__).parents[1] / "bench"


def benchmarks(folder: Path = _FOLDER) -> dict[str, str]:
    """A dict from the NAME of each benchmark (`python -m bench.NAME`) to its description, which is the beginning of the
    module's docstring, up to the first colon or full stop. Raises ValueError if the folder has no benchmarks."""
    if not (folder / "step.py").is_file():
        raise ValueError(
            f"{folder} has no benchmarks, as an installed package has none: run this in a clone of the repository"
        )
    descriptions = {}
    for path in sorted(path for glob in ("*.py", "*/__main__.py", "peers/*.py") for path in folder.glob(glob)):
        source = path.read_text(encoding="utf-8")
        if "\nif __name__ ==" in source:  # a program, not a module that only programs import
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__main__")
            docstring = " ".join((ast.get_docstring(ast.parse(source)) or "").split())
            descriptions[name] = re.split("[:.] ", docstring, maxsplit=1)[0]
    return descriptions


def main(arguments: list[str] | None = None) -> None:
    """Replace this process by a benchmark, or list the benchmarks. A user's mistake ends the command with one sentence
    and exit code 2."""
    argv = sys.argv[1:] if arguments is None else arguments
    try:
        descriptions = benchmarks()
        if not argv or argv[0] in HELP_FLAGS:
            width = max(map(len, descriptions)) + 2
            lines = [f"  {name:<{width}}{description}" for name, description in descriptions.items()]
            usage = "usage: xlme bench NAME --flags    (xlme bench NAME --help lists the flags)\n"
            print("\n".join([usage, *lines]))
            return
        name, *rest = argv
        if name not in descriptions:
            raise no_such("benchmark", name, descriptions)
    except ValueError as error:
        fail("xlme bench", error)
    os.execve(sys.executable, [sys.executable, "-m", f"bench.{name}", *rest], child_environment())


if __name__ == "__main__":
    main()
