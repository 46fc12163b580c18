"""Every setting: its section, flag, help, range and default."""

from hiserve.config.description import MAX_INT32, Auto
from hiserve.config.sections import (
    DTYPE_BYTES,
    MAX_SPEC_STEPS,
    MIN_AUTO_LEN,
    Cache,
    CacheVerify,
    Config,
    Graphs,
    Model,
    Runner,
    Scheduler,
    Spec,
    StorePrefetch,
)
from hiserve.config.serving import Server
from hiserve.config.settings import (
    Setting,
    flag_of,
    flat,
    known,
    make_config,
    nearest,
    settings,
    without_secrets,
)

__all__ = [
    "DTYPE_BYTES",
    "MAX_INT32",
    "MAX_SPEC_STEPS",
    "MIN_AUTO_LEN",
    "Auto",
    "Cache",
    "CacheVerify",
    "Config",
    "Graphs",
    "Model",
    "Runner",
    "Scheduler",
    "Server",
    "Setting",
    "Spec",
    "StorePrefetch",
    "flag_of",
    "flat",
    "known",
    "make_config",
    "nearest",
    "settings",
    "without_secrets",
]
