"""Web server on this machine for a folder's files, which answers requests for ranges of bytes."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class _Ranges(SimpleHTTPRequestHandler):
    """Handler of files and listings; Python's own ignores ranges."""

    requested: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        type(self).requested.append((self.path, asked))
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            super().do_GET()
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        size = path.stat().st_size
        end = min(int(last or size - 1), size - 1)
        with path.open("rb") as file:
            file.seek(int(first))
            content = file.read(end - int(first) + 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{end}/{size}")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", str(path.stat().st_mtime_ns))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def serve_folder(folder: Path) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Serves a folder inside the context; yields its URL, and the requests so far as paths and ranges."""
    requested: list[tuple[str, str | None]] = []
    handler = type("Handler", (_Ranges,), {"requested": requested})
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", requested
        finally:
            server.shutdown()
            thread.join()
