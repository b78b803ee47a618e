"""The Pulumi program applied to the real emulator: idempotent, enforcing, and loud about what it does not know."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pulumi
import pytest

from chat.settings import DispatcherSettings, StreamerSettings, WorkerSettings
from stacks.local.applier import Applied, Backends, apply
from stacks.local.applier.apply import Applier, UnknownResource
from stacks.local.backends import REGION, ROOT
from stacks.local.program import stack_config

ZIPS = ROOT / "build" / "functions-local"
PASSWORD = "correct-horse-9"
SETTINGS = {"streamer": StreamerSettings, "dispatcher": DispatcherSettings, "worker": WorkerSettings}


@dataclass(frozen=True)
class Emulator:
    """The emulator, and what is applied to it."""

    url: str
    backends: Backends
    config: dict[str, str]
    applied: Applied

    def client(self, service: str) -> Any:
        return boto3.Session("local", "local", region_name=REGION).client(service, endpoint_url=self.url)

    def physical(self) -> dict[str, list[str]]:
        """Everything that applying makes."""
        pool = self.applied.user_pool_id
        clients = self.client("cognito-idp").list_user_pool_clients(UserPoolId=pool, MaxResults=60)["UserPoolClients"]
        gateway = self.client("apigateway")
        apis = [api["id"] for api in gateway.get_rest_apis()["items"]]
        return {
            "tables": sorted(self.client("dynamodb").list_tables()["TableNames"]),
            "buckets": sorted(one["Name"] for one in self.client("s3").list_buckets()["Buckets"]),
            "pools": [one["Id"] for one in self.client("cognito-idp").list_user_pools(MaxResults=60)["UserPools"]],
            "clients": [one["ClientId"] for one in clients],
            "apis": apis,
            "deployments": [one["id"] for api in apis for one in gateway.get_deployments(restApiId=api)["items"]],
            "functions": sorted(
                f"{one['FunctionName']} {one['LastModified']}"
                for one in self.client("lambda").list_functions()["Functions"]
            ),
        }

    def get(self, path: str, token: str | None = None) -> tuple[int, Any]:
        """Through the emulated API Gateway."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(self.applied.api_url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            return refused.code, json.loads(refused.read() or b"null")

    def token(self, user: str) -> str:
        """The id token of a user who is made here."""
        cognito = self.client("cognito-idp")
        pool = self.applied.user_pool_id
        cognito.admin_create_user(UserPoolId=pool, Username=user, MessageAction="SUPPRESS")
        cognito.admin_set_user_password(UserPoolId=pool, Username=user, Password=PASSWORD, Permanent=True)
        signed_in = cognito.initiate_auth(
            ClientId=self.applied.audience,
            AuthFlow="USER_PASSWORD_AUTH",
            AuthParameters={"USERNAME": user, "PASSWORD": PASSWORD},
        )
        return str(signed_in["AuthenticationResult"]["IdToken"])


@pytest.fixture(scope="module")
def emulator(ministack_port: int, valkey_port: int, tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """The local stack's program, applied once."""
    subprocess.run([sys.executable, "scripts/build_functions.py", "--target", "local"], cwd=ROOT, check=True)
    url = f"http://127.0.0.1:{ministack_port}"
    backends = Backends(url, "127.0.0.1", valkey_port, tmp_path_factory.mktemp("state"))
    overrides = {"jwksBaseUrl": url, "functionsPath": str(ZIPS), "lambdaArchitecture": "x86_64", "smallReplicas": 1}
    config = stack_config("local", overrides)
    return Emulator(url, backends, config, apply(config, backends))


def test_services_get_the_environment_that_their_settings_accept(emulator: Emulator, valkey_port: int) -> None:
    services = {service.name: service for service in emulator.applied.services}
    assert set(services) == {"streamer", "dispatcher", "worker-large", "worker-small"}
    for service in services.values():
        settings = SETTINGS[service.container].load(service.environment)
        assert settings.valkey_url == f"redis://127.0.0.1:{valkey_port}"
        assert emulator.client("dynamodb").describe_table(TableName=settings.conversations_table)


def test_applying_again_makes_nothing_and_keeps_the_data(emulator: Emulator) -> None:
    before = emulator.physical()
    accounts = emulator.applied.accounts_table
    item = {"userId": {"S": "ada"}, "item": {"S": "account"}, "plan": {"S": "plus"}}
    emulator.client("dynamodb").put_item(TableName=accounts, Item=item)

    assert apply(emulator.config, emulator.backends) == emulator.applied

    assert emulator.physical() == before
    key = {"userId": {"S": "ada"}, "item": {"S": "account"}}
    assert emulator.client("dynamodb").get_item(TableName=accounts, Key=key)["Item"] == item


def test_a_changed_setting_reaches_the_functions_in_place(emulator: Emulator) -> None:
    before = emulator.physical()
    changed = emulator.config | {"chat:traceStages": "true"}
    apply(changed, emulator.backends)
    found = emulator.client("lambda").get_function_configuration(FunctionName="models")["Environment"]["Variables"]
    assert found["TRACE_STAGES"] == "true"
    apply(emulator.config, emulator.backends)
    after = emulator.physical()
    for kind in ("tables", "buckets", "pools", "clients", "apis", "deployments"):
        assert after[kind] == before[kind]


def test_routes_answer_and_the_authorizer_is_enforced(emulator: Emulator) -> None:
    assert emulator.get("/healthz")[0] == 200
    assert "/v1/conversations" in emulator.get("/openapi.json")[1]["paths"]
    assert emulator.get("/v1/models")[0] in (401, 403)
    assert emulator.get("/v1/models", "not.a.token")[0] in (401, 403)
    status, models = emulator.get("/v1/models", emulator.token("grace"))
    assert status == 200
    assert {model["id"] for model in models["data"]} == {"sim-large", "sim-small"}


def test_a_provider_key_reaches_the_worker_alone(emulator: Emulator, tmp_path: Path) -> None:
    provider = {"engine": "openai", "openaiBaseUrl": "http://127.0.0.1:9", "openaiModel": "m", "openaiApiKey": "key-1"}
    config = emulator.config | {f"chat:{key}": value for key, value in provider.items()}
    services = {service.name: service.environment for service in apply(config, emulator.backends).services}
    assert services["worker-large"]["OPENAI_API_KEY"] == "key-1"
    assert all("OPENAI_API_KEY" not in services[name] for name in ("streamer", "dispatcher"))


def test_a_table_with_other_keys_is_not_touched(emulator: Emulator) -> None:
    client = emulator.client("dynamodb")
    client.create_table(
        TableName="data-other",
        BillingMode="PAY_PER_REQUEST",
        KeySchema=[{"AttributeName": "old", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "old", "AttributeType": "S"}],
    )
    inputs = {"billingMode": "PAY_PER_REQUEST", "hashKey": "new", "attributes": [{"name": "new", "type": "S"}]}
    with pytest.raises(ValueError, match="data-other exists with other keys"):
        Applier(emulator.backends).new_resource(_resource("aws:dynamodb/table:Table", "data-other", inputs))
    client.delete_table(TableName="data-other")


def test_an_unknown_type_or_function_is_named(emulator: Emulator) -> None:
    applier = Applier(emulator.backends)
    with pytest.raises(UnknownResource, match="aws:sqs/queue:Queue \\(jobs\\)"):
        applier.new_resource(_resource("aws:sqs/queue:Queue", "jobs", {}))
    with pytest.raises(UnknownResource, match="aws:index/getPartition:getPartition"):
        applier.call(pulumi.runtime.MockCallArgs("aws:index/getPartition:getPartition", {}, ""))


def _resource(kind: str, name: str, inputs: dict[str, Any]) -> pulumi.runtime.MockResourceArgs:
    return pulumi.runtime.MockResourceArgs(kind, name, inputs, "", "", True)
