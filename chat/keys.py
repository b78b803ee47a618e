"""Every DynamoDB and Valkey key, hash tag and time to live, in one place.

DynamoDB tables (physical names come from the settings):

    conversations  conversationId, item   item = ~meta | m#<seq> | c#<clientMessageId>
                   index by-user: userId, updatedKey (only ~meta items have them)
    generations    generationId
                   index open-by-expiry: openShard, expiresAt (only unfinished generations have openShard)
    accounts       userId, item           item = account | day#<utc day>
    ledger         userId, entry          entry = <utc day>#<generationId>

One backwards query of a conversation meets `~meta` first and then the newest messages, since `~` sorts
after `m` and `m` after `c`: opening a conversation is a single bounded read.

Valkey keys of one script share one hash tag: `{g:<generation>}`, `{pool:<pool>}` or `{u:<user>}`.
"""

import zlib
from dataclasses import dataclass

BY_USER_INDEX = "by-user"
OPEN_BY_EXPIRY_INDEX = "open-by-expiry"

META_ITEM = "~meta"
ACCOUNT_ITEM = "account"

BUFFER_TTL_SECONDS = 600
"""The resume window: how long the token buffer outlives the last event."""

QUEUED_TTL_SECONDS = 3600
"""How long a generation that is queued or running is kept; refreshed by every write."""

HOLD_SECONDS = 300
"""A hold expires after 5 minutes without a refresh; then the reaper may settle it."""

ABANDONED_AFTER_SECONDS = 30
"""A generation without any follower for this long is cancelled."""

OPEN_SHARDS = 16
"""Partitions of the index of open generations, so that none gets hot."""


def message_item(seq: int) -> str:
    """Sort key of message number `seq`; ten digits keep text order."""
    return f"m#{seq:010d}"


def send_item(client_message_id: str) -> str:
    """Sort key of the idempotency claim of one send."""
    return f"c#{client_message_id}"


def updated_key(updated_at: str, conversation_id: str) -> str:
    """Sort key of the list of conversations: unique also when times are equal."""
    return f"{updated_at}#{conversation_id}"


def day_item(day: str) -> str:
    """Sort key of a user's counter of one UTC day."""
    return f"day#{day}"


def ledger_entry(day: str, generation_id: str) -> str:
    """Sort key of the ledger: one entry a generation."""
    return f"{day}#{generation_id}"


def open_shard(generation_id: str) -> str:
    """Partition of the index of open generations."""
    return f"open#{zlib.crc32(generation_id.encode()) % OPEN_SHARDS}"


@dataclass(frozen=True)
class GenerationKeys:
    """Valkey keys of one generation, all in one slot."""

    generation_id: str

    @property
    def tag(self) -> str:
        """The hash tag; also the name of the sharded channel that carries its events."""
        return f"{{g:{self.generation_id}}}"

    channel = tag

    @property
    def events(self) -> str:
        """Stream: the token buffer; entry ids are `<seq>-0`."""
        return f"{self.tag}:events"

    @property
    def state(self) -> str:
        """Hash: owner, fence, last seq, cancel mark, sealed outcome."""
        return f"{self.tag}:state"

    @property
    def request(self) -> str:
        """String: the encoded GenerationRequest."""
        return f"{self.tag}:request"


@dataclass(frozen=True)
class PoolKeys:
    """Valkey keys of one pool of replicas, all in one slot."""

    pool: str

    @property
    def tag(self) -> str:
        """The hash tag."""
        return f"{{pool:{self.pool}}}"

    def lane(self, plan: str) -> str:
        """Sorted set: generation ids by order of arrival."""
        return f"{self.tag}:lane:{plan}"

    @property
    def order(self) -> str:
        """String: the counter that gives each arrival its order."""
        return f"{self.tag}:order"

    @property
    def jobs(self) -> str:
        """Hash: generation id -> job with its state, replica, attempt and order."""
        return f"{self.tag}:jobs"

    @property
    def replicas(self) -> str:
        """Hash: replica id -> capacity, heartbeat, draining."""
        return f"{self.tag}:replicas"

    @property
    def booked(self) -> str:
        """Hash: replica id -> KV tokens booked."""
        return f"{self.tag}:booked"

    @property
    def exhausted(self) -> str:
        """Set: generations that cannot be run (out of attempts, malformed, too large); a dispatcher fails them."""
        return f"{self.tag}:exhausted"

    @property
    def followed(self) -> str:
        """Sorted set: generation id -> epoch milliseconds at which a streamer last followed it."""
        return f"{self.tag}:followed"

    @property
    def rate(self) -> str:
        """Hash: what the wait estimate needs, the drain rate of the pool."""
        return f"{self.tag}:rate"

    def inbox(self, replica_id: str) -> str:
        """List: `<generation id> <attempt>` dispatched to a replica."""
        return f"{self.tag}:inbox:{replica_id}"

    def running(self, replica_id: str) -> str:
        """Set: generation ids booked on a replica."""
        return f"{self.tag}:running:{replica_id}"

    @property
    def work_channel(self) -> str:
        """Sharded channel that wakes dispatchers: something was queued or room was freed."""
        return f"{self.tag}:work"

    def control_channel(self, replica_id: str) -> str:
        """Sharded channel on which a replica hears `cancel <generation id>`."""
        return f"{self.tag}:control:{replica_id}"
