"""What can go wrong. Each kind of the daemon's errors has one class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Type

if TYPE_CHECKING:
    from ._commands import CommandResult


class SandboxException(Exception):
    """Anything that a sandbox or its daemon did not do."""


class InvalidArgumentException(SandboxException):
    """The request itself is wrong."""


class AuthenticationException(SandboxException):
    """No or a wrong API key."""


class NotFoundException(SandboxException):
    """No such sandbox, command, file or layer."""


class FileNotFoundException(NotFoundException):
    """No such file in the sandbox."""


class ConflictException(SandboxException):
    """Something is already there, or in another state."""


class NotEnoughSpaceException(SandboxException):
    """A limit of the sandbox or of its disk is reached."""


class UnavailableException(SandboxException):
    """No room now, or the daemon or layerd cannot be reached; try again."""


class SandboxGoneException(SandboxException):
    """The sandbox has ended. It does not come back."""


class InfraFailedException(SandboxException):
    """The machinery failed, not what ran in it: mask the result, do not score it."""


class UnknownOutcomeException(SandboxException):
    """The request was begun, and nobody knows what became of it. It is not carried out again under the same id."""


class TimeoutException(SandboxException):
    """A command's time was over. ``result`` has what it printed until then."""

    def __init__(self, message: str, result: "CommandResult") -> None:
        super().__init__(message)
        self.result = result


class CommandExitException(SandboxException):
    """A command ended with another status than 0. ``result`` has all about it."""

    def __init__(self, message: str, result: "CommandResult") -> None:
        super().__init__(message)
        self.result = result
        self.exit_code = result.exit_code
        self.stdout = result.stdout
        self.stderr = result.stderr


_KINDS: Dict[str, Type[SandboxException]] = {
    "invalid": InvalidArgumentException,
    "unauthenticated": AuthenticationException,
    "not_found": NotFoundException,
    "conflict": ConflictException,
    "exhausted": NotEnoughSpaceException,
    "unavailable": UnavailableException,
    "sandbox_gone": SandboxGoneException,
    "refused": SandboxException,
    "infra_failed": InfraFailedException,
    "unknown_outcome": UnknownOutcomeException,
}


def from_reply(status: int, body: Any) -> SandboxException:
    """The exception that an error reply stands for."""
    if isinstance(body, dict) and "kind" in body:
        kind = _KINDS.get(str(body["kind"]), SandboxException)
        return kind(str(body.get("message", "")))
    return SandboxException(f"the daemon answered with HTTP status {status}")
