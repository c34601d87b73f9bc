"""Initialization of models on the meta device, module by module, so that no rank holds more than one whole unit.

Note: all ranks draw the same bits. Before a module draws, the generator is seeded from (seed, name of the module in
the whole model). So the values do not depend on the order of the calls, the modules that they are given, or the number
of ranks. They do depend on the kind of device, because CPU and CUDA generators differ. The caller's generators do
not change.

Note: initializers. A module that owns parameters or buffers has `reset_parameters()`, as torch's own modules do. In a
transformers model, the nearest `_init_weights` at or above a module initializes it. It may also rewrite tensors of
child modules (GPT-2 rescales output projections in their parent), so it runs for every module that lies wholly in the
module being filled. Buffers that only a module above them writes (Falcon-H1's multipliers) get the values that the
model's constructor computes, from `computed_buffers()` of the model, if it has this method.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from dzero.utils.torch_internals import initializer_of, version_of

Initialise = Callable[[nn.Module], None]
Weights = Mapping[str, Callable[[], Tensor]]
SHOWN_NAMES = 3


@dataclass(frozen=True)
class _Fresh:
    """A newly allocated tensor, its names in the model (several if tied), and its version before any write.

    Floating-point memory starts as NaN, to detect tensors that no initializer wrote.
    """

    names: tuple[str, ...]
    tensor: Tensor
    version: int

    @property
    def is_written(self) -> bool:
        """Whether no NaN is left; for integer tensors, whether anything wrote to them in place."""
        if self.tensor.is_floating_point():
            return not bool(self.tensor.isnan().any())
        return self.tensor.numel() == 0 or version_of(self.tensor) > self.version


class MetaInitializer:
    """Initializer that allocates and fills modules of a model in place; each tensor once, modules in any order.

    Names and ties of `model`, which is whole and on the meta device, are recorded at construction. Floating-point
    parameters are allocated in fp32. `weights` are functions that read tensors, by name in the model; all other tensors
    are drawn. `initializers` are used instead of the modules' own, for the modules that they name.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        seed: int,
        device: torch.device | str,
        weights: Weights | None = None,
        initializers: Mapping[nn.Module, Initialise] | None = None,
    ) -> None:
        self.seed, self.device, self.weights = seed, torch.device(device), weights or {}
        self.names = {module: name for name, module in model.named_modules()}
        self.sweeps = {**dict(_sweeps(model, None)), **(initializers or {})}
        self._computed: Callable[[], Mapping[str, Tensor]] = cache(getattr(model, "computed_buffers", dict))
        self.places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        for module in self.names:
            for attribute, tensor in _own(module):
                self.places.setdefault(tensor, []).append((module, attribute))

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        """Allocate and fill all tensors of `module` and its children that are on meta; leave all others unchanged.

        Raise ValueError, which names them, if no initializer wrote some tensors.
        """
        on_meta = dict.fromkeys(t for part in module.modules() for _, t in _own(part) if t.is_meta)
        fresh = [self._allocate(tensor) for tensor in on_meta]
        drawn = [f for f in fresh if self._reader(f) is None]
        self._draw({f.tensor for f in fresh}, {f.tensor for f in drawn})
        if unwritten := [f.names[0] for f in drawn if not f.is_written and not self._takes_computed(f)]:
            more = f" and {len(unwritten) - SHOWN_NAMES} more" if len(unwritten) > SHOWN_NAMES else ""
            raise ValueError(
                f"no initialiser for {unwritten[:SHOWN_NAMES]}{more}: give the modules that own them a "
                "reset_parameters() that writes each of their parameters and buffers in place, build the model on a "
                "real device, or start from published weights (model.weights)"
            )
        for f in fresh:
            if (read := self._reader(f)) is not None:
                f.tensor.copy_(read())

    def _allocate(self, meta: Tensor) -> _Fresh:
        """Replace `meta` by one real tensor everywhere in the model, so that tied parameters stay tied."""
        is_param = isinstance(meta, nn.Parameter)
        dtype = torch.float32 if is_param and meta.is_floating_point() else meta.dtype
        tensor = torch.empty_like(meta, dtype=dtype, device=self.device)
        if dtype.is_floating_point:
            tensor.fill_(torch.nan)
        if is_param:
            tensor = nn.Parameter(tensor, requires_grad=meta.requires_grad)
        places = self.places[meta]  # not removed: a tiled module is filled again for each of its tiles
        for owner, attribute in places:
            setattr(owner, attribute, tensor)
        names = tuple(f"{self.names[owner]}.{attribute}".removeprefix(".") for owner, attribute in places)
        return _Fresh(names, tensor, version_of(tensor))

    def _takes_computed(self, fresh: _Fresh) -> bool:
        """Fill a buffer with the value that the model's constructor computes; return whether there is one."""
        if isinstance(fresh.tensor, nn.Parameter):
            return False
        found = next((self._computed()[name] for name in fresh.names if name in self._computed()), None)
        if found is None or found.shape != fresh.tensor.shape:
            return False
        fresh.tensor.copy_(found)
        return True

    def _reader(self, fresh: _Fresh) -> Callable[[], Tensor] | None:
        return next((self.weights[name] for name in fresh.names if name in self.weights), None)

    def _draw(self, fresh: set[Tensor], drawn: set[Tensor]) -> None:
        """Draw children before parents; of modules that share a parameter, the first in the model draws last."""
        for module, name in reversed(self.names.items()):
            sweep = self.sweeps.get(module)
            below = {t for part in module.modules() for _, t in _own(part)} if sweep else set()
            owns = any(tensor in drawn for _, tensor in _own(module))
            if owns or (below <= fresh and below & drawn):
                with self._seeded(name):
                    (sweep or _reset)(module)

    @contextmanager
    def _seeded(self, name: str) -> Iterator[None]:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 1
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(seed)
            for device in devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            yield


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers that `module` itself owns, by attribute."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _reset(module: nn.Module) -> None:
    """Call `reset_parameters`, or `_reset_parameters` as in nn.MultiheadAttention."""
    if (reset := initializer_of(module)) is not None:
        reset()


def _sweeps(module: nn.Module, inherited: Initialise | None) -> Iterator[tuple[nn.Module, Initialise]]:
    """Yield (module, nearest `_init_weights` at or above it) for all modules that have one."""
    sweep: Initialise | None = getattr(module, "_init_weights", inherited)
    if sweep is not None:
        yield module, sweep
    for child in module.children():
        yield from _sweeps(child, sweep)
