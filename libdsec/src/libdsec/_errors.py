"""What can go wrong. Each kind of the daemon's errors has one class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Type

if TYPE_CHECKING:
    from ._commands import CommandResult


class SandboxException(Exception):
    """Anything that a sandbox or its daemon did not do."""

    #: The daemon's word for it, the same in HTTP and on the command line.
    kind = ""


class InvalidArgumentException(SandboxException):
    """The request itself is wrong."""

    kind = "invalid"


class AuthenticationException(SandboxException):
    """No or a wrong API key."""

    kind = "unauthenticated"


class NotFoundException(SandboxException):
    """No such sandbox, command, file or layer."""

    kind = "not_found"


class FileNotFoundException(NotFoundException):
    """No such file in the sandbox."""


class ConflictException(SandboxException):
    """Something is already there, or in another state."""

    kind = "conflict"


class NotEnoughSpaceException(SandboxException):
    """A limit of the sandbox or of its disk is reached."""

    kind = "exhausted"


class UnavailableException(SandboxException):
    """No room now, or the daemon or layerd cannot be reached; try again."""

    kind = "unavailable"


class SandboxGoneException(SandboxException):
    """The sandbox has ended. It does not come back."""

    kind = "sandbox_gone"


class RefusedException(SandboxException):
    """The sandbox's own file system or kernel said no."""

    kind = "refused"


class InfraFailedException(SandboxException):
    """The machinery failed, not what ran in it: mask the result, do not score it."""

    kind = "infra_failed"


class UnknownOutcomeException(SandboxException):
    """The request was begun, and nobody knows what became of it. It is not carried out again under the same id."""

    kind = "unknown_outcome"


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
    error.kind: error
    for error in (
        InvalidArgumentException,
        AuthenticationException,
        NotFoundException,
        ConflictException,
        NotEnoughSpaceException,
        UnavailableException,
        SandboxGoneException,
        RefusedException,
        InfraFailedException,
        UnknownOutcomeException,
    )
}


def from_reply(status: int, body: Any) -> SandboxException:
    """The exception that an error reply stands for."""
    if isinstance(body, dict) and "kind" in body:
        kind = _KINDS.get(str(body["kind"]), SandboxException)
        return kind(str(body.get("message", "")))
    return SandboxException(f"the daemon answered with HTTP status {status}")
