"""The calls of the DSec paper's listing, on top of :class:`Sandbox`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from ._errors import InvalidArgumentException
from ._commands import CommandResult
from ._sandbox import Sandbox


#: What a name in ``network_rules`` stands for; add your own, or put your mirrors here.
NETWORK_RULES: Dict[str, List[Dict[str, Any]]] = {
    "npm": [{"to": "registry.npmjs.org", "port": 443}],
    "pypi": [{"to": "pypi.org", "port": 443}, {"to": "files.pythonhosted.org", "port": 443}],
}


@dataclass
class DSecContainerRunArgs:
    """What a container is to be. ``container_image`` names a base layer (``base/`` may be left out); ``network_rules`` says which of
    :data:`NETWORK_RULES` it may reach, and nothing else is."""

    container_image: str
    memory_limit_mb: int = 4096
    cpu_cores_limit: float = 4
    ttl_running_stop: Optional[float] = 300
    network_rules: Dict[str, bool] = field(default_factory=dict)
    init_user: str = "root"


class DSecSandbox:
    """A container that runs."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.id = sandbox.id

    def run_shell(self, command: str, timeout: Optional[float] = None, **kwargs: Any) -> CommandResult:
        """Runs a line of shell; never raises for its status."""
        kwargs.setdefault("check", False)
        return self.sandbox.commands.run(command, timeout=timeout, **kwargs)

    def stop(self) -> None:
        """Ends it."""
        self.sandbox.kill()


class DSecClient:
    """Makes containers."""

    def __init__(self, url: Optional[str] = None, api_key: Optional[str] = None) -> None:
        self._url, self._api_key = url, api_key

    def open(self) -> "DSecClient":
        """Itself: there is no connection to keep."""
        return self

    def close(self) -> None:
        """Nothing is kept."""

    def __enter__(self) -> "DSecClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run_container(self, args: DSecContainerRunArgs, timeout: Optional[float] = None) -> DSecSandbox:
        """Makes a container. ``timeout`` bounds the request in the listing; ours has the daemon's own bound."""
        unknown = sorted(set(args.network_rules) - set(NETWORK_RULES))
        if unknown:
            known = ", ".join(sorted(NETWORK_RULES))
            raise InvalidArgumentException(f"network rules {', '.join(unknown)}: known are {known}")
        allowed = [name for name, allow in args.network_rules.items() if allow]
        image = args.container_image
        base = image if "/" in image or len(image) == 64 else f"base/{image}"
        sandbox = Sandbox.create(
            base,
            memory_mb=args.memory_limit_mb,
            cpus=args.cpu_cores_limit,
            timeout=args.ttl_running_stop,
            user=args.init_user,
            network={"allow": [rule for name in allowed for rule in NETWORK_RULES[name]]},
            url=self._url,
            api_key=self._api_key,
        )
        return DSecSandbox(sandbox)
