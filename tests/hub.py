"""A local server that answers the hub's client as the hub does, and goes wrong on demand.

Two HTTP servers on loopback: the hub itself, which answers small files and redirects for large ones, and the host
of the large ones, which knows them by digest and serves ranges.

    with Hub({"acme/tiny": {"onnx/model.onnx": data}}) as hub:
        hub.faults["onnx/model.onnx"] = Fault(body="reset", times=1)
        ...                                   # HF_ENDPOINT=hub.url
        hub.requests                          # what was asked
"""

import hashlib
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"
SIGNATURE = "signature=5ec7e7"  # what makes a redirect's address a secret
LARGE = 10_000  # bytes; from here on a file lies on the other host


@dataclass(kw_only=True, slots=True)
class Fault:
    """What goes wrong with one file.

    Attributes:
        status: Answer HEAD and GET of the hub with it.
        headers: Of that answer; ``X-Error-Code`` tells kinds of 404 apart.
        body: Of a GET that is answered: "truncated" (the connection ends early), "stalled" (it does not end, nothing
            more comes), "endless" (it goes on and on), "reset", "wrong" (as many other bytes), "held" (the rest comes
            when ``released`` is set).
        after: How many bytes are right.
        times: How often; None is always.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    after: int = 0
    times: int | None = None

    def strike(self) -> bool:
        """Whether it happens this time."""
        if self.times is None:
            return True
        self.times -= 1
        return self.times >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request, as it came."""

    host: str  # "hub" or "blobs"
    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case


class Hub:
    """Repositories (name -> path -> bytes) behind ``url``; see the module."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        self.repositories = repositories
        self.faults: dict[str, Fault] = {}
        self.requests: list[Request] = []
        self.chunk = 1 << 20  # bytes that are sent at once
        self.pause_s = 0.0  # between two of them
        self.metadata = True  # whether answers have the headers that only a hub sends
        self.closing = threading.Event()
        self.released = threading.Event()
        self.holding = threading.Event()  # a body stops before its end, as its fault says
        self._servers = [_Server(self, "hub"), _Server(self, "blobs")]

    @property
    def url(self) -> str:
        """The endpoint."""
        return self._servers[0].url

    @property
    def blobs(self) -> str:
        """The address of the other host."""
        return self._servers[1].url

    def asked(self, method: str, ending: str = "") -> list[Request]:
        """The requests for files of a name, in order."""
        return [request for request in self.requests if request.method == method and ending in request.path]

    def __enter__(self) -> Self:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self.released.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: Hub, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.name = name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients here break connections and are killed, and that is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a head waits for its body's acknowledgement, 40 ms each time

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""

    def _answer(self) -> None:
        hub = self.server.hub
        hub.requests.append(
            Request(
                host=self.server.name,
                method=self.command,
                path=self.path,
                headers={name.lower(): value for name, value in self.headers.items()},
            )
        )
        path = unquote(urlsplit(self.path).path)
        if self.server.name == "blobs":
            self._answer_blob(path)
        else:
            self._answer_file(path)

    def _answer_file(self, path: str) -> None:
        hub = self.server.hub
        repository, found, rest = path.strip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        fault = hub.faults.get(name)
        if fault is not None and fault.status is not None and fault.strike():
            return self._empty(fault.status, fault.headers)
        if not found:
            return self._empty(404)
        if repository not in hub.repositories:
            return self._empty(404, {"X-Error-Code": "RepoNotFound"})
        if revision != REVISION:
            return self._empty(404, {"X-Error-Code": "RevisionNotFound"})
        if name not in hub.repositories[repository]:
            return self._empty(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": REVISION})
        data = hub.repositories[repository][name]
        digest = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": REVISION} if hub.metadata else {}
        if len(data) < LARGE:
            etag = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # as git has it
            return self._content(name, data, headers | {"ETag": f'"{etag}"'})
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data)), "ETag": f'"{digest[:32]}"'}
        return self._empty(302, headers | {"Location": f"{hub.blobs}/{digest}/{name}?{SIGNATURE}"})

    def _answer_blob(self, path: str) -> None:
        digest, _, name = path.strip("/").partition("/")
        for files in self.server.hub.repositories.values():
            if name in files and hashlib.sha256(files[name]).hexdigest() == digest:
                return self._content(name, files[name], {"ETag": f'"{digest}"'})
        return self._empty(403)

    def _empty(self, status: int, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    def _content(self, name: str, data: bytes, headers: Mapping[str, str]) -> None:
        """Serve bytes, or the asked range of them, whole or in the way that is faulty."""
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked.startswith("bytes=") else 0
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        fault = self.server.hub.faults.get(name)
        endless = self.command == "GET" and fault is not None and fault.body == "endless"
        length = 10**12 if endless else len(data) - start
        for key, value in {**headers, "Accept-Ranges": "bytes", "Content-Length": str(length)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        while endless and not self.server.hub.closing.is_set():
            self._send(bytes(1 << 20))
        if fault is None or fault.body is None or not fault.strike():
            self._send(data[start:])
            return
        stop = max(start, fault.after)
        self._send(data[start:stop])
        if fault.body == "wrong":
            self._send(bytes(byte ^ 255 for byte in data[stop:]))
            return
        self.server.hub.holding.set()
        if fault.body == "held":
            self.server.hub.released.wait(60)
            self._send(data[stop:])
            return
        self.close_connection = True
        if fault.body == "stalled":
            self.server.hub.closing.wait(60)
        elif fault.body == "reset":
            # Closing with a linger of 0 seconds sends RST and no FIN.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def _send(self, data: bytes) -> None:
        hub = self.server.hub
        for start in range(0, len(data), hub.chunk):
            self.wfile.write(data[start : start + hub.chunk])
            if hub.pause_s:
                hub.closing.wait(hub.pause_s)


@contextmanager
def silent_address() -> Iterator[str]:
    """The address of a server that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def closed_address() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"
