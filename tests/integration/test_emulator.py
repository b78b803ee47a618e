"""The AWS emulator keeps what it acknowledged, also over a kill. Starts emulators of its own."""

import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from stacks.local import backends

TABLE = "kept"


class Emulator:
    """One that can be stopped in two ways and started again."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.port = directory, backends.free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = backends.ministack_command(self._directory, self.port)
        self.process = backends.start(command, self._directory / "log")
        backends.wait_for_ministack(self.port)

    def end(self, how: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(20)

    def wait_until_saved(self, file: str, text: str) -> None:
        path, end = self._directory / "state" / file, time.monotonic() + 10
        while not (path.exists() and text in path.read_text()):
            assert time.monotonic() < end, f"{text} is not in {file}"
            time.sleep(0.02)

    def client(self, service: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name=backends.REGION,
            aws_access_key_id="local",
            aws_secret_access_key="local",
            config=Config(max_pool_connections=16, retries={"total_max_attempts": 1}),
        )


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[Emulator]:
    made = Emulator(tmp_path / "ministack")
    made.client("dynamodb").create_table(
        TableName=TABLE,
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    yield made
    made.end(signal.SIGKILL)


def add(emulator: Emulator, number: int) -> None:
    """A transaction of a conditional put and a counter: doing it twice would show."""
    text = {"S": "ế👩‍👧" * 10}
    emulator.client("dynamodb").transact_write_items(
        TransactItems=[
            {
                "Put": {
                    "TableName": TABLE,
                    "Item": {"id": {"S": f"item-{number}"}, "text": text},
                    "ConditionExpression": "attribute_not_exists(id)",
                }
            },
            {
                "Update": {
                    "TableName": TABLE,
                    "Key": {"id": {"S": "counter"}},
                    "UpdateExpression": "ADD n :one",
                    "ExpressionAttributeValues": {":one": {"N": "1"}},
                }
            },
        ]
    )


def count(emulator: Emulator) -> tuple[int, int]:
    """Number of items, and the counter."""
    client = emulator.client("dynamodb")
    items = client.scan(TableName=TABLE)["Items"]
    counters = [item for item in items if item["id"]["S"] == "counter"]
    return len(items) - len(counters), int(counters[0]["n"]["N"]) if counters else 0


def test_killed_while_writing_it_has_all_that_it_acknowledged(emulator: Emulator) -> None:
    acknowledged: list[int] = []

    def write(start: int) -> None:
        for number in range(start, start + 10_000):
            try:
                add(emulator, number)
            except Exception:
                return
            acknowledged.append(number)

    with ThreadPoolExecutor(4) as pool:
        for start in range(0, 40_000, 10_000):
            pool.submit(write, start)
        end = time.monotonic() + 30
        while len(acknowledged) < 60 and time.monotonic() < end:
            time.sleep(0.01)
        emulator.end(signal.SIGKILL)
    emulator.start()
    items, counter = count(emulator)
    assert len(acknowledged) <= items <= len(acknowledged) + 4  # one a thread may have lost its answer
    assert counter == items


@pytest.mark.parametrize(
    "ends",
    [
        (signal.SIGKILL, signal.SIGKILL),
        (signal.SIGTERM, signal.SIGKILL),
        (signal.SIGKILL, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGTERM),
    ],
)
def test_counters_are_exact_over_any_two_ends(emulator: Emulator, ends: tuple[signal.Signals, ...]) -> None:
    for number, how in enumerate(ends):
        add(emulator, 2 * number)
        add(emulator, 2 * number + 1)
        emulator.end(how)
        emulator.start()
    assert count(emulator) == (4, 4)


def test_users_objects_and_refused_writes_after_a_kill(emulator: Emulator) -> None:
    identity, objects = emulator.client("cognito-idp"), emulator.client("s3")
    pool = identity.create_user_pool(PoolName="people")["UserPool"]["Id"]
    made = identity.admin_create_user(UserPoolId=pool, Username="ada")["User"]["Attributes"]
    objects.create_bucket(Bucket="content", CreateBucketConfiguration={"LocationConstraint": backends.REGION})
    objects.put_object(Bucket="content", Key="a/b", Body=b"\x00\xff" * 300_000)
    add(emulator, 1)
    with pytest.raises(emulator.client("dynamodb").exceptions.TransactionCanceledException):
        add(emulator, 1)
    emulator.wait_until_saved("cognito.json", "ada")  # what is not DynamoDB is saved a moment later
    emulator.wait_until_saved("s3.json", "content")
    emulator.end(signal.SIGKILL)
    emulator.start()
    assert emulator.client("cognito-idp").admin_get_user(UserPoolId=pool, Username="ada")["UserAttributes"] == made
    assert emulator.client("s3").get_object(Bucket="content", Key="a/b")["Body"].read() == b"\x00\xff" * 300_000
    assert count(emulator) == (1, 1)


@pytest.mark.parametrize("killed", [False, True])
def test_a_transaction_sent_again_is_answered_and_not_applied_again(emulator: Emulator, killed: bool) -> None:
    """Also when what it wrote has changed since."""
    request: dict[str, Any] = {
        "ClientRequestToken": "once",
        "TransactItems": [{"Put": {"TableName": TABLE, "Item": {"id": {"S": "one"}, "n": {"N": "1"}}}}],
    }
    emulator.client("dynamodb").transact_write_items(**request)
    emulator.client("dynamodb").update_item(
        TableName=TABLE,
        Key={"id": {"S": "one"}},
        UpdateExpression="SET n = :two",
        ExpressionAttributeValues={":two": {"N": "2"}},
    )
    if killed:
        emulator.end(signal.SIGKILL)
        emulator.start()
    client = emulator.client("dynamodb")
    client.transact_write_items(**request)
    assert client.get_item(TableName=TABLE, Key={"id": {"S": "one"}})["Item"]["n"]["N"] == "2"
    request["TransactItems"][0]["Put"]["Item"]["n"]["N"] = "3"
    with pytest.raises(client.exceptions.IdempotentParameterMismatchException):
        client.transact_write_items(**request)
