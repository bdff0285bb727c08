"""The only functions that write, rename and remove haiprof's files: no link is ever followed.

A folder may hold what somebody else has put there: it was unpacked from an archive, others may
write to it, or it changes while we work in it. So every function names a boundary, `below`: the
folder that the user named, or that is the user's own. Links on the way to it are the user's and
are followed. From there on every folder is opened from the one before it, by its descriptor, and a
link is an error; the last step, too, is relative to a descriptor, so that no path is looked up
twice. What is removed with all that is in it is a `MadeFolder`, which this process has made.

Only the standard library is used, and little of it: the job's processes load this, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from haiprof.base.descriptors import Descriptor
from haiprof.base.errors import UsageError, convert_os_errors

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe without a reader, or a terminal, must not block.
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NAME_LIMIT = 200  # of 255 bytes: the rest is for the ending of an unfinished file
_UNFINISHED = re.compile(r"\.(?P<name>.*)\.[0-9a-f]{16}", re.DOTALL)
PRIVATE = 0o700
_OTHERS_ENTER, _OTHERS_READ = 0o055, 0o044


@contextlib.contextmanager
def open_folder(
    path: Path, *, below: Path, make: bool = False, mode: int | None = None, own: bool = False,
    trusted: bool = False,
) -> Iterator[int]:  # fmt: skip
    """A folder as a descriptor."""
    fd = os.open(below, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        owner = os.geteuid() if own else os.fstat(fd).st_uid
        if own:
            _check_owner(os.fstat(fd), below, owner)
        at = below
        for name in _names(path, below):
            at = at / name
            inner = _open_inner(fd, name, at, make=make, mode=mode, trusted=trusted)
            os.close(fd)
            fd = inner
            if own or trusted:
                _check_own(os.fstat(fd), at, owner)
        yield fd
    finally:
        os.close(fd)


def make_folder(
    path: Path, *, below: Path, mode: int | None = None, new: bool = False, own: bool = False,
    trusted: bool = False,
) -> None:  # fmt: skip
    """Makes a folder, and those between `below` and it."""
    upper = path.parent if new else path
    with open_folder(upper, below=below, make=True, mode=mode, own=own, trusted=trusted) as folder:
        if new:
            _make_inner(folder, path.name, path, mode=mode, trusted=trusted)


def make_named_folder(path: Path, *, mode: int = 0o777) -> None:
    """Makes a folder that the user named, links on the way to it included."""
    os.makedirs(path, mode, exist_ok=True)


def make_private(path: Path, *, below: Path) -> None:
    """Makes a folder that only its owner may enter, and takes that right from others."""
    with open_folder(path, below=below, make=True, mode=PRIVATE) as folder:
        _check_owner(os.fstat(folder), path, os.stat(below).st_uid)
        if os.fstat(folder).st_mode & 0o077:
            os.fchmod(folder, PRIVATE)


def let_group_read(path: Path, gid: int, *, below: Path) -> None:
    """Lets a group read a folder, and what will be made in it with the folder's own mode.

    By an access list: the owner of the folder need not be in that group, as chown would want it.
    """
    # acl(5); posix_acl_xattr.h: version 2, then tag, permissions and id of each entry.
    import struct

    with open_folder(path, below=below) as folder:
        mode = os.fstat(folder).st_mode
        read, nobody = 5, 0xFFFFFFFF
        entries = ((1, 7, nobody), (4, mode >> 3 & 7, nobody), (8, read, gid), (16, read, nobody),
                   (32, mode & 7, nobody))  # fmt: skip
        content = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *each) for each in entries)
        with _errors_with_path(path):
            for kind in ("access", "default"):
                os.setxattr(folder, f"system.posix_acl_{kind}", content)


def list_folder(path: Path, *, below: Path) -> list[str]:
    """Names in a folder, sorted."""
    with open_folder(path, below=below) as folder:
        return sorted(os.listdir(folder))


def remove_folder(path: Path, *, below: Path) -> None:
    """Removes an empty folder."""
    with open_folder(path.parent, below=below) as folder, _errors_with_path(path):
        os.rmdir(path.name, dir_fd=folder)


def create_file(path: Path, *, below: Path, mode: int | None = None, append: bool = False) -> int:
    """A new file to write into, as a descriptor that the caller closes."""
    with open_folder(path.parent, below=below) as folder:
        return _open_file(folder, path, _NEW | os.O_APPEND if append else _NEW, mode)


def open_to_append(path: Path, *, below: Path, mode: int | None = None) -> int:
    """Opens a file to append to, creating it if needed; the caller closes the descriptor."""
    with open_folder(path.parent, below=below) as folder:
        try:
            return _open_file(folder, path, _NEW | os.O_APPEND, mode)
        except FileExistsError:
            fd = _open_file(folder, path, _APPEND)
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        return fd
    os.close(fd)
    why = "it has a second name (a hard link)" if stat.S_ISREG(found.st_mode) else "it is no file"
    raise OSError(errno.EPERM, f"not written to, as {why}", str(path))


def open_to_read(path: Path, *, below: Path, own: bool = False) -> int:
    """Opens a file to read, never blocking on a pipe; the caller closes the descriptor."""
    with open_folder(path.parent, below=below, own=own) as folder:
        fd = _open_file(folder, path, _READ)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if own:
            _check_own(found, path, os.geteuid())
    except OSError:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def whole_file(
    path: Path, *, below: Path, mode: int | None = None, replace: bool = True, own: bool = False
) -> Iterator[BinaryIO]:
    """A file to write into that gets its name once all is written, and vanishes otherwise."""
    with (
        open_folder(path.parent, below=below, own=own) as folder,
        _draft_file(folder, path, mode) as (file, draft),
    ):
        yield file
        file.close()
        with _errors_with_path(path):
            publish = os.replace if replace else os.link
            publish(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)


def write_file(
    path: Path, data: bytes, *, below: Path, mode: int | None = None, replace: bool = True
) -> None:
    """Puts a whole file in place at once, as `whole_file` does; also safe inside the job."""
    with whole_file(path, below=below, mode=mode, replace=replace) as file:
        descriptor = Descriptor(os.dup(file.fileno()))  # the job may close any number at any time
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(descriptor.check(), rest) :]
        finally:
            descriptor.close()


@contextlib.contextmanager
def named_file(path: Path) -> Iterator[BinaryIO]:
    """The same for a file that the user named (`-o FILE`), with the usual meaning of links.

    A link is the user's own: its target is replaced, the link stays. An existing file keeps its
    mode. What is not a regular file, such as /dev/stdout or a pipe, is written to directly.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        found = None
    if found is not None and not stat.S_ISREG(found.st_mode):
        with open(path, "wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    with whole_file(target, below=target.parent, mode=0o666) as file:
        if found is not None:
            os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))
        yield file


@contextlib.contextmanager
def output_file(path: Path, *, force: bool, below: Path | None = None) -> Iterator[BinaryIO]:
    """A file that the user named: whole or absent, and never over another by mistake."""
    if os.path.lexists(path) and not path.is_file():
        raise UsageError(f"{path}: is not a regular file", hint="without -o: standard output")
    if path.exists() and not force:
        raise UsageError(f"{path}: already exists", hint="--force replaces it")
    target = named_file(path) if below is None else whole_file(path, below=below)
    with convert_os_errors(UsageError, f"{path}: cannot be written"), target as file:
        yield file


def rename(source: Path, target: Path, *, below: Path) -> None:
    """Renames a file or folder; an existing file or link of that name is replaced."""
    with (
        open_folder(source.parent, below=below) as old,
        open_folder(target.parent, below=below) as new,
        _errors_with_path(target),
    ):
        os.rename(source.name, target.name, src_dir_fd=old, dst_dir_fd=new)


def make_link(path: Path, leads_to: Path, *, below: Path) -> None:
    """Makes a symbolic link."""
    with open_folder(path.parent, below=below) as folder, _errors_with_path(path):
        os.symlink(leads_to, path.name, dir_fd=folder)


def remove_file(path: Path, *, below: Path) -> None:
    """Removes a file, or a link itself, if it exists."""
    with (
        contextlib.suppress(FileNotFoundError),
        open_folder(path.parent, below=below) as folder,
        _errors_with_path(path),
    ):
        os.unlink(path.name, dir_fd=folder)


def file_size(path: Path) -> int | None:
    """Bytes of a file; None where it cannot be seen, or is gone meanwhile."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def is_unfinished(name: str, *, of: str | None = None) -> bool:
    """Whether a name is that of a file that `whole_file` has not finished."""
    found = _UNFINISHED.fullmatch(name)
    return found is not None and (of is None or found["name"] == _short(of))


def find_problem(path: Path, *, owner: int, writable: bool = False) -> str:
    """Why the file or folder at a path cannot be trusted as `owner`'s own; empty where it can."""
    try:
        state = os.lstat(path)
    except FileNotFoundError:
        return ""
    if stat.S_ISLNK(state.st_mode):
        return "is a link"
    if state.st_uid != owner:
        return f"belongs to another user (uid {state.st_uid})"
    if state.st_mode & _OTHERS_WRITE and not writable:
        return f"may be written by others (mode {stat.S_IMODE(state.st_mode):o})"
    return ""


class MadeFolder:
    """A folder that this process has made; only such a folder is removed with its content.

    It is identified by device and inode, not by name: another folder in its place is not removed.
    """

    def __init__(self, path: Path, below: Path, number: tuple[int, int]) -> None:
        self.path = path
        self._below, self._number = below, number

    @classmethod
    def make(cls, path: Path, *, below: Path, mode: int = PRIVATE) -> MadeFolder:
        """Makes one."""
        make_folder(path, below=below, mode=mode, new=True)
        with open_folder(path, below=below) as folder:
            found = os.fstat(folder)
            if os.listdir(folder):  # not the one that was made
                raise OSError(errno.EEXIST, "exchanged while it was made", str(path))
        return cls(path, below, (found.st_dev, found.st_ino))

    @classmethod
    def temporary(cls, prefix: str, into: Path | None = None, *, mode: int = PRIVATE) -> MadeFolder:
        """Makes one with an unpredictable name, in the system's temporary folder or another."""
        if into is None:
            import tempfile  # costs some milliseconds, and few need it

            into = Path(tempfile.gettempdir())
        return cls.make(into / f"{prefix}{os.urandom(8).hex()}", below=into, mode=mode)

    def move(self, target: Path) -> None:
        """Moves it within the same boundary."""
        rename(self.path, target, below=self._below)
        self.path = target

    def remove(self) -> None:
        """Removes it with its content; links are removed and not followed, mounts stay."""
        with (
            contextlib.suppress(OSError),
            open_folder(self.path.parent, below=self._below) as parent,
        ):
            folder = os.open(self.path.name, _FOLDER, dir_fd=parent)
            try:
                found = os.fstat(folder)
                if (found.st_dev, found.st_ino) != self._number:
                    return
                _remove_content(folder, found.st_dev)
            finally:
                os.close(folder)
            os.rmdir(self.path.name, dir_fd=parent)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.remove()


def _remove_content(folder: int, device: int) -> None:
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        with contextlib.suppress(OSError):
            if not is_folder:
                os.unlink(name, dir_fd=folder)
                continue
            inner = os.open(name, _FOLDER, dir_fd=folder)
            try:
                if os.fstat(inner).st_dev == device:
                    _remove_content(inner, device)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=folder)


@contextlib.contextmanager
def _draft_file(folder: int, path: Path, mode: int | None) -> Iterator[tuple[BinaryIO, str]]:
    """A file under an unpredictable name; it is removed afterwards, unless renamed."""
    draft = f".{_short(path.name)}.{os.urandom(8).hex()}"
    fd = _open_file(folder, path.with_name(draft), _NEW, mode)
    try:
        with open(fd, "wb") as file:
            yield file, draft
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=folder)


def _short(name: str) -> str:
    return os.fsdecode(os.fsencode(name)[:_NAME_LIMIT])


def _names(path: Path, below: Path) -> tuple[str, ...]:
    names = path.absolute().relative_to(below.absolute()).parts
    if ".." in names:
        raise OSError(errno.EINVAL, f"it leads out of {below}", str(path))
    return names


def _open_inner(
    folder: int, name: str, path: Path, *, make: bool, mode: int | None, trusted: bool
) -> int:
    """Opens a folder within a folder; with `make`, creates it where it is missing."""
    with _errors_with_path(path, folder):
        try:
            return os.open(name, _FOLDER, dir_fd=folder)
        except FileNotFoundError:
            if not make:
                raise
    with contextlib.suppress(FileExistsError):  # another process was faster
        _make_inner(folder, name, path, mode=mode, trusted=trusted)
    with _errors_with_path(path, folder):
        return os.open(name, _FOLDER, dir_fd=folder)


def _make_inner(folder: int, name: str, path: Path, *, mode: int | None, trusted: bool) -> None:
    """Makes a folder in a folder, whatever the umask is.

    What we make shows who we are, also where NFS maps users: with `trusted` it stays only in a
    folder of the same owner.
    """
    with _errors_with_path(path):
        os.mkdir(name, PRIVATE, dir_fd=folder)
        made = os.stat(name, dir_fd=folder, follow_symlinks=False)
        above = os.fstat(folder)
        if trusted and made.st_uid != above.st_uid:
            os.rmdir(name, dir_fd=folder)
            why = f"the folder above belongs to another user (uid {above.st_uid})"
            raise PermissionError(errno.EPERM, why)
        if mode is None:
            mode = PRIVATE | above.st_mode & _OTHERS_ENTER
        if mode != PRIVATE:
            inner = os.open(name, _FOLDER, dir_fd=folder)
            try:
                os.fchmod(inner, mode | stat.S_IMODE(made.st_mode) & stat.S_ISGID)
            finally:
                os.close(inner)


def _open_file(folder: int, path: Path, flags: int, mode: int | None = None) -> int:
    with _errors_with_path(path, folder):
        fd = os.open(path.name, flags, 0o600 if mode is None else mode, dir_fd=folder)
        readers = os.fstat(folder).st_mode & _OTHERS_READ if mode is None else 0
        if readers and flags & os.O_EXCL:
            os.fchmod(fd, 0o600 | readers)
        return fd


@contextlib.contextmanager
def _errors_with_path(path: Path, folder: int | None = None) -> Iterator[None]:
    """Makes errors name the whole path, and say where a link in `folder` is the cause."""
    try:
        yield
    except OSError as error:
        number, reason = error.errno or errno.EIO, error.strerror or str(error)
        if folder is not None and number in (errno.ELOOP, errno.ENOTDIR):
            with contextlib.suppress(OSError):
                found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISLNK(found.st_mode):
                    number, reason = errno.ELOOP, "it is a symbolic link, and not followed"
        raise OSError(number, reason, str(path)) from None


def _check_owner(found: os.stat_result, path: Path, owner: int) -> None:
    if found.st_uid != owner:
        why = f"it belongs to another user (uid {found.st_uid})"
        raise PermissionError(errno.EPERM, why, str(path))


def _check_own(found: os.stat_result, path: Path, owner: int) -> None:
    _check_owner(found, path, owner)
    if found.st_mode & _OTHERS_WRITE:
        mode = f"{stat.S_IMODE(found.st_mode):o}"
        raise PermissionError(errno.EPERM, f"others may write to it (mode {mode})", str(path))
