"""Models and loops as torch users write them, run by plain torch in one process and sharded: both end alike.

A loop trains one step on microbatches of (rank, input, target), one list of them per microbatch: plain torch has those
of all ranks, a sharded model its own. For pool workers, so importable by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear, mse_loss
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from training_loops import Raising, params_of

from dzero import AdamW, OffloadConfig, PrecisionConfig, Sharded, ZeroConfig, make_mesh, shard

WIDTH, RATE = 8, 1e-3
OPTIONS: dict[str, Any] = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}
"""With an eps far above the rounding of gradients, which AdamW would else blow up where they are near zero. So the
scale of gradients counts as well."""
HOST = {"grad": "host", "master": "host", "moments": "host"}
TOLERANCE = 1e-6
"""Of parameters of about 1 after up to four steps of `RATE`: ranks add in another order than one process, in fp32."""
Batch = list[tuple[int, Tensor, Tensor]]


def whole(value: Tensor) -> Tensor:
    """A DTensor's full value, with its graph; any other tensor itself."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def said_by(call: Callable[[], object]) -> str:
    """What an error says; nothing where there is none."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


class Block(nn.Module):
    """Two layers beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three blocks between an embedding and a head. `order`: the blocks that a forward runs."""

    order: tuple[int, ...] = (0, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.change()

    def change(self) -> None:
        """Of other models: what they have instead."""

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.embed(x)
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(x)


class Again(Net):
    """A block that is used three times, as in ALBERT."""

    order = (0, 1, 1, 2, 1)


class Halves(nn.Module):
    """A module of which one layer is used twice, the other once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        x = x + torch.tanh(self.first(x))
        return x + torch.tanh(self.second(x)) if both else x


class PartlyAgain(Net):
    """A unit that is used twice, the second time in part."""

    def change(self) -> None:
        self.blocks[1] = Halves()

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.blocks[1](self.embed(x))
        return self.head(self.blocks[1](self.blocks[0](x), both=False))


class Branch(PartlyAgain):
    """A layer that rank 0 alone runs, unless `everywhere`."""

    everywhere = False

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        return self.head(self.blocks[1](self.embed(x), both=rank == 0 or self.everywhere))


class Tied(Net):
    """Two blocks that share a matrix."""

    def change(self) -> None:
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Parametrized(Net):
    """torch's own parametrizations, inside units."""

    def change(self) -> None:
        weight_norm(self.blocks[0].up)
        spectral_norm(self.blocks[1].down)


class Nested(Net):
    """Blocks that are never called, since they are lists, dicts and modules without forward: their modules are."""

    def change(self) -> None:
        listed = nn.ModuleList([Block(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        named = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.ParameterList([torch.ones(WIDTH)])})
        holder = nn.Module()
        holder.scale, holder.parts = nn.Parameter(torch.ones(WIDTH)), nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.blocks = nn.ModuleList([listed, named, holder])

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        (first, second), named, holder = self.blocks
        x = second(first(self.embed(x)))
        x = named["a"](x) * named["b"][0]
        return self.head(torch.tanh(holder.parts[0](x)) * holder.scale)


class InPlace(Net):
    """Layers whose outputs, views as the layers have biases, are written in place."""

    def change(self) -> None:
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.embed(x[:, None])
        for layer in self.blocks.children():
            x = layer(x)
            x *= 1.5
        out: Tensor = self.head(x)
        out += 1
        return out[:, 0]


class InPlaceAlone(InPlace):
    """The same in a single unit."""

    def change(self) -> None:
        self.blocks = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in range(3)})


class TiedViews(InPlace):
    """Blocks that end in a Linear with a bias, whose output is a view; two of them share its weight."""

    def change(self) -> None:
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.blocks[1][1].weight = self.blocks[0][1].weight


class Gained(Block):
    """A block with a gain without dims."""

    def __init__(self, gain: nn.Parameter) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        assert self.gain.ndim == 0
        return self.gain * super().forward(x)


class Scalars(Net):
    """Parameters without dims: one of the root, as in CLIP, and one that two blocks share; a third block is unused."""

    def change(self) -> None:
        self.logit_scale = nn.Parameter(torch.tensor(0.7))
        gain = nn.Parameter(torch.tensor(1.1))
        self.blocks[0], self.blocks[1] = Gained(gain), Gained(gain)

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        assert self.logit_scale.ndim == 0
        x = self.blocks[1](self.blocks[0](self.embed(x)))
        return self.head(x) * self.logit_scale.exp()


class PartRecomputed(Block):
    """A block of which one layer is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(checkpoint(lambda y: torch.tanh(self.up(y)), x, use_reentrant=False))


class Recomputed(Net):
    """Computed again in backward: a part of a unit, a unit in both of torch's ways, a unit with a layer of the root."""

    def change(self) -> None:
        self.blocks[0] = PartRecomputed()

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.blocks[0](self.embed(x))
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        x = checkpoint(self.blocks[1], x, use_reentrant=True)
        return checkpoint(lambda y: self.head(self.blocks[2](y)), x, use_reentrant=False)


class Memoising(Block):
    """Keeps a function of a weight from one forward to the next, as the cache of autocast does."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.tanh(self.up.weight)
        return x + self.down(linear(x, self.kept, self.up.bias))


class Memoised(Net):
    """Its blocks forget what they keep when `forget` is called."""

    def change(self) -> None:
        self.blocks = nn.ModuleList(Memoising() for _ in range(3))

    def forget(self) -> None:
        for block in self.blocks:
            block.kept = None


@dataclass
class Boxed:
    """What a unit, or a model, returns."""

    x: Tensor


class Slots:
    """An object without a dict, which torch's pytree does not know."""

    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Boxing(Block):
    """A block that takes an object or a dict, and returns one of a kind, or without a kind writes into what it took."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, given: Any) -> Any:
        is_dict = isinstance(given, dict)
        out = super().forward(given["x"] if is_dict else given.x)
        if self.kind is not None:
            return self.kind(x=out)
        if is_dict:
            given["x"] = out
        else:
            given.x = out
        return given


class InObjects(Net):
    """Blocks return objects, of which pytree knows some, or write into them, and the model itself returns one."""

    def change(self) -> None:
        kinds = (SimpleNamespace, Slots, None, dict, None, Boxed)
        self.blocks = nn.ModuleList(Boxing(kind) for kind in kinds)

    def forward(self, x: Tensor, rank: int = 0) -> Any:
        given: Any = SimpleNamespace(x=self.embed(x))
        for block in self.blocks:
            given = block(given)
        return Boxed(self.head(given.x))


class Rows(nn.Module):
    """Positions, of which a forward returns the first: its parameter, or a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0 * WIDTH).view(3, WIDTH) / 24)

    def forward(self, count: int) -> Tensor:
        return self.weight if count == len(self.weight) else self.weight[:count]


class Table(Net):
    """A unit returns its parameter, and a view of it; FSDP2 frees the parameter after the unit."""

    def change(self) -> None:
        self.blocks[1] = Rows()

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.blocks[0](self.embed(x)) + self.blocks[1](3)
        x = torch.cat([torch.tanh(x[:2] + self.blocks[1](2)), x[2:]])
        return self.head(x)


KINDS: tuple[type[Net], ...] = (Net, Again, PartlyAgain, Tied, Parametrized, Nested, InPlace, InPlaceAlone, Scalars)
KINDS += (TiedViews, InObjects, Table, Recomputed, Memoised, Branch)
MODELS = {each.__name__: each for each in KINDS}


Loop = Callable[["Training", list[Batch]], None]


@dataclass
class Training:
    """What a loop has: the model, its optimizer, the number of this step, and of a sharded model its handle."""

    model: Any
    optim: torch.optim.Optimizer
    sharded: Sharded | None = None
    step: int = 0
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters as the model has them now."""
        return [*self.model.parameters()]

    def loss(self, batch: Batch, scale: float = 1.0) -> Tensor:
        """The mean over the ranks of a microbatch, of inputs multiplied by `scale`."""
        outs = [self.model(scale * x, rank=rank) for rank, x, _ in batch]
        losses = [mse_loss(getattr(out, "x", out), y) for out, (_, _, y) in zip(outs, batch, strict=True)]
        return torch.stack(losses).mean()

    def microbatch(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if self.sharded is None else self.sharded.microbatch(is_last=is_last)

    def each(self, batches: list[Batch]) -> Iterator[Batch]:
        """The microbatches of a step, each under `microbatch()`."""
        for index, batch in enumerate(batches):
            with self.microbatch(is_last=index == len(batches) - 1):
                yield batch

    def backwards(self, batches: list[Batch]) -> None:
        for batch in self.each(batches):
            backward(self.loss(batch) / len(batches))

    def finish(self) -> None:
        self.optim.step()
        self.optim.zero_grad()

    def edit(self, factor: float) -> None:
        """Multiply all parameters in place."""
        with torch.no_grad():
            for param in self.params:
                param.mul_(factor)

    def evaluate(self, batch: Batch) -> None:
        with torch.no_grad():
            self.loss(batch)


def backward(loss: Tensor, **options: Any) -> None:
    """As a method, which has no types."""
    loss.backward(**options)


def plain(training: Training, batches: list[Batch]) -> None:
    """A loop as the README has it."""
    training.backwards(batches)
    training.finish()


def accumulated(training: Training, batches: list[Batch]) -> None:
    """Several backwards before a step, and nothing else."""
    for batch in batches:
        backward(training.loss(batch) / len(batches))
    training.finish()


def synchronised(training: Training, batches: list[Batch]) -> None:
    """FSDP2's own switch for the last one."""
    for index, batch in enumerate(batches):
        if training.sharded is not None:
            training.model.set_requires_gradient_sync(index == len(batches) - 1)
        backward(training.loss(batch) / len(batches))
    training.finish()


def last_outside(training: Training, batches: list[Batch]) -> None:
    """The last backward of a step is outside of `microbatch()`."""
    for batch in batches[:-1]:
        with training.microbatch(is_last=False):
            backward(training.loss(batch) / len(batches))
    backward(training.loss(batches[-1]) / len(batches))
    training.finish()


def penalty(training: Training, batches: list[Batch]) -> Tensor:
    """The sum of squares of all parameters, divided by the microbatches."""
    squares = [whole((param**2).sum()) for param in training.params]
    return 0.1 * torch.stack(squares).sum() / len(batches)


def read_around(training: Training, batches: list[Batch]) -> None:
    """Penalties on weights that are read before the forward, and after it, where they are added as they are."""
    for batch in training.each(batches):
        before = penalty(training, batches)
        loss = training.loss(batch) / len(batches) + before
        for param in training.params:
            loss = loss + 0.1 * mse_loss(param, 0.5 * param.detach())
        backward(loss)
    training.finish()


def own_backward_last(training: Training, batches: list[Batch]) -> None:
    """A penalty with a backward of its own before the step, of which the norm is clipped."""
    training.backwards(batches)
    backward(penalty(training, batches))
    torch.nn.utils.clip_grad_norm_(training.params, 0.1)
    training.finish()


def read_by_each_rank(training: Training, batches: list[Batch]) -> None:
    """A loss of a rank's own data reads whole weights: by itself DTensor gives a shard its own rank's gradient."""
    for batch in training.each(batches):
        losses = []
        for rank, x, y in batch:
            drawn, loss = torch.Generator().manual_seed(rank), mse_loss(training.model(x), y)
            for param in training.params[::2]:
                by_hand = whole(param) * torch.randn(param.shape, generator=drawn)
                loss = loss + 0.1 * by_hand.square().mean() + whole(param.norm()) * by_hand.detach().abs().mean()
            losses.append(loss)
        backward(torch.stack(losses).mean() / len(batches))
    training.finish()


def clipped(training: Training, batches: list[Batch]) -> None:
    """torch's own clipping of the norm, with and without foreach, and of values."""
    training.backwards(batches)
    assert float(whole(torch.nn.utils.clip_grad_norm_(training.params, 0.1))) > 0.1
    torch.nn.utils.clip_grad_norm_(training.params, 0.05, foreach=False)
    torch.nn.utils.clip_grad_value_(training.params, 1e-3)
    training.finish()


def assigned(training: Training, batches: list[Batch]) -> None:
    """Gradients scaled and shifted in place, another tensor as gradient, and none where nothing is to be updated."""
    training.backwards(batches)
    for index, param in enumerate(training.params):
        param.grad.mul_(0.5).add_(1e-3)
        if index % 3 < 2:
            param.grad = None if index % 3 == 0 else torch.tanh(10 * param.grad) * 1e-2
    training.finish()


def one_graph_twice(training: Training, batches: list[Batch]) -> None:
    """Two backwards over one graph."""
    for batch in batches:
        outs = [training.model(x, rank=rank) for rank, x, _ in batch]
        errors = [mse_loss(out, y) for out, (_, _, y) in zip(outs, batch, strict=True)]
        backward(torch.stack(errors).mean(), retain_graph=True)
        backward(torch.stack([out.abs().mean() for out in outs]).mean())
    training.finish()


def two_forwards_kept(training: Training, batches: list[Batch]) -> None:
    """The same in each microbatch."""
    for batch in training.each(batches):
        backward(training.loss(batch) + training.loss(batch, scale=2.0))
    training.finish()


def closure(training: Training, batches: list[Batch]) -> None:
    """The step calls what computes the loss."""

    def compute() -> float:
        training.optim.zero_grad()
        loss = training.loss(batches[0])
        backward(loss)
        return float(loss)

    training.optim.step(compute)


def frozen_for_a_while(training: Training, batches: list[Batch]) -> None:
    """One matrix is frozen in the second step, and trained again from the fourth on."""
    frozen = training.model.get_parameter("blocks.0.up.weight")
    frozen.requires_grad_(training.step not in (1, 2))
    plain(training, batches)


def group_added(training: Training, batches: list[Batch]) -> None:
    """The embedding is trained from the third step on, the blocks from the fourth, with settings of their own."""
    if training.step == 0:
        training.optim = _optimizer(training, training.model.head.parameters())
    if training.step == 2:
        training.optim.add_param_group({"params": [*training.model.embed.parameters()], "lr": 2e-3})
    if training.step == 3:
        training.optim.add_param_group({"params": [*training.model.blocks.parameters()], "weight_decay": 0.0})
    plain(training, batches)
    training.model.zero_grad()  # of what is in no group yet: torch would add it up


def _optimizer(training: Training, params: Any) -> torch.optim.Optimizer:
    params = [*params]
    training.optim.zero_grad()
    if training.sharded is None:
        return torch.optim.AdamW(params, **OPTIONS)
    del training.optim
    return AdamW(training.sharded, params, **OPTIONS)


def scheduled(training: Training, batches: list[Batch]) -> None:
    """Two of torch's schedulers, one after the other."""
    if training.step == 0:
        schedulers = torch.optim.lr_scheduler
        warm = schedulers.LinearLR(training.optim, start_factor=0.1, total_iters=2)
        cosine = schedulers.CosineAnnealingLR(training.optim, T_max=4)
        training.kept["rate"] = schedulers.SequentialLR(training.optim, [warm, cosine], milestones=[2])
    plain(training, batches)
    training.kept["rate"].step()


def scaled(training: Training, batches: list[Batch]) -> None:
    """torch's scaler of losses, by habit."""
    scaler = training.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    for batch in batches:
        backward(scaler.scale(training.loss(batch) / len(batches)))
    scaler.unscale_(training.optim)
    torch.nn.utils.clip_grad_norm_(training.params, 0.1)
    scaler.step(training.optim)
    scaler.update()
    training.optim.zero_grad()


def prefetched(training: Training, batches: list[Batch]) -> None:
    """FSDP2's explicit prefetching."""
    blocks = training.model.blocks
    if training.sharded is not None and training.step == 0:
        blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
        blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    plain(training, batches)


def called_as_function(training: Training, batches: list[Batch]) -> None:
    """The model called with its own parameters as arguments."""
    params = dict(training.model.named_parameters())
    for batch in batches:
        outs = [torch.func.functional_call(training.model, params, (x,)) for _, x, _ in batch]
        errors = [mse_loss(out, y) for out, (_, _, y) in zip(outs, batch, strict=True)]
        backward(torch.stack(errors).mean() / len(batches))
    training.finish()


def evaluated(training: Training, batches: list[Batch]) -> None:
    """Evaluations between everything, and then habits that go through `model.parameters()`."""
    for batch in training.each(batches):
        backward(training.loss(batch) / len(batches))
        training.evaluate(batches[0])
    torch.nn.utils.clip_grad_norm_(training.params, 0.1)
    training.optim.step()
    training.evaluate(batches[0])
    training.edit(0.99)
    training.evaluate(batches[0])
    training.model.get_parameter("head.bias").requires_grad_(training.step % 2 == 1)
    training.evaluate(batches[0])
    training.model.zero_grad()


def probed(training: Training, batches: list[Batch]) -> None:
    """Forwards that record gradients and have no backward, each followed by what goes through `model.parameters()`."""

    def probe() -> None:
        training.loss(batches[0])
        training.edit(0.99)

    for index, batch in enumerate(batches):
        probe()
        with training.microbatch(is_last=index == len(batches) - 1):
            backward(training.loss(batch) / len(batches))
        probe()
    training.loss(batches[0])
    torch.nn.utils.clip_grad_norm_(training.params, 0.1)
    training.optim.step()
    probe()
    training.model.load_state_dict({name: 0.9 * value for name, value in training.model.state_dict().items()})
    training.loss(batches[0])
    training.model.get_parameter("blocks.2.up.weight").requires_grad_(training.step % 2 == 1)
    training.model.zero_grad()


def evaluated_in_part(training: Training, batches: list[Batch]) -> None:
    """Evaluations and a step run some blocks alone, and parameters are edited after each."""
    for order in ((0, 1, 2), (1, 2), (0, 1)):
        training.model.order = order
        plain(training, batches)
        for training.model.order in ((0, 1), (1, 2), (0, 1, 2)):
            training.evaluate(batches[0])
            training.edit(0.99)


def changed_between(training: Training, batches: list[Batch]) -> None:
    """Frozen before a backward, which leaves no gradient then; edited and frozen between microbatches."""
    before, between = (training.model.get_parameter(f"blocks.{number}.up.weight") for number in (0, 1))
    for batch in training.each(batches):
        loss = training.loss(batch) / len(batches)
        before.requires_grad_(False)
        backward(loss)
        before.requires_grad_(True)
        with torch.no_grad():
            training.model.get_parameter("blocks.2.up.bias").add_(0.01)
        between.requires_grad_(False)
    between.requires_grad_(True)
    training.finish()


def inferred(training: Training, batches: list[Batch]) -> None:
    """Evaluations in inference mode, the first one before anything else, and an edit after one."""
    with torch.inference_mode():
        training.loss(batches[0])
    plain(training, batches)
    with torch.inference_mode():
        training.loss(batches[0])
    training.edit(0.99)


def raised(training: Training, batches: list[Batch]) -> None:
    """A backward that raises half way, in a hook of a block, is given up, and its step repeated."""
    hook = training.model.blocks[0].register_forward_hook(lambda _, __, out: Raising.apply(out))
    loss = training.loss(batches[0])
    hook.remove()
    try:
        backward(loss)
    except ArithmeticError:
        training.optim.zero_grad()
    plain(training, batches)


def given_up(training: Training, batches: list[Batch]) -> None:
    """The first microbatch is not to count: by the optimizer's `zero_grad`, and in other steps by the model's own."""
    with training.microbatch(is_last=False):
        backward(training.loss(batches[0], scale=3.0))
    (training.optim if training.step % 2 == 0 else training.model).zero_grad()
    plain(training, batches)
    training.model.zero_grad()


def reached_later(training: Training, batches: list[Batch]) -> None:
    """The first backward reaches a layer on some ranks alone, the later ones on all."""
    for index, batch in enumerate(batches):
        training.model.everywhere = index > 0
        backward(training.loss(batch) / len(batches))
    training.finish()


def skipped_then_penalised(training: Training, batches: list[Batch]) -> None:
    """The last microbatch skips a block, whose weights then have a loss of their own."""
    for batch in training.each(batches):
        training.model.order = (0, 2) if batch is batches[-1] else (0, 1, 2)
        backward(training.loss(batch) / len(batches))
    backward(whole(training.model.get_parameter("blocks.1.up.weight").square().sum()))
    training.finish()


def half_detached(training: Training, batches: list[Batch]) -> None:
    """Two forwards of which one backward differentiates the second, which takes what the first one kept."""
    for batch in training.each(batches):
        training.model.forget()
        first = training.loss(batch)
        backward((first.detach() + training.loss(batch, scale=2.0)) / len(batches))
    training.finish()


def restarted(training: Training, batches: list[Batch]) -> None:
    """Moments written in place right after the step, by way of `optim.state`."""
    accumulated(training, batches)
    for param in training.params:
        training.optim.state[param]["exp_avg"].mul_(0.5)
        if training.step == 1:
            training.optim.state[param]["exp_avg_sq"].zero_()


NAMED: tuple[Loop, ...] = (accumulated, synchronised, last_outside, read_around, own_backward_last, read_by_each_rank)
NAMED += (clipped, assigned, one_graph_twice, two_forwards_kept, closure, frozen_for_a_while, group_added, scheduled)
NAMED += (scaled, prefetched, called_as_function, evaluated, probed, inferred, evaluated_in_part)
NAMED += (changed_between, raised, given_up, skipped_then_penalised, restarted)
LOOPS: dict[str, Loop] = {each.__name__: each for each in (plain, *NAMED, reached_later, half_detached)}
LONG = ("frozen_for_a_while", "group_added", "scheduled", "restarted")


def steps_of(loop: str) -> int:
    """Two, so that the second one sees what the first one left; four of a loop that does something in a later one."""
    return 4 if loop in LONG else 2


def batches_of(
    step: int, ranks: int, microbatches: int, *, own: int | None = None, together: bool = False
) -> list[Batch]:
    """A step's microbatches, of all ranks or of one. together: those of all ranks as one input."""
    made = torch.Generator().manual_seed(step)
    drawn = []
    for _ in range(microbatches):
        every = [(rank, torch.randn(3, 4, generator=made), torch.randn(3, 2, generator=made)) for rank in range(ranks)]
        merged = [(0, torch.cat([x for _, x, _ in every]), torch.cat([y for _, _, y in every]))]
        drawn.append([every[own]] if own is not None else merged if together else every)
    return drawn


def build(model: str) -> Any:
    """The same values on every rank and in plain torch."""
    torch.manual_seed(0)
    return MODELS[model]()


def in_torch(model: str, loop: str, ranks: int, microbatches: int) -> dict[str, Tensor]:
    """The parameters that plain torch ends with."""
    built = build(model)
    trained = [param for param in built.parameters() if param.requires_grad]
    training = Training(built, torch.optim.AdamW(trained, **OPTIONS))
    together = model not in ("Branch", "Table") and loop != "read_by_each_rank"
    for training.step in range(steps_of(loop)):
        LOOPS[loop](training, batches_of(training.step, ranks, microbatches, together=together))
    return {name: param.detach().clone() for name, param in built.named_parameters()}


def in_dzero(
    rank: int,
    ranks: int,
    model: str,
    loop: str,
    stages: tuple[int, ...],
    microbatches: int,
    offload: dict[str, str],
    zero: dict[str, Any],
) -> dict[int, dict[str, Tensor]]:
    """Those that a sharded model ends with, by stage."""
    found = {}
    for stage in stages:
        sharded = sharded_of(model, stage, microbatches, offload, **zero)
        training = Training(sharded.model, AdamW(sharded, **OPTIONS), sharded)
        for training.step in range(steps_of(loop)):
            LOOPS[loop](training, batches_of(training.step, ranks, microbatches, own=rank))
        training.optim.synchronize()
        found[stage] = params_of(sharded)
    return found


def sharded_of(
    model: str,
    stage: int,
    microbatches: int = 1,
    offload: Any = None,
    *,
    replicate: int = 1,
    precision: dict[str, Any] | None = None,
    **zero: Any,
) -> Sharded:
    """A model of `MODELS`, in fp32 unless said otherwise; `replicate` as in make_mesh, for stages 1 to 3."""
    return shard(
        build(model),
        ZeroConfig(stage=stage, **zero),
        precision=PrecisionConfig(**(precision or {"param": "fp32"})),
        offload=OffloadConfig(**offload) if offload else None,
        mesh=make_mesh("cpu", replicate=replicate) if replicate > 1 else None,
        microbatches=microbatches,
    )
