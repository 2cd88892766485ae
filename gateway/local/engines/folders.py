"""Making and removing the private folders that machines live in.

Standard library only: the keeper uses this too.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path


def make_private(folder: Path) -> None:
    """Make the folder and its missing parents, for this user only.

    Raises FileExistsError when the folder exists: a machine never moves into a folder
    that somebody prepared for it.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)


def remove_tree(folder: Path) -> None:
    """Remove the folder and everything in it; no folder is fine.

    A notebook may have taken away its own right to list a folder (mode 0): then the
    rights are given back first.  Symbolic links are removed, never followed.  Raises
    OSError when something cannot be removed.
    """
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        if folder.exists():
            remove_tree(folder)
    except PermissionError:
        _give_back_rights(folder)
        shutil.rmtree(folder)


def _give_back_rights(folder: Path) -> None:
    os.chmod(folder, stat.S_IRWXU)
    for parent, names, _ in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                os.chmod(path, stat.S_IRWXU)
