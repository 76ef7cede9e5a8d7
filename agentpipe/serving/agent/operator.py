"""A person at a line that speaks the agent's protocol: takes stations over and hands them back."""

from __future__ import annotations

import socket
from typing import Any, Final

from agentpipe.errors import LineError
from agentpipe.serving.agent.messages import LONGEST_LINE, PROTOCOL, encode, load
from agentpipe.serving.agent.socket_line import parse_url

_SECONDS: Final = 5.0


def tell_line(url: str, kind: str, who: str, station: str | None = None, **fields: object) -> dict[str, Any]:
    """Says one thing to the line at ``url`` and returns what it replies.

    Args:
        url: ``tcp://HOST:PORT``.
        kind: ``takeover``, ``release``, ``act`` (with ``action``) or ``figures``.
        who: the person's name.
        station: which one; None: all.
        fields: more of the message.

    Raises:
        LineError: the line is not there, or does not do it; says why.
    """
    message = {"type": kind, **({} if station is None else {"line_id": station}), **fields}
    hello = {"type": "hello", "protocol": PROTOCOL, "role": "operator", "who": who}
    try:
        with socket.create_connection(parse_url(url), _SECONDS) as connection, connection.makefile("rb") as replies:
            connection.sendall(encode(hello) + encode(message))
            line = replies.readline(LONGEST_LINE)
    except OSError as error:
        raise LineError(f"the line cannot be told: {error}", url=url, remedy="is it running?") from error
    if not line:
        raise LineError("the line has ended the connection", url=url, remedy="is it an agentpipe line?")
    reply = load(line)
    if reply.get("ok") is not True:
        raise LineError(f"the line refuses: {reply.get('reason')}", url=url, remedy="ask for what it can do now")
    return reply
