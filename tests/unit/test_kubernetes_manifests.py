"""The manifests of deploy/ hold to the schemas of Kubernetes, and say what the commands take.

Nothing is run: there is no cluster here. The schema of Ray's own kinds is in no package. Of those, the pods
are checked as Kubernetes does, and the fields around them against the names below.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import kubernetes_validate
import pytest
import typer.main
import yaml

from gare.cli.main import app

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
VERSION = "1.33"
RAY_JOB = {"entrypoint", "clusterSelector", "submissionMode"}
RAY_CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
HEAD = {"rayStartParams", "template"}
WORKERS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


def read(name: str) -> list[dict]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def of_kind(name: str, kind: str) -> dict:
    return next(found for found in read(name) if found["kind"] == kind)


def check_pod(template: dict) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
    kubernetes_validate.validate(pod, VERSION, strict=True)


def check_command(words: list[str]) -> None:
    """Every option of a command line is one that the command has."""
    assert words[0] == "gare"
    command = typer.main.get_command(app).commands[words[1]]
    known = {option for parameter in command.params for option in parameter.opts}
    options = [word for word in words[2:] if word.startswith("--")]
    assert options
    assert set(options) <= known


def test_servers_are_as_kubernetes_wants_them():
    for manifest in read("serve.yaml"):
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_a_manifest_with_a_wrong_field_is_refused():
    manifest = of_kind("serve.yaml", "Deployment")
    manifest["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        check_pod({"spec": {"containers": [{"image": "without a name"}]}})


def test_a_server_has_time_to_drain_and_probes_that_exist():
    from gare.serve.system_routes import router

    pod = of_kind("serve.yaml", "Deployment")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    words = [*container["command"], *container["args"]]
    check_command(words)
    assert pod["terminationGracePeriodSeconds"] >= 45 + float(words[words.index("--drain") + 1])
    routes = {f"/api/v1{route.path}" for route in router.routes}
    probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {probe["path"] for probe in probes} <= routes


def test_pods_of_ray_are_pods_and_the_fields_around_them_are_known():
    spec = of_kind("ray-cluster.yaml", "RayCluster")["spec"]
    assert set(spec) == RAY_CLUSTER
    assert set(spec["headGroupSpec"]) == HEAD
    check_pod(spec["headGroupSpec"]["template"])
    for group in spec["workerGroupSpecs"]:
        assert set(group) == WORKERS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        check_pod(group["template"])


def test_the_indexing_job_runs_a_command_that_exists_on_the_cluster_that_there_is():
    job = of_kind("ray-index-job.yaml", "RayJob")["spec"]
    assert set(job) == RAY_JOB
    check_command(shlex.split(job["entrypoint"]))
    cluster = of_kind("ray-cluster.yaml", "RayCluster")["metadata"]["name"]
    assert job["clusterSelector"] == {"ray.io/cluster": cluster}


def test_every_manifest_is_used_and_says_that_it_was_not_run():
    kustomization = read("kustomization.yaml")[0]
    assert all((FOLDER / name).is_file() for name in kustomization["resources"])
    for path in FOLDER.glob("*.yaml"):
        assert "Not run here" in path.read_text(encoding="utf-8").splitlines()[0]
