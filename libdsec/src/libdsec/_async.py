"""The client for ``asyncio``: the same names, to be awaited.

Each call runs the blocking one on a thread of a pool of its own, so that a thousand sleeping commands do not starve other users of
the event loop's default pool; :data:`CALLS_MAX` run at a time.
"""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Awaitable, Callable, List, Type, TypeVar, Union

from ._errors import SandboxException
from ._commands import CommandHandle, Session
from ._sandbox import Sandbox

CALLS_MAX = 256
_pool = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="libdsec")
T = TypeVar("T")


async def _call(what: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_pool, functools.partial(what, *args, **kwargs))


class _Awaited:
    """An object whose methods are to be awaited."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        @functools.wraps(found)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            result = await _call(found, *args, **kwargs)
            return _Awaited(result) if isinstance(result, (CommandHandle, Session)) else result

        return awaited


class AsyncSandbox:
    """As :class:`Sandbox`, with every method to be awaited."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner
        self.id = inner.id
        self.commands = _Awaited(inner.commands)
        self.files = _Awaited(inner.files)

    @classmethod
    async def create(cls: Type["AsyncSandbox"], *args: Any, **kwargs: Any) -> "AsyncSandbox":
        """See :meth:`Sandbox.create`."""
        return cls(await _call(Sandbox.create, *args, **kwargs))

    @classmethod
    async def connect(cls: Type["AsyncSandbox"], *args: Any, **kwargs: Any) -> "AsyncSandbox":
        """See :meth:`Sandbox.connect`."""
        return cls(await _call(Sandbox.connect, *args, **kwargs))

    @classmethod
    async def list(cls: Type["AsyncSandbox"], **kwargs: Any) -> Any:
        """See :meth:`Sandbox.list`."""
        return await _call(Sandbox.list, **kwargs)

    async def fork(self, *args: Any, **kwargs: Any) -> "List[Union[AsyncSandbox, SandboxException]]":
        """See :meth:`Sandbox.fork`."""
        children = await _call(self._inner.fork, *args, **kwargs)
        return [AsyncSandbox(c) if isinstance(c, Sandbox) else c for c in children]

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        found: Callable[..., Awaitable[Any]] = getattr(_Awaited(self._inner), name)
        return found

    async def __aenter__(self) -> "AsyncSandbox":
        return self

    async def __aexit__(self, *_: object) -> None:
        await _call(self._inner.kill)
