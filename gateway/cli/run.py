"""`jupyter microvm run`: notebooks in, executed notebooks and an exit code out."""

from __future__ import annotations

import asyncio
import getpass
import logging
import sys
from typing import Any

from traitlets import Bool, Float, Integer, List, Unicode
from traitlets.config import Config

import gateway.cli.lean  # noqa: F401  # before everything that imports nbformat
from gateway.batch.host import MicroVMHost, choose_workspace, with_workspace
from gateway.batch.inputs import plan_inputs
from gateway.batch.kernel import library_log
from gateway.batch.notebooks import PlannedRun, check_writable, plan_runs, read_notebook
from gateway.batch.parameters import parse_parameters
from gateway.batch.progress import Progress, choose_progress
from gateway.batch.queue import run_all
from gateway.batch.report import as_json, as_text
from gateway.batch.result import RunResult, overall_exit_code
from gateway.batch.runner import RunOptions
from gateway.cli.app import MicroVMCommand
from gateway.clock import SystemClock
from gateway.config import load_gateway
from gateway.errors import UsageError

# More at once than this meets the service's rates (LM 11: 5 launches a second) for nothing.
MAX_JOBS = 64

_ALIASES: dict[Any, str] = {
    **MicroVMCommand.aliases,
    "output-dir": "RunApp.output_dir",
    ("p", "parameter"): "RunApp.parameters",
    "input": "RunApp.inputs",
    "collect": "RunApp.collect",
    "jobs": "RunApp.jobs",
    "timeout": "RunApp.timeout",
    "profile": "RunApp.profile",
}
_FLAGS = {
    **MicroVMCommand.flags,
    "allow-errors": ({"RunApp": {"allow_errors": True}}, "Go on after a cell that raises."),
    "json": ({"RunApp": {"json_output": True}}, "Print one JSON document instead of text."),
    "quiet": ({"RunApp": {"quiet": True}}, "Show no progress."),
}


class RunApp(MicroVMCommand):
    """Execute notebooks, each in a machine of its own, and terminate the machines."""

    name = "jupyter-microvm-run"
    description = """Execute notebooks in MicroVMs.

    Each notebook gets a machine of its own, which is terminated whatever happens. The
    executed notebook is written to OUTPUT_DIR/NAME.ipynb, or to NAME.executed.ipynb in the
    current folder; a run that fails or is interrupted saves what it has.

    On the local service a kernel works in the notebook's own folder. With --input or --collect
    it works in a copy of it (or in what the profile's workspace_source says), so that the run
    leaves nothing there.

    Exit codes: 0 done, 1 a cell raised or timed out, 2 wrong usage or input, 3 trouble with a
    machine or the service, 130 interrupted.
    """
    examples = """
    jupyter microvm run report.ipynb
    jupyter microvm run report.ipynb -p year=2024 -p city=Bern --output-dir out
    jupyter microvm run a.ipynb b.ipynb --jobs 2 --input data --collect '*.csv' --output-dir out
    """

    output_dir = Unicode("", help="Where executed notebooks and collected files go.").tag(
        config=True
    )
    parameters = List(Unicode(), help="NAME=VALUE for the cell tagged 'parameters'.").tag(
        config=True
    )
    inputs = List(Unicode(), help="A file or folder for the workspace; may be repeated.").tag(
        config=True
    )
    collect = List(Unicode(), help="Files to bring back, as a glob; may be repeated.").tag(
        config=True
    )
    jobs = Integer(1, min=1, max=MAX_JOBS, help="How many notebooks run at once.").tag(config=True)
    timeout = Float(0.0, min=0.0, help="Seconds one cell may take; 0 means no limit.").tag(
        config=True
    )
    profile = Unicode(
        "", help="The profile (jupyter_microvm_config.py) to run with; default: the default one."
    ).tag(config=True)
    allow_errors = Bool(False, help="Go on after a cell that raises.").tag(config=True)
    json_output = Bool(False, help="Print one JSON document instead of text.").tag(config=True)
    quiet = Bool(False, help="Show no progress.").tag(config=True)

    aliases = _ALIASES
    flags = _FLAGS

    def start(self) -> None:
        """Check everything that can be checked without a machine, run, report, exit."""
        super().start()
        self._route_library_log()
        plans = self._plan()
        results = asyncio.run(self._run(plans, self._options()))
        self._report(results)
        self.exit(overall_exit_code(results))

    def _plan(self) -> list[PlannedRun]:
        if not self.extra_args:
            raise UsageError("Say which notebook: jupyter microvm run NOTEBOOK.ipynb.")
        plans = plan_runs(self.extra_args, self.output_dir or None)
        for plan in plans:
            read_notebook(plan.source)
        for folder in sorted({plan.output.parent for plan in plans}):
            check_writable(folder)
        return plans

    def _options(self) -> RunOptions:
        profile = load_gateway(self.config).profile(self.profile or None, getpass.getuser())
        return RunOptions(
            profile=profile.name,
            parameters=parse_parameters(self.parameters),
            inputs=plan_inputs(self.inputs),
            collect=tuple(self.collect),
            timeout_s=self.timeout or None,
            allow_errors=self.allow_errors,
        )

    async def _run(self, plans: list[PlannedRun], options: RunOptions) -> list[RunResult]:
        progress = choose_progress(sys.stderr, quiet=self.quiet, notebooks=len(plans))
        profile = load_gateway(self.config).profile(options.profile)
        host = MicroVMHost(profile, self._host_config(plans, options, progress))
        try:
            return await run_all(plans, options, host, progress, SystemClock(), jobs=self.jobs)
        finally:
            progress.close()

    def _host_config(
        self, plans: list[PlannedRun], options: RunOptions, progress: Progress
    ) -> Config:
        settings = load_gateway(self.config)
        profile = settings.profile(options.profile)
        folders = {plan.folder for plan in plans}
        source = choose_workspace(
            profile, folders, inputs=bool(options.inputs), collect=bool(options.collect)
        )
        if source == profile.workspace_source:
            return self.config
        if source == "none":
            progress.note(
                "The notebook's folder is too large to copy: only --input files are there."
            )
        return with_workspace(self.config, settings, options.profile, source)

    def _report(self, results: list[RunResult]) -> None:
        print(as_json(results) if self.json_output else as_text(results), flush=True)
        for result in results:
            if result.failure is not None:
                print(f"{result.notebook.name}: {result.failure.sentence}", file=sys.stderr)

    def _route_library_log(self) -> None:
        if self.log_level == logging.DEBUG:
            library_log.setLevel(logging.DEBUG)
            library_log.addHandler(logging.StreamHandler(sys.stderr))
