"""The files of ``deploy/``: they parse, fit together, and use flags, routes, ports and times that the server has. No container runs."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from hiserve import cli
from hiserve.commands.serve import CLOSE_S
from hiserve.config.options import Options, flags, make_options
from hiserve.core.endpoints import check_kv_events, topic_of
from hiserve.server.routes import Endpoint
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import make_server

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)
UNITS_S = {"s": 1, "min": 60, "m": 60}
UNITS_GIB = {"gb": 1.0, "Gi": 1.0}
STOP_S = CLOSE_S + 10  # for connections and processes, after the requests
SETTINGS = yaml.safe_load((DEPLOY / "hiserve.yaml").read_text())
OPTIONS = make_options(**SETTINGS)
CONFIG = "/etc/hiserve/hiserve.yaml"


def quantity(text: str | int, units: dict[str, Any]) -> float:
    number, unit = re.fullmatch(r"([\d.]+)([A-Za-z]*)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * (units[unit] if unit else 1)


def documents() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()):
        found.setdefault(each["kind"], []).append(each)
    return found


@dataclass(frozen=True)
class Image:
    """The Dockerfile's instructions; those of the last stage are the image's."""

    instructions: list[tuple[str, str]]

    @classmethod
    def read(cls) -> Image:
        lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
        joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
        return cls([(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines() if line.strip()])

    @property
    def last(self) -> dict[str, str]:
        stages = [i for i, (name, _) in enumerate(self.instructions) if name == "FROM"]
        return dict(self.instructions[stages[-1] :])

    def of(self, name: str) -> list[str]:
        return [text for each, text in self.instructions if each == name]


IMAGE = Image.read()
SERVICE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["hiserve"]
POD = documents()["Deployment"][0]["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


def unit() -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string((DEPLOY / "hiserve.service").read_text())
    assert parser.sections() == ["Unit", "Service", "Install"]
    return dict(parser["Service"])


def served(argv: list[str]) -> Options:
    """The options of a command line, its settings being those of ``deploy/hiserve.yaml``."""
    if "--config" in argv:
        argv[argv.index("--config") + 1] = str(DEPLOY / "hiserve.yaml")
    command, options, _ = cli.parse(argv)
    assert command == "serve"
    return options


@cache
def endpoints() -> dict[str, Endpoint]:
    app = make_server(FakeEngineClient(script=lambda prompt: [])).app
    return {each.path: each for each in app.routes if isinstance(each, Endpoint)}


def assert_probed(url: str, port: int) -> None:
    """A probe needs no key and asks for a route of the port that is listened on."""
    parts = urlsplit(url)
    assert endpoints()[parts.path].is_public and "GET" in endpoints()[parts.path].methods
    assert parts.port == port


def probe_of(command: list[str]) -> str:
    """The address that a probe in Python opens; the program is one that can be compiled."""
    assert command[-2] == "-c"
    compile(command[-1], "probe", "exec")
    (url,) = re.findall(r"urlopen\('(http[^']+)'", command[-1])
    return str(url)


def test_the_settings_are_settings_and_no_keys() -> None:
    assert [name for name in SETTINGS if flags()[name].is_secret] == []
    assert OPTIONS.server.drain_timeout_s == SETTINGS["drain_timeout_s"]
    commented = re.findall(r"^# (\w+):", (DEPLOY / "hiserve.yaml").read_text(), re.MULTILINE)
    assert commented and all(flags()[name].is_secret for name in commented)


# --- image ------------------------------------------------------------------------------------


def test_the_image_serves_beyond_itself_as_nobody_and_its_health_is_a_route() -> None:
    last = IMAGE.last
    (entry,), argv = yaml.safe_load(last["ENTRYPOINT"]), yaml.safe_load(last["CMD"])
    assert entry in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    options = served(argv)
    assert options.server.host == "0.0.0.0" and int(last["EXPOSE"]) == options.server.port
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last["USER"]), "Kubernetes tells by the number that it is not root"
    assert_probed(probe_of(yaml.safe_load(last["HEALTHCHECK"].partition(" CMD ")[2])), options.server.port)


def test_the_image_has_the_files_that_it_needs_and_no_others() -> None:
    """No secret gets into a layer: neither from the folder, nor as an argument."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert "*" in ignored
    copied = {name for text in IMAGE.of("COPY") if "--from" not in text for name in text.split()[:-1]}
    assert copied == allowed and all((ROOT / name).exists() for name in copied)
    assert [text for text in IMAGE.of("ARG") + IMAGE.of("ENV") if SECRET.search(text)] == []
    assert not IMAGE.of("ADD")


def test_the_image_installs_extras_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (script,) = (text for text in IMAGE.of("RUN") if "requirements.txt" in text)
    program, rest = re.match(r".*python -c '(.*?)' (.*?) > requirements", script).groups()  # type: ignore[union-attr]
    compile(program, "Dockerfile", "exec")
    assert rest.endswith("echo gpu)") and {"gpu", "hf"} <= set(project["optional-dependencies"])
    done = subprocess.run(["python3", "-c", program, "gpu"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == project["dependencies"] + project["optional-dependencies"]["gpu"]


def test_the_image_of_a_gpu_has_one_base_everywhere() -> None:
    args = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())["services"]["hiserve"]["build"]["args"]
    assert IMAGE.of("FROM") == ["${BASE} AS base", "base AS install", "base"]
    assert args.keys() == {"DEVICE", "BASE"} <= {text.split("=")[0] for text in IMAGE.of("ARG")}
    assert (
        f"`--build-arg DEVICE={args['DEVICE']} --build-arg BASE={args['BASE']}`"
        in (ROOT / "docs/deploy.md").read_text()
    )


# --- what runs it -----------------------------------------------------------------------------


def stores(options: Options) -> list[str]:
    """The places that must be writable and last."""
    assert options.cache.store is not None
    return [
        str(Path(options.cache.store.removeprefix("file:")).parent),
        dict(re.findall(r"(\w+)=(\S+)", IMAGE.last["ENV"]))["HOME"],
    ]


def assert_holds(options: Options, shm_gib: float) -> None:
    size = options.cache.host_cache_gib
    assert options.cache.host_cache_name and isinstance(size, int | float)
    assert shm_gib > size * options.parallel.replicas


def test_the_images_volumes_are_the_places_that_last() -> None:
    assert sorted(yaml.safe_load(IMAGE.last["VOLUME"])) == sorted(stores(OPTIONS))


def test_compose() -> None:
    options = served(list(SERVICE["command"]))
    address, port, inner = SERVICE["ports"][0].split(":")
    assert (address, int(inner)) == ("127.0.0.1", options.server.port) and port
    assert SERVICE["init"] is True and SERVICE["read_only"] is True and SERVICE["cap_drop"] == ["ALL"]
    assert SERVICE["tmpfs"] == ["/tmp"] and "no-new-privileges:true" in SERVICE["security_opt"]
    assert quantity(SERVICE["stop_grace_period"], UNITS_S) >= options.server.drain_timeout_s + STOP_S
    assert_holds(options, quantity(SERVICE["shm_size"], UNITS_GIB))
    assert_probed(probe_of(SERVICE["healthcheck"]["test"]), options.server.port)
    mounts = [each.split(":") for each in SERVICE["volumes"]]
    assert mounts[0] == ["./hiserve.yaml", CONFIG, "ro"] and CONFIG in SERVICE["command"]
    assert sorted(where for _, where in mounts[1:]) == sorted(stores(options))
    declared = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["volumes"]
    assert [name for name, _ in mounts[1:]] == list(declared)
    build = SERVICE["build"]
    assert ((DEPLOY / build["context"]).resolve(), (DEPLOY / build["context"] / build["dockerfile"]).resolve()) == (
        ROOT,
        DEPLOY / "Dockerfile",
    )


def test_systemd() -> None:
    service = unit()
    argv = shlex.split(service["ExecStart"])
    source = service["LoadCredential"].split(":")
    assert (
        argv[0].endswith("/hiserve") and argv[-1] == f"${{CREDENTIALS_DIRECTORY}}/{source[0]}" and source[1] == CONFIG
    )
    options = served(argv[1:])
    assert (service["Type"], service["KillMode"]) == ("exec", "mixed")
    assert quantity(service["TimeoutStopSec"], UNITS_S) >= options.server.drain_timeout_s + STOP_S
    writable = [f"/var/lib/{service['StateDirectory']}", f"/var/cache/{service['CacheDirectory']}"]
    assert writable == stores(options) and service["Environment"] == f"HOME={writable[1]}"
    assert service["User"] != "root" and service["NoNewPrivileges"] == "yes" and service["ProtectSystem"] == "strict"
    assert service["RemoveIPC"] == "no" and "DynamicUser" not in service, "the named host cache outlives the service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "hiserve.service").read_text().replace("/opt/hiserve/bin/hiserve", "/bin/true")
    (tmp_path / "hiserve.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "hiserve.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "hiserve.service" in line] == []


def test_kubernetes() -> None:
    options = served(list(CONTAINER["args"]))
    (port,) = CONTAINER["ports"]
    assert port["containerPort"] == options.server.port
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = CONTAINER[name]["httpGet"]
        assert asked["port"] == port["name"]
        assert_probed(f"http://pod:{port['containerPort']}{asked['path']}", options.server.port)
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == "/health", "a server that loads or drains is not killed"
    assert {CONTAINER[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe")} == {"/ready"}
    command, seconds = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    grace = POD["terminationGracePeriodSeconds"]
    assert command == "sleep" and grace >= int(seconds) + options.server.drain_timeout_s + STOP_S


def test_kubernetes_runs_it_as_nobody_on_a_root_that_is_read_only() -> None:
    of_pod, own = POD["securityContext"], CONTAINER["securityContext"]
    user, group = IMAGE.last["USER"].split(":")
    assert of_pod["runAsNonRoot"] and [of_pod["runAsUser"], of_pod["runAsGroup"]] == [int(user), int(group)]
    assert of_pod["fsGroup"] == int(group) and of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert POD["automountServiceAccountToken"] is False and POD["shareProcessNamespace"] is True
    mounts = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    volumes = {each["name"]: each for each in POD["volumes"]}
    assert mounts.keys() == volumes.keys()
    options = served(list(CONTAINER["args"]))
    claims = [volumes[name]["persistentVolumeClaim"]["claimName"] for name in ("cache", "pages")]
    assert claims == [each["metadata"]["name"] for each in documents()["PersistentVolumeClaim"]]
    assert sorted([mounts["cache"], mounts["pages"]]) == sorted(stores(options))
    assert mounts["shm"] == "/dev/shm" and volumes["shm"]["emptyDir"]["medium"] == "Memory" and mounts["tmp"] == "/tmp"
    shm_gib = quantity(volumes["shm"]["emptyDir"]["sizeLimit"], UNITS_GIB)
    assert_holds(options, shm_gib)
    assert quantity(CONTAINER["resources"]["limits"]["memory"], UNITS_GIB) >= shm_gib + 2
    pages = documents()["PersistentVolumeClaim"][1]["spec"]["resources"]["requests"]["storage"]
    assert quantity(pages, UNITS_GIB) > options.cache.store_gib
    assert f"{mounts['config']}/hiserve.yaml" == CONFIG and CONFIG in CONTAINER["args"]
    text = (DEPLOY / "kubernetes.yaml").read_text()
    secret = volumes["config"]["secret"]["secretName"]
    assert f"kubectl create secret generic {secret} --from-file=hiserve.yaml=deploy/hiserve.yaml" in text


def of_gateway(name: str) -> dict[str, dict[str, Any]]:
    """The one resource of each kind in a file of ``deploy/``."""
    found = list(yaml.safe_load_all((DEPLOY / f"kubernetes-{name}.yaml").read_text()))
    made = {each["kind"]: each for each in found}
    assert len(made) == len(found)
    return made


ENGINES = of_gateway("engines")["Deployment"]
ENGINE_LABELS = ENGINES["spec"]["template"]["metadata"]["labels"]


def test_engines_behind_a_gateway_are_those_of_one_pod_but_for_their_volumes() -> None:
    pod = ENGINES["spec"]["template"]["spec"]
    (own,) = pod["containers"]
    same = ("image", "securityContext", "resources", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
    assert {name: own[name] for name in same} == {name: CONTAINER[name] for name in same}
    assert own["volumeMounts"] == CONTAINER["volumeMounts"]
    assert {each["name"] for each in pod["volumes"]} == {each["name"] for each in POD["volumes"]}
    for name in ("automountServiceAccountToken", "shareProcessNamespace", "terminationGracePeriodSeconds"):
        assert pod[name] == POD[name]
    assert pod["securityContext"].items() <= POD["securityContext"].items()


def test_engines_behind_a_gateway_say_what_gateways_read() -> None:
    """The topic of events names address, port and model of the pod, as llm-d reads it."""
    (own,) = ENGINES["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in own["ports"]}
    options = served([part for argument in own["args"] for part in argument.split("=", 1)])
    check_kv_events(options)
    assert options.server.metrics_compat == "vllm" and options.server.port == ports["http"]
    assert options.cache.kv_events is not None
    endpoint, topic = topic_of(options.cache.kv_events)
    assert endpoint == f"tcp://*:{ports['kv-events']}"
    assert options.cache.kv_events_replay == f"tcp://*:{ports['kv-replay']}"
    assert (ports["kv-events"], ports["kv-replay"]) == (5557, 5558), "AIBrix knows no others"
    assert own["env"] == [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    kind, address, model = topic.split("@")
    assert (kind, address, model) == ("kv", f"$(POD_IP):{ports['http']}", SETTINGS["model"])
    assert ENGINES["spec"]["selector"]["matchLabels"].items() <= ENGINE_LABELS.items()
    assert ENGINE_LABELS["llm-d.ai/engine-type"] == options.server.metrics_compat
    assert ENGINES["metadata"]["labels"].items() <= ENGINE_LABELS.items()
    assert ENGINE_LABELS["model.aibrix.ai/name"] == SETTINGS["model"]
    assert int(ENGINE_LABELS["model.aibrix.ai/port"]) == ports["http"]
    assert len(ENGINE_LABELS["model.aibrix.ai/kv-events-enabled"]) and ENGINES["spec"]["replicas"] == 2


def test_gateways_find_the_engines() -> None:
    port = served(["serve", "--config", CONFIG]).server.port
    pool, route = (of_gateway("llm-d")[kind] for kind in ("InferencePool", "HTTPRoute"))
    assert pool["spec"]["selector"]["matchLabels"].items() <= ENGINE_LABELS.items()
    assert pool["spec"]["targetPorts"] == [{"number": port}]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert pool["apiVersion"].startswith(f"{backend['group']}/")
    picker = yaml.safe_load(of_gateway("llm-d")["ConfigMap"]["data"]["picker.yaml"])
    plugins = {each["type"] for each in picker["plugins"]}
    assert {each["pluginRef"] for each in picker["schedulingProfiles"][0]["plugins"]} <= plugins

    service = of_gateway("aibrix")["Service"]
    assert service["spec"]["selector"].items() <= ENGINE_LABELS.items()
    assert service["metadata"]["name"] == SETTINGS["model"], "AIBrix finds the service by the name of the model"
    assert service["spec"]["ports"][0]["port"] == port

    stack = of_gateway("production-stack")
    router = stack["Deployment"]["spec"]["template"]["spec"]
    flags_of = dict(argument.removeprefix("--").split("=", 1) for argument in router["containers"][0]["args"])
    key, value = flags_of["k8s-label-selector"].split("=")
    assert ENGINE_LABELS[key] == value and int(flags_of["k8s-port"]) == port
    account = stack["ServiceAccount"]["metadata"]["name"]
    assert router["serviceAccountName"] == stack["RoleBinding"]["subjects"][0]["name"] == account
    assert stack["RoleBinding"]["roleRef"]["name"] == stack["Role"]["metadata"]["name"]
    assert stack["Service"]["spec"]["selector"] == stack["Deployment"]["spec"]["selector"]["matchLabels"]


def test_kubernetes_service_finds_the_pod() -> None:
    found = documents()
    (service,), (deployment,) = found["Service"], found["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["ports"][0]["targetPort"] == CONTAINER["ports"][0]["name"]


def test_the_page_names_files_flags_and_routes_that_there_are() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text()
    for path in DEPLOY.iterdir():
        assert f"deploy/{path.name}" in text, path
    assert [path for path in re.findall(r"\bdeploy/[\w.-]+\w", text) if not (ROOT / path).exists()] == []
    known = {f"--{name.replace('_', '-')}" for name in flags()}
    named = set(re.findall(r"(?<=`)--[a-z-]+", text)) | set(re.findall(r"hiserve serve.* (--[a-z-]+)", text))
    assert named - {"--build-arg", "--init"} <= known, "the others are docker's"
    assert set(re.findall(r"`(/(?:health|ready|metrics)\w*)`", text)) <= endpoints().keys()
