"""Imported first by commands that read notebooks: keeps one useless second out of their start.

nbformat imports jsonschema, and jsonschema imports `rfc3987_syntax` where JupyterLab has brought
it along, which compiles a grammar for the string format "iri": 1.7 s of CPU (2026-11-30, Python
3.11), half of what a short run takes. The notebook schema has no such format. jsonschema
treats the package as optional, so it is told, during this import only, that it is absent.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_COSTLY = "rfc3987_syntax"

if _COSTLY not in sys.modules:
    _modules: dict[str, Any] = sys.modules
    _modules[_COSTLY] = None  # what the import system reads as "cannot be imported"
    try:
        importlib.import_module("jsonschema")
    finally:
        del _modules[_COSTLY]
