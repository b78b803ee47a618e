"""The web page's files, as a bucket behind CloudFront would serve them."""

import contextlib
import json
import mimetypes
from pathlib import Path

from chat.errors import NotFound

SECURITY = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
CONFIG = {"auth": {"kind": "local"}, "apiBase": ""}
TYPES = {".js": "text/javascript; charset=utf-8", ".html": "text/html; charset=utf-8"}


class Pages:
    """Files of one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def page(self, path: str) -> tuple[bytes, str, dict[str, str]]:
        """Content, content type and headers. Raises NotFound."""
        if path == "/config.json":
            return json.dumps(CONFIG).encode(), "application/json", SECURITY
        file = self._file(path)
        if file is None:
            raise NotFound("There is no such page.")
        kind = TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        return file.read_bytes(), kind, SECURITY

    def _file(self, path: str) -> Path | None:
        """The file behind a path, which may say anything."""
        with contextlib.suppress(ValueError, OSError):
            file = (self._root / path.lstrip("/")).resolve()
            if file.is_dir():
                file /= "index.html"
            if file.is_relative_to(self._root) and file.is_file():
                return file
        return None
