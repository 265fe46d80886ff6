"""Watching a folder of a sandbox."""

from __future__ import annotations

import http.client
import json
import socket
import time
from dataclasses import dataclass
from typing import Iterator, Optional

from ._errors import UnavailableException, from_reply
from ._http import frames

#: The daemon says at least this often that it is there (it does every 15 seconds).
SILENCE_SECONDS = 60.0


@dataclass
class WatchEvent:
    """What happened to an entry."""

    #: ``create``, ``write``, ``remove``, ``rename`` (it has another name now), ``chmod``, or ``overflow``: more happened than could
    #: be told, look anew.
    change: str
    #: The entry's path below the watched folder.
    name: str


class Watch:
    """A folder that is watched: iterate over it, and close it (or use ``with``).

    From when it exists on nothing is missed.
    """

    def __init__(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        self._connection = connection
        # Taken now: the connection forgets it with the response.
        self._sock = connection.sock
        self._frames = frames(response)
        self._closed = False
        self._next_frame(None)

    def _next_frame(self, until: Optional[float]) -> "tuple[bytes, bytes]":
        left = SILENCE_SECONDS if until is None else min(SILENCE_SECONDS, until - time.monotonic())
        if left <= 0:
            raise socket.timeout()
        if self._sock is not None:
            self._sock.settimeout(left)
        try:
            return next(self._frames)
        except socket.timeout:
            raise
        except (StopIteration, OSError, ValueError, http.client.HTTPException) as error:
            raise UnavailableException(f"the watch broke off: {error}") from error

    def get(self, timeout: Optional[float] = None) -> Optional[WatchEvent]:
        """The next event; ``None`` if none came in time. After that it can only be closed: half of an event may have been read."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                kind, payload = self._next_frame(until)
            except socket.timeout as late:
                self.close()
                if until is not None:
                    return None
                raise UnavailableException("the watch is silent") from late
            if kind == b"D":
                return WatchEvent(**json.loads(payload))
            if kind == b"X":
                self.close()
                raise from_reply(0, json.loads(payload))

    def __iter__(self) -> Iterator[WatchEvent]:
        while True:
            try:
                event = self.get()
            except UnavailableException:
                if self._closed:
                    return
                raise
            if event is not None:
                yield event

    def close(self) -> None:
        """Ends it; an iteration in another thread ends too."""
        self._closed = True
        if self._sock is not None:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._connection.close()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
