"""The Slurm and Kubernetes files.

There is no Slurm and no cluster here: `srun` and `scontrol` are stand-ins that record their words
and run the command once per node; the pods' commands run with the variables that the operator sets.
Both end in --dry-run: this proves what would be started, not that a cluster starts it.
"""

import json
import os
import shlex
from pathlib import Path

import pytest
import yaml
from launching import ROOT, refused, run

SBATCH = ROOT / "scripts" / "slurm" / "pretrain.sbatch"
JOBS = sorted((ROOT / "scripts" / "k8s").glob("*.yaml"))

SRUN = """#!/bin/bash
printf '%s\\n' "$@" >"$RECORD"
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" || exit; done
"""
SCONTROL = "#!/bin/bash\n[ \"$*\" = 'show hostnames n[7-8]' ] && printf 'n7\\nn8\\n'\n"


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.fixture
def slurm(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record"),
        "LOGS": str(tmp_path / "logs"), "MEGATRON_LM": str(checkout),
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "46005", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n[7-8]", "SLURM_GPUS_ON_NODE": "8",
    }  # fmt: skip


def test_sbatch_starts_torchrun_on_every_node(slurm: dict[str, str], tmp_path: Path) -> None:
    copy = tmp_path / "slurm_script"  # Slurm runs a copy
    copy.write_text(SBATCH.read_text())
    result = run(
        "bash", copy, "--model", "gpt_14b", "--dry-run", "--", "--seed", "7",
        **slurm, CHECKPOINTS="/c",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "job 46005: 2 nodes x 8 processes, rendezvous at n7:16005" in result.stdout
    nodes = [
        shlex.split(line) for line in result.stdout.splitlines() if "torch.distributed.run" in line
    ]
    assert [after(words, "--rdzv-conf") for words in nodes] == ["is_host=1", "is_host=0"]
    for words in nodes:
        assert after(words, "--rdzv-endpoint") == "n7:16005"
        assert after(words, "--rdzv-id") == "46005"
        assert after(words, "--nproc-per-node") == "8"
        assert after(words, "--max-restarts") == "3"
        assert words[-9:] == [
            "--seed", "7", "--exit-signal-handler",
            "--save", "/c", "--load", "/c", "--save-interval", "500",
        ]  # fmt: skip
    record = Path(slurm["RECORD"]).read_text()
    assert "--kill-on-bad-exit=1" in record
    assert f"--output={slurm['LOGS']}/%x-%j-node%n.log" in record


def test_sbatch_for_llama_without_flags_of_megatron(slurm: dict[str, str]) -> None:
    result = run("bash", SBATCH, "--dry-run", **slurm, PRETRAIN="scripts/pretrain_llama.sh")
    assert result.returncode == 0, result.stderr
    assert "--swiglu" in result.stdout
    assert shlex.split(result.stdout.splitlines()[-1])[-2:] == [
        "--adaptra",
        "--exit-signal-handler",
    ]


def test_sbatch_refuses_what_the_script_refuses(slurm: dict[str, str], tmp_path: Path) -> None:
    assert "gpt_7b" in refused(run("bash", SBATCH, "--model", "gpt_8b", **slurm))
    assert "ADAPTRA_HOME" in refused(run("bash", SBATCH, **slurm, ADAPTRA_HOME=str(tmp_path)))


def test_sbatch_options_are_all_in_front() -> None:
    """Slurm stops reading #SBATCH lines at the first command."""
    lines = SBATCH.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line.split()[1] for line in lines[:first] if line.startswith("#SBATCH")]
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    assert {"--ntasks-per-node=1", "--exclusive", "--signal=TERM@120"} <= set(options)


@pytest.mark.parametrize("file", JOBS, ids=lambda path: path.name)
@pytest.mark.parametrize("operator", ["new", "old"])
def test_pods_start_torchrun(file: Path, operator: str, checkout: Path, tmp_path: Path) -> None:
    job = yaml.safe_load(file.read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert set(roles) == {"Master", "Worker"}
    assert roles["Master"]["replicas"] == 1
    pods = 1 + roles["Worker"]["replicas"]
    for end in (".bin", ".idx"):
        (tmp_path / f"my_text_document{end}").touch()
    for rank, role in ((0, "Master"), (1, "Worker"), (pods - 1, "Worker")):
        spec = roles[role]["template"]["spec"]
        (container,) = spec["containers"]
        assert container["name"] == "pytorch"
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in spec["volumes"]}
        env = {item["name"]: item["value"] for item in container["env"]}
        assert all(isinstance(value, str) for value in env.values())
        port = next(p for p in container["ports"] if p["name"] == "pytorchjob-port")
        # As pkg/controller.v1/pytorch/envvar.go of kubeflow/training-operator sets them.
        env |= {
            "MASTER_ADDR": f"{job['metadata']['name']}-master-0",
            "MASTER_PORT": str(port["containerPort"]), "WORLD_SIZE": str(pods), "RANK": str(rank),
        }  # fmt: skip
        if operator == "new":
            env |= {
                "PET_NNODES": str(pods),
                "PET_NODE_RANK": str(rank),
                "PET_NPROC_PER_NODE": "auto",
            }
        (text,) = container["args"]
        text = text.replace("pretrain_gpt.sh ", "pretrain_gpt.sh --dry-run ")
        text = text.replace("/data/", f"{tmp_path}/")
        result = run(*container["command"], text, **{**env, "MEGATRON_LM": str(checkout)})
        assert result.returncode == 0, result.stderr
        words = shlex.split(result.stdout)
        assert after(words, "--nnodes") == str(pods)
        assert after(words, "--rdzv-conf") == f"is_host={int(rank == 0)}"
        assert after(words, "--rdzv-endpoint") == f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
        gpus = container["resources"]["limits"].get("nvidia.com/gpu", 2)
        assert after(words, "--nproc-per-node") == str(gpus)


def test_the_gpu_job_asks_for_eight() -> None:
    text = json.dumps(yaml.safe_load((ROOT / "scripts/k8s/pytorchjob.yaml").read_text()))
    assert text.count('"nvidia.com/gpu": 8') == 4
