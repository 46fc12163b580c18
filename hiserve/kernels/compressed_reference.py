"""The operations of compressed attention and of several streams in plain torch: of fixed shape, without a host sync."""

from __future__ import annotations

from hiserve.kernels.compress_reference import compress as compress
from hiserve.kernels.pairs import pair_angles as pair_angles
from hiserve.kernels.pairs import rotate_pairs as rotate_pairs
from hiserve.kernels.pairs import store_rows as store_rows
from hiserve.kernels.routing import route_by_root as route_by_root
from hiserve.kernels.streams_reference import join_streams as join_streams
from hiserve.kernels.streams_reference import merge_streams as merge_streams
from hiserve.kernels.streams_reference import mix_streams as mix_streams
from hiserve.kernels.streams_reference import pass_streams as pass_streams
from hiserve.kernels.union_reference import attend as attend
from hiserve.kernels.union_reference import choose_rows as choose_rows
from hiserve.kernels.union_rows import slots_behind_first as slots_behind_first
