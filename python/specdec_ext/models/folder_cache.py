"""Folders that are made once and kept below the cache root, each with a manifest of its files.

A folder appears complete or not at all: it is written beside its place and renamed. Its manifest
holds what it was made from and the size and sha256 of every file. A folder is taken as it is while
its files are those of the manifest, no more and no fewer; a file is hashed again when its size or
one of its times has changed (the change time too, which nobody can set back). A folder that differs
is made again. This finds damage and accidents. Whoever may write the cache owns what is loaded from
it (SECURITY.md).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import ModelError, SpecdecError
from ..log import logger

__all__ = [
    "MANIFEST",
    "cache_root",
    "cached_folder",
    "changed_file",
    "check_once",
    "file_entries",
    "file_sha256",
    "file_stamps",
    "make_folder",
    "owned",
    "remembered_sha256",
    "write_manifest",
]

MANIFEST = "manifest.json"


def cache_root() -> Path:
    """$SPECDEC_CACHE_DIR, else $XDG_CACHE_HOME/specdec_ext, else ~/.cache/specdec_ext."""
    if named := os.environ.get("SPECDEC_CACHE_DIR"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specdec_ext"


def cached_folder(folder: Path, origin: Mapping[str, str], write: Callable[[Path], None]) -> Path:
    """The folder that `write(empty folder)` makes from `origin`, made now unless it is intact.

    One process makes it; others wait for the lock. Raises ModelError when the cache cannot be
    written, and what `write` raises.
    """
    if not _is_intact(folder, origin):
        with _locked(folder.parent):
            if not _is_intact(folder, origin):  # another process may have made it meanwhile
                if folder.exists():
                    logger.warning("%s does not match its manifest: made again", folder)
                for stale in folder.parent.glob(f".{folder.name}.*"):  # of a process that died
                    shutil.rmtree(stale, ignore_errors=True)
                make_folder(folder, origin, write)
    return folder


def make_folder(folder: Path, origin: Mapping[str, str], write: Callable[[Path], None]) -> None:
    """Write a folder with its manifest in place of what is there.

    Raises ModelError when the disk refuses, and what `write` raises; the old folder stays then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        work.chmod(0o755)
        write(work)
        for file in work.iterdir():  # safetensors writes its files private
            file.chmod(0o644)
        write_manifest(work, {**origin, "files": file_entries(work)})
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
    except OSError as error:
        raise ModelError(
            f"{folder}: cannot be written ({error}); free space or set SPECDEC_CACHE_DIR to a "
            "writable folder"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def file_sha256(path: Path) -> str:
    """The file's sha256 in hexadecimal digits."""
    with path.open("rb") as file:
        if sys.version_info >= (3, 11):
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def remembered_sha256(path: Path) -> str:
    """file_sha256, remembered below the cache root until the file's size or one of its times
    changes."""
    return str(_remembered(path, "sha256", lambda: file_sha256(path)))


def check_once(path: Path, what: str, check: Callable[[], None]) -> None:
    """Call `check`, which raises for a file that is not as it should be, unless it has passed
    before, by the same memory as remembered_sha256."""

    def passes() -> bool:
        check()
        return True

    _remembered(path, what, passes)


def _remembered(path: Path, what: str, find: Callable[[], Any]) -> Any:
    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:24]
    record = cache_root() / what / f"{name}.json"
    stamps = file_stamps(path.resolve())  # of a link, what it leads to
    with suppress(OSError, ValueError, AttributeError, KeyError):
        entry = json.loads(record.read_text())
        if entry.items() >= stamps.items():
            return entry[what]
    entry = {**stamps, what: find()}
    with suppress(OSError):  # a cache that may only be read
        record.parent.mkdir(parents=True, exist_ok=True)
        work = record.with_suffix(f".{os.getpid()}")
        work.write_text(json.dumps(entry))
        work.replace(record)
    return entry[what]


def file_stamps(path: Path) -> dict[str, int]:
    """What a change of the file changes. Of a link it is the link's own: one is never made here."""
    stat = path.lstat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}


def _entry(path: Path) -> dict[str, Any]:
    return {**file_stamps(path), "sha256": file_sha256(path)}


def file_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """What a manifest says of the files of a folder and of the folders in it, by their paths."""
    files = (path for path in sorted(folder.rglob("*")) if not path.is_dir())
    return {path.relative_to(folder).as_posix(): _entry(path) for path in files}


def changed_file(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """The first file that is missing or not as it was written; None: all are there, intact.

    Raises OSError, and KeyError, TypeError or AttributeError for what is no manifest.
    """
    touched = False
    for name, entry in manifest["files"].items():
        try:
            stamps = file_stamps(folder / name)
            if any(entry.get(key) != value for key, value in stamps.items()):
                if (
                    stamps["bytes"] != entry["bytes"]
                    or file_sha256(folder / name) != entry["sha256"]
                ):
                    return str(name)
                entry.update(stamps)
                touched = True
        except FileNotFoundError:
            return str(name)
    if touched:  # touched or copied, with the same content: not hashed again the next time
        with suppress(OSError):  # a folder that may only be read
            write_manifest(folder, manifest)
    return None


def _is_intact(folder: Path, origin: Mapping[str, str]) -> bool:
    """Was it made from `origin`, and is every file as it was written?"""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
        there = {path.name for path in folder.iterdir()} - {MANIFEST}
        if not files or there != set(files):
            return False
        if any(manifest.get(name) != value for name, value in origin.items()):
            return False
        return changed_file(folder, manifest) is None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all: another process may be reading it."""
    handle, name = tempfile.mkstemp(prefix=f".{folder.name}.", dir=folder.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(content, indent=1) + "\n")
        os.chmod(name, 0o644)
        os.replace(name, folder / MANIFEST)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; the lock dies with its process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".lock").open("w")
    except OSError as error:
        raise ModelError(
            f"{folder}: the model cache cannot be written ({error}); set SPECDEC_CACHE_DIR to a "
            "writable folder"
        ) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def owned(folder: Path, refusal: SpecdecError) -> Iterator[None]:
    """`folder` is this process's while it is entered; the lock dies with the process.

    Raises `refusal` if another process has it, OSError if it cannot be read.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal from None
        yield
    finally:
        os.close(handle)
