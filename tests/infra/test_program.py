"""What the Pulumi program declares, for every stack file."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import infra
from chat.keys import BY_USER_INDEX, OPEN_BY_EXPIRY_INDEX
from chat.settings import (
    AuthorizerSettings,
    DispatcherSettings,
    FunctionSettings,
    StreamerSettings,
    WorkerSettings,
)
from infra.api.document import STREAM_TIMEOUT_MS
from infra.components.balancer import IDLE_SECONDS
from infra.components.services import STOP_SECONDS
from infra.environment import DeclarationError, environment
from infra.settings import StackSettings, StackSettingsError
from stacks.local.program import UnknownOutput, run_program, stack_config
from tests.infra.conftest import STACKS, Recorder, Stack

COST_TAGS = {"Service", "Environment", "Component", "Owner", "CostCenter"}
GATEWAY_IDLE_SECONDS = 300
"""API Gateway cuts a regional stream that is silent for 5 minutes."""

SETTINGS_OF = {
    "streamer": StreamerSettings,
    "dispatcher": DispatcherSettings,
    "worker": WorkerSettings,
}


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, one in value.items() for leaf in leaves(one, f"{path}.{key}")]
    if isinstance(value, list):
        return [leaf for place, one in enumerate(value) for leaf in leaves(one, f"{path}[{place}]")]
    return [(path, value)]


def containers(stack: Stack) -> list[dict[str, Any]]:
    tasks = stack.recorder.of(":TaskDefinition")
    return [container for task in tasks for container in json.loads(task.inputs["containerDefinitions"])]


def test_no_input_is_none_or_an_output_in_text(stack: Stack) -> None:
    for resource in stack.recorder.resources:
        for path, value in leaves(dict(resource.inputs)):
            assert value is not None, f"{resource.name}{path}"
            assert "Output object" not in str(value) and "Calling __str__" not in str(value), f"{resource.name}{path}"
            assert '"null"' not in str(value) and ": null" not in str(value), f"{resource.name}{path}: {value}"


def test_containers_get_exactly_what_they_read(stack: Stack) -> None:
    found = containers(stack)
    assert {container["name"] for container in found} == set(SETTINGS_OF)
    for container in found:
        kind = SETTINGS_OF[container["name"]]
        variables = {one["name"]: one["value"] for one in container["environment"]}
        secrets = {one["name"]: one["valueFrom"] for one in container["secrets"]}
        assert all(reference.startswith("arn:aws:secretsmanager:") for reference in secrets.values())
        variables |= secrets
        assert set(variables) <= set(kind.environment_names())
        settings = kind.load(variables)
        assert settings.environment == stack.name
        assert settings.plans and settings.models


def test_secrets_stand_in_no_task_definition() -> None:
    given = STACKS["dev"]
    recorder = Recorder()
    run_program(stack_config("dev", given), recorder, "dev")
    tasks = {task.name: task.inputs["containerDefinitions"] for task in recorder.of(":TaskDefinition")}
    for secret in (given["cachePassword"], given["openaiApiKey"]):
        assert not any(secret in text for text in tasks.values())
    names = {task: {one["name"] for one in json.loads(text)[0]["secrets"]} for task, text in tasks.items()}
    assert names == {
        "streamer": {"VALKEY_PASSWORD"},
        "dispatcher": {"VALKEY_PASSWORD"},
        "worker-large": {"VALKEY_PASSWORD", "OPENAI_API_KEY"},
    }
    for task in recorder.of(":TaskDefinition"):
        [reader] = [one for one in recorder.of(":RolePolicy") if one.name == f"{task.name}-execution"]
        readable = {arn for one in json.loads(reader.inputs["policy"])["Statement"] for arn in one["Resource"]}
        assert readable == {one["valueFrom"] for one in json.loads(task.inputs["containerDefinitions"])[0]["secrets"]}
    [cache] = recorder.of(":ReplicationGroup")
    assert cache.inputs["authToken"] == given["cachePassword"]


def test_functions_get_exactly_what_they_read(stack: Stack) -> None:
    for function in stack.recorder.of("lambda/function:Function"):
        variables = (function.inputs.get("environment") or {}).get("variables") or {}
        kinds = {"authorizer": AuthorizerSettings, "meta": None}
        kind = kinds.get(function.name, FunctionSettings)
        if kind is None:
            assert variables == {}
        else:
            assert set(variables) <= set(kind.environment_names())
            kind.load(variables)


def test_a_runtime_without_a_variable_or_with_one_too_many_is_an_error() -> None:
    good = {"oidc_issuer": "i", "oidc_audience": "a", "jwks_url": "u"}
    assert environment(AuthorizerSettings, good) == {"OIDC_ISSUER": "i", "OIDC_AUDIENCE": "a", "JWKS_URL": "u"}
    with pytest.raises(DeclarationError, match="JWKS_URL"):
        environment(AuthorizerSettings, good | {"jwks_url": None})
    with pytest.raises(DeclarationError, match="PAGE_LIMIT"):
        environment(AuthorizerSettings, good | {"page_limit": 5})


def test_tables_have_the_keys_that_the_code_uses(stack: Stack) -> None:
    tables = {table.name: table.inputs for table in stack.recorder.of("dynamodb/table:Table")}
    shapes = {
        name.removeprefix("data-"): (inputs["hashKey"], inputs.get("rangeKey")) for name, inputs in tables.items()
    }
    assert shapes == {
        "conversations": ("conversationId", "item"),
        "generations": ("generationId", None),
        "accounts": ("userId", "item"),
        "ledger": ("userId", "entry"),
    }
    indexes = {
        index["name"]: (index["hashKey"], index["rangeKey"])
        for inputs in tables.values()
        for index in inputs.get("globalSecondaryIndexes") or []
    }
    assert indexes == {
        BY_USER_INDEX: ("userId", "updatedKey"),
        OPEN_BY_EXPIRY_INDEX: ("openShard", "expiresAt"),
    }


def test_whatever_takes_tags_has_all_cost_tags(stack: Stack) -> None:
    tagged = [resource for resource in stack.recorder.resources if "tags" in resource.inputs]
    assert len(tagged) > 40
    for resource in tagged:
        assert set(resource.inputs["tags"]) == COST_TAGS, resource.name
        assert resource.inputs["tags"]["Environment"] == stack.name
    for kind in (
        "dynamodb/table:Table",
        "lambda/function:Function",
        ":TaskDefinition",
        "ecs/service:Service",
        ":ReplicationGroup",
        ":LogGroup",
    ):
        for resource in stack.recorder.of(kind):
            assert "tags" in resource.inputs, resource.name


def test_policies_name_actions_and_resources(stack: Stack) -> None:
    policies = stack.recorder.of("iam/rolePolicy:RolePolicy")
    assert policies
    for policy in policies:
        for statement in json.loads(policy.inputs["policy"])["Statement"]:
            assert not any("*" in action for action in statement["Action"]), policy.name
            assert "*" not in statement["Resource"], policy.name
            assert all(resource.startswith("arn:") for resource in statement["Resource"])


def test_functions_may_touch_only_what_they_use(stack: Stack) -> None:
    policies = {one.name: json.loads(one.inputs["policy"])["Statement"] for one in stack.recorder.of(":RolePolicy")}
    assert {"authorizer", "meta"}.isdisjoint(policies)
    [models] = policies["models"]
    assert models["Action"] == ["dynamodb:GetItem", "dynamodb:Query"]
    assert all("data-accounts" in resource for resource in models["Resource"])
    reading = {action for statement in policies["messages"] for action in statement["Action"]}
    assert reading == {"dynamodb:GetItem", "dynamodb:Query", "s3:GetObject"}


def test_an_output_that_nobody_answers_is_named() -> None:
    class Silent(Recorder):
        def new_resource(self, args: Any) -> tuple[str, dict[str, Any]]:
            ident, outputs = super().new_resource(args)
            if args.typ.endswith(":ReplicationGroup"):
                del outputs["configurationEndpointAddress"]
            return ident, outputs

    with pytest.raises(UnknownOutput, match=r"replicationGroup:ReplicationGroup.*configuration_endpoint_address"):
        run_program(stack_config("local"), Silent(), "local")


def test_a_key_that_nobody_reads_is_named() -> None:
    with pytest.raises(StackSettingsError, match="chat:streamer is"):
        run_program(stack_config("local", {"streamer": 3}), Recorder(), "local")


def test_the_entry_point_runs_as_pulumi_runs_it() -> None:
    """In its own folder, with nothing of the repository on the path, up to the settings that are not given."""
    run = "import runpy; runpy.run_path('.', run_name='__main__')"
    bare = {"PATH": os.environ["PATH"]}
    folder = Path(infra.__file__).parent
    process = subprocess.run(
        [sys.executable, "-c", run], cwd=folder, env=bare, capture_output=True, text=True, check=False
    )
    assert "infra.settings.StackSettingsError: chat:environment is not set" in process.stderr


def test_everything_that_runs_has_a_way_out(stack: Stack) -> None:
    out = {route.inputs["routeTableId"] for route in stack.recorder.of("ec2/route:Route")}
    assert out == {f"{table.name}-id" for table in stack.recorder.of(":RouteTable")}


def test_logs_are_kept_for_a_while_and_data_is_encrypted(stack: Stack) -> None:
    assert all(group.inputs["retentionInDays"] for group in stack.recorder.of(":LogGroup"))
    assert all(table.inputs["serverSideEncryption"]["enabled"] for table in stack.recorder.of(":Table"))
    [cache] = stack.recorder.of(":ReplicationGroup")
    assert cache.inputs["atRestEncryptionEnabled"] is True
    assert cache.inputs["clusterMode"] == "enabled"
    if stack.name != "local":
        assert cache.inputs["transitEncryptionEnabled"] is True


def test_nothing_is_open_to_the_world_but_the_gateway(stack: Stack) -> None:
    for rule in stack.recorder.of(":SecurityGroupIngressRule"):
        assert rule.inputs.get("cidrIpv4") != "0.0.0.0/0", rule.name
    [balancer] = stack.recorder.of("lb/loadBalancer:LoadBalancer")
    assert balancer.inputs["internal"] is True


def test_no_timeout_cuts_a_living_stream(stack: Stack) -> None:
    streamer = next(container for container in containers(stack) if container["name"] == "streamer")
    settings = StreamerSettings.load({one["name"]: one["value"] for one in streamer["environment"]})
    assert settings.heartbeat_seconds < 10 < GATEWAY_IDLE_SECONDS < IDLE_SECONDS
    assert settings.drain_seconds < STOP_SECONDS == streamer["stopTimeout"]
    [balancer] = stack.recorder.of("lb/loadBalancer:LoadBalancer")
    assert balancer.inputs["idleTimeout"] == IDLE_SECONDS
    assert STREAM_TIMEOUT_MS == 900_000


def test_every_route_runs_somewhere(stack: Stack) -> None:
    [api] = stack.recorder.of("apigateway/restApi:RestApi")
    document = json.loads(api.inputs["body"])
    streaming = set()
    open_to_all = set()
    for path, item in document["paths"].items():
        for method in ("get", "post", "put", "patch", "delete"):
            if method in item:
                integration = item[method]["x-amazon-apigateway-integration"]
                # The gateway ignores what is declared above an operation.
                if item[method]["security"] == []:
                    open_to_all.add(path)
                declared = {one["name"] for one in item[method]["parameters"] if one["in"] == "path"}
                assert declared == set(re.findall(r"{(\w+)}", path))
                assert integration["uri"].startswith(("arn:aws:apigateway:", "http://")), (path, method)
                if integration.get("responseTransferMode") == "STREAM":
                    streaming.add((method, path))
                    assert integration["connectionType"] == "VPC_LINK" and integration["integrationTarget"]
    assert streaming == {
        ("post", "/v1/conversations/{conversationId}/messages"),
        ("post", "/v1/conversations/{conversationId}/messages/{seq}/regenerate"),
        ("get", "/v1/generations/{generationId}/stream"),
    }
    assert open_to_all == {"/healthz", "/openapi.json"}
    assert "nullable" not in api.inputs["body"]
    for answer in document["x-amazon-apigateway-gateway-responses"].values():
        error = json.loads(answer["responseTemplates"]["application/json"])["error"]
        assert error["type"] and error["code"] and error["message"]
        assert ("retryAfterSeconds" in error) == (answer["statusCode"] in (429, 503))


def test_data_is_protected_where_the_stack_says_so() -> None:
    recorder = Recorder()
    run_program(stack_config("local", {"protectData": True}), recorder, "local")
    for table in recorder.of(":Table"):
        assert table.inputs["deletionProtectionEnabled"] is True
        assert table.inputs["pointInTimeRecovery"]["enabled"] is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "magic"}, 'chat:engine is "magic"; allowed: simulated, vllm, openai'),
        ({"largeModel": "sim-small"}, 'chat:largeModel is "sim-small"; allowed: sim-large'),
        ({"streamers": 0}, "chat:streamers is 0; allowed: 1 or more"),
        ({"streamers": "many"}, 'chat:streamers is "many"; allowed: Expected `int`'),
        ({"lambdaArchitecture": "mips"}, "allowed: arm64, x86_64"),
        ({"typo": 1}, "chat:typo is 1; allowed: only the keys"),
        ({"images": {"streamer": "a"}}, "allowed: an image for each of streamer, dispatcher, worker"),
        ({"natGateways": 4}, "chat:natGateways is 4; allowed: 3 or fewer"),
        ({"plans": []}, "chat:plans is []; allowed: one or more"),
        ({"cacheTls": True}, "chat:cachePassword has 0 characters; allowed: 16 to 128"),
        ({"cachePassword": "long-enough-password"}, "chat:cachePassword is set; allowed: only with cacheTls: true"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(change: dict[str, Any], message: str) -> None:
    plain = {
        key.removeprefix("chat:"): json.loads(value) if value[:1] in "[{" else value
        for key, value in stack_config("local").items()
    }
    with pytest.raises(StackSettingsError) as caught:
        StackSettings.parse(plain | change)
    assert message in str(caught.value)
