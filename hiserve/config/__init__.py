"""Every setting: its section, flag, help, range and default."""

from hiserve.config.sections import (
    DTYPE_BYTES,
    MAX_INT32,
    Auto,
    Cache,
    CacheVerify,
    Config,
    Graphs,
    Model,
    Runner,
    Scheduler,
    Server,
    StorePrefetch,
)
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
    "StorePrefetch",
    "flag_of",
    "flat",
    "known",
    "make_config",
    "nearest",
    "settings",
    "without_secrets",
]
