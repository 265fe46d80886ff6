"""The client for ``asyncio``: the same names, to be awaited.

Each call runs the blocking one on a thread of a pool of its own, so that a thousand sleeping commands do not starve other users of
the event loop's default pool; :data:`CALLS_MAX` run at a time.
"""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, AsyncIterator, Callable, Coroutine, Dict, List, Optional, Type, TypeVar, Union
from typing import TYPE_CHECKING

from ._commands import CommandHandle, Commands, Session
from ._errors import SandboxException
from ._files import Files
from ._sandbox import Layer, Sandbox, SandboxInfo, Step
from ._watch import Watch, WatchEvent

if TYPE_CHECKING:
    from typing_extensions import Concatenate, ParamSpec

    P = ParamSpec("P")

CALLS_MAX = 256
_pool = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="libdsec")
T = TypeVar("T")
A = TypeVar("A")


async def _call(what: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_pool, functools.partial(what, *args, **kwargs))


def _awaited(
    method: "Callable[Concatenate[Any, P], T]",
) -> "Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]":
    """The same method of the object that is wrapped, to be awaited."""

    async def call(self: Any, /, *args: "P.args", **kwargs: "P.kwargs") -> T:
        return await _call(method, self._inner, *args, **kwargs)

    functools.update_wrapper(call, method)
    return call


def _wrapped(
    wrapper: Callable[[Any], A], method: "Callable[Concatenate[Any, P], Any]"
) -> "Callable[Concatenate[Any, P], Coroutine[Any, Any, A]]":
    """The same, with its result wrapped."""

    async def call(self: Any, /, *args: "P.args", **kwargs: "P.kwargs") -> A:
        return wrapper(await _call(method, self._inner, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


class AsyncCommandHandle:
    """As :class:`CommandHandle`, to be awaited."""

    def __init__(self, inner: CommandHandle) -> None:
        self._inner = inner
        self.exec_id = inner.exec_id
        self.pid = inner.pid

    wait = _awaited(CommandHandle.wait)
    send_stdin = _awaited(CommandHandle.send_stdin)
    close_stdin = _awaited(CommandHandle.close_stdin)
    kill = _awaited(CommandHandle.kill)
    send_signal = _awaited(CommandHandle.send_signal)
    resize = _awaited(CommandHandle.resize)


class AsyncSession:
    """As :class:`Session`, to be awaited."""

    def __init__(self, inner: Session) -> None:
        self._inner = inner
        self.exec_id = inner.exec_id

    run = _awaited(Session.run)
    close = _awaited(Session.close)

    async def __aenter__(self) -> "AsyncSession":
        return self

    async def __aexit__(self, *_: object) -> None:
        await _call(self._inner.close)


class AsyncCommands:
    """As :class:`Commands`, to be awaited."""

    def __init__(self, inner: Commands) -> None:
        self._inner = inner

    run = _awaited(Commands.run)
    start = _wrapped(AsyncCommandHandle, Commands.start)
    connect = _wrapped(AsyncCommandHandle, Commands.connect)
    session = _wrapped(AsyncSession, Commands.session)
    list = _awaited(Commands.list)


class AsyncWatch:
    """As :class:`Watch`, to be awaited: ``async for event in watch``."""

    def __init__(self, inner: Watch) -> None:
        self._inner = inner

    get = _awaited(Watch.get)

    async def close(self) -> None:
        """Ends it; a task that waits for an event ends too."""
        # Not on a thread of the pool: all of them may be waiting for events.
        self._inner.close()

    async def __aiter__(self) -> AsyncIterator[WatchEvent]:
        events = iter(self._inner)
        while True:
            event: Optional[WatchEvent] = await _call(next, events, None)
            if event is None:
                return
            yield event

    async def __aenter__(self) -> "AsyncWatch":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncFiles:
    """As :class:`Files`, to be awaited."""

    def __init__(self, inner: Files) -> None:
        self._inner = inner

    read = _awaited(Files.read)
    write = _awaited(Files.write)
    list = _awaited(Files.list)
    get_info = _awaited(Files.get_info)
    exists = _awaited(Files.exists)
    make_dir = _awaited(Files.make_dir)
    remove = _awaited(Files.remove)
    rename = _awaited(Files.rename)
    watch = _wrapped(AsyncWatch, Files.watch)
    upload_tree = _awaited(Files.upload_tree)
    download_tree = _awaited(Files.download_tree)

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        """A file's bytes, piece by piece. Raises if they break off."""
        pieces = self._inner.stream(path)
        while True:
            piece: Optional[bytes] = await _call(next, pieces, None)
            if piece is None:
                return
            yield piece


class AsyncSandbox:
    """As :class:`Sandbox`, with every method to be awaited."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner
        self.id = inner.id
        self.commands = AsyncCommands(inner.commands)
        self.files = AsyncFiles(inner.files)

    @classmethod
    async def create(cls: Type["AsyncSandbox"], *args: Any, **kwargs: Any) -> "AsyncSandbox":
        """See :meth:`Sandbox.create`."""
        return cls(await _call(Sandbox.create, *args, **kwargs))

    @classmethod
    async def connect(cls: Type["AsyncSandbox"], *args: Any, **kwargs: Any) -> "AsyncSandbox":
        """See :meth:`Sandbox.connect`."""
        return cls(await _call(Sandbox.connect, *args, **kwargs))

    @classmethod
    async def list(
        cls: Type["AsyncSandbox"], *, url: Optional[str] = None, api_key: Optional[str] = None
    ) -> List[SandboxInfo]:
        """See :meth:`Sandbox.list`."""
        return await _call(Sandbox.list, url=url, api_key=api_key)

    get_info = _awaited(Sandbox.get_info)
    is_running = _awaited(Sandbox.is_running)
    get_metrics = _awaited(Sandbox.get_metrics)
    set_timeout = _awaited(Sandbox.set_timeout)
    pause = _awaited(Sandbox.pause)
    resume = _awaited(Sandbox.resume)
    pack_diff = _awaited(Sandbox.pack_diff)
    snapshot = _awaited(Sandbox.snapshot)
    steps = _awaited(Sandbox.steps)
    forget_step = _awaited(Sandbox.forget_step)
    changes = _awaited(Sandbox.changes)
    kill = _awaited(Sandbox.kill)

    async def fork(
        self,
        count: int = 1,
        timeout: Optional[float] = None,
        *,
        from_: Union[str, Step, Layer, None] = None,
        request_id: Optional[str] = None,
    ) -> "List[Union[AsyncSandbox, SandboxException]]":
        """See :meth:`Sandbox.fork`."""
        fork = functools.partial(self._inner.fork, from_=from_, request_id=request_id)
        children = await _call(fork, count, timeout)
        return [AsyncSandbox(c) if isinstance(c, Sandbox) else c for c in children]

    async def trajectory(self) -> AsyncIterator[Dict[str, Any]]:
        """See :meth:`Sandbox.trajectory`."""
        events = self._inner.trajectory()
        while True:
            event: Optional[Dict[str, Any]] = await _call(next, events, None)
            if event is None:
                return
            yield event

    def __getattr__(self, name: str) -> Any:
        # What newer versions of `Sandbox` have besides.
        found = getattr(self._inner, name)
        return functools.partial(_call, found) if callable(found) else found

    async def __aenter__(self) -> "AsyncSandbox":
        return self

    async def __aexit__(self, *_: object) -> None:
        await _call(self._inner.kill)
