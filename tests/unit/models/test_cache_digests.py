"""What keeps caches apart: everything that shapes keys and values, and neither paths nor times."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hiserve.cache.storage.cache_identity import BLOCK_BYTES, NUM_BLOCKS, shape_digest, stamps, weight_digests
from hiserve.config.options import make_options
from hiserve.errors import ModelError
from hiserve.models.draft_config import DraftKind, find_draft
from hiserve.models.model_config import find_model, read_model_config
from hiserve.models.rope import RopeConfig
from tests.helpers.settings import namespace_of

SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 512, "spec": "off"}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e5,
    "short_factor": [1.0] * 32,
    "long_factor": [4.0] * 32,
    "original_max_position_embeddings": 256,
}


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = Path(shutil.copytree(find_model("hiserve-nano"), tmp_path / "model"))
    edit(made / "config.json", architectures=["MistralForCausalLM"], sliding_window=None)
    return made


def named(folder: Path, **settings: Any) -> bytes:
    return namespace_of(make_options(model=str(folder), **(SETTINGS | settings)))


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e5}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}},
        {"rms_norm_eps": 1e-6},
        {"sliding_window": 128},
        {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "rms_norm_eps": 2e-5},
    ],
    ids=str,
)
def test_an_edited_config_is_another_cache(folder: Path, change: dict[str, Any]) -> None:
    before = named(folder)
    edit(folder / "config.json", **change)
    assert named(folder) != before


def test_pages_of_another_layout_are_another_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = named(folder)
    monkeypatch.setattr("hiserve.cache.storage.cache_identity.LAYOUT_VERSION", "another")
    assert named(folder) != before


def test_weights_drawn_on_another_device_are_others(folder: Path) -> None:
    drawn = {"load_format": "dummy"}
    assert named(folder, **drawn) == named(folder, **drawn) != named(folder, **drawn, device="cuda")
    assert named(folder, device="cpu") == named(folder, device="cuda"), "files are the same on both"


def test_longrope_has_a_cache_for_each_list_of_divisors(folder: Path) -> None:
    edit(folder / "config.json", rope_parameters=LONGROPE)
    short, at_the_bound, beyond, longer = (named(folder, max_model_len=length) for length in (100, 256, 257, 512))
    assert short == at_the_bound != beyond == longer


def test_the_rope_of_sliding_layers_names_a_cache_as_that_of_the_others_does(folder: Path) -> None:
    """Its divisors by the longest request too."""
    rope = RopeConfig(theta=1e4, kind="longrope", original_context=256, short_factor=(1.0,), long_factor=(2.0,))
    ropes = None, RopeConfig(theta=1e4), RopeConfig(theta=1e5), rope
    models = [msgspec.structs.replace(read_model_config(folder), local_rope=each) for each in ropes]
    assert len({shape_digest(model, None, 100) for model in models}) == len(models)
    short, at_the_bound, beyond, longer = (shape_digest(models[-1], None, length) for length in (100, 256, 257, 512))
    assert short == at_the_bound != beyond == longer


def test_what_concerns_text_alone_shapes_no_key(folder: Path) -> None:
    before = named(folder)
    edit(folder / "config.json", eos_token_id=7, bos_token_id=9)
    edit(folder / "generation_config.json", temperature=0.1, eos_token_id=[3])
    assert named(folder) == before


def test_a_copy_elsewhere_with_other_times_is_the_same_cache(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "of" / "another" / "host"))
    for path in copy.rglob("*"):
        os.utime(path, ns=(10**18, 10**18))
    assert named(copy) == named(folder)
    assert named(copy, spec="eagle3") == named(folder, spec="eagle3") != named(folder)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_an_edited_draft_is_another_cache(folder: Path, kind: DraftKind) -> None:
    of_model, before = named(folder), named(folder, spec=kind)
    edit(folder / kind / "config.json", rms_norm_eps=1e-3)
    assert named(folder, spec=kind) != before
    assert named(folder) == of_model
    model = read_model_config(folder)
    draft = find_draft(kind, None, folder, model)
    digest = shape_digest(model, draft, 512)
    shapes: dict[str, Any] = {"kind": "draft_model", "model": model, "aux_layers": (0,), "head": None}
    for name, other in shapes.items():
        assert shape_digest(model, msgspec.structs.replace(draft, **{name: other}), 512) != digest, name
    places: dict[str, Any] = {"folder": Path("x")}
    assert shape_digest(model, msgspec.structs.replace(draft, **places), 512) == digest
    assert set(draft.__struct_fields__) == shapes.keys() | places.keys(), "a new field is one or the other"


def test_weights_of_the_draft_count_too(folder: Path) -> None:
    before = named(folder, spec="eagle3")
    path = next((folder / "eagle3").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert named(folder, spec="eagle3") != before


def digest_of(folder: Path) -> bytes:
    (digest,) = weight_digests(stamps({folder: "model"}))
    return digest


def test_a_small_file_is_read_whole(tmp_path: Path) -> None:
    path, digests = tmp_path / "model.safetensors", set()
    size = 8 + 2 + NUM_BLOCKS * BLOCK_BYTES
    for at in (0, 9, 10, size // 2, size - 1):
        data = bytearray((2).to_bytes(8, "little") + b"{}" + bytes(size - 10))
        data[at] ^= 1
        path.write_bytes(data)
        digests.add(digest_of(tmp_path))
    assert len(digests) == 5


def test_of_a_large_file_header_size_and_64_blocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = tmp_path / "model.safetensors", list[tuple[int, int]]()
    pread = os.pread

    def read(fd: int, num_bytes: int, start: int) -> bytes:
        reads.append((start, num_bytes))
        return pread(fd, num_bytes, start)

    header = b'{"t":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 1 << 30)  # a hole
    monkeypatch.setattr("hiserve.cache.storage.cache_identity.os.pread", read)
    before = digest_of(tmp_path)
    assert len(reads) == NUM_BLOCKS
    assert sum(num_bytes for _, num_bytes in reads) == 4 << 20
    assert reads[0][0] == 8 + len(header), "the data's first block"
    assert reads[-1][0] + BLOCK_BYTES == 1 << 30, "the data's last block"
    gaps = {after - at for (at, _), (after, _) in itertools.pairwise(reads)}
    assert max(gaps) - min(gaps) <= 1, "blocks are evenly spread"
    os.truncate(path, (1 << 30) + 1)
    assert digest_of(tmp_path) != before
    os.truncate(path, 1 << 30)
    assert digest_of(tmp_path) == before
    with path.open("r+b") as file:
        file.seek(8)
        file.write(header.replace(b"U8", b"I8"))
    assert digest_of(tmp_path) != before


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    found = stamps({folder: "model"})
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors"):
        weight_digests(found)
    with pytest.raises(ModelError, match="only safetensors are read"):
        stamps({folder: "model"})
