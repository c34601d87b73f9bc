"""Table of the settings that do not go together, for configurations, the library and plans alike.

Each configuration checks itself, `RunConfig` checks all of them together, and `Layout.of` checks what `dzero.shard` was
given together with the mesh. All call `check_compatible` with what they know; a rule waits until all of its settings
are known.

Sizes that ranks must divide are checked in parallel/divisibility.py, numbers of ranks in mesh_config.py, and keys that
a kind of model or a source of data does not use in models/config.py and data/config.py.
"""

from __future__ import annotations

from math import gcd

from dzero.utils.ranges import divisors
from dzero.utils.rules import IncompatibleError, Rule, Settings, shown

FACTS = {
    "auto": "zero=auto",
    "axis.replicate": "mesh axis replicate of size {}",
    "axis.shard": "mesh axis shard of size {}",
    "data.source": "data from {}",
    "device": "the device {}",
    "grad.dtype": "gradients stored in {}",
    "offload.uses_disk": "nothing on disk",
    "optim.needs": "",
    "param.fused": "parameter {}, which is cut in several places",
    "params.frozen": "only trained parameters",
    "params.quantized": "no frozen matrix of a block with rows of whole blocks of 64 elements",
    "step.readers": "{} data-parallel ranks",
}
"""Phrase of each derived fact in messages, with `{}` for its value."""
KINDS = ("param", "grad", "master", "moments")
RANKS = ("mesh.dp", "mesh.replicate", "mesh.cp", "launch.workers")
FOLLOWS_FROM = {
    "auto": ("zero.stage",),
    "axis.replicate": (*RANKS, "zero.stage"),
    "axis.shard": (*RANKS, "zero.stage"),
    "data.source": ("data.kind", "data.path", "data.paths", "data.name"),
    "device": ("launch.device",),
    "grad.dtype": ("precision.grad", "precision.param"),
    "offload.uses_disk": tuple(f"offload.{kind}" for kind in KINDS),
    "optim.needs": ("optim.rule",),
    "param.fused": ("model.name_or_path",),
    "params.frozen": ("adapter.kind",),
    "params.quantized": ("adapter.kind",),
    "step.readers": RANKS,
}
"""Settings that each fact follows from, apart from the machine."""
OVER_SHARDS, OVER_REPLICAS = "zero.optimizer_shard_axes=[shard]", "zero.optimizer_shard_axes=[replicate,shard]"
IMPORT = "model=tiny_moe model.weights=FOLDER"
LORA, NO_ADAPTERS = "adapter.kind=lora", "adapter.kind=none"
OF_A_FOLDER = "adapter=lora model=hf model.name_or_path=gpt2 model.weights=true"
ELEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1, "int4": 0.5}


def idle(key: str, where: str, why: str, take: str, example: str) -> Rule:
    """Return the rule that the setting `key` has no effect `where` these conditions hold."""
    return Rule(f"{key} {where}", why, take, example, idle=True)


def _inner_divisors(run: Settings) -> list[int]:
    return divisors(run["axis.shard"])[1:-1]


def _summed_over(run: Settings) -> int:
    """Return the size of the axis over which `zero.node_ranks` divides the ranks."""
    return int(run["axis.shard"] if run["axis.shard"] > 1 else run["axis.replicate"])


def _node_rankss(run: Settings) -> str:
    inner = divisors(_summed_over(run))[1:-1]
    return f"zero.node_ranks=null or a divisor between: {inner}" if inner else "zero.node_ranks=null"


def _reshard_values(run: Settings) -> str:
    inner = _inner_divisors(run)
    return f"true, false or a divisor between: {inner}" if inner else "true or false"


def _one_tier(run: Settings) -> bool:
    """Return whether masters and moments have one tier and one fraction."""
    return all(run[f"offload.master{each}"] == run[f"offload.moments{each}"] for each in ("", "_fraction"))


def _one_tier_of(run: Settings) -> str:
    """Return what gives masters and moments one tier and one fraction."""
    parts = [part for part in ("", "_fraction") if run[f"offload.master{part}"] != run[f"offload.moments{part}"]]
    as_one, as_other = (
        " and ".join(f"offload.{kind}{part}={shown(run[f'offload.{other}{part}'])}" for part in parts)
        for kind, other in (("moments", "master"), ("master", "moments"))
    )
    return f"{as_one}, or {as_other}"


def _at_once(run: Settings) -> int:
    """Return the sequences of one microbatch on all ranks that read data."""
    return int(run["train.microbatch_sequences"] * run["step.readers"])


def _product(run: Settings) -> str:
    """Return what makes `train.global_sequences`: microbatches in a step, or smaller ones."""
    wanted, readers = run["train.global_sequences"], run["step.readers"]
    ways = []
    if wanted % _at_once(run) == 0:
        ways.append(f"train.accumulate=null, from which {wanted // _at_once(run)} follow")
    if (times := run["train.accumulate"]) is not None and wanted % (readers * times) == 0:
        ways.append(f"train.microbatch_sequences={wanted // (readers * times)}")
    if ways:
        return ", or ".join(ways)
    if wanted % readers:
        return f"train.global_sequences as a multiple of {readers}, which each rank has a part of"
    fits = gcd(wanted // readers, run["train.microbatch_sequences"])
    return f"train.microbatch_sequences={fits}, or train.global_sequences as a multiple of {_at_once(run)}"


def _shared_by(run: Settings) -> str:
    """Return the numbers of ranks that experts can be shared by, so that groups of tensor parallelism stay whole."""
    allowed = [each for each in divisors(run["model.experts"]) if each % run["mesh.tp"] == 0]
    return f"mesh.ep={allowed[0]} (of {allowed}), or mesh.tp=1" if allowed else "mesh.tp=1"


MESH = (
    idle("mesh.cp_attention", "mesh.cp=1", "", "", "mesh.cp_attention=ring"),
    idle("mesh.pp_schedule", "mesh.pp=1", "", "", "mesh.pp_schedule=gpipe"),
    idle("mesh.pp_stages_per_rank", "mesh.pp=1", "", "", "mesh.pp_stages_per_rank=2"),
    idle(
        "mesh.replicate",
        "zero.stage=0",
        "which replicates over all ranks",
        "zero.stage=1, 2 or 3",
        "zero.stage=0 mesh.replicate=2",
    ),
    Rule(
        "mesh.pp_stages_per_rank>1 mesh.pp_schedule=1f1b|gpipe",
        "these schedules have one pipeline stage on a rank",
        "mesh.pp_stages_per_rank=1, or mesh.pp_schedule=interleaved or zero_bubble",
        "mesh.pp=2 mesh.pp_stages_per_rank=2 mesh.pp_schedule=1f1b",
    ),
    Rule(
        "mesh.pp_stages_per_rank=1 mesh.pp_schedule=interleaved|zero_bubble",
        "these schedules order several pipeline stages on a rank",
        "mesh.pp_stages_per_rank=2, or mesh.pp_schedule=1f1b or gpipe",
        "mesh.pp=2 mesh.pp_stages_per_rank=1 mesh.pp_schedule=interleaved",
    ),
    Rule("auto=true mesh.pp>1", "nothing is chosen for a pipeline", "a zero.stage", "zero=auto mesh.pp=2"),
    Rule(
        "mesh.cp>1 mesh.pp>1 model.kind=hf",
        "transformers counts positions by the input of a pipeline stage, which is a part of the sequences",
        "mesh.cp=1, mesh.pp=1, or model.kind=llama",
        "model=hf model.name_or_path=gpt2 mesh.cp=2 mesh.pp=2",
    ),
    Rule(
        "mesh.pp>1 mesh.tp>1 model.kind=hf",
        "transformers counts positions by the input of a pipeline stage, which is cut",
        "mesh.pp=1, mesh.tp=1, or model.kind=llama",
        "model=hf model.name_or_path=gpt2 mesh.pp=2 mesh.tp=2",
    ),
)
EXPERTS = (
    Rule(
        "mesh.ep>1 model.kind!=moe",
        "only the experts of model.kind=moe (model=tiny_moe) are shared",
        "mesh.ep=1",
        "mesh.ep=2",
    ),
    Rule(
        "mesh.ep mesh.tp>1 model.kind=moe",
        "ranks of tp have tokens of their own between blocks and share experts as others do, so mesh.ep counts them",
        _shared_by,
        "model=tiny_moe mesh.tp=2 mesh.ep=1",
        also=lambda run: run["mesh.ep"] % run["mesh.tp"] != 0,
    ),
    Rule(
        "mesh.ep>1 model.experts!=null",
        "as many experts are no multiple of the ranks that share them",
        lambda run: f"mesh.ep as one of {divisors(run['model.experts'])}",
        "model=tiny_moe mesh.ep=3",
        also=lambda run: run["model.experts"] % run["mesh.ep"] != 0,
    ),
    Rule(
        "block.activation_checkpoint=selective mesh.ep>1",
        "it cannot compute again what gathers experts inside a block",
        "block.activation_checkpoint=full or none",
        "model=tiny_moe mesh.ep=2 block.activation_checkpoint=selective",
    ),
    Rule(
        "block.compile=true mesh.ep>1",
        "tokens leave a block for other ranks, which ends compiled code there",
        "block.compile=null or false",
        "model=tiny_moe mesh.ep=2 block.compile=true",
    ),
    idle(
        "model.balance_rate", "model.balance=none", "", "", "model=tiny_moe model.balance=none model.balance_rate=0.1"
    ),
    *(
        Rule(f"model.weights!=false {where}", f"of mixtures only Mixtral is read, {why}", take, f"{IMPORT} {example}")
        for where, why, take, example in (
            ("model.scores=sigmoid", "which scores experts by softmax", "model.scores=softmax", ""),
            ("model.top_k=1", "which weighs one expert with 1", "model.top_k=2", "model.scores=softmax model.top_k=1"),
            ("model.shared_experts>0", "which has none", "model.shared_experts=0", "model.scores=softmax"),
            (
                "model.kind=moe model.balance=null|auxiliary-loss-free",
                "which has no bias for the choice of experts",
                "model.balance=loss",
                "model.scores=softmax model.shared_experts=0",
            ),
        )
    ),
)
STATES = (
    idle(
        "zero.reshard_after_forward",
        "zero.stage!=3",
        "which keeps unsharded parameters from forward to backward",
        "zero.stage=3",
        "zero.stage=2 zero.reshard_after_forward=false",
    ),
    Rule("zero.stage=0 axis.shard>1", "it replicates everything", "a mesh of replicate=<world size>", ""),
    Rule(
        "zero.reshard_after_forward!=true|false axis.shard",
        "parameters are resharded over a part of the axis",
        _reshard_values,
        "zero.stage=3 zero.reshard_after_forward=3 mesh.dp=4",
        also=lambda run: run["zero.reshard_after_forward"] not in _inner_divisors(run),
    ),
    *(
        Rule(
            f"zero.reshard_after_forward!=true|false {axis}>1",
            "FSDP2 keeps no second copy of parameters that are cut along another axis",
            "zero.reshard_after_forward=true or false",
            f"model={model} {axis}=2 mesh.dp=4 zero.stage=3 zero.reshard_after_forward=2",
        )
        for axis, model in (("mesh.tp", "tiny"), ("mesh.ep", "tiny_moe"))
    ),
    idle(
        "zero.optimizer_shard_axes",
        "zero.stage=0",
        "which shards nothing",
        "zero.stage=1, 2 or 3 with mesh.replicate=2 or more",
        "zero.stage=0 mesh.dp=2 zero.optimizer_shard_axes=[replicate,shard]",
    ),
    *(
        idle(
            "zero.optimizer_shard_axes",
            f"{axis}=1",
            "since it shards the states of a shard over its replicas",
            take,
            example,
        )
        for axis, take, example in (
            ("axis.replicate", "mesh.replicate=2 or more", f"{OVER_REPLICAS} mesh.dp=2"),
            ("axis.shard", "a smaller mesh.replicate", f"{OVER_REPLICAS} mesh.dp=2 mesh.replicate=2"),
        )
    ),
    *(
        Rule(
            f"{OVER_REPLICAS} {axis}>1",
            "states that three axes cut are not built",
            f"{OVER_SHARDS}",
            f"model={model} {OVER_REPLICAS} {axis}=2 mesh.dp=4 mesh.replicate=2",
        )
        for axis, model in (("mesh.tp", "tiny"), ("mesh.pp", "tiny"), ("mesh.ep", "tiny_moe"))
    ),
    Rule(
        "precision.master=remainder precision.param!=bf16",
        "the remainder is the low half of an fp32 value whose high half is the bf16 parameter",
        "precision.master=fp32",
        "precision.master=remainder precision.param=fp32",
    ),
    Rule(
        "precision.grad!=auto|fp32 precision.param",
        "gradients have the dtype of parameters, or fp32",
        lambda run: f"precision.grad=auto, fp32 or {run['precision.param']}",
        "precision.grad=fp16 precision.param=bf16",
        also=lambda run: run["precision.grad"] != run["precision.param"],
    ),
    Rule(
        "precision.grad!=auto|fp32 axis.replicate>1 axis.shard>1",
        "hybrid sharding keeps fp32 gradients between its two hops",
        "precision.grad=auto or fp32",
        "precision.grad=bf16 precision.param=bf16 mesh.dp=4 mesh.replicate=2",
    ),
    Rule(
        "precision.reduce!=auto grad.dtype",
        "the payload is wider than the gradients that it would carry",
        "precision.grad=fp32 as well, or precision.reduce=auto",
        "precision.reduce=fp32 precision.param=bf16 precision.grad=bf16",
        also=lambda run: ELEM_BYTES[run["precision.reduce"]] > ELEM_BYTES[run["grad.dtype"]],
    ),
    Rule(
        "precision.moments=int8 offload.moments offload.master offload.moments_fraction offload.master_fraction",
        "8-bit moments are decoded where the update runs, so both need one tier and one fraction",
        _one_tier_of,
        "precision.moments=int8 offload.moments=host offload.master=device",
        also=lambda run: not _one_tier(run),
    ),
    Rule("precision.moments=int8 param.fused", "a block would mix the cuts", "precision.moments=bf16", ""),
)
IN_BLOCKS = "precision.reduce=int8|int4|fp8"
WIRE = (
    idle("precision.gather", "axis.shard=1", "over which nothing is gathered", "", "mesh.dp=1 precision.gather=int8"),
    Rule(
        "precision.fetch offload.param=device offload.frozen=device|null",
        "where parameters stay on the device",
        "offload.param=host",
        "zero.stage=3 precision.fetch=fp8",
        also=lambda run: not run.values.get("auto", False),  # which chooses the tier
        idle=True,
    ),
    *(
        Rule(
            f"precision.fetch!=param offload.{kind}=disk",
            "what is loaded from disk is copied as it is stored",
            f"precision.fetch=param, or offload.{kind}=host",
            f"{example} precision.fetch=fp8 offload.{kind}=disk",
        )
        for kind, example in (
            ("param", "zero.stage=3 offload.master=disk offload.moments=disk offload.grad=disk"),
            ("frozen", f"{OF_A_FOLDER} zero.stage=3"),
        )
    ),
    idle(
        "precision.feedback",
        "precision.reduce!=int8|int4|fp8",
        "which does not round gradients to blocks",
        "precision.reduce=int8, int4 or fp8",
        "precision.feedback=true",
    ),
    Rule(
        "precision.feedback=true precision.param=fp16",
        "what is left of one loss scale would be added at another",
        "precision.param=bf16, or precision.feedback=false",
        "mesh.dp=2 precision.feedback=true precision.reduce=int8 precision.param=fp16",
    ),
    Rule(
        f"{IN_BLOCKS} axis.shard=1",
        "blocks are summed where gradients are sharded over several ranks",
        "precision.reduce=auto, or zero.stage=1, 2 or 3 over more ranks",
        "mesh.dp=1 precision.reduce=int8",
    ),
    Rule(
        f"{IN_BLOCKS} axis.replicate>1 axis.shard>1",
        "sums over replicas are not in blocks",
        "mesh.replicate=1, with zero.node_ranks=<ranks of a node> for two hops, or precision.reduce=auto",
        "mesh.dp=4 mesh.replicate=2 precision.reduce=int4",
    ),
    Rule(
        f"{IN_BLOCKS} zero.reduction=native",
        "a backend sums elements of a dtype",
        "zero.reduction=auto or exact",
        "mesh.dp=2 precision.reduce=int8 zero.reduction=native",
    ),
    idle(
        "zero.node_ranks",
        "zero.reduction=native",
        "where the backend chooses the route",
        "zero.reduction=auto or exact",
        "mesh.dp=4 zero.node_ranks=2 zero.reduction=native",
    ),
    Rule(
        "zero.node_ranks!=null axis.shard axis.replicate",
        "groups of as many ranks do not divide the ranks that sum",
        _node_rankss,
        "mesh.dp=4 zero.node_ranks=3",
        also=lambda run: run["zero.node_ranks"] not in divisors(_summed_over(run))[1:-1],
    ),
    *(
        Rule(
            f"{setting} mesh.ep>1",
            "experts are summed over other ranks than the rest of the model",
            take,
            f"model=tiny_moe mesh.ep=2 mesh.dp=4 {example}",
        )
        for setting, take, example in (
            (IN_BLOCKS, "precision.reduce=auto", "precision.reduce=int8"),
            ("zero.node_ranks!=null", "zero.node_ranks=null", "zero.node_ranks=2"),
        )
    ),
)
FROZEN = (
    *(
        idle(key, NO_ADAPTERS, "which trains every parameter", "adapter=lora", f"{key}={value}")
        for key, value in (("precision.frozen", "nf4"), ("offload.frozen", "host"))
    ),
    idle("offload.frozen", "params.frozen=false", "", "", ""),
    idle("precision.frozen", "params.quantized=false", "", "precision.frozen=param", ""),
    Rule(
        "precision.frozen!=param adapter.use_dora=true",
        "the norms of rows would start from weights before they are quantized",
        "adapter.use_dora=false, or precision.frozen=param",
        f"{OF_A_FOLDER} precision.frozen=nf4 adapter.use_dora=true",
    ),
    Rule(
        "offload.frozen!=device|null zero.stage=1|2",
        "only stages 0 and 3 free parameters after use",
        "zero.stage=3, or offload.frozen=device",
        f"{OF_A_FOLDER} zero.stage=2 offload.frozen=host",
    ),
    *(
        Rule(
            f"{key} {where}",
            why,
            take,
            f"{OF_A_FOLDER} zero.stage=3 {given} {example}",
        )
        for key, given, take in (
            ("offload.frozen!=device|null", "offload.frozen=host", "offload.frozen=device"),
            ("precision.frozen!=param", "precision.frozen=nf4", "precision.frozen=param"),
        )
        for where, why, example in (
            (
                "zero.reshard_after_forward!=true|false",
                "FSDP2 keeps a second copy, which it makes of parameters as they are used",
                "zero.reshard_after_forward=2 mesh.dp=4",
            ),
            ("mesh.tp>1", "FSDP2 takes parameters that are cut along another axis as they are", "mesh.tp=2"),
        )
    ),
    *(
        Rule(f"{key} mesh.ep>1", "experts that ranks share are taken as they are", take, "")
        for key, take in (
            ("offload.frozen!=device|null", "offload.frozen=device"),
            ("precision.frozen!=param", "precision.frozen=param"),
        )
    ),
)
FLOAT8 = (
    idle(
        "precision.fp8_exclude",
        "precision.compute=param",
        "",
        "precision.compute=fp8_rowwise",
        "precision.fp8_exclude=[layers.0.*]",
    ),
    Rule(
        "precision.compute!=param precision.param!=bf16",
        "torchao's recipes are for models that compute in bf16 between the products",
        "precision.param=bf16, or precision.compute=param",
        "precision.compute=fp8_rowwise precision.param=fp32",
    ),
    Rule(
        "precision.compute!=param mesh.pp_schedule=zero_bubble",
        "torchao's layers compute both gradients at once, of which it puts one off",
        "another schedule, or precision.compute=param",
        "precision.compute=fp8_rowwise mesh.pp=2 mesh.pp_schedule=zero_bubble",
    ),
    Rule(
        "precision.compute!=param mesh.tp>1 adapter.kind=lora",
        "scales of frozen matrices that ranks share were never tried",
        "mesh.tp=1, or precision.compute=param",
        f"{OF_A_FOLDER} precision.compute=fp8_rowwise mesh.tp=2",
    ),
)
OFFLOAD = (
    *(
        idle(f"offload.{kind}_fraction", f"offload.{kind}=device", "", "", f"offload.{kind}_fraction=0.5")
        for kind in KINDS
    ),
    idle(
        "offload.overlap", "offload.master=device", "where updates run", "offload.master=host", "offload.overlap=step"
    ),
    idle("offload.undo_bytes", "offload.overlap!=backward", "", "", "offload=host offload.undo_bytes=1"),
    idle("offload.delay_warmup_steps", "offload.overlap!=delayed", "", "", "offload=host offload.delay_warmup_steps=1"),
    idle("offload.prefetch_units", "offload.uses_disk=false", "", "", "offload=host offload.prefetch_units=3"),
    idle("offload.disk", "offload.uses_disk=false", "", "", "offload=host offload.disk.threads=3"),
    Rule(
        "offload.param!=device offload.master=device",
        "a parameter leaves the device with its master, which is larger",
        "offload.master=host",
        "zero.stage=3 offload.param=host offload.master=device",
    ),
    Rule(
        "offload.param!=device offload.param_fraction offload.master_fraction",
        "a parameter leaves the device with its master, which is larger",
        "offload.master_fraction ≥ offload.param_fraction",
        "zero.stage=3 offload.param=host offload.master=host offload.master_fraction=0.5",
        also=lambda run: bool(run["offload.param_fraction"] > run["offload.master_fraction"]),
    ),
    *(
        Rule(
            f"offload.overlap=backward offload.{kind}=device",
            "units are updated on the host while gradients are still arriving",
            f"offload.{kind}=host or disk",
            f"offload=host offload.overlap=backward offload.{kind}=device",
        )
        for kind in ("grad", "moments")
    ),
    Rule(
        "offload.overlap=backward|delayed offload.master=disk precision.param=fp32",
        "new weights wait on the host, but fp32 parameters are their own masters, which go back to disk at once",
        "offload.overlap=forward, or precision.param=bf16",
        "offload=disk offload.overlap=backward precision.param=fp32",
    ),
    Rule(
        "offload.overlap=backward|delayed mesh.pp>1",
        "tied parameters and norms need the gradients of all pipeline stages",
        "offload.overlap=forward or step",
        "offload=host offload.overlap=backward mesh.pp=2",
    ),
    Rule(
        f"offload.overlap=backward|delayed {OVER_REPLICAS}",
        "a unit's new values travel between ranks as soon as it is updated, and cannot wait or be taken back",
        "offload.overlap=forward or step",
        f"offload=host offload.overlap=backward {OVER_REPLICAS} mesh.dp=4 mesh.replicate=2",
    ),
    Rule(
        "offload.param!=device zero.stage!=3",
        "only stage 3 frees gathered parameters after use",
        "zero.stage=3, or offload.param=device",
        "zero.stage=2 offload=host offload.param=host",
    ),
    Rule(
        "offload.param!=device zero.reshard_after_forward!=true|false",
        "FSDP2 keeps a second copy on the device and does not let it come from elsewhere",
        "zero.reshard_after_forward=true",
        "zero.stage=3 offload=host_all zero.reshard_after_forward=2 mesh.dp=4",
    ),
    Rule(
        f"offload.param!=device {OVER_REPLICAS}",
        "new values come from other ranks to the device",
        "offload.param=device, other states may leave it",
        f"zero.stage=3 offload=host_all {OVER_REPLICAS} mesh.dp=4 mesh.replicate=2",
    ),
    *(
        Rule(
            f"offload.param!=device {axis}>1",
            "FSDP2 takes parameters that are cut along another axis from the device only",
            "offload.param=device, other states may leave it",
            f"model={model} {axis}=2 zero.stage=3 offload=host_all",
        )
        for axis, model in (("mesh.tp", "tiny"), ("mesh.ep", "tiny_moe"))
    ),
    Rule(
        "offload.activations!=device block.activation_checkpoint=none",
        "only what a block keeps of its inputs leaves the device, the smallest part of what it keeps without "
        "checkpointing",
        "block.activation_checkpoint=full, or offload.activations=device",
        "offload.activations=host block.activation_checkpoint=none",
    ),
    Rule(
        "offload.activations!=device mesh.pp>1",
        "a pipeline runs the backward of its oldest microbatch first, and activations come back in the order in which "
        "the newest went",
        "offload.activations=device",
        "offload.activations=host block.activation_checkpoint=full mesh.pp=2",
    ),
    Rule(
        "offload.activations!=device mesh.ep>1",
        "what blocks with experts keep was never tried off the device",
        "offload.activations=device",
        "offload.activations=host block.activation_checkpoint=full model=tiny_moe mesh.ep=2",
    ),
)
BLOCKS = (
    Rule(
        "block.activation_checkpoint=selective block.tiles>1",
        "what it computes again gathers all tiles of a block at once",
        "block.activation_checkpoint=full, which recomputes tile by tile, or none",
        "block.activation_checkpoint=selective block.tiles=2",
    ),
    Rule(
        "block.compile=true block.tiles>1",
        "a tile is gathered inside its block, which ends compiled code there",
        "block.compile=null or false",
        "block.compile=true block.tiles=2",
    ),
    Rule(
        "block.compile=true zero.unit_bytes!=null",
        "a part of a block is gathered inside it, which ends compiled code there",
        "block.compile=null or false",
        "block.compile=true zero.unit_bytes=1000000",
    ),
    Rule(
        "zero.unit_bytes!=null zero.unused=zeros",
        "a part of a block that only some ranks run would be gathered by these alone",
        "zero.unit_bytes=null, or zero.unused=agree",
        "zero.unit_bytes=1000000 zero.unused=zeros",
    ),
    Rule("block.tiles>1 model.kind=moe", "experts are not cut", "block.tiles=1", "model=tiny_moe block.tiles=2"),
    Rule(
        "block.tiles>1 mesh.tp>1",
        "tiles are cut out of whole matrices",
        "block.tiles=1, since tensor parallelism makes operators smaller too",
        "block.tiles=2 mesh.tp=2",
    ),
    Rule(
        "block.tiles>1 mesh.pp>1",
        "tiles and pipeline stages are not cut out of one model yet",
        "block.tiles=1",
        "block.tiles=2 mesh.pp=2",
    ),
    Rule(
        "block.embedding_tiles>1 model.tied=true",
        "the head reads the whole of the matrix that both share",
        "block.embedding_tiles=1, or model.tied=false",
        "block.embedding_tiles=2 model.tied=true",
    ),
    Rule(
        "block.embedding_tiles>1 mesh.tp>1",
        "the embedding is cut along the vocabulary already",
        "block.embedding_tiles=1",
        "block.embedding_tiles=2 model.tied=false mesh.tp=2",
    ),
    Rule(
        "block.embedding_tiles>1 mesh.pp>1",
        "tiles and pipeline stages are not cut out of one model yet",
        "block.embedding_tiles=1",
        "block.embedding_tiles=2 model.tied=false mesh.pp=2",
    ),
    *(
        Rule(
            f"block.{key}>1 {OVER_REPLICAS}",
            "the states of a tile are not cut over replicas",
            f"block.{key}=1, or {OVER_SHARDS}",
            f"block.{key}=2 model.tied=false {OVER_REPLICAS} mesh.dp=4 mesh.replicate=2",
        )
        for key in ("tiles", "loss_tiles", "embedding_tiles")
    ),
    *(
        Rule(
            f"{key}{values} mesh.pp_schedule=zero_bubble",
            why,
            f"{key}={take}, or another schedule",
            f"{example} mesh.pp=2 mesh.pp_schedule=zero_bubble",
        )
        for key, values, why, take, example in (
            (
                "block.activation_checkpoint",
                "!=none",
                "blocks would be computed again for every weight",
                "none",
                "block.activation_checkpoint=full",
            ),
            ("block.compile", "=true", "compiled code has one backward", "null", "block.compile=true"),
            ("model.kind", "=moe", "the balance of experts has a backward of its own", "llama", "model=tiny_moe"),
        )
    ),
)
ADAPTERS = (
    *(
        idle(f"adapter.{key}", NO_ADAPTERS, "", "adapter=lora", f"adapter.{key}={value}")
        for key, value in (
            ("r", "16"),
            ("lora_alpha", "16"),
            ("lora_dropout", "0.1"),
            ("target_modules", "all-linear"),
            ("exclude_modules", "[q_proj]"),
            ("layers_to_transform", "[0]"),
            ("modules_to_save", "[lm_head]"),
            ("use_rslora", "true"),
            ("use_dora", "true"),
            ("rank_pattern", "{q_proj:4}"),
            ("alpha_pattern", "{q_proj:4}"),
        )
    ),
    idle("export.merge", NO_ADAPTERS, "", "adapter=lora", "export.at_end=true export.merge=true"),
    Rule(
        f"{LORA} model.kind=moe",
        "adapters were never tried in the project's mixtures",
        "model=hf with model.name_or_path, which loads a published Mixtral as well",
        f"adapter=lora {IMPORT} model.scores=softmax model.shared_experts=0 model.balance=loss",
    ),
    Rule(
        f"{LORA} model.weights=false",
        "adapters belong to weights that stay as they are, and random ones would be lost with the run",
        "model.weights=true, or a folder",
        "adapter=lora model=hf model.name_or_path=gpt2",
    ),
    *(
        Rule(
            f"{LORA} block.{key}>1",
            "tiles are cut out of matrices without adapters",
            f"block.{key}=1, or {NO_ADAPTERS}",
            f"{OF_A_FOLDER} block.{key}=2",
        )
        for key in ("tiles", "embedding_tiles")
    ),
    Rule(
        "adapter.use_dora=true mesh.tp>1",
        "norms of rows need whole rows, of which a rank has a part",
        "adapter.use_dora=false, or mesh.tp=1",
        f"{OF_A_FOLDER} adapter.use_dora=true mesh.tp=2",
    ),
)
ADAMW = "optim.rule=adamw"
OPTIMIZER = (
    idle("optim.muon", "optim.rule!=muon", "", "optim.rule=muon", "optim.muon.momentum=0.5"),
    idle("optim.options", "optim.rule=adamw|muon", "", "optim.betas and optim.eps", "optim.options={momentum:0.9}"),
    *(
        idle(f"optim.{key}", "optim.rule!=adamw|muon", "", "optim.options", f"optim.rule=SGD optim.{key}={value}")
        for key, value in (("betas", "[0.9,0.95]"), ("eps", "1e-8"))
    ),
    Rule(
        "optim.rule=muon model.kind=moe",
        "experts' matrices are stacked in one, which would be orthogonalised as a whole",
        ADAMW,
        "optim.rule=muon model=tiny_moe",
    ),
    Rule(
        f"optim.rule=muon {OVER_REPLICAS}",
        "matrices are put together from shards, not from parts of them",
        f"{OVER_SHARDS}, or {ADAMW}",
        f"optim.rule=muon {OVER_REPLICAS} mesh.dp=4 mesh.replicate=2",
    ),
    Rule(
        "optim.rule=muon offload.overlap=backward",
        "only adamw can take updates back",
        f"offload.overlap=forward, or {ADAMW}",
        "optim.rule=muon offload=host offload.overlap=backward",
    ),
    *(
        Rule(
            f"{key}>1 optim.rule {needs}",
            "it mixes elements of a matrix, and those that are cut along other axes or into tiles are not put together",
            f"{key}=1, or {ADAMW}",
            f"{example} {key}=2",
        )
        for key, needs, example in (
            ("mesh.tp", "optim.needs=unknown", "optim.rule=LBFGS zero.stage=0"),
            ("block.tiles", "optim.needs!=elements", "optim.rule=muon"),
            ("mesh.ep", "optim.needs!=elements", "optim.rule=Adafactor zero.stage=0 model=tiny_moe"),
        )
    ),
    Rule(
        "optim.rule optim.needs=parameters param.fused",
        "its parts are not put together",
        f"mesh.tp=1, or {ADAMW}",
        "",
    ),
    Rule(
        "optim.rule optim.needs=unknown zero.stage!=0",
        "it is not known what its update of an element depends on, so on shards its result might be silently wrong",
        "zero.stage=0, a class of torch.optim other than LBFGS and SparseAdam, or say it in Python: elementwise=True "
        "if it updates every element by itself, elementwise=False if every parameter by itself",
        "optim.rule=LBFGS zero.stage=2",
    ),
    *(
        Rule(
            f"optim.rule optim.needs=unknown {kind}!=device",
            "it is not known whether its update of a parameter depends on others, which are updated at other times",
            f"{kind}=device, or say it in Python: elementwise=True if it updates every element by itself, "
            "elementwise=False if every parameter by itself",
            f"optim.rule=LBFGS zero.stage=0 {example}",
        )
        for kind, example in (
            ("offload.grad", "offload.grad=host"),
            ("offload.master", "offload.master=host offload.moments=host"),
        )
    ),
    Rule(
        "offload.moments offload.master offload.moments_fraction offload.master_fraction optim.rule!=adamw|muon",
        "it keeps its states where the masters are, in one fraction",
        lambda run: f"{_one_tier_of(run)}, or {ADAMW}",
        "optim.rule=SGD offload.master=host offload.moments=device",
        also=lambda run: not _one_tier(run),
    ),
    *(
        Rule(f"{setting} optim.rule!=adamw|muon", why, f"{take}, or {ADAMW}", f"optim.rule=SGD {example}")
        for setting, why, take, example in (
            (
                f"{OVER_REPLICAS}",
                "only adamw keeps parts of a shard's states",
                f"{OVER_SHARDS}",
                f"{OVER_REPLICAS} mesh.dp=4 mesh.replicate=2",
            ),
            (
                "offload.overlap=backward",
                "only adamw can take updates back",
                "offload.overlap=forward",
                "offload=host offload.overlap=backward",
            ),
            (
                "precision.master=remainder",
                "it keeps fp32 masters",
                "precision.master=fp32",
                "precision.master=remainder",
            ),
            (
                "precision.moments!=fp32",
                "it keeps its own states",
                "precision.moments=fp32",
                "precision.moments=bf16",
            ),
        )
    ),
)
CHATS = "data.kind=chat data.path=x.jsonl"
RUN = (
    Rule(
        "train.accumulate=null train.global_sequences=null",
        "neither says how many microbatches a step has",
        "train.accumulate=1, or a train.global_sequences, from which it then follows",
        "train.accumulate=null",
    ),
    Rule(
        "train.global_sequences!=null train.microbatch_sequences train.accumulate!=null step.readers",
        "their product is not train.global_sequences",
        _product,
        "train.global_sequences=32 train.accumulate=1 train.microbatch_sequences=4",
        also=lambda run: run["train.global_sequences"] != run["train.accumulate"] * _at_once(run),
    ),
    Rule(
        "train.global_sequences!=null train.microbatch_sequences train.accumulate=null step.readers",
        "no number of such microbatches makes train.global_sequences",
        _product,
        "train.global_sequences=7 train.accumulate=null",
        also=lambda run: run["train.global_sequences"] % _at_once(run) != 0,
    ),
    idle(
        "schedule.warmup_fraction",
        "schedule.warmup_steps!=null",
        "",
        "",
        "schedule.warmup_steps=1 schedule.warmup_fraction=0.1",
    ),
    idle(
        "train.steps",
        "train.epochs!=null",
        "which sets the length of the run",
        "train.epochs=null",
        "train.epochs=1 train.steps=5",
    ),
    Rule(
        "mesh.cp_attention=ring mesh.cp>1 data.pack=true|null data.kind=chat",
        "torch's ring attention takes no masks, which keep attention inside of packed conversations",
        "mesh.cp_attention=all_gather or ulysses, or data.pack=false",
        "data.kind=chat data.path=x.jsonl data.pack=true mesh.cp=2 mesh.cp_attention=ring model.vocab_size=512",
    ),
    Rule(
        "mesh.pp>1 data.pack=true|null data.kind=chat model.kind=hf",
        "transformers counts positions by the input of a pipeline stage, and packed conversations restart them",
        "data.pack=false, mesh.pp=1, or model.kind=llama",
        "data.kind=chat data.path=x.jsonl data.pack=true mesh.pp=2 model=hf model.name_or_path=gpt2",
    ),
    idle("export.merge", "export.at_end=false", "", "export.at_end=true", "export.merge=true"),
    idle("train.answers", "data.kind!=chat", "", "data.kind=chat", "train.answers=2"),
    idle(
        "train.answers>0",
        "train.evaluate_batches=0",
        "",
        "train.evaluate_batches=8",
        f"{CHATS} train.answers=2 train.evaluate_batches=0",
    ),
    idle(
        "train.answer_tokens",
        "train.answers=0",
        "",
        "train.answers=2",
        f"{CHATS} train.answers=0 train.answer_tokens=9",
    ),
    *(
        Rule(
            f"train.answers>0 {axis}>1",
            "answers are made from whole logits of whole sequences",
            "train.answers=0",
            f"{CHATS} train.answers=2 {axis}=2 model.vocab_size=512 data.pack=false",
        )
        for axis in ("mesh.tp", "mesh.pp", "mesh.cp")
    ),
    idle("export.which", "export.at_end=false", "", "export.at_end=true", "export.which=best"),
    Rule(
        "export.which=best checkpoint.keep_best=false",
        "the model of the lowest held-out loss is then not kept",
        "checkpoint.keep_best=true, or export.which=last",
        "export.at_end=true export.which=best",
    ),
    *(
        Rule(
            f"checkpoint.keep_best=true {setting}=0",
            "there is no held-out loss then",
            f"checkpoint.keep_best=false, or a larger {setting}",
            f"checkpoint.every=1 checkpoint.keep_best=true {setting}=0",
        )
        for setting in ("train.evaluate_batches", "data.held_out")
    ),
    *(
        idle("train.patience", f"{setting}=0", "", f"a larger {setting}", f"train.patience=2 {setting}=0")
        for setting in ("train.evaluate_batches", "data.held_out")
    ),
    idle(
        "train.evaluate_batches>0",
        "data.held_out=0",
        "",
        "data.held_out=0.02",
        "data.held_out=0 train.evaluate_batches=2",
    ),
    idle("export.folder", "export.at_end=false", "", "export.at_end=true", "export.folder=x"),
    idle("schedule.final", "schedule.kind=constant", "", "", "schedule.kind=constant schedule.final=0.5"),
    Rule(
        "schedule.decay_steps!=null schedule.kind!=wsd",
        "only wsd decays over a number of steps",
        "schedule.kind=wsd, or schedule.decay_steps=null",
        "schedule.decay_steps=10 schedule.kind=cosine",
    ),
    Rule(
        "schedule.kind=wsd schedule.decay_steps=null",
        "it decays over a number of steps",
        "a schedule.decay_steps",
        "schedule.kind=wsd",
    ),
    *(
        idle(f"{key}", where, "", take, f"{example} {key}={value}".strip())
        for where, take, example, values in (
            (
                "precision.param!=fp16",
                "precision.param=fp16",
                "precision.param=bf16",
                {
                    "scaler.init": 1024,
                    "scaler.growth_interval": 10,
                    "scaler.hysteresis": 2,
                    "scaler.floor": 2,
                },
            ),
            (
                "train.evaluate_batches=0",
                "train.evaluate_batches=8",
                "train.evaluate_batches=0",
                {"train.evaluate_every_steps": 5},
            ),
            (
                "data.held_out=0",
                "data.held_out=0.02",
                "data.held_out=0",
                {"train.evaluate_every_steps": 5},
            ),
            (
                "checkpoint.every=null",
                "a checkpoint.every",
                "",
                {
                    "checkpoint.keep": 3,
                    "checkpoint.keep_best": "true",
                    "checkpoint.last": "false",
                    "checkpoint.staging_bytes": 2097152,
                    "checkpoint.verify": "false",
                    "checkpoint.on_error": "warn",
                    "checkpoint.deadline_s": 5,
                },
            ),
            (
                "resume.source=null",
                "resume=auto or a folder",
                "",
                {"resume.strict": "true", "resume.override": "[optim.lr]"},
            ),
            ("data.tokenizer=null", "a data.tokenizer", "", {"data.separator": "end"}),
            (
                "monitor.tensorboard=false",
                "monitor.tensorboard=true",
                "monitor.tensorboard=false",
                {"monitor.plan": "false"},
            ),
            (
                "monitor.tensorboard=false monitor.wandb=null",
                "monitor.tensorboard=true",
                "monitor.tensorboard=false",
                {"monitor.scalars_every_steps": 2},
            ),
            (
                "profile.enabled=false",
                "profile.enabled=true",
                "",
                {"profile.start_step": 5, "profile.steps": 2, "profile.memory_snapshot": "true"},
            ),
        )
        for key, value in values.items()
    ),
    Rule(
        "profile.memory_snapshot=true device!=cuda",
        "allocations are recorded on cuda only",
        "profile.memory_snapshot=null or false",
        "profile=on profile.memory_snapshot=true",
    ),
    Rule(
        "data.path!=null data.name!=null",
        "only one can be read, files of path or the Hugging Face dataset of name",
        "one of them",
        "data.path=texts data.name=texts",
    ),
    *(
        Rule(
            f"data.paths!=null data.{other}!=null",
            "only one can be read, the sources of paths or that one",
            "one of them",
            f"data.paths=[texts] data.{other}=texts",
        )
        for other in ("path", "name")
    ),
    idle("data.weights", "data.paths=null", "", "data.paths=[...]", "data.weights=[1,2]"),
)
RULES = (*MESH, *EXPERTS, *STATES, *WIRE, *FROZEN, *FLOAT8, *OFFLOAD, *BLOCKS, *ADAPTERS, *OPTIMIZER, *RUN)


def check_compatible(settings: Settings) -> None:
    """Raise IncompatibleError for the first rule that refuses these settings; it names them, reason and repair."""
    for rule in RULES:
        if rule.refuses(settings):
            raise IncompatibleError(rule.message(settings, FACTS), rule, settings)
