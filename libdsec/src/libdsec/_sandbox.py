"""The blocking client."""

from __future__ import annotations

import base64
import http.client
import io
import json
import shlex
import socket
import struct
import tarfile
import time
import uuid
from dataclasses import dataclass, field
from typing import IO, Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Type, Union

from ._errors import (
    CommandExitException,
    FileNotFoundException,
    InfraFailedException,
    NotFoundException,
    SandboxException,
    SandboxGoneException,
    TimeoutException,
    UnavailableException,
    from_reply,
)
from ._http import Transport, frames, segment

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


@dataclass
class SandboxInfo:
    """What the daemon knows of a sandbox, also after its end."""

    id: str
    state: str
    reason: Optional[str]
    backend: str
    refs: List[str]
    layers: List[str]
    created_ms: int
    ends_ms: Optional[int]
    metadata: Dict[str, str]
    request_id: Optional[str]
    parent: Optional[str]

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "SandboxInfo":
        """From a reply; what a newer daemon adds is left out."""
        return cls(**{name: body.get(name) for name in cls.__dataclass_fields__})  # type: ignore[arg-type]


@dataclass
class EntryInfo:
    """A file, folder or link."""

    name: str
    path: str
    kind: str
    size: int
    mode: int
    uid: int
    gid: int
    modified: int
    symlink_target: Optional[str] = None


@dataclass
class Layer:
    """A layer that was published."""

    name: str
    digest: str
    frozen_ms: int
    build: Dict[str, Any] = field(default_factory=dict)


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

    def send_stdin(self, data: Data) -> None:
        """Gives it input (it must have been started with ``stdin=True`` or a terminal)."""
        self._sandbox._transport.upload("POST", self._path("/stdin"), _bytes(data), {})

    def close_stdin(self) -> None:
        """Says that no more input follows."""
        self._sandbox._transport.upload("POST", self._path("/stdin"), b"", {"eof": "true"})

    def kill(self) -> None:
        """Kills everything that it started."""
        self.send_signal(9, tree=True)

    def send_signal(self, signal: int, tree: bool = False) -> None:
        """Sends a signal to its main process."""
        body = {"signal": signal, "tree": tree}
        self._sandbox._transport.json("POST", self._path("/signal"), body)

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

    def _run_whole(self, body: Dict[str, Any]) -> CommandResult:
        until = time.monotonic() + REATTACH_SECONDS
        while True:
            try:
                reply = self._sandbox._transport.json("POST", self._sandbox._path("/execs"), body)
                break
            except UnavailableException:
                # The same id: what runs is attached to, what has run is told.
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
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
        reply = self._sandbox._transport.json("POST", self._sandbox._path("/execs"), body)
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


class Files:
    """Files of a sandbox."""

    def __init__(self, sandbox: "Sandbox") -> None:
        self._sandbox = sandbox

    def _json(self, method: str, what: str, **query: Any) -> Any:
        try:
            return self._sandbox._transport.json(method, self._sandbox._path(what), query=query)
        except NotFoundException as error:
            raise FileNotFoundException(str(error)) from error

    def read(self, path: str, format: str = "text") -> Any:
        """A file's contents: ``text`` (UTF-8, bad bytes replaced) or ``bytes``."""
        data = b"".join(self.stream(path))
        return data if format == "bytes" else data.decode("utf-8", "replace")

    def stream(self, path: str) -> Iterator[bytes]:
        """A file's bytes, piece by piece. Raises if they break off."""
        return self._download("/files", path)

    def _download(self, what: str, path: str) -> Iterator[bytes]:
        transport, at = self._sandbox._transport, self._sandbox._path(what)
        try:
            connection, response = transport.open("GET", at, query={"path": path})
        except NotFoundException as error:
            raise FileNotFoundException(str(error)) from error
        try:
            while True:
                piece = response.read(1 << 18)
                if not piece:
                    return
                yield piece
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableException(f"the download broke off: {error}") from error
        finally:
            connection.close()

    def write(self, path: str, data: Union[Data, IO[bytes]], mode: Optional[int] = None) -> int:
        """Replaces a file's contents at a stroke; folders above it are made. The bytes written."""
        body = data if not isinstance(data, str) else data.encode()
        query = {"path": path, "mode": None if mode is None else f"{mode:o}"}
        written: int = self._sandbox._transport.upload(
            "PUT", self._sandbox._path("/files"), body, query
        )["bytes"]
        return written

    def list(self, path: str, depth: int = 1) -> List[EntryInfo]:
        """A folder's entries."""
        found = self._json("GET", "/files/list", path=path, depth=depth)
        return [EntryInfo(**entry) for entry in found["entries"]]

    def get_info(self, path: str) -> EntryInfo:
        """One entry; a link itself, not what it leads to."""
        return EntryInfo(**self._json("GET", "/files/stat", path=path)["entries"][0])

    def exists(self, path: str) -> bool:
        """Whether something is there."""
        try:
            self.get_info(path)
        except FileNotFoundException:
            return False
        return True

    def make_dir(self, path: str, mode: Optional[int] = None) -> None:
        """Makes a folder, and those above it."""
        self._json("POST", "/files/mkdir", path=path, mode=None if mode is None else f"{mode:o}")

    def remove(self, path: str) -> None:
        """Removes a file, a link, or a folder with all in it."""
        self._json("DELETE", "/files", path=path)

    def rename(self, old: str, new: str) -> None:
        """Renames; what is at the new name is replaced."""
        body = {"from": old, "to": new}
        self._sandbox._transport.json("POST", self._sandbox._path("/files/rename"), body)

    def upload_tree(self, local: str, path: str) -> None:
        """Copies a folder of this machine into the sandbox, as one stream. Owned by root there."""
        packed = io.BytesIO()

        def owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.uid = member.gid = 0
            member.uname = member.gname = "root"
            return member

        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(local, arcname=".", filter=owned_by_root)
        packed.seek(0)
        self._sandbox._transport.upload("PUT", self._sandbox._path("/tree"), packed, {"path": path})

    def download_tree(self, path: str) -> tarfile.TarFile:
        """A folder of the sandbox as a tar archive. Unpack it with ``filter="data"``: its contents are not to be trusted."""
        return tarfile.open(fileobj=io.BytesIO(b"".join(self._download("/tree", path))))


class Sandbox:
    """A sandbox. Ends with its ``with`` block, or by ``kill``, or when its time is over."""

    def __init__(self, id: str, transport: Transport) -> None:
        self.id = id
        self._transport = transport
        self.commands = Commands(self)
        self.files = Files(self)

    @classmethod
    def create(
        cls: Type["Sandbox"],
        base: str,
        workspace: Optional[str] = None,
        toolkits: Sequence[str] = (),
        *,
        backend: str = "container",
        timeout: Optional[float] = None,
        idle_timeout: Optional[float] = None,
        memory_mb: Optional[int] = None,
        cpus: Optional[float] = None,
        pids: Optional[int] = None,
        network: Optional[Mapping[str, Any]] = None,
        envs: Optional[Mapping[str, str]] = None,
        user: Optional[str] = None,
        cwd: Optional[str] = None,
        metadata: Optional[Mapping[str, str]] = None,
        request_id: Optional[str] = None,
        url: Optional[str] = None,
        api_key: Optional[str] = None,
    ) -> "Sandbox":
        """Makes a sandbox of layers.

        ``timeout``: seconds that it lives, from when it is ready. ``request_id``: the same one makes one sandbox, however often
        it is sent; made up if missing, so that a request that is repeated because its answer got lost makes no second one.
        """
        transport = Transport(url, api_key)
        body = {
            "base": base,
            "workspace": workspace,
            "toolkits": list(toolkits),
            "backend": backend,
            "timeout": timeout,
            "idle_timeout": idle_timeout,
            "memory_mb": memory_mb,
            "cpus": cpus,
            "pids": pids,
            "network": network,
            "envs": dict(envs or {}),
            "user": user,
            "cwd": cwd,
            "metadata": dict(metadata or {}),
            "request_id": request_id or uuid.uuid4().hex,
        }
        made = transport.json("POST", "/v1/sandboxes", body)
        return cls(made["id"], transport)

    @classmethod
    def connect(
        cls: Type["Sandbox"], id: str, *, url: Optional[str] = None, api_key: Optional[str] = None
    ) -> "Sandbox":
        """A sandbox that exists, perhaps made by another process."""
        sandbox = cls(id, Transport(url, api_key))
        sandbox.get_info()
        return sandbox

    @classmethod
    def list(
        cls: Type["Sandbox"], *, url: Optional[str] = None, api_key: Optional[str] = None
    ) -> List[SandboxInfo]:
        """All sandboxes of this key's project, ended ones too."""
        listed = Transport(url, api_key).json("GET", "/v1/sandboxes")
        return [SandboxInfo.of(body) for body in listed["sandboxes"]]

    def _path(self, what: str = "") -> str:
        return f"/v1/sandboxes/{segment(self.id)}{what}"

    def get_info(self) -> SandboxInfo:
        """What the daemon knows of it, also after its end."""
        return SandboxInfo.of(self._transport.json("GET", self._path()))

    def is_running(self) -> bool:
        """Whether it lives (a paused one does)."""
        return self.get_info().state in ("running", "paused")

    def get_metrics(self) -> Dict[str, int]:
        """What it uses."""
        used: Dict[str, int] = self._transport.json("GET", self._path("/usage"))
        return used

    def set_timeout(self, timeout: Optional[float]) -> None:
        """Seconds from now until it is killed; ``None`` = never."""
        self._transport.json("POST", self._path("/timeout"), {"timeout": timeout})

    def pause(self) -> None:
        """Lets it stand still and give its memory back. Any request makes it go on."""
        self._transport.json("POST", self._path("/pause"))

    def resume(self) -> None:
        """Lets it go on."""
        self._transport.json("POST", self._path("/resume"))

    def pack_diff(self, name: str, scrub: Sequence[str] = ()) -> Layer:
        """Publishes what it changed as the layer ``axis/name:version``, without the paths in ``scrub``."""
        body = {"name": name, "scrub": list(scrub)}
        packed = self._transport.json("POST", self._path("/pack_diff"), body)
        return Layer(packed["name"], packed["layer"], packed["frozen_ms"], packed["build"])

    def fork(
        self, count: int, timeout: Optional[float] = None
    ) -> List[Union["Sandbox", SandboxException]]:
        """Children with the files that it has now. One that fails does not lose the others."""
        body = {"count": count, "timeout": timeout}
        children = self._transport.json("POST", self._path("/fork"), body)["children"]
        made = lambda body: type(self)(body["id"], self._transport)  # noqa: E731
        return [made(body) if "id" in body else from_reply(0, body) for body in children]

    def kill(self) -> None:
        """Ends it, whatever it is doing."""
        self._transport.json("DELETE", self._path())

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
