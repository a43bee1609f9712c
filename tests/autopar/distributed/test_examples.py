"""The examples of docs/launch are such as their launchers read, and call the script as the page says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).parents[3] / "docs"
SCRIPTS = sorted((DOCS / "launch").glob("*.sh"))
CALL = "python -u train.py --steps 1000"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_is_one_of_bash(script: Path):
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert CALL in text


def test_slurm_starts_a_process_for_each_gpu():
    text = (DOCS / "launch" / "slurm.sh").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert text.index("#SBATCH") < text.index("set -euo")  # Slurm reads them up to the first command


def test_the_job_set_can_read_what_jax_asks_the_cluster_for():
    documents = list(yaml.safe_load_all((DOCS / "launch" / "jobset.yaml").read_text()))
    account, role, binding, job_set = documents
    assert [d["kind"] for d in documents] == ["ServiceAccount", "Role", "RoleBinding", "JobSet"]
    readable = {resource for rule in role["rules"] for resource in rule["resources"]}
    assert readable == {"pods", "services", "jobs"}
    assert all({"get", "list"} == set(rule["verbs"]) for rule in role["rules"])
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["parallelism"] == job["completions"]
    assert job["completionMode"] == "Indexed"  # which gives each pod its rank
    pod = job["template"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert " ".join(pod["containers"][0]["command"]) == CALL


def test_the_page_names_every_example():
    page = (DOCS / "processes.md").read_text()
    named = set(re.findall(r"\((launch/[\w.]+)\)", page))
    assert named == {f"launch/{path.name}" for path in (DOCS / "launch").iterdir()}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        compile(block, "docs/processes.md", "exec")
