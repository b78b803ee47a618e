"""Each stack's program, run once with believable outputs, and everything that it declared."""

from dataclasses import dataclass, field
from typing import Any

import pulumi
import pytest

from stacks.local.applier.believable import OUTPUTS, arn
from stacks.local.program import revealed, run_program, stack_config

STACKS: dict[str, dict[str, Any]] = {
    "local": {},
    "dev": {
        "cachePassword": "long-enough-password",
        "openaiApiKey": "key-of-the-provider",
        "images": {
            name: f"registry.example.com/{name}@sha256:{'0' * 64}" for name in ("streamer", "dispatcher", "worker")
        },
    },
}
"""Stack file -> what its owner sets before the first deployment."""


@dataclass
class Recorder(pulumi.runtime.Mocks):
    """Remembers every registered resource with its resolved inputs."""

    resources: list[pulumi.runtime.MockResourceArgs] = field(default_factory=list)

    def new_resource(self, args: pulumi.runtime.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        args.inputs = revealed(args.inputs)
        self.resources.append(args)
        outputs = dict(args.inputs) | {
            "arn": arn("test", args.name),
            "configurationEndpointAddress": "cache.internal",
            "endpoint": f"cognito-idp.eu-central-1.amazonaws.com/{args.name}",
            "executionArn": arn("execute-api", args.name),
            "invokeUrl": "https://api.example.com/live",
            "name": args.name,
        }
        if args.typ in OUTPUTS:
            return OUTPUTS[args.typ](args.name, dict(args.inputs))[0], outputs | OUTPUTS[args.typ](
                args.name, dict(args.inputs)
            )[1]
        return f"{args.name}-id", outputs

    def call(self, args: pulumi.runtime.MockCallArgs) -> dict[str, Any]:
        return {"region": "eu-central-1", "id": "eu-central-1"}

    def of(self, kind: str) -> list[pulumi.runtime.MockResourceArgs]:
        """Resources of AWS (not our components) whose type ends so."""
        return [one for one in self.resources if one.typ.startswith("aws:") and one.typ.endswith(kind)]


@dataclass(frozen=True)
class Stack:
    """A stack that was run."""

    name: str
    recorder: Recorder
    outputs: dict[str, Any]


_run: dict[str, Stack] = {}


@pytest.fixture(params=STACKS)
def stack(request: pytest.FixtureRequest) -> Stack:
    """Every stack file."""
    name = str(request.param)
    if name not in _run:
        recorder = Recorder()
        _run[name] = Stack(name, recorder, run_program(stack_config(name, STACKS[name]), recorder, name))
    return _run[name]
