# Decode, call one use case, encode: one file per resource. Every handler in this folder answers.

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages

from litestar.handlers import HTTPRouteHandler

from gateway.http import console

MODULES = (console, *(import_module(one.name) for one in walk_packages(__path__, f"{__name__}.")))
HANDLERS = [
    each
    for module in MODULES
    for each in (*vars(module).values(), *getattr(module, "handlers", ()))
    if isinstance(each, HTTPRouteHandler)
]
