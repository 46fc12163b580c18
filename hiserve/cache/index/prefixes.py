"""Prefixes of prompts: found, locked, and extended by the pages that were computed for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

import numpy as np

from hiserve.cache.index.locks import Locks, PrefixLock, path
from hiserve.cache.index.nodes import Node, Tail, is_ready_on_host
from hiserve.cache.index.tails import TailTiers
from hiserve.cache.index.tiers import CacheTiers
from hiserve.cache.index.transfer_ops import TransferOps
from hiserve.cache.index.transfers import Transfers, unbacked
from hiserve.cache.index.uploads import Uploads
from hiserve.core.digest import namespace_digest
from hiserve.core.plan import Int32Array

_IS_ON_DEVICE, _IS_ON_HOST_ONLY = attrgetter("is_on_device"), attrgetter("is_on_host_only")


class HostAdmission(StrEnum):
    """Which pages are offloaded to the host."""

    WRITE_THROUGH = "write_through"  # every published page
    SELECTIVE = "write_through_selective"  # those that a second request uses


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The longest cached prefix of a prompt that a request can be resumed behind. Valid while ``tree_epoch`` stands."""

    num_tokens: int  # on the device, or being loaded: a whole number of pages
    num_host_tokens: int  # after those, usable when ``num_to_load`` pages were loaded: a whole number of pages
    num_to_load: int  # host pages, the frames of a tail included
    num_history_tokens: int  # cached on either tier, resumable or not: a whole number of pages
    tail: Tail | None  # at the end of the prefix on the device; None where nothing but pages is needed
    host_tail: Tail | None  # at the end of the whole prefix, to be loaded with it; None also if there is no more
    tree_epoch: int  # of the tree when it was matched
    _node: Node
    _num_beyond: int  # pages of the node after the match: a split leaves a node's end where it is


class Prefixes:
    """Implements the operations of ``PrefixCache`` on prefixes, whose docstrings are the contract.

    Args:
        uploads: Is offered every inserted page; None without a store, or where it is offered offloaded pages.
        host_admission: Which pages are offloaded; None without a host tier.
        tails: None where each boundary is a resume point.
    """

    def __init__(
        self,
        namespace: bytes,
        tiers: CacheTiers,
        locks: Locks,
        ops: TransferOps,
        transfers: Transfers,
        uploads: Uploads | None,
        host_admission: HostAdmission | None,
        tails: TailTiers | None,
    ) -> None:
        self._namespace = namespace
        self._tiers = tiers
        self._tree = tiers.tree
        self._device = tiers.device
        self._page_size = tiers.tree.page_size
        self._page_bytes = tiers.tree.page_bytes
        self._locks = locks
        self._ops = ops
        self._transfers = transfers
        self._uploads = uploads
        self._writes_through = host_admission is HostAdmission.WRITE_THROUGH
        self._offloads_hits = host_admission is HostAdmission.SELECTIVE
        self._tails = tails

    def match(self, tenant: bytes, key: bytes) -> Match:
        """See ``PrefixCache``."""
        node, node_pages, num_pages = self._tree.find(self.root(tenant), self.usable(key))
        num_beyond = node.num_pages - node_pages
        num_history_tokens = num_pages * self._page_size
        tail, num_less, host_tail, num_more = None, 0, None, 0
        if self._tails is not None:
            tail, num_less = deepest_tail(node, node_pages, _IS_ON_DEVICE)
            host_tail, num_less_on_host = deepest_tail(node, node_pages, _IS_ON_HOST_ONLY)
            num_more = max(0, num_less - num_less_on_host)
            host_tail = host_tail if num_more else None
        num_pages, num_beyond = num_pages - num_less + num_more, num_beyond + num_less - num_more
        num_host_pages = -num_beyond
        step: Node | None = node
        while step is not None and step.is_on_host_only:
            num_host_pages += step.num_pages
            step = step.parent
        num_to_load = num_host_pages = max(0, num_host_pages)
        if self._tails is not None:
            num_host_pages = num_more
            num_to_load = 0 if host_tail is None or host_tail.frames is None else num_to_load + host_tail.frames.size
        return Match(
            num_tokens=(num_pages - num_host_pages) * self._page_size,
            num_host_tokens=num_host_pages * self._page_size,
            num_to_load=num_to_load,
            num_history_tokens=num_history_tokens,
            tail=tail,
            host_tail=host_tail,
            tree_epoch=self._tiers.tree_epoch,
            _node=node,
            _num_beyond=num_beyond,
        )

    def num_resumable(self, tenant: bytes, key: bytes) -> int:
        """Returns the tokens of a prompt before its deepest resume point on any tier."""
        match = self.match(tenant, key)
        return match.num_tokens + match.num_host_tokens

    def lock(self, match: Match, num_host_tokens: int, priority: int, account: bytes | None) -> PrefixLock:
        """See ``PrefixCache``."""
        assert match.tree_epoch == self._tiers.tree_epoch, "the tree changed since the match; match again"
        assert 0 <= num_host_tokens <= match.num_host_tokens and num_host_tokens % self._page_size == 0
        assert self._tails is None or num_host_tokens in (0, match.num_host_tokens), "between two resume points"
        node = self._end_of(match, (match.num_host_tokens - num_host_tokens) // self._page_size)
        *_, root = path(node)
        self._tiers.assign_account(root, root.digests[0] if account is None else account)
        self._device.shares.see(root.account)
        self._tiers.host.shares.see(root.account)
        if self._tails is not None:
            self._tails.see(root.account)
        lock = self._locks.issue(node, self.release, priority)
        lock.tail = match.host_tail if num_host_tokens else match.tail
        if self._tails is not None and lock.tail is not None:
            self._tails.settle(lock.tail)
        if self._ops.num_loads:
            loading = {step.device_ready_op for step in path(node)}
            loading.add(0 if lock.tail is None else lock.tail.device_ready_op)
            for number in loading - {0}:
                self._transfers.wait(lock, self._ops[number])
        if self._offloads_hits:
            self._transfers.enqueue(node)
        return lock

    def release(self, lock: PrefixLock) -> None:
        """See ``PrefixCache``."""
        assert lock.is_open, "this lock was released before"
        lock.is_open = False
        self._locks.drop(lock.path_lock)

    def insert(self, lock: PrefixLock, key: bytes, pages: Int32Array, step: int) -> Int32Array:
        """See ``PrefixCache``."""
        page_bytes = self._page_bytes
        assert lock.is_open and len(key) == pages.size * page_bytes
        assert not lock.host_pages.size, f"{lock.host_pages.size} host pages were neither loaded nor released"
        canonical = pages
        moved: list[Int32Array] = []
        done = 0
        while done < canonical.size:
            children = lock.path_lock.node.children
            child = children.get(key[done * page_bytes : (done + 1) * page_bytes]) if children else None
            if child is None:
                rest = canonical[done:] if done else canonical
                self._insert_pages(lock, key[done * page_bytes :], rest, step)
                break
            if child.device_ready_op:
                canonical = canonical[:done]
                break
            shared = self._tree.common_pages(child.key, key, done * page_bytes)
            if shared < child.num_pages:
                child = self._tree.split(child, shared)
            self._locks.move_on(lock.path_lock, child)
            ours = canonical[done : done + shared]
            if child.is_on_host_only:
                self._tiers.put_on_device(child, ours.copy(), step=step)
            else:
                moved.append(ours)
                canonical = np.concatenate((canonical[:done], child.pages, canonical[done + shared :]))
            if self._offloads_hits:
                self._transfers.enqueue(child)
            done += shared
        if moved:
            self._tiers.free(np.concatenate(moved))
            self._tiers.relocation_version += 1
        return canonical

    def retain(self, lock: PrefixLock, num_tokens: int, until_s: int) -> None:
        """See ``PrefixCache``."""
        num_pages, retention = num_tokens // self._page_size, self._tiers.retention
        if self._tails is None:
            retention.retain(lock.node, num_pages, until_s)
            return
        node = lock.node
        last, _ = deepest_tail(node, node.num_pages, _IS_ON_DEVICE)  # none before it takes more frames
        retention.retain(node, num_pages, until_s, 0 if last is None else self._tails.num_to_retain(last))
        num_behind = max(0, sum(step.num_pages for step in path(node)) - num_pages)
        while node.parent is not None and (num_behind >= node.num_pages or node.retained_until_s < until_s):
            num_behind = max(0, num_behind - node.num_pages)
            node = node.parent
        tail, _ = deepest_tail(node, node.num_pages - num_behind, _IS_ON_DEVICE)
        if tail is not None:
            self._tails.retain(tail, until_s)

    def keep_tail(self, lock: PrefixLock, num_behind: int, pages: Int32Array, slots: Int32Array) -> Tail:
        """See ``PrefixCache``."""
        assert self._tails is not None and lock.is_open
        node, num_left = lock.node, num_behind
        while num_left >= node.num_pages:
            num_left -= node.num_pages
            assert node.parent is not None and node.parent.num_pages, f"no page ends {num_behind} pages before the end"
            node = node.parent
        self._tiers.clock += 1
        return self._tails.keep(node, node.num_pages - num_left, pages, slots)

    def missing(self, tenant: bytes, key: bytes) -> tuple[int, int, list[bytes]]:
        """See ``StorePrefixes``."""
        match = self.match(tenant, key)
        num_cached = (match.num_tokens + match.num_host_tokens) // self._page_size
        node, num_beyond = _before(match._node, match._num_beyond)
        used = node.num_pages - num_beyond
        rest = self.usable(key)[num_cached * self._page_bytes :]
        num_history = match.num_history_tokens // self._page_size
        return num_cached, num_history, self._tree.chain(node.digests[used - 1 if used else 0], rest)

    def rest_of(self, tenant: bytes, key: bytes, max_pages: int, num_most: int) -> tuple[Node, bytes] | None:
        """Returns the last node of the cached pages of a prompt, and the tokens of up to ``max_pages`` pages after it.

        With ``num_most``, the node ends behind so many pages at the latest; else None if no whole page is left.
        """
        match = self.match(tenant, key)
        start = match.num_history_tokens // self._page_size
        if num_most:
            start = min(start, num_most)
        rest = self.usable(key)[start * self._page_bytes :][: max_pages * self._page_bytes]
        if not (rest or num_most):
            return None
        assert not num_most or start + len(rest) // self._page_bytes == num_most, f"{num_most} pages end behind {start}"
        num_resumable = (match.num_tokens + match.num_host_tokens) // self._page_size
        return self._end_of(match, num_resumable - start), rest

    def back_up(self, tenant: bytes, key: bytes, num_pages: int, num_more: int) -> bool | None:
        """See ``StorePrefixes``."""
        match, host = self.match(tenant, key), self._tiers.host
        num_pages = min(match.num_history_tokens // self._page_size, num_pages)
        if not num_pages:
            return True
        node = self._end_of(match, (match.num_tokens + match.num_host_tokens) // self._page_size - num_pages)
        if is_ready_on_host(node):
            return True
        num_missing = sum(step.num_pages for step in unbacked(node))
        if num_missing > host.num_unused or num_missing + num_more > host.num_available:
            return None
        self._transfers.enqueue(node)
        return False

    def root(self, tenant: bytes) -> Node:
        """Returns the root of a tenant's prompts; a new one is not in the tree yet."""
        return self._tree.root(namespace_digest(self._namespace, tenant))

    def usable(self, key: bytes) -> bytes:
        """Returns the whole pages of a prompt before its last token."""
        usable = max(0, len(key) // 4 - 1) // self._page_size * self._page_bytes
        return key[:usable]

    def _end_of(self, match: Match, num_less: int) -> Node:
        """Returns the node that ends ``num_less`` pages before the match, after a split if necessary."""
        node, num_beyond = _before(match._node, match._num_beyond + num_less)  # another lock may have split it
        if node.is_root:
            return self._tree.add_root(node)
        return self._tree.split(node, node.num_pages - num_beyond) if num_beyond else node

    def _insert_pages(self, lock: PrefixLock, key: bytes, pages: Int32Array, step: int) -> None:
        path_lock, tiers, device = lock.path_lock, self._tiers, self._device
        node, count = path_lock.node, pages.size
        is_chosen = self._offloads_hits and node.is_wanted  # a new page below it was not used twice
        in_place = not is_chosen and node.priority == path_lock.priority and not node.retained_until_s
        end = self._tree.extend(node, key, pages, in_place=in_place)
        if end is not node:
            end.num_locks = 1
            end.priority = path_lock.priority
            path_lock.node = end
            tiers.clock += 1
            self._locks.touch(end)
        end.written_step = step
        device.shares.charge(end.account, count)
        device.insert(end, end.num_pages - count)
        tiers.tree_epoch += 1
        if self._writes_through:
            self._transfers.enqueue(end)
            if self._uploads is not None:
                self._uploads.offer(end, end.digests[-count:])


def _before(node: Node, num_pages: int) -> tuple[Node, int]:
    """Returns the node of a path whose end, or a part of it, is so many pages before the end of the path, and those in it."""
    while node.parent is not None and num_pages >= node.num_pages:
        num_pages -= node.num_pages
        node = node.parent
    return node, num_pages


def deepest_tail(node: Node, num_pages: int, has: Callable[[Tail], bool]) -> tuple[Tail | None, int]:
    """Returns the last tail of a kind on the path to the first ``num_pages`` of a node, and how many pages are behind it.

    Without such a tail all pages of the path are: it can be resumed at its start only.
    """
    num_behind = 0
    while node.parent is not None:
        if node.tails:
            ends = [at for at, tail in node.tails.items() if at <= num_pages and has(tail)]
            if ends:
                return node.tails[max(ends)], num_behind + num_pages - max(ends)
        num_behind += num_pages
        node = node.parent
        num_pages = node.num_pages
    return None, num_behind
