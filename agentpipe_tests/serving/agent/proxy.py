"""A TCP proxy that misbehaves on demand, between an agent and whatever it talks to."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Self


class Proxy:
    """Forwards connections on a free port of 127.0.0.1 to ``target``.

    ``mode`` may be changed at any time and holds for open connections too:

    - ``pass``: forwards
    - ``swallow``: takes everything and forwards nothing, as a cut cable does
    - ``refuse``: accepts and closes at once
    - ``reset``: as refuse, with RST, also for open connections
    - ``half``: closes the direction towards the client, keeps taking what it sends

    ``delay`` seconds pass before each piece is forwarded.
    """

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self.mode, self.delay, self.accepted = "pass", 0.0, 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    def set(self, mode: str) -> None:
        """Changes the mode, and does to open connections what it says."""
        self.mode = mode
        with self._lock:
            sockets = list(self._open)
        for each in sockets:
            with contextlib.suppress(OSError):
                if mode == "reset":
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    each.close()
                elif mode == "refuse":
                    each.shutdown(socket.SHUT_RDWR)
                elif mode == "half":
                    each.shutdown(socket.SHUT_WR)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            self.accepted += 1
            if self.mode in ("refuse", "reset"):
                if self.mode == "reset":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, timeout=2)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._open |= {client, server}
            if self.mode == "half":
                client.shutdown(socket.SHUT_WR)
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink), name="proxy", daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if self.delay:
                    time.sleep(self.delay)
                if self.mode != "swallow":
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends every connection and the proxy."""
        self._closing.set()
        self._listener.close()
        self.set("reset")
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
