"""The operations of compressed attention and of several streams as Triton kernels; ``kernels.compressed_reference`` is the twin."""

from __future__ import annotations

from hiserve.kernels.compress import compress as compress
from hiserve.kernels.index_topk import choose_rows as choose_rows
from hiserve.kernels.latent_union import attend as attend
from hiserve.kernels.pairs_triton import pair_angles as pair_angles
from hiserve.kernels.pairs_triton import rotate_pairs as rotate_pairs
from hiserve.kernels.pairs_triton import store_rows as store_rows
from hiserve.kernels.routing_triton import route_by_root as route_by_root
from hiserve.kernels.streams import join_streams as join_streams
from hiserve.kernels.streams import merge_streams as merge_streams
from hiserve.kernels.streams import mix_streams as mix_streams
from hiserve.kernels.streams import pass_streams as pass_streams
from hiserve.kernels.window_slots import slots_behind_first as slots_behind_first
