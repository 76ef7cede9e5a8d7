"""Alerts to a webhook that takes Slack-compatible JSON.

Telling somebody is never a reason to fail: :func:`send` returns what happened. The URL of a webhook is a secret (who
has it may post), so no message, log or exception holds it.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import queue
import re
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import SecretStr

from agentpipe.errors import AlertError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Slack's limits, in characters: https://docs.slack.dev/reference/block-kit/blocks. A link's leaves room for its frame.
HEADER_LIMIT, SECTION_LIMIT, FIELD_LIMIT, FIELDS_A_SECTION, LINK_LIMIT = 150, 3_000, 2_000, 10, 2_900
TEXT_LIMIT = 4_000
MOST_FIELDS = 20
LONGEST_PAUSE = 10.0
"""Seconds that are waited before another attempt at most; a receiver that asks for more is not asked again."""
NO_WEBHOOK = "no webhook is set"
_LONGEST = 3 * TEXT_LIMIT
_ANSWER_LIMIT = 4_096
_CODE = re.compile(r"[a-z][a-z_]{1,39}")


@dataclass(frozen=True)
class Alert:
    """What somebody should know.

    Attributes:
        title: one line.
        text: what happened and what to do, plain text.
        fields: a few names and values, in order.
        link: an ``http`` or ``https`` page to look at.
    """

    title: str
    text: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)
    link: str | None = None


class Sent(NamedTuple):
    """What became of an alert: ``reason`` is empty where it was delivered; ``status`` is the last HTTP one, if any."""

    delivered: bool
    attempts: int
    status: int | None
    reason: str


class _Answer(NamedTuple):
    status: int | None
    reason: str
    again: bool
    """whether another attempt may help"""
    pause: float | None = None
    """seconds that the receiver asks to wait"""


# ----------------------------------------------------------------------------------------------- message


def to_slack(alert: Alert) -> dict[str, Any]:
    """The alert as Slack takes it: ``text`` for notifications, ``blocks`` for the message, cut to Slack's limits.

    Header (150 characters), text (3,000), up to twenty fields of 2,000 in sections of ten, link. ``&``, ``<`` and ``>``
    are escaped, so that nothing in a field becomes a mention or a link.
    """
    text = _clean(alert.text).strip()
    title = " ".join(_clean(alert.title).split()) or "agentpipe"
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": _cut(title, HEADER_LIMIT)}}
    ]
    if text:
        blocks.append({"type": "section", "text": _markdown(_escaped(text, SECTION_LIMIT))})
    shown = [_field(name, value) for name, value in list(alert.fields.items())[:MOST_FIELDS]]
    parts = [shown[start : start + FIELDS_A_SECTION] for start in range(0, len(shown), FIELDS_A_SECTION)]
    blocks += [{"type": "section", "fields": part} for part in parts]
    if len(alert.fields) > MOST_FIELDS:
        blocks.append({"type": "context", "elements": [_markdown(f"{len(alert.fields) - MOST_FIELDS} more fields")]})
    link = _link(alert.link)
    if link:
        blocks.append({"type": "section", "text": _markdown(f"<{link}|Open>")})
    return {"text": _escaped(f"{title}: {text}" if text else title, TEXT_LIMIT), "blocks": blocks}


def _markdown(text: str) -> dict[str, Any]:
    return {"type": "mrkdwn", "text": text}


def _field(name: str, value: object) -> dict[str, Any]:
    head = f"*{_escaped(' '.join(_clean(str(name)).split()), HEADER_LIMIT)}*\n"
    return _markdown(head + (_escaped(_clean(str(value)).strip(), FIELD_LIMIT - len(head)) or "–"))


def _clean(text: str) -> str:
    """``text``, no longer than is ever shown, without halves of characters and without control characters."""
    whole = text[:_LONGEST].encode("utf-8", "replace").decode()
    return "".join(character for character in whole if character >= " " or character in "\n\t")


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _escaped(text: str, limit: int) -> str:
    """``text`` with Slack's three characters escaped, at most ``limit`` long, no escape cut in two."""
    escaped = text[: limit + 1].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped if len(escaped) <= limit else re.sub("&[a-z]*$", "", escaped[: limit - 1]) + "…"


def _link(link: str | None) -> str:
    if link is None or not link.lower().startswith(("http://", "https://")):
        return ""
    quoted = urllib.parse.quote(_clean(link), safe="%/:=&?#+!$,;'@()*[]~").replace("&", "&amp;")
    return quoted if len(quoted) <= LINK_LIMIT else ""


# ----------------------------------------------------------------------------------------------- sending


def send(
    webhook: SecretStr | str | None,
    alert: Alert,
    timeout: float = 5.0,
    *,
    attempts: int = 3,
    pause: float = 0.5,
    raising: bool = False,
) -> Sent:
    """Posts an alert, and again after a 5xx, a 429, a time-out or a failed connection.

    An answer that does not come in time may mean that the alert was taken, so it can arrive twice. Redirects are not
    followed. In all it takes at most ``attempts`` time-outs and the pauses between them.

    Args:
        webhook: the URL; a secret. None: nothing is tried, in no attempt, for the reason :data:`NO_WEBHOOK`.
        alert: what is told.
        timeout: seconds of one attempt, from looking up the name to the end of the answer.
        attempts: one or more.
        pause: seconds before the second attempt, doubled before each later one; ``Retry-After`` takes its place.
        raising: whether failing to deliver raises.

    Raises:
        AlertError: not delivered, with ``raising`` only.
    """
    if webhook is None:
        sent = Sent(delivered=False, attempts=0, status=None, reason=NO_WEBHOOK)
    else:
        url = webhook.get_secret_value() if isinstance(webhook, SecretStr) else webhook
        sent = _send(url, json.dumps(to_slack(alert)).encode(), timeout, attempts, pause)
    if raising and not sent.delivered:
        remedy = "look at AGENTPIPE_ALERTS__WEBHOOK and at the receiver"
        raise AlertError(f"the alert was not delivered: {sent.reason}", attempts=sent.attempts, remedy=remedy)
    return sent


def _send(url: str, body: bytes, timeout: float, attempts: int, pause: float) -> Sent:
    """One attempt after the other, until one is taken, none can help, or there were enough."""
    done, answer = 0, _Answer(None, "no attempt was made", again=False)
    for done in range(1, max(1, attempts) + 1):
        answer = _attempt(url, body, timeout)
        wait = pause * 2 ** (done - 1) if answer.pause is None else answer.pause
        if not answer.again or done >= attempts or wait > LONGEST_PAUSE:
            break
        time.sleep(wait)
    return Sent(not answer.reason, done, answer.status, answer.reason)


def _attempt(url: str, body: bytes, timeout: float) -> _Answer:
    """One post with a limit on all of it: a slow look-up of the name, or an answer byte by byte, has no other."""
    answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
    worker = threading.Thread(target=lambda: answers.put(_post(url, body, timeout)), name="alert", daemon=True)
    worker.start()
    try:
        return answers.get(timeout=timeout)
    except queue.Empty:
        return _timed_out(timeout)


def _timed_out(timeout: float) -> _Answer:
    return _Answer(None, f"no answer within {timeout:g} s", again=True)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer, not another address to tell it to."""

    def redirect_request(self, *arguments: Any) -> None:  # noqa: ANN401, ARG002 - urllib's interface
        return None


def _post(url: str, body: bytes, timeout: float) -> _Answer:
    if not url.lower().startswith(("http://", "https://")):
        return _malformed()
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "agentpipe"}
    try:
        request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310 - checked above
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout) as answer:
            answer.read(_ANSWER_LIMIT)
            return _Answer(answer.status, "", again=False)
    except urllib.error.HTTPError as error:
        with error:
            return _refused(error)
    except TimeoutError:
        return _timed_out(timeout)
    except http.client.InvalidURL:
        return _malformed()
    except (OSError, http.client.HTTPException) as error:
        return _failed(error, timeout)
    except ValueError:
        return _malformed()


def _malformed() -> _Answer:
    return _Answer(None, "the webhook is not a web address", again=False)


def _refused(error: urllib.error.HTTPError) -> _Answer:
    """An answer that is no success. It may echo the URL: only a code such as Slack's ``no_service`` is told of it."""
    text = ""
    with contextlib.suppress(OSError, http.client.HTTPException):
        text = error.read(_ANSWER_LIMIT).decode(errors="replace").strip()
    code = f" ({text})" if _CODE.fullmatch(text) else ""
    again = error.code == http.HTTPStatus.TOO_MANY_REQUESTS or error.code >= http.HTTPStatus.INTERNAL_SERVER_ERROR
    pause = _seconds(error.headers.get("Retry-After")) if again else None
    return _Answer(error.code, f"the receiver answered {error.code}{code}", again, pause)


def _seconds(retry_after: str | None) -> float | None:
    """``Retry-After`` in seconds: a number, or a date."""
    if retry_after is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(int(retry_after)))
    with contextlib.suppress(ValueError):
        moment = email.utils.parsedate_to_datetime(retry_after)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return max(0.0, (moment - datetime.now(UTC)).total_seconds())
    return None


def _failed(error: OSError | http.client.HTTPException, timeout: float) -> _Answer:
    """A connection that failed; what the system says of it names no address."""
    cause = getattr(error, "reason", error)
    if isinstance(cause, TimeoutError):
        return _timed_out(timeout)
    if isinstance(cause, ssl.SSLError):
        return _Answer(None, "no trusted encrypted connection to the receiver", again=False)
    said = cause.strerror if isinstance(cause, OSError) and cause.strerror else type(cause).__name__
    return _Answer(None, f"the receiver cannot be reached: {said}", again=True)
