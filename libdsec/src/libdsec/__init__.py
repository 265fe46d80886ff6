"""Sandboxes composed of layers: the client of ``sandboxd``.

>>> from libdsec import Sandbox
>>> with Sandbox.create(base="base/python:3.11", timeout=300) as sb:
...     print(sb.commands.run("python3 -c 'print(1 + 1)'").stdout)

The daemon is found by ``DSEC_URL`` (``http://ADDRESS:PORT`` or ``unix:PATH``) and ``DSEC_API_KEY``.
"""

from ._async import AsyncCommandHandle, AsyncSandbox, AsyncSession, AsyncWatch
from ._dsec import DSecClient, DSecContainerRunArgs
from ._errors import (
    AuthenticationException,
    CommandExitException,
    ConflictException,
    FileNotFoundException,
    InfraFailedException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    NotFoundException,
    RefusedException,
    SandboxException,
    SandboxGoneException,
    TimeoutException,
    UnavailableException,
    UnknownOutcomeException,
)
from ._commands import CommandHandle, CommandResult, Session
from ._files import EntryInfo
from ._sandbox import Layer, Sandbox, SandboxInfo, Step
from ._watch import Watch, WatchEvent

__all__ = [
    "AsyncCommandHandle",
    "AsyncSandbox",
    "AsyncSession",
    "AsyncWatch",
    "AuthenticationException",
    "CommandExitException",
    "CommandHandle",
    "CommandResult",
    "ConflictException",
    "DSecClient",
    "DSecContainerRunArgs",
    "EntryInfo",
    "FileNotFoundException",
    "InfraFailedException",
    "InvalidArgumentException",
    "Layer",
    "NotEnoughSpaceException",
    "NotFoundException",
    "RefusedException",
    "Sandbox",
    "SandboxException",
    "SandboxGoneException",
    "SandboxInfo",
    "Session",
    "Step",
    "TimeoutException",
    "UnavailableException",
    "UnknownOutcomeException",
    "Watch",
    "WatchEvent",
]
