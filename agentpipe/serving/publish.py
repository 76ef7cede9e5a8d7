"""Putting a bundle's policy into a live model repository, and taking it back: one rename each."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

from agentpipe.errors import BundleError
from agentpipe.serving import layout
from agentpipe.serving.triton_config import MODEL_FILE
from agentpipe.serving.verify import verify_bundle
from agentpipe.storage import sync, typed_os_errors

_VERSION: Final = re.compile(r"[1-9][0-9]{0,17}")  # what fits into Triton's number of a version


def publish_version(bundle: Path, repository: Path, *, version: int | None = None, drafts: Path | None = None) -> Path:
    """Adds the bundle's policy to ``repository`` as the next version (or ``version``) and returns the version folder.

    It is copied into ``drafts`` first (beside the repository, on the same file system), since a server takes every
    folder inside the repository for a model.

    A server that polls the repository sees the whole folder or nothing, and never a moment without a version. All
    versions of a model share one configuration, which depends on the signature only.

    Raises:
        BundleError: the bundle is damaged, the version exists, or the model there has another configuration.
    """
    report = verify_bundle(bundle)
    source, target = bundle / report.model_name, repository / report.model_name
    with typed_os_errors(repository):
        repository.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".staging-{repository.name}-", dir=drafts or repository.parent))
        try:
            number = version or max(published_versions(target), default=0) + 1
            if target.exists():
                return _add(source / str(report.version), target, staging, number, source / layout.CONFIG)
            shutil.copytree(source / str(report.version), staging / "model" / str(number))
            shutil.copy(source / layout.CONFIG, staging / "model" / layout.CONFIG)
            _settle(staging / "model")
            (staging / "model").rename(target)
            sync(repository)
            return target / str(number)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _add(source: Path, target: Path, staging: Path, number: int, config: Path) -> Path:
    there = target / layout.CONFIG
    if not there.is_file():
        raise BundleError("the model there has no configuration", file=there, remedy="restore it, or remove the model")
    if there.read_bytes() != config.read_bytes():
        remedy = "publish a policy of another signature under another model name"
        raise BundleError("the model there has another configuration", file=there, remedy=remedy)
    final = target / str(number)
    if final.exists():
        raise BundleError("the version exists already", file=final, remedy="move it away, or take another number")
    shutil.copytree(source, staging / "version")
    _settle(staging / "version")
    (staging / "version").rename(final)
    sync(target)
    return final


def _settle(root: Path) -> None:
    """Flushes a tree to disk before it is renamed into sight."""
    root.chmod(0o755)
    for path in (*sorted(root.rglob("*"), reverse=True), root):
        sync(path)


def published_versions(model: Path) -> list[int]:
    """Numbers of the complete version folders below ``model``, ascending; empty when there is no such model.

    As a server does, folders whose names are no number, or begin with a zero, are passed over.
    """
    if not model.is_dir():
        return []
    names = (path.name for path in model.iterdir() if (path / MODEL_FILE).is_file())
    return sorted(int(name) for name in names if _VERSION.fullmatch(name))


def withdraw_version(repository: Path, model_name: str, version: int, *, aside: Path | None = None) -> Path:
    """Takes a version out of sight by one rename; the one before serves again. Returns where it lies now.

    That is ``aside``, which must not exist, or a new folder beside the repository.

    Raises:
        BundleError: there is no such version, or it is the only one.
    """
    model = repository / model_name
    versions = published_versions(model)
    if version not in versions:
        raise BundleError("no such version", file=model / str(version), remedy=f"there are {versions}")
    if len(versions) == 1:
        raise BundleError("the only version cannot be withdrawn", file=model, remedy="publish another one first")
    with typed_os_errors(repository):
        if aside is None:
            aside = Path(tempfile.mkdtemp(prefix=f"withdrawn-{model_name}-{version}-", dir=repository.parent))
            aside /= str(version)
        aside.parent.mkdir(parents=True, exist_ok=True)
        (model / str(version)).rename(aside)
        sync(model)
    return aside
