"""Handlers of the resource types that the emulator has. Each finds or makes one, and answers id and outputs."""

import hashlib
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from stacks.local.applier.believable import ACCOUNT, arn
from stacks.local.applier.rest_api import make_rest_api
from stacks.local.applier.state import State
from stacks.local.backends import REGION

Handler = Callable[["Clients", State, str, dict[str, Any]], tuple[str, dict[str, Any]]]


class Clients:
    """boto3 clients of the emulator, made when they are needed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._session = boto3.Session("local", "local", region_name=REGION)

    def _client(self, service: str) -> Any:
        config = Config(retries={"total_max_attempts": 3}, read_timeout=30)
        return self._session.client(service, endpoint_url=self.url, config=config)

    @cached_property
    def dynamodb(self) -> Any:
        """DynamoDB."""
        return self._client("dynamodb")

    @cached_property
    def s3(self) -> Any:
        """S3."""
        return self._client("s3")

    @cached_property
    def cognito(self) -> Any:
        """Cognito user pools."""
        return self._client("cognito-idp")

    @cached_property
    def functions(self) -> Any:
        """Lambda."""
        return self._client("lambda")

    @cached_property
    def apigateway(self) -> Any:
        """API Gateway, REST."""
        return self._client("apigateway")


def _table(clients: Clients, state: State, name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    outputs = {
        "name": name,
        "arn": arn("dynamodb", f"table/{name}"),
        "streamArn": arn("dynamodb", f"table/{name}/stream/1"),
    }
    try:
        found = clients.dynamodb.describe_table(TableName=name)["Table"]
    except ClientError:
        clients.dynamodb.create_table(**_table_definition(name, inputs))
        return name, outputs
    # A schema that differs would go unnoticed for long: data is never dropped silently.
    if _schema(_table_definition(name, inputs)) != _schema(found):
        raise ValueError(f"table {name} exists with other keys or indexes; `make clean` removes the local data")
    return name, outputs


def _schema(definition: dict[str, Any]) -> dict[str, list[str]]:
    """The names of keys, of the table and by index."""
    indexes = definition.get("GlobalSecondaryIndexes") or []
    named = {"": definition["KeySchema"]} | {index["IndexName"]: index["KeySchema"] for index in indexes}
    return {name: [key["AttributeName"] for key in schema] for name, schema in named.items()}


def _table_definition(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    indexes = [
        {
            "IndexName": index["name"],
            "KeySchema": _keys(index["hashKey"], index.get("rangeKey")),
            "Projection": {"ProjectionType": index["projectionType"]},
        }
        for index in inputs.get("globalSecondaryIndexes") or []
    ]
    definition: dict[str, Any] = {
        "TableName": name,
        "BillingMode": inputs["billingMode"],
        "KeySchema": _keys(inputs["hashKey"], inputs.get("rangeKey")),
        "AttributeDefinitions": [
            {"AttributeName": one["name"], "AttributeType": one["type"]} for one in inputs["attributes"]
        ],
    }
    if indexes:
        definition["GlobalSecondaryIndexes"] = indexes
    if inputs.get("streamEnabled"):
        definition["StreamSpecification"] = {"StreamEnabled": True, "StreamViewType": inputs["streamViewType"]}
    return definition


def _keys(partition: str, sort: str | None) -> list[dict[str, str]]:
    schema = [{"AttributeName": partition, "KeyType": "HASH"}]
    return schema + ([{"AttributeName": sort, "KeyType": "RANGE"}] if sort else [])


def _bucket(clients: Clients, state: State, name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    try:
        clients.s3.head_bucket(Bucket=name)
    except ClientError:
        clients.s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
    return name, {"arn": f"arn:aws:s3:::{name}", "bucket": name}


def _user_pool(clients: Clients, state: State, name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    pools = clients.cognito.list_user_pools(MaxResults=60)["UserPools"]
    ident = next((pool["Id"] for pool in pools if pool["Name"] == name), None)
    if ident is None:
        asked = inputs.get("passwordPolicy") or {}
        policy = {
            "MinimumLength": int(asked.get("minimumLength", 8)),
            "RequireLowercase": bool(asked.get("requireLowercase")),
            "RequireNumbers": bool(asked.get("requireNumbers")),
            "RequireSymbols": bool(asked.get("requireSymbols")),
            "RequireUppercase": bool(asked.get("requireUppercase")),
        }
        made = clients.cognito.create_user_pool(PoolName=name, Policies={"PasswordPolicy": policy})
        ident = made["UserPool"]["Id"]
    endpoint = f"cognito-idp.{REGION}.amazonaws.com/{ident}"
    return ident, {"arn": arn("cognito-idp", f"userpool/{ident}"), "endpoint": endpoint, "name": name}


def _user_pool_client(clients: Clients, state: State, name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    pool = inputs["userPoolId"]
    found = clients.cognito.list_user_pool_clients(UserPoolId=pool, MaxResults=60)["UserPoolClients"]
    ident = next((client["ClientId"] for client in found if client["ClientName"] == name), None)
    if ident is None:
        made = clients.cognito.create_user_pool_client(
            UserPoolId=pool, ClientName=name, ExplicitAuthFlows=inputs["explicitAuthFlows"], GenerateSecret=False
        )
        ident = made["UserPoolClient"]["ClientId"]
    return ident, {"name": name}


def _function(clients: Clients, state: State, name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    archive = Path(inputs["code"].path)
    if not archive.exists():
        raise FileNotFoundError(f"{archive} is not built; `make functions` builds it")
    code = archive.read_bytes()
    variables = (inputs.get("environment") or {}).get("variables") or {}
    configuration = {
        "Runtime": inputs["runtime"],
        "Handler": inputs["handler"],
        "Role": inputs["role"],
        "Timeout": int(inputs["timeout"]),
        "MemorySize": int(inputs["memorySize"]),
        "Environment": {"Variables": variables},
    }
    made_from = [configuration, hashlib.sha256(code).hexdigest()]
    own = f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{name}"
    outputs = {"arn": own, "name": name, "invokeArn": own}
    try:
        clients.functions.get_function(FunctionName=name)
    except ClientError:
        clients.functions.create_function(FunctionName=name, Code={"ZipFile": code}, **configuration)
        state.remember(f"function/{name}", own, made_from)
        return name, outputs
    if not state.unchanged(f"function/{name}", made_from):
        clients.functions.update_function_code(FunctionName=name, ZipFile=code)
        clients.functions.update_function_configuration(FunctionName=name, **configuration)
        state.remember(f"function/{name}", own, made_from)
    return name, outputs


def _rest_api(clients: Clients, state: State, name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    key, body = f"rest/{name}", inputs["body"]
    apis = {api["id"] for api in clients.apigateway.get_rest_apis(limit=500)["items"] if api["name"] == name}
    ident = state.ident(key)
    if ident not in apis or not state.unchanged(key, body):
        for old in apis:
            clients.apigateway.delete_rest_api(restApiId=old)
        ident = make_rest_api(clients.apigateway, name, json.loads(body))
        state.remember(key, ident, body)
    assert ident is not None  # noqa: S101 - made or remembered above
    return ident, {
        "executionArn": f"arn:aws:execute-api:{REGION}:{ACCOUNT}:{ident}",
        "name": name,
        "rootResourceId": "root",
    }


def _deployment(clients: Clients, state: State, name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    key, made_from = f"deployment/{name}", [inputs["restApi"], inputs["triggers"]]
    ident = state.ident(key)
    if ident is None or not state.unchanged(key, made_from):
        ident = clients.apigateway.create_deployment(restApiId=inputs["restApi"])["id"]
        state.remember(key, ident, made_from)
    return str(ident), {}


def _stage(clients: Clients, state: State, name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    rest, stage = inputs["restApi"], inputs["stageName"]
    try:
        clients.apigateway.create_stage(restApiId=rest, stageName=stage, deploymentId=inputs["deployment"])
    except ClientError:
        change = [{"op": "replace", "path": "/deploymentId", "value": inputs["deployment"]}]
        clients.apigateway.update_stage(restApiId=rest, stageName=stage, patchOperations=change)
    url = f"{clients.url}/restapis/{rest}/{stage}/_user_request_"
    return f"{rest}-{stage}", {"invokeUrl": url, "arn": arn("apigateway", f"{rest}/{stage}"), "executionArn": rest}


HANDLERS: dict[str, Handler] = {
    "aws:apigateway/deployment:Deployment": _deployment,
    "aws:apigateway/restApi:RestApi": _rest_api,
    "aws:apigateway/stage:Stage": _stage,
    "aws:cognito/userPool:UserPool": _user_pool,
    "aws:cognito/userPoolClient:UserPoolClient": _user_pool_client,
    "aws:dynamodb/table:Table": _table,
    "aws:lambda/function:Function": _function,
    "aws:s3/bucket:Bucket": _bucket,
}
