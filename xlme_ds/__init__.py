"""Pre-train, evaluate and use multilingual encoders such as XLM-E. Guides: docs/index.md.

import xlme_ds as xlme

train, heldout = "runs/first/data/train", "runs/first/data/heldout"  # `xlme quickstart --out runs/first` writes them
xlme.pretrain(xlme.recipe("quickstart"), data=train, out="runs/mine", heldout=heldout)
model = xlme.load("runs/mine")
model.judge("Everyone has the right to life, liberty and Recht of person.")
scores = xlme.evaluate.pairs("runs/mine", heldout)
xlme.export.run("runs/mine", "exports/mine")

The command `xlme prep mix` writes such folders of your own text.

`evaluate`, `export`, `plan`, `finetune`, `recipes` and `translate` are modules: `xlme.plan.run(...)`,
`xlme.finetune.run(...)`, `xlme.translate.lines(...)`. `load` returns a `TextModel`, `recipe` a `RunConfig`.
"""

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from . import evaluate, export, finetune, plan, recipes, translate
    from .api import ScoredPiece, TextModel
    from .config import RunConfig

__version__ = "0.1.0"
_CLASSES = {"RunConfig": "config", "ScoredPiece": "api", "TextModel": "api"}  # class -> the module that defines it
__all__ = [
    "RunConfig", "ScoredPiece", "TextModel", "evaluate", "export", "finetune", "load", "plan", "pretrain", "recipe",
    "recipes", "translate",
]  # fmt: skip


def recipe(name: "Path | str | RunConfig", /, **settings: Any) -> "RunConfig":
    """The settings of a recipe, changed by `settings`. `xlme.recipes.SUMMARIES` lists the recipes.

    config = xlme.recipe("quickstart", seed=2, train={"steps": 500})
    print(config)  # every setting with its meaning; the sections are model, objective, data, optimizer, ...

    `name` may also be the path of a file that `--config` takes, such as "runs/mine/config.json", or a configuration.

    Raises ValueError for a value of the wrong type or out of range, for settings that do not fit each other, and for an
    unknown name or setting, with the nearest known name.
    """
    from . import recipes
    from .cli import config_from_file
    from .config import RunConfig
    from .settings_file import with_values

    if isinstance(name, RunConfig):
        config = name
    elif isinstance(name, os.PathLike) or (isinstance(name, str) and not {".", os.sep}.isdisjoint(name)):
        config = config_from_file(Path(name))
    else:
        config = recipes.recipe(name)
        if not settings:  # a published recipe is valid
            return config
    from .validate import validate  # it loads torch

    return validate(with_values(config, settings, "xlme.recipe"))


def pretrain(
    config: "RunConfig", data: Path | str | Sequence[Path | str], out: Path | str, heldout: Path | str | None = None
) -> Path | None:
    """Train `config` on the folder `data`, which `xlme prep mix` wrote, and return the run folder `out`.

    If the run has phases (`data.phase_steps`), `data` is a list with one folder for each phase. `heldout` is a folder
    of the same kind, whose text is not trained on.

    The call does in this process what the command `xlme pretrain` does. To use several GPUs, start your script with
    `deepspeed` or `torchrun`: every process makes this call. A second call resumes the run. On a signal to stop (Ctrl-C
    or SIGTERM), the call saves a checkpoint and returns None; outside the main thread it does not handle signals.
    Raises ValueError for a mistake in the settings or the data.
    """
    from . import api
    from .engine.ranks import SharedError

    try:
        return api.pretrain(config, data, out, heldout)
    except SharedError as error:
        raise ValueError(str(error)) from None


def load(folder: Path | str, device: "str | torch.device | None" = None) -> "TextModel":
    """The model of a run folder or of an export's folder, on a `device` of torch; by default on a GPU if there is one.

    model = xlme.load("runs/mine")
    model.encode(["Hello.", "Hallo."])  # vectors of sentences, float32 [2, width]
    model.fill("Everyone has the <mask> to education.")
    model.judge("Everyone has the right to life, liberty and Recht of person.")

    An unfinished run gives its newest checkpoint; RUN@STEP names another checkpoint. Raises ValueError if the folder
    has no model.
    """
    from .api import TextModel

    return TextModel(folder, device)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a module, such as `xlme.evaluate`, or a class when it is first used."""
    if name not in __all__:
        from .io.errors import no_such

        if name in import_module(".__main__", __name__).COMMANDS:
            raise AttributeError(f"xlme.{name} is only a command: run `xlme {name} --help` in a shell")
        raise AttributeError(str(no_such("name", name, __all__, "xlme.")))
    if name in _CLASSES:
        return getattr(import_module(f".{_CLASSES[name]}", __name__), name)
    return import_module(f".{name}", __name__)
