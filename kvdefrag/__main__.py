"""Run the command line as `python -m kvdefrag`."""

from kvdefrag.cli import main

main()
