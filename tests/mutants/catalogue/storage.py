"""What outlives a process or comes from outside: segment, records, checksums, stores, identity of a cache."""

from hiserve.cache.storage import (
    breaker,
    cache_identity,
    file_store,
    host,
    host_segment,
    inventory,
    page_tags,
    prefault,
    records,
    resp,
    segment,
    store_address,
    store_transfers,
    transfer,
    valkey_store,
)
from hiserve.core import machine
from hiserve.engine import build
from tests.e2e import test_cache_identity, test_canary, test_equality_matrix
from tests.invariants import test_reported_bugs_namespaces
from tests.unit.commands import test_cache_command
from tests.unit.engine import test_build_host
from tests.unit.models import test_cache_digests
from tests.unit.storage import (
    test_file_store,
    test_file_store_damage,
    test_host_pool,
    test_host_segment,
    test_open_store,
    test_prefault,
    test_records,
    test_store_transfers,
    test_valkey_store,
)

with build._tier_transfers, test_build_host.test_a_start_that_fails_leaves_no_thread_and_no_lock:
    "a failed start keeps threads and the lock of the host cache"
    undo.callback(host.close)
    pass
with prefault.Prefault.__init__, test_prefault.test_every_page_lies_in_one_pinned_piece:
    "TC-60: a page lies across two pinned pieces"
    max(1, piece_bytes // stride) * stride // layout.page_bytes
    max(1, piece_bytes // layout.page_bytes)
with records._sealed, test_records.test_a_restart_drops_what_has_no_checksum_and_what_hangs_below_it:
    "INV 32: a restart adopts pages without a checksum"
    table["checksum"] != NO_CHECKSUM
    table["checksum"] == table["checksum"]
with records._valid_records, test_records.test_a_restart_drops_a_record_with_a_flipped_bit:
    "INV 32: a restart adopts a record whose digest does not follow from its tokens"
    link(parent, key, page_size) == [digest]
    True
with records.Records.begin, test_records.test_a_page_begun_again_has_no_checksum:
    "INV 32: a page that is written again keeps its old checksum"
    self._write("checksum", pages, NO_CHECKSUM)
    pass
with host.HostPool.recover, test_host_pool.test_pages_of_a_former_process_are_read_before_their_first_use:
    "INV 32: adopted pages are not verified before use"
    self._is_foreign[pages] = True
    pass
with (
    host.HostPool.is_intact,
    test_equality_matrix.test_the_tokens_are_those_of_an_engine_without_cache["garbled_pages-0_over-depth_0-greedy"],
):
    "INV 27: a corrupted host page is loaded"
    not is_unsealed and (not self.verify(page))
    False
with segment.SegmentLayout.differences, test_reported_bugs_namespaces.test_tc_61_a_segment_of_another_page_size_is_refused_by_name:
    "TC-61: a segment of another page size is adopted"
    other.page_size != self.page_size
    False
with machine._available_memory, test_reported_bugs_namespaces.test_tc_64_the_host_cache_fits_the_least_of_memory_control_group_and_dev_shm:
    "TC-64: the memory limit of the control group is ignored"
    int(text)
    int(text) * 99
with cache_identity._digest, test_cache_digests.test_a_small_file_is_read_whole:
    "TC-71: small weight files are told apart by size and header alone"
    hasher.update(os.pread(file.fileno(), BLOCK_BYTES, start))
    pass
with cache_identity.cache_namespace, test_reported_bugs_namespaces.test_tc_72_another_dtype_layout_or_shard_shares_nothing_of_one_store:
    "TC-72: element types share a cache namespace"
    namespace_digest(secret, shape, str(len(weights)), *weights, dtype, layout, str(page_size), shard)
    namespace_digest(secret, shape, str(len(weights)), *weights, layout, str(page_size), shard)
with cache_identity.cache_namespace, test_cache_identity.test_a_store_gives_an_edited_model_nothing:
    "an edited config.json keeps the cache namespace"
    namespace_digest(secret, shape, str(len(weights)), *weights, dtype, layout, str(page_size), shard)
    namespace_digest(secret, str(len(weights)), *weights, dtype, layout, str(page_size), shard)
with prefault.PinningThrottle.pause_s, test_prefault.test_pinning_takes_a_small_share_of_the_time_while_steps_run:
    "pinning of host memory takes all the time while steps run"
    now_s > self._step_s + _IDLE_S
    True
with file_store.FileStore._write, test_file_store_damage.test_a_page_appears_whole_or_not_at_all:
    "INV 31: a store page is written in place"
    f"{path}.{self._tag}-{self._num_drafts}.new"
    path
with file_store.FileStore._make_room, test_file_store.test_uploads_of_one_prefix_that_is_larger_than_the_store_leave_no_gap_in_it:
    "the page before an upload makes room for it"
    oldest in before
    False
with file_store.FileStore.put, test_file_store.test_more_pages_at_once_than_the_store_holds_are_stored_from_the_first_on_as_far_as_they_fit:
    "the first pages of an upload make room for its last"
    self._order.use([*last, key])
    pass
with file_store.FileStore._read, test_file_store_damage.test_a_chain_of_what_is_no_page_is_replaced_in_one_round:
    "INV 31: a FIFO in the place of a store page hangs the reader"
    os.O_RDONLY | os.O_NONBLOCK
    os.O_RDONLY
with store_transfers.StoreTransfers._upload, test_store_transfers.test_a_page_that_is_not_what_was_written_is_not_stored:
    "INV 31: a damaged host page is uploaded with a new checksum"
    (*is_intact, False).index(False)
    len(is_intact)
with (
    store_transfers.StoreTransfers._prefetch[2],
    test_store_transfers.test_what_hangs_keeps_its_own_pages_and_hinders_neither_others_nor_the_end,
):
    "INV 31: bytes that arrive after the deadline become valid"
    self._is_closing.is_set()
    False
with store_address.secret_of, test_open_store.test_the_secret_of_a_directory_that_is_no_store_is_not_made:
    "a secret is written into a directory of another user"
    claim(directory)
    pass
with file_store.claim, test_file_store.test_a_marker_that_a_killed_process_had_begun_keeps_no_directory_from_becoming_a_store:
    "INV 31: a marker that was not finished makes its directory foreign"
    not name.startswith(f"{MARKER}.")
    True
with file_store.share_marker, test_file_store.test_a_store_that_is_being_deleted_is_opened_without_its_lock:
    "INV 31: a store that is being deleted ends the start"
    contextlib.suppress(OSError)
    contextlib.suppress()
with file_store.share_marker[1], test_file_store_damage.test_a_marker_that_cannot_be_opened_keeps_no_server_from_its_store:
    "INV 31: a marker that cannot be opened ends the start"
    OSError
    FileExistsError
with transfer.ThreadTransfers._move, test_canary.test_a_page_of_each_tier_passes:
    "INV 34: a copy mixes up the order of its pages"
    torch.from_numpy(host_pages).long()
    torch.from_numpy(host_pages).long().roll(int(is_load))
with (
    page_tags.PageTags._cipher,
    test_valkey_store.test_a_page_that_no_server_of_the_secret_wrote_is_a_counted_miss_and_written_again["the page of another key"],
):
    "INV 92: a page passes for one of another key"
    hmac.digest(self._secret, key, "sha256")
    self._secret
with (
    page_tags.PageTags.is_intact,
    test_valkey_store.test_a_page_that_no_server_of_the_secret_wrote_is_a_counted_miss_and_written_again["another page"],
):
    "INV 92: a tag is not verified"
    self._cipher(key).decrypt(nonce, tag, page)
    pass
with resp.Connection._connected, test_valkey_store.test_all_addresses_of_a_host_are_tried_within_the_time_of_one_call:
    "INV 92: each address of a host that does not answer takes the whole time"
    self._left_s() / (len(addresses) - index)
    self._timeout_s
with resp.Connection._left_s, test_valkey_store.test_calls_of_a_server_that_never_ends_its_answer_are_bounded:
    "INV 92: each byte of an answer may take the whole time"
    left_s <= 0
    (left_s := self._timeout_s) <= 0
with resp._number, test_valkey_store.test_a_server_that_lies_about_its_size_has_none["int64"]:
    "INV 92: numbers of a server that lies end the worker"
    least <= number <= MAX_NUMBER
    True
with breaker.Breaker.failed, test_valkey_store.test_a_server_that_is_down_is_left_alone_and_used_again_when_it_is_back:
    "INV 93: a server that is down is asked by every request"
    self._num_failures += 1
    pass
with store_address._read_shared_secret, test_open_store.test_a_store_on_the_network_needs_a_secret_that_its_user_alone_can_read:
    "INV 94: others may read the secret"
    status.st_mode & 0o077
    0
with valkey_store.ValkeyStore._use, test_valkey_store.test_the_start_of_a_prefix_is_used_last_so_that_its_end_is_evicted_first:
    "S17: servers evict the start of a prefix before its end"
    keys[::-1]
    keys
with inventory.delete_named_cache, test_cache_command.test_the_ranks_of_a_group_are_deleted_together_or_not_at_all:
    "the parts of other ranks stay when a host cache is deleted"
    parts_of_groups(name, directory)
    []
with host_segment.remarks_on_parts, test_host_segment.test_parts_of_groups_of_another_size_are_told_with_their_sizes:
    "parts that a process has open are named as left behind"
    each.is_used or each.trouble
    each.trouble
