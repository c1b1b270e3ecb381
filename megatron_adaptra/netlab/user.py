"""The user who called sudo: a laboratory needs root, its commands and their files do not."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import NamedTuple

from megatron_adaptra.base.errors import BadInput

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # bits, of linux/capability.h


class User(NamedTuple):
    """A user has numbers, and a `name` and `home` that are empty if this machine lacks them."""

    uid: int
    gid: int
    name: str = ""
    home: str = ""

    def become(self) -> dict[str, str]:
        """Turn root's process into this user's; return variables with its name. Raises OSError."""
        os.fchown(1, self.uid, self.gid)  # only its owner can open /dev/stdout
        if self.name:
            os.initgroups(self.name, self.gid)
        else:
            os.setgroups([self.gid])
        os.setgid(self.gid)
        os.setuid(self.uid)
        known = {"USER": self.name, "LOGNAME": self.name, "HOME": self.home}
        return {name: value for name, value in known.items() if value}


def missing_capabilities() -> list[str]:
    """Return the names of the capabilities that this process lacks to make networks."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        held = int(next(line for line in lines if line.startswith("CapEff:")).split()[1], 16)
    except (OSError, StopIteration, ValueError):
        return []  # the kernel's error will name them
    return [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]


def caller() -> User | None:
    """The user who called sudo; None where nobody has, or root. Raises BadInput."""
    ids = []
    for name in ("SUDO_UID", "SUDO_GID"):
        text = os.environ.get(name, "0")
        if not (text.isascii() and text.isdigit() and int(text) < 2**32 - 1):
            raise BadInput(
                name, text, "it has to be a number of a user or group, as sudo sets it; or unset it"
            )
        ids.append(int(text))
    uid, gid = ids
    if os.geteuid() != 0 or uid == 0:
        return None
    try:
        known = pwd.getpwuid(uid)
    except KeyError:
        return User(uid, gid)
    return User(uid, gid, known.pw_name, known.pw_dir)


def give(*paths: Path) -> None:
    """Let `paths` belong to the user who called sudo, if one has. Raises BadInput or OSError."""
    if (user := caller()) is not None:
        for path in paths:
            os.chown(path, user.uid, user.gid)
