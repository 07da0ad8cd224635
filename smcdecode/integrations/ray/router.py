"""Which replica gets a request: one that has read how its prompt begins, unless it is busy. Knows no prompt."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

__all__ = ["Memory", "PrefixRouter", "beginnings"]

_FIRST, _STEP, _MOST = 256, 512, 64  # characters, about four a token: where a server's pieces of prompts end
_KNOWN = 1 << 16  # beginnings that are remembered


def beginnings(text: str) -> tuple[bytes, ...]:
    """Digests of what a text begins with, the shortest first; texts that begin alike have the first of them alike."""
    digest, start, found = hashlib.blake2b(digest_size=16), 0, []
    for end in [_FIRST, *range(_STEP, _STEP * _MOST + 1, _STEP)]:
        if end > len(text):
            break
        digest.update(text[start:end].encode("utf-8", "surrogatepass"))
        found.append(digest.digest())
        start = end
    return tuple(found)


class Memory:
    """Who was sent which beginnings; the least recently sent are forgotten."""

    def __init__(self, most: int = _KNOWN) -> None:
        self.most = most
        self._sent: OrderedDict[bytes, set[ReplicaID]] = OrderedDict()

    def note(self, keys: Iterable[bytes], replica: ReplicaID) -> None:
        """A replica was sent a prompt of these beginnings."""
        for key in keys:
            self._sent.setdefault(key, set()).add(replica)
            self._sent.move_to_end(key)
        while len(self._sent) > self.most:
            self._sent.popitem(last=False)

    def holders(self, keys: Sequence[bytes], there: Iterable[ReplicaID]) -> set[ReplicaID]:
        """Those of the replicas that are ``there`` that were sent the longest of these beginnings that any was."""
        alive = set(there)
        for key in reversed(keys):
            if found := self._sent.get(key, set()) & alive:
                return found
        return set()


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped here
    """A request router of Ray Serve for calls whose first argument has ``keys``, as :func:`beginnings` gives them.

    A prompt goes to the replica that was sent the longest beginning of it, so that its pages are found there; to the
    one with the shortest queue where none was, or where the holders' queues are longer by more than ``slack``.
    """

    def initialize_state(self, slack: int = 4) -> None:
        """Ray Serve hands over ``request_router_kwargs``."""
        self.slack, self.memory = slack, Memory()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas; of a rank Ray Serve takes the one with the shortest queue that is not full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # when all are full, wait between two looks
        ids = [replica.replica_id for replica in candidate_replicas]
        holders = self.memory.holders(_keys(pending_request), ids)
        queue = {i: self.replica_queue_len_cache.get(i) or 0 for i in ids}
        if not holders or min(queue[i] for i in holders) > min(queue.values()) + self.slack:
            return [candidate_replicas]
        first = [replica for replica in candidate_replicas if replica.replica_id in holders]
        return [first, [replica for replica in candidate_replicas if replica.replica_id not in holders]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        """Remember where it went."""
        self.memory.note(_keys(pending_request), replica_id)


def _keys(pending: PendingRequest) -> Sequence[bytes]:
    return pending.args[0].keys if pending.args and hasattr(pending.args[0], "keys") else ()
