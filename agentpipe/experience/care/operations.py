"""Looking after the shards of a home: what changes anything holds the home's lock while it does."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentpipe.errors import AgentpipeError, CorruptError, InputError, VersionError
from agentpipe.experience.care.check import check_folder, check_home
from agentpipe.experience.care.choosing import choose
from agentpipe.experience.care.claims import find_claims
from agentpipe.experience.care.compaction import compact, refuse_claimed
from agentpipe.experience.care.holdings import (
    find_below,
    find_shards,
    holder_of,
    look_at,
    partition_of,
    training_of,
    trainings,
)
from agentpipe.experience.care.inventory import newest_ordinal, sealed_ns
from agentpipe.experience.care.repair import Workshop, figures, fix_all
from agentpipe.experience.care.retention import Candidate, Plan, Rules, plan
from agentpipe.experience.care.shrink import restore, shrink
from agentpipe.experience.origin import home_pools, is_built_in
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.manifest import MANIFEST, read_manifest
from agentpipe.experience.store.remedies import restore_command
from agentpipe.progress import Progress, silent
from agentpipe.storage import home_lock, typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentpipe.experience.care.claims import Claims
    from agentpipe.experience.care.holdings import Holding, State
    from agentpipe.experience.care.report import Report
    from agentpipe.experience.store.shard import Shard


def check(home: Path, *, folder: Path | None = None, fix: bool = False, progress: Progress = silent) -> Report:
    """Checks every shard of a home, or those of ``folder``; see :mod:`~agentpipe.experience.care.check`.

    Args:
        home: The home; with ``folder`` it only says where line profiles and table versions are.
        folder: A shard, or a folder that holds shards.
        fix: Repair what can be repaired, then check again; see :mod:`~agentpipe.experience.care.repair`.
        progress: Told of shards checked.

    Raises:
        InputError: no shard in ``folder``.
        LockHeldError: to be repaired, and another process works on the home.
        DiskFullError, HomeError: a repair cannot be written.
    """
    look = _look(home, folder, progress)
    report = look()
    if report.ok or not fix:
        return report
    inside = folder is None or folder.resolve().is_relative_to(home.resolve())
    root = home if folder is None or inside else folder.resolve().parent
    with contextlib.ExitStack() as stack:
        if inside:
            stack.enter_context(home_lock(home, "agentpipe buffer check --fix"))
        pools = home_pools(home) if home.is_dir() else None
        names = home if inside else folder
        workshop = Workshop(root / "quarantine" / "experience", pools, lambda path: _forget(home, path), names)
        repairs = fix_all(find_shards(home) if folder is None else find_below(folder), workshop)
        if folder is None:
            repairs.done += _take_back(home)
    again = look()
    again.repairs, again.unrepaired, again.lost = repairs.done, repairs.failed, repairs.lost
    return again


def _look(home: Path, folder: Path | None, progress: Progress) -> Callable[[], Report]:
    if folder is None:
        return lambda: check_home(home, progress=progress)
    return lambda: check_folder(folder, home=home if home.is_dir() else None, progress=progress)


def _forget(home: Path, path: Path) -> None:
    """Removes the reference to a materialisation that is another now, so that the next run makes it again."""
    name = find_claims(home).current.get(path.resolve())
    if name is not None:
        (home / "references" / "trajectories" / f"{name[13:-1]}.json").unlink(missing_ok=True)


def _take_back(home: Path) -> list[str]:
    """Removes references that name another digest than the shard has: the next run makes them again."""
    claims, done = find_claims(home), []
    digests = {holding.path.resolve(): holding.digest for holding in find_shards(home)}
    for folder, wanted in claims.expected.items():
        if digests.get(folder) not in (None, wanted):
            _forget(home, folder)
            done.append(f"{claims.current[folder]}: a reference to another digest is taken back")
    return done


# ------------------------------------------------------------------------------------------------ retention


@dataclass
class Outcome:
    """A plan and what became of it."""

    plan: Plan
    failures: dict[str, AgentpipeError] = field(default_factory=dict)
    """shards that stayed as they are, although something was planned → why"""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "bytes_before": self.plan.bytes_before,
            "bytes_after": self.plan.bytes_after,
            "over": self.plan.over,
            "in_use": self.plan.in_use(),
            "actions": [action.to_json() for action in self.plan.actions],
            "failures": [{"shard": shard, "error": error.as_dict()} for shard, error in self.failures.items()],
        }


def retention(
    home: Path, rules: Rules, *, dry_run: bool = False, now_ns: int | None = None, progress: Progress = silent
) -> Outcome:
    """Applies ``rules`` to every shard of a home.

    A shard that shrinks is played again and compared first; one that does not come back as it was stays full, and is
    among the failures. Whoever has a deleted shard open keeps what is mapped.

    Raises:
        CorruptError: a checkpoint, package or reference cannot be read, so that it cannot be told what is needed.
        LockHeldError: another process works on the home.
    """
    if dry_run:
        return Outcome(_plan(home, rules, now_ns))
    with home_lock(home, "agentpipe buffer retain"):
        outcome = Outcome(_plan(home, rules, now_ns))
        due = [action for action in outcome.plan.actions if action.verb != "keep"]
        pools = home_pools(home)
        for number, action in enumerate(due):
            progress("retain", number, len(due))
            path = action.candidate.path
            try:
                if action.verb == "delete":
                    remove_folder(path)
                else:
                    shrink(path, pools)
            except AgentpipeError as error:
                outcome.failures[str(path)] = error
        progress("retain", len(due), len(due))
        return outcome


def _plan(home: Path, rules: Rules, now_ns: int | None) -> Plan:
    claims = find_claims(home)
    if claims.unreadable:
        first = claims.unreadable[0]
        message = f"it cannot be told what is referred to: {first.message}"
        raise CorruptError(message, file=first.where.get("file"), remedy=first.remedy)
    candidates = [candidate(holding, claims) for holding in find_shards(home)]
    return plan(candidates, rules, now_ns=time.time_ns() if now_ns is None else now_ns)


def candidate(holding: Holding, claims: Claims) -> Candidate:
    """What retention has to know of a shard; whose it is can be told only where its manifest is as it was sealed."""
    said = holding.said
    state, readable = _condition(holding)
    shrinkable = state == "sealed" and readable and is_built_in(said)
    return Candidate(
        path=holding.path,
        state=state,
        group=holding.group,
        recorded=training_of(holding.path) is None,
        bytes=holding.bytes,
        shrunk_bytes=_shrunk_bytes(holding) if shrinkable else None,
        sealed_ns=sealed_ns(said),
        ordinal=newest_ordinal(said),
        claims=claims.on(holding),
        current=claims.is_current(holding),
        holder=holder_of(holding.path) if state == "open" else None,
        readable=readable,
    )


def _condition(holding: Holding) -> tuple[State, bool]:
    """Its state, ``damaged`` where the manifest is altered, and whether it is of the format that this program reads."""
    if holding.state in ("sealed", "shrunk"):
        try:
            read_manifest(holding.path / MANIFEST)
        except VersionError:
            return holding.state, False
        except CorruptError:
            return "damaged", True
    return holding.state, True


def _shrunk_bytes(holding: Holding) -> int:
    full = (rec.RECORDS, rec.FINALS, rec.GRAPH)
    gone = sum((holding.path / name).stat().st_size for name in full if (holding.path / name).exists())
    return holding.bytes - gone + int(holding.said["steps"]) * rec.COMPACT.itemsize


def remove_folder(path: Path) -> None:
    """Takes a folder away at once (by rename), then its content; whoever has a file of it mapped keeps it."""
    with typed_os_errors(path):
        aside = Path(tempfile.mkdtemp(prefix=".staging-gone-", dir=path.parent))
        path.rename(aside / path.name)
    shutil.rmtree(aside, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ one by one


@dataclass(frozen=True)
class Restored:
    """A shard with its full records."""

    shard: Shard
    changed: bool
    """they were made again; else it had them already"""


def restore_shards(home: Path, shards: Sequence[str], *, progress: Progress = silent) -> list[Restored]:
    """Makes the full records of shrunk shards again; see :func:`~agentpipe.experience.care.shrink.restore`."""
    paths = [choose(home, text) for text in shards]
    restored = []
    with home_lock(home, "agentpipe buffer restore"):
        for number, path in enumerate(paths):
            progress("restore", number, len(paths))
            changed = look_at(path).state == "shrunk"
            restored.append(Restored(restore(path, home_pools(home)), changed))
    progress("restore", len(paths), len(paths))
    return restored


def compact_shards(
    home: Path, shards: Sequence[str], *, partition: str | None = None, out: Path | None = None, keep: bool = False
) -> Shard:
    """Merges shards, those named or all sealed rollouts of a training, and removes them unless ``keep``.

    Raises:
        InputError: no such training; fewer than two shards, not of one cell or training, or claimed by somebody (who
            is named).
        RecordError: an episode occurs twice.
        CorruptError, VersionError, ShrunkError: one cannot be read.
        LockHeldError: another process works on the home.
    """
    folders = [choose(home, text) for text in shards]
    if partition is not None:
        folders += rollouts(home, partition)
    with home_lock(home, "agentpipe buffer compact"):
        refuse_claimed([look_at(path) for path in folders], find_claims(home))
        final = out if out is not None else folders[0].with_name(f"{folders[0].name}-compact") if folders else Path()
        shard = compact(folders, final, quality=figures)
        if not keep:
            for path in folders:
                remove_folder(path)
        return shard


def rollouts(home: Path, partition: str) -> list[Path]:
    """The sealed live rollouts of the trainings of a candidate, such as ``2026-01-31|manual``.

    Raises:
        InputError: no such training (those that there are are listed), or fewer than two sealed shards.
    """
    wanted, of_all = partition.replace("|", "_"), trainings(home)
    there = sorted({partition_of(training).replace("_", "|", 1) for training in of_all})
    if wanted not in {partition_of(training) for training in of_all}:
        remedy = f"there are: {', '.join(there)}" if there else "there are none in this home"
        raise InputError(f"no training {partition!r}", field="run", remedy=remedy)
    holdings = [holding for holding in find_shards(home) if training_of(holding.path) and holding.group == wanted]
    sealed = [holding.path for holding in holdings if holding.state == "sealed"]
    if len(sealed) < 2:
        shrunk = [holding.path for holding in holdings if holding.state == "shrunk"]
        remedy = f"make the full records again first: {restore_command(shrunk[0])}" if shrunk else "name other shards"
        text = f"{len(sealed)} sealed shards of {partition}, {len(shrunk)} shrunk: nothing to merge"
        raise InputError(text, field="run", remedy=remedy)
    return sealed
