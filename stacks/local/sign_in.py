"""Sign in a local user and print its token: `make token USER=ada PLAN=plus`.

The user is made in the emulated Cognito when it is new, and its plan set in the accounts table. Plain HTTP calls,
since importing an SDK would take longer than all of them.
"""

import argparse
import hashlib
import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PLANS = ("free", "plus")
USER_NAME = re.compile(r"[A-Za-z0-9._@+-]{1,64}")


class SignInError(Exception):
    """The user cannot be signed in; the message says why."""


def password_of(user: str) -> str:
    """Local users have a password only because Cognito wants one."""
    return "Local-" + hashlib.sha256(user.encode()).hexdigest()[:20] + "-1a"


class LocalIdentity:
    """The emulated user pool and the accounts table, from what `make up` wrote to `$LOCAL_DIR/state/applied.json`."""

    def __init__(self, local_dir: Path) -> None:
        applied = local_dir / "state" / "applied.json"
        if not applied.exists():
            raise SignInError(f"nothing runs in {local_dir}; start it with `make up`")
        facts = json.loads(applied.read_text())
        self._url, self._pool = facts["awsUrl"], facts["userPoolId"]
        self._client, self._accounts = facts["audience"], facts["accountsTable"]

    def sign_in(self, user: str, plan: str) -> str:
        """An id token of the user, made if new, on that plan. Raises SignInError."""
        if not USER_NAME.fullmatch(user):
            raise SignInError(f"user {user!r}: allowed are 1 to 64 letters, digits and ._@+-")
        if plan not in PLANS:
            raise SignInError(f"plan {plan!r}: allowed are {', '.join(PLANS)}")
        try:
            token = self._authenticate(user)
        except SignInError:
            self._create(user)
            token = self._authenticate(user)
        self._set_plan(_subject(token), plan)
        return token

    def _authenticate(self, user: str) -> str:
        answer = self._cognito(
            "InitiateAuth",
            {
                "AuthFlow": "USER_PASSWORD_AUTH",
                "ClientId": self._client,
                "AuthParameters": {"USERNAME": user, "PASSWORD": password_of(user)},
            },
        )
        return str(answer["AuthenticationResult"]["IdToken"])

    def _create(self, user: str) -> None:
        self._cognito("AdminCreateUser", {"UserPoolId": self._pool, "Username": user, "MessageAction": "SUPPRESS"})
        self._cognito(
            "AdminSetUserPassword",
            {"UserPoolId": self._pool, "Username": user, "Password": password_of(user), "Permanent": True},
        )

    def _set_plan(self, user_id: str, plan: str) -> None:
        item = {"userId": {"S": user_id}, "item": {"S": "account"}, "plan": {"S": plan}}
        self._call("dynamodb", "DynamoDB_20120810.PutItem", "1.0", {"TableName": self._accounts, "Item": item})

    def _cognito(self, operation: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._call("cognito-idp", f"AWSCognitoIdentityProviderService.{operation}", "1.1", body)

    def _call(self, service: str, target: str, version: str, body: dict[str, Any]) -> dict[str, Any]:
        # The emulator reads the service from the credential scope and verifies no signature.
        scope = f"local/20200101/eu-central-1/{service}/aws4_request"
        request = urllib.request.Request(
            self._url,
            json.dumps(body).encode(),
            {
                "Content-Type": f"application/x-amz-json-{version}",
                "X-Amz-Target": target,
                "Authorization": f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                answer: dict[str, Any] = json.loads(response.read() or b"{}")
                return answer
        except urllib.error.HTTPError as error:
            raise SignInError(f"{target}: {error.read().decode(errors='replace')[:300]}") from error
        except OSError as error:
            raise SignInError(f"the local service does not answer ({error}); is it up?") from error


def _subject(token: str) -> str:
    """The `sub` of a token that we just received from its issuer."""
    import base64

    payload = token.split(".")[1]
    return str(json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["sub"])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("user", help="name of the user, made if new")
    parser.add_argument("plan", nargs="?", default="free", help="free or plus (default free)")
    parser.add_argument("--local-dir", type=Path, default=Path(".local"), help="state of the service")
    options = parser.parse_args(arguments)
    try:
        print(LocalIdentity(options.local_dir).sign_in(options.user, options.plan))
    except SignInError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
