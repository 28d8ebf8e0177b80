"""`python -m data_prep STAGE --flags`: the stages of data preparation."""

import contextlib
import importlib
import sys

# Stage -> module and name of its config, in the order of use; imported when asked for, so a worker process is light.
STAGES = {
    "sample": ("data_prep.sample", "SampleConfig"),
    "vocab": ("data_prep.vocab", "VocabConfig"),
    "vocap": ("data_prep.vocap.stage", "VocapConfig"),
    "encode": ("data_prep.encode", "EncodeConfig"),
    "mix": ("data_prep.mix", "MixConfig"),
    "verify": ("data_prep.verify", "VerifyConfig"),
    "stats": ("data_prep.stats", "StatsConfig"),
    "show": ("data_prep.show", "ShowConfig"),
}


def main(arguments: list[str]) -> int:
    """Run one stage. A user's mistake is one line on stderr and exit code 1; ours keeps its traceback."""
    if not arguments or arguments[0] not in STAGES:
        return _usage(arguments)
    import tyro

    from data_prep import executor

    name, (module, config_name) = arguments[0], STAGES[arguments[0]]
    stage = importlib.import_module(module)
    config = tyro.cli(getattr(stage, config_name), args=arguments[1:], prog=f"python -m data_prep {name}")
    try:
        stage.run(config)
    except (executor.SharedError, executor.TaskError) as error:  # every rank has it
        if executor.is_root():
            user = isinstance(error, executor.SharedError)
            print(f"data_prep {name}: error: {error}" if user else error, file=sys.stderr, flush=True)
        return 1
    except (Exception, KeyboardInterrupt) as error:
        return _alone(name, error)
    return 0


def _alone(name: str, error: BaseException) -> int:
    """An error that the other ranks may not have: tell it, then end them, for they might wait for this one."""
    from data_prep import executor

    if isinstance(error, KeyboardInterrupt):
        print(f"data_prep {name}: interrupted: the same command goes on where this one stopped", file=sys.stderr)
    elif type(error) is not ValueError:
        sys.excepthook(type(error), error, error.__traceback__)
    else:
        print(f"data_prep {name}: error: {error}", file=sys.stderr, flush=True)
    sys.stderr.flush()
    with contextlib.suppress(ValueError):  # the launcher's mistake, which is the error itself
        executor.abort()
    return 1


def _usage(arguments: list[str]) -> int:
    asked = bool(arguments) and arguments[0] in ("-h", "--help")
    stages = "\n".join(f"  {name}" for name in STAGES)
    text = f"usage: python -m data_prep STAGE --flags (STAGE --help lists them)\nstages, in the order of use:\n{stages}"
    if arguments and not asked:
        text = f"data_prep: error: there is no stage {arguments[0]!r}\n{text}"
    print(text, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
