"""Commands and shell sessions of a sandbox."""

from __future__ import annotations

import base64
import http.client
import json
import shlex
import socket
import struct
import time
import uuid
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, TYPE_CHECKING, Tuple, Union

from ._errors import (
    CommandExitException,
    InfraFailedException,
    NotFoundException,
    SandboxException,
    SandboxGoneException,
    TimeoutException,
    UnavailableException,
)
from ._http import frames, segment

if TYPE_CHECKING:
    from ._sandbox import Sandbox

#: How long a stream that broke off is attached to again.
REATTACH_SECONDS = 30.0
Sink = Optional[Callable[[str], None]]
Data = Union[bytes, str]


def _bytes(data: Data) -> bytes:
    return data.encode() if isinstance(data, str) else data


@dataclass
class CommandResult:
    """How a command ended, and what it printed."""

    exec_id: str
    outcome: str
    exit_code: int
    stdout_bytes: bytes
    stderr_bytes: bytes
    #: Bytes were left out between the kept beginning and end.
    truncated: bool = False
    signal: Optional[int] = None
    message: Optional[str] = None
    duration_ms: int = 0

    @property
    def stdout(self) -> str:
        """Standard output as text; what is not UTF-8 is replaced. ``stdout_bytes`` has the bytes."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Standard error as text."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def timed_out(self) -> bool:
        """Its time was over, and everything that it started was killed."""
        return self.outcome == "timed_out"

    @property
    def oom(self) -> bool:
        """It was killed for lack of memory."""
        return self.outcome == "oom"

    def check(self) -> "CommandResult":
        """Itself, if the command did well; raises otherwise."""
        if self.outcome == "timed_out":
            raise TimeoutException("the command's time was over", self)
        if self.outcome == "sandbox_gone":
            raise SandboxGoneException(self.message or "the sandbox is gone")
        if self.outcome == "infra_failed":
            raise InfraFailedException(self.message or "what became of the command is not known")
        if self.exit_code != 0:
            why = self.message or self.stderr.strip()[-500:]
            raise CommandExitException(f"exit status {self.exit_code}: {why}", self)
        return self


class CommandHandle:
    """A command that runs."""

    def __init__(self, sandbox: "Sandbox", exec_id: str, pid: int) -> None:
        self._sandbox = sandbox
        self.exec_id = exec_id
        self.pid = pid

    def _path(self, what: str = "") -> str:
        return self._sandbox._path(f"/execs/{segment(self.exec_id)}{what}")

    def wait(
        self, on_stdout: Sink = None, on_stderr: Sink = None, check: bool = True
    ) -> CommandResult:
        """Follows it to its end. A connection that breaks off is made again where it was."""
        result = _Follower(self, on_stdout, on_stderr).run(None)
        return result.check() if check else result

    def send_stdin(self, data: Data, *, request_id: Optional[str] = None) -> None:
        """Gives it input (it must have been started with ``stdin=True`` or a terminal)."""
        query = {"request_id": request_id}
        self._sandbox._transport.upload("POST", self._path("/stdin"), _bytes(data), query)

    def close_stdin(self) -> None:
        """Says that no more input follows."""
        self._sandbox._transport.upload("POST", self._path("/stdin"), b"", {"eof": "true"})

    def kill(self) -> None:
        """Kills everything that it started."""
        self.send_signal(9, tree=True)

    def send_signal(
        self, signal: int, tree: bool = False, *, request_id: Optional[str] = None
    ) -> None:
        """Sends a signal to its main process."""
        body = {"signal": signal, "tree": tree}
        at = self._path("/signal")
        self._sandbox._transport.change("POST", at, body, request_id=request_id)

    def resize(self, cols: int, rows: int) -> None:
        """Changes its terminal's size."""
        self._sandbox._transport.json("POST", self._path("/resize"), {"cols": cols, "rows": rows})


class _Follower:
    """Reads a stream of frames to the end of the command, over as many connections as it takes."""

    def __init__(self, handle: CommandHandle, on_stdout: Sink, on_stderr: Sink) -> None:
        self.handle = handle
        self.sinks = {b"1": on_stdout, b"2": on_stderr}
        self.decoders = {kind: _decoder() for kind in (b"1", b"2")}
        self.data = {b"1": bytearray(), b"2": bytearray()}
        self.next = {b"1": 0, b"2": 0}
        self.gap = False

    def run(
        self, first: Optional[Tuple[http.client.HTTPConnection, http.client.HTTPResponse]]
    ) -> CommandResult:
        until = time.monotonic() + REATTACH_SECONDS
        while True:
            try:
                connection, response = first or self._attach()
                first = None
                try:
                    exit_ = self._read(response)
                finally:
                    connection.close()
                if exit_ is not None:
                    return self._result(exit_)
            except (OSError, http.client.HTTPException, UnavailableException) as error:
                if time.monotonic() > until:
                    raise UnavailableException(f"the stream broke off: {error}") from error
                time.sleep(0.1)

    def _attach(self) -> Tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        query = {"stdout_from": self.next[b"1"], "stderr_from": self.next[b"2"]}
        transport = self.handle._sandbox._transport
        # Longer than the daemon's keepalives.
        return transport.open("GET", self.handle._path("/stream"), query=query, timeout=60)

    def _read(self, response: http.client.HTTPResponse) -> Optional[Dict[str, Any]]:
        for kind, payload in frames(response):
            if kind in (b"1", b"2"):
                (at,) = struct.unpack("<Q", payload[:8])
                self._take(kind, at, payload[8:])
            elif kind == b"X":
                parsed: Dict[str, Any] = json.loads(payload)
                return parsed
        return None

    def _take(self, kind: bytes, at: int, data: bytes) -> None:
        if at > self.next[kind]:
            self.gap = True
        data = data[max(0, self.next[kind] - at) :]
        self.next[kind] = max(self.next[kind], at) + len(data)
        self.data[kind] += data
        sink = self.sinks[kind]
        if sink is not None and data:
            text = self.decoders[kind](data)
            if text:
                sink(text)

    def _result(self, exit_: Mapping[str, Any]) -> CommandResult:
        return _result(self.handle.exec_id, exit_, bytes(self.data[b"1"]), bytes(self.data[b"2"]), self.gap)


def _decoder() -> Callable[[bytes], str]:
    import codecs

    # Characters may straddle frames.
    return codecs.getincrementaldecoder("utf-8")("replace").decode


def _result(
    exec_id: str, exit_: Mapping[str, Any], stdout: bytes, stderr: bytes, truncated: bool
) -> CommandResult:
    return CommandResult(
        exec_id=exec_id,
        outcome=exit_["outcome"],
        exit_code=exit_["exit_code"],
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        truncated=truncated,
        signal=exit_.get("signal"),
        message=exit_.get("message"),
        duration_ms=exit_.get("duration_ms", 0),
    )


class Commands:
    """Commands of a sandbox."""

    def __init__(self, sandbox: "Sandbox") -> None:
        self._sandbox = sandbox

    def run(
        self,
        cmd: Union[str, Sequence[str]],
        *,
        timeout: Optional[float] = None,
        on_stdout: Sink = None,
        on_stderr: Sink = None,
        stdin: Optional[Data] = None,
        envs: Optional[Mapping[str, str]] = None,
        cwd: Optional[str] = None,
        user: Optional[str] = None,
        check: bool = True,
        request_id: Optional[str] = None,
    ) -> CommandResult:
        """Runs a line of shell (or a program with arguments) to its end.

        ``timeout`` is kept by the daemon: everything that the command started is killed then. With ``request_id`` a second call
        returns what the first one did, and runs nothing. Raises ``CommandExitException`` or ``TimeoutException`` unless ``check``
        is false. A lost connection never runs a command twice: the client attaches again.
        """
        stream = on_stdout is not None or on_stderr is not None or stdin is not None
        body = self._body(cmd, timeout, envs, cwd, user, request_id)
        if not stream:
            result = self._run_whole(body)
            return result.check() if check else result
        body.update(stream=True, stdin=stdin is not None)
        raw = json.dumps(body).encode()
        path = self._sandbox._path("/execs")
        first = self._sandbox._transport.open("POST", path, body=raw, timeout=60)
        handle = CommandHandle(self._sandbox, body["request_id"], 0)
        if stdin is not None:
            import threading

            threading.Thread(target=self._feed, args=(handle, _bytes(stdin)), daemon=True).start()
        result = _Follower(handle, on_stdout, on_stderr).run(first)
        return result.check() if check else result

    @staticmethod
    def _feed(handle: CommandHandle, data: bytes) -> None:
        transport = handle._sandbox._transport
        try:
            transport.upload("POST", handle._path("/stdin"), data, {"eof": "true"})
        except SandboxException:
            # The command ended without reading it; its status says the rest.
            pass

    def _body(
        self,
        cmd: Union[str, Sequence[str]],
        timeout: Optional[float],
        envs: Optional[Mapping[str, str]],
        cwd: Optional[str],
        user: Optional[str],
        request_id: Optional[str],
    ) -> Dict[str, Any]:
        body: Dict[str, Any] = {"cmd": cmd} if isinstance(cmd, str) else {"args": list(cmd)}
        body.update(envs=dict(envs or {}), request_id=request_id or uuid.uuid4().hex)
        for name, value in (("timeout", timeout), ("cwd", cwd), ("user", user)):
            if value is not None:
                body[name] = value
        return body

    def _send(self, body: Dict[str, Any]) -> Dict[str, Any]:
        until = time.monotonic() + REATTACH_SECONDS
        while True:
            try:
                reply: Dict[str, Any] = self._sandbox._transport.json(
                    "POST", self._sandbox._path("/execs"), body
                )
                return reply
            except UnavailableException:
                # The same id: what runs is attached to, what has run is told.
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def _run_whole(self, body: Dict[str, Any]) -> CommandResult:
        reply = self._send(body)
        stdout, stderr = base64.b64decode(reply["stdout"]), base64.b64decode(reply["stderr"])
        return _result(reply["exec_id"], reply, stdout, stderr, reply["truncated"])

    def start(
        self,
        cmd: Union[str, Sequence[str]],
        *,
        timeout: Optional[float] = None,
        stdin: bool = False,
        envs: Optional[Mapping[str, str]] = None,
        cwd: Optional[str] = None,
        user: Optional[str] = None,
        pty: Optional[Tuple[int, int]] = None,
        request_id: Optional[str] = None,
    ) -> CommandHandle:
        """Starts a command in the background; with ``pty=(cols, rows)`` at a terminal."""
        body = self._body(cmd, timeout, envs, cwd, user, request_id)
        body.update(background=True, stdin=stdin)
        if pty is not None:
            body["pty"] = {"cols": pty[0], "rows": pty[1]}
        reply = self._send(body)
        return CommandHandle(self._sandbox, reply["exec_id"], reply["pid"])

    def session(
        self,
        shell: str = "/bin/bash",
        envs: Optional[Mapping[str, str]] = None,
        cwd: Optional[str] = None,
        user: Optional[str] = None,
    ) -> Session:
        """A shell that stays, for several commands."""
        return Session(self.start([shell], stdin=True, envs=envs, cwd=cwd, user=user))

    def connect(self, exec_id: str) -> CommandHandle:
        """A command that another client started."""
        for command in self.list():
            if command["exec_id"] == exec_id:
                return CommandHandle(self._sandbox, exec_id, command["pid"])
        raise NotFoundException(f"no command {exec_id!r}")

    def list(self) -> List[Dict[str, Any]]:
        """Commands that run, and the last ones that ended."""
        listed: List[Dict[str, Any]] = self._sandbox._transport.json("GET", self._sandbox._path("/execs"))
        return listed


class Session:
    """A shell that stays: folder, variables and background jobs live from one command to the next.

    The sandbox's own shell runs it: a sandbox can lie to its session, and to nobody else. A command whose time is over ends the
    session, with everything that was started in it.
    """

    def __init__(self, handle: CommandHandle) -> None:
        self._handle = handle
        self.exec_id = handle.exec_id
        transport = handle._sandbox._transport
        self._connection, response = transport.open("GET", handle._path("/stream"), timeout=60)
        self._sock = self._connection.sock
        self._frames = frames(response)
        self._data = {b"1": b"", b"2": b""}

    def run(
        self,
        cmd: str,
        *,
        timeout: Optional[float] = None,
        on_stdout: Sink = None,
        check: bool = True,
    ) -> CommandResult:
        """Runs a line of shell in the session."""
        mark = uuid.uuid4().hex.encode()
        line = f"eval {shlex.quote(cmd)} </dev/null\n"
        tell = f"printf '{mark.decode()} %d\\n' $?; printf '{mark.decode()}\\n' >&2\n"
        began = time.monotonic()
        self._handle.send_stdin(line + tell)
        until = None if timeout is None else began + timeout
        decode, seen = _decoder(), 0
        while not self._complete(mark):
            kind, payload = self._next(until, began)
            if kind in self._data:
                self._data[kind] += payload[8:]
            elif kind == b"X":
                raise self._ended(json.loads(payload))
            if on_stdout is not None and kind == b"1":
                # What may be the beginning of the mark waits.
                end = self._data[b"1"].find(mark)
                end = max(seen, len(self._data[b"1"]) - len(mark)) if end < 0 else end
                text, seen = decode(self._data[b"1"][seen:end]), end
                if text:
                    on_stdout(text)
        stdout, _, rest = self._data[b"1"].partition(mark)
        status, _, self._data[b"1"] = rest.partition(b"\n")
        stderr, _, rest = self._data[b"2"].partition(mark)
        self._data[b"2"] = rest[1:]
        took = int((time.monotonic() - began) * 1000)
        result = CommandResult(self.exec_id, "user_exit", int(status), stdout, stderr, duration_ms=took)
        return result.check() if check else result

    def _complete(self, mark: bytes) -> bool:
        out, err = self._data[b"1"], self._data[b"2"]
        return mark in err and b"\n" in out.partition(mark)[2] and b"\n" in err.partition(mark)[2]

    def _next(self, until: Optional[float], began: float) -> Tuple[bytes, bytes]:
        left = 60.0 if until is None else until - time.monotonic()
        try:
            if left <= 0:
                raise socket.timeout()
            if self._sock is not None:
                self._sock.settimeout(min(left, 60.0))
            return next(self._frames)
        except socket.timeout as late:
            if until is None:
                raise UnavailableException("the session's stream is silent") from late
            self.close()
            took = int((time.monotonic() - began) * 1000)
            out, err = self._data[b"1"], self._data[b"2"]
            result = CommandResult(self.exec_id, "timed_out", 137, out, err, duration_ms=took)
            raise TimeoutException("the command's time was over; its session has ended", result) from late
        except (StopIteration, OSError, http.client.HTTPException) as error:
            raise UnavailableException(f"the session's stream broke off: {error}") from error

    def _ended(self, exit_: Mapping[str, Any]) -> SandboxException:
        out, err = self._data[b"1"], self._data[b"2"]
        result = _result(self.exec_id, exit_, out, err, False)
        self.close()
        return CommandExitException("the session has ended", result)

    def close(self) -> None:
        """Ends the session and everything that was started in it."""
        try:
            self._handle.kill()
        except (NotFoundException, SandboxGoneException):
            pass
        self._connection.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
