"""Log records of other libraries that say nothing to a user of dzero, and are left out.

    logger                 record                         why it comes, and tells nothing
    torchao                Failed to load ..._C_*.so      wheels have kernels for devices and versions of CUDA that a
                                                          machine lacks; dzero uses none of them
    torch.utils._pytree    ... is an Enum subclass ...    torchao registers its enums in a way that torch deprecates

Both come where torchao is imported: by transformers with each model, if torchao is installed, and by dzero for moments
and products in 8 bits. All other records of these loggers are kept.
"""

from __future__ import annotations

import logging
import re

EXTENSION = re.compile(r"Failed to load \S+\.so: ")
ENUM = re.compile(r".* is an Enum subclass and is now natively supported by torch\.compile")


def leave_out() -> None:
    """Leave out these records from now on; a second call changes nothing."""
    logging.getLogger("torchao").addFilter(_is_no_extension)
    logging.getLogger("torch.utils._pytree").addFilter(_is_no_enum)


def _is_no_extension(record: logging.LogRecord) -> bool:
    return EXTENSION.match(record.getMessage()) is None


def _is_no_enum(record: logging.LogRecord) -> bool:
    return ENUM.match(record.getMessage()) is None
