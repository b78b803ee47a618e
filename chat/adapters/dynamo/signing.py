"""AWS Signature Version 4 for one service that is always called with `POST /`.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
"""

import hashlib
import hmac
import time
from typing import Protocol

CONTENT_TYPE = "application/x-amz-json-1.0"


class Credentials(Protocol):
    """Keys as botocore freezes them."""

    @property
    def access_key(self) -> str | None: ...

    @property
    def secret_key(self) -> str | None: ...

    @property
    def token(self) -> str | None: ...


class Signer:
    """Signs requests to one host. The day's key is derived once."""

    def __init__(self, host: str, region: str, service: str) -> None:
        self._host, self._region, self._service = host, region, service
        self._derived: tuple[str, str, bytes] = ("", "", b"")

    def headers(self, target: str, body: bytes, credentials: Credentials, now: float | None = None) -> str:
        """Header lines, each ended by CRLF, `Host` and `Authorization` among them. `now` in epoch seconds."""
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        date = moment[:8]
        token = credentials.token
        signed = "content-type;host;x-amz-date;" + ("x-amz-security-token;" if token else "") + "x-amz-target"
        canonical = (
            f"POST\n/\n\ncontent-type:{CONTENT_TYPE}\nhost:{self._host}\nx-amz-date:{moment}\n"
            + (f"x-amz-security-token:{token}\n" if token else "")
            + f"x-amz-target:{target}\n\n{signed}\n{hashlib.sha256(body).hexdigest()}"
        )
        scope = f"{date}/{self._region}/{self._service}/aws4_request"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        to_sign = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}"
        signature = hmac.digest(self._key(credentials.secret_key or "", date), to_sign.encode(), "sha256").hex()
        return (
            f"Host: {self._host}\r\nContent-Type: {CONTENT_TYPE}\r\nX-Amz-Date: {moment}\r\nX-Amz-Target: {target}\r\n"
            + (f"X-Amz-Security-Token: {token}\r\n" if token else "")
            + f"Authorization: AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, "
            f"SignedHeaders={signed}, Signature={signature}\r\n"
        )

    def _key(self, secret: str, date: str) -> bytes:
        if self._derived[:2] != (secret, date):
            key = ("AWS4" + secret).encode()
            for part in (date, self._region, self._service, "aws4_request"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._derived = (secret, date, key)
        return self._derived[2]
