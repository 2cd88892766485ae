"""`jupyter microvm`: dispatches to its subcommands, which are imported only when used."""

from __future__ import annotations

import sys

from gateway.cli.app import USAGE, MicroVMCommand, run_guarded
from gateway.errors import UsageError

SUBCOMMANDS = {
    "run": ("gateway.cli.run.RunApp", "Execute notebooks, each in a machine of its own"),
    "kernelspec": ("gateway.cli.kernelspec.KernelspecApp", "Install or list kernelspecs"),
    "local": ("gateway.cli.local.LocalApp", "Start, stop and inspect the local service"),
    "image": ("gateway.cli.image.ImageApp", "Build the guest's image"),
}


class MicroVMApp(MicroVMCommand):
    """Run Jupyter kernels and notebooks in AWS Lambda MicroVMs."""

    name = "jupyter-microvm"
    description = """Run Jupyter kernels and notebooks in AWS Lambda MicroVMs.

    Without configuration the machines are those of a local service on this computer, which
    is started on demand. Configuration is read from jupyter_microvm_config.py.
    """
    examples = """
    jupyter microvm run notebooks/quickstart.ipynb --output-dir out
    jupyter microvm kernelspec install --sys-prefix
    jupyter microvm local status
    jupyter microvm image build --output guest.zip
    """
    subcommands = SUBCOMMANDS

    def start(self) -> None:
        """Without a subcommand there is nothing to do but to say what there is."""
        super().start()
        if self.extra_args:
            known = ", ".join(self.subcommands)
            raise UsageError(f"There is no command {self.extra_args[0]!r}; there are {known}.")
        self.print_help()
        self.exit(USAGE)


def main(argv: list[str] | None = None) -> None:
    """The entry point `jupyter-microvm`; always ends in SystemExit with a meaningful code."""
    sys.exit(run_guarded("jupyter microvm", lambda: MicroVMApp.launch_instance(argv)))
