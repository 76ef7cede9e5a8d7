"""Every path, command, port, variable, volume and network that the files name is there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main
import yaml

from agentpipe.cli.main import app
from agentpipe.defs.instance import CONFIGURATION
from agentpipe.serving.deployment import serving_repository
from agentpipe.settings import load_settings
from agentpipe_tests.docker import files
from agentpipe_tests.docker.files import DOCKER, MissingVariableError, compose, image, own, services
from agentpipe_tests.strategies import REPOSITORY

EVERY = sorted(services())
OURS = [name for name in EVERY if own(services()[name])]
OF_DAGSTER = [name for name in OURS if name != "agent"]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
# What each image documents: the port that its program takes where the command names none, and variables.
DOCUMENTED_PORTS = {"postgres": {5432}, "tritonserver": {8000, 8001, 8002}, "prometheus": {9090}}
DOCUMENTED_VARIABLES = {
    "postgres": {"POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD", "POSTGRES_INITDB_ARGS"},
    "valkey": {"REDIS_PASSWORD"},  # of our own command
}
IN_THE_BASE_IMAGE = {"sh", "mkdir", "install", "python"}


def text(name):
    return (DOCKER / name).read_text()


def everything():
    """All that the services say, as one text of resolved values."""
    return json.dumps([services(), image().command, image().health])


# ------------------------------------------------------------------------------------------------ the files themselves


def test_compose_yaml_follows_the_compose_specification():
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(DOCKER / "compose.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_itself_reads_the_file_as_these_tests_do():
    """Needs the program, no engine: commands, variables and mounts after merging and interpolation."""
    programs = (["docker", "compose"], ["docker-compose"])
    known = [words for words in programs if shutil.which(words[0]) and not _run([*words, "version"]).returncode]
    if not known:
        pytest.skip("no Docker Compose here")
    done = _run([*known[0], "--file", str(DOCKER / "compose.yaml"), "config", "--format", "json"])
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)["services"]
    assert sorted(read) == [name for name in EVERY if "profiles" not in services()[name]]
    for name, found in read.items():
        ours = services()[name]
        assert [word.replace("$$", "$") for word in found["command"] or []] == ours.get("command", []), name
        assert {key: value.replace("$$", "$") for key, value in found.get("environment", {}).items()} == ours.get(
            "environment", {}
        ), name
        targets = [mount["target"] for mount in found.get("volumes", [])]
        assert targets == [mount.split(":")[1] for mount in ours.get("volumes", [])]


def _run(words):
    return subprocess.run(words, env={**os.environ, **files.GIVEN}, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["POSTGRES_PASSWORD", "REDIS_PASSWORD", "TRITON_IMAGE"])
def test_without_a_password_or_the_image_of_the_server_nothing_starts(name):
    with pytest.raises(MissingVariableError, match=name):
        compose({**files.GIVEN, name: ""})


def test_no_file_holds_a_password():
    """Whatever is called a password comes from outside, and no program gets it on its command line."""
    assert re.findall(r"^(\w*PASSWORD\w*)=(.+)$", text("example.env"), re.MULTILINE) == []
    raw = yaml.safe_load(text("compose.yaml"))["services"]
    given = [
        value for service in raw.values() for key, value in service.get("environment", {}).items() if "PASSWORD" in key
    ]
    assert len(given) >= 5
    assert {value for value in given if not re.match(r"\$\{\w+:\?", value)} == set()
    assert not any(
        secret in json.dumps(files.command(services()[name])) for secret in files.PASSWORDS.values() for name in EVERY
    )


def test_the_example_names_every_variable_that_compose_yaml_reads():
    read = set(re.findall(r"(?<!\$)\$\{(\w+)", text("compose.yaml")))
    assert read == set(re.findall(r"^(?:# )?([A-Z_]+)=", text("example.env"), re.MULTILINE))


def test_passwords_are_kept_out_of_git_and_out_of_the_image():
    ignored = subprocess.run(
        ["git", "check-ignore", "docker/.env", "docker/agentpipe.env"], cwd=REPOSITORY, capture_output=True, text=True
    )
    if (REPOSITORY / ".git").exists():
        assert ignored.stdout.split() == ["docker/.env", "docker/agentpipe.env"]
    allowed = [line.removeprefix("!") for line in text("Dockerfile.dockerignore").splitlines() if line.startswith("!")]
    assert text("Dockerfile.dockerignore").splitlines()[1] == "*"
    assert [name for name in allowed if "env" in name or name == "docker"] == []


# ------------------------------------------------------------------------------------------------ the image


def test_the_image_runs_as_a_user_of_its_own_and_pins_its_base():
    assert image().user == "1000:1000"
    bases = {value.split()[0] for name, value in image().instructions if name == "FROM"}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", bases.pop())
    names = [name for name, _ in image().instructions]
    assert names.count("FROM") == 2  # what builds stays behind
    assert {"USER", "HEALTHCHECK", "LABEL", "CMD"} <= set(names[len(names) - names[::-1].index("FROM") :])


def test_every_path_that_the_image_copies_is_there_and_may_enter_the_build():
    allowed = {line[1:] for line in text("Dockerfile.dockerignore").splitlines() if line.startswith("!")}
    copied = {source for stage, sources, _ in image().copies for source in sources if not stage}
    assert {name for name in copied if not (REPOSITORY / name).exists()} == set()
    assert copied == allowed


def test_the_wheel_of_the_image_is_built_from_what_is_copied():
    """What pyproject.toml names for the build: packages, readme, licence."""
    config = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    needed = {*config["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"], PROJECT["readme"]}
    copied = {source for _, sources, _ in image().copies for source in sources}
    assert needed | set(PROJECT["license-files"]) | {"constraints.txt", "pyproject.toml"} <= copied


def test_the_image_bears_the_version_of_the_project():
    (labels,) = [value for name, value in image().instructions if name == "LABEL"]
    assert f'org.opencontainers.image.version="{PROJECT["version"]}"' in labels
    assert {services()[name]["image"] for name in OURS} == {f"agentpipe:{PROJECT['version']}"}


def test_the_extra_that_the_image_installs_exists():
    (install,) = [value for name, value in image().instructions if name == "RUN" and "uv pip install" in value]
    (extra,) = re.findall(r"'\.\[(\w+)\]'", install)
    assert "dagster-postgres" in str(PROJECT["optional-dependencies"][extra])
    for option in re.findall(r"(?<!\S)--[a-z-]+", install):
        uv = Path(sys.executable).with_name("uv")
        if uv.exists():
            assert option in subprocess.run([uv, "pip", "install", "--help"], capture_output=True, text=True).stdout


# ------------------------------------------------------------------------------------------------ services


@pytest.mark.parametrize("name", EVERY)
def test_a_service_has_no_more_rights_than_it_needs(name):
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert {"privileged", "pid", "ipc", "devices"}.isdisjoint(service)
    assert "network_mode" not in service
    user = service.get("user", image().user if own(service) else "65534:65534" if name == "prometheus" else "")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert not any("docker.sock" in volume for volume in service.get("volumes", []))


@pytest.mark.parametrize("name", EVERY)
def test_a_service_restarts_is_watched_and_is_limited(name):
    service = services()[name]
    ends_by_itself = service["restart"] == "no"
    assert ends_by_itself or service["restart"] == "unless-stopped"
    assert ends_by_itself or files.health(service)
    assert {"memory", "pids"} <= set(service["deploy"]["resources"]["limits"])
    assert re.search(r":v?\d+\.\d+[\w.-]*$", service["image"]), "an image is pinned by version"


@pytest.mark.parametrize("name", EVERY)
def test_what_a_service_waits_for_can_happen(name):
    for other, wait in services()[name].get("depends_on", {}).items():
        target = services()[other]
        assert wait["condition"] == (
            "service_completed_successfully" if target["restart"] == "no" else "service_healthy"
        )
        assert wait["condition"] != "service_healthy" or files.health(target)
        assert "profiles" not in target


@pytest.mark.parametrize("name", EVERY)
def test_published_ports_are_of_the_loopback_address_and_listened_on(name):
    for published in services()[name].get("ports", []):
        address, _, port = published.split(":")
        assert address == "127.0.0.1"
        assert int(port) in listens(name)


def listens(name):
    """Ports that a service's program listens on: those that its command names, else the documented ones."""
    service = services()[name]
    words = " ".join(files.command(service))
    named = {int(port) for port in re.findall(r"(?:-p|--port)[ =](\d+)", words)}
    if name == "agent":
        named = {load_settings().agent.metrics_port}
    return named or next((ports for program, ports in DOCUMENTED_PORTS.items() if program in service["image"]), set())


def addresses():
    """Every ``host:port`` in commands, variables, health checks and configuration, and who asks there."""
    parts = ("command", "environment", "healthcheck")
    said = {name: json.dumps([services()[name].get(part) for part in parts]) for name in EVERY}
    code = yaml.safe_load(text("workspace.yaml"))["load_from"][0]["grpc_server"]
    said["webserver"] += f" {code['host']}:{code['port']}"
    said["daemon"] += f" {code['host']}:{code['port']}"
    said["prometheus"] += text("prometheus.yml")
    hosts = "|".join(re.escape(name) for name in (*EVERY, "127.0.0.1", "localhost"))
    found = re.compile(rf"(?<![\w.-])({hosts}):(\d+)")
    return [(name, host, int(port)) for name, words in said.items() for host, port in found.findall(words)]


def test_every_address_inside_is_of_a_service_that_listens_there_and_can_be_reached():
    inside = [entry for entry in addresses() if entry[1] in EVERY]
    assert {host for _, host, _ in inside} == {"agent", "code", "redis", "triton", "triton-check", "webserver"}
    for name, host, port in inside:
        assert port in listens(host), (name, host, port)
        assert set(services()[name]["networks"]) & set(services()[host]["networks"]), (name, host)


def test_every_loopback_address_is_of_the_service_itself_or_published_there():
    published = {int(entry.split(":")[1]) for name in EVERY for entry in services()[name].get("ports", [])}
    for name, host, port in addresses():
        if host not in EVERY:
            assert port in (published if name == "code" else listens(name)), (name, port)


def test_those_that_need_postgres_reach_it():
    for name in OF_DAGSTER:
        given = services()[name]["environment"]
        assert (given["DAGSTER_POSTGRES_HOST"], int(given["DAGSTER_POSTGRES_PORT"])) == ("postgres", 5432)
        assert set(services()[name]["networks"]) & set(services()["postgres"]["networks"])
        server = services()["postgres"]["environment"]
        for ours, theirs in (("USER", "USER"), ("PASSWORD", "PASSWORD"), ("DB", "DB")):
            assert given[f"DAGSTER_POSTGRES_{ours}"] == server[f"POSTGRES_{theirs}"]


def test_the_databases_have_no_way_out_and_publish_nothing():
    assert compose()["networks"]["inside"]["internal"] is True
    for name in ("postgres", "redis", "triton-check"):
        assert services()[name]["networks"] == ["inside"]
        assert "ports" not in services()[name]


@pytest.mark.parametrize("name", OURS)
def test_every_variable_of_our_services_is_read_by_something(name, monkeypatch):
    given = {**image().environment, **services()[name]["environment"]}
    asked = set(re.findall(r"env: (\w+)", text("dagster.yaml")))
    of_dagster = {variable for variable in given if variable.startswith("DAGSTER_")}
    assert of_dagster == {"DAGSTER_HOME"} | (asked if name in OF_DAGSTER else set())
    known = {"PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "MPLCONFIGDIR"}
    assert all(variable.startswith(("DAGSTER_", "AGENTPIPE_", "REDIS_URL")) or variable in known for variable in given)
    for variable, value in given.items():
        if variable not in known:
            monkeypatch.setenv(variable, value)
    settings = load_settings()  # refuses what it does not know
    assert str(settings.home) == "/home/agentpipe/home"
    assert given["DAGSTER_HOME"] == f"{settings.home}/dagster"  # where `agentpipe run` looks for its instance


def test_every_variable_of_other_images_is_documented_by_them():
    for name in EVERY:
        if not own(services()[name]):
            given = set(services()[name].get("environment", {}))
            documented = [
                names for image_name, names in DOCUMENTED_VARIABLES.items() if image_name in services()[name]["image"]
            ]
            assert given <= set().union(*documented), name


@pytest.mark.parametrize("name", EVERY)
def test_what_a_service_mounts_is_there(name):
    service = services()[name]
    for mount in service.get("volumes", []):
        source, target, *_ = mount.split(":")
        if source.startswith("."):
            assert (DOCKER / source).is_file(), source
        else:
            assert source in compose()["volumes"]
        assert target.startswith("/")
    assert not any(mount.startswith("./") and not mount.endswith(":ro") for mount in service.get("volumes", []))


def test_folders_of_the_image_are_mounted_where_the_settings_look():
    for name in OURS:
        targets = {mount.split(":")[1] for mount in services()[name]["volumes"]}
        assert "/home/agentpipe/home" in targets
        assert {image().environment["AGENTPIPE_HOME"]} <= targets
    volumes = json.loads(next(value for name, value in image().instructions if name == "VOLUME"))
    assert volumes == [image().environment["AGENTPIPE_HOME"], image().environment["AGENTPIPE_CACHE"]]


def test_triton_polls_the_folder_that_is_prepared_for_it():
    repository = next(word for word in files.command(services()["triton"]) if word.startswith("--model-repository="))
    home = image().environment["AGENTPIPE_HOME"]
    assert repository == f"--model-repository={serving_repository(load_settings(home=Path(home))).models}"
    assert 'mkdir -p "$AGENTPIPE_HOME/serving/models"' in files.command(services()["prepare"])[2]
    assert [mount for mount in services()["triton"]["volumes"] if mount == f"home:{home}:ro"]
    assert services()["triton"]["user"] == image().user  # who may read what is published


@pytest.mark.parametrize("name", OURS)
def test_every_program_of_our_services_is_in_the_image(name):
    scripts = Path(sys.executable).parent
    service = services()[name]
    for program in {*files.programs(files.command(service)), *(files.programs(files.health(service) or ["sh"]))}:
        assert program in IN_THE_BASE_IMAGE or os.access(scripts / program, os.X_OK), program
    for path in re.findall(r"/etc/agentpipe/[\w.]+", " ".join(files.command(service))):
        assert files.path_in_checkout(path) is not None, path


def test_the_agent_is_started_with_options_that_it_has():
    program, *words = files.command(services()["agent"])
    assert program == "agentpipe"
    command = typer.main.get_command(app).commands[words[0]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


# ------------------------------------------------------------------------------------------------ configuration files


def test_the_instance_is_the_one_of_a_home_but_for_its_storage():
    ours, home = yaml.safe_load(text("dagster.yaml")), yaml.safe_load(CONFIGURATION)
    assert {name: ours.get(name) for name in home} == home
    assert "postgres" in ours["storage"]


def test_prometheus_asks_those_that_have_figures():
    """Keys as Prometheus documents them; its own program judges where it is installed."""
    content = yaml.safe_load(text("prometheus.yml"))
    assert set(content) == {"global", "scrape_configs"}
    assert set(content["global"]) == {"scrape_interval"}
    for job in content["scrape_configs"]:
        assert set(job) == {"job_name", "static_configs"}
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in content["scrape_configs"]}
    assert targets == {"triton": ["triton:8002"], "agent": [f"agent:{load_settings().agent.metrics_port}"]}
    agent = services()["agent"]
    assert agent["environment"]["AGENTPIPE_AGENT__METRICS_HOST"] == agent["hostname"] == "agent"
    judge = shutil.which("promtool")
    if judge:
        done = subprocess.run([judge, "check", "config", DOCKER / "prometheus.yml"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_workspace_names_the_code_location_by_the_name_that_a_checkout_gives_it():
    ours = yaml.safe_load(text("workspace.yaml"))["load_from"][0]["grpc_server"]
    checkout = yaml.safe_load((REPOSITORY / "workspace.yaml").read_text())["load_from"][0]["python_module"]
    assert ours["location_name"] == checkout["location_name"]
    assert f"-m {checkout['module_name']}" in image().command[2]
    assert services()[ours["host"]]["hostname"] == ours["host"]
