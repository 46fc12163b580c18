"""The first step of every way to run a model: reads the model's files, and turns options into settings for this machine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from hiserve.cache.storage.cache_identity import identify
from hiserve.cache.storage.host_segment import probe_segments, remarks_on_parts
from hiserve.config.options import Options
from hiserve.config.settings import Settings
from hiserve.core.machine import Machine, probe
from hiserve.core.resolve import Resolved, resolve
from hiserve.models.builtin_shapes import read_model
from hiserve.models.draft_config import model_facts
from hiserve.models.model_config import ModelConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """A model that fits this machine.

    Attributes:
        folder: The model's folder.
        model: Its configuration.
        machine: This machine, what former servers left included.
        resolved: The settings and how they came about.
    """

    folder: Path
    model: ModelConfig
    machine: Machine
    resolved: Resolved

    def identified(self) -> Settings:
        """Returns the settings with the cache's identity, which reads the weights.

        Raises:
            ModelError: The weights or the draft's cannot be read.
            ConfigError: The file that holds the server's secret cannot be used.
        """
        return identify(self.resolved.settings, self.folder, self.model)

    def log(self) -> None:
        """Logs what was decided, and warns of tiers of the cache that cannot help, and of what others of this name left."""
        for line in self.resolved.decisions:
            logger.info("%s", line)
        for line in (*self.resolved.remarks, *remarks_on_parts(self.resolved.settings)):
            logger.warning("%s", line)


def prepare(options: Options, machine: Machine | None = None) -> Launch:
    """Reads the model's configuration and resolves the options.

    Args:
        options: As given.
        machine: As probed; None probes it.

    Raises:
        HiserveError: The model cannot be read, or the options are not possible here.
    """
    folder, model = read_model(options.model)
    machine = probe_segments(options, machine or probe())
    return Launch(folder, model, machine, resolve(options, model_facts(options, folder, model), machine))
