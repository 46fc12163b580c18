"""Models of the Hub: what is asked of the library, in which order, and what its failures mean to the user."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from hiserve.errors import ModelError
from hiserve.models.checkpoint import PATTERNS, is_hub_name
from hiserve.models.model_config import NANO, find_model

NAME = "owner/some-model_1.5"
WHOLE = ("config.json", "model.safetensors")
SHARDS = {"a": "model-1.safetensors", "b": "model-2.safetensors"}


class Hub:
    """A hub with one model, and a cache.

    Args:
        cached: Files of the model that the cache holds; None when it does not know the model.
        online: Files that a download brings, or what goes wrong.
    """

    def __init__(self, place: Path, cached: tuple[str, ...] | None, online: tuple[str, ...] | Exception) -> None:
        self.place = place
        self.online = online
        self.calls: list[dict[str, Any]] = []
        self.is_known = cached is not None
        self.put(cached or ())

    def put(self, names: tuple[str, ...]) -> None:
        for name in names:
            content = json.dumps({"weight_map": SHARDS}) if name.endswith("index.json") else ""
            (self.place / name).write_text(content)

    def __call__(self, name: str, **options: Any) -> str:
        self.calls.append({"name": name} | options)
        if options.get("local_files_only"):
            if not self.is_known:
                raise errors.LocalEntryNotFoundError("not cached")
        elif isinstance(self.online, Exception):
            raise self.online
        else:
            self.put(self.online)
        return str(self.place)


def failure(kind: type[Exception], text: str = "401 Client Error.\n\nMore.") -> Exception:
    """An error of the library; those of HTTP are made without the response they carry."""
    error = kind.__new__(kind)
    error.args = (text,)
    return error


def refusal(place: Path, kind: type[Exception], revision: str | None = None) -> str:
    with pytest.raises(ModelError) as refused:
        find_model(NAME, revision, download=Hub(place, None, failure(kind)))
    assert refused.value.param == "model"
    assert "\n" not in refused.value.message
    assert NAME in refused.value.message
    return refused.value.message


def test_a_model_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    hub = Hub(tmp_path, WHOLE, AssertionError("asked the network"))
    assert find_model(NAME, download=hub) == tmp_path
    assert [call["local_files_only"] for call in hub.calls] == [True]


@pytest.mark.parametrize("revision", [None, "v1.0"])
def test_a_model_that_is_not_in_the_cache_is_fetched(tmp_path: Path, revision: str | None) -> None:
    hub = Hub(tmp_path, None, WHOLE)
    assert find_model(NAME, revision, download=hub) == tmp_path
    asked = {"name": NAME, "revision": revision, "allow_patterns": list(PATTERNS)}
    assert hub.calls == [asked | {"local_files_only": True}, asked]


@pytest.mark.parametrize(
    "cached",
    [
        ("config.json",),
        ("model.safetensors",),
        ("config.json", "pytorch_model.bin"),
        ("config.json", "model.safetensors.index.json", "model-1.safetensors"),
    ],
)
def test_a_copy_that_lacks_something_is_completed(tmp_path: Path, cached: tuple[str, ...]) -> None:
    hub = Hub(tmp_path, cached, WHOLE)
    assert find_model(NAME, download=hub) == tmp_path
    assert len(hub.calls) == 2


def test_a_copy_with_all_its_shards_is_whole(tmp_path: Path) -> None:
    files = ("config.json", "model.safetensors.index.json", *SHARDS.values())
    assert find_model(NAME, download=Hub(tmp_path, files, AssertionError("asked the network"))) == tmp_path


def test_a_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="only safetensors are read"):
        find_model(NAME, download=Hub(tmp_path, None, ("config.json", "pytorch_model.bin")))


def test_failures_say_what_to_do(tmp_path: Path) -> None:
    gated = refusal(tmp_path, errors.GatedRepoError)
    assert f"accept its terms at https://huggingface.co/{NAME}" in gated
    assert "hf auth login" in gated
    missing = refusal(tmp_path, errors.RepositoryNotFoundError)
    assert "no folder" in missing
    assert "no model of that name" in missing
    assert "no revision 'v9'" in refusal(tmp_path, errors.RevisionNotFoundError, "v9")
    offline = refusal(tmp_path, errors.LocalEntryNotFoundError)
    assert "no folder" in offline
    assert "cannot be reached" in offline
    assert "401 Client Error." in refusal(tmp_path, errors.HfHubHTTPError)
    assert "No space left" in refusal_of(tmp_path, OSError(28, "No space left on device"))


def refusal_of(place: Path, error: Exception) -> str:
    with pytest.raises(ModelError) as refused:
        find_model(NAME, download=Hub(place, None, error))
    return refused.value.message


def test_failures_of_the_connection_are_answered_too(tmp_path: Path) -> None:
    assert "cannot fetch" in refusal_of(tmp_path, failure(errors.HTTPError, "timed out"))
    assert "cannot fetch" in refusal_of(tmp_path, failure(errors.HTTPError, ""))


def test_our_own_faults_are_not_taken_for_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        find_model(NAME, download=Hub(tmp_path, None, ZeroDivisionError()))


def test_the_library_finds_what_its_cache_holds_without_the_network(tmp_path: Path) -> None:
    """The real ``snapshot_download``, on a cache as it lays one out."""
    snapshot = tmp_path / "models--owner--some-model_1.5" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for name in WHOLE:
        (snapshot / name).write_text("")
    refs = tmp_path / "models--owner--some-model_1.5" / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    download = functools.partial(huggingface_hub.snapshot_download, cache_dir=tmp_path)
    assert find_model(NAME, download=download) == snapshot
    assert find_model(NAME, "a" * 40, download=download) == snapshot
    (snapshot / "config.json").unlink()
    offline = functools.partial(download, local_files_only=True)
    with pytest.raises(ModelError, match="has no config"):
        find_model(NAME, download=lambda name, **options: offline(name, **options | {"local_files_only": True}))
    with pytest.raises(ModelError, match="cannot be reached"):
        find_model(
            "owner/other", download=lambda name, **options: offline(name, **options | {"local_files_only": True})
        )


def test_a_local_folder_goes_before_the_hub_and_the_embedded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (NAME, NANO):
        place = tmp_path / name
        place.mkdir(parents=True)
        (place / "config.json").write_text("{}")
        found = find_model(name, download=Hub(tmp_path, None, AssertionError("asked the hub")))
        assert found.resolve() == place.resolve()


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        (NAME, True),
        ("Qwen/Qwen3-0.6B", True),
        ("a/b", True),
        ("gpt2", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("./a", False),
        ("../a", False),
        ("a/../b", False),
        ("a/..", False),
        ("~/a", False),
        ("a/", False),
        ("/a", False),
        ("a b/c", False),
        ("ä/b", False),
        ("a/b\n", False),
        ("", False),
        ("a/" + "b" * 200, False),
    ],
)
def test_only_owner_and_name_are_looked_for_on_the_hub(name: str, is_one: bool) -> None:
    assert is_hub_name(name) == is_one


@pytest.mark.parametrize(
    ("file", "is_fetched"),
    [
        ("config.json", True),
        ("generation_config.json", True),
        ("hf_quant_config.json", True),
        ("tokenizer.json", True),
        ("tokenizer_config.json", True),
        ("chat_template.jinja", True),
        ("model.safetensors", True),
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("pytorch_model.bin", False),
        ("consolidated.safetensors", False),
        ("original/model.safetensors", False),
        ("README.md", False),
    ],
)
def test_what_is_fetched_of_a_model(file: str, is_fetched: bool) -> None:
    assert any(fnmatch(file, pattern) for pattern in PATTERNS) == is_fetched


def test_the_library_is_loaded_only_when_the_hub_is_asked() -> None:
    script = (
        "import sys; from hiserve.models.model_config import find_model, read_model_config;"
        "read_model_config(find_model('hiserve-nano')); print('huggingface_hub' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
