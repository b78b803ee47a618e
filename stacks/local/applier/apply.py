"""Pulumi's mock monitor as a deployment engine: every registered resource is made, or found, on the emulator."""

import json
from collections.abc import Mapping
from typing import Any

import pulumi

from stacks.local.applier import aws, believable
from stacks.local.applier.applied import Applied, Backends, ServiceSpec
from stacks.local.applier.state import State
from stacks.local.program import revealed, run_program


class UnknownResource(Exception):
    """The program uses a resource type, or a function, that has no local counterpart yet."""


class Applier(pulumi.runtime.Mocks):
    """Hands each resource to the handler of its type."""

    def __init__(self, backends: Backends) -> None:
        self.backends = backends
        self.state = State(backends.state / "resources.json")
        self.services: list[ServiceSpec] = []
        self._clients = aws.Clients(backends.aws_url)
        self._tasks: dict[str, tuple[str, dict[str, str]]] = {}
        self._secrets: dict[str, str] = {}

    def new_resource(self, args: pulumi.runtime.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        """See pulumi.runtime.Mocks. Raises UnknownResource."""
        args.inputs = revealed(args.inputs)
        if not args.custom:
            return f"{args.name}-component", dict(args.inputs)
        if args.typ == "aws:ecs/taskDefinition:TaskDefinition":
            return self._task(args)
        if args.typ == "aws:ecs/service:Service":
            return self._service(args)
        if args.typ == "aws:secretsmanager/secretVersion:SecretVersion":
            self._secrets[args.inputs["secretId"]] = args.inputs["secretString"]
        if args.typ == "aws:elasticache/replicationGroup:ReplicationGroup":
            where = {
                "configurationEndpointAddress": self.backends.valkey_host,
                "port": self.backends.valkey_port,
                "arn": believable.arn("elasticache", args.name),
            }
            return args.name, dict(args.inputs) | where
        if make := aws.HANDLERS.get(args.typ):
            ident, outputs = make(self._clients, self.state, args.name, dict(args.inputs))
            return ident, dict(args.inputs) | outputs
        if args.typ in believable.OUTPUTS:
            ident, outputs = believable.OUTPUTS[args.typ](args.name, dict(args.inputs))
            return ident, dict(args.inputs) | outputs
        raise UnknownResource(
            f"{args.typ} ({args.name}): give it a handler in stacks/local/applier, aws.py if the emulator has it, "
            "believable.py if it has no local meaning"
        )

    def call(self, args: pulumi.runtime.MockCallArgs) -> dict[str, Any]:
        """See pulumi.runtime.Mocks. Raises UnknownResource."""
        if args.token == "aws:index/getRegion:getRegion":  # noqa: S105
            return {"region": aws.REGION, "id": aws.REGION, "description": "", "endpoint": ""}
        raise UnknownResource(f"the function {args.token} has no local counterpart in stacks/local/applier/apply.py")

    def _task(self, args: pulumi.runtime.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        (container,) = json.loads(args.inputs["containerDefinitions"])
        arn = believable.arn("ecs", f"task-definition/{args.name}:1")
        variables = {one["name"]: one["value"] for one in container["environment"]}
        variables |= {one["name"]: self._secrets[one["valueFrom"]] for one in container["secrets"]}
        self._tasks[arn] = (container["name"], variables)
        return args.name, dict(args.inputs) | {"arn": arn, "revision": 1}

    def _service(self, args: pulumi.runtime.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        container, variables = self._tasks[args.inputs["taskDefinition"]]
        count = int(args.inputs["desiredCount"])
        self.services.append(ServiceSpec(args.name, container, variables, count))
        return args.name, dict(args.inputs) | {"arn": believable.arn("ecs", f"service/{args.name}")}


def apply(config: Mapping[str, str], backends: Backends) -> Applied:
    """Make the emulator look like the program says. Idempotent: tables and users that exist are kept."""
    applier = Applier(backends)
    try:
        outputs = run_program(config, applier, "local")
    finally:
        applier.state.save()
    return Applied(
        api_url=outputs["apiUrl"],
        issuer=outputs["issuer"],
        audience=outputs["audience"],
        user_pool_id=outputs["userPoolId"],
        accounts_table=outputs["accountsTable"],
        services=sorted(applier.services, key=lambda service: service.name),
    )
