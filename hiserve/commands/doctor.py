"""``hiserve doctor``: one line for each requirement; the exit status is 0 if hiserve will run."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from typing import Any, Literal, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hiserve import __version__
from hiserve.config.options import Options
from hiserve.config.settings import Settings
from hiserve.core.machine import GIB, Machine, probe
from hiserve.errors import ConfigError, HiserveError
from hiserve.ipc.messages import GraphReport
from hiserve.launch import prepare

Level = Literal["ok", "note", "fail"]
STYLES: dict[Level, str] = {"ok": "green", "note": "yellow", "fail": "bold red"}
LEAST_PYTHON = (3, 11)
TORCH_RANGE = ((2, 11), (2, 14))
LEAST_MEMORY_BYTES = 2 * GIB
LEAST_SHARED_BYTES = GIB
IMPORT_TIMEOUT_S = 120.0

# Imports a package in another process: a broken package must not end this one.
_IMPORT = """
import importlib, json, sys, time
begin = time.perf_counter()
module = importlib.import_module(sys.argv[1])
facts = {"version": getattr(module, "__version__", "?"), "import_s": time.perf_counter() - begin}
if sys.argv[1] == "torch":
    facts["cuda_build"] = module.version.cuda
    if module.cuda.is_available():
        count = module.cuda.device_count()
        facts["devices"] = [module.cuda.get_device_name(i) for i in range(count)]
        facts["capability"] = list(module.cuda.get_device_capability(0))
        module.zeros(1, device="cuda")
print(json.dumps(facts))
"""
GRAPHS_TIMEOUT_S = 1800.0  # weights are read and kernels compiled
_GRAPHS_COMMAND = (sys.executable, "-m", "hiserve.engine.graph_check")


class CheckResult(NamedTuple):
    """One line.

    Attributes:
        level: With ``fail`` hiserve does not run; ``note`` is a remark.
        name: The requirement.
        text: The finding, with a remedy unless it is ``ok``.
    """

    level: Level
    name: str
    text: str


class Package(msgspec.Struct, kw_only=True):
    """The outcome of importing a package.

    Attributes:
        version: Its ``__version__``.
        import_s: Seconds the import took.
        cuda_build: CUDA version torch was built for, or None.
        devices: Names of the CUDA devices that torch can use.
        capability: Compute capability of the first.
        error: Why it could not be imported; None when it could.
        is_missing: It is not installed.
    """

    version: str = ""
    import_s: float = 0.0
    cuda_build: str | None = None
    devices: list[str] = []
    capability: list[int] = []
    error: str | None = None
    is_missing: bool = False


class _Graphs(argparse.Action):
    """Sets the setting ``graphs`` if ``--graphs`` has a value, and with or without one checks graphs alone."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Stores the value."""
        namespace.graphs, namespace.has_graphs = values, True


def add_arguments(parser: argparse.ArgumentParser, add_settings: Callable[[argparse.ArgumentParser], None]) -> None:
    """Adds the settings of the engine, then the command's own arguments."""
    add_settings(parser)
    group = parser.add_argument_group("doctor", conflict_handler="resolve")  # in place of the setting
    group.add_argument(
        "--graphs",
        action=_Graphs,
        nargs="?",
        dest="has_graphs",
        default=False,
        metavar="auto|off|decode|all",
        help="Check instead whether steps are ready to be replayed as CUDA graphs.",
    )
    group.add_argument("--json", action="store_true", help="With --graphs: print JSON.")


def run(config: Options, has_graphs: bool = False, json: bool = False) -> int:
    """Prints every finding; returns 1 if hiserve cannot run with these settings.

    Args:
        config: As given.
        has_graphs: Check graphs alone.
        json: Print that as JSON.

    Raises:
        ConfigError: ``json`` without ``has_graphs``.
        HiserveError: With ``has_graphs``: the model cannot be read, or the configuration is not possible here.
    """
    if has_graphs:
        return _check_graphs(config, as_json=json)
    if json:
        raise ConfigError("--json goes with --graphs: hiserve doctor --graphs --json.", param="json")
    console = Console(highlight=False, soft_wrap=True)
    machine = probe()
    findings = [CheckResult("ok", "hiserve", __version__), _python(), *_packages(import_package, machine)]
    findings += [
        _memory(machine),
        _shared_memory(Path("/dev/shm")),
        _locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_cuda=bool(machine.cuda_memory_bytes)),
        _port(config.server.host, config.server.port),
        *_model(config, machine),
    ]
    for finding in findings:
        console.print(_line(*finding))
    return int(any(finding.level == "fail" for finding in findings))


def _check_graphs(options: Options, *, as_json: bool) -> int:
    answer = judge(prepare(options).resolved.settings, run_on_device)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer)).decode() + "\n")
    else:
        show_graphs(answer)
    return int(not answer.is_ready)


def show_graphs(answer: Answer) -> None:
    """Prints a table of the steps, or why there is none."""
    console = Console(highlight=False, soft_wrap=True)
    if answer.report is None:
        console.print(_line("fail" if answer.is_broken else "note", "steps", f"not run: {answer.not_run}"))
        return
    table = Table(title=f"steps on {answer.report.device}, {answer.report.num_nodes} graph nodes", title_justify="left")
    for name in ("", "step", "ran", "allocations", "difference", "problems"):
        table.add_column(name)
    for check in answer.report.checks:
        numbers = (f"{check.allocations:g}", f"{check.difference:.4f}")
        problems = Text("; ".join(check.problems))  # lines of code: brackets are no markup
        table.add_row(_mark("fail" if check.problems else "ok"), check.kind, check.ran, *numbers, problems)
    console.print(table)


def _line(level: Level, name: str, text: str) -> Text:
    """Returns a line; a name longer than its column is shown whole."""
    return Text.assemble(_mark(level), f"{name:<13} ", text)


def _mark(level: Level) -> Text:
    return Text(f"{level:<5}", STYLES[level])


def import_package(name: str) -> Package:
    """Imports a package in another process."""
    command = [sys.executable, "-c", _IMPORT, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Package(error=f"the import did not end within {IMPORT_TIMEOUT_S:g} s")
    if done.returncode == 0:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Package)
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return Package(error=last[:300], is_missing=last == f"ModuleNotFoundError: No module named {name!r}")


def _python() -> CheckResult:
    version = platform.python_version()
    if sys.version_info < LEAST_PYTHON:
        return CheckResult("fail", "python", f"{version}; hiserve needs {'.'.join(map(str, LEAST_PYTHON))} or later.")
    return CheckResult("ok", "python", f"{version} ({platform.machine()}, {platform.system()} {platform.release()})")


def _packages(load: Callable[[str], Package], machine: Machine) -> list[CheckResult]:
    """Looks at torch, CUDA through torch, and the kernel packages that only CUDA needs."""
    torch = load("torch")
    findings = [_torch(torch), _cuda(torch, machine)]
    for name in ("triton", "flashinfer"):
        package = load(name)
        if package.error is None:
            findings.append(CheckResult("ok", name, f"{package.version}, imports in {package.import_s:.1f} s"))
        elif not package.is_missing:
            findings.append(CheckResult("note", name, f"is installed but does not import: {package.error}"))
        elif torch.devices:
            findings.append(
                CheckResult("note", name, "is not installed. For faster kernels: pip install 'hiserve[gpu]'")
            )
        else:
            findings.append(CheckResult("ok", name, "is not installed; only CUDA devices need it"))
    return findings


def _torch(torch: Package) -> CheckResult:
    least, below = (".".join(map(str, end)) for end in TORCH_RANGE)
    remedy = f"pip install 'torch>={least},<{below}'"
    if torch.error is not None:
        return CheckResult("fail", "torch", f"does not import: {torch.error}. Try: {remedy}")
    release = tuple(int(part) for part in torch.version.split("+")[0].split(".")[:2])
    if not TORCH_RANGE[0] <= release < TORCH_RANGE[1]:
        return CheckResult("note", "torch", f"{torch.version} is not a tested version. Try: {remedy}")
    return CheckResult("ok", "torch", f"{torch.version}, imports in {torch.import_s:.1f} s")


def _cuda(torch: Package, machine: Machine) -> CheckResult:
    if torch.devices:
        capability = ".".join(map(str, torch.capability))
        memory = " + ".join(f"{num_bytes / GIB:.0f}" for num_bytes in machine.cuda_memory_bytes) + " GiB"
        return CheckResult("ok", "cuda", f"{', '.join(torch.devices)} (compute {capability}, {memory})")
    if not machine.cuda_memory_bytes:
        return CheckResult("ok", "cuda", "no device; models run on the CPU")
    if torch.error is None and torch.cuda_build is None:
        return CheckResult(
            "note", "cuda", "the driver has a device, but torch is a CPU build. Install a CUDA build of torch."
        )
    return CheckResult(
        "note", "cuda", "the driver has a device that torch cannot use. Check that the driver is recent enough."
    )


def _memory(machine: Machine) -> CheckResult:
    text = f"{machine.memory_bytes / GIB:.1f} GiB available (container limits included), {machine.cores} cores"
    if machine.memory_bytes < LEAST_MEMORY_BYTES:
        return CheckResult(
            "note", "memory", f"{text}. That is little: choose a small model or raise the container's limit."
        )
    return CheckResult("ok", "memory", text)


def _shared_memory(folder: Path) -> CheckResult:
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return CheckResult("note", "shared memory", f"{folder} cannot be written; the host cache will need it.")
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free in {folder}"
    if free < LEAST_SHARED_BYTES:
        return CheckResult("note", "shared memory", f"{text}. The host cache will need more: docker run --shm-size 8g.")
    return CheckResult("ok", "shared memory", text)


def _locked_memory(limit: int, *, has_cuda: bool) -> CheckResult:
    if limit == resource.RLIM_INFINITY:
        return CheckResult("ok", "memlock", "unlimited")
    text = f"limited to {limit / 2**20:.0f} MiB"
    if has_cuda:
        return CheckResult("note", "memlock", f"{text}. For pinned host memory: ulimit -l unlimited.")
    return CheckResult("ok", "memlock", f"{text}; only CUDA devices pin memory")


def _port(host: str, port: int) -> CheckResult:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe_socket:
            probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe_socket.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        return CheckResult("fail", "port", f"{host}:{port} cannot be used: {reason}. Choose another with --port.")
    return CheckResult("ok", "port", f"{host}:{port} is free" if port else f"{host}: a free port will be chosen")


def _model(options: Options, machine: Machine) -> list[CheckResult]:
    """Looks at the model with these settings, and at tiers of its cache that cannot help."""
    name = options.model.shape or options.model.model
    try:
        resolved = prepare(options, machine).resolved
    except HiserveError as error:
        return [CheckResult("fail", "model", error.message)]
    needed = (sum(resolved.memory.parts.values()) + sum(resolved.memory.host_parts.values())) / GIB
    where = f"{resolved.settings.model.device} as {resolved.settings.model.dtype}"
    model = CheckResult("ok", "model", f"{name} on {where}: {needed:.2f} GiB for each worker (see hiserve config)")
    return [model, *(CheckResult("note", "cache", remark) for remark in resolved.remarks)]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The result, printed as JSON.

    Attributes:
        is_ready: No step has a problem.
        report: Of the steps; None if none ran.
        not_run: The reason why none ran; empty if they ran.
        is_broken: No step ran though there is a device.
    """

    is_ready: bool
    report: GraphReport | None
    not_run: str
    is_broken: bool


def judge(config: Settings, run_steps: Callable[[Settings], GraphReport | str]) -> Answer:
    """Runs steps where there is a device for graphs.

    Args:
        config: Resolved.
        run_steps: Runs them; returns a sentence if it could not.
    """
    if config.model.device == "cpu":
        not_run = "models run on the CPU here, which has no graphs"
        return Answer(is_ready=True, report=None, not_run=not_run, is_broken=False)
    result = run_steps(config)
    if isinstance(result, str):
        return Answer(is_ready=False, report=None, not_run=result, is_broken=True)
    has_problems = any(check.problems for check in result.checks)
    return Answer(is_ready=not has_problems, report=result, not_run="", is_broken=False)


def run_on_device(config: Settings) -> GraphReport | str:
    """Runs steps in another process; returns the last line of its standard error if it failed.

    These lines are printed as they come: kernels that are compiled first may take minutes.
    """
    with (
        TemporaryFile() as report,
        subprocess.Popen(_GRAPHS_COMMAND, stdin=subprocess.PIPE, stdout=report, stderr=subprocess.PIPE) as process,
    ):
        limit = Timer(GRAPHS_TIMEOUT_S, process.kill)
        limit.start()
        try:
            last = _talk(process, msgspec.json.encode(config))
            process.wait()
        finally:
            process.kill()
            is_late = not limit.is_alive()
            limit.cancel()
        if process.returncode:
            return f"the steps did not end within {GRAPHS_TIMEOUT_S:g} s" if is_late else last
        report.seek(0)
        return msgspec.json.decode(report.read().splitlines()[-1], type=GraphReport)


def _talk(process: subprocess.Popen[bytes], given: bytes) -> str:
    """Writes a process's input and prints its standard error until it closes; returns the last line."""
    assert process.stdin is not None and process.stderr is not None
    with suppress(BrokenPipeError), process.stdin:  # it may have ended already; its error says why
        process.stdin.write(given)
    last = "it said nothing"
    for raw in process.stderr:
        said = raw.decode(errors="replace").rstrip()
        sys.stderr.write(said + "\n")
        sys.stderr.flush()
        last = said.strip() or last
    return last
