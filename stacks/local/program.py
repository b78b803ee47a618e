"""Run the Pulumi program in process, with any mock monitor in the place of a deployment engine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pulumi
import yaml

from infra.settings import NAMESPACE, StackSettings
from infra.stack import deploy

STACKS = Path(__file__).resolve().parents[1]


def stack_config(stack: str, overrides: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The configuration of `stacks/Pulumi.<stack>.yaml`, with overrides by key (without the namespace)."""
    written = yaml.safe_load((STACKS / f"Pulumi.{stack}.yaml").read_text())["config"]
    values = dict(written) | {f"{NAMESPACE}:{key}": value for key, value in (overrides or {}).items()}
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}


def run_program(config: Mapping[str, str], mocks: pulumi.runtime.Mocks, stack: str) -> dict[str, Any]:
    """Execute `infra` once, answering the stack's outputs. Raises what the program or the mocks raise.

    `pulumi.runtime.test` drives the event loop and waits for every registration.
    """
    outputs: dict[str, Any] = {}
    pulumi.runtime.set_mocks(mocks, project="llm-chat-service", stack=stack, preview=False)
    pulumi.runtime.set_all_config(dict(config))

    @pulumi.runtime.test
    def program() -> Any:
        exported: dict[str, pulumi.Output[Any]] = {}
        original = pulumi.export
        pulumi.export = exported.__setitem__  # the root stack of mocks keeps no outputs
        try:
            deploy(StackSettings.load())
        finally:
            pulumi.export = original
        return pulumi.Output.all(**exported).apply(outputs.update)

    program()
    return outputs
