"""What is never lost: the tables and the bucket of large contents. Keys are those of `chat/keys.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pulumi
import pulumi_aws as aws

from chat.keys import BY_USER_INDEX, OPEN_BY_EXPIRY_INDEX
from infra.settings import StackSettings
from infra.tags import Component, tags

READ_ITEMS = ("dynamodb:GetItem", "dynamodb:Query")
WRITE_ITEMS = (
    "dynamodb:BatchWriteItem",
    "dynamodb:ConditionCheckItem",
    "dynamodb:DeleteItem",
    "dynamodb:PutItem",
    "dynamodb:UpdateItem",
)
READ_OBJECTS = ("s3:GetObject",)
WRITE_OBJECTS = ("s3:DeleteObject", "s3:PutObject")


class Access(StrEnum):
    """What a runtime does with a table or a bucket."""

    READ = "read"
    WRITE = "write"
    """Reads too."""


@dataclass(frozen=True)
class Link:
    """A runtime's link to the data: what its settings read, and the IAM statements that go with it."""

    values: dict[str, pulumi.Output[str]]
    statements: list[dict[str, Any]]


class Data(pulumi.ComponentResource):
    """Tables on demand with encryption, point-in-time recovery and streams. Key changes replace a table."""

    def __init__(self, name: str, settings: StackSettings, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("chat:data:Data", name, None, opts)
        self._settings = settings
        self.conversations = self._table(
            f"{name}-conversations",
            ("conversationId", "item"),
            {"userId": "S", "updatedKey": "S"},
            {BY_USER_INDEX: ("userId", "updatedKey")},
            stream=True,
        )
        self.generations = self._table(
            f"{name}-generations",
            ("generationId",),
            {"openShard": "S", "expiresAt": "N"},
            {OPEN_BY_EXPIRY_INDEX: ("openShard", "expiresAt")},
        )
        self.accounts = self._table(f"{name}-accounts", ("userId", "item"))
        self.ledger = self._table(f"{name}-ledger", ("userId", "entry"), stream=True)
        self.contents = self._bucket(f"{name}-contents")
        self.register_outputs({})

    def _table(
        self,
        name: str,
        keys: Sequence[str],
        more_attributes: dict[str, str] | None = None,
        indexes: dict[str, tuple[str, str]] | None = None,
        *,
        stream: bool = False,
    ) -> aws.dynamodb.Table:
        attributes = dict.fromkeys(keys, "S") | (more_attributes or {})
        protected = self._settings.protect_data
        return aws.dynamodb.Table(
            name,
            billing_mode="PAY_PER_REQUEST",
            hash_key=keys[0],
            range_key=keys[1] if len(keys) > 1 else None,
            attributes=[{"name": one, "type": kind} for one, kind in attributes.items()],
            global_secondary_indexes=[
                {"name": index, "hash_key": parts[0], "range_key": parts[1], "projection_type": "ALL"}
                for index, parts in (indexes or {}).items()
            ],
            stream_enabled=stream,
            stream_view_type="NEW_AND_OLD_IMAGES" if stream else None,
            point_in_time_recovery={"enabled": protected},
            server_side_encryption={"enabled": True},
            deletion_protection_enabled=protected,
            tags=tags(self._settings, Component.DATA),
            opts=pulumi.ResourceOptions(parent=self, protect=protected),
        )

    def _bucket(self, name: str) -> aws.s3.Bucket:
        bucket = aws.s3.Bucket(
            name,
            tags=tags(self._settings, Component.DATA),
            opts=pulumi.ResourceOptions(parent=self, protect=self._settings.protect_data),
        )
        aws.s3.BucketPublicAccessBlock(
            name,
            bucket=bucket.id,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=pulumi.ResourceOptions(parent=self),
        )
        return bucket

    def link(
        self,
        *,
        conversations: Access | None = None,
        generations: Access | None = None,
        accounts: Access | None = None,
        ledger: Access | None = None,
        contents: Access | None = None,
    ) -> Link:
        """The names of everything, as `chat.settings.StoreSettings` reads them, and access to what is named here.

        Items and objects only: nobody who serves requests may manage a table or a bucket.
        """
        tables = (
            (self.conversations, conversations),
            (self.generations, generations),
            (self.accounts, accounts),
            (self.ledger, ledger),
        )
        statements = [_items(table, access) for table, access in tables if access]
        if contents:
            objects = READ_OBJECTS + (WRITE_OBJECTS if contents is Access.WRITE else ())
            arn = pulumi.Output.concat(self.contents.arn, "/contents/*")
            statements.append({"Effect": "Allow", "Action": list(objects), "Resource": [arn]})
        return Link(self._values(), statements)

    def _values(self) -> dict[str, pulumi.Output[str]]:
        return {
            "conversations_table": self.conversations.name,
            "generations_table": self.generations.name,
            "accounts_table": self.accounts.name,
            "ledger_table": self.ledger.name,
            "content_bucket": self.contents.id,
        }


def _items(table: aws.dynamodb.Table, access: Access) -> dict[str, Any]:
    actions = READ_ITEMS + (WRITE_ITEMS if access is Access.WRITE else ())
    return {
        "Effect": "Allow",
        "Action": list(actions),
        "Resource": [table.arn, pulumi.Output.concat(table.arn, "/index/*")],
    }
