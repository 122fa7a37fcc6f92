"""docs/ray.md: its examples parse, its settings exist, its numbers are those of the code."""

import re
import subprocess
from dataclasses import fields
from pathlib import Path

import yaml

from claw_lightning.remote import blocks, cluster, host
from claw_lightning.remote.config import RayConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ray.md").read_text()


def block(language):
    """The one example in a language."""
    [text] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return text


def test_the_script_is_a_script():
    found = subprocess.run(["bash", "-n"], input=block("bash"), text=True, capture_output=True)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_manifest_is_one_of_the_tested_ray():
    manifest = yaml.safe_load(block("yaml"))
    assert manifest["kind"] == "RayCluster"
    assert f"ray=={manifest['spec']['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()
    for group in (manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]):
        [container] = group["template"]["spec"]["containers"]
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]


def test_settings_and_numbers_are_those_of_the_code():
    named = set(re.findall(r"^\| `data\.ray\.(\w+)`", PAGE, re.M))
    assert named == {each.name for each in fields(RayConfig)}
    assert blocks.UNSENT_BYTES == 8 << 20 and host.MOST_BYTES == 4 << 20 and cluster.IN_FLIGHT == 2
    assert cluster.PARAMETER_SECONDS == 0.02 and blocks.LEAST_STEPS // 4 - 2 == 14
    assert (cluster.REPLY_SECONDS, cluster.REPLY_SECONDS_PER_WORKER) == (0.005, 0.0005)
    assert (host.PATIENT_INTERVALS, host.EARLY_BYTES) == (8, 1 << 20)
    assert (cluster.PLACING_PATIENCE, cluster.PLACING_INTERVAL) == (10.0, 60.0)
