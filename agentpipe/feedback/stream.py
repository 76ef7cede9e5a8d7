"""Feedback from a Redis stream, read as a consumer group: one entry a row, in the field ``row`` as a JSON object.

An entry is acknowledged only after its row is durable, in its day or in quarantine. One that was delivered and not
acknowledged (a crash, a lost connection) is delivered again, and is then seen to have been taken: by its id and its
content, since a server that was emptied or replaced may give an id a second time.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agentpipe.environments.table_redis_client import connect, redis_errors
from agentpipe.errors import AgentpipeError
from agentpipe.feedback.block import Refused, Row
from agentpipe.feedback.intake import Intake, committing, take
from agentpipe.feedback.rows import read_row
from agentpipe.storage import digest_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from redis import Redis

    from agentpipe.feedback.batch import Batch
    from agentpipe.feedback.rules import Rules
    from agentpipe.settings import Settings

FIELD: Final = b"row"
"""the field of an entry that holds the row"""
NO_ROW: Final = "the entry has no field named row"
"""detail of an entry that holds none"""
_STREAM: Final = "stream:"
_SHORT: Final = 12
"""characters of a digest that tell entries of one id apart"""

Entry = tuple[bytes, dict[bytes, bytes] | None]


def is_stream(digest: str) -> bool:
    """True where the digest of a source stands for a stream."""
    return digest.startswith(_STREAM)


def consumer_of(store: Path) -> str:
    """The name under which a store reads: the same after a restart, so that it finds what was delivered to it."""
    return f"{socket.gethostname()}-{digest_bytes(str(store.resolve()).encode())[:8]}"


@dataclass(frozen=True)
class FeedbackStream:
    """Where feedback is read from, and how much at once.

    Args:
        url: of the server, as in ``agentpipe.environments.table_redis_client.connect``; never shown.
        stream: Its key; group and stream are created when missing, and the group begins with the first entry.
        group: The consumer group.
        consumer: Our name in the group; empty: one that follows from host and store.
        at_once: Entries of one commit.
        most: Entries of one call; the rest waits for the next.
        dead_after_s: Seconds after which an entry that another consumer has not acknowledged is ours.
    """

    url: str = field(repr=False)
    stream: str
    group: str
    consumer: str = ""
    at_once: int = 1_000
    most: int = 100_000
    dead_after_s: float = 60.0


def stream_of(settings: Settings) -> FeedbackStream | None:
    """The stream that the settings name; None where no Redis is set."""
    if settings.redis_url is None:
        return None
    options = settings.feedback
    return FeedbackStream(settings.redis_url.get_secret_value(), options.stream, options.group)


def waiting_entries(source: FeedbackStream) -> str:
    """What the stream holds that is not acknowledged; empty where there is nothing.

    Its last entry's id, how many, and a digest of its first and last entry: the ids may come a second time.

    Raises:
        RedisServerError: the server is away, slow, refuses, or the key is no stream.
    """
    with contextlib.closing(connect(source.url)) as client, redis_errors(client):
        if not client.exists(source.stream):
            return ""
        about: Any = client.xinfo_stream(source.stream)
        groups: Any = client.xinfo_groups(source.stream)
    own = [group for group in groups if group["name"] in (source.group, source.group.encode())]
    if not own:
        count = int(about["length"])
    else:  # the server does not know the lag where entries were deleted: what it has delivered tells
        lag = own[0].get("lag")
        behind = own[0]["last-delivered-id"] != about["last-generated-id"]
        count = int(own[0]["pending"]) + (int(behind) if lag is None else int(lag))
    last = about["last-generated-id"]
    ends = digest_bytes(repr((about.get("first-entry"), about.get("last-entry"))).encode())[:_SHORT]
    return f"{last.decode() if isinstance(last, bytes) else last}:{count}:{ends}" if count else ""


class Taken(NamedTuple):
    """What inbox and stream gave, by name; ``failure`` is why the stream could not be read, after the inbox was."""

    intakes: dict[str, Intake]
    failure: AgentpipeError | None


def take_all(inbox: Path, store: Path, rules: Rules, source: FeedbackStream | None) -> Taken:
    """What lies in the inbox, and then what the stream has; see :func:`take_stream`.

    Raises:
        StoreError: the inbox could not be taken; nothing was.
    """
    done, failure = {"inbox": take(inbox, store, rules)}, None
    if source is not None:
        try:
            done["stream"] = take_stream(source, store, rules)
        except AgentpipeError as error:
            failure = error
    return Taken(done, failure)


def take_stream(source: FeedbackStream, store: Path, rules: Rules) -> Intake:
    """Takes what the stream has for us; the caller holds the home's lock.

    First comes what was delivered to us before and not acknowledged, then what consumers left that have been silent for
    long, then what is new.

    Raises:
        RedisServerError: the server is away, slow, refuses, or the key is no stream; what was committed stays so.
        StoreError: the store cannot be read or written; nothing was acknowledged that is not durable.
    """
    reader = _Reader(source, source.consumer or consumer_of(store))
    taken, already, left = 0, 0, source.most
    quarantined: Counter[str] = Counter()
    with contextlib.closing(connect(source.url)) as client, redis_errors(client):
        reader.prepare(client)
        for entries in reader.batches(client):
            with committing(store, rules) as batch:
                _add(batch, source.stream, entries)
            reader.acknowledge(client, entries)
            taken, already = taken + batch.taken, already + batch.already
            quarantined.update(batch.quarantined)
            left -= len(entries)
            if left <= 0:
                break
    return Intake(rows_taken=taken, rows_already=already, quarantined=dict(sorted(quarantined.items())))


class _Reader:
    """One consumer of a group."""

    def __init__(self, source: FeedbackStream, consumer: str) -> None:
        self.stream, self.group, self.consumer = source.stream, source.group, consumer
        self.count, self.dead_after_ms = source.at_once, int(1_000 * source.dead_after_s)

    def prepare(self, client: Redis) -> None:
        """Makes stream and group where they are missing."""
        from redis.exceptions import ResponseError

        try:
            client.xgroup_create(self.stream, self.group, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):  # it is there
                raise

    def batches(self, client: Redis) -> Iterator[list[Entry]]:
        """Entries to take, so many at once: our own pending ones, those of the dead, new ones."""
        yield from self._read(client, "0")
        start = b"0-0"
        while True:
            found: Any = client.xautoclaim(
                self.stream, self.group, self.consumer, self.dead_after_ms, start, self.count
            )
            if found[1]:
                yield found[1]
            start = found[0]
            if start == b"0-0":
                break
        yield from self._read(client, ">")

    def _read(self, client: Redis, after: str) -> Iterator[list[Entry]]:
        while True:
            found: Any = client.xreadgroup(self.group, self.consumer, {self.stream: after}, count=self.count)
            streams = found.items() if isinstance(found, dict) else found or []
            entries = [entry for _, listed in streams for entry in _flat(listed)]
            if not entries:
                return
            yield entries
            if after != ">":
                after = entries[-1][0].decode()

    def acknowledge(self, client: Redis, entries: list[Entry]) -> None:
        """Says that the entries are durable here."""
        client.xack(self.stream, self.group, *(identifier for identifier, _ in entries))


def _flat(listed: list[Any]) -> list[Entry]:
    """The entries of one stream; the newer protocol wraps them in one more list."""
    return listed[0] if listed and isinstance(listed[0], list) else listed


def _add(batch: Batch, stream: str, entries: list[Entry]) -> None:
    """The rows of entries that are not in quarantine already; what was deleted meanwhile has none."""
    source = batch.source(f"{_STREAM}{stream}", stream)[0]
    for identifier, fields in entries:
        line = place_of_entry(identifier, fields)
        query = "SELECT 1 FROM quarantine WHERE source = ? AND line = ?"
        if batch.connection.execute(query, (source, line)).fetchone():
            batch.already += 1
        elif fields:
            batch.add(source, iter([_row(line, fields)]))


def place_of_entry(identifier: bytes, fields: dict[bytes, bytes] | None) -> str:
    """Which entry it was, whatever became of the server: ``<id>#<digest of its row, or of all its fields>``."""
    content = (fields or {}).get(FIELD)
    data = content if content is not None else repr(sorted((fields or {}).items())).encode()
    return f"{identifier.decode()}#{digest_bytes(data)[:_SHORT]}"


def _row(line: str, fields: dict[bytes, bytes]) -> Row | Refused:
    text = fields.get(FIELD)
    if text is None:
        names = {key.decode(errors="backslashreplace"): str(value)[:200] for key, value in list(fields.items())[:20]}
        return Refused("missing_field", NO_ROW, line, json.dumps(names).encode())
    return read_row(text.strip(), line, text)
