"""Credentials never reach a recorded file or a display; what only looks like one is kept."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from haiprof.cli import main
from haiprof.run_format.environment import named_variables
from haiprof.run_format.secrets import MASK, mask_command, mask_text, mask_variable

# Put together here, so that no scanner takes this file for a leak.
HF = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
GITHUB = "ghp_" + "0123456789abcdefghijABCDEFGHIJ012345"
AWS = "AKIA" + "IOSFODNN7EXAMPLE"
OPENAI = "sk-" + "proj-Ab12Cd34Ef56Gh78Ij90Kl12Mn34"
JWT = "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"
RANDOM = "Zx81kQp93LmVn72RtYw5"
SECRET = "opensesame"
SLACK = "https://hooks.slack." + "com/services/"
DISCORD = "https://discord." + "com/api/webhooks/"

MASKED = [
    (["--api-key", SECRET], ["--api-key", MASK]),
    (["--api-key=" + SECRET], ["--api-key=" + MASK]),
    (["--api_key", SECRET], ["--api_key", MASK]),
    (["--apiKey", SECRET], ["--apiKey", MASK]),
    (["--password", "123456"], ["--password", MASK]),
    (["--password=p&w;x=1, y"], ["--password=" + MASK]),
    (["-password", SECRET], ["-password", MASK]),
    (["--db-pass", SECRET], ["--db-pass", MASK]),
    (["--token", SECRET], ["--token", MASK]),
    (["--hub_token", SECRET], ["--hub_token", MASK]),
    (["--hf-token=" + SECRET], ["--hf-token=" + MASK]),
    (["--use-auth-token", RANDOM], ["--use-auth-token", MASK]),
    (["--wandb.api_key=" + SECRET], ["--wandb.api_key=" + MASK]),
    (["+trainer.logger.api_key=" + SECRET], ["+trainer.logger.api_key=" + MASK]),
    (["model.secret=" + SECRET], ["model.secret=" + MASK]),
    (["--key", RANDOM], ["--key", MASK]),
    (["env", "WANDB_API_KEY=" + SECRET, "python"], ["env", "WANDB_API_KEY=" + MASK, "python"]),
    (["-x", "MYSQL_PWD=" + SECRET], ["-x", "MYSQL_PWD=" + MASK]),
    (["--export=ALL,DB_PW=" + SECRET], ["--export=ALL,DB_PW=" + MASK]),
    (["--env=DB_PASSWORD=" + SECRET], ["--env=DB_PASSWORD=" + MASK]),
    (["--db", "postgres://u:p@h/x"], ["--db", f"postgres://u:{MASK}@h/x"]),
    (["--db=postgres://u:p@ss@h:5432/x"], [f"--db=postgres://u:{MASK}@h:5432/x"]),
    (["redis://:pw@h:6379/0"], [f"redis://:{MASK}@h:6379/0"]),
    (["mongodb+srv://u:p/w@h/x"], [f"mongodb+srv://u:{MASK}@h/x"]),
    (["me:sesame@proxy:8080"], [f"me:{MASK}@proxy:8080"]),
    ([f"https://{GITHUB}@github.com/a/b.git"], [f"https://{MASK}@github.com/a/b.git"]),
    ([f"https://oauth2:{SECRET}@gitlab.com/a"], [f"https://oauth2:{MASK}@gitlab.com/a"]),
    ([f"https://{RANDOM}@sentry.io/42"], [f"https://{MASK}@sentry.io/42"]),
    ([f"https://h/d?a=1&token={SECRET}&b=2"], [f"https://h/d?a=1&token={MASK}&b=2"]),
    ([f"https://b.s3/x?X-Amz-Signature={RANDOM}&y=1"], [f"https://b.s3/x?X-Amz-Signature={MASK}&y=1"]),
    ([f"https://h/x?sig={RANDOM}%3D"], [f"https://h/x?sig={MASK}"]),
    (["-H", f"Authorization: Bearer {SECRET}"], ["-H", f"Authorization: {MASK}"]),
    (["-H", f"Authorization: Basic {SECRET}"], ["-H", f"Authorization: {MASK}"]),
    (["-H", f"X-Api-Key: {SECRET}"], ["-H", f"X-Api-Key: {MASK}"]),
    (["--header", f"bearer {SECRET}"], ["--header", f"bearer {MASK}"]),
    (["-u", f"me:{SECRET}"], ["-u", f"me:{MASK}"]),
    (["train.py", HF], ["train.py", MASK]),
    (["--x", AWS], ["--x", MASK]),
    ([f"x={OPENAI}"], [f"x={MASK}"]),
    ([JWT], [MASK]),
    (["glpat-" + RANDOM], [MASK]),
    (["xoxb-" + RANDOM], [MASK]),
    ([f'{{"api_key": "{SECRET}", "lr": 0.1}}'], [f'{{"api_key": "{MASK}", "lr": 0.1}}']),
    ([f"{{api_key: {SECRET}, lr: 0.1}}"], [f"{{api_key: {MASK}, lr: 0.1}}"]),
    (
        ["bash", "-c", f"WANDB_API_KEY={SECRET} python t.py --api-key 'a b' --lr 0.1"],
        ["bash", "-c", f"WANDB_API_KEY={MASK} python t.py --api-key '{MASK}' --lr 0.1"],
    ),
    (
        ["sh", "-c", f"export TOKEN=\"{SECRET} b\"; python t.py"],
        ["sh", "-c", f"export TOKEN=\"{MASK}\"; python t.py"],
    ),
    (["--token", "12345678"], ["--token", MASK]),
    (["--token=1234567890"], ["--token=" + MASK]),
    (["--api-key", "-abc123"], ["--api-key", MASK]),
    (["--token", "-9f8e7d"], ["--token", MASK]),
    (["sh", "-c", "python t.py --api-key -abc123 --lr 1"],
     ["sh", "-c", f"python t.py --api-key {MASK} --lr 1"]),
    (["--kaggle-key", "abc"], ["--kaggle-key", MASK]),
    (["env", "KAGGLE_KEY=abc", "python"], ["env", f"KAGGLE_KEY={MASK}", "python"]),
    (["--webhook", SLACK + "T0AB/B0CD/x9Yz"], ["--webhook", SLACK + MASK]),
    (["--webhook=" + SLACK + "T0AB/B0CD/x9Yz"], ["--webhook=" + SLACK + MASK]),
    (["hooks.slack.com/workflows/T0/A1/2/x9Yz"], ["hooks.slack.com/workflows/" + MASK]),
    ([DISCORD + "123456/abc-DEF_1?wait=true"], [DISCORD + MASK + "?wait=true"]),
    (["https://discordapp.com/api/v10/webhooks/1/ab"],
     ["https://discordapp.com/api/v10/webhooks/" + MASK]),
    (["sh", "-c", f"curl -d x {SLACK}T0/B0/x9 && python t.py"],
     ["sh", "-c", f"curl -d x {SLACK}{MASK} && python t.py"]),
    (["-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----"],
     [f"{MASK} RSA PRIVATE KEY-----"]),
]  # fmt: skip

KEPT = [
    "--tokenizer gpt2", "--tokenizer-path /data/tok", "--tokenizer=meta-llama/Llama-3.1-8B",
    "--max-tokens 512", "--num-tokens 1000000", "--max_new_tokens=64", "--pad-token <pad>",
    "--pad_token=[PAD]", "--eos-token END", "--stop-token stop", "--token 50256",
    "--placeholder_token cat --initializer_token toy", "--key-dim 64", "--key_dim=64", "--key loss",
    "--sort-key length", "--image-key jpg", "--text-key=text", "--num-keys 4", "--keys a,b",
    "--monitor-key val/loss", "--pass 2", "--passes 3", "--num-pass=2", "--forward-pass full",
    "--bypass x", "--compass north", "--author me", "--authors a,b", "--auth none",
    "--key-size 64", "--num-tokens 4096", "--max-token 10000000", "--total-token 200000000",
    "--token 1000000", "--token 0.00001", "--api-key -v", "--token -fp16", "--password -h host",
    "--token --lr", "--use-auth-token -x264fast", "--kaggle-dataset abc", "--groq-keys a",
    "--url https://api.slack.com/messaging/webhooks", "https://discord.com/channels/1/2",
    "https://discord.com/api/webhooks", "--slack-channel hooks",
    "--password-file /run/pw", "--token-path tok.json", "--api-key-file key", "--api-key-env KEY",
    "--secret-name mine", "--ssh-key ~/.ssh/id_ed25519", "--private-key /k.pem",
    "--use-auth-token train.py", "--no-password train.py", "--keyboard us", "--monkey x",
    "--turkey=tr", "--secretary bob", "--seed 1234567890123456", "--hash sha256",
    "--query-key-norm true", "--tokens-per-batch 4096", "--attn-key-bias=False",
    "SLURM_JOB_ID=12345678901234567890", "SLURM_STEP_NODELIST=node[1-4]", "MASTER_PORT=29500",
    "MASTER_ADDR=10.0.0.1", "RANK=0", "PWD=/home/me", "OLDPWD=/home/me", "KEYDIM=64",
    "--lr 3e-4", "--name sk-learn", "sk-learn-gradient-boosting", "--run 20260101-123456-abcdef12",
    "--commit 0123456789abcdef0123456789abcdef01234567", "git@github.com:a/b.git",
    "ssh://git@github.com/a/b.git", "https://github.com/a/b.git", "http://h:8080/x",
    "--endpoint=http://h:8080/a@b", "user@host:/data", "repo/image:tag@sha256:0123456789abcdef",
    "node1:8", "--rdzv-endpoint=node1:29500", "-u train.py", "--user 1000:1000", "-pPASSWORD",
    "a:b:c", "--filter kind:auto", "s3://bucket/tokens/key.json", "--url http://h/?page=2&key=name",
    "--options profile.time=120", "cuda:0", "-m pkg.train", "--prompt Once", "--steps 100:105",
    "hf_config.json", "--model hf_model", "ghp_short", "eyJ", "AKIAlogger",
]  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), MASKED, ids=lambda w: shlex.join(w)[:60])
def test_a_credential_is_masked(words: list[str], expected: list[str]) -> None:
    assert mask_command(words) == expected
    assert mask_command(expected) == expected  # a recorded command that is recorded again


@pytest.mark.parametrize("line", KEPT)
def test_what_is_no_credential_is_kept(line: str) -> None:
    assert mask_command(line.split()) == line.split()
    assert mask_text(line) == line


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("TORCH_HUB_TOKEN", SECRET, MASK),
    ("CUDA_DB_PW", "x", MASK),
    ("UCX_AWS_SECRET_ACCESS_KEY", "/a/b", MASK),
    ("NCCL_AUTH", SECRET, MASK),
    ("TORCH_PROXY", "http://u:p@proxy:1", f"http://u:{MASK}@proxy:1"),
    ("TORCH_URL", f"https://h/?access_token={SECRET}", f"https://h/?access_token={MASK}"),
    ("TRITON_X", HF, MASK),
    ("CUDA_VISIBLE_DEVICES", "0,1", "0,1"),
    ("CUDA_KEYRING", "x", "x"),
    ("NCCL_SOCKET_IFNAME", "=eth0", "=eth0"),
    ("NCCL_IB_HCA", "mlx5_0:1,mlx5_1:1", "mlx5_0:1,mlx5_1:1"),
    ("TORCH_LOGS", "+dynamo,aot:10", "+dynamo,aot:10"),
    ("OMP_PLACES", "{0:4},{4:4}", "{0:4},{4:4}"),
    ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128", "max_split_size_mb:128"),
])  # fmt: skip
def test_values_of_variables_are_masked(name: str, value: str, expected: str) -> None:
    assert mask_variable(name, value) == expected
    assert named_variables({name: value}) == {name: expected}


def test_a_variable_is_masked_before_it_is_cut_short() -> None:
    long = "x" * 480 + " https://u:" + SECRET * 10 + "@h"
    assert SECRET not in named_variables({"NCCL_DEBUG_FILE": long})["NCCL_DEBUG_FILE"]


@pytest.mark.parametrize("word", [
    "a" * 200_000, "--" + "a-" * 100_000, "a=" * 100_000, "@" + "a://b:c" * 30_000,
    "@" + "a:b" * 60_000, 'a="\\' * 50_000, "sk-" * 70_000, "--token " * 25_000,
    "bearer " * 30_000, "eyJ." * 50_000, " " * 200_000 + "=", "token" + " " * 200_000,
    "-----BEGIN PRIVATE KEY-----" * 8_000, "hooks.slack.com/services/" * 8_000,
    "--token -a1" * 20_000, "--token " + "-" * 200_000, "discord.com/api/v1" * 10_000,
])  # fmt: skip
def test_masking_takes_time_in_proportion_to_the_text(word: str) -> None:
    began = time.process_time()
    mask_command(["python", word])
    assert time.process_time() - began < 2.0


def test_no_file_of_a_run_holds_a_credential_and_the_job_gets_it(tmp_path: Path) -> None:
    show = "import os, sys; e = os.environ; print(sys.argv[1:], e['TORCH_HUB_TOKEN'], e['HIDDEN'])"
    secrets = (SECRET, "trustno1", "letmein99", "geheim")
    hidden = dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "WANDB_API_KEY", "HIDDEN"),
                           "geheim")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "haiprof", "--log-dir", str(tmp_path), "--",
         sys.executable, "-c", show, "--api-key", SECRET, "postgres://u:trustno1@h"],
        env={**os.environ, **hidden, "TORCH_HUB_TOKEN": "letmein99", "OMP_NUM_THREADS": "3",
             "NCCL_PROXY": "http://user:geheim@proxy"},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    for secret in secrets:
        assert secret in done.stdout, "the job itself gets the true value"
        assert secret not in done.stderr
        for file in tmp_path.rglob("*"):
            if file.is_file():
                assert secret.encode() not in file.read_bytes(), file
    (manifest,) = tmp_path.glob("*/run.json")
    recorded = json.loads(manifest.read_text())
    assert recorded["command"][-3:] == ["--api-key", MASK, f"postgres://u:{MASK}@h"]
    variables = recorded["environment"]["variables"]
    assert (variables["TORCH_HUB_TOKEN"], variables["OMP_NUM_THREADS"]) == (MASK, "3")


def test_what_slurm_gets_is_true_and_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, says in (("srun", ""), ("sbatch", "echo Submitted batch job 7")):
        (stubs / name).write_text(f"#!/bin/sh\n{says}\n")
        (stubs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{stubs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    folder = tmp_path / "logs/slurm"
    folder.mkdir(mode=0o755, parents=True)  # of an earlier release
    before = os.umask(0o022)
    try:
        words = ["--on", "slurm", "--env", f"DB_PW={SECRET}", "--log-dir", str(tmp_path / "logs")]
        assert main(["submit", "train.py", *words, "--", "--api-key", SECRET]) == 0
    finally:
        os.umask(before)
    assert any(SECRET.encode() in file.read_bytes() for file in folder.iterdir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
