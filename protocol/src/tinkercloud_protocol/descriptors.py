"""How many files and connections this process may have open.

Login shells and service managers start programs with a soft limit of 1024, for those that use
`select`; who does not is expected to raise it.
"""

import resource

_ENOUGH = 1 << 16
"""Programs that are started from here inherit the limit, and some close every number up to it."""


def raise_limit() -> int:
    """Raise the soft limit of open files as far as the hard one allows; return what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _ENOUGH if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
