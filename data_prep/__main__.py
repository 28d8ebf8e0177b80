"""`python -m data_prep STAGE --flags`: the stages of data preparation."""

import importlib
import sys
import time

# Stage -> module and name of its config, in the order of use; imported when asked for, so a worker process is light.
STAGES = {
    "sample": ("data_prep.sample", "SampleConfig"),
    "vocab": ("data_prep.vocab", "VocabConfig"),
    "vocap": ("data_prep.vocap", "VocapConfig"),
    "encode": ("data_prep.encode", "EncodeConfig"),
    "mix": ("data_prep.mix", "MixConfig"),
    "verify": ("data_prep.verify", "VerifyConfig"),
    "stats": ("data_prep.stats", "StatsConfig"),
    "show": ("data_prep.show", "ShowConfig"),
}


def main(arguments: list[str]) -> int:
    """Run one stage; the exit code is 2 where a user has to do something first, 1 where another try may help.

    What a user can mend is one line on stderr; our mistakes keep their traceback.
    """
    if not arguments or arguments[0] not in STAGES:
        return _usage(arguments)
    import tyro

    from data_prep import executor

    name, (module, config_name) = arguments[0], STAGES[arguments[0]]
    stage = importlib.import_module(module)
    config = tyro.cli(getattr(stage, config_name), args=arguments[1:], prog=f"python -m data_prep {name}")
    try:
        executor.on_root(lambda: _check_names(arguments))
        stage.run(config)
    except (Exception, KeyboardInterrupt) as error:
        return _failed(name, error)
    return 0


def _check_names(arguments: list[str]) -> None:
    """Names that are not UTF-8 reach Python with lone surrogates, which neither Arrow nor JSON can hold."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{argument} is not a name in UTF-8: rename it") from None


def _failed(name: str, error: BaseException) -> int:
    """Tell an error once, and end the ranks that do not have it, for they might wait for this one."""
    from data_prep import executor, ranks
    from data_prep.outcomes import in_words
    from data_prep.progress import shown

    told = in_words(error)
    code = 2 if isinstance(told, executor.SharedError) else 1
    everywhere = isinstance(error, executor.SharedError | executor.SharedFault | executor.TaskError)
    words = None if told is None else shown(str(told))
    try:
        executor.world_size()
    except ValueError:  # MPI does not join what the launcher started, which is the error that each process has
        if ranks.launched_rank() == 0:
            _tell(name, error, words)
        else:
            time.sleep(1)  # a launcher that sees one process fail ends the others, and with them the sentence
        return code
    if not everywhere or executor.is_root():
        _tell(name, error, words)
    if not everywhere:
        executor.abort(code)
    return code


def _tell(name: str, error: BaseException, words: str | None) -> None:
    from data_prep import executor
    from data_prep.progress import shown

    if words is not None:
        print(f"data_prep {name}: error: {words}", file=sys.stderr)
    elif isinstance(error, executor.TaskError):
        print("\n".join(map(shown, str(error).split("\n"))), file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print(f"data_prep {name}: interrupted: the same command goes on where this one stopped", file=sys.stderr)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.flush()


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
