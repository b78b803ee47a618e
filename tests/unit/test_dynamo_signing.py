"""The signature is the one that botocore makes."""

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as SdkCredentials
from botocore.credentials import ReadOnlyCredentials

from chat.adapters.dynamo.signing import CONTENT_TYPE, Signer

TARGET = "DynamoDB_20120810.GetItem"


@pytest.mark.parametrize("token", [None, "a-session-token//with+signs=="])
@pytest.mark.parametrize("body", [b"{}", '{"Key":{"S":"ế👋"}}'.encode()])
@pytest.mark.parametrize("host", ["dynamodb.eu-central-1.amazonaws.com", "127.0.0.1:4566"])
def test_it_is_botocores(monkeypatch: pytest.MonkeyPatch, token: str | None, body: bytes, host: str) -> None:
    now = 1_790_000_000.0
    signer = Signer(host, "eu-central-1", "dynamodb")
    for secret in ("secret one", "secret two"):  # the derived key follows the secret
        ours = signer.headers(TARGET, body, ReadOnlyCredentials("AKIA", secret, token), now)
        headers = dict(line.split(": ", 1) for line in ours.splitlines())
        request = AWSRequest("POST", f"https://{host}/", data=body)
        request.headers["Content-Type"] = CONTENT_TYPE
        request.headers["Host"] = host
        request.headers["X-Amz-Target"] = TARGET
        request.context["timestamp"] = headers["X-Amz-Date"]
        if token:
            request.headers["X-Amz-Security-Token"] = token
        auth = SigV4Auth(SdkCredentials("AKIA", secret, token), "dynamodb", "eu-central-1")
        request.headers["X-Amz-Date"] = headers["X-Amz-Date"]
        signature = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
        assert headers["Authorization"].endswith(f"Signature={signature}")
        assert f"SignedHeaders={auth.signed_headers(auth.headers_to_sign(request))}," in headers["Authorization"]
