"""HTTP to the daemon: one connection a request, over TCP or a unix socket. Standard library only."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
import time
import uuid
from typing import IO, Any, Iterator, Mapping, Optional, Tuple, Union
from urllib.parse import quote, urlencode

from ._errors import UnavailableException, from_reply

#: How long a request that changes something is sent again while the daemon is away.
AGAIN_SECONDS = 30.0
DEFAULT_URL = "http://127.0.0.1:7070"
Body = Union[bytes, IO[bytes], Iterator[bytes], None]


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: Optional[float]) -> None:
        super().__init__("sandboxd", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Transport:
    """Where the daemon is, and how it is asked."""

    def __init__(self, url: Optional[str] = None, api_key: Optional[str] = None) -> None:
        self.url = url or os.environ.get("DSEC_URL", DEFAULT_URL)
        self.api_key = api_key or os.environ.get("DSEC_API_KEY")

    def _connect(self, timeout: Optional[float]) -> http.client.HTTPConnection:
        if self.url.startswith("unix:"):
            return _UnixConnection(self.url[len("unix:") :], timeout)
        if self.url.startswith("http://"):
            return http.client.HTTPConnection(self.url[len("http://") :].rstrip("/"), timeout=timeout)
        raise UnavailableException(f"DSEC_URL is http://ADDRESS:PORT or unix:PATH, not {self.url!r}")

    def open(
        self,
        method: str,
        path: str,
        *,
        body: Body = None,
        query: Optional[Mapping[str, Any]] = None,
        timeout: Optional[float] = None,
    ) -> Tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Sends a request; the caller reads the response and closes the connection."""
        if query:
            path += "?" + urlencode({k: v for k, v in query.items() if v is not None})
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection = self._connect(timeout)
        try:
            chunked = body is not None and not isinstance(body, bytes)
            connection.request(method, path, body=body, headers=headers, encode_chunked=chunked)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise UnavailableException(f"sandboxd at {self.url}: {error}") from error
        if response.status >= 400:
            raw = response.read()
            connection.close()
            try:
                parsed = json.loads(raw)
            except ValueError:
                parsed = None
            raise from_reply(response.status, parsed)
        return connection, response

    def json(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Optional[Mapping[str, Any]] = None,
        timeout: Optional[float] = None,
    ) -> Any:
        """Sends JSON (or nothing), wants JSON (or nothing)."""
        raw = None if body is None else json.dumps(body).encode()
        return self._parsed(*self.open(method, path, body=raw, query=query, timeout=timeout))

    def change(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Optional[Mapping[str, Any]] = None,
        request_id: Optional[str] = None,
    ) -> Any:
        """As :meth:`json`, for what changes a sandbox: it has a name, so that sending it again because its answer got lost does
        nothing twice."""
        named = dict(query or {}, request_id=request_id or uuid.uuid4().hex)
        until = time.monotonic() + AGAIN_SECONDS
        while True:
            try:
                return self.json(method, path, body, query=named)
            except UnavailableException:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def upload(self, method: str, path: str, body: Body, query: Mapping[str, Any]) -> Any:
        """Sends bytes, wants JSON (or nothing)."""
        return self._parsed(*self.open(method, path, body=body, query=query))

    def _parsed(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> Any:
        try:
            raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableException(f"sandboxd at {self.url} broke off: {error}") from error
        finally:
            connection.close()
        return json.loads(raw) if raw else None


def segment(text: str) -> str:
    """A text as one part of a path."""
    return quote(text, safe="")


def frames(response: http.client.HTTPResponse) -> Iterator[Tuple[bytes, bytes]]:
    """Kind and payload of each frame of a stream."""
    while True:
        head = _exactly(response, 4, may_end=True)
        if not head:
            return
        (length,) = struct.unpack("<I", head)
        payload = _exactly(response, length, may_end=False)
        yield payload[:1], payload[1:]


def _exactly(response: http.client.HTTPResponse, length: int, may_end: bool) -> bytes:
    data = b""
    while len(data) < length:
        piece = response.read(length - len(data))
        if not piece:
            if may_end and not data:
                return b""
            raise http.client.IncompleteRead(data)
        data += piece
    return data
