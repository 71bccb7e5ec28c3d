"""The page about Spark clusters says what the commands and Kubernetes take."""

from __future__ import annotations

import json
import re

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from jobs_lib.cli.main import cli
from jobs_lib.cli.pack import read_conf
from spark_bridge import pack, workers
from spark_bridge.master import check_password
from tests.support.pages import ROOT, read_blocks

PAGE = "docs/spark.md"
(MANIFEST,) = [yaml.safe_load(block) for block in read_blocks(PAGE, "yaml")]
(DRIVER,) = MANIFEST["spec"]["template"]["spec"]["containers"]


def test_the_manifest_fits_kubernetes():
    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(MANIFEST, version, strict=True)
    wrong = json.loads(json.dumps(MANIFEST).replace('"backoffLimit"', '"backofLimit"'))
    with pytest.raises(kubernetes_validate.ValidationError, match="backofLimit"):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("block", [*read_blocks(PAGE, "sh"), " ".join(DRIVER["args"])])
def test_commands_and_options_exist(block):
    told = re.findall(r"(reexport \w+)(.*)", block)
    for command, rest in told:
        done = CliRunner().invoke(cli, [*command.split(), "--help"])
        assert done.exit_code == 0, done.output
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in done.output
    assert told or "spark-submit" in block


def test_the_manifest_gives_no_secret_and_is_not_refused():
    given = [one.removeprefix("--conf=") for one in DRIVER["args"] if "--conf" in one]
    settings = read_conf(given)
    (url,) = [one["value"] for one in DRIVER["env"] if "URL" in one["name"]]
    check_password("k8s://https://kubernetes.default.svc", url, settings)


def test_what_the_page_says_of_settings_and_waits_holds():
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert f"{pack.ARCHIVES}=packed.tar.gz#{pack.FOLDER}" in text
    assert f"{pack.PATH}={pack.FOLDER}" in text
    assert workers.PATIENCE == 300
    assert "five minutes" in text
