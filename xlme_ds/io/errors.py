"""Errors of users and of the operating system, as one sentence that says what to do."""

import errno

_FOLDER = "choose another output folder"
_PERMIT = "give this user the permission, or choose another place"
_AGAIN = "give the same command again: finished work is kept"
ADVICE = {
    errno.ENOSPC: f"make room there and {_AGAIN}",
    errno.EDQUOT: f"make room in the quota and {_AGAIN}",
    errno.EFBIG: f"raise the limit of a file's size (ulimit -f) and {_AGAIN}",
    errno.EMFILE: "use fewer processes, or raise the limit of open files (ulimit -n)",
    errno.EAGAIN: "use fewer processes, or raise the limit of processes (ulimit -u)",
    errno.ENOMEM: "use fewer processes, or a machine with more memory",
    errno.EACCES: _PERMIT,
    errno.EPERM: _PERMIT,
    errno.EROFS: _FOLDER,
    errno.EEXIST: f"it is in the way of a folder: remove it, or {_FOLDER}",
    errno.ENOTDIR: _FOLDER,
    errno.EISDIR: "remove it, or name a file",
    errno.ELOOP: "remove the link, or name the file that it should point to",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "it was removed, or the name is wrong: correct this and give the same command again",
}


def in_words(error: Exception) -> str:
    """The error as one sentence; for an error of the operating system the file, the fault and what to do."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    place = f"{error.filename}: " if error.filename is not None else ""
    advice = ADVICE.get(error.errno or 0)
    return f"{place}{error.strerror}{f': {advice}' if advice else ''}"
