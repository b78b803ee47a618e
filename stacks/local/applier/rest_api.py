"""A REST API on the emulator from an OpenAPI document, call by call: its importer does not read the document."""

from typing import Any

METHODS = ("get", "post", "put", "patch", "delete")


def make_rest_api(client: Any, name: str, document: dict[str, Any]) -> str:
    """Create the API with the document's routes to functions, and answer its id.

    Streaming routes are not made: the emulator buffers, so the local edge sends them to the streamers itself.
    """
    ident: str = client.create_rest_api(name=name)["id"]
    root = next(one["id"] for one in client.get_resources(restApiId=ident)["items"] if one["path"] == "/")
    authorizer = _authorizer(client, ident, document)
    resources = {"/": root}
    for path, item in document["paths"].items():
        for method in METHODS:
            integration = item.get(method, {}).get("x-amazon-apigateway-integration")
            if integration is None or integration["type"] != "aws_proxy":
                continue
            resource = _resource(client, ident, resources, path)
            open_to_all = item[method].get("security") == []
            guard = (
                {"authorizationType": "NONE"}
                if open_to_all
                else {"authorizationType": "CUSTOM", "authorizerId": authorizer}
            )
            client.put_method(restApiId=ident, resourceId=resource, httpMethod=method.upper(), **guard)
            client.put_integration(
                restApiId=ident,
                resourceId=resource,
                httpMethod=method.upper(),
                type="AWS_PROXY",
                integrationHttpMethod="POST",
                uri=integration["uri"],
            )
    return ident


def _authorizer(client: Any, ident: str, document: dict[str, Any]) -> str:
    wanted = document["components"]["securitySchemes"]["bearer"]["x-amazon-apigateway-authorizer"]
    made = client.create_authorizer(
        restApiId=ident,
        name="bearer",
        type=wanted["type"].upper(),
        authorizerUri=wanted["authorizerUri"],
        identitySource="method.request.header.Authorization",
        authorizerResultTtlInSeconds=wanted["authorizerResultTtlInSeconds"],
    )
    return str(made["id"])


def _resource(client: Any, ident: str, resources: dict[str, str], path: str) -> str:
    """The resource of a path, with all above it."""
    if path not in resources:
        parent, _, part = path.rpartition("/")
        above = _resource(client, ident, resources, parent or "/")
        made = client.create_resource(restApiId=ident, parentId=above, pathPart=part)
        resources[path] = made["id"]
    return resources[path]
