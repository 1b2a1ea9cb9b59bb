"""A folder for which the user names the place: written aside, checked, moved into place at the end.

Files are written to `.partial` inside the folder and moved out of it when all are complete, the
manifest last: a folder with a manifest is complete. Nothing that this command did not write is
removed or replaced. After Ctrl-C, or when the machine goes down, `.partial` stays and the same
command goes on with it; after any other failure it goes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ModelError
from ..models.folder_cache import (
    MANIFEST,
    changed_file,
    file_entries,
    file_stamps,
    owned,
    write_manifest,
)
from ..models.json_file import read_json

__all__ = ["check_folder", "written_folder"]

_PARTIAL, _ORIGIN = ".partial", "origin.json"


@contextmanager
def written_folder(
    folder: Path, kind: str, origin: Mapping[str, Any], *, resumes: bool
) -> Iterator[Path]:
    """An empty folder to write to, whose content becomes that of `folder` when the block ends.

    kind     what the manifest calls the folder, "checkpoint" or "engine"
    origin   what it is made from, JSON-ready; goes into the manifest
    resumes  files of an interrupted run from an equal origin are there already, each complete if it
             stands under its final name

    Raises ConfigError for a folder with files of somebody else, ModelError when the disk refuses or
    another process is writing there.
    """
    stamp = json.loads(json.dumps({"kind": kind, "origin": origin}))
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        _check_owner(folder, kind)
        partial = folder / _PARTIAL
        partial.mkdir(exist_ok=True)
        with owned(partial, _taken(folder)), _tidy(partial, missing, keeps=resumes):
            content = partial / "files"
            if not (resumes and _read(partial / _ORIGIN) == stamp):
                shutil.rmtree(content, ignore_errors=True)
            content.mkdir(exist_ok=True)
            (partial / _ORIGIN).write_text(json.dumps(stamp))
            yield content
            _publish(folder, partial, stamp)
    except OSError as error:
        raise ModelError(
            f"{folder}: cannot be written ({error.strerror or error}); free space, or name another "
            "folder with --output_dir"
        ) from error


@contextmanager
def _tidy(partial: Path, created: list[Path], *, keeps: bool) -> Iterator[None]:
    """Remove what is left when the block ends; after Ctrl-C only what cannot be gone on with."""
    keep = False
    try:
        yield
    except KeyboardInterrupt:
        keep = keeps
        raise
    finally:
        if not keep:
            shutil.rmtree(partial, ignore_errors=True)
            with suppress(OSError):  # as far as they are empty
                for path in created:
                    path.rmdir()


def check_folder(folder: Path, kind: str, remedy: str) -> dict[str, Any]:
    """The manifest of a complete, intact folder of that kind.

    remedy  what to do about one that is not. Raises ModelError.
    """
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise ModelError(f"{kind} {str(folder)!r} {found}; {remedy}")
    path = folder / MANIFEST
    if not path.is_file():
        half = " (its writing was interrupted)" if (folder / _PARTIAL).is_dir() else ""
        raise ModelError(f"{folder}: {MANIFEST} is missing: not a complete {kind}{half}; {remedy}")
    manifest = read_json(path, "the manifest")
    if manifest.get("kind") != kind:
        found = f"is {_a(manifest['kind'])}" if manifest.get("kind") else "was not written as one"
        raise ModelError(f"{folder}: not {_a(kind)}: it {found}; {remedy}")
    try:
        changed = changed_file(folder, manifest)
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: cannot be used ({error!r}); {remedy}") from error
    if changed is not None:
        about = manifest["files"][changed]
        there = (folder / changed).is_file()
        what = f"is not the file that was written (sha256 {about['sha256']})"
        raise ModelError(f"{folder / changed}: {what if there else 'is missing'}; {remedy}")
    return manifest


def _a(kind: object) -> str:
    return f"an {kind}" if str(kind).startswith("e") else f"a {kind}"


def _check_owner(folder: Path, kind: str) -> None:
    """Refuse a folder with files that no run of the same command has written. Folders may be there:
    the documents put the checkpoint into the engine's."""
    own = {MANIFEST}
    for path in (folder / MANIFEST, folder / _PARTIAL / MANIFEST):
        manifest = _read(path)
        if manifest is not None and manifest.get("kind") == kind:
            own |= set(manifest.get("files", ()))
        elif path.parent == folder and manifest is not None:
            own.discard(MANIFEST)
    for path in sorted(folder.iterdir()):
        if path.name not in own and not path.is_dir():
            raise ConfigError(
                f"--output_dir {str(folder)!r} holds {path.name!r}, which is no part of {_a(kind)} "
                "written before; name an empty folder, or one that is not there yet"
            )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _publish(folder: Path, partial: Path, stamp: Mapping[str, Any]) -> None:
    content = partial / "files"
    old = _read(folder / MANIFEST) or {}
    entries = file_entries(content)
    manifest = {**stamp, "files": entries}
    write_manifest(partial, manifest)  # what is moved is known, should the moving be interrupted
    (folder / MANIFEST).unlink(missing_ok=True)
    for name in old.get("files", ()):
        if name not in entries:
            (folder / name).unlink(missing_ok=True)
    for name in entries:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(content / name, folder / name)
        entries[name].update(file_stamps(folder / name))  # a move changes one of the times
    write_manifest(folder, manifest)


def _taken(folder: Path) -> ModelError:
    return ModelError(
        f"{folder}: another process is writing this folder; wait for it, or name another folder "
        "with --output_dir"
    )
