# SPDX-License-Identifier: Apache-2.0
"""One short file per method; importing this package registers them all."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
