"""What a user gives that cannot be used is one line with its name and a repair, of whatever kind it is.

Each case is a command that is typed as a user types it, in a folder that holds the files of `FILES`. Most are typed as
torchrun starts its only worker, which looks at settings and files as the launcher's own check does, and then trains.
The other cases of a family that one case stands for are slow.
"""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import TCPStore
from typed_commands import ROOT, Ended, as_torchrun, refused, typed

SMALL = [
    "train.steps=1",
    "train.sequence_tokens=8",
    "train.microbatch_sequences=1",
    "train.evaluate_batches=0",
    "monitor.plan=false",
]
DEEP = 100_000
VOCAB = {"<unk>": 0, "<|im_end|>": 1, "a": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 64}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 256,
}


def saved(array: object) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def zipped() -> bytes:
    file = io.BytesIO()
    np.savez(file, ids=np.arange(99))
    return file.getvalue()


def parquet(flip: Callable[[bytearray], None]) -> bytes:
    """A table of texts whose bytes `flip` changed."""
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    writer.write_table(arrow.table({"text": [f"word {n} " * 20 for n in range(500)]}), file, compression="zstd")
    content = bytearray(file.getvalue())
    flip(content)
    return bytes(content)


def flip_pages(content: bytearray) -> None:
    content[40:400] = bytes(byte ^ 0xFF for byte in content[40:400])


def flip_footer(content: bytearray) -> None:
    content[-60:-20] = bytes(byte ^ 0xFF for byte in content[-60:-20])


def tokenizer(**changes: object) -> bytes:
    made = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    made |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None}
    made["model"] = {"type": "WordLevel", "vocab": VOCAB, "unk_token": "<unk>"}
    return json.dumps(made | changes).encode()


def nested(key: str) -> bytes:
    return f'{{"{key}": '.encode() + b"[" * DEEP + b"]" * DEEP + b"}"


TEXT = b"words of a text " * 500
FILES: dict[str, bytes | Callable[[], bytes]] = {
    "good.txt": TEXT,
    "good.bin": bytes(range(200)) * 20,
    "odd.bin": b"abc",
    "float.npy": saved(np.zeros(99)),
    "half.npy": saved(np.arange(4000))[:2000],
    "zipped.npy": zipped(),
    "header.npy": b"\x93NUMPY\x01\x00\xff\xff{",
    "huge.npy": b"\x93NUMPY\x01\x00"
    + struct.pack("<H", 118)
    + b"{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999999999,), }".ljust(117)
    + b"\n",
    "deep.jsonl": nested("text"),
    "keys.jsonl": b'{"body": "a"}\n',
    "digits.jsonl": b'{"text": "a", "n": ' + b"9" * 9999 + b"}\n",
    "latin.txt": "é".encode("latin-1") * 999,
    "pages.parquet": lambda: parquet(flip_pages),
    "footer.parquet": lambda: parquet(flip_footer),
    "no.parquet": b"PAR1 but no more",
    "deep.json": nested("model"),
    "list.json": b"[1]",
    "unended.json": tokenizer(),
    "ended/tokenizer.json": tokenizer(),
    "without.json": tokenizer(model={"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "<unk>"}),
    "config/kv_heads/config.json": json.dumps(LLAMA | {"num_key_value_heads": 3}).encode(),
    "config/layers/config.json": json.dumps(LLAMA | {"num_hidden_layers": 10_000_000}).encode(),
    "config/nested/config.json": b'{"model_type": "git", "vision_config": {"num_hidden_layers": 10000000}}',
    "config/wide/config.json": json.dumps(LLAMA | {"intermediate_size": 10**12}).encode(),
    "config/pattern/config.json": json.dumps({"hybrid_override_pattern": "M" * 3_000_000}).encode(),
    "broken.json": tokenizer(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]}),
    "folder/notes.md": b"no data",
    "shelf/latest.json": b"{}",
    "config/empty/config.json": b"",
    "config/deep/config.json": nested("model_type"),
    "config/list/config.json": b"[1]",
    "config/typeless/config.json": b"{}",
    "config/number/config.json": b'{"model_type": 3}',
    "config/unknown/config.json": b'{"model_type": "gptt2"}',
    "config/vision/config.json": b'{"model_type": "vit"}',
    "config/encoder/config.json": json.dumps(
        {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2}
    ).encode(),
    "config/latin/config.json": b'{"model_type": "\xe9"}',
    "config/good/config.json": json.dumps(LLAMA).encode(),
}
SIZES = {"zero": 0, "minus": -8, "word": '"32"', "null": "null", "list": "[3]", "huge": 10**30, "float": 32.5}
for name, size in SIZES.items():
    of = json.dumps(LLAMA).replace('"hidden_size": 32', f'"hidden_size": {size}')
    FILES[f"config/{name}_hidden/config.json"] = of.encode()
    of = json.dumps(GPT2).replace('"n_head": 2', f'"n_head": {size}')
    FILES[f"config/{name}_heads/config.json"] = of.encode()
    of = json.dumps(LLAMA).replace('"vocab_size": 256', f'"vocab_size": {size}')
    FILES[f"config/{name}_vocab/config.json"] = of.encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content())
    os.mkfifo(root / "pipe.txt")
    (root / "link").symlink_to("shelf")
    return root


def train(folder: Path, *settings: str, **how: Any) -> Ended:
    return typed("train.py", *SMALL, *settings, cwd=folder, **{"env": as_torchrun(), **how})


HF = "model=hf model.name_or_path="
# What is typed: what the line says.
DATA = {
    "data.path=folder": "no file below it ends in one of",
    "data.path=pipe.txt": "pipe.txt is no regular file",
    "data.path=odd.bin": "odd.bin: 3 bytes are no whole number of uint16 ids; set data.token_dtype",
    "data.path=good.bin data.token_dtype=int64 data.vocab_size=9": "good.bin",
    "data.path=float.npy": "float.npy holds float64",
    "data.path=half.npy": "half.npy is no .npy file of token ids",
    "data.path=zipped.npy": "zipped.npy is an .npz archive",
    "data.path=header.npy": "header.npy is no .npy file of token ids",
    "data.path=huge.npy": "huge.npy is no .npy file of token ids",
    "data.path=good.txt data.tokenizer=list.json": "data.tokenizer=list.json is no tokenizers JSON file",
    "data.path=good.txt data.tokenizer=deep.json": "data.tokenizer=deep.json is no tokenizers JSON file",
    "data.path=good.txt data.tokenizer=broken.json": "data.tokenizer=broken.json is no tokenizers JSON file",
    "data.path=good.txt data.tokenizer=folder": "data.tokenizer=folder",
    "data.path=good.txt data.tokenizer=unended.json": "set data.separator to the token that ends a document",
    "data.path=good.txt data.tokenizer=unended.json data.separator=<unk>": """'data.separator="<unk>"'""",
}
MODELS = {
    f"{HF}config/empty": "config/empty",
    f"{HF}config/deep": "config/deep",
    f"{HF}config/list": "config/list",
    f"{HF}config/typeless": "config/typeless",
    f"{HF}config/number": "config/number",
    f"{HF}config/unknown": "config/unknown",
    f"{HF}config/vision": "config/vision",
    f"{HF}config/encoder": "config/encoder: bert attends to later tokens",
    f"{HF}bert": "model.name_or_path=bert: bert attends to later tokens",
    f"{HF}config/kv_heads": "num_key_value_heads=3 does not divide num_attention_heads=2",
    f"{HF}config/layers": "num_hidden_layers=10000000: must be a whole number up to 10000",
    f"{HF}config/nested": "vision_config.num_hidden_layers=10000000: must be a whole number up to 10000",
    f"{HF}config/wide": "intermediate_size=1000000000000: must be a whole number up to 67108864",
    f"{HF}config/pattern": "hybrid_override_pattern has 3000000 entries: must be at most 10000",
    f"{HF}config/latin": "config/latin",
    f"{HF}folder": "the folder has no config.json",
    f"{HF}good.txt": "model.name_or_path=good.txt",
    f"{HF}no/such": "model.name_or_path=no/such: no such folder",
    f"{HF}nosuchtype": "nothing is downloaded",
    **{f"{HF}config/{name}_hidden": f"config/{name}_hidden" for name in SIZES},
    **{f"{HF}config/{name}_heads": f"config/{name}_heads" for name in SIZES},
    **{f"{HF}config/{name}_vocab": f"config/{name}_vocab" for name in SIZES},
}
RULES = {
    "optim.rule=SGD optim.options={foo:1}": "optim.options",
    "optim.rule=SGD optim.options={weight_decay:1}": "optim.weight_decay",
    "optim.rule=SGD optim.options={momentum:-1}": "momentum",
    "optim.rule=Adam optim.options={betas:[2,3]}": "betas",
    "optim.rule=Adam optim.options={betas:[0.9]}": "betas",
    "optim.rule=Adam optim.options={capturable:true}": "capturable",
    "optim.rule=LBFGS zero.stage=0": "LBFGS",
}
DISKS = {
    "offload=disk offload.disk.paths=[absent/disk]": "absent",
    "offload=disk offload.disk.paths=[good.txt]": "good.txt",
    "offload=disk offload.disk.paths=[/proc]": "/proc",
}
CASES = {**DATA, **MODELS, **RULES, **DISKS}


FIRST = {
    "data.path=odd.bin",
    "data.path=zipped.npy",
    "data.path=huge.npy",
    "data.path=good.txt data.tokenizer=unended.json",
    f"{HF}config/deep",
    f"{HF}config/typeless",
    f"{HF}config/zero_hidden",
    f"{HF}config/word_hidden",
    f"{HF}config/huge_vocab",
    f"{HF}config/encoder",
    "optim.rule=SGD optim.options={foo:1}",
    "optim.rule=Adam optim.options={betas:[0.9]}",
    "optim.rule=LBFGS zero.stage=0",
    "offload=disk offload.disk.paths=[absent/disk]",
    "offload=disk offload.disk.paths=[/proc]",
}
WORKER = {
    "data.path=deep.jsonl": "deep.jsonl line 1 is not JSON in UTF-8",
    "data.path=pages.parquet": "pages.parquet is no readable .parquet file",
    "data.path=footer.parquet": "footer.parquet is no readable .parquet file",
    "data.path=keys.jsonl": "data.field=text: keys.jsonl line 1 has no such key, it has keys ['body']; choose one",
    "data.path=digits.jsonl": "digits.jsonl line 1 is not JSON",
    "data.path=latin.txt data.tokenizer=unended.json data.separator='<unk>'": "latin.txt is not UTF-8",
    "data.path=good.txt data.tokenizer=without.json": "data.tokenizer=without.json cannot encode good.txt",
    "data.path=huge.npy launch.check_memory=false": "huge.npy is no .npy file of token ids",
}
FIRST_OF_WORKER = ["data.path=pages.parquet"]
WITHOUT = {
    "transformers": ("pip install 'dzero[hf]'", f"data.path=good.txt {HF}config/good"),
    "tokenizers": ("pip install 'dzero[data]'", "data.path=good.txt data.tokenizer=unended.json"),
    "pyarrow": ("pip install 'dzero[data]'", "data.path=no.parquet"),
    "datasets": ("pip install 'dzero[data]'", "data.name=./folder"),
}


def slow(cases: Iterable[str], first: Collection[str]) -> list[Any]:
    """The cases as parameters, those that are not in `first` marked slow."""
    return [pytest.param(each, marks=() if each in first else pytest.mark.slow) for each in cases]


@pytest.mark.product(keep=3)
@pytest.mark.parametrize("line", slow(CASES, FIRST))
def test_what_is_seen_before_training_is_refused_in_one_line(folder: Path, line: str) -> None:
    data = [] if "data.path=" in line else ["data.path=good.txt"]
    refused(train(folder, *data, *line.split()), CASES[line])


@pytest.mark.parametrize("line", slow(WORKER, FIRST_OF_WORKER))
def test_what_a_worker_meets_is_refused_in_one_line(folder: Path, line: str) -> None:
    refused(train(folder, *line.split()), WORKER[line])


@pytest.mark.parametrize("package", slow(WITHOUT, ["transformers"]))
def test_a_package_that_is_not_installed_is_named_with_its_extra(folder: Path, package: str) -> None:
    repair, line = WITHOUT[package]
    refused(train(folder, *line.split(), without=[package]), f"needs the package {package}", repair)


def test_the_launcher_refuses_as_a_worker_of_torchrun_does(folder: Path) -> None:
    line, says = [*SMALL, "data.path=odd.bin"], "odd.bin: 3 bytes are no whole number of uint16 ids"
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


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("command", ["plan", "explain"])
def test_the_other_commands_refuse_the_same_inputs(folder: Path, command: str) -> None:
    line = ["-m", "dzero", command, "hardware=laptop"]
    assert not refused(typed(*line, "data.path=zipped.npy", cwd=folder), ".npz archive").count("\n") > 1
    refused(typed(*line, *f"{HF}config/deep".split(), cwd=folder), "config/deep")


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
    "--picture=x.gif": "the name must end with one of .png",
    "--picture=absent/x.png": "there is no folder absent",
    "--picture=closed/x.png": "this user may not write there",
    "--tensorboard=closed/board": "this user may not write in",
    "--tensorboard=good.txt": "good.txt is no folder",
}


@pytest.mark.parametrize("option", slow(OUTPUTS, ["--picture=absent/x.png"]))
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
    "RANK=0 WORLD_SIZE=two": "{'WORLD_SIZE': 'two'}: must be whole numbers",
    "RANK=2 WORLD_SIZE=2": "RANK=2 with WORLD_SIZE=2: a rank is less than the number of ranks",
    "RANK=1 LOCAL_RANK=1": "RANK=1 without WORLD_SIZE: torchrun sets both",
    "OMPI_COMM_WORLD_SIZE=2": "OMPI_COMM_WORLD_SIZE=2 without RANK: each of several processes would be a run of",
    "SLURM_STEP_NUM_TASKS=4": "SLURM_STEP_NUM_TASKS=4 without RANK: each of several processes would be a run of",
    "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=0": "LOCAL_RANK=0 with LOCAL_WORLD_SIZE=0: a rank is less",
}


@pytest.mark.parametrize("line", slow(RANKS, ["RANK=abc WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=2"]))
def test_an_environment_that_names_no_rank_is_refused_in_one_line(folder: Path, line: str) -> None:
    env = dict(word.split("=") for word in line.split())
    told = refused(train(folder, "data.path=good.txt", env=env), RANKS[line], "for a run without it")
    assert told.count("\n") == 1


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("here", "missing"), [(0, "1, 2"), (1, "0, 2")])
def test_a_rank_that_does_not_come_is_named(folder: Path, here: int, missing: str) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = {"RANK": str(here), "LOCAL_RANK": str(here), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    line = ["data.path=good.txt", "launch.timeout_s=1", "launch.check_memory=false"]
    told = refused(train(folder, *line, env=ranks | meeting))
    assert f"rank {missing} of 3 did not come within launch.timeout_s=1\n" in told


def test_a_group_without_a_place_to_meet_is_refused_in_one_line(folder: Path) -> None:
    told = refused(train(folder, "data.path=good.txt", env={"RANK": "0", "WORLD_SIZE": "1"}))
    assert told.startswith("error: no store to meet at with RANK=0, WORLD_SIZE=1: ")
    assert told.count("\n") == 1


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("words", [["train.py"], ["-m", "dzero", "plan"]], ids=["train", "plan"])
def test_a_working_directory_that_is_gone_is_told_in_one_line(words: list[str], tmp_path: Path) -> None:
    leaving = """mkdir gone && cd gone && rmdir ../gone && exec "$@" """
    command = [str(ROOT / "train.py") if words == ["train.py"] else words[0], *words[1:]]
    line = ["sh", "-c", leaving, "sh", sys.executable, *command]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
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
