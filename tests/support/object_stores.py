"""Servers on this machine, each of one folder: S3, Google Cloud Storage, the Hugging Face hub, and a plain web server.

They answer what their clients ask to list and read public objects, in the stores' own protocols.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET, REPOSITORY = "corpora", "team/corpora"
_TIME = "2026-01-02T03:04:05.000Z"


class _Store(BaseHTTPRequestHandler):
    """Handler of requests; subclasses know a protocol.

    Attributes:
        requested: Requests so far, as method, path and range.
        failures: Number of requests for content that are answered with an error first.
    """

    protocol_version = "HTTP/1.1"
    requested: list[tuple[str, str, str | None]]
    failures = 0

    def __init__(self, *args: Any, folder: Path) -> None:
        self.folder = folder
        super().__init__(*args)

    def handle_any(self) -> None:
        self.url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(self.url.query, keep_blank_values=True).items()}
        type(self).requested.append((self.command, unquote(self.path), self.headers.get("Range")))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer()

    do_GET = do_HEAD = do_POST = handle_any

    def answer(self) -> None:
        raise NotImplementedError

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of the objects that begin with a prefix."""
        found = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        return sorted(name for name in found if name.startswith(prefix))

    def listed(self, prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
        """Returns the objects and the common prefixes, as object stores list."""
        names, prefixes = [], set[str]()
        for name in self.names(prefix):
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                names.append(name)
        return names, sorted(prefixes)

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def tag(self, name: str) -> str:
        return str((self.folder / name).stat().st_mtime_ns)

    def send(self, content: bytes, kind: str = "application/json", code: int = 200, **headers: str) -> None:
        self.send_response(code)
        length = headers.pop("length", str(len(content)))
        known = {"Content-Type": kind, "Content-Length": length, "x-request-id": "1"}
        for key, value in (known | {key.replace("_", "-"): value for key, value in headers.items()}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_json(self, value: Any, code: int = 200) -> None:
        self.send(json.dumps(value).encode(), code=code)

    def send_object(self, name: str, **headers: str) -> None:
        """Sends an object, or a range of its bytes."""
        kind = type(self)
        if kind.failures and self.command == "GET":
            kind.failures -= 1
            self.send(b"", code=503)
            return
        content, asked = (self.folder / name).read_bytes(), self.headers.get("Range")
        headers |= {"ETag": f'"{self.tag(name)}"', "Last_Modified": formatdate(usegmt=True), "Accept_Ranges": "bytes"}
        if asked is None:
            self.send(content, "application/octet-stream", **headers)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last or len(content) - 1), len(content) - 1)
        headers["Content_Range"] = f"bytes {begin}-{end}/{len(content)}"
        self.send(content[begin : end + 1], "application/octet-stream", 206, **headers)

    def has(self, name: str) -> bool:
        return bool(name) and (self.folder / name).is_file()

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


class S3(_Store):
    """Amazon's protocol: `ListObjectsV2`, `HeadObject` and `GetObject`."""

    def answer(self) -> None:
        _, _, name = unquote(self.url.path).lstrip("/").partition("/")
        if self.has(name):
            self.send_object(name)
        elif name or self.command == "HEAD":
            code = "<Code>NoSuchKey</Code><Message>no such key</Message>"
            self.send(f"<Error>{code}</Error>".encode(), "application/xml", 404 if name else 200)
        else:
            names, prefixes = self.listed(self.query.get("prefix", ""), self.query.get("delimiter", ""))
            entries = "".join(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{_TIME}</LastModified><ETag>{self.tag(key)}</ETag>"
                f"<Size>{self.size(key)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
                for key in names
            )
            entries += "".join(f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>" for key in prefixes)
            count = f"<KeyCount>{len(names) + len(prefixes)}</KeyCount><IsTruncated>false</IsTruncated>"
            found = f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{count}{entries}'
            self.send(f"{found}</ListBucketResult>".encode(), "application/xml")


class GoogleStorage(_Store):
    """Google's JSON API: `objects.list` and `objects.get`, with `alt=media` for content."""

    def answer(self) -> None:
        path = self.url.path.partition("/b/")[2]
        _, _, name = path.partition("/o")
        name = unquote(name.lstrip("/"))
        if self.has(name) and (self.query.get("alt") == "media" or "/download/" in self.url.path):
            self.send_object(name)
        elif self.has(name):
            self.send_json(self.described(name))
        elif name or "/o" not in path:
            self.send_json({"error": {"code": 404, "message": "No such object", "errors": []}}, 404)
        else:
            names, prefixes = self.listed(self.query.get("prefix", ""), self.query.get("delimiter", ""))
            self.send_json({"items": [self.described(key) for key in names], "prefixes": prefixes})

    def described(self, name: str) -> dict[str, str]:
        times = dict.fromkeys(("timeCreated", "updated"), _TIME)
        tag = self.tag(name)
        return {"name": name, "bucket": BUCKET, "size": str(self.size(name)), "etag": tag, "generation": tag, **times}


class Hub(_Store):
    """The hub's API of a data set: its revisions, its tree, its paths, and the files themselves."""

    def answer(self) -> None:
        path, api = unquote(self.url.path), f"/api/datasets/{REPOSITORY}"
        where = f"/datasets/{REPOSITORY}/resolve/main/"
        if path.startswith(where):
            name = path.removeprefix(where)
            if self.has(name):
                self.send_object(name, X_Repo_Commit="0" * 40, X_Linked_Size=str(self.size(name)))
            else:
                self.send(b"", code=404, X_Error_Code="EntryNotFound")
        elif path == f"{api}/paths-info/main":
            asked = json.loads(self.body)["paths"] if self.body[:1] == b"{" else parse_qs(self.body.decode())["paths"]
            found = [self.described(name) for name in asked if self.has(name)]
            found += [{"type": "directory", "path": name, "oid": "1"} for name in asked if self.is_folder(name)]
            self.send_json(found)
        elif path.startswith(f"{api}/tree/main"):
            folder = path.removeprefix(f"{api}/tree/main").strip("/")
            if folder and not self.is_folder(folder):
                self.send(b"{}", code=404, X_Error_Code="EntryNotFound")
                return
            names, prefixes = self.listed(f"{folder}/" if folder else "", "/")
            folders = [{"type": "directory", "path": name.rstrip("/"), "oid": "1"} for name in prefixes]
            self.send_json([*map(self.described, names), *folders])
        elif path.startswith(api):
            self.send_json({"id": REPOSITORY, "sha": "0" * 40, "siblings": [], "private": False, "tags": []})
        else:
            self.send(b"{}", code=404, X_Error_Code="RepoNotFound")

    def is_folder(self, name: str) -> bool:
        return bool(name) and bool(self.names(f"{name}/"))

    def described(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": self.size(name), "oid": self.tag(name)}


class WebServer(_Store):
    """Pages of links to files, and the files."""

    def answer(self) -> None:
        name = unquote(self.url.path).strip("/")
        if self.has(name):
            self.send_object(name)
        else:
            names, _ = self.listed(f"{name}/" if name else "", "/")
            links = "".join(f'<a href="{quote(Path(key).name)}">{escape(Path(key).name)}</a>' for key in names)
            self.send(links.encode(), "text/html", 200 if names else 404)


#: By protocol: the store, the URL of its bucket, and the options of fsspec's file system for a server.
STORES: dict[str, tuple[type[_Store], str, Any]] = {
    "s3": (S3, f"s3://{BUCKET}", lambda url: {"anon": True, "endpoint_url": url}),
    "gs": (GoogleStorage, f"gs://{BUCKET}", lambda url: {"token": "anon", "endpoint_url": url}),
    "hf": (Hub, f"hf://datasets/{REPOSITORY}", lambda url: {"endpoint": url, "token": False}),
    "http": (WebServer, "", lambda url: {}),
}


@contextlib.contextmanager
def serve_store(protocol: str, folder: Path) -> Iterator[tuple[str, dict[str, Any], type[_Store]]]:
    """Serves a folder as a bucket; yields its URL, the file system's options, and the handler with its requests."""
    kind, bucket, options = STORES[protocol]
    handler = type("Handler", (kind,), {"requested": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, folder=folder)) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            yield bucket or url, options(url), handler
        finally:
            server.shutdown()
            thread.join()
