"""What became of bundles in servers, one small file each: a bundle that passed is not checked again."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import BundleError, CorruptError, NoServerError
from agentpipe.progress import Progress, silent
from agentpipe.serving import layout
from agentpipe.serving.places import INSTALL, find_place
from agentpipe.serving.server_check import PASSED, ServerCheck, check_in_server, skipped
from agentpipe.storage import read_json, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from agentpipe.settings import Settings

_FORMAT: Final = 1
_FOLDER: Final = "server_checks"


class CheckRecords:
    """The checks of one home, by the content digest of the bundle."""

    def __init__(self, home: Path) -> None:
        self.root = home / _FOLDER

    def path(self, bundle: str) -> Path:
        """The file of one bundle's last check."""
        return self.root / f"{bundle[:16]}.json"

    def find(self, bundle: str) -> ServerCheck | None:
        """The last check of a bundle, None where there was none.

        Raises:
            CorruptError: the file is not a check of this bundle.
        """
        path = self.path(bundle)
        if not path.exists():
            return None
        content: Any = read_json(path)
        remedy = "remove it; the bundle is then checked again"
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise CorruptError("not a server check of this version", file=path, remedy=remedy)
        try:
            found = ServerCheck.from_json(content["check"])
        except (KeyError, TypeError) as error:
            raise CorruptError(f"not a server check: {error!r}", file=path, remedy=remedy) from error
        if found.bundle != bundle:
            raise CorruptError("the check of another bundle", file=path, remedy=remedy)
        return found

    def save(self, check: ServerCheck) -> None:
        """Notes what became of a bundle."""
        at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        write_json(self.path(check.bundle), {"format": _FORMAT, "checked_at": at, "check": check.to_json()})


def check_once(
    home: Path, bundle: Path, digest: str, settings: Settings, *, progress: Progress = silent
) -> tuple[ServerCheck, bool]:
    """Checks the bundle at ``bundle``, unless one of this content has passed before; notes the result.

    Returns:
        The check, and whether it is one from before. Where no server can be had it is a skipped one.

    Raises:
        BundleError, ParityError: the bundle is damaged, or not the one of ``digest``.
        ServiceError: the server went away in between.
        CorruptError: the record of an earlier check is damaged.
    """
    found = layout.content_digest(layout.check_files(bundle))
    if found != digest:
        remedy = "build the bundle again"
        raise BundleError(f"the bundle there is {found[:12]}, not {digest[:12]}", bundle=bundle, remedy=remedy)
    records = CheckRecords(home)
    before = records.find(digest)
    if before is not None and before.status == PASSED:
        return before, True
    check = _check_or_skip(bundle, digest, settings, progress)
    records.save(check)
    return check, False


def _check_or_skip(bundle: Path, digest: str, settings: Settings, progress: Progress) -> ServerCheck:
    try:
        place = find_place(settings)
        if place is None:
            return skipped(digest, f"no Triton is installed here; {INSTALL}")
        return check_in_server(bundle, place, progress=progress)
    except NoServerError as error:
        return skipped(digest, str(error))
