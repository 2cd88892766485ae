"""Which variables of the client's environment reach the kernel. An allow-list.

jupyter_server hands its provisioners the whole server environment, cloud
credentials included (JK 1.7), so the rule is: nothing, except

1. names of the client's own circumstances that a kernel needs to behave the
   same: locale, time zone, ``KERNEL_*``, ``JPY_SESSION_NAME``, colours;
2. what the kernelspec's ``env`` sets;
3. what the profile names (shell patterns allowed).

and, against 1, 2 and the patterns of 3, never names that carry secrets or that
describe the client's own machine (paths, process ids). A profile may name such
a variable exactly; then its author meant it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

__all__ = ["ALLOWED", "NEVER", "select_environment"]

ALLOWED = (
    "TZ",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "KERNEL_*",
    "JPY_SESSION_NAME",
    "NO_COLOR",
    "FORCE_COLOR",
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "COLORTERM",
    "TERM",
    "COLUMNS",  # the width of tracebacks and tables
    "LINES",
    "MPLBACKEND",
    "PYTHONHASHSEED",
    "PYTHONWARNINGS",
    "PYDEVD_DISABLE_FILE_VALIDATION",
)

NEVER = (
    "AWS_*",
    "*TOKEN*",
    "*SECRET*",
    "*PASSWORD*",
    "*PASSWD*",
    "*CREDENTIAL*",
    "*API_KEY*",
    "*APIKEY*",
    "*PRIVATE_KEY*",
    "JUPYTER_MICROVM_*",
    "JPY_API_*",
    "JPY_PARENT_PID",  # ipykernel exits when that process is not there
    "JPY_INTERRUPT_EVENT",
    "PATH",
    "HOME",
    "PWD",
    "OLDPWD",
    "TMPDIR",
    "VIRTUAL_ENV",
    "CONDA_*",
    "PYTHONHOME",
    "PYTHONEXECUTABLE",
    "LD_*",
    "DYLD_*",
    "SSH_*",
    "XDG_*",
    "DBUS_*",
)

# A machine's RunMicrovm carries none of this; it travels in the start call. The
# bound keeps a start one small message, not a way to move data.
MAX_VALUE_CHARS = 32_768


def select_environment(
    client: Mapping[str, str],
    kernelspec: Mapping[str, str] | None = None,
    profile: Iterable[str] = (),
) -> dict[str, str]:
    """The variables for the kernel. Pure; the names that were left out are simply not there."""
    patterns = tuple(profile)
    exact = {name for name in patterns if not _is_pattern(name)}
    own = dict(kernelspec or {})
    candidates = {**client, **own}
    return {
        name: value
        for name, value in candidates.items()
        if len(value) <= MAX_VALUE_CHARS
        and (name in exact or (_allowed(name, own, patterns) and not _matches(name, NEVER)))
    }


def _allowed(name: str, own: Mapping[str, str], patterns: tuple[str, ...]) -> bool:
    return name in own or _matches(name, ALLOWED) or _matches(name, patterns)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name.upper(), pattern) for pattern in patterns)


def _is_pattern(name: str) -> bool:
    return any(mark in name for mark in "*?[")
