"""The type of `optim.state`: values can be read and written in place, entries are fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

REPLACED = (
    "optim.state shows the states that updates use; what is put in their place, or taken away, would be passed over: "
    "write into them (optim.state[param][key].zero_()), or call load_state_dict()"
)


class FixedKeysDict(dict[Any, Any]):
    """A dictionary that raises RuntimeError if an entry is set or removed."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(REPLACED)

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


class StateMapping(FixedKeysDict):
    """The states of each parameter, by key; empty for a parameter without states, as in torch."""

    def put(self, param: nn.Parameter, states: Mapping[str, Any]) -> None:
        """Set the states of `param`."""
        dict.__setitem__(self, param, FixedKeysDict(states))

    def __missing__(self, param: object) -> FixedKeysDict:
        return FixedKeysDict()
