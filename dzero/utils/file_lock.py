"""Locks of files (flock), which the kernel frees when the process that holds them ends, however it ends.

Lustre and NFS may be mounted without them. Then nobody knows whether another run is alive: what it may use is left
where it is, and the user is told that two runs at once are not noticed. Checkpoints, scratch space and the cache of
samples share this rule, and no package above `utils` holds all three.
"""

from __future__ import annotations

import errno
import fcntl

WITHOUT = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


def take(fd: int, *, wait: bool = False) -> bool | None:
    """Lock an open file; return whether this process has the lock now, and None if the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in WITHOUT:
            return None
        raise
    return True
