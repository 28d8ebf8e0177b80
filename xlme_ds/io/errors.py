"""Writes an error as one sentence, and adds advice to errors of the operating system."""

import errno
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

_OTHER_FOLDER = "choose another output folder"
_GIVE_PERMISSION = "give this user the permission, or choose another place"
_RUN_AGAIN = "give the same command again"
ADVICE = {  # error number -> remedy
    errno.ENOSPC: f"make room there and {_RUN_AGAIN}",
    errno.EDQUOT: f"make room in the quota and {_RUN_AGAIN}",
    errno.EFBIG: f"raise the limit of a file's size (ulimit -f) and {_RUN_AGAIN}",
    errno.EMFILE: "use fewer processes, or raise the limit of open files (ulimit -n)",
    errno.EAGAIN: "use fewer processes, or raise the limit of processes (ulimit -u)",
    errno.ENOMEM: "use fewer processes, or a machine with more memory",
    errno.EACCES: _GIVE_PERMISSION,
    errno.EPERM: _GIVE_PERMISSION,
    errno.EROFS: _OTHER_FOLDER,
    errno.EEXIST: f"remove it, or {_OTHER_FOLDER}",
    errno.ENOTDIR: _OTHER_FOLDER,
    errno.EISDIR: "remove it, or name a file",
    errno.ELOOP: "remove the link, or name the file that it should point to",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "it was removed, or the name is wrong: correct this and give the same command again",
}


def in_words(error: Exception) -> str:
    """The error as one sentence: an error of the operating system as `FILE: FAULT: ADVICE`, any other as its text."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.errno in (errno.EEXIST, errno.ENOTDIR) and isinstance(error.filename, str):
        path = Path(error.filename)
        for part in (path, *path.parents):
            if part.exists() and not part.is_dir():
                return f"{part} is a file, not a folder: {_OTHER_FOLDER}"
    names = error.filename, error.filename2  # of a copy: source and target
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        names = names[::-1]
    place = next((f"{name}: " for name in names if name is not None), "")
    advice = ADVICE.get(error.errno or 0)
    return f"{place}{error.strerror}{f': {advice}' if advice else ''}"


def no_such(kind: str, name: str, choices: Iterable[str], prefix: str = "") -> ValueError:
    """The error for a `name` that is none of `choices`. It suggests a choice that `near_settings` finds, or a similar
    one, or else lists all. `prefix`, such as the section of a setting, is written before the name and the
    suggestion."""
    choices = list(choices)
    near = near_settings(name, choices) or get_close_matches(name, choices, n=1)
    advice = f"did you mean {prefix}{near[0]}?" if near else f"choose one of {', '.join(choices)}"
    fault = f"{kind} cannot be" if kind.startswith("--") else f"there is no {kind}"
    return ValueError(f"{fault} {prefix + name!r}: {advice}")


def near_settings(key: str, settings: Iterable[str]) -> list[str]:
    """The `settings` that `key` may mean. `key` may be a name without its section (steps for train.steps), or have the
    name's initials (lr or optimizer.lr for optimizer.learning_rate)."""
    near = []
    for setting in settings:
        section, _, name = setting.rpartition(".")
        initials = "".join(word[0] for word in name.split("_"))
        if len(key) > 1 and key in (name, initials, f"{section}.{initials}"):
            near.append(setting)
    return near
