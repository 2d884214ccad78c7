# deploy/kubernetes, held to what it promises without a cluster: Kubernetes' schemas take every object, our command
# lines every container's arguments, and names, ports, secrets and times are those of the code and its pages.

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from gateway.cli import app
from gateway.config.file import load_settings
from gpu_backend.__main__ import FLEET_REDIS, FLEET_SECRET, SECRET, read_settings

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "deploy" / "kubernetes"
CONFIG = CLUSTER / "tollgate.yaml"
PARTS = (CLUSTER, CLUSTER / "engines", CLUSTER / "monitoring")
KUBERNETES = "1.34"  # the version whose schemas are asked
VARIABLE = re.compile(r"\$\{(\w+)(:-)?")
READ_BY_COMMANDS = {"TOLLGATE_CONFIG"}
VALUES = {
    "DATABASE_URL": "postgresql://tollgate_service:secret@postgres/tollgate",
    "REDIS_URL": "redis://:secret@redis:6379/0",
    FLEET_REDIS: "redis://:secret@redis:6379/0",
}

Object = dict[str, Any]


def objects() -> list[Object]:
    """Return every object of every kustomization, each with the folder that it comes from."""
    found = []
    for part in PARTS:
        for name in yaml.safe_load((part / "kustomization.yaml").read_text())["resources"]:
            found += [each | {"from": part.name} for each in yaml.load_all((part / name).read_text(), yaml.CSafeLoader)]
    return found


OBJECTS = objects()
PODS = {one["metadata"]["name"]: one["spec"]["template"] for one in OBJECTS if "template" in one.get("spec", {})}
CONTAINERS = {name: pod["spec"]["containers"][0] for name, pod in PODS.items()}
SERVICES = {one["metadata"]["name"]: one["spec"] for one in OBJECTS if one["kind"] == "Service"}

# What the schemas of other makers' objects ask for at least; KEDA's was asked whole once, when these were written.
NEEDED = {
    "ServiceMonitor": {"selector", "endpoints"},
    "PrometheusRule": {"groups"},
    "ScaledObject": {"scaleTargetRef", "triggers"},
}


def named(one: Object) -> str:
    return f"{one['kind']}/{one['metadata']['name']}"


@cache
def _schema(filename: str, version: str) -> Any:
    return _read_schema(filename, version)


_read_schema = kubernetes_validate.utils.schema_contents


@pytest.mark.parametrize("one", OBJECTS, ids=named)
def test_a_cluster_takes_each_object(one: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strictly by Kubernetes' own schema: no field that it does not know. Others' objects have what theirs need."""
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", _schema)  # each of them is read once
    one = {key: value for key, value in one.items() if key != "from"}

    if one["kind"] in NEEDED:
        assert one["spec"].keys() >= NEEDED[one["kind"]]
        with pytest.raises(kubernetes_validate.SchemaNotFoundError):
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
    else:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_kustomize_builds_each_part(part: Path) -> None:
    """`kubectl apply -k` finds every file, with our registry's images, the namespace, and the configuration."""
    if shutil.which("kubectl") is None:
        pytest.skip("SKIPPED: no kubectl here")
    built = subprocess.run(["kubectl", "kustomize", str(part)], capture_output=True, text=True, timeout=30)
    made = list(yaml.safe_load_all(built.stdout))
    images = re.findall(r"image: (\S+)", built.stdout)

    assert built.returncode == 0, built.stderr
    assert {one["metadata"].get("namespace") for one in made if one["kind"] != "Namespace"} == {"tollgate"}
    assert all(image.startswith("registry.example.com/tollgate") for image in images)
    if part == CLUSTER:
        config = next(one for one in made if one["kind"] == "ConfigMap")
        assert config["data"] == {"tollgate.yaml": CONFIG.read_text()}
        assert built.stdout.count(f"name: {config['metadata']['name']}") == 4  # itself, and mounted three times


@pytest.mark.parametrize("name", ["gateway", "worker", "migrate"])
def test_our_command_line_takes_the_arguments(name: str) -> None:
    """The command is one of ours, with flags that it has and values that they take."""
    program, command, *arguments = CONTAINERS[name]["args"]
    commands = typer.main.get_command(app)
    context = commands.commands[command].make_context(command, list(arguments))  # type: ignore[attr-defined]

    assert program == "tollgate"
    assert context.params["config"] == Path("/etc/tollgate/tollgate.yaml")
    assert {"name": "config", "mountPath": "/etc/tollgate", "readOnly": True} in CONTAINERS[name]["volumeMounts"]
    if name != "migrate":
        port = context.params["port" if name == "gateway" else "metrics_port"]
        host = context.params["host" if name == "gateway" else "metrics_host"]
        assert host == "0.0.0.0"
        assert (
            [told["containerPort"] for told in CONTAINERS[name]["ports"]]
            == [port]
            == [SERVICES[name]["ports"][0]["port"]]
        )


def test_the_engine_takes_its_arguments_and_joins_a_pool_of_the_gateways() -> None:
    """Its own parser reads them, with the environment of its container; the model is the one that is routed to."""
    container, settings = CONTAINERS["engine"], load_settings(CONFIG, values_of(CONTAINERS["gateway"]))
    python, module, package, *arguments = container["args"]
    engine = read_settings(arguments, values_of(container))

    assert (python, module, package) == ("python", "-m", "gpu_backend")
    assert engine.fleet is not None and engine.fleet.pool in settings.fleet.pools
    assert engine.served_model_name in {model.upstream_model for model in settings.catalog().models.values()}
    assert container["ports"][0]["containerPort"] == engine.port == SERVICES["engine"]["ports"][0]["port"]
    assert PODS["engine"]["spec"]["terminationGracePeriodSeconds"] >= engine.drain_seconds + 15
    assert "replicas" not in next(one for one in OBJECTS if named(one) == "Deployment/engine")["spec"]  # KEDA's


def values_of(container: Object) -> dict[str, str]:
    """Return a value for each variable of a container that is not optional: any strong one for a secret."""
    stated = {}
    for one in container["env"]:
        secret = one.get("valueFrom", {}).get("secretKeyRef", {})
        if not secret.get("optional"):
            stated[one["name"]] = one.get("value") or VALUES.get(one["name"], sha256(one["name"].encode()).hexdigest())
    return stated


@pytest.mark.parametrize("name", ["gateway", "worker", "migrate"])
def test_the_configuration_is_whole_and_each_variable_is_read(name: str) -> None:
    """It loads with what the container has; nothing is missing, and nothing stands there that no setting reads."""
    variables = {variable: bool(default) for variable, default in VARIABLE.findall(CONFIG.read_text())}
    told = {
        one["name"]: bool(one.get("valueFrom", {}).get("secretKeyRef", {}).get("optional"))
        for one in CONTAINERS[name]["env"]
        if one["name"] not in READ_BY_COMMANDS
    }
    settings = load_settings(CONFIG, values_of(CONTAINERS[name]))
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINERS[name]["volumeMounts"]}

    assert told == variables
    if name != "migrate":
        assert mounts["journal"] == str(settings.data_dir)
        assert PODS[name]["spec"]["terminationGracePeriodSeconds"] >= settings.drain + 15
        assert 5 <= settings.lame_duck < settings.drain


def test_the_engine_is_told_no_more_than_it_reads() -> None:
    """Its secret, its pool's, and the gateways' Redis; no key of administrators and no database."""
    assert {one["name"] for one in CONTAINERS["engine"]["env"]} == {SECRET, FLEET_SECRET, FLEET_REDIS}


def test_secrets_are_named_and_the_page_says_how_each_is_made() -> None:
    """No value stands in a file; what is referred to is what the page's commands put into the cluster."""
    page = (ROOT / "docs" / "operations" / "kubernetes.md").read_text()
    made = set()
    for secret, rest in re.findall(r"create secret generic (\S+)((?: \\\n|[^\n])*)", page):
        made |= {(secret, key) for key in re.findall(r"--from-literal=(\w+)=", rest)}
    referred = {
        (told["name"], told["key"])
        for container in CONTAINERS.values()
        for one in container["env"]
        if (told := one.get("valueFrom", {}).get("secretKeyRef")) and not told.get("optional")
    }
    for monitor in (one for one in OBJECTS if one["kind"] == "ServiceMonitor"):
        for endpoint in monitor["spec"]["endpoints"]:
            if "authorization" in endpoint:
                told = endpoint["authorization"]["credentials"]
                assert (told["name"], told["key"]) in made
    stated = [one for container in CONTAINERS.values() for one in container["env"] if "value" in one]

    assert referred == made
    assert {one["name"] for one in stated} == READ_BY_COMMANDS


@pytest.mark.parametrize("name", PODS)
def test_a_pod_can_do_no_more_than_it_must(name: str) -> None:
    """As `restricted` of Pod Security asks, by the images' own user; memory has a bound; no token of the cluster."""
    pod, container = PODS[name]["spec"], CONTAINERS[name]
    user = re.findall(r"(?m)^USER (\d+):", (ROOT / "Dockerfile").read_text())[-1]

    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == int(user)
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"] and "cpu" in container["resources"]["requests"]


@pytest.mark.parametrize("name", PODS)
def test_images_are_those_of_compose(name: str) -> None:
    """One name and version of each image in both."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]

    assert CONTAINERS[name]["image"] == services["engine-gpu" if name == "engine" else name]["image"]


def test_services_budgets_and_policies_find_pods() -> None:
    """Each selects the pods of its name, and every pod stands under a policy for what comes in and one for what goes
    out."""
    ruled: dict[str, set[str]] = {name: set() for name in PODS}
    for one in OBJECTS:
        spec = one.get("spec", {})
        if one["kind"] == "NetworkPolicy":
            for name in (found := selected(spec["podSelector"])):
                ruled[name] |= set(spec["policyTypes"])
            ports = {port["port"] for rule in spec.get("ingress", ()) for port in rule["ports"]}
            opened = {told["containerPort"] for name in found for told in CONTAINERS[name].get("ports", ())}
            assert ports <= opened, named(one)
        elif one["kind"] in ("Service", "PodDisruptionBudget", "ServiceMonitor"):
            selector = spec["selector"] if one["kind"] != "Service" else {"matchLabels": spec["selector"]}
            assert selected(selector) == {one["metadata"]["name"]}, named(one)
        if one["kind"] == "ServiceMonitor":
            assert spec["endpoints"][0]["port"] in {port["name"] for port in SERVICES[one["metadata"]["name"]]["ports"]}
            assert spec["jobLabel"] == "app.kubernetes.io/component"

    assert all(types == {"Ingress", "Egress"} for types in ruled.values()), ruled


def selected(selector: Object) -> set[str]:
    """Return the names of the pods that a selector finds."""
    found = set()
    for name, pod in PODS.items():
        labels = pod["metadata"]["labels"]
        is_equal = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
        if is_equal and all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ())):
            found.add(name)
    return found


def test_probes_ask_what_is_answered() -> None:
    """Paths that gateway and engine have, open to all; the worker's own check; none of them waits for a store."""
    paths = {
        (name, kind): probe.get("httpGet", {}).get("path")
        for name, container in CONTAINERS.items()
        for kind, probe in container.items()
        if kind.endswith("Probe")
    }
    check = CONTAINERS["worker"]["livenessProbe"]["exec"]["command"]
    command = typer.main.get_command(app).commands["work"]  # type: ignore[attr-defined]
    routes = (ROOT / "gateway" / "http" / "routes" / "health.py").read_text()

    assert paths == {
        ("gateway", "startupProbe"): "/health/live",
        ("gateway", "livenessProbe"): "/health/live",
        ("gateway", "readinessProbe"): "/health/ready",
        ("worker", "startupProbe"): None,
        ("worker", "livenessProbe"): None,
        ("engine", "startupProbe"): "/health",
        ("engine", "readinessProbe"): "/health",
        ("engine", "livenessProbe"): None,
    }
    assert all(f'"{path}"' in routes for path in ("/health/live", "/health/ready"))
    assert '@get("/health", opt={"is_open": True})' in (ROOT / "gpu_backend" / "server" / "operations.py").read_text()
    assert check[0] == "tollgate" and command.make_context("work", check[2:]).params["check"] is True


def test_rules_are_the_alerts() -> None:
    """What the operator is given is what Prometheus reads in compose: written by `make rules`."""
    written = subprocess.run(
        [sys.executable, "-c", "import pathlib, rules; print(rules.rules(pathlib.Path('.')), end='')"],
        cwd=ROOT / "deploy",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rules = yaml.safe_load(written)

    assert (CLUSTER / "monitoring" / "rules.yaml").read_text() == written, "`make rules` writes it anew"
    assert rules["spec"] == yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())


def test_what_scales_the_pool_is_measured() -> None:
    """The query asks for metrics that engines and gateways have, and the target is the pool's Deployment."""
    scaled = next(one for one in OBJECTS if one["kind"] == "ScaledObject")["spec"]
    (trigger,) = scaled["triggers"]
    asked = set(re.findall(r"\b((?:vllm:|tollgate_)\w+)\{", trigger["metadata"]["query"]))
    engine = (ROOT / "gpu_backend" / "server" / "client" / "engine_metrics.py").read_text()
    gateway = (ROOT / "gateway" / "telemetry" / "target_metrics.py").read_text()

    assert trigger["type"] == "prometheus" and float(trigger["metadata"]["threshold"]) > 0
    assert len(asked) == 3 and all(f'"{metric}"' in engine + gateway for metric in asked)
    assert scaled["scaleTargetRef"]["name"] == "engine"
    assert scaled["minReplicaCount"] <= scaled["fallback"]["replicas"] <= scaled["maxReplicaCount"]
