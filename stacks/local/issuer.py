"""A token issuer of its own, for tests and benchmarks that start a streamer without a user pool."""

import http.server
import json
import threading
import time

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa


class Issuer:
    """Signs tokens with a key made at start, and publishes it at `url`."""

    def __init__(self, issuer: str, audience: str) -> None:
        self.issuer, self.audience = issuer, audience
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        published = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key())) | {"kid": "k1", "use": "sig"}
        document = json.dumps({"keys": [published]}).encode()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(document)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/jwks.json"

    def token(self, user: str, seconds: int = 600, **claims: object) -> str:
        """A token of the user, valid for `seconds`; `claims` replace or add to the usual ones."""
        values = {"iss": self.issuer, "aud": self.audience, "sub": user, "exp": int(time.time()) + seconds}
        return jwt.encode(values | claims, self._key, "RS256", {"kid": "k1"})
