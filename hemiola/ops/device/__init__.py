"""Device variants: one file per op, binding the kernels to the op's contract. Importing this registers them all.

Nothing imports it but the op table, when an engine's policy asks for the device arm.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
