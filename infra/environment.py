"""A runtime's environment, checked against the settings class that reads it, so that the two cannot drift."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pulumi

from chat.settings import Settings
from infra.components.secret import Secret

Variable = pulumi.Input[str] | Secret
"""The value of an environment variable; a Secret is handed over by reference where the platform can."""


class DeclarationError(Exception):
    """A variable is missing, or given to a runtime that does not read it."""


def environment(kind: type[Settings], values: Mapping[str, Any]) -> dict[str, Variable]:
    """Field name -> value (plain, Output or Secret) becomes VARIABLE -> text or Secret. Raises DeclarationError."""
    known = kind.environment_names()
    given = {name.upper(): value for name, value in values.items() if value is not None}
    missing = sorted(name for name, required in known.items() if required and name not in given)
    unknown = sorted(set(given) - set(known))
    if missing or unknown:
        raise DeclarationError(f"{kind.__name__}: missing {missing}, not read {unknown}")
    return {name: _text(value) for name, value in given.items()}


def readable(kind: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that this runtime reads."""
    known = kind.environment_names()
    return {name: value for name, value in values.items() if name.upper() in known}


def as_text(variable: Variable) -> pulumi.Input[str]:
    """For a platform that takes no references; the text stays a secret in the stack's state."""
    return variable.value if isinstance(variable, Secret) else variable


def _text(value: Any) -> Variable:
    if isinstance(value, Secret):
        return value
    if isinstance(value, pulumi.Output):
        return value.apply(_plain_text)
    return _plain_text(value)


def _plain_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return msgspec.json.encode(value).decode()
