"""The CUDA devices of each replica: with ``--tp N`` replica r runs on N of ``--devices``, from the r·N-th on, and sees no other."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence

from hiserve.config.options import Options
from hiserve.config.settings import Settings
from hiserve.errors import ConfigError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"  # CUDA's own variable: the devices that a process sees, in order

_NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",  # ranks are processes of one host
    "NCCL_RAS_ENABLE": "0",  # no port for its reports
    # A rank may issue an exchange by itself that others have in a graph: both must be the same to NCCL.
    "NCCL_GRAPH_REGISTER": "0",
}


def choose_devices(options: Options, num_found: int, *, on_cpu: bool) -> tuple[int, ...]:
    """Returns the number of each rank's device, replica after replica, by default the first ones; empty on cpu.

    Args:
        options: As given.
        num_found: CUDA devices that this process sees.
        on_cpu: The model runs on cpu.

    Raises:
        ConfigError: A device is unknown or named twice, or there is not one for each rank of each replica.
    """
    given, replicas, num_ranks = options.parallel.devices, options.parallel.replicas, options.parallel.num_ranks
    asked = f"{replicas} replicas" + (f" of {options.parallel.tp} devices" if options.parallel.tp > 1 else "")
    if on_cpu:
        if given is not None:
            raise ConfigError(
                f"--devices is {given!r}, CUDA devices, but the model runs on cpu. Leave it out, or use --device cuda.",
                param="devices",
            )
        return ()
    if given is None:
        if num_ranks > num_found and options.parallel.tp > 1:
            raise ConfigError(
                f"--tp is {options.parallel.tp}, so that {asked} take {num_ranks} CUDA devices, but {num_found} were found. Lower "
                "--tp or --replicas, or use --device cpu.",
                param="tp",
            )
        if replicas > num_found:
            raise ConfigError(
                f"--replicas is {replicas} but {num_found} CUDA devices were found, and each replica needs one of its own. "
                "Lower --replicas, or use --device cpu.",
                param="replicas",
            )
        return tuple(range(num_ranks))
    numbers = _numbers(given)
    if unknown := [number for number in numbers if number >= num_found]:
        raise ConfigError(
            f"--devices is {given!r} but there is no CUDA device {unknown[0]}: {num_found} were found, numbered from 0.",
            param="devices",
        )
    if len(set(numbers)) < len(numbers):
        raise ConfigError(
            f"--devices is {given!r}, which names a device twice. Give each replica one of its own.", param="devices"
        )
    if len(numbers) != num_ranks:
        each, which = ("replica", "--replicas") if options.parallel.tp == 1 else ("rank", "--replicas or --tp")
        raise ConfigError(
            f"--devices is {given!r}, {len(numbers)} of them for {asked}. Name one device for each {each}, or change {which}.",
            param="devices",
        )
    return numbers


def devices_of(settings: Settings) -> tuple[int, ...]:
    """Returns the number of each rank's device, replica after replica; empty on cpu."""
    return () if settings.parallel.devices is None else _numbers(settings.parallel.devices)


def least_memory(devices: Sequence[int], memory_bytes: Sequence[int]) -> int:
    """Returns the memory of the smallest of these devices, by number: every replica is planned for it."""
    return min(memory_bytes[number] for number in devices)


def environment_of(settings: Settings, replica: int, environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Returns the environment of a replica's worker, in which its devices are the only ones; None on cpu.

    Libraries that take the first device then take the right one, and no process opens a context on another's device.
    """
    devices, size = devices_of(settings), settings.parallel.tp
    if not devices:
        return None
    return environment_with(devices[replica * size : (replica + 1) * size], environ)


def environment_with(devices: Sequence[int], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns an environment in which these of the devices that ``environ`` shows are the only ones."""
    seen = environ.get(VISIBLE_DEVICES)
    shown = [str(number) if seen is None else seen.split(",")[number].strip() for number in devices]
    return {**environ, VISIBLE_DEVICES: ",".join(shown)}


def prepare_nccl(environ: MutableMapping[str, str] = os.environ) -> None:
    """Writes NCCL's settings, which it reads in the environment, unless the user has."""
    for name, value in _NCCL.items():
        environ.setdefault(name, value)


def _numbers(given: str) -> tuple[int, ...]:
    """Reads the numbers of ``--devices``; raises ``ConfigError`` if it is no list of numbers."""
    words = [word.strip() for word in given.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) <= 4 for word in words):
        raise ConfigError(
            f"--devices is {given!r}; give the numbers of CUDA devices, as in --devices 0,1.", param="devices"
        )
    return tuple(map(int, words))
