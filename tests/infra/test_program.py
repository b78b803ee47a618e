"""What the Pulumi program declares, for every stack file."""

import json
from typing import Any

import pytest

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
from stacks.local.program import stack_config
from tests.infra.conftest import Stack

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
        variables = {one["name"]: one["value"] for one in container["environment"]}
        kind = SETTINGS_OF[container["name"]]
        assert set(variables) <= set(kind.environment_names())
        settings = kind.load(variables)
        assert settings.environment == stack.name
        assert settings.plans and settings.models


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
    for kind in (":Table", ":Function", ":TaskDefinition", "ecs/service:Service", ":ReplicationGroup", ":LogGroup"):
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
    for path, item in document["paths"].items():
        for method in ("get", "post", "put", "patch", "delete"):
            if method in item:
                integration = item[method]["x-amazon-apigateway-integration"]
                assert integration["uri"].startswith(("arn:aws:apigateway:", "http://")), (path, method)
                if integration.get("responseTransferMode") == "STREAM":
                    streaming.add((method, path))
                    assert integration["connectionType"] == "VPC_LINK" and integration["integrationTarget"]
    assert streaming == {
        ("post", "/v1/conversations/{conversationId}/messages"),
        ("post", "/v1/conversations/{conversationId}/messages/{seq}/regenerate"),
        ("get", "/v1/generations/{generationId}/stream"),
    }


def test_data_is_protected_where_the_stack_says_so() -> None:
    settings = stack_config("local", {"protectData": True})
    from stacks.local.program import run_program
    from tests.infra.conftest import Recorder

    recorder = Recorder()
    run_program(settings, recorder, "local")
    for table in recorder.of(":Table"):
        assert table.inputs["deletionProtectionEnabled"] is True
        assert table.inputs["pointInTimeRecovery"]["enabled"] is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "magic"}, "chat:engine is 'magic'; allowed: simulated, vllm, openai"),
        ({"largeModel": "nope"}, "chat:largeModel is 'nope'; allowed: sim-large, sim-small"),
        ({"streamers": 0}, "chat:streamers is 0; allowed: 1 or more"),
        ({"streamers": "many"}, "streamers"),
        ({"lambdaArchitecture": "mips"}, "allowed: arm64, x86_64"),
        ({"typo": 1}, "typo"),
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
