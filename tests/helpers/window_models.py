"""A small random model with windows in some layers, engines around it, and memory that nobody may read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hiserve import LLM
from hiserve.cache.storage.device import DevicePool
from hiserve.engine import executing_half
from hiserve.engine.loop import Engine
from hiserve.models.model_config import NANO, find_model
from tests.helpers.cuda import wait_for_stream
from tests.helpers.draft_heads import randomised, save_head
from tests.helpers.models import save_family
from tests.helpers.tiered import engine_of
from tools.nano.heads import Eagle3Head
from tools.nano.model import Nano, NanoConfig

WINDOW, VOCAB = 12, 4096
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "max_model_len": 160,
    "page_size": 4,
    "kv_pages": 200,
    "window_pages": 120,
    "max_running_requests": 4,
    "max_batched_tokens": 24,
    "cpu_threads": 1,
    "host_cache_gib": 0,
    "spec": "off",
    "in_process": True,
}


def save_windows(folder: Path) -> Path:
    """Saves a Qwen2 of three layers, of which the last two have a window."""
    save_family("qwen2", folder, vocab_size=VOCAB, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1)
    shutil.copy(find_model(NANO) / "tokenizer.json", folder)
    return folder


def add_mtp(folder: Path) -> Path:
    """Gives a model of ``save_windows`` a draft head behind its last layer, in DeepSeek's names, that is hardly ever right."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    tensors = load_file(folder / "model.safetensors")
    last, head = (f"model.layers.{config['num_hidden_layers'] - less}." for less in (1, 0))
    tensors |= {
        head + name.removeprefix(last): tensors[name].clone() for name in list(tensors) if name.startswith(last)
    }
    torch.manual_seed(8)
    hidden = config["hidden_size"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{head}{name}.weight"] = torch.rand(hidden) + 0.5
    tensors[head + "eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.2
    save_file(tensors, folder / "model.safetensors")
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder


def save_with_heads(folder: Path) -> Path:
    """Saves a model of ``save_windows`` with an MTP head, and an EAGLE-3 head in its own folder, both hardly ever right."""
    add_mtp(save_windows(folder))
    shape = NanoConfig(VOCAB, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96)
    torch.manual_seed(9)
    save_head(randomised(Eagle3Head(Nano(shape), (0, 1, 2))), folder / "eagle3", shape)
    return folder


class WindowPool:
    """The pools that engines make while a test runs; after each step, window pages without a holder become NaN."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[DevicePool] = []
        make = DevicePool

        def kept(*args: Any) -> DevicePool:
            self.made.append(make(*args))
            return self.made[-1]

        patch.setattr(executing_half, "DevicePool", kept)

    def watch(self, llm: LLM, then: Callable[[Engine], None] = lambda engine: None) -> Engine:
        """Watches the engine of an LLM; see ``watch_engine``."""
        return self.watch_engine(engine_of(llm), then)

    def watch_engine(self, engine: Engine, then: Callable[[Engine], None] = lambda engine: None) -> Engine:
        """Checks an engine after each of its steps, and poisons free pages: steps in flight do not read these either."""
        storage = self.made[-1].storage("swa")
        step = engine.step

        def watched() -> Any:
            updates = step()
            windows = engine._planner._cache.windows
            assert windows is not None
            windows.check()
            engine._planner._rows.check()
            free = torch.from_numpy(np.flatnonzero(windows.num_refs == 0)[1:])
            pages = storage.view(*storage.shape[:2], -1, windows.page_size, *storage.shape[3:])
            pages[:, :, free] = torch.nan
            wait_for_stream()
            then(engine)
            return updates

        engine.step = watched  # type: ignore[method-assign]
        return engine
