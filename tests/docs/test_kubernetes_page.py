"""The manifests of docs/kubernetes.md fit Kubernetes' schemas, and this library."""

from __future__ import annotations

import json
import re

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from jobs_lib.cli.main import cli
from jobs_lib.settings import Settings, load_settings
from tests.support.pages import read_blocks

PAGE = "docs/kubernetes.md"
MANIFESTS = [yaml.safe_load(block) for block in read_blocks(PAGE, "yaml")]
KUBERNETES = kubernetes_validate.latest_version()


def containers():
    """Every container of the page."""
    for manifest in MANIFESTS:
        pod = manifest["spec"]["template"]["spec"]
        yield from [*pod.get("initContainers", ()), *pod["containers"]]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: one["kind"])
def test_a_manifest_fits_the_schema_of_its_kind(manifest):
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_a_manifest_with_an_unknown_field_is_refused():
    (deployment,) = [one for one in MANIFESTS if one["kind"] == "Deployment"]
    wrong = json.loads(json.dumps(deployment).replace('"replicas"', '"replica"'))
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("container", [*containers()], ids=lambda one: one["name"])
def test_a_container_runs_a_command_that_exists_with_its_options(container):
    done = CliRunner().invoke(cli, [*container["args"], "--help"])
    assert done.exit_code == 0, done.output
    for option in (word for word in container["args"] if word.startswith("--")):
        assert option in done.output


def test_the_variables_are_settings():
    known = {f"JOBS_LIB_{name.upper()}" for name in Settings.model_fields}
    named = set(re.findall(r"JOBS_LIB_[A-Z_]+", str([*containers()])))
    assert named
    assert named <= known


def test_service_and_sidecar_have_one_name_and_ports_of_their_own():
    (deployment,) = [one for one in MANIFESTS if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    ports = []
    for container in pod["containers"]:
        env = {one["name"]: one for one in container["env"]}
        name = env["JOBS_LIB_POD"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert name == "metadata.name"
        ports.append(int(env["JOBS_LIB_PROBES_PORT"]["value"]))
        for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
            assert container[probe]["httpGet"] == {"path": path, "port": ports[-1]}
    assert len(set(ports)) == len(ports) == 2
    # To write the outcomes after the jobs have ended takes some time, too.
    assert pod["terminationGracePeriodSeconds"] > load_settings().shutdown_timeout + 10


def test_the_image_runs_the_command_itself_as_an_ordinary_user():
    (dockerfile,) = read_blocks(PAGE, "dockerfile")
    steps = dict(line.split(" ", 1) for line in dockerfile.splitlines())
    assert json.loads(steps["ENTRYPOINT"]) == ["jobs-lib"]
    assert int(steps["USER"]) > 0
    assert steps["FROM"].startswith("python:3.")
