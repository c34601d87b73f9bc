"""Count of the parameters and modules that were registered in any module, so that models are looked at again.

It is a file of its own, because optimizers and units both ask for the count, and guards of models import units.
"""

from __future__ import annotations

from functools import cache

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Registrations:
    """Registrations in this process.

    Attributes:
        count: How many there were since this object was made.
    """

    def __init__(self) -> None:
        self.count = 0
        register_module_parameter_registration_hook(self._add)
        register_module_module_registration_hook(self._add)

    def _add(self, *unused: object) -> None:
        self.count += 1


@cache
def registrations() -> Registrations:
    """Return the registrations that all models share; the first call begins to count."""
    return Registrations()
