"""The blocking client."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Type, Union

from ._commands import Commands
from ._errors import SandboxException, UnavailableException, from_reply
from ._files import Files
from ._http import AGAIN_SECONDS, Transport, segment


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
    #: Its disk limit: ``mib``, ``inodes``, and ``by``, what keeps it.
    disk: Optional[Dict[str, Any]]

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "SandboxInfo":
        """From a reply; what a newer daemon adds is left out."""
        return cls(**{name: body.get(name) for name in cls.__dataclass_fields__})  # type: ignore[arg-type]


@dataclass
class Layer:
    """A layer that was published."""

    name: str
    digest: str
    frozen_ms: int
    build: Dict[str, Any] = field(default_factory=dict)


@dataclass
class Step:
    """What a sandbox can be forked from: a snapshot, or a layer that was made of it."""

    name: str
    #: The layer's digest; a snapshot has none.
    layer: Optional[str]
    created_ms: int


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
        disk_mb: Optional[int] = None,
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
            "disk_mb": disk_mb,
            "network": network,
            "envs": dict(envs or {}),
            "user": user,
            "cwd": cwd,
            "metadata": dict(metadata or {}),
            "request_id": request_id or uuid.uuid4().hex,
        }
        until = time.monotonic() + AGAIN_SECONDS
        while True:
            try:
                made = transport.json("POST", "/v1/sandboxes", body)
                return cls(made["id"], transport)
            except UnavailableException:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

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

    def _change(self, what: str, body: Any = None, request_id: Optional[str] = None) -> Any:
        return self._transport.change("POST", self._path(what), body, request_id=request_id)

    def set_timeout(self, timeout: Optional[float], *, request_id: Optional[str] = None) -> None:
        """Seconds from now until it is killed; ``None`` = never."""
        self._change("/timeout", {"timeout": timeout}, request_id)

    def pause(self, *, request_id: Optional[str] = None) -> None:
        """Lets it stand still and give its memory back. Any request makes it go on."""
        self._change("/pause", None, request_id)

    def resume(self, *, request_id: Optional[str] = None) -> None:
        """Lets it go on."""
        self._change("/resume", None, request_id)

    def pack_diff(
        self, name: str, scrub: Sequence[str] = (), *, request_id: Optional[str] = None
    ) -> Layer:
        """Publishes what it changed as the layer ``axis/name:version``, without the paths in ``scrub``."""
        body = {"name": name, "scrub": list(scrub)}
        packed = self._change("/pack_diff", body, request_id)
        return Layer(packed["name"], packed["layer"], packed["frozen_ms"], packed["build"])

    def snapshot(self, name: str, *, request_id: Optional[str] = None) -> Step:
        """Keeps its files as they are now, to fork from, for as long as it lives. One of that name is replaced."""
        return self._step(self._change("/steps", {"name": name}, request_id))

    def steps(self) -> "List[Step]":
        """What it can be forked from, by time: its snapshots, and the layers that ``pack_diff`` made of it."""
        return [self._step(body) for body in self._transport.json("GET", self._path("/steps"))["steps"]]

    def forget_step(self, name: str, *, request_id: Optional[str] = None) -> None:
        """Forgets a step. A layer stays published, and children that stand on a snapshot stay."""
        path = self._path(f"/steps/{segment(name)}")
        self._transport.change("DELETE", path, request_id=request_id)

    @staticmethod
    def _step(body: Mapping[str, Any]) -> Step:
        return Step(body["name"], body["layer"], body["created_ms"])

    def fork(
        self,
        count: int = 1,
        timeout: Optional[float] = None,
        *,
        from_: Union[str, Step, Layer, None] = None,
        request_id: Optional[str] = None,
    ) -> List[Union["Sandbox", SandboxException]]:
        """Children with the files that it has now, or had at the step ``from_``: the name of a snapshot or of a layer that
        ``pack_diff`` made of it. One that fails does not lose the others."""
        name = from_.name if isinstance(from_, (Step, Layer)) else from_
        body = {"count": count, "timeout": timeout, "from": name}
        children = self._change("/fork", body, request_id)["children"]

        def made(body: Mapping[str, Any]) -> "Union[Sandbox, SandboxException]":
            if "id" in body:
                return type(self)(str(body["id"]), self._transport)
            return from_reply(0, body)

        return [made(body) for body in children]

    def kill(self, *, request_id: Optional[str] = None) -> None:
        """Ends it, whatever it is doing."""
        self._transport.change("DELETE", self._path(), request_id=request_id)

    def trajectory(self) -> Iterator[Dict[str, Any]]:
        """Its requests and results in their order, also after its end: each has ``seq``, ``at_ms`` and ``what``
        (``request``, ``result`` or ``ended``)."""
        at: Optional[int] = 0
        while at is not None:
            page = self._transport.json("GET", self._path("/trajectory"), query={"from": at})
            yield from page["events"]
            at = page["next"]

    def changes(self) -> Dict[str, Any]:
        """What it has changed, as one ``digest`` that is equal for equal trees, times aside."""
        found: Dict[str, Any] = self._transport.json("GET", self._path("/changes"))
        return found

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
