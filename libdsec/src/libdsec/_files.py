"""Files of a sandbox."""

from __future__ import annotations

import http.client
import io
import tarfile
from dataclasses import dataclass
from typing import IO, Any, Iterator, List, Mapping, Optional, TYPE_CHECKING, Union

from ._commands import Data
from ._errors import FileNotFoundException, NotFoundException, UnavailableException
from ._watch import Watch

if TYPE_CHECKING:
    from ._sandbox import Sandbox


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
    owner: str
    group: str
    modified: int
    symlink_target: Optional[str] = None

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "EntryInfo":
        """From a reply; what a newer daemon adds is left out."""
        return cls(**{name: body.get(name) for name in cls.__dataclass_fields__})  # type: ignore[arg-type]


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

    def _change(
        self, method: str, what: str, body: Any, request_id: Optional[str], **query: Any
    ) -> None:
        sandbox = self._sandbox
        try:
            sandbox._transport.change(
                method, sandbox._path(what), body, query=query, request_id=request_id
            )
        except NotFoundException as error:
            raise FileNotFoundException(str(error)) from error

    def write(
        self,
        path: str,
        data: Union[Data, IO[bytes]],
        mode: Optional[int] = None,
        *,
        request_id: Optional[str] = None,
    ) -> int:
        """Replaces a file's contents at a stroke; folders above it are made. The bytes written."""
        body = data if not isinstance(data, str) else data.encode()
        octal = None if mode is None else f"{mode:o}"
        query = {"path": path, "mode": octal, "request_id": request_id}
        written: int = self._sandbox._transport.upload(
            "PUT", self._sandbox._path("/files"), body, query
        )["bytes"]
        return written

    def list(self, path: str, depth: int = 1) -> List[EntryInfo]:
        """A folder's entries."""
        found = self._json("GET", "/files/list", path=path, depth=depth)
        return [EntryInfo.of(entry) for entry in found["entries"]]

    def get_info(self, path: str) -> EntryInfo:
        """One entry; a link itself, not what it leads to."""
        return EntryInfo.of(self._json("GET", "/files/stat", path=path)["entries"][0])

    def exists(self, path: str) -> bool:
        """Whether something is there."""
        try:
            self.get_info(path)
        except FileNotFoundException:
            return False
        return True

    def make_dir(
        self, path: str, mode: Optional[int] = None, *, request_id: Optional[str] = None
    ) -> None:
        """Makes a folder, and those above it."""
        octal = None if mode is None else f"{mode:o}"
        self._change("POST", "/files/mkdir", None, request_id, path=path, mode=octal)

    def remove(self, path: str, *, request_id: Optional[str] = None) -> None:
        """Removes a file, a link, or a folder with all in it."""
        self._change("DELETE", "/files", None, request_id, path=path)

    def rename(self, old: str, new: str, *, request_id: Optional[str] = None) -> None:
        """Renames; what is at the new name is replaced."""
        self._change("POST", "/files/rename", {"from": old, "to": new}, request_id)

    def watch(self, path: str, recursive: bool = False) -> Watch:
        """Watches a folder, with ``recursive`` those below it too."""
        query = {"path": path, "recursive": "true" if recursive else "false"}
        at = self._sandbox._path("/files/watch")
        try:
            opened = self._sandbox._transport.open("GET", at, query=query, timeout=60)
        except NotFoundException as error:
            raise FileNotFoundException(str(error)) from error
        return Watch(*opened)

    def upload_tree(self, local: str, path: str, *, request_id: Optional[str] = None) -> None:
        """Copies a folder of this machine into the sandbox, as one stream. Owned by root there."""
        packed = io.BytesIO()

        def owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.uid = member.gid = 0
            member.uname = member.gname = "root"
            return member

        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(local, arcname=".", filter=owned_by_root)
        packed.seek(0)
        query = {"path": path, "request_id": request_id}
        self._sandbox._transport.upload("PUT", self._sandbox._path("/tree"), packed, query)

    def download_tree(self, path: str) -> tarfile.TarFile:
        """A folder of the sandbox as a tar archive. Unpack it with ``filter="data"``: its contents are not to be trusted."""
        return tarfile.open(fileobj=io.BytesIO(b"".join(self._download("/tree", path))))
