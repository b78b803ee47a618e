"""Run the Pulumi program in process, with any mock monitor in the place of a deployment engine."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pulumi
import yaml

from infra.settings import NAMESPACE, StackSettings
from infra.stack import deploy

SECRET_MARK = "4dabf18193072939515e22adb298388d"  # noqa: S105
"""The key by which Pulumi's wire format marks an object; a marked one with a `value` is a secret."""

STACKS = Path(__file__).resolve().parents[1]


def stack_config(stack: str, overrides: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The configuration of `stacks/Pulumi.<stack>.yaml`, with overrides by key (without the namespace)."""
    written = yaml.safe_load((STACKS / f"Pulumi.{stack}.yaml").read_text())["config"]
    values = dict(written) | {f"{NAMESPACE}:{key}": value for key, value in (overrides or {}).items()}
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}


class UnknownOutput(Exception):
    """The program reads an output that the mocks did not answer."""


def revealed(inputs: Any) -> Any:
    """The inputs with plain text in the place of secrets."""
    if isinstance(inputs, dict):
        if SECRET_MARK in inputs and "value" in inputs:
            return revealed(inputs["value"])
        return {key: revealed(value) for key, value in inputs.items()}
    return [revealed(one) for one in inputs] if isinstance(inputs, list) else inputs


def run_program(config: Mapping[str, str], mocks: pulumi.runtime.Mocks, stack: str) -> dict[str, Any]:
    """Execute `infra` once, answering the stack's outputs.

    Raises what the program or the mocks raise, and UnknownOutput.

    `pulumi.runtime.test` drives the event loop and waits for every registration.
    """
    outputs: dict[str, Any] = {}
    try:
        asyncio.get_event_loop()
    except RuntimeError:  # somebody before us closed the thread's loop
        asyncio.set_event_loop(asyncio.new_event_loop())
    pulumi.runtime.set_mocks(mocks, project="llm-chat-service", stack=stack, preview=False)
    pulumi.runtime.set_all_config(dict(config))

    @pulumi.runtime.test
    def program() -> Any:
        exported: dict[str, pulumi.Output[Any]] = {}
        original, get = pulumi.export, pulumi.get
        pulumi.export = exported.__setitem__  # the root stack of mocks keeps no outputs
        pulumi.get = lambda owner, name: _checked(owner, name, get(owner, name))  # every property reads by it
        try:
            deploy(StackSettings.load())
        finally:
            pulumi.export, pulumi.get = original, get
        return pulumi.Output.all(**exported).apply(outputs.update)

    program()
    return outputs


def _checked(owner: Any, name: str, value: Any) -> Any:
    """A resource's output that fails when it is absent: mocks would let it pass as None."""
    if not (isinstance(owner, pulumi.CustomResource) and isinstance(value, pulumi.Output)):
        return value

    def check(found: Any) -> Any:
        if found is None:
            raise UnknownOutput(f"{owner.pulumi_resource_type} ({owner.pulumi_resource_name}) has no output {name}")
        return found

    return value.apply(check)
