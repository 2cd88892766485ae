"""What the commands of `jupyter microvm` share.

Errors are one sentence on standard error and an exit code that a script can branch on; a
traceback is shown by `--debug` only. The exit codes are those of gateway/errors.py: 2 for
what the user can correct, 3 for a machine or a service, 130 after Ctrl-C.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Generator
from textwrap import dedent, indent
from typing import Any

from jupyter_core.application import JupyterApp, NoStart, base_aliases, base_flags
from traitlets import TraitError
from traitlets.config.loader import KVArgParseConfigLoader

from gateway.errors import ConfigError, GatewayError, UsageError

VERSION = "0.1.0"
CONFIG_FILE_NAME = "jupyter_microvm_config"

USAGE = 2
TROUBLE = 3
INTERRUPTED = 130

# Of Jupyter's own options those that mean something to every command here.
_FLAGS = {"debug": base_flags["debug"]}
_ALIASES = {name: base_aliases[name] for name in ("config", "log-level")}


class MicroVMCommand(JupyterApp):
    """Base of the commands: one configuration file for all of them, no migration of old ones."""

    version = VERSION
    flags = _FLAGS
    aliases = _ALIASES

    # A broken configuration is an error of ours, not a warning with a traceback.
    raise_config_file_errors = True

    def _log_level_default(self) -> int:
        return logging.WARNING

    def _log_format_default(self) -> str:
        return "jupyter microvm: %(message)s"

    def _config_file_name_default(self) -> str:
        return CONFIG_FILE_NAME

    def emit_examples(self) -> Generator[str, None, None]:
        """Yield the examples, indented alike; traitlets indents all but the first twice."""
        if self.examples:
            shown = indent(dedent(self.examples).strip("\n"), "    ")
            yield from ("Examples", "--------", "", shown, "")

    def migrate_config(self) -> None:
        """Nothing of ours is older than Jupyter; and a read-only home is not an error here."""

    def _find_subcommand(self, name: str) -> str:
        # Ours are listed. JupyterApp would look for an executable named after the first
        # argument, which may be any file name.
        return ""

    def load_config_file(  # type: ignore[override]  # as in JupyterApp
        self, suppress_errors: bool = True
    ) -> None:
        """Read the configuration; raises ConfigError for a file that cannot be executed."""
        try:
            super().load_config_file(suppress_errors)
        except GatewayError:
            raise
        except Exception as error:
            # A configuration file is Python: it can raise anything.
            raise ConfigError("file", f"{type(error).__name__}: {error}") from error

    def exit(self, exit_status: int | str | None = 0) -> None:
        """Exit; traitlets' 1 for a value that a trait refuses is our 2."""
        super().exit(USAGE if exit_status == 1 and not self.configured else exit_status)

    def initialize(self, argv: Any = None) -> None:
        """Parse the command line and the configuration files."""
        super().initialize(argv)
        self.configured = True

    configured = False

    def _create_loader(
        self, argv: list[str] | None, aliases: Any, flags: Any, classes: Any
    ) -> KVArgParseConfigLoader:
        return _StrictLoader(
            argv, aliases, flags, classes=classes, log=self.log, subcommands=self.subcommands
        )


class _StrictLoader(KVArgParseConfigLoader):
    """Refuses an unknown option, which traitlets would only warn about."""

    def _handle_unrecognized_alias(self, arg: str) -> None:
        raise UsageError(f"There is no option --{arg}; see --help.")


def run_guarded(name: str, body: Callable[[], object]) -> int:
    """Call `body()` and turn whatever it raises into a sentence and an exit code.

    Returns the code; `SystemExit` of `body` counts as its own. Called by `main` only.
    """
    try:
        body()
    except NoStart:
        return 0
    except SystemExit as exit_request:
        return _code_of(exit_request)
    except GatewayError as error:
        return _say(name, error.sentence, error.exit_code)
    except TraitError as error:
        return _say(name, f"Wrong argument or configuration: {error}", USAGE)
    except KeyboardInterrupt:
        return _say(name, "Interrupted.", INTERRUPTED)
    except BrokenPipeError:
        _silence_stdout()
        return TROUBLE
    except Exception as error:
        _show_traceback()
        text = f"Unexpected {type(error).__name__}: {error} (--debug shows more; please report it)"
        return _say(name, text, TROUBLE)
    return 0


def _code_of(request: SystemExit) -> int:
    if isinstance(request.code, str):
        print(request.code, file=sys.stderr)
        return 1
    return request.code or 0


def _say(name: str, sentence: str, code: int) -> int:
    print(f"{name}: {' '.join(sentence.split())}", file=sys.stderr)
    return code


def _show_traceback() -> None:
    if "--debug" in sys.argv:
        logging.getLogger("gateway").exception("unexpected error")


def _silence_stdout() -> None:
    # Whoever read our output is gone; the interpreter must not complain when it flushes.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
