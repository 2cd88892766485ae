"""`python -m gateway.cli`: the command of a certain interpreter, whatever PATH says."""

from gateway.cli.main import main

main()
