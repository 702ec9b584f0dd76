"""The number of files and connections that this process may have open.

Login shells and service managers start programs with a soft limit of 1024, for programs that use
`select`; other programs are expected to raise it.
"""

import resource

_ENOUGH = 1 << 16
"""Upper bound: child processes inherit the limit, and some close every descriptor up to it."""


def raise_limit() -> int:
    """Raise the soft limit of open files as far as the hard limit allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _ENOUGH if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
