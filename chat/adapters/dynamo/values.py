"""DynamoDB's typed values and expressions, from and to plain Python.

Numbers come back as int where they have no fraction. None is never written: a missing attribute reads as None.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
"""An item as plain Python values."""


def to_value(value: Any) -> dict[str, Any]:
    """One typed value."""
    if isinstance(value, str):
        return {"S": str(value)}
    if isinstance(value, bool):
        return {"BOOL": value}
    if isinstance(value, int | float):
        return {"N": repr(value)}
    if isinstance(value, Mapping):
        return {"M": to_item(value)}
    raise TypeError(f"DynamoDB rows hold no {type(value).__name__}")


def to_item(row: Mapping[str, Any]) -> dict[str, Any]:
    """A typed item; attributes that are None are left out."""
    return {name: to_value(value) for name, value in row.items() if value is not None}


def from_value(typed: Mapping[str, Any]) -> Any:
    """The plain value."""
    ((kind, value),) = typed.items()
    if kind == "N":
        return int(value) if value.lstrip("-").isdigit() else float(value)
    if kind == "M":
        return from_item(value)
    return value


def from_item(item: Mapping[str, Any]) -> Row:
    """The plain row."""
    return {name: from_value(typed) for name, typed in item.items()}


@dataclass
class Expression:
    """Collects names and values, so that no reserved word can break an expression."""

    names: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def name(self, attribute: str) -> str:
        """A placeholder for an attribute's name."""
        self.names[f"#{attribute}"] = attribute
        return f"#{attribute}"

    def value(self, value: Any) -> str:
        """A placeholder for a value."""
        placeholder = f":v{len(self.values)}"
        self.values[placeholder] = to_value(value)
        return placeholder

    def equals(self, attribute: str, value: Any) -> str:
        """`attribute = value`."""
        return f"{self.name(attribute)} = {self.value(value)}"

    def exists(self, attribute: str) -> str:
        """The attribute is there."""
        return f"attribute_exists({self.name(attribute)})"

    def absent(self, attribute: str) -> str:
        """The attribute is not there."""
        return f"attribute_not_exists({self.name(attribute)})"

    def change(self, row: Mapping[str, Any], *, remove: tuple[str, ...] = ()) -> str:
        """`SET … REMOVE …`; attributes that are None are removed."""
        sets = [self.equals(name, value) for name, value in row.items() if value is not None]
        gone = [self.name(name) for name in (*remove, *(name for name, value in row.items() if value is None))]
        return " ".join(f"{verb} {', '.join(parts)}" for verb, parts in (("SET", sets), ("REMOVE", gone)) if parts)

    def arguments(self) -> dict[str, Any]:
        """The placeholders as the API takes them."""
        named: dict[str, Any] = {}
        if self.names:
            named["ExpressionAttributeNames"] = self.names
        if self.values:
            named["ExpressionAttributeValues"] = self.values
        return named
