"""What a user gives that cannot be used is one line with its name and a repair, of whatever kind it is.

Each case is a command that is typed as a user types it, in a folder that holds the files of `FILES`. Most are typed as
torchrun starts its only worker, which looks at settings and files as the launcher's own check does, and then trains.
"""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import TCPStore
from typed_commands import ROOT, Ended, as_torchrun, refused, typed

SMALL = "train.steps=1 train.sequence_tokens=8 train.microbatch_sequences=1 train.evaluate_batches=0 monitor.plan=false"
DEEP = 100_000
VOCAB = {"<unk>": 0, "<|im_end|>": 1, "a": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 64}
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "vocab_size": 256}


def zipped() -> bytes:
    file = io.BytesIO()
    np.savez(file, ids=np.arange(99))
    return file.getvalue()


def parquet() -> bytes:
    """A table of texts of whose pages some bytes were flipped."""
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    writer.write_table(arrow.table({"text": [f"word {n} " * 20 for n in range(500)]}), file, compression="zstd")
    content = bytearray(file.getvalue())
    content[40:400] = bytes(byte ^ 0xFF for byte in content[40:400])
    return bytes(content)


def tokenizer(**changes: object) -> bytes:
    made = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    made |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None}
    made["model"] = {"type": "WordLevel", "vocab": VOCAB, "unk_token": "<unk>"}
    return json.dumps(made | changes).encode()


def nested(key: str) -> bytes:
    return f'{{"{key}": '.encode() + b"[" * DEEP + b"]" * DEEP + b"}"


TEXT = b"words of a text " * 500
FILES: dict[str, bytes] = {
    "good.txt": TEXT,
    "odd.bin": b"abc",
    "zipped.npy": zipped(),
    "huge.npy": b"\x93NUMPY\x01\x00"
    + struct.pack("<H", 118)
    + b"{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999999999,), }".ljust(117)
    + b"\n",
    "deep.jsonl": nested("text"),
    "digits.jsonl": b'{"text": "a", "n": ' + b"9" * 9999 + b"}\n",
    "deep.json": nested("model"),
    "unended.json": tokenizer(),
    "ended/tokenizer.json": tokenizer(),
    "without.json": tokenizer(model={"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "<unk>"}),
    "broken.json": tokenizer(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]}),
    "shelf/latest.json": b"{}",
}


def of(model: Any = LLAMA, **changes: object) -> bytes:
    return json.dumps(model | changes).encode()


CONFIGS = {
    "good": (of(), ""),
    "deep": (nested("model_type"), "config/deep"),
    "typeless": (b"{}", "config/typeless"),
    "number": (of(model_type=3), "config/number"),
    "unknown": (of(model_type="gptt2"), "config/unknown"),
    "latin": (b'{"model_type": "\xe9"}', "config/latin"),
    "encoder": (of({}, model_type="bert", hidden_size=32, num_attention_heads=2), "bert attends to later tokens"),
    "kv_heads": (of(num_key_value_heads=3), "num_key_value_heads=3 does not divide num_attention_heads=2"),
    "layers": (of(num_hidden_layers=10**7), "num_hidden_layers=10000000: must be a whole number up to 10000"),
    "nested": (
        of({}, model_type="git", vision_config={"num_hidden_layers": 10**7}),
        "vision_config.num_hidden_layers=10000000: must be a whole number up to 10000",
    ),
    "wide": (of(intermediate_size=10**12), "intermediate_size=1000000000000: must be a whole number up to 67108864"),
    "pattern": (of({}, hybrid_override_pattern="M" * 3_000_000), "has 3000000 entries: must be at most 10000"),
    "zero": (of(hidden_size=0), "config/zero"),
    "word": (of(hidden_size="32"), "config/word"),
    "null": (of(hidden_size=None), "config/null"),
    "huge": (of(vocab_size=10**30), "config/huge"),
    "minus": (of(GPT2, n_head=-8), "config/minus"),
    "half": (of(GPT2, n_head=32.5), "config/half"),
    "no_words": (of(GPT2, vocab_size=0), "config/no_words"),
}
"""What a config.json has, and what is said of it."""
FILES |= {f"config/{name}/config.json": content for name, (content, _) in CONFIGS.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "pages.parquet").write_bytes(parquet())
    os.mkfifo(root / "pipe.txt")
    (root / "link").symlink_to("shelf")
    return root


def train(folder: Path, *settings: str, **how: Any) -> Ended:
    return typed("train.py", *SMALL.split(), *settings, cwd=folder, **{"env": as_torchrun(), **how})


HF = "model=hf model.name_or_path="
CASES = {
    "data.path=pipe.txt": "pipe.txt is no regular file",
    "data.path=zipped.npy": "zipped.npy is an .npz archive",
    "data.path=huge.npy": "huge.npy is no .npy file of token ids",
    "data.path=good.txt data.tokenizer=deep.json": "data.tokenizer=deep.json is no tokenizers JSON file",
    "data.path=good.txt data.tokenizer=broken.json": "data.tokenizer=broken.json is no tokenizers JSON file",
    "data.path=good.txt data.tokenizer=unended.json": "set data.separator to the token that ends a document",
    "data.path=good.txt data.tokenizer=unended.json data.separator=<unk>": """'data.separator="<unk>"'""",
    f"{HF}good.txt": "model.name_or_path=good.txt",
    **{f"{HF}config/{name}": says for name, (_, says) in CONFIGS.items() if says},
    "optim.rule=SGD optim.options={foo:1}": "optim.options",
    "optim.rule=SGD optim.options={weight_decay:1}": "optim.weight_decay",
    "optim.rule=Adam optim.options={betas:[0.9]}": "betas",
    "optim.rule=LBFGS zero.stage=0": "LBFGS",
    "offload=disk offload.disk.paths=[absent/disk]": "absent",
    "offload=disk offload.disk.paths=[good.txt]": "good.txt",
    "offload=disk offload.disk.paths=[/proc]": "/proc",
}
"""What is typed: what the line says. Kinds of files and folders: tests/data/test_corpus.py, tests/models/test_hf.py."""
WORKER = {
    "data.path=pages.parquet": "pages.parquet is no readable .parquet file",
    "data.path=deep.jsonl": "deep.jsonl line 1 is not JSON in UTF-8",
    "data.path=digits.jsonl": "digits.jsonl line 1 is not JSON",
    "data.path=good.txt data.tokenizer=without.json": "data.tokenizer=without.json cannot encode good.txt",
    "data.path=huge.npy launch.check_memory=false": "huge.npy is no .npy file of token ids",
}


@pytest.mark.product(keep=3)
@pytest.mark.parametrize("line", CASES)
def test_what_is_seen_before_training_is_refused_in_one_line(folder: Path, line: str) -> None:
    data = [] if "data.path=" in line else ["data.path=good.txt"]
    refused(train(folder, *data, *line.split()), CASES[line])


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("line", WORKER)
def test_what_a_worker_meets_is_refused_in_one_line(folder: Path, line: str) -> None:
    refused(train(folder, *line.split()), WORKER[line])


def test_a_package_that_is_not_installed_is_named_with_its_extra(folder: Path) -> None:
    """Packages that read data: tests/data/test_corpus.py."""
    ended = train(folder, *f"data.path=good.txt {HF}config/good".split(), without=["transformers"])
    refused(ended, "needs the package transformers", "pip install 'dzero[hf]'")


def test_the_launcher_refuses_as_a_worker_of_torchrun_does(folder: Path) -> None:
    line, says = [*SMALL.split(), "data.path=odd.bin"], "odd.bin: 3 bytes are no whole number of uint16 ids"
    plainly = typed("train.py", *line, "launch.workers=1", cwd=folder)
    assert refused(plainly, says) == refused(train(folder, *line), says)


@pytest.mark.product(keep=3)
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("hardware --ranks 0", "argument --ranks: '0' is no whole number of at least 1"),
        ("disk-bench --mib -1", "argument --mib: '-1' is no whole number of at least 1"),
        ("disk-bench absent", "absent: a scratch path must be a directory that exists"),
        ("inspect absent", "absent: no checkpoint is in it"),
        ("inspect link", "link: a symbolic link is not followed: name the folder itself, /"),
        ("export absent out", "absent: no checkpoint: neither manifest.json nor latest.json is in it"),
    ],
)
def test_what_an_option_cannot_be_is_told(folder: Path, command: str, says: str) -> None:
    assert says in typed("-m", "dzero", *command.split(), cwd=folder).stderr


def test_the_other_commands_refuse_the_same_inputs(folder: Path) -> None:
    for command, line, says in (
        ("plan", "data.path=zipped.npy", "zipped.npy is an .npz archive"),
        ("explain", f"{HF}config/deep", "config/deep"),
    ):
        refused(typed("-m", "dzero", command, "hardware=laptop", *line.split(), cwd=folder), says)


def test_the_end_token_is_read_beside_the_tokenizer(folder: Path) -> None:
    line = ["-m", "dzero", "explain", "hardware=laptop", "data.path=good.txt", "data.tokenizer=ended/tokenizer.json"]
    for told in ("<|im_end|>", {"content": "<|im_end|>", "lstrip": False}):
        (folder / "ended/tokenizer_config.json").write_text(json.dumps({"eos_token": told}))
        ended = typed(*line, cwd=folder)
        assert ended.returncode == 0, ended.stderr
    (folder / "ended/tokenizer_config.json").write_bytes(nested("eos_token"))
    refused(typed(*line, cwd=folder), "tokenizer_config.json is no JSON object", "data.separator")


@pytest.fixture
def closed(folder: Path) -> Iterator[Path]:
    """A folder in which nothing may be made, and a file that may not be read, until the test's end."""
    where = folder / "closed"
    where.mkdir(exist_ok=True)
    (where / "secret.txt").write_bytes(TEXT)
    (where / "secret.txt").chmod(0)
    where.chmod(0o555)
    yield where
    where.chmod(0o755)


def test_what_permissions_forbid_is_named(folder: Path, closed: Path) -> None:
    allow = "give this user access to it"
    refused(train(folder, "data.path=closed/secret.txt"), "secret.txt: Permission denied", allow)
    refused(train(closed, "data.path=../good.txt"), f"{closed}/outputs", "hydra.run.dir=FOLDER")
    disks = ["data.path=good.txt", "offload=disk", "offload.disk.paths=[closed/new]"]
    refused(train(folder, *disks), f"{folder}/closed/new: making", "Permission denied")


OUTPUTS = {
    "--picture=absent/x.png": "there is no folder absent",
    "--picture=x.gif": "the name must end with one of .png",
    "--picture=closed/x.png": "this user may not write there",
    "--tensorboard=closed/board": "this user may not write in",
    "--tensorboard=good.txt": "good.txt is no folder",
}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("option", OUTPUTS)
def test_what_a_plan_cannot_write_is_told_before_the_plan(folder: Path, closed: Path, option: str) -> None:
    ended = typed("-m", "dzero", "plan", "hardware=laptop", option, cwd=folder)
    refused(ended, option.partition("=")[2], OUTPUTS[option])
    assert not ended.stdout


def test_a_plans_picture_without_matplotlib_is_refused_before_the_plan(folder: Path) -> None:
    ended = typed("-m", "dzero", "plan", "hardware=laptop", "--picture=x.png", cwd=folder, without=["matplotlib"])
    refused(ended, "pip install 'dzero[plot]'")
    assert not ended.stdout


def test_an_interface_that_does_not_exist_is_named_beside_those_that_do(folder: Path) -> None:
    env = {**as_torchrun(), "GLOO_SOCKET_IFNAME": "eth77"}
    refused(train(folder, "data.path=good.txt", env=env), "GLOO_SOCKET_IFNAME=eth77", "['lo'")


RANKS = {
    "RANK=abc WORLD_SIZE=2": "{'RANK': 'abc'}: must be whole numbers",
    "RANK=2 WORLD_SIZE=2": "RANK=2 with WORLD_SIZE=2: a rank is less than the number of ranks",
    "RANK=1 LOCAL_RANK=1": "RANK=1 without WORLD_SIZE: torchrun sets both",
    "SLURM_STEP_NUM_TASKS=4": "SLURM_STEP_NUM_TASKS=4 without RANK: each of several processes would be a run of",
    "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=0": "LOCAL_RANK=0 with LOCAL_WORLD_SIZE=0: a rank is less",
}


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("line", RANKS)
def test_an_environment_that_names_no_rank_is_refused_in_one_line(folder: Path, line: str) -> None:
    env = dict(word.split("=") for word in line.split())
    told = refused(train(folder, "data.path=good.txt", env=env), RANKS[line], "for a run without it")
    assert told.count("\n") == 1


def test_a_rank_that_does_not_come_is_named(folder: Path) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    line = ["data.path=good.txt", "launch.timeout_s=1", "launch.check_memory=false"]
    told = refused(train(folder, *line, env=ranks | meeting))
    assert "rank 0, 2 of 3 did not come within launch.timeout_s=1\n" in told


def test_a_group_without_a_place_to_meet_is_refused_in_one_line(folder: Path) -> None:
    told = refused(train(folder, "data.path=good.txt", env={"RANK": "0", "WORLD_SIZE": "1"}))
    assert told.startswith("error: no store to meet at with RANK=0, WORLD_SIZE=1: ")
    assert told.count("\n") == 1


def test_a_working_directory_that_is_gone_is_told_in_one_line(tmp_path: Path) -> None:
    leaving = """mkdir gone && cd gone && rmdir ../gone && exec "$@" """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for words in ([str(ROOT / "train.py")], ["-m", "dzero", "plan"]):
        line = ["sh", "-c", leaving, "sh", sys.executable, *words]
        ended = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
        assert ended.stderr == "error: the working directory is gone: cd to one that exists\n"
        assert (ended.returncode, ended.stdout) == (1, "")


def test_a_scratch_folder_is_made_and_a_full_disk_without_offload_is_no_matter(folder: Path) -> None:
    sizes = ["model.hidden_size=32", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn_size=48"]
    disks = ["data.path=good.txt", "offload=disk", "offload.disk.paths=[scratch]"]
    ended = train(folder, *sizes, *disks)
    assert ended.returncode == 0, ended.stderr
    assert not any((folder / "scratch").iterdir())
    here = [f"data.path={folder}/good.txt", f"hydra.run.dir={folder}/outputs/proc"]
    ended = train(Path("/proc"), *sizes, *here)  # a file system without a free byte
    assert ended.returncode == 0, ended.stderr


def test_a_broken_file_of_a_folder_of_configurations_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [1\nb: {")
    ended = typed("train.py", "--config-dir", str(tmp_path), "--config-name", "bad", cwd=tmp_path)
    refused(ended, f'"{tmp_path}/bad.yaml", line 2')
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00a")
    ended = typed("train.py", "--config-dir", str(tmp_path), "--config-name", "bad", cwd=tmp_path)
    refused(ended, "a YAML file of the configuration is not UTF-8")
    refused(typed("train.py", "--config-dir", str(tmp_path), "+foo=1", cwd=tmp_path), "foo: unknown key")
